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
_TRIES = 16  # candidates of each kind that are tried in a piece


def borders(text: str, piece: int, can_cut: Callable[[str, str], bool]) -> Iterator[int]:
    """Places within a text where it may be cut: half to a whole ``piece`` of characters after the
    last one or, where none is found there, further on.

    ``can_cut(left, right)`` tells whether two neighbouring texts have, one after the other, the
    tokens of the joined text.
    """
    begin = 0  # the last border
    while len(text) - begin > piece:
        border, stop = None, begin  # the text up to ``stop`` has been searched
        while border is None and len(text) - stop > piece:
            first, stop = stop + piece // 2, stop + piece
            border = _border(text, first, stop, can_cut)
        if border is None:
            return
        yield border
        begin = border


def _border(text: str, first: int, stop: int, can_cut: Callable[[str, str], bool]) -> int | None:
    """The last border in ``[first, stop)`` at which the tokens stay the same: after a newline, else
    before a blank. None when none of the last few newlines and blanks is one."""
    for blank, after in (("\n", 1), (" ", 0)):  # ``after``: characters of the blank before the cut
        at = stop
        for _ in range(_TRIES):
            at = text.rfind(blank, first, at)
            if at < 1:
                break
            border = at + after
            # In a run of blanks there is no border, as tokenizers take the run as one.
            alone = not (text[at - 1].isspace() or text[at + 1 : at + 2].isspace())
            left, right = text[max(0, border - _AROUND) : border], text[border : border + _AROUND]
            if alone and can_cut(left, right):
                return border
    return None
