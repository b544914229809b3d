"""A small share of every attack; and the attacks attacked: what is planted is found."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest

from attacks import __main__ as command_line
from attacks import checkpoints, programs, steps
from attacks.attack import Attack, Case, Outcome, case_rng
from attacks.checkpoints import CHECKPOINTS
from attacks.doors import door_attack
from attacks.kills import KILLS
from attacks.planner import PLANNER
from attacks.programs import PROGRAMS
from attacks.registry import ATTACKS
from attacks.runner import Runner
from attacks.tally import Tally
from headrace.comm.mesh import Groups
from headrace.errors import ModelError, ProgramError
from headrace.native import checkpoint
from headrace.native.checkpoint import StoredShard
from headrace.native.shard_files import check_file
from headrace.spec import Plan, Program, check_programs
from jobs import Command
from spread import whole


def run(attack: Attack, cases: int) -> Tally:
    """The first cases of an attack."""
    with closing(Runner([attack], seed=0)) as runner:
        runner.for_cases({attack.name: cases})
    return runner.tallies[0]


BOTH = {
    "programs": {"refused", "sound"},
    "checkpoints": {"refused", "right"},
    "caches": {"rebuilt", "refused"},
    "data": {"refused", "right", "read"},
    "configurations": {"refused", "planned"},
}
"""How the cases of an attack that tries something must have ended, in both ways."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> checkpoints.Saved:
    """The checkpoints of a run."""
    return checkpoints.trained(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("every", [4, whole(1)])
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(
            one, marks=[pytest.mark.slow, pytest.mark.timeout(900)] if one is KILLS else []
        )
        for one in ATTACKS
        if one is not CHECKPOINTS
    ],
    ids=lambda one: one.name,
)
def test_a_few_cases_are_survived(attack: Attack, every: int) -> None:
    """Catches whatever the attack is after; and an attack that reaches nothing."""
    _survived(attack, every)


@pytest.mark.parametrize("every", [2, whole(1)])
def test_a_few_damaged_checkpoints_are_survived(saved: checkpoints.Saved, every: int) -> None:
    """Catches damage that is loaded, or that ends in a traceback."""
    _survived(checkpoints.attack_with(checkpoint.load, saved), every)


def _survived(attack: Attack, every: int) -> None:
    few = max(1, attack.few // every)
    tally = run(attack, few)
    assert tally.failures == []
    assert tally.survived == tally.cases == few
    assert set(tally.verdicts) >= BOTH.get(attack.name, set())


# Planted faults


def wrong_gradient(groups: Groups, work: steps.Steps) -> steps.Result:
    """The steps with one gradient a little wrong on the last rank."""
    found = steps.run_steps(groups, work)
    if groups.rank == groups.ranks - 1:
        for _, rows in found:
            next(iter(rows.values()))[...] *= 1 + 1e-9
    return found


def rank_that_fails(groups: Groups, work: steps.Steps) -> steps.Result:
    """A rank that fails while others wait for it."""
    if groups.ranks > 1 and groups.rank == 1:
        raise RuntimeError("planted")
    return steps.run_steps(groups, work)


def test_a_wrong_gradient_is_noticed() -> None:
    """Catches an attack that compares nothing, or too roughly."""
    tally = run(steps.attack_with(wrong_gradient), 4)
    assert tally.survived < tally.cases
    assert tally.worst is not None
    assert 1e-10 < tally.worst < 1e-8
    assert "gradient of" in tally.failures[0].words


def test_a_rank_that_fails_is_noticed_and_the_next_case_has_new_ranks() -> None:
    """Catches a failure that ends all cases after it."""
    tally = run(steps.attack_with(rank_that_fails), 5)
    assert 0 < tally.survived < 5
    assert "planted" in tally.failures[0].words


def accepts_all(found: Sequence[Program], plan: Plan, buckets: int) -> str:
    return ""


def forgets_deadlocks(found: Sequence[Program], plan: Plan, buckets: int) -> str:
    """The checker without its last rule."""
    try:
        check_programs(found, plan, buckets)
    except ProgramError as error:
        return "" if str(error).startswith("rule 5") else str(error)
    return ""


def too_strict(found: Sequence[Program], plan: Plan, buckets: int) -> str:
    return "no" if len(found) > 4 else programs.refusal(found, plan, buckets)


@pytest.mark.parametrize("checker", [accepts_all, forgets_deadlocks, too_strict])
def test_a_checker_that_errs_is_noticed(checker: programs.Refusal) -> None:
    """Catches changes so wild that one rule finds them all, and sound programs that are never
    tried."""
    assert run(programs.attack_with(checker), 120).verdicts["misjudged"] > 0


def without_checksums(path: Path, wanted: list[StoredShard]) -> dict[str, Any]:
    sizes_alone = partial(check_file, checksum=False)
    with mock.patch.object(
        checkpoint, "check_file", lambda path, file, checksum: sizes_alone(path, file)
    ):
        return checkpoint.load(path, wanted)


def test_a_load_without_checksums_is_noticed(saved: checkpoints.Saved) -> None:
    """Catches damage that never reaches the weights."""
    assert run(checkpoints.attack_with(without_checksums, saved), 40).verdicts["wrong data"] > 0


# The runner


@contextmanager
def _troubled(folder: Path) -> Iterator[Case]:
    """Cases that hang, die, fail or are fine."""

    def case(rng: np.random.Generator) -> Outcome:
        match int(rng.integers(4)):
            case 0:
                (folder / "child").write_text("x")
                Command(lambda: time.sleep(600), "sleeper")
                time.sleep(600)
            case 1:
                os.kill(os.getpid(), signal.SIGKILL)
            case 2:
                raise ValueError("planted")
        return Outcome(verdict="fine", error=0.5)

    yield case


TROUBLED = Attack(name="troubled", about="", begin=_troubled, limit_s=1.0, few=1)


def test_cases_that_hang_or_die_are_cases(capfd: pytest.CaptureFixture[str]) -> None:
    """Catches a runner that hangs or dies with a case, children that are left, and what a case
    prints among the table."""
    drawn = (
        [int(case_rng(seed, "troubled", n).integers(4)) for n in range(6)] for seed in range(999)
    )
    seed, kinds = next((seed, kinds) for seed, kinds in enumerate(drawn) if len({*kinds}) == 4)
    wanted = [("hung", "died", "traceback", "fine")[kind] for kind in kinds]
    ended: list[str] = []
    before = len(psutil.Process().children(recursive=True))
    with closing(
        Runner([TROUBLED], seed, lambda tally, number, outcome: ended.append(outcome.verdict))
    ) as runner:
        runner.for_cases({"troubled": 6})
    assert ended == wanted
    assert len(psutil.Process().children(recursive=True)) == before
    tally = runner.tallies[0]
    assert tally.survived == wanted.count("fine")
    assert tally.worst == 0.5
    assert "planted" in next(f.words for f in tally.failures if f.verdict == "traceback")
    assert capfd.readouterr() == ("", "")


def test_a_case_runs_again_by_its_number() -> None:
    """Catches draws that depend on what ran before."""
    told: dict[int, list[str]] = {}

    def keep(tally: Tally, number: int, outcome: Outcome) -> None:
        told.setdefault(number, []).append(outcome.words)

    for numbers in (range(20), (13, 7)):
        with closing(Runner([PROGRAMS], 5, keep)) as runner:
            for number in numbers:
                runner.one(number)
    assert told[13][0] == told[13][1]
    assert told[7][0] == told[7][1]
    assert len({words for words, *_ in told.values()}) > 5


def test_an_attack_that_cannot_begin_is_told_once() -> None:
    """Catches a runner that tries again for an hour, or calls nothing a success."""

    @contextmanager
    def begin(folder: Path) -> Iterator[Case]:
        raise OSError("planted")
        yield

    with closing(Runner([replace(TROUBLED, begin=begin)], 0)) as runner:
        runner.for_seconds(5)
    assert runner.tallies[0].verdicts == {"no start": 1}
    assert "planted" in runner.tallies[0].failures[0].words


def test_time_is_shared_by_weight() -> None:
    """Catches an attack that takes all, or gets nothing."""

    @contextmanager
    def begin(folder: Path) -> Iterator[Case]:
        yield lambda rng: time.sleep(0.02) or Outcome(verdict="fine")

    before, longest = {"light": 0.0, "heavy": 0.0}, 0.0

    def told(tally: Tally, number: int, outcome: Outcome) -> None:
        nonlocal longest
        longest = max(longest, tally.seconds - before[tally.attack.name])
        before[tally.attack.name] = tally.seconds

    light = replace(TROUBLED, name="light", begin=begin, limit_s=60)
    heavy = replace(light, name="heavy", weight=3.0)
    with closing(Runner([light, heavy], 0, told)) as runner:
        runner.for_seconds(1.5)
    few, many = (tally.seconds for tally in runner.tallies)
    assert min(few, many) > 0
    assert abs(many / 3 - few) <= longest  # nobody is ahead by more than a case


def test_the_command_prints_a_table_and_how_to_run_a_failure_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Catches a failure that is not in the exit code, and a command that runs another case."""
    bad = programs.attack_with(accepts_all)
    monkeypatch.setattr(command_line, "ATTACKS", (bad, TROUBLED))
    arguments = ["--minutes", "0.03", "--seed", "3", "--only", "programs"]
    assert command_line.main([*arguments, "--json", str(tmp_path / "found.json")]) == 1
    out = capsys.readouterr().out
    assert "| attack   | cases " in out
    flags = re.search(r'make attack ARGS="(.*)"', out)
    assert flags is not None
    found = json.loads((tmp_path / "found.json").read_text())
    (programs_found,) = found["attacks"]
    assert found["seed"] == 3
    assert programs_found["cases"] > programs_found["survived"] > 0
    assert command_line.main(flags.group(1).split()) == 1
    again = capsys.readouterr().out
    assert "misjudged 1" in again
    assert programs_found["failures"][0]["words"].splitlines()[0] in again


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_the_table_so_far(number: signal.Signals) -> None:
    """Catches an hour's table that is lost, and workers that outlive the command."""
    command = Command(
        command_line.main_and_exit, "attacks", "--only", "programs", "--only", "planner"
    )
    with closing(_Ended(command)):
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(children) < 2:
            assert time.monotonic() < deadline
            children = psutil.Process(command.pid).children(recursive=True)
            time.sleep(0.05)
        time.sleep(0.5)
        send = os.killpg if number == signal.SIGINT else os.kill  # as a terminal does
        send(command.pid, number)
        out, err = command.communicate(30)
    assert command.returncode == 130, err
    assert "| programs | " in out
    assert "Traceback" not in err
    assert not any(child.is_running() for child in children)


def test_workers_do_not_outlive_a_runner_that_is_killed() -> None:
    """Catches processes and folders that stay when nobody is left to end them."""
    command = Command(command_line.main_and_exit, "attacks", "--only", "steps")
    with closing(_Ended(command)):
        children: list[psutil.Process] = []
        deadline = time.monotonic() + 60
        while len(children) < 3:  # a worker and some ranks
            assert time.monotonic() < deadline
            children = psutil.Process(command.pid).children(recursive=True)
            time.sleep(0.05)
        os.kill(command.pid, signal.SIGKILL)
        gone, alive = psutil.wait_procs(children, timeout=30)
        assert len(gone) == len(children), alive


class _Ended:
    """Nothing of a command is left."""

    def __init__(self, command: Command) -> None:
        self._command = command

    def close(self) -> None:
        self._command.clear()


@pytest.mark.parametrize(
    ("seed", "number"), [(23, 354), (77, 1073), (77, 1876), (2311, 2972), (31337, 2943)]
)
def test_problems_that_a_planner_did_not_survive(seed: int, number: int, tmp_path: Path) -> None:
    """Catches sharded groups of two sizes, neither of which holds a thing, asked for a bound; and a
    pipeline whose micro-batches have layers of their own, out of memory as it drains; and plans far
    above their bound that a plain baseline beats, on more devices than others are asked for."""
    with PLANNER.begin(tmp_path) as case:
        outcome = case(case_rng(seed, PLANNER.name, number))
    assert outcome.survived, outcome.words


def _drawn_nothing(rng: np.random.Generator, ranks: int) -> str:
    return "nothing"


def _off(groups: Any, drawn: str, folder: Path) -> float:
    return 1e-3


def _refused_by_one(groups: Any, drawn: str, folder: Path) -> float:
    if groups.rank == 1:
        raise ModelError("planted", got="this", wanted="that")
    return 0.0


def _refused_by_all(groups: Any, drawn: str, folder: Path) -> float:
    raise ModelError("planted", got="this", wanted="that")


def _exact(groups: Any, drawn: str, folder: Path) -> float:
    return 0.0


@pytest.mark.parametrize(("work", "verdict"), [(_off, "wrong"), (_refused_by_one, "apart")])
def test_doors_that_are_wrong_or_refuse_on_some_ranks_are_found(work: Any, verdict: str) -> None:
    """Catches an attack on front doors that is content with an error, or with a refusal that only
    one rank hears of."""
    tally = run(door_attack("planted", "", work, _drawn_nothing, few=4), 4)
    assert tally.verdicts[verdict] > 0
    assert {failure.verdict for failure in tally.failures} == {verdict}


@pytest.mark.parametrize(
    ("work", "takes", "verdict"),
    [(_refused_by_all, True, "refused wrongly"), (_exact, False, "taken")],
)
def test_doors_that_refuse_or_take_the_wrong_things_are_found(
    work: Any, takes: bool, verdict: str
) -> None:
    """Catches an attack on front doors that is content with refusals of what is right, or with
    exact results of what cannot be."""
    attack = door_attack("planted", "", work, _drawn_nothing, few=2, takes=lambda drawn: takes)
    assert run(attack, 2).verdicts == {verdict: 2}
    assert run(door_attack("planted", "", work, _drawn_nothing, few=2), 2).survived == 2
