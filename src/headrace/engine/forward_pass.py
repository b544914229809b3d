"""Forwards of a batch, planned as a step is, and the values of its samples on every rank.

    values = run.map(samples, fn)             fn(outputs, micro) -> values of tokens or sequences
    run.backward(samples, fn, gradients)      the same forwards with the backward of these values

A pass is run by the engine of every step, with another runner: it makes the same work of a plan,
calls the model itself and updates nothing. The values that each rank has of some tokens are sent to
all ranks at the end, with the places of the tokens: no rank waits for another one's ``fn``.
"""

from __future__ import annotations

import gc
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from headrace.adopt.held_weights import HeldWeights
from headrace.adopt.spread_model import BatchPart, Item, SpreadModel
from headrace.adopt.token_model import arguments_of
from headrace.comm.collectives import exchange_bytes, gather_bytes
from headrace.comm.ranks import is_broken_connection
from headrace.engine.loop_runner import LoopMicroBatch, LoopRunner, Work
from headrace.engine.sample_order import LoopBatch
from headrace.errors import DataError, HeadraceError, ModelError
from headrace.native.machine import is_out_of_memory
from headrace.spec.measurement import Row
from headrace.spec.plan import Plan
from headrace.spec.program import Forward, Idle

__all__ = ["ForwardRunner", "MoreInputs", "ValuesOf", "gradients_of", "inputs_of", "weighted"]

ValuesOf = Callable[[Any, LoopMicroBatch], torch.Tensor]
"""Called with the outputs of the model and the micro-batch; returns values of each local token
[1, s_r, ...], or one of each sequence of the micro-batch [k]."""

MoreInputs = Callable[[LoopMicroBatch], Mapping[str, Any]]
"""Called with a micro-batch; returns further arguments of the model, by their names."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Piece:
    """The values that this rank has of a sample, given by its number in the batch: either
    ``values`` [m, ...] of m of its tokens and their ``places`` [m] in the sample, or one value []
    of the whole sample and no places."""

    sample: int
    values: torch.Tensor
    places: np.ndarray | None

    @property
    def kind(self) -> str:
        """The type of the values, and whether they are of tokens or of sequences."""
        of = "sequences" if self.places is None else "tokens"
        return f"{_name(self.values.dtype)} values of {of}"


@dataclass(slots=True, kw_only=True, eq=False)
class ForwardRunner:
    """Runs the forwards of plans on this rank, without gradients.

    Attributes:
        loop: The runner of the loop's steps, whose work this does.
        model: The model that is run, spread: that of the loop or one of the same kind.
        held: The weights of this model, and the module that its user calls.
        fn: Makes values of its outputs.
        more: Makes further arguments of the model for a micro-batch, if any.
        action: The action that this rank is in, in words.
    """

    loop: LoopRunner
    model: SpreadModel
    held: HeldWeights
    fn: ValuesOf
    more: MoreInputs | None = None
    action: str = field(default="", init=False)
    _pieces: list[_Piece] = field(default_factory=list, init=False)
    _failure: Exception | None = field(default=None, init=False)

    def attempt(self, number: int, batch: LoopBatch, plan: Plan) -> Iterator[LoopMicroBatch]:
        """Run this rank's forwards of a plan and keep their values. Yields nothing: no loop calls
        the model. An error of ``fn`` is not raised here but by :meth:`gathered`."""
        self._pieces.clear()
        self._failure, self.action = None, "the making of groups"
        loop = self.loop
        work = loop.work(number, batch, plan)
        loop.targets = work.targets
        if loop.probes.levels is not None:
            loop.probes.levels.choose([])  # no layer recomputes: no backward follows
        try:
            with torch.no_grad(), self.held.step():
                for turn in work.program.actions:
                    if isinstance(turn, Forward | Idle):
                        self.action = str(turn)
                        self._turn(batch, plan, turn, work)
        finally:
            self.held.shard_again()
        return iter(())

    def _turn(self, batch: LoopBatch, plan: Plan, turn: Forward | Idle, work: Work) -> None:
        """Run one forward of this rank, or an idle one whose outputs are dropped, and keep what
        ``fn`` makes of the outputs."""
        part = self.loop.placed(batch, plan, turn, work, model=self.model)
        micro = self.loop.micro_batch(batch, plan, turn, work, part, _refuse_backward)
        self.loop.part = part
        self.model.take(part)
        try:
            more: Mapping[str, Any] = {} if self.more is None else self.more(micro)
            outputs = self.held.model(**inputs_of(part, self.model), **more)
            if isinstance(turn, Forward) and self._failure is None:
                self._keep(outputs, micro, batch)
        finally:
            self.model.release()
            self.loop.part = None

    def _keep(self, outputs: Any, micro: LoopMicroBatch, batch: LoopBatch) -> None:
        """Add what ``fn`` makes of the outputs of a micro-batch to the pieces: of values
        [1, s_r, ...] of tokens each rank keeps those of its own tokens, and values [k] of
        sequences, which all ranks have alike, are kept by the first rank of the micro-batch. An
        error of ``fn`` is kept too and not raised, as other ranks may wait for this one in
        forwards."""
        try:
            values = _require_values(self.fn(outputs, micro), micro)
        except Exception as error:
            if is_out_of_memory(error) or is_broken_connection(error):
                raise
            self._failure = error
            return
        values = values.detach()
        if values.dim() > 1:
            # Sample by sample; places count from the first token of the micro-batch.
            places, first = micro.local_index, 0
            for sample in micro.sequences:
                after = first + batch.tokens[sample]
                of_sample = np.flatnonzero((places >= first) & (places < after))
                self._pieces.append(
                    _Piece(
                        sample=sample,
                        values=values[0, torch.from_numpy(of_sample).to(values.device)],
                        places=places[of_sample] - first,
                    )
                )
                first = after
        elif micro.ranks[0] == self.loop.groups.rank:
            self._pieces += [
                _Piece(sample=sample, values=value, places=None)
                for sample, value in zip(micro.sequences, values, strict=True)
            ]

    def gathered(self, batch: LoopBatch) -> list[torch.Tensor]:
        """The values of the samples of the batch in their order, [n, ...] of the n tokens of a
        sample or [] of a sequence, on this rank's device: of all samples, or where each rank has
        its own samples in the batch, of these. Collective. Raises the error of ``fn`` on the rank
        where it failed and HeadraceError on the others, and ModelError where it gave values of
        tokens for one micro-batch and of sequences for another, or of several types."""
        groups, starts, wanted = self.loop.groups, batch.starts, range(len(batch.tokens))
        if starts is None:  # every rank gave the same samples, and gets the values of all
            messages = gather_bytes(self._message(wanted), groups.world)
        else:
            samples_by_rank = [range(*pair) for pair in pairwise(starts)]
            messages = exchange_bytes(list(map(self._message, samples_by_rank)), groups.world)
            wanted = samples_by_rank[groups.rank]
        parts = [message.partition(b"\n") for message in messages]  # (JSON, line end, values)
        heads = [json.loads(head) for head, _, _ in parts]
        if self._failure is not None:
            raise self._failure
        for rank, head in enumerate(heads):
            if head["failure"] is not None:
                raise HeadraceError(f"run.map(fn) on rank {rank}", got=head["failure"])
        kinds = {kind for head in heads for kind in head["kinds"]}
        if len(kinds) > 1:
            raise ModelError(
                "run.map(fn)",
                got=" and ".join(sorted(kinds)),
                wanted="the same of every micro-batch",
            )
        values_of = dict[int, torch.Tensor]()  # by the number of the sample
        for head, (_, _, body) in zip(heads, parts, strict=True):
            _read_values(head["pieces"], body, batch, values_of)
        return [values_of[sample].to(self.loop.device) for sample in wanted]

    def _message(self, wanted: range) -> bytes:
        """The values that this rank has of the samples ``wanted`` as bytes, which
        :func:`_read_values` reads: a line of JSON that describes them, then for each piece its
        places (int64; none for a value of a whole sequence) and its values."""
        pieces, body = list[dict[str, Any]](), list[bytes]()
        for piece in self._pieces:
            if piece.sample not in wanted:
                continue
            values = piece.values.cpu().contiguous()
            pieces.append(
                {
                    "sample": piece.sample,
                    "of tokens": piece.places is not None,
                    "dtype": _name(values.dtype),
                    "shape": list(values.shape),
                }
            )
            if piece.places is not None:
                body.append(piece.places.astype(np.int64).tobytes())
            body.append(values.view(-1).view(torch.uint8).numpy().tobytes())
        failure = self._failure
        head = {
            "failure": None if failure is None else f"{type(failure).__name__}: {failure}",
            "kinds": sorted({piece.kind for piece in self._pieces}),
            "pieces": pieces,
        }
        return json.dumps(head).encode() + b"\n" + b"".join(body)

    @property
    def targets(self) -> int:
        """Tokens of the batch that have a loss."""
        return self.loop.targets

    @property
    def own_loss(self) -> float:
        """0, as a pass has no loss."""
        return 0.0

    def drop_attempt(self) -> None:
        """Drop the values of an attempt that ran out of memory, and free what it held. Gradients
        stay: they are of a step whose update the loop may still take."""
        self._pieces.clear()
        self.model.forget()
        gc.collect()

    def abandon(self) -> None:
        """Drop the values of a pass that failed."""
        self._pieces.clear()

    def update(self, number: int, loss: float) -> tuple[float, float]:
        """Update nothing, as a pass is no step; returns ``loss`` and 0 as the gradient's norm."""
        return loss, 0.0

    def rows(self) -> tuple[Row, ...]:
        """No rows, as nothing is measured here."""
        return ()

    def bytes_now(self) -> int:
        """Bytes of the model and its optimizer on this rank."""
        return self.loop.bytes_now()

    def metrics(self, number: int, plan: Plan, step_s: float | None) -> dict[str, Any]:
        """No metrics, as a pass is not written down."""
        return {}


def inputs_of(part: BatchPart, model: SpreadModel) -> dict[str, Any]:
    """The arguments of the model for a part, by their names, without its labels where these are an
    optional argument: with labels a model may give a loss and no logits."""
    parameters = arguments_of(model.inner)

    def is_needed(name: str) -> bool:
        """Whether the model cannot be called without the argument, as far as its signature says."""
        return name not in parameters or parameters[name].default is inspect.Parameter.empty

    return {
        name: value
        for name, value in part.inputs.items()
        if value is not part.labels or is_needed(name)
    }


def gradients_of(gradients: Sequence[Any], counts: Sequence[int]) -> list[Item]:
    """Check the gradients that a user gives, one for each sample: [n, ...] of its n tokens, [] of
    the whole sample, or None for zero. ``counts`` are the tokens of the samples. Returns for each
    sample the fields that go beside it, which :func:`weighted` reads: its gradient as a tensor, or
    nothing for None. Raises DataError for another number or shape, and where one is not finite."""
    tensors = [None if g is None else torch.as_tensor(g).detach() for g in gradients]
    if len(tensors) != len(counts):
        raise DataError("gradients", got=len(tensors), wanted=f"{len(counts)}, one for each sample")
    for at, (gradient, count) in enumerate(zip(tensors, counts, strict=True)):
        if gradient is None:
            continue
        if gradient.dim() > 0 and len(gradient) != count:
            raise DataError(
                f"gradient of sample {at}",
                got=f"shape {list(gradient.shape)}",
                wanted=f"[{count}], of its tokens, or a single number",
            )
        if not bool(gradient.isfinite().all()):
            raise DataError(
                f"gradient of sample {at}", got="no finite number", wanted="finite ones"
            )
    return [{} if gradient is None else {_GRADIENT: gradient} for gradient in tensors]


_GRADIENT = "gradient"
"""The field beside a sample that holds the gradient of its values."""


def weighted(values: torch.Tensor, micro: LoopMicroBatch, batch: LoopBatch) -> torch.Tensor:
    """The sum [] of ``values``, [1, s_r, ...] of the local tokens or [k] of the sequences of the
    micro-batch, times the gradients that go with its samples. Its backward gives values these
    gradients; added over the ranks of the micro-batch it is the sum over all its tokens or
    sequences. Raises ModelError for values of other tokens, and for gradients of tokens where
    values are of sequences."""
    values = _require_values(values, micro)
    of_tokens = values.dim() > 1
    gradients = list[torch.Tensor]()  # of each sample
    for sample in micro.sequences:
        shape = [batch.tokens[sample], *values.shape[2:]] if of_tokens else []
        gradient = batch.beside(sample).get(_GRADIENT)
        if gradient is None:
            gradient = torch.zeros(shape)
        if list(gradient.shape) != shape:
            raise ModelError(
                f"gradient of sample {sample}",
                got=f"shape {list(gradient.shape)}",
                wanted=f"{shape}, as the values of fn",
            )
        gradients.append(gradient.to(values))
    if not of_tokens:  # all ranks of the micro-batch have the same values
        return (values * torch.stack(gradients)).sum() / len(micro.ranks)
    places = torch.from_numpy(micro.local_index).to(values.device)
    return (values[0] * torch.cat(gradients)[places]).sum()


def _require_values(values: Any, micro: LoopMicroBatch) -> torch.Tensor:
    """Return what ``fn`` gave unchanged. Raises ModelError unless it is a floating-point tensor,
    [1, s_r, ...] of the local tokens or [k] of the sequences."""
    tokens, sequences = [1, len(micro.local_index)], [len(micro.sequences)]
    shape = list(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
    fits = isinstance(shape, list) and (shape[:2] == tokens or shape == sequences)
    if not fits or not values.is_floating_point():
        raise ModelError(
            "fn(outputs, micro)",
            got=f"shape {shape}" if isinstance(shape, list) else shape,
            wanted=f"numbers [1, {tokens[1]}, ...] of the local tokens, or {sequences} of the "
            "sequences",
            hint="sum values of tokens up by micro.per_sequence",
        )
    return values


def _read_values(
    pieces: Sequence[dict[str, Any]],
    body: bytes,
    batch: LoopBatch,
    values_of: dict[int, torch.Tensor],
) -> None:
    """Put the values in the message of one rank into ``values_of``, the values [n, ...] or [] by
    the number of the sample, made here where a sample has none yet. ``pieces`` say what the bytes
    of ``body`` are."""
    start = 0
    for piece in pieces:
        dtype, shape, sample = getattr(torch, piece["dtype"]), piece["shape"], piece["sample"]
        places = None
        if piece["of tokens"]:
            places = _read_array(body, start, torch.int64, shape[:1])
            start += places.nbytes
        values = _read_array(body, start, dtype, shape)
        start += values.nbytes
        if places is None:
            values_of[sample] = values
            continue
        if sample not in values_of:
            values_of[sample] = values.new_zeros(batch.tokens[sample], *shape[1:])
        values_of[sample][places] = values


def _read_array(body: bytes, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Read a tensor of this type and shape from ``body``, from byte ``start`` on."""
    part = bytearray(body[start : start + dtype.itemsize * math.prod(shape)])
    if not part:  # frombuffer refuses an empty buffer
        return torch.empty(list(shape), dtype=dtype)
    return torch.frombuffer(part, dtype=dtype).view(list(shape))


def _name(dtype: torch.dtype) -> str:
    """The name of a type in the module torch, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def _refuse_backward(_: LoopMicroBatch, loss: torch.Tensor) -> None:
    """Raise ModelError: a forward alone has no backward."""
    raise ModelError(
        "micro.backward",
        got="a call within run.map",
        wanted="none: forwards alone",
        hint="run.backward(samples, fn, gradients) trains with the gradients of values",
    )
