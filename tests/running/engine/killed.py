"""A loop that is killed once: run under torchrun by the test beside it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import headrace as hr
from running.engine.loops import costs, dataset, llama


def main(folder: Path, kill_at: int) -> None:
    """Six steps, a checkpoint after every second one; rank 1 is killed in step ``kill_at``."""
    torch.distributed.init_process_group("gloo")
    model = DistributedDataParallel(llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = hr.attach(
        model,
        optimizer,
        dataset(),
        batch_tokens=150,
        steps=6,
        measure=hr.MeasureOptions(cache=folder / "cache", costs=costs(2)),
        say=lambda text: None,
    )
    run.load(folder / "saved")
    for step in run:
        for micro in step:
            loss = model(**micro.inputs).loss
            if step.number == kill_at and run.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            micro.backward(loss)
        if step.number % 2:
            run.save(folder / "saved")
        if run.rank == 0:
            print(json.dumps({"step": step.number, "loss": step.loss}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
