"""Gradients of adopted models: sums over all ranks, whatever wraps the model."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from headrace.comm.waiting import Transfer
from headrace.errors import ModelError

__all__ = [
    "SummedBackward",
    "SummedGradients",
    "add_plainly",
    "add_up",
    "gradient_error",
    "is_wrapped",
    "require_known_wrapper",
    "reshard",
    "require_made",
]

_BUCKET_BYTES = 32 << 20
"""Bytes of gradients that are summed in one all-reduce, unless one parameter has more."""
_FLOOR = 1e-3
"""The fraction of the largest value of all gradients below which a gradient may be rounding
alone."""
_Written = dict[int, tuple[int, int]]
"""What :func:`written` says of gradients, by the parameters' ids."""
_WRAPPERS = (DistributedDataParallel, FSDPModule)


def is_wrapped(model: torch.nn.Module) -> bool:
    """Whether DDP or FSDP2 adds up the gradients of a model."""
    return isinstance(model, _WRAPPERS)


def require_known_wrapper(model: torch.nn.Module, *, static: bool = False) -> None:
    """Raise ModelError for a model within a wrapper whose calls or gradients are its own: FSDP1,
    DataParallel, or what torch.compile made of the whole model; for parameters in shards that no
    FSDP2 around the model adds up over all ranks; and for DDP of a graph that never changes, unless
    it may be ``static``."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    compiled = hasattr(inner, "_orig_mod")
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    if sharded and not isinstance(model, FSDPModule):
        raise ModelError(
            "model with parameters in shards",
            got=f"{len(sharded)} DTensors, and no FSDP2 around the model",
            wanted="fully_shard(model), after that of its blocks, or no shards",
        )
    if isinstance(model, FSDPModule):
        _require_all_ranks(model, sharded)
    if isinstance(model, DistributedDataParallel) and model.static_graph and not static:
        raise ModelError(
            "model under DDP",
            got="static_graph=True",
            wanted="False: the backwards of a step differ",
        )
    found = [module for module in model.modules() if isinstance(module, (Fsdp1, DataParallel))]
    if not found and not compiled:
        return
    wrapper = type(inner if compiled else found[0]).__name__
    raise ModelError(
        f"model under {wrapper}",
        got="torch.compile" if compiled else f"{wrapper}, which adds up gradients in its own way",
        wanted="the model itself, DDP of it, or fully_shard (FSDP2)",
        hint="spread=hr.SpreadOptions(backend='inductor'), hr.compile(backend='inductor') and "
        "run.compile() compile the spread model"
        if compiled
        else "start a rank for each GPU by torchrun",
    )


def _require_all_ranks(model: torch.nn.Module, sharded: Sequence[DTensor]) -> None:
    """Raise ModelError for parameters that FSDP2 shards over fewer ranks than there are, or that
    tensor parallelism shards besides, or that FSDP2 ignores: nobody sums their gradients over all
    ranks."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for p in sharded:
        mesh, (*others, last) = p.device_mesh, p.placements
        if mesh.size() != world or not last.is_shard() or not all(x.is_replicate() for x in others):
            raise ModelError(
                f"parameter {list(p.shape)} under FSDP2",
                got=f"{p.placements} on a mesh of {list(mesh.shape)}",
                wanted=f"shards over all {world} ranks, or over some and copies beside",
                hint="headrace spreads sequences over ranks in the place of tensor parallelism: "
                "leave that out, and give fully_shard the mesh of all ranks",
            )
    _require_no_others(model)


def _require_no_others(model: torch.nn.Module) -> None:
    """Raise ModelError, on all ranks alike, for parameters that are trained and that FSDP2 around
    the model ignores."""
    reshard(model)  # what FSDP2 has gathered are other tensors
    ignored = [p for p in model.parameters() if p.requires_grad and not isinstance(p, DTensor)]
    if ignored and dist.is_initialized() and dist.get_world_size() > 1:
        raise ModelError(
            "parameters that FSDP2 ignores",
            got=f"{len(ignored)} that are trained, the first of shape {list(ignored[0].shape)}",
            wanted="none, as nobody sums their gradients over ranks",
            hint="leave ignored_params out, or freeze them",
        )


def require_made(loss: object, what: str) -> None:
    """Raise ModelError for ``what``, a loss that was made of no result of the model: no backward
    would reach it, and the ranks that share the batch would wait in theirs."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.grad_fn is not None:
        return
    got = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        got = f"{list(loss.shape)}" if loss.numel() != 1 else "a number made of no result"
    raise ModelError(
        what,
        got=got,
        wanted="a single number, made of what the model returned",
        hint="for a part without a label it is 0: say logits.sum() * 0",
    )


class SummedBackward:
    """Runs backwards of a ``model`` so that gradients are sums over ranks. DDP divides its sums by
    the number of ranks, so losses are multiplied by it. Backwards that are begun otherwise pass by
    every look at losses: they are refused, at once under DDP, else when gradients are summed.

    Attributes:
        ran: Whether a backward was run since the caller last set this to False.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Nothing runs yet."""
        self.ran = False
        self._model, self._averaged = model, isinstance(model, DistributedDataParallel)
        self._runs = self._begun_otherwise = False

    def run(self, loss: torch.Tensor) -> None:
        """Run the backward of a loss."""
        self._begun_otherwise = self.error() is not None  # not where gradients were dropped since
        self.ran = self._runs = True
        try:
            (loss * dist.get_world_size() if self._averaged else loss).backward()
        finally:
            self._runs = False

    def require(self, results: Iterable[torch.Tensor]) -> None:
        """Have any other backward of the model's ``results`` noted; under DDP it raises
        ModelError."""
        for result in results:
            if result.grad_fn is not None:
                result.grad_fn.register_prehook(self._look)

    def error(self) -> ModelError | None:
        """What is wrong where another backward has added to gradients that are still there."""
        gradients = (p.grad for p in self._model.parameters() if p.grad is not None)
        if not self._begun_otherwise or not any(bool(grad.any()) for grad in gradients):
            return None
        return ModelError(
            "loss.backward() of a spread model",
            got="a loss that nobody has looked at",
            wanted="run.backward(loss), which refuses what is no sum over the part",
        )

    def _look(self, _: Sequence[torch.Tensor]) -> None:
        """The hook before the backward of a result."""
        if self._runs or self._begun_otherwise:
            return
        if self._averaged:
            raise ModelError(
                "loss.backward() of a model under DDP",
                got="gradients that DDP divides by the number of ranks",
                wanted="run.backward(loss), which undoes it",
            )
        self._begun_otherwise = _adds_gradients(self._model)


def _adds_gradients(model: torch.nn.Module) -> bool:
    """Whether the backward at work adds to gradients of ``model``, which ``torch.autograd.grad``
    does not."""
    if isinstance(model, FSDPModule):  # its graphs have other parameters
        return True
    for parameter in model.parameters():
        if parameter.requires_grad:
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            try:
                if torch._C._will_engine_execute_node(node):  # noqa: SLF001
                    return True
            except RuntimeError:  # autograd.grad was asked for this gradient
                return False
    return False


def reshard(model: torch.nn.Module) -> None:
    """Have FSDP2 free the weights that it has gathered, and gather them anew in the next forward:
    it keeps those of the outermost module after a forward without a backward, which would hide
    changes of the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def add_plainly(model: torch.nn.Module) -> None:
    """Have FSDP2 add up gradients without dividing them: a factor that is no power of two, even if
    it is undone before, rounds what models compute in single precision."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def add_up(
    parameters: Iterable[torch.nn.Parameter],
    world: dist.ProcessGroup,
    error: ModelError | None = None,
) -> None:
    """Sum the gradients of all ranks of ``world`` in place; a parameter that none of them used
    stays without one, so that optimizers pass it over as they would in one process. Where a rank
    has an ``error``, all raise one instead. Collective."""
    trained = [p for p in parameters if p.requires_grad]
    # How many ranks have an error, and a gradient of each parameter. The counts stay in host
    # memory: this function branches on them, and reading them from a device would wait for it.
    counts = torch.tensor([float(x is not None) for x in (error, *(p.grad for p in trained))])
    Transfer(dist.all_reduce(counts, group=world, async_op=True), world, counts).wait()
    refused, *used = counts.tolist()
    if refused:
        raise error or ModelError("add_up", got="what another rank refuses")
    for bucket in _buckets(p for p, count in zip(trained, used, strict=True) if count):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        Transfer(dist.all_reduce(flat, group=world, async_op=True), world, flat).wait()
        sums = flat.split([p.numel() for p in bucket])
        for parameter, grad, summed in zip(bucket, grads, sums, strict=True):
            parameter.grad = grad.copy_(summed.view_as(grad))


class SummedGradients:
    """Knows which gradients of a model are sums over ranks already, so that none is summed again,
    and which were changed since a backward, so that no rank's part is clipped by its own norm."""

    def __init__(self, model: torch.nn.Module) -> None:
        # DDP knows no parameters that were frozen when it was made.
        self._frozen = {id(p) for p in model.parameters() if not p.requires_grad}
        # Of each sum, and of each gradient after the last backward, where its data is and how
        # often it was written to, by the parameter's id.
        self._sums, self._parts = _Written(), _Written()

    def add_up(
        self, model: torch.nn.Module, world: dist.ProcessGroup, error: ModelError | None
    ) -> None:
        """Sum the gradients of ``model`` over ``world``, where no wrapper does and they are no
        sums already, and note them. Where a rank has an ``error``, all raise one instead.
        Collective."""
        if isinstance(model, DistributedDataParallel):
            _require_known(model, self._frozen)
        elif isinstance(model, FSDPModule):
            _require_no_others(model)
            add_up((), world, error)
        elif not is_wrapped(model) and not self.are_there(model):
            add_up(model.parameters(), world, error or self._error_of_parts(model))
            self._sums, self._parts = _written(model), _Written()

    def note_parts(self, model: torch.nn.Module) -> None:
        """Note that a backward has just added this rank's part to the gradients of ``model``."""
        self._parts = _Written() if is_wrapped(model) else _written(model)

    def _error_of_parts(self, model: torch.nn.Module) -> ModelError | None:
        """What is wrong where gradients were written to since a backward, and not made zero."""
        changed = (gradient for gradient, differs in _kept(model, self._parts) if differs)
        if not any(bool(gradient.any()) for gradient in changed):
            return None
        return ModelError(
            "add_up",
            got="gradients of this rank's part that were changed after run.backward",
            wanted="gradients as backwards leave them",
            hint="clip or scale gradients once they are summed, after run.add_up(loss); a term of "
            "weights alone is run.backward(loss + run.share * term)",
        )

    def are_there(self, model: torch.nn.Module) -> bool:
        """Whether the gradients of ``model`` are noted sums: no backward has run since, and another
        loss that is added up leaves them as they are. Raises ModelError where they were written to
        since."""
        kept = list(_kept(model, self._sums))
        if any(changed for _, changed in kept):
            raise ModelError(
                "add_up",
                got="gradients that are summed over ranks already, and were changed since",
                wanted="a backward by run.backward(loss) before it",
                hint="add up the losses of a step before gradients are clipped or scaled",
            )
        return bool(kept)

    def require_dropped(self, model: torch.nn.Module) -> None:
        """Raise ModelError before a backward of ``model`` that would add to sums over ranks, on all
        ranks alike. Only the first backward after a sum is looked at."""
        kept = list(_kept(model, self._sums))
        self._sums = {}
        if any(bool(gradient.any()) for gradient, _ in kept):
            raise ModelError(
                "backward after add_up",
                got="gradients that are summed over ranks already",
                wanted="none, or zeros",
                hint="call optimizer.zero_grad() first; of several backwards in a step give the "
                "sum of their losses to one add_up, after the last",
            )


def _require_known(model: DistributedDataParallel, frozen: Collection[int]) -> None:
    """Raise ModelError, on all ranks alike, for parameters that are trained and that DDP does not
    know, as they were ignored when it was made, or ``frozen``, by their ids."""
    known = {id(p) for p in model._module_parameters} - set(frozen)  # noqa: SLF001
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    if others:
        raise ModelError(
            "parameters of a model under DDP",
            got=f"{len(others)} that are trained and DDP does not know, the first of shape "
            f"{list(others[0].shape)}",
            wanted="those that required gradients when DDP was made",
            hint="make DDP, and what hr.compile gives, anew once parameters are unfrozen",
        )


def written(gradient: torch.Tensor) -> tuple[int, int]:
    """Where the data of a gradient is, this rank's shard of a DTensor, and how often it was written
    to; torch counts no writes to shards by functions of many tensors."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient  # noqa: SLF001
    versions = {id(x): x._version for x in (gradient, local)}  # noqa: SLF001
    return local.data_ptr(), sum(versions.values())


def _written(model: torch.nn.Module) -> _Written:
    """What :func:`written` says of the gradients of ``model`` now."""
    return {id(p): written(p.grad) for p in model.parameters() if p.grad is not None}


def _kept(model: torch.nn.Module, noted: _Written) -> Iterator[tuple[torch.Tensor, bool]]:
    """The gradients of ``model`` that are still where they were ``noted``, each with whether it
    was written to since."""
    for p in model.parameters() if noted else ():
        if p.grad is not None and id(p) in noted:
            (at, version), (place, now) = noted[id(p)], written(p.grad)
            if place == at and now >= version:
                yield p.grad, now > version


def gradient_error(
    found: Iterable[torch.Tensor | None], wanted: Iterable[torch.Tensor | None]
) -> float:
    """The largest relative error of the gradients ``found`` among all tensors.

    The error of a tensor is its largest absolute difference from the one ``wanted``, relative to
    the largest absolute value of the latter; where this is below ``_FLOOR`` times the largest value
    of all tensors, relative to that. A gradient that is missing counts as zeros; one that is not
    finite gives infinity."""
    pairs = list(zip(found, wanted, strict=True))
    floor = _FLOOR * max((_largest(right) for _, right in pairs), default=0.0)
    errors = []
    for gradient, right in pairs:
        scale = max(_largest(right), floor) or 1.0  # 1 where all wanted gradients are zero
        errors.append(_largest(_difference(gradient, right)) / scale)
    return max(errors, default=0.0)


def _difference(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """a - b or b - a, where None stands for zeros; None where both are None."""
    if a is None:
        return b
    return a if b is None else a - b


def _largest(x: torch.Tensor | None) -> float:
    """The largest absolute value of a tensor: 0 for None and for no entries, infinity where it is
    not finite."""
    if x is None or not x.numel():
        return 0.0
    value = float(x.detach().abs().max())
    return value if math.isfinite(value) else math.inf


def _buckets(parameters: Iterable[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yield the parameters in order, in lists of one dtype and device of up to ``_BUCKET_BYTES``,
    or of a single larger parameter."""
    bucket, bucket_bytes = list[torch.nn.Parameter](), 0
    for parameter in parameters:
        differs = bool(bucket) and _kind(bucket[0]) != _kind(parameter)
        if bucket and (differs or bucket_bytes + parameter.nbytes > _BUCKET_BYTES):
            yield bucket
            bucket, bucket_bytes = list[torch.nn.Parameter](), 0
        bucket.append(parameter)
        bucket_bytes += parameter.nbytes
    if bucket:
        yield bucket


def _kind(parameter: torch.nn.Parameter) -> tuple[torch.dtype, torch.device]:
    """What the parameters of a bucket have in common: (dtype, device)."""
    return parameter.dtype, parameter.device
