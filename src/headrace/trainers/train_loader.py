"""The samples of a trainer's steps, in the order in which one process would take them.

On W ranks a trainer gives each rank a batch of B samples of its own; together they are the batch of
B x W samples that a single process would take. The loader here gives every rank this whole batch,
with the trainer's own sampler, seed and epochs. It collates samples one by one, as a plan places
each of them by its length.

With a budget of tokens the order of an epoch is cut into as many batches of about equal tokens as
the budget needs: the same number in every epoch, and each sample once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from headrace.engine.listener import tell
from headrace.errors import DataError, SpecError
from headrace.trainers.one_process import one_process_loader
from headrace.trainers.rows import RowSample, samples_of

__all__ = ["Collated", "ItemReader", "example_of", "lengths_of", "longest_of", "train_loader"]

_LENGTH_STRATEGIES = ("group_by_length", "batch_rebalance")
"""Values of ``train_sampling_strategy`` with which a trainer draws samples by their length."""

_TOKENS = ("input_ids", "chosen_ids", "rejected_ids")
"""Columns of a data set with the token numbers of a text."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Collated:
    """An item of the data set, and the samples that the data collator makes of this item alone.
    There are no samples for trainers that collate whole batches, such as those of pairs."""

    item: Any
    samples: list[RowSample]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemReader:
    """The ``collate_fn`` of a loader: it keeps a batch as a list of items, and if ``alone`` runs
    the data ``collator`` on each item by itself."""

    collator: Callable[[list[Any]], Any]
    alone: bool

    def __call__(self, items: list[Any]) -> list[Collated]:
        """The items, and the samples of each."""
        return [Collated(item=item, samples=self.samples(item)) for item in items]

    def samples(self, item: Any) -> list[RowSample]:
        """The samples that the collator makes of an item; empty unless ``alone``."""
        if not self.alone:
            return []
        return samples_of(self.collator([item]), "input_ids", "an item")


class _Budgeted(BatchSampler):
    """The order of a sampler, cut into batches of about equal tokens, as many as a budget needs."""

    def __init__(self, sampler: Sampler[int], lengths: NDArray[np.int64], budget: int) -> None:
        """Batches of about ``budget`` tokens or fewer; ``lengths`` [items] are in tokens."""
        super().__init__(sampler, batch_size=1, drop_last=False)
        self._lengths = lengths
        self._count = min(len(lengths), max(1, math.ceil(int(lengths.sum()) / budget)))

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the numbers of the items of each batch. Batch k of n, from 1, ends where k / n of
        all tokens of the epoch are reached."""
        order = [int(item) for item in self.sampler]
        ends = np.cumsum(self._lengths[order])
        start = 0
        for number in range(1, self._count + 1):
            end = int(np.searchsorted(ends, ends[-1] * number / self._count, side="right"))
            # At least one item for this batch and for each that follows.
            end = min(max(end, start + 1), len(order) - (self._count - number))
            yield order[start:end]
            start = end


def train_loader(
    trainer: Any, *, alone: bool, budget: int | None, say: Callable[[str], object] = tell
) -> Any:
    """A loader that gives every rank the batches of all ranks, as lists of :class:`Collated`. If
    ``alone``, each item is collated by itself; else it has no samples yet. A batch has ``budget``
    tokens or, where that is None, as many samples as the trainer's arguments say. Raises SpecError
    for a budget where the data set has no length."""
    args, dataset, collator = trainer.args, trainer.train_dataset, trainer.data_collator
    dataset, collator = _columns(trainer, dataset, collator)
    options: dict[str, Any] = {
        "collate_fn": ItemReader(collator=collator, alone=alone),
        "num_workers": args.dataloader_num_workers,
        "persistent_workers": args.dataloader_persistent_workers,
        "multiprocessing_context": args.dataloader_multiprocessing_context,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "in_order": args.dataloader_in_order,
        "worker_init_fn": _SameSeeds(args.dataloader_num_workers),
    }
    streams = isinstance(dataset, IterableDataset)
    if budget is None:
        options |= {
            "batch_size": trainer._train_batch_size * args.world_size,  # noqa: SLF001
            "drop_last": args.dataloader_drop_last,
        }
        if not streams:
            options["sampler"] = _sampler(trainer, dataset, say)
    elif streams:
        raise SpecError(
            "batch_tokens=",
            got="a data set without a length",
            wanted="items by number",
            hint="say per_device_train_batch_size and gradient_accumulation_steps",
        )
    else:
        sampler, lengths = _sampler(trainer, dataset, say), lengths_of(dataset)
        options["batch_sampler"] = _Budgeted(_seedable(trainer, sampler), lengths, budget)
    return one_process_loader(trainer.accelerator, DataLoader(dataset, **options), moves=False)


def example_of(trainer: Any) -> dict[str, torch.Tensor] | None:
    """The fields of the first sample with a label, for a model whose labels are no tokens, as it
    has no head of a language model; None for others, whose example can be drawn at random, and for
    a data set that is not read by number."""
    dataset, head = trainer.train_dataset, getattr(trainer.model, "get_output_embeddings", None)
    by_number = hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)
    if not by_number or (head is not None and head() is not None):
        return None
    dataset, collator = _columns(trainer, dataset, trainer.data_collator)
    reader = ItemReader(collator=collator, alone=True)
    for at in range(len(dataset)):
        for sample in reader.samples(dataset[at]):
            labels = sample.fields.get("labels")
            if labels is None or bool((labels >= 0).any()):
                return sample.fields
    return None


def _columns(trainer: Any, dataset: Any, collator: Any) -> tuple[Any, Any]:
    """(data set, collator) without the columns that the model does not use: they are removed from
    the data set or, where that is impossible, by the collator."""
    if hasattr(dataset, "remove_columns") and not isinstance(dataset, IterableDataset):
        return trainer._remove_unused_columns(dataset, description="Training"), collator  # noqa: SLF001
    take = trainer._get_collator_with_removed_columns  # noqa: SLF001
    return dataset, take(collator, description="Training")


def _sampler(trainer: Any, dataset: Any, say: Callable[[str], object]) -> Any:
    """The trainer's sampler, or a random one where the trainer would group samples by length: then
    the first rank says so."""
    from transformers import Trainer

    overridden = type(trainer)._get_train_sampler is not Trainer._get_train_sampler  # noqa: SLF001
    strategy = str(getattr(trainer.args, "train_sampling_strategy", "random"))
    if overridden or strategy not in _LENGTH_STRATEGIES:
        return trainer._get_train_sampler(dataset)  # noqa: SLF001
    if trainer.is_world_process_zero():
        say(f"{strategy} is passed over: samples come at random, and plans place them by length")
    return torch.utils.data.RandomSampler(dataset)


def _seedable(trainer: Any, sampler: Any) -> Any:
    """The sampler as Accelerate makes it: a random one is replaced by one whose order depends on
    the seed and the epoch alone, where Accelerate is configured so; any other is returned as it
    is."""
    from accelerate.data_loader import SeedableRandomSampler

    config = trainer.accelerator.dataloader_config
    if not isinstance(sampler, torch.utils.data.RandomSampler) or not config.use_seedable_sampler:
        return sampler
    return SeedableRandomSampler(
        data_source=sampler.data_source, generator=sampler.generator, data_seed=config.data_seed
    )


class _SameSeeds:
    """The ``worker_init_fn`` of a loader, which seeds workers alike on all ranks: every rank reads
    the samples of all ranks, and must read the same ones."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def __call__(self, worker: int) -> None:
        """Seed the worker of this number as transformers does on rank 0."""
        from transformers.trainer_utils import seed_worker

        seed_worker(worker, num_workers=self._workers, rank=0)


def lengths_of(dataset: Any) -> NDArray[np.int64]:
    """The tokens of each item of a data set, an array [items]: of an item with two texts that are
    compared, those of the longer one with its prompt."""
    columns = getattr(dataset, "column_names", None) or ()
    named = [name for name in _TOKENS if name in columns]
    if named and hasattr(dataset, "with_format"):
        # Lengths are counted in Arrow's columns, without making Python objects of the tokens.
        import pyarrow.compute as pc

        parts = list[NDArray[np.int64]]()
        table = dataset.select_columns(
            [*named, *(["prompt_ids"] if "prompt_ids" in columns else [])]
        )
        for rows in table.with_format("arrow").iter(batch_size=10_000):
            counts = {c: pc.list_value_length(rows[c]).to_numpy() for c in rows.column_names}
            prompt = counts.pop("prompt_ids", 0)
            parts.append(np.max(np.stack(list(counts.values())), axis=0) + prompt)
        return np.concatenate(parts).astype(np.int64)
    return np.asarray([_length(dataset[at], at) for at in range(len(dataset))], dtype=np.int64)


def _length(item: Any, at: int) -> int:
    """The tokens of item ``at``: of the longest of its texts, and of the prompt that they share.
    Raises DataError without any text."""
    texts = [item[name] for name in _TOKENS if hasattr(item, "keys") and name in item]
    if not texts:
        raise DataError(
            f"item {at} of the data set",
            got=f"fields {', '.join(map(str, item))}"
            if hasattr(item, "keys")
            else type(item).__name__,
            wanted=f"one of {', '.join(_TOKENS)}",
            hint="token numbers that a data collator makes are not counted: give "
            "hr.trainer(..., longest=...)",
        )
    prompt = item.get("prompt_ids", ())
    return max(len(tokens) for tokens in texts) + len(prompt)


def longest_of(trainer: Any, given: int | None) -> tuple[int, int | None]:
    """(tokens of the longest sample that may come, in training or evaluation, tokens of all samples
    to train or None where they are not counted). ``given`` is the longest that the user named.
    Raises SpecError where nothing tells."""
    dataset, most = trainer.train_dataset, getattr(trainer.args, "max_length", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        longest = given or most
        if longest is None:
            raise SpecError(
                "hr.trainer with a data set without a length",
                got="no longest=",
                wanted="the tokens of the longest sample that it will give",
                hint='as hr.trainer(Trainer, longest="8Ki")',
            )
        return int(longest), None
    if given is not None:
        return given, None
    lengths = lengths_of(dataset)
    longest = max(int(lengths.max()), _longest_evaluated(trainer.eval_dataset))
    return (longest if most is None else min(longest, int(most))), int(lengths.sum())


def _longest_evaluated(dataset: Any) -> int:
    """Tokens of the longest sample of a data set to evaluate, or of several by name; 0 without one,
    and where tokens are not counted."""
    if isinstance(dataset, dict):
        return max(map(_longest_evaluated, dataset.values()), default=0)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        return 0
    try:
        return int(lengths_of(dataset).max(initial=0))
    except DataError:  # other samples than those to train, perhaps of a loop of the user's own
        return 0
