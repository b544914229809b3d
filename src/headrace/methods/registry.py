"""All methods by name: a plain dict, looked up by the layer option of a plan."""

from __future__ import annotations

from headrace.errors import SpecError, did_you_mean
from headrace.methods.colossal_z import COLOSSAL_Z
from headrace.methods.composite import TENSOR_RING, ULYSSES_RING
from headrace.methods.context import Members
from headrace.methods.local import LOCAL
from headrace.methods.megatron_cz import MEGATRON_CZ, MEGATRON_CZ_GATHER
from headrace.methods.megatron_ts import MEGATRON_TS
from headrace.methods.method import Branch, BranchFunction, Method
from headrace.methods.metp import METP
from headrace.methods.ulysses_z import ULYSSES_Z
from headrace.spec.architecture import Architecture
from headrace.spec.method import LayerOption

__all__ = ["METHODS", "branch", "method", "methods_for", "subgroups"]

METHODS: dict[str, Method] = {
    m.name: m
    for m in (
        LOCAL, ULYSSES_Z, MEGATRON_CZ, MEGATRON_CZ_GATHER, MEGATRON_TS, METP, COLOSSAL_Z,
        ULYSSES_RING, TENSOR_RING,
    )
}  # fmt: skip


def method(name: str) -> Method:
    """The method ``name``. Raises SpecError for an unknown name."""
    found = METHODS.get(name)
    if found is None:
        hint = did_you_mean(name, METHODS) or f"known are {', '.join(METHODS)}"
        raise SpecError("method", got=repr(name), hint=hint)
    return found


def branch(name: str, part: Branch, architecture: Architecture, ranks: int) -> BranchFunction:
    """The attention or feed-forward of method ``name`` for a group of ``ranks``.

    Raises SpecError for an unknown name, and for a group it does not support (says which rule,
    and which methods would do).
    """
    found = method(name)
    rule = found.rule(part, architecture, ranks)
    if rule:
        would_do = ", ".join(methods_for(architecture, ranks, part)) or "none"
        raise SpecError(f"method {name}: {rule}", hint=f"these would do: {would_do}")
    return found.attention if part == "attention" else found.feed_forward


def methods_for(architecture: Architecture, ranks: int, part: Branch) -> tuple[str, ...]:
    """The methods that can run a branch on a group of ``ranks``."""
    return tuple(m.name for m in METHODS.values() if m.rule(part, architecture, ranks) is None)


def subgroups(
    option: LayerOption, architecture: Architecture, ranks: int, tensor: int = 1
) -> tuple[Members, ...]:
    """The groups within a group of ``ranks`` that a layer option needs, where blocks of ``tensor``
    neighbours hold the weights together. Raises SpecError when it cannot run in such blocks."""
    attention, feed_forward = method(option.attention), method(option.feed_forward)
    return (
        *attention.attention_groups(architecture, ranks, tensor),
        *feed_forward.feed_forward_groups(architecture, ranks, tensor),
    )
