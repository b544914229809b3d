"""Profiles of made-up devices: single documents, without noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.spec import Architecture, Cluster
from headrace.spec.profile import ENDS, Profile, ProfilePoint

__all__ = ["LENGTHS", "OPTIONS", "made_up"]

LENGTHS = tuple(round(64 * 1.5**k) for k in range(11))
OPTIONS = (
    ENDS,
    "attention:local",
    "attention:local+attention",
    "feed_forward:local",
    "feed_forward:local+attention",
)


def cost(option: str, length: int) -> float:
    """Seconds forward: another curve for every option, the same for the levels of one."""
    number = 1 + OPTIONS.index(option.partition("+")[0])
    square = 1e-9 * length**2 if "attention:" in option else 0.0
    return number * (1e-4 + 1e-6 * length + square)


def made_up(
    lengths: Sequence[int] = LENGTHS,
    *,
    options: Sequence[str] = OPTIONS,
    hidden: int = 64,
    seconds: Callable[[str, int], float] = cost,
) -> Profile:
    """What a device of these costs would measure."""
    points = [
        ProfilePoint(
            p=1,
            option=option,
            lengths=(n,),
            forward_s=seconds(option, n),
            backward_s=(2.5 + 0.5 * ("+" in option)) * seconds(option, n) + 1e-5,
            kept_bytes=100 * n * (1 + OPTIONS.index(option)),
            transient_bytes=77 * n + 640,
        )
        for option in options
        for n in lengths
    ]
    return Profile(
        fingerprint="device=none",
        shape=Architecture(
            layers=3, hidden=hidden, heads=4, kv_heads=4, ffn=2 * hidden, vocabulary=50
        ).shape,
        cluster=Cluster(devices=1, memory_bytes=10**9),
        points=tuple(points),
        exchange_s={"pull_s": 0.1, "push_s": 0.2, "update_s": 0.3},
        state_bytes=1234,
        working_bytes={1: {"replicated": 9, "sharded": 9}},
    )
