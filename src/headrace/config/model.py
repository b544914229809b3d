"""Every key of a configuration file, with its meaning and default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    BeforeValidator,
    Field,
    field_validator,
    model_validator,
)

from headrace.config.load import read_config
from headrace.config.model_section import ModelConfig
from headrace.config.planner_config import PlannerConfig
from headrace.config.section import Count, Natural, Place, Positive, Section, number
from headrace.errors import SpecError
from headrace.spec.draw_options import DrawOptions, Flow
from headrace.spec.hardware import Hardware
from headrace.spec.implementation import DEFAULT_IMPLEMENTATION, Implementation
from headrace.spec.strategy import Strategy
from headrace.units import counted, parse_bytes

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DevicesConfig",
    "IterationsConfig",
    "JobConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PlannerConfig",
    "ProfileConfig",
    "ReportConfig",
    "RunConfig",
    "cache_folder",
]


def cache_folder(given: str | Path | None = None) -> Path:
    """The folder of caches: ``given``, or else ``headrace`` in the user's cache folder."""
    if given is not None:
        return Path(given).expanduser()
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that a relative path counts as not set.
    return (named if named.is_absolute() else Path.home() / ".cache") / "headrace"


class RunConfig(Section):
    """Name, steps, seed and folder of the run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run; its folder is ``OUT/NAME-DATE-TIME`` unless ``--out`` says otherwise."""

    out: Place = "runs"
    """Folder that holds the folders of all runs."""

    seed: Natural = 0
    """Seed of the weights, the order of the data, and dropout."""

    steps: Positive = 100
    """Optimizer steps to take in all."""

    check_finite: bool = False
    """Look for values that are not finite after every layer, forward and backward, and stop with
    the layer's number and method; costs a pass over each activation."""

    deterministic: bool = False
    """On devices, have torch and its libraries give the same bits each time, as they always do on a
    CPU: some kernels are slower, and torch warns of those that do not exist."""


_DRAWS = DrawOptions()


class IterationsConfig(Section):
    """How steps choose their own samples, after Data-Centric Parallel: ranks are filled with
    groups, each of samples of like lengths, and what fills them is the step (its sections 3.2 to
    3.4)."""

    flow: Flow = _DRAWS.flow
    """``dcp`` accumulates launches until all groups end together, ``bucket`` (bucket parallel) has
    one launch for each group."""

    least_steps: Positive = _DRAWS.least_steps
    """Accumulation steps that some group has at least (G_min)."""

    most_steps: Positive = _DRAWS.most_steps
    """Accumulation steps of the group with the longest launch at most (G_max)."""

    bucket_ratio: Annotated[float, Field(gt=1)] = _DRAWS.bucket_ratio
    """The longest over the shortest length of samples that count as alike."""

    width: Positive | None = None
    """Ranks of all groups of bucket parallel; the fewest that hold the longest sample when left
    out."""

    @model_validator(mode="after")
    def _known(self) -> IterationsConfig:
        """Refuse options that contradict each other, as :class:`DrawOptions` checks."""
        try:
            self.options(0)
        except SpecError as error:
            raise ValueError(str(error)) from None
        return self

    def options(self, seed: int) -> DrawOptions:
        """These keys as :class:`DrawOptions`, with ``seed`` for the order in which samples are
        drawn."""
        return DrawOptions(seed=seed, **self.model_dump())


def _flow(value: Any) -> Any:
    """The value of ``iterations`` as a table: the text ``"dcp"`` stands for ``{"flow": "dcp"}``.
    Values that are no text are returned as they are."""
    return {"flow": value} if isinstance(value, str) else value


class DataConfig(Section):
    """The data to train on, and how batches are made of it."""

    kind: Literal["text", "jsonl", "parquet", "memmap", "fasta"] = "text"
    """Kind of files: one document per file (text), per line (jsonl), per row (parquet), token ids
    of Megatron or nanoGPT (memmap), or records of FASTA."""

    paths: Annotated[tuple[Place, ...], Field(min_length=1)]
    """Folders, files and globs; relative to the configuration file. ``python:stdlib`` is the
    standard library's sources, ``package:NAME`` those of an installed package."""

    patterns: tuple[str, ...] = ()
    """Names of files to take from folders (``*.py``); the kind's own when empty."""

    field: str | None = None
    """Field of jsonl and parquet: ``text`` or ``input_ids``; found out when left out."""

    ignore: tuple[str, ...] = ()
    """Fields of jsonl and parquet that are left out on purpose. Elsewhere ``labels`` of -100 and
    masks of the loss (``completion_mask``, ``loss_mask``, ``assistant_masks``) leave tokens out of
    it, and others that are not read are told once."""

    end_id: Natural | None = None
    """Id that ends a document in a token memmap without index."""

    dtype: Literal["uint16", "uint32"] = "uint16"
    """Type of the ids in a token memmap without index."""

    tokenizer: Place = "bytes"
    """``bytes``, ``kmer:K``, a ``tokenizer.json``, a local Hugging Face folder or name, or
    ``ids:VOCABULARY[:END]`` for data that is ids already, END being the id that ends a document."""

    context: Count = 8192
    """Longest sequence in tokens; a number, or a text (``"32Ki"`` is 32,768)."""

    too_long: Literal["truncate", "split", "refuse"] = "split"
    """What to do with longer documents: cut them off, cut them in pieces that overlap by one token
    (so that each is predicted), or stop."""

    batch_tokens: Count | None = None
    """Token budget of one optimizer step (``"256Ki"``)."""

    batch_sequences: Positive | None = None
    """Sequences of one optimizer step, in place of a token budget."""

    iterations: Annotated[IterationsConfig | None, BeforeValidator(_flow)] = None
    """How steps choose their own samples, in place of a size: ``"dcp"`` or ``"bucket"``, or a
    table ``[data.iterations]``. Devices are filled first, and what fills them is the step: its
    samples and tokens follow from ranks and costs, and vary. Every sample comes once an epoch."""

    min_tokens: Annotated[int, Field(ge=1)] = 2
    """Shorter sequences are left out: a single token predicts nothing."""

    curriculum: Literal["none", "short-to-long"] = "none"
    """Order of lengths: random, or growing over the first ``curriculum_steps`` batches."""

    curriculum_steps: Natural = 0
    """Batches until all lengths are allowed."""

    cache: Place | None = None
    """Folder of token and profile caches; ``headrace`` in ``XDG_CACHE_HOME``, or in ``~/.cache``
    where that is not set, when left out."""

    read_ahead: Positive = 2
    """Batches prepared while one trains."""

    @property
    def cache_folder(self) -> Path:
        """The folder of caches: ``cache``, or the default folder where that is left out."""
        return cache_folder(self.cache)

    @model_validator(mode="after")
    def _one_budget(self) -> DataConfig:
        """Refuse two sizes of a batch or none, a size or a curriculum beside iterations that choose
        their own samples, and only one of ``curriculum`` and ``curriculum_steps``."""
        if self.iterations is not None:
            for name in ("batch_tokens", "batch_sequences"):
                if getattr(self, name) is not None:
                    raise ValueError(f"iterations are as large as what fills the ranks: no {name}")
            if self.curriculum != "none":
                raise ValueError("iterations draw all lengths at any time: no curriculum")
        elif (self.batch_tokens is None) == (self.batch_sequences is None):
            raise ValueError("give either batch_tokens or batch_sequences, or iterations")
        if (self.curriculum == "none") != (self.curriculum_steps == 0):
            raise ValueError("curriculum 'short-to-long' and curriculum_steps go together")
        return self


class OptimizerConfig(Section):
    """The optimizer and its schedule: linear warm-up, then a cosine down to ``floor`` times
    ``lr``."""

    name: Literal["adamw", "adam", "adamax", "radam", "adagrad", "adadelta", "rmsprop", "sgd"] = (
        "adamw"
    )
    """An elementwise optimizer of torch: each rank updates the rows that it stores."""

    options: dict[str, float | bool | tuple[float, float]] = Field(default_factory=dict)
    """torch's options of an optimizer other than AdamW, such as ``{ momentum = 0.9 }`` or
    ``{ betas = [0.9, 0.99] }``; torch's defaults where left out."""

    lr: Annotated[float, Field(gt=0)] = 1e-3
    """Highest learning rate of the schedule."""

    beta1: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of AdamW's first moment; 0.9 when left out."""

    beta2: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Decay of AdamW's second moment; 0.95 when left out."""

    eps: Annotated[float, Field(gt=0)] | None = None
    """Added to the root of AdamW's second moment; 1e-8 when left out."""

    decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of matrices."""

    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the whole gradient; 0 does not clip."""

    warmup_steps: Natural = 10
    """Steps from zero to ``lr``."""

    floor: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Last learning rate as a fraction of ``lr``."""

    @model_validator(mode="after")
    def _options(self) -> OptimizerConfig:
        """Refuse keys and options of another optimizer than the chosen one, and options for which
        this section has a key."""
        if self.name == "adamw" and self.options:
            raise ValueError("options of AdamW are beta1, beta2 and eps")
        for key in ("beta1", "beta2", "eps"):
            if self.name != "adamw" and getattr(self, key) is not None:
                hint = (
                    "those of others stand in options, such as { betas = [0.9, 0.99], eps = 1e-8 }"
                )
                raise ValueError(f"{key} is AdamW's; {hint}")
        for given, own in (("lr", "lr"), ("weight_decay", "decay")):
            if given in self.options:
                raise ValueError(f"options.{given}: wanted optimizer.{own} instead")
        return self


class DevicesConfig(Section):
    """The ranks and what each may use."""

    ranks: Annotated[int, Field(ge=1, le=65_536)] = 2
    """Processes to start on this machine (under torchrun: its own number)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of each rank; ``auto`` takes CUDA when every rank can have one."""

    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Threads of each rank on a CPU; 0 shares the cores evenly."""

    memory: str = "auto"
    """What one rank may use (``"2GiB"``); ``auto`` is 80 % of its share of what is free."""

    hardware: str | None = None
    """Plan and simulate for devices that are not at hand, ``DEVICE[+INSIDE][+ACROSS]`` such as
    ``"h100"`` or ``"a100-80g+pcie4"``, by their data sheets; training takes those it finds."""

    implementation: str = DEFAULT_IMPLEMENTATION
    """Kernels that forecasts for ``hardware`` are of: ``headrace`` as it runs today, ``eager``,
    ``eager-2023``, ``compiled``, ``fused`` or ``ideal``."""

    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    """Of the weights and activations that ranks work with; ``auto`` is bfloat16 on GPUs, float32 on
    CPUs. Stored weights, optimizer state and sums of gradients are float32 with ``bfloat16``, and
    of the same type otherwise."""

    node_ranks: Annotated[int, Field(ge=0, le=65_536)] = 0
    """Ranks of one node, the last of which may have fewer, for hierarchical exchange: weights and
    gradients cross the network once for each node and are spread or summed inside it. 0 takes the
    launcher's number on GPUs and turns it off on CPUs, where a rank would have to wait for the
    first step; the number of all ranks turns it off, too."""

    timeout_s: Annotated[float, Field(ge=1, le=1e6)] = 1800.0
    """Seconds that a collective may wait."""

    hang_s: Annotated[float, Field(gt=0)] = 30.0
    """Seconds without a heartbeat after which a rank counts as hung; one whose process or machine
    is gone is missed within four seconds."""

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: str) -> str:
        """Refuse a memory that is neither ``auto`` nor a number of bytes above zero."""
        if value != "auto" and number(parse_bytes)(value) < 1:
            raise ValueError("wanted at least one byte")
        return value

    @field_validator("hardware")
    @classmethod
    def _hardware(cls, value: str | None) -> str | None:
        """The text of the hardware with its usual links written out; refuse unknown names."""
        return None if value is None else str(number(Hardware.parse)(value))

    @field_validator("implementation")
    @classmethod
    def _implementation(cls, value: str) -> str:
        """Refuse an implementation that is not known."""
        return str(number(Implementation.named)(value))

    def dtype_on(self, *, gpu: bool) -> str:
        """``dtype`` by torch's name; where it is ``auto``, bfloat16 on a GPU and float32 on a
        CPU."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if gpu else "float32"

    @property
    def planned_dtype(self) -> str:
        """The dtype that plans made without devices assume: ``dtype``, or where it is ``auto`` what
        is usual on ``hardware``, and on a CPU where that is not set."""
        if self.hardware is None:
            return self.dtype_on(gpu=False)
        device = Hardware.parse(self.hardware).device
        usual = self.dtype_on(gpu=not device.is_cpu)
        if self.dtype == "auto" and usual not in device.flops_per_s:
            return next(iter(device.flops_per_s))  # the one in which it was measured
        return usual

    @property
    def memory_bytes(self) -> int | None:
        """``memory`` in bytes, None for auto."""
        return None if self.memory == "auto" else parse_bytes(self.memory)


class ProfileConfig(Section):
    """The measurement of costs before the first step."""

    longest: Count | None = None
    """Longest pack to measure in tokens; the context when left out."""

    rung_s: Annotated[float, Field(gt=0)] = 0.5
    """No pack is measured that would take longer."""

    repeats: Positive = 2
    """Timings of each pack; the fastest counts."""


class CheckpointConfig(Section):
    """When the state of a run is written to disk."""

    every: Natural = 50
    """Steps between checkpoints; 0 writes one at the end only."""

    keep: Positive = 2
    """Number of last checkpoints that stay on disk."""

    background: bool | None = None
    """Whether threads write checkpoints while training goes on, from a copy in the host's memory;
    on devices when left out. The last one of a run is waited for."""

    grace_s: Annotated[float, Field(ge=0)] = 25.0
    """Seconds that a run has, after Ctrl-C or another first signal that ends it, to finish the step
    under way and write a checkpoint; 0 ends it at once, as a second signal does. Schedulers kill
    what has not ended after 30 s. Ranks of torchrun end at once."""


class ReportConfig(Section):
    """What a run writes besides its checkpoints."""

    html: bool = True
    """Whether to write a report at the end."""

    timelines: Natural = 8
    """Steps whose timelines are recorded, evenly over the run."""

    tensorboard: bool = False
    """Also write scalars for TensorBoard."""

    wandb: bool = False
    """Also send scalars to Weights & Biases (``WANDB_MODE=offline`` keeps them here)."""


class JobConfig(Protocol):
    """What configurations of all kinds of runs have."""

    @property
    def run(self) -> RunConfig:
        """Name, steps, seed and folder of the run."""
        ...

    @property
    def devices(self) -> DevicesConfig:
        """The ranks and what each may use."""
        ...

    @property
    def checkpoint(self) -> CheckpointConfig:
        """When the state of the run is written to disk, and how many of these states are kept."""
        ...

    @property
    def report(self) -> ReportConfig:
        """What the run writes besides its checkpoints."""
        ...


class Config(Section):
    """A whole configuration: a section for each part of a run.

    Its sections and their keys are explained on the page of configurations.
    """

    run: RunConfig = RunConfig()
    data: DataConfig
    model: ModelConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    devices: DevicesConfig = DevicesConfig()
    planner: PlannerConfig = PlannerConfig()
    profile: ProfileConfig = ProfileConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="before")
    @classmethod
    def _refuse_clips(cls, value: Any) -> Any:
        """Refuse a configuration of a run over clips, which :class:`ClipsConfig` reads."""
        data = value.get("data") if isinstance(value, dict) else None
        if isinstance(data, dict) and data.get("kind") == "synthetic-clips":
            raise ValueError("data.kind: a run over clips, which only headrace train takes")
        return value

    @model_validator(mode="after")
    def _tokenizer_of_the_model(self) -> Config:
        """Take the tokenizer of the model's folder where no tokenizer is named."""
        if self.model.from_ is not None and "tokenizer" not in self.data.model_fields_set:
            # The data section is replaced by one with this tokenizer, so that a saved configuration
            # names it. Sections are frozen, so it is set past pydantic.
            self.__dict__["data"] = self.data.model_copy(update={"tokenizer": self.model.from_})
        return self

    @model_validator(mode="after")
    def _ranks_of_strategies(self) -> Config:
        """Refuse a strategy that needs more ranks than there are."""
        for text in self.planner.strategies:
            devices = Strategy.parse(text).devices
            if not 1 <= devices <= self.devices.ranks:
                raise ValueError(
                    f"planner.strategies: {text!r} needs {counted(devices, 'rank')} "
                    f"of {self.devices.ranks}"
                )
        return self

    @model_validator(mode="after")
    def _groups_of_iterations(self) -> Config:
        """Refuse iterations that choose their own samples for the planner ``strategies``: they are
        filled with groups, and it has pipelines."""
        if self.data.iterations is not None and self.planner.name == "strategies":
            raise ValueError(
                "data.iterations are filled with groups: planner 'strategies' has pipelines"
            )
        return self

    @classmethod
    def load(cls, path: str | Path, *changes: str) -> Config:
        """Read a configuration from a TOML file.

        Args:
            path: The file. Relative ``data.paths``, ``data.tokenizer`` and ``model.from`` are taken
                from its folder.
            changes: ``SECTION.KEY=VALUE`` each, such as ``"run.steps=200"``; ``"run.steps="``
                restores the default.

        Returns:
            The configuration.

        Raises:
            ConfigError: When the file cannot be read; and for wrong keys and values, of which it
                lists all.
        """
        return read_config(cls, Path(path), changes)

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON.

        Returns:
            All keys, those left out with their defaults.
        """
        return self.model_dump(mode="json")
