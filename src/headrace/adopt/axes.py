"""Multi-dimensional models on shards of their axes, with nothing changed in them (DSP).

    run = headrace.adapt(model)                      # or with stages of one's own
    shard = run.shard({"hidden_states": video, "timestep": t})
    out = run(**shard)                               # axes are switched where a stage mixes them
    loss = ((out.sample - run.local(target, "b c t h w")) ** 2).sum() / target.numel()
    run.backward(loss); run.add_up(loss)             # gradients of all ranks

An axis is in shards in which the stage at work mixes nothing; where the next one does, one
all-to-all between the modules puts another one in shards. The objective is the sum of all ranks'
losses: what all ranks compute alike is divided by their number (``alike=True``), what those with
the same samples do by ``mates``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from headrace.adopt.axis_hooks import Passage
from headrace.adopt.axis_shards import AxisShards, Dims
from headrace.adopt.axis_stages import AxisStage
from headrace.adopt.gradients import add_plainly, add_up, is_wrapped, summed_loss
from headrace.adopt.placement import fingerprint
from headrace.comm.collectives import agree
from headrace.comm.mesh import Groups, device_of, groups_here
from headrace.errors import DataError, InfeasiblePlan, ModelError, SpecError
from headrace.layouts.partition import split_sizes
from headrace.ops.switch import gather
from headrace.spec.axes import AxisMove, split_batch
from headrace.spec.method_facts import Members
from headrace.units import bytes_text

__all__ = ["Adapted", "axis_groups"]

_GRAPHS = 1 << 16
"""Graphs that a compiler may make of one model."""

Sizes = Callable[[Mapping[str, torch.Tensor]], Mapping[str, int]] | None
"""Places of axes by name, for inputs by name."""


class Adapted:
    """A model, its stages, and the shards of the batch at work (``shards``).

    ``inputs`` are the dims of its inputs by name, those with places of ``axis``, which is in shards
    where no stage says otherwise; ``batch`` names samples that may be worked on apart. ``sizes``
    tells places of axes that the model makes of its inputs.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        stages: Sequence[AxisStage],
        inputs: Mapping[str, str],
        axis: str,
        batch: str | None = None,
        sizes: Sizes = None,
        groups: Groups | None = None,
    ) -> None:
        self.model = model
        self.inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.inputs = {name: Dims.parse(text) for name, text in inputs.items()}
        self.axis, self.batch = axis, batch
        self._sizes = sizes
        if sizes is None and not any(axis in dims for dims in self.inputs.values()):
            raise SpecError("axis of the inputs", got=axis, wanted="one of an input's dims")
        self._given, self._met = groups, groups is not None
        self._passage = Passage(self.inner, stages, axis)
        self.traceable = True
        self._compiled: Callable[..., Any] | None = None
        self.on = self._passage.on

    @property
    def shards(self) -> AxisShards | None:
        """What the model works on."""
        return self._passage.shards

    @property
    def moves(self) -> tuple[AxisMove, ...]:
        """What this rank exchanged with others in the last forward that was not compiled, in its
        order."""
        return () if self.shards is None else tuple(self.shards.moves)

    def __str__(self) -> str:
        name, moves = type(self.inner).__name__, self.moves
        if self.shards is None or self.shards.group is None:
            return f"{name} on one rank" if self.ranks == 1 else f"{name}, samples apart"
        sent = bytes_text(sum(move.sent_bytes for move in moves))
        counts = Counter(map(str, moves))
        said = ", ".join(f"{count} x {move}" for move, count in counts.items())
        return (
            f"{name} on {self.shards.ranks} ranks, axis {self.axis} in shards at first; "
            f"a forward: {said or 'nothing exchanged'}; {sent} sent by switches of this rank"
        )

    @property
    def axes(self) -> frozenset[str]:
        """Their names."""
        return frozenset(self._passage.axes)

    @property
    def _groups(self) -> Groups | None:
        """Those of the world, which may begin after the model was adapted. Raises LaunchError for
        ranks of a launcher that have not met."""
        if not self._met:
            self._given, self._met = groups_here(device_of(self.model)), True
        return self._given

    def join(self, groups: Groups) -> None:
        """Work with the groups of somebody else."""
        self._given, self._met = groups, True

    @property
    def ranks(self) -> int:
        """All of them."""
        return self._groups.ranks if self._groups is not None else 1

    @property
    def mates(self) -> int:
        """Ranks that work on the same samples: what they have alike counts once for all of them."""
        return self._passage.at_work.ranks

    def shard(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of inputs that all ranks have alike: its places of ``axis``, and its
        samples where the axis has fewer places than there are ranks. Collective.

        Raises DataError for inputs of other dims, and for tensors without declared dims that may be
        of all samples where ranks work on some of them; InfeasiblePlan where there are more ranks
        than samples and places together, and PlanMismatch where ranks have other inputs.
        """
        members = tuple(range(self.ranks))
        needed = self.groups_for(batch, members)
        if self._groups is not None:
            self._groups.prepare(needed)
            agree("inputs", fingerprint(self._tensors(batch), (needed,)), self._groups.world)
        return self.place(batch, members)

    def place(
        self, batch: Mapping[str, Any], ranks: Members, groups: Groups | None = None
    ) -> dict[str, Any]:
        """:meth:`shard` of a batch that is known to be alike on all ``ranks``, whose groups
        (:meth:`groups_for`) were made among ``groups``: no rank is asked."""
        if isinstance(self.model, FSDPModule):
            add_plainly(self.model)
        tensors, groups = self._tensors(batch), groups or self._groups
        totals = self._totals(tensors)
        samples = self._samples(totals)
        parts = self._parts(totals, len(ranks))
        each = len(ranks) // parts
        if parts > 1:
            self._require_declared(batch, samples)
        block, me = divmod(0 if groups is None else ranks.index(groups.rank), each)
        sizes = split_sizes(samples, parts)
        if self.batch is not None:
            totals[self.batch] = sizes[block]
        shards = AxisShards(
            axis=self.axis,
            totals=totals,
            samples=(sum(sizes[:block]), sizes[block], samples),
            group=groups.get(ranks[block * each : (block + 1) * each]) if groups else None,
            across=groups.get(ranks[me::each]) if groups else None,
            members=ranks,
        )
        self.take(shards)
        found = dict(batch)
        for name, value in tensors.items():
            part = self.local(value, str(self.inputs[name]))
            found[name] = part.view_as(part) if part is value else part  # whole is no shard
            self._passage.know(found[name], shards)
        return found

    def take(self, shards: AxisShards) -> None:
        """Work on the shards of another batch that was placed."""
        self._passage.take(shards)

    def groups_for(self, batch: Mapping[str, Any], ranks: Members) -> list[Members]:
        """The groups in which ``ranks`` work on a batch. Raises InfeasiblePlan where they are too
        many."""
        parts = self._parts(self._totals(self._tensors(batch)), len(ranks))
        return axis_groups(ranks, len(ranks) // parts)

    def most_ranks(self, batch: Mapping[str, Any], ranks: int) -> int:
        """How many of ``ranks`` a batch can be spread over: an image has one frame."""
        totals = self._totals(self._tensors(batch))
        for count in range(ranks, 1, -1):
            try:
                self._parts(totals, count)
            except InfeasiblePlan:
                continue
            return count
        return 1

    def places(self, sample: Mapping[str, Any]) -> int:
        """Places of all axes in a sample, or of those that its inputs tell."""
        totals = self._totals(self._tensors(sample))
        return math.prod(n for name, n in totals.items() if name != self.batch)

    def local(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """This rank's part of another tensor of the batch that all ranks have alike, as the axis in
        shards is now: after a forward as in its result."""
        layout, shards = Dims.parse(dims), self._passage.at_work
        if self.batch is not None and self.batch in layout:
            if (self.batch,) not in layout.names:
                raise SpecError("dims", got=dims, wanted=f"a dim of its own for {self.batch}")
            x = x.narrow(layout.names.index((self.batch,)), *shards.samples[:2])
        return shards.local(x, layout)

    def collect(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """The whole of a result, on every rank: a loss of it is ``alike`` on all of them.
        Collective."""
        layout, shards = Dims.parse(dims), self._passage.at_work
        whole = shards.whole(x, layout)
        if shards.across is None or self.batch is None or (self.batch,) not in layout.names:
            return whole
        sizes = split_sizes(shards.samples[2], dist.get_world_size(shards.across))
        return gather(whole, layout.names.index((self.batch,)), shards.across, sizes=sizes)

    def back(self, out: Any, like: str) -> Any:
        """A result, or the first of several, of the dims of the input ``like``, on the shards that
        inputs have. Raises ModelError for one that is no tensor. Collective."""
        shards = self._passage.at_work
        if shards.group is None or shards.axis == self.axis:
            return out
        first, *rest = out if isinstance(out, tuple) else (out,)
        if not isinstance(first, torch.Tensor):
            raise ModelError(
                "result of the model",
                got=type(first).__name__,
                wanted="a tensor",
                hint="let stages put the axis back in shards: returns=True",
            )
        first = shards.switched(first, self.inputs[like], self.axis)
        return (first, *rest) if isinstance(out, tuple) else first

    def __call__(self, **inputs: Any) -> Any:
        """The model's result for what :meth:`shard` returned; call it again for another forward of
        the same batch. Raises ModelError for other inputs."""
        shards = self._passage.shards_of(list(inputs.values()))
        if shards is None:
            raise ModelError(
                "inputs of the model", got="others than were sharded", wanted="what shard() gave"
            )
        self.take(shards)
        if self._compiled is None or not self._passage.legs:
            return self.model(**inputs)
        # Every shape is a graph of its own.
        with torch._dynamo.config.patch(  # noqa: SLF001
            recompile_limit=_GRAPHS, accumulated_recompile_limit=_GRAPHS
        ):
            out = self._compiled(**inputs)
        shards.axis = self._passage.last_axis if shards.group is not None else self.axis
        return out

    def compile(self, *, backend: str = "inductor", **options: Any) -> None:
        """Run the model as one graph, switches and all, once a first forward has shown the order of
        its stages; one for each shape of a batch. ``options`` are those of torch.compile.

        Raises ModelError for models under DDP and FSDP2 and for TimeSformer, whose blocks can be
        compiled instead, and in a later forward for stages that run twice or mix all axes.
        """
        if is_wrapped(self.model) or not self.traceable:
            raise ModelError(
                f"compiled {type(self.inner).__name__}",
                got="hooks that break its graph",
                wanted="a model alone, whose stages do all that is switched",
                hint="compile its blocks: block.compile()",
            )
        self._passage.traced = True
        self._compiled = torch.compile(self.model, backend=backend, fullgraph=True, **options)

    def backward(self, loss: torch.Tensor, *, alike: bool = False) -> None:
        """Add gradients of this rank's part of the loss; one that all ranks have ``alike``, as that
        of a collected result, counts once."""
        shards = self._passage.at_work
        axis = shards.axis
        summed_loss(self.model, loss / len(shards.members) if alike else loss).backward()
        self._passage.shards, shards.axis = shards, axis  # checkpoints go back to others

    def add_up(self, loss: torch.Tensor, *, alike: bool = False) -> torch.Tensor:
        """The loss of all ranks together, once gradients are there: after the last
        :meth:`backward` of a step. Collective."""
        whole = loss.detach().clone() / (self.ranks if alike else 1)
        if self._groups is not None:
            dist.all_reduce(whole)
            if not is_wrapped(self.model):
                add_up(self.model.parameters())
        return whole

    def stages_in(self, module: torch.nn.Module) -> int:
        """How many modules of stages a module has."""
        return sum(inner in self._passage.stages for inner in module.modules())

    def forget(self) -> None:
        """What was learnt of stages, where a forward may have failed on some ranks."""
        self._passage.forget()

    def detach(self) -> None:
        """Take the hooks away."""
        self._passage.close()

    def _tensors(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: batch[name] for name in self.inputs if batch.get(name) is not None}

    def _totals(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The places of every name in the inputs. Raises DataError where they differ."""
        found: dict[str, int] = {}
        for name, x in tensors.items():
            dims = self.inputs[name]
            if x.dim() != len(dims.names):
                raise DataError(f"input {name}", got=list(x.shape), wanted=f"dims {dims}")
            for names, size in zip(dims.names, x.shape, strict=True):
                if len(names) == 1 and found.setdefault(names[0], size) != size:
                    raise DataError(
                        f"input {name}",
                        got=f"{size} places of {names[0]}",
                        wanted=f"{found[names[0]]}, as in others",
                    )
        found |= self._sizes(tensors) if self._sizes is not None else {}
        if self.axis not in found:
            raise DataError("inputs", got=", ".join(tensors) or "none", wanted="those with axes")
        wanted = {*self._passage.axes, self.batch}
        return {name: n for name, n in found.items() if name in wanted}

    def _require_declared(self, batch: Mapping[str, Any], samples: int) -> None:
        """Raise DataError for tensors that may be of all samples, where ranks have some of them."""
        for name, value in batch.items():
            tensor = isinstance(value, torch.Tensor) and value.dim() > 0
            if name not in self.inputs and tensor and len(value) == samples > 1:
                raise DataError(
                    f"input {name}",
                    got=f"{list(value.shape)} and no dims",
                    wanted=f"its dims, as ranks work on some of {samples} samples",
                    hint=f'hr.adapt(model, inputs={{"{name}": "{self.batch} ...", ...}})',
                )

    def _samples(self, totals: Mapping[str, int]) -> int:
        return totals.get(self.batch, 1) if self.batch else 1

    def _parts(self, totals: Mapping[str, int], ranks: int) -> int:
        """Parts of the samples that ``ranks`` work on apart: each axis has places for all ranks of
        a part."""
        places = min(n for name, n in totals.items() if name != self.batch)
        return split_batch(self._samples(totals), totals[self.axis], ranks, fewest=places)


def axis_groups(ranks: Members, each: int) -> list[Members]:
    """Blocks of ``each`` of the ranks, and those of the same place in all blocks."""
    blocks = [ranks[at : at + each] for at in range(0, len(ranks), each)]
    return [*blocks, *(ranks[at::each] for at in range(each))]
