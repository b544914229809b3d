"""Storage and working layouts of random plans, against what each rank's micro-batches need."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from headrace.layouts.partition import (
    Partition,
    Rows,
    group_shards,
    link,
    received_rows,
    sent_rows,
    storage_partition,
    storage_partitions,
    working_key,
    working_partition,
    working_partitions,
    works_whole,
)
from headrace.spec import Architecture, Lengths, weight_table
from headrace.spec.architecture import WeightSpec
from headrace.spec.layer_plan import LayerOption, LayerPlan
from headrace.spec.plan import MicroBatch, Pipeline, Plan, Working
from headrace.spec.strategy import Scheme, Strategy
from plans import random_plan
from strategies import NAMED, laid_out

LLAMA = Architecture(layers=2, hidden=48, heads=6, kv_heads=3, ffn=40, vocabulary=61, tied=False)
GPT = Architecture(
    layers=1, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=7, kind="gpt", positions=5
)
WEIGHTS = [*weight_table(LLAMA), *weight_table(GPT)]


def _plan(devices: int, *groups: tuple[int, ...], working: Working = "sharded") -> Plan:
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


def _random_plans(count: int) -> list[Plan]:
    rng = np.random.default_rng(0)
    plans = []
    for _ in range(count):
        devices = int(rng.integers(1, 7))
        lengths = Lengths.of(rng.integers(1, 20, size=int(rng.integers(1, 6))))
        plans.append(random_plan(lengths, devices, 2, rng))
    return plans


@pytest.mark.parametrize("ranks", NAMED)
def test_no_rank_receives_more_than_its_part_or_sends_more_than_all(ranks: int) -> None:
    """Would catch a stage that pulls other stages' layers or more than its tensor share, and an
    owner that sends rows twice (Hydraulis, appendix B.1: at most W / TP in, W out)."""
    a = replace(LLAMA, heads=8, kv_heads=8, ffn=128, layers=3)
    table = weight_table(a)
    whole = sum(w.elements for w in table)
    uncut = sum(w.elements for w in table if w.unit is None)
    for text in NAMED[ranks]:
        plan = laid_out(text, a, tuple(range(1, 20)), ranks)
        received, sent = [0] * ranks, [0] * ranks
        for w in table:
            slices = link(storage_partition(w, ranks), working_partition(w, plan))
            for rank in range(ranks):
                received[rank] += received_rows(slices, rank) * w.row_elements
                sent[rank] += sent_rows(slices, rank) * w.row_elements
        for pipeline in plan.pipelines:
            for stage in pipeline.stages(a.layers):
                own = [w for w in table if {w.bucket, w.also} & set(stage.buckets)]
                part = sum(w.elements for w in own if w.unit) / pipeline.scheme.tensor
                unit = max(w.unit * w.row_elements for w in own if w.unit)
                for rank in stage.ranks:
                    assert received[rank] <= part + uncut + len(own) * unit, text
                    assert received[rank] <= whole / pipeline.scheme.tensor + uncut, text
        assert max(sent) <= whole, text
        assert sum(sent) == sum(received)


def _name(weight: WeightSpec, name: str) -> bool:
    return weight.name.endswith(name)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 50])
def test_storage_holds_every_row_once(ranks: int) -> None:
    """Would catch rows without an owner where ranks outnumber rows or units."""
    for weight in WEIGHTS:
        partition = storage_partition(weight, ranks)
        assert len(partition.parts) == ranks
        assert partition.is_disjoint_cover
        step = weight.unit or 1
        largest = max(len(part) for part in partition.parts)
        assert largest <= step * -(-weight.rows // step // ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_shards_of_a_group_are_cut_at_units_or_whole(ranks: int) -> None:
    """Would catch a KV group cut in two, and a norm cut at all: its gradient would be partial."""
    for weight in WEIGHTS:
        shards = group_shards(weight, ranks)
        if weight.unit is None:
            assert shards == (Rows(0, weight.rows),) * ranks
        else:
            assert Partition(rows=weight.rows, parts=shards).is_disjoint_cover
            assert all(shard.start % weight.unit == 0 for shard in shards)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_matrices_of_a_pair_are_cut_alike(ranks: int) -> None:
    """Would catch heads or features of one rank multiplied by those of another."""
    for one, other in (("qkv.weight", "proj.weight"), ("in.weight", "out.weight")):
        for a in (LLAMA, GPT):
            first, second = (
                next(w for w in weight_table(a) if _name(w, name)) for name in (one, other)
            )
            cuts = [
                [(shard.start // w.unit, shard.stop // w.unit) for shard in group_shards(w, ranks)]
                for w in (first, second)
                if w.unit
            ]
            assert cuts[0] == cuts[1]


def test_whole_where_a_rank_works_alone_or_the_plan_says_so() -> None:
    """Would catch a rank left with a shard though it has a micro-batch of its own."""
    assert works_whole(_plan(4, (0, 1), (2,))) == (False, False, True, False)
    assert works_whole(_plan(4, (0, 1), (1,))) == (False, True, False, False)
    assert works_whole(_plan(4, (0, 1), (2,), working="replicated")) == (True, True, True, False)
    unused = replace(
        _plan(3, (0, 1)),
        pipelines=(*_plan(3, (0, 1)).pipelines, Pipeline(scheme=Scheme(), ranks=(0,))),
    )
    assert works_whole(unused) == (False, False, False)  # a pipeline without work needs nothing


def test_working_rows_are_the_least_interval_that_serves_every_micro_batch() -> None:
    """Would catch rows that a method asks for and never get pulled, or are pulled for nothing."""
    for plan in _random_plans(60):
        whole = works_whole(plan)
        for weight in weight_table(LLAMA):
            needed: list[set[int]] = [set() for _ in range(plan.devices)]
            for micro in plan.micro_batches:
                ranks = plan.pipelines[micro.pipeline].ranks
                for rank, shard in zip(ranks, group_shards(weight, len(ranks)), strict=True):
                    rows = range(weight.rows) if whole[rank] else range(shard.start, shard.stop)
                    needed[rank] |= set(rows)
            parts = working_partition(weight, plan).parts
            for part, rows in zip(parts, needed, strict=True):
                wanted = (min(rows), max(rows) + 1) if rows else (part.start, part.start)
                assert (part.start, part.stop) == wanted


def test_one_sharded_group_of_all_ranks_works_on_what_it_stores() -> None:
    """Would catch a storage cut that differs from the working cut: matrices would move."""
    plan = _plan(3, (0, 1, 2))
    for weight in weight_table(LLAMA):
        storage, working = storage_partition(weight, 3), working_partition(weight, plan)
        if weight.unit is None:
            assert working.parts == (Rows(0, weight.rows),) * 3
        else:
            assert working == storage
            assert all(s.owner == s.reader for s in link(storage, working))


def test_partitions_of_all_weights_are_those_of_each() -> None:
    """Would catch weights taken for alike that are of other units or of other stages."""
    texts = [text for named in NAMED.values() for text in named]
    plans = _random_plans(40)
    for text in texts:
        a = replace(LLAMA, heads=8, kv_heads=8, ffn=128, layers=3)
        ranks = Strategy.parse(text).devices
        plans.append(laid_out(text, a, tuple(range(1, 20)), ranks))
    for plan in plans:
        table = weight_table(replace(LLAMA, layers=plan.layers))
        found = working_partitions(table, plan)
        assert found == {w.name: working_partition(w, plan) for w in table}
        assert len({id(p) for p in found.values()}) <= 8 * (1 + plan.layers)
        owners = storage_partitions(table, plan.devices)
        assert owners == {w.name: storage_partition(w, plan.devices) for w in table}


def test_plans_of_one_layout_have_one_key() -> None:
    """Would catch a layout that is made anew for every batch, or kept for another one."""
    keys = [working_key(plan) for plan in (_plan(4, (0, 1), (2,)), _plan(4, (0, 1), (2,)))]
    assert keys[0] == keys[1]
    others = (
        _plan(5, (0, 1), (2,)),
        _plan(4, (0, 1), (2,), working="replicated"),
        _plan(4, (0, 1)),
        _plan(4, (0, 1), (3,)),
    )
    assert all(working_key(plan) != keys[0] for plan in others)
    for one, other in itertools.combinations(_random_plans(60), 2):
        if working_key(one) == working_key(other):
            for weight in weight_table(LLAMA):
                assert working_partition(weight, one) == working_partition(weight, other)
