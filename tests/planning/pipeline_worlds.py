"""Random costs and batches for the tests of pipelines."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
from hypothesis import strategies as st

from headrace.costs.pipeline_costs import PipelineCosts, SchemeCost
from headrace.spec import Scheme

__all__ = ["batches", "costs_of", "log_normal", "published", "small_costs", "tiny_world"]

_PUBLISHED = Path(__file__).parents[2] / "benchmarks" / "published"

Entry = tuple[str, float, float, float, int]
"""Scheme, a, b, c and room."""


def costs_of(*entries: Entry, devices: int = 1) -> PipelineCosts:
    """Costs that list their rooms at ``devices``."""
    return PipelineCosts(
        schemes=tuple(
            SchemeCost(scheme=Scheme.parse(text), a_s=a, b_s=b, c_s=c, max_length={devices: room})
            for text, a, b, c, room in entries
        )
    )


def published(name: str) -> PipelineCosts:
    """Costs that a paper's authors measured."""
    return PipelineCosts.load(_PUBLISHED / f"{name}.json")


@st.composite
def small_costs(draw: st.DrawFn, most: int = 4) -> PipelineCosts:
    """One to ``most`` schemes of up to four devices, with and without stages, tight and roomy,
    with constants from nothing to much."""
    texts = draw(
        st.lists(
            st.sampled_from(["cp1", "tp2", "tp3", "pp2", "pp3", "tp4", "tp2-pp2", "cp2"]),
            min_size=1,
            max_size=most,
            unique=True,
        )
    )
    entries: list[Entry] = []
    for text in texts:
        scheme = Scheme.parse(text)
        loss = 1 + 0.15 * (scheme.devices / scheme.pipeline - 1)
        a = draw(st.sampled_from([0.0, 1e-9, 1e-8])) / scheme.devices
        b = 1e-4 * loss * draw(st.floats(1, 1.4)) / scheme.devices
        c = draw(st.sampled_from([0.0, 0.02, 0.2])) / scheme.pipeline
        room = draw(st.sampled_from([500, 2000, 6000])) * scheme.devices
        entries.append((text, a, b, c, room))
    return costs_of(*entries)


def tiny_world(
    seed: int, *, devices: int, sequences: int, longest: int = 3000
) -> tuple[PipelineCosts, int, list[int]]:
    """Costs, up to so many devices and up to so many lengths: any drawn by ``seed``, for a test of
    many worlds that are always the same. Lengths fit; costs that fit no device are drawn again."""
    random = Random(seed)
    while True:
        texts = ["cp1", "tp2", "tp3", "pp2", "pp3", "tp4", "tp2-pp2", "cp2"]
        entries = list[Entry]()
        for text in random.sample(texts, random.randint(1, 4)):
            scheme = Scheme.parse(text)
            loss = 1 + 0.15 * (scheme.devices / scheme.pipeline - 1)
            a = random.choice([0.0, 1e-9, 1e-8]) / scheme.devices
            b = 1e-4 * loss * random.uniform(1, 1.4) / scheme.devices
            c = random.choice([0.0, 0.02, 0.2]) / scheme.pipeline
            room = random.choice([500, 2000, 6000]) * scheme.devices
            entries.append((text, a, b, c, room))
        held = random.randint(1, devices)
        rooms = [room for text, *_, room in entries if Scheme.parse(text).devices <= held]
        if rooms:
            break
    lengths = [
        min(max(rooms), random.choice([random.randint(1, 300), random.randint(1, longest), 512]))
        for _ in range(random.randint(1, sequences))
    ]
    return costs_of(*entries), held, lengths


def batches(most: int, longest: int = 8000) -> st.SearchStrategy[list[int]]:
    """Short, long and equal sequences."""
    length = st.one_of(st.integers(1, 300), st.integers(1, longest), st.just(512))
    return st.lists(length, min_size=1, max_size=most)


def log_normal(tokens: int, seed: int, *, sigma: float = 1.05, longest: int = 32_768) -> list[int]:
    """A long-tailed batch of about so many tokens: median 700."""
    random = np.random.default_rng(seed)
    lengths = list[int]()
    while sum(lengths) < tokens:
        lengths.append(int(np.clip(np.exp(random.normal(np.log(700), sigma)), 16, longest)))
    return lengths
