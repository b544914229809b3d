"""A trainer that works as one process does, for a while.

A planned step hands each rank its own number of micro-batches, and an evaluation gives every rank
the results of all rows. A collective of the trainer's own would then wait for ranks that do not
call it, or count everything once for each rank. So the trainer's accelerator is replaced by one
that behaves as if there were a single process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

__all__ = ["OneProcess", "as_one_process", "one_process_loader"]


class OneProcess:
    """Stands in for the Accelerate accelerator ``real`` and behaves as if there were one process;
    all attributes that it does not define are those of ``real``."""

    num_processes = 1
    process_index = 0

    def __init__(self, real: Any) -> None:
        self.real = real
        self._rows: int | None = None  # of the batch that is evaluated

    def note_rows(self, inputs: Any) -> None:
        """Note how many rows the batch ``inputs`` has, whose values are gathered next."""
        from accelerate.utils import find_batch_size

        self._rows = find_batch_size(inputs)

    def __getattr__(self, name: str) -> Any:
        """An attribute of the real accelerator, as it is not defined here."""
        return getattr(self.real, name)

    def gather(self, values: Any) -> Any:
        """The values of all processes, of which there is one."""
        return values

    def gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        """The values without those of padding samples: of the last batch of a data loader only the
        first ``remainder`` or, where the data set has no length, as many as the batch has rows."""
        from accelerate.utils import recursively_apply

        state = self.real.gradient_state
        remainder = state.remainder if state.end_of_dataloader else 0
        if remainder < 0 and self._rows is not None:
            remainder = self._rows
        if remainder <= 0:  # not the last batch, or no padding in it
            return values
        return recursively_apply(partial(_first_rows, remainder), values)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum or mean over processes, which is the tensor itself, as there is one."""
        return tensor

    def pad_across_processes(self, tensor: Any, dim: int = 0, **_: Any) -> Any:
        """The tensor itself: there is no other process whose tensor could be wider."""
        return tensor

    def wait_for_everyone(self) -> None:
        """Return at once: there is nobody to wait for."""

    def unwrap_model(self, model: Any, *args: Any, **named: Any) -> Any:
        """The model within the wrappers that Accelerate put around it; of a stand-in, that within
        the model it stands for."""
        return self.real.unwrap_model(getattr(model, "stands_for", model), *args, **named)

    def prepare(self, *given: Any, **named: Any) -> Any:
        """Prepare objects as Accelerate does, except for a single data loader, which gives every
        process all batches."""
        if len(given) == 1 and isinstance(given[0], DataLoader):
            return one_process_loader(self.real, given[0])
        return self.real.prepare(*given, **named)


def one_process_loader(accelerator: Any, loader: DataLoader[Any], *, moves: bool = True) -> Any:
    """The loader that Accelerate makes of a data loader in a single process: it gives the same
    batches on all ranks, in the same order. If ``moves``, tensors are moved to the device."""
    from accelerate.data_loader import prepare_data_loader

    return prepare_data_loader(
        loader,
        accelerator.device if moves else None,
        num_processes=1,
        process_index=0,
        put_on_device=moves,
        dispatch_batches=False,
        even_batches=accelerator.even_batches,
        use_seedable_sampler=accelerator.use_seedable_sampler,
        data_seed=accelerator.dataloader_config.data_seed,
    )


def _first_rows(count: int, tensor: torch.Tensor) -> torch.Tensor:
    """The first rows of a tensor; a scalar as it is."""
    return tensor[:count] if tensor.dim() else tensor


@contextmanager
def as_one_process(trainer: Any) -> Iterator[None]:
    """Within the block ``trainer`` does no collective: its accelerator is that of one process.
    Blocks may be nested."""
    before, gathers = trainer.accelerator, trainer.gather_function
    if isinstance(before, OneProcess):  # within another such block
        yield
        return
    alone = OneProcess(before)
    trainer.accelerator = alone
    if gathers == before.gather:  # as Seq2SeqTrainer has it
        trainer.gather_function = alone.gather
    else:
        trainer.gather_function = partial(
            alone.gather_for_metrics, use_gather_object=trainer.args.eval_use_gather_object
        )
    try:
        yield
    finally:
        trainer.accelerator, trainer.gather_function = before, gathers
