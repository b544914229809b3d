"""Running a model only to examine it: without dropout, and with all that its forwards change in it
restored, the states of random generators too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules import module as module_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from headrace.adopt.gradients import reshard
from headrace.errors import ModelError

__all__ = ["Draws", "buffers_kept", "drawn_off_neutral", "held_still", "who_draws"]

_PLAIN = (bool, int, float, torch.Tensor, type(None))
"""Types of the attributes of a module that are restored."""


@contextmanager
def held_still(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """Context in which ``model`` may be run to examine it, in ``training`` or evaluation mode.

    Within it torch's dropout drops nothing, and parameters that are all zero hold small random
    numbers: a gate that starts at zero would hide whatever it multiplies. At the end its weights,
    buffers, flags and counters are as they were, and so are the states of random generators. What
    autocast keeps of weights in another type is dropped before and after."""
    torch.clear_autocast_cache()
    with ExitStack() as undo:
        undo.callback(torch.clear_autocast_cache)
        draws = Draws.now(model)
        undo.callback(draws.restore)
        undo.callback(_remember(model))
        # A model in training stays as it is: the user may keep some of its modules in evaluation.
        if not (training and model.training):
            for module in model.modules():
                module.training = training
        undo.callback(_fill_zeros(model))
        undo.enter_context(_WithoutDropout())
        yield


@contextmanager
def buffers_kept(model: torch.nn.Module) -> Iterator[None]:
    """Context for forwards in training. Raises ModelError at its end where they changed a buffer
    that is saved with the model: it would become that of this rank's tokens, by as many forwards as
    the rank had, and what it changes later would, too. Counts of one number may change."""
    saved = model.state_dict().keys()
    before = {
        name: x.detach().clone()
        for name, x in model.named_buffers()
        if name in saved and x.numel() > 1 and not x.is_meta and not isinstance(x, FakeTensor)
    }
    yield
    now = dict(model.named_buffers())
    for name, x in before.items():
        if name in now and not _has_same_numbers(now[name], x):
            raise ModelError(
                f"buffer {name} of {type(model).__name__}",
                got="a forward in training that changes it",
                wanted="forwards that change nothing",
                hint="each rank would keep that of its own tokens: change it after the step, by "
                "sums over all ranks, or register it with persistent=False where no result needs "
                "it",
            )


def _has_same_numbers(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both tensors hold the same numbers, NaN counted as one."""
    if torch.equal(x, y):
        return True
    same_kind = x.shape == y.shape and x.is_floating_point()
    return same_kind and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


def _remember(model: torch.nn.Module) -> Callable[[], None]:
    """Note the numbers and tensors that the modules hold now, beside parameters, and return the
    function that restores them. Of a DDP wrapper itself only the training flag is restored: its
    attributes are the state of its communication."""
    flags = [(module, module.training) for module in model.modules()]
    modules = [m for m in model.modules() if not isinstance(m, DistributedDataParallel)]
    # The plain attributes of each module, by name; then its buffers.
    attributes = [{k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)} for m in modules]
    buffers = [dict(m._buffers) for m in modules]  # noqa: SLF001
    tensors = [x for held in (*attributes, *buffers) for x in held.values() if torch.is_tensor(x)]
    values = [x.detach().clone() for x in tensors]

    def restore() -> None:
        """Put plain attributes, buffers, tensor values and training flags of all modules back as
        they were, and delete plain attributes that are new."""
        for module, held, buffers_held in zip(modules, attributes, buffers, strict=True):
            now = vars(module)
            for name in [k for k, v in now.items() if isinstance(v, _PLAIN) and k not in held]:
                del now[name]
            now.update(held)
            module._buffers.clear()  # noqa: SLF001
            module._buffers.update(buffers_held)  # noqa: SLF001
        for tensor, value in zip(tensors, values, strict=True):
            # By .data: autograd graphs of the user's would refuse a tensor changed in place.
            tensor.data.copy_(value)
        for module, flag in flags:
            module.training = flag

    return restore


@contextmanager
def drawn_off_neutral(model: torch.nn.Module) -> Iterator[None]:
    """Context in which trainable parameters that may stand at a neutral point have small random
    numbers added: those whose entries are all equal (a gate at 1), or of which 1 % are zero (a
    convolution that begins as the identity). There a module may pass on nothing of other tokens
    that it sees a step later. Weights of ``Linear`` and ``Embedding``, which see single tokens,
    stay as they are. All are as before at the end."""
    within_a_token = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
    }

    def may_be_neutral(parameter: torch.Tensor, local: torch.Tensor) -> bool:
        """Whether the numbers of a parameter, of which this rank has ``local``, may hide others."""
        if not parameter.requires_grad or id(parameter) in within_a_token:
            return False
        zeros = local.numel() - int(local.count_nonzero())
        return bool(local.max() == local.min()) or 100 * zeros >= local.numel()

    restore = _redraw(model, may_be_neutral)
    try:
        yield
    finally:
        restore()


def _fill_zeros(model: torch.nn.Module) -> Callable[[], None]:
    """Fill parameters that are all zero with numbers from 0.05 to 0.15 of either sign. Returns the
    function that restores the zeros, with their signs."""
    return _redraw(model, lambda parameter, local: not bool(local.any()))


def _redraw(
    model: torch.nn.Module, chooses: Callable[[torch.Tensor, torch.Tensor], bool]
) -> Callable[[], None]:
    """Add random numbers to the parameters that ``chooses(parameter, local)`` names, where
    ``local`` is the parameter, or this rank's shard of it: from 0.05 to 0.15 of either sign, times
    its largest number where that is not 0, drawn with a fixed seed. Returns the function that
    restores the numbers that were there. Autocast is to keep none of them in another type."""
    reshard(model)
    torch.clear_autocast_cache()
    generator = torch.Generator().manual_seed(0)
    changed = list[tuple[torch.Tensor, torch.Tensor]]()  # (parameter, its numbers)
    for parameter in model.parameters():
        local = getattr(parameter, "_local_tensor", parameter).data
        if local.is_floating_point() and local.numel() and chooses(parameter, local):
            changed.append((local, local.clone()))
            signs = (torch.rand(local.shape, generator=generator) - 0.5).sign()
            sizes = 0.05 + 0.1 * torch.rand(local.shape, generator=generator)
            scale = float(local.abs().max()) or 1.0
            local.copy_(local + (signs * sizes * scale).to(local))

    def restore() -> None:
        """Put the numbers back, and have FSDP2 gather them anew."""
        for local, numbers in changed:
            local.copy_(numbers)
        reshard(model)

    return restore


class _WithoutDropout(TorchFunctionMode):
    """A function mode in which torch's dropout of the values of single tokens drops nothing.
    Dropout with one mask for all tokens of a row, as in drop path, still draws random numbers, so
    that a comparison of :class:`Draws` notices it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the input of a dropout unchanged; call any other function."""
        named = kwargs or {}
        if func is functional.dropout or func is functional.alpha_dropout:
            x = args[0] if args else named["input"]
            # The mask has x's shape: for a single number, or one for each feature,
            # [1, 1, ..., features], all tokens of a row share it.
            shared = x.numel() == 1 or (x.dim() > 2 and x[..., 0].numel() == 1)
            if not shared:
                return x
        return func(*args, **named)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The states of the random generators of torch, numpy and Python, which decide what is drawn
    next. ``torch_states`` are those of the CPU and, where the model is on another ``device``, of
    that device."""

    device: torch.device
    torch_states: list[torch.Tensor]
    numpy_state: Any
    python_state: Any

    @classmethod
    def now(cls, model: torch.nn.Module) -> Draws:
        """The states now, on the CPU and on the device of ``model``."""
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
        """Whether the states are those of ``other``: nothing was drawn between the two."""
        # numpy's state is (name, array of words, numbers...).
        _, own_words, *own_numbers = self.numpy_state
        _, other_words, *other_numbers = other.numpy_state
        return (
            all(map(torch.equal, self.torch_states, other.torch_states))
            and self.python_state == other.python_state
            and own_numbers == other_numbers
            and bool((own_words == other_words).all())
        )

    def restore(self) -> None:
        """Set all generators to these states."""
        torch.set_rng_state(self.torch_states[0])
        for state in self.torch_states[1:]:
            torch.get_device_module(self.device).set_rng_state(state, self.device)
        np.random.set_state(self.numpy_state)  # noqa: NPY002
        random.setstate(self.python_state)


def who_draws(model: torch.nn.Module, again: Callable[[], Any]) -> str:
    """The class name of the module that draws random numbers in its forward while ``again()`` runs
    the model: the first one to end, which is an innermost one; that of the model where none
    does."""
    states_before = list[Draws]()  # of the forwards that run now, the innermost last
    drawing = list[torch.nn.Module]()  # in the order in which their forwards end

    def before(*_: Any) -> None:
        """Note the states as a module's forward begins."""
        states_before.append(Draws.now(model))

    def after(module: torch.nn.Module, *_: Any) -> None:
        """Note the module where its forward has changed the states."""
        if not states_before.pop().same(Draws.now(model)):
            drawing.append(module)

    with ExitStack() as hooks:
        hooks.callback(module_hooks.register_module_forward_pre_hook(before).remove)
        hooks.callback(module_hooks.register_module_forward_hook(after).remove)
        again()
    return type(drawing[0] if drawing else model).__name__
