"""``headrace papers``: the scripts of benchmarks/ that hold papers' claims beside headrace's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import headrace
from headrace.cli.display import tell
from headrace.errors import ConfigError

__all__ = ["papers"]

_PREFIX = "paper_"


def papers(name: str | None, *, quick: bool, out: Path | None) -> int:
    """Run the script of one paper, or all of them one after the other; the exit code is that of the
    first that fails."""
    scripts = _scripts()
    if name is not None and name not in scripts:
        raise ConfigError("NAME", got=name, wanted=", ".join(scripts))
    if out is not None:
        _require_folder(out)
    for paper in scripts if name is None else [name]:
        tell(f"claims of {paper}")
        command = [sys.executable, str(scripts[paper]), *(["--quick"] if quick else [])]
        if out is not None:
            command += ["--json", str(out / f"{paper}.json")]
        code = subprocess.run(command, check=False).returncode
        if code != 0:
            return code
    return 0


def _require_folder(out: Path) -> None:
    """Make the folder of results, before anything runs. Raises ConfigError where that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}", got=error.strerror, wanted="a folder to write to")


def _scripts() -> dict[str, Path]:
    """The script of each paper by its name, in the clone that this package is in, or the current
    folder; raises ConfigError where there are none."""
    clone = Path(headrace.__file__).resolve().parents[2]
    for folder in (clone / "benchmarks", Path.cwd() / "benchmarks"):
        found = {file.stem.removeprefix(_PREFIX): file for file in folder.glob(f"{_PREFIX}*.py")}
        if found:
            return dict(sorted(found.items()))
    raise ConfigError(
        "benchmarks",
        got="a package without them",
        wanted="a clone of headrace, or to be in its folder",
        hint="they are not part of the package, as their costs and results are large",
    )
