"""The application that commands register with, and the options that many of them share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter, Token
from rich.console import Console

from headrace.errors import shortened

__all__ = ["Changes", "Json", "Output", "Whole", "app", "errors"]


class Output(Console):
    """Standard output with tables and colours. Keywords are those of ``rich.console.Console``."""

    def on_broken_pipe(self) -> None:
        """Let the command line end as for all output whose reader is gone: rich itself would end
        the process with the code of a failed check."""
        raise BrokenPipeError


errors = Console(stderr=True, highlight=False)

app = App(
    name="headrace",
    help="Train Transformers on sequences of wildly different lengths: for every batch the data"
    " decides which devices work on which sequences, and how.",
    version_flags=["--version"],
    console=Output(),
    error_console=errors,
    help_epilogue="Documentation of every key: headrace config. What works here: headrace doctor.",
)

Changes = Annotated[
    list[str],
    Parameter(
        name="--set",
        help="Change a key of the configuration, SECTION.KEY=VALUE; SECTION.KEY= unsets it.",
        negative="",
        consume_multiple=False,
    ),
]


def _whole(type_: object, tokens: Sequence[Token]) -> int:
    """The whole number that a flag's only token says; raises ValueError for others. cyclopts itself
    would make 1 of 1.5."""
    (token,) = tokens
    if len(token.value) > 30 or not token.value.strip().removeprefix("-").isdecimal():
        raise ValueError(f"got {shortened(token.value)}, wanted a whole number")
    return int(token.value)


Whole = Annotated[int, Parameter(converter=_whole)]
Json = Annotated[bool, Parameter(help="Write JSON to stdout.", negative="")]
