"""The executor: what it refuses, what it repeats bit by bit, what it tells of its actions."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.mesh import Groups
from headrace.errors import HeadraceError, PlanMismatch, SpecError
from headrace.layouts.partition import storage_partition
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths, compile_plan, weight_table
from headrace.spec.architecture import bucket_count
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan
from headrace.spec.strategy import Scheme
from oracles import full_weights, reference_step
from plans import random_documents, random_plan
from ranks import run_ranks
from spread import whole

LLAMA = Architecture(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61)
LAYERS = LayerPlan.uniform(LayerOption.of("ulysses_z"), 2)


def _plan(devices: int, lengths: tuple[int, ...], *groups: tuple[int, ...], **rest: Any) -> Plan:
    """Sequence i alone in a micro-batch on group i, wherever that group is."""
    pipelines = tuple(dict.fromkeys(groups))
    return Plan(
        lengths=Lengths(tokens=lengths),
        devices=devices,
        pipelines=tuple(Pipeline(scheme=Scheme(context=len(g)), ranks=g) for g in pipelines),
        micro_batches=tuple(
            MicroBatch(pipeline=pipelines.index(g), sequences=(i,), layers=LAYERS)
            for i, g in enumerate(groups)
        ),
        predicted_s=0.0,
        lower_bound_s=0.0,
        **rest,
    )


def _documents(lengths: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return tuple(rng.integers(LLAMA.vocabulary, size=n).astype(np.int32) for n in lengths)


def _executor(dtype: torch.dtype = torch.float64, **rest: Any) -> Executor:
    groups = Groups()
    storage = Storage(LLAMA, groups, seed=1, dtype=dtype, options=AdamW(clip=0.0))
    return Executor(storage, groups, seed=1, **rest)


def _bits(executor: Executor, plan: Plan, documents: Any) -> tuple[Any, ...]:
    result = executor.run(plan, documents, step=0, lr=0.0)
    sums = {name: s.numpy().tobytes() for name, s in executor.storage.sums.items()}
    return result.loss, result.gradient_norm, sums


def _repeated(plans: int) -> list[bool]:
    rng, same = np.random.default_rng(0), []
    executors = [_executor(torch.float32), _executor(torch.float32)]
    for _ in range(plans):
        documents = random_documents(rng, LLAMA.vocabulary, 6, 60)
        plan = random_plan(Lengths.of(map(len, documents)), 3, LLAMA.layers, rng)
        runs = [_bits(e, plan, documents) for e in (*executors, *executors)]
        same.append(all(run == runs[0] for run in runs))
    return same


@pytest.mark.parametrize("plans", [2, whole(4)])
def test_the_same_plan_gives_the_same_bits(plans: int) -> None:
    """Would catch sums in order of arrival, and anything of a step that the next one sees."""
    assert run_ranks(3, _repeated, plans) == [[True] * plans] * 3


def _refusals(plans: list[list[Plan]]) -> tuple[list[str], float]:
    """Each of ``plans`` holds the plan of every rank; then a step that must work."""
    executor, out = _executor(), []
    for plan in plans:
        try:
            executor.prepare(plan[executor.groups.rank])
            out.append("accepted")
        except PlanMismatch as error:
            out.append(str(error))
    good = _plan(3, (5, 4), (0, 1), (2,))
    return out, executor.run(good, _documents((5, 4)), step=0, lr=0.0).loss


def test_a_plan_of_another_kind_or_of_other_ranks_is_refused_everywhere() -> None:
    """Would catch a rank that runs what the others refuse, and an executor that a refusal
    leaves unusable."""
    good = _plan(3, (5, 4), (0, 1), (2,))
    moved = _plan(3, (5, 4), (0, 1), (1,))
    cases = [
        [good.replace(semantics="lockstep")] * 3,
        [_plan(2, (5, 4), (0, 1), (1,))] * 3,
        [good, good, moved],
        [moved, good, good],
        [good, good, good.replace(working="sharded")],
        [good, good.replace(predicted_s=1.0, why=("another reason",)), good],
    ]
    results = run_ranks(3, _refusals, cases)
    told = results[0][0]
    assert all(errors == told for errors, _ in results)
    assert told[0] == "plan: got lockstep for 3 ranks, wanted free for 3"
    assert told[1] == "plan: got free for 2 ranks, wanted free for 3"
    assert [text.split(": got ")[0] for text in told[2:5]] == ["hash of the plan"] * 3
    assert [text.partition("on rank ")[2][0] for text in told[2:5]] == ["2", "1", "2"]
    assert told[5] == "accepted"  # predictions are no decisions
    assert len({loss for _, loss in results}) == 1


def _layers(text: str) -> Plan:
    plan = _plan(2, (5, 4), (0, 1), (1,))
    micros = [replace(micro, layers=LayerPlan.parse(text)) for micro in plan.micro_batches]
    return plan.replace(micro_batches=(micros[0], plan.micro_batches[1]))


UNFIT = {
    "1*ulysses_z": "layers of micro-batch 0: got 1, wanted 2",
    "3*ulysses_z": "layers of micro-batch 0: got 3, wanted 2",
    "1*ulysses_z 1*local": "method local: local runs on 1 rank, not 2",
    "1*ulysses_z/local 1*ulysses_z": "method local: local runs on 1 rank, not 2",
    "2*tensor_ring": "method tensor_ring: tensor_ring runs on ranks that are blocks of at least 2",
}


def _unfit() -> list[str]:
    executor, out = _executor(), []
    for text in UNFIT:
        try:
            executor.prepare(_layers(text))
            out.append("accepted")
        except HeadraceError as error:
            out.append(str(error))
    loss = executor.run(_layers("2*ulysses_z"), _documents((5, 4)), step=0, lr=0.0).loss
    return [*out, "then it runs" if loss > 0 else "nothing runs"]


def test_layers_that_the_model_or_a_stage_does_not_have_are_refused_before_the_step() -> None:
    """Would catch layers that are cut off or missing, and a method that is found out in the
    middle of a forward, when others wait in theirs."""
    for told in run_ranks(2, _unfit):
        for got, wanted in zip(told, [*UNFIT.values(), "then it runs"], strict=True):
            assert got.startswith(wanted)


def _wrong_lengths() -> list[str]:
    executor, out = _executor(), []
    plan = _plan(1, (6, 5), (0,), (0,))
    for lengths in ((6, 4), (7, 5), (5, 6), (6,), (6, 5, 1), ()):
        try:
            executor.run(plan, _documents(lengths), step=0, lr=0.1)
            out.append("accepted")
        except PlanMismatch as error:
            out.append(str(error))
    return [*out, str(executor.storage.updates)]


def test_sequences_that_are_not_as_long_as_planned_are_refused() -> None:
    """Would catch tokens that are cut off, and a loss divided by the planned count."""
    (told,) = run_ranks(1, _wrong_lengths)
    assert told == [
        "tokens of sequence 1: got 4, wanted 5",
        "tokens of sequence 0: got 7, wanted 6",
        "tokens of sequence 0: got 5, wanted 6",
        "tokens of sequence 1: got none, wanted 5",
        "tokens of sequence 2: got 1, wanted none",
        "tokens of sequence 0: got none, wanted 6",
        "0",
    ]


def test_a_plan_of_another_kind_on_one_rank_is_refused_everywhere() -> None:
    """Would catch ranks that wait for ever to agree with one that has already left."""
    good = _plan(3, (5, 4), (0, 1), (2,))
    cases = [[good, good.replace(semantics="lockstep"), good]]
    results = run_ranks(3, _refusals, cases, timeout_s=3.0)
    assert all("plan" in errors[0] for errors, _ in results)


def _loss_and_sums(plan: Plan) -> tuple[float, dict[str, np.ndarray]]:
    executor = _executor()
    result = executor.run(plan, _documents(plan.lengths.tokens), step=0, lr=0.0)
    return result.loss, {name: s.numpy() for name, s in executor.storage.sums.items()}


def _wrong(plan: Plan) -> list[str]:
    """Names of gradients that differ from those of one process."""
    results = run_ranks(plan.devices, _loss_and_sums, plan, timeout_s=20.0)
    weights = full_weights(LLAMA, 1, torch.float64)
    loss, grads = reference_step(list(_documents(plan.lengths.tokens)), weights, LLAMA)
    wrong = [] if results[0][0] == pytest.approx(loss, rel=1e-10) else ["loss"]
    for w in weight_table(LLAMA):
        parts = storage_partition(w, plan.devices).parts
        got = np.concatenate([sums[w.name] for _, sums in results])
        assert len(got) == sum(len(part) for part in parts)
        if np.abs(got - grads[w.name].numpy()).max() > 1e-10:
            wrong.append(w.name)
    return wrong


def test_ranks_that_share_several_groups_and_ranks_without_work() -> None:
    """Would catch a group entered in another order by one of its ranks, and a rank that holds
    rows but leaves when it has nothing to run."""
    groups = ((0, 1, 2), (1, 2), (0,), (1, 2), (2,))
    assert _wrong(_plan(4, (9, 5, 4, 7, 1), *groups, working="sharded")) == []
    assert _wrong(_plan(4, (9, 5, 4, 7, 1), *groups)) == []


def test_the_ranks_of_a_pipeline_in_any_order() -> None:
    """Would catch tokens cut in the order of the plan but exchanged in the order of the group:
    such a plan is refused or gives the right gradients."""
    try:
        plan = _plan(3, (12,), (2, 0, 1))
    except SpecError:
        return
    assert _wrong(plan) == []


def _told(plan: Plan) -> dict[str, Any]:
    entered: list[str] = []
    executor = _executor(entered=entered.append)
    result = executor.run(plan, _documents(plan.lengths.tokens), step=0, lr=0.0)
    rows = [(r.rank, r.action, r.kind, r.tokens, r.ranks) for r in result.rows]
    times = [(r.start_s, r.end_s) for r in result.rows]
    return {"entered": entered, "rows": rows, "times": times}


def test_every_action_is_told_and_measured() -> None:
    """Would catch an action missing from a timeline, a wait that is not measured, and a watcher
    that would name the wrong action of a hung rank."""
    plan = _plan(3, (8, 3), (0, 1), (0,))
    count = bucket_count(LLAMA)
    results = run_ranks(3, _told, plan)
    for rank, (result, program) in enumerate(zip(results, compile_plan(plan, count), strict=True)):
        assert result["entered"] == [*map(str, program.actions), "between steps"]
        pulls = [(rank, f"P{b}", "pull", 0, 3) for b in range(count)]
        pushes = [(rank, f"G{b}", "push", 0, 3) for b in reversed(range(count))]
        work = {
            0: [
                ("0F0[0,1]", "forward", 8, 2),
                ("0B0[0,1]", "backward", 8, 2),
                ("0F1[0]", "forward", 3, 1),
                ("0B1[0]{3,2,1,0}", "backward", 3, 1),
            ],
            1: [("0F0[0,1]", "forward", 8, 2), ("0B0[0,1]", "backward", 8, 2)],
            2: [],
        }[rank]
        assert result["rows"] == [
            *pulls,
            *((rank, *row) for row in work),
            *pushes,
            (rank, "U", "update", 0, 3),
        ]
        times = [
            t for t, row in zip(result["times"], result["rows"], strict=True) if row[2] != "pull"
        ]
        ends = [0.0, *(end for _, end in times)]
        for before, (start, end) in zip(ends, times, strict=False):
            assert before <= start <= end


def _failed() -> list[Any]:
    executor = _executor()
    good = _documents((6, 5))
    bad = (good[0], np.full(5, LLAMA.vocabulary, dtype=np.int32))
    before = {n: m.clone() for n, m in executor.storage.masters.items()}
    plan = _plan(1, (6, 5), (0,), (0,))
    with pytest.raises(IndexError):
        executor.run(plan, bad, step=0, lr=0.1)
    kept = all(torch.equal(before[n], m) for n, m in executor.storage.masters.items())
    again = _bits(executor, plan, good)
    return [kept, executor.storage.updates, again == _bits(_executor(), plan, good)]


def test_a_step_that_fails_leaves_the_weights_as_they_were() -> None:
    """Would catch an update before the last backward, and gradients of the failed step in the
    sums of the next."""
    assert run_ranks(1, _failed) == [[True, 1, True]]


def test_documents_of_one_token_predict_nothing() -> None:
    """Would catch a division by zero predicted tokens: every weight would turn to NaN."""
    plan = _plan(2, (1, 1, 1), (0, 1), (0,), (1,))
    for loss, sums in run_ranks(2, _loss_and_sums, plan):
        assert loss == 0
        assert not any(s.any() for s in sums.values())


def _order(plan: Plan) -> tuple[float, float]:
    executor = _executor()
    documents = _documents(plan.lengths.tokens)
    first = executor.run(plan, documents, step=0, lr=0.003)
    second = executor.run(plan, documents, step=1, lr=0.003)
    return first.loss, second.loss


def test_the_loss_is_the_batch_s_on_every_rank() -> None:
    """Would catch a rank that reports its own part, and weights that an update does not reach."""
    plan = _plan(3, (9, 4), (0, 1), (2,))
    results = run_ranks(3, _order, plan)
    assert len({json.dumps(losses) for losses in results}) == 1
    first, second = results[0]
    assert first == pytest.approx(np.log(LLAMA.vocabulary), rel=0.05)
    assert second < first


def _in_flight(limit: float) -> tuple[Any, int, int]:
    """Bits of a step, and the most pulls and pushes under way at a time."""
    executor = _executor(in_flight_bytes=limit)
    under_way = {"pull": [0], "push": [0]}
    plan = _plan(3, (9, 4, 6), (0, 1), (2,), (1, 2))
    working = executor.storage.working(plan)

    def counted(kind: str, issue: Any) -> Any:
        def issued(bucket: int) -> Any:
            pending = issue(bucket)
            if pending is not None:
                under_way[kind].append(under_way[kind][-1] + 1)
                ended = pending.wait

                def wait() -> None:
                    under_way[kind].append(under_way[kind][-1] - 1)
                    ended()

                pending.wait = wait
            return pending

        return issued

    working.pull, working.push = counted("pull", working.pull), counted("push", working.push)
    bits = _bits(executor, plan, _documents((9, 4, 6)))
    assert under_way["pull"][-1] == under_way["push"][-1] == 0
    return bits, max(under_way["pull"]), max(under_way["push"])


def test_what_is_under_way_is_limited() -> None:
    """Catches buffers of all pulls at once where there is no room for them, ranks that wait for
    each other for ever, and a limit that changes what is computed."""
    count = bucket_count(LLAMA)
    free = run_ranks(3, _in_flight, float("inf"))
    one = run_ranks(3, _in_flight, 0.0)
    some = run_ranks(3, _in_flight, 100_000.0)
    assert [most for _, *most in free] == [[count, count]] * 3
    assert [most for _, *most in one] == [[1, 1]] * 3
    assert all(1 < pulls < count for _, pulls, _ in some)
    assert [bits for bits, *_ in one] == [bits for bits, *_ in free] == [bits for bits, *_ in some]
