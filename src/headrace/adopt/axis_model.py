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

The words used below: the *places* of an axis are its indices (frames of time, say), so their number
is its size. An axis is *in shards* (sharded) when each rank of a group has a run of its places.
What ranks have *alike* is the same on each of them. The model is *spread* while its forwards work
on shards; otherwise it is the user's *plain* one.
"""

from __future__ import annotations

import inspect
import math
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain, product, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from headrace.adopt.alike_guards import AlikeGuards
from headrace.adopt.axis_hooks import HookManager
from headrace.adopt.axis_probe import WholeFails, mixes_batch, probe_axes, refuse_batch_norms
from headrace.adopt.axis_shards import AxisShards, Dims
from headrace.adopt.axis_stages import AxisStage
from headrace.adopt.call_arguments import of_part, plain_arguments
from headrace.adopt.first_step import FirstStep, compare_first_step, ranks_that_add_up
from headrace.adopt.gradients import (
    SummedBackward,
    SummedGradients,
    add_plainly,
    is_wrapped,
    require_made,
)
from headrace.adopt.held_weights import AlikeWeights, require_linear_hooks
from headrace.adopt.labels import logits_of, result_tensors
from headrace.adopt.loss_graph import Parted, PartOf
from headrace.adopt.own_hooks import hook_before
from headrace.adopt.own_losses import OwnLosses
from headrace.adopt.placement import fingerprint, replica_blocks
from headrace.adopt.replaced_calls import compiled_within
from headrace.adopt.samples import numbers_of
from headrace.adopt.spread_model import BatchPart, Item, Levels, Pack, Watcher
from headrace.comm.collectives import agree, gather_floats
from headrace.comm.loop_watch import CallWatch
from headrace.comm.mesh import Groups, device_of, groups_here
from headrace.comm.waiting import Transfer
from headrace.errors import DataError, InfeasiblePlan, ModelError, SpecError
from headrace.layouts.partition import split_sizes
from headrace.ops.fused import to_device
from headrace.ops.switch import gather
from headrace.spec.axes import AxisMove, split_batch
from headrace.spec.layer_plan import Recompute
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder
from headrace.units import bytes_text

__all__ = ["AxisModel", "axis_groups"]

_GRAPHS = 1 << 16
"""Graphs that a compiler may make of one model before it gives up."""

_FACTS = (bool, int, float, str)
"""Types of values of a batch, beside tensors and None, that ranks compare."""

_FEWEST = 3
"""Places that a sample on which a model is tried has on every axis, at least."""

Sizes = Callable[[Mapping[str, torch.Tensor]], Mapping[str, int]] | None
"""A function from the whole inputs by name to the sizes of axes by name."""


class AxisModel:
    """A model that is spread by its axes; see :class:`~headrace.adopt.spread_model.SpreadModel`.

    Args:
        model: The model, alone or under DDP or FSDP2.
        stages: The modules in which places of an axis see each other.
        inputs: The dims of its inputs with places of axes, by name.
        axis: The axis that is in shards when a forward begins, and where no stage needs another.
        batch: The name of the axis of samples; groups of ranks may work on different samples.
        sizes: A function from the inputs by name to the sizes, by name, of axes that no dim of an
            input shows, such as the patches that the model makes of a frame.
        counts: For each input that is a whole number of places, by name, the axis whose places it
            counts; the model is given the number of places on this rank instead.
        switched: Further axes that hooks of an adapter put in shards.
        groups: The groups of this rank; those of the world when left out.
        check: Whether the model is tried on shards of its first batch before it is run on any;
            ``"first step"`` compares gradients of all ranks with the plain model's, too.
        compare: Whether ranks compare the inputs of each batch.
        other_dims: For inputs that may come with another number of dims, by name, these dims.

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
        """Hook ``model``; it stays the user's plain model until a batch is sharded and run."""
        self.model = model
        self._compare = compare
        self._other_dims = {name: Dims.parse(x) for name, x in (other_dims or {}).items()}
        self.counts = dict(counts or {})
        self.inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.inputs = {name: Dims.parse(text) for name, text in inputs.items()}
        self.axis, self.batch = axis, batch
        self._sizes = sizes
        # Whether to try the model, and in which modes (whether training) that was done.
        self._checks, self._probed_modes = bool(check), set[bool]()
        self._first_step = check == "first step"
        # A batch on which the plain model raised in ``shard``: the probe is tried again on it in
        # the first call, which may have what was missing.
        self._unprobed_batch: Mapping[str, Any] | None = None
        # From the probe, by mode (whether training), for each tensor that the model returns:
        # whether every rank has it whole.
        self._alike_by_mode = dict[bool, tuple[bool, ...]]()
        self._guards = AlikeGuards()  # on tensors that ranks have alike
        self._alike_of_backwards = set[bool]()  # given to backwards since the last add_up
        if sizes is None and not any(axis in dims for dims in self.inputs.values()):
            raise SpecError("axis of the inputs", got=axis, wanted="one of an input's dims")
        self._known_groups, self._groups_are_known = groups, groups is not None
        self._manager = HookManager(self.inner, stages, axis)
        self._manager.switched = tuple(switched)
        self.traceable = True
        self._compiled: Callable[..., Any] | None = None
        self._label_name = "labels"
        arguments = inspect.signature(self.inner.forward).parameters
        takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in arguments.values())
        # Declared inputs that the forward does not take are cut for the loss.
        self._argument_names = {*arguments, *(self.inputs if takes_any else ())}
        inputs_with_axis = [name for name, dims in self.inputs.items() if axis in dims]
        taken = [name for name in inputs_with_axis if name in self._argument_names]
        self._main_input = next(iter((*taken, *inputs_with_axis)), None)
        self._watch = CallWatch()
        self._hooks_seen = dict[int, Any]()  # hooks on gradients that were looked at, by id
        self._own_losses = OwnLosses(
            model,
            "error.square().sum() / target.numel() of the whole target; a mean over as many places "
            "on every rank, or over a rank's samples, counts loss * run.share",
        )
        self._watcher: Watcher | None = None  # sees the results of forwards in a loop
        self._summed, self._summed_backward = SummedGradients(model), SummedBackward(model)
        self._alike_weights = AlikeWeights(model)
        self._author_compiles = bool(compiled_within(model))  # inputs of graphs are plain tensors
        weakref.finalize(self, self._watch.close)

    exchanges: tuple[str, ...] = ("dsp",)
    whole = False

    @property
    def check(self) -> bool:
        """Whether the model is still to be tried on shards in its present mode, training or
        evaluation."""
        return self._checks and self.inner.training not in self._probed_modes

    @check.setter
    def check(self, value: bool) -> None:
        self._checks = value

    def install(self) -> Callable[[], None]:
        """Have a call of the model itself, while it is spread, give what a call of this object
        gives, with the result on the shards of the inputs: for loops that call the model. Returns a
        function that undoes this."""

        def begin(*_: Any) -> None:
            """Note that a forward begins, which a graph cannot hold."""
            if self._manager.spread and not torch.compiler.is_compiling():
                self._own_losses.begin()

        def back(_: Any, out: Any) -> Any:
            """Put the result back on the shards of the inputs, and prepare it for a backward."""
            if not self._manager.spread:
                return None
            on_input_shards = self.back(out, str(self._main_input))
            return self._spread_in_backward(on_input_shards, self._manager.at_work)

        removers = ExitStack()
        removers.callback(hook_before(self.inner, begin, named=False))
        removers.callback(self._manager.on(self.inner, after=back))
        return removers.close

    def on(
        self,
        module: torch.nn.Module,
        before: Callable[[Any, dict[str, Any]], Any] | None = None,
        after: Callable[[Any, Any], Any] | None = None,
        *,
        always: bool = False,
    ) -> Callable[[], None]:
        """Change what a module of the model is given or returns while the model is spread, such as
        a module that makes positions from the number of places that it sees.

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
        """Count the places of an axis on all ranks that share this rank's samples.

        Args:
            axis: Its name.

        Returns:
            The size of the axis before it was sharded.

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
        """The model, its sharded axis, and what this rank sent in the last forward, in words."""
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
        if not self._groups_are_known:
            self._known_groups, self._groups_are_known = groups_here(device_of(self.model)), True
        return self._known_groups

    @property
    def ranks(self) -> int:
        """The number of all ranks of the world."""
        return self._groups.ranks if self._groups is not None else 1

    @property
    def mates(self) -> int:
        """The number of ranks that work on this rank's samples. Losses of ranks are summed, so a
        loss that these ranks compute alike has to be divided by it. Who reads it, or :attr:`share`,
        is taken to do so: the next backward refuses no term for being alike."""
        self._guards.divides = True
        return self._manager.at_work.ranks

    @property
    def share(self) -> float:
        """The weight of a mean over this rank's samples, such as a model's own loss, in the mean
        over the whole batch: this rank's share of the samples, divided by the number of ranks that
        have the same ones. Use it as ``run.backward(loss * run.share)``."""
        _, own_samples, all_samples = self._manager.at_work.samples
        return own_samples / all_samples / self.mates

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
        places = self.places(batch) * self._sample_count(batch)  # later those of all replicas
        groups = self._groups
        members = blocks[0] if groups is None else next(b for b in blocks if groups.rank in b)
        needed = self.groups_for(batch, members)
        self._watch.count()
        with self._watch.during("sharding"):
            if groups is not None:
                self._watch.begin(groups)
                self._alike_weights.require(groups, warnings.warn)
                # Replicas may split their samples differently, and all ranks make the same groups.
                any_needed = [some for block in blocks for some in self.groups_of(block)]
                groups.prepare(needed if replicas == 1 else any_needed)
                if self._compare:
                    replica = groups.world if replicas == 1 else groups.get(members)
                    agree("inputs", _fingerprint(batch, needed), replica)
                if replicas > 1:
                    places_by_rank = gather_floats([float(places)], groups.world)
                    places = round(sum(places_by_rank[block[0]][0] for block in blocks))
            self._probe_once(batch, may_postpone=True)
        shards, inputs = self._place_batch(batch, members, None)
        labels = self._local_labels(inputs, shards)
        if self._label_name not in self._argument_names:
            inputs.pop(self._label_name, None)
        rest = {name: inputs.pop(name) for name in [*inputs] if self._is_for_loss(name)}
        if self._first_step and replicas == 1 and self._unprobed_batch is None:
            self._first_step = False
            self._compare_whole(inputs, {k: v for k, v in batch.items() if k in inputs})
            # The comparison has run forwards on these shards: the caller gets fresh ones.
            shards, inputs = self._place_batch({k: batch[k] for k in inputs}, members, None)
        return BatchPart(
            inputs=inputs,
            labels=labels,
            group=shards.group,
            targets=places,
            tokens=self._local_places(shards),
            by_places=True,
            placed=shards,
            rest=rest,
        )

    def _is_for_loss(self, name: str) -> bool:
        """Whether a field has declared dims but is no argument of the model: it is cut for the loss
        alone."""
        return name in self.inputs and name not in self._argument_names

    def _compare_whole(self, local: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        """Compare the spread model on this rank's ``local`` inputs with the plain one on the
        ``whole`` batch, by the sum of squares of all results as the loss, and its gradients.
        Collective. Raises ModelError where they differ."""

        def spread() -> torch.Tensor:
            """The loss of all ranks, [], after its backward."""
            values = list(result_tensors(self(**local)))
            alike_here = self._alike
            known = alike_here if len(alike_here) == len(values) else [False] * len(values)
            # What ranks with the same samples have alike counts once in the sum over ranks.
            squares = [
                x.square().sum() / (self.mates if alike else 1)
                for x, alike in zip(values, known, strict=True)
            ]
            loss = torch.stack(squares).sum()
            self.backward(loss)
            return self.add_up(loss)

        def plain() -> torch.Tensor:
            """The loss of the plain model on this rank alone, [], after its backward."""
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
        """This rank's part of a batch, as :meth:`shard` gives it, but without communication: it is
        not checked that all ``ranks`` have the same batch, and their process groups
        (:meth:`groups_for`) must exist in ``groups`` already. Fields that the model does not take
        are in ``rest``. Of values in host memory only this rank's part is copied to the model's
        device, asynchronously."""
        declared = {name: value for name, value in values.items() if name in self.inputs}
        others = {name: value for name, value in values.items() if name not in declared}
        shards, placed = self._place_batch(declared, ranks, groups)
        device = device_of(self.model)
        local = {
            name: to_device(self._own_samples(name, value, shards), device)
            for name, value in {**placed, **others}.items()
        }
        taken = self._argument_names
        return BatchPart(
            inputs={name: value for name, value in local.items() if name in taken},
            rest={
                name: value
                for name, value in local.items()
                if name not in taken and name != self._label_name
            },
            labels=self._local_labels(local, shards),
            group=shards.group,
            targets=targets or 0,
            tokens=self._local_places(shards),
            by_places=True,
            placed=shards,
        )

    def _own_samples(self, name: str, value: torch.Tensor, shards: AxisShards) -> torch.Tensor:
        """A field without declared dims, cut to the samples of ``shards`` where its first dim has
        as many entries as the batch has samples; any other field as it is."""
        first, count, all_samples = shards.samples
        if self._dims(name) is None and value.dim() and len(value) == all_samples:
            return value.narrow(0, first, count)
        return value

    def take(self, part: BatchPart) -> None:
        """Spread the model: its forwards work on the shards of ``part`` until :meth:`release`. What
        autocast keeps may be of weights as they were, or as FSDP2 has freed them."""
        torch.clear_autocast_cache()
        self._manager.take(part.placed)
        self._guards.divides = False
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
        """Cut a batch, which all ``ranks`` share, to this rank: first samples are divided among
        groups of consecutive ranks, then each group shards the axis. Returns (this rank's shards,
        the batch with its inputs cut to them); the model's next forward runs on these shards. The
        process groups are found in ``groups``, or in those of this model where it is None. Raises
        InfeasiblePlan and DataError."""
        if isinstance(self.model, FSDPModule):
            add_plainly(self.model)  # FSDP2 is to sum gradients of ranks, as losses are summed
        tensors, groups = self._declared_inputs(batch), groups or self._groups
        totals = self._totals(tensors)
        samples = self._samples_of(totals)
        parts = self._parts_for(totals, len(ranks))
        group_ranks = len(ranks) // parts  # ranks of each group, which has the same samples
        if parts > 1:
            self._require_declared(batch, samples)
        own_index = 0 if groups is None else ranks.index(groups.rank)
        own_part, index_in_group = divmod(own_index, group_ranks)
        samples_by_part = split_sizes(samples, parts)
        first_sample, own_samples = sum(samples_by_part[:own_part]), samples_by_part[own_part]
        if self.batch is not None:
            totals[self.batch] = own_samples
        first_rank = own_part * group_ranks
        own_group = ranks[first_rank : first_rank + group_ranks]
        shards = AxisShards(
            axis=self.axis,
            totals=totals,
            samples=(first_sample, own_samples, samples),
            group=groups.get(own_group) if groups else None,
            across=groups.get(ranks[index_in_group::group_ranks]) if groups else None,
            members=ranks,
            beside=self._manager.beside,
        )
        return shards, self._cut_inputs(shards, batch)

    def _cut_inputs(self, shards: AxisShards, batch: Mapping[str, Any]) -> dict[str, Any]:
        """A batch with its inputs cut to ``shards``, and its counts of places set to those of this
        rank. The model works on these shards from here on; a later forward recognises them by the
        tensors that are returned here."""
        self._manager.take(shards)
        cut = dict(batch)
        for name, value in self._declared_inputs(batch).items():
            dims = self._dims_of(name, value)
            part = self.local(value, str(dims))
            # A new tensor even where nothing was cut off: the user's own input must not be taken
            # for one that was sharded.
            part = part.view_as(part) if part is value else part
            marks = self.ranks > 1 and not self._author_compiles
            cut[name] = of_part(part, self.model) if marks and self.axis in dims else part
            self._manager.know(cut[name], shards)
        for name, axis in self.counts.items():
            if type(cut.get(name)) is int:
                cut[name] = self._manager.at_work.counted(axis)
        return cut

    def _probe_once(
        self, batch: Mapping[str, Any], *, may_postpone: bool = False, training: bool = False
    ) -> None:
        """Try the model on shards of a batch, unless that was done, is not wanted, or the axis has
        too few places for two ranks. Raises ModelError, on all ranks, where results differ on any.
        Collective.

        With ``may_postpone``, where the plain model raises, the probe is postponed: the batch is
        kept for the first call of the model, which may have the inputs that were missing here, or
        another dtype (autocast). It is tried in evaluation and, where it is in training now or
        ``training`` asks for it, in training."""
        refuse_batch_norms(self.inner)
        if not self.check or self._places_of_axis(batch) < 2:
            return
        modes = {False, training or self.inner.training}
        error: Exception | None = None
        try:
            self._run_probe(batch, training=True in modes)
        except Exception as found:
            error = found
        postponed = isinstance(error, WholeFails) and may_postpone
        if self._groups is not None:
            # All ranks end alike: an error on any of them goes before a postponed probe on any.
            has_error = error is not None and not postponed
            on_any_rank = torch.tensor([float(has_error), float(postponed)])
            dist.all_reduce(on_any_rank, dist.ReduceOp.MAX, group=self._groups.world)
            postponed = postponed or (error is None and bool(on_any_rank[1]))
            if on_any_rank[0] and (error is None or postponed):
                error, postponed = _elsewhere(self.inner), False
        self._unprobed_batch = batch if postponed else None
        if error is not None and not postponed:
            raise error
        if not postponed:
            self._probed_modes |= modes

    def _places_of_axis(self, batch: Mapping[str, Any]) -> int:
        """The size, in a whole batch, of the axis that is sharded at first."""
        return self._totals(self._declared_inputs(batch))[self.axis]

    @property
    def _alike(self) -> tuple[bool, ...]:
        """For each tensor that the model returns in its present mode, whether every rank has it
        whole; empty where the model was not tried."""
        return self._alike_by_mode.get(self.inner.training, ())

    def _run_probe(self, batch: Mapping[str, Any], *, training: bool) -> None:
        """Try the model on shards of a batch in this process, by :func:`probe_axes`, and record
        which results are alike on all ranks. To save time the batch is cut to two samples, unless
        it has a number or a tensor without declared dims, as that may count samples or have a value
        for each. Raises ModelError."""
        inputs = {
            name: value
            for name, value in batch.items()
            if (name != self._label_name or name in self._argument_names)
            and not self._is_for_loss(name)
        }
        others = [value for name, value in inputs.items() if name not in self.inputs]
        if not any(isinstance(x, torch.Tensor) or type(x) is int for x in others):
            for name, value in self._declared_inputs(inputs).items():
                dim = self._sample_dim(self.inputs[name])
                if dim is not None:
                    inputs[name] = value.narrow(dim, 0, min(2, value.shape[dim]))
        totals = self._totals(self._declared_inputs(inputs))
        samples = self._samples_of(totals)

        def placed(shards: AxisShards) -> Mapping[str, Any]:
            """The inputs on shards of all samples."""
            shards.samples = (0, samples, samples)
            return self._cut_inputs(shards, inputs)

        # They may have places of the axis that nobody declared; an error will name them.
        suspects = [
            name
            for name, x in _all_tensors(inputs).items()
            if name not in self.inputs and totals[self.axis] in x.shape
        ]
        self._alike_by_mode |= probe_axes(
            self._manager, inputs, totals, placed, training=training, suspects=suspects
        )

    def _local_labels(self, values: Mapping[str, Any], shards: AxisShards) -> torch.Tensor | None:
        """This rank's part of the labels among ``values``; None where there are none. Labels with
        declared dims were cut with the inputs; others are taken to have the dims of the main input,
        and are cut here."""
        labels = values.get(self._label_name)
        if labels is None or self._label_name in self.inputs or self._main_input is None:
            return labels
        return self.local(labels, str(self.inputs[self._main_input]))

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
        parts = self._parts_for(self._totals(self._declared_inputs(batch)), len(ranks))
        return axis_groups(ranks, len(ranks) // parts)

    def most_ranks(self, batch: Mapping[str, Any], ranks: int) -> int:
        """How many ranks a batch can be spread over: fewer than there are where its axes are short
        and its samples few, as for one image, which has one frame.

        Args:
            batch: Inputs of the model by name.
            ranks: The ranks that are there.

        Returns:
            A number of at most ``ranks``.
        """
        totals = self._totals(self._declared_inputs(batch))
        for count in range(ranks, 1, -1):
            try:
                self._parts_for(totals, count)
            except InfeasiblePlan:
                continue
            return count
        return 1

    def places(self, sample: Mapping[str, Any]) -> int:
        """Count the places of a sample: the product of the sizes of its axes, as far as the inputs
        and ``sizes`` tell them.

        Args:
            sample: Inputs of the model by name.

        Returns:
            The product of the places of the axes.
        """
        totals = self._totals(self._declared_inputs(sample))
        return math.prod(n for name, n in totals.items() if name in self.axes)

    def _local_places(self, shards: AxisShards) -> int:
        """The number of places on this rank: the product of its local sizes of all axes and of its
        number of samples. Sequences beside the axes, such as a text, do not count."""
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
        """Say whether ranks with the same samples have different parts of a tensor now (True), or
        all of them the same one.

        Args:
            dims: Its dims.

        Returns:
            Whether a name among them is sharded over these ranks.
        """
        return bool(self._manager.at_work.sharded_dims(Dims.parse(dims)))

    def collect(self, x: torch.Tensor, dims: str) -> torch.Tensor:
        """Gather a result, so that every rank has the whole of it: places, then samples. A loss of
        it is the same on all ranks, so it is ``run.backward(loss, alike=True)``. Collective.

        Args:
            x: This rank's part.
            dims: Its dims.

        Returns:
            The whole tensor.
        """
        layout, shards = Dims.parse(dims), self._manager.at_work
        whole = shards.whole(x, layout)
        if shards.across is None or self.batch is None or (self.batch,) not in layout.names:
            return self._guarded(whole)
        sizes = split_sizes(shards.samples[2], dist.get_world_size(shards.across))
        sample_dim = layout.names.index((self.batch,))
        return self._guarded(gather(whole, sample_dim, shards.across, sizes=sizes))

    def back(self, out: Any, like: str) -> Any:
        """Switch a result of the model back to shards of the axis that the inputs have in shards.
        Collective.

        Args:
            out: The result: a tensor, or a tuple of which the first tensor is switched.
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
        if self._unprobed_batch is not None:
            # The probe that shard() postponed, with the flags and numbers of this call.
            more = {k: v for k, v in inputs.items() if not isinstance(v, torch.Tensor)}
            self._probe_once({**more, **self._unprobed_batch})
        spread_before = self._manager.spread
        self._manager.take(shards)
        self._manager.spread = True
        try:
            self._own_losses.begin()
            torch.clear_autocast_cache()  # as in take()
            with self._watch.during("forward"):
                out = self._run(inputs)
        finally:
            self._manager.spread = spread_before
        self._summed_backward.require(result_tensors(out))
        return self._spread_in_backward(out, self._manager.at_work)

    def _run(self, inputs: Mapping[str, Any]) -> Any:
        """The model's result, compiled where that is asked for and the order of stages is known."""
        if self._compiled is None or not self._manager.routes:
            return self.model(**inputs)
        _, inputs = plain_arguments((), inputs)
        # Every shape gets its own graph.
        with torch._dynamo.config.patch(  # noqa: SLF001
            recompile_limit=_GRAPHS, accumulated_recompile_limit=_GRAPHS
        ):
            out = self._compiled(**inputs)
        shards = self._manager.at_work
        # Nothing kept track of the sharded axis in a graph: it is the one that was planned.
        shards.axis = self._manager.last_axis if shards.group is not None else self.axis
        return out

    def _spread_in_backward(self, out: Any, shards: AxisShards) -> Any:
        """Make sure that in the backward of a result ``out`` the model is spread on the ``shards``
        of its forward, as activation checkpoints run stages again there; and guard the tensors of
        ``out`` that ranks have alike (:meth:`_guarded`). Returns ``out`` itself."""
        values = list(result_tensors(out))
        was_probed = len(self._alike) == len(values)
        flags = self._alike if was_probed else [True for _ in values]
        for value, alike in zip(values, flags, strict=True):
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(partial(self._manager.resume, shards))
            # Without a probe single numbers are taken to be losses where samples are apart.
            is_own_loss = not value.dim() and (was_probed or shards.across is not None)
            if alike and (is_own_loss or shards.group is not None):
                self._guarded(value, own=is_own_loss, known=was_probed or is_own_loss)
        if self.ranks > 1:
            parts = (
                self._part_of(x, shards, alike) for x, alike in zip(values, flags, strict=True)
            )
            within = self._parts_within(shards)
            self._own_losses.note(zip(values, parts, strict=True), part_of=within)
        if self._watcher is not None:
            self._watcher(values)
        return out

    def _part_of(self, x: torch.Tensor, shards: AxisShards, alike: bool) -> Parted | None:
        """What part of the whole result a result ``x`` of a forward on ``shards`` is, as its shape
        tells; None where ranks have it ``alike``, or it is no tensor of samples."""
        _, own_samples, _ = shards.samples
        if not x.dim() or x.shape[0] != own_samples:
            return None
        if shards.group is None or alike:
            apart = shards.across is not None
            shape = tuple(x.shape)
            return Parted(shape=shape, dims=(0,), word="samples", weighed=True) if apart else None
        sizes = shards.sizes(shards.axis)
        dims = tuple(d for d in range(1, x.dim()) if x.shape[d] == sizes[shards.rank])
        return Parted(
            shape=tuple(x.shape),
            dims=dims,
            word="places",
            known=len(dims) == 1,
            group=_sharers(shards),
            weighed=len(set(sizes)) == 1,
        )

    def _parts_within(self, shards: AxisShards) -> PartOf:
        """What part a tensor of a shape is that a forward on ``shards`` has made: one with the dims
        of an input or of a stage, of which any axis may be sharded."""
        _, own_samples, _ = shards.samples
        apart, sharers = shards.across is not None, _sharers(shards)
        layouts = {*self.inputs.values(), *(x.layout for x in self._manager.stages.values())}
        axes = () if shards.group is None else [x for x in shards.totals if x != self.batch]

        def part_of(shape: tuple[int, ...]) -> Parted | None:
            """The part; None for a tensor of other dims."""
            if shards.group is None:
                samples = apart and shape[:1] == (own_samples,)
                return (
                    Parted(shape=shape, dims=(0,), word="samples", weighed=True)
                    if samples
                    else None
                )
            for layout, axis in product(layouts, axes):
                sizes = shards.sizes(axis)
                here = {**shards.totals, axis: sizes[shards.rank]}
                if axis in layout and layout.fits(shape, here):
                    at = next(at for at, names in enumerate(layout.names) if axis in names)
                    even = len(set(sizes)) == 1
                    return Parted(
                        shape=shape, dims=(at,), word="places", group=sharers, weighed=even
                    )
            return None

        return part_of

    def _guarded(self, x: torch.Tensor, *, own: bool = False, known: bool = True) -> torch.Tensor:
        """Guard a tensor ``x`` that ranks have alike, or of which that is not ``known``
        (:class:`AlikeGuards`). ``own`` says that it is a loss that the model itself returns, a mean
        over samples. Returns ``x``."""
        return self._guards.guard(x, own=own, known=known) if self.ranks > 1 else x

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
            ModelError: For a term of what ranks have alike that every rank adds, where it is not
                said to be alike; gradients are dropped. Ranks compare the gradients of such
                tensors after the first eight backwards, and after those whose number is a power
                of two, as that waits for the device. And for gradients of the step before that are
                still there, summed over ranks, and for a loss that was made of no result.
        """
        require_made(loss, "loss given to run.backward")
        self._summed.require_dropped(self.model)
        shards, guards = self._manager.at_work, self._guards
        axis = shards.axis
        self._alike_of_backwards.add(alike)
        if self.ranks > 1 and not alike:
            self._own_losses.require_sum(loss, weighed=guards.divides)
        elif self.ranks > 1:
            self._own_losses.require_own(loss)
        if guards.made and not guards.divides:
            _, own_samples, all_samples = shards.samples
            parts = all_samples / max(1, own_samples)
            # With ``alike`` the mean of all ranks' means is taken, which is the mean over all
            # samples only where every group of ranks has as many samples as this one.
            guards.refuses_own = not alike or parts * shards.ranks != len(shards.members)
        is_due, counts_often = guards.due() and guards.made and not alike, False
        try:
            with self._watch.during("backward"):
                with guards.noting() if is_due else nullcontext():
                    whole = loss / len(shards.members) if alike else loss
                    self._summed_backward.run(whole)
                if is_due:
                    counts_often = guards.counts_for_every_rank(_sharers(shards))
        finally:
            guards.refuses_own = guards.divides = False
            self._manager.end_backward()
            # Recomputes may have left other shards and another axis.
            self._manager.shards, shards.axis = shards, axis
        self._summed.note_parts(self.model)
        if counts_often:
            for parameter in self.model.parameters():
                parameter.grad = None
            raise ModelError(
                "loss with a term of what ranks have alike",
                got="a backward that counts it for every rank",
                wanted="alike=True, or run.share times the term",
                hint="where ranks have all of the loss alike, as that of a collected result, it is "
                "run.backward(loss, alike=True); beside a sum over this rank's places write "
                "loss + run.share * term, and divide what is a sum over its samples by run.mates",
            )

    def watch(self, watcher: Watcher | None) -> None:
        """Have the results of spread forwards in a loop looked at.

        Args:
            watcher: Is given the tensors among the results of each forward; None ends it.
        """
        self._watcher = watcher

    def checked_backward(self, loss: torch.Tensor, *, weighed: bool) -> ModelError | None:
        """Run the backward of a loss in a loop, and tell what is wrong where its graph shows that
        it is no sum over places, or ranks that share the samples add a term of what they have
        alike. Collective among these ranks.

        Args:
            loss: This rank's part, a single number.
            weighed: Whether terms are weighed by this rank's share of the step.

        Returns:
            The error; None where nothing is wrong.
        """
        shards, error = self._manager.at_work, None
        if self.ranks > 1:
            error = self._own_losses.error(loss, weighed=weighed, alike=not weighed)
        with self._guards.noting(own=shards.group is not None):
            loss.backward()
        if error is not None:
            return error
        if not self._guards.counts_for_every_rank(_sharers(shards)):
            return None
        return ModelError(
            "loss of a micro-batch",
            got="a term of what its ranks have alike, which counts for each of them",
            wanted="a sum over this rank's places",
            hint="of a mean write micro.share * term, of a sum over micro.targets adapted.share * "
            "term, where adapted is what hr.adapt gave",
        )

    def add_up(self, loss: torch.Tensor, *, alike: bool = False) -> torch.Tensor:
        """Sum the loss over all ranks, and gradients too, where no wrapper does; call it after the
        last :meth:`backward` of a step. Without a backward since the last sum gradients stay as
        they are. Collective.

        Args:
            loss: What was given to :meth:`backward`.
            alike: As for :meth:`backward`.

        Returns:
            The loss of all ranks together, of all replicas.

        Raises:
            ModelError: Where every backward since the last sum was given another ``alike``: the
                loss would be that of all ranks times their number, or a part of it.
        """
        given_before = frozenset(self._alike_of_backwards)
        self._alike_of_backwards.clear()
        # Without a backward before, or after some of either kind, the caller knows what adds up.
        if self.ranks > 1 and given_before == {not alike}:
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
                world = self._groups.world
                Transfer(dist.all_reduce(whole, group=world, async_op=True), world, whole).wait()
                require_linear_hooks(self.model, self._hooks_seen)
                self._summed.add_up(self.model, world, self._error_of_sum(loss, alike=alike))
        return whole

    def _error_of_sum(self, loss: torch.Tensor, *, alike: bool) -> ModelError | None:
        """What is wrong on this rank with gradients that are to be summed, of a loss that ranks
        may have ``alike``; None where nothing is."""
        ran, self._summed_backward.ran = self._summed_backward.ran, False
        if self.ranks == 1:
            return None
        error = self._summed_backward.error()
        if error is None and not (ran or alike):
            error = self._own_losses.error_after(loss, weighed=self._guards.divides)
        return error

    def join(self, groups: Groups, *, label_name: str) -> None:
        """Prepare for a training loop that reads samples from a data set: use the process groups of
        the loop, and know which field of a sample has its labels.

        Args:
            groups: The groups of this rank in the loop.
            label_name: The field with the labels (targets) of a sample. Unless ``inputs`` declares
                its dims, it has the dims of the first input that has the sharded axis.

        Raises:
            SpecError: For a model that was adapted without ``batch``, the name of its samples.
            ModelError: For a model none of whose inputs has places of its axis.
        """
        if self.batch is None:
            raise SpecError(
                "adapted model in a loop",
                got="no name of its samples",
                wanted="one",
                hint="hr.adapt(model, ..., batch='b')",
            )
        if self._main_input is None:
            raise ModelError(
                f"loop over {type(self.inner).__name__}",
                got="no input with places of its axis",
                wanted=f"one with a dim {self.axis}",
                hint="use hr.adapt and a loop of your own",
            )
        self._known_groups, self._groups_are_known = groups, True
        self._label_name = label_name

    def read(self, item: Any, what: str, *, labelled: bool = True) -> Item:
        """Make a sample of an item of the data set: its tensors and numbers as tensors, each with a
        dim of samples, of size 1, where inputs have that dim; other fields are left out. Raises
        DataError for an item without the main input, and for other dims; ``what`` is what errors
        call the item. Whether it is ``labelled`` makes no difference here, as labels are read where
        a loss is computed."""
        if not isinstance(item, Mapping) or self._main_input not in item:
            got = ", ".join(map(str, item)) if isinstance(item, Mapping) else type(item).__name__
            raise DataError(what, got=got or "nothing", wanted=f"a field {self._main_input!r}")
        read = {name: numbers_of(value, f"{name} of {what}") for name, value in item.items()}
        return {
            name: self._with_batch_dim(name, value, what)
            for name, value in read.items()
            if value is not None
        }

    def forget_fields(self) -> None:
        """Do nothing: samples may have any fields."""

    def length(self, sample: Item) -> int:
        """The length by which a sample is planned, as every spread model tells it: its places."""
        return self.places(sample)

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Try the model on shards of a sample, and :meth:`install` it for the loop; returns a
        function that undoes the latter. Raises ModelError for a model that cannot be run on
        shards."""
        self._own_losses = OwnLosses(
            self.model,
            "error.square().sum() / micro.targets; a mean over as many places on every rank takes "
            "micro.share * mean",
        )
        grown = {name: value.to(device) for name, value in self._grown(sample).items()}
        inputs = {name: value for name, value in grown.items() if name in self._argument_names}
        # A loop may put the model into training later.
        training = not mixes_batch(self.inner)
        self._probe_once(inputs, may_postpone=True, training=training)
        if self._unprobed_batch is not None:
            # The loop calls the model itself, so nothing would try it; perhaps the sample fits
            # several ranks alone.
            few = self._shrunk(inputs, 1, _FEWEST)
            self._probe_once(few, training=training)
        if self._first_step and self.most_ranks(inputs, self.ranks) == self.ranks:
            self.shard(inputs)  # compares the first step
        installed = self.install()

        def end() -> None:
            self.release()
            installed()

        return end

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """Put samples together into packs, one for all samples of equal shapes."""
        samples_by_key: dict[Any, list[Item]] = {}
        for sample in samples:
            samples_by_key.setdefault(self._pack_key(sample), []).append(sample)
        return [self._pack(some) for some in samples_by_key.values()]

    def few(self, sample: Item) -> int:
        """Count the places of the smallest sample that the model is tried on."""
        return self.length(self._shrunk(sample, 1, _FEWEST))

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """Make a pack to measure the model with: equal copies of one sample, resized so that all
        have about ``sum(lengths)`` places together. There are as many copies as lengths, or more
        where a copy would have more than ``document`` places. ``ranks`` will share the pack."""
        total = sum(lengths)
        count = max(len(lengths), -(-total // document))  # rounded up
        shrunk = self._shrunk(sample, total / count, ranks)
        return self._pack([shrunk] * count)

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """The first of ``ranks``: as many as can share the samples and axes of a pack."""
        return ranks[: self.most_ranks(pack.values, len(ranks))]

    def groups_of(self, ranks: Members) -> list[Members]:
        """List all groups that ``ranks`` may need: for each size of the groups that share a sample,
        which divides the number of ranks, those of :func:`axis_groups`."""
        group_sizes = [each for each in range(1, len(ranks) + 1) if len(ranks) % each == 0]
        return sorted({some for each in group_sizes for some in axis_groups(ranks, each)})

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make groups of ranks. Collective: every rank of the world calls it alike."""
        if self._groups is not None:
            self._groups.prepare(groups)

    def number(self, outputs: Any) -> torch.Tensor:
        """The mean square of the model's result, as a loss to measure a backward with."""
        return logits_of(getattr(outputs, "sample", outputs)).float().square().mean()

    def order(self, exchange: str) -> TokenOrder:
        """``natural``, as each rank has one run of places."""
        return "natural"

    def levels(self, layers: Sequence[torch.nn.Module]) -> Levels | None:
        """The level ``full``, which recomputes a whole layer, for models each of whose layers has a
        flag ``gradient_checkpointing``; else None."""
        if not all("gradient_checkpointing" in vars(layer) for layer in layers):
            return None

        def choose(levels: Sequence[Recompute]) -> None:
            """Set the flag of every layer by its level; layers beyond the levels recompute
            nothing."""
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

    def look_again(self) -> None:
        """Do nothing: stages are named by the user, and hooks are on the modules that he named."""

    def forget(self) -> None:
        """Drop the recorded order of stages, where a forward may have failed on some ranks."""
        self._manager.forget()

    def detach(self) -> None:
        """Remove all hooks from the model; it cannot be spread any more."""
        self._watch.close()
        self._manager.close()

    def _declared_inputs(self, batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The inputs of a batch whose dims are declared, by name; without those that are None."""
        return {name: batch[name] for name in self.inputs if batch.get(name) is not None}

    def _totals(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """The sizes of a batch by name: of the model's axes, of sequences beside them, such as a
        text, and of the samples. ``tensors`` are the whole inputs with declared dims; sizes are
        read from their shapes, and from the user's ``sizes``. Raises DataError where inputs do not
        fit their dims or each other, and where no size of the axis to shard is found."""
        found: dict[str, int] = {}
        for name, x in tensors.items():
            dims = self._dims_of(name, x)
            if x.dim() != len(dims.names):
                raise DataError(f"input {name}", got=list(x.shape), wanted=f"dims {dims}")
            for names, size in zip(dims.names, x.shape, strict=True):
                # A flattened dim, such as (t s), does not tell the sizes of its axes.
                if len(names) == 1 and found.setdefault(names[0], size) != size:
                    raise DataError(
                        f"input {name}",
                        got=f"{size} places of {names[0]}",
                        wanted=f"{found[names[0]]}, as in others",
                    )
        found |= self._sizes(tensors) if self._sizes is not None else {}
        if self.axis not in found:
            raise DataError("inputs", got=", ".join(tensors) or "none", wanted="those with axes")
        # Without dims that nobody shards, such as channels.
        wanted = {*self._manager.axes, *self._manager.beside, self.batch}
        return {name: n for name, n in found.items() if name in wanted}

    def _dims_of(self, name: str, x: torch.Tensor) -> Dims:
        """The dims of an input ``x``: those of ``other_dims`` where their number is that of ``x``,
        else the declared ones."""
        other = self._other_dims.get(name)
        fits = other is not None and x.dim() == len(other.names)
        return other if other is not None and fits else self.inputs[name]

    def _require_declared(self, batch: Mapping[str, Any], samples: int) -> None:
        """Raise DataError for a tensor without declared dims whose first dim is as long as there
        are ``samples``: it may have a dim of samples, and nobody would cut it to those of a
        rank."""
        for name, value in batch.items():
            tensor = isinstance(value, torch.Tensor) and value.dim() > 0
            if name not in self.inputs and tensor and len(value) == samples > 1:
                raise DataError(
                    f"input {name}",
                    got=f"{list(value.shape)} and no dims",
                    wanted=f"its dims, as ranks work on some of {samples} samples",
                    hint=f'hr.adapt(model, inputs={{"{name}": "{self.batch} ...", ...}})',
                )

    def _samples_of(self, totals: Mapping[str, int]) -> int:
        """The number of samples of a batch of these sizes; 1 where samples have no dim."""
        return totals.get(self.batch, 1) if self.batch else 1

    def _parts_for(self, totals: Mapping[str, int], ranks: int) -> int:
        """The number of parts into which to split the samples of a batch among ``ranks``, so that
        every axis that will be sharded has places for all ranks of a part. Raises InfeasiblePlan
        where there is none."""
        fewest = self._manager.fewest(totals)
        return split_batch(self._samples_of(totals), totals[self.axis], ranks, fewest=fewest)

    def _with_batch_dim(self, name: str, value: torch.Tensor, what: str) -> torch.Tensor:
        """A field of one sample with the dim of samples, of size 1; raises DataError where its dims
        are not the declared ones."""
        dims = self._dims(name)
        if dims is None:
            return value[None]
        sample_dim = self._sample_dim(dims)
        if value.dim() != len(dims.names) - (sample_dim is not None):
            raise DataError(
                f"{name} of {what}", got=list(value.shape), wanted=f"dims {dims}, of one sample"
            )
        return value if sample_dim is None else value.unsqueeze(sample_dim)

    def _dims(self, name: str) -> Dims | None:
        """The dims of a field, None where none are declared; labels without dims of their own have
        those of the main input."""
        if name == self._label_name and self._main_input is not None and name not in self.inputs:
            name = self._main_input
        return self.inputs.get(name)

    def _sample_dim(self, dims: Dims) -> int | None:
        """The index of the dim of samples in a tensor of ``dims``; None where it has none."""
        names = (self.batch or "",)
        return dims.names.index(names) if names in dims.names else None

    def _sample_count(self, values: Mapping[str, torch.Tensor]) -> int:
        """The number of samples of a batch, from the main input; 1 where it has no dim of them."""
        if self._main_input is None or self._main_input not in values:
            return 1
        sample_dim = self._sample_dim(self.inputs[self._main_input])
        return 1 if sample_dim is None else int(values[self._main_input].shape[sample_dim])

    def _pack_key(self, sample: Item) -> Any:
        """A key that is equal for samples that may be in one pack: for each field (name, shape, and
        for inputs without a dim of samples, which a pack has once, the values)."""
        key: list[Any] = []
        for name, value in sorted(sample.items()):
            dims = self._dims(name)
            is_shared = dims is not None and self._sample_dim(dims) is None
            key.append((name, value.shape, tuple(value.flatten().tolist()) if is_shared else None))
        return tuple(key)

    def _pack(self, samples: Sequence[Item]) -> Pack:
        """The samples as one batch, joined along the dim of samples; each place of each sample
        counts as a token and as a target."""
        values = dict[str, torch.Tensor]()
        for name, value in samples[0].items():
            dims = self._dims(name)
            dim = 0 if dims is None else self._sample_dim(dims)
            values[name] = value if dim is None else torch.cat([s[name] for s in samples], dim=dim)
        places = self.length(samples[0]) * len(samples)
        return Pack(values=values, tokens=places, targets=places)

    def _shrunk(self, sample: Item, places: float, ranks: int) -> Item:
        """A sample resized to about ``places`` places, by the same factor on each axis that its
        inputs show, with at least one place for each of ``ranks`` on every axis."""
        sizes = dict[str, int]()
        for name, dims in self.inputs.items():
            for at, names in enumerate(dims.names):
                if len(names) == 1 and names[0] in self.axes and name in sample:
                    sizes[names[0]] = sample[name].shape[at]
        # All axes scaled by f scale the number of places by f to the number of axes.
        factor = (places / self.length(sample)) ** (1 / len(sizes))
        wanted = {name: max(ranks, round(n * factor)) for name, n in sizes.items()}
        return {name: self._resized(name, value, wanted) for name, value in sample.items()}

    def _grown(self, sample: Item) -> Item:
        """A sample with at least ``_FEWEST`` places on each axis that its inputs show; shorter axes
        are repeated."""
        sizes = self._totals(self._declared_inputs(sample))
        wanted = {name: max(_FEWEST, n) for name, n in sizes.items() if name in self.axes}
        return {name: self._resized(name, value, wanted) for name, value in sample.items()}

    def _resized(self, name: str, value: torch.Tensor, wanted: Mapping[str, int]) -> torch.Tensor:
        """A field of a sample, cut to the sizes that ``wanted`` gives for its axes by name; where
        it has fewer places they are repeated. Other dims stay as they are."""
        dims = self._dims(name)
        for at, names in enumerate(dims.names if dims is not None else ()):
            count = wanted.get(names[0]) if len(names) == 1 else None
            if count is not None:
                repeats = [1] * value.dim()
                repeats[at] = -(-count // value.shape[at])  # rounded up, then cut to the count
                value = value.repeat(repeats).narrow(at, 0, count)
        return value


def _all_tensors(batch: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors among the values of a batch, by name."""
    return {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all values within nested mappings, tuples and lists."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, (tuple, list)):
        for at, inner in enumerate(value):
            yield from _leaves(f"{name}.{at}", inner)
    else:
        yield name, value


def _fingerprint(batch: Mapping[str, Any], groups: Sequence[Members]) -> str:
    """A hash of what ranks that share a batch must have in common: its tensors, numbers and texts,
    however they are nested, and the ``groups`` that they need."""
    leaves = dict(_leaves("", batch))
    facts = {name: x for name, x in leaves.items() if x is None or isinstance(x, _FACTS)}
    return fingerprint(_all_tensors(leaves), (groups, sorted(map(repr, facts.items()))))


def _sharers(shards: AxisShards) -> dist.ProcessGroup | None:
    """The ranks that share this rank's samples; where none does, those with other samples."""
    return shards.group if shards.group is not None else shards.across


def _elsewhere(model: torch.nn.Module) -> ModelError:
    """The error for ranks on which results were equal, or could not be compared yet, where another
    rank found a difference."""
    return ModelError(
        f"{type(model).__name__} on shards of its axes",
        got="another result than on the whole, on another rank",
        wanted="the same model and batch on all ranks",
    )


def axis_groups(ranks: Members, each: int) -> list[Members]:
    """The groups of ``ranks`` where ``each`` of them share a sample: first the blocks of ``each``
    consecutive ranks, which shard an axis; then, for each index in a block, the ranks with that
    index in all blocks, which have the same places of different samples. For four ranks and
    ``each`` 2 these are (0, 1), (2, 3), (0, 2), (1, 3)."""
    blocks = [ranks[at : at + each] for at in range(0, len(ranks), each)]
    return [*blocks, *(ranks[at::each] for at in range(each))]
