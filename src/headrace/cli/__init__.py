"""The command line: ``headrace COMMAND``. Data goes to stdout, the rest to stderr."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from headrace.cli import commands  # registers them
from headrace.cli.app import app, errors
from headrace.comm.variables import speaks_here
from headrace.errors import HeadraceError, MissingExtra

__all__ = ["app", "commands", "main", "run"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for a failed check, 2 for a user's mistake or for
    output that cannot be written."""
    _open_streams()
    try:
        code = app(arguments, result_action="return_value")
        sys.stdout.flush()  # a full disk may only show now
    except HeadraceError as error:
        _tell(error)
        return 2
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torch", "psutil", "safetensors"):
            raise
        missing = MissingExtra(package, extra="train", needed_for="this command")
        _tell(missing)
        return 2
    except BrokenPipeError:
        # The reader has seen enough (| head); nothing more can be written, at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        # Writes know no file's name, those to stdout among them.
        where = "output" if error.filename is None else str(error.filename)
        _tell(HeadraceError(where, got=error.strerror or error))
        return 2
    except KeyboardInterrupt:
        return 130
    return code if isinstance(code, int) else 0


def run() -> None:
    """Run a command and end the process at once: to take torch apart takes seconds, in which one
    more Ctrl-C would end in a traceback."""
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or its reader is gone
            stream.flush()
    os._exit(code)


def _open_streams() -> None:
    """Open stdout and stderr where they were closed (``>&-``) and so are None: what is written to
    stdout fails, as nobody can read it, and what is told on stderr is dropped."""
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _tell(error: HeadraceError) -> None:
    """Print what is wrong to stderr, on the rank that speaks for all."""
    if speaks_here():
        text = str(error).replace("[", r"\[")
        errors.print(f"[bold red]error:[/] {text}", soft_wrap=True)
