"""One rank's part of ``headrace train`` on a model that is not native.

The model is that of a folder of any type of transformers that ``hr.compile`` takes, or one that a
factory makes. The run is a training loop over :func:`headrace.attach`, so planner, recovery,
record and checkpoints are those of any loop; the corpus, its order and the configuration are those
of a native model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from headrace.adopt.spread_model import Item, SampleReader
from headrace.comm.collectives import gather_bytes
from headrace.comm.gpus import settings_text
from headrace.comm.mesh import Groups
from headrace.comm.ranks import World
from headrace.config import Config
from headrace.config.clips_config import ClipsConfig
from headrace.config.model import OptimizerConfig
from headrace.data.corpus import Corpus
from headrace.data.length_summary import summarise
from headrace.data.sampler import BatchSampler
from headrace.data.tokens import make_tokenizer
from headrace.engine.attach import Attached, begin
from headrace.engine.attach_options import MeasureOptions, SampleOptions, SpreadOptions
from headrace.engine.listener import Listener
from headrace.engine.loop_runner import LoopMicroBatch
from headrace.engine.plans import sizes_left_out
from headrace.engine.rank import optimizer_options
from headrace.engine.run_planner import RunPlanner, Stopped
from headrace.engine.sample_order import LoopBatch
from headrace.engine.setup import PricedSampler, open_sampler
from headrace.engine.training_run import lock_wait_s, locked
from headrace.errors import CheckpointError, ConfigError, MissingExtra, SpecError
from headrace.native.optimizers import Schedule
from headrace.ops.loss import IGNORED
from headrace.planning import Problem
from headrace.spec.lengths import Lengths
from headrace.units import bytes_text, count_text, counted

__all__ = ["Factory", "run_loop", "train_adopted", "user_optimizer"]

Factory = Callable[[], torch.nn.Module]
"""A function that makes the model, the same on every rank."""

_NATIVE_ONLY = ("strategies", "rotate", "methods", "candidates", "smoothing")
"""Keys of the planner that only native models know."""


def train_adopted(
    world: World,
    config: Config,
    folder: Path,
    listener: Listener,
    *,
    resume: bool,
    factory: Factory | None = None,
) -> None:
    """Train as one rank, in the first rank's ``folder``. Collective.

    Args:
        world: The ranks of the run.
        config: The run. ``planner.working`` says how weights are held: ``replicated``, or
            ``sharded`` over all ranks by FSDP2; ``auto`` shards where the type is bfloat16, as
            FSDP2 keeps the weights in float32 beside it.
        folder: Where the run is written.
        listener: Hears of the run on the first rank.
        resume: Whether to go on from the last checkpoint, where there is one.
        factory: Makes the model; that of ``model.from`` where it is None.

    Raises:
        ConfigError: For keys that only native models know.
        CheckpointError: For a folder whose weights cannot be read.
        ModelError: For a model that cannot be spread over ranks.
    """
    _require_known(config)
    groups, first = Groups(device=world.device), world.rank == 0
    shared = Path(gather_bytes(str(folder).encode(), groups.world)[0].decode())
    wait_s = lock_wait_s(world.attempt)
    with locked(shared, wait_s=wait_s) if first else nullcontext():
        world.watcher.enter("reading and tokenising the corpus")
        tokenizer = make_tokenizer(config.data.tokenizer)
        corpus, sampler = open_sampler(config, tokenizer, listener.progress if first else None)
        world.watcher.enter("making the model")
        model = _build_model(world, config, factory)
        _require_fitting(model, tokenizer.vocabulary, config)
        if first:
            _announce(world, config, model, corpus, listener, shared)
        model = _shard_model(model, config, world)
        world.watcher.enter("measuring")
        order = partial(_order, corpus, sampler, config.data.context)  # called with a reader
        run = _attach(config, model, order, shared, listener)

        def loss(micro: LoopMicroBatch) -> torch.Tensor:
            """This rank's part of the step's loss: the model's own where it gives one."""
            outputs = model(**micro.inputs)
            own_loss = getattr(outputs, "loss", None)
            return own_loss if own_loss is not None else micro.loss(_logits(outputs))

        run_loop(world, config, run, shared, listener, loss, resume=resume)


def run_loop(
    world: World,
    config: Config | ClipsConfig,
    run: Attached,
    folder: Path,
    listener: Listener,
    loss: Callable[[LoopMicroBatch], torch.Tensor],
    *,
    resume: bool,
) -> None:
    """Take the steps of a run that are left, and save where the configuration says. Collective.

    Args:
        world: The ranks of the run.
        config: How many steps there are, and when to save.
        run: The attached model; it is detached at the end.
        folder: Where the run is written.
        listener: Hears of the run on the first rank.
        loss: Runs the model on a micro-batch; returns this rank's part of the step's loss, [].
        resume: Whether to go on from the last checkpoint, where there is one.
    """
    first, steps = world.rank == 0, config.run.steps
    try:
        if resume and not run.load(folder / "checkpoints") and first:
            listener.tell("no checkpoint yet: starting from the first step")
        if run.number >= steps:
            if first:
                listener.tell(
                    f"the run has taken {run.number} of {steps} steps: raise run.steps to go on"
                )
            return
        if first:
            listener.begin(run.number, steps)
        planner = run.engine.planner
        assert isinstance(planner, RunPlanner), "of any attached loop"
        planner.stop_when(world.watcher.stop_asked)
        with world.watcher.stoppable():
            _take_steps(world, config, run, folder / "checkpoints", loss)
    finally:
        run.detach()
        if first:
            listener.end()


def _take_steps(
    world: World,
    config: Config | ClipsConfig,
    run: Attached,
    checkpoints: Path,
    loss: Callable[[LoopMicroBatch], torch.Tensor],
) -> None:
    """Take the steps that are left, and save a checkpoint every so many steps and at the end, also
    where the run is stopped early. Collective."""
    saved, steps, every = run.number, config.run.steps, config.checkpoint.every

    def save() -> None:
        """Write a checkpoint of the steps so far."""
        world.watcher.enter(f"writing checkpoint {run.number}")
        run.save(checkpoints, keep=config.checkpoint.keep)

    try:
        for step in run:
            world.watcher.enter(f"step {step.number}")
            for micro in step:
                with micro:
                    micro.backward(loss(micro))
            if run.number == steps or (every and run.number % every == 0):
                save()
                saved = run.number
    except Stopped:
        if run.number > saved:  # steps taken since the last checkpoint
            save()


def user_optimizer(
    model: torch.nn.Module, options: OptimizerConfig, steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer of a configuration, and the scheduler of its learning rate over ``steps``
    steps, as torch has them. Weights of one dim, such as norms and biases, do not decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_options(options).make(
        [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": options.decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ]
    )
    schedule = Schedule(
        lr=options.lr, steps=steps, warmup_steps=options.warmup_steps, floor=options.floor
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: schedule.rate(step) / options.lr,  # a factor of the optimizer's own rate
    )
    return optimizer, scheduler


class CorpusOrder:
    """The batches of a corpus, drawn as for native models: a
    :class:`~headrace.engine.sample_order.SampleOrder` for a loop."""

    def __init__(
        self, corpus: Corpus, sampler: BatchSampler, context: int, reader: SampleReader
    ) -> None:
        """Batches that a copy of ``sampler`` draws, of samples of at most ``context`` tokens that
        ``reader`` makes for the model."""
        self._corpus, self._sampler, self._reader = corpus, sampler.copy(), reader
        self._context = context

    @property
    def epoch(self) -> int:
        """The pass over the corpus that the next batch belongs to."""
        return int(self._sampler.state()["epoch"])

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return min(self._context, int(self._corpus.lengths.max()))

    @property
    def total(self) -> int:
        """Sum of the tokens of all samples."""
        return int(self._corpus.lengths.sum())

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the corpus."""
        return self._corpus.fingerprint

    def next_batch(self) -> LoopBatch:
        """The samples of the next step."""
        batch = self._sampler.next_batch()

        def read(index: int) -> Item:
            """Read a sample of the batch, by its number in it."""
            sample = batch.samples[index]
            stop = sample.start + sample.length
            return self._read(sample.document, sample.start, stop, f"document {sample.document}")

        return LoopBatch(
            lengths=batch.lengths, epoch=batch.epoch, state_after=batch.state_after, read=read
        )

    def coming(self, epochs: int | None) -> Iterator[Lengths]:
        """Yield the lengths of the batches that follow, up to the end of epoch ``epochs``, or
        without end where it is None. A copy of the sampler draws them, so this order stays where it
        is."""
        sampler = self._sampler.copy()
        while epochs is None or int(sampler.state()["epoch"]) < epochs:
            yield sampler.next_batch().lengths

    def first(self) -> Item:
        """The longest sample of the corpus."""
        longest = int(self._corpus.lengths.argmax())
        return self._read(longest, 0, self.longest, "the longest document")

    def facts(self) -> dict[str, Any]:
        """How long the documents are."""
        return {
            **summarise(self._corpus).facts(),
            "fingerprint": self._corpus.fingerprint,
            "context": self.longest,
        }

    def state(self) -> dict[str, Any]:
        """The position in the order of the corpus, as JSON."""
        return self._sampler.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken. Raises DataError for that of another corpus."""
        self._sampler.restore(state)

    def close(self) -> None:
        """Do nothing: samples are read when they are needed."""

    def _read(self, document: int, start: int, stop: int, what: str) -> Item:
        """The tokens ``start`` to ``stop`` of a document as a sample of the model, called ``what``
        in errors. Its labels are its tokens (the reader moves them by one place), without those
        that the corpus says are not to be learned."""
        ids = torch.from_numpy(self._corpus.tokens(document, start, stop)).long()
        learned = self._corpus.learned(document, start, stop)
        if learned is None:
            return self._reader.read(ids, what)
        labels = ids.masked_fill(~torch.from_numpy(learned), IGNORED)
        return self._reader.read((ids, labels), what)


class CorpusIterations(CorpusOrder):
    """The batches of a corpus whose size depends on costs: each step takes as many samples as keep
    all ranks busy until they finish at the same time."""

    def price(self, problem: Problem) -> None:
        """Draw batches for the costs and ranks of ``problem`` from now on. Raises what
        :meth:`headrace.engine.setup.PricedSampler.price` does."""
        assert isinstance(self._sampler, PricedSampler), "of such iterations"
        self._sampler.price(problem)


def _order(
    corpus: Corpus, sampler: BatchSampler, context: int, reader: SampleReader
) -> CorpusOrder:
    """The order of a corpus's batches, of the class that fits its sampler. Samples have at most
    ``context`` tokens, and ``reader`` makes them for the model."""
    order_class = CorpusIterations if isinstance(sampler, PricedSampler) else CorpusOrder
    return order_class(corpus, sampler, context, reader)


def _require_known(config: Config) -> None:
    """Raise ConfigError for configured options that only native models have: an adopted model would
    ignore them."""
    given = config.planner.model_fields_set & set(_NATIVE_ONLY)
    if given:
        raise ConfigError(
            f"planner.{min(given)}",
            got="a model that is adopted",
            wanted="a native model (Llama, GPT-2 or BERT, or a shape of its own)",
            hint="leave the key out: adopted models are spread by their tokens",
        )
    if config.model.dropout is not None:
        raise ConfigError(
            "model.dropout",
            got="a model that is adopted",
            wanted="the rates of its own configuration",
        )


def _build_model(world: World, config: Config, factory: Factory | None) -> torch.nn.Module:
    """The model on this rank's device, in training mode, the same on all ranks: from ``factory``
    or, where that is None, from the folder ``model.from``."""
    torch.manual_seed(config.run.seed)
    dtype = torch.float64 if config.devices.dtype == "float64" else torch.float32
    if factory is None:
        model = _pretrained(Path(config.model.from_ or ""), dtype)
    else:
        model = factory()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError("model", got=type(model).__name__, wanted="a torch.nn.Module")
    return model.to(world.device, dtype).train()


def _pretrained(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """The causal language model in a folder of transformers."""
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", extra="hf", needed_for=f"model {folder}") from None
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=dtype
        )
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"model {folder}",
            got=" ".join(str(error).split())[:300],
            wanted="the weights of a causal language model that transformers reads",
        ) from None
    assert isinstance(model, torch.nn.Module), "what transformers reads"
    return model


def _require_fitting(model: torch.nn.Module, vocabulary: int, config: Config) -> None:
    """Raise SpecError for a model whose embeddings have fewer rows than the tokenizer has tokens,
    or that has fewer positions than samples have tokens."""
    embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    largest = max((embedding.num_embeddings for embedding in embeddings), default=None)
    if largest is not None and largest < vocabulary:
        raise SpecError(
            "vocabulary of the model",
            got=largest,
            wanted=f"at least the tokenizer's {vocabulary}",
            hint="without data.tokenizer that of the model's folder is taken",
        )
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and config.data.context > positions:
        raise SpecError(
            "data.context",
            got=config.data.context,
            wanted=f"at most {positions}, the model's places",
        )


def _shard_model(model: torch.nn.Module, config: Config, world: World) -> torch.nn.Module:
    """The model, sharded over all ranks by FSDP2 where the configuration says so. In bfloat16 it
    is always sharded, as FSDP2 keeps float32 weights beside. Raises ConfigError for ``replicated``
    in bfloat16, and for sharded weights with iterations that choose their samples."""
    half = config.devices.dtype_on(gpu=world.device != "cpu") == "bfloat16"
    working = config.planner.working
    if half and working == "replicated":
        raise ConfigError(
            "planner.working",
            got="'replicated' in bfloat16",
            wanted="'sharded', which keeps the weights in float32, or devices.dtype = 'float32'",
        )
    if working != "sharded" and not half:
        return model
    if config.data.iterations is not None:
        raise ConfigError(
            "data.iterations",
            got="an adopted model whose weights are sharded over all ranks",
            wanted="planner.working = 'replicated', and devices.dtype float32 or float64",
            hint="sharded groups wait for each other at every layer, so none ends by itself; "
            "data.batch_tokens gives steps a size",
        )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options: dict[str, Any] = {"mp_policy": policy} if half else {}
    for block in _blocks(model):  # inner modules first, as FSDP2 asks for
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def _blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks (layers) of a model that FSDP2 shards one by one: modules of the classes that
    transformers names, else the modules of each ModuleList whose modules are all of one class."""
    class_names = set(getattr(model, "_no_split_modules", None) or ())
    if class_names:
        return [module for module in model.modules() if type(module).__name__ in class_names]
    return [
        block
        for stack in model.modules()
        if isinstance(stack, torch.nn.ModuleList) and len({type(block) for block in stack}) == 1
        for block in stack
    ]


def _attach(
    config: Config,
    model: torch.nn.Module,
    order: Callable[[SampleReader], CorpusOrder],
    folder: Path,
    listener: Listener,
) -> Attached:
    """The user's model attached to plans as the configuration says, with an optimizer and a
    scheduler made from it."""
    optimizer, scheduler = user_optimizer(model, config.optimizer, config.run.steps)
    return begin(
        model,
        optimizer,
        order,
        config=config.to_json(),
        budget=config.data.batch_tokens,
        steps=config.run.steps,
        scheduler=scheduler,
        clip=config.optimizer.clip or None,
        check_loss=True,
        seed=config.run.seed,
        planner=config.planner,
        samples=SampleOptions(labels="next"),
        spread=SpreadOptions(logits=not hasattr(model, "config")),
        measure=MeasureOptions(
            memory=None if config.devices.memory == "auto" else config.devices.memory,
            cache=config.data.cache_folder,
        ),
        out=folder,
        on_step=lambda step: listener.step(step, ()),
        say=listener.tell,
    )


def _logits(outputs: Any) -> torch.Tensor:
    """The logits in the outputs of a model: ``outputs.logits``, the first of a tuple, or the
    outputs themselves."""
    logits = getattr(outputs, "logits", None)
    if logits is None:
        logits = outputs[0] if isinstance(outputs, tuple) else outputs
    assert isinstance(logits, torch.Tensor), "checked when the model was attached"
    return logits


def _announce(
    world: World,
    config: Config,
    model: torch.nn.Module,
    corpus: Corpus,
    listener: Listener,
    folder: Path,
) -> None:
    """Tell the listener of the model, the corpus, the ranks and the folder of the run."""
    parameters = sum(p.numel() for p in model.parameters())
    memory = config.devices.memory_bytes
    if left_out := sizes_left_out(config.planner, world.ranks):
        listener.tell(left_out)
    listener.tell(str(summarise(corpus)))
    for skipped in corpus.skipped[:3]:
        listener.tell(f"skipped {skipped}")
    for note in corpus.notes:
        listener.tell(note)
    listener.tell(
        f"model         {type(model).__name__}, adopted, {count_text(parameters)} parameters\n"
        f"devices       {counted(world.ranks, 'rank')} of {world.device}"
        f"{'' if memory is None else f', {bytes_text(memory)} each'}\n"
        f"run           {folder}"
    )
    if world.device != "cpu":
        listener.tell(settings_text())
