"""Small models of every family, drawn at random."""

from __future__ import annotations

import numpy as np

from headrace.spec import Architecture
from headrace.spec.known_methods import FACTS

__all__ = ["methods_by_width", "random_model"]


def random_model(rng: np.random.Generator, *, layers: int, positions: int) -> Architecture:
    """A model of at most ``layers`` layers; learned positions take ``positions`` tokens."""
    kind = str(rng.choice(["llama", "gpt", "bert"], p=[0.5, 0.25, 0.25]))
    kv_heads = int(rng.integers(1, 6))
    heads = kv_heads * int(rng.integers(1, 4))
    features = 2 * int(rng.integers(1, 6))
    vocabulary = int(rng.integers(5, 90))
    return Architecture(
        layers=int(rng.integers(1, layers + 1)),
        hidden=heads * features,
        heads=heads,
        kv_heads=kv_heads,
        ffn=int(rng.choice([5, 12, 16, 24, 40, 48, 64, 96])),
        vocabulary=vocabulary,
        kind=kind,
        tied=bool(rng.random() < 0.5),
        causal=kind != "bert" and bool(rng.random() < 0.8),
        positions=positions if kind != "llama" else 0,
        rope_theta=float(rng.choice([100.0, 1e4, 5e5])),
        norm_eps=float(rng.choice([1e-5, 1e-6, 1e-12])),
        mask_id=int(rng.integers(vocabulary)) if kind == "bert" else None,
    )


def methods_by_width(a: Architecture, ranks: int) -> dict[int, list[str]]:
    """The methods that stages of every width up to ``ranks`` can run."""
    return {
        width: [name for name, facts in FACTS.items() if facts.supports(a, width) is None]
        for width in range(1, ranks + 1)
    }
