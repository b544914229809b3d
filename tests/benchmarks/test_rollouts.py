"""Rollouts beside static sizes and sizes by the longest sequence."""

from __future__ import annotations

import numpy as np
import pytest
from rollouts import DEVICES, KINDS, LAWS, LIMITS, RIVALS, batches_here, problem_of
from sizes_by_longest import generators

import headrace as hr
from benchmarks.scripts import Ran, run
from headrace.simulator import peak_bytes

SMALL = ("--models", "8b", "--laws", "dapo", "--sequences", 64, "--seeds", 0, 1)
HERE = ("--ranks", 2, "--batches", 1, "--repeats", 1)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run("rollouts.py", *SMALL, *HERE, json_in=tmp_path_factory.mktemp("rollouts"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_ahead_of_what_may_choose_more(ran: Ran) -> None:
    """Catches a search that misses what rules find, a bound above plans, and forwards that are
    priced as steps."""
    assert ran.code == 0, ran.err
    assert ran.numbers is not None
    cells = {cell["kind"]: cell for cell in ran.numbers["cells"]}
    assert tuple(cells) == KINDS
    for cell in cells.values():
        assert set(cell["seconds"]) == set(RIVALS)
        for seconds in cell["seconds"].values():
            assert len(seconds) == len(cell["ours_s"]) == 2
            assert all(s >= 0.995 * ours for s, ours in zip(seconds, cell["ours_s"], strict=True))
        assert all(b <= s for b, s in zip(cell["bound_s"], cell["ours_s"], strict=True))
        chosen, static = (cell["seconds"][name] for name in ("chosen", "static"))
        assert all(a <= b for a, b in zip(chosen, static, strict=True))
        script = np.mean(np.log(cell["seconds"]["script"]))
        assert script >= np.mean(np.log(static)) - 1e-9, "a script chooses less"
    for forward, step in zip(cells["forward"]["ours_s"], cells["step"]["ours_s"], strict=True):
        assert step / 5 < forward < step / 2
    for name in RIVALS:
        assert name in ran.out


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_are_measured(ran: Ran) -> None:
    """Catches a size that is left out, and numbers of another batch."""
    assert ran.numbers is not None
    (found,) = ran.numbers["measured"]
    assert found["ranks"] == 2
    assert found["lengths"] == batches_here(1, 16)
    for kind in KINDS:
        assert set(found["seconds"][kind]) == {"headrace", "cp1", "cp2"}
        for what in ("seconds", "cpu_s"):
            assert all(len(s) == 1 and s[0] > 0 for s in found[what][kind].values())


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("limit", [2048, LIMITS[-1]])
def test_sizes_are_those_of_the_rule(limit: int, batch: bool) -> None:
    """Catches a sequence on other ranks than the rule gives it, and plans beyond the memory."""
    problem = problem_of("8b", "step").replace(stages=False)
    lengths = hr.lengths.draw(LAWS["4k"], sequences=64, seed=3)
    plan = hr.plan(lengths, problem, generators=generators(tensor=1, limit=limit, batch=batch))
    assert max(peak_bytes(plan, problem.model)) <= problem.model.capacity_bytes
    longest = max(lengths.tokens)
    seen = []
    for micro in plan.micro_batches:
        ranks = len(plan.pipelines[micro.pipeline].ranks)
        for i in micro.sequences:
            tokens = longest if batch else lengths.tokens[i]
            assert ranks == 2 ** int(np.ceil(np.log2(max(1.0, tokens / limit))))
            seen.append(i)
    assert sorted(seen) == list(range(64))
    assert plan.devices == DEVICES


def test_a_limit_that_does_not_fit_is_none() -> None:
    """Catches a rule that gives a sequence more ranks than it says, to make it fit."""
    problem = problem_of("8b", "step").replace(stages=False)
    rule = generators(tensor=1, limit=1 << 20, batch=False)
    with pytest.raises(hr.errors.InfeasiblePlan):
        hr.plan([60_000, 100], problem, generators=rule)
