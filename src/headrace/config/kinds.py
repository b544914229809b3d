"""Which kind of run a configuration file is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.config.clips_config import ClipsConfig
from headrace.config.load import read_toml
from headrace.config.model import Config

__all__ = ["read_any"]


def read_any(path: Path, changes: Sequence[str] = ()) -> Config | ClipsConfig:
    """Read the configuration in a file, with ``a.b=c`` changes: a ClipsConfig where ``data.kind``
    is ``synthetic-clips``, else a Config. Raises ConfigError that lists every wrong key or
    value."""
    data = read_toml(path, changes).get("data")
    clips = isinstance(data, dict) and data.get("kind") == "synthetic-clips"
    return (ClipsConfig if clips else Config).load(path, *changes)
