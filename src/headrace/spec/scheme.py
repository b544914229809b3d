"""How one pipeline is laid out: tensor x context x pipeline degrees."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.errors import SpecError

__all__ = ["Scheme"]

_PART = re.compile(r"^(tp|cp|pp)([1-9][0-9]*)$")
_FIELDS = {"tp": "tensor", "cp": "context", "pp": "pipeline"}


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Scheme:
    """Degrees of one pipeline, written ``tp4-cp2-pp2``; degrees of one are left out, and a
    pipeline of a single device is ``cp1`` (Hydraulis, "parallel scheme")."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        for name in _FIELDS.values():
            if getattr(self, name) < 1:
                raise SpecError(f"{name} degree", got=getattr(self, name), wanted=">= 1")

    @property
    def devices(self) -> int:
        """Devices of one pipeline."""
        return self.tensor * self.context * self.pipeline

    @property
    def width(self) -> int:
        """Ranks of one stage."""
        return self.tensor * self.context

    def parts(self, *, sharded: bool) -> int:
        """Parts into which the ranks of a stage cut the rows of a weight: the tensor degree, whose
        blocks of neighbours are replicas of each other, or all its ranks."""
        return self.width if sharded else self.tensor

    def __str__(self) -> str:
        degrees = {"tp": self.tensor, "cp": self.context, "pp": self.pipeline}
        text = "-".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)
        return text or "cp1"

    @classmethod
    def parse(cls, text: str) -> Scheme:
        """The inverse of ``str``; degrees of one may be written out, order is free."""
        fields: dict[str, int] = {}
        for part in text.strip().split("-"):
            found = _PART.match(part)
            if not found or _FIELDS[found[1]] in fields:
                raise SpecError("scheme", got=repr(text), wanted="tpN, cpN, ppN joined by '-'")
            fields[_FIELDS[found[1]]] = int(found[2])
        return cls(**fields)
