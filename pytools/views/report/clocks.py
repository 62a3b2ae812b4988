"""How well the clocks were known: the bound of every offset over time, and the state behind it. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from markupsafe import Markup

from pytools.units import duration
from pytools.views.report import chart, format, scales, tables
from pytools.views.report.aggregate import ClockHistory, Report
from pytools.views.report.chart import HEIGHT, STYLES, Curve
from pytools.views.report.markup import element
from pytools.views.report.scales import Span
from pytools.views.tables import offset, ppm

_CHARTS: Final = 16  # of so many clocks each at most `STYLES`


def drawn(report: Report, span: Span) -> Markup:
    others = sorted((each for each in report.clocks if each.last.of != each.last.reference), key=_by_reference(report))
    if not others:
        nothing = "No other clock was compared within this time (a clock has no error against itself)."
        return tables.section("clocks", "Clock errors", tables.paragraphs(nothing))
    rows = [
        [
            f"{history.last.of} against {history.last.reference or 'nothing'}",
            chart.strip(span, history.states, format.state),
            format.lasted(history.states.lasted_ns()),
            _offset(history),
            duration(history.last.hard_bound_ns) if history.last.hard_bound_ns is not None else format.UNKNOWN,
            f"{ppm(history.last.drift_ppb)} ppm" if history.last.drift_ppb is not None else format.UNKNOWN,
            duration(history.most.value) if history.most is not None else format.UNKNOWN,
            history.host,
        ]
        for history in others
    ]
    headings = ["clock", "state", "how long", "last offset ±", "last hard ±", "last drift", "largest ±", "told by"]
    how = (
        "What the offset of each clock against the reference was known to, over time. One-way delays rest on it; where "
        "it is unknown (free_running), so are they."
    )
    groups = [
        some[first : first + STYLES]
        for _, against in itertools.groupby(others, key=lambda history: history.last.reference)
        for some in (list(against),)
        for first in range(0, len(some), STYLES)
    ]
    return tables.section(
        "clocks",
        "Clock errors",
        tables.paragraphs(how),
        *(_chart(group, span) for group in groups[:_CHARTS]),
        tables.table("Every clock, at the end", headings, rows, left=("state", "how long", "told by")),
    )


def _by_reference(report: Report) -> Callable[[ClockHistory], tuple[int, str, str]]:
    """The reference that most was said about first: before hosts have found each other each is its own."""
    said = Counter[str]()
    for history in report.clocks:
        said[history.last.reference] += history.bound.values
    return lambda history: (-said[history.last.reference], history.last.reference, history.last.of)


def _offset(history: ClockHistory) -> str:
    last = history.last
    if last.offset_ns is None:
        return format.UNKNOWN
    return f"{offset(last.offset_ns)} ± {duration(last.bound_ns) if last.bound_ns is not None else format.UNKNOWN}"


def _chart(histories: Sequence[ClockHistory], span: Span) -> Markup:
    curves = [Curve(history.last.of, history.bound) for history in histories]
    values = [point.value for curve in curves for point in curve.line.points]
    if not values:
        return tables.paragraphs("Of these clocks no bound is known: " + ", ".join(curve.name for curve in curves))
    label = "Bounds of clock offsets over time. Arrow keys read values, plus and minus look closer; a table follows."
    return tables.figure(
        f"Bound (±) of the offset against {histories[0].last.reference}, logarithmic",
        chart.legend([curve.name for curve in curves]),
        element("div", chart.lines(span, curves, scales.logarithmic(values, HEIGHT), "ns", label, duration)),
        tables.lines_table(span, curves, duration),
    )
