"""Multi-dimensional models on shards of their axes, with nothing changed in them (DSP).

    run = headrace.adapt(model)                      # or with stages of one's own
    shard = run.shard({"hidden_states": video, "timestep": t})
    out = run(**shard)                               # axes are switched where a stage mixes them
    loss = ((out.sample - run.local(target, "b c t h w")) ** 2).sum() / target.numel()
    run.backward(loss); run.add_up(loss)             # gradients of all ranks

The sharded axis is one that the current stage does not mix; before a stage that mixes it, one
all-to-all shards another axis instead. The objective is the sum of all ranks'
losses: a term that all ranks compute alike is divided by the number of ranks
(``alike=True``), a term that ranks with the same samples compute alike by ``mates``.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from headrace.adopt.axis_hooks import HookManager
from headrace.adopt.axis_probe import WholeFails, probe_axes, refuse_batch_norms
from headrace.adopt.axis_shards import AxisShards, Dims
from headrace.adopt.axis_stages import AxisStage
from headrace.adopt.first_step import FirstStep, compare_first_step, ranks_that_add_up
from headrace.adopt.gradients import add_plainly, add_up, is_wrapped, summed_loss
from headrace.adopt.labels import logits_of, result_tensors
from headrace.adopt.placement import fingerprint, replica_blocks
from headrace.adopt.samples import is_numbers
from headrace.adopt.spread_model import BatchPart, Item, Levels, Pack
from headrace.comm.collectives import agree, gather_floats
from headrace.comm.loop_watch import CallWatch
from headrace.comm.mesh import Groups, device_of, groups_here
from headrace.comm.waiting import Transfer
from headrace.errors import DataError, InfeasiblePlan, ModelError, SpecError
from headrace.layouts.partition import split_sizes
from headrace.ops.switch import gather
from headrace.spec.axes import AxisMove, split_batch
from headrace.spec.layer_plan import Recompute
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder
from headrace.units import bytes_text

__all__ = ["AxisModel", "axis_groups"]

_GRAPHS = 1 << 16
"""Graphs that a compiler may make of one model before it gives up."""

_FEWEST = 3
"""Places of a sample on which a model is tried."""

Sizes = Callable[[Mapping[str, torch.Tensor]], Mapping[str, int]] | None
"""A function from the inputs by name to the sizes of axes by name."""


class AxisModel:
    """A model that is spread by its axes; see :class:`~headrace.adopt.spread_model.SpreadModel`.

    Args:
        model: The model, alone or under DDP or FSDP2.
        stages: The modules in which places of an axis see each other.
        inputs: The dims of its inputs with places of axes, by name.
        axis: The axis that is in shards where no stage says otherwise.
        batch: The name of the samples, which may be worked on apart.
        sizes: Gives places of axes that the model makes of its inputs, by name.
        counts: The axes that whole numbers among the inputs count, by name of the input.
        switched: Axes that hooks of an adapter put in shards.
        groups: The groups of this rank; those of the world when left out.
        check: Whether the model is tried on shards of its first batch before it is run on any;
            ``"first step"`` compares gradients of all ranks with the plain model's, too.
        compare: Whether ranks compare the inputs of each batch.
        other_dims: Dims that an input may have in the place of those of ``inputs``, by name.

    Raises:
        SpecError: For an ``axis`` that no input has, where no ``sizes`` are given.
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
        switched: Sequence[str] = (),
        counts: Mapping[str, str] | None = None,
        check: bool | FirstStep = True,
        compare: bool = True,
        other_dims: Mapping[str, str] | None = None,
    ) -> None:
        """Hook ``model``: ``inputs`` and ``other_dims`` name the dims of tensors, ``axis`` is in
        shards first, and ``check`` has the model tried on shards of its first batch."""
        self.model = model
        self._compare = compare
        self._other_dims = {name: Dims.parse(x) for name, x in (other_dims or {}).items()}
        self.counts = dict(counts or {})
        self.inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.inputs = {name: Dims.parse(text) for name, text in inputs.items()}
        self.axis, self.batch = axis, batch
        self._sizes, self.check = sizes, bool(check)
        self._first_step = check == "first step"
        self._untried: Mapping[str, Any] | None = None
        # Results that all shards have alike; whether a backward may meet one; and what is refused
        # in the one at work: to meet any, or one that is the model's own loss.
        self._alike = tuple[bool, ...]()
        self._may_meet, self._refuses, self._refuses_own = False, False, False
        self._backwards = set[bool]()  # ``alike`` of those since the last sum
        if sizes is None and not any(axis in dims for dims in self.inputs.values()):
            raise SpecError("axis of the inputs", got=axis, wanted="one of an input's dims")
        self._given, self._met = groups, groups is not None
        self._manager = HookManager(self.inner, stages, axis)
        self._manager.switched = tuple(switched)
        self.traceable = True
        self._compiled: Callable[..., Any] | None = None
        shown = [name for name, dims in self.inputs.items() if axis in dims]
        self._main = shown[0] if shown else None
        self._label_name = "labels"
        self._takes = {*inspect.signature(self.inner.forward).parameters, *self.inputs}
        self._watch = CallWatch()
        weakref.finalize(self, self._watch.close)

    exchanges: tuple[str, ...] = ("dsp",)
    whole = False

    def install(self) -> Callable[[], None]:
        """Have the model itself give results on the shards of its inputs while it is spread; its
        hooks exist already. Returns a function that undoes this."""

        def back(_: Any, out: Any) -> Any:
            if not self._manager.spread:
                return None
            return self._bound(self.back(out, str(self._main)), self._manager.at_work)

        return self._manager.on(self.inner, after=back)

    def on(
        self,
        module: torch.nn.Module,
        before: Callable[[Any, dict[str, Any]], Any] | None = None,
        after: Callable[[Any, Any], Any] | None = None,
        *,
        always: bool = False,
    ) -> Callable[[], None]:
        """Change what a module of the model is given or returns while the model is spread, as for
        positions that it counts itself.

        Args:
            module: A module of the model.
            before: Given the arguments and those by name, returns both anew.
            after: Given the arguments and the result, returns the result anew.
            always: Whether ``after`` is called after a forward that failed, too, with None.

        Returns:
            What takes the hooks away.
        """
        return self._manager.on(module, before, after, always=always)

    def places_of(self, axis: str) -> int:
        """Count the places of an axis in the whole batch, of which this rank may have some.

        Args:
            axis: Its name.

        Returns:
            The places on all ranks.

        Raises:
            SpecError: For an axis that neither inputs nor ``sizes`` tell.
        """
        totals = self._manager.at_work.totals
        if axis not in totals:
            raise SpecError("axis", got=axis, wanted=f"one of {', '.join(totals)}")
        return totals[axis]

    @property
    def shards(self) -> AxisShards | None:
        """The shards of the current batch; None where the model is not spread."""
        return self._manager.shards

    @property
    def moves(self) -> tuple[AxisMove, ...]:
        """The exchanges of this rank in the last forward that was not compiled, in order."""
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
        """The names of the axes that stages mix, and of the one in shards."""
        return frozenset(self._manager.axes)

    @property
    def _groups(self) -> Groups | None:
        """The groups that were given, else those of the world, which may be set up after the model
        was adapted; None in a process that is no rank. Raises
        LaunchError on a launched rank whose process group is not initialized."""
        if not self._met:
            self._given, self._met = groups_here(device_of(self.model)), True
        return self._given

    @property
    def ranks(self) -> int:
        """The number of all ranks of the world."""
        return self._groups.ranks if self._groups is not None else 1

    @property
    def mates(self) -> int:
        """The number of ranks that work on the same samples. What they have alike counts once: a
        loss is taken to be divided by it where it is asked for after the forward."""
        self._may_meet = False
        return self._manager.at_work.ranks

    @property
    def share(self) -> float:
        """What a mean over samples on this rank, as a model's own loss, counts in that over the
        whole batch, ``run.backward(loss * run.share)``: its part of the samples, over the ranks
        that have the same ones."""
        _, count, of = self._manager.at_work.samples
        return count / of / self.mates

    def shard(self, batch: Mapping[str, Any], *, replicas: int = 1) -> BatchPart:
        """This rank's part of inputs that all ranks have alike: its places of ``axis``, and its
        samples where the axis has fewer places than there are ranks. Collective.

        Args:
            batch: Inputs of the model by name, and other values.
            replicas: How many batches are worked on at once, each by so many neighbouring ranks,
                which have it alike: with 2 on four ranks the batch of ranks 0 and 1, and that of
                ranks 2 and 3. Losses of all ranks add up, so a mean is over all batches:
                ``part.targets`` counts the places of all.

        Returns:
            The part: call ``run(**part)``.

        Raises:
            ModelError: For the first batch with places to try, on which shards of the model give
                other results than the whole; for BatchNorm in training.
            DataError: For inputs of other dims, and for tensors without declared dims that may be
                of all samples where ranks work on some of them.
            InfeasiblePlan: Where there are more ranks than samples and places together.
            PlanMismatch: Where ranks of a replica have other inputs.
            SpecError: For replicas that the ranks cannot be divided into.
        """
        blocks = replica_blocks(self.ranks, replicas)
        places, groups = self.places(batch) * self._sample_count(batch), self._groups
        members = blocks[0] if groups is None else next(b for b in blocks if groups.rank in b)
        needed = self.groups_for(batch, members)
        self._watch.count()
        with self._watch.during("sharding"):
            if groups is not None:
                self._watch.begin(groups)
                apart = [some for block in blocks for some in self.groups_of(block)]
                groups.prepare(needed if replicas == 1 else apart)
                if self._compare:
                    own = groups.world if replicas == 1 else groups.get(members)
                    agree("inputs", fingerprint(_all_tensors(batch), (needed,)), own)
                if replicas > 1:
                    counts = gather_floats([float(places)], groups.world)
                    places = round(sum(counts[block[0]][0] for block in blocks))
            self._look_once(batch, may_wait=True)
        shards, found = self._place_batch(batch, members, None)
        labels = self._local_labels(found, shards)
        if self._label_name not in self._takes:
            found.pop(self._label_name, None)
        if self._first_step and replicas == 1 and self._untried is None:
            self._first_step = False
            self._compare_whole(found, {k: v for k, v in batch.items() if k in found})
            shards, found = self._place_batch({k: batch[k] for k in found}, members, None)
        return BatchPart(
            inputs=found,
            labels=labels,
            group=shards.group,
            targets=places,
            tokens=self._tokens(shards),
            placed=shards,
        )

    def _compare_whole(self, local: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        """Compare a batch of all ranks with the plain model, by the squares of its results."""

        def spread() -> torch.Tensor:
            """The sum of squares of the results of all ranks, [], after its backward."""
            values = list(result_tensors(self(**local)))
            known = self._alike if len(self._alike) == len(values) else [False] * len(values)
            parts = zip(values, known, strict=True)
            sizes = [x.square().sum() / (self.mates if alike else 1) for x, alike in parts]
            loss = torch.stack(sizes).sum()
            self.backward(loss)
            return self.add_up(loss)

        def plain() -> torch.Tensor:
            values = result_tensors(self.model(**whole))
            loss = torch.stack([x.square().sum() for x in values]).sum()
            (loss / ranks_that_add_up(self.model, self._groups)).backward()
            return loss.detach()

        compare_first_step(self.model, self._groups, spread=spread, plain=plain)

    def place(
        self,
        values: Mapping[str, Any],
        ranks: Members,
        *,
        targets: int | None = None,
        exchange: str | None = None,
        groups: Groups | None = None,
    ) -> BatchPart:
        """:meth:`shard` without a check that ``ranks`` have the same batch: no communication. Their
        groups (:meth:`groups_for`) must exist in ``groups``. Fields that the model does not take
        are in ``rest``."""
        known = {name: value for name, value in values.items() if name in self.inputs}
        others = {name: value for name, value in values.items() if name not in known}
        shards, placed = self._place_batch(known, ranks, groups)
        first, count, of = shards.samples
        own = {
            name: value.narrow(0, first, count)
            if self._dims(name) is None and value.dim() and len(value) == of
            else value
            for name, value in {**placed, **others}.items()
        }
        takes = self._takes
        return BatchPart(
            inputs={name: value for name, value in own.items() if name in takes},
            rest={
                name: value
                for name, value in own.items()
                if name not in takes and name != self._label_name
            },
            labels=self._local_labels(own, shards),
            group=shards.group,
            targets=targets or 0,
            tokens=self._tokens(shards),
            placed=shards,
        )

    def take(self, part: BatchPart) -> None:
        """Spread the model: its forwards work on ``part`` from now on."""
        self._manager.take(part.placed)
        self._manager.spread = True
        self._manager.inputs = tuple(
            x for x in part.inputs.values() if isinstance(x, torch.Tensor) and x.dim()
        )

    def release(self) -> None:
        """Make the model the user's plain one again."""
        self._manager.spread, self._manager.inputs = False, ()

    def _place_batch(
        self, batch: Mapping[str, Any], ranks: Members, groups: Groups | None
    ) -> tuple[AxisShards, dict[str, Any]]:
        """The shards of a batch on this rank, and the local inputs."""
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
            beside=self._manager.beside,
        )
        return shards, self._on(shards, batch)

    def _on(self, shards: AxisShards, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs on shards, which the model works on from here on."""
        self._manager.take(shards)
        found = dict(batch)
        for name, value in self._tensors(batch).items():
            part = self.local(value, str(self._dims_of(name, value)))
            found[name] = part.view_as(part) if part is value else part  # not the input itself
            self._manager.know(found[name], shards)
        for name, axis in self.counts.items():
            if type(found.get(name)) is int:
                found[name] = self._manager.at_work.counted(axis)
        return found

    def _look_once(self, batch: Mapping[str, Any], *, may_wait: bool = False) -> None:
        """Try the model on shards of a batch, the first one that has places for two ranks. Raises
        ModelError, on all ranks, where results differ. Where the plain model fails it ``may_wait``
        for the first call, which may have more inputs, or other types of numbers (autocast)."""
        refuse_batch_norms(self.inner)
        if not self.check or self._places_of_axis(batch) < 2:
            return
        error: Exception | None = None
        try:
            self._probe(batch)
        except Exception as found:
            error = found
        later = isinstance(error, WholeFails) and may_wait
        if self._groups is not None:
            worst = torch.tensor([float(error is not None and not later), float(later)])
            worst = worst.to(device_of(self.model))
            dist.all_reduce(worst, dist.ReduceOp.MAX)
            later = later or (error is None and bool(worst[1]))
            if worst[0] and (error is None or later):
                error, later = _elsewhere(self.inner), False
        self._untried = batch if later else None
        if error is not None and not later:
            raise error
        self.check = later

    def _places_of_axis(self, batch: Mapping[str, Any]) -> int:
        return self._totals(self._tensors(batch))[self.axis]

    def _probe(self, batch: Mapping[str, Any]) -> None:
        """:func:`probe_axes` on two samples; on all where something may count them."""
        inputs = {
            name: value
            for name, value in batch.items()
            if name != self._label_name or name in self._takes
        }
        others = [value for name, value in inputs.items() if name not in self.inputs]
        if not any(isinstance(x, torch.Tensor) or type(x) is int for x in others):
            for name, value in self._tensors(inputs).items():
                at = self._at(self.inputs[name])
                inputs[name] = value if at is None else value.narrow(at, 0, min(2, value.shape[at]))
        totals = self._totals(self._tensors(inputs))
        samples = self._samples(totals)

        def placed(shards: AxisShards) -> Mapping[str, Any]:
            shards.samples = (0, samples, samples)
            return self._on(shards, inputs)

        suspects = [
            name
            for name, x in _all_tensors(inputs).items()
            if name not in self.inputs and totals[self.axis] in x.shape
        ]
        self._alike = probe_axes(self._manager, inputs, totals, placed, suspects=suspects)

    def _local_labels(self, values: Mapping[str, Any], shards: AxisShards) -> torch.Tensor | None:
        """The labels of this rank's places; their dims are those of the first input with axes."""
        labels = values.get(self._label_name)
        if labels is None or self._label_name in self.inputs or self._main is None:
            return None if labels is None else labels
        return self.local(labels, str(self.inputs[self._main]))

    def groups_for(self, batch: Mapping[str, Any], ranks: Members) -> list[Members]:
        """List the groups in which ranks work on a batch.

        Args:
            batch: Inputs of the model by name.
            ranks: The ranks that share it.

        Returns:
            The ranks of each group.

        Raises:
            InfeasiblePlan: Where there are more ranks than samples and places together.
        """
        parts = self._parts(self._totals(self._tensors(batch)), len(ranks))
        return axis_groups(ranks, len(ranks) // parts)

    def most_ranks(self, batch: Mapping[str, Any], ranks: int) -> int:
        """How many ranks a batch can be spread over: an image has one frame.

        Args:
            batch: Inputs of the model by name.
            ranks: The ranks that are there.

        Returns:
            A number of at most ``ranks``.
        """
        totals = self._totals(self._tensors(batch))
        for count in range(ranks, 1, -1):
            try:
                self._parts(totals, count)
            except InfeasiblePlan:
                continue
            return count
        return 1

    def places(self, sample: Mapping[str, Any]) -> int:
        """Count the places of all axes in a sample, or of those that its inputs tell.

        Args:
            sample: Inputs of the model by name.

        Returns:
            The product of the places of the axes.
        """
        totals = self._totals(self._tensors(sample))
        return math.prod(n for name, n in totals.items() if name in self.axes)

    def _tokens(self, shards: AxisShards) -> int:
        """The places of all axes and samples on this rank."""
        here = shards.here()
        return math.prod(n for name, n in here.items() if name not in shards.beside)

    def local(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """Cut a tensor that every rank holds whole, such as a target, along its samples and the
        axis that is in shards now. After a forward it matches the result of that forward.

        Args:
            x: The whole tensor.
            dims: Its dims, such as ``b c t y x``.

        Returns:
            This rank's part.

        Raises:
            SpecError: For dims in which samples have no dim of their own.
        """
        layout, shards = Dims.parse(dims), self._manager.at_work
        if self.batch is not None and self.batch in layout:
            if (self.batch,) not in layout.names:
                raise SpecError("dims", got=dims, wanted=f"a dim of its own for {self.batch}")
            x = x.narrow(layout.names.index((self.batch,)), *shards.samples[:2])
        return shards.local(x, layout)

    def is_sharded(self, dims: str) -> bool:
        """Say whether ranks with the same samples have parts of a tensor now, or have it alike.

        Args:
            dims: Its dims.

        Returns:
            Whether a name among them is sharded over these ranks.
        """
        return bool(self._manager.at_work.sharded_dims(Dims.parse(dims)))

    def collect(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """Put a result together on every rank: a loss of it is ``alike`` on all of them.
        Collective.

        Args:
            x: This rank's part.
            dims: Its dims.

        Returns:
            The whole tensor.
        """
        layout, shards = Dims.parse(dims), self._manager.at_work
        whole = shards.whole(x, layout)
        if shards.across is None or self.batch is None or (self.batch,) not in layout.names:
            return self._marked(whole)
        sizes = split_sizes(shards.samples[2], dist.get_world_size(shards.across))
        at = layout.names.index((self.batch,))
        return self._marked(gather(whole, at, shards.across, sizes=sizes))

    def back(self, out: Any, like: str) -> Any:
        """Put a result on the shards that inputs have. Collective.

        Args:
            out: The result, a tensor or several of which the first counts.
            like: The input whose dims it has.

        Returns:
            The result with the axis of the inputs in shards.

        Raises:
            ModelError: For a result that is no tensor.
        """
        shards = self._manager.at_work
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
        shards = self._manager.shards_of(list(inputs.values()))
        if shards is None:
            raise ModelError(
                "inputs of the model", got="others than were sharded", wanted="what shard() gave"
            )
        if self._untried is not None:
            more = {k: v for k, v in inputs.items() if not isinstance(v, torch.Tensor)}
            self._look_once({**more, **self._untried})
        before = self._manager.spread
        self._manager.take(shards)
        self._manager.spread = True
        try:
            with self._watch.during("forward"):
                out = self._run(inputs)
        finally:
            self._manager.spread = before
        return self._bound(out, self._manager.at_work)

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        """The model's result, compiled where that is asked for and the order of stages is known."""
        if self._compiled is None or not self._manager.routes:
            return self.model(**inputs)
        # Every shape gets its own graph.
        with torch._dynamo.config.patch(  # noqa: SLF001
            recompile_limit=_GRAPHS, accumulated_recompile_limit=_GRAPHS
        ):
            out = self._compiled(**inputs)
        shards = self._manager.at_work
        shards.axis = self._manager.last_axis if shards.group is not None else self.axis
        return out

    def _bound(self, out: Any, shards: AxisShards) -> Any:
        """Have the backward of a result run while the model is spread, on the shards of its
        forward: checkpoints run stages again there."""
        queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001

        def begin(_: Sequence[torch.Tensor]) -> None:
            self._manager.resume(shards, queue)

        values = list(result_tensors(out))
        known = len(self._alike) == len(values)
        flags = self._alike if known else [not x.dim() for x in values]
        for value, alike in zip(values, flags, strict=True):
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)
            own = not value.dim() and (known or shards.across is not None)
            if alike and (own or shards.group is not None):
                self._marked(value, own=own)
        return out

    def _marked(self, x: torch.Tensor, *, own: bool = False) -> torch.Tensor:
        """A tensor that ranks have alike, or the model's ``own`` loss, a mean. Its gradient is
        refused in a backward that counts it for each rank."""

        def meet(_: torch.Tensor) -> None:
            """Refuse a backward that would count the tensor's gradient once for every rank."""
            if self._refuses or (own and self._refuses_own):
                raise ModelError(
                    "loss that the model makes of its samples" if own else "loss of what is alike",
                    got="a backward that counts it for every rank",
                    wanted="run.backward(loss * run.share)" if own else "alike=True",
                    hint="a mean over samples is loss * run.share; what ranks have alike is "
                    "run.backward(loss, alike=True)",
                )

        if x.requires_grad and self.ranks > 1:
            x.register_hook(meet)
            self._may_meet = True
        return x

    def _is_alike(self, loss: torch.Tensor) -> bool:
        """Whether ranks that share samples, or all that have others, have the same number. It is
        asked for where a backward may meet what is alike. Collective among them."""
        shards = self._manager.at_work
        group = shards.group if shards.group is not None else shards.across
        if group is None or loss.dim():
            return False
        value = loss.detach().double()
        extremes = torch.stack([value, -value])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
        largest, smallest = float(extremes[0]), -float(extremes[1])
        rounding = 16 * torch.finfo(loss.dtype).eps * max(abs(largest), abs(smallest))
        return largest - smallest <= rounding and largest != 0

    def compile(self, *, backend: str = "inductor", **options: Any) -> None:
        """Run the model as one graph, switches and all, once a first forward has shown the order of
        its stages; one graph for each shape of a batch.

        Args:
            backend: The backend of torch.compile.
            options: Other options of torch.compile.

        Raises:
            ModelError: For models under DDP and FSDP2 and for TimeSformer, whose blocks can be
                compiled instead; and in a later forward for stages that run twice or mix all axes.
        """
        if is_wrapped(self.model) or not self.traceable:
            raise ModelError(
                f"compiled {type(self.inner).__name__}",
                got="hooks that break its graph",
                wanted="a model alone, whose stages do all that is switched",
                hint="compile its blocks: block.compile()",
            )
        self._manager.traced = True
        self._compiled = torch.compile(self.model, backend=backend, fullgraph=True, **options)

    def backward(self, loss: torch.Tensor, *, alike: bool = False) -> None:
        """Run the backward of this rank's part of a loss and add its gradients.

        Args:
            loss: A single number.
            alike: Whether all ranks have the same loss, as that of a collected result: it counts
                once.

        Raises:
            ModelError: For a loss of what ranks have alike that is the same number on all of them,
                where it is not said to be alike.
        """
        shards = self._manager.at_work
        axis = shards.axis
        self._backwards.add(alike)
        if self._may_meet:
            parts = shards.samples[2] / max(1, shards.samples[1])
            self._refuses_own = not alike or parts * shards.ranks != len(shards.members)
            self._refuses = not alike and self._is_alike(loss)
        try:
            with self._watch.during("backward"):
                summed_loss(self.model, loss / len(shards.members) if alike else loss).backward()
        finally:
            self._refuses = self._refuses_own = False
            self._manager.end_backward()
            self._manager.shards, shards.axis = shards, axis  # checkpoints go back to others

    def add_up(self, loss: torch.Tensor, *, alike: bool = False) -> torch.Tensor:
        """Sum the loss over all ranks, and gradients too, where no wrapper does; call it after the
        last :meth:`backward` of a step. Collective.

        Args:
            loss: What was given to :meth:`backward`.
            alike: As for :meth:`backward`.

        Returns:
            The loss of all ranks together, of all replicas.

        Raises:
            ModelError: Where every backward since the last sum was given another ``alike``: the
                loss would be that of all ranks times their number, or a part of it.
        """
        before = frozenset(self._backwards)
        self._backwards.clear()
        # Without a backward before, or after some of either kind, the caller knows what adds up.
        if self.ranks > 1 and before == {not alike}:
            raise ModelError(
                "add_up of a loss",
                got=f"alike={alike}",
                wanted=f"alike={not alike}, as its backward was given",
                hint="what all ranks have alike counts once: run.add_up(loss, alike=True)",
            )
        # A loss that all ranks of a replica have counts once; losses of replicas add up.
        sharers = len(self._manager.at_work.members) if alike and self.ranks > 1 else 1
        whole = loss.detach().clone() / sharers
        if self._groups is not None:
            with self._watch.during("adding up gradients"):
                Transfer(dist.all_reduce(whole, async_op=True), None, whole).wait()
                if not is_wrapped(self.model):
                    add_up(self.model.parameters())
        return whole

    def join(self, groups: Groups, *, label_name: str) -> None:
        """Work in a training loop, with its groups. Items have the model's inputs without the dim
        of samples, and what they are compared with under ``label_name``, of the dims of the first
        input with axes.

        Raises:
            SpecError: For a model whose samples have no name.
            ModelError: For a model none of whose inputs has places of its axis.
        """
        if self.batch is None:
            raise SpecError(
                "adapted model in a loop",
                got="no name of its samples",
                wanted="one",
                hint="hr.adapt(model, ..., batch='b')",
            )
        if self._main is None:
            raise ModelError(
                f"loop over {type(self.inner).__name__}",
                got="no input with places of its axis",
                wanted=f"one with a dim {self.axis}",
                hint="use hr.adapt and a loop of your own",
            )
        self._given, self._met, self._label_name = groups, True, label_name

    def read(self, item: Any, what: str) -> Item:
        """Make a sample of an item: its tensors, with a dim of one sample where inputs have one."""
        if not isinstance(item, Mapping) or self._main not in item:
            got = ", ".join(map(str, item)) if isinstance(item, Mapping) else type(item).__name__
            raise DataError(what, got=got or "nothing", wanted=f"a field {self._main!r}")
        found = {
            name: torch.as_tensor(value)
            for name, value in item.items()
            if is_numbers(value) or isinstance(value, int | float)
        }
        return {name: self._with_batch_dim(name, value, what) for name, value in found.items()}

    def forget_fields(self) -> None:
        """Do nothing: samples may have any fields."""

    def length(self, sample: Item) -> int:
        """Count the places of a sample."""
        return self.places(sample)

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Try the model on shards of a sample, grown where it has few places, and :meth:`install`;
        returns what takes that back. Raises ModelError for a model that cannot be run on them."""
        grown = {name: value.to(device) for name, value in self._grown(sample).items()}
        given = {name: value for name, value in grown.items() if name in self._takes}
        self._look_once(given, may_wait=True)
        self._untried = None  # it is called by others
        if self._first_step and self.most_ranks(given, self.ranks) == self.ranks:
            self.shard(given)
        installed = self.install()

        def end() -> None:
            self.release()
            installed()

        return end

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """Put samples of one shape together into one pack each."""
        alike: dict[Any, list[Item]] = {}
        for sample in samples:
            alike.setdefault(self._kind(sample), []).append(sample)
        return [self._pack(some) for some in alike.values()]

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """Make a pack of samples of one shape: each axis that inputs show is shortened alike."""
        total = sum(lengths)
        count = max(len(lengths), -(-total // document))
        one = self._shrunk(sample, total / count, ranks)
        return self._pack([one] * count)

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """Choose as many ranks as samples and axes have places for."""
        return ranks[: self.most_ranks(pack.values, len(ranks))]

    def groups_of(self, ranks: Members) -> list[Members]:
        """List the groups of axes and those across them, however samples are split."""
        sizes = [each for each in range(1, len(ranks) + 1) if len(ranks) % each == 0]
        return sorted({some for each in sizes for some in axis_groups(ranks, each)})

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make groups of ranks. Collective: every rank of the world calls it alike."""
        if self._groups is not None:
            self._groups.prepare(groups)

    def number(self, outputs: Any) -> torch.Tensor:
        """The mean square of the model's result."""
        return logits_of(getattr(outputs, "sample", outputs)).float().square().mean()

    def order(self, exchange: str) -> TokenOrder:
        """``natural``, as each rank has one run of places."""
        return "natural"

    def levels(self, layers: Sequence[torch.nn.Module]) -> Levels | None:
        """Recompute of whole stages, in models whose layers each have a flag for it; else None."""
        if not all("gradient_checkpointing" in vars(layer) for layer in layers):
            return None

        def choose(levels: Sequence[Recompute]) -> None:
            for layer, level in zip(layers, chain(levels, repeat("none")), strict=False):
                vars(layer)["gradient_checkpointing"] = level != "none"

        entries = max(1, self.stages_in(layers[0]))
        return Levels(choose=choose, known=("full",), entries=entries)

    def stages_in(self, module: torch.nn.Module) -> int:
        """Count the modules of stages within a module.

        Args:
            module: The module, which may be one itself.

        Returns:
            How many there are.
        """
        return sum(inner in self._manager.stages for inner in module.modules())

    def forget(self) -> None:
        """Drop what was learnt of stages, where a forward may have failed on some ranks."""
        self._manager.forget()

    def detach(self) -> None:
        """Remove all hooks from the model; it cannot be spread any more."""
        self._watch.close()
        self._manager.close()

    def _tensors(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {name: batch[name] for name in self.inputs if batch.get(name) is not None}

    def _totals(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The places of every name in the inputs. Raises DataError where they differ."""
        found: dict[str, int] = {}
        for name, x in tensors.items():
            dims = self._dims_of(name, x)
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
        wanted = {*self._manager.axes, *self._manager.beside, self.batch}
        return {name: n for name, n in found.items() if name in wanted}

    def _dims_of(self, name: str, x: torch.Tensor) -> Dims:
        """The dims of an input, of two that it may have those of as many as it has."""
        other = self._other_dims.get(name)
        fits = other is not None and x.dim() == len(other.names)
        return other if other is not None and fits else self.inputs[name]

    def _require_declared(self, batch: Mapping[str, Any], samples: int) -> None:
        """Raise DataError for tensors without declared dims that may have a dim of samples, where
        ranks have different samples."""
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
        """Parts of the samples that ``ranks`` work on apart: the axes that will be in shards have
        places for all ranks of a part."""
        places = self._manager.fewest(totals)
        return split_batch(self._samples(totals), totals[self.axis], ranks, fewest=places)

    def _with_batch_dim(self, name: str, value: torch.Tensor, what: str) -> torch.Tensor:
        """A field of one sample with the dim of samples, of size 1; raises DataError where its dims
        are not the declared ones."""
        dims = self._dims(name)
        if dims is None:
            return value[None]
        at = self._at(dims)
        if value.dim() != len(dims.names) - (at is not None):
            raise DataError(
                f"{name} of {what}", got=list(value.shape), wanted=f"dims {dims}, of one sample"
            )
        return value if at is None else value.unsqueeze(at)

    def _dims(self, name: str) -> Dims | None:
        """The dims of a field; labels without dims of their own have those of the main input."""
        if name == self._label_name and self._main is not None and name not in self.inputs:
            name = self._main
        return self.inputs.get(name)

    def _at(self, dims: Dims) -> int | None:
        """The dim along which the samples of a tensor stand."""
        names = (self.batch or "",)
        return dims.names.index(names) if names in dims.names else None

    def _sample_count(self, values: Mapping[str, torch.Tensor]) -> int:
        """The samples of a batch; 1 where no dim counts them."""
        if self._main is None or self._main not in values:
            return 1
        at = self._at(self.inputs[self._main])
        return 1 if at is None else int(values[self._main].shape[at])

    def _kind(self, sample: Item) -> Any:
        """A key that is equal for samples of one pack: their shapes, and the values of inputs that
        have no dim of samples."""
        found: list[Any] = []
        for name, value in sorted(sample.items()):
            dims = self._dims(name)
            alone = dims is not None and self._at(dims) is None
            found.append((name, value.shape, tuple(value.flatten().tolist()) if alone else None))
        return tuple(found)

    def _pack(self, samples: Sequence[Item]) -> Pack:
        """The samples as one batch, joined along the dim of samples; each place of each sample
        counts as a token and as a target."""
        values = dict[str, torch.Tensor]()
        for name, value in samples[0].items():
            dims = self._dims(name)
            at = 0 if dims is None else self._at(dims)
            values[name] = value if at is None else torch.cat([s[name] for s in samples], dim=at)
        places = self.length(samples[0]) * len(samples)
        return Pack(values=values, tokens=places, targets=places)

    def _shrunk(self, sample: Item, places: float, ranks: int) -> Item:
        """A sample cut to about ``places`` places, with at least one for each rank on every
        axis."""
        sizes = dict[str, int]()
        for name, dims in self.inputs.items():
            for at, names in enumerate(dims.names):
                if len(names) == 1 and names[0] in self.axes and name in sample:
                    sizes[names[0]] = sample[name].shape[at]
        share = (places / self.length(sample)) ** (1 / len(sizes))
        wanted = {name: max(ranks, round(n * share)) for name, n in sizes.items()}
        return {name: self._cut(name, value, wanted) for name, value in sample.items()}

    def _grown(self, sample: Item) -> Item:
        """A sample of several places on every axis that inputs show."""
        shown = self._totals(self._tensors(sample))
        wanted = {name: max(_FEWEST, n) for name, n in shown.items() if name in self.axes}
        return {name: self._cut(name, value, wanted) for name, value in sample.items()}

    def _cut(self, name: str, value: torch.Tensor, wanted: Mapping[str, int]) -> torch.Tensor:
        """A field cut, or repeated and cut, to the number of places that ``wanted`` has for each of
        its axes."""
        dims = self._dims(name)
        for at, names in enumerate(dims.names if dims is not None else ()):
            count = wanted.get(names[0]) if len(names) == 1 else None
            if count is not None:
                times = [1] * value.dim()
                times[at] = -(-count // value.shape[at])
                value = value.repeat(times).narrow(at, 0, count)
        return value


def _all_tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _elsewhere(model: torch.nn.Module) -> ModelError:
    """The error for ranks on which the comparison was right, where another rank found a
    difference."""
    return ModelError(
        f"{type(model).__name__} on shards of its axes",
        got="another result than on the whole, on another rank",
        wanted="the same model and batch on all ranks",
    )


def axis_groups(ranks: Members, each: int) -> list[Members]:
    """Blocks of ``each`` consecutive ranks, and the groups of ranks that have the same index in all
    blocks."""
    blocks = [ranks[at : at + each] for at in range(0, len(ranks), each)]
    return [*blocks, *(ranks[at::each] for at in range(each))]
