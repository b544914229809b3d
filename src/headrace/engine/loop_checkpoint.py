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

__all__ = ["LoopCheckpoints"]

_SCALAR = "scalar."
_GENERATOR = "generator."
_FORMAT = 1


@dataclass(slots=True, kw_only=True, eq=False)
class LoopCheckpoints:
    """Saves and loads ``model`` and ``optimizer``; collective."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    groups: Groups
    _names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = {id(p): name for name, p in self.model.named_parameters()}

    def save(
        self,
        root: Path,
        step: int,
        extra: Mapping[str, Any],
        *,
        keep: int,
        writer: BackgroundWriter | None = None,
    ) -> Path:
        """Write a checkpoint into a folder of its own in ``root``, or have ``writer`` write it, of
        everything as it is now; returns that folder.

        Raises CheckpointError on every rank when any could not, or could not end the one before,
        with what was there as it was.
        """
        tensors = {**self._weights(), **self._state()}
        shards = [
            shard for name, x in tensors.items() for shard in self._parts(name, x, whole=False)
        ]
        shards += [self._row(name, x) for name, x in self._generators().items()]
        values = {"kind": self._kind, "groups": self._hyper(), "values": self._plain_values()}
        said = {**extra, "loop": _FORMAT, "optimizer": values}
        rank, gather = self.groups.rank, self.gather
        if writer is None:
            return checkpoint.save(root, step, shards, said, rank=rank, gather=gather, keep=keep)
        writer.begin(root, step, shards, said, rank=rank, gather=gather, keep=keep)
        return step_folder(root, step)

    def gather(self, payload: bytes) -> list[bytes]:
        """The ``payload`` of every rank, by rank. Collective."""
        return gather_bytes(payload, self.groups.world)

    def load(self, root: Path, tell: Callable[[str], object]) -> dict[str, Any] | None:
        """Fill model and optimizer from the newest whole checkpoint in ``root``, or from ``root``
        itself where it is one; what else was saved. None where there is none yet. ``tell`` hears of
        damaged ones.

        Raises CheckpointError where all are damaged, and for one of another model.
        """
        found = [root] if step_of(root) is not None else checkpoint.newest_first(root)
        newest = newest_whole(found, self._load, self.groups, tell)
        return None if newest is None else newest[1]

    def _load(self, path: Path) -> dict[str, Any]:
        """Load the tensors of a checkpoint; returns its other values."""
        self._require(path, checkpoint.extra_of(path))
        names = checkpoint.names(path)
        wanted = [
            shard
            for name, x in self._weights().items()
            for shard in self._parts(name, x, whole=True)
        ]
        state = self._new_state(names)
        wanted += [shard for name, x in state.items() for shard in self._parts(name, x, whole=True)]
        drawn = {name: x for name, x in self._generators().items() if self._has_row(names, name, x)}
        wanted += [self._row(name, x) for name, x in drawn.items()]
        extra = checkpoint.load(path, wanted)
        self._take(extra["optimizer"], state)
        for name, x in drawn.items():
            device = name.removeprefix(_GENERATOR)
            torch.set_rng_state(x) if device == "cpu" else torch.cuda.set_rng_state(x)
        return extra

    def _generators(self) -> dict[str, torch.Tensor]:
        """The states of torch's generators on this rank, which dropout draws from, by device."""
        found = {f"{_GENERATOR}cpu": torch.get_rng_state()}
        if self.groups.device.type == "cuda":
            found[f"{_GENERATOR}cuda"] = torch.cuda.get_rng_state()
        return found

    def _row(self, name: str, x: torch.Tensor) -> StoredShard:
        """A row for each rank, of which this is this rank's."""
        shape = (self.groups.ranks, len(x))
        return StoredShard(name=name, first_row=self.groups.rank, tensor=x[None], shape=shape)

    def _has_row(self, names: Mapping[str, Any], name: str, x: torch.Tensor) -> bool:
        """Whether a checkpoint has such a state for each of as many ranks: others begin with
        numbers of their own."""
        return name in names and tuple(names[name][0]) == (self.groups.ranks, len(x))

    def _require(self, path: Path, extra: Mapping[str, Any]) -> None:
        """Raise CheckpointError for a checkpoint of another kind of run, or of another
        optimizer."""
        if extra.get("loop") != _FORMAT:
            raise CheckpointError(
                f"checkpoint {path}", got="not one of a loop", wanted="one that run.save() wrote"
            )
        if extra["optimizer"]["kind"] != self._kind:
            raise CheckpointError(
                f"checkpoint {path}",
                got=f"state of {extra['optimizer']['kind']}",
                wanted=f"that of the optimizer, {self._kind}",
            )

    @property
    def _kind(self) -> str:
        return type(self.optimizer).__name__

    def _weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers to save, by name; a shared tensor is there once."""
        seen, found = set[int](), dict[str, torch.Tensor]()
        for name, x in self.model.state_dict(keep_vars=True).items():
            if torch.is_tensor(x) and id(x) not in seen:
                seen.add(id(x))
                found[f"model.{name}"] = x.detach()
        return found

    def _state(self) -> dict[str, torch.Tensor]:
        """The optimizer's tensors by parameter."""
        return {
            f"optimizer.{_SCALAR if not value.dim() else ''}{key}.{name}": value
            for name, key, value in self._entries()
            if torch.is_tensor(value)
        }

    def _entries(self) -> Iterator[tuple[str, str, Any]]:
        """(parameter, key, value) of the optimizer's state."""
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                yield self._names[id(parameter)], key, value

    def _plain_values(self) -> dict[str, dict[str, Any]]:
        """The values of the optimizer's state that are no tensors, by parameter and key."""
        found: dict[str, dict[str, Any]] = {}
        for name, key, value in self._entries():
            if not torch.is_tensor(value):
                found.setdefault(name, {})[key] = value
        return found

    def _hyper(self) -> list[dict[str, Any]]:
        """The options of the optimizer's groups."""
        return [
            {k: float(v) if torch.is_tensor(v) else v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def _new_state(self, names: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Empty tensors in the form of the optimizer state of a checkpoint, to be loaded into."""
        parameters = dict(self.model.named_parameters())
        found: dict[str, torch.Tensor] = {}
        for name, (_, dtype) in names.items():
            if not name.startswith("optimizer."):
                continue
            _, parameter = self._split(name)
            like = parameters[parameter]
            if name.startswith(f"optimizer.{_SCALAR}"):
                found[name] = torch.zeros((), dtype=dtype)
            else:
                found[name] = torch.zeros_like(like, dtype=dtype, requires_grad=False)
        return found

    def _split(self, name: str) -> tuple[str, str]:
        """(key, parameter) of a tensor of the optimizer's state."""
        rest = name.removeprefix("optimizer.").removeprefix(_SCALAR)
        key, _, parameter = rest.partition(".")
        return key, parameter

    def _take(self, saved: Mapping[str, Any], state: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizer a loaded state."""
        parameters = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for name, value in state.items():
            key, parameter = self._split(name)
            self.optimizer.state[parameters[parameter]][key] = value
        for parameter, values in saved["values"].items():
            self.optimizer.state[parameters[parameter]].update(values)
        for group, options in zip(self.optimizer.param_groups, saved["groups"], strict=True):
            for key, value in options.items():
                own = group.get(key)
                if torch.is_tensor(own):
                    own.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(own, tuple) else value

    def _parts(self, name: str, x: torch.Tensor, *, whole: bool) -> Iterator[StoredShard]:
        """This rank's rows of a tensor: all that it works with if ``whole``, else those it has to
        write."""
        shape = tuple(x.shape) or (1,)
        if isinstance(x, DTensor):
            yield from self._own_rows(name, x)
            return
        rows = x.reshape(shape) if x.dim() else x.view(1)
        start, count = 0, shape[0]
        if not whole:
            sizes = split_sizes(count, self.groups.ranks)
            start, count = sum(sizes[: self.groups.rank]), sizes[self.groups.rank]
        if count:
            part = rows[start : start + count]
            yield StoredShard(name=name, first_row=start, tensor=part, shape=shape)

    def _own_rows(self, name: str, x: DTensor) -> Iterator[StoredShard]:
        """This rank's rows of a tensor that FSDP2 shards; none where it has no rows."""
        if len(x.placements) != 1 or not x.placements[0].is_shard(0):
            raise CheckpointError(
                f"checkpoint of {name}",
                got=x.placements,
                wanted=f"{[Shard(0)]}",
                hint="shard weights over one mesh axis, by rows",
            )
        local = x.to_local()
        each = -(-x.shape[0] // x.device_mesh.size())
        if len(local):
            yield StoredShard(
                name=name,
                first_row=each * x.device_mesh.get_local_rank(),
                tensor=local,
                shape=tuple(x.shape),
            )
