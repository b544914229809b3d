"""One micro-batch on one rank: its inputs, its view of the weights, its forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace.comm.mesh import Groups
from headrace.layouts.layout import group_shards, works_whole
from headrace.layouts.tokens import TokenPlan
from headrace.methods.context import Context, Shard, Whole
from headrace.models.transformer import Transformer
from headrace.ops.linear import Source
from headrace.ops.loss import IGNORED
from headrace.ops.random import DropoutKey
from headrace.ops.rotary import rotary_tables
from headrace.runtime.storage import Working
from headrace.spec.method import LayerPlan
from headrace.spec.plan import MicroBatch, Plan
from headrace.spec.weights import WeightSpec

__all__ = ["MicroBatchRun", "sources"]


def sources(
    table: tuple[WeightSpec, ...], working: Working, plan: Plan, ranks: tuple[int, ...],
    groups: Groups,
) -> dict[str, Source]:  # fmt: skip
    """The weights as a group's methods see them: whole where every member holds all rows,
    gathered from the members' shards otherwise."""
    whole = works_whole(plan)
    gathered = not all(whole[rank] for rank in ranks)
    group = groups.get(ranks)
    views: dict[str, Source] = {}
    for weight in table:
        value, grad = working.values[weight.name], working.partials[weight.name]
        if gathered and weight.unit is not None and group is not None:
            shards = group_shards(weight, len(ranks))
            part = shards[sorted(ranks).index(groups.rank)].within(working.held[weight.name])
            views[weight.name] = Shard(
                value=value[part], grad=grad[part], shards=shards, group=group
            )
        else:
            views[weight.name] = Whole(value=value, grad=grad)
    return views


@dataclass(slots=True, kw_only=True)
class MicroBatchRun:
    """A micro-batch between its forward and its backward.

    ``ids``, ``labels`` and ``positions`` are the local tokens [T / R]; ``scale`` is one over the
    predicted tokens of the whole batch.
    """

    model: Transformer
    layers: LayerPlan
    weights: dict[str, Source]
    context: Context
    ids: torch.Tensor
    labels: torch.Tensor
    scale: float
    _segments: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _last_grad: torch.Tensor | None = None

    @classmethod
    def of(
        cls, model: Transformer, plan: Plan, micro: MicroBatch, tokens: tuple[np.ndarray, ...],
        weights: dict[str, Source], groups: Groups, *, seed: int, step: int, dtype: torch.dtype,
        device: str = "cpu", training: bool = True,
    ) -> MicroBatchRun:  # fmt: skip
        """The run of ``micro`` on this rank; ``tokens[i]`` are the ids of the batch's sequence i
        (int32), cut here to this rank's part of the pack."""
        ranks = plan.pipelines[micro.pipeline].ranks
        member = sorted(ranks).index(groups.rank)  # the place in the process group
        pack = TokenPlan(lengths=plan.tokens_of(micro), ranks=len(ranks))
        documents = [tokens[i] for i in micro.sequences]
        positions = torch.from_numpy(pack.positions(member)).to(device)
        sample_ids = np.array([plan.lengths.ids[i] for i in micro.sequences], dtype=np.int64)
        a = model.architecture
        context = Context(
            architecture=a,
            tokens=pack,
            member=member,
            group=groups.get(ranks),
            tables=(
                rotary_tables(positions, a.head_features, a.rope_theta, dtype)
                if a.kind == "llama"
                else None
            ),
            dropout=DropoutKey(
                seed=seed,
                step=step,
                samples=torch.from_numpy(sample_ids[pack.documents(member)]).to(device),
                positions=positions,
            ),
            training=training,
        )
        return cls(
            model=model,
            layers=micro.layers,
            weights=weights,
            context=context,
            ids=_local(pack, member, documents, device),
            labels=_local(pack, member, [_shifted(d) for d in documents], device),
            scale=1.0 / max(1, plan.lengths.predicted),
        )

    def forward(self, passed: Callable[[], None] = lambda: None) -> float:
        """Run all segments; returns this rank's part of the batch's mean loss. ``passed`` is
        called before the first segment and after each (the profiler's marks)."""
        self._segments = []
        passed()
        x = self.model.embedding(self.ids, self.context.dropout.positions, self.weights)
        self._segments.append((x, x))
        passed()
        for index, option in enumerate(self.layers.options):
            entry = x.detach().requires_grad_(self.context.training)
            x = self.model.layer(entry, index, option, self.weights, self.context)
            self._segments.append((entry, x))
            passed()
        entry = x.detach().requires_grad_(self.context.training)
        normalised = self.model.last_norm(entry, self.weights)
        loss, self._last_grad = self.model.head(
            normalised.detach(), self.labels, self.weights, self.scale
        )
        self._segments.append((entry, normalised))
        passed()
        return float(loss)

    def backward(self, passed: Callable[[], None] = lambda: None) -> None:
        """Run the segments backwards, dropping each when it is done; ``passed`` after each."""
        grad, self._last_grad = self._last_grad, None
        while self._segments:
            entry, out = self._segments.pop()
            out.backward(grad)
            grad = entry.grad if self._segments else None
            del entry, out
            passed()


def _local(pack: TokenPlan, member: int, documents: list[np.ndarray], device: str) -> torch.Tensor:
    values = pack.take(member, np.concatenate(documents)).astype(np.int64)
    return torch.from_numpy(values).to(device)


def _shifted(document: np.ndarray) -> np.ndarray:
    """Labels: the next token of the same document; the last predicts nothing.

    Shifted before tokens are split over ranks, so no rank needs its neighbour's first token.
    """
    return np.append(document[1:], IGNORED)
