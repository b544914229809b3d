"""The door of calls: what knows of other tokens is replaced while a model's Python runs.

A mode of torch sees the functions that the model's modules call, and no others. It sees them again
where a checkpoint computes modules again, as that calls them too; nothing is traced, so hooks of
wrappers (FSDP2) and Python that no graph can hold are no matter.

A graph tells a size that is the number of tokens from one that is the same by chance; numbers do
not. So calls that count tokens are known by their places in the code: those whose sizes followed
the tokens through all lengths of the probe.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from headrace.errors import ModelError
from headrace.passes.operators import ModelSeat, positions
from headrace.passes.replaced import (
    cross_entropy,
    cuts_of,
    multi_head_attention,
    rows_of,
    scaled_dot_product_attention,
)
from headrace.passes.stand_in import StandIn

__all__ = ["ReplacedCalls"]

_REPLACED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: scaled_dot_product_attention,
    functional.multi_head_attention_forward: multi_head_attention,
    functional.cross_entropy: cross_entropy,
}

_FRAMES = 8
"""Functions by which a call is known, at most: models count tokens in functions of their own."""

_TORCH = str(Path(torch.__file__).parent)
_MODULES = torch.nn.modules.module.__file__
_AGAIN = (torch.utils.checkpoint.__file__, torch.autograd.function.__file__)

Frames = tuple[tuple[CodeType, int], ...]


@dataclass(slots=True, kw_only=True)
class _Seen:
    """How a call's size and the tokens went together: the numbers of tokens that it followed, and
    the sizes that it had when there were other numbers of tokens."""

    followed: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)

    @property
    def follows(self) -> bool:
        return len(self.followed) > 1


class ReplacedCalls(TorchFunctionMode):
    """In force while modules of ``model`` run that its author wrote, until :meth:`remove`."""

    def __init__(self, model: torch.nn.Module, seat: ModelSeat) -> None:
        super().__init__()
        self._seat, self._model = seat, model
        _remove_older(model)
        self._sites: dict[tuple[Frames, int], _Seen] = {}
        self._tables: set[int] | None = None
        self._here = threading.local()
        self._hooks = ExitStack()
        within = {id(x) for part in _compiled_within(model) for x in part.modules()}
        for module in model.modules():
            if id(module) not in within and _calls_functions(module):
                enter = module.register_forward_pre_hook(self._enter, prepend=True)
                leave = module.register_forward_hook(self._leave, always_call=True)
                self._hooks.callback(enter.remove)
                self._hooks.callback(leave.remove)

    def remove(self) -> None:
        """Leave the model as it was."""
        self._hooks.close()

    def run(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """``function(*args, **named)``, a forward that a checkpoint calls: this is in force there
        too, where it is computed again."""
        self._enter()
        try:
            return function(*args, **named)
        finally:
            self._leave()

    def _enter(self, *_: Any) -> None:
        # Backward begins without the modes of its forward, whatever this thread is inside of.
        enters = self not in _get_current_function_mode_stack()
        self._entered().append(enters)
        if enters:
            self._tables = None
            self.__enter__()

    def _leave(self, *_: Any) -> None:
        if self._entered().pop():
            self.__exit__(None, None, None)

    def _entered(self) -> list[bool]:
        """Of each module that is running on this thread, whether it put this in force."""
        if not hasattr(self._here, "entered"):
            self._here.entered = []
        return self._here.entered  # type: ignore[no-any-return]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What is replaced, and all else as it is."""
        named = kwargs or {}
        if func in _REPLACED:
            if not torch.compiler.is_compiling():
                _site()
            return _REPLACED[func](*args, **named, handle=self._seat.handle)
        if torch.compiler.is_compiling():
            return func(*args, **named)
        out = func(*args, **named)
        if func is torch.arange and _begins_at_zero(*args, **named):
            return self._counted(out)
        if func is torch.Tensor.__getitem__ and args[0].grad_fn is None:  # what is held has none
            return self._cut(out, args[0], args[1])
        return out

    def _cut(self, out: torch.Tensor, table: torch.Tensor, index: Any) -> torch.Tensor:
        cuts = cuts_of(index, table.dim())
        if not cuts or not self._is_held(table):
            return out
        follow = [cut for cut in cuts if self._follows(out.shape[cut.made], part=cut.at)]
        if len(follow) != 1:
            return out
        return rows_of(table, index, **follow[0]._asdict(), handle=self._seat.handle)

    def _is_held(self, table: torch.Tensor) -> bool:
        """Whether a module holds a tensor, in this call of the model's outermost module."""
        if self._tables is None:
            self._tables = set(map(id, _tables(self._model)))
        return id(table) in self._tables

    def _counted(self, out: torch.Tensor) -> torch.Tensor:
        return positions(out, self._seat.handle) if self._follows(len(out)) else out

    def _follows(self, size: int, part: int = 0) -> bool:
        """Whether the size of the call that is being made, or of a ``part`` of its index, is the
        number of tokens. Raises ModelError where that cannot be told."""
        now = self._seat.now
        tokens, frames = len(now.positions()), _site()
        seen = self._sites.get((frames, part))
        if isinstance(now, StandIn):
            seen = self._sites.setdefault((frames, part), _Seen())
            (seen.followed if size == tokens else seen.others).add(size)
            return size == tokens
        if size != tokens or (seen is not None and not seen.follows and size in seen.others):
            return False
        if seen is None or not seen.follows or size in seen.others:
            raise ModelError(
                f"places counted in {_named(frames)}",
                got=f"{size}, which may be tokens or not",
                wanted="places that follow the tokens",
                hint="give the model its places, or another number of tokens",
            )
        return True


def _compiled_within(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that their author compiles."""
    return [
        module
        for module in model.modules()
        if isinstance(module, torch._dynamo.OptimizedModule)  # noqa: SLF001
        or module._compiled_call_impl is not None  # noqa: SLF001
    ]


def _remove_older(model: torch.nn.Module) -> None:
    """A model is replaced once."""
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):  # noqa: SLF001
            older = getattr(hook, "__self__", None)
            if isinstance(older, ReplacedCalls):
                older.remove()


def _calls_functions(module: torch.nn.Module) -> bool:
    """Whether a module's forward may call what is replaced: one that is not torch's own, or has
    parts, or a loss."""
    own = not type(module).__module__.startswith("torch.nn.modules")
    return own or any(True for _ in module.children()) or isinstance(module, _LOSSES)


_LOSSES = (torch.nn.CrossEntropyLoss,)


def _tables(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Tensors that modules hold."""
    for module in model.modules():
        yield from module._parameters.values()  # type: ignore[misc]  # noqa: SLF001
        yield from module._buffers.values()  # type: ignore[misc]  # noqa: SLF001
        yield from (x for x in vars(module).values() if isinstance(x, torch.Tensor))


def _begins_at_zero(*args: Any, **named: Any) -> bool:
    """Whether an arange of such arguments counts 0, 1, 2, ..."""
    starts = len(args) > 1 or (args and "end" in named)
    start = named.get("start", args[0] if starts else 0)
    return bool(start == 0 and named.get("step", args[2] if len(args) > 2 else 1) == 1)


def _site() -> Frames:
    """Where the call is made that is being replaced: in which functions of its module's forward,
    however that was called. Raises ModelError where a checkpoint, or a function with a backward of
    its own, runs functions that are no module: what they do again would not be replaced."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    found = list[tuple[CodeType, int]]()
    while frame is not None and (file := frame.f_code.co_filename) != _MODULES:
        if frame.f_code is ReplacedCalls.run.__code__:
            break
        if file in _AGAIN:
            raise ModelError(
                _named(found[-1:]),
                got="a checkpoint around a function",
                wanted="around a module",
                hint="put the function in a module, or give hr.compile a backend",
            )
        if file != __file__ and not file.startswith(_TORCH):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found[:_FRAMES])


def _named(frames: Sequence[tuple[CodeType, int]]) -> str:
    """The first function of a site, and where it is written."""
    if not frames:
        return "a function of torch"
    code, _ = frames[0]
    return f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}"
