"""From a configuration to the things a command needs; no torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.config import Config, load_config
from headrace.config.model import PlannerConfig
from headrace.costs import FORMULA_METHODS, CostModel, roofline_costs, synthetic_costs
from headrace.data import Corpus, Sampler, SamplerOptions, Source, make_tokenizer, open_corpus
from headrace.errors import ConfigError, CostError, InfeasiblePlan
from headrace.planning import Problem, static_plan
from headrace.planning.strategies import Strategist
from headrace.spec.architecture import Architecture
from headrace.spec.hardware import Hardware
from headrace.spec.known_methods import SINGLE_RANK
from headrace.spec.lengths import Lengths
from headrace.spec.model_shape import ModelShape
from headrace.spec.plan import Plan
from headrace.spec.strategy import Strategy

__all__ = [
    "Data",
    "best_static",
    "calibration_path",
    "formula_costs",
    "listed_methods",
    "make_problem",
    "make_strategist",
    "memory_margin_of",
    "newest_costs",
    "open_data",
    "profile_path",
    "read_config",
    "remember_costs",
]

Progress = Callable[[str, int, int], None]

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


def read_config(
    path: Path,
    changes: list[str],
    *,
    ranks: int | None = None,
    steps: int | None = None,
    hardware: str | None = None,
) -> Config:
    """The configuration with the command line's changes."""
    extra = [f"devices.ranks={ranks}"] if ranks is not None else []
    extra += [f"run.steps={steps}"] if steps is not None else []
    extra += [f"devices.hardware={hardware}"] if hardware is not None else []
    return load_config(path, [*changes, *extra])


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The corpus of a run, its sampler, and the architecture that fits its tokenizer."""

    corpus: Corpus
    sampler: Sampler
    architecture: Architecture


def open_data(config: Config, progress: Progress | None = None) -> Data:
    """Open (and index, the first time) the corpus of a configuration."""
    options = config.data
    tokenizer = make_tokenizer(options.tokenizer)
    source = Source(
        kind=options.kind, paths=options.paths, patterns=options.patterns,
        field=options.field, end_id=options.end_id, dtype=options.dtype,
    )  # fmt: skip
    cache = Path(options.cache).expanduser() / "corpora"
    corpus = open_corpus(source, tokenizer, cache=cache, progress=progress)
    architecture = config.model.architecture(corpus.vocabulary, options.context, tokenizer.mask_id)
    sampler = Sampler(
        corpus,
        SamplerOptions(
            seed=config.run.seed,
            context=options.context,
            too_long=options.too_long,
            batch_tokens=options.batch_tokens,
            batch_sequences=options.batch_sequences,
            min_tokens=options.min_tokens,
            curriculum=options.curriculum,
            curriculum_steps=options.curriculum_steps,
        ),
    )
    return Data(corpus=corpus, sampler=sampler, architecture=architecture)


def _costs_folder(config: Config) -> Path:
    """Where profiles are cached."""
    return Path(config.data.cache).expanduser() / "profiles"


def profile_path(config: Config, fingerprint: str) -> Path:
    """The cached profile of a fingerprint."""
    name = hashlib.sha256(fingerprint.encode()).hexdigest()[:24]
    return _costs_folder(config) / f"{name}.json"


def calibration_path(config: Config, fingerprint: str) -> Path:
    """What runs learnt about the costs of a fingerprint, beside its cached profile."""
    profile = profile_path(config, fingerprint)
    return profile.with_name(f"calibration-{profile.name}")


def newest_costs(config: Config, architecture: Architecture, ranks: int) -> CostModel | None:
    """The costs last measured for this model on as many ranks, on this machine; None if never."""
    index = _costs_folder(config) / _latest_name(architecture.shape, ranks)
    try:
        return CostModel.load(index)
    except CostError:
        return None


def remember_costs(config: Config, costs: CostModel) -> None:
    """Keep costs where :func:`newest_costs` finds them."""
    folder = _costs_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    costs.save(folder / _latest_name(costs.shape, costs.cluster.devices))


def formula_costs(config: Config, architecture: Architecture, ranks: int) -> CostModel:
    """Costs from formulas, for planning where nothing was measured: the roofline of the hardware
    that the configuration names, or those of a made-up device."""
    options = config.devices
    memory = options.memory_bytes
    if options.hardware is not None:
        hardware = Hardware.parse(options.hardware)
        margin = config.planner.memory_margin
        if margin is None:
            margin = memory_margin_of(hardware.device.name)
        return roofline_costs(
            hardware, ranks, architecture, element_bytes=_ELEMENT_BYTES[options.dtype],
            memory_bytes=memory,
        ).replace(memory_margin=margin)  # fmt: skip
    if memory is None:
        return synthetic_costs(ranks, architecture=architecture, methods=FORMULA_METHODS)
    return synthetic_costs(
        ranks, architecture=architecture, methods=FORMULA_METHODS, memory_bytes=memory
    )


def memory_margin_of(device: str) -> float:
    """The part of the memory of a kind of device that plans leave free unless told."""
    return 0.3 if device == "cpu" else 0.1


def _latest_name(shape: ModelShape, ranks: int) -> str:
    model = json.dumps(shape.to_json(), sort_keys=True)
    digest = hashlib.sha256(f"{model} {ranks}".encode()).hexdigest()[:16]
    return f"latest-{digest}.json"


def make_problem(costs: CostModel, options: PlannerConfig) -> Problem:
    """The problem that a configuration poses with these costs."""
    unknown = [p for p in options.group_sizes if p not in costs.group_sizes]
    if unknown:
        raise ConfigError(
            "planner.group_sizes", got=unknown[0],
            wanted=f"one of {', '.join(map(str, costs.group_sizes))}",
        )  # fmt: skip
    alone = (SINGLE_RANK,) if 1 in costs.group_sizes else ()
    # A single rank has nothing to choose between.
    open_ = options.candidates if costs.group_sizes != (1,) else ()
    return Problem(
        costs=costs,
        devices=costs.cluster.devices,
        sizes=options.group_sizes or None,
        methods=(*alone, *open_) if open_ else None,
        layers=listed_methods(options),
        recompute=options.recompute,
        smoothing=options.smoothing,
        holding=("whole", "sharded") if options.working == "auto" else (options.working,),
    )


def make_strategist(
    options: PlannerConfig, seed: int, samples: Callable[[], Sequence[Sequence[int]]]
) -> Strategist:
    """Who decides the strategies of a run; candidates come from ``samples`` of its batches unless
    the configuration lists them."""
    return Strategist(
        strategies=tuple(map(Strategy.parse, options.strategies)), rotate=options.rotate,
        seed=seed, samples=samples,
    )  # fmt: skip


def listed_methods(options: PlannerConfig) -> tuple[str, ...] | None:
    """The methods that a configuration fixes, one for all layers or one for each; None where the
    choice is the planner's."""
    if options.methods == "auto":
        return None
    return (options.methods,) if isinstance(options.methods, str) else options.methods


def best_static(problem: Problem, lengths: Lengths) -> Plan | None:
    """The fastest plan of one group size; None when no single size fits."""
    found: list[Plan] = []
    for p in problem.group_sizes:
        try:
            found.append(static_plan(problem, lengths, p))
        except InfeasiblePlan:
            continue
    return min(found, key=lambda candidate: candidate.predicted_s, default=None)
