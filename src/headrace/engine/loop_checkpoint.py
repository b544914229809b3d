"""Checkpoints of a loop: the user's model and optimizer in rows, and everything small as JSON.

Replicated weights are written by all ranks together, each its share of the rows;
each shard of FSDP2 is written by its rank. Any number of ranks loads what any other has saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from headrace.comm.collectives import gather_bytes
from headrace.comm.mesh import Groups
from headrace.engine.agreement import newest_whole
from headrace.errors import CheckpointError
from headrace.layouts.partition import split_sizes
from headrace.native import checkpoint
from headrace.native.checkpoint import BackgroundWriter, step_folder, step_of
from headrace.native.shard_files import StoredShard
from headrace.units import counted

__all__ = ["LoopCheckpoints"]

_SCALAR = "scalar."
"""Part of the names of optimizer tensors without dims, which are stored with one row."""

_GENERATOR = "generator."
"""Prefix of the names of the states of random number generators."""

_FORMAT = 1
"""The version of this format, which marks a checkpoint as one of a loop."""


@dataclass(slots=True, kw_only=True, eq=False)
class LoopCheckpoints:
    """Saves and loads ``model`` and ``optimizer``; collective.

    The tensors of a checkpoint have these names and rows:

        model.PARAMETER                    a parameter or buffer, by its rows
        optimizer.KEY.PARAMETER            a tensor of the optimizer's state, by its rows
        optimizer.scalar.KEY.PARAMETER     the same of a tensor without dims: a single row
        generator.DEVICE                   [ranks, bytes]: the generator's state on each rank
    """

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    groups: Groups
    _names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        """Note the name of each parameter by its id: the optimizer knows parameters without their
        names."""
        self._names = {id(p): name for name, p in self.model.named_parameters()}
        inner = getattr(self.optimizer, "optim", None)
        if isinstance(inner, torch.optim.Optimizer) and inner.state is not self.optimizer.state:
            raise CheckpointError(
                f"optimizer {type(self.optimizer).__name__}",
                got="states that each rank has of a part of the parameters",
                wanted="states of the optimizer itself",
                hint="shard the model by fully_shard, which shards states as well, or save by "
                "consolidate_state_dict()",
            )

    def save(
        self,
        root: Path,
        step: int,
        extra: Mapping[str, Any],
        *,
        keep: int,
        writer: BackgroundWriter | None = None,
    ) -> Path:
        """Write a checkpoint of model, optimizer and generators as they are now.

        Args:
            root: The checkpoint gets a folder of its own within it.
            step: The number of the step that comes next, after which that folder is named.
            extra: Other values of the loop, as JSON.
            keep: How many of the last checkpoints stay in ``root``.
            writer: Copies the tensors and writes them while the loop goes on; where it is None they
                are written before this returns.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: On every rank when any could not write it, or could not end the one
                before; what was there before is as it was.
        """
        tensors = {**self._weights(), **self._optimizer_tensors()}
        shards = [
            shard
            for name, tensor in tensors.items()
            for shard in self._shards(name, tensor, whole=False)
        ]
        shards += [self._generator_row(name, state) for name, state in self._generators().items()]
        optimizer = {
            "kind": self._optimizer_kind,
            "groups": self._group_options(),
            "values": self._plain_values(),
        }
        values = {**extra, "loop": _FORMAT, "optimizer": optimizer}
        rank, gather = self.groups.rank, self.gather
        if writer is None:
            return checkpoint.save(root, step, shards, values, rank=rank, gather=gather, keep=keep)
        writer.begin(root, step, shards, values, rank=rank, gather=gather, keep=keep)
        return step_folder(root, step)

    def gather(self, payload: bytes) -> list[bytes]:
        """The ``payload`` of every rank, by rank. Collective."""
        return gather_bytes(payload, self.groups.world)

    def load(self, root: Path, tell: Callable[[str], object]) -> dict[str, Any] | None:
        """Fill model, optimizer and generators from a checkpoint.

        Args:
            root: A checkpoint, or a folder of which the newest whole one is taken.
            tell: Called with a line for people for each checkpoint that is damaged.

        Returns:
            The values that were saved beside the tensors: ``extra`` of :meth:`save`, and those of
            the optimizer. None where there is no checkpoint yet.

        Raises:
            CheckpointError: Where all are damaged, and for one of another model.
        """
        found = [root] if step_of(root) is not None else checkpoint.newest_first(root)
        newest = newest_whole(found, self._load, self.groups, tell)
        return None if newest is None else newest[1]

    def _load(self, path: Path) -> dict[str, Any]:
        """Fill model, optimizer and generators from the checkpoint ``path``; returns its other
        values."""
        self._require_same_kind(path, checkpoint.extra_of(path))
        stored = checkpoint.names(path)
        self._require_same_weights(path, stored)
        wanted = [
            shard
            for name, tensor in self._weights().items()
            for shard in self._shards(name, tensor, whole=True)
        ]
        optimizer_tensors = self._empty_optimizer_tensors(stored)
        wanted += [
            shard
            for name, tensor in optimizer_tensors.items()
            for shard in self._shards(name, tensor, whole=True)
        ]
        generators = {
            name: state
            for name, state in self._generators().items()
            if self._fits_generator(stored, name, state)
        }
        wanted += [self._generator_row(name, state) for name, state in generators.items()]
        extra = checkpoint.load(path, wanted)
        self._restore_optimizer(extra["optimizer"], optimizer_tensors)
        for name, state in generators.items():
            device = name.removeprefix(_GENERATOR)
            torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state)
        return extra

    def _generators(self) -> dict[str, torch.Tensor]:
        """The states of torch's generators on this rank, which dropout draws from, by the name in a
        checkpoint: [bytes] uint8 each."""
        states = {f"{_GENERATOR}cpu": torch.get_rng_state()}
        if self.groups.device.type == "cuda":
            states[f"{_GENERATOR}cuda"] = torch.cuda.get_rng_state()
        return states

    def _generator_row(self, name: str, state: torch.Tensor) -> StoredShard:
        """This rank's row of the tensor [ranks, bytes] that has a generator's state of each
        rank."""
        shape = (self.groups.ranks, len(state))
        return StoredShard(name=name, first_row=self.groups.rank, tensor=state[None], shape=shape)

    def _fits_generator(self, stored: Mapping[str, Any], name: str, state: torch.Tensor) -> bool:
        """Whether a checkpoint, with tensors ``stored`` as (shape, dtype) by name, was saved by as
        many ranks as there are now, each with a state of this generator as long as ``state``. Else
        the generator is not restored."""
        return name in stored and tuple(stored[name][0]) == (self.groups.ranks, len(state))

    def _require_same_kind(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a checkpoint of another kind of run, or of an optimizer of
        another class, or with other groups of parameters."""
        if extra.get("loop") != _FORMAT:
            raise CheckpointError(
                f"checkpoint {path}", got="not one of a loop", wanted="one that run.save() wrote"
            )
        if extra["optimizer"]["kind"] != self._optimizer_kind:
            raise CheckpointError(
                f"checkpoint {path}",
                got=f"state of {extra['optimizer']['kind']}",
                wanted=f"that of the optimizer, {self._optimizer_kind}",
            )
        saved, here = len(extra["optimizer"]["groups"]), len(self.optimizer.param_groups)
        if saved != here:
            raise CheckpointError(
                f"checkpoint {path}",
                got=f"an optimizer with {counted(saved, 'group')} of parameters",
                wanted=f"{here}, as the optimizer has",
            )

    def _require_same_weights(self, path: Path, stored: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a checkpoint, with tensors ``stored`` by name, of a model with
        other weights, before anything of it is read."""
        weights = self._weights()
        saved = {name for name in stored if not name.startswith(("optimizer.", _GENERATOR))}
        missing, more = sorted(weights.keys() - saved), sorted(saved - weights.keys())
        if missing or more:
            raise CheckpointError(
                f"checkpoint {path}",
                got=f"one without {missing[0]}" if missing else f"one with {more[0]}",
                wanted=f"the {counted(len(weights), 'weight')} of the model, by their names",
            )
        for name, tensor in weights.items():
            shape = tuple(stored[name][0])
            if shape != (tuple(tensor.shape) or (1,)):
                raise CheckpointError(
                    f"checkpoint {path}",
                    got=f"{name} of {list(shape)}",
                    wanted=f"{list(tensor.shape)}",
                )

    @property
    def _optimizer_kind(self) -> str:
        """The name of the optimizer's class."""
        return type(self.optimizer).__name__

    def _weights(self) -> dict[str, torch.Tensor]:
        """The model's parameters and buffers by their names in a checkpoint; a tensor that several
        modules share is there once."""
        seen, weights = set[int](), dict[str, torch.Tensor]()
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if torch.is_tensor(tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                weights[f"model.{name}"] = tensor.detach()
        return weights

    def _optimizer_tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the optimizer's state by their names in a checkpoint."""
        return {
            f"optimizer.{_SCALAR if not value.dim() else ''}{key}.{parameter}": value
            for parameter, key, value in self._optimizer_entries()
            if torch.is_tensor(value)
        }

    def _optimizer_entries(self) -> Iterator[tuple[str, str, Any]]:
        """The values of the optimizer's state, each as (name of the parameter, key, value)."""
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                yield self._names[id(parameter)], key, value

    def _plain_values(self) -> dict[str, dict[str, Any]]:
        """The values of the optimizer's state that are no tensors, by the name of the parameter and
        by key."""
        values: dict[str, dict[str, Any]] = {}
        for parameter, key, value in self._optimizer_entries():
            if not torch.is_tensor(value):
                values.setdefault(parameter, {})[key] = value
        return values

    def _group_options(self) -> list[dict[str, Any]]:
        """The options of each of the optimizer's parameter groups by name, without the
        parameters."""
        return [
            {k: float(v) if torch.is_tensor(v) else v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def _empty_optimizer_tensors(self, stored: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """New tensors for the optimizer's state in a checkpoint to be loaded into, by name: those
        of the tensors ``stored``, (shape, dtype) by name, that belong to the optimizer. Each is
        sharded as its parameter is."""
        parameters = dict(self.model.named_parameters())
        tensors: dict[str, torch.Tensor] = {}
        for name, (_, dtype) in stored.items():
            if not name.startswith("optimizer."):
                continue
            _, parameter_name = self._key_and_parameter(name)
            parameter = parameters[parameter_name]
            if name.startswith(f"optimizer.{_SCALAR}"):
                tensors[name] = torch.zeros((), dtype=dtype)
            else:
                tensors[name] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
        return tensors

    def _key_and_parameter(self, name: str) -> tuple[str, str]:
        """(key of the optimizer's state, name of the parameter) of an optimizer tensor, from its
        ``name`` in a checkpoint."""
        rest = name.removeprefix("optimizer.").removeprefix(_SCALAR)
        key, _, parameter = rest.partition(".")
        return key, parameter

    def _restore_optimizer(
        self, saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        """Give the optimizer the state and the options of a checkpoint: ``saved`` are its values
        that are no tensors, ``tensors`` the loaded ones by name."""
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for name, tensor in tensors.items():
            key, parameter = self._key_and_parameter(name)
            self.optimizer.state[parameters[parameter]][key] = tensor
        for parameter, values in saved["values"].items():
            self.optimizer.state[parameters[parameter]].update(values)
        for group, options in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            for key, value in options.items():
                current = group.get(key)
                if torch.is_tensor(current):  # such as a learning rate that is a tensor
                    current.fill_(value)
                else:
                    # JSON has lists in the place of tuples, such as the betas of Adam.
                    group[key] = tuple(value) if isinstance(current, tuple) else value

    def _shards(self, name: str, tensor: torch.Tensor, *, whole: bool) -> Iterator[StoredShard]:
        """This rank's rows of a tensor, for reading or writing. Of one that every rank has, these
        are all rows if ``whole``, else the part that this rank writes; of one that FSDP2 shards,
        those of this rank. None where this rank has no row."""
        if isinstance(tensor, DTensor):
            yield from self._rows_of_sharded(name, tensor)
            return
        shape = tuple(tensor.shape) or (1,)  # a tensor without dims is stored as one row
        rows = tensor.reshape(shape) if tensor.dim() else tensor.view(1)
        start, count = 0, shape[0]
        if not whole:
            sizes = split_sizes(count, self.groups.ranks)
            start, count = sum(sizes[: self.groups.rank]), sizes[self.groups.rank]
        if count:
            part = rows[start : start + count]
            yield StoredShard(name=name, first_row=start, tensor=part, shape=shape)

    def _rows_of_sharded(self, name: str, tensor: DTensor) -> Iterator[StoredShard]:
        """This rank's rows of a tensor that FSDP2 shards; none where it has no rows. Raises
        CheckpointError for one that is not sharded by rows over a single mesh axis."""
        if len(tensor.placements) != 1 or not tensor.placements[0].is_shard(0):
            raise CheckpointError(
                f"checkpoint of {name}",
                got=tensor.placements,
                wanted=f"{[Shard(0)]}",
                hint="shard weights over one mesh axis, by rows",
            )
        local = tensor.to_local()
        rows_per_rank = -(-tensor.shape[0] // tensor.device_mesh.size())  # rounded up, as FSDP2
        if len(local):
            yield StoredShard(
                name=name,
                first_row=rows_per_rank * tensor.device_mesh.get_local_rank(),
                tensor=local,
                shape=tuple(tensor.shape),
            )
