"""Hooks on a user's modules that stay with these modules.

A deep copy of a module copies its hooks, and pickling writes them. A copy of a model is to be the
user's plain model, so its hooks do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["hook_after", "hook_before", "in_checkpoint", "tensors_among"]


class OwnHook:
    """A hook that calls ``function`` for ``module`` alone. Its deep copies and pickles are hooks
    that do nothing."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        self._module, self._function = module, function

    def __call__(self, module: torch.nn.Module, *given: Any) -> Any:
        """The result of ``function(module, *given)`` for the hook's own module; None for others."""
        return self._function(module, *given) if module is self._module else None

    def __deepcopy__(self, memo: Any) -> InertHook:
        return InertHook()

    def __reduce__(self) -> tuple[type[InertHook], tuple[()]]:
        return InertHook, ()


class InertHook:
    """A hook that does nothing, in the place of an :class:`OwnHook` in a copied module."""

    def __call__(self, *_: Any) -> None:
        """Return None, which leaves arguments and results as they are."""


def hook_before(
    module: torch.nn.Module, function: Callable[..., Any], *, named: bool, first: bool = False
) -> Callable[[], None]:
    """Call ``function(module, args[, kwargs])`` before each forward of a module.

    Args:
        module: The module.
        function: Returns new arguments, or None.
        named: Whether it takes and returns keyword arguments, too.
        first: Whether it is called before the hooks that the module has already.

    Returns:
        A function that removes the hook.
    """
    hook = OwnHook(module, function)
    return module.register_forward_pre_hook(hook, with_kwargs=named, prepend=first).remove


def hook_after(
    module: torch.nn.Module, function: Callable[..., Any], *, always: bool = False
) -> Callable[[], None]:
    """Call ``function(module, args, result)`` after each forward of a module.

    Args:
        module: The module.
        function: Returns a new result, or None.
        always: Whether it is called after a forward that failed, too, with the result None.

    Returns:
        A function that removes the hook.
    """
    hook = OwnHook(module, function)
    return module.register_forward_hook(hook, always_call=always).remove


def in_checkpoint(args: Sequence[Any]) -> bool:
    """Whether a module that is called with ``args`` may run in an activation checkpoint of its
    author: within one, hooks on saved tensors are set, or nothing is recorded of inputs that need
    gradients. The former is so, too, where saved tensors are moved to the host."""
    if torch.is_grad_enabled():
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # noqa: SLF001
    return any(x.requires_grad for x in tensors_among(args))


def tensors_among(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among a module's arguments or results, which are one or several."""
    for value in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(value, torch.Tensor):
            yield value
