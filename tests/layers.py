"""Some layers by any methods on several ranks, and by plain autograd in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

import oracles
from headrace.comm.mesh import Groups
from headrace.layouts.partition import group_shards
from headrace.layouts.token_plan import TokenPlan
from headrace.methods import Context, Place, Shard, Whole
from headrace.methods.weights import Weight
from headrace.models.transformer import Transformer
from headrace.native.counted import TrafficCounter
from headrace.native.micro_batch import layer_states
from headrace.ops.random import DropoutKey
from headrace.spec import Architecture, weight_table
from headrace.spec.architecture import WeightSpec
from headrace.spec.known_methods import subgroups
from headrace.spec.layer_plan import LayerPlan
from headrace.spec.plan import TokenOrder

__all__ = [
    "Case",
    "context_of",
    "drawn",
    "reference",
    "run_all",
    "run_case",
    "sources_of",
    "through",
    "together",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some layers, run once forward and once backward; ``layers`` is a layer plan's text."""

    architecture: Architecture
    layers: str
    held: str
    pack: tuple[int, ...]
    order: TokenOrder = "natural"
    dtype: torch.dtype = torch.float64
    rounded: bool = False  # the values of ``dtype`` in fp64

    @property
    def plan(self) -> LayerPlan:
        return LayerPlan.parse(self.layers)

    @property
    def table(self) -> list[WeightSpec]:
        """The weights of the first ``layers`` layers, which may be more than the model has."""
        one = [w for w in weight_table(self.architecture) if w.bucket == 1]
        return [
            WeightSpec(
                name=w.name.replace("layers.0.", f"layers.{i}."),
                shape=w.shape,
                unit=w.unit,
                bucket=i + 1,
            )
            for i in range(len(self.plan.options))
            for w in one
        ]


def drawn(case: Case) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """x and dy [T, h] of the whole pack, all weights; nothing is zero or one."""
    a, total = case.architecture, sum(case.pack)
    generator = torch.Generator().manual_seed(total)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def typed(x: torch.Tensor) -> torch.Tensor:
        return x.to(case.dtype).double() if case.rounded else x.to(case.dtype)

    weights = {w.name: typed(0.3 * randn(*w.shape) + 0.1) for w in case.table}
    return typed(randn(total, a.hidden)), typed(randn(total, a.hidden)), weights


def sources_of(case: Case, group: Any, member: int, ranks: int) -> dict[str, Weight]:
    """The layers' weights as this rank holds them; gradients start at one."""
    *_, weights = drawn(case)
    sources: dict[str, Weight] = {}
    for w in case.table:
        value, unit = weights[w.name], w.unit or 1
        wide = torch.float64 if case.dtype == torch.float64 else torch.float32
        if case.held == "replicated" or w.unit is None:
            grad = torch.ones_like(value, dtype=wide)
            sources[w.name] = Whole(value=value, grad=grad, member=member, unit=unit)
            continue
        shards = group_shards(w, ranks)
        part = value[shards[member].start : shards[member].stop].clone()
        grad = torch.ones_like(part, dtype=wide)
        sources[w.name] = Shard(value=part, grad=grad, shards=shards, group=group, unit=unit)
    return sources


def context_of(case: Case, groups: Groups | None) -> Context:
    a, member = case.architecture, groups.rank if groups else 0
    ranks = groups.ranks if groups else 1
    pack = TokenPlan(lengths=case.pack, ranks=ranks, order=case.order)
    place = Place(
        architecture=a,
        tokens=pack,
        member=member,
        dtype=case.dtype,
        group=groups.get(tuple(range(ranks))) if groups else None,
        subgroup=groups.get if groups else lambda members: None,
    )
    key = DropoutKey(
        seed=0,
        step=0,
        samples=torch.from_numpy(pack.documents(member)),
        positions=torch.from_numpy(pack.positions(member)),
    )
    return Context(place=place, dropout=key)


def through(case: Case, x: torch.Tensor, sources: dict[str, Weight], context: Context) -> Any:
    states = layer_states(sources, len(case.plan.options))
    for index, option in enumerate(case.plan.options):
        x = Transformer(case.architecture).layer(x, index, option, states[index], context)
    return x


def run_case(case: Case, groups: Groups) -> dict[str, Any]:
    world = tuple(range(groups.ranks))
    wanted = {world} | {
        members
        for option in case.plan.options
        for members in subgroups(option, case.architecture, groups.ranks)
    }
    groups.prepare(wanted)
    sources = sources_of(case, groups.get(world), groups.rank, groups.ranks)
    context = context_of(case, groups)
    x, dy, _ = drawn(case)
    mine = torch.from_numpy(context.tokens.index(groups.rank))
    x, dy = x[mine], dy[mine]
    x.requires_grad_()
    with TrafficCounter() as wire:
        out = through(case, x, sources, context)
        forward = wire.take()
        out.backward(dy)
    return {
        "out": out.detach().double().numpy(),
        "dx": x.grad.double().numpy(),
        "grads": {n: (source.grad - 1).double().numpy() for n, source in sources.items()},
        "sent": (forward, wire.take()),
        "places": mine.numpy(),
    }


def run_all(cases: list[Case]) -> list[dict[str, Any]]:
    groups = Groups()
    return [run_case(case, groups) for case in cases]


def reference(case: Case) -> dict[str, np.ndarray]:
    """The layers by plain autograd, a document at a time."""
    x, dy, weights = drawn(case)
    x.requires_grad_()
    w = {name: t.requires_grad_() for name, t in weights.items()}
    out = torch.cat([_document(part, w, case) for part in x.split(list(case.pack))])
    out.backward(dy)
    grads = {name: t.grad.double().numpy() for name, t in weights.items()}
    return {"out": out.detach().double().numpy(), "dx": x.grad.double().numpy(), **grads}


def _document(x: torch.Tensor, weights: dict[str, torch.Tensor], case: Case) -> torch.Tensor:
    a = case.architecture
    g, m, d = a.kv_heads, a.group_heads, a.head_features

    def norm(x: torch.Tensor, name: str, first: bool) -> torch.Tensor:
        if a.norm_first != first:
            return x
        if a.kind == "llama":
            return F.rms_norm(x, (a.hidden,), w[f"{name}.weight"], eps=a.norm_eps)
        return F.layer_norm(x, (a.hidden,), w[f"{name}.weight"], w[f"{name}.bias"], eps=a.norm_eps)

    for i in range(len(case.plan.options)):
        w = {n.split(".", 2)[2]: t for n, t in weights.items() if n.startswith(f"layers.{i}.")}
        y = F.linear(norm(x, "norm1", True), w["qkv.weight"], w.get("qkv.bias"))
        y = y.view(len(x), g, m + 2, d)
        q, k, v = y[:, :, :m].reshape(len(x), g * m, d), y[:, :, m], y[:, :, m + 1]
        if a.kind == "llama":
            q, k = oracles._rope(q, a), oracles._rope(k, a)
        heads = oracles.reference_attention(q, k, v, a.causal).reshape(len(x), a.hidden)
        x = norm(x + heads @ w["proj.weight"] + w.get("proj.bias", 0), "norm1", False)
        y = F.linear(norm(x, "norm2", True), w["in.weight"], w.get("in.bias"))
        if a.gated:
            pairs = y.view(len(x), a.ffn // a.ffn_block, 2, a.ffn_block)
            y = (F.silu(pairs[:, :, 0]) * pairs[:, :, 1]).reshape(len(x), a.ffn)
        else:
            y = F.gelu(y, approximate="tanh" if a.kind == "gpt" else "none")
        x = norm(x + y @ w["out.weight"] + w.get("out.bias", 0), "norm2", False)
    return x


def together(case: Case, results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """What the ranks hold, as one process would: tokens and shards joined, partial sums added."""
    whole: dict[str, np.ndarray] = {}
    places = np.concatenate([r["places"] for r in results])
    for key in ("out", "dx"):
        whole[key] = np.empty((sum(case.pack), case.architecture.hidden))
        whole[key][places] = np.concatenate([r[key] for r in results])
    for w in case.table:
        parts = [r["grads"][w.name] for r in results]
        sharded = case.held == "sharded" and w.unit is not None
        whole[w.name] = np.concatenate(parts) if sharded else sum(parts)
    return whole
