"""Probes of a native model: two of its layers, with random weights.

Two layers serve for the whole model, as layers are alike: the first warms up (DCP, section 3.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from headrace.comm.mesh import Groups
from headrace.layouts.partition import group_shards
from headrace.methods.weights import Shard, Weight, Whole
from headrace.models.transformer import Transformer
from headrace.native.micro_batch import MicroBatchRun
from headrace.profiling.branches import BranchTarget
from headrace.profiling.probe import ChainProbe, Passed, Probe
from headrace.profiling.sweep import Sweep
from headrace.spec.architecture import Architecture, buckets, weight_table
from headrace.spec.known_methods import subgroups
from headrace.spec.layer_plan import Branch, LayerOption, LayerPlan
from headrace.spec.lengths import Lengths
from headrace.spec.model_shape import HEAD_CHUNK_TOKENS
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.strategy import Scheme

__all__ = ["EndsProbe", "TwoLayers", "branch_probe"]


@dataclass(slots=True)
class EndsProbe:
    """Embedding, last norm, head and loss of a micro-batch, without its layers."""

    run: MicroBatchRun
    segments: int = 1
    # Of the last forward: the embedding's output; the same as an input, cut from its graph; and
    # what the head was given. Then the gradient of the latter.
    _done: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    _ending_grad: torch.Tensor | None = None

    def forward(self, passed: Passed) -> None:
        """Run the embedding, then the head and the loss, which computes its gradient at once."""
        run = self.run
        passed()
        x = run.model.embedding(run.ids, run.weights, run.context)
        entry = x.detach().requires_grad_()
        ending, labels = run.model.ending(entry, run.labels, run.weights)
        _, self._ending_grad = run.model.head(
            ending.detach(), labels, run.weights, run.scale, run.context
        )
        self._done = (x, entry, ending)
        passed()

    def backward(self, passed: Passed) -> None:
        """Run the backward of the last forward, and free what that kept."""
        assert self._done is not None
        x, entry, ending = self._done
        self._done = None
        ending.backward(self._ending_grad)
        del ending
        self._ending_grad = None
        x.backward(entry.grad)
        passed()


def branch_probe(run: MicroBatchRun, part: Branch, option: LayerOption, layers: int) -> ChainProbe:
    """A probe of one branch of the first ``layers`` layers, run as a micro-batch would run it."""

    def entry() -> torch.Tensor:
        """Random activations [T / R, h]."""
        shape = (len(run.ids), run.context.architecture.hidden)
        return torch.randn(shape, dtype=run.context.place.dtype, device=run.ids.device)

    def branch(index: int, x: torch.Tensor) -> torch.Tensor:
        """The branch of layer ``index``, x [T / R, h] to [T / R, h]."""
        inner = replace(run.context, recompute=option.recompute, layer=index)
        return run.model.branch(x, part, option, run.states[index], inner)

    return ChainProbe(entry, [partial(branch, index) for index in range(layers)])


class TwoLayers:
    """Makes probes of ``architecture`` for this rank; ``two`` is the architecture of the model that
    is run, with two layers, or one where there are no more.

    Weights are whole on every rank, of ``dtype``; gradients are fp32 for half types.
    """

    def __init__(
        self, architecture: Architecture, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:
        """Up to two layers of the architecture with random weights and zero gradients."""
        self.two = replace(architecture, layers=min(2, architecture.layers))
        self.dtype, self.device = dtype, device
        self.model = Transformer(self.two)
        grad_dtype = dtype if dtype.itemsize >= 4 else torch.float32
        # By the weight's name: value, gradient, and rows of a unit that is never cut (a head, say).
        self._held: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = {}
        for weight in weight_table(self.two):
            value = torch.empty(weight.shape, dtype=dtype, device=device).normal_(std=0.02)
            grad = torch.zeros(weight.shape, dtype=grad_dtype, device=device)
            self._held[weight.name] = (value, grad, weight.unit or 1)

    @property
    def bytes_held(self) -> int:
        """Bytes of the weights and their gradients."""
        return sum(value.nbytes + grad.nbytes for value, grad, _ in self._held.values())

    def groups_of(self, target: BranchTarget, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The process groups that a target needs, as tuples of ranks: one of all ``ranks``, and
        those of its method within them."""
        groups = [tuple(range(target.p)), *subgroups(target.option, self.two, target.p)]
        return [tuple(ranks[member] for member in group) for group in groups]

    def sweep(self, target: BranchTarget) -> Sweep:
        """The sweep that measures a target."""

        def probe(groups: Groups, ranks: tuple[int, ...], lengths: tuple[int, ...]) -> Probe:
            """The target's probe of one pack."""
            return self.probe(groups, ranks, target, lengths)

        return Sweep(
            p=target.p,
            option=target.text,
            probe=probe,
            groups_of=partial(self.groups_of, target),
            order=target.order(self.two),
            fetched=target.fetched(self.two),
            chunk_tokens=HEAD_CHUNK_TOKENS if target.part is None else None,
        )

    def probe(
        self, groups: Groups, ranks: tuple[int, ...], target: BranchTarget, lengths: tuple[int, ...]
    ) -> Probe:
        """A target's probe on ``ranks`` of ``groups``, for a pack of documents of ``lengths``
        tokens."""
        layers = LayerPlan.uniform(target.option, self.two.layers)
        order = target.order(self.two)
        micro = MicroBatch(
            pipeline=0, sequences=tuple(range(len(lengths))), layers=layers, order=order
        )
        plan = Plan(
            lengths=Lengths(tokens=lengths),
            devices=groups.ranks,
            pipelines=(Pipeline(scheme=Scheme(context=len(ranks)), ranks=ranks),),
            micro_batches=(micro,),
            predicted_s=0.0,
            lower_bound_s=0.0,
        )
        run = MicroBatchRun.of(
            self.model,
            plan,
            micro,
            self._tokens(lengths),
            self._weights(ranks.index(groups.rank)),
            groups,
            seed=0,
            step=0,
            dtype=self.dtype,
            device=self.device,
        )
        if target.part is None:
            return EndsProbe(run)
        return branch_probe(run, target.part, target.option, self.two.layers)

    def shards(self, groups: Groups, ranks: tuple[int, ...]) -> list[Shard]:
        """This rank's shards of one layer's matrices, sharded over ``ranks``."""
        group = groups.get(ranks)
        assert group is not None, "a group of several ranks"
        shards = []
        for weight in buckets(self.two)[1]:
            if weight.unit is not None:
                value, grad, _ = self._held[weight.name]
                parts = group_shards(weight, len(ranks))
                # Any rows serve, as only their number counts for costs.
                rows = len(parts[ranks.index(groups.rank)])
                shard = Shard(value=value[:rows], grad=grad[:rows], shards=parts, group=group)
                shards.append(shard)
        return shards

    def _weights(self, member: int) -> dict[str, Weight]:
        """All weights of the model by name, whole, for one member of a group."""
        return {
            name: Whole(value=value, grad=grad, member=member, unit=unit)
            for name, (value, grad, unit) in self._held.items()
        }

    def _tokens(self, lengths: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Random documents of these lengths, ids [L] each."""
        rng = np.random.default_rng(sum(lengths))
        return tuple(rng.integers(self.two.vocabulary, size=n).astype(np.int32) for n in lengths)
