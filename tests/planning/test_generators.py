"""Generators: a list that a user may shorten or extend."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from headrace.costs import published, synthetic_costs
from headrace.errors import HeadraceError, SpecError
from headrace.planners import BASELINES, PLANNERS
from headrace.planning import (
    GENERATORS,
    Known,
    Nested,
    Problem,
    Role,
    SideBySide,
    Static,
    Waves,
    plan,
)
from headrace.planning.batch import PriceTable, SortedBatch
from headrace.planning.filling import deal
from headrace.planning.formula_source import formula_table
from headrace.planning.generators import Draft
from headrace.planning.schedule import Assignment, placed
from headrace.planning.side_by_side import ANY_SCHEME
from headrace.planning.static import static_schedule
from headrace.spec import Lengths

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "plans.md"
LENGTHS = [9000, 4000, 3000, 900, 800, 700, 300, 200, 100, 50]


def problems() -> dict[str, Problem]:
    return {
        "model": Problem(costs=synthetic_costs(4, 4)),
        "lockstep": Problem(costs=synthetic_costs(4, 4), semantics="lockstep"),
        "groups": Problem(costs=published("flexsp-7b-a100"), devices=8),
        "pipelines": Problem(costs=published("hydraulis-7b"), devices=32),
    }


class Smallest:
    """Everything on the smallest groups that hold the longest sequence, packed."""

    role = Role(name="smallest", tables="one size", final=True)

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Assignment]:
        made = (static_schedule(table, k) for k in range(len(table)))
        yield from [schedule for schedule in made if schedule is not None][:1]


class Loser:
    """Drafts that lose the shortest sequence."""

    role = Role(name="loser", tables="one size")

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Draft]:
        pipelines = [(len(table) - 1, list[int]())]
        seconds = deal(table, pipelines, range(len(table.tokens) - 1))
        yield Draft.of(table, seconds, placed(table, pipelines), "loser")


@pytest.mark.parametrize("name", problems())
def test_a_shorter_list_plans_less(name: str) -> None:
    """Catches a list that is not asked for, and one that is asked for more than it has."""
    problem = problems()[name]
    only = hr.plan(LENGTHS, problem, generators=[Static()])
    assert only.predicted_s == hr.plan(LENGTHS, problem.replace(planner="static")).predicted_s
    assert hr.plan(LENGTHS, problem).predicted_s <= only.predicted_s


@pytest.mark.parametrize("generator", [SideBySide(), Nested()], ids=["side by side", "nested"])
def test_one_generator_is_enough(generator: SideBySide | Nested) -> None:
    """Catches a search that needs a static schedule to begin with."""
    made = hr.plan(LENGTHS, problems()["model"], generators=[generator])
    assert made.lower_bound_s <= made.predicted_s


@pytest.mark.parametrize("name", ["model", "groups", "pipelines"])
def test_a_generator_of_ones_own(name: str) -> None:
    """Catches a generator of the user's that is not asked, or whose schedules are not timed."""
    problem = problems()[name]
    alone = hr.plan(LENGTHS, problem, generators=[Smallest()])
    assert len({pipeline.scheme for pipeline in alone.pipelines}) == 1
    beside = hr.plan(LENGTHS, problem, generators=[*PLANNERS["adaptive"], Smallest()])
    assert beside.predicted_s <= min(alone.predicted_s, hr.plan(LENGTHS, problem).predicted_s)


class Listener:
    """Drafts nothing, and keeps the strategies that it is told of."""

    role = Role(name="listener", tables="any scheme", beyond=-1.0)  # asked in any case

    def __init__(self) -> None:
        self.told = list[hr.Strategy]()

    def drafts(self, table: PriceTable, known: Known) -> Iterator[Draft]:
        self.told += known.strategies
        yield from ()


def test_generators_know_the_strategies_found_before() -> None:
    """Catches a generator that is not told of earlier strategies, or of some whose ranks work in
    several pipelines."""
    problem = Problem(costs=published("hydraulis-13b"), devices=32)
    lengths, listener = (
        hr.lengths.draw("lognormal:median=900,sigma=1", tokens="200K", seed=1),
        Listener(),
    )
    made = plan(problem, lengths, generators=[Static(), SideBySide(role=ANY_SCHEME), listener])
    assert made.strategy in listener.told
    assert all(strategy.devices <= 32 for strategy in listener.told)
    assert len(set(listener.told)) == len(listener.told) > 1


@pytest.mark.parametrize("name", ["hybrid-cp", "dcp", "max-length", "token-balance"])
def test_planners_of_others_are_asked_again_for_few_sequences(name: str) -> None:
    """Catches one that takes its time for many sequences, and one that is never asked."""
    problem = problems()["groups" if name in ("hybrid-cp", "dcp") else "pipelines"]
    (again,) = (
        own for own in PLANNERS["adaptive"] if own.role.name == name and own.role.covers(problem)
    )
    tables = [formula_table(problem, SortedBatch.of(Lengths.of([900] * n))) for n in (100, 101)]
    made = [[*again.drafts(table, Known(problem=problem, bound_s=0.0))] for table in tables]
    assert [len(drafts) for drafts in made] == [1, 0]
    assert BASELINES[name].schedules(tables[1], "free", 0) is not None


def test_lost_sequences_are_refused() -> None:
    """Catches a plan of a user's generator that leaves a sequence out."""
    with pytest.raises(HeadraceError, match="sequence"):
        hr.plan(LENGTHS, problems()["groups"], generators=[Loser()])


@pytest.mark.parametrize(
    ("name", "generators"),
    [("model", [Waves()]), ("lockstep", [Nested()]), ("pipelines", [Nested()]), ("groups", [])],
)
def test_generators_of_other_problems_are_refused(name: str, generators: list[Any]) -> None:
    """Catches a traceback, or a plan of nothing, where no generator is for the problem."""
    with pytest.raises(SpecError, match=r"planner|generators"):
        hr.plan(LENGTHS, problems()[name], generators=generators)


def test_numbers_belong_to_generators() -> None:
    """Catches generators that share what one of them is given."""
    given = SideBySide(exchanged=0)
    assert given.role == SideBySide().role
    assert SideBySide().exchanged > 0
    assert all(generator.role.name for generator in GENERATORS["adaptive"])


def test_the_page_of_plans_runs() -> None:
    """Catches a page whose list of generators no longer plans."""
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(compile(text, str(PAGE), "exec"), {})


def test_the_page_names_every_planner() -> None:
    """Catches a planner that nobody finds."""
    page = PAGE.read_text()
    assert all(f"`{name}`" in page for name in PLANNERS)
