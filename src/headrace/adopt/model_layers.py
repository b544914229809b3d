"""The layers of a user's model: where they are, and the model with its layers left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headrace.adopt.own_hooks import in_checkpoint

__all__ = ["LayerCall", "Layers", "are_in_checkpoints", "find_layers"]


@dataclass(slots=True, kw_only=True, eq=False)
class LayerCall:
    """The arguments with which a model called one of its layers: the first input ``x``
    [..., hidden], the other positional ones (``rest``), and those by name."""

    x: torch.Tensor
    rest: tuple[Any, ...]
    named: dict[str, Any]


class _PassThrough(nn.Module):
    """Takes the place of a ``layer`` in a model: appends the arguments of each call to ``calls``
    and returns the first input unchanged, in a tuple where the layer returns one (``many``)."""

    def __init__(self, layer: nn.Module, calls: list[LayerCall], *, many: bool) -> None:
        super().__init__()
        self._calls, self._many = calls, many
        self._replaced = [layer]  # in a list, so that it is no submodule of this one

    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        """Record the call and return the first input, in a tuple where the layer returns one."""
        self._calls.append(LayerCall(x=x, rest=rest, named=named))
        return (x,) if self._many else x

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._replaced[0], name)  # attributes of a layer that the model reads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layers:
    """Equal layers of a model: ``modules``, in the order in which the model calls them, are the
    entries of its list ``container``. Their first input has ``hidden`` features. ``many`` says that
    a layer returns a tuple, whose first entry is the next layer's input, and not that input
    alone."""

    container: nn.ModuleList
    modules: tuple[nn.Module, ...]
    many: bool
    hidden: int

    def __len__(self) -> int:
        return len(self.modules)

    def call(self, index: int, x: torch.Tensor, how: LayerCall) -> torch.Tensor:
        """Call layer ``index`` (from 0) with the input ``x`` [..., hidden] and the other arguments
        of the recorded call ``how``; returns its output, of the shape of ``x``."""
        out = self.modules[index](x, *how.rest, **how.named)
        return out[0] if self.many else out  # type: ignore[no-any-return]

    @contextmanager
    def left_out(self) -> Iterator[list[LayerCall]]:
        """Context in which the layers return their inputs; yields the list to which the model's
        calls of them are appended."""
        calls = list[LayerCall]()
        try:
            for index, layer in enumerate(self.modules):
                self.container[index] = _PassThrough(layer, calls, many=self.many)
            yield calls
        finally:
            for index, layer in enumerate(self.modules):
                self.container[index] = layer


def find_layers(model: nn.Module, run: Callable[[], Any]) -> Layers | None:
    """The layers of ``model``, found while ``run`` calls it; None where there are none.

    Layers are the entries of a ModuleList: two or more modules of one class with parameters of
    equal shapes, each called once, with the output of the one before. Of several such lists the one
    with the most parameters is taken."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and _are_equal(m)]
    calls: dict[int, list[tuple[Any, Any]]] = {}  # (inputs, output) of each call, by a module's id
    record = _recording_hook(calls)
    handles = [layer.register_forward_hook(record) for layers in lists for layer in layers]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    chains = [layers for layers in lists if _is_chain([calls.get(id(m), []) for m in layers])]
    if not chains:
        return None
    largest = max(chains, key=lambda layers: sum(p.numel() for p in layers.parameters()))
    ((inputs, out),) = calls[id(largest[0])]
    return Layers(
        container=largest,
        modules=tuple(largest),
        many=not torch.is_tensor(out),
        hidden=inputs[0].shape[-1],
    )


def are_in_checkpoints(layers: Layers, run: Callable[[], Any]) -> bool:
    """Whether parts of the ``layers`` run in activation checkpoints of the model's author, as
    ``run`` calls the model."""
    found = list[bool]()

    def look(_: nn.Module, args: tuple[Any, ...]) -> None:
        """The hook before each part of a layer."""
        found.append(in_checkpoint(args))

    parts = [part for layer in layers.modules for part in layer.modules() if part is not layer]
    handles = [part.register_forward_pre_hook(look) for part in parts]
    try:
        with torch.enable_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return any(found)


def _recording_hook(calls: dict[int, list[tuple[Any, Any]]]) -> Callable[..., None]:
    """A forward hook that records each call of a module in ``calls``: (positional inputs, output),
    by the module's id."""

    def hook(module: nn.Module, inputs: tuple[Any, ...], out: Any) -> None:
        calls.setdefault(id(module), []).append((inputs, out))

    return hook


def _are_equal(modules: nn.ModuleList) -> bool:
    """Whether there are two or more modules, all of one class with parameters of equal shapes."""
    kinds = {(type(m), tuple(tuple(p.shape) for p in m.parameters())) for m in modules}
    return len(modules) > 1 and len(kinds) == 1


def _is_chain(calls: Sequence[list[tuple[Any, Any]]]) -> bool:
    """Whether each module was called once, with the output of the module before as its first input.
    ``calls`` are the calls of each module, (positional inputs, output)."""
    if any(len(calls_of_module) != 1 for calls_of_module in calls):
        return False
    single_calls = [calls_of_module[0] for calls_of_module in calls]
    if not all(inputs for inputs, _ in single_calls):
        return False
    entries = [inputs[0] for inputs, _ in single_calls]
    results = [_first(out) for _, out in single_calls]
    if not all(torch.is_tensor(x) and x.is_floating_point() for x in [*entries, *results]):
        return False
    # The same memory: a layer's input is the tensor that the one before returned.
    return all(
        entry.shape == before.shape and entry.data_ptr() == before.data_ptr()
        for entry, before in zip(entries[1:], results, strict=False)
    )


def _first(out: Any) -> Any:
    """The first result of a module that returns several, None for none; a single tensor itself."""
    return out if torch.is_tensor(out) else next(iter(out), None)
