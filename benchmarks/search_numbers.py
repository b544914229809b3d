"""What each number of the search for plans gains: worlds planned with it halved and doubled.

A number is a constant of ``headrace/planning``, or a field of a generator, of the improvement or of
a search's effort that has one by default. Between 0.5 and 2 it is its distance from 1 that is
halved and doubled, and of several values the first half is kept. Worlds are those of ``worlds.py``.

    smaller, larger   the mean step beside that of the search as it is, and the worst world's; how
                      much wider gaps to the bound are; the processor time, as a geometric mean of
                      ratios
    -                 the number cannot be made so

A number earns its place where one of both is slower in a world that matters, or takes more time for
nothing.

examples:
    python benchmarks/search_numbers.py --groups pipelines lockstep
    python benchmarks/search_numbers.py --only improvement waves --json numbers.json
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

import numpy as np
import worlds
from rich.console import Console
from rich.table import Table

import headrace.planning
from headrace.cli.display import tell
from headrace.planners import PLANNERS
from headrace.planning import Generator, Problem, plan
from headrace.planning import generators as generators_module
from headrace.planning.generators import ENOUGH
from headrace.spec import Plan

ROOM = Path(headrace.planning.__file__).parent
OF_ARITHMETIC = {"ROUNDING", "NEVER", "_ROUNDING_BYTES", "FORWARD"}
"""Numbers that steer nothing: what rounding is, what stands for infinite, a share of work."""
OF_POWERS = {"MOST_SEQUENCES"}
"""Numbers by powers of which effort grows: they are changed by 1."""
OF_PRICES = {"mixtures", "priced", "problem", "tolerances"}
"""Files whose numbers decide which rows a scheme is priced by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number of the search: its file, the class that has it as a field (or none), and its
    name."""

    file: str
    owner: str
    name: str

    def __str__(self) -> str:
        return ".".join(part for part in (self.file, self.owner, self.name) if part)

    @property
    def value(self) -> Any:
        module = importlib.import_module(f"headrace.planning.{self.file}")
        if not self.owner:
            return vars(module)[self.name]
        return getattr(module, self.owner).__init__.__kwdefaults__[self.name]

    @contextmanager
    def being(self, value: Any) -> Iterator[None]:
        """Plan with another value meanwhile."""
        before = self.value
        if self.owner:
            module = importlib.import_module(f"headrace.planning.{self.file}")
            homes = [getattr(module, self.owner).__init__.__kwdefaults__]
        else:
            homes = [room for room in _rooms() if room.get(self.name) is before]
        places = [(home, self.name) for home in homes]
        if isinstance(before, float) and not self.owner:  # fields that have it by default
            places += [
                (defaults, field)
                for defaults in _defaults()
                for field, default in defaults.items()
                if default is before
            ]
        for home, name in places:
            home[name] = value
        self._forget()
        try:
            yield
        finally:
            for home, name in places:
                home[name] = before
            self._forget()

    def _forget(self) -> None:
        """Price all worlds anew where prices depend on the number."""
        if self.file in OF_PRICES:
            worlds.of_model.cache_clear()
            worlds.of_published.cache_clear()


def _rooms() -> list[dict[str, Any]]:
    """The names of all modules that plan."""
    rooms = ("headrace.planning", "headrace.planners")
    return [vars(module) for name, module in sys.modules.items() if name.startswith(rooms)]


def _defaults() -> Iterator[dict[str, Any]]:
    """What the fields of these modules' classes have by default."""
    for room in _rooms():
        for owner in (one for one in room.values() if isinstance(one, type)):
            yield getattr(owner.__init__, "__kwdefaults__", None) or {}


def _values_in(node: ast.expr | None) -> list[float]:
    """The numbers in an expression, or none where it is a table of something else."""
    if node is None or isinstance(node, ast.Dict):
        return []
    found = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return [value for value in found if isinstance(value, (int, float)) and value is not True]


def _numbers_of(path: Path) -> Iterator[Number]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            targets = node.targets[0]
            names = targets.elts if isinstance(targets, ast.Tuple) else [targets]
            if _values_in(node.value):
                for name in map(ast.unparse, names):
                    if name.isupper() and name not in OF_ARITHMETIC:
                        yield Number(file=path.stem, owner="", name=name)
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            # 0 and 1 are the absence of something.
            if isinstance(field, ast.AnnAssign) and set(_values_in(field.value)) - {0, 1}:
                yield Number(file=path.stem, owner=node.name, name=ast.unparse(field.target))  # type: ignore[union-attr]


@cache
def search_numbers() -> list[Number]:
    """All numbers that steer the search: constants, and fields of classes with one by default."""
    return [number for path in sorted(ROOM.glob("*.py")) for number in _numbers_of(path)]


def others(number: Number) -> dict[str, Any]:
    """Values to replace a number by."""
    value = number.value
    if number.name in OF_POWERS:
        return {"smaller": value - 1, "larger": value + 1}
    if isinstance(value, np.ndarray):
        return {"smaller": value[::2]}
    if isinstance(value, (tuple, list)):
        return {"smaller": value[: max(1, len(value) // 2)]} if len(value) > 1 else {}
    if isinstance(value, int):
        return {"smaller": value // 2, "larger": 2 * value}
    if 0.5 < value < 2:
        return {
            way: round(1 + (value - 1) * by, 9) for way, by in (("smaller", 0.5), ("larger", 2))
        }
    return {"smaller": value / 2, "larger": 2 * value}


def generators(problem: Problem) -> list[Generator]:
    """Those of the problem's planner, with the numbers of now."""
    return [_with_numbers_of_now(own) for own in PLANNERS[problem.planner]]


def _with_numbers_of_now(own: Any) -> Any:
    defaults = type(own).__init__.__kwdefaults__ or {}
    numbers = {
        number.name: defaults[number.name]
        for number in search_numbers()
        if number.owner == type(own).__name__
    }
    beyond = generators_module.ENOUGH if own.role.beyond == ENOUGH else own.role.beyond
    return replace(own, role=replace(own.role, beyond=beyond), **numbers)


def planned(world: worlds.World) -> tuple[Plan, float]:
    """The plan of a world, and its processor seconds without prices."""
    problem, lengths = world.problem(), world.lengths()
    began = time.process_time()
    made = plan(problem, lengths, generators=generators(problem))
    return made, time.process_time() - began


def compared(found: list[tuple[Plan, float]], usual: list[tuple[Plan, float]]) -> dict[str, float]:
    pairs = list(zip(found, usual, strict=True))
    losses = [made.predicted_s / before.predicted_s - 1 for (made, _), (before, _) in pairs]
    ratios = [max(now, 1e-4) / max(then, 1e-4) for (_, now), (_, then) in pairs]
    return {
        "mean": fmean(losses),
        "worst": max(losses),
        "best": min(losses),
        "gap": fmean([made.gap - before.gap for (made, _), (before, _) in pairs]),
        "cpu": geometric_mean(ratios),
    }


def row_of(
    number: Number, chosen: list[worlds.World], usual: list[tuple[Plan, float]]
) -> dict[str, Any]:
    row: dict[str, Any] = {"number": str(number), "value": repr(number.value)}
    for name, value in others(number).items():
        with number.being(value):
            found = [planned(world) for world in chosen]
        row[name] = {"value": repr(value), "all": compared(found, usual)}
        for group in dict.fromkeys(world.group for world in chosen):
            at = [n for n, world in enumerate(chosen) if world.group == group]
            row[name][group] = compared([found[n] for n in at], [usual[n] for n in at])
    return row


def told(rows: list[dict[str, Any]], console: Console) -> None:
    columns = ("worst in", "gap", "cpu")
    table = Table("number", "value", "smaller", *columns, "larger", *columns)
    for row in rows:
        cells = list[str]()
        for name in ("smaller", "larger"):
            if name not in row:
                cells += ["-", "", "", ""]
                continue
            of_groups = {k: v for k, v in row[name].items() if k not in ("value", "all")}
            worst = max(of_groups, key=lambda group: of_groups[group]["worst"])
            whole = row[name]["all"]
            cells += [
                f"{100 * whole['mean']:+.3f} %",
                f"{100 * whole['worst']:+.2f} % {worst}",
                f"{100 * whole['gap']:+.3f}",
                f"x{whole['cpu']:.2f}",
            ]
        table.add_row(row["number"], row["value"][:24], *cells)
    console.print(table)


def main() -> None:
    groups = list(dict.fromkeys(world.group for world in worlds.all_worlds()))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", choices=groups, default=groups)
    parser.add_argument("--only", nargs="+", default=("",), help="numbers that begin so")
    parser.add_argument("--json", type=Path, help="where rows are kept")
    o = parser.parse_args()
    chosen = [world for world in worlds.all_worlds() if world.group in o.groups]
    tell(f"{len(chosen)} worlds as they are")
    for world in chosen:  # prices are made once
        planned(world)
    usual, rows = [planned(world) for world in chosen], list[dict[str, Any]]()
    numbers = [n for n in search_numbers() if str(n).startswith(tuple(o.only))]
    for at, number in enumerate(numbers):
        tell(f"{at + 1} of {len(numbers)}: {number}")
        rows.append(row_of(number, chosen, usual))
        if o.json is not None:
            found = {"worlds": len(chosen), "groups": o.groups, "numbers": rows}
            o.json.write_text(json.dumps(found, indent=1) + "\n")
    told(rows, Console(width=160))


if __name__ == "__main__":
    main()
