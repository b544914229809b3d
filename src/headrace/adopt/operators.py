"""Registered operators that adopted models call in the place of torch's, eager and compiled alike.

Shape legend: t tokens of this rank, N query and G key-value heads, D features of a head.

A graph knows a model by one integer, its *handle*; the placement, which tells where the tokens are,
is looked up by it when an operator runs. So one graph serves all lengths, group sizes and
exchanges: results are of the shape of the local queries, and what the backward keeps has a size
that is known only then.

    attend(q, k, v, handle, causal, window, joins, softcap, sinks) -> out, kept, lse, serial
    positions(like, handle)     [s] int64   the places of the local tokens in their rows
    targets(like, labels, handle)  []       tokens of the step that have a loss

``serial`` is the number of the placement: a backward finds the one of its forward, however
many batches came in between.

``kept`` is what an exchange brought, so that no traffic is repeated. Where nothing was exchanged it
is a copy of the local q, k and v if the operator ``joins`` them. Else it is empty, and the backward
is given q, k and v: a recompute makes them again, and keeps the output and its log-sum-exp alone.
A graph that serves several ranks has to join them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from headrace.adopt.placement import Placement
from headrace.errors import ModelError
from headrace.methods.switched import SwitchedCore
from headrace.ops.core import Core, Heads, sink_gradient, sunk, wide_dtype
from headrace.ops.loss import IGNORED

__all__ = [
    "ModelSlot",
    "StandIn",
    "attend",
    "joins_inputs",
    "positions",
    "targets",
]


_stand_in_serials = count(-1, -1)


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class StandIn:
    """Takes the place of a placement while a model is probed in one process, and replaces attention
    by a function of each token alone. ``places`` [s] are the places of the tokens in their rows,
    ``targets`` the number of tokens with a loss; ``calls`` counts the calls of attention.
    ``serial`` is its unique number, below 0, by which a backward finds it."""

    places: np.ndarray
    targets: int
    calls: int = 0
    serial: int = field(default_factory=lambda: next(_stand_in_serials))

    def positions(self) -> np.ndarray:
        """[s] int64: the place of each token in its row."""
        return self.places

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stand-in for attention: the values v [t, G, D] of each token, weighted by the similarity
        of its own q [t, N, D] and k [t, G, D] and by that of both to a fixed vector, so that errors
        in any of the three show; the first alone is the same at all places, as rotary embeddings
        turn q and k alike. Returns (out [t, N, D], nothing kept, no log-sum-exp, its serial
        number), as the operator :func:`headrace.adopt.operators.attend` does."""
        self.calls += 1
        kv_heads = _kv_head_of_each(q, k)
        similarity, direction = _weights(q, k[:, kv_heads])
        out = v[:, kv_heads] * (1 + similarity + direction)
        return (
            out.contiguous(),
            q.new_empty(0),
            q.new_empty(0, dtype=wide_dtype(q.dtype)),
            torch.tensor([self.serial]),
        )

    def backward(
        self, grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q [t, N, D], k and v [t, G, D] of :meth:`attend`, from ``grad``
        [t, N, D] of its output; like it, of each token alone."""
        kv_heads = _kv_head_of_each(q, k)
        keys, values = k[:, kv_heads], v[:, kv_heads]
        similarity, direction = _weights(q, keys)
        dweight = (grad * values).sum(-1, keepdim=True)  # [t, N, 1]
        # By the sums under both tanh, [t, N, 1].
        dsimilar = dweight * (1 - similarity.square())
        ddirection = dweight * (1 - direction.square()) * _fixed(q)
        dq, dkeys = dsimilar * keys + ddirection, dsimilar * q + ddirection
        dk = torch.zeros_like(k).index_add_(1, kv_heads, dkeys)
        weight = 1 + similarity + direction
        dv = torch.zeros_like(v).index_add_(1, kv_heads, grad * weight)
        return dq, dk, dv


def _weights(q: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers within -1 and 1 for each token and head [t, N, 1] of q and ``keys`` [t, N, D]: by
    their similarity, and by that of their sum to a fixed vector."""
    similarity = torch.tanh((q * keys).sum(-1, keepdim=True))
    return similarity, torch.tanh(((q + keys) * _fixed(q)).sum(-1, keepdim=True))


def _fixed(q: torch.Tensor) -> torch.Tensor:
    """A vector [D] that no rotation of q [t, N, D] leaves as it is, of length about 0.7."""
    features = q.shape[-1]
    turns = torch.arange(features, device=q.device, dtype=torch.float32).cos()
    return (turns / features**0.5).to(q.dtype)


def _kv_head_of_each(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The key-value head of each query head [N], for q [t, N, D] and k [t, G, D]: neighbouring
    query heads share one."""
    return torch.arange(q.shape[1], device=q.device) * k.shape[1] // q.shape[1]


# A registered operator takes tensors and numbers only, so it looks up its objects by number.
_slots: WeakValueDictionary[int, ModelSlot] = WeakValueDictionary()
_placements: WeakValueDictionary[int, Placement | StandIn] = WeakValueDictionary()

_handles = count(1)

_RECENT = 32
"""The last placements of one model that are kept for a backward to come: compiled graphs keep none,
while those of eager forwards keep theirs."""


class ModelSlot:
    """Holds the placement that one adopted model works on now; operators find the slot by its
    number ``handle``.

    While there is a placement in the slot, the model is spread, else it is the user's plain model.
    When that changes, each function in ``switches`` is called with whether the model is spread now.
    """

    def __init__(self) -> None:
        """An empty slot: the model is plain."""
        self.handle = next(_handles)
        self.switches: list[Callable[[bool], None]] = []
        self._now: Placement | StandIn | None = None
        self._recent: deque[Placement] = deque(maxlen=_RECENT)
        # Whether a backward runs that began while the model was plain. It spreads the model, and
        # must make it plain again at its end.
        self._in_plain_backward = False
        _slots[self.handle] = self

    @property
    def now(self) -> Placement | StandIn:
        """The current placement. Raises ModelError where there is none."""
        if self._now is None:
            raise ModelError(
                "attention of a model with sequence parallelism",
                got="no batch",
                wanted="one that was sharded",
                hint="call shard(batch) and give what it returns",
            )
        return self._now

    @property
    def held(self) -> Placement | StandIn | None:
        """The current placement; None where the model is not spread."""
        return self._now

    def take(self, now: Placement | StandIn | None) -> None:
        """Use another placement from now on; None makes the model plain again."""
        changes = (now is None) != (self._now is None)
        self._now = now
        if now is not None:
            _placements[now.serial] = now
        if isinstance(now, Placement):
            self._recent.append(now)
        if changes:  # turned off in reverse order, as one may have changed what another set
            for switch in self.switches if now is not None else reversed(self.switches):
                switch(now is not None)

    def kept(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` as a checkpoint is to run it: on the placement of now, when it is computed
        again, too, whatever is in the slot then."""
        held = self._now

        def run(*args: Any, **named: Any) -> Any:
            before = self._now
            if before is held:
                return function(*args, **named)
            self.take(held)
            try:
                return function(*args, **named)
            finally:
                self.take(before)

        return run

    def hook_backward(
        self, values: Iterable[Tensor], placement: Placement | StandIn | None
    ) -> None:
        """Have the backward of ``values``, results of a forward on this placement, put it in the
        slot when it reaches them, until it ends; so checkpoints recompute on the right batch,
        whatever was run since."""
        begin = partial(self._begin_backward, placement)
        for value in values:
            if value.grad_fn is not None:
                value.grad_fn.register_prehook(begin)

    def _begin_backward(self, placement: Placement | StandIn | None, _: Any) -> None:
        """Put the placement in the slot; where the model was plain, it is so again after the
        backward."""
        if not self._in_plain_backward and self._now is None:
            self._in_plain_backward = True
            # Autograd calls this once the whole backward has ended.
            queue = torch.autograd.Variable._execution_engine.queue_callback  # noqa: SLF001
            queue(self.end_backward)
        if self._now is not placement:
            self.take(placement)

    def end_backward(self) -> None:
        """Make the model plain again, after a backward that began while it was plain, or failed."""
        if self._in_plain_backward:
            self._in_plain_backward = False
            self.take(None)

    def __deepcopy__(self, memo: Any) -> ModelSlot:
        """The same slot: hooks in copies of a model leave the copies alone."""
        return self


def _current_in(handle: int) -> Placement | StandIn:
    """The placement in the slot with this handle. Raises ModelError where the slot is gone, or
    empty."""
    slot = _slots.get(handle)
    if slot is None:
        raise ModelError(
            "attention of a model with sequence parallelism",
            got="nobody who shards its batches",
            wanted="what compile() returned",
            hint="keep it as long as the model is used",
        )
    return slot.now


def _heads(q: Tensor, k: Tensor, softcap: float) -> Heads:
    """The numbers of heads of q [t, N, D] and k [t, G, D]."""
    return Heads(queries=q.shape[1], keys=k.shape[1], softcap=softcap)


_SELECTIVE = tuple(type(context) for context in create_selective_checkpoint_contexts([]))
"""Modes of a checkpoint that keeps the results of some operators; there is no public name."""


def joins_inputs() -> bool:
    """The argument ``joins`` for a call of :func:`attend` at this point: whether it keeps a copy of
    q, k and v for its backward where no exchange has brought them.

    An eager call keeps one, except within a selective checkpoint, which computes q, k and v again.
    A call that is traced keeps one where there are several ranks: the graph serves all exchanges,
    and some of them keep what they have brought.
    """
    if torch.compiler.is_compiling() or _is_tracing():
        return dist.is_initialized() and dist.get_world_size() > 1
    return not any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack())


def _is_tracing() -> bool:
    """Whether the calling code runs on fake tensors with symbolic sizes, as a compiler runs it to
    trace a graph. A rehearsal runs on fake tensors as well, but their sizes are plain numbers: its
    fake tensor mode has no shape environment, which is what holds the symbols."""
    fake_mode = detect_fake_mode()
    return fake_mode is not None and fake_mode.shape_env is not None


@torch.library.custom_op("headrace::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    causal: bool,
    window: int,
    joins: bool,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v over all tokens of the group that a query sees.

        q          [t, N, D]   rows of the local tokens, in the order of the placement
        k, v       [t, G, D]
        handle     the slot that holds the placement
        window     w > 0: a sliding window, in which a query sees w tokens on one side, itself among
                   them (on each side, where not causal); 0: all; -n: those of its chunk, where each
                   document is cut into chunks of n tokens
        joins      keep a copy of q, k and v for the backward where no exchange has brought them
        softcap    c > 0: scores are c tanh(score / c); 0: they stay as they are
        sinks      [N] one more score of each head in the softmax's denominator, without a value
        returns    out [t, N, D]
                   kept, flat: what the backward needs besides, or nothing (see the module)
                   the log-sum-exp of the scores, flat
                   the serial number of the placement [1]

    Raises ModelError where the tokens are others than those of the placement. Collective.
    """
    now = _current_in(handle)
    if isinstance(now, StandIn):
        return now.attend(q, k, v)
    if q.shape[0] != now.tokens.sizes[now.member] or k.shape[0] != q.shape[0]:
        raise ModelError(
            "attention",
            got=f"{q.shape[0]} queries and {k.shape[0]} keys of this rank",
            wanted=f"{now.tokens.sizes[now.member]} of both, as were sharded",
            hint="the model must be given all inputs that shard() returned, and no cache",
        )
    core = now.core(_heads(q, k, softcap), causal, window, q.device)
    qkv = torch.cat([q, k, v], dim=1)
    if isinstance(core, SwitchedCore):
        out, saved = core.forward(qkv, sinks)
    else:
        out, saved = core.forward(qkv)
        if sinks is not None:
            out, saved = sunk(out, saved, sinks)
    # What a switched core saves holds q, k and v already, as they were exchanged.
    keeps_local = joins and not isinstance(core, SwitchedCore)
    # The last of what a core saves is the log-sum-exp.
    *parts, lse = (qkv, *saved) if keeps_local else saved
    kept = torch.cat([part.reshape(-1) for part in parts]) if parts else q.new_empty(0)
    return out.contiguous(), kept, lse.reshape(-1).clone(), torch.tensor([now.serial])


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    causal: bool,
    window: int,
    joins: bool,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty results of ``attend``, for tracing: out [t, N, D], kept, lse and serial."""
    kept_size, lse_size = _kept_sizes(
        _heads(q, k, softcap), q, handle, causal=causal, window=window, joins=joins
    )
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(kept_size),
        q.new_empty(lse_size, dtype=wide_dtype(q.dtype)),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


def _kept_sizes(
    heads: Heads, q: Tensor, handle: int, *, causal: bool, window: int, joins: bool
) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """(elements of ``kept``, elements of the log-sum-exp) that :func:`attend` returns for
    q [t, N, D]. Where a graph is traced they are symbols, as it serves all placements; else, as in
    a rehearsal on fake tensors, numbers for the current placement."""
    context = torch.library.get_ctx()
    if context._shape_env is not None:  # noqa: SLF001
        return context.new_dynamic_size() if joins else 0, context.new_dynamic_size()
    now = _current_in(handle)
    core = None if isinstance(now, StandIn) else now.core(heads, causal, window, q.device)
    features = q.shape[2]
    if not isinstance(core, SwitchedCore):
        kept_heads = heads.queries + 2 * heads.keys if joins else 0  # q, k and v
        return len(q) * kept_heads * features, heads.queries * len(q)
    inner = core.inner
    kept_heads = 2 * inner.queries + 2 * inner.keys  # switched q, k and v, and the result
    return core.rows * kept_heads * features, inner.queries * core.rows


@torch.library.custom_op("headrace::attend_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    inputs: list[Tensor],
    out: Tensor,
    kept: Tensor,
    lse: Tensor,
    serial: Tensor,
    keys: int,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q [t, N, D], k and v [t, G, D] and of sinks [N] (empty without sinks), from
    ``grad`` [t, N, D] of ``out``. ``kept``, ``lse`` and ``serial`` are results of the forward;
    ``inputs`` are q, k and v where ``kept`` is empty, ``keys`` is G. Raises ModelError where the
    placement of the forward is gone. Collective."""
    now = _placements.get(int(serial))
    if now is None:
        raise ModelError(
            "backward", got="a batch that is gone", wanted="one whose shard is still held"
        )
    if isinstance(now, StandIn):  # it ignores sinks
        dsinks = grad.new_empty(0) if sinks is None else torch.zeros_like(sinks)
        return *now.backward(grad, *inputs), dsinks
    heads = Heads(queries=grad.shape[1], keys=keys, softcap=softcap)
    core = now.core(heads, causal, window, grad.device)
    features = grad.shape[2]
    if not isinstance(core, SwitchedCore) and not kept.numel():
        kept = torch.cat(inputs, dim=1)
    qkv, saved = _unpack(core, heads, kept, lse, grad.shape[0], features)
    grad, dsinks = grad.contiguous(), grad.new_empty(0)
    if isinstance(core, SwitchedCore):
        grads = core.backward(grad, qkv, out, saved, sinks)
        dsinks = dsinks if grads.sinks is None else grads.sinks
    else:
        grads = core.backward(grad, qkv, out, saved)
        dsinks = dsinks if sinks is None else sink_gradient(grad, out, saved[-1], sinks)
    # Results of an operator must share no memory, as views of one joint gradient would.
    if grads.joint is None:
        return grads.q.contiguous(), grads.k.contiguous(), grads.v.contiguous(), dsinks
    return (
        grads.q.clone(memory_format=torch.contiguous_format),
        grads.k.clone(memory_format=torch.contiguous_format),
        grads.v.clone(memory_format=torch.contiguous_format),
        dsinks,
    )


def _unpack(
    core: Core, heads: Heads, kept: Tensor, lse: Tensor, rows: int, features: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(qkv, what the core saved), as the backward of ``core`` takes them, from the flat tensors
    ``kept`` and ``lse`` of a forward.

    Of most cores ``kept`` is q, k and v of this rank's ``rows`` tokens, [rows, N + 2 G, D], with D
    ``features``. Of a switched core it is q, k and v of all T tokens of its block and this rank's
    part of the heads, [T, n + 2 g, D], followed by their result [T, n, D].
    """
    if not isinstance(core, SwitchedCore):
        qkv_heads = heads.queries + 2 * heads.keys
        return kept.view(rows, qkv_heads, features), (lse.view(heads.queries, rows),)
    inner, total = core.inner, core.rows
    qkv_heads = inner.queries + 2 * inner.keys
    qkv, out = kept.split([total * qkv_heads * features, total * inner.queries * features])
    # A switched core takes q, k and v from what it saved, and does not read its argument ``qkv``.
    return kept, (
        qkv.view(total, qkv_heads, features),
        out.view(total, inner.queries, features),
        lse.view(inner.queries, total),
    )


@_attend_backward.register_fake
def _(
    grad: Tensor,
    inputs: list[Tensor],
    out: Tensor,
    kept: Tensor,
    lse: Tensor,
    serial: Tensor,
    keys: int,
    causal: bool,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Empty results of the backward, for tracing: gradients of q, k, v and sinks."""
    tokens, heads, features = grad.shape
    return (
        grad.new_empty(tokens, heads, features),
        grad.new_empty(tokens, keys, features),
        grad.new_empty(tokens, keys, features),
        grad.new_empty(0 if sinks is None else heads, dtype=lse.dtype),
    )


def _refuse_second(ctx: Any, *_: object) -> NoReturn:
    """Raise ModelError for the gradient of a gradient, which kernels of attention do not have."""
    raise ModelError(
        "attention of a spread model",
        got="a gradient of its gradient (create_graph=True)",
        wanted="first gradients",
        hint="a penalty on gradients: call the plain model for it, outside of the shard",
    )


_attend_backward.register_autograd(_refuse_second)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save in ``ctx`` what :func:`_adjoint` needs of a call of ``attend``: its results, its sinks
    and, where ``kept`` does not hold them, q, k and v."""
    q, k, v, _handle, causal, window, _joins, softcap, sinks = inputs
    _out, kept, _lse, serial = output
    ctx.save_for_backward(*output, sinks, *(() if _holds_qkv(kept) else (q, k, v)))
    # The arguments of _attend_backward between ``serial`` and ``sinks``; the first is G.
    ctx.rest = k.shape[1], causal, window, softcap
    if not torch.compiler.is_compiling() and not isinstance(serial, FakeTensor):
        # Placements are held weakly: this one must live until the backward looks it up by its
        # serial number, which has no value while a graph is traced.
        ctx.placement = _placements.get(int(serial))
    ctx.set_materialize_grads(False)


def _holds_qkv(kept: Tensor) -> bool:
    """Whether the result ``kept`` of ``attend`` holds q, k and v, as it does unless it is empty. In
    a graph its size is a symbol where it holds them, and 0 where it does not."""
    count = kept.numel()
    return not isinstance(count, int) or count > 0


def _adjoint(ctx: Any, grad: Tensor | None, *_: object) -> tuple[Tensor | None, ...]:
    """The backward of ``attend``: gradients of its nine arguments, given ``grad`` [t, N, D] of its
    first result; tensors for q, k, v and sinks, None for the rest."""
    if grad is None:  # the result is not used
        return (None,) * 9
    out, kept, lse, serial, sinks, *qkv = ctx.saved_tensors
    *grads, dsinks = _attend_backward(grad, qkv, out, kept, lse, serial, *ctx.rest, sinks)
    sinks_grad = None if sinks is None else dsinks.to(sinks.dtype)
    return (*grads, None, None, None, None, None, sinks_grad)


attend.register_autograd(_adjoint, setup_context=_save_for_backward)


@torch.library.custom_op("headrace::positions", mutates_args=())
def positions(like: Tensor, handle: int) -> Tensor:
    """The places [s] of the local tokens in their rows. ``like`` [s] is the model's own count
    0, 1, 2, ..., which they replace; it gives their dtype and device. Raises ModelError where it
    counts another number of tokens."""
    now = _current_in(handle)
    found = torch.from_numpy(now.positions()).to(like)
    if len(found) != len(like):
        raise ModelError(
            "positions that the model makes",
            got=f"{len(like)}",
            wanted=f"{len(found)}",
            hint="give it position_ids, or rows of the length that was sharded",
        )
    return found


@positions.register_fake
def _(like: Tensor, handle: int) -> Tensor:
    """An empty result of ``positions``, for tracing."""
    return torch.empty_like(like)


@torch.library.custom_op("headrace::targets", mutates_args=())
def targets(like: Tensor, labels: Tensor, handle: int) -> Tensor:
    """The number of tokens of the step that have a loss, at least 1, as a tensor [] in the dtype of
    ``like``; the placement is told how many of this rank's ``labels`` have one. Raises ModelError
    where a batch came without labels."""
    now = _current_in(handle)
    found = now.targets
    if found is None:
        raise ModelError(
            "loss of the model",
            got="a batch without labels",
            wanted="labels, or their number",
            hint="say which input they are (compile: label_name), or shard(batch, targets=...)",
        )
    if isinstance(now, Placement) and not labels.is_floating_point():
        now.counted.append((labels != IGNORED).sum())
    return like.new_tensor(float(max(1, found)))


@targets.register_fake
def _(like: Tensor, labels: Tensor, handle: int) -> Tensor:
    """An empty result of ``targets``, for tracing."""
    return like.new_empty(())
