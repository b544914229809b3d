"""One micro-batch on one rank: its inputs, its view of the weights, its forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups
from headrace.errors import NotFinite, PlanMismatch
from headrace.layouts.partition import group_shards, works_whole
from headrace.layouts.token_plan import TokenPlan
from headrace.methods.context import Context, Place
from headrace.methods.weights import Shard, State, Weight, Whole
from headrace.models.objective import objective_of
from headrace.models.transformer import Transformer
from headrace.native.storage import Working
from headrace.ops.fused import to_device
from headrace.ops.random import DropoutKey
from headrace.spec.architecture import WeightSpec
from headrace.spec.layer_plan import LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.strategy import Stage

__all__ = ["MicroBatchRun", "layer_states", "sources"]


def sources(
    table: tuple[WeightSpec, ...], working: Working, plan: Plan, pipeline: Pipeline, groups: Groups
) -> dict[str, Weight]:
    """The weights of ``table`` that this rank's stage of a pipeline uses, by name, as methods take
    them: a ``Whole`` where every member of the stage holds all rows, and for each vector; else a
    ``Shard``, one of a block of neighbouring members that hold the rows together. They are views of
    the tensors in ``working``, so what methods add to a gradient is added there."""
    stage = pipeline.stage_of(groups.rank, plan.layers)
    holds_all = works_whole(plan)
    block_ranks = pipeline.scheme.parts(sharded=plan.working == "sharded")
    is_sharded = not all(holds_all[rank] for rank in stage.ranks)
    member = _member(groups.rank, stage.ranks)
    # The members from ``block_start`` on, ``block_ranks`` of them, hold one copy of the rows.
    block_start = member - member % block_ranks
    group = groups.get(stage.ranks[block_start : block_start + block_ranks]) if is_sharded else None
    views: dict[str, Weight] = {}
    for weight in table:
        if not weight.used_in(stage.buckets):
            continue
        value, grad = working.values[weight.name], working.partials[weight.name]
        if group is not None and weight.unit is not None:
            shards = group_shards(weight, block_ranks)
            # the working tensors may hold more rows than this member's shard
            own_rows = shards[member - block_start].within(working.held[weight.name])
            views[weight.name] = Shard(
                value=value[own_rows],
                grad=grad[own_rows],
                shards=shards,
                group=group,
                unit=weight.unit,
                first=block_start,
                dtype=working.dtype,
            )
        else:
            views[weight.name] = Whole(value=value, grad=grad, member=member, unit=weight.unit or 1)
    return views


def _member(rank: int, ranks: tuple[int, ...]) -> int:
    """The index of ``rank`` in its process group. Raises PlanMismatch when it is not in it."""
    if rank not in ranks:
        raise PlanMismatch(f"rank {rank}", got="outside the group", wanted=f"one of {ranks}")
    return ranks.index(rank)


def layer_states(weights: State, layers: int) -> tuple[State, ...]:
    """Group weights by layer: for each of the first ``layers`` layers its weights, by their names
    within the layer (``layers.3.qkv.weight`` is ``qkv.weight`` of layer 3). Layers of which there
    are no ``weights``, those of other stages, get an empty mapping."""
    states: tuple[dict[str, Weight], ...] = tuple({} for _ in range(layers))
    for name, weight in weights.items():
        first_word, _, rest = name.partition(".")
        if first_word == "layers":
            index, _, name_in_layer = rest.partition(".")
            if int(index) < layers:
                states[int(index)][name_in_layer] = weight
    return states


Needed = Callable[[int], None]
"""Called with a weight bucket before a segment first uses it, or after its gradients are
complete."""


@dataclass(slots=True, kw_only=True)
class MicroBatchRun:
    """A micro-batch in one stage, which runs its forward and later its backward.

    A pack of T tokens is on R ranks. ``ids`` and ``labels`` [T / R] are those of this rank's
    tokens; ``weights`` are those of the stage by name, ``states`` those of each layer. ``scale`` is
    one over the number of tokens of the whole batch that have a loss. With ``checked``, values that
    are not finite are looked for after each layer.

    After the forward, ``loss`` is this rank's part of the batch's mean loss (0 except in the last
    stage), and ``leaving`` [T / R, h] are the activations for the next stage (None in the last).
    After the backward, ``returning`` [T / R, h] is the gradient for the stage before (None in the
    first).

    The embedding, each layer and the end of the model are segments, with an autograd graph each.
    ``_segments`` has (input, output) of each segment whose backward has not run, ``_last_grad`` is
    the gradient of the output of the last one.
    """

    model: Transformer
    layers: LayerPlan
    stage: Stage
    weights: State
    states: tuple[State, ...]
    context: Context
    ids: torch.Tensor
    labels: torch.Tensor
    scale: float
    checked: bool = False
    loss: torch.Tensor | float = 0.0
    leaving: torch.Tensor | None = None
    returning: torch.Tensor | None = None
    _segments: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _last_grad: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        model: Transformer,
        plan: Plan,
        micro: MicroBatch,
        tokens: tuple[np.ndarray, ...],
        weights: State,
        groups: Groups,
        *,
        seed: int,
        step: int,
        dtype: torch.dtype,
        device: str = "cpu",
        training: bool = True,
        checked: bool = False,
        masks: tuple[np.ndarray | None, ...] = (),
    ) -> MicroBatchRun:
        """Make the run of ``micro`` in this rank's stage. ``tokens[i]`` are the ids of the batch's
        sequence i (int32), ``masks[i]`` says which of them have a loss (None: all): of those of
        ``micro`` this rank takes its part of the pack. ``weights`` are those of the stage by name
        (:func:`sources`)."""
        pipeline = plan.pipelines[micro.pipeline]
        stage = pipeline.stage_of(groups.rank, model.architecture.layers)
        ranks, member = stage.ranks, _member(groups.rank, stage.ranks)
        pack = TokenPlan(lengths=plan.tokens_of(micro), ranks=len(ranks), order=micro.order)
        samples = np.array([plan.lengths.ids[i] for i in micro.sequences], dtype=np.int64)
        objective = objective_of(model.architecture, seed=seed, step=step)
        examples = [
            objective.example(tokens[i], int(sample), masks[i] if masks else None)
            for i, sample in zip(micro.sequences, samples, strict=True)
        ]

        def subgroup(members: tuple[int, ...]) -> dist.ProcessGroup | None:
            """The process group of some members of the stage; None for one member alone."""
            return groups.get(tuple(ranks[other] for other in members))

        def local(values: np.ndarray) -> torch.Tensor:
            """An array as an int64 tensor on the device."""
            return to_device(torch.from_numpy(values.astype(np.int64)), device)

        place = Place(
            architecture=model.architecture,
            tokens=pack,
            member=member,
            dtype=dtype,
            device=device,
            group=groups.get(ranks),
            subgroup=subgroup,
            tensor=pipeline.scheme.tensor,
        )
        dropout = DropoutKey(
            seed=seed,
            step=step,
            samples=local(samples[pack.documents(member)]),
            positions=local(pack.positions(member)),
        )
        # Examples are pairs (ids, labels) of a sequence: concatenated for the whole pack, of which
        # this rank takes its part below.
        ids, labels = (np.concatenate(parts) for parts in zip(*examples, strict=True))
        return cls(
            model=model,
            layers=micro.layers,
            stage=stage,
            weights=weights,
            states=layer_states(weights, len(micro.layers.options)),
            context=Context(place=place, dropout=dropout, training=training),
            ids=local(pack.take(member, ids)),
            labels=local(pack.take(member, labels)),
            scale=1.0 / objective.count(plan.lengths, masks),
            checked=checked,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the activations at the borders of the stage: [T / R, h]."""
        return len(self.ids), self.model.architecture.hidden

    def forward(
        self, arrived: torch.Tensor | None = None, need: Needed = lambda bucket: None
    ) -> None:
        """Run all segments of the stage; ``arrived`` [T / R, h] is what the stage before sent, None
        in the first stage. ``need`` is called with each weight bucket before it is used.

        Raises NotFinite when ``checked`` and a layer gives a value that is not finite.
        """
        self._segments = []
        if arrived is None:
            need(0)
            x = self.model.embedding(self.ids, self.weights, self.context)
            self._segments.append((x, x))
        else:
            x = arrived
        for index in range(self.stage.start, self.stage.stop):
            need(index + 1)
            # Each layer is a graph of its own, so that the backward can run, and drop, one after
            # the other.
            entry = x.detach().requires_grad_(self.context.training)
            option = self.layers.options[index]
            x = self.model.layer(entry, index, option, self.states[index], self.context)
            self._check(x, "activations", index)
            self._segments.append((entry, x))
        if self.stage.last:
            self._end(x, need)
        else:
            self.leaving = x.detach()

    def _end(self, x: torch.Tensor, need: Needed) -> None:
        """Run what follows the last layer on its output x [T / R, h]: the last norm, and the head
        with the loss, which is set. The head computes the gradient of its input in the same call;
        it is kept for the backward. ``need`` is called with each weight bucket before it is
        used."""
        need(0)  # the embedding, whose weight a tied head uses
        need(self.stage.stop + 1)
        entry = x.detach().requires_grad_(self.context.training)
        ending, labels = self.model.ending(entry, self.labels, self.weights)
        loss, self._last_grad = self.model.head(
            ending.detach(), labels, self.weights, self.scale, self.context
        )
        self._segments.append((entry, ending))
        self.loss = loss.detach()

    def _check(self, x: torch.Tensor, what: str, index: int) -> None:
        """If ``checked``, raise NotFinite where x, the ``what`` (activations or gradient) of layer
        ``index``, has values that are not finite."""
        if not self.checked or bool(x.isfinite().all()):
            return
        bad_count = int(x.numel() - x.isfinite().sum())
        raise NotFinite(
            f"{what} of layer {index} ({self.layers.options[index]}) on member "
            f"{self.context.member} of {self.context.ranks}",
            got=f"{bad_count:,} of {x.numel():,} values not finite",
            wanted="finite values",
        )

    def backward(
        self, grad: torch.Tensor | None = None, done: Needed = lambda bucket: None
    ) -> None:
        """Run the segments backwards, dropping each when it is done; ``grad`` [T / R, h] is what
        the next stage sent, None in the last. ``done`` is called with the bucket of each finished
        segment."""
        if self.stage.last:
            grad, self._last_grad = self._last_grad, None
        for bucket in reversed(self.stage.buckets):
            entry, out = self._segments.pop()
            out.backward(grad)
            # Bucket 0, the embedding, is the first segment: nothing before it needs a gradient.
            grad = entry.grad if bucket else None
            del entry, out
            # bucket b + 1 has layer b
            if grad is not None and self.stage.start < bucket <= self.stage.stop:
                self._check(grad, "gradient", bucket - 1)
            done(bucket)
        self.returning = grad
