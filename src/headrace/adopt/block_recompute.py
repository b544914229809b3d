"""Recompute for long sequences: blocks keep their attention and compute the rest again.

The work of linear parts grows with the number s of tokens, that of attention with its square. So
for long sequences all but attention is recomputed at a small cost, O(1 / s) of the work (AutoSP),
and only one block at a time holds the activations of its linear parts. The result of attention and
what an exchange brought for it are kept, so no traffic is repeated; where nothing was exchanged, q,
k and v are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import headrace.adopt.operators  # noqa: F401  registers attend
from headrace.errors import ModelError
from headrace.spec.layer_plan import Recompute

__all__ = [
    "BlockLevels",
    "Kept",
    "WrappedLevels",
    "recompute_blocks",
    "recomputed",
    "users_checkpoints",
]

Kept = Literal["attention", "full"]
"""Recompute level of a block: ``attention`` keeps attention and recomputes all else, ``full``
recomputes everything."""


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


Keep = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes of a function one that runs in the recompute of a checkpoint as it does now."""


def recompute_blocks(model: Any, level: Kept, keep: Keep) -> Callable[[bool], None]:
    """Make the switch that turns activation checkpoints of all blocks of a transformers model on
    and off. Raises ModelError for models that do not support them."""
    _require_blocks(model)
    modules = [m for m in model.modules() if hasattr(m, _FLAG)]
    contexts = {} if level == "full" else {"context_fn": _contexts}
    run = partial(checkpoint, use_reentrant=False, **contexts)
    return _Checkpoints(modules, _KeptCheckpoint(run, keep))


def users_checkpoints(model: torch.nn.Module, keep: Keep) -> Callable[[bool], None]:
    """Make the switch that, while it is on, has the user's own checkpoints of blocks of a
    transformers model recompute as they ran."""
    changed = list[tuple[torch.nn.Module, Callable[..., Any]]]()

    def switch(on: bool) -> None:
        """Wrap the functions that run these checkpoints when ``on``, else restore them."""
        for module, users in changed:
            vars(module)[_FUNCTION] = users
        changed.clear()
        for module in model.modules() if on else ():
            users = vars(module).get(_FUNCTION)
            if users is not None and vars(module).get(_FLAG):
                changed.append((module, users))
                vars(module)[_FUNCTION] = _KeptCheckpoint(users, keep)

    return switch


class _KeptCheckpoint:
    """Runs functions in the checkpoint ``run`` so that they are computed again as they ran. Its
    deep copies and pickles are ``run`` itself."""

    def __init__(self, run: Callable[..., Any], keep: Keep) -> None:
        """``keep`` makes of a function the one that is run and computed again."""
        self._run, self._keep = run, keep

    def __call__(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The results of ``function(*args)``, in the checkpoint."""
        return self._run(self._keep(function), *args, **named)

    def __reduce__(self) -> tuple[Callable[[Any], Any], tuple[Callable[..., Any]]]:
        return _itself, (self._run,)


def _itself(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function: what a :class:`_KeptCheckpoint` is in a copy."""
    return run


class BlockLevels:
    """Chooses before each forward which recompute level each of the ``blocks`` of a transformers
    model uses while ``switch`` is on."""

    def __init__(self, model: Any, blocks: Sequence[torch.nn.Module], keep: Keep) -> None:
        """Start with the level ``none`` for each of ``blocks`` and with ``switch`` off. Raises
        ModelError for a model or blocks that do not support checkpoints."""
        _require_blocks(model)
        if not all(hasattr(block, _FLAG) for block in blocks):
            raise ModelError(
                f"recompute of {type(model).__name__}",
                got="blocks that it cannot compute again",
                wanted="layers with gradient_checkpointing",
            )
        # The levels of those blocks that recompute in the next forward, in the order in which they
        # are called; each call takes one off.
        self._coming: deque[Recompute] = deque()
        run = partial(checkpoint, use_reentrant=False, context_fn=self._next_contexts)
        self.switch = _Checkpoints(blocks, _KeptCheckpoint(run, keep))
        self.choose([])

    def __reduce__(self) -> tuple[type[_FullRecompute], tuple[()]]:
        """Copy and pickle this as a :class:`_FullRecompute`: blocks of a copied model refer to it,
        and must not take levels that are meant for this model."""
        return _FullRecompute, ()

    def choose(self, levels: Sequence[Recompute]) -> None:
        """Set the level of each block, in order, for the next forward; blocks beyond the end of
        ``levels`` recompute nothing."""
        self.switch.choose([level != "none" for level in levels])
        self._coming = deque(level for level in levels if level != "none")

    def _next_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """(context of the forward, context of the recompute) for the checkpoint of the block that
        is called now, as torch's ``context_fn`` returns them. Takes the block's level off the
        coming ones; it is ``full`` where none is left."""
        level = self._coming.popleft() if self._coming else "full"
        return _contexts() if level == "attention" else (nullcontext(), nullcontext())


class _FullRecompute(BlockLevels):
    """Stands for a :class:`BlockLevels` in a copied model: each checkpoint recomputes all."""

    def __init__(self) -> None:
        """Make it without blocks and levels, so that each checkpoint falls back to ``full``."""
        self._coming = deque()


_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
"""Attributes of a module of transformers that may be computed again in the backward: whether it is,
and the function that runs it in a checkpoint."""
_ABSENT = object()
"""Stands for the value of an attribute that a module does not have itself."""


class _Checkpoints:
    """A switch, called with True or False, of the activation checkpoints of some transformers
    ``modules``: while it is on, those that recompute are run by ``run(forward, *args)``; while it
    is off, the modules are as the user has set them."""

    def __init__(self, modules: Sequence[torch.nn.Module], run: Callable[..., Any]) -> None:
        """Make the switch, which is off; once it is on, all modules recompute."""
        self._modules, self._run = modules, run
        self._recomputed = [True] * len(modules)  # whether each module recomputes
        # (module, the attribute's name, the user's value) while the switch is on.
        self._users: list[tuple[torch.nn.Module, str, Any]] = []

    def choose(self, recomputed: Sequence[bool]) -> None:
        """Set which modules recompute, in order; those beyond the end of the list do not."""
        rest = len(self._modules) - len(recomputed)
        self._recomputed = [*recomputed, *[False] * rest][: len(self._modules)]
        if self._users:
            self._set_flags()

    def __call__(self, on: bool) -> None:
        """Turn the checkpoints of the modules on, or restore the user's settings."""
        for module, name, value in self._users:
            if value is _ABSENT:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = value
        self._users.clear()
        if not on:
            return
        for module in self._modules:
            for name in (_FLAG, _FUNCTION):
                self._users.append((module, name, vars(module).get(name, _ABSENT)))
            vars(module)[_FUNCTION] = self._run
        self._set_flags()

    def _set_flags(self) -> None:
        """Set the flag of each module that says whether it recomputes."""
        for module, recomputed in zip(self._modules, self._recomputed, strict=True):
            vars(module)[_FLAG] = recomputed


class WrappedLevels:
    """Chooses before each forward which recompute level each of any model's ``blocks`` uses: their
    forwards run under checkpoints until :meth:`remove`."""

    def __init__(
        self, blocks: Sequence[torch.nn.Module], around: Callable[..., Any], keep: Keep
    ) -> None:
        """Wrap the forward of every block. ``around(forward, *args, **named)`` is what a checkpoint
        runs in the place of ``forward(*args, **named)``, also when it recomputes."""
        self._around, self._keep = around, keep
        self._levels: list[Recompute] = ["none"] * len(blocks)
        self._hooks = ExitStack()
        for index, block in enumerate(blocks):
            # A forward set on the block itself, which hides that of its class, is put back later.
            own = vars(block).get("forward")
            if own is None:
                self._hooks.callback(vars(block).pop, "forward")
            else:
                self._hooks.callback(setattr, block, "forward", own)
            block.forward = partial(self._run, index, block.forward)

    def __reduce__(self) -> tuple[type[_NoRecompute], tuple[()]]:
        """Copy and pickle this as a :class:`_NoRecompute`: the wrapped forwards of a copied model
        refer to it, and must not follow the levels of this model."""
        return _NoRecompute, ()

    def remove(self) -> None:
        """Give the blocks back their own forwards."""
        self._hooks.close()

    def choose(self, levels: Sequence[Recompute]) -> None:
        """Set the level of each block, in order, for the forwards that follow; blocks beyond the
        end of ``levels`` recompute nothing."""
        self._levels = [*levels, *["none"] * (len(self._levels) - len(levels))]

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Run the ``forward`` of block ``index`` (from 0) in a checkpoint of its chosen level, and
        return its result."""
        level = self._levels[index] if index < len(self._levels) else "none"
        if level == "none" or not torch.is_grad_enabled():
            return forward(*args, **named)
        # Keyword arguments are bound here, as checkpoint has some of its own.
        function = self._keep(partial(self._around, forward, **named))
        return recomputed(function, *args, level=level)


class _NoRecompute(WrappedLevels):
    """Stands for a :class:`WrappedLevels` in a copied model, whose blocks recompute nothing."""

    def __init__(self) -> None:
        """Make it without levels, so that each block runs at the level ``none``."""
        self._levels = []


def _require_blocks(model: Any) -> None:
    """Raise ModelError for a transformers model that does not support checkpoints of its blocks."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ModelError(
            f"recompute of {type(model).__name__}",
            got="no blocks that it knows",
            wanted="supports_gradient_checkpointing",
            hint="use recompute(block, x) in its forward",
        )


_ATEN = torch.ops.aten
_ATTENTION_OPERATORS = frozenset(
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
    """The policy of a selective checkpoint: save the results of attention operators, and compute
    those of all others again."""
    if operator in _ATTENTION_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


_contexts = partial(create_selective_checkpoint_contexts, _policy)
"""Makes the pair (context of the forward, context of the recompute) of a checkpoint that saves the
results of attention; torch's ``context_fn``."""
