"""``headrace verify MODEL``: sequence parallelism of a foreign model against one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal, cast

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

import headrace
from headrace.adopt.gradients import gradient_error
from headrace.adopt.labels import logits_of, loss_of, predicted
from headrace.adopt.placement import Exchange
from headrace.adopt.token_model import TokenModel
from headrace.cli.display import tell
from headrace.cli.foreign_models import foreign_model
from headrace.comm.launch import World, start
from headrace.errors import HeadraceError, ModelError
from headrace.native.counted import ByteCounter, SavedBytes
from headrace.ops.loss import IGNORED
from headrace.units import bytes_text, counted

__all__ = ["on_all", "verify_model"]

_VOCABULARY = 97
"""Token numbers are below it, and below the rows of the first embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """Rows of documents, as lengths. ``padded``: the last document of each row is padding, on the
    ``left`` the first; the first ``ignored`` labels have no loss.

    ``own``: the loss is that of the model itself, which one process is given whole rows for; else
    it is the cross entropy of logits, and one process runs every document by itself."""

    name: str
    rows: tuple[tuple[int, ...], ...]
    padded: Literal["", "left", "right"] = ""
    ignored: int = 0
    own: bool = False
    training: bool = True


_BATCHES = (
    _Batch(name="rows", rows=((18,), (18,))),
    _Batch(name="packed", rows=((5, 20, 1, 11),)),
    _Batch(name="padded", rows=((9, 8), (16, 1)), padded="right"),
    _Batch(name="half ignored", rows=((23,),), ignored=14),
    _Batch(name="own loss", rows=((14,), (14,)), own=True),
    _Batch(name="left padded", rows=((8, 9), (1, 16)), padded="left", own=True),
    _Batch(name="evaluation", rows=((17,),), training=False),
)
_LONG = 150
"""Tokens of a row that is longer than the thresholds of tiny models' rotary embeddings."""
_LONGEST = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """Largest errors of a case: of the loss, relative to it, and of gradients, as
    :func:`gradient_error` has it. ``recompute``: what blocks compute again, and ``kept_bytes`` of a
    rank from forward to backward, where that was counted. ``compiles``: how often the model was by
    then."""

    model: str
    ranks: int
    exchange: str
    batch: str
    entry_point: str
    compiles: int
    loss_error: float
    gradient_error: float
    recompute: str = "none"
    kept_bytes: int | None = None


def verify_model(
    name: str,
    *,
    ranks: Sequence[int],
    seed: int,
    tolerance: float,
    backend: str | None,
    as_json: bool,
) -> int:
    """Compare losses and gradients of ``name`` on groups of ``ranks`` with one process'. The exit
    code is 0 when they are equal, 1 when they are not, 2 when the model is refused."""
    foreign_model(name, seed)  # a name that is none is told at once
    rows = on_all(name, ranks, lambda count: _cases(name, count, seed, backend))
    if rows is None:
        return 2
    found = [_Verdict(**row) for row in rows]
    good = all(max(v.loss_error, v.gradient_error) <= tolerance for v in found)
    if as_json:
        print(json.dumps({"exact": good, "cases": [asdict(v) for v in found]}, indent=1))
    else:
        _print(found, tolerance)
        print(f"tolerance {tolerance:.0e}: " + ("all exact" if good else "FAILED"))
    return 0 if good else 1


def _print(found: Sequence[_Verdict], tolerance: float) -> None:
    """Print the errors of every case against the tolerance, and how the attention was reached."""
    table = Table(box=None, pad_edge=False)
    for title in (
        "model",
        "ranks",
        "exchange",
        "batch",
        "recompute",
        "kept",
        "loss error",
        "gradient error",
        "verdict",
    ):
        left = title in ("model", "exchange", "batch", "recompute", "verdict")
        table.add_column(title, justify="left" if left else "right")
    for v in found:
        fine = max(v.loss_error, v.gradient_error) <= tolerance
        table.add_row(
            v.model,
            str(v.ranks),
            v.exchange,
            v.batch,
            v.recompute,
            "" if v.kept_bytes is None else bytes_text(v.kept_bytes),
            f"{v.loss_error:.1e}",
            f"{v.gradient_error:.1e}",
            "exact" if fine else "WRONG",
        )
    Console(highlight=False, width=110).print(table)
    times = max(v.compiles for v in found)
    print(f"attention reached by its {found[0].entry_point}; compiled {times} times")


def on_all(
    name: str, ranks: Sequence[int], cases: Callable[[int], Iterable[Any]]
) -> list[dict[str, Any]] | None:
    """The first rank's rows, dataclasses as dicts, for each number of ranks; None, with what is
    wrong said, where a model is refused."""
    found = list[dict[str, Any]]()
    for count in ranks:
        tell(f"{name} on {counted(count, 'rank')}")
        answer = _on_ranks(name, count, partial(cases, count))
        if "refused" in answer:
            tell(f"refused: {answer['refused']}")
            return None
        found += answer["rows"]
    return found


def _on_ranks(name: str, ranks: int, cases: Callable[[], Iterable[Any]]) -> dict[str, Any]:
    """The rows of ``cases`` as the first of so many ranks found them, or under ``refused`` why the
    model cannot be spread."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            """Run the cases on this rank; the first one writes the answer to a file."""
            try:
                rows = [asdict(row) for row in cases()]
                answer: dict[str, Any] = {"rows": rows}
            except ModelError as error:
                answer = {"refused": str(error)}
            if world.rank == 0:
                result.write_text(json.dumps(answer))
            return 0

        code = start(main, ranks=ranks, threads=1)
        if code != 0 or not result.exists():
            raise HeadraceError(f"verify {name}", got=f"exit code {code} of the ranks", wanted="0")
        answer: dict[str, Any] = json.loads(result.read_text())
    return answer


def _cases(name: str, ranks: int, seed: int, backend: str | None) -> Iterator[_Verdict]:
    """The verdicts of a model on this rank's world: every exchange, kind of batch and recompute
    level. Collective."""
    model, plain = foreign_model(name, seed), foreign_model(name, seed)
    run = headrace.compile(model, backend=backend)
    exchanges: list[Exchange] = ["ulysses", "ring", "gather"]
    counts = run.entry_point != "graph"
    for at, batch in enumerate(_batches(run)):
        for exchange in exchanges if at == 0 else [exchanges[at % len(exchanges)]]:
            verdict = _compare(run, plain, batch, seed + at, exchange, counts=counts)
            yield replace(verdict, model=name, ranks=ranks)
    if counts and run.has_blocks:
        for level in ("attention", "full"):
            again = headrace.compile(foreign_model(name, seed), backend=backend, recompute=level)
            verdict = _compare(again, plain, _BATCHES[0], seed, exchanges[0], counts=True)
            yield replace(verdict, model=name, ranks=ranks, recompute=level)


def _batches(run: TokenModel) -> Iterator[_Batch]:
    """The batches that a model can be given. Graphs are not made again for an evaluation."""
    takes = signature(run.inner.forward).parameters
    for batch in _BATCHES:
        if batch.own and "labels" not in takes:
            continue
        if batch.padded == "left" and "attention_mask" not in takes:
            continue
        if batch.training or run.entry_point != "graph":
            yield batch
    long = _long_row(run)
    if long:
        yield _Batch(name="long", rows=((long,),))


def _long_row(run: TokenModel) -> int | None:
    """A length beyond the windows and the thresholds of rotary embeddings of a model, as far as
    that is small enough to run, and such places are not refused. None where there is no rotary
    embedding: a table of places ends."""
    config = getattr(run.inner, "config", None)
    if not any("inv_freq" in name for name, _ in run.inner.named_buffers()):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    names = ("sliding_window", "local_attention", "max_position_embeddings")
    limits = [getattr(config, name, None) for name in names]
    limits.append(rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None)
    beyond = [end + 22 for end in limits if isinstance(end, int) and end + 22 <= _LONGEST]
    return min(max([_LONG, *beyond]), run.longest or _LONGEST)


def _compare(
    run: TokenModel,
    plain: torch.nn.Module,
    batch: _Batch,
    seed: int,
    exchange: Exchange,
    *,
    counts: bool,
) -> _Verdict:
    """What one case gives: loss and gradients on all ranks against those on one."""
    inputs = _inputs(batch, seed, run)
    for model in (run.model, plain):
        model.train(batch.training)
    loss, gradients, kept = _spread(run, inputs, exchange, batch, counts=counts)
    whole = _own_loss if batch.own else _alone
    wanted, expected = whole(plain, run, inputs, batch)
    return _Verdict(
        model="",
        ranks=0,
        exchange=exchange,
        batch=batch.name,
        entry_point=run.entry_point,
        compiles=run.compiles,
        loss_error=abs(loss - wanted) / abs(wanted),
        gradient_error=gradient_error(gradients, expected),
        kept_bytes=kept,
    )


def _inputs(batch: _Batch, seed: int, run: TokenModel) -> dict[str, torch.Tensor]:
    """Drawn tokens and labels, two in five of which are ignored."""
    draw = torch.Generator().manual_seed(seed)
    shape = len(batch.rows), sum(batch.rows[0])
    rows = [m.num_embeddings for m in run.inner.modules() if isinstance(m, torch.nn.Embedding)]
    ids = torch.randint(3, min([_VOCABULARY, *rows[:1]]), shape, generator=draw)
    labels = ids.masked_fill(torch.rand(shape, generator=draw) < 0.4, IGNORED)
    labels[:, : batch.ignored] = IGNORED
    found = {run.tokens: ids, "labels": labels}
    if batch.padded:
        first = torch.stack([torch.arange(shape[1]) < row[0] for row in batch.rows])
        mask = (first if batch.padded == "right" else ~first).long()
        found |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, IGNORED)}
    elif any(len(row) > 1 for row in batch.rows):
        places = [torch.cat([torch.arange(length) for length in row]) for row in batch.rows]
        found["position_ids"] = torch.stack(places) + run.first_place(found)
    return found


def _spread(
    run: TokenModel,
    inputs: dict[str, torch.Tensor],
    exchange: Exchange,
    batch: _Batch,
    *,
    counts: bool,
) -> tuple[float, list[torch.Tensor | None], int | None]:
    """(loss, gradients) of all ranks together, and the bytes that this one keeps."""
    run.model.zero_grad()
    shard = run.shard(inputs, exchange=exchange)
    assert shard.labels is not None, "labels were given"
    kept = None
    with _counter(run) if counts else nullcontext() as live:
        before = live.look()[0] if live is not None else 0
        if batch.own:
            loss = _loss_among(run(**shard.inputs))
        else:
            outputs = run(**{k: v for k, v in shard.inputs.items() if k != "labels"})
            loss = run.loss(logits_of(outputs), shard.labels)
        if live is not None:
            kept = live.look()[0] - before
    run.backward(loss)
    return float(run.add_up(loss)), [p.grad for p in run.model.parameters()], kept


def _counter(run: TokenModel) -> ByteCounter | SavedBytes:
    """Counts what is alive; of a compiled model, which that would forbid, what autograd keeps."""
    if run.compiled:
        return SavedBytes(run.model.parameters())
    return ByteCounter(settle_s=0.0)


def _loss_among(outputs: Any) -> torch.Tensor:
    """The loss in a model's results; raises ModelError where there is none."""
    loss = loss_of(outputs)
    if loss is None:
        raise ModelError("results of the model", got="no loss", wanted="one, given labels")
    return loss


def _own_loss(
    model: torch.nn.Module, run: TokenModel, inputs: dict[str, torch.Tensor], batch: _Batch
) -> tuple[float, list[torch.Tensor | None]]:
    """(the model's own loss, gradients) of one process that is given whole rows, or one row after
    the other without its padding where its attention gives NaN for that."""
    model.zero_grad()

    def own(part: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of some rows, a mean over their tokens."""
        rest = {name: value for name, value in part.items() if name != run.tokens}
        return _loss_among(model(**run.plain_inputs(part[run.tokens]), **rest))

    if not batch.padded:
        loss = own(inputs)
    elif getattr(model, "_supports_sdpa", False):
        # Eager attention gives NaN to queries that see padding alone.
        cast("Any", model).set_attn_implementation("sdpa")
        loss = own(inputs)
    else:
        kept = inputs["attention_mask"] != 0
        rows = [{k: v[at : at + 1, kept[at]] for k, v in inputs.items()} for at in range(len(kept))]
        counts = [int((predicted(row["labels"], run.labels) != IGNORED).sum()) for row in rows]
        parts = [own(row) * count for row, count in zip(rows, counts, strict=True)]
        loss = torch.stack(parts).sum() / sum(counts)
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


def _alone(
    model: torch.nn.Module, run: TokenModel, inputs: dict[str, torch.Tensor], batch: _Batch
) -> tuple[float, list[torch.Tensor | None]]:
    """(loss, gradients) of one process that runs every document by itself."""
    model.zero_grad()
    ids, kind = inputs[run.tokens], run.labels
    labels, parts = predicted(inputs["labels"], kind), list[torch.Tensor]()
    for at, row in enumerate(batch.rows):
        start = 0
        for length in row:
            outputs = model(**run.plain_inputs(ids[at : at + 1, start : start + length]))
            parts.append(logits_of(outputs).flatten(0, -2))
            start += length
    total = cross_entropy(torch.cat(parts), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = total / (labels != IGNORED).sum()
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]
