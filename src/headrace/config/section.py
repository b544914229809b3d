"""What all sections of a configuration share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from headrace.errors import HeadraceError
from headrace.units import parse_count

__all__ = ["Count", "Natural", "Place", "Positive", "Section", "number"]

_MOST = 2**63 - 1  # what arrays and files hold


def number(parse: Callable[[str], object]) -> Callable[[Any], Any]:
    """Make a validator for pydantic of ``parse``: a function that parses a text and returns any
    other value unchanged. Errors of ``parse`` become ValueErrors, which pydantic collects."""

    def read(value: Any) -> Any:
        """Return ``value``, parsed where it is a text."""
        try:
            return parse(value) if isinstance(value, str) else value
        except HeadraceError as error:
            raise ValueError(str(error)) from None

    return read


def _checked_path(text: str) -> str:
    """The text of a path, unchanged; raises ValueError for a text with null characters, which no
    path can have, and for the home folder of an unknown user."""
    if "\0" in text:
        raise ValueError("wanted a path without null characters")
    try:
        Path(text).expanduser()
    except RuntimeError:
        raise ValueError("wanted the home folder of a user who is known") from None
    return text


Positive = Annotated[int, Field(ge=1, le=_MOST)]
Natural = Annotated[int, Field(ge=0, le=_MOST)]
Count = Annotated[int, BeforeValidator(number(parse_count)), Field(ge=1, le=_MOST)]
"""A number, or a text such as ``"32Ki"``."""

Place = Annotated[str, AfterValidator(_checked_path)]
"""A path, or what stands for one."""


class Section(BaseModel):
    """The base class of the tables of a configuration file. It refuses unknown keys, and inf and
    NaN, which checkpoints cannot hold; the docstring after each key explains it to users."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
