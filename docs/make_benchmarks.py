"""Writes what the documentation says of results from the files of benchmarks/results.

docs/benchmarks.md is generated whole: every claim of the papers, and what headrace's own numbers
are. In README.md the lines between the marks ``<!-- NAME -->`` and ``<!-- end of NAME -->`` are.

docs/pictures/one-planner.svg is drawn from them, docs/_generated/search_numbers.md says what each
number of the search for plans gains, and docs/_generated/families.md which types of transformers
are exact.

python docs/make_benchmarks.py           write them
python docs/make_benchmarks.py --check   exit 1 when they are not as written
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from textwrap import shorten
from typing import Any

import benchmark_pictures as pictures

from headrace.units import bytes_text, seconds_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
PICTURE = ROOT / "docs" / "pictures" / "one-planner.svg"
NUMBERS = ROOT / "docs" / "_generated" / "search_numbers.md"
FAMILIES = ROOT / "docs" / "_generated" / "families.md"

PAPERS = {
    "paradyse": "ParaDySe",
    "dcp": "Data-Centric Parallel",
    "dsp": "DSP",
    "hydraulis": "Hydraulis",
    "autosp": "AutoSP",
}
"""Papers by the names of their results, in the order of the page."""

RESTRICTED = {
    "methods": "methods of layers (ParaDySe)",
    "sizes": "sizes of groups (FlexSP, DCP-inter)",
    "recompute": "recompute (DCP-intra's half)",
    "both": "sizes and recompute (DCP-intra)",
    "tensor": "tensor and pipeline parallel (Hydraulis)",
    "static": "nothing: the best static layout",
    "bucket": "bucket parallel",
    "packed": "packed parallel",
}
"""What a restricted planner chooses, by its name in the results."""

BOUND = "the same over the bound"

_WIDTH = 90
"""Characters of what is said of a type of models."""

_LUCK = 5e-4
"""Ratios that differ by less count as alike."""

RIVALS = {
    "script": "one size, method and recompute level for the run",
    "static": "one size for the run",
    "chosen": "one size for each batch, the best",
    "batch": "a power of two by the longest sequence of the batch",
    "micro": "the same by the longest of each micro-batch (Megatron-Core, verl, SkyRL)",
}
"""What sizes of groups are chosen by for rollouts, by their names in the results."""

METHODS = ("ulysses_z", "megatron_cz", "megatron_cz_gather", "megatron_ts", "metp")


def read(name: str) -> dict[str, Any]:
    """The results of a benchmark."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def machine(found: dict[str, Any]) -> str:
    """Where results are from."""
    own = found["machine"]
    return f"{own['cores']} cores of an {own['host_cpu']}, torch {own['torch'].partition('+')[0]}"


def rows(titles: Sequence[str], cells: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    yield f"| {' | '.join(titles)} |"
    yield f"|{'---|' * len(titles)}"
    for own in cells:
        yield f"| {' | '.join(own)} |"


# What README says.


def one_planner() -> Iterator[str]:
    """How much one planner gains over each paper's decisions alone."""
    found = read("papers/planner")["worlds"]
    keys = list(dict.fromkeys((world["model"], world["devices"]) for world in found))
    titles = ["what is chosen for a batch", *(f"{model.upper()} on {n:,}" for model, n in keys)]
    groups = [[w for w in found if (w["model"], w["devices"]) == key] for key in keys]
    cells = list[list[str]]()
    for name, text in RESTRICTED.items():
        overs = [
            [w["seconds"][name] / w["step_s"] for w in own if w["seconds"][name]] for own in groups
        ]
        cells.append([text, *(f"{geometric_mean(own):.2f}" if own else "none" for own in overs)])
    best = [[min(filter(None, w["seconds"].values())) for w in own] for own in groups]
    for text, under in (("the best of these for each batch", "step_s"), (BOUND, "bound_s")):
        ratios = [
            [s / w[under] for s, w in zip(seconds, own, strict=True)]
            for seconds, own in zip(best, groups, strict=True)
        ]
        cells.append([f"*{text}*", *(f"{geometric_mean(own):.2f}" for own in ratios)])
    laws = len({world["law"] for world in found})
    over = [min(filter(None, w["seconds"].values())) / w["step_s"] for w in found]
    behind = [one for one in over if one < 1 - _LUCK]
    yield (
        "One planner decides all that the papers decide apart. How many times as long steps take"
        " where less is chosen, on H100s by the roofline, geometric means over"
        f" {len(found)} batches of {laws} data sets (`headrace papers planner`):"
    )
    yield ""
    yield from rows(titles, cells)
    yield ""
    yield (
        "The last row is what no planner with these costs could exceed. A search can be unlucky:"
        f" {len(behind)} of the batches take longer than with the best of these, by up to"
        f" {_percent(1 - min(behind))}."
    )


def picture() -> str:
    """The table of :func:`one_planner` with what single batches give, least to most."""
    found = read("papers/planner")["worlds"]
    marks = [
        {
            "what": text,
            "model": f"{model.upper()} on {devices:,}",
            "least": min(overs),
            "mean": geometric_mean(overs),
            "most": max(overs),
        }
        for model, devices in dict.fromkeys((w["model"], w["devices"]) for w in found)
        for name, text in RESTRICTED.items()
        if (
            overs := [
                w["seconds"][name] / w["step_s"]
                for w in found
                if (w["model"], w["devices"]) == (model, devices) and w["seconds"][name]
            ]
        )
    ]
    return pictures.one_planner(marks, list(RESTRICTED.values()))


def main_job() -> Iterator[str]:
    """The main job beside static choices and DistributedDataParallel."""
    found = read("main_job")
    own = found["side_by_side"]
    rate = {name: own["tokens"] / seconds for name, seconds in own["seconds"].items()}
    ours = rate["adaptive"]
    yield (
        f"The main job, {len(own['lengths'])} batches of 24Ki tokens with sequences of up to 8,192,"
        f" side by side in one run (`python benchmarks/main_job.py`; {found['ranks']} ranks over"
        f" gloo, {machine(found)}). headrace trains {ours:,.0f} tokens a second, which is"
    )
    yield ""
    others = {
        "ddp padded": "DistributedDataParallel with padding",
        "ddp packed": "DistributedDataParallel with packing",
        "static cp1": "groups of one always",
        "static cp2": "groups of two always",
    }
    for name, text in others.items():
        yield f"- {ours / rate[name]:.2f} times as fast as {text} ({rate[name]:,.0f} tokens/s)"
    yield ""
    alone = found["one_rank"]["seconds"]
    yield (
        "Two ranks of one machine talk nearly for free, so there is little to gain over the best"
        " static choice. On one rank it is"
        f" {alone['hand-written'] / alone['headrace']:.2f} times as fast as a hand-written"
        " loop over the plain model."
    )


def methods() -> Iterator[str]:
    """Each method beside torch's own parallelism of its kind."""
    case = next(c for c in read("methods")["cases"] if (c["case"], c["ranks"]) == ("model", 4))
    yield (
        "Each method against torch's own parallelism of its kind, four layers of 512 features,"
        f" weights sharded, {case['ranks']} ranks on the same cores"
        " (`python benchmarks/methods.py`):"
    )
    yield ""
    against = {row["name"]: row for row in case["against_torch"]}
    yield from rows(
        (
            "method",
            "torch's best of the kind",
            "times as fast, by CPU seconds",
            "of its bytes sent",
            "of its peak memory",
        ),
        (
            (
                f"`{name}`",
                against[name]["torch"],
                f"{1 / against[name]['cpu_ratio']:.2f}",
                f"{against[name]['sent_ratio']:.0%}".replace("%", " %"),
                f"{against[name]['peak_ratio']:.0%}".replace("%", " %"),
            )
            for name in METHODS
        ),
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _span(shares: Sequence[float]) -> str:
    return f"{100 * min(shares):.2g} to {_percent(max(shares))}"


def pipelines() -> Iterator[str]:
    """Leads over planners of others by Hydraulis' published costs."""
    over = {
        "over_best": "the best of planners like Megatron's, DeepSpeed's and HotSPa's",
        "over_homogeneous": "the best of all six planners of one scheme",
        "over_hydraulis": "Hydraulis' own planner",
        "over_hydraulis_tuned": "the same in its strongest form (`hydraulis-tuned`)",
    }
    found = read("hetero")
    sides = [found["scenarios"], found["context"]]
    yield (
        f"By Hydraulis' published costs, in {len(sides[0]['rows'])} scenarios of 8 to 64 devices,"
        " steps of others take so many times as long (`python benchmarks/hetero.py`; geometric"
        " means, least to most):"
    )
    yield ""
    yield from rows(
        ("planner", "one scheme a sequence", "with context parallelism, costs by a rule"),
        (
            (text, *(_ratios([row[name] for row in side["rows"]]) for side in sides))
            for name, text in over.items()
        ),
    )


def _ratios(numbers: Sequence[float]) -> str:
    return f"{geometric_mean(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def truth() -> Iterator[str]:
    """How far predictions are off."""
    ranks = read("hetero")["ranks"]
    simulated = {
        n: median(
            abs(p / m - 1)
            for one in found["strategies"].values()
            for p, m in zip(one["predicted_s"], one["measured_s"], strict=True)
        )
        for n, found in ranks.items()
    }
    errors = [
        error
        for world in read("costs")["worlds"]
        for error in world["errors"]
        if error["model"] == "quadratic"
    ]
    seconds = [error["median"] for error in errors if error["target"].endswith("_s")]
    sizes = [error["median"] for error in errors if error["target"].endswith("_bytes")]
    rehearsed = [
        median(abs(row["ratio"] - 1) for row in case["rows"] if row["ratio"])
        for case in read("rehearsal")["cases"]
    ]
    published = [
        abs(row["ratio"] - 1)
        for row in read("forecasts")["rows"]
        if row["what"] == "tokens/s" and not row["fitted"]
    ]
    yield (
        f"Predictions: the simulator's step is off by {_percent(simulated['2'])} in the median with"
        f" one core a rank, by {_percent(simulated['4'])} with four ranks on two cores. At lengths"
        f" left out of the fit seconds are off by {_span(seconds)} in the median, bytes by at most"
        f" {_percent(max(sizes))} (`python benchmarks/costs.py`); a rehearsed rank by"
        f" {_span(rehearsed)} (`python benchmarks/rehearsal.py`); forecasts for hardware that is"
        f" not at hand by {_percent(median(published))} in the median"
        f" and {_percent(max(published))} at most of the tokens per second of {len(published)}"
        " published runs that nothing was fitted to (`python benchmarks/forecasts.py`)."
    )


def rollouts() -> Iterator[str]:
    """What planning each batch of rollouts gains, forwards alone and steps."""
    found = read("rollouts")
    cells, measured = found["cells"], found["measured"]
    keys = list(dict.fromkeys((cell["model"], cell["kind"]) for cell in cells))
    groups = [[c for c in cells if (c["model"], c["kind"]) == key] for key in keys]
    yield (
        f"Rollouts, {found['devices']} H100 by the roofline: how many times as long forwards and"
        " steps take where the sizes of groups are chosen otherwise, and headrace decides all else,"
        " but for the first row. Lengths as in DAPO and log-normal ones with medians of 2K, 4K and"
        " 8K up to 64K, 128 and 512 sequences a batch; geometric means, least to most"
        " (`python benchmarks/rollouts.py`):"
    )
    yield ""
    yield from rows(
        ("sizes", *(f"{model.upper()}, {kind}" for model, kind in keys)),
        [
            *(
                (text, *(_ratios(_over(own, name)) for own in groups))
                for name, text in RIVALS.items()
            ),
            ("*headrace over the bound*", *(_ratios(_above_bound(own)) for own in groups)),
        ],
    )
    yield ""
    said = list[str]()
    for one in measured:
        for kind, seconds in one["seconds"].items():
            ours = seconds["headrace"]
            each = [
                f"{name} {_ratios([a / b for a, b in zip(own, ours, strict=True)])}"
                for name, own in seconds.items()
                if name != "headrace"
            ]
            said.append(f"{one['ranks']} ranks, {kind}: {', '.join(each)}")
    yield (
        "Measured with a tiny Llama beside static sizes, in one run each, ranks of one machine over"
        f" gloo ({machine(found)}): {'; '.join(said)}. Four ranks share two cores: what one leaves"
        " idle another uses, so there the work of all counts and not who ends last, and groups of"
        " one win, which exchange nothing."
    )


def _over(cells: Sequence[dict[str, Any]], name: str) -> list[float]:
    """How many times as long as headrace's plans those of a rival take."""
    return [
        a / b
        for cell in cells
        for a, b in zip(cell["seconds"].get(name, ()), cell["ours_s"], strict=False)
    ]


def _above_bound(cells: Sequence[dict[str, Any]]) -> list[float]:
    return [a / b for cell in cells for a, b in zip(cell["ours_s"], cell["bound_s"], strict=True)]


def switches() -> Iterator[str]:
    """What changes of plans take and leave equal."""
    change_s = max(
        world["summary"]["change_s"]
        for world in read("switching")["worlds"]
        if world["summary"]["change_s"]
    )
    apart = read("convergence")["apart"]["worst"]
    yield (
        f"A change of method takes {seconds_text(change_s)} for four layers at most"
        " (`python benchmarks/switching.py`). Two hundred steps with another strategy each give the"
        f" losses of a static one to {apart:.1e} (`python benchmarks/convergence.py`)."
    )


def text_of(*parts: Iterator[str]) -> str:
    """Paragraphs and tables, with a line between them."""
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def sections() -> dict[str, str]:
    """README's generated lines by name."""
    return {
        "gains": text_of(one_planner()),
        "measured": text_of(main_job(), methods(), pipelines(), truth(), switches()),
    }


# The page of all claims.


def _number(number: float | list[float] | None, unit: str) -> str:
    if number is None:
        return "not given"
    if isinstance(number, list):
        return f"{_number(number[0], unit)} to {_number(number[1], unit)}"
    if unit == "bytes":
        return bytes_text(round(number))
    if unit == "fraction":
        return _percent(number)
    if unit == "tokens":
        return f"{number:,.0f}"
    if unit == "s":
        return seconds_text(number)
    return f"{number:,.3g}{'' if unit == 'times' else f' {unit}'}"


def claims(name: str) -> Iterator[str]:
    """A table of a paper's claims."""
    found = read(f"papers/{name}")
    own = found["claims"]
    known = [row for row in own if row["verdict"]]
    counts = {
        word: sum(row["verdict"] == word for row in known) for word in ("ahead", "even", "behind")
    }
    yield (
        f"{len(own)} rows, {len(known)} of which have a number to compare with:"
        f" {counts['ahead']} ahead, {counts['even']} even, {counts['behind']} behind."
        f" `headrace papers {name}` makes them; {machine(found)}."
    )
    yield ""
    yield from rows(
        ("claim", "theirs", "ours", "ratio", "", "how", "why"),
        (
            (
                f"{row['where']}: {row['what']}".replace("|", "/"),
                _number(row["theirs"], row["unit"]),
                _number(row["ours"], row["unit"]),
                "" if row["ratio"] is None else f"{row['ratio']:.2f}",
                row["verdict"],
                f"{row['how']}, {row['costs']}".replace("|", "/"),
                row["why"].replace("|", "/"),
            )
            for row in own
        ),
    )


def page() -> str:
    """docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        "Made by `docs/make_benchmarks.py` from the files in `benchmarks/results`; every number"
        " here and between the marks in README.md is from them. `make benchmarks` runs those"
        " of the papers anew.",
        "",
        "Each row of a paper says what it claims, what headrace gets, and how many times as good"
        " that is (of what should be small: how many times as small). *Simulated* rows are by the"
        " costs that are named; nothing here ran on a GPU unless it says so.",
        "",
        "## headrace's own",
        "",
        sections()["gains"],
        "![Steps of restricted planners over ours, least, mean and most](pictures/one-planner.svg)",
        "",
        sections()["measured"],
        text_of(rollouts()),
    ]
    for name, title in {**PAPERS, "planner": "One planner beside each paper alone"}.items():
        if (RESULTS / "papers" / f"{name}.json").exists():
            lines += [f"## {title}", "", *claims(name), ""]
    return "\n".join(line.rstrip() for line in lines).rstrip("\n") + "\n"


_SEEN = 5e-4
"""A number is shown where some step gets longer by this share."""


def search_numbers() -> str:
    """docs/_generated/search_numbers.md: what numbers of the search gain: by how much steps are
    longer without them, and of those that change no step how gaps and times of planning change."""
    found = read("search_numbers")["numbers"]
    shown = [row for row in found if any(_matters(row, way) for way in ("smaller", "larger"))]
    others = [row for row in found if row not in shown]
    return "\n".join(
        [
            *_numbers_table(shown, ("mean", "worst"), _lost),
            "",
            "With the others no step gets longer by 0.05 %. They change how wide gaps are, in the "
            "mean, and how long planning takes:",
            "",
            *_numbers_table(others, ("gap", "time"), _spent),
            "",
        ]
    )


def _numbers_table(
    found: Iterable[dict[str, Any]],
    titles: tuple[str, str],
    cells: Callable[[dict[str, Any]], tuple[str, str]],
) -> list[str]:
    """A table of numbers of the search, with two ``cells`` for each way to change one."""
    lines = []
    for row in found:
        line = [f"`{row['number']}`", row["value"].replace("|", "/")]
        for way in ("smaller", "larger"):
            value = row[way]["value"].replace("|", "/") if way in row else ""
            line += [value, *(cells(row[way]) if way in row else ("", ""))]
        lines.append(line)
    return [*rows(("number", "is", "smaller", *titles, "larger", *titles), lines)]


def _matters(row: dict[str, Any], way: str) -> bool:
    """Whether a number makes some step longer when it is changed in a way."""
    return way in row and row[way]["all"]["worst"] >= _SEEN


def _lost(changed: dict[str, Any]) -> tuple[str, str]:
    """(mean loss, worst loss and the group of its world) of a number that is changed."""
    groups = {name: own for name, own in changed.items() if name not in ("value", "all")}
    worst = max(groups, key=lambda name: groups[name]["worst"])
    whole = changed["all"]
    return f"{100 * whole['mean']:+.3f} %", f"{100 * whole['worst']:.2f} % ({worst})"


def _spent(changed: dict[str, Any]) -> tuple[str, str]:
    """(points by which gaps are wider, ratio of times of planning) of a number that is changed."""
    whole = changed["all"]
    return f"{100 * whole['gap']:+.3f}", f"{whole['cpu']:.2f}"


def families() -> str:
    """docs/_generated/families.md: which types of transformers are exact, and why others are
    not."""
    found = read("families")
    types = found["types"]
    exact = [row for row in types if row["verdict"] == "exact"]
    others = [row for row in types if row["verdict"] != "exact"]
    worst = max(row["worst"] for row in exact)
    lines = [
        f"Of the {len(types)} types of transformers {found['transformers']} for causal or masked"
        f" language modelling, or for texts and images, tiny models of {len(exact)} are exact on"
        f" {found['ranks']} ranks (to {worst:.0e}; norms and rotary embeddings of transformers are"
        " single precision):",
        "",
        ", ".join(f"`{row['type']}`" for row in exact) + ".",
        "",
        "The others, with what is said:",
        "",
        "```text",
        *(f"{row['type']:<26}{_said(row)}" for row in others),
        "```",
        "",
    ]
    return "\n".join(lines)


def _said(row: dict[str, Any]) -> str:
    """What is said of a type that is not exact, in a line."""
    if row["verdict"] == "off":
        return f"off by {row['worst']:.1e} of a gradient"
    if row["verdict"] == "no answer":
        return "no answer"
    what, _, got = row["why"].partition(": got ")
    got = got.partition(", wanted")[0]
    return shorten(got or what, _WIDTH, placeholder=" ...")


def readme() -> str:
    """README.md with its generated lines made anew."""
    text = README.read_text(encoding="utf-8")
    for name, lines in sections().items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"README.md: no lines between {begin.strip()} and {end.strip()}")
        text = f"{before}{begin}{lines}{end}{after}"
    return text


def main() -> int:
    """Write or check all of them."""
    stale = list[str]()
    written = {
        PAGE: page(),
        README: readme(),
        PICTURE: picture(),
        NUMBERS: search_numbers(),
        FAMILIES: families(),
    }
    for path, text in written.items():
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
    if stale:
        print(f"{', '.join(stale)}: not as the results say; run python docs/make_benchmarks.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
