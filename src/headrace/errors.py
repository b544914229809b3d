"""Every error that headrace raises on purpose::

    HeadraceError
    |-- SpecError         a value (scheme, strategy, plan, ...) is malformed or contradicts itself
    |-- ConfigError       a configuration file or flag is wrong
    |-- DataError         a corpus cannot be read or is empty
    |-- CostError         a profile does not fit what it is used for, or cannot be fitted
    |-- InfeasiblePlan    no plan fits the devices; says which bound failed and by how much
    |-- ProgramError      a program would deadlock or leave something out; found before it runs
    |-- PlanMismatch      the ranks do not hold the same plan
    |-- CheckpointError   a checkpoint is missing, damaged or of another model
    |   `-- DamagedCheckpoint   it is missing or damaged: the one before may be whole
    |-- ModelError        a foreign model cannot run with sequence parallelism, or on its inputs
    |-- NotFinite         a layer gave a value that is no number (looked for when asked)
    |-- PeerLost          another rank of a loop has failed or ended
    |-- LaunchError       ranks cannot be started
    `-- MissingExtra      an optional dependency is absent; says what to install

The text is always ``what: got X, wanted Y; hint``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CostError",
    "DamagedCheckpoint",
    "DataError",
    "HeadraceError",
    "InfeasiblePlan",
    "LaunchError",
    "MissingExtra",
    "ModelError",
    "NotFinite",
    "PeerLost",
    "PlanMismatch",
    "ProgramError",
    "SpecError",
    "did_you_mean",
    "shortened",
]

_LONGEST = 500
"""Characters of what was got, and of what was wanted, that a message shows."""


class HeadraceError(Exception):
    """Base of all errors that a user can cause or meet.

    Args:
        what: The thing at fault, with which the text begins.
        got: What there was.
        wanted: What there should be.
        hint: What to do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        got: object | None = None,
        wanted: object | None = None,
        hint: str | None = None,
    ) -> None:
        self.what, self.got, self.wanted, self.hint = what, got, wanted, hint
        text = what
        if got is not None:
            text += f": got {shortened(got, _LONGEST)}"
        if wanted is not None:
            text += f"{', ' if got is not None else ': '}wanted {shortened(wanted, _LONGEST)}"
        if hint:
            text += f"; {hint}"
        super().__init__(text)


class SpecError(HeadraceError):
    """A value is malformed or contradicts itself."""


class ConfigError(HeadraceError):
    """A configuration file or flag is wrong."""


class DataError(HeadraceError):
    """A corpus cannot be read or holds nothing to train on."""


class CostError(HeadraceError):
    """A profile is of another model or device, damaged, or too thin to fit."""


class InfeasiblePlan(HeadraceError):
    """No plan fits; says which bound failed and by how much."""


class ProgramError(HeadraceError):
    """A program breaks one of the checker's rules."""


class PlanMismatch(HeadraceError):
    """The ranks do not hold the same plan, or a plan of the wrong kind."""


class CheckpointError(HeadraceError):
    """A checkpoint is missing, damaged or of another model."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is missing or not as it was written; the one before may be whole."""


class ModelError(HeadraceError):
    """A model that nobody here wrote cannot run with sequence parallelism, or is given what it
    cannot take."""


class NotFinite(HeadraceError):
    """A layer gave a value that is not a finite number."""


class LaunchError(HeadraceError):
    """The ranks of a job cannot be started, or one of them died."""


class PeerLost(HeadraceError):
    """Another rank of a user's loop has failed or ended while this one needed it."""


class MissingExtra(HeadraceError):
    """An optional package is not installed.

    Args:
        package: The package.
        extra: The extra of headrace that installs it.
        needed_for: What needs it.
    """

    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package}",
            hint=f"pip install 'headrace[{extra}]'",
        )


def shortened(value: object, longest: int = 80) -> str:
    """The text of a value, its middle left out where it is long.

    Args:
        value: Any value.
        longest: Characters of its text that are shown.

    Returns:
        The text, with a count of the characters that are left out.
    """
    text = str(value)
    if len(text) <= longest:
        return text
    left_out = f" ...{len(text) - longest:,} characters... "
    # Two thirds of what is shown are the beginning, one third the end.
    return text[: longest * 2 // 3] + left_out + text[-(longest // 3) :]


def did_you_mean(word: str, options: Iterable[str]) -> str | None:
    """Look for an option that a word may be a slip of.

    Args:
        word: What was written.
        options: What could have been meant.

    Returns:
        A hint that names the closest option; None when nothing is close.

    Example:
        >>> hr.errors.did_you_mean("megatron", ["megatron_cz", "ulysses_z"])
        "did you mean 'megatron_cz'?"
    """
    close = difflib.get_close_matches(str(word), list(options), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else None
