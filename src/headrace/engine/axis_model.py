"""Models of several axes in a loop: clips of equal shape are worked on together.

A pack is a batch of samples of one shape, so a micro-batch of clips of several shapes is several
packs, one after the other. The length of a sample is the number of its places on all axes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.adopt.axes import Adapted, axis_groups
from headrace.adopt.axis_shards import Dims
from headrace.adopt.token_probe import logits_of
from headrace.comm.mesh import Groups
from headrace.engine.sample_order import is_numbers
from headrace.engine.spread_model import Item, Levels, LoopPart, Pack
from headrace.errors import DataError, ModelError, SpecError
from headrace.spec.method import Recompute
from headrace.spec.method_facts import Members
from headrace.spec.plan import TokenOrder

__all__ = ["AxisModel"]

_EXCHANGES = ("dsp",)


class AxisModel:
    """A model whose axes are switched. Items have its inputs without the dim of samples, and what
    they are compared with under ``label_name``, of the dims of the first input with axes."""

    def __init__(self, adapted: Adapted, groups: Groups, *, label_name: str) -> None:
        if adapted.batch is None:
            raise SpecError(
                "adapted model in a loop",
                got="no name of its samples",
                wanted="one",
                hint="hr.adapt(model, ..., batch='b')",
            )
        self.adapted, self.exchanges, self.whole = adapted, _EXCHANGES, False
        self._groups, self._label_name = groups, label_name
        adapted.join(groups)
        shown = [name for name, dims in adapted.inputs.items() if adapted.axis in dims]
        if not shown:
            raise ModelError(
                f"loop over {type(adapted.inner).__name__}",
                got="no input with places of its axis",
                wanted=f"one with a dim {adapted.axis}",
                hint="use hr.adapt and a loop of your own",
            )
        self._main = shown[0]
        takes = inspect.signature(adapted.inner.forward).parameters
        self._takes = {*takes, *adapted.inputs}

    @property
    def inner(self) -> torch.nn.Module:
        """The user's own module."""
        return self.adapted.inner

    def read(self, item: Any, what: str) -> Item:
        """Its tensors, with a dim of one sample where inputs have one."""
        if not isinstance(item, Mapping) or self._main not in item:
            got = ", ".join(map(str, item)) if isinstance(item, Mapping) else type(item).__name__
            raise DataError(what, got=got or "nothing", wanted=f"a field {self._main!r}")
        found = {
            name: torch.as_tensor(value)
            for name, value in item.items()
            if is_numbers(value) or isinstance(value, int | float)
        }
        return {name: self._one(name, value, what) for name, value in found.items()}

    def length(self, sample: Item) -> int:
        """Its places."""
        return self.adapted.places(sample)

    def begin(self, sample: Item, device: str) -> Callable[[], None]:
        """Its hooks are there already; results come back to the shards that inputs have."""

        def back(_: Any, out: Any) -> Any:
            return self.adapted.back(out, self._main)

        return self.adapted.on(self.inner, after=back)

    def packs(self, samples: Sequence[Item]) -> list[Pack]:
        """Those of one shape together."""
        alike: dict[Any, list[Item]] = {}
        for sample in samples:
            alike.setdefault(self._kind(sample), []).append(sample)
        return [self._pack(some) for some in alike.values()]

    def made(self, sample: Item, lengths: Sequence[int], ranks: int, *, document: int) -> Pack:
        """Samples of one shape: each axis that inputs show is shortened alike."""
        total = sum(lengths)
        count = max(len(lengths), -(-total // document))
        one = self._shrunk(sample, total / count, ranks)
        return self._pack([one] * count)

    def ranks_for(self, pack: Pack, ranks: Members) -> Members:
        """As many as samples and axes have places for."""
        return ranks[: self.adapted.most_ranks(pack.values, len(ranks))]

    def groups_of(self, ranks: Members) -> list[Members]:
        """Those of axes and across them, however samples are split."""
        sizes = [each for each in range(1, len(ranks) + 1) if len(ranks) % each == 0]
        return sorted({some for each in sizes for some in axis_groups(ranks, each)})

    def prepare(self, groups: Iterable[Members]) -> None:
        """Make groups."""
        self._groups.prepare(groups)

    def place(
        self,
        pack: Pack,
        ranks: Members,
        *,
        targets: int,
        exchange: str | None,
        groups: Groups | None = None,
    ) -> LoopPart:
        """This rank's places."""
        declared, rest = self._declared(pack.values)
        placed = self.adapted.place(declared, ranks, groups or self._groups)
        return self._part({**placed, **rest}, targets)

    def _declared(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Inputs with dims, and all else."""
        known = {name: value for name, value in values.items() if name in self.adapted.inputs}
        return known, {name: value for name, value in values.items() if name not in known}

    def take(self, part: LoopPart) -> None:
        """Work on a part."""
        self.adapted.take(part.shard)

    def number(self, outputs: Any) -> torch.Tensor:
        """The square of its result."""
        return logits_of(getattr(outputs, "sample", outputs)).float().square().mean()

    def order(self, exchange: str) -> TokenOrder:
        """Places in a row."""
        return "natural"

    def levels(self, layers: Sequence[torch.nn.Module]) -> Levels | None:
        """Whole stages, in models whose layers each have a flag for it."""
        if not all("gradient_checkpointing" in vars(layer) for layer in layers):
            return None

        def choose(levels: Sequence[Recompute]) -> None:
            for layer, level in zip(layers, levels, strict=True):
                vars(layer)["gradient_checkpointing"] = level != "none"

        entries = max(1, self.adapted.stages_in(layers[0]))
        return Levels(choose=choose, known=("full",), entries=entries)

    def shard(self, batch: Any) -> LoopPart:
        """This rank's places of a batch as users have them."""
        values = dict(batch)
        places = self.adapted.places(values) * self._samples(values)
        declared, rest = self._declared(values)
        return self._part({**self.adapted.shard(declared), **rest}, places)

    def forget(self) -> None:
        """What was learnt of stages."""
        self.adapted.forget()

    def _part(self, placed: Mapping[str, torch.Tensor], targets: int) -> LoopPart:
        shards = self.adapted.shards
        assert shards is not None, "placed"
        labels = placed.get(self._label_name)
        if labels is not None and self._label_name not in self.adapted.inputs:
            labels = self.adapted.local(labels, str(self.adapted.inputs[self._main]))
        first, count, of = shards.samples
        own = {
            name: value.narrow(0, first, count)
            if self._dims(name) is None and value.dim() and len(value) == of
            else value
            for name, value in placed.items()
        }
        return LoopPart(
            inputs={name: value for name, value in own.items() if name in self._takes},
            rest={
                name: value
                for name, value in own.items()
                if name not in self._takes and name != self._label_name
            },
            labels=labels,
            group=shards.group,
            targets=targets,
            tokens=math.prod(shards.here().values()),
            shard=shards,
        )

    def _one(self, name: str, value: torch.Tensor, what: str) -> torch.Tensor:
        dims = self._dims(name)
        if dims is None:
            return value[None]
        at = self._at(dims)
        if value.dim() != len(dims.names) - (at is not None):
            raise DataError(
                f"{name} of {what}", got=list(value.shape), wanted=f"dims {dims}, of one sample"
            )
        return value if at is None else value.unsqueeze(at)

    def _dims(self, name: str) -> Dims | None:
        if name == self._label_name:
            name = self._main
        return self.adapted.inputs.get(name)

    def _at(self, dims: Dims) -> int | None:
        """The dim of the samples."""
        names = (self.adapted.batch or "",)
        return dims.names.index(names) if names in dims.names else None

    def _samples(self, values: Mapping[str, torch.Tensor]) -> int:
        at = self._at(self.adapted.inputs[self._main])
        return 1 if at is None else values[self._main].shape[at]

    def _kind(self, sample: Item) -> Any:
        """What samples of one pack have alike: shapes, and inputs that have no samples."""
        found: list[Any] = []
        for name, value in sorted(sample.items()):
            dims = self._dims(name)
            alone = dims is not None and self._at(dims) is None
            found.append((name, value.shape, tuple(value.flatten().tolist()) if alone else None))
        return tuple(found)

    def _pack(self, samples: Sequence[Item]) -> Pack:
        values = dict[str, torch.Tensor]()
        for name, value in samples[0].items():
            dims = self._dims(name)
            at = 0 if dims is None else self._at(dims)
            values[name] = value if at is None else torch.cat([s[name] for s in samples], dim=at)
        places = self.length(samples[0]) * len(samples)
        return Pack(values=values, tokens=places, targets=places)

    def _shrunk(self, sample: Item, places: float, ranks: int) -> Item:
        """A sample of about so many places, and one for each rank on every axis."""
        sizes = dict[str, int]()
        for name, dims in self.adapted.inputs.items():
            for at, names in enumerate(dims.names):
                if len(names) == 1 and names[0] in self.adapted.axes and name in sample:
                    sizes[names[0]] = sample[name].shape[at]
        share = (places / self.length(sample)) ** (1 / len(sizes))
        wanted = {name: max(ranks, round(n * share)) for name, n in sizes.items()}
        return {name: self._cut(name, value, wanted) for name, value in sample.items()}

    def _cut(self, name: str, value: torch.Tensor, wanted: Mapping[str, int]) -> torch.Tensor:
        dims = self._dims(name)
        for at, names in enumerate(dims.names if dims is not None else ()):
            count = wanted.get(names[0]) if len(names) == 1 else None
            if count is not None:
                times = [1] * value.dim()
                times[at] = -(-count // value.shape[at])
                value = value.repeat(times).narrow(at, 0, count)
        return value
