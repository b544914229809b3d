"""Models that nobody here wrote, on one GPU: through gloo where ranks share it, and in a world of
NCCL alone, as most scripts begin one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.cli.foreign_models import foreign_model
from headrace.comm.gpus import count_gpus
from ranks import run_ranks

pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.skipif(not count_gpus(), reason="needs a CUDA device"),
    pytest.mark.gpu,
    pytest.mark.timeout(240),
]
FAMILIES = ("qwen3", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "opt", "modernbert")
ROOMS = {torch.float64: 1e-5, torch.bfloat16: 0.06}
"""How far gradients may be off, by their norm: norms of transformers are in single precision."""


def _step(family: str, device: str, dtype: torch.dtype) -> list[tuple[float, dict[str, Any]]]:
    """Loss and gradients of a step by each exchange of a packed row with a long document."""
    model = foreign_model(family, 0).to(device, dtype).eval()
    ids = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(0)).to(device)
    places = torch.cat([torch.arange(n) for n in (7, 41, 12)])[None].to(device)
    batch = {
        "input_ids": ids,
        "position_ids": places,
        "labels": ids.masked_fill(ids % 5 == 0, -100),
    }
    if family == "opt":  # learned places, read from the mask
        del batch["position_ids"]
    run, found = hr.compile(model), []
    for exchange in ("ulysses", "ring"):
        model.zero_grad()
        loss = run(**run.shard(batch, exchange=exchange).inputs).loss
        run.backward(loss)
        total = float(run.add_up(loss))
        grads = {
            name: p.grad.double().cpu().numpy()
            for name, p in model.named_parameters()
            if p.grad is not None
        }
        found.append((total, grads))
    return found


@pytest.mark.parametrize("dtype", ROOMS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_equal_one_process_on_a_cpu(family: str, dtype: torch.dtype) -> None:
    """Catches masks, biases, sinks and caps that kernels of a GPU do not know, and lose."""
    room = ROOMS[dtype]
    wanted_loss, wanted = run_ranks(1, _step, family, "cpu", torch.float64, timeout_s=100)[0][0]
    for rank in run_ranks(2, _step, family, "cuda:0", dtype, timeout_s=200):
        for loss, grads in rank:
            assert loss == pytest.approx(wanted_loss, rel=room / 3)
            assert grads.keys() == wanted.keys()
            off = sum(np.linalg.norm(grads[name] - wanted[name]) ** 2 for name in wanted) ** 0.5
            assert off <= room * sum(np.linalg.norm(x) ** 2 for x in wanted.values()) ** 0.5


NCCL_ALONE = """
import os, sys
import torch
import torch.distributed as dist
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost",
                  MASTER_PORT=sys.argv[1])
dist.init_process_group("nccl")
import headrace as hr
from running.engine.loops import alone, attached, batches, dataset, llama

def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

plain, model = llama(), llama().to("cuda")
run = attached(model, optimizer_of(model), dataset(), sys.argv[2], clip=0.5, steps=4)
losses = []
for step in run:
    for micro in step:
        with torch.no_grad():
            model.eval()
            model.train()
        micro.backward(model(**micro.inputs).loss)
    losses.append(step.loss)
wanted = alone(plain, optimizer_of(plain), batches(dataset(), 4, batch_tokens=150), clip=0.5)
assert len(losses) == 4
assert max(abs(a / b - 1) for a, b in zip(losses, wanted)) < 1e-6, (losses, wanted)
for mine, exact in zip(model.parameters(), plain.parameters(), strict=True):
    assert (mine.cpu() - exact).abs().max() < 1e-6
assert str(dist.get_backend_config()) == "cuda:nccl", dist.get_backend_config()
"""


def test_a_loop_in_a_world_of_nccl_alone(tmp_path: Path) -> None:
    """Catches what ranks agree on sent through NCCL from the host, and measured costs of a GPU
    that plans cannot be made from."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", NCCL_ALONE, str(port), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([tests, *sys.path])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
