"""The profiler: the same profile everywhere, enough to fit, and nothing left behind."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.collectives import gather_floats
from headrace.comm.mesh import Groups
from headrace.costs.sources.measured import costs_from_profile
from headrace.errors import InfeasiblePlan
from headrace.methods import branch
from headrace.native.counted import ByteCounter
from headrace.native.executor import Executor
from headrace.native.storage import Storage
from headrace.profiling.branches import ProfileOptions
from headrace.profiling.profiler import Profiler
from headrace.profiling.two_layers import TwoLayers
from headrace.spec import Architecture, Cluster, Lengths
from headrace.spec.architecture import parameter_count
from headrace.spec.layer_plan import RECOMPUTE, LayerOption
from headrace.spec.profile import ENDS, Profile, ProfilePoint
from plans import random_documents, random_plan
from ranks import run_ranks

MODEL = Architecture(layers=3, hidden=32, heads=4, kv_heads=2, ffn=96, vocabulary=50)
LONGEST = 64
BRANCHES = {  # group size: attention methods and feed-forwards that are measured
    1: (("local",), ("local",)),
    2: (("ulysses_z", "megatron_cz", "megatron_ts"), ("ulysses_z", "megatron_ts")),
    3: (("ulysses_z", "megatron_cz"), ("ulysses_z", "megatron_ts")),
}
METHODS = ("ulysses_z", "megatron_cz", "megatron_ts", "ulysses_ring")
LEVELS = ("none", "attention")


def _profiled(
    sizes: tuple[int, ...], model: Architecture, methods: tuple[str, ...] = METHODS
) -> dict[str, Any]:
    groups = Groups()
    storage, told = Storage(model, groups, seed=2), []
    before = {name: master.clone() for name, master in storage.masters.items()}
    profiler = Profiler(
        storage,
        groups,
        ProfileOptions(sizes=sizes, longest=LONGEST, repeats=1, methods=methods),
        progress=lambda what, done, of: told.append((what, done, of)),
    )
    cluster = Cluster(devices=groups.ranks, memory_bytes=2**30)
    profile = profiler.profile("fingerprint", cluster)
    same = all(torch.equal(before[n], m) for n, m in storage.masters.items())
    return {
        "profile": profile.to_json(),
        "masters": same,
        "updates": storage.updates,
        "step": _step(storage, groups) == _step(Storage(model, groups, seed=2), groups),
        "told": told,
        "state": storage.bytes_held(),
    }


def _step(storage: Storage, groups: Groups) -> dict[str, bytes]:
    """The weights' bits after one step of a plan."""
    rng = np.random.default_rng(5)
    documents = random_documents(rng, storage.architecture.vocabulary, 5, 20)
    lengths = Lengths.of(map(len, documents))
    plan = random_plan(lengths, groups.ranks, storage.architecture.layers, rng)
    Executor(storage, groups, seed=2).run(plan, documents, step=0, lr=0.01)
    return {name: master.numpy().tobytes() for name, master in storage.masters.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """One profile on three ranks: for groups of two, the third rank has nothing to measure."""
    return run_ranks(3, _profiled, (1, 2, 3), MODEL)


@pytest.fixture(scope="module")
def profile(results: list[dict[str, Any]]) -> Profile:
    return Profile.from_json(results[0]["profile"])


def test_every_rank_gets_the_same_profile(results: list[dict[str, Any]]) -> None:
    """Would catch numbers of one rank alone: ranks would plan differently."""
    assert all(r["profile"] == results[0]["profile"] for r in results)
    assert len({r["state"] for r in results}) > 1
    assert results[0]["profile"]["state_bytes"] == max(r["state"] for r in results)


def _ladders(profile: Profile) -> dict[tuple[int, str], list[ProfilePoint]]:
    ladders: dict[tuple[int, str], list[ProfilePoint]] = {}
    for point in profile.points:
        ladders.setdefault((point.p, point.option), []).append(point)
    return ladders


def test_points_for_every_size_branch_and_level(profile: Profile) -> None:
    """Would catch a ladder left out, a shared feed-forward measured again for each method, a
    method measured where the heads do not allow it, and packs that shrink."""
    options = {
        (p, f"{part}:{name}" + ("" if level == "none" else f"+{level}"))
        for p, parts in BRANCHES.items()
        for part, names in zip(("attention", "feed_forward"), parts, strict=True)
        for name in names
        for level in LEVELS
    }
    ladders = _ladders(profile)
    assert ladders.keys() == options | {(p, ENDS) for p in BRANCHES}
    for points in ladders.values():
        tokens = [sum(point.lengths) for point in points]
        assert tokens == sorted(tokens)
        assert len(set(tokens)) >= 4
        assert max(tokens) <= LONGEST
        assert any(len(point.lengths) > 1 for point in points)
        assert sum(point.kept_bytes is not None for point in points) >= 2
        assert all(point.forward_s > 0 and point.backward_s > 0 for point in points)
        packs = [point.lengths for point in points]
        assert len(set(packs)) == len(packs)


def test_points_say_what_they_hold_for(profile: Profile) -> None:
    """Would catch a ring measured in natural order, and shards that are said to be fetched where
    a method uses them as they lie."""
    for (p, text), points in _ladders(profile).items():
        ring = p > 1 and text.startswith("attention:megatron_cz")
        assert {point.order for point in points} == {"zigzag" if ring else "natural"}
        assert {point.fetched for point in points} == {0.0 if "megatron_ts" in text else 1.0}


def test_levels_keep_less_the_more_they_run_again(profile: Profile) -> None:
    """Would catch bytes counted at the wrong mark, or of the layer before: a feed-forward that is
    computed again keeps its result and the norm's statistics and nothing else."""
    kept: dict[tuple[int, str], float] = {}
    for (p, text), points in _ladders(profile).items():
        counted = [x for x in points if x.kept_bytes is not None]
        kept[p, text] = median(x.kept_bytes / -(-sum(x.lengths) // p) for x in counted)
    for p, (_, names) in BRANCHES.items():
        for name in names:
            none, again = kept[p, f"feed_forward:{name}"], kept[p, f"feed_forward:{name}+attention"]
            assert none > again
            assert again == pytest.approx(4 * MODEL.hidden + 4, rel=0.05)
    assert kept[1, "attention:local"] > kept[1, "attention:local+attention"]


def test_a_profile_can_be_fitted(profile: Profile) -> None:
    """Would catch a ladder too short to tell squares, tokens and constants apart, branches that do
    not make layers, and a shared feed-forward under a name that the group cannot run."""
    costs = costs_from_profile(profile)
    for p, (attention, feed) in BRANCHES.items():
        for name in attention:
            for other in feed:
                for level in RECOMPUTE:
                    option = LayerOption(attention=name, feed_forward=other, recompute=level)
                    cost = costs.option(p, option)
                    assert cost.forward((LONGEST,)) > 0
                    assert cost.kept(LONGEST) > 0
        for text in costs.options[p]:
            option = LayerOption.parse(text)
            for part, name in (
                ("attention", option.attention),
                ("feed_forward", option.feed_forward),
            ):
                assert branch(name, part, MODEL, p) is not None
    full = costs.option(1, LayerOption.of("local", "full"))
    assert full.kept.slope == MODEL.hidden * 4


def test_methods_that_no_size_supports_are_told() -> None:
    """Would catch an empty ladder that fails where costs are fitted, without the reason."""
    with pytest.raises(AssertionError, match="methods on groups of 3: got ulysses_ring, wanted"):
        run_ranks(3, _profiled, (1, 3), MODEL, ("ulysses_ring",))


def test_constants_of_the_step(profile: Profile) -> None:
    """Would catch bytes of gradients forgotten beside those of working weights, and gathers
    timed for groups of one."""
    whole = 2 * 4 * parameter_count(MODEL)
    for p in BRANCHES:
        held = profile.working_bytes[p]
        assert held["replicated"] == whole
        assert held["sharded"] >= whole / p
        assert (held["sharded"] == whole) == (p == 1)
    assert set(profile.exchange_s) == {"pull_s", "push_s", "update_s"}
    assert all(seconds > 0 for seconds in profile.exchange_s.values())
    assert set(profile.gather_s) == {2, 3}
    assert all(0 < forward < backward for forward, backward in profile.gather_s.values())
    assert 0 < profile.measured_in_s < 60


def test_nothing_is_left_behind(results: list[dict[str, Any]]) -> None:
    """Would catch noise left in working weights, optimizer state or sums: the step after a
    profile has the bits of one without."""
    assert all(r["masters"] and r["updates"] == 0 and r["step"] for r in results)


def test_progress_is_told_once_per_ladder(results: list[dict[str, Any]]) -> None:
    """Would catch a bar that never ends."""
    told = results[0]["told"]
    assert [done for _, done, _ in told] == list(range(23))
    assert {of for *_, of in told} == {22}
    assert told[0][0] == "profile cp1 ends"


def test_one_rank_can_be_profiled() -> None:
    """Would catch a single process whose weights are overwritten: they are the working ones."""
    result = run_ranks(1, _profiled, (1,), MODEL)[0]
    assert result["masters"]
    assert result["step"]
    profile = Profile.from_json(result["profile"])
    assert profile.working_bytes == {1: {"replicated": 0, "sharded": 0}}
    assert profile.gather_s == {}
    costs_from_profile(profile)


class _Exhausted(ByteCounter):
    """Memory that runs out at ``limit`` bytes of live tensors made inside."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit
        self.raised = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self.current_bytes > self._limit:
            self.raised += 1
            raise torch.OutOfMemoryError("injected")
        return out


def _starved(room: int, there: float) -> tuple[dict[str, Any], int]:
    """A profile where ``room`` bytes should be left, of which the last rank has ``there``."""
    groups, wide = Groups(), replace(MODEL, ffn=1024)
    storage = Storage(wide, groups, seed=2)
    options = ProfileOptions(
        sizes=(2,),
        longest=2048,
        repeats=1,
        methods=("megatron_cz",),
        levels=("none",),
        point_s=20.0,
    )
    profiler = Profiler(storage, groups, options)
    held = max(int(n) for (n,) in gather_floats([storage.bytes_held()], groups.world))
    memory = held + TwoLayers(wide).bytes_held + room
    last = groups.rank == groups.ranks - 1
    starving = _Exhausted(there if last else float("inf"))
    with starving:
        profile = profiler.profile("f", Cluster(devices=2, memory_bytes=memory))
    return profile.to_json(), starving.raised


def test_memory_that_runs_out_on_one_rank_ends_the_ladder_on_all() -> None:
    """Would catch a rank that waits for one that has failed, a failure that ends the job, and
    ranks that go on measuring different packs."""
    (one, calm), (other, raised) = run_ranks(2, _starved, 50_000_000, 30e6, timeout_s=60)
    assert one == other
    assert (calm, raised > 0) == (0, True)
    profile = Profile.from_json(one)
    over = {(pack.p, pack.option): pack.tokens for pack in profile.not_fitting}
    assert (2, "feed_forward:ulysses_z") in over
    for (p, text), points in _ladders(profile).items():
        tokens = max(sum(point.lengths) for point in points)
        if (p, text) in over:
            assert tokens < over[p, text] <= 2048
        else:
            assert tokens == 2048
        counted = [point for point in points if point.kept_bytes is not None]
        assert all(2 * (c.kept_bytes or 0) < 30e6 for c in counted)


def test_what_cannot_fit_is_not_tried() -> None:
    """Would catch a rung that fills the memory of a machine that then kills the process."""
    (one, calm), (_, raised) = run_ranks(2, _starved, 20_000_000, 60e6, timeout_s=60)
    assert (calm, raised) == (0, 0)
    assert Profile.from_json(one).not_fitting


def _too_large() -> str:
    groups = Groups()
    storage = Storage(MODEL, groups, seed=2)
    options = ProfileOptions(sizes=(1,), longest=64)
    try:
        Profiler(storage, groups, options).profile("f", Cluster(devices=2, memory_bytes=1000))
    except InfeasiblePlan as error:
        return str(error)
    return ""


def test_a_model_that_leaves_no_memory_is_said() -> None:
    """Would catch a division of nothing, and ranks that wait for one that stops."""
    texts = run_ranks(2, _too_large)
    assert texts[0] == texts[1]
    assert "for stored weights and two layers to measure, wanted less than 0.977 KiB" in texts[0]


def test_links_are_measured(profile: Profile) -> None:
    """Would catch a link of another size's groups, and speeds that no planner could divide by."""
    assert profile.links.keys() == {2, 3}
    assert all(start >= 0 and speed > 0 for start, speed in profile.links.values())


def _with_a_large_head() -> dict[str, Any]:
    groups, model = Groups(), replace(MODEL, layers=1, vocabulary=2_000)
    options = ProfileOptions(
        sizes=tuple(range(1, groups.ranks + 1)),
        longest=8_192,
        repeats=1,
        methods=("megatron_cz",),
        levels=("none",),
        point_s=20.0,
    )
    profiler = Profiler(Storage(model, groups, seed=2), groups, options)
    return profiler.profile("f", Cluster(devices=groups.ranks, memory_bytes=2**33)).to_json()


@pytest.mark.slow
def test_the_head_of_a_long_pack_is_counted_by_its_chunks() -> None:
    """Catches logits of a chunk of tokens that are extrapolated from shorter packs as if a long one
    held all of its logits at once: packs of 8,192 tokens took 4 times the bytes on paper."""
    (found, _) = run_ranks(2, _with_a_large_head, timeout_s=120)
    costs = costs_from_profile(Profile.from_json(found))
    points = [p for p in Profile.from_json(found).points if p.option == ENDS]
    for p in (1, 2):
        counted = [x for x in points if x.p == p and x.transient_bytes is not None]
        largest = max(x.transient_bytes or 0 for x in counted)
        assert max(sum(x.lengths) for x in counted) >= 4096 * p
        # longer packs hold no more logits, but their rows' other values
        assert 0.99 * largest <= costs.ends[p].transient(8_192) < 1.5 * largest
        for x in counted:
            assert costs.ends[p].transient(sum(x.lengths)) >= 0.95 * (x.transient_bytes or 0)
