"""``headrace plan`` as a user types it, in this process; and that planning needs no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import main
from headrace.config import Config
from headrace.costs import CostModel, synthetic_costs
from headrace.costs.library import roofline
from headrace.engine.cost_cache import remember_costs
from headrace.spec import Architecture, Plan

CONFIG = """
[run]
steps = 5
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
[devices]
ranks = 2
device = "cpu"
memory = "64MiB"
"""
BY_FORMULA = "costs by formula, not measured"
LENGTHS = "lognormal:median=60,sigma=1,max=256"
ARCHITECTURE = Architecture(layers=2, hidden=32, heads=4, kv_heads=4, ffn=128, vocabulary=257)


def test_group_sizes_beyond_the_ranks_are_left_out(monkeypatch, capsys) -> None:
    """Catches a demo that takes no other number of ranks than its own, and sizes that are left out
    without a word."""
    demo = str(Path(__file__).parents[2] / "examples" / "python-sources.toml")
    for ranks, said in ((2, "4 left out, as there are 2 ranks"), (1, "2, 4 left out")):
        code = main(["plan", demo, "--ranks", str(ranks), "--lengths", "fixed:64"])
        out, err = capsys.readouterr()
        assert code == 0, err
        assert f"planner.group_sizes: {said}" in err
        assert out


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """A configuration of a tiny corpus: 40 texts of 8 to 632 bytes."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "corpus").mkdir()
    for i in range(40):
        (folder / "corpus" / f"{i:02d}.txt").write_text("a race " * (1 + i * i // 17))
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(cache=folder / "cache"))
    return path


def call(capsys, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else -1
    out, err = capsys.readouterr()
    return code, out, err


def plans(out: str) -> list[Plan]:
    return [Plan.from_json(value) for value in json.loads(out)["plans"]]


def test_a_table_says_what_and_why(config: Path, capsys) -> None:
    """Catches a table that lost one of its rows, and remarks among the data."""
    code, out, err = call(capsys, "plan", config)
    assert code == 0, err
    rows = (
        "strategy",
        "sequences",
        "micro-batches",
        "predicted",
        "why",
        "fits",
        "best static",
        "bucket",
        "packed",
        "took",
    )
    for row in rows:
        assert re.search(rf"^{row} +\S", out, re.MULTILINE), row
    assert re.search(r"^predicted .+ bound .+ gap .+ %$", out, re.MULTILINE)
    ratios = re.findall(r", the plan is ([\d.]+) times as fast$", out, re.MULTILINE)
    assert len(ratios) == 3
    assert min(map(float, ratios)) >= 1
    assert re.search(r"^fits +peak .+ of 64 MiB \(rank [01]\) +planned in ", out, re.MULTILINE)
    assert re.search(r"^took +\S+ \S+ to plan, \S+ \S+ for plans of other planners$", out, re.M)
    assert BY_FORMULA in err
    assert BY_FORMULA not in out


def test_json_is_plans_that_read_back(config: Path, capsys) -> None:
    """Catches anything but JSON on stdout, a batch planned twice, a sequence lost or doubled."""
    code, out, err = call(capsys, "plan", config, "--batches", 3, "--json")
    assert code == 0, err
    found = plans(out)
    assert len(found) == 3
    seen: list[int] = []
    for plan in found:
        assert plan.devices == 2
        done = sorted(i for micro in plan.micro_batches for i in micro.sequences)
        assert done == list(range(len(plan.lengths)))
        assert plan.lengths.longest <= 256
        assert plan.lengths.total <= 1500
        assert plan.lower_bound_s <= plan.predicted_s * (1 + 1e-9)
        assert all(len(micro.layers.options) == 2 for micro in plan.micro_batches)
        seen += plan.lengths.ids
    assert len(set(seen)) == len(seen), "an epoch shows each sequence once"
    value = json.loads(out)
    assert BY_FORMULA in value["costs"]
    assert all(plan["planning_s"] >= 0 for plan in value["plans"])


def test_batches_are_those_of_training_and_of_every_call(config: Path, capsys) -> None:
    """Catches an order that depends on how many batches are looked at, or on the ranks."""
    three = plans(call(capsys, "plan", config, "--batches", 3, "--json")[1])
    one = plans(call(capsys, "plan", config, "--json", "--ranks", 3)[1])
    assert one[0].lengths == three[0].lengths
    assert one[0].devices == 3
    other = plans(call(capsys, "plan", config, "--json", "--set", "run.seed=9")[1])
    assert other[0].lengths != three[0].lengths
    assert (one[0].seed, other[0].seed) == (0, 9)


@pytest.mark.parametrize(
    "text", [LENGTHS, "fixed:128", "github-code", "0.5*fixed:64 + 0.5*list:100/200"]
)
def test_drawn_lengths_take_the_place_of_the_corpus(config: Path, capsys, text: str) -> None:
    """Catches a corpus that is opened all the same, and a budget that is ignored."""
    changes = [
        "--set",
        'data.paths=["nowhere"]',
        "--set",
        "devices.memory=8GiB",
        "--set",
        "data.batch_tokens=1Mi",
        "--set",
        "data.context=1Mi",
    ]
    code, out, err = call(capsys, "plan", config, "--json", "--lengths", text, *changes)
    assert code == 0, err
    [plan] = plans(out)
    assert 0 < plan.lengths.total <= 2**20
    if text == "fixed:128":
        assert set(plan.lengths.tokens) == {128}


def test_the_seed_draws_the_lengths(config: Path, capsys) -> None:
    """Catches a seed that does nothing, and lengths that differ between two calls."""
    first, again, other = (
        plans(call(capsys, "plan", config, "--json", "--lengths", LENGTHS, "--seed", seed)[1])[0]
        for seed in (1, 1, 2)
    )
    assert first.hash == again.hash
    assert first.lengths != other.lengths


@pytest.mark.parametrize("kernels", ["made-up", "modelled"])
def test_costs_that_nobody_measured_are_not_called_so(
    config: Path, capsys, tmp_path: Path, kernels: str
) -> None:
    """Catches made-up costs, and a roofline that was saved, among what predictions assume as
    measured kernels."""
    words = ["plan", config, "--lengths", "fixed:100"]
    if kernels == "modelled":
        path = tmp_path / "costs.json"
        roofline(ARCHITECTURE, "h100", devices=2).save(path)
        words += ["--costs", path]
    assert f"{kernels} kernels" in call(capsys, *words)[1]
    [plan] = json.loads(call(capsys, *words, "--json")[1])["plans"]
    assert plan["forecast"]["assumed"]["implementation"] == kernels


@pytest.mark.parametrize("drawn", [(), ("--lengths", "fixed:100")], ids=["corpus", "drawn"])
def test_the_seed_reaches_planners_and_the_corpus(config: Path, capsys, drawn) -> None:
    """Catches a planner that draws with the configuration's seed whatever the flag says, and a flag
    that leaves the order of the corpus as it is."""
    by_key, by_flag, other = (
        plans(call(capsys, "plan", config, "--json", *drawn, *words)[1])[0]
        for words in (("--set", "run.seed=1"), ("--seed", 1), ("--seed", 2))
    )
    assert (by_key.seed, by_flag.seed, other.seed) == (1, 1, 2)
    assert by_flag.lengths == by_key.lengths
    assert (by_flag.lengths == other.lengths) == bool(drawn)


@pytest.mark.parametrize("ending", [".json", ".svg"])
def test_a_picture_of_the_longest_batch(config: Path, capsys, tmp_path, ending: str) -> None:
    """Catches a picture of another batch, one without all ranks or lengths, or JSON beside it that
    cannot be read."""
    pytest.importorskip("altair")
    path = tmp_path / f"plan{ending}"
    code, out, err = call(capsys, "plan", config, "--batches", 3, "--json", "--picture", path)
    assert code == 0, err
    found = plans(out)
    longest = max(range(3), key=lambda i: found[i].predicted_s)
    assert f"picture of batch {longest}, the longest" in " ".join(err.split())
    if ending == ".svg":
        assert path.read_text().startswith("<svg")
        return
    spec = json.loads(path.read_text())
    [gantt, where] = spec["vconcat"]
    rows = [spec["datasets"][chart["data"]["name"]] for chart in (gantt, where)]
    assert gantt["title"].startswith(f"batch {longest}: ")
    assert len(rows[1]) == len(found[longest].lengths)
    bars = [bar for bar in rows[0] if bar["longest"]]
    assert {rank for bar in bars for rank in range(bar["low"], bar["high"])} == {0, 1}


def test_a_picture_without_a_place_is_refused(config: Path, capsys, tmp_path) -> None:
    """Catches batches that are planned first."""
    pytest.importorskip("altair")
    code, out, err = call(capsys, "plan", config, "--picture", tmp_path / "no" / "plan.svg")
    assert (code, out) == (2, "")
    assert "no such folder" in " ".join(err.split())


def test_the_static_planner_uses_one_size(config: Path, capsys) -> None:
    """Catches a planner that is chosen in the configuration and not used."""
    changes = ["--set", "planner.name=static", "--set", "planner.static_size=2"]
    [plan] = plans(call(capsys, "plan", config, "--json", *changes)[1])
    assert {str(pipeline.scheme) for pipeline in plan.pipelines} == {"cp2"}


def test_a_planner_of_others_is_named_by_a_flag(config: Path, capsys) -> None:
    """Catches a flag that is not obeyed beside a configuration, and a name that only one of plan
    and simulate knows."""
    [plan] = plans(call(capsys, "plan", config, "--json", "--planner", "paradyse")[1])
    assert plan.planner == "paradyse"
    assert all(len(micro.layers.counts) <= 2 for micro in plan.micro_batches)
    [own] = plans(call(capsys, "plan", config, "--json", "--planner", "headrace")[1])
    assert own.planner == "adaptive"
    assert own.predicted_s <= plan.predicted_s * (1 + 1e-9)
    code, out, err = call(
        capsys, "simulate", config, "--json", "--set", "planner.name=paradyse", "--programs"
    )
    assert code == 0, err
    (batch,) = json.loads(out)["batches"]
    assert Plan.from_json(batch["plan"]).hash == plan.hash


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("paradise", "planner.name"),
        ("best-static", "planner.name"),
        ("static", "static_size"),
    ],
)
def test_planners_that_a_configuration_lacks_are_refused(
    config: Path, capsys, name: str, said: str
) -> None:
    """Catches another planner in the place of the one that is asked for."""
    code, out, err = call(capsys, "plan", config, "--planner", name)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())


def test_group_sizes_and_recompute_are_limits(config: Path, capsys) -> None:
    """Catches limits of the configuration that the planner does not see."""
    changes = ["--set", "planner.group_sizes=[2]", "--set", 'planner.recompute=["full"]']
    [plan] = plans(call(capsys, "plan", config, "--json", *changes)[1])
    assert {len(pipeline.ranks) for pipeline in plan.pipelines} == {2}
    levels = {o.recompute for micro in plan.micro_batches for o in micro.layers.options}
    assert levels == {"full"}


def save_costs(path: Path, ranks: int, architecture: Architecture = ARCHITECTURE) -> CostModel:
    costs = synthetic_costs(ranks, architecture=architecture).replace(fingerprint="made=here")
    costs.save(path)
    return costs


def test_a_file_of_costs_is_used(config: Path, capsys, tmp_path: Path) -> None:
    """Catches a formula in place of what was measured."""
    costs = save_costs(tmp_path / "one.json", 2)
    costs.replace(scale=2.0).save(tmp_path / "two.json")
    code, out, err = call(capsys, "plan", config, "--json", "--costs", tmp_path / "one.json")
    assert code == 0, err
    assert BY_FORMULA not in err
    assert json.loads(out)["costs"] == "made=here"
    twice = call(capsys, "plan", config, "--json", "--costs", tmp_path / "two.json")[1]
    assert plans(twice)[0].predicted_s == pytest.approx(2 * plans(out)[0].predicted_s)


@pytest.mark.parametrize("other", ["ranks", "model"])
def test_costs_of_something_else_are_refused(config, capsys, tmp_path, other: str) -> None:
    """Catches a plan for two ranks where four were asked for, or for another model's layers."""
    model = Architecture.preset("llama-tiny") if other == "model" else ARCHITECTURE
    save_costs(tmp_path / "costs.json", 2, model)
    ranks = 4 if other == "ranks" else 2
    code, out, err = call(
        capsys, "plan", config, "--json", "--ranks", ranks, "--costs", tmp_path / "costs.json"
    )
    if code == 0:
        [plan] = plans(out)
        assert plan.devices == ranks
        assert all(len(micro.layers.options) == 2 for micro in plan.micro_batches)
    else:
        assert (code, out) == (2, "")
        assert "costs.json" in err or "cost" in err


def test_costs_of_another_model_say_what_differs(config: Path, capsys, tmp_path: Path) -> None:
    """Catches ``got llama 2x32, wanted llama 2x32``."""
    save_costs(tmp_path / "costs.json", 2)
    code, out, err = call(
        capsys, "plan", config, "--costs", tmp_path / "costs.json", "--set", "model.causal=false"
    )
    assert (code, out) == (2, "")
    assert "causal" in err


@pytest.mark.parametrize("change", ["model.causal=false", "model.dropout=0.1"])
def test_kept_costs_are_those_of_the_model(config: Path, capsys, tmp_path, change: str) -> None:
    """Catches costs of a causal model that are taken for one that sees everything."""
    cache = ("--set", f"data.cache={tmp_path}")
    remember_costs(Config.load(config, *cache[1:]), synthetic_costs(2, architecture=ARCHITECTURE))
    assert BY_FORMULA not in call(capsys, "plan", config, *cache)[2]
    assert BY_FORMULA in call(capsys, "plan", config, *cache, "--ranks", 3)[2]
    assert BY_FORMULA in call(capsys, "plan", config, *cache, "--set", change)[2]


BAD: dict[str, tuple[list[str], str]] = {
    "no file": (["plan", "nowhere.toml"], "nowhere.toml: got No such file"),
    "no configuration": (["plan"], "wanted a CONFIG"),
    "unknown command": (["plam", "{config}"], 'Did you mean "plan"?'),
    "unknown flag": (["plan", "{config}", "--batchs", "2"], "Did you mean --batches?"),
    "no number": (["plan", "{config}", "--batches", "two"], "got two, wanted a whole number"),
    "no batches": (["plan", "{config}", "--batches", "0"], "--batches: got 0, wanted >= 1"),
    "fewer than no batches": (["plan", "{config}", "--batches", "-3"], "--batches: got -3"),
    "no ranks": (["plan", "{config}", "--ranks", "0"], "devices.ranks"),
    "unknown key": (["plan", "{config}", "--set", "run.stepz=3"], "run.stepz: unknown key; did"),
    "no value": (["plan", "{config}", "--set", "run.steps"], "wanted SECTION.KEY=VALUE"),
    "unknown distribution": (
        ["plan", "{config}", "--lengths", "lognorml:median=3"],
        "did you mean 'lognormal'?",
    ),
    "unknown parameter": (
        ["plan", "{config}", "--lengths", "lognormal:median=3,sigmq=1"],
        "did you mean 'sigma'?",
    ),
    "half a distribution": (["plan", "{config}", "--lengths", "lognormal:median=3"], "sigma"),
    "no corpus": (["plan", "{config}", "--set", 'data.paths=["nowhere"]'], "nowhere"),
    "no costs": (["plan", "{config}", "--costs", "nowhere.json"], "nowhere.json: got No such file"),
    "costs of no JSON": (["plan", "{config}", "--costs", "{config}"], "got no JSON"),
    "unknown preset": (
        ["plan", "{config}", "--set", "model.preset=llama-tinny"],
        "did you mean 'llama-tiny'?",
    ),
    "unknown size": (
        ["plan", "{config}", "--set", "planner.group_sizes=[3]"],
        "planner.group_sizes: got 3, wanted one of 1, 2",
    ),
    "empty planner": (["plan", "{config}", "--planner", ""], "planner.name: got an empty text"),
    "empty hardware": (
        ["plan", "{config}", "--hardware", ""],
        "devices.hardware: got an empty text",
    ),
    "nothing fits": (["plan", "{config}", "--set", "devices.memory=8KiB"], "8 KiB"),
}


@pytest.fixture(scope="module")
def sequences(config: Path) -> Path:
    """A configuration that counts sequences."""
    path = config.with_name("sequences.toml")
    path.write_text(config.read_text().replace("batch_tokens = 1500", "batch_sequences = 4"))
    return path


@pytest.mark.parametrize("case", BAD)
def test_mistakes_are_one_message_on_stderr(case: str, config: Path, capsys) -> None:
    """Catches a traceback, an exit code of success, and words on stdout that a script would
    read as data."""
    arguments, text = BAD[case]
    code, out, err = call(capsys, *(a.replace("{config}", str(config)) for a in arguments))
    assert code == 2, err
    assert out == ""
    assert text in re.sub(r"[\s\u2502]+", " ", err), err
    assert "Traceback" not in err


def test_bad_toml_is_one_message(tmp_path: Path, capsys) -> None:
    """Catches the parser's own traceback."""
    (tmp_path / "bad.toml").write_text("[run\n")
    code, out, err = call(capsys, "plan", tmp_path / "bad.toml")
    assert (code, out) == (2, "")
    assert "bad.toml: got no TOML" in err


def test_lengths_are_drawn_as_the_configuration_makes_batches(sequences: Path, capsys) -> None:
    """Catches batches of tokens where the configuration counts sequences, and a curriculum that
    drawn lengths do not follow."""
    law = ("--lengths", "list:16/32/64/128/256", "--batches", 3, "--json")
    found = plans(call(capsys, "plan", sequences, *law)[1])
    assert [len(plan.lengths) for plan in found] == [4, 4, 4]
    curriculum = ["--set", "data.curriculum=short-to-long", "--set", "data.curriculum_steps=5"]
    found = plans(call(capsys, "plan", sequences, *law, *curriculum)[1])
    assert [len(plan.lengths) for plan in found] == [4, 4, 4]
    for plan, longest in zip(found, (16, 32, 64), strict=True):
        assert plan.lengths.longest <= longest


BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "psutil", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
"""
COMMANDS = """
import sys
import headrace, headrace.cli
for command in ("plan", "simulate"):
    code = headrace.cli.main([command, sys.argv[1], "--json"])
    assert code == 0, code
    code = headrace.cli.main([command, sys.argv[1], "--lengths", sys.argv[2]])
    assert code == 0, code
for kind, devices in (("hydraulis-7b", "32"), ("flexsp-7b-a100", "8")):
    files = ["--costs", f"benchmarks/published/{kind}.json", "--devices", devices,
             "--lengths", "benchmarks/fixtures/longtail-32k-100k.json"]
    assert headrace.cli.main(["plan", *files]) == 0
assert headrace.cli.main(["config"]) == 0
models = {"AxisExample", "AxisStage", "adapt", "attach", "compile", "profile", "recomputed"}
models |= {"train", "trainer", "gather", "split", "switch"}
for name in set(headrace.__all__) - models:
    getattr(headrace, name)
assert "torch" not in sys.modules
"""


def python(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=Path(__file__).parents[2],
    )


@pytest.mark.parametrize("blocked", ["", BLOCK], ids=["torch is left alone", "torch is absent"])
def test_planning_needs_no_torch(config: Path, blocked: str) -> None:
    """Catches an import of torch anywhere on the way, which laptops would pay for or lack."""
    done = python(blocked + COMMANDS, config, LENGTHS)
    assert done.returncode == 0, done.stderr


def test_training_without_torch_says_what_to_install(config: Path) -> None:
    """Catches a ModuleNotFoundError as a traceback."""
    code = BLOCK + "import headrace.cli; sys.exit(headrace.cli.main(['train', sys.argv[1]]))"
    done = python(code, config)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "needs the package torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_to_install_is_the_extra(config: Path) -> None:
    """Catches ``pip install 'headrace'``, which installs no torch."""
    code = BLOCK + "import headrace.cli; sys.exit(headrace.cli.main(['train', sys.argv[1]]))"
    assert "pip install 'headrace[train]'" in python(code, config).stderr
