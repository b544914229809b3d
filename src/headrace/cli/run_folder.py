"""Folders of runs: a new one, or the one to continue."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from headrace.config import Config
from headrace.errors import ConfigError

__all__ = ["choose_folder"]


def choose_folder(config: Config, out: Path | None, *, resume: bool) -> Path:
    """The folder of a run: ``out``, or a new one under run.out, or the newest one to resume.

    Raises ConfigError for a folder that already holds a run when it is not resumed, and for
    nothing to resume.
    """
    if resume:
        return out if out is not None else _newest(config)
    if out is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        return Path(config.run.out) / f"{config.run.name}-{stamp}"
    if (out / "run.json").exists():
        raise ConfigError(
            f"folder {out}", got="a run", wanted="an empty or new folder",
            hint="continue it with --resume, or choose another --out",
        )  # fmt: skip
    return out


def _newest(config: Config) -> Path:
    found = sorted(Path(config.run.out).glob(f"{config.run.name}-*/run.json"))
    if not found:
        raise ConfigError(
            f"runs named {config.run.name} in {config.run.out}", got="none to resume",
            wanted="at least one", hint="name its folder with --out",
        )  # fmt: skip
    return found[-1].parent
