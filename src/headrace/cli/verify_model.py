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
from rich.table import Table
from torch.nn.functional import cross_entropy

import headrace
from headrace.adopt.gradients import gradient_error
from headrace.adopt.labels import logits_of, loss_of, predicted
from headrace.adopt.placement import Exchange
from headrace.adopt.token_model import TokenModel
from headrace.cli.app import Output
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
    """A batch to compare with.

    Attributes:
        name: What the table calls it.
        rows: The tokens of each document, row by row.
        padded: Which document of each row is padding: for ``right`` the last one, for ``left`` the
            first one, for ``""`` none.
        ignored: The number of labels at the start of each row that have no loss.
        own: Whether the loss is the one that the model computes itself: then one process is given
            whole rows. Else it is the cross entropy of the logits, and one process runs every
            document by itself.
        training: Whether the model is in training mode, not in evaluation mode.
    """

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
"""The most tokens of a row that runs quickly enough."""
_BEYOND = 22
"""Tokens by which the long row goes beyond a limit that a model's configuration names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """The errors of one case on ``ranks`` ranks against one process.

    Attributes:
        model: The model's name.
        ranks: Ranks that a row was spread over.
        exchange: How attention exchanges keys and values between ranks.
        batch: The name of the batch.
        entry_point: Where attention is replaced in the model.
        compiles: How often the model has been compiled by then.
        loss_error: Relative error of the loss.
        gradient_error: Largest relative error of a gradient (:func:`gradient_error`).
        recompute: What blocks compute again in the backward.
        kept_bytes: Bytes that this rank keeps from forward to backward; None where not counted.
    """

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
    """Compare losses and gradients of ``name`` on each number of ``ranks`` with those of one
    process. The exit code is 0 when they are equal, 1 when they are not, 2 when the model is
    refused."""
    foreign_model(name, seed)  # raises at once where the name is of no model
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
    Output(highlight=False, width=110).print(table)
    times = max(v.compiles for v in found)
    print(f"attention reached by its {found[0].entry_point}; compiled {times} times")


def on_all(
    name: str, ranks: Sequence[int], cases: Callable[[int], Iterable[Any]]
) -> list[dict[str, Any]] | None:
    """Run ``cases(count)`` on ``count`` ranks for each number in ``ranks``. Returns the dataclasses
    that it yields on the first rank, as dicts; None where the model is refused, after the reason is
    printed."""
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
    """Run ``cases()`` on so many new ranks. Returns ``{"rows": dataclasses as dicts}`` of the first
    rank, or ``{"refused": reason}`` where the model cannot be spread over ranks."""
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
    """The verdicts of a model on this rank's world: the first batch with every exchange, each other
    batch with one of them in turn, then the first batch with each recompute level. Collective."""
    model, plain = foreign_model(name, seed), foreign_model(name, seed)
    run = headrace.compile(model, backend=backend)
    exchanges: list[Exchange] = ["ulysses", "ring", "gather"]
    count_bytes = run.entry_point != "graph"
    for at, batch in enumerate(_batches(run)):
        for exchange in exchanges if at == 0 else [exchanges[at % len(exchanges)]]:
            verdict = _compare(run, plain, batch, seed + at, exchange, count_bytes=count_bytes)
            yield replace(verdict, model=name, ranks=ranks)
    if count_bytes and run.has_blocks:
        for level in ("attention", "full"):
            again = headrace.compile(foreign_model(name, seed), backend=backend, recompute=level)
            verdict = _compare(again, plain, _BATCHES[0], seed, exchanges[0], count_bytes=True)
            yield replace(verdict, model=name, ranks=ranks, recompute=level)


def _batches(run: TokenModel) -> Iterator[_Batch]:
    """The batches that a model can be given: those with its own loss need ``labels``, those padded
    on the left ``attention_mask``. A model whose graph is rewritten is not evaluated, as that would
    need another graph."""
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
    """The tokens of a row that goes beyond a model's attention windows and the thresholds of its
    rotary embeddings: _BEYOND more than the largest of these that leaves at most _LONGEST, at least
    _LONG, and no more than the model takes. None without rotary embeddings, as a table of positions
    ends."""
    config = getattr(run.inner, "config", None)
    if not any("inv_freq" in name for name, _ in run.inner.named_buffers()):
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    names = ("sliding_window", "local_attention", "max_position_embeddings")
    limits = [getattr(config, name, None) for name in names]
    limits.append(rope.get("original_max_position_embeddings") if isinstance(rope, dict) else None)
    lengths = [limit + _BEYOND for limit in limits if isinstance(limit, int)]
    short_enough = [length for length in lengths if length <= _LONGEST]
    return min(max([_LONG, *short_enough]), run.longest or _LONGEST)


def _compare(
    run: TokenModel,
    plain: torch.nn.Module,
    batch: _Batch,
    seed: int,
    exchange: Exchange,
    *,
    count_bytes: bool,
) -> _Verdict:
    """Compare loss and gradients of one batch on all ranks, by ``run``, with those of the ``plain``
    model in one process. The verdict has no model and ranks yet. Collective."""
    inputs = _inputs(batch, seed, run)
    for model in (run.model, plain):
        model.train(batch.training)
    loss, gradients, kept = _on_shards(run, inputs, exchange, batch, count_bytes=count_bytes)
    in_one_process = _own_loss if batch.own else _by_document
    expected_loss, expected_gradients = in_one_process(plain, run, inputs, batch)
    return _Verdict(
        model="",
        ranks=0,
        exchange=exchange,
        batch=batch.name,
        entry_point=run.entry_point,
        compiles=run.compiles,
        loss_error=abs(loss - expected_loss) / abs(expected_loss),
        gradient_error=gradient_error(gradients, expected_gradients),
        kept_bytes=kept,
    )


def _inputs(batch: _Batch, seed: int, run: TokenModel) -> dict[str, torch.Tensor]:
    """Whole inputs of the model by name, each [b, S]: token ids drawn with ``seed``, and as labels
    the same ids, two in five of them ignored. With padding an ``attention_mask`` too, and where
    several documents are packed into a row ``position_ids`` that begin anew for each."""
    draw = torch.Generator().manual_seed(seed)
    shape = len(batch.rows), sum(batch.rows[0])
    tables = [m for m in run.inner.modules() if isinstance(m, torch.nn.Embedding)]
    sizes = [table.num_embeddings for table in tables[:1]]  # the first is that of the tokens
    ids = torch.randint(3, min([_VOCABULARY, *sizes]), shape, generator=draw)
    labels = ids.masked_fill(torch.rand(shape, generator=draw) < 0.4, IGNORED)
    labels[:, : batch.ignored] = IGNORED
    found = {run.tokens: ids, "labels": labels}
    if batch.padded:
        in_first = torch.stack([torch.arange(shape[1]) < row[0] for row in batch.rows])
        mask = (in_first if batch.padded == "right" else ~in_first).long()
        found |= {"attention_mask": mask, "labels": labels.masked_fill(mask == 0, IGNORED)}
    elif any(len(row) > 1 for row in batch.rows):
        positions = [torch.cat([torch.arange(length) for length in row]) for row in batch.rows]
        found["position_ids"] = torch.stack(positions) + run.first_place(found)
    return found


def _on_shards(
    run: TokenModel,
    inputs: dict[str, torch.Tensor],
    exchange: Exchange,
    batch: _Batch,
    *,
    count_bytes: bool,
) -> tuple[float, list[torch.Tensor | None], int | None]:
    """(loss, gradient of each parameter, kept bytes) with every rank running its shard of the
    inputs: loss and gradients are summed over ranks, the bytes that this rank keeps from forward to
    backward are None unless ``count_bytes``. Collective."""
    run.model.zero_grad()
    shard = run.shard(inputs, exchange=exchange)
    assert shard.labels is not None, "labels were given"
    kept = None
    with _counter(run) if count_bytes else nullcontext() as counter:
        before, _ = counter.look() if counter is not None else (0, 0)
        if batch.own:
            loss = _loss_among(run(**shard.inputs))
        else:
            outputs = run(**{k: v for k, v in shard.inputs.items() if k != "labels"})
            loss = run.loss(logits_of(outputs), shard.labels)
        if counter is not None:
            now, _ = counter.look()
            kept = now - before
    run.backward(loss)
    return float(run.add_up(loss)), [p.grad for p in run.model.parameters()], kept


def _counter(run: TokenModel) -> ByteCounter | SavedBytes:
    """A counter of the bytes of live tensors; for a compiled model, which cannot run under that
    one, of the bytes that autograd saves."""
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
    """(the loss that the model computes itself, gradient of each parameter) in one process that is
    given whole rows. A padded batch is run by SDPA, or where the model has none row by row without
    its padding, as eager attention gives NaN to queries that see padding alone."""
    model.zero_grad()

    def own(part: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of some rows, a mean over their tokens."""
        rest = {name: value for name, value in part.items() if name != run.tokens}
        return _loss_among(model(**run.plain_inputs(part[run.tokens]), **rest))

    if not batch.padded:
        loss = own(inputs)
    elif getattr(model, "_supports_sdpa", False):
        cast("Any", model).set_attn_implementation("sdpa")
        loss = own(inputs)
    else:
        kept = inputs["attention_mask"] != 0
        rows = [{k: v[at : at + 1, kept[at]] for k, v in inputs.items()} for at in range(len(kept))]
        targets = [int((predicted(row["labels"], run.labels) != IGNORED).sum()) for row in rows]
        sums = [own(row) * count for row, count in zip(rows, targets, strict=True)]
        loss = torch.stack(sums).sum() / sum(targets)
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


def _by_document(
    model: torch.nn.Module, run: TokenModel, inputs: dict[str, torch.Tensor], batch: _Batch
) -> tuple[float, list[torch.Tensor | None]]:
    """(mean cross entropy of the batch, gradient of each parameter) in one process that runs every
    document by itself; padding too, which has no labels."""
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
