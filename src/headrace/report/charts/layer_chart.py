"""Figures of the layer plans: which layers used what, over the run and step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import altair as alt

from headrace.report.charts import theme
from headrace.report.layer_use import layer_use, spans
from headrace.report.records import Run
from headrace.spec import LayerOption

__all__ = ["layer_options", "options_over_steps"]

_SPANS = 200
"""The most bars over the steps that can be told apart in the width of half a row."""

_TICKS = 10
"""Steps that each have a tick; of more Vega picks some."""

_LEGEND, _LETTER, _SYMBOL = theme.HALF - 50, 6.2, 31
"""Widths in pixels: of a legend, and in it about of a letter and of the symbol and the space beside
a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Palette:
    """The options that have a colour of their own, most used first, and the name of the rest."""

    names: Mapping[LayerOption, str]
    others: str

    @classmethod
    def of(cls, run: Run) -> _Palette:
        """Colours for the layer options with the largest shares in a run; the rest share one."""
        options = list(layer_use(run).shares)
        rest = len(options) - len(theme.OPTIONS)
        return cls(
            names={option: str(option) for option in options[: len(theme.OPTIONS)]},
            others=f"{rest} other{'' if rest == 1 else 's'}" if rest > 0 else "",
        )

    @property
    def shown(self) -> list[str]:
        """The names in the order of the stack."""
        return [*self.names.values(), *([self.others] if self.others else [])]

    def stacked(self, counts: Mapping[LayerOption, int]) -> list[tuple[str, int, float, float]]:
        """Rows (name, count, low, high) of a stacked bar: each option with a count fills it from
        ``low`` to ``high``, fractions of the total."""
        sums = dict.fromkeys(self.shown, 0)
        for option, count in counts.items():
            sums[self.names.get(option, self.others)] += count
        total, below = sum(sums.values()), 0  # below: the counts of the options under this one
        rows = []
        for name, count in sums.items():
            if count:
                rows.append((name, count, below / total, (below + count) / total))
            below += count
        return rows

    def color(self) -> alt.Color:
        """The colours of the options and their legend, the same in both figures."""
        colors = [*theme.OPTIONS[: len(self.names)], *([theme.OTHERS] if self.others else [])]
        return alt.Color(
            "option:N",
            scale=alt.Scale(domain=self.shown, range=colors),
            legend=theme.legend(
                symbolType="square", symbolStrokeWidth=0, columns=self.columns, labelLimit=_LEGEND
            ),
        )

    @property
    def columns(self) -> int:
        """The most columns of the legend in which no name is cut off."""
        widths = [_SYMBOL + _LETTER * len(name) for name in self.shown]
        counts = range(len(widths), 1, -1)
        # With n columns, names i, i + n, ... are below each other in column i.
        fits = (n for n in counts if sum(max(widths[i::n]) for i in range(n)) <= _LEGEND)
        return next(fits, 1)

    @property
    def height(self) -> int:
        """The height of a figure in pixels: the bars, and 17 for each row of the legend."""
        return 250 + 17 * -(-len(self.shown) // self.columns)


def layer_options(run: Run) -> theme.Drawing:
    """A bar per layer: the shares of the tokens that passed it by layer option."""
    palette = _Palette.of(run)
    rows = [
        {
            "layer": layer,
            "option": name,
            "tokens": tokens,
            "share": high - low,
            "low": low,
            "high": high,
        }
        for layer, counts in enumerate(layer_use(run).tokens)
        for name, tokens, low, high in palette.stacked(counts)
    ]
    x = alt.X("layer:O", axis=alt.Axis(labelAngle=0, labelOverlap=True, grid=False, ticks=False))
    chart = (
        alt.Chart(theme.data(rows))
        .mark_bar()
        .encode(
            x=x,
            y=_share("tokens"),
            y2="high:Q",
            color=palette.color(),
            tooltip=["layer:O", "option:N", alt.Tooltip("tokens:Q", format=","), _SHARE],
        )
    )
    return theme.half(chart, palette.height)


def options_over_steps(run: Run) -> theme.Drawing:
    """A bar per step, or per run of steps when there are many: the shares of its token-layers by
    layer option."""
    palette = _Palette.of(run)
    rows = [
        {
            "from": span.first,
            "to": span.last,
            "left": span.first - 0.5,
            "right": span.last + 0.5,
            "option": name,
            "count": count,
            "share": high - low,
            "low": low,
            "high": high,
        }
        for span in spans(run, _SPANS)
        for name, count, low, high in palette.stacked(span.token_layers)
    ]
    ends = [run.steps[0].step - 0.5, run.steps[-1].step + 0.5]
    ticks = [step.step for step in run.steps] if len(run.steps) <= _TICKS else alt.Undefined
    axis = alt.Axis(format=",d", values=ticks, tickMinStep=1, grid=False)
    scale = alt.Scale(domain=ends, nice=False, round=True)  # no seams between bars
    x = alt.X("left:Q", title="step", axis=axis, scale=scale)
    few = len(run.steps) <= _SPANS // 4
    bars = alt.Chart(theme.data(rows)).mark_rect(stroke="white", strokeWidth=1 if few else 0)
    chart = bars.encode(
        x=x,
        x2="right:Q",
        y=_share("token-layers"),
        y2="high:Q",
        color=palette.color(),
        tooltip=[
            "from:Q",
            "to:Q",
            "option:N",
            alt.Tooltip("count:Q", title="token-layers", format=","),
            _SHARE,
        ],
    )
    return theme.half(chart, palette.height)


_SHARE = alt.Tooltip("share:Q", format=".1%")


def _share(what: str) -> alt.Y:
    """The axis of shares from 0 to 1."""
    axis = alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1], grid=False)
    return alt.Y("low:Q", title=f"share of {what}", scale=alt.Scale(domain=[0, 1]), axis=axis)
