"""A batch with its costs: what every sequence takes on every group size, longest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headrace.costs.group_costs import GroupCosts
from headrace.errors import InfeasiblePlan, SpecError
from headrace.spec import Lengths

__all__ = ["Floats", "Work"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Work:
    """A batch on a world, sorted: position 0 is the longest sequence (ties by index).

    ``order[i]`` is the index of position i in the batch, ``tokens[i]`` its length.
    ``seconds[row, i]`` is what it adds to a launch on ``sizes[row]`` ranks, without the launch's
    constant, and infinite where it does not fit (``rows`` are the same as lists); ``area[row, i]``
    the device-seconds, with its share of the constants: a launch on p ranks pays p c
    device-seconds and holds at most p cap tokens, so this much of c comes on each token.
    ``share_s[row, i]`` is the area of one rank.
    """

    costs: GroupCosts
    devices: int
    lengths: Lengths
    order: tuple[int, ...]
    tokens: tuple[int, ...]
    sizes: tuple[int, ...]
    seconds: Floats
    rows: list[list[float]]
    area: Floats
    share_s: Floats

    @property
    def c_s(self) -> float:
        """Seconds of an empty launch."""
        return self.costs.c_s

    @classmethod
    def of(cls, costs: GroupCosts, lengths: Lengths, devices: int) -> Work:
        """Sort ``lengths`` and price them. Raises SpecError for a world without ranks,
        InfeasiblePlan for one that no group fits, or that is too small for a sequence."""
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
            raise SpecError("devices", got=repr(devices), wanted="a whole number >= 1")
        order = sorted(range(len(lengths)), key=lambda i: (-lengths.tokens[i], i))
        tokens = tuple(lengths.tokens[i] for i in order)
        _require_fit(costs, devices, order[0], tokens[0])
        sizes = tuple(p for p in costs.sizes if p <= devices)
        length = np.array(tokens, dtype=np.float64)
        ranks = np.array(sizes, dtype=np.float64)[:, None]
        kappa = np.array([costs.kappa_s[p] for p in sizes])[:, None]
        seconds = (costs.a_s * length**2 + costs.b_s * length + kappa * length) / ranks
        seconds[length > costs.cap_tokens * ranks] = np.inf
        share_s = seconds + costs.c_s / costs.cap_tokens * length / ranks
        return cls(
            costs=costs, devices=devices, lengths=lengths, order=tuple(order), tokens=tokens,
            sizes=sizes, seconds=seconds, rows=seconds.tolist(), area=ranks * share_s,
            share_s=share_s,
        )  # fmt: skip

    def launch_s(self, p: int, held: Sequence[int]) -> float:
        """Seconds of one launch of the positions ``held`` on ``p`` ranks."""
        row = self.rows[self.sizes.index(p)]
        return sum([row[i] for i in held]) + self.c_s


def _require_fit(costs: GroupCosts, devices: int, index: int, longest: int) -> None:
    if costs.sizes[0] > devices:
        raise InfeasiblePlan(
            "devices",
            got=devices,
            wanted=f"at least {costs.sizes[0]}, the smallest group with costs",
        )
    most = costs.most_tokens(devices)
    if longest <= most:
        return
    enough = next((p for p in costs.sizes if p * costs.cap_tokens >= longest), None)
    if enough is not None:
        hint = f"{enough} devices would hold it"
    else:
        ranks = -(-longest // costs.cap_tokens)
        hint = f"it takes {ranks} devices, and groups of so many have no costs"
    raise InfeasiblePlan(
        f"sequence {index} of {longest:,} tokens",
        wanted=f"at most {most:,} tokens on {devices} devices ({costs.cap_tokens:,} per device)",
        hint=hint,
    )
