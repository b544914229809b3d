"""What a run asks for on devices, where there are none."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.cli import doctor
from headrace.comm.gpus import settings_text
from headrace.comm.rerendezvous import Rerendezvous
from headrace.config.model import DevicesConfig
from headrace.engine import agreement, step_engine
from headrace.engine import rank as rank_module
from headrace.engine.rank import Rank, StepActions, open_rank
from headrace.errors import ConfigError, SpecError
from headrace.native import machine
from headrace.ops import fused as index
from ranks import run_ranks
from running.engine.loops import attached, costs, dataset, llama, trained


def _config(device: str = "auto") -> Any:
    """As much of a configuration as is asked for."""
    return SimpleNamespace(devices=DevicesConfig(ranks=2, device=device))


class Stop(Exception):
    """Far enough."""


def world(device: str, **more: Any) -> Any:
    """As much of a world as is asked for."""
    return SimpleNamespace(
        device=device,
        timeout_s=7.0,
        ranks=2,
        local_ranks=2,
        rerendezvous=SimpleNamespace(connections=None),
        **more,
    )


@pytest.mark.parametrize(("device", "backend"), [("cuda:0", "nccl"), ("cpu", None)])
def test_groups_of_devices_are_of_nccl_alone(
    device: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches gloo's connections between all ranks of each group beside NCCL's."""
    asked = dict[str, Any]()

    def groups(**named: Any) -> None:
        asked.update(named)
        raise Stop

    monkeypatch.setattr(rank_module, "Groups", groups)
    monkeypatch.setattr(rank_module, "_node_sizes", lambda world, wanted: None)
    with pytest.raises(Stop):
        open_rank(world(device), _config())
    assert (asked["backend"], asked["device"]) == (backend, device)


def test_actions_on_a_device_have_a_limit() -> None:
    """Catches a hang that nobody names: on a device the host waits in no collective."""
    told = list[tuple[str, float | None]]()
    watcher = SimpleNamespace(enter=lambda action, limit_s: told.append((action, limit_s)))
    for device in ("cuda:1", "cpu"):
        Rank.enters(SimpleNamespace(world=world(device, watcher=watcher)), "0F0")  # type: ignore[arg-type]
    assert told == [("0F0", 7.0), ("0F0", None)]


def test_actions_of_a_step_have_minutes() -> None:
    """Catches a hang that is named after half an hour, and a first step that compiles kernels and
    is taken for one."""
    told = list[float | None]()
    watcher = SimpleNamespace(enter=lambda action, limit_s: told.append(limit_s))
    for device in ("cuda:1", "cpu"):
        of_rank = SimpleNamespace(world=world(device, watcher=watcher))
        of_rank.world.timeout_s = 1800.0
        of_rank.enters = partial(Rank.enters, of_rank)
        actions = StepActions(rank=of_rank)  # type: ignore[arg-type]
        for predicted_s in (1.0, 1.0, 30.0, 1e6):
            actions.expect(predicted_s)
            actions.enters("0F0")
    assert told == [1800.0, 120.0, 600.0, 1800.0, None, None, None, None]


def test_meeting_anew_has_a_limit_of_its_own() -> None:
    """Catches a recovery that waits as long as a step may, or is cut off by a step's limit."""
    told = list[tuple[str, float]]()

    def refuse() -> None:
        raise Stop

    watcher = SimpleNamespace(enter=lambda what, limit_s: told.append((what, limit_s)), keep=refuse)
    for timeout_s in (1800.0, 60.0):
        rank = SimpleNamespace(_watcher=watcher, _timeout_s=timeout_s)
        with pytest.raises(Stop):
            Rerendezvous.meet_anew(rank, groups=None, drop_attempt=refuse)  # type: ignore[arg-type]
    assert told == [("meeting anew", 300.0), ("meeting anew", 60.0)]


def test_settings_of_devices_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches runs that cannot recover from a lack of memory and do not say why."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    text = settings_text()
    assert "NCCL_NVLS_ENABLE 0" in text
    assert "expandable_segments:True" in text
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    assert "NVLink SHARP" in settings_text()


@pytest.mark.parametrize(
    ("variables", "gpus", "found"),
    [
        ({}, 2, "cuda"),  # two ranks of this process
        ({}, 1, "cpu"),
        ({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8, "cuda"),
        ({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 2, "cpu"),
        ({"RANK": "3", "WORLD_SIZE": "16", "SLURM_GPUS_PER_TASK": "1"}, 1, "cuda"),
    ],
)
def test_a_device_for_each_rank_of_this_machine(
    variables: dict[str, str], gpus: int, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches devices counted against ranks of other machines, and a rank's own taken for one that
    all share."""
    for name in (
        "TORCHELASTIC_RUN_ID",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "SLURM_GPUS_PER_TASK",
        "SLURM_TRES_PER_TASK",
    ):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_module, "count_gpus", lambda: gpus)
    assert rank_module._device(_config()) == found
    if found == "cpu":
        with pytest.raises(ConfigError, match="a device for each rank"):
            rank_module._device(_config(device="cuda"))


def test_links_are_measured_before_cuda_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches processes that are forked to measure links from one that has begun CUDA."""
    asked = list[str]()
    monkeypatch.setattr(doctor, "_links", lambda: asked.append("links") or {})
    monkeypatch.setattr(doctor, "_devices", lambda: asked.append("devices") or [])
    monkeypatch.setattr(doctor, "_works", lambda found: {})
    doctor.examine()
    assert asked == ["links", "devices"]


class Matrix:
    """One that knows its size, and how many of them were multiplied."""

    def __init__(self) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self.products = 0

    def __call__(self, *size: int, dtype: torch.dtype, device: str) -> Matrix:
        self.sizes.append((*size, dtype, device))  # type: ignore[arg-type]
        return self

    def __matmul__(self, other: Matrix) -> None:
        self.products += 1


def test_what_utilisation_is_measured_against(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a product so small that a device is idle for most of it, and one that is timed
    before it has been done."""
    matrix, waits = Matrix(), list[int]()
    monkeypatch.setattr(torch, "randn", matrix)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(matrix.products))
    assert machine.matmul_flops_per_s("cuda:0", torch.bfloat16) > 0
    assert matrix.sizes == [(8192, 8192, torch.bfloat16, "cuda:0")]
    assert waits == [8, 16, 24, 32]


def test_index_tensors_are_copied_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a copy for which the host waits until the device has come to it."""
    copied = list[tuple[Any, ...]]()

    class Pinned:
        def to(self, device: str, *, non_blocking: bool) -> str:
            copied.append((device, non_blocking))
            return "there"

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: Pinned())
    assert index.to_device(torch.arange(3), "cuda:0") == "there"
    assert copied == [("cuda:0", True)]


def peaks_with_communicators(folder: Path, grown: int) -> list[int]:
    """The peaks that a run records whose communicators take ``grown`` bytes in its first step."""
    seen = iter([1000])
    step_engine.outside_bytes = lambda device: next(seen, 1000 + grown)
    model = llama()
    run = attached(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset(),
        folder,
        costs=costs(1),
        steps=2,
        out=folder / "run",
    )
    trained(run, model)
    run.detach()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row["peak_bytes"][0] for row in map(json.loads, lines) if "step_s" in row]


def test_communicators_count_as_memory_that_was_taken(tmp_path: Path) -> None:
    """Catches plans that fill a device whose communicators hold what they count on."""
    pytest.importorskip("transformers")
    (plain,) = run_ranks(1, peaks_with_communicators, tmp_path / "a", 0)
    (grown,) = run_ranks(1, peaks_with_communicators, tmp_path / "b", 5 << 40)
    assert len(grown) == len(plain) == 2
    assert max(plain) < 5 << 40 <= min(grown)


def test_no_memory_is_not_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a memory of 0 bytes that counts as left out."""
    for name in ("gather_bytes", "gather_floats"):
        monkeypatch.setattr(agreement, name, lambda own, world: [own])
    groups: Any = SimpleNamespace(world=None, ranks=1)
    assert agreement.agreed_cluster(groups, "cpu", None).memory_bytes > 1
    with pytest.raises(SpecError, match="memory of a device: got 0"):
        agreement.agreed_cluster(groups, "cpu", 0)
