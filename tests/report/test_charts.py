"""The figures as data: what is in them, whatever the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.report.records import RecordedStep, Run
from headrace.report.run_reader import read_run
from headrace.report.run_summary import summed_up
from headrace.spec import Row, Timeline
from report.fake_run import fake_run, layered_run

pytest.importorskip("altair")
from headrace.report.captions import layers_caption, options_caption, strategies_caption
from headrace.report.charts.figures import FIGURES
from headrace.report.charts.gantt import bars, gantt
from headrace.report.charts.layer_chart import layer_options, options_over_steps
from headrace.report.charts.length_charts import bin_label, length_histogram, placement_map
from headrace.report.charts.predictions import cost_fit, predicted_against_measured
from headrace.report.charts.step_charts import strategies_over_steps
from headrace.report.charts.theme import KINDS, OPTIONS, OTHERS, group_scale, log_ticks, second_unit
from headrace.report.layer_use import layer_use


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return read_run(folder)


def walk(value: Any) -> Iterator[dict[str, Any]]:
    """All objects of a specification."""
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


@pytest.mark.parametrize(
    "how",
    [
        {"steps": 1, "ranks": 1},
        {"steps": 2, "ranks": 3, "nan_at": (0, 1)},
        {"steps": 15, "ranks": 2, "recorded": 0, "plans": False, "nan_at": (3,)},
    ],
)
def test_any_run_can_be_drawn(tmp_path: Path, how: dict[str, Any]) -> None:
    """Catches empty scales, division by nothing and NaN in the specification."""
    run = read_run(fake_run(tmp_path / "run", **how))
    drawn = [figure for figure in FIGURES if figure.known(run)]
    alike = len({step.planned.strategy for step in run.steps}) == 1
    assert len(drawn) == len(FIGURES) - (how.get("recorded") == 0) - alike
    for figure in drawn:
        json.dumps(figure.draw(run).to_dict(), allow_nan=False)
        assert figure.caption(summed_up(run)).endswith(".")
        assert "nan" not in figure.caption(summed_up(run))


def test_points_without_a_prediction_are_gaps(run: Run) -> None:
    """Catches NaN in the page, which no browser can read."""
    points = [replace(point, predicted_s=nan) for point in run.facts.costs.points]
    costs = replace(run.facts.costs, points=(*points[:3], *run.facts.costs.points[3:]))
    partly = replace(run, facts=replace(run.facts, costs=costs))
    json.dumps(cost_fit(partly).to_dict(), allow_nan=False)


def test_lines_of_long_runs_are_thinned(tmp_path: Path) -> None:
    """Catches a page that grows with the run."""
    there = fake_run(tmp_path / "run", steps=5)
    rows = [json.loads(line) for line in (there / "metrics.jsonl").read_text().splitlines()]
    with (there / "metrics.jsonl").open("w") as file:
        for step in range(6000):
            file.write(json.dumps({**rows[step % 5], "step": step}) + "\n")
    run = read_run(there)
    for figure in FIGURES:
        spec = figure.draw(run).to_dict()
        series = 2 if figure.name == "gap" else 1
        assert max(len(rows) for rows in spec["datasets"].values()) <= 2000 * series


def test_histogram_shows_all_documents_and_all_tokens(run: Run) -> None:
    """Catches bins dropped at the ends."""
    rows = next(
        rows
        for rows in length_histogram(run.facts.corpus).to_dict()["datasets"].values()
        if "documents" in rows[0]
    )
    assert sum(row["documents"] for row in rows) == pytest.approx(1)
    assert sum(row["tokens"] for row in rows) == pytest.approx(1)
    assert sum(row["count"] for row in rows) == sum(run.facts.corpus.counts)


def test_every_length_is_placed_once(run: Run) -> None:
    """Catches shares taken over the whole map instead of a length's own sequences."""
    datasets = placement_map(run).to_dict()["datasets"].values()
    cells = next(rows for rows in datasets if "share" in rows[0])
    for label in {row["length"] for row in cells}:
        assert sum(row["share"] for row in cells if row["length"] == label) == pytest.approx(1)


LAYER_FIGURES = (layer_options, options_over_steps)


def rows_of(drawing: Any) -> list[dict[str, Any]]:
    """The only data set of a figure."""
    (rows,) = drawing.to_dict()["datasets"].values()
    return rows  # type: ignore[no-any-return]


def colors_of(drawing: Any) -> dict[str, str]:
    """Colours by option, in the order of the legend."""
    scale = drawing.to_dict()["encoding"]["color"]["scale"]
    return dict(zip(scale["domain"], scale["range"], strict=True))


def text_of(layers: int) -> str:
    """A layer plan of as many options, the first of them most used."""
    return " ".join(f"{2 * layers - i}*m{i:02}" for i in range(layers))


@pytest.mark.parametrize(
    ("draw", "column"), [(layer_options, "layer"), (options_over_steps, "from")]
)
def test_options_are_stacked_to_the_whole(run: Run, draw: Any, column: str) -> None:
    """Catches holes and overlaps in a bar, and a stack in another order than the legend."""
    rows, order = rows_of(draw(run)), list(colors_of(draw(run)))
    places = {row[column] for row in rows}
    assert places == set(range(8 if column == "layer" else 40))
    for place in places:
        bar = [row for row in rows if row[column] == place]
        ends = [0.0, *(row["high"] for row in bar)]
        assert [row["low"] for row in bar] == ends[:-1]
        assert ends[-1] == 1
        assert [row["share"] for row in bar] == pytest.approx(np.diff(ends))
        assert sorted(bar, key=lambda row: order.index(row["option"])) == bar


def test_layer_bars_hold_the_tokens_of_the_run(run: Run) -> None:
    """Catches bars of the wrong option or layer."""
    rows = rows_of(layer_options(run))
    drawn = {(row["layer"], row["option"]): row["tokens"] for row in rows}
    use = layer_use(run)
    palette = colors_of(layer_options(run))
    for layer, tokens in enumerate(use.tokens):
        for option, count in tokens.items():
            if str(option) in palette:
                assert drawn[layer, str(option)] == count
    assert sum(drawn.values()) == 8 * sum(step.tokens for step in run.steps)


def test_both_layer_figures_colour_an_option_alike(run: Run) -> None:
    """Catches colours given by first appearance."""
    first, second = map(colors_of, (draw(run) for draw in LAYER_FIGURES))
    assert first == second
    assert list(first)[:8] == [str(option) for option in layer_use(run).shares][:8]


@pytest.mark.parametrize(
    ("options", "others"), [(7, ""), (8, ""), (9, "1 other"), (12, "4 others")]
)
@pytest.mark.parametrize("draw", LAYER_FIGURES)
def test_options_beyond_the_palette_are_one(
    tmp_path: Path, draw: Any, options: int, others: str
) -> None:
    """Catches colours that repeat, tokens left out, and a grey name without any option."""
    text = text_of(options)
    run = read_run(layered_run(tmp_path / "run", [(text, 5)], [(text, 7)]))
    colors = colors_of(draw(run))
    wanted = {f"m{i:02}": OPTIONS[i] for i in range(min(options, 8))}
    assert list(colors.items()) == [*wanted.items(), *([(others, OTHERS)] if others else [])]
    rows = rows_of(draw(run))
    assert {row["option"] for row in rows} == set(colors)
    count = "tokens" if draw is layer_options else "count"
    layers = sum(2 * options - i for i in range(options))
    assert sum(row[count] for row in rows) == 12 * layers


def test_layers_of_different_depth_have_whole_bars(tmp_path: Path) -> None:
    """Catches shares taken over the tokens of the run, of which few reach the last layers."""
    run = read_run(layered_run(tmp_path / "run", [("1*a", 6), ("3*b", 2)]))
    rows = rows_of(layer_options(run))
    drawn = [(row["layer"], row["option"], row["tokens"], row["low"], row["high"]) for row in rows]
    assert drawn == [
        (0, "a", 6, 0, 0.5 + 0.25),
        (0, "b", 2, 0.75, 1),
        (1, "b", 2, 0, 1),
        (2, "b", 2, 0, 1),
    ]


def test_steps_of_a_long_run_share_bars(tmp_path: Path) -> None:
    """Catches bars too thin to see, and steps beside the axis."""
    run = read_run(layered_run(tmp_path / "run", [("2*a", 3)], [("2*b", 5)]))
    steps = tuple(replace(run.steps[i % 2], step=i) for i in range(1000))
    long = replace(run, steps=steps)
    rows = rows_of(options_over_steps(long))
    lefts = sorted({row["left"] for row in rows})
    assert lefts == [5 * i - 0.5 for i in range(200)]
    assert [row["right"] for row in rows] == [row["left"] + 5 for row in rows]
    domain = options_over_steps(long).to_dict()["encoding"]["x"]["scale"]["domain"]
    assert domain == [-0.5, 999.5]
    assert sum(row["count"] for row in rows) == 2 * (3 + 5) * 500


def test_few_steps_have_a_tick_each(tmp_path: Path) -> None:
    """Catches an axis that counts from -1 to 1 under the only step."""
    run = read_run(layered_run(tmp_path / "run", [("2*a", 3)]))
    axis = options_over_steps(run).to_dict()["encoding"]["x"]["axis"]
    assert axis["values"] == [0]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("1*a 1*b 1*c 1*d", 4),
        ("1*megatron_cz_gather/megatron_ts+attention 1*ulysses_ring/tensor_ring+attention", 1),
        ("1*megatron_cz_gather/megatron_ts+attention 1*ulysses_z+attention 1*metp+attention", 2),
        ("1*megatron_cz_gather/megatron_ts+attention 1*a 1*b", 3),
    ],
)
def test_a_legend_is_as_wide_as_its_names(tmp_path: Path, text: str, columns: int) -> None:
    """Catches names cut off, and names in one tall column that would fit beside each other."""
    run = read_run(layered_run(tmp_path / "run", [(text, 3)]))
    heights = set()
    for draw in LAYER_FIGURES:
        spec = draw(run).to_dict()
        assert spec["encoding"]["color"]["legend"]["columns"] == columns
        heights.add(spec["height"])
    assert len(heights) == 1


def test_captions_of_layers_by_hand(tmp_path: Path) -> None:
    """Catches shares of the wrong layer, and changes of steps told as changes of layers."""
    steps = [[("1*a+full 2*a", 30), ("1*a 2*b", 10)], [("3*a", 40)], [("3*a", 20)]]
    run = read_run(layered_run(tmp_path / "run", *steps))  # type: ignore[arg-type]
    assert layers_caption(summed_up(run)) == (
        "Layers differ most in a+full: 0 % of the tokens in layer 1, 30 % in layer 0; methods "
        "changed once between layers of a micro-batch."
    )
    assert options_caption(summed_up(run)) == (
        "a did 83 % of all token-layers (tokens times layers); in 1 of 2 steps after the first "
        "some layer ran other methods than in the step before."
    )


@pytest.mark.parametrize(
    ("step", "caption"),
    [
        ([("4*a", 3)], "Every layer used a for all of its tokens."),
        (
            [("2*a", 3), ("2*b", 1)],
            "All layers used the same mix; methods never changed between layers of a micro-batch.",
        ),
        (
            [("1*a 1*b 1*a", 1)] * 600,
            "Layers differ most in a: 0 % of the tokens in layer 1, 100 % in layer 0; methods "
            "changed 1,200 times between layers of a micro-batch.",
        ),
    ],
)
def test_captions_of_simple_runs(tmp_path: Path, step: Any, caption: str) -> None:
    """Catches a sentence about differences where there are none."""
    assert layers_caption(summed_up(read_run(layered_run(tmp_path / "run", step)))) == caption


def test_caption_of_one_step_does_not_speak_of_others(tmp_path: Path) -> None:
    """Catches '0 of 0 steps'."""
    run = read_run(layered_run(tmp_path / "run", [("1*a 3*b", 2)]))
    assert (
        options_caption(summed_up(run)) == "b did 75 % of all token-layers (tokens times layers)."
    )


def test_runs_without_layer_plans_have_no_layer_figures(tmp_path: Path) -> None:
    """Catches empty figures, and a crash on runs of before layers were written."""
    run = read_run(layered_run(tmp_path / "run", [(None, 2)]))
    names = {figure.name for figure in FIGURES if figure.known(run)}
    assert not {"layers", "options"} & names
    assert {"loss", "throughput"} <= names


def test_bins_are_named_by_their_upper_end() -> None:
    assert [bin_label(b) for b in (0, 9, 10, 15, 20)] == ["1", "512", "1K", "32K", "1M"]


def test_panels_of_a_step_share_one_time_axis(run: Run) -> None:
    """Catches a static plan that looks as short as the others."""
    assert run.recorded is not None
    spec = gantt(run.recorded, "1*cp4").to_dict()
    domains = [panel["encoding"]["x"]["scale"]["domain"] for panel in spec["vconcat"]]
    assert len(domains) == 3
    assert domains[0] == domains[1] == domains[2]
    longest = max(run.recorded.measured.seconds, run.recorded.static.seconds)  # type: ignore[union-attr]
    assert domains[0][1] == pytest.approx(longest * second_unit([longest]).factor)
    assert "best static plan 1*cp4" in json.dumps(spec)


def test_bars_are_the_rows_over_grey_ground(run: Run) -> None:
    """Catches lost rows, and communication drawn over the computation that hides it."""
    assert run.recorded is not None
    timeline = run.recorded.measured
    drawn = bars(timeline, 10_000, 1.0)
    assert [bar["rank"] for bar in drawn[:4]] == [0, 1, 2, 3]
    assert all(bar["kind"] == "idle" for bar in drawn[:4])
    assert sorted(bar["action"] for bar in drawn[4:]) == sorted(r.action for r in timeline.rows)
    kinds = [bar["kind"] for bar in drawn[4:]]
    last_pull = max(i for i, kind in enumerate(kinds) if kind == "pull")
    assert last_pull < kinds.index("forward")


def test_steps_are_coloured_by_their_strategy(run: Run) -> None:
    """Catches a strategy without a colour of its own, rare ones that take those of others, and
    a legend that names what no step ran."""
    names = [f"{n}*cp1 + 1*tp{n + 1}" for n in range(1, 12)]
    steps = [
        replace(step, planned=replace(step.planned, strategy=names[min(number, len(names) - 1)]))
        for number, step in enumerate(run.steps)
    ]
    spec = strategies_over_steps(replace(run, steps=tuple(steps))).to_dict()
    scale = next(o["scale"] for o in walk(spec) if "legend" in o and "scale" in o)
    assert len(scale["domain"]) == len(scale["range"]) == len(set(scale["range"]))
    rows = next(iter(spec["datasets"].values()))
    assert {row["shown"] for row in rows} == set(scale["domain"])
    assert [row["strategy"] for row in rows] == [step.planned.strategy for step in steps]
    caption = strategies_caption(summed_up(replace(run, steps=tuple(steps))))
    assert caption.count("of the steps") == min(3, len(set(names[: len(steps)])))


def test_waits_and_messages_have_bars_of_their_own() -> None:
    """Catches a wait for weights hidden below the forward that waits, and kinds without a
    colour."""
    rows = (
        Row(rank=0, action="P0", kind="pull", start_s=1, end_s=2),
        Row(rank=0, action="0F0[0]", kind="forward", start_s=0, end_s=4, waited_s=1),
        Row(rank=0, action="Sa0>1*9", kind="send", start_s=4, end_s=5),
        Row(rank=0, action="Rg0<1*9", kind="recv", start_s=5, end_s=7),
        Row(rank=0, action="X(Sa1>1*9,Rg1<1*9)", kind="exchange", start_s=7, end_s=9),
    )
    timeline = Timeline(source="measured", rows=rows, devices=1)
    drawn = [(bar["kind"], bar["from"], bar["to"]) for bar in bars(timeline, 100, 1.0)]
    assert sorted(drawn) == [
        ("forward", 0, 1),
        ("forward", 2, 4),
        ("idle", 0, 9),
        ("message", 4, 5),
        ("message", 5, 7),
        ("message", 7, 9),
        ("pull", 1, 2),
    ]
    joined = bars(timeline, 5, 1.0)
    assert ("message", 9) in [(bar["kind"], bar["to"]) for bar in joined]
    spec = gantt(RecordedStep(step=0, measured=timeline, predicted=timeline)).to_dict()
    kinds = {row["kind"] for rows in spec["datasets"].values() for row in rows}
    assert kinds <= set(KINDS)


def many_rows(ranks: int, per_rank: int) -> Timeline:
    kinds = ("forward", "backward")
    rows = tuple(
        Row(
            rank=rank,
            action=f"{i}",
            kind=kinds[i // 40 % 2],
            start_s=i * 1e-3,
            end_s=i * 1e-3 + 1e-3,
        )
        for rank in range(ranks)
        for i in range(per_rank)
    )
    return Timeline(source="measured", rows=rows, devices=ranks)


def test_many_bars_are_joined_and_keep_their_time() -> None:
    """Catches a page of a hundred thousand bars, and aggregation that moves time between kinds."""
    timeline = many_rows(8, 4000)
    drawn = bars(timeline, 3000, 1.0)
    assert len(drawn) <= 3000
    for rank in range(8):
        took = {
            kind: sum(b["to"] - b["from"] for b in drawn if b["rank"] == rank and b["kind"] == kind)
            for kind in ("forward", "backward")
        }
        assert took["forward"] == pytest.approx(2.0, abs=0.02)
        assert took["backward"] == pytest.approx(2.0, abs=0.02)


def test_idle_time_stays_idle_when_joined() -> None:
    """Catches gaps filled by their neighbours."""
    rows = tuple(
        Row(rank=0, action=str(i), kind="forward", start_s=i * 1e-3, end_s=(i + 1) * 1e-3)
        for i in [*range(1000), *range(3000, 4000)]
    )
    drawn = bars(Timeline(source="measured", rows=rows, devices=1), 101, 1.0)
    spans = [(bar["from"], bar["to"]) for bar in drawn if bar["kind"] == "forward"]
    assert spans == [(0, pytest.approx(1.0, abs=0.05)), (pytest.approx(3.0, abs=0.05), 4.0)]


def test_very_many_ranks_are_sampled() -> None:
    """Catches a figure taller than a screen can hold."""
    drawn = bars(many_rows(1024, 3), 10_000, 1.0)
    ranks = {bar["rank"] for bar in drawn}
    assert len(ranks) == 128
    assert {0, 1023} <= ranks


def test_one_group_size_has_one_colour(run: Run) -> None:
    """Catches two figures that colour the same number of ranks differently."""
    scales = []
    for figure in (predicted_against_measured(run), cost_fit(run)):
        for part in walk(figure.to_dict()):
            scale = part.get("scale", {})
            if isinstance(scale, dict) and str(scale.get("range", [""])[0]).startswith("#7ad"):
                scales.append((tuple(scale["domain"]), tuple(scale["range"])))
    assert len(scales) >= 2
    assert len(set(scales)) == 1


def test_group_colours_are_distinct_and_ordered() -> None:
    scale = group_scale([4, 1, 2, 8]).to_dict()
    assert scale["domain"] == [1, 2, 4, 8]
    assert len(set(scale["range"])) == 4


# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
_BLIND = {
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
}


@pytest.mark.parametrize("eye", _BLIND)
@pytest.mark.parametrize(
    "colors", [tuple(KINDS.values()), (*OPTIONS, OTHERS)], ids=["kinds", "layer options"]
)
def test_colours_stay_apart_for_the_colour_blind(eye: str, colors: tuple[str, ...]) -> None:
    """Catches a new colour that some readers cannot tell from another."""
    labs = [_lab(color, np.array(_BLIND[eye])) for color in colors]
    apart = min(np.linalg.norm(a - b) for i, a in enumerate(labs) for b in labs[:i])
    assert apart > 12


def _lab(color: str, matrix: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(matrix @ linear, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    x, y, z = np.cbrt(to_xyz @ seen / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("low", "high"), [(1, 1000), (300, 700), (1e-5, 1e3), (16, 16384)])
def test_log_axes_have_some_ticks_inside(low: float, high: float) -> None:
    """Catches an axis without a number on it."""
    ticks = log_ticks(low, high)
    assert 1 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)
