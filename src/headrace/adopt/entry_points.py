"""Doors: how the attention of a model is reached.

    attention registry  models of transformers: a function in its public registry
    calls               others: what they call is replaced while they run
    graph               others that are compiled: a pass over their graph

Behind all of them is one function; what differs is how it comes to be called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from headrace.adopt.attention_registry import asks_registry, take_interface
from headrace.adopt.block_recompute import BlockLevels, Kept, WrappedLevels, recompute_blocks
from headrace.adopt.gradients import is_wrapped
from headrace.adopt.graph_pass import Compiler
from headrace.adopt.operators import ModelSeat
from headrace.adopt.replaced_calls import ReplacedCalls
from headrace.errors import ModelError
from headrace.spec.method import Recompute

__all__ = ["ChosenLevels", "Door", "OpenDoor", "open_door"]

Door = Literal["attention registry", "calls", "graph"]


class ChosenLevels(Protocol):
    """What blocks compute again in the next forward."""

    def choose(self, levels: Sequence[Recompute]) -> None:
        """The level of each block."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenDoor:
    """The door to a model: ``call(**inputs)`` runs it with its attention reached, ``probing`` the
    same where a compiler should not; ``compiler`` counts what was compiled. ``install()`` has the
    model itself do so and returns what leaves the model as it was.
    ``levels(blocks)`` says what blocks compute again; None where they cannot be told apart."""

    name: Door
    call: Callable[..., Any]
    probing: Callable[..., Any]
    install: Callable[[], Callable[[], None]]
    compiler: Compiler | None = None
    levels: Callable[[Sequence[torch.nn.Module]], ChosenLevels | None] = lambda blocks: None


def open_door(
    model: torch.nn.Module,
    inner: torch.nn.Module,
    seat: ModelSeat,
    backend: str | None,
    recompute: Kept | None,
) -> OpenDoor:
    """The door to ``inner``, which ``model`` may wrap. Raises ModelError where there is none, and
    where blocks of transformers cannot compute again what ``recompute`` says; of other models
    they are found when it is probed."""
    if asks_registry(inner):
        return _registry(model, inner, seat, backend, recompute)
    if backend is None:
        return _calls(model, inner, seat)
    if isinstance(model, FSDPModule):
        raise ModelError(
            "model under FSDP2",
            got=f"backend {backend}",
            wanted="none",
            hint="its hooks break graphs: compile the model's blocks, then shard them",
        )
    return _graph(model, inner, seat, backend)


def _registry(
    model: torch.nn.Module, inner: Any, seat: ModelSeat, backend: str | None, recompute: Kept | None
) -> OpenDoor:
    give_back = take_interface(inner, seat)
    if recompute is not None:
        recompute_blocks(inner, recompute)
    compiler = None if backend is None else Compiler(backend)

    def levels(blocks: Sequence[torch.nn.Module]) -> ChosenLevels | None:
        able = getattr(inner, "supports_gradient_checkpointing", False)
        return BlockLevels(inner, blocks) if able else None

    return OpenDoor(
        name="attention registry",
        probing=model,
        install=lambda: give_back,
        call=model if compiler is None else _compiled(model, compiler, fullgraph=False),
        compiler=compiler,
        levels=levels,
    )


def _calls(model: torch.nn.Module, inner: torch.nn.Module, seat: ModelSeat) -> OpenDoor:
    replaced, opened = ReplacedCalls(inner, seat), ExitStack()
    opened.callback(replaced.remove)

    def levels(blocks: Sequence[torch.nn.Module]) -> ChosenLevels:
        wrapped = WrappedLevels(blocks, replaced.run)
        opened.callback(wrapped.remove)
        return wrapped

    return OpenDoor(
        name="calls", call=model, probing=model, install=lambda: opened.close, levels=levels
    )


def _graph(
    model: torch.nn.Module, inner: torch.nn.Module, seat: ModelSeat, backend: str
) -> OpenDoor:
    compiler, whole, opened = Compiler(backend, seat), not is_wrapped(model), ExitStack()

    def install() -> Callable[[], None]:
        inner.compile(backend=compiler, fullgraph=True, dynamic=True)
        opened.callback(setattr, inner, "_compiled_call_impl", None)
        return opened.close

    def levels(blocks: Sequence[torch.nn.Module]) -> ChosenLevels:
        # Of a graph they are tags on its nodes, for the partitioner.
        wrapped = WrappedLevels(blocks, _as_it_is)
        opened.callback(wrapped.remove)
        return wrapped

    return OpenDoor(
        name="graph",
        call=_compiled(model, compiler, fullgraph=whole),
        compiler=compiler,
        probing=_compiled(model, Compiler("eager", seat), fullgraph=whole),
        install=install,
        levels=levels,
    )


def _as_it_is(forward: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    return forward(*args, **named)


def _compiled(model: torch.nn.Module, compiler: Compiler, *, fullgraph: bool) -> Callable[..., Any]:
    """The model, compiled. Hooks of wrappers break graphs; what a broken graph may hide the probe
    finds."""
    compiled = torch.compile(model, backend=compiler, fullgraph=fullgraph, dynamic=True)
    return partial(_sized, compiled)


def _sized(compiled: Callable[..., Any], **inputs: Any) -> Any:
    # What attention keeps has a size that is known only when it runs.
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):  # noqa: SLF001
        return compiled(**inputs)
