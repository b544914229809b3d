"""Random steps: loss and gradients of random models under random plans equal one process'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from attacks.attack import Attack, Case, Outcome
from attacks.crew import Crews, Work
from attacks.models import methods_by_width, random_model
from headrace.comm.mesh import Groups
from headrace.layouts.partition import storage_partition
from headrace.native.executor import Executor
from headrace.native.optimizers import AdamW
from headrace.native.storage import Storage
from headrace.spec import Architecture, Lengths, Plan, weight_table
from headrace.spec.random_plans import random_plan, random_strategy
from oracles import full_weights, reference_step
from plans import random_documents

__all__ = ["STEPS", "Steps", "attack_with", "run_steps"]

TOLERANCE = 1e-10
_SHORT, _LONG, _POSITIONS = 40, 600, 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """A model and what it is to do, one plan after the other, from the same weights."""

    architecture: Architecture
    seed: int
    overlap: bool
    batches: tuple[tuple[Plan, tuple[np.ndarray, ...]], ...]


Result = list[tuple[float, dict[str, np.ndarray]]]
"""Of every step the loss and the gradient rows that this rank stores."""


def run_steps(groups: Groups, steps: Steps) -> Result:
    """The steps on this rank."""
    storage = Storage(
        steps.architecture,
        groups,
        seed=steps.seed,
        dtype=torch.float64,
        options=AdamW(clip=0.0, decay=0.0),
    )
    executor = Executor(storage, groups, seed=steps.seed, overlap=steps.overlap)
    found: Result = []
    for number, (plan, documents) in enumerate(steps.batches):
        loss = executor.run(plan, documents, step=number, lr=0.0).loss
        found.append((loss, {name: s.numpy().copy() for name, s in storage.sums.items()}))
    return found


def attack_with(work: Work) -> Attack:
    """The attack on what ``work`` runs of :class:`Steps`."""

    @contextmanager
    def begin(folder: Path) -> Iterator[Case]:
        crews = Crews()
        try:
            yield lambda rng: _case(rng, crews, work)
        finally:
            crews.close()

    return Attack(
        name="steps",
        about="random models under random plans on 1 to 4 ranks equal one process",
        begin=begin,
        limit_s=120,
        few=10,
        weight=4.0,
    )


def _case(rng: np.random.Generator, crews: Crews, work: Work) -> Outcome:
    ranks = int(rng.choice([1, 2, 3, 4], p=[0.1, 0.3, 0.3, 0.3]))
    steps = _drawn(rng, ranks)
    wanted, results = crews.run(ranks, work, steps, beside=lambda: _reference(steps))
    error, where = _worst(steps, wanted, results)
    good = error <= TOLERANCE  # a NaN is not
    words = "" if good else f"{where} on {ranks} ranks, {steps.architecture}"
    return Outcome(verdict="exact" if good else "wrong", survived=good, error=error, words=words)


def _drawn(rng: np.random.Generator, ranks: int) -> Steps:
    a = random_model(rng, layers=4, positions=_POSITIONS)
    batches = []
    for _ in range(int(rng.integers(1, 4))):
        longest = _LONG if rng.random() < 0.1 else _SHORT
        documents = random_documents(rng, a.vocabulary, int(rng.integers(1, 9)), longest)
        lengths = Lengths.of(len(document) for document in documents)
        batches.append((_plan(rng, lengths, ranks, a), documents))
    return Steps(
        architecture=a,
        seed=int(rng.integers(2**31)),
        overlap=bool(rng.random() < 0.8),
        batches=tuple(batches),
    )


def _plan(rng: np.random.Generator, lengths: Lengths, ranks: int, a: Architecture) -> Plan:
    methods = methods_by_width(a, ranks)
    draw: Callable[..., Plan] = random_plan
    more: dict[str, Any] = {}
    if rng.random() < 0.6:
        draw, more = random_strategy, {"most_tensor": a.tensor_ranks}
    return draw(lengths, ranks, a.layers, rng, methods=methods, **more)


def _reference(steps: Steps) -> list[tuple[float, dict[str, torch.Tensor]]]:
    weights = full_weights(steps.architecture, steps.seed, torch.float64)
    return [
        reference_step(list(documents), weights, steps.architecture, seed=steps.seed, step=number)
        for number, (_, documents) in enumerate(steps.batches)
    ]


def _worst(
    steps: Steps, wanted: list[tuple[float, dict[str, torch.Tensor]]], results: list[Result]
) -> tuple[float, str]:
    """The largest relative error, and what it is of."""
    table = {w.name: w for w in weight_table(steps.architecture)}
    errors: list[tuple[float, str]] = [(0.0, "")]
    for number, (loss, grads) in enumerate(wanted):
        plan = steps.batches[number][0]
        where = f"step {number}, {plan.strategy}, weights {plan.working}"
        for result in results:
            difference = abs(result[number][0] - loss) / max(abs(loss), 1e-12)
            errors.append((difference, f"loss of {where}"))
        for name, gradient in grads.items():
            pieces = [result[number][1][name] for result in results]
            rows = storage_partition(table[name], len(results)).parts
            if [len(piece) for piece in pieces] != [len(part) for part in rows]:
                errors.append((float("inf"), f"rows of {name} of {where}"))
                continue
            scale = max(float(gradient.abs().max()), 1e-3)
            difference = float(np.abs(np.concatenate(pieces) - gradient.numpy()).max()) / scale
            errors.append((difference, f"gradient of {name} of {where}"))
    return max(errors, key=lambda one: (not one[0] <= 1e300, one[0]))


STEPS = attack_with(run_steps)
