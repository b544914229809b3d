"""Lengths of batches as ``hr.lengths``: drawn from a distribution, read from a text."""

from __future__ import annotations

from headrace.data.drawn_lengths import draw_batches, parse_distribution
from headrace.spec.lengths import Lengths
from headrace.units import parse_count

__all__ = ["batches", "draw", "parse"]


def draw(distribution: str, *, tokens: int | str, seed: int = 0) -> Lengths:
    """The lengths of one batch of at most ``tokens`` tokens (``"4M"``), drawn independently.

    ``distribution`` is a law (``"lognormal:median=2000,sigma=1.4,max=128Ki"``, ``"fixed:4096"``), a
    preset (``"github-code"``), ``"list:LENGTH/..."``, ``"file:PATH"``, or a mixture
    ``"0.3*A + 0.7*B"``. A single sequence that is longer stands alone. Deterministic by ``seed``.
    Raises ConfigError for a malformed text.
    """
    return batches(distribution, 1, tokens=tokens, seed=seed)[0]


def batches(
    distribution: str, count: int, *, tokens: int | str, seed: int = 0
) -> tuple[Lengths, ...]:
    """The lengths of ``count`` batches, one after the other, each as :func:`draw` makes it."""
    budget = parse_count(tokens) if isinstance(tokens, str) else tokens
    return tuple(draw_batches(parse_distribution(distribution), budget, count, seed))


def parse(text: str) -> Lengths:
    """The lengths that a text lists: ``"48000 9000 4000x3"``. Raises SpecError."""
    return Lengths.parse(text)
