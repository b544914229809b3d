"""One micro-batch on one rank: its inputs, its view of the weights, its forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups
from headrace.errors import NotFinite, PlanMismatch
from headrace.layouts.layout import group_shards, works_whole
from headrace.layouts.tokens import TokenPlan
from headrace.methods.context import Context, Place
from headrace.methods.weights import Shard, State, Weight, Whole
from headrace.models.objective import objective_of
from headrace.models.transformer import Transformer
from headrace.ops.random import DropoutKey
from headrace.runtime.storage import Working
from headrace.spec.method import LayerPlan
from headrace.spec.plan import MicroBatch, Plan
from headrace.spec.weights import WeightSpec

__all__ = ["MicroBatchRun", "layer_states", "sources"]


def sources(
    table: tuple[WeightSpec, ...], working: Working, plan: Plan, ranks: tuple[int, ...],
    groups: Groups,
) -> dict[str, Weight]:  # fmt: skip
    """The weights as a group's methods see them: whole where every member holds all rows, shards
    of the members otherwise."""
    whole = works_whole(plan)
    gathered = not all(whole[rank] for rank in ranks)
    ranks = tuple(sorted(ranks))
    member = _member(groups.rank, ranks)
    group = groups.get(ranks)
    views: dict[str, Weight] = {}
    for weight in table:
        value, grad = working.values[weight.name], working.partials[weight.name]
        if gathered and weight.unit is not None and group is not None:
            shards = group_shards(weight, len(ranks))
            part = shards[member].within(working.held[weight.name])
            views[weight.name] = Shard(
                value=value[part], grad=grad[part], shards=shards, group=group, unit=weight.unit
            )
        else:
            views[weight.name] = Whole(value=value, grad=grad, member=member, unit=weight.unit or 1)
    return views


def _member(rank: int, ranks: tuple[int, ...]) -> int:
    """A rank's place in its process group. Raises PlanMismatch when it is not in it."""
    if rank not in ranks:
        raise PlanMismatch(f"rank {rank}", got="outside the group", wanted=f"one of {ranks}")
    return ranks.index(rank)


def layer_states(weights: State, layers: int) -> tuple[State, ...]:
    """The weights of each of the first ``layers`` layers by short name."""
    states: tuple[dict[str, Weight], ...] = tuple({} for _ in range(layers))
    for name, weight in weights.items():
        head, _, rest = name.partition(".")
        if head == "layers":
            index, _, short = rest.partition(".")
            if int(index) < layers:
                states[int(index)][short] = weight
    return states


@dataclass(slots=True, kw_only=True)
class MicroBatchRun:
    """A micro-batch between its forward and its backward.

    ``ids`` and ``labels`` are the local tokens [T / R]; ``scale`` is one over the tokens of the
    whole batch that have a loss. ``checked`` looks for values that are not finite after each layer.
    """

    model: Transformer
    layers: LayerPlan
    weights: State
    states: tuple[State, ...]
    context: Context
    ids: torch.Tensor
    labels: torch.Tensor
    scale: float
    checked: bool = False
    _segments: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _last_grad: torch.Tensor | None = None

    @classmethod
    def of(
        cls, model: Transformer, plan: Plan, micro: MicroBatch, tokens: tuple[np.ndarray, ...],
        weights: State, groups: Groups, *, seed: int, step: int, dtype: torch.dtype,
        device: str = "cpu", training: bool = True, checked: bool = False,
    ) -> MicroBatchRun:  # fmt: skip
        """The run of ``micro`` on this rank; ``tokens[i]`` are the ids of the batch's sequence i
        (int32), cut here to this rank's part of the pack."""
        ranks = tuple(sorted(plan.pipelines[micro.pipeline].ranks))
        member = _member(groups.rank, ranks)
        pack = TokenPlan(lengths=plan.tokens_of(micro), ranks=len(ranks), order=micro.order)
        samples = np.array([plan.lengths.ids[i] for i in micro.sequences], dtype=np.int64)
        objective = objective_of(model.architecture, seed=seed, step=step)
        examples = [
            objective.example(tokens[i], int(sample))
            for i, sample in zip(micro.sequences, samples, strict=True)
        ]

        def subgroup(members: tuple[int, ...]) -> dist.ProcessGroup | None:
            return groups.get(tuple(ranks[member] for member in members))

        def local(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device)

        place = Place(
            architecture=model.architecture, tokens=pack, member=member,
            group=groups.get(ranks), dtype=dtype, device=device, subgroup=subgroup,
        )  # fmt: skip
        dropout = DropoutKey(
            seed=seed, step=step, samples=local(samples[pack.documents(member)]),
            positions=local(pack.positions(member)),
        )  # fmt: skip
        ids, labels = (np.concatenate(parts) for parts in zip(*examples, strict=True))
        return cls(
            model=model,
            layers=micro.layers,
            weights=weights,
            states=layer_states(weights, len(micro.layers.options)),
            context=Context(place=place, dropout=dropout, training=training),
            ids=local(pack.take(member, ids)),
            labels=local(pack.take(member, labels)),
            scale=1.0 / objective.count(plan.lengths),
            checked=checked,
        )

    def forward(self, passed: Callable[[], None] = lambda: None) -> float:
        """Run all segments; returns this rank's part of the batch's mean loss. ``passed`` is
        called before the first segment and after each (the profiler's marks).

        Raises NotFinite when ``checked`` and a layer gives a value that is not finite.
        """
        self._segments = []
        passed()
        x = self.model.embedding(self.ids, self.weights, self.context)
        self._segments.append((x, x))
        passed()
        for index, option in enumerate(self.layers.options):
            entry = x.detach().requires_grad_(self.context.training)
            x = self.model.layer(entry, index, option, self.states[index], self.context)
            self._check(x, "activations", index)
            self._segments.append((entry, x))
            passed()
        entry = x.detach().requires_grad_(self.context.training)
        ending, labels = self.model.ending(entry, self.labels, self.weights)
        loss, self._last_grad = self.model.head(ending.detach(), labels, self.weights, self.scale)
        self._segments.append((entry, ending))
        passed()
        return float(loss)

    def _check(self, x: torch.Tensor, what: str, index: int) -> None:
        if not self.checked or bool(x.isfinite().all()):
            return
        bad = int(x.numel() - x.isfinite().sum())
        raise NotFinite(
            f"{what} of layer {index} ({self.layers.options[index]}) on member "
            f"{self.context.member} of {self.context.ranks}",
            got=f"{bad:,} of {x.numel():,} values not finite", wanted="finite values",
        )  # fmt: skip

    def backward(self, passed: Callable[[], None] = lambda: None) -> None:
        """Run the segments backwards, dropping each when it is done; ``passed`` after each."""
        grad, self._last_grad = self._last_grad, None
        while self._segments:
            entry, out = self._segments.pop()
            out.backward(grad)
            grad = entry.grad if self._segments else None
            del entry, out
            layer = len(self._segments) - 1
            if grad is not None and 0 <= layer < len(self.layers.options):
                self._check(grad, "gradient", layer)
            passed()
