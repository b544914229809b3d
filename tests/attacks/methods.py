"""Random layers: any methods over any lengths, heads and groups equal plain autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import layers
from attacks.attack import Attack, Outcome
from attacks.attack import Case as AttackCase
from attacks.crew import Crews
from attacks.models import random_model
from headrace.comm.mesh import Groups
from headrace.spec import Architecture
from headrace.spec.known_methods import methods_for
from headrace.spec.layer_plan import RECOMPUTE

__all__ = ["METHODS"]

TOLERANCE = 1e-10
_POSITIONS = 1300


@contextmanager
def _begin(folder: Path) -> Iterator[AttackCase]:
    crews = Crews()
    try:
        yield lambda rng: _case(rng, crews)
    finally:
        crews.close()


def _case(rng: np.random.Generator, crews: Crews) -> Outcome:
    ranks = int(rng.choice([1, 2, 3, 4], p=[0.1, 0.3, 0.3, 0.3]))
    case = _drawn(rng, ranks)
    wanted, results = crews.run(ranks, _run, case, beside=lambda: layers.reference(case))
    got = layers.together(case, results)
    errors = {
        name: float(np.abs(got[name] - right).max() / max(1.0, float(np.abs(right).max())))
        for name, right in wanted.items()
    }
    name = max(errors, key=lambda key: (not errors[key] <= 1e300, errors[key]))
    good = errors[name] <= TOLERANCE
    words = "" if good else f"{name} on {ranks} ranks of {case}"
    return Outcome(
        verdict="exact" if good else "wrong", survived=good, error=errors[name], words=words
    )


def _run(groups: Groups, case: layers.Case) -> dict[str, Any]:
    return layers.run_case(case, groups)


def _drawn(rng: np.random.Generator, ranks: int) -> layers.Case:
    a = random_model(rng, layers=1, positions=_POSITIONS)
    count = int(rng.integers(1, 5))
    longest = 500 if rng.random() < 0.2 else 40
    pack = rng.integers(1, longest + 1, size=count)
    options = [_option(rng, a, ranks) for _ in range(int(rng.integers(1, 4)))]
    return layers.Case(
        architecture=a,
        layers=" ".join(f"1*{option}" for option in options),
        held="sharded" if ranks > 1 and rng.random() < 0.5 else "replicated",
        pack=tuple(int(tokens) for tokens in pack),
        order="zigzag" if rng.random() < 0.5 else "natural",
        dtype=torch.float64,
    )


def _option(rng: np.random.Generator, a: Architecture, ranks: int) -> str:
    attention = str(rng.choice(methods_for(a, ranks, "attention")))
    feed_forward = str(rng.choice(methods_for(a, ranks, "feed_forward")))
    return f"{attention}/{feed_forward}+{rng.choice(RECOMPUTE)}"


METHODS = Attack(
    name="methods",
    about="layers by any methods on 1 to 4 ranks equal plain autograd",
    begin=_begin,
    limit_s=120,
    few=25,
    weight=2.0,
)
