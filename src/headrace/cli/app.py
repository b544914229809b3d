"""The application that commands register with, and the options that many of them share."""

from __future__ import annotations

from typing import Annotated

from cyclopts import App, Parameter
from rich.console import Console

__all__ = ["Changes", "Json", "app", "errors"]

errors = Console(stderr=True, highlight=False)

app = App(
    name="headrace",
    help="Train Transformers on sequences of wildly different lengths: for every batch the data"
    " decides which devices work on which sequences, and how.",
    version_flags=["--version"],
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
Json = Annotated[bool, Parameter(help="Write JSON to stdout.", negative="")]
