"""Synthetic clips of many shapes: waves that travel over patches and frames, with noise on them.

Nothing in them comes from a camera. Each clip is one sample of a diffusion: values at a time of the
noise, and the noise, which a model learns to find. A clip follows from its number alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

__all__ = ["SyntheticClips"]

_TIMES = 1000
"""Number of times of the noise: at 0 a clip is without noise, near the last one nothing else."""


class SyntheticClips:
    """A data set of synthetic clips. ``shapes`` [clips, 2] are the frames and the patches of a
    frame of each clip, ``lengths`` [clips] its tokens, which are frames times patches."""

    def __init__(
        self,
        count: int,
        shapes: Mapping[tuple[int, int], float],
        *,
        channels: int,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Draw the shape of each of ``count`` clips: ``shapes`` has the weight of each pair
        (frames, patches). Values have so many ``channels`` and are of type ``dtype``."""
        weights = np.array(list(shapes.values()), dtype=np.float64)
        drawn = np.random.default_rng(seed).choice(
            len(weights), size=count, p=weights / weights.sum()
        )
        self.shapes = np.array(list(shapes), dtype=np.int64)[drawn]
        self.lengths = self.shapes.prod(axis=1)
        self._channels, self._seed, self._dtype = channels, seed, dtype

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Clip ``index`` as fields by their names: the noisy clip ``x`` and the noise in it,
        ``labels``, both [t, s, c]; the time of the noise, ``timestep`` []; and the position ids of
        both axes, ``frames`` [t] and ``patches`` [s]."""
        frames, patches = (int(n) for n in self.shapes[index])
        draw = torch.Generator().manual_seed(self._seed * 1_000_003 + index)
        # A wave for each channel, all drawn at random: [c] radians a frame, 2 [c] radians a patch,
        # and its phase.
        by_frame, by_patch, phase = torch.rand(
            3, self._channels, generator=draw, dtype=torch.float64
        )
        t, s = torch.arange(frames), torch.arange(patches)
        angle = by_frame * t[:, None, None] + 2 * by_patch * s[:, None] + math.tau * phase
        noise = torch.randn(frames, patches, self._channels, generator=draw, dtype=torch.float64)
        time = torch.randint(0, _TIMES, (), generator=draw)
        # From the clip alone (cos = 1) to the noise alone (sin = 1), by a quarter of a circle.
        mixed = torch.tensor(math.pi / 2 * float(time) / _TIMES, dtype=torch.float64)
        noisy = mixed.cos() * angle.sin() + mixed.sin() * noise
        return {
            "x": noisy.to(self._dtype),
            "labels": noise.to(self._dtype),
            "timestep": time,
            "frames": t,
            "patches": s,
        }
