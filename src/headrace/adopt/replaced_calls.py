"""The entry point of calls: torch functions that depend on other tokens are replaced at run time.

A torch function mode sees the functions that the model's modules call, and no others; those that a
checkpoint recomputes, too. Nothing is traced, so hooks of wrappers (FSDP2) and Python that no
compiler can trace do no harm.

A symbolic graph distinguishes the number of tokens from a size that equals it by chance; plain
numbers do not. So calls that count tokens are recognized by their places in the code: those whose
sizes were the number of tokens for all lengths of the probe.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.utils.checkpoint
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from headrace.adopt.attention_registry import attention
from headrace.adopt.operators import ModelSlot, StandIn, positions, targets
from headrace.adopt.own_hooks import hook_after, hook_before
from headrace.errors import ModelError

__all__ = [
    "Cut",
    "ReplacedCalls",
    "cross_entropy",
    "cuts_of",
    "multi_head_attention",
    "rows_of",
    "scaled_dot_product_attention",
]


class Cut(NamedTuple):
    """The component ``at`` of an index, which takes the first rows of dim ``dim`` of the table;
    they are dim ``made`` of the result."""

    at: int
    dim: int
    made: int


def cuts_of(index: Any, dims: int) -> list[Cut]:
    """The components of an index of a tensor of ``dims`` dims that take first rows; none where the
    index does more than slice and pick."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, (torch.Tensor, list, bool)) for part in parts):
        return []
    taken = sum(part is not None and part is not Ellipsis for part in parts)
    found, dim, made = list[Cut](), 0, 0
    for at, part in enumerate(parts):
        if part is Ellipsis:
            dim, made = dim + dims - taken, made + dims - taken
        elif part is None:
            made += 1
        elif not isinstance(part, slice):
            dim += 1
        else:
            if part.stop is not None and part.start in (None, 0) and part.step in (None, 1):
                found.append(Cut(at=at, dim=dim, made=made))
            dim, made = dim + 1, made + 1
    return found


def rows_of(
    table: torch.Tensor, index: Any, *, at: int, dim: int, made: int, handle: int
) -> torch.Tensor:
    """``table[index]`` for this rank: where a :class:`Cut` takes the first rows, the rows of the
    local tokens."""
    counted = torch.arange(table[index].shape[made], device=table.device)
    parts = index if isinstance(index, tuple) else (index,)
    rest = tuple(slice(None) if i == at else part for i, part in enumerate(parts))
    return table.index_select(dim, positions(counted, handle))[rest]


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    handle: int,
) -> torch.Tensor:
    """Attention of the local tokens over the group: q [b, N, s_r, D], k and v [b, G, s_r, D].
    Raises ModelError for masks, dropout and tokens of other places."""
    what = "scaled_dot_product_attention"
    if attn_mask is not None:
        raise ModelError(
            what,
            got="attn_mask",
            wanted="is_causal, or no mask",
            hint="a mask of this rank's tokens says nothing of those of others",
        )
    if dropout_p > 0:
        raise ModelError(what, got=f"dropout_p {dropout_p}", wanted="0")
    if query.dim() != 4 or key.shape[2] != query.shape[2]:
        raise ModelError(
            what,
            got=f"queries {list(query.shape)}, keys {list(key.shape)}",
            wanted="[rows, heads, tokens, features] of the same tokens",
        )
    return attention(query, key, value, handle, causal=is_causal, scale=scale)


def multi_head_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    features: int,
    heads: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_k: torch.Tensor | None,
    bias_v: torch.Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: torch.Tensor,
    out_bias: torch.Tensor | None,
    training: bool = True,
    key_padding_mask: torch.Tensor | None = None,
    need_weights: bool = True,
    attn_mask: torch.Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: torch.Tensor | None = None,
    k_proj_weight: torch.Tensor | None = None,
    v_proj_weight: torch.Tensor | None = None,
    static_k: torch.Tensor | None = None,
    static_v: torch.Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
    *,
    handle: int,
) -> tuple[torch.Tensor, None]:
    """What torch's MultiheadAttention calls, of the local tokens: all three inputs [s_r, b, N D].
    As there, a mask is dropped where ``is_causal`` says what it is. Raises ModelError for what
    changes the scores, and where the weights are wanted."""
    odd = {
        "bias_k": bias_k,
        "bias_v": bias_v,
        "add_zero_attn": add_zero_attn or None,
        "key_padding_mask": key_padding_mask,
        "need_weights": need_weights or None,
        "attn_mask": None if is_causal else attn_mask,
        "static_k": static_k,
        "static_v": static_v,
        "dropout": (training and dropout_p) or None,
    }
    if found := [name for name, value in odd.items() if value is not None]:
        raise ModelError(
            "MultiheadAttention",
            got=found[0],
            wanted="need_weights=False, is_causal or no mask",
            hint="padding and documents are known from what shard() was given",
        )
    if query.dim() != 3 or query.shape != key.shape:
        raise ModelError(
            "MultiheadAttention",
            got=f"queries {list(query.shape)}, keys {list(key.shape)}",
            wanted="rows of the same tokens",
        )
    separate = (q_proj_weight, k_proj_weight, v_proj_weight)
    weights = separate if weight is None else weight.chunk(3)
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    q, k, v = (
        functional.linear(x, part, own).unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
        for x, part, own in zip((query, key, value), weights, biases, strict=True)
        if part is not None
    )
    out = attention(q, k, v, handle, causal=is_causal).permute(2, 0, 1, 3).flatten(2)
    return functional.linear(out, out_weight, out_bias), None


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    handle: int,
) -> torch.Tensor:
    """This rank's part of a mean over all tokens: the sum over its own tokens, divided by the
    targets of the step. Raises ModelError for means that are weighted by class."""
    if size_average is not None or reduce is not None:
        raise ModelError("cross_entropy", got="size_average or reduce", wanted="reduction")
    if reduction != "mean":
        return functional.cross_entropy(
            logits,
            labels,
            weight,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    if weight is not None:
        raise ModelError(
            "cross_entropy", got="weights of classes and a mean", wanted="no weights, or a sum"
        )
    total = functional.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    return total / targets(total.detach(), handle)


_REPLACED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: scaled_dot_product_attention,
    functional.multi_head_attention_forward: multi_head_attention,
    functional.cross_entropy: cross_entropy,
}

_FRAMES = 8
"""Most functions of the call stack that identify a call: models count tokens in functions of their
own."""

_TORCH = str(Path(torch.__file__).parent)
_MODULES = torch.nn.modules.module.__file__
_AGAIN = (torch.utils.checkpoint.__file__, torch.autograd.function.__file__)

Frames = tuple[tuple[CodeType, int], ...]
"""A place in the code: of each function on the call stack its code and the line (or
instruction)."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """Sizes of one call in the probe: the numbers of tokens that it was equal to, and its sizes
    where it was not."""

    followed: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)

    @property
    def follows(self) -> bool:
        return len(self.followed) > 1


class ReplacedCalls(TorchFunctionMode):
    """A torch function mode that is active while ``model`` is spread and its author's modules run,
    until :meth:`remove`."""

    def __init__(self, model: torch.nn.Module, slot: ModelSlot) -> None:
        """Hook every module of the model that calls torch functions itself and is not compiled, so
        that the mode is active while it runs."""
        super().__init__()
        self._slot, self._model = slot, model
        _remove_older(model)
        _replacing[model] = self
        self._sites: dict[tuple[Frames, int], _Seen] = {}
        self._tables: set[int] | None = None
        self._here = threading.local()
        self._own = set(map(id, model.modules()))
        self._hooks = ExitStack()
        within = {id(x) for part in _compiled_within(model) for x in part.modules()}
        for module in model.modules():
            if id(module) not in within and _calls_functions(module):
                self._hooks.callback(hook_before(module, self._enter, named=False, first=True))
                self._hooks.callback(hook_after(module, self._leave, always=True))

    def __deepcopy__(self, memo: Any) -> ReplacedCalls:
        """Returns this object itself: forwards of a copied model run unchanged."""
        return self

    def remove(self) -> None:
        """Restore the forwards of the model's modules."""
        self._hooks.close()

    def run(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """``function(*args, **named)``, a forward within a checkpoint: calls are replaced in its
        recompute too. A forward of another model runs unchanged."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module) and id(owner) not in self._own:
            return function(*args, **named)
        self._enter()
        try:
            return function(*args, **named)
        finally:
            self._leave()

    def _enter(self, *_: Any) -> None:
        """Activate the mode where the model is spread and the mode is not active yet."""
        # A backward starts without the modes of its forward, whatever is active on this thread.
        spread = self._slot.held is not None
        enters = spread and self not in _get_current_function_mode_stack()
        self._activations().append(enters)
        if enters:
            self._tables = None
            self.__enter__()

    def _leave(self, *_: Any) -> None:
        if self._activations().pop():
            self.__exit__(None, None, None)

    def _activations(self) -> list[bool]:
        """For each module that is running on this thread, whether its hook activated the mode."""
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
        """Call the replacement of ``func`` where there is one, else ``func`` itself."""
        named = kwargs or {}
        if func in _REPLACED:
            if torch.compiler.is_compiling():
                return _REPLACED[func](*args, **named, handle=self._slot.handle)
            frames = _site()
            try:
                return _REPLACED[func](*args, **named, handle=self._slot.handle)
            except ModelError as error:
                what = f"{error.what} in {_site_text(frames)}"
                raise ModelError(
                    what, got=error.got, wanted=error.wanted, hint=error.hint
                ) from error
        if torch.compiler.is_compiling():
            return func(*args, **named)
        out = func(*args, **named)
        if func is torch.arange and _begins_at_zero(*args, **named):
            return self._own_positions(out)
        if func is torch.Tensor.__getitem__ and args[0].grad_fn is None:  # weights have none
            return self._cut(out, args[0], args[1])
        return out

    def _cut(self, out: torch.Tensor, table: torch.Tensor, index: Any) -> torch.Tensor:
        """The rows of a table by place that belong to this rank's tokens, where ``out`` is
        ``table[index]`` cut by the number of tokens; else ``out``."""
        cuts = cuts_of(index, table.dim())
        if not cuts or not self._is_held(table):
            return out
        follow = [cut for cut in cuts if self._follows(out.shape[cut.made], part=cut.at)]
        if len(follow) != 1:
            return out
        return rows_of(table, index, **follow[0]._asdict(), handle=self._slot.handle)

    def _is_held(self, table: torch.Tensor) -> bool:
        """Whether ``table`` is a tensor of a module, during this call of the outermost module."""
        if self._tables is None:
            self._tables = set(map(id, _tables(self._model)))
        return id(table) in self._tables

    def _own_positions(self, out: torch.Tensor) -> torch.Tensor:
        return positions(out, self._slot.handle) if self._follows(len(out)) else out

    def _follows(self, size: int, part: int = 0) -> bool:
        """Whether the size of the current call, or of component ``part`` of its index, is the
        number of tokens. Raises ModelError where the probe could not decide that."""
        now = self._slot.now
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
                f"places counted in {_site_text(frames)}",
                got=f"{size}, which may be tokens or not",
                wanted="places that follow the tokens",
                hint="give the model its places, or another number of tokens",
            )
        return True


def _compiled_within(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules that the model's author compiles."""
    return [
        module
        for module in model.modules()
        if isinstance(module, torch._dynamo.OptimizedModule)  # noqa: SLF001
        or module._compiled_call_impl is not None  # noqa: SLF001
    ]


_replacing: WeakKeyDictionary[torch.nn.Module, ReplacedCalls] = WeakKeyDictionary()
"""The active replacement of each model."""


def _remove_older(model: torch.nn.Module) -> None:
    """Remove earlier replacements of a model or of its modules: calls are replaced once."""
    for module in model.modules():
        older = _replacing.pop(module, None)
        if older is not None:
            older.remove()


def _calls_functions(module: torch.nn.Module) -> bool:
    """Whether a module's forward may call a replaced function: one that is not torch's own, or has
    submodules, or is a loss."""
    own = not type(module).__module__.startswith("torch.nn.modules")
    return own or any(True for _ in module.children()) or isinstance(module, _LOSSES)


_LOSSES = (torch.nn.CrossEntropyLoss,)


def _tables(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and other tensor attributes of all modules."""
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
    """The place in the code of the current call: the functions of its module's forward, however
    that was called. Raises ModelError where a checkpoint or an autograd function runs a function
    that is no module: its recompute would not be replaced."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    found = list[tuple[CodeType, int]]()
    while frame is not None and (file := frame.f_code.co_filename) != _MODULES:
        if frame.f_code is ReplacedCalls.run.__code__:
            break
        if file in _AGAIN:
            raise ModelError(
                _site_text(found[-1:]),
                got="a checkpoint around a function",
                wanted="around a module",
                hint="put the function in a module, or give hr.compile a backend",
            )
        if file != __file__ and not file.startswith(_TORCH):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found[:_FRAMES])


def _site_text(frames: Sequence[tuple[CodeType, int]]) -> str:
    """The first function of a call stack, with file and line."""
    if not frames:
        return "a function of torch"
    code, _ = frames[0]
    return f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}"
