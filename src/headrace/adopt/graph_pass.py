"""The entry point of the compiler: a pass over the graph that Dynamo traced with the local shard.

Every operation that treats tokens alone has the right shapes already, as the graph was traced with
a rank's part of the batch. Calls that depend on other tokens are replaced:

    scaled_dot_product_attention   attention over the group
    multi_head_attention_forward   the same, with its projections
    arange over the tokens         the places of the local tokens
    table[:tokens] of parameters   the rows of the local tokens (learned or rotary positions)
    cross_entropy, mean            the sum, divided by the targets of the step

in the graph and in all nested graphs, such as those of checkpoints.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from headrace.adopt.operators import ModelSlot
from headrace.adopt.replaced_calls import (
    Cut,
    cross_entropy,
    cuts_of,
    multi_head_attention,
    rows_of,
    scaled_dot_product_attention,
)

__all__ = ["Compiler"]

Compiled = Callable[..., Any]

_REDUCTIONS = {1: "mean", 2: "sum"}  # as torch numbers them


class Compiler:
    """A backend of torch.compile: rewrites the graph where the model is reached through it (by
    ``slot``), then calls ``backend``. ``times`` counts compiled graphs."""

    def __init__(self, backend: str, slot: ModelSlot | None = None) -> None:
        self.times = 0
        self._backend, self._slot = backend, slot

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile one graph, rewritten for the local tokens where there is a slot."""
        if self._slot is not None:
            _rewrite(module, self._slot.handle)
        made: Compiled = module.forward
        if self._backend != "eager":
            made = torch._dynamo.lookup_backend(self._backend)(module, list(inputs))  # noqa: SLF001
        self.times += 1  # at the end: a backend may have a graph traced again
        return made


def _rewrite(module: GraphModule, handle: int) -> None:
    """Replace the nodes of a traced graph, and of graphs within it, that depend on other tokens by
    operators that find the placement by ``handle``."""
    width = _width(module)
    for graph in (m for m in module.modules() if isinstance(m, GraphModule)):
        for node in list(graph.graph.nodes):
            if node.op == "call_function":
                _replace(node, handle, width)
        graph.graph.lint()
        graph.recompile()


def _width(module: GraphModule) -> str | None:
    """The symbol of the number of tokens in a row: the second size of the graph's token ids."""
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            return str(value.shape[1])
    return None


def _replace(node: Node, handle: int, width: str | None) -> None:
    """Replace one node where it is attention, cross-entropy, a count of all places or a cut by
    them; ``width`` is the symbol of the tokens in a row."""
    target = node.target
    if target is torch._C._nn.scaled_dot_product_attention:  # noqa: SLF001
        _call(node, scaled_dot_product_attention, handle=handle)
    elif target is torch._C._nn.cross_entropy_loss:  # noqa: SLF001
        _call(node, _numbered_cross_entropy, handle=handle)
    elif target is torch.nn.functional.cross_entropy:
        _call(node, cross_entropy, handle=handle)
    elif target is torch.nn.functional.multi_head_attention_forward:
        _call(node, multi_head_attention, handle=handle)
    elif target is torch.arange and _counts(node, width):
        _after(node, torch.ops.headrace.positions.default, handle)
    elif target is operator.getitem and (cut := _table_cut(node, width)) is not None:
        _call(node, rows_of, **cut._asdict(), handle=handle)


def _call(node: Node, function: Callable[..., Any], **more: Any) -> None:
    """Replace the function that a node calls by ``function``, with the same arguments and
    ``more``."""
    node.target, node.kwargs = function, {**node.kwargs, **more}


def _after(node: Node, function: Callable[..., Any], handle: int) -> None:
    """Insert a call of ``function`` on the result of ``node``, and have all users of ``node`` use
    it."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(function, (node, handle))
        made.meta = dict(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _counts(node: Node, width: str | None) -> bool:
    """Whether an arange counts the tokens of a row."""
    value = node.meta.get("example_value")
    starts = len(node.args) == 1 or node.args[0] == 0
    return bool(starts) and value is not None and str(value.shape[0]) == width


def _table_cut(node: Node, width: str | None) -> Cut | None:
    """The cut of a table of positions to the tokens of a row; None where ``node`` is none."""
    base, index = node.args
    value = node.meta.get("example_value")
    before = base.meta.get("example_value") if isinstance(base, Node) else None
    if not isinstance(value, torch.Tensor) or not isinstance(before, torch.Tensor):
        return None
    if not isinstance(base, Node) or not _is_held(base):
        return None
    found = [
        cut
        for cut in cuts_of(index, before.dim())
        if str(value.shape[cut.made]) == width and str(before.shape[cut.dim]) != width
    ]
    return found[0] if len(found) == 1 else None


def _is_held(node: Node) -> bool:
    """Whether a value is a parameter or a buffer of the model."""
    if node.op == "get_attr":
        return True
    # Dynamo makes inputs of the graph of them; only the name of their source, such as
    # ``L['self']._modules['wpe']._parameters['weight']``, tells them from the user's inputs.
    argument = node.meta.get("grapharg")
    if node.op != "placeholder" or argument is None:
        return False
    source = str(argument.source.name)  # a method in some versions of torch: its text has it, too
    return "_parameters" in source or "_buffers" in source


def _numbered_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    handle: int,
) -> torch.Tensor:
    """Cross-entropy over the tokens of all ranks, with the arguments of torch's inner operator, in
    which ``reduction`` is a number."""
    return cross_entropy(
        logits,
        labels,
        weight,
        ignore_index=ignore_index,
        reduction=_REDUCTIONS.get(int(reduction), "none"),
        label_smoothing=label_smoothing,
        handle=handle,
    )
