"""What the benchmark of Data-Centric Parallel plans: its models, data sets and planners.

Models: the paper's Transformer-1D (42 layers of 3072 features, 48 heads, 5 billion parameters) by
roofline formulas with the implementation that headrace takes by default, and its Transformer-2D
(dcp_clips.py); on H200 with 80 GB a device, with Ulysses or DSP, and weights replicated while they
work, as with ZeRO-1.

Data sets, named after what takes their time as in the paper, whose own are pictures only: lengths l
from 1 Ki to 128 Ki tokens, each length as frequent as l^-k, with k = 3 where short sequences
dominate, 2 where both do, 1 where long ones do; and those of a real corpus, the sources of Python's
standard library, a token for each byte.

    bucket   one group size for all steps, the smallest that holds the longest sequence there can
             be (the paper's baseline); batches of like lengths
    packed   the same groups, packs as full as memory allows
    best ... both on the group size that is quickest for each batch, as nobody chooses by hand
    inter    a size and a batch for each bucket of lengths, accumulation to end together;
             as those before, every layer computed again
    intra    the same, and no more layers computed again than memory asks for
    headrace whatever is quickest, group sizes that are no powers of two among them
"""

from __future__ import annotations

import sysconfig
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
from dcp_clips import costs_of_clips
from numpy.typing import NDArray

import headrace as hr
from headrace.spec.implementation import DEFAULT_IMPLEMENTATION

__all__ = [
    "EXPONENTS",
    "FULL",
    "LEVELS",
    "MEMORY_BYTES",
    "METHODS",
    "MODEL",
    "PLANNERS",
    "costs_of",
    "drawn_lengths",
    "held",
    "lengths_of",
    "priced_by",
    "problem_of",
]

MODEL = hr.Architecture(
    kind="gpt",
    layers=42,
    hidden=3072,
    heads=48,
    kv_heads=48,
    ffn=4 * 3072,
    vocabulary=32_000,
    positions=1 << 17,
    tied=True,
)
LONGEST = 1 << 17
MEMORY_BYTES = 80 * 10**9
EXPONENTS = {"short": 3.0, "balanced": 2.0, "long": 1.0}
FULL = ("full",)
LEVELS = ("none", "attention", "full")
METHODS = {"1d": ("local", "ulysses_z"), "2d": ("local", "dsp")}
PLANNERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bucket": ("bucket", FULL),
    "packed": ("packed", FULL),
    "best bucket": ("bucket", FULL),
    "best packed": ("packed", FULL),
    "inter": ("dcp", FULL),
    "intra": ("dcp", LEVELS),
    "headrace": ("adaptive", LEVELS),
}


@cache
def corpus() -> NDArray[np.int64]:
    """Bytes of each source of the standard library, up to the longest sequence."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    sizes = np.array([file.stat().st_size for file in files], dtype=np.int64)
    return sizes[sizes > 0].clip(max=LONGEST)


def drawn_lengths(
    exponent: float, tokens: int, seed: int, *, longest: int = LONGEST
) -> NDArray[np.int64]:
    """Lengths as frequent as l^-exponent, of about so many tokens together."""
    rng = np.random.default_rng(seed)
    grid = np.geomspace(1 << 10, longest, 400)
    weights = grid ** (1 - exponent)  # of a grid whose cells grow as it does
    drawn = rng.choice(grid, size=tokens // 1024, p=weights / weights.sum()).astype(np.int64)
    return drawn[: max(1, int(np.searchsorted(np.cumsum(drawn), tokens)))]


def lengths_of(name: str, tokens: int, seed: int) -> hr.Lengths:
    """One batch of a data set, of about so many tokens."""
    if name != "corpus":
        return hr.Lengths.of(drawn_lengths(EXPONENTS[name], tokens, seed))
    drawn = np.random.default_rng(seed).permutation(corpus())
    drawn = np.tile(drawn, 1 + tokens // int(drawn.sum()))
    return hr.Lengths.of(drawn[: max(1, int(np.searchsorted(np.cumsum(drawn), tokens)))])


def priced_by(model: str) -> str:
    """What prices a model, for rows of claims."""
    if model == "2d":
        return "formulas of clips, h200"
    return f"roofline of {DEFAULT_IMPLEMENTATION}'s kernels, h200"


@cache
def costs_of(model: str, devices: int) -> hr.CostModel:
    """The costs of a model on so many devices."""
    if model == "1d":
        return hr.costs.roofline(MODEL, "h200", devices=devices, memory_bytes=MEMORY_BYTES)
    return costs_of_clips("h200", devices, memory_bytes=MEMORY_BYTES, longest=LONGEST)


@cache
def problem_of(planner: str, devices: int, model: str = "1d") -> hr.Problem:
    """What a planner may choose from."""
    name, levels = PLANNERS[planner]
    problem = hr.Problem(
        costs=costs_of(model, devices),
        planner=name,
        recompute=levels,
        holding=("replicated",),
        stages=False,
        methods=METHODS[model],
    )
    return (
        problem if planner not in ("bucket", "packed") else problem.replace(sizes=(held(problem),))
    )


def held(problem: hr.Problem) -> int:
    """The smallest group size that holds the longest sequence there can be."""
    for p in problem.group_sizes:
        with suppress(hr.errors.InfeasiblePlan):
            hr.plan([LONGEST], problem.replace(sizes=(p,)))
            return p
    raise SystemExit(f"no group holds {LONGEST} tokens")
