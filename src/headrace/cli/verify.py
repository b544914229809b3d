"""``headrace verify``: exactness of the runtime on this machine, wholeness of a checkpoint."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.table import Table

from headrace.cli.app import Output
from headrace.cli.display import tell
from headrace.cli.flags import VerifyFlags
from headrace.comm.collectives import all_gather_rows
from headrace.comm.launch import World, start
from headrace.comm.mesh import Groups
from headrace.engine.checkpoints import Checkpoints
from headrace.engine.considered_methods import methods_by_size
from headrace.errors import CheckpointError, ConfigError
from headrace.models.objective import objective_of
from headrace.models.plain import plain_loss, whole_weights
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.spec.architecture import Architecture
from headrace.spec.known_methods import FACTS, SINGLE_RANK, facts_of
from headrace.spec.lengths import Lengths
from headrace.spec.plan import Plan
from headrace.spec.random_plans import random_plan, random_strategy
from headrace.units import counted

__all__ = ["verify"]

_MODELS = {
    "llama, grouped heads": Architecture(
        layers=3, hidden=32, heads=4, kv_heads=2, ffn=48, vocabulary=61
    ),
    "llama, one key head, untied": Architecture(
        layers=2, hidden=48, heads=8, kv_heads=1, ffn=40, vocabulary=53, tied=False
    ),
    "gpt": Architecture(
        layers=2, hidden=32, heads=4, kv_heads=4, ffn=80, vocabulary=61, kind="gpt", positions=640
    ),
    "bert": Architecture(
        layers=2,
        hidden=32,
        heads=4,
        kv_heads=4,
        ffn=80,
        vocabulary=61,
        kind="bert",
        positions=640,
        causal=False,
        norm_eps=1e-12,
        mask_id=60,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What one start of ``ranks`` ranks verifies: ``steps`` batches of a model, by several
    methods."""

    model: str
    ranks: int
    steps: int
    seed: int
    methods: tuple[str, ...]


_Errors = dict[str, dict[str, float]]
"""By method: the largest relative errors, ``loss`` and ``gradient``."""

_MIXED = "mixed"  # random plans that draw from all methods, named as if it were one
_STRATEGIES = "strategies"  # likewise, with random pipelines side by side
_MOST_RANKS = 256  # all of them on this machine
_LONG = 600  # long enough to be folded over four ranks


def verify(what: str, path: Path | None, flags: VerifyFlags) -> int:
    """Run one of the verifications; the exit code is 1 when it fails."""
    if what == "checkpoint":
        return _verify_checkpoint(path)
    if path is not None:
        raise ConfigError(f"verify {what}", got=f"a path {path}", wanted="none")
    ranks, steps, methods = flags.ranks, flags.steps, flags.methods
    if steps < 1 or not ranks or min(ranks) < 1 or max(ranks) > _MOST_RANKS:
        got = f"ranks {list(ranks)}, steps {steps}"
        raise ConfigError("verify", got=got, wanted=f">= 1 each, at most {_MOST_RANKS} ranks")
    if flags.seed < 0:
        raise ConfigError("--seed", got=flags.seed, wanted=">= 0")
    if flags.tolerance is not None and not 0 <= flags.tolerance < 1:
        raise ConfigError("--tolerance", got=flags.tolerance, wanted="from 0 to below 1")
    if what != "native":
        if ":" in what:
            tell(f"running the code of {what}")
        from headrace.cli.verify_axes import axis_examples, verify_axes

        examples = axis_examples(what)
        if examples:
            return verify_axes(
                what, examples, ranks=ranks, tolerance=flags.tolerance, as_json=flags.json
            )
        from headrace.cli.verify_model import verify_model

        return verify_model(
            what,
            ranks=ranks,
            seed=flags.seed,
            tolerance=1e-5 if flags.tolerance is None else flags.tolerance,
            backend=flags.backend,
            as_json=flags.json,
        )
    names = tuple(FACTS) if "all" in methods else tuple(facts_of(name).name for name in methods)
    names = (*names, _MIXED, _STRATEGIES)
    cases = [
        _Case(model=model, ranks=count, steps=steps, seed=flags.seed, methods=names)
        for model in _MODELS
        for count in ranks
    ]
    tolerance = 1e-10 if flags.tolerance is None else flags.tolerance
    return _print([(case, _errors_of(case)) for case in cases], tolerance)


def _verify_checkpoint(path: Path | None) -> int:
    """Check every checksum of the newest checkpoint in a folder; returns the exit code."""
    if path is None:
        raise ConfigError("verify checkpoint", got="no path", wanted="a checkpoint or their folder")
    inside = path / "checkpoints"  # of a run's folder
    target = Checkpoints(folder=inside if inside.is_dir() else path).latest()
    try:
        tensors = target.verify()
    except CheckpointError as error:
        tell(f"error: {error}")
        return 1
    print(f"{target.path}: whole, {tensors} tensors, every checksum agrees")
    return 0


def _errors_of(case: _Case) -> _Errors | None:
    """Run a case on ranks of its own; returns its largest relative errors, None when a rank
    failed."""
    tell(f"{case.model} on {counted(case.ranks, 'rank')}")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"

        def main(world: World) -> int:
            """Compare on this rank; the first one writes the errors to a file."""
            found = _compare(case)
            if world.rank == 0:
                result.write_text(json.dumps(found))
            return 0

        code = start(main, ranks=case.ranks, threads=1)
        if code != 0 or not result.exists():
            return None
        values: _Errors = json.loads(result.read_text())
    return values


def _compare(case: _Case) -> _Errors:
    """The errors of each method of the case that some group of its ranks can run; ``mixed`` draws
    from all of them for every branch of every layer, ``strategies`` also pipelines of random
    tensor, context and pipeline degrees side by side."""
    a, groups = _MODELS[case.model], Groups()
    storage = Storage(
        a, groups, seed=case.seed, dtype=torch.float64, options=AdamW(clip=0.0, decay=0.0)
    )
    executor = Executor(storage, groups, seed=case.seed)
    found: _Errors = {}
    for name in case.methods:
        draws_from_all = name in (_MIXED, _STRATEGIES)
        by_size = methods_by_size(tuple(FACTS) if draws_from_all else (name,), a, groups.ranks)
        if name == _STRATEGIES:
            # Tensor parallelism cuts key heads and blocks of the feed-forward.
            most_tensor = min(a.kv_heads, a.ffn // a.ffn_block)
            draw = partial(random_strategy, methods=by_size, most_tensor=most_tensor)
            found[name] = _worst(case, executor, draw)
        # Size 1 is always there: a method runs on some group of these ranks where others are too.
        elif len(by_size) > 1 or name in (SINGLE_RANK, _MIXED):
            found[name] = _worst(case, executor, partial(random_plan, methods=by_size))
    return found


def _worst(case: _Case, executor: Executor, draw: Callable[..., Plan]) -> dict[str, float]:
    """Run batches of random tokens by the plans ``draw(lengths, ranks, layers, rng)``; returns the
    largest relative errors, ``loss`` and ``gradient``, against one plain process. The error of a
    gradient is relative to its largest value. Collective."""
    storage, groups = executor.storage, executor.groups
    a, rng = storage.architecture, np.random.default_rng((case.seed, case.ranks))
    worst = {"loss": 0.0, "gradient": 0.0}
    for step in range(case.steps):
        short = rng.integers(1, 50, size=int(rng.integers(2, 10))).tolist()
        lengths = Lengths.of([_LONG, *short] if step == 0 else short)
        tokens = tuple(rng.integers(a.vocabulary, size=n).astype(np.int32) for n in lengths.tokens)
        plan = draw(lengths, groups.ranks, a.layers, rng)
        result = executor.run(plan, tokens, step=step, lr=0.0)
        loss, grads = _plain_step(tokens, lengths, a, case.seed, step)
        off = abs(result.loss - loss) / max(abs(loss), 1e-12)
        worst["loss"] = max(worst["loss"], _or_infinite(off))
        for name, wanted in grads.items():
            sizes = [len(part) for part in storage.partitions[name].parts]
            group = groups.world if groups.ranks > 1 else None
            got = all_gather_rows(storage.sums[name], sizes, group)
            scale = max(float(wanted.abs().max()), 1e-3)
            off = float((got - wanted).abs().max()) / scale
            worst["gradient"] = max(worst["gradient"], _or_infinite(off))
    return worst


def _or_infinite(error: float) -> float:
    """The error, or infinity for NaN: ``max`` and ``<=`` would pass over NaN as if it were no
    error."""
    return error if math.isfinite(error) else math.inf


def _plain_step(
    tokens: tuple[np.ndarray, ...], lengths: Lengths, a: Architecture, seed: int, step: int
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a batch and the gradient of every weight by plain autograd on one rank, in
    float64."""
    objective = objective_of(a, seed=seed, step=step)
    examples = [objective.example(t, i) for t, i in zip(tokens, lengths.ids, strict=True)]
    ids, labels = (
        torch.from_numpy(np.concatenate(parts).astype(np.int64))
        for parts in zip(*examples, strict=True)
    )
    weights = {n: w.requires_grad_() for n, w in whole_weights(a, seed, torch.float64).items()}
    loss = plain_loss(ids, labels, lengths.tokens, weights, a, objective.count(lengths))
    loss.backward()
    zero = {n: torch.zeros_like(w) for n, w in weights.items()}
    return float(loss.detach()), {
        n: w.grad if w.grad is not None else zero[n] for n, w in weights.items()
    }


def _print(rows: list[tuple[_Case, _Errors | None]], tolerance: float) -> int:
    """Print the errors of every case against the tolerance; returns the exit code."""
    table = Table(box=None, pad_edge=False)
    for name in ("model", "ranks", "methods", "loss error", "gradient error", "verdict"):
        table.add_column(name, justify="left" if name in ("model", "methods") else "right")
    good = True
    for case, found in rows:
        if found is None:
            good = False
            table.add_row(case.model, str(case.ranks), "", "-", "-", "FAILED")
        for name, errors in (found or {}).items():
            fine = max(errors.values()) <= tolerance
            good &= fine
            shown = [f"{errors[key]:.1e}" for key in ("loss", "gradient")]
            verdict = "exact" if fine else "WRONG"
            table.add_row(case.model, str(case.ranks), name, *shown, verdict)
    width = max(80, int(os.get_terminal_size().columns)) if os.isatty(1) else 110
    Output(highlight=False, width=width).print(table)
    print(f"tolerance {tolerance:.0e}: " + ("all exact" if good else "FAILED"))
    return 0 if good else 1
