"""``headrace verify``: exactness of the runtime on this machine, wholeness of a checkpoint."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from headrace.cli.display import tell
from headrace.comm.collectives import all_gather_rows
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.errors import CheckpointError, ConfigError
from headrace.models.plain import plain_loss, whole_weights
from headrace.planning.drawn import random_plan
from headrace.runtime import checkpoint
from headrace.runtime.executor import Executor
from headrace.runtime.storage import AdamW, Storage
from headrace.spec.architecture import Architecture
from headrace.spec.lengths import Lengths

__all__ = ["verify"]

_MODELS = {
    "llama, grouped heads": Architecture(
        layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61
    ),
    "llama, one key head, untied": Architecture(
        layers=2, hidden=48, heads=8, kv_heads=1, ffn=40, vocabulary=53, tied=False
    ),
    "gpt": Architecture(
        layers=2, hidden=32, heads=4, kv_heads=4, ffn=64, vocabulary=61, kind="gpt", positions=64
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    model: str
    ranks: int
    steps: int
    seed: int


def verify(
    what: str, path: Path | None, *, ranks: Sequence[int], steps: int, seed: int, tolerance: float
) -> int:
    """Run one of the verifications; the exit code is 1 when it fails."""
    if what == "checkpoint":
        return _verify_checkpoint(path)
    if path is not None:
        raise ConfigError("verify native", got=f"a path {path}", wanted="none")
    if steps < 1 or not ranks or min(ranks) < 1:
        raise ConfigError("verify", got=f"ranks {list(ranks)}, steps {steps}", wanted=">= 1 each")
    cases = [
        _Case(model=model, ranks=count, steps=steps, seed=seed)
        for model in _MODELS
        for count in ranks
    ]
    return _print([(case, _errors_of(case)) for case in cases], tolerance)


def _verify_checkpoint(path: Path | None) -> int:
    if path is None:
        raise ConfigError("verify checkpoint", got="no path", wanted="a checkpoint or their folder")
    target = path if (path / "index.json").exists() else checkpoint.latest(path)
    if target is None:
        raise CheckpointError(f"checkpoints in {path}", got="none", wanted="at least one")
    try:
        checkpoint.verify(target)
    except CheckpointError as error:
        tell(f"error: {error}")
        return 1
    tensors = checkpoint.names(target)
    print(f"{target}: whole, {len(tensors)} tensors, every checksum agrees")
    return 0


def _errors_of(case: _Case) -> dict[str, float] | None:
    """Largest relative errors of a case, None when its ranks failed."""
    tell(f"{case.model} on {case.ranks} ranks")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            found = _compare(case)
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        code = start(main, ranks=case.ranks, threads=1)
        if code != 0 or not result.exists():
            return None
        values: dict[str, float] = json.loads(result.read_text())
    return values


def _compare(case: _Case) -> dict[str, float]:
    a, groups = _MODELS[case.model], Groups()
    storage = Storage(
        a, groups, seed=case.seed, dtype=torch.float64, options=AdamW(clip=0.0, decay=0.0)
    )
    executor = Executor(storage, groups, seed=case.seed, dtype=torch.float64)
    rng = np.random.default_rng((case.seed, case.ranks))
    worst = {"loss": 0.0, "gradient": 0.0}
    for step in range(case.steps):
        lengths = Lengths.of(rng.integers(1, 50, size=int(rng.integers(2, 10))))
        tokens = tuple(rng.integers(a.vocabulary, size=n).astype(np.int32) for n in lengths.tokens)
        plan = random_plan(lengths, groups.ranks, a.layers, rng, largest=a.heads)
        result = executor.run(plan, tokens, step=step, lr=0.0)
        loss, grads = _plain_step(tokens, a, case.seed)
        worst["loss"] = max(worst["loss"], abs(result.loss - loss) / max(abs(loss), 1e-12))
        for name, wanted in grads.items():
            sizes = [len(part) for part in storage.partitions[name].parts]
            group = groups.world if groups.ranks > 1 else None
            got = all_gather_rows(storage.sums[name], sizes, group)
            scale = max(float(wanted.abs().max()), 1e-3)
            worst["gradient"] = max(worst["gradient"], float((got - wanted).abs().max()) / scale)
    return worst


def _plain_step(
    tokens: tuple[np.ndarray, ...], a: Architecture, seed: int
) -> tuple[float, dict[str, torch.Tensor]]:
    weights = {n: w.requires_grad_() for n, w in whole_weights(a, seed, torch.float64).items()}
    ids = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
    lengths = [len(t) for t in tokens]
    loss = plain_loss(ids, lengths, weights, a, sum(lengths) - len(lengths))
    loss.backward()
    zero = {n: torch.zeros_like(w) for n, w in weights.items()}
    return float(loss.detach()), {n: w.grad if w.grad is not None else zero[n]
                                  for n, w in weights.items()}  # fmt: skip


def _print(rows: list[tuple[_Case, dict[str, float] | None]], tolerance: float) -> int:
    table = Table(box=None, pad_edge=False)
    for name in ("model", "ranks", "loss error", "gradient error", "verdict"):
        table.add_column(name, justify="left" if name == "model" else "right")
    good = True
    for case, found in rows:
        fine = found is not None and max(found.values()) <= tolerance
        good &= fine
        shown = [f"{found[k]:.1e}" for k in ("loss", "gradient")] if found else ["-", "-"]
        verdict: Any = "exact" if fine else "WRONG" if found else "FAILED"
        table.add_row(case.model, str(case.ranks), *shown, verdict)
    width = max(80, int(os.get_terminal_size().columns)) if os.isatty(1) else 100
    Console(highlight=False, width=width).print(table)
    print(f"tolerance {tolerance:.0e}: " + ("all exact" if good else "FAILED"))
    return 0 if good else 1
