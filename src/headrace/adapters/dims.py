"""How axes lie in the dims of a tensor, as texts: ``"(b t) s c"``.

Names stand for axes; a pair of brackets holds those that a dim was flattened from, the first one
outermost. A name that no axis has (batch, channels) may be of any size, one in each dim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from headrace.errors import DataError, SpecError

__all__ = ["Dims"]


@dataclass(frozen=True, slots=True)
class Dims:
    """The names in each dim of a tensor."""

    names: tuple[tuple[str, ...], ...]

    @classmethod
    def parse(cls, text: str) -> Dims:
        """Read a text. Raises SpecError for names that stand twice, and brackets in brackets."""
        return _parsed(text)

    @property
    def flat(self) -> tuple[str, ...]:
        """All names, one after the other."""
        return tuple(name for names in self.names for name in names)

    def __contains__(self, name: str) -> bool:
        return name in self.flat

    def __str__(self) -> str:
        texts = (names[0] if len(names) == 1 else f"({' '.join(names)})" for names in self.names)
        return " ".join(texts)

    def opened(self, x: torch.Tensor, sizes: Mapping[str, int]) -> torch.Tensor:
        """``x`` with a dim for each name, ``sizes`` being those of the axes here. Raises DataError
        for a tensor of other dims or sizes."""
        if x.dim() != len(self.names):
            self._refuse(x, sizes)
        shape: list[int] = []
        for size, names in zip(x.shape, self.names, strict=True):
            known = math.prod([sizes[name] for name in names if name in sizes])
            open_ = [name for name in names if name not in sizes]
            rest = size // known if known else 0
            if len(open_) > 1 or rest * known != size or (not open_ and known != size):
                self._refuse(x, sizes)
            shape += [sizes.get(name, rest) for name in names]
        return x.reshape(shape)

    def closed(self, x: torch.Tensor) -> torch.Tensor:
        """The other way, from a dim for each name."""
        shape: list[int] = []
        at = 0
        for names in self.names:
            shape.append(math.prod(x.shape[at : at + len(names)]))
            at += len(names)
        return x.reshape(shape)

    def dim_of(self, name: str) -> int:
        """The dim of an axis once they are opened. Raises SpecError where it is not there."""
        if name not in self:
            raise SpecError("axis of a tensor", got=name, wanted=f"one of {self}")
        return self.flat.index(name)

    def _refuse(self, x: torch.Tensor, sizes: Mapping[str, int]) -> None:
        known = ", ".join(f"{name} {sizes[name]}" for name in self.flat if name in sizes)
        raise DataError(
            f"tensor of dims {self}",
            got=f"{list(x.shape)}",
            wanted=f"{len(self.names)} dims, {known} on this rank",
        )


@lru_cache(maxsize=256)
def _parsed(text: str) -> Dims:
    names: list[tuple[str, ...]] = []
    pieces: Sequence[str] = re.findall(r"\([^()]*\)|[^\s()]+|[()]", text)
    for piece in pieces:
        inside = piece[1:-1].split() if piece.startswith("(") else [piece]
        if not inside or not all(re.fullmatch(r"\w+", name) for name in inside):
            raise SpecError("dims", got=repr(text), wanted="names, flattened ones in brackets")
        names.append(tuple(inside))
    found = Dims(tuple(names))
    if len(set(found.flat)) != len(found.flat) or not names:
        raise SpecError("dims", got=repr(text), wanted="names, each once")
    return found
