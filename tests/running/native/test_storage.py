"""Storage: what moves, how much of it, and what an update does to it."""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from headrace.comm.mesh import Groups
from headrace.errors import SpecError
from headrace.layouts.partition import (
    link,
    received_rows,
    sent_rows,
    storage_partition,
    working_partition,
)
from headrace.native.optimizers import ELEMENTWISE, AdamW, Elementwise
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths, weight_table
from headrace.spec.architecture import bucket_count, parameter_count
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan, Working
from headrace.spec.strategy import Scheme
from oracles import full_weights
from ranks import run_ranks
from strategies import laid_out

# 4 ranks divide every unit of every matrix, and the rows of the norms too.
EVEN = Architecture(layers=2, hidden=32, heads=4, kv_heads=4, ffn=256, vocabulary=64)
ODD = Architecture(
    layers=1, hidden=24, heads=3, kv_heads=3, ffn=40, vocabulary=7, kind="gpt", positions=5
)
VECTORS = sum(w.elements for w in weight_table(EVEN) if w.unit is None)


def _plan(devices: int, *groups: tuple[int, ...], working: Working = "replicated") -> Plan:
    """One micro-batch of one sequence per group."""
    layers = LayerPlan.uniform(LayerOption.of("ulysses_z"), 2)
    return Plan(
        lengths=Lengths(tokens=(8,) * len(groups)),
        devices=devices,
        pipelines=tuple(Pipeline(scheme=Scheme(context=len(g)), ranks=g) for g in groups),
        micro_batches=tuple(
            MicroBatch(pipeline=i, sequences=(i,), layers=layers) for i in range(len(groups))
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
        working=working,
    )


PLANS = {
    "4*cp1": _plan(4, (0,), (1,), (2,), (3,)),
    "1*cp4 replicated": _plan(4, (0, 1, 2, 3)),
    "1*cp4 sharded": _plan(4, (0, 1, 2, 3), working="sharded"),
    "2*cp2 sharded": _plan(4, (0, 1), (2, 3), working="sharded"),
    "1*cp2 + 2*cp1 sharded": _plan(4, (0, 1), (2,), (3,), working="sharded"),
    "1*cp1": _plan(4, (2,)),
    "1*tp2 + 2*cp1": laid_out("1*tp2 + 2*cp1", EVEN, (8,) * 3, 4),
    "1*tp4": laid_out("1*tp4", EVEN, (8,), 4),
    "1*pp2 + 1*tp2": laid_out("1*pp2 + 1*tp2", EVEN, (8,) * 2, 4),
}


class Wire:
    """Counts the bytes that this process sends to other ranks."""

    def __init__(self) -> None:
        self.sent, self._real = 0, dist.all_to_all_single
        dist.all_to_all_single = self._counted

    def _counted(self, out: Any, x: Any, receive: Any, send: Any, group: Any, **rest: Any) -> Any:
        others = sum(n for r, n in enumerate(send) if r != dist.get_rank(group))
        self.sent += others * x.element_size() * x[:1].numel()
        return self._real(out, x, receive, send, group=group, **rest)

    def take(self) -> int:
        sent, self.sent = self.sent, 0
        return sent


def _moved(a: Architecture, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    groups = Groups()
    wire, out = Wire(), {}
    for name, plan in PLANS.items():
        storage = Storage(a, groups, seed=3, dtype=dtype)
        working = storage.working(plan)
        moving = [v for n, v in working.values.items() if v is not storage.masters[n]]
        unread = all(bool(value.isnan().all()) for value in moving)
        working.begin()
        for pending in [working.pull(bucket) for bucket in range(bucket_count(a))]:
            if pending is not None:
                pending.wait()
        pulled = wire.take()
        for partial in working.partials.values():
            partial.fill_(1.0)
        for pending in [working.push(bucket) for bucket in range(bucket_count(a))]:
            if pending is not None:
                pending.wait()
        out[name] = {
            "unread": unread,
            "moving": len(moving),
            "wire": (pulled, wire.take()),
            "told": (working.pull_bytes, working.push_bytes),
            "values": {n: v.double().numpy().copy() for n, v in working.values.items()},
            "sums": {n: s.double().numpy().copy() for n, s in storage.sums.items()},
        }
    return out


@pytest.mark.parametrize(("a", "dtype"), [(EVEN, torch.float32), (ODD, torch.float64)])
def test_pulls_and_pushes_move_what_the_link_table_says(a: Architecture, dtype: Any) -> None:
    """Would catch a working row that no pull fills, a reader missing from a sum, and bytes on the
    wire that the table, and so the planner, knows nothing of."""
    results = run_ranks(4, _moved, a, dtype)
    weights = full_weights(a, 3, dtype)
    for name, plan in PLANS.items():
        received, served = [0] * 4, [0] * 4
        for w in weight_table(a):
            owners, readers = storage_partition(w, 4), working_partition(w, plan)
            count = np.zeros((w.rows, *w.shape[1:]))
            for rank, part in enumerate(readers.parts):
                rows = slice(part.start, part.stop)
                got = results[rank][name]["values"][w.name]
                np.testing.assert_array_equal(got, weights[w.name][rows].double().numpy())
                count[rows] += 1
            for rank, part in enumerate(owners.parts):
                got = results[rank][name]["sums"][w.name]
                np.testing.assert_array_equal(got, count[part.start : part.stop])
            slices = link(owners, readers)
            for rank in range(4):
                size = w.row_elements * torch.empty(0, dtype=dtype).element_size()
                received[rank] += received_rows(slices, rank) * size
                served[rank] += sent_rows(slices, rank) * size
        for rank in range(4):
            got = results[rank][name]
            assert got["unread"], "nothing but NaN before the pull"
            assert got["moving"] > 0
            assert got["told"] == (received[rank], served[rank]), name
            assert got["wire"] == (served[rank], received[rank]), name


def test_bytes_are_the_formulas() -> None:
    """Would catch a link that moves more than an all-gather, or anything where it need not."""
    results = run_ranks(4, _moved, EVEN, torch.float32)
    w = 4 * parameter_count(EVEN)
    vectors = 4 * VECTORS
    matrices = w - vectors
    quarter = vectors * 3 / 4  # whole on every rank that works
    wanted = {
        "4*cp1": [w * 3 / 4] * 4,
        "1*cp4 replicated": [w * 3 / 4] * 4,
        "1*cp4 sharded": [quarter] * 4,
        "2*cp2 sharded": [quarter + m * matrices for m in (1 / 4, 1 / 2, 1 / 2, 1 / 4)],
        "1*cp2 + 2*cp1 sharded": [quarter + m * matrices for m in (1 / 4, 1 / 2, 3 / 4, 3 / 4)],
        "1*cp1": [0, 0, w * 3 / 4, 0],
        "1*tp2 + 2*cp1": [quarter + m * matrices for m in (1 / 4, 1 / 2, 3 / 4, 3 / 4)],
        "1*tp4": [quarter] * 4,
    }
    for name, received in wanted.items():
        assert [r[name]["told"][0] for r in results] == received, name
        assert sum(r[name]["wire"][0] for r in results) == sum(received), name  # pull
        assert [r[name]["wire"][1] for r in results] == received, name  # push: the transpose


def _alone() -> dict[str, Any]:
    storage = Storage(EVEN, Groups(), seed=3)
    working = storage.working(_plan(1, (0,)))
    return {
        "same": all(working.values[n] is m for n, m in storage.masters.items())
        and all(working.partials[n] is s for n, s in storage.sums.items()),
        "moved": [working.pull(b) or working.push(b) for b in range(bucket_count(EVEN))],
        "bytes": (working.pull_bytes, working.push_bytes),
    }


def test_one_rank_works_on_what_it_stores() -> None:
    """Would catch a second copy of all weights and gradients where nothing need move."""
    assert run_ranks(1, _alone) == [{"same": True, "moved": [None] * 4, "bytes": (0, 0)}]


def _buffers() -> list[bool]:
    storage = Storage(ODD, Groups(), seed=3)
    first = storage.working(PLANS["4*cp1"])
    again = storage.working(PLANS["4*cp1"].replace(predicted_s=1.0))
    alike = storage.working(PLANS["1*cp4 replicated"])
    kept = [again is first, alike is first]
    gone = weakref.ref(first)
    del first, again, alike
    other = storage.working(PLANS["1*cp1"])
    kept += [gone() is None, storage.working(PLANS["1*cp1"]) is other]
    back = storage.working(PLANS["4*cp1"])
    rows = {
        w.name: working_partition(w, PLANS["4*cp1"]).parts[dist.get_rank()] for w in storage.table
    }
    kept += [back is not other, back.held == rows]
    return kept


def test_buffers_are_kept_while_the_layout_stays() -> None:
    """Would catch an allocation at every step, and buffers of one layout used for another or kept
    beside it."""
    assert run_ranks(4, _buffers) == [[True] * 6] * 4


def _masters() -> tuple[dict[str, np.ndarray], int, int]:
    storage = Storage(ODD, Groups(), seed=3, dtype=torch.float64)
    storage.update(0.1)  # so that the optimizer has its state
    state = sum(t.numel() * t.element_size() for _, t in storage.optimizer_rows())
    held = sum(
        t.numel() * t.element_size() for t in (*storage.masters.values(), *storage.sums.values())
    )
    fresh = Storage(ODD, Groups(), seed=3, dtype=torch.float64)
    masters = {n: m.numpy() for n, m in fresh.masters.items()}
    return masters, storage.bytes_held(), held + state


@pytest.mark.parametrize("ranks", [1, 3, 9])
def test_the_first_weights_do_not_depend_on_the_ranks(ranks: int) -> None:
    """Would catch a random stream per rank, and bytes told that are not those held."""
    results = run_ranks(ranks, _masters)
    for name, whole in full_weights(ODD, 3, torch.float64).items():
        got = np.concatenate([masters[name] for masters, _, _ in results])
        np.testing.assert_array_equal(got, whole.numpy())
    assert [told for _, told, _ in results] == [held for _, _, held in results]


def _gradients(storage: Storage) -> None:
    """Random sums, the same rows whatever the ranks."""
    for w in storage.table:
        part = storage.partitions[w.name].parts[storage._groups.rank]
        generator = torch.Generator().manual_seed(w.elements)
        whole = torch.randn(w.shape, generator=generator, dtype=torch.float64)
        storage.sums[w.name].copy_(whole[part.start : part.stop])


def _updated(options: AdamW, lr: float) -> dict[str, Any]:
    storage = Storage(ODD, Groups(), seed=3, dtype=torch.float64, options=options)
    _gradients(storage)
    norm = storage.update(lr)
    return {
        "norm": norm,
        "updates": storage.updates,
        "masters": {n: m.numpy() for n, m in storage.masters.items()},
    }


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.5, 1e9])
def test_an_update_is_adamw_clipped_by_the_norm_of_the_whole(ranks: int, clip: float) -> None:
    """Would catch a norm of one rank's rows, ``clip = 0`` that clips everything away, decay of
    norms and biases, and a rate other than the one asked for."""
    options = AdamW(clip=clip, decay=0.2, eps=1e-2, lr=7.0)
    results = run_ranks(ranks, _updated, options, 0.05)
    weights = full_weights(ODD, 3, torch.float64)
    grads = {
        w.name: torch.randn(
            w.shape, generator=torch.Generator().manual_seed(w.elements), dtype=torch.float64
        )
        for w in weight_table(ODD)
    }
    norm = math.sqrt(sum(float(g.square().sum()) for g in grads.values()))
    factor = min(1.0, clip / norm) if clip else 1.0
    for result in results:
        assert result["norm"] == pytest.approx(norm, rel=1e-12)
        assert result["updates"] == 1
    for name, before in weights.items():
        g = factor * grads[name]
        decayed = before * (1 - 0.05 * 0.2) if before.dim() > 1 else before
        # The first step of Adam: both moments are unbiased to g and g squared.
        wanted = decayed - 0.05 * g / (g.abs() + 1e-2)
        got = np.concatenate([r["masters"][name] for r in results])
        np.testing.assert_allclose(got, wanted.numpy(), rtol=0, atol=1e-7)


def _not_finite(values: list[float]) -> list[dict[str, Any]]:
    groups, out = Groups(), []
    storage = Storage(ODD, groups, seed=3, dtype=torch.float64)
    _gradients(storage)
    storage.update(0.1)

    def state() -> list[torch.Tensor]:
        rows = [rows.clone() for _, rows in storage.optimizer_rows()]
        return [*(m.clone() for m in storage.masters.values()), *rows]

    for value in values:
        before = state()
        _gradients(storage)
        if groups.rank == 1:
            storage.sums["embed.weight"][0, 0] = value
        norm = storage.update(0.1)
        same = all(torch.equal(one, other) for one, other in zip(before, state(), strict=True))
        out.append({"norm": norm, "same": same, "updates": storage.updates})
    return out


def test_an_update_that_is_not_finite_changes_nothing_anywhere() -> None:
    """Would catch ranks without the NaN that step on: the weights would differ in age."""
    for results in run_ranks(3, _not_finite, [math.nan, math.inf, -math.inf]):
        assert all(not math.isfinite(r["norm"]) for r in results)
        assert all(r["same"] and r["updates"] == 1 for r in results)


def _restored() -> list[Any]:
    storage = Storage(ODD, Groups(), seed=3, dtype=torch.float64)
    names = [name for name, _ in storage.optimizer_rows()]
    storage.updates = 4
    _gradients(storage)
    storage.update(0.1)
    after = storage.updates
    storage.reset_optimizer()
    return [names[:2], len(names), after, storage.updates]


def test_the_optimizer_s_state_is_laid_out_before_a_checkpoint_fills_it() -> None:
    """Would catch a resumed run whose bias correction starts again at one."""
    names, count, after, reset = run_ranks(1, _restored)[0]
    assert names == ["exp_avg.embed.weight", "exp_avg_sq.embed.weight"]
    assert (count, after, reset) == (2 * len(weight_table(ODD)), 5, 0)


def _listed_then_updated() -> float:
    storage = Storage(ODD, Groups(), seed=3, dtype=torch.float64)
    list(storage.optimizer_rows())
    _gradients(storage)
    return storage.update(0.1)


def test_listing_the_state_does_not_spoil_the_first_update() -> None:
    """Would catch a checkpoint at step 0 after which no update is possible."""
    assert run_ranks(1, _listed_then_updated)[0] > 0


OTHERS = [
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "dampening": 0.5}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    ("adam", {"betas": (0.5, 0.7)}),
    ("adam", {"amsgrad": True}),
    ("adamax", {}),
    ("radam", {}),
    ("adagrad", {"initial_accumulator_value": 0.5}),
    ("adadelta", {}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
]


def _three_updates(
    name: str, given: dict[str, Any], saved_before: int | None
) -> dict[str, np.ndarray]:
    options = Elementwise(name=name, decay=0.1, clip=0.0, options=given)
    storage = Storage(ODD, Groups(), seed=3, dtype=torch.float64, options=options)
    for step in range(3):
        if step == saved_before:  # as a checkpoint would: into a storage that has done nothing
            rows = {key: t.clone() for key, t in storage.optimizer_rows()}
            other = Storage(ODD, Groups(), seed=3, dtype=torch.float64, options=options)
            for key, t in other.optimizer_rows():
                t.copy_(rows[key])
            for key, master in storage.masters.items():
                other.masters[key].copy_(master)
            other.updates, storage = storage.updates, other
        _gradients(storage)
        for total in storage.sums.values():
            total.mul_(step + 1.0)
        storage.update(0.05)
    return {n: m.numpy() for n, m in storage.masters.items()}


@pytest.mark.parametrize("saved_before", [None, 0, 2], ids=["at once", "from 0", "from 2"])
@pytest.mark.parametrize(("name", "options"), OTHERS, ids=str)
def test_any_elementwise_optimizer_is_torch_s(
    name: str, options: dict[str, Any], saved_before: int | None
) -> None:
    """Would catch state that a checkpoint forgets, a first step that was taken for laying it out
    (dampening would hold back the true one), and a rate or decay that stays at the zero of that
    step."""
    ranks = 2 if name == "sgd" else 1
    results = run_ranks(ranks, _three_updates, name, options, saved_before)
    weights = {n: torch.nn.Parameter(w) for n, w in full_weights(ODD, 3, torch.float64).items()}
    optimizer = ELEMENTWISE[name](
        [
            {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": 0.1},
            {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
        ],
        lr=0.05,
        **options,
    )
    for step in range(3):
        for w in weight_table(ODD):
            generator = torch.Generator().manual_seed(w.elements)
            grad = torch.randn(w.shape, generator=generator, dtype=torch.float64)
            weights[w.name].grad = grad * (step + 1.0)
        optimizer.step()
    for key, wanted in weights.items():
        got = np.concatenate([r[key] for r in results])
        np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-12, atol=1e-14)


def test_unknown_optimizers_and_options_are_refused() -> None:
    """Would catch a traceback from torch's depths."""
    with pytest.raises(SpecError, match="did you mean 'rmsprop'"):
        Elementwise(name="rmspro")
    with pytest.raises(SpecError, match=r"options of sgd.*momentun"):
        Elementwise(name="sgd", options={"momentun": 0.9}).make([{"params": [torch.zeros(1)]}])
    with pytest.raises(
        SpecError, match=r"options of sgd: got weight_decay, wanted optimizer.decay"
    ):
        Elementwise(name="sgd", options={"weight_decay": 0.1})
