"""Distributions by a text or a name, and batches drawn from them.

The text forms, which :func:`parse_distribution` reads and ``str`` of a distribution writes::

    lognormal:median=700,sigma=1.5,min=16,max=32768
    lognormal:median=700,sigma=1.5,max=1M,tail=0.01,alpha=1.1
    bins:edges=64/4096/8192,shares=80/20
    fixed:4096
    list:512/700/90000
    counted:lengths=512/700/90000,counts=30/12/1
    0.6*lognormal:median=500,sigma=1 + 0.4*bins:edges=8192/32768,shares=1
    file:lengths.txt
    github-code

Files hold lengths or histograms of them (:mod:`headrace.data.length_files`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.distributions import Bins, Counted, Distribution, LogNormal, Mixture, Resampled
from headrace.data.length_files import read_lengths
from headrace.errors import ConfigError, HeadraceError, did_you_mean
from headrace.spec.given import of_kind, whole
from headrace.spec.lengths import MOST_SEQUENCES, Lengths
from headrace.units import counted, parse_count

__all__ = ["PRESETS", "draw_batches", "parse_distribution"]

_SORTED = 1 << 16
"""Lengths that are drawn and sorted to know the shortest ones of a distribution."""

PRESETS: dict[str, Distribution] = {
    # ParaDySe, Table 3: shares below 4K, 8K, ... and the longest, K = 1024 as its Table 5 shows
    # (all lengths there are multiples of 512). The least length is a guess.
    "github-code": Bins(
        edges=(64, 4096, 8192, 16384, 32768, 65536, 131072, 309 * 1024 + 1),
        shares=(65.7, 14.5, 9.8, 5.1, 2.7, 1.1, 1.1),
    ),
    "grch38-3mer": Bins(
        edges=(1024, 4096, 8192, 16384, 32768, 65536, 131072, 624 * 1024 + 1),
        shares=(3.5, 26.4, 28.7, 21.2, 11.9, 5.5, 1.9),
    ),
    # Quantiles of a list of a million tokenized articles, from 50 % to 99.99 %.
    "wikipedia": Bins(
        edges=(16, 347, 1024, 2112, 3721, 10921, 37367, 102060, 1823778),
        shares=(50, 28.8, 11.2, 5, 4, 0.9, 0.09, 0.01),
    ),
    # Quantiles of 77,932 documents: 50, 90 and 99 %.
    "prolong": Bins(edges=(64, 1914, 6051, 16273, 340150), shares=(50, 40, 9, 1)),
    # Skrull, Table 1: shares below 1K, 4K, 8K, 32K and the longest; two humps.
    "chatqa2-sft": Bins(
        edges=(64, 1024, 4096, 8192, 32768, 99 * 1024 + 1),
        shares=(21.92, 9.56, 8.95, 59.43, 0.14),
    ),
    "lmsys-chat": Bins(
        edges=(16, 1024, 4096, 8192, 32768, 131072, 1643 * 1024 + 1),
        shares=(87.12, 12.23, 0.52, 0.11, 0.01, 0.01),
    ),
    # No table is published. Hydraulis, Figure 17, draws 1.6M tokens of it 30 times and finds the
    # longest sequence between 15K and the 32K of the context: this law does the same.
    "commoncrawl-like": LogNormal(median=350, sigma=1.3, min=16, max=32768),
    # 11.45 GB of text in 28,602 books (the data set's card), four bytes a token: a mean of 100K.
    # The spread is a guess.
    "pg19-books": LogNormal(median=76_000, sigma=0.75, min=1024, max=1_000_000),
    # verl, issue 1458: responses of a step of DAPO, of 1,174 tokens in the mean, and 20,480, the
    # most that are allowed, at most. This law has both, of 8,192 responses.
    "rollouts": LogNormal(median=700, sigma=1.0, min=16, max=20_480),
}
"""Distributions by name, from what papers and lists have published of real corpora."""


def parse_distribution(text: str) -> Distribution:
    """The distribution a text names (the forms are listed at the top of this module).

    Raises ConfigError for a malformed text, DataError for a file that holds no lengths.
    """
    given = of_kind("lengths", text, str, error=ConfigError)
    parts = [part.strip() for part in re.split(r"\s\+\s", given.strip())]
    weighted = [re.fullmatch(r"([0-9.]+)\*(.+)", part) for part in parts]
    if not any(weighted):
        if len(parts) > 1:
            raise ConfigError("lengths", got=repr(text), wanted="WEIGHT*PART + WEIGHT*PART")
        return _parse_one(parts[0])
    pairs = [(match[1], _parse_one(match[2])) for match in weighted if match]
    if len(pairs) != len(parts):
        raise ConfigError("lengths", got=repr(text), wanted="a weight before each part")
    weights = tuple(_float("weight", weight) for weight, _ in pairs)
    return Mixture(weights=weights, parts=tuple(part for _, part in pairs))


def _parse_one(text: str) -> Distribution:
    """The distribution of a preset's name or of a text ``kind:options``; raises ConfigError for
    others."""
    if text in PRESETS:
        return PRESETS[text]
    kind, colon, rest = text.partition(":")
    if not colon or kind not in _KINDS:
        known = [*PRESETS, *_KINDS]
        hint = did_you_mean(kind, known) or f"known are {', '.join(known)}"
        raise ConfigError("lengths", got=repr(text), hint=hint)
    return _KINDS[kind](rest)


def _options(kind: str, text: str, known: tuple[str, ...], needed: int) -> dict[str, str]:
    """The options ``a=1,b=2`` of a distribution of this kind as a dict of texts. Raises ConfigError
    for a name that is not ``known``, and unless the first ``needed`` of the known names are
    there."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    options: dict[str, str] = {}
    for name, _, value in pairs:
        if name.strip() in options:
            got = f"{name.strip()} twice"
            raise ConfigError(f"{kind} lengths", got=got, wanted="each option once")
        options[name.strip()] = value.strip()
    for name in options:
        if name not in known:
            hint = did_you_mean(name, known) or f"known are {', '.join(known)}"
            raise ConfigError(f"{kind} lengths", got=repr(name), hint=hint)
    for name in known[:needed]:
        if name not in options:
            raise ConfigError(f"{kind} lengths", got=repr(text), wanted=f"a {name}=...")
    return options


def _float(name: str, text: str) -> float:
    """The number in a text; raises ConfigError, about ``name``, for other text."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(name, got=repr(text), wanted="a number")


def _int(text: str) -> int:
    """A number of tokens from text; raises ConfigError for other text."""
    try:
        return parse_count(text)
    except HeadraceError as error:
        wanted = "a count such as 4096, 32Ki or 1,234"
        raise ConfigError("a length", got=repr(text), wanted=wanted, hint=error.hint)


def _float_or_count(text: str) -> float:
    """A number of tokens, possibly a fraction, or a count such as ``4Ki``."""
    try:
        return float(text)
    except ValueError:
        return _int(text)


def _lognormal(text: str) -> LogNormal:
    """The distribution of options such as ``median=4Ki,sigma=1``."""
    known = ("median", "sigma", "min", "max", "tail", "alpha")
    options = _options("lognormal", text, known, 2)
    values: dict[str, Any] = {"median": _float_or_count(options.pop("median"))}
    for name, value in options.items():
        values[name] = _int(value) if name in ("min", "max") else _float(name, value)
    return LogNormal(**values)


def _bins(text: str) -> Bins:
    """The distribution of ``edges`` and ``shares``, each with slashes between its numbers."""
    options = _options("bins", text, ("edges", "shares"), 2)
    return Bins(
        edges=tuple(_int(edge) for edge in options["edges"].split("/")),
        shares=tuple(_float("share", share) for share in options["shares"].split("/")),
    )


def _one_length(text: str) -> Resampled:
    """The distribution in which every length is the same."""
    return Resampled(lengths=(_int(text),))


def _list(text: str) -> Resampled:
    """The distribution of lengths with slashes between them, all as likely as each other."""
    if "," in text:
        wanted = "lengths parted by '/', as in list:512/700/90000"
        raise ConfigError("list lengths", got=repr(text), wanted=wanted)
    return Resampled(lengths=tuple(_int(length) for length in text.split("/")))


def _counted(text: str) -> Counted:
    """The distribution of ``lengths`` and ``counts``, each with slashes between its numbers."""
    options = _options("counted", text, ("lengths", "counts"), 2)
    return Counted(
        lengths=tuple(_int(length) for length in options["lengths"].split("/")),
        counts=tuple(_float("count", count) for count in options["counts"].split("/")),
    )


def _file(text: str) -> Distribution:
    """The distribution of the lengths in the file with this path."""
    return read_lengths(Path(text))


_KINDS: dict[str, Callable[[str], Distribution]] = {
    "lognormal": _lognormal,
    "bins": _bins,
    "fixed": _one_length,
    "list": _list,
    "counted": _counted,
    "file": _file,
}


class _Draws:
    """Lengths without end, drawn in chunks of 1024 from a generator of a seed.

    In the first ``curriculum_steps`` steps they are short: in step s drawn from the shortest
    (s + 1) / curriculum_steps of the lengths, as a sampler draws from a large corpus
    (:class:`headrace.data.sampler.SamplerOptions`).
    """

    def __init__(self, distribution: Distribution, seed: int, curriculum_steps: int) -> None:
        self._distribution, self._steps = distribution, curriculum_steps
        self._generator, self._chunk = _generator(seed, 0), iter(list[int]())
        # Lengths after the curriculum do not depend on it: it has streams of its own.
        if curriculum_steps:
            self._early = _generator(seed, 1)
            self._sorted = np.sort(distribution.draw(_SORTED, _generator(seed, 2)))

    def next(self, step: int) -> int:
        """The next length in tokens, for the batch of a step."""
        if step < self._steps:
            allowed = ceil(_SORTED * (step + 1) / self._steps)  # the shortest that may be drawn
            return int(self._sorted[self._early.integers(allowed)])
        length = next(self._chunk, None)
        if length is None:
            self._chunk = iter(self._distribution.draw(1024, self._generator).tolist())
            length = next(self._chunk)
        return length


def _generator(seed: int, stream: int) -> np.random.Generator:
    """A generator for one of a seed's streams of random numbers, which are independent."""
    key = np.array([seed, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def draw_batches(
    distribution: Distribution,
    batch_tokens: int | None,
    batches: int,
    seed: int = 0,
    *,
    batch_sequences: int | None = None,
    curriculum_steps: int = 0,
) -> list[Lengths]:
    """Draw ``batches`` batches of lengths from a distribution.

    Exactly one of ``batch_tokens`` and ``batch_sequences`` is given. A batch has at most
    ``batch_tokens`` tokens, except that a longer sequence is a batch alone, or it has
    ``batch_sequences`` sequences.

    The first ``curriculum_steps`` batches draw from the shortest lengths, as a run with the
    curriculum ``short-to-long`` does. A seed, from 0 to below 2^64, always gives the same batches.
    Ids of sequences count over all batches. Raises ConfigError for a budget or a number of batches
    below one, another seed, or more than two million sequences in all, as a digit too many would
    take all memory, or for ever.
    """
    seed = whole("seed", seed, most=2**64 - 1, error=ConfigError)
    if (batch_tokens is None) == (batch_sequences is None):
        got = "neither" if batch_tokens is None else "both"
        raise ConfigError("tokens and sequences of a batch", got=got, wanted="one of them")
    size, unit = batch_sequences, "sequence"
    if batch_tokens is not None:
        size, unit = batch_tokens, "token"
    size = whole(f"{unit}s of a batch", size, least=1, error=ConfigError)
    batches = whole("batches to draw", batches, least=1, error=ConfigError)
    budget = counted(size, unit)
    draws = _Draws(distribution, seed, curriculum_steps)
    drawn: list[Lengths] = []
    first = 0  # the id of the first sequence of the batch
    held = 0  # a length that was drawn when its batch was full, for the next batch; 0 for none
    for step in range(batches):
        batch: list[int] = []
        tokens = 0
        while batch_sequences is None or len(batch) < batch_sequences:
            length = held or draws.next(step)
            held = 0
            if batch and batch_tokens is not None and tokens + length > batch_tokens:
                held = length
                break
            batch.append(length)
            tokens += length
            if first + len(batch) > MOST_SEQUENCES:
                raise ConfigError(
                    f"lengths of {batches:,} batches of {budget}",
                    got=f"more than {MOST_SEQUENCES:,} sequences",
                    wanted="fewer",
                    hint="draw fewer batches, smaller ones, or longer sequences",
                )
        drawn.append(Lengths.of(batch, range(first, first + len(batch))))
        first += len(batch)
    return drawn
