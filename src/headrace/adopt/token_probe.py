"""Whether a model can be run on parts of its tokens: tested by a run, not by a list of names.

With attention replaced by a stand-in that looks at no other token, the model is run on a few tokens
and on parts of them. If the results of the parts are the parts of the result, everything beside
attention treats each token alone and uses its right place. If not, something that was not replaced
depends on other tokens: attention of its own, a convolution, pooling, a mean over tokens, places
that it counts itself. What is too little to show in results shows in gradients.

This is tested in evaluation and in training mode, on a few tokens and on as many as a row has: an
expert's capacity or a distant neighbour shows in long rows only. All ranks run the model the same
number of times, whatever their rows, as wrappers (DDP, FSDP2) communicate in every forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from headrace.adopt.held_still import Draws, buffers_kept, held_still, who_draws
from headrace.adopt.labels import (
    Labels,
    local_loss,
    logits_of,
    loss_of,
    own_loss_error,
    predicted,
)
from headrace.adopt.operators import ModelSlot, StandIn
from headrace.adopt.token_gradients import depended_on, scaled_by_others, who_mixes
from headrace.errors import ModelError
from headrace.ops.loss import IGNORED

__all__ = [
    "Probed",
    "counts_by_ids",
    "counts_by_mask",
    "few_of",
    "first_places",
    "look_again",
    "looked_at",
    "own_loss",
    "probe",
    "run_few",
    "run_plain",
    "tried_tokens",
    "without_padding",
]

_TOKENS = 13
"""Tokens of the short row that the model is run on first."""
_LONGEST = 4096
"""The most tokens of a row that the model is run on."""

_MIXES_THE_BATCH = (
    torch.nn.modules.batchnorm._BatchNorm,  # noqa: SLF001
    torch.nn.modules.instancenorm._InstanceNorm,  # noqa: SLF001
)
"""Norms whose statistics are those of many tokens."""


def first_places(model: torch.nn.Module) -> tuple[int, ...]:
    """The position ids that a model may give to the first token of a row, to be tried in order: 0,
    and the one after the padding's token id, as models such as RoBERTa keep the positions up to
    that number for padding."""
    padding = getattr(getattr(model, "config", None), "pad_token_id", None)
    return (0,) if padding is None else (0, padding + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a probe found out: the number of calls of attention in a forward (``attentions``), and
    the position id of a row's first token (``first``), for models that take position ids."""

    attentions: int
    first: int


@torch.no_grad()
def probe(
    model: torch.nn.Module,
    run: Callable[..., Any],
    slot: ModelSlot,
    batch: Mapping[str, torch.Tensor],
    tokens: str,
    *,
    places: bool,
    firsts: Sequence[int] = (0,),
) -> Probed:
    """Test whether ``model`` can be run on parts of its tokens: run it by ``run(**inputs)`` on a
    few tokens of ``batch`` and on parts of them, and compare the results.

    ``tokens`` names the input with token ids; labels in the batch are given, too. Where the model
    takes position ids (``places``), those of the parts are tried to begin at each of ``firsts``;
    the first that gives the same results is returned. Raises ModelError, which names what it found,
    where results of parts differ from those of the whole.
    """
    for name, module in model.named_modules():
        if isinstance(module, _MIXES_THE_BATCH):
            raise ModelError(
                f"module {name}",
                got=type(module).__name__,
                wanted="norms of single tokens",
                hint="its statistics are those of one rank's tokens",
            )
    few = few_of(batch, tokens)
    error = ModelError("places of tokens", got="none to try")  # where ``firsts`` is empty
    with looked_at(model, slot, training=False):
        runs = _Runs(model=model, run=run, slot=slot, count=_TOKENS)
        whole = runs.outcome_of(few)
        if not whole.calls:
            raise _no_attention_error(model)
        for first in firsts:
            difference = runs.difference_error(whole, _with_places(few, tokens, places, first))
            if difference is None:
                return Probed(attentions=whole.calls, first=first)
            error = difference
    raise error


@torch.no_grad()
def look_again(
    model: torch.nn.Module,
    run: Callable[..., Any],
    slot: ModelSlot,
    batch: Mapping[str, torch.Tensor],
    tokens: str,
    *,
    places: bool,
    first: int,
    longest: int,
    training: bool,
) -> None:
    """Probe a model again, in training or in evaluation mode, on rows of a few and of ``longest``
    tokens, with position ids from ``first`` on where it takes ``places``. Raises ModelError where
    results of parts differ from those of the whole."""
    with looked_at(model, slot, training=training), _as_in_steps(model, training=training):
        for count in (_TOKENS, longest):
            given = _with_places(few_of(batch, tokens, count), tokens, places, first)
            runs = _Runs(model=model, run=run, slot=slot, count=count)
            whole = runs.outcome_of(given)
            error = runs.difference_error(whole, given)
            if error is None and count == _TOKENS:
                error = runs.dependence_error(given, tokens)
                if error is None and whole.loss is not None:
                    error = runs.undivided_error(whole.loss, given)
            if error is not None:
                raise error


def _as_in_steps(model: torch.nn.Module, *, training: bool) -> AbstractContextManager[None]:
    """A context in which forwards in ``training`` must keep buffers, as those of steps must."""
    return buffers_kept(model) if training else nullcontext()


@torch.no_grad()
def own_loss(
    model: torch.nn.Module,
    run: Callable[..., Any],
    slot: ModelSlot,
    batch: Mapping[str, torch.Tensor],
    tokens: str,
    *,
    label_name: str,
    kind: Labels,
    training: bool,
) -> ModelError | None:
    """Test whether the loss of a transformers model is the mean cross entropy of its logits.
    Returns the error that says that it is not, or None where it is or cannot be compared.

    The model is run on a few tokens of ``batch`` with labels made of their ids, modulo the classes
    of its logits, given under the name ``label_name``; one of these is ignored where the batch has
    ignored labels, too. ``kind`` says whether the model's loss shifts labels.
    """
    few = few_of({k: v for k, v in batch.items() if k != "labels"}, tokens)
    with looked_at(model, slot, training=training), _add_noise(model):
        slot.take(StandIn(places=np.arange(_TOKENS), targets=_TOKENS))
        unlabelled, labels = run(**few), few[tokens].clone()
        if getattr(unlabelled, "logits", None) is not None or isinstance(unlabelled, tuple):
            labels %= logits_of(unlabelled).shape[-1]  # classes may be fewer than token ids
        if "labels" in batch and bool((batch["labels"] < 0).any()):
            labels[:, _TOKENS // 3] = IGNORED
        slot.take(StandIn(places=np.arange(_TOKENS), targets=_TOKENS))
        shifted = predicted(labels, kind)
        outputs = run(**few, **{label_name: labels})
        own, logits = loss_of(outputs), getattr(outputs, "logits", None)
    if own is None or (logits is None and not isinstance(outputs, tuple)):
        return None  # a head fused with its loss returns no logits to compare with
    plain = float(local_loss(logits_of(outputs), shifted, int((shifted != IGNORED).sum())))
    if abs(float(own) - plain) <= 1e-5 * abs(plain):
        return None
    return own_loss_error(
        model,
        got=f"{float(own):.6g} of the model's own",
        wanted=f"{plain:.6g}, the cross entropy of its logits",
    )


_MODEL_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError)
"""What the forward of a user's model may raise by itself."""


@contextmanager
def _named_errors(model: torch.nn.Module, count: int) -> Iterator[None]:
    """Context in which a model runs on ``count`` tokens: what its own forward raises becomes a
    ModelError that says so."""
    try:
        yield
    except _MODEL_ERRORS as error:
        # These are not the model's fault: memory is short, or another rank is lost (gloo).
        if isinstance(error, torch.OutOfMemoryError) or "gloo" in str(error):
            raise
        raise ModelError(
            f"forward of {type(model).__name__} on {count} tokens",
            got=" ".join(f"{type(error).__name__}: {error}".split())[:300],
            wanted="results",
            hint="call the plain model: it may not know the type of its weights, or need other "
            "inputs",
        ) from error


class _Lookups(TorchFunctionMode):
    """A function mode that records the indices of every embedding lookup while a model runs on
    ``tokens`` [count]: among them are the positions that the model counts itself."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens, self._indices = tokens, list[torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding:
            self._indices.append(args[0])
        return func(*args, **(kwargs or {}))

    def of_places(self) -> Iterator[torch.Tensor]:
        """Yield those recorded indices [count], on the CPU, that may be the tokens' positions: of
        lookups with one index for each token (the last row, where there are several), unless the
        indices are the token ids themselves. Fake tensors are left out, as they have no values."""
        for indices in self._indices:
            flat = indices.reshape(-1)[-len(self._tokens) :]
            if isinstance(flat, FakeTensor) or len(flat) != len(self._tokens):
                continue
            if not torch.equal(flat, self._tokens):
                yield flat.cpu()


def _are_consecutive(places: torch.Tensor) -> bool:
    """Whether positions [count] are consecutive: each is one more than the one before."""
    return torch.equal(places - places[0], torch.arange(len(places)))


@torch.no_grad()
def run_plain(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], tokens: str, **always: Any
) -> None:
    """Run a plain model on a few tokens of ``batch`` in evaluation mode; ``always`` are arguments
    given in every call. Raises ModelError where its forward fails."""
    with held_still(model, training=False), _named_errors(model, _TOKENS):
        model(**few_of(batch, tokens), **always)


@torch.no_grad()
def counts_by_mask(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], tokens: str, **always: Any
) -> bool:
    """Whether a plain model that is given no position ids counts them from the first token that its
    attention mask does not hide, as OPT does.

    Tested with a mask that hides the first tokens of a row: such a model looks up positions that
    are consecutive over the tokens behind them, but not over the whole row."""
    few = few_of(batch, tokens)[tokens]
    padding = _TOKENS // 3  # the first tokens, which are masked
    mask = torch.ones_like(few)
    mask[:, :padding] = 0
    with (
        held_still(model, training=False),
        _named_errors(model, _TOKENS),
        _Lookups(few[0]) as lookups,
    ):
        model(**{tokens: few, "attention_mask": mask, **always})
    for places in lookups.of_places():
        if _are_consecutive(places[padding:]):
            return not _are_consecutive(places)
    return False


def _padding_of(model: torch.nn.Module) -> tuple[int, int] | None:
    """(the padding's token id, the vocabulary size) of a transformers model; None where its
    configuration lacks either."""
    config = getattr(getattr(model, "module", model), "config", None)
    padding = getattr(config, "pad_token_id", None)
    vocabulary = getattr(config, "vocab_size", None)
    if not isinstance(padding, int) or not isinstance(vocabulary, int):
        return None
    return (padding, vocabulary) if 0 <= padding < vocabulary else None


def without_padding(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Token ids [b, S] for a probe, with the padding's id replaced by the next id of the
    vocabulary: some models skip padding when they count positions, which would upset the probe."""
    found = None if isinstance(ids, FakeTensor) else _padding_of(model)
    if found is None:
        return ids
    padding, vocabulary = found
    return torch.where(ids == padding, (ids + 1) % vocabulary, ids)


@torch.no_grad()
def counts_by_ids(
    model: torch.nn.Module, batch: Mapping[str, torch.Tensor], tokens: str, **always: Any
) -> int | None:
    """The padding's token id, for a model that skips tokens with this id when it counts positions
    by itself, as RoBERTa does; None for other models. Tested with one such token amid a row."""
    found = _padding_of(model)
    if found is None:
        return None
    padding, _ = found
    at = _TOKENS // 3  # the index of a token amid the row that becomes padding
    few = without_padding(model, few_of(batch, tokens)[tokens]).clone()
    few[:, at] = padding
    with (
        held_still(model, training=False),
        _named_errors(model, _TOKENS),
        _Lookups(few[0]) as lookups,
    ):
        model(**{tokens: few, **always})
    for places in lookups.of_places():
        others = torch.cat([places[:at], places[at + 1 :]])
        # RoBERTa gives padding the position of its own id, and counts on behind it.
        if _are_consecutive(others) and int(places[at]) == padding:
            return int(padding)
    return None


@contextmanager
def _add_noise(model: torch.nn.Module) -> Iterator[None]:
    """Context in which fixed noise is added to the logits of the model's output head. A loss beside
    the cross entropy, such as a z-loss, may be zero for the logits of fresh weights, and would go
    unnoticed without it."""
    find = getattr(getattr(model, "module", model), "get_output_embeddings", None)
    head = find() if callable(find) else None

    def disturb(module: Any, args: Any, logits: Any) -> Any:
        """The logits [b, s, V] with noise, the same in every call; other results unchanged."""
        if not isinstance(logits, torch.Tensor):
            return logits
        generator = torch.Generator().manual_seed(0)
        return logits + torch.randn(logits.shape, generator=generator).to(logits)

    hook = None if head is None else head.register_forward_hook(disturb)
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def _no_attention_error(model: torch.nn.Module) -> ModelError:
    """The error for a model in whose forward no attention was replaced; it names up to three
    classes of the model's modules that may be attention of its own."""
    classes = {type(module).__name__ for module in model.modules()}
    names = sorted(name for name in classes if "attention" in name.lower())
    what = f"model with {', '.join(names[:3])}" if names else "model"
    return ModelError(
        what,
        got="no attention that was replaced",
        wanted="at least one",
        hint="it must call scaled_dot_product_attention or transformers' registry: take a model "
        "with set_attn_implementation, or call run.attention(q, k, v, causal=True) in your own",
    )


@contextmanager
def looked_at(model: torch.nn.Module, slot: ModelSlot, *, training: bool) -> Iterator[None]:
    """Context in which a model is run only to examine it, in training or evaluation mode: what its
    forwards change in it and the random numbers that they draw are undone at the end, and the slot
    holds again what it held before."""
    before = slot.held
    try:
        with held_still(model, training=training):
            yield
    finally:
        slot.take(before)


@torch.no_grad()
def run_few(
    model: torch.nn.Module,
    run: Callable[..., Any],
    slot: ModelSlot,
    batch: Mapping[str, torch.Tensor],
    tokens: str,
) -> None:
    """Run a model once by ``run(**inputs)`` on a few tokens, with the stand-in for attention."""
    with looked_at(model, slot, training=False):
        _Runs(model=model, run=run, slot=slot, count=_TOKENS).outcome_of(few_of(batch, tokens))


def tried_tokens(documents: Iterable[Iterable[int]]) -> int:
    """The length in tokens of the longer row to probe: the longest of ``documents``, lengths row by
    row, between ``_TOKENS`` and ``_LONGEST``."""
    longest = max(max(row) for row in documents)
    return min(_LONGEST, max(_TOKENS, longest))


def few_of(
    batch: Mapping[str, torch.Tensor], tokens: str, count: int = _TOKENS
) -> dict[str, torch.Tensor]:
    """Inputs [1, count, ...] by name to run a probe on: the first ``count`` tokens of the first row
    of ``batch``, which is repeated where it is shorter. There is no mask; position ids, where the
    batch has some, are consecutive."""
    repeats = -(-count // batch[tokens].shape[1])  # rounded up
    found = {
        name: value[:1].repeat(1, repeats, *[1] * (value.dim() - 2))[:, :count]
        for name, value in batch.items()
        if name not in ("attention_mask", "position_ids")
    }
    # Labels that are ignored (below 0) become token ids, so that every place has a loss.
    for name, value in found.items():
        if value.shape == found[tokens].shape and not value.is_floating_point():
            found[name] = torch.where(value < 0, found[tokens].to(value), value)
    if "position_ids" in batch:  # from the batch's lowest on, as models may begin above 0
        start = int(batch["position_ids"].min())
        found["position_ids"] = torch.arange(count)[None].to(batch["position_ids"]) + start
    return found


def _with_places(
    few: Mapping[str, torch.Tensor], tokens: str, places: bool, first: int
) -> dict[str, torch.Tensor]:
    """Inputs ``few`` with ``position_ids`` from ``first`` on, where the model takes them
    (``places``) and none were given."""
    given = dict(few)
    if places and "position_ids" not in few:
        counted = torch.arange(few[tokens].shape[1])[None]
        given["position_ids"] = counted.to(few[tokens]) + first
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What a run of the model gave: logits [1, n, ...], the model's own loss [] or None, and the
    number of calls of attention."""

    logits: torch.Tensor
    loss: torch.Tensor | None
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """Runs a model by ``run(**inputs)`` on ``count`` tokens and on parts of them, with the stand-in
    for attention in its ``slot``."""

    model: torch.nn.Module
    run: Callable[..., Any]
    slot: ModelSlot
    count: int

    @property
    def parts(self) -> tuple[slice, ...]:
        """Three parts of the tokens in the order in which they are run, about 5, 5 and 3 of 13: two
        of one length (in a short row) show what a forward keeps for so many tokens. Each has two
        tokens or more, as compilers make another graph for a size of 1."""
        first_cut, second_cut = 5 * self.count // 13, 8 * self.count // 13
        if self.count > _TOKENS:
            # Odd cuts are no multiples of an even number of tokens in which a model may work, so
            # that they cut its blocks apart.
            first_cut, second_cut = first_cut | 1, second_cut | 1
        return slice(0, first_cut), slice(second_cut, self.count), slice(first_cut, second_cut)

    def outcome_of(
        self, few: Mapping[str, torch.Tensor], part: slice | None = None, *, target_factor: int = 1
    ) -> _Outcome:
        """Run the model on one ``part`` of the tokens of ``few``, inputs [1, count, ...] by name,
        or on all where it is None. The stand-in has it believe that the step has ``target_factor``
        times ``count`` targets, by which the model's loss is divided. Raises ModelError where the
        forward fails or draws random numbers."""
        part = part or slice(0, self.count)
        stand_in = StandIn(
            places=np.arange(part.start, part.stop), targets=target_factor * self.count
        )
        self.slot.take(stand_in)
        inputs = {name: value[:, part] for name, value in few.items()}
        before = Draws.now(self.model)
        with _named_errors(self.model, part.stop - part.start):
            outputs = self.run(**inputs)
        if not before.same(Draws.now(self.model)):
            raise ModelError(
                f"module {who_draws(self.model, lambda: self.run(**inputs))}",
                got="random numbers in its forward",
                wanted="none but those of torch's dropout",
                hint="ranks would draw apart: set layerdrop, drop path, stochastic depth and noise "
                "of routers to 0, or draw outside of the model and give it what was drawn",
            )
        return _Outcome(logits=logits_of(outputs), loss=loss_of(outputs), calls=stand_in.calls)

    def difference_error(
        self, whole: _Outcome, given: Mapping[str, torch.Tensor]
    ) -> ModelError | None:
        """Run the model on each part of the inputs ``given`` and compare with the ``whole``: each
        token's result must be the same, and the losses must sum to the whole's. Returns the error
        that says what differs, or None."""
        single = whole.logits.dtype in (torch.float32, torch.float64)
        tolerance = 1e-4 if single else 5e-2
        limit = tolerance * max(float(whole.logits.abs().max()), 1e-30)
        differing = list[int]()  # the indices of tokens whose results differ
        loss_of_parts = 0.0
        for part in self.parts:
            of_part = self.outcome_of(given, part)
            wanted = whole.logits[:, part]
            if of_part.logits.shape != wanted.shape or whole.logits.shape[1] != self.count:
                return _shape_error(of_part, whole, part)
            # The largest difference of each token [n]; "not <=" counts NaN as wrong.
            errors = (wanted - of_part.logits).abs().flatten(2).amax(dim=2)[0]
            indices = torch.nonzero(~(errors <= limit)).flatten().tolist()
            differing += [part.start + index for index in indices]
            loss_of_parts += 0.0 if of_part.loss is None else float(of_part.loss)
        # Few tokens may differ: rounding can turn a router's choice between near-equal experts.
        if len(differing) > self.count // (512 if single else 64):
            return ModelError(
                f"model run on parts of {self.count} tokens",
                got=f"another result for token {min(differing)}",
                wanted="the results of the whole",
                hint=f"something beside attention meets other tokens{self._in_mode}, or places are "
                "counted in it: give position_ids, use scaled_dot_product_attention with "
                "is_causal, no convolution, pooling, mean or capacity over tokens",
            )
        if whole.loss is None:
            return None
        loss = float(whole.loss)
        if abs(loss_of_parts - loss) > tolerance * abs(loss):
            return _sum_error("loss of the model", loss_of_parts, loss)
        return None

    def dependence_error(self, given: Mapping[str, torch.Tensor], tokens: str) -> ModelError | None:
        """Test by gradients that the result of a token depends on no other token, however little.
        Of the inputs ``given``, ``tokens`` names the token ids. Returns the error that says that it
        does, or None."""

        def logits() -> torch.Tensor:
            """The model's results [1, n, ...] for all tokens."""
            return self.outcome_of(given).logits

        others = depended_on(self.model, logits, given[tokens])
        if (
            not others
            and others is not None
            and scaled_by_others(self.model, logits, given[tokens])
        ):
            return ModelError(
                f"backward of {type(self.model).__name__}",
                got="another gradient of a token where other tokens have one, too",
                wanted="gradients of each token alone",
                hint="a function or a hook norms or clips gradients over the tokens of a rank: do "
                "it to each token alone, or to the weights' gradients after run.add_up",
            )
        if not others:
            return None
        named = who_mixes(self.model, logits, given[tokens])
        return ModelError(
            f"gradient of {named or type(self.model).__name__}",
            got=f"a part by token {others[0]} in the results of others",
            wanted="none but by attention",
            hint=f"something beside attention meets other tokens{self._in_mode}, however little it "
            "passes on with the first weights: no convolution, shift, pooling or mean over tokens",
        )

    @property
    def _in_mode(self) -> str:
        """The words of errors for a model in training mode; empty in evaluation mode."""
        return " in training" if self.model.training else ""

    def undivided_error(
        self, loss: torch.Tensor, given: Mapping[str, torch.Tensor]
    ) -> ModelError | None:
        """Test the term of the ``loss`` [] that is not divided by the step's targets, such as a
        mean over experts, however small it is beside the rest: those of the parts must sum to that
        of the whole inputs ``given``. Returns the error that says that they do not, or None."""

        def constant_term(part: slice | None) -> float:
            """The term c of the loss of a ``part`` (None for the whole) that is not divided by the
            number T of targets: of loss(T) = s / T + c two runs with T and 2 T targets give
            c = 2 loss(2 T) - loss(T)."""
            once, twice = (self.outcome_of(given, part, target_factor=n).loss for n in (1, 2))
            return 0.0 if once is None or twice is None else 2 * float(twice) - float(once)

        wanted, got = constant_term(None), sum(map(constant_term, self.parts))
        # Allowed: some roundings of the losses that were subtracted, and 1 % of the term.
        limit = 16 * torch.finfo(loss.dtype).eps * abs(float(loss)) + 1e-2 * abs(wanted)
        if abs(got - wanted) <= limit:
            return None
        return _sum_error("loss of the model beside its cross entropy", got, wanted)


def _shape_error(part: _Outcome, whole: _Outcome, where: slice) -> ModelError:
    """The error for a model that does not give one result for each token, as seen in its results
    for the ``part`` of the tokens at ``where``."""
    return ModelError(
        "results of parts of the tokens",
        got=f"{list(part.logits.shape)} of {where.stop - where.start} tokens",
        wanted=f"as {list(whole.logits.shape)} of the whole",
        hint="the model must give one result for each token",
    )


def _sum_error(what: str, got: float, wanted: float) -> ModelError:
    """The error for a loss whose parts sum to ``got`` and not to ``wanted``, that of the whole."""
    return ModelError(
        what,
        got=f"{got:.6g} in parts",
        wanted=f"{wanted:.6g}",
        hint="a loss must be a cross_entropy of one label for each place: shift labels before "
        "the model, or take logits and use loss(logits, labels); a mean over tokens beside it is "
        "one of this rank's tokens",
    )
