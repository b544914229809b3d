"""Randomness without state: a function of (seed, step, site, sample, position, feature).

The mask of a token is the same on whatever rank, in whatever pack and order it is computed, and is
computed again in the backward instead of being kept. Seed, step and site make a key of 64 bits by
splitmix64, one after the other: a sum of them would give sample 4 of one seed the mask of sample 5
of another. What differs from token to token and from feature to feature is mixed by a 32-bit
finaliser of two xor-shift-multiply rounds in wrapping int32 arithmetic: good enough for dropout,
not for statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["DropoutKey", "dropout", "keep_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutKey:
    """All that a dropout mask depends on, besides the feature.

    ``seed`` and ``step`` of the run, ``samples`` [t] and ``positions`` [t] of this rank's tokens
    (int64): the sample's id in the corpus and the token's position in it.
    """

    seed: int
    step: int
    samples: torch.Tensor
    positions: torch.Tensor


def dropout(x: torch.Tensor, rate: float, key: DropoutKey, site: int) -> torch.Tensor:
    """Zero each element with probability ``rate``, scale the rest by 1 / (1 - rate).

        x         [t, h]
        returns   [t, h]
        backward  the same mask and scale

    ``site`` is a number for each place in the model that has a dropout (layer and branch), so that
    each has masks of its own.
    """
    return x if rate == 0 else _Dropout.apply(x, rate, key, site)  # type: ignore[no-any-return]


class _Dropout(torch.autograd.Function):
    """Autograd of :func:`dropout`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rate: float, key: Any, site: int) -> torch.Tensor:
        """x [t, h] times mask and scale, neither of which is kept."""
        ctx.rest = (rate, key, site)
        return x * keep_mask(x.shape[1], rate, key, site).to(x.dtype).div_(1 - rate)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        """The gradient of x: ``grad`` times the same mask, computed again, and scale."""
        rate, key, site = ctx.rest
        mask = keep_mask(grad.shape[1], rate, key, site)
        return grad * mask.to(grad.dtype).div_(1 - rate), None, None, None


def keep_mask(features: int, rate: float, key: DropoutKey, site: int) -> torch.Tensor:
    """Which elements dropout keeps: [t, features] bool, True with probability 1 - rate. The same
    for a token on every rank and in every pack."""
    # Large odd constants (two of xxHash, and 2^32 over the golden ratio) spread small numbers over
    # all 32 bits before they are mixed.
    site_key = _splitmix(_splitmix(_splitmix(key.seed) + key.step) + site)
    # mixed in one after the other: both halves of the sample's id, the position, the feature
    low_bits, high_bits = key.samples.to(torch.int32), (key.samples >> 32).to(torch.int32)
    sample_hash = _mix(_mix(low_bits ^ _int32(site_key)) + (high_bits ^ _int32(site_key >> 32)))
    token_hash = _mix(sample_hash + key.positions.to(torch.int32) * _int32(0x85EBCA77))
    feature_terms = torch.arange(features, dtype=torch.int32, device=token_hash.device) * _int32(
        0x9E3779B9
    )
    bits = _mix(
        _mix(token_hash[:, None] + feature_terms) ^ _mix(token_hash + _int32(0x27D4EB2F))[:, None]
    )
    # Bits are uniform over all int32 values, the share ``rate`` of which is below this threshold;
    # it is at most the largest int32.
    return bits >= min(round(rate * 2**32) - 2**31, 2**31 - 1)


def _int32(value: int) -> int:
    """The signed 32-bit number that equals ``value`` modulo 2^32."""
    return (value + 2**31) % 2**32 - 2**31


def _splitmix(x: int) -> int:
    """The splitmix64 hash of a 64-bit number."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Hash each int32 value to a pseudo-random int32, by the hash ``lowbias32`` of C. Wellons."""
    # int32 shifts are arithmetic: the mask after each makes them logical.
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _int32(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)
