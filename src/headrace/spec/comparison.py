"""What several planners make of the same batches with the same costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from headrace.errors import SpecError, did_you_mean
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan
from headrace.units import counted, percent_text, rate_text, seconds_text

__all__ = ["HEADINGS", "Comparison", "PlannedBatch", "PlannerResult", "Ratios"]

HEADINGS = (
    "planner",
    "mean step",
    "tokens/s a device",
    "idle",
    "times headrace",
    "least-most",
    "holds",
)
"""Names of the columns of :meth:`Comparison.rows`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """One batch by one planner.

    Attributes:
        seconds: Predicted seconds of the step.
        strategy: Its groups, such as ``4*cp8 + 32*cp1``.
        idle: The share of all devices' time in which no micro-batch and no update runs, by the
            planner's seconds; None where it is not known, as of a model's costs in lockstep.
    """

    seconds: float
    strategy: str
    idle: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """How many times the seconds of headrace another planner takes, over the batches that it holds.

    Attributes:
        mean: The mean of the ratios of all batches.
        least: The smallest ratio of a batch.
        most: The largest ratio of a batch.
    """

    mean: float
    least: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerResult:
    """What one planner makes of every batch.

    Attributes:
        name: The planner.
        batches: For each batch what it makes of it; None where it cannot hold the batch.
    """

    name: str
    batches: tuple[PlannedBatch | None, ...]

    @property
    def held(self) -> tuple[int, ...]:
        """The numbers of the batches that it can hold."""
        return tuple(i for i, batch in enumerate(self.batches) if batch is not None)

    @property
    def seconds(self) -> tuple[float | None, ...]:
        """The predicted seconds of each batch."""
        return tuple(None if batch is None else batch.seconds for batch in self.batches)

    @property
    def total_s(self) -> float:
        """Seconds of all batches that it can hold."""
        return sum(batch.seconds for batch in self.batches if batch is not None)

    @property
    def mean_s(self) -> float | None:
        """Seconds of a step, the mean of the batches that it can hold; None where there is none."""
        return self.total_s / len(self.held) if self.held else None

    @property
    def idle(self) -> float | None:
        """The idle share of all devices' time over the batches that it can hold; None where there
        is none, or a share is not known."""
        waited_s = 0.0
        for batch in filter(None, self.batches):
            if batch.idle is None:
                return None
            waited_s += batch.idle * batch.seconds
        return waited_s / self.total_s if self.held else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Several planners over the same batches, all with the same costs.

    ``print`` shows a row for each planner. Seconds are predicted.

    Attributes:
        devices: Ranks of the job.
        plans: The plan of each batch by headrace (of a configuration: by its planner).
        results: What each planner makes of the batches; first that of ``plans``, then ``best static
            of each batch``, the quickest single group size for every batch anew, ``best static``,
            the one size for all batches that is quickest in all of them, as a launch script would
            fix it, ``bucket`` and ``packed`` (``headrace.planners.BASELINES``).
        static_size: Ranks of a group of ``best static``; None where no size holds all batches.

    Raises:
        SpecError: For no batch, and for a planner with another number of them.

    Example:
        >>> model = hr.Architecture.preset("llama-tiny")
        >>> costs = hr.costs.roofline(model, "h100", devices=8)
        >>> batches = hr.lengths.batches("lognormal:median=900,sigma=1.5", 3, tokens="64Ki")
        >>> found = hr.compare(batches, costs)
        >>> found.ratios("best static").least >= 1
        True
    """

    devices: int
    plans: tuple[Plan, ...]
    results: tuple[PlannerResult, ...]
    static_size: int | None

    def __post_init__(self) -> None:
        if not self.plans:
            raise SpecError("batches to compare planners with", got="none", wanted="at least one")
        for result in self.results:
            if len(result.batches) != len(self.plans):
                raise SpecError(
                    f"batches of planner {result.name}",
                    got=len(result.batches),
                    wanted=len(self.plans),
                )

    @property
    def batches(self) -> tuple[Lengths, ...]:
        """The lengths of each batch."""
        return tuple(plan.lengths for plan in self.plans)

    @property
    def tokens(self) -> int:
        """Tokens of all batches together."""
        return sum(plan.lengths.total for plan in self.plans)

    @property
    def bounds_s(self) -> tuple[float, ...]:
        """Seconds of each batch that no plan beats."""
        return tuple(plan.lower_bound_s for plan in self.plans)

    @property
    def gap(self) -> float:
        """How far the plans' seconds are above their bounds, over all batches, as a fraction of
        these."""
        bound_s = sum(self.bounds_s)
        return self.results[0].total_s / bound_s - 1 if bound_s > 0 else 0.0

    def result(self, name: str) -> PlannerResult:
        """What a planner makes of the batches.

        Args:
            name: The planner, as ``results`` names it.

        Returns:
            Its seconds, strategies and idle shares.

        Raises:
            SpecError: For a planner that was not compared.
        """
        by_name = {result.name: result for result in self.results}
        if name not in by_name:
            raise SpecError(
                "planner of a comparison",
                got=repr(name),
                wanted=", ".join(by_name),
                hint=did_you_mean(name, by_name),
            )
        return by_name[name]

    def tokens_per_s(self, name: str) -> float | None:
        """Tokens that one device trains in a second, over the batches that a planner holds.

        Args:
            name: The planner.

        Returns:
            Tokens of these batches over their seconds and the devices; None where it holds none.

        Raises:
            SpecError: For a planner that was not compared.
        """
        result = self.result(name)
        if not result.held:
            return None
        tokens = sum(self.plans[i].lengths.total for i in result.held)
        return tokens / result.total_s / self.devices

    def ratios(self, name: str) -> Ratios | None:
        """How much longer a planner takes than headrace.

        Args:
            name: The planner.

        Returns:
            Its seconds over those of ``plans``, batch by batch; None where it holds none.

        Raises:
            SpecError: For a planner that was not compared.
        """
        seconds = self.result(name).seconds
        ratios = [
            batch_s / plan.predicted_s
            for batch_s, plan in zip(seconds, self.plans, strict=True)
            if batch_s is not None
        ]
        if not ratios:
            return None
        return Ratios(mean=sum(ratios) / len(ratios), least=min(ratios), most=max(ratios))

    def label(self, name: str) -> str:
        """The name of a planner for people, with the group size of ``best static``.

        Args:
            name: The planner.

        Returns:
            Its name, such as ``best static, 16 ranks``.
        """
        if name != "best static" or self.static_size is None:
            return name
        return f"{name}, {counted(self.static_size, 'rank')}"

    def rows(self) -> list[tuple[str, ...]]:
        """The table of the comparison, as text.

        Returns:
            For each planner its name, seconds of a mean step, tokens per second of a device, idle
            share, mean ratio, least and most ratio, and how many batches it holds.
        """
        return [self._row(result) for result in self.results]

    def _row(self, result: PlannerResult) -> tuple[str, ...]:
        """The cells of one planner; a dash where it holds no batch."""
        held = f"{len(result.held)} of {len(self.plans)}"
        name = self.label(result.name)
        mean_s, rate = result.mean_s, self.tokens_per_s(result.name)
        ratios, idle = self.ratios(result.name), result.idle
        if mean_s is None or rate is None or ratios is None:
            return (name, "-", "-", "-", "-", "-", held)
        return (
            name,
            seconds_text(mean_s),
            rate_text(rate),
            "-" if idle is None else percent_text(idle),
            f"{ratios.mean:.3f}",
            f"{ratios.least:.3f}-{ratios.most:.3f}",
            held,
        )

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON.

        Returns:
            Devices, for each batch its tokens, sequences, longest sequence and bound, and for each
            planner its seconds, strategies and idle shares (null where it cannot hold a batch), the
            mean step, tokens per second of a device and ratios.
        """
        return {
            "devices": self.devices,
            "static_size": self.static_size,
            "gap": self.gap,
            "batches": [
                {
                    "tokens": plan.lengths.total,
                    "sequences": len(plan.lengths),
                    "longest": plan.lengths.longest,
                    "lower_bound_s": plan.lower_bound_s,
                }
                for plan in self.plans
            ],
            "planners": [self._planner_json(result) for result in self.results],
        }

    def _planner_json(self, result: PlannerResult) -> dict[str, Any]:
        """One planner's entry in :meth:`to_json`."""
        ratios, batches = self.ratios(result.name), result.batches
        return {
            "name": result.name,
            "seconds": list(result.seconds),
            "strategies": [None if batch is None else batch.strategy for batch in batches],
            "idle": [None if batch is None else batch.idle for batch in batches],
            "mean_s": result.mean_s,
            "tokens_per_s_per_device": self.tokens_per_s(result.name),
            "ratios": None if ratios is None else asdict(ratios),
        }

    def __str__(self) -> str:
        """A table with a row for each planner, and how far headrace is from its bound."""
        table = [HEADINGS, *self.rows()]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if at else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in table
        ]
        return "\n".join((*lines, self.bound_text()))

    def bound_text(self) -> str:
        """How far the plans are above what no plan beats, in words.

        Returns:
            A sentence.
        """
        over = percent_text(self.gap)
        return f"{self.results[0].name} is {over} above the bound that no plan beats"
