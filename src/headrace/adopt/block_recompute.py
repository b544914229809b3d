"""Recompute for long sequences: blocks keep their attention and compute the rest again.

The work of linear parts grows with the tokens, that of attention with their square: of long
sequences all but attention is computed again for next to nothing, O(1 / s) of the work (AutoSP),
and its memory is that of one block. The result of attention and what an exchange brought for it
stay, so no traffic is repeated; where nothing was exchanged, q, k and v are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain, repeat
from typing import Any, Literal, Protocol, cast

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import headrace.adopt.operators  # noqa: F401  registers attend
from headrace.errors import ModelError
from headrace.spec.layer_plan import Recompute

__all__ = ["BlockLevels", "Kept", "WrappedLevels", "recompute_blocks", "recomputed"]

Kept = Literal["attention", "full"]
"""Recompute level of a block, as that of a layer: all but attention, or everything."""


def recomputed(function: Callable[..., Any], *inputs: Any, level: Kept = "attention") -> Any:
    """Run a part of a model so that its backward computes it again instead of keeping it.

    Args:
        function: The part, such as a block.
        inputs: Its inputs; those that need gradients get them.
        level: What is computed again: all but ``attention``, whose traffic is then not repeated, or
            everything (``full``).

    Returns:
        ``function(*inputs)``.

    Example:
        >>> x = hr.recomputed(block, x)
    """
    if level == "full":
        return checkpoint(function, *inputs, use_reentrant=False)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=_contexts)


def recompute_blocks(model: Any, level: Kept) -> None:
    """Turn on activation checkpoints of the blocks of a transformers model. Raises ModelError for
    models that do not support them."""
    _enable(model, {} if level == "full" else {"context_fn": _contexts})


class BlockLevels:
    """Chooses before each forward which recompute level each of the ``blocks`` of a transformers
    model uses. Raises ModelError for a model that does not support checkpoints, and for ``blocks``
    that do not."""

    def __init__(self, model: Any, blocks: Sequence[torch.nn.Module]) -> None:
        """Turn on the model's own gradient checkpointing, with levels that :meth:`choose` sets;
        raises ModelError for blocks without it."""
        self._blocks = [cast(_Block, block) for block in blocks]
        self._coming: deque[Recompute] = deque()
        _enable(model, {"context_fn": self._next})
        if not all(getattr(block, "gradient_checkpointing", False) for block in blocks):
            raise ModelError(
                f"recompute of {type(model).__name__}",
                got="blocks that it cannot compute again",
                wanted="layers with gradient_checkpointing",
            )
        self.choose(["none"] * len(blocks))

    def choose(self, levels: Sequence[Recompute]) -> None:
        """The level of each block in the next forward; blocks beyond them recompute nothing."""
        for block, level in zip(self._blocks, chain(levels, repeat("none")), strict=False):
            block.gradient_checkpointing = level != "none"
        self._coming = deque(level for level in levels if level != "none")

    def _next(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The two contexts (forward, recompute) of the next block's checkpoint."""
        level = self._coming.popleft() if self._coming else "full"
        return _contexts() if level == "attention" else (nullcontext(), nullcontext())


class WrappedLevels:
    """The same for any ``blocks``, whose forwards are run under checkpoints until :meth:`remove`.
    ``around(forward, ...)`` calls a forward in a checkpoint, where it is computed again too."""

    def __init__(self, blocks: Sequence[torch.nn.Module], around: Callable[..., Any]) -> None:
        """Wrap the forward of every block; ``around(forward, *args)`` runs a forward within a
        checkpoint."""
        self._around = around
        self._levels: list[Recompute] = ["none"] * len(blocks)
        self._hooks = ExitStack()
        for index, block in enumerate(blocks):
            own = vars(block).get("forward")
            self._hooks.callback(
                partial(vars(block).pop, "forward")
                if own is None
                else partial(setattr, block, "forward", own)
            )
            block.forward = partial(self._run, index, block.forward)

    def __deepcopy__(self, memo: Any) -> WrappedLevels:
        """Returns this object itself: the blocks of a copied model follow the same levels."""
        return self

    def remove(self) -> None:
        """Give the blocks back their own forwards."""
        self._hooks.close()

    def choose(self, levels: Sequence[Recompute]) -> None:
        """The level of each block in the next forward; blocks beyond them recompute nothing."""
        self._levels = [*levels, *["none"] * (len(self._levels) - len(levels))]

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The forward of block ``index`` (from 0), in a checkpoint of its chosen level."""
        level = self._levels[index]
        if level == "none" or not torch.is_grad_enabled():
            return forward(*args, **named)
        # Names are bound here: checkpoint has some of its own.
        return recomputed(partial(self._around, forward, **named), *args, level=level)


class _Block(Protocol):
    """A block as transformers marks it: whether it is computed again in the backward."""

    gradient_checkpointing: bool


def _enable(model: Any, options: dict[str, Any]) -> None:
    """Turn on a transformers model's gradient checkpointing with options; raises ModelError for a
    model that does not have it."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"recompute of {type(model).__name__}",
            got="no blocks that it knows",
            wanted="supports_gradient_checkpointing",
            hint="use recompute(block, x) in its forward",
        )
    older = model.gradient_checkpointing_enable  # the name of before
    getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False, **options})


_ATEN = torch.ops.aten
_ATTENDS = frozenset(
    {
        torch.ops.headrace.attend.default,
        _ATEN._scaled_dot_product_flash_attention.default,  # noqa: SLF001
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
        _ATEN._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
        _ATEN._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,  # noqa: SLF001
        _ATEN._flash_attention_forward.default,  # noqa: SLF001
        _ATEN._efficient_attention_forward.default,  # noqa: SLF001
    }
)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    attends = operator in _ATTENDS
    return CheckpointPolicy.MUST_SAVE if attends else CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _policy)
