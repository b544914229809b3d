"""How a user's model holds its weights, and what follows for plans and gradients.

replicated  every rank has all weights, alone or under DDP: groups run whatever they have, and
            gradients are added up once at the end of the step (plans are ``free``)
sharded     FSDP2 gathers weights from all ranks at every layer and scatters gradients over them:
            all ranks run as many micro-batches as any other (plans are ``lockstep``)

A user's hook on a parameter's gradient sees what one backward adds, of the samples that a rank or a
micro-batch has. The sum is that of one process only where the hook is linear (a mask, a factor).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from headrace.adopt.gradients import add_up, require_known_wrapper, reshard
from headrace.comm.collectives import agree, gather_bytes
from headrace.comm.mesh import Groups
from headrace.errors import ModelError
from headrace.spec.plan import Semantics

__all__ = [
    "AlikeWeights",
    "HeldWeights",
    "bytes_now",
    "require_linear_hooks",
    "share_weights",
    "state_bytes",
]

_OFTEN = 8
"""Batches before which weights are compared each time."""
_FEW, _ELEMENTS, _OF_EACH = 8, 4_096, 16
"""About so many parameters are compared, of each so many elements at most; and so many of all."""

_STATES = {"SGD": 0, "Adagrad": 1, "RMSprop": 1, "Adam": 2, "AdamW": 2, "RAdam": 2, "Adamax": 2}
"""How many tensors of a parameter's size optimizers keep for it, by the names of their classes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldWeights:
    """The weights of ``model``, which may be wrapped; ``inner`` is the user's own module. ``ranks``
    is the number of ranks of the world."""

    model: torch.nn.Module
    inner: torch.nn.Module
    ranks: int

    @classmethod
    def of(cls, model: torch.nn.Module, ranks: int) -> HeldWeights:
        """The weights of ``model``, wrapped or not, in a world of ``ranks`` ranks. Raises
        ModelError for a wrapper that is not known."""
        require_known_wrapper(model, static=True)
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        return cls(model=model, inner=inner, ranks=ranks)

    @property
    def sharded(self) -> bool:
        """Whether the weights are sharded by FSDP2."""
        return isinstance(self.model, FSDPModule)

    @property
    def computes_in(self) -> torch.dtype:
        """The type that the model computes in, as far as its weights and autocast tell; bfloat16
        where FSDP2 may cast single precision to it."""
        parameter = next(self.inner.parameters())
        device, dtype = parameter.device.type, parameter.dtype
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return torch.bfloat16 if self.sharded and dtype == torch.float32 else dtype

    @property
    def semantics(self) -> Semantics:
        """The kind of plan that this model can run: ``lockstep`` where FSDP2 shards it, else
        ``free``."""
        return "lockstep" if self.sharded else "free"

    def step(self) -> AbstractContextManager[Any]:
        """A context for the micro-batches of a step, in which DDP does not synchronize gradients:
        they are summed once, by :meth:`add_up`."""
        if isinstance(self.model, DistributedDataParallel):
            # A forward between steps that no backward followed would have the next one sum.
            self.model.reducer._reset_state()  # noqa: SLF001
            return self.model.no_sync()
        return nullcontext()

    def sum_shards(self) -> None:
        """Have FSDP2 sum the gradients of the backward that follows, as those of every micro-batch
        are to be, also where the loop has told it to put that off."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(True)

    def shard_again(self) -> None:
        """Have FSDP2 free weights that it has gathered (:func:`reshard`)."""
        reshard(self.model)

    def add_up(self, world: dist.ProcessGroup) -> None:
        """Sum gradients over all ranks of ``world`` in place, unless FSDP2 has done so.
        Collective."""
        if not self.sharded and self.ranks > 1:
            add_up(self.trained, world)

    @property
    def trained(self) -> list[torch.nn.Parameter]:
        """Parameters of the model that require gradients."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def norm(self) -> torch.Tensor:
        """The 2-norm [] of the gradient of all parameters together, the same on all ranks.
        Collective where gradients are sharded."""
        gradients = [p.grad for p in self.trained if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def scale_down(self, norm: torch.Tensor, most: float) -> None:
        """Clip the gradient of all parameters, whose norm is ``norm`` [], in place to a norm of at
        most ``most``."""
        torch.nn.utils.clip_grads_with_norm_(self.trained, most, norm)


def bytes_now(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes on this rank of weights, buffers, existing gradients and optimizer state."""
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    states = [
        value
        for state_of_parameter in optimizer.state.values()
        for value in state_of_parameter.values()
        if torch.is_tensor(value)
    ]
    return sum(_local(x).nbytes for x in (*parameters, *model.buffers(), *grads, *states))


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that this rank holds throughout a step: weights, buffers, gradients and optimizer
    state. Gradients that do not exist yet are counted as such, and where there is no state yet, an
    estimate of what the optimizer's first step will add."""
    trained = [p for p in model.parameters() if p.requires_grad]
    missing_gradients = sum(_local(p).nbytes for p in trained if p.grad is None)
    held = bytes_now(model, optimizer) + missing_gradients
    if optimizer.state:
        return held
    tensors_per_parameter = _STATES.get(type(optimizer).__name__, 2)
    if any(group.get("momentum") for group in optimizer.param_groups):
        tensors_per_parameter += 1
    return held + tensors_per_parameter * sum(_local(p).nbytes for p in trained)


def _local(x: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor itself."""
    return x.to_local() if isinstance(x, DTensor) else x


_SCALES = (1e-6, 1e-3, 1.0, 1e3)
"""Sizes of gradients that hooks are tried on: a clamp shows above its limit alone."""


def require_linear_hooks(model: torch.nn.Module, seen: dict[int, Any]) -> None:
    """Raise ModelError for a hook on the gradient of a parameter that is not linear, or is called
    once the gradient is accumulated, as an optimizer's step within the backward is. ``seen`` has
    the hooks that were looked at by their ids, and gets those that are new. Under FSDP2 any hook is
    refused."""
    sharded = isinstance(model, FSDPModule)
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        hooks = list((parameter._backward_hooks or {}).values())  # noqa: SLF001
        if sharded and (after or hooks):
            _refuse_hook(name, "one that FSDP2 never calls")
        if after:
            _refuse_hook(name, "one that is called once its gradient is accumulated")
        for hook in hooks:
            if id(hook) not in seen and not _is_linear(hook, parameter):
                _refuse_hook(name, "one that is no linear function of its gradient")
            seen[id(hook)] = hook  # kept, so that no other hook gets its id


def _refuse_hook(name: str, got: str) -> None:
    """Raise ModelError for a hook on the gradient of the parameter ``name``."""
    raise ModelError(
        f"hook on parameter {name}",
        got=got,
        wanted="none, or a linear one, such as a mask or a factor",
        hint="it would see the gradient of the samples of one rank or micro-batch, which plans "
        "choose: change gradients once they are added up, after run.add_up or in a loop of "
        "hr.attach(update=False)",
    )


def _is_linear(hook: Callable[[torch.Tensor], torch.Tensor | None], like: torch.Tensor) -> bool:
    """Whether a hook of a gradient of the shape of ``like`` adds up: whether what it makes of the
    sum of two random gradients is the sum of what it makes of each."""
    if not like.numel():
        return True
    generator = torch.Generator(like.device).manual_seed(0)
    first, second = (torch.empty_like(like).detach() for _ in range(2))
    with torch.no_grad():
        for scale in _SCALES:
            first.normal_(std=scale, generator=generator)
            second.normal_(std=scale, generator=generator)
            one, other, both = (_hooked(hook, x) for x in (first, second, first + second))
            tolerance = 4 * torch.finfo(like.dtype).eps ** 0.75 * float(both.abs().max())
            if not float((both - one - other).abs().max()) <= tolerance:  # NaN is not linear
                return False
    return True


def _hooked(
    hook: Callable[[torch.Tensor], torch.Tensor | None], gradient: torch.Tensor
) -> torch.Tensor:
    """What a hook makes of a gradient: the gradient itself where the hook returns None."""
    result = hook(gradient.clone())
    return gradient if result is None else result


def _require_alike_embeddings(model: torch.nn.Module) -> None:
    """Raise ModelError for embeddings whose gradients are sparse, which no rank can add to those of
    others, or scaled by how often a rank has a token, and for those whose forward changes the rows
    that it looks up."""
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            continue
        if module.sparse and module.weight.requires_grad:
            what = "sparse=True", "sparse=False", "sparse gradients are not summed over ranks"
        elif module.scale_grad_by_freq and module.weight.requires_grad:
            what = "scale_grad_by_freq", "False", "each rank would count its own tokens"
        elif module.max_norm is not None:
            what = "max_norm", "none", "each rank would scale the rows of its own tokens"
        else:
            continue
        got, wanted, hint = what
        raise ModelError(f"embedding {name}", got=got, wanted=wanted, hint=hint)


class AlikeWeights:
    """Sees to it that all ranks have the weights of rank 0 before the first batch of a ``model``,
    and compares some of them before later ones: they differ where gradients were not summed, and
    where one rank alone has loaded others."""

    def __init__(self, model: torch.nn.Module) -> None:
        """No batch was there yet."""
        self._model, self._batches = model, 0

    def require(self, groups: Groups, say: Callable[[str], object]) -> None:
        """Before a batch: give ranks the weights of rank 0 at first, by :func:`share_weights`;
        raise ModelError on all ranks where they differ later. The first batches are looked at, and
        later those whose number is a power of two. Collective."""
        first, due = not self._batches, self._is_due()
        if first:
            share_weights(HeldWeights.of(self._model, groups.ranks), groups, say)
        elif groups.ranks > 1 and due:
            checksums = json.dumps([_checksum(x) for x in _few(self._trained())]).encode()
            by_rank = gather_bytes(checksums, groups.world)
            if any(of_rank != by_rank[0] for of_rank in by_rank):
                raise ModelError(
                    "weights of the model",
                    got="others than on rank 0",
                    wanted="the same on all ranks",
                    hint="run.add_up(loss) sums the gradients of all ranks: call it after the last "
                    "backward of a step, before the optimizer's step",
                )

    def text(self) -> str:
        """Before a batch: a text of some weights and buffers, to be compared between ranks, of the
        batches that :meth:`require` looks at; empty for others. Waits for the device."""
        if not self._is_due():
            return ""
        kept = self._kept()  # first: a state dict frees what FSDP2 has gathered
        return str([_checksum(x) for of in (self._trained(), kept) for x in _few(of)])

    def _is_due(self) -> bool:
        """Count a batch; returns whether weights are compared before it."""
        number, self._batches = self._batches, self._batches + 1
        return number <= _OFTEN or not number & (number - 1)

    def _trained(self) -> list[torch.Tensor]:
        """The parameters that are trained, and that every rank has whole."""
        return [
            p.detach()
            for p in self._model.parameters()
            if p.requires_grad and not isinstance(p, (DTensor, FakeTensor))
        ]

    def _kept(self) -> list[torch.Tensor]:
        """What else is saved with the model and every rank has whole: parameters that are not
        trained, and buffers, but counts of one number, which each rank's forwards may change."""
        return [
            x.detach()
            for x in self._model.state_dict(keep_vars=True).values()
            if torch.is_tensor(x)
            and not x.requires_grad
            and (isinstance(x, torch.nn.Parameter) or x.numel() > 1)
            and not (x.is_meta or isinstance(x, (DTensor, FakeTensor)))
        ]


def _few(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The first elements of some of the tensors, and a few of every one, joined."""
    every = max(1, len(tensors) // _FEW)
    flat = [x.reshape(-1) for x in tensors if x.numel()]
    spread = defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]](list)
    for x in flat:
        spread[x.dtype, x.device].append(x[:: -(-len(x) // _OF_EACH)])
    return [*(x[:_ELEMENTS] for x in flat[::every]), *map(torch.cat, spread.values())]


def share_weights(held: HeldWeights, groups: Groups, say: Callable[[str], object]) -> None:
    """Give all ranks the parameters and buffers of rank 0 where any rank has others, as DDP does,
    and ``say`` so. Nothing is done for weights that FSDP2 shards, and for fake ones. Collective;
    raises PlanMismatch where shapes or types differ, and ModelError for embeddings that several
    ranks cannot train alike."""
    if groups.ranks > 1:
        _require_alike_embeddings(held.inner)
    faked = any(isinstance(p, FakeTensor) for p in held.inner.parameters())
    if held.sharded or faked or groups.ranks == 1:
        return
    tensors = [x for x in held.inner.state_dict(keep_vars=True).values() if torch.is_tensor(x)]
    shapes = [[list(x.shape), str(x.dtype)] for x in tensors]
    agree("shapes of the model's weights", json.dumps(shapes), groups.world)
    checksums = json.dumps([_checksum(x.detach()) for x in tensors])
    checksums_by_rank = gather_bytes(checksums.encode(), groups.world)
    differing_ranks = [
        rank for rank, of_rank in enumerate(checksums_by_rank) if of_rank != checksums_by_rank[0]
    ]
    if not differing_ranks:
        return
    say(
        f"weights of rank {differing_ranks[0]} were not those of rank 0: "
        "all ranks begin with those of rank 0 (call torch.manual_seed before the model is made)"
    )
    with torch.no_grad():
        for x in tensors:
            dist.broadcast(x.data, src=0, group=groups.world)


def _checksum(x: torch.Tensor) -> int:
    """A checksum of a tensor's bits, computed on its device: the sum of its bytes, each times a
    factor that depends on its position."""
    if not x.numel():
        return 0
    byte_values = x.contiguous().view(-1).view(torch.uint8).to(torch.int64)
    # 65521 is the largest prime below 2^16: swapped bytes give another sum.
    factors = torch.arange(len(byte_values), device=x.device) % 65521 + 1
    return int((byte_values * factors).sum())
