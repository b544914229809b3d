"""Where a long text may be cut without changing its tokens.

Tokenizers look at words, or at runs of blanks: one newline or blank between two other characters
is where they end too. What follows a newline, and what begins with a blank, is tokenized as in the
middle of a text by most, but not by those that put a blank before every text: so each border is
tried on its surroundings, and not used where the tokens differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

__all__ = ["borders"]

_AROUND = 128  # characters on either side that a border is tried with: more than a few words
_TRIES = 16


def borders(text: str, piece: int, parts: Callable[[str, str], bool]) -> Iterator[int]:
    """Borders within a text, about ``piece`` characters apart or, where none is found, more.

    ``parts(left, right)`` is whether two neighbours have the tokens of both together.
    """
    begin = 0
    while len(text) - begin > piece:
        border, stop = None, begin
        while border is None and len(text) - stop > piece:
            first, stop = stop + piece // 2, stop + piece
            border = _border(text, first, stop, parts)
        if border is None:
            return
        yield border
        begin = border


def _border(text: str, first: int, stop: int, parts: Callable[[str, str], bool]) -> int | None:
    """The last good border in ``[first, stop)``: after a newline, else before a blank."""
    for blank, after in (("\n", 1), (" ", 0)):
        at = stop
        for _ in range(_TRIES):
            at = text.rfind(blank, first, at)
            if at < 1:
                break
            border = at + after
            alone = not (text[at - 1].isspace() or text[at + 1 : at + 2].isspace())
            if alone and parts(
                text[max(0, border - _AROUND) : border], text[border : border + _AROUND]
            ):
                return border
    return None
