"""Writes the generated pages of the documentation: commands from their help, keys from the model.

python docs/make_reference.py           write them
python docs/make_reference.py --check   exit 1 when they are not as written
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path

from rich.console import Console

from headrace.cli import app
from headrace.cli.reference import config_markdown

FOLDER = Path(__file__).parent / "_generated"
COMMANDS = (
    "train",
    "plan",
    "simulate",
    "forecast",
    "profile",
    "rehearse",
    "report",
    "verify",
    "export",
    "papers",
    "doctor",
    "config",
)


def help_text(*arguments: str) -> str:
    """What ``--help`` prints, at a fixed width and without colour."""
    out = io.StringIO()
    console = Console(file=out, width=90, color_system=None, force_terminal=False)
    with contextlib.suppress(SystemExit):
        app.help_print([*arguments], console=console)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def cli_markdown() -> str:
    """All commands with their help."""
    parts = [f"```text\n{help_text()}\n```\n"]
    parts += [f"## headrace {name}\n\n```text\n{help_text(name)}\n```\n" for name in COMMANDS]
    return "\n".join(parts)


def main() -> int:
    """Write or check both pages."""
    pages = {"cli.md": cli_markdown(), "config.md": config_markdown()}
    stale = []
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages.items():
        path = FOLDER / name
        if "--check" in sys.argv[1:]:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(str(path))
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run make reference", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
