"""Index tensors of a device, made once for all layers and micro-batches that ask for the same.

A tensor that is made of numbers of the host is a copy to the device, for which the host stands
still until all work before it is done; so is each layer's, unless it is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch._guards import detect_fake_mode

__all__ = ["index_tensor", "kept", "to_device"]

_MOST = 256
_made: dict[Hashable, torch.Tensor] = {}


def index_tensor(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """The values, int64, on ``device``."""
    key = (tuple(values), device)
    return kept(key, lambda: to_device(torch.tensor(key[0], dtype=torch.int64), device))


def kept(key: Hashable, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``make`` gives, which must depend on ``key`` alone; nobody may write to it. The last
    ones made are kept, but for tensors without contents, which are of the mode that made them."""
    if detect_fake_mode() is not None:
        return make()
    found = _made.get(key)
    if found is None:
        with torch.inference_mode(mode=False):
            found = _made[key] = make()
        if len(_made) > _MOST:
            _made.pop(next(iter(_made)), None)
    return found


def to_device(x: torch.Tensor, device: str | torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``, without waiting for what that has to do before."""
    if torch.device(device).type == "cuda" and detect_fake_mode() is None:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)
