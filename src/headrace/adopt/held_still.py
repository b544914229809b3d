"""A model that is run to look at it: it drops nothing, and all that its forwards change or draw is
taken back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

__all__ = ["Draws", "held_still", "who_draws"]

_PLAIN = (bool, int, float, torch.Tensor, type(None))


@contextmanager
def held_still(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Run ``model`` as in training or in evaluation, without dropout. Parameters that are all zero
    hold small numbers meanwhile: a gate that starts at zero hides what is behind it. At the end its
    weights, buffers, flags, counters and what is drawn next are as they were."""
    with ExitStack() as undo:
        draws = Draws.now(model)
        undo.callback(draws.restore)
        undo.callback(_remember(model))
        if not (training and model.training):  # else what the user keeps in evaluation stays there
            for module in model.modules():
                module.training = training
        undo.callback(_fill_zeros(model))
        undo.enter_context(_Undropped())
        yield


def _remember(model: torch.nn.Module) -> Callable[[], None]:
    """What gives modules back the numbers and tensors that they hold now, beside parameters."""
    flags = [(module, module.training) for module in model.modules()]
    own = [m for m in model.modules() if not isinstance(m, DistributedDataParallel)]
    plain = [{k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)} for m in own]
    buffers = [dict(m._buffers) for m in own]  # noqa: SLF001
    tensors = [x for held in (*plain, *buffers) for x in held.values() if torch.is_tensor(x)]
    values = [x.detach().clone() for x in tensors]

    def restore() -> None:
        """Put plain attributes, buffers, tensor values and training flags of all modules back as
        they were."""
        for module, held, buffered in zip(own, plain, buffers, strict=True):
            now = vars(module)
            for name in [k for k, v in now.items() if isinstance(v, _PLAIN) and k not in held]:
                del now[name]
            now.update(held)
            module._buffers.clear()  # noqa: SLF001
            module._buffers.update(buffered)  # noqa: SLF001
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)  # .data: graphs of the user's do not count it as a change
        for module, flag in flags:
            module.training = flag

    return restore


def _fill_zeros(model: torch.nn.Module) -> Callable[[], None]:
    """Fill parameters that are all zero; returns what makes them the very zeros again."""
    _reshard(model)
    draw, changed = torch.Generator().manual_seed(0), list[tuple[torch.Tensor, torch.Tensor]]()
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter).data
        if local.is_floating_point() and local.numel() and not bool(local.any()):
            changed.append((local, local.clone()))
            numbers = torch.rand(local.shape, generator=draw)  # from 0.05 to 0.15, either sign
            local.copy_(
                (numbers - 0.5).sign() * (0.05 + 0.1 * torch.rand(local.shape, generator=draw))
            )

    def restore() -> None:
        for local, zeros in changed:
            local.copy_(zeros)
        _reshard(model)

    return restore


def _reshard(model: torch.nn.Module) -> None:
    """Have FSDP2 gather weights anew: it keeps those of its root after a forward."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class _Undropped(TorchFunctionMode):
    """Dropout of tokens drops nothing. What is dropped for all tokens of a row at once is drawn, so
    that :class:`Draws` tells."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The input of a dropout, and all else as it is."""
        named = kwargs or {}
        if func is functional.dropout or func is functional.alpha_dropout:
            x = args[0] if args else named["input"]
            if x.numel() != 1 and not (x.dim() > 2 and x[..., 0].numel() == 1):
                return x
        return func(*args, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What torch, numpy and Python draw next."""

    device: torch.device
    torch_states: list[torch.Tensor]
    numpy_state: Any
    python_state: Any

    @classmethod
    def now(cls, model: torch.nn.Module) -> Draws:
        """Look, on the CPU and on the device of ``model``."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        states = [torch.get_rng_state()]
        if device.type not in ("cpu", "meta"):
            states.append(torch.get_device_module(device).get_rng_state(device))
        return cls(
            device=device,
            torch_states=states,
            numpy_state=np.random.get_state(),  # noqa: NPY002
            python_state=random.getstate(),
        )

    def same(self, other: Draws) -> bool:
        """Whether nothing was drawn between two looks."""
        mine, others = self.numpy_state, other.numpy_state
        return (
            all(map(torch.equal, self.torch_states, other.torch_states))
            and self.python_state == other.python_state
            and mine[2:] == others[2:]
            and bool((mine[1] == others[1]).all())
        )

    def restore(self) -> None:
        """Have all draw again what they would have drawn at the look."""
        torch.set_rng_state(self.torch_states[0])
        for state in self.torch_states[1:]:
            torch.get_device_module(self.device).set_rng_state(state, self.device)
        np.random.set_state(self.numpy_state)  # noqa: NPY002
        random.setstate(self.python_state)


def who_draws(model: torch.nn.Module, again: Callable[[], Any]) -> str:
    """The class of the innermost module that draws while ``again`` runs, as far as modules run."""
    before, found = list[Draws](), list[torch.nn.Module]()

    def begin(*_: Any) -> None:
        before.append(Draws.now(model))

    def look(module: torch.nn.Module, *_: Any) -> None:
        if not before.pop().same(Draws.now(model)):
            found.append(module)

    with ExitStack() as hooks:
        hooks.callback(module_hooks.register_module_forward_pre_hook(begin).remove)
        hooks.callback(module_hooks.register_module_forward_hook(look).remove)
        again()
    return type(found[0] if found else model).__name__
