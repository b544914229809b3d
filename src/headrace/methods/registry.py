"""All methods by name: a plain dict, looked up by the layer option of a plan."""

from __future__ import annotations

from headrace.errors import SpecError
from headrace.methods import (
    colossal_z,
    composite,
    local,
    megatron_cz,
    megatron_ts,
    metp,
    ulysses_z,
)
from headrace.methods.method import BranchFunction, Method
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import facts_of, methods_for
from headrace.spec.layer_plan import Branch

__all__ = ["METHODS", "branch"]

METHODS: dict[str, Method] = {
    method.facts.name: method
    for module in (local, ulysses_z, megatron_ts, megatron_cz, metp, colossal_z, composite)
    for method in module.METHODS
}
"""Every method of :data:`headrace.spec.known_methods.FACTS`, by its name."""


def branch(name: str, part: Branch, architecture: Architecture, ranks: int) -> BranchFunction:
    """The function of method ``name`` for one branch, ``part``, of a layer on ``ranks`` ranks.

    Raises SpecError for an unknown name, and for a group it does not support (says which rule,
    and which methods would do).
    """
    broken_rule = facts_of(name).rule(part, architecture, ranks)
    if broken_rule:
        would_do = ", ".join(methods_for(architecture, ranks, part)) or "none"
        raise SpecError(f"method {name}: {broken_rule}", hint=f"these would do: {would_do}")
    method = METHODS[name]
    return method.attention if part == "attention" else method.feed_forward
