"""``headrace doctor``: what is installed, what the machine has, what will work here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

import headrace
from headrace.cli.app import Output
from headrace.units import bytes_text, seconds_text

__all__ = ["doctor", "examine"]

_PACKAGES = (
    "torch",
    "numpy",
    "pydantic",
    "cyclopts",
    "rich",
    "jinja2",
    "safetensors",
    "psutil",
    "tokenizers",
    "transformers",
    "altair",
    "vl-convert-python",
    "scikit-learn",
    "pyarrow",
    "diffusers",
    "accelerate",
    "trl",
    "peft",
    "pyfaidx",
    "tensorboard",
    "wandb",
)


def doctor(*, as_json: bool) -> int:
    """Print the examination; exit code 1 when nothing can be trained here."""
    found = examine()
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)
    return 0 if found["works"]["train on this machine"]["ok"] else 1


def examine() -> dict[str, Any]:
    """Versions, machine, links, and for each thing one wants to do whether it works here."""
    versions = {name: _version(name) for name in _PACKAGES}
    found: dict[str, Any] = {
        "headrace": headrace.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions,
        "machine": _machine(),
        # Links first: they are measured by processes that are forked, which CUDA does not survive.
        "links": _links() if versions["torch"] else {},
        "devices": _devices() if versions["torch"] else [],
    }
    found["works"] = _works(found)
    return found


def _version(name: str) -> str | None:
    """The installed version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    """Cores, and bytes of memory, shared memory and disk, of this machine; None for what it does
    not tell."""
    meminfo_bytes: dict[str, int] = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            key, _, value = line.partition(":")
            meminfo_bytes[key] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        meminfo_bytes = {}
    shared_memory = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1,
        "memory_bytes": meminfo_bytes.get("MemTotal"),
        "free_memory_bytes": meminfo_bytes.get("MemAvailable"),
        "shared_memory_bytes": shared_memory.total if shared_memory else None,
        "free_disk_bytes": shutil.disk_usage(Path.cwd()).free,
    }


def _devices() -> list[dict[str, Any]]:
    """``name`` and ``memory_bytes`` of every GPU."""
    import torch

    return [
        {
            "name": torch.cuda.get_device_name(i),
            "memory_bytes": torch.cuda.get_device_properties(i).total_memory,
        }
        for i in range(torch.cuda.device_count())
    ]


def _links() -> dict[str, Any]:
    """Back ends of torch.distributed, and gloo's bandwidth between two ranks of this machine."""
    import torch.distributed as dist

    if not dist.is_available():
        return {}
    links: dict[str, Any] = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    if links["gloo"]:
        links |= _measure_gloo()
    return links


def _measure_gloo() -> dict[str, Any]:
    """Whether two gloo ranks of this machine can talk, and how fast; see
    :func:`_time_exchanges`."""
    with tempfile.TemporaryDirectory() as folder:
        return _time_exchanges(Path(folder) / "seconds.json")


def _time_exchanges(path: Path) -> dict[str, Any]:
    """Start two gloo ranks, which write the seconds of their exchanges to the file ``path``.

    Returns whether that worked, seconds from start to end, latency in seconds and bytes per second;
    the exit code alone where they measured nothing.
    """
    import torch
    import torch.distributed as dist

    from headrace.comm.launch import World, start

    def exchange(world: World) -> int:
        """Time an all-to-all of a few bytes and one of 32 MiB between the ranks; the first rank
        writes the seconds of each."""
        small, large = torch.zeros(2), torch.zeros(8 * 2**20)
        out_small, out_large = torch.empty_like(small), torch.empty_like(large)
        times_s = []
        for out, value, repeats in ((out_small, small, 50), (out_large, large, 4)):
            dist.all_to_all_single(out, value)
            begin = time.perf_counter()
            for _ in range(repeats):
                dist.all_to_all_single(out, value)
            times_s.append((time.perf_counter() - begin) / repeats)
        if world.rank == 0:
            path.write_text(json.dumps(times_s))
        return 0

    begin = time.perf_counter()
    code = start(exchange, ranks=2)
    ready_s = time.perf_counter() - begin
    try:
        latency_s, transfer_s = json.loads(path.read_text())
    except (OSError, ValueError):
        return {"gloo_works": False, "gloo_exit_code": code}
    # Half of the 8 Mi elements of 4 bytes leave a rank.
    sent_bytes = 4 * 4 * 2**20
    return {
        "gloo_works": code == 0,
        "ranks_ready_s": ready_s,
        "gloo_latency_s": latency_s,
        "gloo_bytes_per_s": sent_bytes / transfer_s,
    }


def _works(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Which parts of headrace work here, by what was ``found``: for each ``ok`` and, in ``why``,
    the reason."""
    versions, links = found["versions"], found["links"]

    def row(ok: bool, why: str) -> dict[str, Any]:
        return {"ok": ok, "why": why}

    def needs(names: tuple[str, ...], extra: str) -> dict[str, Any]:
        """The row of what works when all packages of ``names`` are installed, which ``extra``
        brings."""
        absent = [name for name in names if not versions.get(name)]
        hint = f"needs {', '.join(absent)}: pip install 'headrace[{extra}]'"
        return row(not absent, hint if absent else "installed")

    train = needs(("torch", "safetensors"), "train")
    if train["ok"]:
        talked = bool(links.get("gloo_works"))
        train = row(talked, "two gloo ranks talked" if talked else "gloo ranks could not talk")
    gpus = found["devices"]
    new_enough = sys.version_info >= (3, 11)
    return {
        "plan and simulate": row(new_enough, "needs Python 3.11" if not new_enough else "always"),
        "train on this machine": train,
        "train on its GPUs": row(
            bool(gpus) and bool(links.get("nccl")),
            _gpu_reason(len(gpus), nccl=bool(links.get("nccl"))),
        ),
        "tokenizer.json": needs(("tokenizers",), "train"),
        "reports": needs(("altair", "vl-convert-python"), "report"),
        "parquet": needs(("pyarrow",), "hf"),
        "FASTA": needs(("pyfaidx",), "genomics"),
    }


def _gpu_reason(count: int, *, nccl: bool) -> str:
    """Why ``count`` GPUs can or cannot be trained on, in words."""
    if not count:
        return "no CUDA device, or torch without it"
    return f"{count} devices, NCCL {'present' if nccl else 'absent from this torch'}"


def _print(found: dict[str, Any]) -> None:
    """Print what was found as lines and a table."""
    out = Output(highlight=False)
    machine, links = found["machine"], found["links"]
    out.print(f"headrace {found['headrace']}  Python {found['python']}  {found['system']}")
    sizes = {
        "memory": machine["memory_bytes"],
        "free": machine["free_memory_bytes"],
        "/dev/shm": machine["shared_memory_bytes"],
        "disk free": machine["free_disk_bytes"],
    }
    memory = " ".join(
        f"{name} {bytes_text(size)}" for name, size in sizes.items() if size is not None
    )
    out.print(f"{machine['cores']} cores  {memory}")
    for device in found["devices"]:
        out.print(f"{device['name']}  {bytes_text(device['memory_bytes'])}")
    if links.get("gloo_works"):
        out.print(
            f"gloo: two ranks ready and done in {seconds_text(links['ranks_ready_s'])}, latency "
            f"{seconds_text(links['gloo_latency_s'])}, {bytes_text(links['gloo_bytes_per_s'])}/s"
        )
    table = Table(box=None, pad_edge=False)
    for name in ("to", "works", "because"):
        table.add_column(name)
    for what, row in found["works"].items():
        works = "[green]yes[/]" if row["ok"] else "[red]no[/]"
        table.add_row(what, works, row["why"].replace("[", r"\["))
    out.print(table)
    versions = found["versions"]
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    absent = ", ".join(name for name, version in versions.items() if not version)
    out.print(f"installed: {installed}", soft_wrap=True)
    out.print(f"absent: {absent or 'nothing'}", soft_wrap=True)
