"""Axes of multi-dimensional models: what stages mix, and which axis is in shards meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.errors import InfeasiblePlan, SpecError
from headrace.units import counted

__all__ = [
    "AxisChoice",
    "AxisMove",
    "AxisPlan",
    "MixingStage",
    "plan_axes",
    "split_batch",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixingStage:
    """A part of a model in which places of the axes ``mixes`` see each other, and of no other.
    ``work_s`` are its seconds on one device for the whole tensor."""

    mixes: tuple[str, ...]
    work_s: float = 0.0

    def __post_init__(self) -> None:
        if len(set(self.mixes)) != len(self.mixes):
            raise SpecError("axes of a stage", got=", ".join(self.mixes), wanted="each once")
        if not self.work_s >= 0:
            raise SpecError("work_s of a stage", got=self.work_s, wanted="seconds >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """The axis in shards during a stage. A stage that mixes it meets the other ranks within:
    ``ulysses`` exchanges heads for places, ``ring`` passes keys and values on."""

    axis: str
    method: Literal["none", "ulysses", "ring"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMove:
    """What one rank did between two modules or within one: it switched the axis in shards, or met
    the others' places by a ``method`` and kept it; the rank sent ``sent_bytes``."""

    before: str
    after: str
    sent_bytes: int = 0
    method: str = "switch"

    def __str__(self) -> str:
        return f"{self.before} to {self.after}" if self.method == "switch" else self.method


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """One choice for each stage. ``sent_bytes`` of each rank in a forward, and its ``seconds``;
    ``switches`` counts changes of the axis, from that of the input on."""

    choices: tuple[AxisChoice, ...]
    switches: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Way:
    """The best way to a stage with an axis."""

    seconds: float
    sent_bytes: float
    switches: int
    choices: tuple[AxisChoice, ...]

    @property
    def key(self) -> tuple[float, float, int]:
        return self.seconds, self.sent_bytes, self.switches


def plan_axes(
    stages: Sequence[MixingStage],
    sizes: Mapping[str, int],
    ranks: int,
    *,
    tensor_bytes: float,
    transfer_s: Callable[[float], float],
    heads: int | None = None,
    entry: str | None = None,
    exit_: str | None = None,
    empty: bool = False,
) -> AxisPlan:
    """The quickest choice of axes for one pass.

    ``sizes`` are those of the axes that may be in shards. ``transfer_s(b)``: seconds in which every
    rank sends b bytes. ``heads`` limits Ulysses, which is not chosen for more ranks; without heads
    no stage may mix its own axis. ``entry`` is the axis of the input, free where it is None, and
    ``exit_`` that in which the result is wanted. With ``empty`` ranks may be without places.

    Raises SpecError for axes that have no size, and InfeasiblePlan, naming the stage, when there is
    no axis for it.
    """
    _check(stages, sizes, (entry, exit_))
    axes = [axis for axis, size in sizes.items() if empty or size >= ranks]
    switch_bytes = tensor_bytes * (ranks - 1) / ranks**2
    switch_s = transfer_s(switch_bytes) if ranks > 1 else 0.0
    start = [entry] if entry is not None else axes
    ways = {axis: _Way(0.0, 0.0, 0, ()) for axis in start}
    for number, stage in enumerate(stages):
        found: dict[str, _Way] = {}
        for axis in axes:
            for choice in _choices(stage, axis, ranks, heads):
                sent = _bytes_within(choice, tensor_bytes, ranks)
                share = -(-sizes[axis] // ranks) / sizes[axis]
                within_s = stage.work_s * share + (transfer_s(sent) if sent else 0.0)
                for before, way in ways.items():
                    moved = before != axis
                    new = _Way(
                        way.seconds + within_s + switch_s * moved,
                        way.sent_bytes + sent + switch_bytes * moved,
                        way.switches + moved,
                        (*way.choices, choice),
                    )
                    if axis not in found or new.key < found[axis].key:
                        found[axis] = new
        if not found:
            raise InfeasiblePlan(
                f"stage {number}, which mixes {', '.join(stage.mixes)}",
                got=f"axes {_sizes_text(sizes)} for {counted(ranks, 'rank')}",
                wanted=f"another axis of at least {ranks} places",
                hint="fewer ranks for each sample, or heads to exchange",
            )
        ways = found
    finished = {
        axis: _Way(
            way.seconds + switch_s * moved,
            way.sent_bytes + switch_bytes * moved,
            way.switches + moved,
            way.choices,
        )
        for axis, way in ways.items()
        for moved in (exit_ is not None and axis != exit_,)
    }
    best = min(finished.values(), key=lambda way: way.key)
    return AxisPlan(
        choices=best.choices,
        switches=best.switches,
        sent_bytes=best.sent_bytes,
        seconds=best.seconds,
    )


def split_batch(batch: int, places: int, ranks: int, *, fewest: int | None = None) -> int:
    """Parts of the batch that work apart, so that an axis with few ``places`` serves many ranks
    (images have one frame): the number b of the divisors of ``ranks`` with b <= ``batch`` and
    ranks / b <= ``places`` whose busiest rank has the least, the smallest of equals. ``fewest`` are
    places of the shortest axis that will be in shards, those of this one where it is None. Raises
    InfeasiblePlan where some rank would have nothing."""
    most = places if fewest is None else min(fewest, places)
    found = [
        (-(-batch // parts) * -(-places // (ranks // parts)), parts)
        for parts in range(1, ranks + 1)
        if ranks % parts == 0 and parts <= batch and ranks // parts <= most
    ]
    if not found:
        raise InfeasiblePlan(
            f"{batch} samples of {most} places",
            got=counted(ranks, "rank"),
            wanted="a place for each",
            hint="fewer ranks for each batch, or more samples in it",
        )
    return min(found)[1]


def _choices(stage: MixingStage, axis: str, ranks: int, heads: int | None) -> list[AxisChoice]:
    """How a stage can run with ``axis`` in shards: as it is where it does not mix the axis, else by
    a ring, or by Ulysses where there are ``heads`` for all ranks."""
    if axis not in stage.mixes or ranks == 1:
        return [AxisChoice(axis=axis)]
    if heads is None:
        return []
    found = [AxisChoice(axis=axis, method="ring")]
    return [AxisChoice(axis=axis, method="ulysses"), *found] if heads >= ranks else found


def _bytes_within(choice: AxisChoice, tensor_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends within a stage of the axis in shards: four tensors by Ulysses, keys
    and values round a ring."""
    if choice.method == "ulysses":
        return 4 * tensor_bytes * (ranks - 1) / ranks**2
    return 2 * tensor_bytes * (ranks - 1) / ranks if choice.method == "ring" else 0.0


def _check(
    stages: Sequence[MixingStage], sizes: Mapping[str, int], outer: tuple[str | None, ...]
) -> None:
    """Raise SpecError for an axis without places, an unknown axis at the beginning or end, or no
    stages."""
    for name, size in sizes.items():
        if size < 1:
            raise SpecError(f"axis {name}", got=size, wanted="at least one place")
    for axis in outer:
        if axis is not None and axis not in sizes:
            raise SpecError("axis", got=axis, wanted=f"one of {', '.join(sizes)}")
    if not stages:
        raise SpecError("stages", got="none", wanted="at least one")


def _sizes_text(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
