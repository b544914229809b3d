"""Numbers of a run beside those of an earlier one, whose JSON was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["Earlier"]


class Earlier:
    """Rows of an earlier run. Rows of the same thing are alike in ``keys``."""

    def __init__(self, rows: Iterable[dict[str, Any]], keys: Sequence[str]) -> None:
        self._keys = keys
        self._rows = {self._of(row): row for row in rows}

    def _of(self, row: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in self._keys)

    def text(self, row: dict[str, Any], key: str, form: Callable[[Any], str]) -> str:
        """A number, and how many times that of the earlier run it is, if there was one."""
        before = self._rows.get(self._of(row), {}).get(key)
        return form(row[key]) + (f" ({row[key] / before:.3f}x)" if before else "")
