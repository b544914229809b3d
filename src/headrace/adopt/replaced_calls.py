"""The entry point of calls: torch functions that depend on other tokens are replaced at run time.

A torch function mode sees the functions that the model's modules call, and no others; those that a
checkpoint recomputes, too. Nothing is traced, so hooks of wrappers (FSDP2) and Python that no
compiler can trace do no harm.

A symbolic graph distinguishes the number of tokens from a size that equals it by chance; plain
numbers do not. So calls that count tokens are recognized by their sites in the code: those whose
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
from headrace.adopt.own_hooks import hook_after, hook_before, in_checkpoint, tensors_among
from headrace.errors import ModelError
from headrace.ops.loss import IGNORED

__all__ = [
    "Cut",
    "ReplacedCalls",
    "compiled_within",
    "cross_entropy",
    "cuts_of",
    "modules_run_as_written",
    "multi_head_attention",
    "rows_of",
    "scaled_dot_product_attention",
]


class Cut(NamedTuple):
    """A component ``:n`` of the index in ``table[index]``, which takes the first rows along a dim:
    component number ``at`` of the index cuts dim ``dim`` of the table, which is dim ``made`` of the
    result. In ``table[None, :n]``, ``at`` is 1, ``dim`` 0 and ``made`` 1."""

    at: int
    dim: int
    made: int


def cuts_of(index: Any, dims: int) -> list[Cut]:
    """The components ``:n`` of the ``index`` of a tensor with ``dims`` dims, each as a
    :class:`Cut`; none at all where the index has other components than slices, numbers, None and
    ``...``."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, (torch.Tensor, list, bool)) for part in parts):
        return []
    indexed_dims = sum(part is not None and part is not Ellipsis for part in parts)
    cuts, dim, made = list[Cut](), 0, 0  # ``dim`` and ``made`` are those of the next component
    for at, part in enumerate(parts):
        if part is Ellipsis:
            dim, made = dim + dims - indexed_dims, made + dims - indexed_dims
        elif part is None:  # a new dim of the result
            made += 1
        elif not isinstance(part, slice):  # a number, which removes a dim
            dim += 1
        else:
            if part.stop is not None and part.start in (None, 0) and part.step in (None, 1):
                cuts.append(Cut(at=at, dim=dim, made=made))
            dim, made = dim + 1, made + 1
    return cuts


def rows_of(
    table: torch.Tensor, index: Any, *, at: int, dim: int, made: int, handle: int
) -> torch.Tensor:
    """``table[index]`` for this rank's tokens: where the index takes as many first rows as there
    are local tokens, by the :class:`Cut` (``at``, ``dim``, ``made``), the rows at the places of
    these tokens are taken instead. ``handle`` finds the placement."""
    counted = torch.arange(table[index].shape[made], device=table.device)  # [local tokens]
    parts = index if isinstance(index, tuple) else (index,)
    # The other components of the index stay as they are.
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
    """Attention of the local tokens over the group, with the arguments of torch's function: q
    [b, N, s_r, D], k and v [b, G, s_r, D] to [b, N, s_r, D]. Raises ModelError for masks, dropout,
    and keys that are not of the same tokens as the queries."""
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
    """Torch's ``multi_head_attention_forward`` over the group: query, key and value [s_r, b, N D]
    of the local tokens to (output [s_r, b, N D], None for the weights).

    ``weight`` and ``bias`` project to queries, keys and values, ``out_weight`` and ``out_bias`` the
    result. As in torch, a mask is dropped where ``is_causal`` says what it is. Raises ModelError
    for other arguments that change the scores, and where the attention weights are wanted."""
    unsupported = {
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
    given = [name for name, value in unsupported.items() if value is not None]
    if given:
        raise ModelError(
            "MultiheadAttention",
            got=given[0],
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
    q, k, v = (  # [b, N, s_r, D]
        functional.linear(x, own_weight, own_bias).unflatten(2, (heads, -1)).permute(1, 2, 0, 3)
        for x, own_weight, own_bias in zip((query, key, value), weights, biases, strict=True)
        if own_weight is not None
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
    """Cross entropy with the arguments of torch's function. A mean is this rank's part of that over
    all ranks: the sum over its own tokens, divided by the targets of the step. Other reductions are
    torch's own. Raises ModelError for means that are weighted by class, for those over labels other
    than the targets that are counted, and for those over probabilities of classes, of which none is
    ignored."""
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
    if labels.is_floating_point():
        raise ModelError(
            "cross_entropy",
            got="probabilities of classes and a mean",
            wanted="a sum, divided by the targets of the step",
            hint="a mean over probabilities counts tokens without a label, too",
        )
    if ignore_index != IGNORED:
        raise ModelError(
            "cross_entropy",
            got=f"ignore_index={ignore_index} and a mean",
            wanted=f"ignore_index={IGNORED}",
            hint=f"labels that are not {IGNORED} are counted as tokens with a loss: "
            f"labels.masked_fill(labels == {ignore_index}, {IGNORED})",
        )
    total = functional.cross_entropy(
        logits, labels, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
    )
    return total / targets(total.detach(), labels, handle)


_REPLACED: Mapping[Callable[..., Any], Callable[..., Any]] = {
    functional.scaled_dot_product_attention: scaled_dot_product_attention,
    functional.multi_head_attention_forward: multi_head_attention,
    functional.cross_entropy: cross_entropy,
}

_FRAMES = 8
"""The innermost functions of the call stack, at most, that identify a call: models count tokens in
functions of their own, which several modules call."""

_TORCH = str(Path(torch.__file__).parent)
_MODULES = torch.nn.modules.module.__file__
_RECOMPUTING = (torch.utils.checkpoint.__file__, torch.autograd.function.__file__)
"""Files of torch that may run a function again in a backward."""

Frames = tuple[tuple[CodeType, int], ...]
"""The site of a call: (code, index of the instruction) of each function on the call stack,
innermost first."""


@dataclass(slots=True, kw_only=True)
class _ProbedSizes:
    """Sizes that a call at one site had in the probe, which runs the model with several numbers of
    tokens: those that were the number of tokens then (``equal``), and those that were not
    (``others``)."""

    equal: set[int] = field(default_factory=set)
    others: set[int] = field(default_factory=set)

    @property
    def follows(self) -> bool:
        """Whether the size was the number of tokens for two different numbers or more, so that it
        depends on them and does not equal them by chance."""
        return len(self.equal) > 1


class ReplacedCalls(TorchFunctionMode):
    """A torch function mode that replaces calls of torch functions which depend on other tokens. It
    is active while ``model`` is spread and one of its modules runs, until :meth:`remove`."""

    def __init__(self, model: torch.nn.Module, slot: ModelSlot) -> None:
        """Hook every module of the model that calls torch functions itself and is not compiled, so
        that the mode is active while it runs. ``slot`` has the current placement."""
        super().__init__()
        self._slot, self._model = slot, model
        _remove_older(model)
        _replacing[model] = self
        # Sizes that were seen in the probe, by the site of the call and the number of the component
        # of its index (0 for calls without an index).
        self._sites: dict[tuple[Frames, int], _ProbedSizes] = {}
        # The ids of the model's own tensors, listed once in each call of its outermost module; None
        # where they are not listed yet.
        self._table_ids: set[int] | None = None
        self._thread_state = threading.local()
        self._module_ids = set(map(id, model.modules()))
        self._has_checkpoints = False  # whether its author has parts of it computed again
        self._hooks = ExitStack()
        for module in modules_run_as_written(model):
            if _calls_functions(module):
                self._hooks.callback(hook_before(module, self._enter, named=False, first=True))
                self._hooks.callback(hook_after(module, self._leave, always=True))

    def __deepcopy__(self, memo: Any) -> ReplacedCalls:
        """Returns this object itself: forwards of a copied model run unchanged."""
        return self

    def remove(self) -> None:
        """Restore the forwards of the model's modules."""
        self._hooks.close()

    def run(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """``function(*args, **named)``, the forward of a module within a checkpoint, with calls
        replaced; in the recompute too. A forward of another model's module runs unchanged."""
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.nn.Module) and id(owner) not in self._module_ids:
            return function(*args, **named)
        self._enter()
        try:
            return function(*args, **named)
        finally:
            self._leave()

    def _enter(self, *given: Any) -> None:
        """The hook before a module: activates the mode where the model is spread and the mode is
        not active yet."""
        # Torch's stack is asked, not the list of this class: a recompute in a backward runs modules
        # without the modes of their forward.
        spread = self._slot.held is not None
        if spread and not self._has_checkpoints and given and in_checkpoint(given[-1]):
            self._hook_backwards()
        enters = spread and self not in _get_current_function_mode_stack()
        self._activations().append(enters)
        if enters:
            self._table_ids = None
            self.__enter__()

    def _hook_backwards(self) -> None:
        """Hook the backward of the results of all modules, as some are computed again by the
        model's author: a loss may be made of states that a user's hook kept, and not of the model's
        results."""
        self._has_checkpoints = True

        def after(_: Any, args: Any, out: Any) -> None:
            """The hook after each module."""
            if self._slot.held is not None and not torch.compiler.is_compiling():
                self._slot.hook_backward(tensors_among(out), self._slot.held)

        for module in modules_run_as_written(self._model):
            self._hooks.callback(hook_after(module, after))

    def _leave(self, *_: Any) -> None:
        """The hook after a module, also one that raised: deactivates the mode where the hook before
        it activated it."""
        if self._activations().pop():
            self.__exit__(None, None, None)

    def _activations(self) -> list[bool]:
        """This thread's list, to be changed by the hooks: for each module that is running now,
        outermost first, whether its hook has activated the mode."""
        if not hasattr(self._thread_state, "activations"):
            self._thread_state.activations = []
        return self._thread_state.activations  # type: ignore[no-any-return]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the replacement of ``func`` where there is one, else ``func`` itself. Results of
        ``arange`` and of cuts of tables that count tokens are replaced by those of this rank."""
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
            return self._own_rows(out, args[0], args[1])
        return out

    def _own_rows(self, out: torch.Tensor, table: torch.Tensor, index: Any) -> torch.Tensor:
        """The rows at the places of this rank's tokens, where ``out`` is ``table[index]``, a cut of
        a model's tensor to as many first rows as there are tokens; else ``out``."""
        cuts = cuts_of(index, table.dim())
        if not cuts or not self._is_held(table):
            return out
        token_cuts = [cut for cut in cuts if self._is_token_count(out.shape[cut.made], part=cut.at)]
        if len(token_cuts) != 1:
            return out
        self._require_rows(table.shape[token_cuts[0].dim])
        return rows_of(table, index, **token_cuts[0]._asdict(), handle=self._slot.handle)

    def _require_rows(self, rows: int) -> None:
        """Raise ModelError, on all ranks, where a table of places has fewer ``rows`` than the
        longest document of the batch has tokens, as one that grows with the tokens it is asked for
        has on each rank."""
        now = self._slot.now
        longest = 0 if isinstance(now, StandIn) else max(now.tokens.lengths)
        if rows < longest:
            raise ModelError(
                f"table of places in {_site_text(_site())}",
                got=f"{rows} rows",
                wanted=f"{longest}, as many as the longest document has tokens",
                hint="make the table for the longest rows at first: it may not grow while the "
                "model is spread, as no rank has all tokens",
            )

    def _is_held(self, table: torch.Tensor) -> bool:
        """Whether ``table`` is a parameter, buffer or attribute of one of the model's modules."""
        if self._table_ids is None:
            self._table_ids = set(map(id, _tables(self._model)))
        return id(table) in self._table_ids

    def _own_positions(self, out: torch.Tensor) -> torch.Tensor:
        """The places of this rank's tokens, where ``out`` [n] is an arange that counts tokens; else
        ``out``."""
        return positions(out, self._slot.handle) if self._is_token_count(len(out)) else out

    def _is_token_count(self, size: int, part: int = 0) -> bool:
        """Whether ``size``, that of the result of the current call or of component ``part`` of its
        index, stands for the number of local tokens and does not just equal it by chance.

        During the probe equality decides, and the size is recorded for the site of the call. Later
        the record decides: the size of a site that followed the number of tokens in the probe
        stands for it. Raises ModelError where there is no record, or it allows both."""
        now = self._slot.now
        tokens, frames = len(now.positions()), _site()
        probed = self._sites.get((frames, part))
        if isinstance(now, StandIn):
            probed = self._sites.setdefault((frames, part), _ProbedSizes())
            (probed.equal if size == tokens else probed.others).add(size)
            return size == tokens
        # A size that the site had in the probe for another number of tokens is a constant of the
        # model, which equals the number of tokens by chance now.
        if size != tokens or (probed is not None and not probed.follows and size in probed.others):
            return False
        if probed is None or not probed.follows or size in probed.others:
            raise ModelError(
                f"places counted in {_site_text(frames)}",
                got=f"{size}, which may be tokens or not",
                wanted="places that follow the tokens",
                hint="give the model its places, or another number of tokens",
            )
        return True


def compiled_within(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that the model's author compiled, by ``torch.compile`` or ``module.compile``."""
    return [
        module
        for module in model.modules()
        if isinstance(module, torch._dynamo.OptimizedModule)  # noqa: SLF001
        or module._compiled_call_impl is not None  # noqa: SLF001
    ]


def modules_run_as_written(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a model, itself among them, but those that its author compiled and what is
    within these: hooks would break their graphs."""
    compiled = {module for part in compiled_within(model) for module in part.modules()}
    return [module for module in model.modules() if module not in compiled]


_replacing: WeakKeyDictionary[torch.nn.Module, ReplacedCalls] = WeakKeyDictionary()
"""The active replacement of each model."""


def _remove_older(model: torch.nn.Module) -> None:
    """Remove earlier replacements on a model or one of its modules, as calls are to be replaced
    once."""
    for module in model.modules():
        older = _replacing.pop(module, None)
        if older is not None:
            older.remove()


def _calls_functions(module: torch.nn.Module) -> bool:
    """Whether the forward of a module may call a replaced function: where its class is not one of
    torch's own, where it has submodules, and where it is a loss."""
    is_authors = not type(module).__module__.startswith("torch.nn.modules")
    return is_authors or any(True for _ in module.children()) or isinstance(module, _LOSSES)


_LOSSES = (torch.nn.CrossEntropyLoss,)


def _tables(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield the parameters, buffers and other tensor attributes of all modules of a model."""
    for module in model.modules():
        yield from module._parameters.values()  # type: ignore[misc]  # noqa: SLF001
        yield from module._buffers.values()  # type: ignore[misc]  # noqa: SLF001
        yield from (x for x in vars(module).values() if isinstance(x, torch.Tensor))


def _begins_at_zero(*args: Any, **named: Any) -> bool:
    """Whether ``torch.arange(*args, **named)`` counts 0, 1, 2, ..."""
    first_is_start = len(args) > 1 or (args and "end" in named)  # else it is the end
    start = named.get("start", args[0] if first_is_start else 0)
    step = named.get("step", args[2] if len(args) > 2 else 1)
    return bool(start == 0 and step == 1)


def _site() -> Frames:
    """The site of the current call: the functions on the call stack, innermost first, up to the
    forward of the module that makes the call. Torch's own functions are left out, so that the site
    is the same however the module was called. Raises ModelError where a checkpoint or an autograd
    function runs a function that is no module: calls in its recompute would not be replaced."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    found = list[tuple[CodeType, int]]()
    while frame is not None and (file := frame.f_code.co_filename) != _MODULES:
        if frame.f_code is ReplacedCalls.run.__code__:
            break
        if file in _RECOMPUTING:
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
    """The innermost function of a site in words, with its file and first line."""
    if not frames:
        return "a function of torch"
    code, _ = frames[0]
    return f"{code.co_qualname}, {code.co_filename}:{code.co_firstlineno}"
