"""What is measured of a piece of a model: the targets that fits are made for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from headrace.errors import CostError
from headrace.spec.profile import ProfilePoint

__all__ = ["LEAST_LENGTHS", "TARGETS", "Target", "check_lengths", "measured", "target_of"]

Target = Literal["forward_s", "backward_s", "kept_bytes", "transient_bytes"]
TARGETS: tuple[Target, ...] = get_args(Target)

LEAST_LENGTHS: dict[Target, int] = {
    "forward_s": 3, "backward_s": 3, "kept_bytes": 2, "transient_bytes": 2,
}  # fmt: skip
"""Different lengths that a fit takes: seconds bend, bytes do not."""


def target_of(name: str) -> Target:
    """The target of a name. Raises CostError when there is none."""
    for target in TARGETS:
        if name == target:
            return target
    raise CostError("target", got=repr(name), wanted=" or ".join(TARGETS))


def measured(points: Sequence[ProfilePoint], target: Target) -> tuple[list[int], list[float]]:
    """Lengths of single documents and what was measured of them."""
    found = [
        (point.lengths[0], float(value))
        for point in points
        if len(point.lengths) == 1 and (value := getattr(point, target)) is not None
    ]
    return [length for length, _ in found], [value for _, value in found]


def check_lengths(what: str, lengths: Sequence[int], target: Target) -> None:
    """Raise CostError for too few lengths, naming some to add."""
    wanted, longest = LEAST_LENGTHS[target], max(lengths, default=256)
    if len(set(lengths)) < wanted:
        raise CostError(
            what, got=f"{len(set(lengths))} lengths of single documents",
            wanted=f"at least {wanted}",
            hint=f"measure documents of {2 * longest:,} and {4 * longest:,} tokens too",
        )  # fmt: skip
