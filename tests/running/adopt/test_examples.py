"""The examples of models and loops of one's own, and their twins for one device."""

from __future__ import annotations

import ast
import difflib
import io
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout, suppress
from pathlib import Path

import pytest

from headrace.profiling import sweep

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[3] / "examples"


def environment(folder: Path) -> dict[str, str]:
    """An environment whose measurements are kept in the folder."""
    return os.environ | {"XDG_CACHE_HOME": str(folder)}


def losses(folder: Path, *command: str) -> list[float]:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=folder,
        env=environment(folder),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line)["loss"] for line in done.stdout.splitlines()]


def added(single: str, several: str) -> list[str]:
    """Lines that one has and its twin has not, comments and descriptions aside."""
    # One line for each statement, however the formatter broke it.
    first, second = (
        ast.unparse(ast.parse((EXAMPLES / name).read_text()).body[1:]).splitlines()
        for name in (single, several)
    )
    return [line for line in difflib.ndiff(first, second) if line.startswith("+ ")]


TWINS = ["hf_llama", "attach_plain", "attach_transformers", "attach_accelerate", "grpo"]
STEPS = {"hf_llama": "4", "grpo": "6"}


@pytest.mark.parametrize("name", TWINS)
def test_few_lines_more(name: str) -> None:
    """Catches an interface that asks for more."""
    assert 0 < len(added(f"{name}_single.py", f"{name}.py")) <= (15 if name == "grpo" else 10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TWINS)
def test_the_same_losses(name: str, tmp_path: Path) -> None:
    """Catches an example that does not run, or trains something else."""
    if name == "attach_accelerate":
        pytest.importorskip("accelerate")
    steps = ("--steps", STEPS.get(name, "20"))
    more = ("--tokens", "96") if name == "hf_llama" else ()
    alone = losses(tmp_path, str(EXAMPLES / f"{name}_single.py"), *steps, *more)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    spread = losses(tmp_path, *ranks, str(EXAMPLES / f"{name}.py"), *steps, *more)
    assert len(alone) == int(steps[1])
    assert spread == pytest.approx(alone, rel=1e-5)


WRAPS = {
    "ddp": "model = torch.nn.parallel.DistributedDataParallel(model)",
    "fsdp2": """from torch.distributed.fsdp import fully_shard
    for net in [model, reference] if "reference" in locals() else [model]:
        for layer in net.blocks if hasattr(net, "blocks") else net.model.layers:
            fully_shard(layer)
        fully_shard(net)""",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["attach_plain", "attach_transformers", "grpo"])
@pytest.mark.parametrize("how", WRAPS)
def test_the_same_losses_in_wrappers(name: str, how: str, tmp_path: Path) -> None:
    """Catches a loop that is another when its user wraps the model. Accelerate wraps in DDP as it
    stands, and in FSDP2 on GPUs only."""
    prepared = f"    torch.distributed.init_process_group()\n    {WRAPS[how]}\n    optimizer ="
    script = tmp_path / f"{name}_{how}.py"
    script.write_text((EXAMPLES / f"{name}.py").read_text().replace("    optimizer =", prepared))
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    steps = ("--steps", STEPS.get(name, "20"))
    spread = losses(tmp_path, *ranks, str(script), *steps)
    alone = losses(tmp_path, str(EXAMPLES / f"{name}_single.py"), *steps)
    assert spread == pytest.approx(alone, rel=1e-5)


def kill_all(script: str) -> None:
    """Kill a launcher and its ranks, which are in sessions of their own and would train on."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if script.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_rollouts_go_on_after_a_kill(how: str, tmp_path: Path) -> None:
    """Catches updates that are lost or done twice, and other samples, once a run was killed."""
    prepared = f"    torch.distributed.init_process_group()\n    {WRAPS[how]}\n    optimizer ="
    script = tmp_path / "grpo.py"
    script.write_text((EXAMPLES / "grpo.py").read_text().replace("    optimizer =", prepared))
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (sys.executable, *ranks, str(script), "--steps", "40")
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment(tmp_path), start_new_session=True
    )
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if len(list((tmp_path / "runs" / "grpo").glob("step-*"))) >= 2:
            break
        time.sleep(0.02)
    kill_all(str(script))
    process.wait()
    found = losses(tmp_path, *command[1:], "--resume")
    alone = losses(tmp_path, str(EXAMPLES / "grpo_single.py"), "--steps", "40")
    assert 0 < len(found) < 40
    assert found == pytest.approx(alone[-len(found) :], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.apart
def test_a_loop_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an attached loop that needs a launcher."""
    script = EXAMPLES / "attach_plain.py"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(script), "--steps", "2"])
    monkeypatch.setattr(sweep, "_NOISY_S", 0.0)
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(script), run_name="__main__")
    assert [json.loads(line)["step"] for line in out.getvalue().splitlines()] == [0, 1]
