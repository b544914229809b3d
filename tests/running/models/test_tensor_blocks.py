"""A Transformer whose stage has tensor-parallel blocks, against one process, in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.mesh import Groups
from headrace.errors import SpecError
from headrace.layouts.partition import group_shards
from headrace.layouts.token_plan import TokenPlan
from headrace.methods.context import Context, Place
from headrace.methods.weights import Shard, Weight, Whole
from headrace.models.objective import objective_of
from headrace.models.transformer import Transformer
from headrace.native.micro_batch import layer_states
from headrace.ops.random import DropoutKey
from headrace.spec import Architecture, Lengths, weight_table
from headrace.spec.known_methods import subgroups
from headrace.spec.layer_plan import LayerPlan
from headrace.spec.plan import TokenOrder
from oracles import full_weights, reference_step
from ranks import run_ranks

SHAPE: dict[str, Any] = {"layers": 1, "hidden": 16, "heads": 4, "ffn": 20, "vocabulary": 13}
OTHER: dict[str, Any] = SHAPE | {"kv_heads": 4, "positions": 700}
MODELS = {
    "llama": Architecture(**SHAPE, kv_heads=2),
    "untied": Architecture(**SHAPE, kv_heads=2, tied=False),
    "gpt": Architecture(**OTHER, kind="gpt"),
    "bert": Architecture(**OTHER, kind="bert", causal=False, mask_id=12, tied=True),
    "few": Architecture(**(OTHER | {"vocabulary": 1}), kind="gpt", tied=False),
}
PACKS = ((9, 1, 30), (1,), (2, 3), (520, 17))  # of one token others hold none


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One micro-batch of ``pack`` on a stage of blocks of ``tensor`` ranks."""

    model: str
    pack: tuple[int, ...]
    tensor: int
    order: TokenOrder = "natural"

    @property
    def architecture(self) -> Architecture:
        return MODELS[self.model]

    @property
    def documents(self) -> list[np.ndarray]:
        rng = np.random.default_rng(sum(self.pack))
        return [rng.integers(self.architecture.vocabulary, size=n) for n in self.pack]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Nothing is zero or one."""
        generator = torch.Generator().manual_seed(1)
        return {
            name: value + 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
            for name, value in full_weights(self.architecture, 0, torch.float64).items()
        }

    def blocks(self, ranks: int) -> list[tuple[int, ...]]:
        return [tuple(range(i, i + self.tensor)) for i in range(0, ranks, self.tensor)]


def _weights(case: Case, groups: Groups) -> dict[str, Weight]:
    """Matrices as shards of this rank's block, vectors whole."""
    first = groups.rank - groups.rank % case.tensor
    group = groups.get(case.blocks(groups.ranks)[groups.rank // case.tensor])
    whole, held = case.weights, dict[str, Weight]()
    for w in weight_table(case.architecture):
        value = whole[w.name]
        if w.unit is None:
            held[w.name] = Whole(value=value, grad=torch.zeros_like(value), member=groups.rank)
            continue
        shards = group_shards(w, case.tensor)
        rows = shards[groups.rank - first]
        value = value[rows.start : rows.stop].clone()
        assert group is not None
        held[w.name] = Shard(
            value=value,
            grad=torch.zeros_like(value),
            shards=shards,
            group=group,
            unit=w.unit,
            first=first,
        )
    return held


def _context(case: Case, groups: Groups) -> Context:
    pack = TokenPlan(lengths=case.pack, ranks=groups.ranks, order=case.order)
    place = Place(
        architecture=case.architecture,
        tokens=pack,
        member=groups.rank,
        dtype=torch.float64,
        group=groups.get(tuple(range(groups.ranks))),
        subgroup=groups.get,
        tensor=case.tensor,
    )
    samples, positions = (
        torch.from_numpy(values)
        for values in (pack.documents(groups.rank), pack.positions(groups.rank))
    )
    return Context(
        place=place, dropout=DropoutKey(seed=0, step=0, samples=samples, positions=positions)
    )


def _step(case: Case, groups: Groups) -> dict[str, Any]:
    """Forward and backward of the micro-batch, segment by segment: this rank's loss and rows."""
    a, ranks = case.architecture, groups.ranks
    layers = LayerPlan.parse("1*megatron_ts" if case.tensor == ranks else "1*tensor_ring")
    inner = subgroups(layers.options[0], a, ranks, case.tensor)
    groups.prepare([tuple(range(ranks)), *case.blocks(ranks), *inner])
    weights, context, model = _weights(case, groups), _context(case, groups), Transformer(a)
    objective = objective_of(a, seed=0, step=0)
    examples = [objective.example(d.astype(np.int32), i) for i, d in enumerate(case.documents)]
    ids, labels = (
        torch.from_numpy(context.tokens.take(groups.rank, np.concatenate(parts)).astype(np.int64))
        for parts in zip(*examples, strict=True)
    )
    scale = 1.0 / objective.count(Lengths(tokens=case.pack))
    embedding = model.embedding(ids, weights, context)
    x = embedding.detach().requires_grad_()
    layer = model.layer(x, 0, layers.options[0], layer_states(weights, 1)[0], context)
    y = layer.detach().requires_grad_()
    ending, asked = model.ending(y, labels, weights)
    loss, grad = model.head(ending.detach(), asked, weights, scale, context)
    ending.backward(grad)
    layer.backward(y.grad)
    embedding.backward(x.grad)
    return {"loss": float(loss), "grads": {n: w.grad.numpy() for n, w in weights.items()}}


def _steps(cases: list[Case]) -> list[dict[str, Any]]:
    groups = Groups()
    return [_step(case, groups) for case in cases]


def _check(cases: list[Case], ranks: int) -> None:
    results = run_ranks(ranks, _steps, cases, timeout_s=120)
    for i, case in enumerate(cases):
        parts = [of_rank[i] for of_rank in results]
        loss, grads = reference_step(case.documents, case.weights, case.architecture)
        assert sum(part["loss"] for part in parts) == pytest.approx(loss, rel=1e-11, abs=1e-13), (
            case
        )
        for w in weight_table(case.architecture):
            of = [part["grads"][w.name] for part in parts]
            got = (
                sum(of)
                if w.unit is None
                else sum(np.concatenate([of[m] for m in block]) for block in case.blocks(ranks))
            )
            wanted = grads[w.name].numpy()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-10, err_msg=f"{w.name} {case}")


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 2), (4, 2), (4, 4)])
def test_a_model_on_blocks_equals_one_process(ranks: int, tensor: int) -> None:
    """Would catch rows of another member or block taken for the own ones, positions and types
    looked up in a part of their table, guessed tokens counted as those of the pack, a bias of the
    vocabulary added to other words, and a tied table whose two gradients are not added."""
    cases = [
        Case(model=model, pack=pack, tensor=tensor, order=("natural", "zigzag")[i % 2])
        for model in MODELS
        if tensor <= MODELS[model].kv_heads
        for i, pack in enumerate(PACKS)
    ]
    _check(cases, ranks)


def _refused() -> str:
    groups = Groups()
    case = Case(model="gpt", pack=(4,), tensor=2)
    groups.prepare([(0, 1)])
    weights, context = _weights(case, groups), _context(case, groups)
    try:
        Transformer(case.architecture).embedding(torch.tensor([3, 13]), weights, context)
    except SpecError as error:
        return str(error)
    return "taken"


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    """Would catch an id that no rank has a row for and that is silently embedded as zero."""
    wanted = "row of embed.weight: got 13, wanted 0 <= row < 13"
    assert [wanted in text for text in run_ranks(2, _refused)] == [True, True]


def test_blocks_are_neighbours() -> None:
    """Would catch blocks of members a stride apart, which are the rings across blocks."""
    tokens = TokenPlan(lengths=(8,), ranks=6)
    place = Place(
        architecture=MODELS["llama"], tokens=tokens, member=0, group=None, dtype=torch.float64
    )
    assert [replace(place, member=m).block for m in range(3)] == [(0,), (1,), (2,)]
    blocks = [replace(place, member=m, tensor=3).block for m in range(6)]
    assert blocks == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
