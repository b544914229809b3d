"""The layers of a user's model: where they are, and the model with some of them taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["LayerCall", "Layers", "find_layers"]


@dataclass(slots=True, kw_only=True, eq=False)
class LayerCall:
    """How a model called one of its layers: the first input, and everything else."""

    x: torch.Tensor
    rest: tuple[Any, ...]
    named: dict[str, Any]


class _Passing(nn.Module):
    """Stands in for a layer: records the call and returns its input."""

    def __init__(self, layer: nn.Module, called: list[LayerCall], *, many: bool) -> None:
        super().__init__()
        self._called, self._many = called, many
        self._behind = [layer]  # in a list, so that it is no part of this module

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """Record the call and return the first input, in a tuple where the layer returns one."""
        self._called.append(LayerCall(x=x, rest=rest, named=named))
        return (x,) if self._many else x

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._behind[0], name)  # attributes of a layer that the model reads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layers:
    """Equal layers of a model in the order in which it calls them, in ``container``.

    ``many``: their result is a tuple, whose first is the next one's input of ``hidden`` features.
    """

    container: nn.ModuleList
    modules: tuple[nn.Module, ...]
    many: bool
    hidden: int

    def __len__(self) -> int:
        return len(self.modules)

    def call(self, index: int, x: torch.Tensor, how: LayerCall) -> torch.Tensor:
        """The output of layer ``index`` for the input ``x``, with the other arguments of the call
        ``how``."""
        out = self.modules[index](x, *how.rest, **how.named)
        return out[0] if self.many else out  # type: ignore[no-any-return]

    @contextmanager
    def left_out(self) -> Iterator[list[LayerCall]]:
        """Context in which the layers return their inputs; gives the list of calls that the model
        makes."""
        called = list[LayerCall]()
        try:
            for index, layer in enumerate(self.modules):
                self.container[index] = _Passing(layer, called, many=self.many)
            yield called
        finally:
            for index, layer in enumerate(self.modules):
                self.container[index] = layer


def find_layers(model: nn.Module, run: Callable[[], Any]) -> Layers | None:
    """The layers of ``model``, seen while ``run`` calls it: of all lists of two or more modules of
    one class and equal parameters, each called once with a tensor that the one before gave, the one
    with the most parameters. None where there is no such list."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and _alike(m)]
    calls: dict[int, list[tuple[Any, Any]]] = {}
    handles = [layer.register_forward_hook(_noting(calls)) for found in lists for layer in found]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    chains = [found for found in lists if _is_chain([calls.get(id(m), []) for m in found])]
    if not chains:
        return None
    best = max(chains, key=lambda found: sum(p.numel() for p in found.parameters()))
    ((inputs, out),) = calls[id(best[0])]
    return Layers(
        container=best,
        modules=tuple(best),
        many=not torch.is_tensor(out),
        hidden=inputs[0].shape[-1],
    )


def _noting(calls: dict[int, list[tuple[Any, Any]]]) -> Callable[..., None]:
    """A forward hook that appends (inputs, output) to the list of its module, by id."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        calls.setdefault(id(module), []).append((inputs, out))

    return hook


def _alike(modules: nn.ModuleList) -> bool:
    kinds = {(type(m), tuple(tuple(p.shape) for p in m.parameters())) for m in modules}
    return len(modules) > 1 and len(kinds) == 1


def _is_chain(calls: Sequence[list[tuple[Any, Any]]]) -> bool:
    """Whether each module was called once, with the output of the module before."""
    if any(len(own) != 1 or not own[0][0] for own in calls):
        return False
    entries = [own[0][0][0] for own in calls]
    results = [_first(own[0][1]) for own in calls]
    tensors = all(torch.is_tensor(x) and x.is_floating_point() for x in [*entries, *results])
    return tensors and all(
        entry.shape == given.shape and entry.data_ptr() == given.data_ptr()
        for entry, given in zip(entries[1:], results, strict=False)
    )


def _first(out: Any) -> Any:
    return out if torch.is_tensor(out) else next(iter(out), None)
