"""Configurations: frozen pydantic models, read from TOML, changed by ``a.b=c``."""

from headrace.config.load import apply_overrides
from headrace.config.model import Config

__all__ = ["Config", "apply_overrides"]
