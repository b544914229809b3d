"""Odd configurations and flags: an error of the library's own or a plan, soon, no traceback."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel

from attacks.attack import Attack, Case, Outcome
from attacks.damage import ODD_TEXTS, damaged
from headrace.cli import main
from headrace.config import Config

__all__ = ["CONFIGURATIONS"]

Rng = np.random.Generator

_GOOD = """
[run]
name = "tiny"
seed = 3
steps = 10

[data]
paths = ["corpus"]
kind = "text"
tokenizer = "bytes"
context = 256
batch_tokens = 1500
cache = "cache"

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
memory = "1GiB"

[planner]
candidates = ["ulysses_z", "megatron_cz"]

[profile]
rung_s = 0.02

[checkpoint]
every = 4

[report]
html = false
"""

_NUMBERS = (
    "0",
    "1",
    "2",
    "3",
    "4",
    "7",
    "8",
    "16",
    "64",
    "1000",
    "0.5",
    "1e-3",
    '"2GiB"',
    '"32Ki"',
)

_LIKELY = (
    *_NUMBERS,
    "true",
    "false",
    "[]",
    '["local"]',
    '["metp"]',
    '["1*tp2"]',
    '["2*cp1"]',
    "[1, 2]",
    '["1*pp2", "1*cp2"]',
    '"h100"',
    '["full"]',
    '"kmer:3"',
    '"ids:50:7"',
    "{ momentum = 0.9 }",
    '"llama-8b"',
    '"corpus"',
    '["corpus/*.txt"]',
    '["python:stdlib"]',
    '"auto"',
    "",
)
"""Values that some key takes."""

_LENGTHS = (
    "fixed:100",
    "lognormal:median=100,sigma=1",
    "list:1/2/3/256",
    "github-code",
    "0.5*fixed:7 + 0.5*fixed:200",
    "bins:edges=1/10/200,shares=1/2",
    "file:lengths.json",
)


def _keys(model: type[BaseModel], before: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """The keys of a configuration, each with values that it may take."""
    for name, field in model.model_fields.items():
        key, inner = before + (field.alias or name), field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _keys(inner, f"{key}.")
        else:
            yield key, tuple(_fitting(inner)) or _LIKELY


def _fitting(annotation: Any) -> Iterator[str]:
    if annotation is bool:
        yield from ("true", "false")
    elif annotation in (int, float):
        yield from _NUMBERS
    elif get_origin(annotation) is Literal:
        yield from (json.dumps(word) for word in get_args(annotation))
    elif get_origin(annotation) in (Union, UnionType, Annotated):
        for inner in get_args(annotation):
            yield from _fitting(inner)


_KEYS = dict(_keys(Config))


@contextmanager
def _begin(folder: Path) -> Iterator[Case]:
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(20):
        (corpus / f"{number}.txt").write_text("a mill race " * (number * number // 4 + 1))
    (folder / "lengths.json").write_text("[100, 20, 300]")
    os.chdir(folder)
    yield lambda rng: _case(rng, folder)


def _case(rng: Rng, folder: Path) -> Outcome:
    path = folder / "case.toml"
    path.write_bytes(_text(rng))
    arguments = [str(rng.choice(["plan", "plan", "simulate"])), str(path), *_flags(rng)]
    words = " ".join(arguments)
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = main(arguments)
    except SystemExit as error:  # of the parser of flags
        code = error.code if isinstance(error.code, int) else 1
    except Exception as error:
        words = (
            f"{type(error).__name__}: {error}\n{words[:500]}\n{path.read_text(errors='replace')}"
        )
        return Outcome(verdict="traceback", survived=False, words=words)
    if code == 0:
        return Outcome(verdict="planned", words=words)
    if not err.getvalue().strip() or "Traceback" in err.getvalue():
        words = f"exit code {code}, stderr {err.getvalue()!r}\n{words}"
        return Outcome(verdict="no message", survived=False, words=words)
    return Outcome(verdict="refused", words=err.getvalue())


def _text(rng: Rng) -> bytes:
    """The good configuration, or one with lines, values or bytes changed."""
    lines = _GOOD.splitlines()
    for _ in range(int(rng.choice([0, 1, 2, 3], p=[0.5, 0.3, 0.1, 0.1]))):
        at = int(rng.integers(len(lines)))
        match str(rng.choice(["value", "drop", "double", "move", "key"])):
            case "value" if "=" in lines[at]:
                name = lines[at].partition("=")[0]
                lines[at] = f"{name}= {_value(rng, _LIKELY)}"
            case "drop":
                del lines[at]
            case "double":
                lines.insert(at, lines[int(rng.integers(len(lines)))])
            case "move":
                lines.insert(at, lines.pop(int(rng.integers(len(lines)))))
            case "key":
                name, value = _setting(rng)
                lines.insert(at, f"{name.rpartition('.')[2]} = {value}")
    raw = "\n".join(lines).encode(errors="surrogatepass")
    return damaged(raw, rng) if rng.random() < 0.05 else raw


def _flags(rng: Rng) -> list[str]:
    flags: list[str] = []
    for _ in range(int(rng.choice([0, 1, 2, 3], p=[0.15, 0.45, 0.25, 0.15]))):
        flags += ["--set", "=".join(_setting(rng))]
    if rng.random() < 0.7:
        lengths = str(rng.choice(_LENGTHS))
        odd = damaged(lengths.encode(), rng).decode(errors="replace")
        flags += ["--lengths", odd if rng.random() < 0.2 else lengths]
    for name in ("--batches", "--ranks", "--seed", "--hardware"):
        if rng.random() < 0.07:
            flags += [name, _value(rng, _NUMBERS)]
    if rng.random() < 0.3:
        flags.append("--json")
    # No command line holds null characters, and no terminal lone surrogates.
    return [f.replace("\0", "").encode(errors="replace").decode() for f in flags]


def _setting(rng: Rng) -> tuple[str, str]:
    """A key, rarely a damaged one, and a value."""
    key = str(rng.choice(list(_KEYS)))
    value = _value(rng, _KEYS[key])
    if rng.random() < 0.03:
        key = damaged(key.encode(), rng).decode(errors="replace").replace("\n", "")
    return key, value


def _value(rng: Rng, fitting: Sequence[str]) -> str:
    """Mostly one that fits, else one that fits elsewhere or nowhere."""
    where = rng.random()
    if where < 0.7:
        return fitting[int(rng.integers(len(fitting)))]
    if where < 0.85:
        return _LIKELY[int(rng.integers(len(_LIKELY)))]
    odd = ODD_TEXTS[int(rng.integers(len(ODD_TEXTS)))]
    return f'"{odd}"' if rng.random() < 0.3 else odd


CONFIGURATIONS = Attack(
    name="configurations",
    about="odd configurations and flags are planned or refused, soon",
    begin=_begin,
    limit_s=60,
    few=60,
)
