"""The examples of trainers, their twins for one device, and the guide."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import headrace as hr
from ranks import run_ranks
from running.adopt.test_examples import EXAMPLES, added
from running.engine.loops import costs
from running.trainers.scripts import data, language_model, padded

for package in ("transformers", "accelerate", "datasets", "trl", "peft"):
    pytest.importorskip(package)

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs/guides/trainer.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^\$ (\S+) (.*?)(?:  +#.*)?$", GUIDE, re.MULTILINE)

RANKS = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SHARDED = (str(Path(__file__).parent / "sharded_on_cpus.py"),)


def started(folder: Path, *command: str) -> subprocess.Popen[str]:
    """A command in a group of processes of its own."""
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ
        | {"XDG_CACHE_HOME": str(folder), "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )


def losses(folder: Path, *command: str) -> list[float]:
    """The losses that a command prints."""
    process = started(folder, *command)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err[-3000:]
    return [json.loads(line)["loss"] for line in out.splitlines() if line.startswith('{"')]


def test_few_lines_more() -> None:
    """Catches an interface that asks for more."""
    for name in ("trainer_sft", "trainer_dpo"):
        assert 0 < len(added(f"{name}_single.py", f"{name}.py")) <= 15


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    """Catches a command that does not run, or two ranks that train something else than one."""
    assert [word for word, _ in COMMANDS] == ["torchrun", "python"] * 2
    found = list[list[float]]()
    for word, rest in COMMANDS:
        words = [str(ROOT / w) if w.startswith("examples/") else w for w in rest.split()]
        start = RANKS[:3] if word == "torchrun" else RANKS[:1]
        found.append(losses(tmp_path, *start, *words))
    for spread, alone in zip(found[::2], found[1::2], strict=True):
        assert len(alone) == 20
        assert alone[-1] < alone[0] - 0.1
        assert spread == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["sft", "dpo"])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_go_on_after_a_kill(name: str, how: str, tmp_path: Path) -> None:
    """Catches a run that goes on with other samples, weights or rates once it was killed, and
    sharded weights that train otherwise."""
    script = str(EXAMPLES / f"trainer_{name}.py")
    command = (*RANKS, *(SHARDED if how == "fsdp2" else ()), script, "--steps", "30")
    command = (*command, *(("--fsdp",) if how == "fsdp2" else ()))
    out = tmp_path / "runs" / f"trainer_{name}"
    process = started(tmp_path, *command)
    while process.poll() is None and not (out / "checkpoint-5" / "headrace.json").exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    said = process.communicate()[1]
    assert (out / "checkpoint-5" / "headrace.json").exists(), said[-3000:]
    for folder in out.glob("checkpoint-*"):  # the trainer writes them in place
        if folder.name != "checkpoint-5":
            shutil.rmtree(folder)
    found = losses(tmp_path, *command, "--resume")
    alone = losses(tmp_path, sys.executable, script.replace(".py", "_single.py"), "--steps", "30")
    assert len(alone) == 30
    assert found == pytest.approx(alone, rel=1e-4 if how == "fsdp2" else 3e-5)


def as_it_reads(ranks: int, folder: Path) -> list[list[float]]:
    """The losses of the trainers that the guide makes."""
    import torch
    import transformers
    from torch.nn.functional import cross_entropy

    os.environ |= {"RANK": str(torch.distributed.get_rank()), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    if ranks == 1:
        for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            del os.environ[key]
    given = f"measure=hr.MeasureOptions(costs=costs({ranks})), say=lambda text: None)"
    found = list[list[float]]()
    for start in (0, 1, 2):
        batch = 1 if start == 1 else 4 // ranks
        names: dict[str, Any] = {
            "hr": hr,
            "transformers": transformers,
            "costs": costs,
            "model": language_model(),
            "dataset": data(20),
            "collator": padded,
            "cross_entropy": cross_entropy,
            "weight": torch.arange(1.0, 65.0) / 64,
            "args": transformers.TrainingArguments(
                output_dir=str(folder / str(start)),
                max_steps=3,
                per_device_train_batch_size=batch,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
        }
        text = BLOCKS[start] if start != 1 else BLOCKS[1] + "".join(BLOCKS[0].splitlines(True)[1:])
        made = re.sub(r"(hr\.trainer\([^)]*)\)", rf"\1, {given}", text)
        assert made != text
        with redirect_stdout(io.StringIO()):
            exec(made, names)
        found.append([r["loss"] for r in names["trainer"].state.log_history if "loss" in r])
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_guide_runs_as_it_reads(tmp_path: Path) -> None:
    """Catches a line of the guide that does not run, or trains something else on two ranks."""
    assert len(BLOCKS) == 3
    wanted, *_ = run_ranks(1, as_it_reads, 1, tmp_path / "one", timeout_s=120)
    assert [len(row) for row in wanted] == [3, 3, 3]
    for found in run_ranks(2, as_it_reads, 2, tmp_path / "two", timeout_s=120):
        for own, row in zip(found, wanted, strict=True):
            assert own == pytest.approx(row, rel=1e-5)
