"""What is installed for the tests is what they need: none is skipped for want of a package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {"vl_convert": "vl-convert-python", "sklearn": "scikit-learn"}
"""Packages that are installed under another name than they are imported."""


def _installed(extra: str) -> set[str]:
    """The distributions of an extra, with those of the extras in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    for requirement in project["optional-dependencies"][extra]:
        name, _, inner = re.split(r"[>=<]", requirement)[0].partition("[")
        found |= {name} if not inner else set().union(*map(_installed, inner[:-1].split(",")))
    return found


def test_ci_installs_every_package_that_a_test_can_do_without() -> None:
    """Catches tests that guard weights and data and are skipped wherever anybody looks."""
    wanted = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(r'importorskip\(\s*"(\w+)', path.read_text())
    }
    assert {"transformers", "pyarrow"} <= wanted
    assert {DISTRIBUTIONS.get(name, name) for name in wanted} <= _installed("dev")
