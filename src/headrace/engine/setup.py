"""From a configuration to data, architecture and costs by formula; no torch here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from headrace.config import Config
from headrace.costs import FORMULA_METHODS, CostModel, synthetic_costs
from headrace.costs.library import roofline
from headrace.costs.rates import Assumed
from headrace.data.corpus import Corpus
from headrace.data.opening import open_corpus
from headrace.data.sampler import BatchSampler, Sampler, SamplerOptions
from headrace.data.source import Source
from headrace.data.tokens import Tokenizer, make_tokenizer, tokenizer_sizes
from headrace.errors import DataError, SpecError
from headrace.spec.architecture import Architecture
from headrace.spec.hardware import MEASURED, Hardware
from headrace.spec.hf_config import read_architecture
from headrace.spec.implementation import Implementation

if TYPE_CHECKING:
    from headrace.planning import Problem

__all__ = [
    "PricedSampler",
    "TrainingData",
    "architecture_of",
    "assumed_by",
    "formula_costs",
    "native_or_why",
    "open_data",
    "open_sampler",
    "roofline_of",
]


_NOT_MEASURED = {
    "source=synthetic": "made-up",
    "source=roofline": "modelled",
    "source=rehearsal": "modelled",
}
"""What kernels are called whose costs have this fact in their fingerprint."""


@runtime_checkable
class PricedSampler(Protocol):
    """A sampler for which costs and ranks decide what a batch holds."""

    def price(self, problem: Problem) -> None:
        """Draw batches for the costs and ranks of this planning problem from now on. Raises
        InfeasiblePlan where the longest sample fits no group, and SpecError for costs and ranks for
        which no iteration can be drawn."""
        ...

    def __str__(self) -> str:
        """How batches are drawn, in words: from which buckets of lengths, for which groups. Call
        :meth:`price` before."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    """The corpus of a run, its sampler, and the architecture that fits its tokenizer."""

    corpus: Corpus
    sampler: BatchSampler
    architecture: Architecture


def open_data(
    config: Config, progress: Callable[[str, int, int], None] | None = None
) -> TrainingData:
    """Open (and index, the first time) the corpus of a configuration of a native model."""
    folder = _folder_architecture(config)  # errors in the folder are raised first
    tokenizer = make_tokenizer(config.data.tokenizer)
    architecture = _architecture(config, folder, tokenizer.vocabulary, tokenizer.mask_id)
    corpus, sampler = open_sampler(config, tokenizer, progress)
    if architecture.masked and corpus.masked:
        raise DataError(
            f"corpus {corpus.name}",
            got="rows whose masks leave tokens out of the loss",
            wanted="whole rows: a model of masked tokens hides them itself",
            hint="data.ignore names the masks to train on every token",
        )
    return TrainingData(corpus=corpus, sampler=sampler, architecture=architecture)


def open_sampler(
    config: Config,
    tokenizer: Tokenizer,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Corpus, BatchSampler]:
    """Open (and index, the first time) the corpus of a configuration, and draw batches of it: a
    :class:`PricedSampler` where iterations choose their own samples."""
    options = config.data
    source = Source(
        kind=options.kind,
        paths=options.paths,
        patterns=options.patterns,
        field=options.field,
        end_id=options.end_id,
        dtype=options.dtype,
        ignore=options.ignore,
    )
    cache = options.cache_folder / "corpora"
    corpus = open_corpus(source, tokenizer, cache=cache, progress=progress)
    return corpus, _sampler(config, corpus)


def _sampler(config: Config, corpus: Corpus) -> BatchSampler:
    """The sampler that draws the batches of a corpus as a configuration says."""
    options, seed = config.data, config.run.seed
    if options.iterations is not None:
        # Here, as it imports much that other runs do not need.
        from headrace.engine.iteration_sampler import IterationSampler

        return IterationSampler(
            corpus,
            options.iterations.options(seed),
            context=options.context,
            too_long=options.too_long,
            min_tokens=options.min_tokens,
        )
    return Sampler(
        corpus,
        SamplerOptions(
            seed=seed,
            context=options.context,
            too_long=options.too_long,
            batch_tokens=options.batch_tokens,
            batch_sequences=options.batch_sequences,
            min_tokens=options.min_tokens,
            curriculum=options.curriculum,
            curriculum_steps=options.curriculum_steps,
        ),
    )


def roofline_of(
    config: Config,
    architecture: Architecture,
    ranks: int,
    hardware: Hardware,
    implementation: Implementation,
) -> CostModel:
    """The roofline costs of ``ranks`` devices with some hardware and kernels; the memory of a
    device and the type of numbers are those of the configuration."""
    return roofline(
        architecture,
        hardware,
        devices=ranks,
        dtype=config.devices.planned_dtype,
        memory_bytes=config.devices.memory_bytes,
        memory_margin=config.planner.memory_margin,
        implementation=implementation,
    )


def assumed_by(config: Config, costs: CostModel, *, precision: str | None = None) -> Assumed:
    """What predictions with these costs assume: devices, kernels, precision, optimizer and memory.
    ``precision`` takes the place of the type that the configuration plans with."""
    options, cluster = config.devices, costs.cluster
    precision = precision or options.planned_dtype
    hardware, peak = cluster.device, None
    of_source = (kind for word, kind in _NOT_MEASURED.items() if word in costs.fingerprint)
    kernels = next(of_source, "measured")
    # Whether seconds are from a model of the hardware that the configuration names.
    if options.hardware is not None and kernels == "modelled":
        device = Hardware.parse(options.hardware).device
        hardware, kernels = options.hardware, options.implementation
        peak = device.flops_per_s.get(precision)
        if hardware.startswith(MEASURED):
            kernels = "measured"
    return Assumed(
        devices=cluster.devices,
        hardware=hardware,
        implementation=kernels,
        precision=precision,
        optimizer=config.optimizer.name,
        peak_flops_per_s=peak,
        memory_bytes=cluster.memory_bytes,
        kept_free_bytes=cluster.memory_bytes - costs.capacity_bytes,
    )


def native_or_why(config: Config) -> str:
    """The reason, in words, why the model of a configuration is not native; empty where it is. It
    is empty too for an unsupported variant of a native type, which raises an error when it is
    opened."""
    if config.model.from_ is None:
        return ""
    try:
        _folder_architecture(config)
    except SpecError as error:
        # The type is native where the error is about something else than the type.
        return str(error) if error.what == "model_type" else ""
    return ""


def architecture_of(config: Config) -> Architecture:
    """The architecture of a configuration, without opening its corpus."""
    folder = _folder_architecture(config)
    vocabulary, mask_id = tokenizer_sizes(config.data.tokenizer)
    return _architecture(config, folder, vocabulary, mask_id)


def _folder_architecture(config: Config) -> Architecture | None:
    """The architecture of ``model.from``; None where the configuration has a shape of its own."""
    model = config.model
    if model.from_ is None:
        return None
    return read_architecture(Path(model.from_), dropout=model.dropout)


def _architecture(
    config: Config, folder: Architecture | None, vocabulary: int, mask_id: int | None
) -> Architecture:
    """The architecture of a configuration: ``folder``, that of the model's folder, where it names
    one, else by the sizes in its section [model]. Either is fitted to the context of the
    configuration, the size of its ``vocabulary``, and the id of its tokenizer's mask token."""
    model, context = config.model, config.data.context
    if folder is None:
        return model.architecture(vocabulary, context, mask_id)
    if folder.masked and mask_id is not None:
        folder = replace(folder, mask_id=mask_id)
    return model.fitted(folder, vocabulary, context)


def formula_costs(config: Config, architecture: Architecture, ranks: int) -> CostModel:
    """Costs from formulas, for planning where nothing was measured: a roofline of the hardware
    that the configuration names, else the synthetic costs of a made-up device."""
    options = config.devices
    memory = options.memory_bytes
    if options.hardware is not None:
        kernels = Implementation.named(options.implementation)
        return roofline_of(config, architecture, ranks, Hardware.parse(options.hardware), kernels)
    costs = synthetic_costs(ranks, architecture=architecture, methods=FORMULA_METHODS)
    if memory is None:
        return costs
    return costs.replace(cluster=replace(costs.cluster, memory_bytes=memory))
