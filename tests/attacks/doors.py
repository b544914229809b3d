"""Front doors: models, losses, labels, columns and stages that nobody here wrote equal one process,
or are refused by name, on every rank."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as f

import headrace as hr
from attacks.attack import Attack, Case, Outcome
from attacks.crew import Crews
from headrace.adopt.gradients import gradient_error
from headrace.cli.foreign_models import foreign_model
from headrace.comm.mesh import Groups
from headrace.errors import DataError, HeadraceError
from running.adopt.foreign import gpt
from running.engine.loops import Drawn, attached, costs

__all__ = ["AXES", "CALLS", "LOOPS", "door_attack"]

_TOLERANCE = 1e-5
"""Norms and rotary positions of transformers are single precision."""

_KINDS = (
    "llama",
    "gpt2",
    "opt",
    "bert",
    "roberta",
    "qwen3",
    "mistral",
    "gemma3_text",
    "gpt_oss",
    "llama4_text",
    "mixtral",
    "phi3",
)

Answer = tuple[str, float, str]
"""Of a rank: ``exact`` or ``refused``, the largest relative error, and what it was refused for."""


def _either(drawn: Any) -> bool | None:
    """Nothing is known of what is drawn."""
    return None


def door_attack(
    name: str,
    about: str,
    run: Callable[..., float],
    draw: Callable[..., Any],
    few: int,
    takes: Callable[[Any], bool | None] = _either,
) -> Attack:
    """The attack on what ``run(groups, drawn, folder)`` gives on every rank, an error, of what
    ``draw(rng, ranks)`` draws. ``takes(drawn)`` says whether that must be exact (True) or refused
    (False); for None it may be either."""

    @contextmanager
    def begin(folder: Path) -> Iterator[Case]:
        crews = Crews()
        try:
            yield lambda rng: _case(rng, crews, run, draw, takes, folder)
        finally:
            crews.close()

    return Attack(name=name, about=about, begin=begin, limit_s=120, few=few, weight=2.0)


def _case(
    rng: np.random.Generator, crews: Crews, run: Any, draw: Any, takes: Any, folder: Path
) -> Outcome:
    ranks = int(rng.integers(1, 5))
    drawn = draw(rng, ranks)
    _, answers = crews.run(ranks, _answered, run, drawn, str(folder), beside=lambda: None)
    words = f"{answers} of {drawn} on {ranks} ranks"
    verdicts = {verdict for verdict, _, _ in answers}
    if len(verdicts) > 1:
        return Outcome(verdict="apart", survived=False, words=words)
    (verdict,) = verdicts
    taken = takes(drawn)
    if verdict == "refused":
        known = taken is not True
        return Outcome(
            verdict="refused" if known else "refused wrongly", survived=known, words=words
        )
    error = max(error for _, error, _ in answers)
    good = error <= _TOLERANCE  # a NaN is not
    if good and taken is False:
        return Outcome(verdict="taken", survived=False, error=error, words=words)
    return Outcome(
        verdict="exact" if good else "wrong",
        survived=good,
        error=error,
        words="" if good else words,
    )


def _answered(groups: Groups, run: Callable[..., float], drawn: Any, folder: str) -> Answer:
    """What a case says on this rank; errors that are not the library's are raised."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "exact", run(groups, drawn, Path(folder)), ""
        except HeadraceError as error:
            return "refused", 0.0, f"{type(error).__name__}: {error}"[:300]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A model of transformers, a batch, a loss, and how ranks meet."""

    kind: str
    seed: int
    rows: int
    tokens: int
    loss: str
    exchange: str
    padded: str = ""
    packed: bool = False
    replicas: int = 1
    recompute: str = ""


def _drawn_call(rng: np.random.Generator, ranks: int) -> Call:
    padded = str(rng.choice(["", "left", "right"], p=[0.6, 0.2, 0.2]))
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    call = Call(
        kind=str(rng.choice(_KINDS)),
        seed=int(rng.integers(1 << 20)),
        rows=int(rng.integers(1, 4)),
        tokens=int(rng.integers(ranks + 3, 48)),
        loss=str(rng.choice(["its own", "smoothed", "z-loss", "function", "by hand", "mean"])),
        exchange=str(rng.choice(["ulysses", "ring", "gather", "2d"])),
        padded=padded,
        replicas=int(rng.choice(divisors)) if rng.random() < 0.3 else 1,
        recompute=str(rng.choice(["", "attention", "full"], p=[0.6, 0.2, 0.2])),
    )
    if call.loss == "mean":  # over all tokens, padding too
        return replace(call, padded="")
    return replace(call, packed=not padded and call.rows == 1 and rng.random() < 0.4)


def _smoothed(logits: torch.Tensor, labels: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return f.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1
    )


def _made(call: Call) -> Any:
    """The model, with its loss."""
    model: Any = foreign_model(call.kind, call.seed % 7)
    if call.loss == "function":
        model.loss_function = _smoothed
    if call.loss in ("smoothed", "z-loss"):
        model.__class__ = _with_loss(type(model), call.loss)
    return model


def _with_loss(kind: Any, loss: str) -> Any:
    """A class of one's own, with a loss in its forward."""

    def forward(self: Any, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        out = kind.forward(self, input_ids, labels=labels, **named)
        if labels is None:
            return out
        kept = labels[:, 1:] != -100
        if loss == "smoothed":
            out.loss = _smoothed(out.logits, labels)
        else:
            sizes = out.logits[:, :-1].logsumexp(-1).square() * kept
            out.loss = out.loss + 1e-3 * sizes.sum() / kept.sum().clamp(min=1)
        return out

    return type(f"Own{kind.__name__}", (kind,), {"forward": forward})


def _batch(call: Call, number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(call.seed + number)
    ids = torch.randint(3, 97, (call.rows, call.tokens), generator=draw)
    labels = ids.masked_fill(torch.rand(ids.shape, generator=draw) < 0.3, -100)
    batch = {"input_ids": ids, "labels": labels}
    if call.padded:
        mask = torch.ones_like(ids)
        few = call.tokens // 3
        at = slice(0, few) if call.padded == "left" else slice(call.tokens - few, call.tokens)
        mask[0, at], labels[0, at] = 0, -100
        if call.padded == "left":
            labels[0, few] = -100  # what padding predicts is nobody's business
        batch["attention_mask"] = mask
    if call.packed:
        cut = call.tokens // 2 + 1
        places = torch.cat([torch.arange(cut), torch.arange(call.tokens - cut)])[None]
        batch["position_ids"] = places
        labels[:, cut] = -100  # nobody says the first token of the next document
    return batch


def _called(groups: Groups, call: Call, folder: Path) -> float:
    """The error of loss and gradients of a call over ``hr.compile``."""
    model, plain = _made(call), _made(call)
    more: dict[str, Any] = {"recompute": call.recompute} if call.recompute else {}
    run = hr.compile(model, exchange=call.exchange, groups=groups, **more)  # type: ignore[arg-type]
    batches = [_batch(call, at) for at in range(call.replicas)]
    mine = groups.rank * call.replicas // groups.ranks
    part = run.shard(batches[mine], replicas=call.replicas)
    loss = _loss_of(run, call, part)
    run.backward(loss)
    total = float(run.add_up(loss))
    wanted = _alone(plain, call, batches, run.labels)
    run.detach()
    if not math.isfinite(wanted):  # of rows that plain attention masks whole
        raise DataError("plain model", got=wanted, wanted="a finite loss to compare with")
    grads = ([p.grad for p in one.parameters()] for one in (model, plain))
    return max(abs(total - wanted) / max(abs(wanted), 1e-3), gradient_error(*grads))


def _loss_of(run: Any, call: Call, part: Any) -> torch.Tensor:
    if call.loss not in ("by hand", "mean"):
        return run(**part.inputs).loss  # type: ignore[no-any-return]
    logits = run(**{k: v for k, v in part.inputs.items() if k != "labels"}).logits
    flat = logits.flatten(0, 1), part.labels.flatten()
    total = f.cross_entropy(*flat, reduction="sum", ignore_index=-100) / max(1, part.targets)
    if call.loss == "mean":
        return total + run.share * run.mean(logits.softmax(-1)).square().sum()  # type: ignore[no-any-return]
    return total


def _alone(plain: Any, call: Call, batches: Sequence[Any], kind: str) -> float:
    """The loss of one process, document by document where rows have several, whose gradients it
    adds up."""
    ahead = 1 if kind == "next" else 0
    everything = sum(int((b["labels"][:, ahead:] != -100).sum()) for b in batches)
    total = 0.0
    for given in (one for batch in batches for one in _documents(batch)):
        labels = given["labels"]
        count = int((labels[:, ahead:] != -100).sum())
        if call.loss in ("by hand", "its own", "mean"):
            logits = plain(**{k: v for k, v in given.items() if k != "labels"}).logits
            shifted = logits[:, : logits.shape[1] - ahead].flatten(0, 1)
            loss = f.cross_entropy(shifted, labels[:, ahead:].flatten(), reduction="sum")
            loss = loss / max(1, everything)
            if call.loss == "mean":
                loss = loss + logits.softmax(-1).mean((0, 1)).square().sum()
        elif not count:
            continue
        else:
            loss = plain(**given).loss * count / everything
        loss.backward()
        total += float(loss.detach())
    return total


def _documents(batch: Any) -> Iterator[dict[str, torch.Tensor]]:
    """A batch, or the documents of its only row."""
    places = batch.get("position_ids")
    if places is None:
        yield dict(batch)
        return
    begins = [*torch.nonzero(places[0] == 0).flatten().tolist(), places.shape[1]]
    for start, stop in pairwise(begins):
        yield {name: batch[name][:, start:stop] for name in ("input_ids", "labels")}


def _takes_call(call: Call) -> bool | None:
    plain = call.loss in ("its own", "by hand", "mean") and not call.padded
    return True if plain and call.exchange != "2d" else None


CALLS = door_attack(
    "calls",
    "models of transformers with any loss, over hr.compile on 1 to 4 ranks, equal one process",
    _called,
    _drawn_call,
    few=6,
    takes=_takes_call,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A loop: its model and optimizer, its samples, its loss, its columns, and plans drawn at
    random."""

    kind: str
    optimizer: str
    clip: float | None
    seed: int
    lengths: tuple[int, ...]
    loss: str
    labels: str
    column: str
    steps: int
    form: str
    partial: bool
    evaluates: bool
    hook: str

    @property
    def tokens(self) -> str:
        """The field with token numbers."""
        return "ids" if self.kind == "plain" else "input_ids"

    @property
    def label_name(self) -> str:
        """The field with labels."""
        return "wanted" if self.form == "renamed" else "labels"


_LOOPED = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "gpt2", "phi3", "plain")
_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # Adam divides gradients that are zero but for rounding by their own size.
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2, eps=(1e-3, 1e-3)),
}


def _drawn_loop(rng: np.random.Generator, ranks: int) -> Loop:
    count = int(rng.integers(6, 14))
    return Loop(
        kind=str(rng.choice(_LOOPED)),
        optimizer=str(rng.choice([*_OPTIMIZERS])),
        clip=0.5 if rng.random() < 0.3 else None,
        seed=int(rng.integers(1 << 20)),
        lengths=tuple(int(n) for n in rng.integers(1, 60, size=count)),
        loss=str(
            rng.choice(["own", "micro", "weighted", "penalty", "mean", "bce", "sequence", "bare"])
        ),
        labels=str(rng.choice(["given", "ignored", "one", "shifted"], p=[0.4, 0.4, 0.1, 0.1])),
        column=str(
            rng.choice(["", "weights", "sample", "nested", "short"], p=[0.4, 0.2, 0.2, 0.1, 0.1])
        ),
        steps=int(rng.integers(1, 4)),
        form=str(rng.choice(["dicts", "pairs", "renamed", "stream"], p=[0.55, 0.15, 0.15, 0.15])),
        partial=bool(rng.random() < 0.3),
        evaluates=bool(rng.random() < 0.3),
        hook=str(rng.choice(["", "mask", "clamp"], p=[0.8, 0.15, 0.05])),
    )


def _items(loop: Loop) -> list[Any]:
    draw = torch.Generator().manual_seed(loop.seed)
    items = list[Any]()
    for at, count in enumerate(loop.lengths):
        ids = torch.randint(3, 61 if loop.kind == "plain" else 97, (count,), generator=draw)
        labels = ids.clone()
        if loop.labels == "ignored":
            labels[torch.rand(count, generator=draw) < 0.4] = -100
        if loop.labels == "one":
            labels = labels[:1]
        if loop.labels == "shifted":
            labels = labels[1:]
        if loop.form == "pairs":
            items.append((ids, labels))
            continue
        item: dict[str, Any] = {loop.tokens: ids, loop.label_name: labels}
        if loop.column == "weights":
            item["weights"] = torch.rand(count, generator=draw, dtype=torch.float64)
        if loop.column == "sample":
            item["weights"] = float(at)
        if loop.column == "nested":
            item["weights"] = torch.rand(count, 2, generator=draw, dtype=torch.float64).tolist()
        if loop.column == "short":
            item["weights"] = torch.rand(max(1, count - 1), generator=draw)
        items.append(item)
    return items


def _loop_loss(model: Any, micro: Any, loop: Loop) -> torch.Tensor:
    if loop.loss == "own":
        outputs = model(**micro.inputs)
        return outputs[1] if loop.kind == "plain" else outputs.loss  # type: ignore[no-any-return]
    inputs = {k: v for k, v in micro.inputs.items() if k not in ("labels", loop.label_name)}
    outputs = model(**inputs)
    logits = outputs[0] if loop.kind == "plain" else outputs.logits
    kept = micro.labels != -100
    each = f.cross_entropy(logits.flatten(0, 1), micro.labels.flatten(), reduction="none")
    each = each.view(micro.labels.shape)
    weights = micro.rest.get("weights", torch.ones_like(each))
    weights = weights[..., 0] if weights.dim() > each.dim() else weights
    if loop.loss == "weighted":
        return (each * weights * kept).sum() / micro.targets
    if loop.loss == "penalty":
        squares = sum(p.square().sum() for p in model.parameters())
        return micro.loss(logits) + 1e-3 * micro.share * squares
    if loop.loss == "bare":
        squares = sum(p.square().sum() for p in model.parameters())
        return micro.loss(logits) + 1e-3 * squares
    if loop.loss == "mean":
        return each.sum() / kept.sum().clamp(min=1)
    if loop.loss == "bce":
        said = logits.gather(2, micro.labels.clamp(min=0)[..., None])[..., 0]
        return (f.softplus(-said) * kept).sum() / micro.targets
    if loop.loss == "sequence":
        return (micro.per_sequence(each * kept).tanh() * micro.sequence_share).sum()
    return micro.loss(logits)


def _looped_model(loop: Loop) -> Any:
    return gpt() if loop.kind == "plain" else foreign_model(loop.kind, 1)


def _hook(loop: Loop, model: Any) -> None:
    """Hang a hook on the gradient of each parameter."""
    for p in model.parameters():
        if loop.hook == "mask":
            kept = p.detach() > 0
            p.register_hook(lambda gradient, kept=kept: gradient * kept)
        if loop.hook == "clamp":
            p.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def _optimizer(loop: Loop, model: Any) -> torch.optim.Optimizer:
    """Of all parameters of the model, or all but its first."""
    return _OPTIMIZERS[loop.optimizer]([*model.parameters()][int(loop.partial) :])


def _evaluated(model: Any, loop: Loop, ids: torch.Tensor) -> float:
    """The error of an evaluation within a loop, beside a plain model of the same weights."""
    alone = _looped_model(loop)
    alone.load_state_dict(model.state_dict())
    logits = list[torch.Tensor]()
    for one in (model, alone):
        one.eval()
        with torch.no_grad():
            logits.append(one(ids[None])[0] if loop.kind == "plain" else one(ids[None]).logits)
        one.train()
    return float((logits[0] - logits[1]).abs().max() / logits[1].abs().max())


def _looped(groups: Groups, loop: Loop, folder: Path) -> float:
    """The error of weights after a loop of random plans, and of evaluations within it."""
    model, plain = (_looped_model(loop) for _ in range(2))
    _hook(loop, model)
    _hook(loop, plain)
    layers = 2 if loop.kind == "plain" else int(model.config.num_hidden_layers)
    items = _items(loop)
    run = attached(
        model,
        _optimizer(loop, model),
        itertools.cycle(items) if loop.form == "stream" else items,
        folder,
        steps=loop.steps,
        costs=costs(groups.ranks, layers),
        batch_tokens=120,
        clip=loop.clip,
        label_name=loop.label_name,
        longest=60 if loop.form == "stream" else None,
        labels="next",
    )
    run.engine.planner = Drawn(  # type: ignore[assignment]
        ranks=groups.ranks, layers=layers, seed=loop.seed, levels=("none",)
    )
    batches, errors = [], [0.0]
    try:
        for step in run:
            batches.append([step.batch.read(i) for i in range(len(step.batch.lengths))])
            for micro in step:
                micro.backward(_loop_loss(model, micro, loop))
                if loop.evaluates:
                    errors.append(_evaluated(model, loop, batches[-1][0][loop.tokens]))
    finally:
        run.detach()
    _train_alone(plain, batches, loop)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    found = [(p - q).abs().max() / q.abs().max().clamp(min=1e-3) for p, q in pairs]
    return max(float(torch.stack(found).max()), *errors)


class _Whole:
    """A sample of a batch, as a micro-batch is to a loss."""

    def __init__(self, item: Any, tokens: str, targets: int, count: int, samples: int) -> None:
        self.labels = item["labels"][None]
        self.rest = {"weights": item["weights"][None]} if "weights" in item else {}
        self.inputs = {tokens: item[tokens][None]}
        self.targets, self.share = targets, count / targets
        self.sequence_share = torch.tensor([1 / samples], dtype=torch.float64)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        flat = logits.flatten(0, 1), self.labels.flatten()
        return f.cross_entropy(*flat, reduction="sum") / self.targets

    def per_sequence(self, values: torch.Tensor) -> torch.Tensor:
        return values.sum()[None]


def _train_alone(plain: Any, batches: list[Any], loop: Loop) -> None:
    optimizer = _optimizer(loop, plain)
    own = replace(loop, loss="micro") if loop.loss == "own" else loop
    for batch in batches:
        counts = [int((item["labels"] != -100).sum()) for item in batch]
        for item, count in zip(batch, counts, strict=True):
            micro = _Whole(item, loop.tokens, sum(counts), count, len(batch))
            _loop_loss(plain, micro, own).backward()
        if loop.clip is not None:
            nn.utils.clip_grad_norm_(plain.parameters(), loop.clip)
        optimizer.step()
        plain.zero_grad()


def _takes_loop(loop: Loop) -> bool | None:
    if loop.labels in ("one", "shifted") or (loop.column == "short" and loop.form != "pairs"):
        return None if min(loop.lengths) == max(loop.lengths) == 1 else False
    unlabelled = loop.kind == "plain" and loop.form == "renamed" and loop.loss == "own"
    if loop.hook == "clamp" or unlabelled:  # a model whose argument has another name
        return False
    return None if loop.loss in ("mean", "bare", "weighted") else True


LOOPS = door_attack(
    "loops",
    "loops of hr.attach with any loss, labels and columns, under random plans, equal one process",
    _looped,
    _drawn_loop,
    few=6,
    takes=_takes_loop,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """A model of axes ``i`` and ``j``: what its blocks are, in order, and what is declared."""

    seed: int
    sizes: tuple[int, int, int]
    blocks: tuple[str, ...]
    declared: tuple[str, ...]
    returns: bool
    alike: bool
    replicas: int = 1
    ranks: int = 1
    loss: str = "squares"
    given: tuple[str, ...] = ()
    looped: bool = False


_BLOCKS = ("mix i", "mix j", "local", "conv i", "norm", "places", "cumsum j", "pool", "trains")
_MIXES = {"mix i": "i", "mix j": "j", "conv i": "i", "cumsum j": "j"}
_AXES_LOSSES = ("squares", "alike beside", "share of alike", "penalty")


def _drawn_axes(rng: np.random.Generator, ranks: int) -> Axes:
    odd = 0.08
    shares = np.array([0.3, 0.3, 0.15, *[odd] * 5, odd / 2])
    blocks = tuple(
        str(b) for b in rng.choice(_BLOCKS, size=int(rng.integers(1, 6)), p=shares / shares.sum())
    )
    right = [_MIXES.get(block, "") for block in blocks]
    if rng.random() < 0.15 and right:  # a stage that is forgotten, or named wrongly
        right[int(rng.integers(len(right)))] = str(rng.choice(["", "i", "j"]))
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    loss = str(rng.choice(_AXES_LOSSES, p=[0.4, 0.2, 0.2, 0.2]))
    looped = bool(rng.random() < 0.25)
    return Axes(
        seed=int(rng.integers(1 << 20)),
        sizes=(int(rng.integers(1, 3)), int(rng.integers(4, 9)), int(rng.integers(4, 9))),
        blocks=blocks,
        declared=tuple(right),
        returns=bool(rng.random() < 0.5),
        alike=bool(rng.random() < 0.3) and loss == "squares" and not looped,
        replicas=int(rng.choice(divisors)) if rng.random() < 0.3 and not looped else 1,
        ranks=ranks,
        loss=loss,
        given=tuple(name for name in ("sides", "counts") if rng.random() < 0.2 and not looped),
        looped=looped,
    )


class _Block(nn.Module):
    """Something over a tensor [b, i, j, c]."""

    def __init__(self, what: str, features: int = 4) -> None:
        super().__init__()
        self.what = what
        self.linear = nn.Linear(features, features)
        self.conv = nn.Conv1d(features, features, 3, padding=1)
        self.norm = nn.GroupNorm(2, features)
        self.table = nn.Parameter(torch.randn(16, features))

    def forward(
        self, x: torch.Tensor, beside: torch.Tensor | None = None, count: int | None = None
    ) -> torch.Tensor:
        if count is not None and count != x.shape[1]:
            raise ValueError(f"{count} places, {x.shape[1]} here")
        y = self.linear(x if beside is None else x + beside[:, :, None])
        if self.what == "trains":
            return x - x.mean(dim=(1, 2), keepdim=True) if self.training else x + y
        if self.what == "mix i":
            z = y.transpose(1, 2)
            return x + f.scaled_dot_product_attention(z, z, z).transpose(1, 2)
        if self.what == "mix j":
            return x + f.scaled_dot_product_attention(y, y, y)
        if self.what == "conv i":
            b, i, j, c = y.shape
            z = self.conv(y.permute(0, 2, 3, 1).reshape(b * j, c, i))
            return x + z.view(b, j, c, i).permute(0, 3, 1, 2)
        if self.what == "norm":
            return x + self.norm(y.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        if self.what == "places":
            return x + self.table[: x.shape[1], None]
        if self.what == "cumsum j":
            return x + y.cumsum(2) / x.shape[2]
        if self.what == "pool":
            return x + y.mean(dim=(1, 2), keepdim=True)
        return x + f.gelu(y)


class _Stack(nn.Module):
    """Blocks in turn, which are given something for each place of ``i`` (``sides``) and the number
    of these places (``counts``)."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        torch.manual_seed(axes.seed)
        self.given = axes.given
        self.blocks = nn.ModuleList(_Block(what) for what in axes.blocks)

    def forward(
        self, x: torch.Tensor, time: torch.Tensor | None = None, count: int | None = None
    ) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, time, count)
        return x


_AXES_DIMS = "b i j c"


def _axes_stages(axes: Axes) -> list[hr.AxisStage]:
    """What is declared of the blocks; all blocks are stages where they are given something."""
    sides = {1: "b i c"} if "sides" in axes.given else {}
    counts = {2: "i"} if "counts" in axes.given else {}
    return [
        hr.AxisStage(
            modules=f"blocks.{at}",
            mixes=mixed,
            dims=_AXES_DIMS,
            returns=axes.returns,
            sides=sides,
            counts=counts,
        )
        for at, mixed in enumerate(axes.declared)
        if mixed or axes.given
    ]


def _axes_loss(
    axes: Axes, out: torch.Tensor, whole: Any, share: Any, model: Any, targets: float = 1.0
) -> torch.Tensor:
    """The loss of this rank's result, or of the whole one in one process. ``whole()`` gives the
    collected result, ``share()`` this rank's share of a term that does not depend on places."""
    loss = out.square().sum() / targets
    if axes.loss == "alike beside":  # each rank adds it
        return loss + whole().sin().sum() / targets
    if axes.loss == "share of alike":
        return loss + share() * whole().sin().mean()
    if axes.loss == "penalty":
        return loss + share() * sum(p.square().sum() for p in model.parameters())
    return loss


def _of_axes(groups: Groups, axes: Axes, folder: Path) -> float:
    """The error of loss and gradients over ``hr.adapt``."""
    if axes.looped:
        return _of_looped_axes(groups, axes, folder)
    model = _Stack(axes).double()
    plain = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(axes.seed)
    shape = (*axes.sizes, 4)
    batches = [
        torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(axes.replicas)
    ]
    more: dict[str, Any] = {}
    if "sides" in axes.given:
        more["time"] = torch.randn((*shape[:2], 4), generator=draw, dtype=torch.float64)
    if "counts" in axes.given:
        more["count"] = shape[1]
    run = hr.adapt(
        model,
        stages=_axes_stages(axes),
        inputs={"x": _AXES_DIMS},
        axis="i",
        batch="b",
        groups=groups,
        counts={"count": "i"},
    )
    mine = groups.rank * axes.replicas // groups.ranks
    part = run.shard({"x": batches[mine], **more}, replicas=axes.replicas)
    for _ in range(2):  # the order of stages is learnt in the first
        model.zero_grad()
        out = run(**part)
        if axes.alike:
            out = run.collect(out, _AXES_DIMS)
        given = out
        loss = _axes_loss(
            axes, out, lambda out=given: run.collect(out, _AXES_DIMS), lambda: run.share, model
        )
        run.backward(loss, alike=axes.alike)
        total = float(run.add_up(loss, alike=axes.alike))
    wanted = 0.0
    for x in batches:
        out = plain(x, **more)
        result = out
        one = _axes_loss(axes, out, lambda out=result: out, lambda: 1.0, plain)
        one.backward()
        wanted += float(one.detach())
    run.detach()
    grads = ([p.grad for p in one.parameters()] for one in (model, plain))
    return max(abs(total / wanted - 1), gradient_error(*grads))


def _of_looped_axes(groups: Groups, axes: Axes, folder: Path) -> float:
    """The error of a step's loss and weights in a loop whose loss has a declared column of places,
    which the model does not take."""
    model = _Stack(axes).double()
    plain = copy.deepcopy(model)
    draw = torch.Generator().manual_seed(axes.seed)
    items = [
        {
            "x": torch.randn((*axes.sizes[1:], 4), generator=draw, dtype=torch.float64),
            "mask": torch.rand(axes.sizes[1:], generator=draw, dtype=torch.float64),
        }
        for _ in range(axes.sizes[0])
    ]
    adapted = hr.adapt(
        model,
        stages=_axes_stages(axes),
        inputs={"x": _AXES_DIMS, "mask": "b i j"},
        axis="i",
        batch="b",
    )
    run = hr.attach(
        adapted,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        items,
        batch_sequences=len(items),
        steps=1,
        samples=hr.SampleOptions(shuffle=False),
        planner=hr.PlannerConfig(name="static", static_size=groups.ranks, ahead=0),
        measure=hr.MeasureOptions(
            cache=folder / f"axes-{axes.seed}",
            costs=costs(groups.ranks, layers=_axes_layers(axes)),
        ),
        say=lambda text: None,
    )
    total, targets = 0.0, 1
    try:
        for step in run:
            for micro in step:
                targets = targets if micro.checking else micro.targets
                mine = model(**micro.inputs) * micro.rest["mask"][..., None]

                def whole(mine: torch.Tensor = mine) -> torch.Tensor:
                    return adapted.collect(mine, _AXES_DIMS)

                def share(micro: Any = micro) -> torch.Tensor:
                    return micro.share  # type: ignore[no-any-return]

                micro.backward(_axes_loss(axes, mine, whole, share, model, micro.targets))
            total = step.loss
    finally:
        run.detach()
    x, mask = (torch.stack([item[name] for item in items]) for name in ("x", "mask"))
    out = plain(x) * mask[..., None]
    wanted = _axes_loss(axes, out, lambda: out, lambda: 1.0, plain, targets)
    wanted.backward()
    torch.optim.SGD(plain.parameters(), lr=1e-3).step()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    off = max(float((mine - other).detach().abs().max()) for mine, other in pairs)
    return max(abs(total / float(wanted.detach()) - 1), off)


def _axes_layers(axes: Axes) -> int:
    """How many layers a loop finds: blocks are a chain of equal ones where there are several."""
    return len(axes.blocks) if len(axes.blocks) > 1 else 1


def _takes_axes(axes: Axes) -> bool | None:
    if "trains" in axes.blocks or (axes.loss == "alike beside" and axes.ranks > axes.replicas):
        return False
    if "sides" in axes.given and axes.sizes[0] > 1:
        return None  # without dims of its own it may be of all samples
    known = set(axes.blocks) <= {"local", *_MIXES}
    right = axes.declared == tuple(_MIXES.get(block, "") for block in axes.blocks)
    # Where one axis alone is mixed, no other can be in shards meanwhile: only attention is spread.
    spread = {"i", "j"} <= {*axes.declared} or {*axes.blocks} & {"mix i", "mix j"}
    attends = {"i", "j"} <= {*axes.declared} or not {*axes.blocks} & {"conv i", "cumsum j"}
    return True if known and right and spread and attends else None


AXES = door_attack(
    "axes",
    "models of axes with any blocks, declared rightly or not, over hr.adapt, equal one process",
    _of_axes,
    _drawn_axes,
    few=8,
    takes=_takes_axes,
)
