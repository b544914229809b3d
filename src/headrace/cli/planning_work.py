"""What ``headrace plan`` and ``headrace simulate`` plan: batches, costs, and who plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.cli.display import tell
from headrace.cli.flags import PlanFlags, SimulateFlags, overrides
from headrace.config import Config
from headrace.costs import CostModel
from headrace.costs.rates import Assumed, Rates
from headrace.data.drawn_lengths import draw_batches, parse_distribution
from headrace.data.sampler import BatchSampler
from headrace.engine.cost_cache import costs_at_hand
from headrace.engine.iteration_sampler import IterationSampler
from headrace.engine.listener import ProgressLines
from headrace.engine.planned_iterations import OWN
from headrace.engine.plans import sizes_left_out
from headrace.engine.robustness import (
    DoubtedPlans,
    Robustness,
    doubted,
    for_the_worst,
    robustness,
)
from headrace.engine.setup import (
    PricedSampler,
    architecture_of,
    assumed_by,
    open_data,
    roofline_of,
)
from headrace.engine.step_planner import StepPlanner
from headrace.errors import ConfigError
from headrace.planning import Problem
from headrace.spec.architecture import Architecture
from headrace.spec.draw_options import DrawOptions
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import Implementation
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan
from headrace.spec.step import Planned, PlanRequest
from headrace.units import bytes_text

__all__ = ["PlanningWork", "fits", "prepare"]

_POOL = 1024
"""Samples of the first, smallest pool from which iterations are drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningWork:
    """What to plan and who plans it.

    ``batches`` are the lengths of each batch's sequences; ``source`` says where the costs are from,
    ``assumed`` what rates assume. ``doubted`` has the plans for hardware that is somewhat slower or
    faster than the assumed one, by names such as ``links x 0.8``; None where costs were measured.
    With ``pessimistic``, each batch gets the plan that is best in the worst case of these.
    """

    planner: StepPlanner
    batches: tuple[Lengths, ...]
    source: str
    architecture: Architecture
    assumed: Assumed
    doubted: DoubtedPlans | None
    pessimistic: bool = False

    @property
    def costs(self) -> CostModel:
        """What work costs on the devices."""
        return self.planner.costs

    def plans(self) -> Iterator[Planned]:
        """Plan one batch after the other, each knowing the plan before it."""
        previous: Plan | None = None
        for step, batch in enumerate(self.batches):
            request = PlanRequest(lengths=batch, step=step, previous=previous)
            planned = self.planner.plan(request)
            if self.pessimistic and (doubted := self.doubted) is not None:
                made = doubted.of(step)
                planned = for_the_worst(planned, self.planner, doubted.doubts, made)
            yield planned
            previous = planned.plan

    def rates(self, plan: Plan) -> Rates:
        """Tokens a second and utilisation of a plan."""
        return Rates.of(plan.lengths.tokens, plan.predicted_s, self.architecture, self.assumed)

    def robustness(self, planned: Planned) -> Robustness | None:
        """How far a plan stays best when the hardware is not as assumed; None where costs were
        measured."""
        if self.doubted is None:
            return None
        assert planned.request is not None, "each plan is of a batch"
        made = self.doubted.of(planned.request.step)
        return robustness(planned.plan, self.doubted.doubts, made)


def fits(planned: Planned, costs: CostModel) -> str:
    """The memory of the fullest rank in words: its predicted peak and the bytes that it may use."""
    peaks = planned.peak_bytes
    fullest = max(range(len(peaks)), key=lambda rank: peaks[rank])
    capacity = bytes_text(costs.capacity_bytes)
    return f"peak {bytes_text(peaks[fullest])} of {capacity} (rank {fullest})"


def prepare(config_path: Path, flags: PlanFlags | SimulateFlags) -> PlanningWork:
    """All that planning needs: batches from the data or from a distribution of lengths, costs, and
    what they assume; raises ConfigError for flags that exclude each other."""
    if flags.batches < 1:
        raise ConfigError("--batches", got=flags.batches, wanted=">= 1")
    if flags.costs is not None and flags.hardware is not None:
        raise ConfigError("--hardware", got="--costs too", wanted="one of them")
    keys = {
        "planner.name": _planner_name(flags),
        "devices.ranks": flags.ranks,
        "devices.hardware": flags.hardware,
        "devices.implementation": flags.implementation,
        "run.seed": flags.seed,
    }
    config = Config.load(config_path, *overrides(flags.changes, keys))
    data = open_data(config, ProgressLines()) if flags.lengths is None else None
    architecture = architecture_of(config) if data is None else data.architecture
    costs, remark = costs_at_hand(config, architecture, flags.costs)
    for line in (remark, sizes_left_out(config.planner, costs.cluster.devices)):
        if line:
            tell(line)
    planner = StepPlanner(costs=costs, options=config.planner, seed=config.run.seed)
    if flags.lengths is None:
        assert data is not None, "opened"
        batches = _next_batches(data.sampler, flags.batches, planner.problem())
    elif config.data.iterations is None:
        batches = _drawn(config, flags.lengths, flags.batches)
    else:
        options = config.data.iterations.options(config.run.seed)
        batches = _iterations(flags.lengths, options, flags.batches, planner.problem())
    doubts: dict[str, StepPlanner] = {}
    if isinstance(flags, PlanFlags) and flags.costs is None:
        doubts = _doubts(config, architecture)
    pessimistic = isinstance(flags, PlanFlags) and flags.pessimistic
    if pessimistic and not doubts:
        wanted = "costs of hardware that is not at hand (--hardware)"
        raise ConfigError("--pessimistic", got="costs of other kinds", wanted=wanted)
    return PlanningWork(
        planner=planner,
        batches=batches,
        source=remark or costs.fingerprint,
        architecture=architecture,
        assumed=assumed_by(config, costs),
        doubted=DoubtedPlans(batches, doubts) if doubts else None,
        pessimistic=pessimistic,
    )


def _planner_name(flags: PlanFlags | SimulateFlags) -> str | None:
    """The value of ``planner.name`` that the flag ``--planner`` stands for, as this library's own
    planner has another name there; None where the flag is left out or not one of the command."""
    name = flags.planner if isinstance(flags, PlanFlags) else None
    return "adaptive" if name == OWN else name


def _doubts(config: Config, architecture: Architecture) -> dict[str, StepPlanner]:
    """Planners for hardware that is slower or faster than the one a configuration names, by the
    name of each such doubt (:func:`doubted`); empty where it names no hardware."""
    options = config.devices
    if options.hardware is None:
        return {}
    hardware = Hardware.parse(options.hardware)
    kernels = Implementation.named(options.implementation)
    return {
        name: StepPlanner(
            costs=roofline_of(config, architecture, options.ranks, *hardware_and_kernels),
            options=config.planner,
            seed=config.run.seed,
        )
        for name, hardware_and_kernels in doubted(hardware, kernels).items()
    }


def _next_batches(sampler: BatchSampler, batches: int, problem: Problem) -> tuple[Lengths, ...]:
    """The lengths of the next ``batches`` batches of the data; the sampler does not move. A sampler
    whose batches depend on costs draws them for those of ``problem``."""
    if isinstance(sampler, PricedSampler):
        sampler.price(problem)
        tell(f"iterations are {sampler}")
    return tuple(batch.lengths for batch in sampler.peek(batches))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pool:
    """Lengths drawn from a distribution, in the place of a corpus: a sampler of iterations asks for
    its lengths, name and fingerprint."""

    lengths: NDArray[np.int64]
    name: str = "drawn lengths"
    fingerprint: str = ""


def _iterations(
    text: str, options: DrawOptions, batches: int, problem: Problem
) -> tuple[Lengths, ...]:
    """The lengths of ``batches`` iterations that choose their samples among lengths drawn from the
    distribution ``text``. At least twice as many are drawn as are chosen: the last iterations of an
    epoch have few to choose from."""
    distribution, pool_samples = parse_distribution(text), _POOL
    while True:  # with twice the samples each time, until they are enough
        (pool,) = draw_batches(distribution, None, 1, options.seed, batch_sequences=pool_samples)
        sampler = IterationSampler(_Pool(lengths=np.array(pool.tokens)), options)
        sampler.price(problem)
        iterations = sampler.peek(batches)
        chosen_samples = sum(len(iteration.samples) for iteration in iterations)
        if iterations[-1].epoch == 0 and 2 * chosen_samples <= pool_samples:
            tell(f"iterations are {sampler}, {pool_samples:,} samples in an epoch")
            return tuple(iteration.lengths for iteration in iterations)
        pool_samples *= 2


def _drawn(config: Config, text: str, batches: int) -> tuple[Lengths, ...]:
    """The lengths of ``batches`` batches drawn from the distribution ``text``, each of as many
    tokens or sequences as the configuration says, the first ones short where it has a
    curriculum."""
    options = config.data
    drawn = draw_batches(
        parse_distribution(text),
        options.batch_tokens,
        batches,
        config.run.seed,
        batch_sequences=options.batch_sequences,
        curriculum_steps=options.curriculum_steps,
    )
    return tuple(drawn)
