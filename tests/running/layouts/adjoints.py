"""Both sides of <pull x, y> = <x, push y>, as far as one rank sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from headrace.layouts.partition import Partition
from headrace.layouts.two_steps import WeightLink
from headrace.spec.architecture import WeightSpec

__all__ = ["sides"]


def sides(
    link: WeightLink,
    weights: Sequence[WeightSpec],
    owners: Mapping[str, Partition],
    readers: Mapping[str, Partition],
    rank: int,
) -> tuple[float, float]:
    """This rank's share of either product, of random x and y in fp64."""

    def draw(partitions: Mapping[str, Partition]) -> dict[str, torch.Tensor]:
        return {
            w.name: torch.randn(
                len(partitions[w.name].parts[rank]), *w.shape[1:], dtype=torch.float64
            )
            for w in weights
        }

    x, y, ax, aty = draw(owners), draw(readers), draw(readers), draw(owners)
    link.pull(x, ax).wait()
    link.push(y, aty).wait()
    left = sum(float((ax[n] * y[n]).sum()) for n in y)
    return left, sum(float((x[n] * aty[n]).sum()) for n in x)
