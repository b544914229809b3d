"""How iterations that choose their own samples are drawn, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headrace.errors import SpecError

__all__ = ["DrawOptions", "Flow"]

Flow = Literal["dcp", "bucket"]
"""What fills an iteration: accumulated launches, or one launch for each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """How iterations are drawn.

    Attributes:
        flow: ``dcp`` accumulates launches until all groups end together, ``bucket`` has one launch
            for each group.
        least_steps: G_min, the accumulation steps that some group has at least.
        most_steps: G_max, at most how many accumulation steps the group with the longest launch
            has. The paper has no number; with 5 steps, ranks of its Transformer-1D are idle for 2
            to 6 % of their time, with 3 for 4 to 10 %.
        bucket_ratio: The longest over the shortest length of a bucket; with 2 the idle shares above
            are up to twice as large.
        width: Ranks of each group in the flow ``bucket``, whose groups are of one size; when left
            out, as few as hold the longest sample.
        seed: Seed of the random order of samples and of groups.

    Raises:
        SpecError: For a value out of range.
    """

    flow: Flow = "dcp"
    least_steps: int = 2
    most_steps: int = 5
    bucket_ratio: float = 2**0.25
    width: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise SpecError for options out of range, and for a width that nothing would use."""
        if self.flow not in get_args(Flow):
            raise SpecError("flow", got=repr(self.flow), wanted="dcp or bucket")
        if not self.least_steps >= 1 or not self.most_steps >= 1:
            got = f"{self.least_steps} to {self.most_steps}"
            raise SpecError("accumulation steps", got=got, wanted=">= 1 each")
        if not self.bucket_ratio > 1:
            raise SpecError("bucket_ratio", got=self.bucket_ratio, wanted="> 1")
        if self.width is not None and self.flow != "bucket":
            raise SpecError("width", got=self.width, wanted="flow 'bucket' with it")
