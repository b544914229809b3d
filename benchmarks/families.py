"""Which types of models of transformers are exact when their tokens are spread over ranks.

Of every type for causal or masked language modelling, or for texts and images, a tiny model is made
and compared with one process by ``headrace verify TYPE``: rows, packed documents, padding on either
side, labels that are ignored, the model's own loss and evaluation. Models of texts and images are
given texts alone.

    exact     losses and gradients are those of one process, to 1e-5
    off       some are not; ``worst`` is the largest error
    refused   the type is refused by name, or no small model of it can be made; ``why`` is the error
    no answer nothing was said within ``--limit-s`` seconds, or the process was killed

examples:
    python benchmarks/families.py llama gemma3 mamba
    python benchmarks/families.py --json families.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from rich.progress import track
from transformers.models.auto import modeling_auto

from headrace.cli import main as headrace
from headrace.native.machine import machine_facts

FORK = multiprocessing.get_context("fork")

USES = ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT")
"""What models are for, as transformers names its lists."""


def types() -> list[str]:
    """All types of the installed transformers that have a model of tokens."""
    names = [getattr(modeling_auto, f"MODEL_FOR_{use}_MAPPING_NAMES") for use in USES]
    return sorted({kind for mapping in names for kind in mapping})


def verdict(kind: str, ranks: int, limit_s: float) -> dict[str, Any]:
    """What ``headrace verify`` says of a type, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = FORK.Process(target=_verify, args=(kind, ranks, out, err))
        process.start()
        process.join(limit_s)
        if process.exitcode is None:
            process.kill()
            return {"type": kind, "verdict": "no answer", "worst": None, "why": f"{limit_s:g} s"}
        said, told = out.read_text(), err.read_text()
    if process.exitcode == 2:
        return {"type": kind, "verdict": "refused", "worst": None, "why": reason(told)}
    if process.exitcode not in (0, 1) or not said:
        return {"type": kind, "verdict": "no answer", "worst": None, "why": told[-300:]}
    found = json.loads(said)
    worst = max(max(case["loss_error"], case["gradient_error"]) for case in found["cases"])
    return {
        "type": kind,
        "verdict": "exact" if found["exact"] else "off",
        "worst": worst,
        "why": "",
    }


def _verify(kind: str, ranks: int, out: Path, err: Path) -> None:
    """Verify a type and exit with the command's code; what it says goes to two files."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    code = headrace(["verify", kind, "--ranks", str(ranks), "--json"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def reason(said: str) -> str:
    """The error among the lines that a command wrote to stderr, without its hint."""
    text = " ".join(said.split())
    found = re.search(r"(?:refused|error): (.*)", text)
    return (found[1] if found else text).partition(";")[0][:200]


def verdicts(kinds: Sequence[str], ranks: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Those of all ``kinds``, one after the other."""
    for kind in track(kinds, console=Console(stderr=True)):
        yield verdict(kind, ranks, limit_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("types", nargs="*", help="types to look at; all when left out")
    parser.add_argument("--ranks", type=int, default=2, help="ranks to spread rows over (2)")
    parser.add_argument("--limit-s", type=float, default=300, help="seconds for each type (300)")
    parser.add_argument("--json", type=Path, help="file for the results")
    flags = parser.parse_args()
    found = list[dict[str, Any]]()
    for row in verdicts(flags.types or types(), flags.ranks, flags.limit_s):
        print(f"{row['type']:<28}{row['verdict']:<11}{row['why'][:100]}", flush=True)
        found.append(row)
    print(dict(Counter(row["verdict"] for row in found)))
    if flags.json:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        facts = {
            "machine": machine_facts("cpu"),
            "transformers": transformers.__version__,
            "ranks": flags.ranks,
            "types": found,
        }
        flags.json.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
