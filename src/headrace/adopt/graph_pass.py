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
    """A backend of torch.compile: rewrites each graph for the local tokens of the placement in
    ``slot``, then has torch's backend of the name ``backend`` compile it. Without a slot, where the
    model's attention is reached in another way, graphs are not rewritten. ``times`` counts compiled
    graphs."""

    def __init__(self, backend: str, slot: ModelSlot | None = None) -> None:
        self.times = 0
        self._backend, self._slot = backend, slot

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Compiled:
        """Compile one graph, rewritten where there is a slot, for example ``inputs``: returns the
        function that runs it."""
        if self._slot is not None:
            _rewrite(module, self._slot.handle)
        compiled: Compiled = module.forward
        if self._backend != "eager":
            backend = torch._dynamo.lookup_backend(self._backend)  # noqa: SLF001
            compiled = backend(module, list(inputs))
        self.times += 1  # at the end: a backend may have a graph traced again
        return compiled


def _rewrite(module: GraphModule, handle: int) -> None:
    """Replace the nodes of a traced graph, and of graphs within it, that depend on other tokens by
    operators that find the placement by ``handle``. The graphs are changed in place."""
    width = _width(module)
    for graph_module in (m for m in module.modules() if isinstance(m, GraphModule)):
        for node in list(graph_module.graph.nodes):
            if node.op == "call_function":
                _replace(node, handle, width)
        graph_module.graph.lint()
        graph_module.recompile()


def _width(module: GraphModule) -> str | None:
    """The number of tokens in a row, as text such as ``s0``: the second size of the graph's token
    ids, its first input of two dims that is not floating; None where there is none. As graphs are
    traced with dynamic sizes it usually is a symbol, so that another size has the same text only
    where it is the number of tokens, not where it equals it by chance."""
    for node in module.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.dim() == 2 and not value.is_floating_point():
            return str(value.shape[1])
    return None


def _replace(node: Node, handle: int, width: str | None) -> None:
    """Replace one node where it is attention, a cross entropy, an arange that counts tokens, or a
    slice of a parameter or buffer, ``table[:tokens]``. ``width`` is the text of the number of
    tokens in a row, ``handle`` that of the model's slot."""
    target = node.target
    if target is torch._C._nn.scaled_dot_product_attention:  # noqa: SLF001
        _call(node, scaled_dot_product_attention, handle=handle)
    elif target is torch._C._nn.cross_entropy_loss:  # noqa: SLF001
        _call(node, _numbered_cross_entropy, handle=handle)
    elif target is torch.nn.functional.cross_entropy:
        _call(node, cross_entropy, handle=handle)
    elif target is torch.nn.functional.multi_head_attention_forward:
        _call(node, multi_head_attention, handle=handle)
    elif target is torch.arange and _counts_tokens(node, width):
        _after(node, torch.ops.headrace.positions.default, handle)
    elif target is operator.getitem and (cut := _table_cut(node, width)) is not None:
        _call(node, rows_of, **cut._asdict(), handle=handle)


def _call(node: Node, function: Callable[..., Any], **added: Any) -> None:
    """Have a node call ``function`` instead, with the same arguments and those ``added``."""
    node.target, node.kwargs = function, {**node.kwargs, **added}


def _after(node: Node, function: Callable[..., Any], handle: int) -> None:
    """Insert a call ``function(result of node, handle)`` after ``node``, and have all users of
    ``node`` use its result."""
    with node.graph.inserting_after(node):
        made = node.graph.call_function(function, (node, handle))
        made.meta = dict(node.meta)
    # All but the new node itself, whose argument stays ``node``.
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def _counts_tokens(node: Node, width: str | None) -> bool:
    """Whether an arange counts the tokens of a row from 0; ``width`` is the text of their
    number."""
    value = node.meta.get("example_value")
    starts_at_zero = len(node.args) == 1 or node.args[0] == 0
    return bool(starts_at_zero) and value is not None and str(value.shape[0]) == width


def _table_cut(node: Node, width: str | None) -> Cut | None:
    """The :class:`Cut` of ``node``, a call ``table[index]``, where the table is a parameter or
    buffer and the index takes as many first rows as a row has tokens (``width``, as text); else
    None."""
    table_node, index = node.args
    result = node.meta.get("example_value")
    table = table_node.meta.get("example_value") if isinstance(table_node, Node) else None
    if not isinstance(result, torch.Tensor) or not isinstance(table, torch.Tensor):
        return None
    if not isinstance(table_node, Node) or not _is_held(table_node):
        return None
    # Cuts to the number of tokens, of a dim whose size is another: ``:n`` of n rows cuts nothing.
    cuts = [
        cut
        for cut in cuts_of(index, table.dim())
        if str(result.shape[cut.made]) == width and str(table.shape[cut.dim]) != width
    ]
    return cuts[0] if len(cuts) == 1 else None


def _is_held(node: Node) -> bool:
    """Whether the value of a node is a parameter or a buffer of the model."""
    if node.op == "get_attr":
        return True
    # Dynamo makes parameters and buffers inputs of the graph; only the name of their source, such
    # as ``L['self']._modules['wpe']._parameters['weight']``, tells them from the user's inputs.
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
    """:func:`cross_entropy` with the arguments of torch's inner operator, in which ``reduction`` is
    a number: 0 for none, 1 for the mean, 2 for the sum."""
    return cross_entropy(
        logits,
        labels,
        weight,
        ignore_index=ignore_index,
        reduction=_REDUCTIONS.get(int(reduction), "none"),
        label_smoothing=label_smoothing,
        handle=handle,
    )
