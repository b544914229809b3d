"""Small training jobs as a user starts them: in a process of their own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import headrace.cli
from jobs import Command

__all__ = ["losses", "run", "start", "wait_for_step", "write_job"]

_CONFIG = """
[run]
name = "tiny"
seed = 3
steps = {steps}

[data]
paths = ["corpus"]
patterns = ["*.txt"]
context = 256
batch_tokens = 1500
cache = "{cache}"

[model]
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 64

[optimizer]
lr = 0.01
warmup_steps = 2

[devices]
ranks = 2
device = "cpu"
threads = 1
memory = "64MiB"

[profile]
rung_s = 0.02
repeats = 1

[checkpoint]
every = 4

[report]
html = false
"""


def write_job(
    folder: Path, *, steps: int = 10, candidates: Sequence[str] = ("ulysses_z", "megatron_cz")
) -> Path:
    """A configuration and its corpus: 60 files with a long tail, one of them undecodable.

    Few ``candidates``, as a profile of all methods (none named) takes long.
    """
    corpus = folder / "corpus"
    corpus.mkdir()
    rng = np.random.default_rng(1)
    words = ["tail", "race", "wheel", "water", "mill", "gate", "of", "the", "and", "a"]
    for i, size in enumerate(rng.lognormal(4.0, 1.2, size=60)):
        text = " ".join(rng.choice(words, size=max(2, int(size / 4))))
        (corpus / f"{i:02d}.txt").write_text(text)
    (corpus / "bad.txt").write_bytes(b"\xff\xfe\x00broken\xff")
    path = folder / "tiny.toml"
    text = _CONFIG.format(steps=steps, cache=folder / "cache")
    path.write_text(text + f"\n[planner]\ncandidates = {json.dumps(list(candidates))}\n")
    return path


def start(*arguments: object) -> Command:
    """``headrace ARGUMENTS`` in a process group of its own."""
    return Command(headrace.cli.run, "headrace", *arguments)


def run(*arguments: object, timeout_s: float = 90.0) -> tuple[int, str, str]:
    """Run to the end: exit code, stdout, stderr."""
    process = start(*arguments)
    out, err = process.communicate(timeout_s)
    assert process.returncode is not None
    return process.returncode, out, err


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of all finished steps."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(folder: Path) -> list[float]:
    """The loss of every step, in order."""
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    return [row["loss"] for row in rows]


def wait_for_step(process: Command, folder: Path, step: int) -> None:
    """Return once ``step`` has finished."""
    _wait(process, lambda: any(row["step"] >= step for row in metrics(folder)))


def children(process: Command) -> list[psutil.Process]:
    """The ranks of a job, in the order they were started."""
    found = psutil.Process(process.pid).children(recursive=True)
    return sorted(found, key=lambda child: child.pid)


def _wait(process: Command, done: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        assert process.poll() is None, process.err
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.01)
