"""What a run finds out before it takes long, and what does not stop it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import headrace as hr
from headrace.comm.mesh import Groups
from headrace.config import Config
from headrace.costs import synthetic_costs
from headrace.costs.calibration import Calibration
from headrace.engine.cost_cache import calibration_path, newest_costs, remember_costs
from headrace.engine.measured_costs import _hosts
from headrace.engine.rank import _node_sizes
from headrace.errors import ConfigError, InfeasiblePlan, MissingExtra
from headrace.native.machine import _links
from headrace.spec.architecture import Architecture
from ranks import run_ranks
from running.cli.jobs import write_job

Make = Callable[..., Config]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """``make(CHANGES...)``: a configuration of one rank and two steps."""
    path = write_job(tmp_path, steps=2, candidates=["megatron_cz"])
    return lambda *changes: Config.load(path, "devices.ranks=1", *changes)


def refused(make: Make, folder: Path, *changes: str) -> None:
    """Training is refused before anything is tokenized."""
    config = make(*changes)
    with pytest.raises((ConfigError, MissingExtra)):
        hr.train(config, out=folder, tell=lambda line: None)
    assert not config.data.cache_folder.exists()


def test_the_folder_is_tried_first(make: Make, tmp_path: Path) -> None:
    """Catches a traceback, or a clear word after minutes of tokenizing and profiling."""
    (tmp_path / "file").touch()
    refused(make, tmp_path / "file" / "run")
    refused(make, tmp_path / ("x" * 300))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # as a disk that is full
    try:
        refused(make, tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_trackers_are_looked_for_first(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Catches a run that measures its costs before it says what is not installed."""
    monkeypatch.setitem(sys.modules, name, None)
    refused(make, tmp_path / "run", f"report.{name}=true")


def test_a_model_that_nobody_can_store(make: Make, tmp_path: Path) -> None:
    """Catches torch's traceback about memory that it cannot have."""
    with pytest.raises(InfeasiblePlan, match=r"weights of .* more ranks, or a smaller model"):
        hr.train(
            make("model.hidden=1000000", "model.heads=4"),
            out=tmp_path / "run",
            tell=lambda line: None,
        )


def test_a_cache_that_takes_no_costs_stops_nothing(make: Make, tmp_path: Path) -> None:
    """Catches a run that ends, its profile lost, since others could not use it."""
    config, told = make(), list[str]()
    config.data.cache_folder.mkdir()
    (config.data.cache_folder / "profiles").touch()
    run = hr.train(config, out=tmp_path / "run", tell=told.append)
    assert len(run.losses) == 2
    assert any("costs are not kept for other runs" in line for line in told)


def nodes_of(place: list[tuple[int, int]], links: str) -> list[dict[str, str]]:
    """The machines that ranks at (local rank, local ranks) see."""

    def seen() -> dict[str, str]:
        groups = Groups()
        local_rank, local_ranks = place[groups.rank]
        machine = {"host_cpu": f"cpu {local_ranks}", "cores": 2, "torch": "2", "links": links}
        world = SimpleNamespace(local_rank=local_rank, local_ranks=local_ranks)
        rank: Any = SimpleNamespace(machine=machine, world=world, groups=groups)
        return _hosts(rank)

    return run_ranks(len(place), seen)


def test_costs_are_those_of_the_machines(tmp_path: Path) -> None:
    """Catches two nodes planned with the costs of one, and a fingerprint that ranks differ in."""
    found = [
        nodes_of([(0, 3), (1, 3), (2, 3)], "1000"),
        nodes_of([(0, 2), (1, 2), (0, 1)], "1000"),
        nodes_of([(0, 2), (1, 2), (0, 1)], "40000"),
    ]
    for ranks in found:
        assert all(one == ranks[0] for one in ranks)
    one, two, faster = (ranks[0] for ranks in found)
    assert (one["nodes"], two["nodes"]) == ("3", "2+1")
    assert two["processor"] == "cpu 1 + cpu 2"
    assert "links" not in one
    assert (two["links"], faster["links"]) == ("1000", "40000")


def ranks_of_a_node(place: list[tuple[int, int]], device: str, wanted: int) -> list[Any]:
    """What ranks at (local rank, local ranks) of such devices take."""

    def found() -> Any:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        local_rank, local_ranks = place[rank]
        world: Any = SimpleNamespace(
            rank=rank, ranks=ranks, local_rank=local_rank, local_ranks=local_ranks, device=device
        )
        try:
            return _node_sizes(world, wanted)
        except ConfigError as error:
            return str(error)

    return run_ranks(len(place), found)


def test_ranks_of_a_node_are_the_launchers() -> None:
    """Catches nodes whose ranks do not follow each other, and ranks that differ in it."""
    two, odd = [(0, 2), (1, 2), (0, 2), (1, 2)], [(0, 3), (1, 3), (2, 3), (0, 1)]
    turned = [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert ranks_of_a_node(two, "cuda:0", 0) == [(2, 2)] * 4
    assert ranks_of_a_node(odd, "cuda:0", 0) == [(3, 1)] * 4
    assert ranks_of_a_node(turned, "cuda:0", 0) == [None] * 4
    assert ranks_of_a_node(two, "cpu", 0) == [None] * 4
    assert ranks_of_a_node(odd, "cpu", 2) == [(2, 2)] * 4
    assert ranks_of_a_node(two, "cpu", 3) == [(3, 1)] * 4


def test_links_are_devices_that_are_up(tmp_path: Path) -> None:
    """Catches a bridge that comes and goes taken for another network."""
    for name, speed in {"eth0": "1000\n", "ib0": "40000\n", "down": "-1\n", "odd": "?"}.items():
        (tmp_path / name / "device").mkdir(parents=True)
        (tmp_path / name / "speed").write_text(speed)
    (tmp_path / "docker0").mkdir()
    (tmp_path / "docker0" / "speed").write_text("10000\n")
    assert _links(tmp_path) == "40000+1000"
    assert _links(tmp_path / "eth0") == "unknown"


@pytest.mark.parametrize(
    "change",
    [
        "devices.memory=1GiB",
        "optimizer.name=sgd",
        "data.batch_tokens=3000",
        "data.context=128",
        "planner.group_sizes=[1]",
        "planner.working=replicated",
        "data.batch_tokens= data.iterations=dcp",
    ],
)
def test_a_margin_is_learnt_for_one_configuration(make: Make, change: str) -> None:
    """Catches a margin that peaks of another planner, optimizer, budget or memory have raised."""
    costs = synthetic_costs(1, architecture=Architecture.preset("llama-tiny"))
    ours, other = make("run.steps=9", "planner.ahead=0"), make(*change.split())
    known = Calibration(fingerprint=costs.fingerprint)
    for _ in range(30):
        known.peaks = known.peaks.after([100], [160], 200)
    known.save(calibration_path(make(), costs.fingerprint))
    remember_costs(make(), costs.replace(memory_margin=0.0))
    margins = [newest_costs(c, Architecture.preset("llama-tiny"), 1) for c in (ours, other)]
    assert [m.memory_margin for m in margins if m] == [0.45, 0.1]
    assert make("devices.memory=1GiB").devices.memory_bytes == 2**30


def test_plans_have_the_memory_of_their_configuration(make: Make) -> None:
    """Catches kept costs that plan with the memory of the run that measured them."""
    a = Architecture.preset("llama-tiny")
    remember_costs(make(), synthetic_costs(1, architecture=a))
    found = newest_costs(make("devices.memory=3GiB", "planner.memory_margin=0.2"), a, 1)
    assert found is not None
    assert (found.cluster.memory_bytes, found.memory_margin) == (3 * 2**30, 0.2)
