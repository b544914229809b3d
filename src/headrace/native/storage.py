"""Storage: master weights, optimizer state and gradient sums, sharded over all ranks.

[Note: the tensors of a weight] Each weight goes through four tensors:

    master   this rank's rows of the storage layout, updated by the optimizer
    working  the rows this rank needs while a plan propagates, filled by the pull
    partial  the gradient of the working rows, a partial sum over this rank's tokens
    sum      this rank's storage rows of the gradient, filled by the push

Where storage and working layout of a weight are the same partition (one rank, say, or weights that
are sharded over all ranks), partial *is* sum and no gradient moves; where they are also of the same
dtype, or the weight is a shard, which is cast when it is used, working *is* master and no weight
moves either.

[Note: mixed precision] Masters, optimizer state and sums are wide (fp32 or fp64). Where working
weights are of a half type, pull and push carry that type: owners round what they send, readers
round the gradients that they send. Sums are wide: a matrix product's within it, a rank's over its
micro-batches, an owner's over the readers. Between them gradients are rounded twice: the product of
a matrix in each micro-batch, and what a rank sends; in two steps between nodes a third time, the
sum of a node. Products left in fp32 were measured: 17 % less
error with one micro-batch, 2 % less with 32, as what is rounded in the activations weighs more, for
a third more time on a CPU. One process in bf16 that sums in bf16 has 2.1 times this error with 32.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from headrace.comm.collectives import gather_floats
from headrace.comm.mesh import Groups
from headrace.layouts.partition import (
    Partition,
    Rows,
    storage_partitions,
    working_key,
    working_partitions,
)
from headrace.layouts.transfer import Pending
from headrace.layouts.two_steps import WeightLink, links_over
from headrace.models.initial import initial_rows
from headrace.native.optimizers import AdamW, OptimizerOptions, state_names
from headrace.spec.architecture import Architecture, WeightSpec, buckets, weight_table
from headrace.spec.plan import Plan

__all__ = ["Storage", "Working"]


class Working:
    """The weights of one rank while plans of one working layout propagate.

    ``held`` are the rows of each weight that this rank works with, ``values`` [rows, ...] these
    rows and ``partials`` [rows, ...] this rank's part of the sum of their gradient, all by the
    weight's name. ``waits`` is whether issuing a pull or push may itself block."""

    def __init__(
        self,
        storage: Storage,
        partitions: dict[str, Partition],
        groups: Groups,
    ) -> None:
        """``partitions`` is the working layout: which rank has which rows of each weight. Weights
        that it partitions as storage does are used in place; for the others buffers, pulls and
        pushes are made."""
        self.held: dict[str, Rows] = {
            name: partition.parts[groups.rank] for name, partition in partitions.items()
        }
        self.values: dict[str, torch.Tensor] = {}
        self.partials: dict[str, torch.Tensor] = {}
        self._storage, self.partitions = storage, partitions
        self.dtype = storage.working_dtype
        # The names of the weights whose partial gradients are the stored sums, and of those whose
        # values are the stored masters: see [Note: the tensors of a weight].
        uses_sums = _same_partitions(storage.partitions, partitions)
        uses_masters = uses_sums
        if storage.working_dtype != storage.dtype:
            # Shards are cast when they are used; a whole weight would be cast again and again.
            sharded_names = {weight.name for weight in storage.table if weight.unit is not None}
            uses_masters = uses_sums & sharded_names if groups.ranks > 1 else frozenset[str]()
        for weight in storage.table:
            self._hold(
                weight,
                uses_master=weight.name in uses_masters,
                uses_sum=weight.name in uses_sums,
            )
        self._pulls = self._links_without(uses_masters, groups)
        self._pushes = (
            self._pulls if uses_masters == uses_sums else self._links_without(uses_sums, groups)
        )
        links = (*self._pulls, *self._pushes)
        self.waits = any(link.waits for link in links if link)

    def _links_without(self, names: Collection[str], groups: Groups) -> list[WeightLink | None]:
        """The link of each bucket, in order, which moves its weights between storage and working
        layout, all but those of these ``names``; None for a bucket of which nothing moves."""
        tables = [
            [weight for weight in bucket if weight.name not in names]
            for bucket in buckets(self._storage.architecture)
        ]
        moving = [table for table in tables if table]
        links = iter(links_over(groups, moving, self._storage.partitions, self.partitions))
        return [next(links) if table else None for table in tables]

    def _hold(self, weight: WeightSpec, *, uses_master: bool, uses_sum: bool) -> None:
        """Set the tensors of a weight's working rows and of their gradient: the stored ones where
        it ``uses_master`` and ``uses_sum``, else new buffers."""
        name, storage = weight.name, self._storage
        shape = (len(self.held[name]), *weight.shape[1:])
        master, total = storage.masters[name], storage.sums[name]
        # A new buffer is filled with NaN, so that its use before a pull is noticed.
        self.values[name] = (
            master
            if uses_master
            else master.new_full(shape, float("nan"), dtype=storage.working_dtype)
        )
        self.partials[name] = total if uses_sum else total.new_zeros(shape)

    def begin(self) -> None:
        """Clear the partial gradient sums before a step."""
        for partial in self.partials.values():
            partial.zero_()

    def pull(self, bucket: int) -> Pending | None:
        """Start the pull of a bucket: from stored rows to working weights. None when nothing
        moves."""
        link = self._pulls[bucket]
        wire = self._storage.working_dtype
        return link.pull(self._storage.masters, self.values, wire=wire) if link else None

    def push(self, bucket: int) -> Pending | None:
        """Start the push of a bucket: from partial gradients to stored sums. None when nothing
        moves."""
        link = self._pushes[bucket]
        if link is None:
            return None
        names = [w.name for w in buckets(self._storage.architecture)[bucket]]
        sums = {name: self._storage.sums[name] for name in names}
        return link.push(self.partials, sums, wire=self._storage.working_dtype)

    def buffer_bytes(self, bucket: int) -> int:
        """The most bytes of buffers that a transfer of a bucket, pull or push, takes on this rank
        while it is in flight."""
        size, wide = self._storage.working_dtype.itemsize, self._storage.dtype
        links = [link for link in (self._pulls[bucket], self._pushes[bucket]) if link]
        link_bytes = [
            (link.pull_elements + link.push_elements) * size + link.between_bytes(wide)
            for link in links
        ]
        return max(link_bytes, default=0)

    @property
    def pull_bytes(self) -> int:
        """Bytes this rank receives from others in the pull of all buckets."""
        size = self._storage.working_dtype.itemsize
        return sum(link.pull_elements for link in self._pulls if link) * size

    @property
    def push_bytes(self) -> int:
        """Bytes this rank receives from others in the push of all buckets."""
        size = self._storage.working_dtype.itemsize
        return sum(link.push_elements for link in self._pushes if link) * size


class Storage:
    """This rank's rows of every weight (``masters``), of its gradient (``sums``), both by name, and
    of the optimizer's state.

    They are of ``dtype``; the weights with which plans propagate are of ``working_dtype``, the same
    by default. ``partitions`` tells which rank stores which rows of each weight, ``updates`` counts
    the optimizer steps.
    """

    def __init__(
        self,
        architecture: Architecture,
        groups: Groups,
        *,
        seed: int,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        options: OptimizerOptions | None = None,
        working_dtype: torch.dtype | None = None,
    ) -> None:
        """Make this rank's rows of initial weights, drawn by ``seed``, their gradient sums and an
        optimizer of ``options``, on ``device``."""
        self.architecture = architecture
        self.options: OptimizerOptions = options or AdamW()
        self.dtype, self.working_dtype = dtype, working_dtype or dtype
        self._groups = groups
        self.table = weight_table(architecture)
        self.partitions = storage_partitions(self.table, groups.ranks, groups.node_sizes)
        self.masters: dict[str, torch.Tensor] = {
            w.name: initial_rows(
                w, self.partitions[w.name].parts[groups.rank], architecture, seed, dtype
            ).to(device)
            for w in self.table
        }
        self.sums = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self._state_names = state_names(self.options, dtype)
        self.reset_optimizer()
        self._working: Working | None = None
        # the key of the layout that ``_working`` was last used for
        self._layout: tuple[object, ...] | None = None

    def fill(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Set the weights from full tensors by name, of any float type: this rank keeps its
        rows."""
        for name, weight in weights:
            rows = self.partitions[name].parts[self._groups.rank]
            self.masters[name].copy_(weight[rows.start : rows.stop])

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimizer of this rank's rows, with weight decay for matrices and none for
        vectors."""
        matrices = [self.masters[w.name] for w in self.table if len(w.shape) > 1]
        vectors = [self.masters[w.name] for w in self.table if len(w.shape) == 1]
        return self.options.make(
            [
                {"params": matrices, "weight_decay": self.options.decay},
                {"params": vectors, "weight_decay": 0.0},
            ]
        )

    def reset_optimizer(self) -> None:
        """Discard all optimizer state and the count of updates."""
        self.optimizer = self._make_optimizer()
        self._updates = 0
        self._laid_out = False  # whether the optimizer has made its state

    def working(self, plan: Plan) -> Working:
        """The working weights for ``plan``: those of the last call while the layout stays the
        same, else new ones, whose buffers are NaN until they are pulled."""
        key = working_key(plan)
        if self._working is not None and self._layout == key:
            return self._working
        partitions = working_partitions(self.table, plan)
        if self._working is None or not _equal_partitions(self._working.partitions, partitions):
            # One layout's buffers at a time: a change of layout costs an allocation, not memory.
            self._working = None
            self._working = Working(self, partitions, self._groups)
        self._layout = key
        return self._working

    def forget_layouts(self) -> None:
        """Drop the working weights, and the links over a world that was destroyed."""
        self._working = self._layout = None

    def gradient_norm(self) -> float:
        """The L2 norm of the whole gradient, over all ranks: squares of disjoint rows, added in
        rank order. Collective."""
        local = _sum_of_squares(list(self.sums.values()))
        return sum(row[0] for row in gather_floats([local], self._groups.world)) ** 0.5

    def update(self, lr: float, norm: float | None = None) -> float:
        """Clip by the global norm of the gradient (``norm``, else it is computed, collectively) and
        take one optimizer step at rate ``lr``; returns the norm before clipping. A norm that is not
        finite leaves everything as it was."""
        norm = self.gradient_norm() if norm is None else norm
        # NaN fails every comparison, and so comes here as well
        if not norm < float("inf"):
            return norm
        if not self._updates:
            # State that was laid out to be loaded is no state of a step: SGD's first one differs.
            self.reset_optimizer()
        factor = min(1.0, self.options.clip / (norm + 1e-6)) if self.options.clip > 0 else 1.0
        for name, master in self.masters.items():
            if factor < 1.0:
                self.sums[name].mul_(factor)
            master.grad = self.sums[name]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self._laid_out = True
        self._updates += 1
        return norm

    def bytes_held(self) -> int:
        """Bytes of masters, gradient sums and optimizer state on this rank."""
        # as many tensors of the masters' size: masters, sums, and each state of the optimizer
        copies = 2 + len(self._state_names)
        return copies * sum(m.numel() * m.element_size() for m in self.masters.values())

    def bytes_now(self) -> int:
        """Bytes of all tensors that are allocated now, working weights included."""
        # by address, so that working weights that are the masters themselves count once
        seen: dict[int, int] = {}
        for tensor in self._tensors():
            seen[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return sum(seen.values())

    def _tensors(self) -> Iterable[torch.Tensor]:
        """All tensors of this rank: masters, sums, optimizer state, working weights, gradients."""
        yield from self.masters.values()
        yield from self.sums.values()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
        if self._working is not None:
            yield from self._working.values.values()
            yield from self._working.partials.values()

    def optimizer_rows(self) -> Iterable[tuple[str, torch.Tensor]]:
        """(``key.weight``, tensor [rows, ...]) of each state that the optimizer keeps for every
        element of a weight, such as ``exp_avg`` of AdamW; made first where it was not."""
        self._lay_out()
        for weight in self.table:
            for key in self._state_names:
                yield f"{key}.{weight.name}", self.optimizer.state[self.masters[weight.name]][key]

    def _lay_out(self) -> None:
        """Have the optimizer allocate its state, which torch does only in the first step: by a step
        whose gradients, rate and decay are zero, so that no weight changes, and after which steps
        are counted from zero again. Does nothing where there is state already."""
        if self._laid_out:
            return
        self._laid_out = True
        grads = {name: master.grad for name, master in self.masters.items()}
        kept = [dict(group) for group in self.optimizer.param_groups]
        for master in self.masters.values():
            master.grad = torch.zeros_like(master)
        for group in self.optimizer.param_groups:
            group.update(lr=0.0, weight_decay=0.0)
        self.optimizer.step()
        for name, master in self.masters.items():
            master.grad = grads[name]
        for group, before in zip(self.optimizer.param_groups, kept, strict=True):
            group.update(lr=before["lr"], weight_decay=before["weight_decay"])
        self._set_steps(0)

    @property
    def updates(self) -> int:
        """Number of optimizer steps taken."""
        return self._updates

    @updates.setter
    def updates(self, count: int) -> None:
        """Set the number of optimizer steps taken, in the optimizer's state too."""
        self._lay_out()
        self._updates = count
        self._set_steps(count)

    def _set_steps(self, steps: int) -> None:
        """Set the number of steps that the optimizer believes it has made."""
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"].fill_(float(steps))
            elif "step" in state:
                state["step"] = steps


def _sum_of_squares(gradients: list[torch.Tensor]) -> float:
    """The sum of the squares of all elements of all ``gradients``; on a GPU by a few kernels over
    all tensors, and one synchronization."""
    if all(x.device.type == "cpu" for x in gradients):
        return sum(float(x.double().square().sum()) for x in gradients)
    norms = torch._foreach_norm(gradients)  # noqa: SLF001  torch's own clipping calls it
    # squares of the norms of the single tensors
    return float(torch.stack(norms).double().square().sum())


def _same_partitions(
    storage: dict[str, Partition], working: dict[str, Partition]
) -> frozenset[str]:
    """The names of the weights of which every rank works with just the rows that it stores."""
    # Many weights share a partition, and comparing those of a thousand ranks takes long: each pair
    # of objects is compared once.
    equal: dict[tuple[int, int], bool] = {}
    same = set[str]()
    for name, stored in storage.items():
        pair = id(stored), id(working[name])
        if pair not in equal:
            equal[pair] = stored == working[name]
        if equal[pair]:
            same.add(name)
    return frozenset(same)


def _equal_partitions(one: dict[str, Partition], other: dict[str, Partition]) -> bool:
    """Whether partitions of the same weights are equal."""
    # Many weights share a partition, and comparing those of a thousand ranks takes long: each pair
    # of objects is compared once, for any one weight that has it.
    pairs = {(id(one[name]), id(other[name])): name for name in one}
    return all(one[name] == other[name] for name in pairs.values())
