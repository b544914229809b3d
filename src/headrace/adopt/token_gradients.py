"""Whether tokens meet beside attention, told by gradients: zero exactly where they do not.

Results of parts that equal those of the whole do not tell it where little of other tokens comes in
yet, behind a gate of 1e-5 or in numbers of half precision. A gradient needs no tolerance: with
attention replaced by a stand-in that looks at no other token, the result of a token has none by the
embeddings of others. Parameters that may stand at a neutral point, as a mix of which the share of
other tokens is 0 at first, are drawn off it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from headrace.adopt.held_still import drawn_off_neutral
from headrace.errors import HeadraceError

_DIFFERENCES = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Differences, relative to the largest gradient of a token, that rounding may make; 10 % in half
types."""

__all__ = ["SEEN_TOKENS", "depended_on", "scaled_by_others", "who_mixes"]

SEEN_TOKENS = (2, 4, 5, 8, 9, 11)
"""The tokens, of a row of 13, whose results are looked at: some others are at nearly every distance
before and behind them, the first and the last token among these."""


class _MarkedEmbeddings(TorchFunctionMode):
    """A function mode that adds ``marks`` [n], zeros, to the embeddings of n tokens wherever they
    are looked up, each times a vector: the gradient of a mark is that of its token's embedding
    along it. Lookups are calls of torch's ``embedding``, and indexing by the token ids ``ids``
    [1, n] themselves."""

    def __init__(self, marks: torch.Tensor, ids: torch.Tensor) -> None:
        super().__init__()
        self._marks, self._ids = marks, ids

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of the function, with marks where it is an embedding of each token."""
        named = kwargs or {}
        found = func(*args, **named)
        if func is functional.embedding:
            indices = args[0] if args else named["input"]
        elif func is torch.Tensor.__getitem__ and not torch.compiler.is_compiling():
            indices = args[1]
            # Experts are indexed by other numbers of the same shape, in an order of their own.
            if not isinstance(indices, torch.Tensor) or indices.data_ptr() != self._ids.data_ptr():
                return found
        else:
            return found
        count = len(self._marks)
        one_each = indices.numel() == count == indices.shape[-1]
        if not one_each or found.dim() < 2 or not found.is_floating_point():
            return found
        vector = torch.sin(torch.arange(1, found.shape[-1] + 1, device=found.device))
        return found + (self._marks[:, None] * vector).to(found.dtype)


def depended_on(
    model: torch.nn.Module, run: Callable[[], torch.Tensor], ids: torch.Tensor
) -> list[int] | None:
    """The tokens outside of :data:`SEEN_TOKENS` on whose embeddings the results of those depend.

    Args:
        model: A model whose attention is replaced by a function of each token alone.
        run: Runs it on a row of 13 tokens; returns logits [1, 13, ...].
        ids: The token ids [1, 13] that it is given.

    Returns:
        Their indices. None where no gradient can be had: of a model whose embeddings are not seen,
        whose results have none or are not finite, or whose checkpoints allow none.
    """
    with _with_gradients(model, ids) as marks:
        logits = run()
        if not logits.requires_grad or not bool(logits.isfinite().all()):
            return None
        try:
            # Graphs that compilers made can be gone through once only.
            return _others_with_gradient(logits, marks, again=False)
        except RuntimeError as error:
            if "torch.utils.checkpoint" in str(error):  # reentrant ones
                return None
            raise


def scaled_by_others(
    model: torch.nn.Module, run: Callable[[], torch.Tensor], ids: torch.Tensor
) -> bool:
    """Whether the gradient that a token's own result gives its embedding is another where other
    tokens' results have gradients, too: a backward norms or clips gradients over tokens. Has the
    arguments of :func:`depended_on`; False where no gradient can be had."""
    found = list[torch.Tensor]()  # gradients [n] by the marks
    with _with_gradients(model, ids) as marks:
        for tokens in (SEEN_TOKENS[:1], SEEN_TOKENS):
            logits = run()
            if not logits.requires_grad or not bool(logits.isfinite().all()):
                return False
            few = logits[0][list(tokens)].flatten(1)
            weights = torch.cos(torch.arange(few.shape[1], device=few.device)).to(few.dtype)
            try:
                gradient = _gradient((few * weights).sum(), marks)
                found.append(torch.zeros_like(marks) if gradient is None else gradient)
            except RuntimeError as error:
                if "torch.utils.checkpoint" in str(error):  # reentrant ones
                    return False
                raise
    alone, beside = found
    difference = float((alone - beside)[SEEN_TOKENS[0]].abs())
    return difference > _DIFFERENCES.get(logits.dtype, 0.1) * float(beside.abs().max())


def who_mixes(
    model: torch.nn.Module, run: Callable[[], torch.Tensor], ids: torch.Tensor
) -> str | None:
    """The class name of the first module to end, an innermost one, whose result for a token depends
    on others, with the arguments of :func:`depended_on`; None where no single module can be
    named."""
    results = list[tuple[torch.nn.Module, torch.Tensor]]()

    def after(module: torch.nn.Module, args: Any, result: Any) -> None:
        """Note the result of a module where it has one row of results for each token."""
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, torch.Tensor) and first.dim() >= 2 and first.shape[1] == ids.shape[1]:
            results.append((module, first))

    with _with_gradients(model, ids) as marks:
        hook = module_hooks.register_module_forward_hook(after)
        try:
            run()
            for module, result in results:
                if result.requires_grad and _others_with_gradient(result, marks, again=True):
                    return type(module).__name__
        except HeadraceError:
            raise
        except (RuntimeError, TypeError):  # of a compiler or a checkpoint, which allow no hooks
            return None
        finally:
            hook.remove()
    return None


@contextmanager
def _with_gradients(model: torch.nn.Module, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Context in which embeddings of the tokens ``ids`` [1, n] are marked, with the marks [n] as
    its value, and in which forwards of the model keep what a backward needs."""
    marks = torch.zeros(ids.shape[1], device=ids.device, requires_grad=True)
    # DDP would wait for a backward of all parameters.
    alone = model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
    with drawn_off_neutral(model), alone, torch.enable_grad(), _MarkedEmbeddings(marks, ids):
        yield marks


def _others_with_gradient(result: torch.Tensor, marks: torch.Tensor, *, again: bool) -> list[int]:
    """The tokens outside of :data:`SEEN_TOKENS` on which the ``result`` [1, n, ...] of these
    depends, by the gradient of a fixed projection of it. ``again`` keeps the graph for others."""
    seen = torch.tensor(SEEN_TOKENS, device=result.device)
    flat = result[0].index_select(0, seen).flatten()
    weights = torch.cos(torch.arange(len(flat), device=flat.device, dtype=torch.float32))
    gradient = _gradient((flat * weights.to(flat.dtype)).sum(), marks, again=again)
    if gradient is None or not bool(gradient.isfinite().all()):
        return []
    found = gradient.nonzero().flatten().tolist()
    return [token for token in found if token not in SEEN_TOKENS]


def _gradient(of: torch.Tensor, marks: torch.Tensor, *, again: bool = False) -> torch.Tensor | None:
    """The gradient [n] of a number by the marks, None where it does not depend on them; ``again``
    keeps the graph."""
    # torch.autograd.grad and backward are themselves seen by function modes, which are off while
    # they look: what a checkpoint computes again would have dropout, and no marks. So the engine is
    # called as these two call it.
    engine = torch.autograd.Variable._execution_engine  # noqa: SLF001
    marks.grad = None
    engine.run_backward(
        (of,),
        (torch.ones_like(of),),
        again,
        False,  # no graph of the gradient
        (marks,),
        allow_unreachable=True,
        accumulate_grad=True,
    )
    found, marks.grad = marks.grad, None
    return found
