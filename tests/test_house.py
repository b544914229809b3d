"""The drawing of the architecture is the code's, and follows it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_house", ROOT / "docs/make_house.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_house"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The source and its drawing, to be changed."""
    shutil.copytree(
        ROOT / "src/headrace",
        tmp_path / "src/headrace",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for name in (".importlinter", "docs/pictures/house.svg", "docs/_generated/house.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def plant(root: Path, name: str, text: str) -> None:
    path = root / "src/headrace" / name
    path.write_text((path.read_text() if path.exists() else '"""New."""\n') + f"\n{text}\n")


def test_the_drawing_is_up_to_date(script: ModuleType, monkeypatch, capsys) -> None:
    """Catches a room, a floor or an import that the drawing does not have (make reference)."""
    monkeypatch.setattr(sys, "argv", ["make_house.py", "--check"])
    assert script.main() == 0, capsys.readouterr().err


FORMS = (
    "from headrace.lengths import draw",
    "from headrace import lengths",
    "import headrace.lengths",
    "def late():\n    from headrace.lengths import draw",
)


def test_a_planted_import_changes_the_drawing(
    script: ModuleType, copy: Path, monkeypatch, capsys
) -> None:
    """Catches a reader that misses some form of import, and a check that compares nothing."""
    monkeypatch.setattr(sys, "argv", ["make_house.py", "--check"])
    assert script.main(copy) == 0, capsys.readouterr().err
    picture = copy / "docs/pictures/house.svg"
    assert "report imports lengths" not in picture.read_text()
    for text in FORMS:
        plant(copy, "report/facts.py", text)
    assert script.main(copy) == 1
    assert "house.svg" in capsys.readouterr().err
    assert f"report imports lengths: {len(FORMS)}" in script.picture(script.House.of(copy))


def test_a_longer_way_replaces_an_arrow(script: ModuleType) -> None:
    """Catches a drawing of all arrows, and one that lost what only the short way says: every
    import leads along the arrows that are drawn."""
    house = script.House.of(ROOT)
    arrows = set(house.arrows())
    assert ("planning", "simulator") in arrows
    assert ("planning", "spec") in house.imports
    assert ("planning", "spec") not in arrows
    for source, to in house.imports:
        reached, new = set(), {source}
        while new:
            reached |= new
            new = {b for a, b in arrows if a in reached} - reached
        assert to in reached


def test_a_room_on_no_floor_is_refused(script: ModuleType, copy: Path) -> None:
    """Catches a new room that no contract and no drawing knows."""
    plant(copy, "attic.py", "")
    with pytest.raises(ValueError, match="attic stands on no floor"):
        script.House.of(copy)


def test_modules_that_import_each_other_are_refused(script: ModuleType, copy: Path) -> None:
    """Catches two planners that need each other, which no levels can show."""
    plant(copy, "planning/priced.py", "from headrace.planning import generators")
    with pytest.raises(ValueError, match="import each other"):
        script.House.of(copy)
