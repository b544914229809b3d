"""One rank of a Transformer-2D by each method of DSP's Table 3, at sizes that need many GPUs.

The rank runs its real code in a world of absent partners, on tensors that have shapes and no
contents: bytes sent and bytes alive are counted, seconds are a roofline of the hardware, operator
by operator, and of its links. Layers are alike, so a model of one layer and one of two tell those
of all. Blocks are computed again in the backward (``recompute``), without which a clip of the
paper's fits no GPU.

Links are priced to the rivals' advantage: an all-to-all sends to other nodes and within its own at
once; all-gathers and sums of Megatron cross to each node once, however they are sent here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from dsp_sides import Prepared, prepare
from torch.nn import functional

import headrace as hr
from headrace.comm.fake_world import fake_world
from headrace.comm.mesh import Groups
from headrace.models.transformer_2d import SHAPES_2D, Shape2D, Transformer2D
from headrace.native.counted import ByteCounter, TrafficCounter
from headrace.profiling.link_clock import Modelled
from headrace.spec.hardware import Hardware, Link

__all__ = ["Cell", "Rehearsed", "rehearsed"]

SPACE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A batch of ``clips`` of ``frames`` frames of 4,096 patches, all shared by ``ranks``."""

    method: str
    model: str
    frames: int
    ranks: int
    clips: int = 1
    recompute: bool = True
    training: bool = True

    @property
    def tokens(self) -> int:
        """Places of the whole batch."""
        return self.clips * self.frames * SPACE

    @property
    def tensor_bytes(self) -> int:
        """M of the paper: the activations between two blocks, of all ranks."""
        return self.tokens * SHAPES_2D[self.model].hidden * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What one rank does: seconds of a forward and of a whole step, seconds in which its links are
    busy, bytes that it sends, and the most bytes of activations alive at once."""

    forward_s: float
    step_s: float
    link_s: float
    sent_forward: float
    sent_step: float
    peak_bytes: float

    def extended(self, other: Rehearsed, layers: int) -> Rehearsed:
        """That of ``layers`` layers, this being of one and ``other`` of two."""
        found = {
            name: getattr(self, name) + (layers - 1) * (getattr(other, name) - getattr(self, name))
            for name in self.__slots__
        }
        return Rehearsed(**found)

    def per_layer(self, other: Rehearsed) -> Rehearsed:
        """What one more layer adds, this being of one and ``other`` of two."""
        return Rehearsed(
            **{name: getattr(other, name) - getattr(self, name) for name in self.__slots__}
        )


class _NodeClock(Modelled):
    """Prices an exchange by what stays in the node and what leaves it; ``sums``: an all-to-all is
    part of a sum over ranks."""

    def __init__(self, hardware: Hardware, rank: int, ranks: int, *, sums: bool) -> None:
        super().__init__(hardware)
        self._rank, self._ranks, self._sums = rank, ranks, sums
        self._given: tuple[Any, ...] = ()

    def _collective(self, func: Any, args: Any, rest: Any, sent: tuple[int, Any]) -> Any:
        self._given = args
        return super()._collective(func, args, rest, sent)

    def _seconds(self, link: Link, count: int) -> float:
        splits = self._given[4] if len(self._given) > 4 else None
        if self._sums or not isinstance(splits, list):
            whole = count * self._ranks / (self._ranks - 1)
            return link.latency_s + self.hardware.gather_s(self._ranks, whole)
        each, node = self.hardware.devices_per_node, self._rank // self.hardware.devices_per_node
        row = count / max(1, sum(splits) - splits[self._rank])
        mine = sum(
            n for peer, n in enumerate(splits) if peer // each == node and peer != self._rank
        )
        others = sum(n for peer, n in enumerate(splits) if peer // each != node)
        inside_s = self.hardware.inside.seconds(mine * row, 0)
        return link.latency_s + max(inside_s, self.hardware.across.seconds(others * row, 0))


def rehearsed(cell: Cell, hardware: str = "h100") -> tuple[Rehearsed, Rehearsed]:
    """(the whole model, one layer of it) by one rank; torch.distributed must not be initialised."""
    shape = SHAPES_2D[cell.model]
    one, two = (_of_layers(cell, replace(shape, layers=n), hardware) for n in (1, 2))
    return one.extended(two, shape.layers), one.per_layer(two)


def _of_layers(cell: Cell, shape: Shape2D, hardware: str) -> Rehearsed:
    """A model of a few layers."""
    machine = Hardware.parse(hardware)
    rank = min(cell.ranks, machine.devices_per_node) - 1  # whose next one is in another node
    with fake_world(rank, cell.ranks) as groups:
        groups.prepare([tuple(range(cell.ranks))])
        loss = _prepared(cell, shape, groups)
        sums = cell.method.startswith("megatron")
        clock = _NodeClock(machine, rank, cell.ranks, sums=sums)
        with _flash(), ByteCounter() as live, clock, TrafficCounter() as wire:
            with torch.set_grad_enabled(cell.training):
                result = loss()
            forward_s, sent = clock.now(), wire.sent_bytes
            if cell.training:
                result.backward()
        return Rehearsed(
            forward_s=forward_s,
            step_s=clock.now(),
            link_s=clock.comm_s,
            sent_forward=sent,
            sent_step=wire.sent_bytes,
            peak_bytes=live.peak_bytes,
        )


@contextmanager
def _flash() -> Iterator[None]:
    """Attention by a kernel that keeps no scores, as on a GPU; without a device torch takes one
    that does."""
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    with patch.object(functional, "scaled_dot_product_attention", lambda *qkv: fused(*qkv)[0]):
        yield


def _prepared(cell: Cell, shape: Shape2D, groups: Groups) -> Callable[[], torch.Tensor]:
    """The loss of this rank, of a model without contents."""
    with torch.device("meta"):
        model = Transformer2D(shape).to(torch.bfloat16)
        inputs = {
            "x": torch.empty(
                (cell.clips, cell.frames, SPACE, shape.channels), dtype=torch.bfloat16
            ),
            "timestep": torch.empty(cell.clips),
            "frames": torch.empty(cell.frames),
            "patches": torch.empty(SPACE),
        }
        for layer in model.layers:
            layer.gradient_checkpointing = cell.recompute and cell.training
        if cell.ranks == 1:
            return lambda: model(**inputs).square().sum()
        if cell.method != "dsp":
            return prepare(cell.method, model, inputs).loss
    return _switched(model, inputs, groups, tuple(range(cell.ranks))).loss


def _switched(
    model: Transformer2D, inputs: dict[str, torch.Tensor], groups: Groups, ranks: tuple[int, ...]
) -> Prepared:
    """By ``hr.adapt``, whose ranks compare nothing."""
    run = hr.adapt(model, groups=groups, check=False, compare=False)
    part = run.place(inputs, ranks, groups=groups)
    with torch.no_grad(), _flash():
        run(**part)  # the order of the stages is learnt
    return Prepared(loss=lambda: run(**part).square().sum(), keep=run)
