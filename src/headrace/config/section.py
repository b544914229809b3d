"""What all sections of a configuration share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headrace.errors import HeadraceError
from headrace.units import parse_count

__all__ = ["Count", "Natural", "Positive", "Section", "number"]


def number(parse: Callable[[str], object]) -> Callable[[Any], Any]:
    """Reads a text by ``parse``, its error as pydantic wants it; leaves other values alone."""

    def read(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except HeadraceError as error:
            raise ValueError(str(error)) from None

    return read


Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, BeforeValidator(number(parse_count)), Field(ge=1)]
"""A number, or a text such as ``"32Ki"``."""


class Section(BaseModel):
    """A table of the file: no unknown keys, and a docstring after each known one."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
