"""The page of planners compared over several batches: one HTML file that needs no network.
Importing this module needs the packages of the extra ``report``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import vl_convert

from headrace.data.length_summary import summarise_lengths
from headrace.errors import ConfigError
from headrace.report.captions import lengths_text
from headrace.report.charts.comparison_charts import (
    gap_of_batches,
    mean_steps,
    rates,
    seconds_of_batches,
)
from headrace.report.charts.length_charts import Assigned, length_histogram, size_map
from headrace.report.headline import Card
from headrace.report.html_page import DrawnFigure, html_page, sections_of, write_page
from headrace.report.records import CorpusStatistics
from headrace.report.run_reader import length_bin
from headrace.report.run_summary import known, share_text
from headrace.spec.comparison import HEADINGS, Comparison
from headrace.spec.given import require_place
from headrace.units import count_text, counted, seconds_text

__all__ = ["require_page", "write_comparison"]

_SECONDS, _LENGTHS = "What each batch takes", "The lengths and where they go"


def require_page(path: Path) -> None:
    """Raise ConfigError where no page can be written."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"--page {path}", got=f"ending {path.suffix!r}", wanted=".html")
    require_place(f"--page {path}", path, error=ConfigError)


def write_comparison(
    comparison: Comparison, page: Path, *, name: str, assumed: str, costs: str, version: str
) -> None:
    """Write the page of a comparison.

    Args:
        comparison: The planners and batches.
        page: The HTML file.
        name: What was planned, for the heading.
        assumed: What the predictions assume.
        costs: Where the costs come from.
        version: The version of headrace.

    Raises:
        DataError: When the page cannot be written.
    """
    html = html_page(
        "comparison.html.j2",
        converter=vl_convert,
        title=f"{name} - planners compared by headrace",
        version=version,
        name=name,
        lead=_lead(comparison),
        cards=_cards(comparison),
        headings=HEADINGS,
        rows=comparison.rows(),
        sections=sections_of(_figures(comparison)),
        names=[comparison.label(result.name) for result in comparison.results],
        batches=_batch_rows(comparison),
        assumed=assumed,
        costs=costs,
    )
    write_page(page, html, "page")


def _lead(comparison: Comparison) -> str:
    """The line under the heading: how many batches, sequences, tokens and devices there are."""
    count = len(comparison.plans)
    several = f"{count:,} batch{'' if count == 1 else 'es'}"
    sequences = counted(sum(map(len, comparison.batches)), "sequence")
    return (
        f"{several}, {sequences}, {count_text(comparison.tokens)} tokens on "
        f"{counted(comparison.devices, 'device')}; seconds are predicted"
    )


def _cards(comparison: Comparison) -> list[Card]:
    """The headline figures of the first planner, which is headrace."""
    own = comparison.results[0]
    static = comparison.ratios("best static")
    rate = comparison.tokens_per_s(own.name)
    idle = float("nan") if own.idle is None else own.idle
    size = comparison.static_size
    return [
        Card(
            name="gain",
            value="-" if static is None else f"{static.mean:.2f}",
            label="times as fast as the best static choice",
            remark="no group size holds all batches"
            if static is None or size is None
            else f"groups of {counted(size, 'rank')} in every batch, both predicted",
        ),
        Card(
            name="speed",
            value="-" if rate is None else count_text(rate),
            label="tokens/s a device",
            remark="" if own.mean_s is None else f"{seconds_text(own.mean_s)} a mean step",
        ),
        Card(
            name="idle", value=known(idle, share_text), label="idle", remark="devices without work"
        ),
        Card(
            name="gap",
            value=share_text(comparison.gap),
            label="above the bound",
            remark="that no plan of these batches beats",
        ),
    ]


def _figures(comparison: Comparison) -> list[DrawnFigure]:
    """All figures of the page in their order."""
    corpus, assigned = _statistics(comparison), _assigned(comparison)
    own = comparison.results[0].name
    return [
        DrawnFigure(
            name="seconds",
            title="Seconds of each batch",
            section=_SECONDS,
            caption="Predicted, by planner; a planner that cannot hold a batch has no dot there.",
            spec=seconds_of_batches(comparison).to_dict(),
            wide=True,
        ),
        DrawnFigure(
            name="means",
            title="A mean step",
            section=_SECONDS,
            caption="Over the batches that each planner holds.",
            spec=mean_steps(comparison).to_dict(),
        ),
        DrawnFigure(
            name="rates",
            title="Tokens per second",
            section=_SECONDS,
            caption="Of one device, over the batches that each planner holds.",
            spec=rates(comparison).to_dict(),
        ),
        DrawnFigure(
            name="gap",
            title="Above the lower bound",
            section=_SECONDS,
            caption=f"{own} is {share_text(comparison.gap)} above what no plan beats.",
            spec=gap_of_batches(comparison).to_dict(),
            wide=True,
        ),
        DrawnFigure(
            name="lengths",
            title="Lengths of the sequences",
            section=_LENGTHS,
            caption=lengths_text(corpus, "sequence"),
            spec=length_histogram(corpus, "sequence").to_dict(),
        ),
        DrawnFigure(
            name="placement",
            title="Which lengths go to how many ranks",
            section=_LENGTHS,
            caption=_placed_text(comparison),
            spec=size_map(assigned).to_dict(),
        ),
    ]


def _statistics(comparison: Comparison) -> CorpusStatistics:
    """The lengths of all batches together, as a corpus."""
    tokens = [length for lengths in comparison.batches for length in lengths.tokens]
    summary = summarise_lengths(tokens, name="batches")
    return CorpusStatistics(
        name=summary.name,
        documents=summary.documents,
        tokens=summary.tokens,
        median=summary.median,
        p90=summary.p90,
        p99=summary.p99,
        max=summary.longest,
        edges=tuple(map(float, summary.edges)),
        counts=summary.counts,
    )


def _assigned(comparison: Comparison) -> Assigned:
    """The number of sequences of all plans by (bin of their length, number of ranks that they run
    on)."""
    sequences: Counter[tuple[int, int]] = Counter()
    for plan in comparison.plans:
        for micro in plan.micro_batches:
            ranks = len(plan.pipelines[micro.pipeline].ranks)
            sequences.update((length_bin(tokens), ranks) for tokens in plan.tokens_of(micro))
    return sequences


def _placed_text(comparison: Comparison) -> str:
    """The size of groups that most tokens run on, and that of the longest sequence."""
    tokens: Counter[int] = Counter()  # by ranks of a group
    longest, widest = 0, 0  # tokens of the longest sequence, and the ranks it runs on
    for plan in comparison.plans:
        for micro in plan.micro_batches:
            ranks, lengths = len(plan.pipelines[micro.pipeline].ranks), plan.tokens_of(micro)
            tokens[ranks] += sum(lengths)
            if max(lengths) > longest:
                longest, widest = max(lengths), ranks
    size, tokens_of_size = tokens.most_common(1)[0]
    share = share_text(tokens_of_size / comparison.tokens)
    return (
        f"{share} of the tokens run on groups of {counted(size, 'rank')}, the longest sequence "
        f"({longest:,} tokens) on {counted(widest, 'rank')}."
    )


def _batch_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """A row of text for each batch: number, sequences, tokens, longest, bound, seconds by planner,
    strategy of the first planner."""
    return [
        (
            str(number),
            f"{len(plan.lengths):,}",
            f"{plan.lengths.total:,}",
            f"{plan.lengths.longest:,}",
            seconds_text(plan.lower_bound_s),
            *[
                "does not fit" if batch is None else seconds_text(batch.seconds)
                for batch in (result.batches[number] for result in comparison.results)
            ],
            str(plan.strategy),
        )
        for number, plan in enumerate(comparison.plans)
    ]
