"""``headrace plan`` and ``headrace simulate``: decide, and look, without a device."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.cli.display import tell
from headrace.cli.draw_plan import draw_picture, require_picture
from headrace.cli.flags import PlanFlags, SimulateFlags, overrides
from headrace.config import Config
from headrace.costs import CostModel
from headrace.costs.rates import Assumed, Rates
from headrace.data.drawn_lengths import draw_batches, parse_distribution
from headrace.engine.cost_cache import costs_at_hand
from headrace.engine.listener import ProgressLines
from headrace.engine.planned_iterations import OWN
from headrace.engine.plans import programs_of, rivals, sizes_left_out
from headrace.engine.plans import simulate as run_clock
from headrace.engine.robustness import Robustness, doubted, for_the_worst, robustness
from headrace.engine.setup import architecture_of, assumed_by, open_data, roofline_of
from headrace.engine.step_planner import StepPlanner
from headrace.errors import ConfigError
from headrace.report.plan_bars import bars_of_plan
from headrace.simulator import draw
from headrace.simulator import simulate as run_programs
from headrace.simulator.memory import peak_parts
from headrace.spec.architecture import Architecture
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import Implementation
from headrace.spec.lengths import Lengths
from headrace.spec.measurement import Timeline
from headrace.spec.plan import Plan
from headrace.spec.step import Planned, PlanRequest
from headrace.units import bytes_text, counted, seconds_text

__all__ = ["plan", "simulate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What to plan: who plans it, the batches' lengths, and where the costs are from."""

    planner: StepPlanner
    batches: tuple[Lengths, ...]
    source: str
    architecture: Architecture
    assumed: Assumed
    doubts: Mapping[str, StepPlanner]
    pessimistic: bool = False

    @property
    def costs(self) -> CostModel:
        return self.planner.costs

    def plans(self) -> Iterator[Planned]:
        """Plan one batch after the other, each knowing the plan before it."""
        previous: Plan | None = None
        for step, batch in enumerate(self.batches):
            request = PlanRequest(lengths=batch, step=step, previous=previous)
            if self.pessimistic:
                planned = for_the_worst(request, self.planner, self.doubts)
            else:
                planned = self.planner.plan(request)
            yield planned
            previous = planned.plan

    def rates(self, plan: Plan) -> Rates:
        """Tokens a second and utilisation of a plan."""
        return Rates.of(plan.lengths.tokens, plan.predicted_s, self.architecture, self.assumed)

    def robustness(self, planned: Planned) -> Robustness | None:
        """How far a plan stays best when the hardware is not as assumed; None where costs were
        measured."""
        if not self.doubts:
            return None
        return robustness(planned, self.doubts)


def plan(config_path: Path, flags: PlanFlags) -> int:
    """Plan batches; a table for people or JSON for programs, and a picture of the longest."""
    if flags.picture is not None:
        require_picture(flags.picture)
    work = _prepare(config_path, flags)
    found, made = list[dict[str, Any]](), list[Plan]()
    for number, planned in enumerate(work.plans()):
        chosen, took = planned.plan, seconds_text(planned.planning_s)
        made.append(chosen)
        if flags.json:
            found.append(
                {
                    "planning_s": planned.planning_s,
                    "forecast": work.rates(chosen).to_json(),
                    "memory": asdict(peak_parts(chosen, work.costs, planned.peak_bytes)),
                    "robustness": _json_of(work.robustness(planned)),
                }
                | chosen.to_json()
            )
            continue
        if number:
            print()
        print(chosen)
        print(f"{'fits':<14}{_fits(planned, work.costs)}     planned in {took}")
        print(f"{'memory':<14}{peak_parts(chosen, work.costs, planned.peak_bytes)}")
        print(f"{'forecast':<14}{work.rates(chosen)}")
        if (robust := work.robustness(planned)) is not None:
            print(f"{'robust':<14}{robust}")
        others = rivals(work.planner.problem(), chosen.lengths, seed=work.planner.seed)
        for name, rival in others.items():
            print(
                f"{name:<14}{rival.strategy}: {seconds_text(rival.predicted_s)}, the plan is "
                f"{rival.predicted_s / chosen.predicted_s:.2f} times as fast"
            )
    if flags.json:
        print(json.dumps({"costs": work.source, "plans": found}))
    else:
        print(f"{'assumed':<14}{work.assumed}")
    if flags.picture is not None:
        number = max(range(len(made)), key=lambda k: made[k].predicted_s)
        bars = bars_of_plan(made[number], run_clock(made[number], work.costs))
        draw_picture(bars, f"batch {number}", flags.picture)
    return 0


def simulate(config_path: Path, flags: SimulateFlags) -> int:
    """Run the programs of planned batches on a clock; draw what every rank does."""
    work = _prepare(config_path, flags)
    events: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    began_s = 0.0
    for number, planned in enumerate(work.plans()):
        chosen = planned.plan
        actions = programs_of(chosen, work.costs)
        timeline = run_programs(actions, chosen, work.costs)
        later_us, began_s = began_s * 1e6, began_s + timeline.seconds
        for event in timeline.to_chrome_trace(step=number):
            events.append({**event, "ts": event["ts"] + later_us})
        if flags.json:
            found.append(
                {
                    "plan": chosen.to_json(),
                    "programs": [str(program) for program in actions],
                    "timeline": timeline.to_json(),
                    "peak_bytes": list(planned.peak_bytes),
                    "forecast": work.rates(chosen).to_json(),
                }
            )
        else:
            _print_clock(number, planned, timeline, work.costs)
            print(work.rates(chosen))
            if flags.programs:
                print("\n".join(map(str, actions)))
    if flags.json:
        print(json.dumps({"costs": work.source, "batches": found}))
    else:
        print(f"assumed: {work.assumed}")
    if flags.trace is not None:
        try:
            flags.trace.write_text(json.dumps({"traceEvents": events}))
        except OSError as error:
            raise ConfigError(
                f"--trace {flags.trace}", got=error.strerror, wanted="a writable file"
            )
        tell(f"trace of {len(events)} actions in {flags.trace}")
    return 0


def _print_clock(number: int, planned: Planned, timeline: Timeline, costs: CostModel) -> None:
    """Print one batch's plan as a picture of its ranks over time, and how full their memory is."""
    chosen = planned.plan
    if number:
        print()
    print(
        f"batch {number}: {counted(len(chosen.lengths), 'sequence')}, "
        f"{chosen.lengths.total:,} tokens, {chosen.strategy}, programs checked"
    )
    print(draw(timeline))
    print(_fits(planned, costs))


def _fits(planned: Planned, costs: CostModel) -> str:
    """Words for the fullest rank: its peak in bytes of what it may use."""
    peaks = planned.peak_bytes
    rank = max(range(len(peaks)), key=lambda r: peaks[r])
    return f"peak {bytes_text(peaks[rank])} of {bytes_text(costs.capacity_bytes)} (rank {rank})"


def _prepare(config_path: Path, flags: PlanFlags | SimulateFlags) -> _Work:
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
    }
    config = Config.load(config_path, *overrides(flags.changes, keys))
    if flags.lengths is None:
        data = open_data(config, ProgressLines())
        architecture = data.architecture
        batches = tuple(batch.lengths for batch in data.sampler.peek(flags.batches))
    else:
        architecture = architecture_of(config)
        batches = _drawn(config, flags.lengths, flags.batches, flags.seed)
    costs, remark = costs_at_hand(config, architecture, flags.costs)
    for line in (remark, sizes_left_out(config.planner, costs.cluster.devices)):
        if line:
            tell(line)
    planner = StepPlanner(costs=costs, options=config.planner, seed=config.run.seed)
    doubts = _doubts(config, architecture) if flags.costs is None else {}
    pessimistic = isinstance(flags, PlanFlags) and flags.pessimistic
    if pessimistic and not doubts:
        wanted = "costs of hardware that is not at hand (--hardware)"
        raise ConfigError("--pessimistic", got="measured costs", wanted=wanted)
    return _Work(
        planner=planner,
        batches=batches,
        source=remark or costs.fingerprint,
        architecture=architecture,
        assumed=assumed_by(config, costs),
        doubts=doubts,
        pessimistic=pessimistic,
    )


def _planner_name(flags: PlanFlags | SimulateFlags) -> str | None:
    """The planner of ``--planner`` by its name in a configuration."""
    name = flags.planner if isinstance(flags, PlanFlags) else None
    return "adaptive" if name == OWN else name


def _doubts(config: Config, architecture: Architecture) -> dict[str, StepPlanner]:
    """Planners with the costs of the hardware that a configuration names under each doubt of it."""
    options = config.devices
    if options.hardware is None:
        return {}
    hardware = Hardware.parse(options.hardware)
    kernels = Implementation.named(options.implementation)
    return {
        name: StepPlanner(
            costs=roofline_of(config, architecture, options.ranks, *other),
            options=config.planner,
            seed=config.run.seed,
        )
        for name, other in doubted(hardware, kernels).items()
    }


def _json_of(robust: Robustness | None) -> dict[str, Any] | None:
    return None if robust is None else asdict(robust)


def _drawn(config: Config, text: str, batches: int, seed: int) -> tuple[Lengths, ...]:
    """The lengths of so many batches drawn from a distribution; raises ConfigError where the
    configuration has no number of tokens."""
    budget = config.data.batch_tokens
    if budget is None:
        raise ConfigError(
            "--lengths",
            got="a configuration that counts sequences",
            wanted="data.batch_tokens",
            hint="add --set data.batch_tokens=N --set data.batch_sequences=",
        )
    return tuple(draw_batches(parse_distribution(text), budget, batches, seed))
