"""Damaged checkpoints: what loads is what was saved, everything else is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headrace.cli
from attacks.attack import Attack, Case, Outcome, refusal_of
from attacks.damage import damage_file, replaced
from headrace.engine.checkpoints import Checkpoint, Checkpoints, SavedState
from headrace.errors import CheckpointError, HeadraceError
from headrace.native import checkpoint
from headrace.native.checkpoint import StoredShard
from jobs import Command
from running.cli.jobs import write_job

__all__ = ["CHECKPOINTS", "Saved", "attack_with", "trained"]

Tensors = dict[str, torch.Tensor]
Load = Callable[[Path, list[StoredShard]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Checkpoints of a run: their folder, and the tensors and state in each by its path's name."""

    folder: Path
    tensors: dict[str, Tensors]
    state: dict[str, str]


def attack_with(load: Load, saved: Saved | None = None) -> Attack:
    """The attack on a function that loads checkpoints: those ``saved``, or of a run of its own."""

    @contextmanager
    def begin(folder: Path) -> Iterator[Case]:
        good = saved or trained(folder)
        yield lambda rng: _case(rng, good, folder / "copy", load)

    return Attack(
        name="checkpoints",
        about="damaged checkpoints are refused, or load what was saved",
        begin=begin,
        limit_s=30,
        few=40,
    )


def trained(folder: Path) -> Saved:
    """The checkpoints of a short run on two ranks."""
    config = write_job(folder, steps=4, candidates=["megatron_cz"])
    few = [
        "--set",
        "checkpoint.every=2",
        "--set",
        "planner.recompute=['none']",
        "--set",
        "profile.longest=128",
    ]
    command = Command(headrace.cli.run, "headrace", "train", config, "--out", folder / "run", *few)
    _, err = command.communicate(240)
    assert command.returncode == 0, err
    root = folder / "run" / "checkpoints"
    found = {path.name: path for path in checkpoint.newest_first(root)}
    return Saved(
        folder=root,
        tensors={name: checkpoint.read_all(path) for name, path in found.items()},
        state={name: _text(checkpoint.load(path, [])) for name, path in found.items()},
    )


def _text(extra: dict[str, Any]) -> str:
    return json.dumps(extra, sort_keys=True)


def _case(rng: np.random.Generator, saved: Saved, copy: Path, load: Load) -> Outcome:
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(saved.folder, copy)
    name = str(rng.choice(sorted(saved.tensors)))
    done = _damage(rng, copy / name)
    if rng.random() < 0.1:  # a whole one beside a damaged one
        name = str(rng.choice(sorted(saved.tensors)))
    tried = [
        _attempt(what, check)
        for what, check in {
            "load": lambda: _loads(rng, copy / name, saved, load),
            "read_all": lambda: _reads(copy / name, saved),
            "verify": lambda: _verifies(copy / name, saved),
            "state": lambda: SavedState.read(copy / name),
            "latest": lambda: _latest(copy, saved),
            "previous": lambda: checkpoint.previous(copy / name),
        }.items()
    ]
    bad = next((one for one in tried if not one.survived), None)
    if bad is not None:
        return Outcome(verdict=bad.verdict, survived=False, words=f"{done}: {bad.words}")
    refused = tried[0].verdict == "refused"
    return Outcome(verdict="refused" if refused else "right", words=done)


def _damage(rng: np.random.Generator, folder: Path) -> str:
    """Damage one or two files of a checkpoint; what was done."""
    told, root = [], folder.parent
    for _ in range(int(rng.choice([1, 2], p=[0.8, 0.2]))):
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if not files:
            break
        path = files[int(rng.integers(len(files)))]
        match str(rng.choice(["change", "replace", "exchange"], p=[0.7, 0.2, 0.1])):
            case "change":
                word = damage_file(path, rng)
            case "replace":
                word = replaced(path, rng)
            case _:
                word = _exchange(path, root, rng)
        told.append(f"{folder.name}/{path.name} {word}")
    if rng.random() < 0.05:
        other = folder.with_name(f"step-{int(rng.integers(10**6)):06d}")
        if not other.exists():
            folder.rename(other)
            told.append(f"{folder.name} renamed to {other.name}")
    return ", ".join(told)


def _exchange(path: Path, root: Path, rng: np.random.Generator) -> str:
    """The file of another checkpoint in the place of this one."""
    others = [one / path.name for one in root.iterdir() if one != path.parent]
    chosen = others[int(rng.integers(len(others)))]
    if chosen.is_file():
        shutil.copy(chosen, path)
    return "of another step"


def _attempt(what: str, check: Callable[[], object]) -> Outcome:
    """The outcome of a check, which raises AssertionError for wrong data."""
    try:
        check()
    except AssertionError as error:
        return Outcome(verdict="wrong data", survived=False, words=f"{what}: {error}")
    except CheckpointError as error:
        return refusal_of(error)
    except Exception as error:
        return Outcome(
            verdict="traceback", survived=False, words=f"{what}: {type(error).__name__}: {error}"
        )
    return Outcome(verdict="right")


def _loads(rng: np.random.Generator, path: Path, saved: Saved, load: Load) -> None:
    """Some rows of all tensors, as a rank of another number of ranks would load them."""
    tensors, wanted = saved.tensors[path.name], list[StoredShard]()
    for name, tensor in tensors.items():
        first, stop = 0, len(tensor)
        if rng.random() < 0.5:
            first, stop = sorted(int(n) for n in rng.integers(len(tensor) + 1, size=2))
        part = torch.zeros_like(tensor[first:stop])
        shape = tuple(tensor.shape)
        wanted.append(StoredShard(name=name, first_row=first, tensor=part, shape=shape))
    extra = load(path, wanted)
    for shard in wanted:
        stop = shard.first_row + len(shard.tensor)
        right = tensors[shard.name][shard.first_row : stop]
        assert torch.equal(shard.tensor, right), f"{shard.name} is another"
    assert _text(extra) == saved.state[path.name], "the state is another"


def _reads(path: Path, saved: Saved) -> None:
    got, tensors = checkpoint.read_all(path), saved.tensors[path.name]
    assert got.keys() == tensors.keys(), "the tensors are others"
    for name, tensor in got.items():
        assert torch.equal(tensor, tensors[name]), f"{name} is another"


def _verifies(path: Path, saved: Saved) -> None:
    count = Checkpoint(path=path).verify()
    assert count == len(saved.tensors[path.name]), "verified, but tensors are missing"
    _reads(path, saved)


def _latest(root: Path, saved: Saved) -> None:
    found = Checkpoints(folder=root).latest()
    try:
        state = found.state
    except HeadraceError:
        return
    assert _text(state) in saved.state.values(), "the newest checkpoint has a state of its own"


CHECKPOINTS = attack_with(checkpoint.load)
