"""headrace from Python, as the guide shows it: plans without torch, runs on one rank and more."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import headrace as hr
from headrace.planning.problem import Pricing

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/guides/library.md").read_text()
PLANNING, TRAINING = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
README = (ROOT / "README.md").read_text()
NO_TORCH = "import sys\nsys.modules['torch'] = None\n"


@pytest.fixture(scope="module")
def costs() -> hr.CostModel:
    return hr.costs.roofline(hr.Architecture.preset("llama-tiny"), "h100", devices=4)


def test_the_guide_plans_without_torch(tmp_path: Path) -> None:
    """Catches a line of the guide that does not run, or takes torch with it."""
    pytest.importorskip("altair")
    checks = """
assert plan.devices == 64 and plan.gap >= 0 and timeline.devices == 64
assert hr.Plan.load("plan.json") == plan and hr.Plan.load("plan.json").hash == plan.hash
"""
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH + PLANNING + checks],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    ratios = [float(line.split()[1]) for line in done.stdout.splitlines() if "static-cp" in line]
    assert len(ratios) > 3
    assert min(ratios) >= 1
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_the_page_and_the_guide_agree() -> None:
    """Catches a session that was changed in one of the two."""
    for line in (*TRAINING.splitlines(), "plan = hr.plan(lengths, costs)"):
        assert line in README, line


def test_names_are_seen_and_documented() -> None:
    """Catches a public name that completion does not show, or that says nothing."""
    assert dir(hr) == sorted(hr.__all__)
    page = (ROOT / "docs/reference/library.md").read_text()
    for name in hr.__all__:
        value = getattr(hr, name)
        parts = vars(value) if isinstance(value, ModuleType) else {}
        assert inspect.getdoc(value), name
        assert f"headrace.{name}" in page, name
        for part in {"costs": hr.costs.library, "lengths": hr.lengths}.get(name, hr).__all__:
            assert part not in parts or inspect.getdoc(parts[part]), (name, part)
    with pytest.raises(AttributeError, match="trane"):
        hr.__getattr__("trane")


def test_lists_and_problems_are_taken(costs: hr.CostModel) -> None:
    """Catches a wrapper that plans otherwise than the planner, or ignores a restriction."""
    lengths = [5000, 400, 300, 20]
    plan = hr.plan(lengths, costs)
    assert plan == hr.plan(hr.Lengths.of(lengths), hr.Problem(costs=costs, devices=4))
    narrow = hr.plan(lengths, hr.Problem(costs=costs, devices=4, sizes=(1,)))
    assert {len(pipeline.ranks) for pipeline in narrow.pipelines} == {1}
    others = hr.baselines(lengths, costs)
    assert list(others) == [f"static-cp{p}" for p in costs.group_sizes]
    assert min(other.predicted_s for other in others.values()) >= plan.predicted_s
    assert hr.simulate(plan, costs).seconds == pytest.approx(plan.predicted_s)


def test_costs_are_priced_once(costs: hr.CostModel, monkeypatch) -> None:
    """Catches schemes that are priced anew for every batch, which takes longer than its plan, and
    plans of other costs that are answered from those."""
    made, priced = list[object](), Pricing.__init__

    def counted(self: Pricing, problem: hr.Problem) -> None:
        made.append(problem)
        priced(self, problem)

    monkeypatch.setattr(Pricing, "__init__", counted)
    costs = costs.replace()  # not asked before
    first, second = hr.plan([512, 64], costs), hr.plan([512, 64], costs)
    assert first == second
    assert len(made) == 1
    slow = hr.plan([512, 64], costs.replace(scale=2.0))
    assert slow.predicted_s == pytest.approx(2 * first.predicted_s)


def test_lengths_are_drawn_alike() -> None:
    """Catches a budget or seed that is not passed on."""
    first, second = hr.lengths.batches("fixed:100", 2, tokens="1Ki")
    assert set(first.tokens + second.tokens) == {100}
    assert len(first) == len(second) == 10
    law = "lognormal:median=60,sigma=1,max=256"
    assert hr.lengths.draw(law, tokens=5000) == hr.lengths.draw(law, tokens=5000, seed=0)
    assert hr.lengths.draw(law, tokens=5000) != hr.lengths.draw(law, tokens=5000, seed=1)
    assert hr.lengths.parse("5x2") == hr.Lengths.of([5, 5])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"sequences": 1.5}, "sequences of a batch: got 1.5, wanted a whole number >= 1"),
        ({"sequences": "5"}, "sequences of a batch: got '5'"),
        ({"sequences": 0}, "sequences of a batch: got 0"),
        ({"tokens": 1.5}, "tokens of a batch: got 1.5"),
        ({"tokens": 100, "seed": "a"}, "seed: got 'a'"),
        ({"tokens": 100, "seed": -1}, "seed: got -1"),
    ],
)
def test_what_is_drawn_is_a_whole_number(options: dict[str, Any], told: str) -> None:
    """Catches fractions that are rounded up or down without a word."""
    with pytest.raises(hr.errors.ConfigError, match=told):
        hr.lengths.draw("fixed:10", **options)


def test_costs_come_from_files(costs: hr.CostModel, tmp_path: Path) -> None:
    """Catches a kind of file that is taken for another, and one that nobody can plan with."""
    costs.save(tmp_path / "costs.json")
    assert hr.costs.load(tmp_path / "costs.json") == costs
    for name in ("hydraulis-7b", "flexsp-7b-a100"):
        published = hr.costs.published(name)
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(published.to_json()))
        assert hr.costs.load(path) == published
        with pytest.raises(hr.errors.SpecError, match="published costs"):
            hr.plan([100], published)
    with pytest.raises(hr.errors.CostError, match="did you mean 'hydraulis-7b'"):
        hr.costs.published("hydraulis-7")
    with pytest.raises(hr.errors.CostError, match="nowhere"):
        hr.costs.load(tmp_path / "nowhere.json")


def test_arguments_in_another_order_are_named(costs: hr.CostModel) -> None:
    """Catches a message about published costs where there are none."""
    for wrong in ((costs, [100]), (hr.Problem(costs=costs), hr.Lengths.of([100])), ([100], "h100")):
        with pytest.raises(hr.errors.SpecError, match=r"hr\.plan\(lengths, costs\)"):
            hr.plan(*wrong)
    for ask in (hr.simulate, hr.peak_bytes):
        with pytest.raises(hr.errors.SpecError, match=r"got CostModel\(.*wanted a Plan"):
            ask(costs, hr.plan([100], costs))


@pytest.mark.parametrize("planner", ["adaptive", "hydraulis", "static"])
@pytest.mark.parametrize("seed", [-1, 1.5, "a", None])
def test_a_seed_is_a_whole_number(costs: hr.CostModel, planner: str, seed: Any) -> None:
    """Catches a seed that only some planners look at, and that a plan keeps as it is."""
    with pytest.raises(hr.errors.SpecError, match=f"seed: got {seed!r}, wanted a whole number"):
        hr.plan([700, 60], hr.Problem(costs=costs, planner=planner), seed=seed)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"generators": ["nested"]}, "role of a generator: got None, wanted a Role"),
        ({"previous": 5}, "previous plan: got 5, wanted a Plan"),
    ],
)
def test_arguments_of_another_kind_are_named(
    costs: hr.CostModel, options: dict[str, Any], told: str
) -> None:
    """Catches a traceback of a search that was given what it cannot ask."""
    problem = hr.Problem(costs=costs, smoothing=0.1)
    with pytest.raises(hr.errors.SpecError, match=told):
        hr.plan([700, 60], problem, **options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"devices": 8.0}, "devices of a cluster: got 8.0, wanted a whole number"),
        ({"devices": "8"}, "devices of a cluster: got '8'"),
        ({"devices": None}, "devices of a cluster: got None"),
        ({"devices": 10**9}, "devices of a cluster: got 1000000000, wanted .* to 1,000,000"),
        ({"memory_bytes": "80GiB"}, "memory of a device: got '80GiB'"),
        ({"memory_margin": "0.1"}, "memory margin: got '0.1', wanted a finite number"),
        ({"model": 5}, "model: got 5, wanted an Architecture"),
        ({"model": "llama-9b"}, "did you mean 'llama-8b'"),
        ({"hardware": None}, "hardware: got None, wanted a Hardware"),
        ({"implementation": None}, "implementation: got None, wanted an Implementation"),
    ],
)
def test_arguments_of_a_roofline_are_named(options: dict[str, Any], told: str) -> None:
    """Catches a traceback from the depths, and an error about something else."""
    given = {"model": "llama-tiny", "hardware": "h100", "devices": 8}
    with pytest.raises(hr.errors.HeadraceError, match=told):
        hr.costs.roofline(**(given | options))


def test_names_and_numbers_of_other_kinds_are_taken() -> None:
    """Catches numpy's whole numbers taken for fractions, and a preset that has to be looked up."""
    model = hr.Architecture.preset("llama-tiny")
    expected = hr.costs.roofline(model, "h100", devices=8)
    assert hr.costs.roofline("llama-tiny", "h100", devices=np.int64(8)) == expected
    with pytest.raises(hr.errors.SpecError, match="architecture: got None; known are"):
        hr.Architecture.preset(None)  # type: ignore[arg-type]


def test_peaks_for_a_problem(costs: hr.CostModel) -> None:
    """Catches an AttributeError for what hr.simulate takes, and for published costs."""
    plan = hr.plan([700, 60, 60], costs)
    assert hr.peak_bytes(plan, hr.Problem(costs=costs)) == hr.peak_bytes(plan, costs)
    published = hr.Problem(costs=hr.costs.published("flexsp-7b-a100"), devices=4)
    with pytest.raises(hr.errors.SpecError, match="costs: got published ones"):
        hr.peak_bytes(plan, published)


def test_only_a_plans_own_timeline_is_drawn(costs: hr.CostModel, tmp_path: Path) -> None:
    """Catches a picture of one plan with the seconds of another."""
    plan, path = hr.plan([7000, 600, 600], costs), tmp_path / "plan.json"
    wider = hr.costs.roofline(hr.Architecture.preset("llama-tiny"), "h100", devices=8)
    more = hr.plan([7000, 600, 600], wider)
    with pytest.raises(hr.errors.SpecError, match="got 8 devices, wanted the plan's 4"):
        hr.draw(plan, path, hr.simulate(more, wider))
    other = hr.simulate(hr.plan([7000, 600, 601], costs), costs)
    with pytest.raises(hr.errors.SpecError, match="wanted the plan's micro-batches"):
        hr.draw(plan, path, other)
    own = hr.simulate(plan, costs)
    last = f"F{len(plan.micro_batches) - 1}["
    rows = tuple(row for row in own.rows if last not in row.action)
    with pytest.raises(hr.errors.SpecError, match=f"wanted the plan's {len(plan.micro_batches)}"):
        hr.draw(plan, path, hr.Timeline(source="predicted", rows=rows, devices=4))


def test_plans_show_and_draw_themselves(costs: hr.CostModel, tmp_path: Path) -> None:
    """Catches text taken for markup, and a picture of a plan that has no clock."""
    plan = hr.plan([700, 60, 60], costs).replace(why=("a < b",))
    assert "<td style='text-align:left'>a &lt; b</td>" in plan._repr_html_()
    plan.save(tmp_path / "plan.json")
    loaded = hr.Plan.load(tmp_path / "plan.json")
    with pytest.raises(hr.errors.SpecError, match=r"hr\.simulate"):
        hr.draw(loaded, tmp_path / "plan.json")
    pytest.importorskip("altair")
    hr.draw(loaded, tmp_path / "picture.json", hr.simulate(loaded, costs))
    hr.draw(plan, tmp_path / "own.json")
    drawn, own = ((tmp_path / name).read_text() for name in ("picture.json", "own.json"))
    assert drawn == own
    (tmp_path / "torn.json").write_text("{")
    with pytest.raises(hr.errors.SpecError, match="no JSON"):
        hr.Plan.load(tmp_path / "torn.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, my.toml, and its corpus."""
    pytest.importorskip("torch")
    from running.cli.jobs import write_job

    made = tmp_path_factory.mktemp("library")
    write_job(made, steps=3, candidates=["megatron_cz"]).rename(made / "my.toml")
    return made


@pytest.mark.slow
def test_the_guide_trains(folder: Path, monkeypatch, capfd) -> None:
    """Catches a line of the guide that does not run, steps that are told in a rank's process, and
    a run on one rank that is another one."""
    pytest.importorskip("altair")
    monkeypatch.chdir(folder)
    values: dict[str, object] = {"hr": hr}
    exec(TRAINING.replace("run.steps=200", "run.steps=3"), values)
    run = values["run"]
    assert isinstance(run, hr.TrainingRun)
    lines = re.findall(r"^([0-9.]+) [0-9.]+$", capfd.readouterr().out, re.MULTILINE)
    assert tuple(map(float, lines)) == run.losses
    assert len(run.losses) == 3
    assert (folder / "hf/model.safetensors").exists()
    assert (run.folder / "report.html").exists()
    assert "<polyline" in run._repr_html_()
    pids: list[int] = []
    told: list[str] = []
    alone = hr.train(
        hr.Config.load("my.toml", "devices.ranks=1"),
        out=folder / "alone",
        on_step=lambda step: pids.append(os.getpid()),
        tell=told.append,
    )
    assert pids == [os.getpid()] * 3
    assert alone.losses == pytest.approx(run.losses, rel=1e-5)
    assert any(line.startswith("model ") for line in told)
    assert capfd.readouterr().err == ""
    before = alone.losses
    more = hr.Config.load("my.toml", "devices.ranks=1", "run.steps=4")
    again = hr.train(more, out=folder / "alone", resume=True, tell=told.append)
    assert again.losses[:3] == before
    assert len(again.losses) == 4
    assert again.checkpoints.latest().step == 4
    assert again.checkpoints.latest().verify() > 0


def test_errors_of_ranks_are_raised_here(folder: Path) -> None:
    """Catches an error that only stderr tells, and ranks that outlive a callback's error."""
    psutil = pytest.importorskip("psutil")
    path, seen = folder / "my.toml", list[int]()
    with pytest.raises(hr.errors.InfeasiblePlan, match=r"does not fit|less than 64 KiB"):
        hr.train(hr.Config.load(path, "devices.memory=64KiB"), out=folder / "small")
    children = psutil.Process().children()

    def refuse(step: object) -> None:
        seen.append(len(psutil.Process().children()))
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        hr.train(hr.Config.load(path), out=folder / "refused", on_step=refuse)
    assert seen[0] >= len(children) + 2
    assert len(psutil.Process().children()) == len(children)

    def kill_rank(step: object) -> None:
        ranks = [child for child in psutil.Process().children() if child not in children]
        ranks[-1].kill()

    with pytest.raises(hr.errors.LaunchError, match="exit code 137"):
        hr.train(hr.Config.load(path), out=folder / "killed", on_step=kill_rank)
    with pytest.raises(KeyboardInterrupt):
        hr.train(
            hr.Config.load(path),
            out=folder / "interrupted",
            on_step=lambda step: os.kill(os.getpid(), signal.SIGINT),
        )
    with pytest.raises(SystemExit) as ended:
        hr.train(
            hr.Config.load(path),
            out=folder / "stopped",
            on_step=lambda step: os.kill(os.getpid(), signal.SIGHUP),
        )
    assert ended.value.code == 128 + signal.SIGHUP


@pytest.mark.slow
def test_ranks_in_new_processes_train_alike(folder: Path, monkeypatch) -> None:
    """Catches a run that a process which may not fork (it has begun CUDA, or computed on several
    threads as a rank) cannot start, or in which callbacks and errors stay in the ranks."""
    from headrace.comm.launch import start
    from headrace.engine import rank

    path, seen = folder / "my.toml", list[float]()
    config, small = hr.Config.load(path), hr.Config.load(path, "devices.memory=64KiB")
    forked = hr.train(config, out=folder / "forked")
    monkeypatch.setattr(rank, "start", partial(start, forked=False))
    run = hr.train(config, out=folder / "new", on_step=lambda step: seen.append(step.loss))
    assert run.losses == pytest.approx(forked.losses, rel=1e-5)
    assert tuple(seen) == run.losses
    with pytest.raises(hr.errors.InfeasiblePlan, match=r"does not fit|less than 64 KiB"):
        hr.train(small, out=folder / "new-small")


def test_costs_are_measured_or_cached(folder: Path) -> None:
    """Catches a profile of another set-up, or measured twice."""
    config = hr.Config.load(folder / "my.toml", "devices.ranks=1")
    first = hr.profile(config)
    assert first.cluster.devices == 1
    assert first.options == hr.profile(config).options
    assert hr.plan([100, 20], first).devices == 1


def test_training_without_torch_says_what_to_install() -> None:
    """Catches a ModuleNotFoundError where an extra is missing."""
    code = NO_TORCH + (
        "import headrace as hr\n"
        "for what in (lambda: hr.train, lambda: hr.profile(None)):\n"
        "    try: what()\n"
        "    except hr.errors.MissingExtra as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.count("pip install 'headrace[train]'") == 2, done.stderr
