"""transformers' Trainer, and TRL's, with planned steps.

    Trainer = headrace.trainer(transformers.Trainer)
    trainer = Trainer(model=model, args=args, train_dataset=dataset, ...)
    trainer.train()

All stays the trainer's: arguments, callbacks, logs, checkpoints, and the update (clipping,
optimizer, scheduler). What changes is a step: it has the samples that all ranks would have taken
together, is planned by their lengths, and its loss and gradients are those of one process.

A loss that is a sum over tokens is made of the trainer's own ``compute_loss`` on each micro-batch.
Losses of whole sequences (DPO, rewards) take two passes: planned forwards give every rank the
values of all samples, the trainer's ``compute_loss`` makes its loss of them, and a planned step has
the gradients of these values. So does GRPO, each rank with the completions that it samples
(:mod:`headrace.trainers.policy`): there a step is that of the same number of ranks.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from headrace.adopt.held_still import held_still
from headrace.comm.collectives import gather_floats
from headrace.comm.launch import join_world
from headrace.config.planner_config import PlannerConfig
from headrace.engine.attach import Attached, attach
from headrace.engine.attach_options import MeasureOptions, SampleOptions, SpreadOptions
from headrace.engine.listener import tell
from headrace.errors import DataError, MissingExtra, ModelError, SpecError
from headrace.ops.loss import IGNORED
from headrace.spec.step import Step
from headrace.trainers.one_process import OneProcess, as_one_process
from headrace.trainers.policy import PolicyModel, policy_values
from headrace.trainers.refusals import Kind, kind_of, require_base, require_combinable
from headrace.trainers.rows import RowSample, rows_of, samples_of
from headrace.trainers.stand_ins import (
    REPORTED,
    Outcome,
    PartInputs,
    PartOfModel,
    Sums,
    WholeModel,
    fused_head,
)
from headrace.trainers.token_scores import (
    ScoredModel,
    scores_by_token,
    scores_of_tokens,
    without_labels,
)
from headrace.trainers.train_loader import Collated, example_of, longest_of, train_loader
from headrace.units import parse_count

__all__ = ["TrainerOptions", "trainer"]

Base = TypeVar("Base")

_STATE = "headrace.json"
"""The file of a checkpoint with the state of planning, so that a resumed run plans alike."""

_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}
"""Relative differences that the loss of a batch may have when its samples are spread over ranks, as
sums are then in another order; 3e-2 for other types."""

_SHORT_TOKENS = 1024
"""Tokens of an item that any device is taken to compute whole without a gradient."""

_VALUES = ("logps/chosen", "logps/rejected", "min_reward", "mean_reward", "max_reward")
"""Metrics that TRL's trainers of whole sequences make of the values of samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """The arguments of :func:`trainer`."""

    batch_tokens: int | None
    longest: int | None
    planner: PlannerConfig
    spread: SpreadOptions
    measure: MeasureOptions
    check_loss: bool
    out: str | Path | None
    on_step: Callable[[Step], object]
    say: Callable[[str], object]


def trainer(
    base: type[Base],
    *,
    batch_tokens: int | str | None = None,
    longest: int | str | None = None,
    planner: PlannerConfig | None = None,
    spread: SpreadOptions | None = None,
    measure: MeasureOptions | None = None,
    check_loss: bool = True,
    out: str | Path | None = None,
    on_step: Callable[[Step], object] = lambda step: None,
    say: Callable[[str], object] = tell,
) -> type[Base]:
    """Make a trainer of transformers, or of TRL, whose steps are planned.

    A step has ``per_device_train_batch_size`` times ``gradient_accumulation_steps`` times the
    number of ranks samples, those that one process would take with the batch size of all ranks.

    Args:
        base: ``transformers.Trainer``, a class made of it, or TRL's ``SFTTrainer``, ``DPOTrainer``,
            ``RewardTrainer`` or ``GRPOTrainer``.
        batch_tokens: Tokens of one step (``"64Ki"``), about, in the place of a number of samples.
        longest: Tokens of the longest sample: needed where the data set has no length, and for
            GRPOTrainer, of a prompt with its completion.
        planner: All options of a planner.
        spread: How a model is spread over ranks.
        measure: The memory of a rank, and where costs come from.
        check_loss: Whether the loss is checked in the first step: it must be a sum over the labels,
            divided by ``num_items_in_batch``.
        out: The folder for metrics and plans, which ``headrace report`` reads.
        on_step: Called with every finished step, its plan and its times, on the first rank.
        say: Called with lines for people, on the first rank.

    Returns:
        A class that takes the arguments of ``base``.

    Raises:
        SpecError: For a class that plans cannot be made for, and when a trainer of the class is
            made, for arguments that cannot be combined with planned steps.

    Example:
        >>> trainer = hr.trainer(SFTTrainer)(model=model, args=args, train_dataset=dataset)
        >>> trainer.train(resume_from_checkpoint=True)
    """
    try:
        require_base(base)
    except ModuleNotFoundError:
        raise MissingExtra("transformers", extra="hf", needed_for="hr.trainer") from None
    options = TrainerOptions(
        batch_tokens=_tokens(batch_tokens),
        longest=_tokens(longest),
        planner=planner or PlannerConfig(),
        spread=spread or SpreadOptions(),
        measure=measure or MeasureOptions(),
        check_loss=check_loss,
        out=out,
        on_step=on_step,
        say=say,
    )
    names = {"__module__": base.__module__, "__doc__": base.__doc__, "_planned": options}
    return type(base.__name__, (_Planned, base), names)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Coming:
    """What the trainer gets in the place of each batch of a step. The last one of a step carries
    all ``batches`` of the step, the others none, as a planned step is taken at once."""

    batches: Sequence[list[Collated]] = ()


if TYPE_CHECKING:
    _Trainer: Any
else:
    _Trainer = object


class _Planned(_Trainer):
    """A mixin that takes planned steps. It stands before a trainer's own class in the order in
    which methods are looked up."""

    _planned: TrainerOptions

    def __init__(self, *args: Any, **named: Any) -> None:
        """Make the trainer's own class of its arguments; raises SpecError where these cannot be
        combined with planned steps."""
        self._run: Attached | None = None  # made when training begins
        self._loss_checked = False
        self._outcomes: list[Outcome] | None = None  # those of a policy's step while it is taken
        # Names of TRL's metrics that were collected and left out, and those that were said to be.
        self._collected, self._said = set[str](), set[str]()
        super().__init__(*args, **named)
        self._kind: Kind = kind_of(type(self))
        budget = self._planned.batch_tokens is not None
        require_combinable(self, self._kind, budget=budget)
        _require_one_mean(self, self._kind)

    # What the trainer asks for before its steps.

    def get_train_dataloader(self) -> Any:
        """A loader that gives every rank the samples of all ranks, in the order of one process. A
        trainer that samples completions of prompts has its own loader."""
        if self.train_dataset is None or self._kind == "policy":
            return super().get_train_dataloader()  # raises an error where there is no data set
        return train_loader(
            self,
            alone=self._kind in ("sums", "sft"),
            budget=self._planned.batch_tokens,
            say=self._planned.say,
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> Any:
        """Wrap the model and make the optimizer as the trainer does, then spread the model."""
        if self._run is not None:
            self._run.detach()
            self._run = None
        found = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._run = self._attach_wrapped()
        self._loss_checked = not self._planned.check_loss
        if resume_from_checkpoint is not None:
            path = Path(resume_from_checkpoint, _STATE)
            self._run.go_on(self.state.global_step, _read_state(path, self._planned.say))
        return found

    def _attach_wrapped(self) -> Attached:
        """Attach the trainer's model, as the trainer has wrapped it, to planned steps; the update
        stays with the trainer. Raises SpecError where the trainer knows another number of processes
        than there are."""
        options, model = self._planned, self.model_wrapped
        model.train()
        longest, total = self._longest()
        samples = self._train_batch_size * self.args.world_size
        samples *= self.args.gradient_accumulation_steps
        # Tokens of a step to plan for: the mean length times its samples where lengths are known.
        step_tokens = longest * samples
        if total is not None:
            mean_tokens = total * samples // max(1, len(self.train_dataset))
            step_tokens = min(step_tokens, max(longest, mean_tokens))
        example: Any = example_of(self) if self._kind == "sums" else None
        if self._kind == "scores":
            first = next(iter(self.train_dataset))
            example = without_labels(torch.as_tensor(first["chosen_ids"]), {})
        join_world(str(self.args.device))
        if dist.get_world_size() != self.args.world_size:
            raise SpecError(
                "processes of the trainer",
                got=f"{self.args.world_size} that it knows",
                wanted=f"the {dist.get_world_size()} that were started",
                hint="on CPUs say TrainingArguments(use_cpu=True)",
            )
        with self._spread_forward():
            return self._attach(model, longest, example, options.batch_tokens or step_tokens)

    def _spread_forward(self) -> AbstractContextManager[None]:
        """A context in which the model's forward gives an output for each token, which a model must
        do to be split by tokens. Only reward models, which score a sequence, are changed."""
        if self._kind != "scores":
            return nullcontext()
        return scores_of_tokens(self.model, self.accelerator.autocast)

    def _attach(self, model: Any, longest: int, example: Any, batch_tokens: int | str) -> Attached:
        """Attach ``model`` by :func:`headrace.attach`, for samples of up to ``longest`` tokens and
        steps of ``batch_tokens``. ``example`` is a sample to try the model with, None for a model
        that needs none."""
        options = self._planned
        samples = SampleOptions(
            labels="same" if self._kind == "scores" else None, own=self._kind == "policy"
        )
        return attach(
            model,
            getattr(self.optimizer, "optimizer", self.optimizer),
            longest=longest,
            example=example,
            batch_tokens=batch_tokens,
            update=False,
            check_loss=options.check_loss and self._kind in ("sums", "sft"),
            seed=self.args.seed,
            planner=options.planner,
            samples=samples,
            spread=options.spread,
            measure=options.measure,
            out=options.out,
            on_step=options.on_step,
            say=options.say,
        )

    def _longest(self) -> tuple[int, int | None]:
        """(tokens of the longest sample that may come, tokens of all samples or None where they are
        not counted). Raises SpecError for completions that are sampled when the user has not given
        the longest."""
        if self._kind != "policy":
            return longest_of(self, self._planned.longest)
        if self._planned.longest is None:
            raise SpecError(
                f"hr.trainer({type(self).__name__})",
                got="no longest=",
                wanted="the tokens of the longest prompt with its completion",
                hint='as hr.trainer(GRPOTrainer, longest="8Ki")',
            )
        return self._planned.longest, None

    # A step.

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[_Coming], None]:
        """Take the batches of a step from the loader; returns one entry for each, of which the last
        one carries all batches, and None for the number of items, which planned steps count
        themselves."""
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return [], None
        return [*[_Coming()] * (len(batches) - 1), _Coming(batches=batches)], None

    def training_step(
        self, model: Any, inputs: Any, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Take a planned step, all but its update; returns its loss, the same on all ranks."""
        if not isinstance(inputs, _Coming):
            raise SpecError(
                "training_step",
                got=f"inputs of {type(inputs).__name__}",
                wanted="what get_batch_samples gave",
                hint="call super().training_step(model, inputs, num_items_in_batch) with its own",
            )
        loss = 0.0
        if inputs.batches:  # none for all but the last batch of a step
            model.train()
            if callable(getattr(self.optimizer, "train", None)):
                self.optimizer.train()
            if self._kind == "policy":
                loss = self._policy_step(model, inputs.batches)
            elif self._kind in ("sums", "sft"):
                loss = self._one_pass(model, inputs.batches)
            else:
                loss = self._two_passes(model, inputs.batches)
        return torch.tensor(loss, device=self.args.device)

    def _one_pass(self, model: Any, batches: Sequence[list[Collated]]) -> float:
        """A planned step of a loss that is a sum over tokens: the trainer's own loss of each
        micro-batch, and its backward. Returns the loss of the step."""
        assert self._run is not None, "made before the first step"
        items = [item for batch in batches for item in batch]
        if not self._loss_checked:
            self._check_loss_of(model, items)
            self._loss_checked = True
        samples = [sample.fields for item in items for sample in item.samples]
        beside, share = _fields_of(items), self._targets_share(samples)
        # By attempt, as one that runs out of memory counts for nothing.
        step, sums = self._run.step(samples), defaultdict[int, Sums](Sums)
        for micro in step:
            # Idle turns, which have no sequences, and trials of the loss are not reported.
            counted = micro.sequences and not micro.checking
            with micro:
                counts = sums[step.retries] if counted else None
                loss = self._part_loss(model, micro, beside, counts, share=share)
                micro.backward(loss)
        tokens = sum(len(sample["input_ids"]) for sample in samples)
        self._note_tokens(tokens)
        if self._kind == "sft":
            self._report(sums[step.retries], tokens, step.tokens)
            self._say_what_is_unreported()
        return step.loss

    def _part_loss(
        self,
        model: Any,
        micro: Any,
        beside: Iterable[str],
        sums: Sums | None = None,
        *,
        share: float,
    ) -> torch.Tensor:
        """The trainer's own loss [] of the local tokens of ``micro``, a micro-batch or a part of a
        batch: a sum over them, divided by the number of tokens of the whole step that have a loss.
        ``beside`` are the fields that samples have, and ``share`` is that of :meth:`_targets_share`
        for the whole step. What TRL reports of these tokens is added to ``sums``."""
        items = torch.tensor(round(micro.targets / share), device=micro.labels.device)
        part = PartOfModel(
            model,
            micro.inputs,
            micro.labels,
            shifts=self._shifts,
            sums=sums,
            items=items,
            share=share,
            read=self._has_own_loss,
        )
        inputs = PartInputs(part.inputs, beside, part.mask)
        with self._unreported(), as_one_process(self), self.compute_loss_context_manager():
            return self.compute_loss(part, inputs, num_items_in_batch=items)

    @property
    def _shifts(self) -> bool:
        """Whether each token predicts the label of the next one, not its own."""
        assert self._run is not None, "made before the first step"
        return bool(self._run.predicts_next)

    @property
    def _has_own_loss(self) -> bool:
        """Whether ``compute_loss`` is a user's, which may read what the libraries' does not."""
        module = type(self).compute_loss.__module__ or ""  # None of one that was made by exec()
        return not module.startswith(("transformers.", "trl."))

    def _targets_share(self, samples: Iterable[Mapping[str, torch.Tensor]]) -> float:
        """Of the labels of ``samples`` that the trainer counts, by whose number it divides losses,
        the share that some token predicts. It counts the first label of a row too for models of
        which transformers does not know that they shift labels, such as GPT-2."""
        if not self._shifts or getattr(self, "_loss_shifts_labels", True):
            return 1.0
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        labels = [sample["labels"] for sample in samples if counts and "labels" in sample]
        counted = sum(int((own != IGNORED).sum()) for own in labels)
        targets = sum(int((own[1:] != IGNORED).sum()) for own in labels)
        return targets / counted if targets else 1.0

    def _check_loss_of(self, model: Any, items: Sequence[Collated]) -> None:
        """Compare the loss of a few items as the trainer collates and computes it, in one batch and
        as batches that it accumulates, with that of the same samples spread over all ranks.
        Collective. Raises ModelError on all ranks where they differ."""
        assert self._run is not None, "made before the first step"
        few, accumulates = _short_ones(items), self.args.gradient_accumulation_steps > 1
        # The mean of a batch without a target is no number, which nothing could be compared with.
        enough = all if accumulates else any
        if not enough(map(_has_target, few)):
            few = _short_ones([item for item in items if _has_target(item)])
        if not few:
            return  # the step itself raises an error for samples without a label
        together = self._collated(few)
        if len(together) == 1:
            _require_same(samples_of(together[0], "input_ids", "a batch"), few)
        samples = [sample for item in few for sample in item.samples]
        ways = [together]
        if accumulates and len(few) > 1:
            ways.append([self._prepare_inputs(self.data_collator([item.item])) for item in few])
        with torch.no_grad(), held_still(model, training=True):
            # Not the batch itself: a planned step has samples without the padding before them.
            with self._run.shard(self._prepare_inputs(rows_of(samples))) as part:
                assert part.labels is not None, "looked for above"
                share = self._targets_share(sample.fields for sample in samples)
                own_loss = self._part_loss(model, part, _fields_of(few), share=share)
            total = sum(row[0] for row in gather_floats([float(own_loss)], dist.group.WORLD))
            for batches in ways:
                self._require_like(total, self._plain_loss(model, batches), len(batches))

    def _collated(self, few: Sequence[Collated]) -> list[Any]:
        """The batch of a few items; where the collator cannot put them together, and each rank
        takes one item at a time, a batch of each."""
        items = [item.item for item in few]
        try:
            return [self._prepare_inputs(self.data_collator(items))]
        except (TypeError, ValueError, RuntimeError):
            if self.args.per_device_train_batch_size > 1:
                raise
        return [self._prepare_inputs(self.data_collator([item])) for item in items]

    def _plain_loss(self, model: Any, batches: Sequence[Any]) -> float:
        """The loss that the trainer without plans has of a step of these batches: it adds up that
        of each, divided by their number where it takes them for means."""
        with self._unreported(), as_one_process(self), self.compute_loss_context_manager():
            items = self._get_num_items_in_batch(batches, self.args.device)
            losses = [
                float(self.compute_loss(model, dict(batch), num_items_in_batch=items))
                for batch in batches
            ]
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            by_model = self.model_accepts_loss_kwargs and items is not None
            scaled = by_model or self.compute_loss_func is not None
        return sum(losses) if scaled else sum(losses) / len(losses)

    def _require_like(self, total: float, wanted: float, batches: int) -> None:
        """Raise ModelError where the loss ``total`` of a few samples spread differs from the one
        ``wanted``, which the trainer has of them in so many ``batches``."""
        limit = self._tolerance * max(abs(wanted), abs(total))
        # ``not <=`` refuses a total that is NaN, too.
        if not math.isfinite(wanted) or abs(total - wanted) <= limit:
            return
        where, hint = "one batch", "a data collator gives the same of a sample alone and in a batch"
        if batches > 1:
            where = f"{batches} batches that are added up"
            hint = "a model that is not given this number, or passes it over, has a mean for each "
            hint += "batch: give it, or raise per_device_train_batch_size instead of "
            hint += "gradient_accumulation_steps, as plans cut a step into what fits"
        raise ModelError(
            f"loss of {type(self).__name__}",
            got=f"{total:.6g} of a few samples spread",
            wanted=f"{wanted:.6g}, as compute_loss makes of them in {where}",
            hint=f"a loss is a sum over tokens with a label, divided by num_items_in_batch; {hint}",
        )

    @property
    def _tolerance(self) -> float:
        """The relative difference that the loss of a batch may have when it is spread."""
        dtype = next(self.model.parameters()).dtype
        return 3e-2 if self.args.bf16 or dtype not in _TOLERANCES else _TOLERANCES[dtype]

    def _check_values_of(self, model: Any, items: Sequence[Collated]) -> None:
        """Compare scores, or log-probabilities, of a few items as the trainer makes them of one
        batch with those of planned forwards. Collective. Raises ModelError on all ranks where they
        differ. Losses are not compared: rounding may be much of a small one."""
        few = _short_ones(items)
        batch = self._prepare_inputs(self.data_collator([item.item for item in few]))
        with torch.no_grad():
            with as_one_process(self), self.compute_loss_context_manager():
                plain = self._values_of(model, batch)
            with self._stood_in() as whole:
                spread = self._values_of(whole, batch)
        # Scores are sums that cancel in part, so rounding counts for more than in a loss.
        limit = 3 * self._tolerance * max(map(abs, (*plain.values(), 0.0)))
        for name, wanted in plain.items():
            if math.isfinite(wanted) and not abs(spread[name] - wanted) <= limit:
                raise ModelError(
                    f"{name} of {type(self).__name__}",
                    got=f"{spread[name]:.6g} of {len(few)} samples spread",
                    wanted=f"{wanted:.6g}, as compute_loss makes of them in one batch",
                    hint="a model must give a sequence alone what it gives it in a padded batch",
                )

    def _values_of(self, model: Any, batch: Any) -> dict[str, float]:
        """The metrics in _VALUES of a batch that ``model`` is called on, by name."""
        with self._unreported():
            self.compute_loss(model, dict(batch))
            found = self._metrics["train"]
            return {name: float(found[name][-1]) for name in _VALUES if name in found}

    # What is counted and reported.

    def _note_tokens(self, tokens: int) -> None:
        """Add the tokens of a step and their FLOPs to the trainer's counts. All ranks know the
        whole number, so nothing is gathered; there is no padding to leave out."""
        if str(getattr(self.args, "include_num_input_tokens_seen", "no")) != "no":
            self.state.num_input_tokens_seen += tokens
        if self.is_world_process_zero() and hasattr(self.model, "floating_point_ops"):
            self.current_flos += float(
                self.model.floating_point_ops({"input_ids": torch.empty(tokens, device="meta")})
            )

    def floating_point_ops(self, inputs: Any) -> int:
        """0 for a batch of a planned step, as :meth:`_note_tokens` counts the whole step."""
        return 0 if isinstance(inputs, _Coming) else super().floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Count no tokens of a batch of a planned step, as :meth:`_note_tokens` counts the whole
        step."""
        if not isinstance(inputs, _Coming):
            super()._track_num_input_tokens(inputs)

    @contextmanager
    def _unreported(self) -> Iterator[None]:
        """Within the block TRL's trainers collect no metrics: those of a micro-batch are part of
        what is reported of the whole step."""
        if self._kind == "sums":
            yield
            return
        metrics, tokens = self._metrics, self._total_train_tokens
        self._metrics = {mode: _ListsByName() for mode in metrics}
        try:
            yield
        finally:
            self._collected |= self._metrics["train"].keys()
            self._metrics, self._total_train_tokens = metrics, tokens

    def _say_what_is_unreported(self) -> None:
        """Say on the first rank, once, which metrics a user's ``compute_loss`` collects that are
        not logged in training, as they are of micro-batches."""
        own, self._collected = self._collected - self._metrics["train"].keys() - self._said, set()
        self._said |= own
        if own and self.is_world_process_zero():
            self._planned.say(
                f"metrics of compute_loss that are not logged in training: {', '.join(sorted(own))}"
                " (they would be those of micro-batches; on_step= is called with every step)"
            )

    def _report(self, sums: Sums, tokens: int, targets: int) -> None:
        """Have SFTTrainer add the metrics of a step, by its own formulas, as if it had been one
        batch of ``tokens``, of which ``targets`` have a loss. Collective.

        Each of its metrics is a sum of token values divided by the sum of their mask. So it is
        called with tensors of one element that hold the sums over all tokens of the step, and with
        the number of tokens in the place of the attention mask, by which it counts them. The loss
        that it returns is not used. A label smoother or a loss function of the user's would need
        logits, which are not here, so both are taken away meanwhile.
        """
        rows = gather_floats(sums.values, dist.group.WORLD)  # [ranks, values]
        totals = [torch.tensor([sum(column)]) for column in zip(*rows, strict=True)]
        outputs = SimpleNamespace(**dict(zip(REPORTED, totals, strict=True)), aux_loss=None)
        # Not super(): a user's class in between may have a compute_loss of its own.
        sft_trainer: Any = next(
            kind
            for kind in type(self).__mro__
            if kind.__name__ == "SFTTrainer" and kind.__module__ == "trl.trainer.sft_trainer"
        )
        smoother, func = self.label_smoother, self.compute_loss_func
        self.label_smoother = self.compute_loss_func = None
        try:
            with as_one_process(self):
                sft_trainer.compute_loss(
                    self,
                    partial(_constant_model, outputs),
                    {"attention_mask": torch.tensor([tokens])},
                    num_items_in_batch=torch.tensor(targets),
                )
        finally:
            self.label_smoother, self.compute_loss_func = smoother, func

    # Losses of whole sequences.

    def _two_passes(self, model: Any, batches: Sequence[list[Collated]]) -> float:
        """A step of a loss of whole sequences: planned forwards give the values of all tokens, the
        trainer's loss of them has gradients by these values, and a planned step runs the backward
        from there. Returns the loss of the step."""
        assert self._run is not None, "made before the first step"
        if not self._loss_checked:
            self._check_values_of(model, batches[0])
            self._loss_checked = True
        outcomes, total, tokens = list[Outcome](), 0.0, 0
        for items in batches:
            batch = self._prepare_inputs(self.data_collator([item.item for item in items]))
            tokens += int(batch["attention_mask"].sum())
            with self._stood_in(outcomes) as whole:
                loss = self.compute_loss(whole, batch) / len(batches)
            loss.backward()
            total += float(loss)
        # The models' calls have added their outcomes while the losses were computed.
        samples = [sample for outcome in outcomes for sample in outcome.given()]
        gradients = [gradient for outcome in outcomes for gradient in outcome.gradients()]
        scores = self._kind == "scores"
        with self._spread_forward():
            self._run.backward(
                samples,
                scores_by_token if scores else _log_probs,
                gradients,
                more=None if scores else fused_head,
            )
        self._note_tokens(tokens)
        return total

    # Completions that are sampled.

    def _policy_step(self, model: Any, batches: Sequence[Any]) -> float:
        """A step of a trainer that samples completions: on each rank the trainer's loss of its own
        batches has gradients by the values of their tokens, and one planned step runs the backward
        of all ranks. Returns the loss of this rank, as the trainer takes the mean over ranks."""
        assert self._run is not None, "made before the first step"
        outcomes = list[Outcome]()
        self._outcomes = outcomes  # filled by PolicyModel within ``compute_loss``
        total, began_s = 0.0, time.perf_counter()
        try:
            for at, batch in enumerate(batches):
                last = at == len(batches) - 1
                state = self.accelerator.gradient_state
                state._set_sync_gradients(last)  # noqa: SLF001  as transformers' Trainer does
                inputs = self._prepare_inputs(batch)
                with self.compute_loss_context_manager():
                    loss = self.compute_loss(model, inputs)
                loss.backward()
                total += float(loss)
                self._step += 1  # GRPOTrainer counts batches by it, to know when to sample anew
        finally:
            self._outcomes = None
        # The step's loss is the mean of the ranks' losses, but the run adds up their gradients.
        ranks = self.args.world_size
        samples = [sample for outcome in outcomes for sample in outcome.given()]
        gradients = [g / ranks for outcome in outcomes for g in outcome.gradients()]
        self._run.backward(samples, policy_values, gradients, more=fused_head)
        self._metrics["train"]["step_time"].append(time.perf_counter() - began_s)
        return total

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **named: Any) -> Any:
        """The log-probabilities and entropies of tokens from which GRPOTrainer computes its loss;
        once training has begun they come from planned forwards that all ranks share."""
        if self._run is not None:
            named.pop("batch_size", None)  # plans cut a batch into what fits
            reference = getattr(self, "ref_model", None)
            model = PolicyModel(
                self._run,
                model,
                spread=reference if model is reference else None,
                outcomes=self._outcomes,
            )
        return super()._get_per_token_logps_and_entropies(model, *args, **named)

    @contextmanager
    def _stood_in(
        self, outcomes: list[Outcome] | None = None, *, makes_logits: bool = True
    ) -> Iterator[Any]:
        """Within the block the trainer works as one process, and calls of its models are planned
        forwards on all ranks. Yields the object to be called in the place of its model, which adds
        the values that a loss is computed of to ``outcomes``."""
        run = self._run
        assert run is not None, "made before"
        model, reference = self.model, getattr(self, "ref_model", None)
        if self._kind == "scores":
            whole: Any = ScoredModel(
                run, model, around=self.accelerator.autocast, outcomes=outcomes
            )
        else:
            whole = WholeModel(
                run,
                model,
                shifts=self._shifts,
                makes_logits=makes_logits,
                outcomes=outcomes,
            )
        with ExitStack() as undo:
            undo.enter_context(as_one_process(self))
            undo.enter_context(self.compute_loss_context_manager())
            if self._kind == "pairs":
                undo.callback(setattr, self, "ref_model", reference)
                undo.callback(setattr, self, "model", model)
                self.ref_model = self._reference(run, model, reference)
                self.model = whole
            yield whole

    def _reference(self, run: Attached, model: Any, reference: Any) -> Any:
        """What DPOTrainer calls in the place of its reference model: a stand-in for ``reference``
        or, where that is None, for ``model`` without its adapter. None for a model that has no
        adapter either."""
        if reference is not None:
            return WholeModel(run, reference, spread=reference)
        inner = self.accelerator.unwrap_model(model)
        if not hasattr(inner, "peft_config"):
            return None  # its log-probabilities were computed before
        from trl.trainer.utils import use_adapter

        name = "ref" if "ref" in inner.peft_config else None
        return WholeModel(run, model, around=lambda: use_adapter(inner, adapter_name=name))

    # Evaluation and prediction: as one process does them, with forwards that all ranks share. Of
    # completions that are sampled each rank has its own, as in training.

    def _alone(self) -> AbstractContextManager[None]:
        """A context in which the trainer works as one process, unless each rank samples completions
        of its own."""
        return nullcontext() if self._kind == "policy" else as_one_process(self)

    def get_eval_dataloader(self, *args: Any, **named: Any) -> Any:
        """A loader that gives every rank all batches, as one process has them."""
        with self._alone():
            return super().get_eval_dataloader(*args, **named)

    def get_test_dataloader(self, *args: Any, **named: Any) -> Any:
        """A loader that gives every rank all batches, as one process has them."""
        with self._alone():
            return super().get_test_dataloader(*args, **named)

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """Evaluate as one process does: every rank has the results of all samples."""
        with self._alone():
            return super().evaluation_loop(*args, **named)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """The trainer's results (loss, logits, labels) of a batch; once training has begun they
        come from planned forwards that all ranks share."""
        if isinstance(self.accelerator, OneProcess):
            self.accelerator.note_rows(inputs)
        if self._run is None or self._kind == "policy":
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        makes_logits = self._has_own_loss or not prediction_loss_only
        with torch.no_grad(), self._stood_in(makes_logits=makes_logits) as whole:
            return super().prediction_step(whole, inputs, prediction_loss_only, ignore_keys)

    # Checkpoints.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write the trainer's checkpoint, and the planner's state into its folder."""
        super()._save_checkpoint(model, trial)
        if self._run is not None and self._run.rank == 0:  # others have no state of their own
            folder = Path(self._get_output_dir(trial=trial), f"checkpoint-{self.state.global_step}")
            if folder.is_dir():
                # Aside and renamed: a run that dies meanwhile leaves no half of it.
                aside = folder / f"{_STATE}.new"
                aside.write_text(json.dumps(self._run.planner_state()), encoding="utf-8")
                aside.replace(folder / _STATE)


def _read_state(path: Path, say: Callable[[str], object]) -> dict[str, Any] | None:
    """The state of planning in a checkpoint, None without one, and on other ranks than the first,
    which tells them. One that cannot be read is passed over, which is said, as plans can be made
    without it."""
    if dist.get_rank() or not path.exists():
        return None
    try:
        state: dict[str, Any] = json.loads(path.read_text("utf-8"))
        if "ranks" in state and "costs" in state["planner"]:
            return state
        fault = f"it has {', '.join(state) or 'nothing'}"
    except (OSError, ValueError, TypeError, KeyError) as error:
        fault = f"{type(error).__name__}: {error}"
    say(f"{path} is passed over ({fault}): plans are made anew")
    return None


class _ListsByName(dict[str, list[Any]]):
    """A dict that makes an empty list for each name that is asked for and missing."""

    def __missing__(self, name: str) -> list[Any]:
        """Put an empty list under a name that is missing, and return it."""
        values = self[name] = list[Any]()
        return values


def _constant_model(outputs: Any, **_: Any) -> Any:
    """Return ``outputs`` for any inputs: with its first argument bound, a callable in the place of
    a model."""
    return outputs


def _log_probs(outputs: Any, micro: Any) -> torch.Tensor:
    """The log-probability of each local token's label, [1, s_r]."""
    log_probs: torch.Tensor = outputs.log_probs
    return log_probs


def _tokens(value: int | str | None) -> int | None:
    """A number of tokens, which may be a text such as ``64Ki``."""
    return parse_count(value) if isinstance(value, str) else value


def _tokens_of(item: Collated) -> int:
    """The tokens of all samples of an item; of one without samples, those of its texts."""
    if item.samples:
        return sum(len(sample.fields["input_ids"]) for sample in item.samples)
    return sum(len(item.item.get(name, ())) for name in ("chosen_ids", "rejected_ids"))


def _short_ones(items: Sequence[Collated]) -> list[Collated]:
    """Two of ``items``, fewer where there are not two, which every rank computes whole: the
    shortest, and one above it, so that their batch has padding: of at least twice its tokens where
    there is one of at most _SHORT_TOKENS."""
    ordered = sorted(items, key=_tokens_of)
    least = _tokens_of(ordered[0]) if ordered else 0
    longer = [item for item in ordered if _tokens_of(item) > least]
    wide = [item for item in longer if 2 * least <= _tokens_of(item) <= _SHORT_TOKENS]
    return [*ordered[:1], *(wide or longer or ordered[1:])[:1]]


def _fields_of(items: Sequence[Collated]) -> set[str]:
    """The names of the fields that samples of ``items`` have."""
    return {name for item in items for sample in item.samples for name in sample.fields}


def _has_target(item: Collated) -> bool:
    """Whether a token of an item has a label that a token before predicts. Raises DataError where
    a data collator gives no labels."""
    for sample in item.samples:
        labels = sample.fields.get("labels")
        if labels is None:
            raise DataError(
                "samples as the data collator gives them",
                got=f"fields {', '.join(sample.fields)}",
                wanted="labels",
                hint="DataCollatorForLanguageModeling(tokenizer, mlm=False) makes them of tokens",
            )
        if bool((labels[1:] >= 0).any()):
            return True
    return False


def _require_same(together: Sequence[RowSample], items: Sequence[Collated]) -> None:
    """Raise DataError unless the samples that the data collator made of several items in one batch,
    ``together``, equal those that it made of each of the ``items`` alone. Otherwise it draws at
    random or mixes items, and a plan could not move its samples to other batches."""
    alone = [sample for item in items for sample in item.samples]
    if len(together) == len(alone) and all(
        own.fields.keys() == sample.fields.keys()
        and all(torch.equal(value.cpu(), sample.fields[k]) for k, value in own.fields.items())
        for own, sample in zip(together, alone, strict=True)
    ):
        return
    raise DataError(
        "samples as the data collator gives them",
        got="others in a batch than alone",
        wanted="the same, beside padding",
        hint="what it draws at random (mlm=True), or makes of several items, cannot be planned: do "
        "it in the data set",
    )


def _require_one_mean(instance: Any, kind: Kind) -> None:
    """Raise SpecError where the trainer ``instance`` would take the mean of the losses of a step's
    batches however many tokens each has, which it does when its loss is not given the number of the
    step's tokens. A planned step weighs all tokens alike, so its loss would differ."""
    several = instance.args.gradient_accumulation_steps > 1
    scaled = getattr(instance, "loss_is_scaled_for_ga", None)
    if scaled is None:
        scaled = instance.model_accepts_loss_kwargs or instance.compute_loss_func is not None
    if kind == "sums" and several and not scaled:
        raise SpecError(
            "gradient_accumulation_steps",
            got=instance.args.gradient_accumulation_steps,
            wanted=f"1 for {type(instance.model).__name__}, whose loss is not divided by "
            "num_items_in_batch",
            hint="its loss is a mean of the means of batches: raise per_device_train_batch_size "
            "instead, as plans cut a step into what fits",
        )
