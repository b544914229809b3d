"""Lengths of batches as ``hr.lengths``: drawn from a distribution, read from a text."""

from __future__ import annotations

from headrace.data.drawn_lengths import draw_batches, parse_distribution
from headrace.spec.lengths import Lengths
from headrace.units import parse_count

__all__ = ["batches", "draw", "parse"]


def draw(
    distribution: str,
    *,
    tokens: int | str | None = None,
    sequences: int | None = None,
    seed: int = 0,
) -> Lengths:
    """Draw the lengths of one batch at random, independently of each other.

    A sequence that is longer than the whole budget stands alone.

    Args:
        distribution: A law (``"lognormal:median=2000,sigma=1.4,max=128Ki"``, ``"fixed:4096"``), a
            preset (``"github-code"``), ``"list:LENGTH/..."``, ``"file:PATH"`` of a file of lengths
            or of a histogram, or a mixture ``"0.3*A + 0.7*B"``.
        tokens: The most tokens of the batch, a number or a text such as ``"4M"``.
        sequences: The number of its sequences, in place of tokens.
        seed: The same seed gives the same lengths.

    Returns:
        The lengths.

    Raises:
        ConfigError: For a malformed distribution, a budget below one token or sequence, both
            budgets or none, or a seed that is negative.
        DataError: For a file that cannot be read or is malformed.
        SpecError: For a malformed text of ``tokens``.

    Example:
        >>> hr.lengths.draw("fixed:100", tokens="1Ki").tokens
        (100, 100, 100, 100, 100, 100, 100, 100, 100, 100)
    """
    return batches(distribution, 1, tokens=tokens, sequences=sequences, seed=seed)[0]


def batches(
    distribution: str,
    count: int,
    *,
    tokens: int | str | None = None,
    sequences: int | None = None,
    seed: int = 0,
) -> tuple[Lengths, ...]:
    """Draw the lengths of several batches, one after the other, each as :func:`draw` makes it.

    Args:
        distribution: As for :func:`draw`.
        count: How many batches to draw.
        tokens: The most tokens of each batch, a number or a text such as ``"4M"``.
        sequences: The number of sequences of each batch, in place of tokens.
        seed: The same seed gives the same batches.

    Returns:
        The lengths of each batch; their ids count the sequences over all batches.

    Raises:
        ConfigError: As for :func:`draw`, and for fewer than one batch or more than two million
            sequences in all.
        DataError: As for :func:`draw`.
        SpecError: For a malformed text of ``tokens``.
    """
    budget = parse_count(tokens) if isinstance(tokens, str) else tokens
    law = parse_distribution(distribution)
    return tuple(draw_batches(law, budget, count, seed, batch_sequences=sequences))


def parse(text: str) -> Lengths:
    """Read lengths from a text that lists them.

    Args:
        text: Lengths with blanks between, ``LENGTHxCOUNT`` for several equal ones.

    Returns:
        The lengths.

    Raises:
        SpecError: For a word that is no length, and for none at all.

    Example:
        >>> hr.lengths.parse("48000 9000 4000x3").total
        69000
    """
    return Lengths.parse(text)
