"""Entry points: how the attention of a model is reached.

    attention registry  models of transformers: a function in its public registry
    calls               others: functions of torch that they call are replaced while they run
    graph               others that are compiled: a pass over their graph

All of them lead to one function, the attention over all ranks of a group; they differ in how the
model comes to call it. It is called only while the model is spread: the model's slot switches an
entry point on and off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from headrace.adopt.attention_registry import asks_registry, registered
from headrace.adopt.block_recompute import (
    BlockLevels,
    Kept,
    WrappedLevels,
    recompute_blocks,
    users_checkpoints,
)
from headrace.adopt.call_arguments import plain_arguments
from headrace.adopt.gradients import is_wrapped
from headrace.adopt.graph_pass import Compiler
from headrace.adopt.operators import ModelSlot
from headrace.adopt.replaced_calls import ReplacedCalls
from headrace.errors import ModelError
from headrace.spec.layer_plan import Recompute

__all__ = ["ChosenLevels", "EntryPoint", "EntryPointName", "entry_point_of"]

EntryPointName = Literal["attention registry", "calls", "graph"]


Look = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""A function that checks the arguments of a forward, (positional, keyword), before it runs."""

Noted = Callable[[Any], None]
"""A function that notes the results of a forward after it has run."""


class ChosenLevels(Protocol):
    """Sets the recompute level of each block for the next forward."""

    def choose(self, levels: Sequence[Recompute]) -> None:
        """Set what each block recomputes in the next forward; those beyond ``levels`` nothing."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EntryPoint:
    """How the attention of one model is reached.

    Attributes:
        name: Which entry point it is.
        call: Runs the spread model as ``call(**inputs)``.
        probing: Like ``call``, but without a slow compiler backend.
        install: Takes a :data:`Look` and a :data:`Noted`. Has the model itself do what ``call``
            does while it is spread, with the arguments checked and the results noted by these
            functions where no hook can; returns a function that undoes this.
        remove: Removes every hook and replaced function; the entry point is of no use afterwards.
        compiler: Counts compiled graphs; None where the model is not compiled.
        read_masks: Finds which tokens each attention layer sees, by a function that runs the plain
            model on a few tokens.
        levels: Makes the object that sets recompute levels of blocks; None where blocks cannot be
            told apart.
    """

    name: EntryPointName
    call: Callable[..., Any]
    probing: Callable[..., Any]
    install: Callable[[Look, Noted], Callable[[], None]]
    remove: Callable[[], None] = lambda: None
    compiler: Compiler | None = None
    read_masks: Callable[[Callable[[], object]], None] = lambda run: None
    levels: Callable[[Sequence[torch.nn.Module]], ChosenLevels | None] = lambda blocks: None


def entry_point_of(
    model: torch.nn.Module,
    inner: torch.nn.Module,
    slot: ModelSlot,
    backend: str | None,
    recompute: Kept | None,
) -> EntryPoint:
    """The entry point to ``inner``, the user's module, which ``model`` may wrap. ``backend`` is
    that of torch.compile, None for a model that is not compiled. ``recompute`` turns on activation
    checkpoints of a transformers model at once; layers of other models are found when these are
    probed. Raises ModelError where there is no entry point, and where blocks of transformers do not
    support checkpoints."""
    if asks_registry(inner):
        return _registry(model, inner, slot, backend, recompute)
    if backend is None:
        return _calls(model, inner, slot)
    if isinstance(model, FSDPModule):
        raise ModelError(
            "model under FSDP2",
            got=f"backend {backend}",
            wanted="none",
            hint="its hooks break graphs: compile the model's blocks, then shard them",
        )
    return _graph(model, inner, slot, backend)


def _registry(
    model: torch.nn.Module, inner: Any, slot: ModelSlot, backend: str | None, recompute: Kept | None
) -> EntryPoint:
    """The entry point through transformers' registry of attention functions, compiled where a
    ``backend`` is given."""
    switch = registered(inner, slot)
    compiler = None if backend is None else Compiler(backend)
    # A compiler would trace what keeps the placement into its graphs.
    keep = slot.kept if compiler is None else _as_it_is
    slot.switches += [switch, users_checkpoints(inner, keep)]
    if recompute is not None:
        slot.switches.append(recompute_blocks(inner, recompute, keep))

    def levels(blocks: Sequence[torch.nn.Module]) -> ChosenLevels | None:
        """The object that sets the recompute level of each of ``blocks`` while the model is spread;
        None for a model without gradient checkpointing."""
        if not getattr(inner, "supports_gradient_checkpointing", False):
            return None
        chosen = BlockLevels(inner, blocks, keep)
        slot.switches.append(chosen.switch)
        return chosen

    return EntryPoint(
        name="attention registry",
        probing=model,
        install=lambda *_: _undo_nothing,
        call=model if compiler is None else _compiled(model, compiler, fullgraph=False),
        compiler=compiler,
        read_masks=switch.read_masks,
        levels=levels,
    )


def _calls(model: torch.nn.Module, inner: torch.nn.Module, slot: ModelSlot) -> EntryPoint:
    """The entry point that replaces torch's functions while the author's modules run."""
    replaced, to_undo = ReplacedCalls(inner, slot), ExitStack()
    to_undo.callback(replaced.remove)

    def levels(blocks: Sequence[torch.nn.Module]) -> ChosenLevels:
        """The object that sets the recompute level of each of ``blocks``, whose forwards it wraps
        until the entry point is removed."""
        # In the recompute, too, the block's torch calls must be replaced.
        wrapped = WrappedLevels(blocks, replaced.run, slot.kept)
        to_undo.callback(wrapped.remove)
        return wrapped

    return EntryPoint(
        name="calls",
        call=model,
        probing=model,
        install=lambda *_: _undo_nothing,
        remove=to_undo.close,
        levels=levels,
    )


def _graph(
    model: torch.nn.Module, inner: torch.nn.Module, slot: ModelSlot, backend: str
) -> EntryPoint:
    """The entry point that changes attention in the graph which Dynamo traces, compiled by
    ``backend``."""
    compiler, to_undo = Compiler(backend, slot), ExitStack()
    fullgraph = not is_wrapped(model)  # hooks of DDP and FSDP2 break graphs

    def install(look: Look, noted: Noted) -> Callable[[], None]:
        """Compile the model and call its graph while it is spread, after ``look`` has checked the
        arguments and before ``noted`` has the results; returns the function that undoes it."""
        # torch keeps what a compiled module calls in this attribute. ``inner.compile`` is used to
        # make the compiled function alone, which the switch puts there while the model is spread.
        before = inner._compiled_call_impl  # noqa: SLF001
        inner.compile(backend=compiler, fullgraph=True, dynamic=True)
        graph: Any = inner._compiled_call_impl  # noqa: SLF001
        inner._compiled_call_impl = before  # noqa: SLF001

        def spread(*args: Any, **named: Any) -> Any:
            look(args, named)  # here, as a graph cannot hold the check
            args, named = plain_arguments(args, named)
            results = graph(*args, **named)
            noted(results)
            return results

        def switch(on: bool) -> None:
            """Have calls of the model run the graph when ``on``, else what they ran before."""
            inner._compiled_call_impl = spread if on else before  # noqa: SLF001

        slot.switches.append(switch)
        # Undone in reverse order: turned off, then taken from the slot.
        to_undo.callback(slot.switches.remove, switch)
        to_undo.callback(switch, False)
        return to_undo.close

    def levels(blocks: Sequence[torch.nn.Module]) -> ChosenLevels:
        """The object that sets the recompute level of each of ``blocks``, whose forwards it wraps
        until the entry point is removed."""
        # Dynamo traces checkpoints into tags of a graph's nodes, by which the compiler's
        # partitioner chooses what to recompute.
        wrapped = WrappedLevels(blocks, _run_forward, _as_it_is)
        to_undo.callback(wrapped.remove)
        return wrapped

    return EntryPoint(
        name="graph",
        call=_compiled(model, compiler, fullgraph=fullgraph),
        compiler=compiler,
        probing=_compiled(model, Compiler("eager", slot), fullgraph=fullgraph, isolated=True),
        install=install,
        remove=to_undo.close,
        levels=levels,
    )


def _undo_nothing() -> None:
    """Do nothing: there is nothing to undo, as the entry point was active before it was
    installed."""


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function."""
    return function


def _run_forward(forward: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """Run a forward unchanged and return its results."""
    return forward(*args, **named)


def _compiled(
    model: torch.nn.Module, compiler: Compiler, *, fullgraph: bool, isolated: bool = False
) -> Callable[..., Any]:
    """A function that calls the model, compiled by ``compiler`` for any number of tokens.
    ``fullgraph`` refuses graph breaks: where a graph breaks, the pass may miss an operation that
    depends on other tokens, which the probe then finds. Graphs of an ``isolated`` one do not count
    towards the number that torch allows others of the same code."""
    make: Any = torch.compile  # its declared overloads lack ``isolate_recompiles``
    compiled = make(
        model,
        backend=compiler,
        fullgraph=fullgraph,
        dynamic=True,
        isolate_recompiles=isolated,
    )
    return partial(_call_compiled, compiled)


def _call_compiled(compiled: Callable[..., Any], **inputs: Any) -> Any:
    """Call a compiled model with dynamic output shapes captured in its graph: what attention keeps
    for its backward has a size that is known only when it runs."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):  # noqa: SLF001
        return compiled(**inputs)
