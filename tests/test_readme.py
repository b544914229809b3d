"""What README.md shows is there and works, and the generated pages are up to date."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest

from headrace.cli import app, main
from headrace.config import Config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```[a-z]*\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S))
SHOWN = [line.removeprefix("$ ").strip() for block in BLOCKS for line in block.splitlines()] + SPANS


def _words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


DEFAULT_METHODS = ("ulysses_z", "megatron_cz", "megatron_cz_gather", "megatron_ts", "metp")
COMMANDS = [line for line in SHOWN if re.match(r"(torchrun .* -m )?headrace [a-z]+\b", line)]


def test_the_python_session_runs() -> None:
    """Catches a name, a result or a default that has changed since the page was written."""
    failed, tried = doctest.testfile(
        str(ROOT / "README.md"),
        module_relative=False,
        optionflags=doctest.REPORT_ONLY_FIRST_FAILURE,
    )
    assert tried >= 5
    assert not failed


def test_the_page_shows_commands() -> None:
    """Catches a change of the page's form, after which the tests below would look at nothing."""
    names = {_words(line.rpartition("headrace ")[2])[0] for line in COMMANDS}
    assert names >= {"train", "plan", "simulate", "profile", "report", "verify", "export", "doctor"}


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_can_be_called(line: str) -> None:
    """Catches a command or flag that was renamed."""
    words = _words(line[line.rindex("headrace ") :])[1:]
    app.parse_args(words, exit_on_error=False, print_error=False)


def test_every_command_is_in_the_table() -> None:
    """Catches a command that the page does not know."""
    rows = "".join(line for line in README.splitlines() if line.startswith("| "))
    assert set(re.findall(r"`headrace ([a-z]+)", rows)) == {
        name for name in app if not name.startswith("-")
    }


def _timeless(text: str) -> list[str]:
    timed = r" +planned in .*|(?<=^took) .*"
    return [re.sub(timed, "", line) for line in text.strip().splitlines()]


def test_the_shown_output_is_what_the_command_prints(capsys, monkeypatch) -> None:
    """Catches a session with an output of another day, and one that planned something else than
    the picture shows."""
    line, _, shown = next(block for block in BLOCKS if "\nstrategy " in block).partition("\n")
    words = _words(line.removeprefix("$ headrace "))
    monkeypatch.chdir(ROOT)
    assert main(words) == 0
    assert _timeless(capsys.readouterr().out) == _timeless(shown)
    recipe = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    drawn = next(r for r in recipe.splitlines() if "--picture docs/pictures/plan-64.svg" in r)
    assert set(words) <= set(_words(drawn))
    bound = re.search(r"predicted +(\S+ s)  bound (\S+ s)", shown)
    assert bound is not None
    picture = (ROOT / "docs/pictures/plan-64.svg").read_text()
    assert "{}, bound {}".format(*bound.groups()) in picture


@pytest.mark.parametrize("method", DEFAULT_METHODS)
def test_methods_of_the_first_output_are_explained(method: str) -> None:
    """Catches a word of the first plan that a newcomer finds nowhere."""
    words = README[README.index("\n## Words\n") :]
    assert f"| `{method}` |" in words


def test_the_make_targets_exist() -> None:
    """Catches the two commands a newcomer types first."""
    named = {_words(line)[1] for line in SHOWN if line.startswith("make ")}
    assert named >= {"demo", "test"}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named <= targets


def test_the_paths_exist() -> None:
    """Catches a link to a file that has moved."""
    links = re.findall(r"\]\(([^)#]+)\)", README)
    files = [span for span in SPANS if re.fullmatch(r"[A-Z]+\.md|python [a-z_/]+\.py", span)]
    for name in [*links, *(file.removeprefix("python ") for file in files)]:
        if "://" not in name:
            assert (ROOT / name).exists(), name


def test_the_example_of_the_docs_home_runs(capsys) -> None:
    """Catches a home page whose example is of another day."""
    home = (ROOT / "docs/index.md").read_text()
    example = re.search(r"^```python\n(.*?)^```$", home, re.MULTILINE | re.DOTALL)
    assert example is not None
    exec(compile(example[1], "index.md", "exec"), {})
    ratio = re.search(r"^([\d.]+) times as fast as the best static", capsys.readouterr().out, re.M)
    assert ratio is not None
    assert float(ratio[1]) >= 1
    assert (ROOT / "docs/pictures/plan-64.svg").exists()
    assert "](pictures/plan-64.svg)" in home
    assert re.search(r"^pip install \.", home, re.MULTILINE)


def test_the_demo_plans_64_devices_with_the_corpus_that_it_trains_on() -> None:
    """Catches a demo of ranks that are too few to choose among, and an end on other data."""
    here, larger = (
        Config.load(ROOT / "examples" / name)
        for name in ("python-sources.toml", "python-sources-64.toml")
    )
    assert here.devices.ranks == 4
    assert larger.devices.ranks == 64
    assert here.data.paths == larger.data.paths
    recipe = (ROOT / "Makefile").read_text().partition("\ndemo:")[2].partition("\n\n")[0]
    assert recipe.index("headrace train $(CONFIG)") < recipe.index("headrace plan $(LARGER)")
    assert "--picture" in recipe


def test_the_generated_pages_are_up_to_date(monkeypatch, capsys) -> None:
    """Catches a flag or key whose page nobody wrote anew (make reference)."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["make_reference.py", "--check"])
    assert module.main() == 0, capsys.readouterr().err
