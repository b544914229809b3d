"""All methods by name: a plain dict, looked up by the layer option of a plan."""

from __future__ import annotations

from headrace.errors import SpecError, did_you_mean
from headrace.methods.context import Method
from headrace.methods.local import Local
from headrace.methods.ulysses_z import UlyssesZ
from headrace.spec.architecture import Architecture

__all__ = ["METHODS", "method"]

METHODS: dict[str, Method] = {m.name: m for m in (Local(), UlyssesZ())}


def method(name: str, architecture: Architecture, ranks: int) -> Method:
    """The method ``name`` for a group of ``ranks``.

    Raises SpecError for an unknown name, and for a group it does not support (says which rule,
    and which methods would do).
    """
    found = METHODS.get(name)
    if found is None:
        hint = did_you_mean(name, METHODS) or f"known are {', '.join(METHODS)}"
        raise SpecError("method", got=repr(name), hint=hint)
    rule = found.supports(architecture, ranks)
    if rule:
        others = [m.name for m in METHODS.values() if m.supports(architecture, ranks) is None]
        would_do = ", ".join(others) or "none"
        raise SpecError(f"method {name}: {rule}", hint=f"these would do: {would_do}")
    return found
