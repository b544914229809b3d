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
    """A part of a model that mixes elements along the axes ``mixes`` (such as attention over time),
    and treats all other axes element by element. ``work_s`` are its seconds on one device for the
    whole tensor."""

    mixes: tuple[str, ...]
    work_s: float = 0.0

    def __post_init__(self) -> None:
        if len(set(self.mixes)) != len(self.mixes):
            raise SpecError("axes of a stage", got=", ".join(self.mixes), wanted="each once")
        if not self.work_s >= 0:
            raise SpecError("work_s of a stage", got=self.work_s, wanted="seconds >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """The axis that is sharded over ranks during a stage. A stage that mixes this axis has to
    communicate: ``ulysses`` exchanges heads for positions, ``ring`` passes keys and values on."""

    axis: str
    method: Literal["none", "ulysses", "ring"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisMove:
    """One communication of a rank, in which it sent ``sent_bytes``: ``switch`` changes the sharded
    axis from ``before`` to ``after`` between two modules, another ``method`` (Ulysses, ring) mixes
    the sharded axis within a module and leaves it sharded."""

    before: str
    after: str
    sent_bytes: int = 0
    method: str = "switch"

    def __str__(self) -> str:
        return f"{self.before} to {self.after}" if self.method == "switch" else self.method


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPlan:
    """One choice for each stage. A rank sends ``sent_bytes`` in a forward, which takes ``seconds``;
    ``switches`` counts the changes of the sharded axis, including one right after the input."""

    choices: tuple[AxisChoice, ...]
    switches: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class _Way:
    """The best choices for the first stages of a model that end with one axis sharded; its cost in
    a forward is summed over these stages."""

    seconds: float
    sent_bytes: float
    switches: int
    choices: tuple[AxisChoice, ...]

    @property
    def key(self) -> tuple[float, float, int]:
        """What ways are compared by: quicker first, then fewer bytes, then fewer switches."""
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
    """Choose the sharded axis of every stage so that one forward is quickest, by dynamic
    programming over the stages.

    ``sizes`` are the lengths of the axes that may be sharded over ``ranks``. ``transfer_s(b)`` are
    the seconds in which every rank sends b bytes. Ulysses is chosen for at most ``heads`` ranks;
    where ``heads`` is None no stage may mix the axis that is sharded. ``entry`` is the sharded axis
    of the input (any where None), ``exit_`` the one in which the result is wanted. With ``empty``
    an axis may be shorter than ``ranks``, which leaves some ranks without elements.

    Raises SpecError for axes that have no size, and InfeasiblePlan, naming the stage, when there is
    no axis for it.
    """
    _check(stages, sizes, (entry, exit_))
    axes = [axis for axis, size in sizes.items() if empty or size >= ranks]
    # A switch is an all-to-all: a rank keeps one of R parts of its shard and sends the others.
    switch_bytes = tensor_bytes * (ranks - 1) / ranks**2
    switch_s = transfer_s(switch_bytes) if ranks > 1 else 0.0
    start = [entry] if entry is not None else axes
    nothing = _Way(seconds=0.0, sent_bytes=0.0, switches=0, choices=())
    ways = dict.fromkeys(start, nothing)  # the best way so far by the axis that is sharded now
    for number, stage in enumerate(stages):
        next_ways: dict[str, _Way] = {}  # the best way by the axis sharded in this stage
        for axis in axes:
            for choice in _choices(stage, axis, ranks, heads):
                sent = _bytes_within(choice, tensor_bytes, ranks)
                # The share of the busiest rank, whose shard is ceil(size / ranks) long.
                share = -(-sizes[axis] // ranks) / sizes[axis]
                within_s = stage.work_s * share + (transfer_s(sent) if sent else 0.0)
                for before, way in ways.items():
                    moved = before != axis
                    new = _Way(
                        seconds=way.seconds + within_s + switch_s * moved,
                        sent_bytes=way.sent_bytes + sent + switch_bytes * moved,
                        switches=way.switches + moved,
                        choices=(*way.choices, choice),
                    )
                    if axis not in next_ways or new.key < next_ways[axis].key:
                        next_ways[axis] = new
        if not next_ways:
            raise InfeasiblePlan(
                f"stage {number}, which mixes {', '.join(stage.mixes)}",
                got=f"axes {_sizes_text(sizes)} for {counted(ranks, 'rank')}",
                wanted=f"another axis of at least {ranks} places",
                hint="fewer ranks for each sample, or heads to exchange",
            )
        ways = next_ways
    # Add the last switch, to the wanted axis, where a way ends with another one.
    finished: list[_Way] = []
    for axis, way in ways.items():
        moved = exit_ is not None and axis != exit_
        finished.append(
            _Way(
                seconds=way.seconds + switch_s * moved,
                sent_bytes=way.sent_bytes + switch_bytes * moved,
                switches=way.switches + moved,
                choices=way.choices,
            )
        )
    best = min(finished, key=lambda way: way.key)
    return AxisPlan(
        choices=best.choices,
        switches=best.switches,
        sent_bytes=best.sent_bytes,
        seconds=best.seconds,
    )


def split_batch(batch: int, places: int, ranks: int, *, fewest: int | None = None) -> int:
    """The number of parts into which to split a batch, so that ranks / parts ranks shard an axis of
    ``places`` positions for each part: then an axis may be shorter than the number of ranks.

    Of the divisors of ``ranks`` that leave no rank without positions, the one whose busiest rank
    has the fewest is taken; the smaller one of equals. ``fewest`` is the length of the shortest
    axis that will be sharded, ``places`` where None. Raises InfeasiblePlan where there is no such
    divisor."""
    most = places if fewest is None else min(fewest, places)
    candidates: list[tuple[int, int]] = []  # (positions of the busiest rank, parts)
    for parts in range(1, ranks + 1):
        ranks_of_part = ranks // parts
        if ranks % parts == 0 and parts <= batch and ranks_of_part <= most:
            # Both are rounded up: the busiest rank has the larger share of each.
            samples, positions = -(-batch // parts), -(-places // ranks_of_part)
            candidates.append((samples * positions, parts))
    if not candidates:
        raise InfeasiblePlan(
            f"{batch} samples of {most} places",
            got=counted(ranks, "rank"),
            wanted="a place for each",
            hint="fewer ranks for each batch, or more samples in it",
        )
    return min(candidates)[1]


def _choices(stage: MixingStage, axis: str, ranks: int, heads: int | None) -> list[AxisChoice]:
    """The methods by which a stage can run while ``axis`` is sharded: without communication where
    it does not mix the axis, else by a ring, and by Ulysses where there is a head for each rank.
    None at all where the stage mixes the axis and has no ``heads``."""
    if axis not in stage.mixes or ranks == 1:
        return [AxisChoice(axis=axis)]
    if heads is None:
        return []
    found = [AxisChoice(axis=axis, method="ring")]
    return [AxisChoice(axis=axis, method="ulysses"), *found] if heads >= ranks else found


def _bytes_within(choice: AxisChoice, tensor_bytes: float, ranks: int) -> float:
    """Bytes that a rank sends within a stage, where it holds a shard of ``tensor_bytes`` / R. By
    Ulysses it sends (R - 1) / R of four shards (queries, keys, values, results) in all-to-alls, by
    a ring its keys and values in each of R - 1 hops, and nothing without a method."""
    if choice.method == "ulysses":
        return 4 * tensor_bytes * (ranks - 1) / ranks**2
    return 2 * tensor_bytes * (ranks - 1) / ranks if choice.method == "ring" else 0.0


def _check(
    stages: Sequence[MixingStage], sizes: Mapping[str, int], outer: tuple[str | None, ...]
) -> None:
    """Raise SpecError for an axis of no length, for no stages, and where an axis of ``outer``, that
    of the input and that of the result, is unknown."""
    for name, size in sizes.items():
        if size < 1:
            raise SpecError(f"axis {name}", got=size, wanted="at least one place")
    for axis in outer:
        if axis is not None and axis not in sizes:
            raise SpecError("axis", got=axis, wanted=f"one of {', '.join(sizes)}")
    if not stages:
        raise SpecError("stages", got="none", wanted="at least one")


def _sizes_text(sizes: Mapping[str, int]) -> str:
    """The axes and their lengths for an error's text, such as ``time 16, space 64``."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
