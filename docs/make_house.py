"""Draws the architecture from the code: rooms on their floors, and who imports whom.

python docs/make_house.py           write the picture and its tables
python docs/make_house.py --check   exit 1 when they are not as written

Floors come from ``.importlinter``, rooms are what stands on them, imports are read by ``ast``
wherever they stand in a module. Drawn are the arrows that no longer way through other rooms
replaces; the table has all of them.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from configparser import ConfigParser
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "headrace"
INSIDE = "planning"
"""The room whose modules are listed one by one."""

Edge = tuple[str, str]

_WIDTH, _FLOOR, _BOX, _MARGIN = 960, 92, 34, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class House:
    """``floors`` of rooms, top first. ``files`` and ``lines`` of a room, and the first sentence of
    its docstring. ``imports`` counts the import statements between two rooms, ``reaching_up`` those
    that the contract lets through, ``levels`` the modules of one room by what they import."""

    floors: tuple[tuple[str, ...], ...]
    files: Mapping[str, int]
    lines: Mapping[str, int]
    texts: Mapping[str, str]
    imports: Mapping[Edge, int]
    reaching_up: Mapping[Edge, int]
    levels: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, root: Path = ROOT) -> House:
        """Read the code under ``root``. Raises ValueError for a room on no floor."""
        floors, allowed = _contract(root / ".importlinter")
        rooms = {room for floor in floors for room in floor}
        source = root / "src" / PACKAGE
        files, lines, texts = Counter[str](), Counter[str](), dict[str, str]()
        imports, up = Counter[Edge](), Counter[Edge]()
        inside: dict[str, set[str]] = {}
        for path in sorted(source.rglob("*.py")):
            name = _module(path, source)
            if not name:  # import headrace: names are imported when first asked for
                continue
            room = name.split(".")[0]
            if room not in rooms:
                raise ValueError(f"{room} stands on no floor of .importlinter")
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
            files[room] += 1
            lines[room] += text.count("\n")
            if name == room:
                texts[room] = _said(tree)
            for target in _imported(tree, source):
                other = target.split(".")[0]
                if other != room and other in rooms:
                    which = up if (name, target) in allowed else imports
                    which[room, other] += 1
            if room == INSIDE and name != room:
                asked = _imported(tree, source, running=True)
                inside[name] = {to for to in asked if to.startswith(f"{INSIDE}.")}
        return cls(
            floors=floors,
            files=files,
            lines=lines,
            texts=texts,
            imports=imports,
            reaching_up=up,
            levels=_levels(inside),
        )

    def arrows(self) -> list[Edge]:
        """Imports between rooms that no longer way replaces."""
        after: dict[str, set[str]] = {}
        for floor in reversed(self.floors):
            for room in floor:
                direct = {to for source, to in self.imports if source == room}
                after[room] = direct.union(*(after.get(to, set()) for to in direct))
        return sorted(
            (room, to)
            for room, to in self.imports
            if not any(to in after[by] for by in after if (room, by) in self.imports)
        )


def _contract(path: Path) -> tuple[tuple[tuple[str, ...], ...], set[Edge]]:
    """(floors, imports that may reach up) of the contract of layers."""
    parser = ConfigParser()
    parser.read(path, encoding="utf-8")
    section = parser["importlinter:contract:floors"]
    floors = tuple(
        tuple(_short(name) for name in line.split("|"))
        for line in section["layers"].split("\n")
        if line.strip()
    )
    pairs = (line.split("->") for line in section.get("ignore_imports", "").split("\n"))
    return floors, {(_short(pair[0]), _short(pair[1])) for pair in pairs if len(pair) == 2}


def _said(tree: ast.Module) -> str:
    """What a module says of itself first."""
    first = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
    return first.removesuffix("::") + "." * first.endswith("::")


def _short(name: str) -> str:
    return name.strip().removeprefix(f"{PACKAGE}.")


def _module(path: Path, source: Path) -> str:
    """A module's name without the package's; the package itself has none."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module, source: Path, *, running: bool = False) -> Iterator[str]:
    """The modules of the package that each import statement names; without those for annotations
    alone where ``running``."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if running and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
            if node.module == PACKAGE or (source / _path(node.module)).is_dir():
                own = [f"{node.module}.{alias.name}" for alias in node.names]
                modules = [name for name in own if _exists(source / _path(name))]
                names = modules or names
        else:
            continue
        yield from {_short(name) for name in names if name.startswith(f"{PACKAGE}.")}


def _path(name: str) -> str:
    return _short(name).replace(".", "/") if name != PACKAGE else ""


def _exists(path: Path) -> bool:
    return path.is_dir() or path.with_suffix(".py").exists()


def _levels(inside: Mapping[str, set[str]]) -> tuple[tuple[str, ...], ...]:
    """Modules by levels, top first: each imports from lower ones only."""
    height: dict[str, int] = {}

    def high(name: str, above: tuple[str, ...] = ()) -> int:
        if name in above:
            raise ValueError(f"modules import each other: {' -> '.join((*above, name))}")
        if name not in height:
            below = [high(to, (*above, name)) for to in inside.get(name, ()) if to != name]
            height[name] = 1 + max(below, default=-1)
        return height[name]

    for name in inside:
        high(name)
    top = max(height.values(), default=-1)
    return tuple(
        tuple(sorted(name.removeprefix(f"{INSIDE}.") for name in inside if height[name] == at))
        for at in range(top, -1, -1)
    )


def _routed(house: House) -> tuple[list[list[str]], dict[Edge, list[str]]]:
    """Floors with places for arrows that pass them, and the places of every arrow from its room
    to the other; ordered so that arrows cross little."""
    rows = [list(floor) for floor in house.floors]
    floor_of = {room: at for at, floor in enumerate(house.floors) for room in floor}
    ways: dict[Edge, list[str]] = {}
    for source, to in house.arrows():
        way = [source]
        for at in range(floor_of[source] + 1, floor_of[to]):
            shared = f"~{to}~{at}"  # arrows to the same room pass a floor at one place
            if shared not in rows[at]:
                rows[at].append(shared)
            way.append(shared)
        ways[source, to] = [*way, to]
    steps = sorted({pair for way in ways.values() for pair in pairwise(way)})
    for turn in range(24):
        order = range(1, len(rows)) if turn % 2 == 0 else range(len(rows) - 2, -1, -1)
        for at in order:
            other = rows[at - 1 if turn % 2 == 0 else at + 1]
            place = {name: _x(n, len(other)) for n, name in enumerate(other)}
            near = {
                name: [
                    place[b if a == name else a]
                    for a, b in steps
                    if (a == name and b in place) or (b == name and a in place)
                ]
                for name in rows[at]
            }
            own = {name: _x(n, len(rows[at])) for n, name in enumerate(rows[at])}
            middle = {n: sum(near[n]) / len(near[n]) if near[n] else own[n] for n in own}
            rows[at].sort(key=lambda name: (round(middle[name], 3), name))
    return rows, ways


def _x(number: int, count: int) -> float:
    return (number + 0.5) / count


def picture(house: House) -> str:
    """The rooms on their floors as SVG: an arrow from who imports to what is imported, with the
    number of import statements."""
    rows, ways = _routed(house)
    height = _FLOOR * len(rows) + _MARGIN
    places = {
        name: (_WIDTH * _x(n, len(row)), _MARGIN + _FLOOR * at + _BOX / 2)
        for at, row in enumerate(rows)
        for n, name in enumerate(row)
    }
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="15">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0,0L8,4L0,8z" fill="#667"/></marker></defs>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
    ]
    for at in range(0, len(rows), 2):
        top = _MARGIN + _FLOOR * at - (_FLOOR - _BOX) / 2
        out.append(f'<rect y="{top:g}" width="{_WIDTH}" height="{_FLOOR}" fill="#f4f6f9"/>')
    labels = []
    for (source, to), way in ways.items():
        points = [places[name] for name in way]
        path = _curve(points)
        count = house.imports[source, to]
        out.append(
            f'<path d="{path}" fill="none" stroke="#667" stroke-width="1.4" '
            f'marker-end="url(#tip)"><title>{escape(source)} imports {escape(to)}: {count}'
            "</title></path>"
        )
        (x, y), (x1, y1) = points[:2]
        labels.append(
            f'<text x="{x + (x1 - x) * 0.3:.0f}" y="{y + _BOX / 2 + (y1 - y - _BOX) * 0.36:.0f}" '
            f'font-size="11" text-anchor="middle" fill="#334" stroke="white" stroke-width="3" '
            f'paint-order="stroke">{count}</text>'
        )
    for row in rows:
        for name in row:
            if name.startswith("~"):
                continue
            x, y = places[name]
            wide = 9 * len(name) + 24
            out.append(
                f'<rect x="{x - wide / 2:.0f}" y="{y - _BOX / 2:.0f}" width="{wide}" '
                f'height="{_BOX}" rx="5" fill="#e3ecf7" stroke="#4c78a8"/>'
                f'<text x="{x:.0f}" y="{y + 5:.0f}" text-anchor="middle">{escape(name)}</text>'
            )
    return "\n".join([*out, *labels, "</svg>"]) + "\n"


def _curve(points: Sequence[tuple[float, float]]) -> str:
    """A smooth line downwards through the places, from the edge of a box to that of another."""
    x, y = points[0][0], points[0][1] + _BOX / 2
    parts = [f"M{x:.0f},{y:.0f}"]
    for n, (x1, middle) in enumerate(points[1:], 2):
        end = n == len(points)
        top, bottom = middle - _BOX / 2, middle + _BOX / 2
        half = (y + top) / 2
        parts.append(f"C{x:.0f},{half:.0f} {x1:.0f},{half:.0f} {x1:.0f},{top:.0f}")
        if not end:
            parts.append(f"L{x1:.0f},{bottom:.0f}")
        x, y = x1, bottom
    return "".join(parts)


def tables(house: House) -> str:
    """What each room does and from whom it imports, and the modules of one room, as Markdown."""
    out = ["| room | what it does | files | lines | imports from |", "|---|---|---|---|---|"]
    for floor in house.floors:
        for room in floor:
            found = sorted((n, to) for (by, to), n in house.imports.items() if by == room)
            others = ", ".join(f"{to} {count}" for count, to in reversed(found))
            lines = max(100, round(house.lines[room], -2))
            text = house.texts.get(room, "").replace("``", "`").replace("|", "\\|")
            out.append(f"| `{room}` | {text} | {house.files[room]} | {lines:,} | {others} |")
    out.append("")
    for (room, to), count in sorted(house.reaching_up.items()):
        times = "once" if count == 1 else f"{count} times"
        out.append(f"* `{room}` reaches up to `{to}` {times}, when it is called.")
    out += ["", f"## Inside `{INSIDE}`", ""]
    out += ["One core. A module imports from lines below its own only.", "", "```text"]
    out += [_wrapped(names) for names in house.levels]
    return "\n".join([*out, "```", ""])


def _wrapped(names: Sequence[str]) -> str:
    rows = [""]
    for name in names:
        if len(rows[-1]) + len(name) > 92:
            rows.append("")
        rows[-1] += f"  {name}" if rows[-1] else name
    return "- " + "\n  ".join(rows)


def written(root: Path = ROOT) -> dict[Path, str]:
    """The files to write and what is in them."""
    house = House.of(root)
    docs = root / "docs"
    return {
        docs / "pictures/house.svg": picture(house),
        docs / "_generated/house.md": tables(house),
    }


def main(root: Path = ROOT) -> int:
    """Write or check both files."""
    stale = []
    for path, text in written(root).items():
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(str(path))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run make reference", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
