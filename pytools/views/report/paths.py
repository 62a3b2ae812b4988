"""The paths: a table of all, states as bands, of the worst ones delay and queueing over time with every act. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from markupsafe import Markup

from pytools.figures import FOLLOWED, Measure
from pytools.signals import Path
from pytools.units import duration, size
from pytools.views.report import chart, format, scales, tables
from pytools.views.report.aggregate import PathHistory, Report
from pytools.views.report.chart import HEIGHT, Curve, Mark
from pytools.views.report.markup import element
from pytools.views.report.scales import Span

DRAWN: Final = 48  # paths with charts, the worst first
OPEN: Final = 2  # of these, shown without being asked for
_STATES: Final = 64
_CHANGES: Final = 300


def anchors(report: Report) -> dict[tuple[str, Path], str]:
    return {history.key: f"path-{number}" for number, history in enumerate(report.paths[:DRAWN], start=1)}


def marks(report: Report, span: Span) -> dict[int, Mark]:
    """Every act as a mark on a chart, by its number."""
    return {each.number: Mark(each.act.unix_ns, each.number, format.explained(each, span)) for each in report.acts}


def drawn(report: Report, span: Span) -> Markup:
    places, made = anchors(report), marks(report, span)
    if not report.paths:
        return tables.section("paths", "Paths", tables.paragraphs("No path was measured within this time."))
    histories = [
        _drawn(history, span, made, places[history.key], number <= OPEN)
        for number, history in enumerate(report.paths[:DRAWN], start=1)
    ]
    left_out = len(report.paths) - DRAWN
    note = (
        f"Of the other {left_out} paths there is only the table: the {DRAWN} worst are drawn." if left_out > 0 else ""
    )
    how = (
        "The worst path first. A line is broken where nothing is known; a shade is the error (±) of the line in it. "
        "Flags are acts of steering on what carries the path: focus or point at one to read what was done and why."
    )
    return tables.section("paths", "Paths", _table(report.paths, places), tables.paragraphs(how, note), *histories)


def _table(paths: Sequence[PathHistory], places: Mapping[tuple[str, Path], str]) -> Markup:
    headings = ["path", *(figure.name for figure in FOLLOWED), "lost", "retransmitted", "held", "last state"]
    rows = []
    for history in paths:
        anchor = places.get(history.key)
        name = format.way(history.path)
        resent = sum(history.resent.totals.values())
        rows.append(
            [
                element("a", name, href=f"#{anchor}") if anchor else name,
                *(format.delay(history.forward.figures.get(figure)) for figure in FOLLOWED),
                format.share(history.loss),
                f"{resent:,} of {history.segments_out:,}" if history.segments_out or resent else "no TCP",
                _held(history),
                history.states.runs[-1].word if history.states.runs else format.UNKNOWN,
            ]
        )
    return tables.table(
        "From source to destination, over the whole time; p50: median of the windows' medians; else: no larger in "
        "all windows but one in a hundred", headings, rows, left=("last state",),
    )  # fmt: skip


def _held(history: PathHistory) -> str:
    """What waited at the source, and for how long in all."""
    return "never" if history.held is None else f"{size(history.held.bytes)}, {duration(history.held.waited_ns)}"


def _drawn(history: PathHistory, span: Span, made: Mapping[int, Mark], anchor: str, opened: bool) -> Markup:
    acts = [made[number] for number in history.acts if number in made]
    name = format.way(history.path)
    summary = f"{name}: " + ", ".join(
        f"{each.name} {format.delay(history.forward.figures.get(each))}" for each in FOLLOWED if each.share > 0.5
    )
    if acts:
        summary += f", {format.counted(len(acts), 'act')}"
    return tables.folded(
        summary,
        *(_chart(measure, history, span, acts) for measure in dict.fromkeys(figure.measure for figure in FOLLOWED)),
        tables.paragraphs(_resolution(history)),
        id_=anchor,
        opened=opened,
    )  # fmt: skip


def _chart(measure: Measure, history: PathHistory, span: Span, acts: Sequence[Mark]) -> Markup:
    title = measure.words.capitalize()
    curves = [Curve(each.part or each.name, line) for each, line in history.lines.items() if each.measure is measure]
    values = [point.value for curve in curves for point in curve.line.points]
    if not values:
        return tables.paragraphs(f"{title}: unknown within this time. {_why_unknown(history, measure)}")
    scale = scales.logarithmic(values, HEIGHT)
    label = (
        f"{title} of {format.way(history.path)} over time: {duration(min(values))} to {duration(max(values))}. "
        "Arrow keys read values, plus and minus look closer; a table follows."
    )
    return tables.figure(
        f"{title}, logarithmic",
        chart.legend([curve.name for curve in curves]),
        chart.lines(span, curves, scale, "ns", label, duration, acts),
        tables.lines_table(span, curves, duration),
    )


def _why_unknown(history: PathHistory, measure: Measure) -> str:
    if history.settled and history.lost == history.settled:
        return "All its probes were lost."
    if measure.compared and set(history.clocks) == {"free_running"}:
        return "The clocks of the two hosts were never compared (free_running): this needs them to be."
    return ""


def _resolution(history: PathHistory) -> str:
    if not history.windows:
        return "It was not probed within this time."
    line = max(history.lines.values(), key=lambda line: line.values)
    kept = f"of each {duration(line.slot_ns)} the smallest and the largest are drawn" if line.values > len(
        line.points) else "all are drawn"  # fmt: skip
    clocks = ", ".join(f"{state} {count}" for state, count in sorted(history.clocks.items()))
    return f"{history.windows:,} windows of {duration(history.window_ns)} by {history.host}; {kept}. Clocks: {clocks}."


def states(report: Report, span: Span) -> Markup:
    told = [history for history in report.paths if history.states.runs]
    if not told:
        return tables.section("states", "States of paths", tables.paragraphs("No controller told any state."))
    rows = [
        [
            format.way(history.path),
            chart.strip(span, history.states, format.state),
            format.lasted(history.states.lasted_ns()),
        ]
        for history in told[:_STATES]
    ]
    changes = sorted(
        ((run.began_ns, format.way(history.path), run) for history in told for run in history.states.runs), reverse=True
    )
    listed = [
        [span.clock(began, 3), name, run.word, duration(run.ended_ns - run.began_ns), run.note]
        for began, name, run in reversed(changes[:_CHANGES])
    ]
    forgotten = sum(history.states.forgotten for history in told) + max(0, len(changes) - _CHANGES)
    note = f"{forgotten:,} older changes are not listed." if forgotten else ""
    return tables.section(
        "states",
        "States of paths",
        tables.table("State over time: the higher the band, the worse", ["path", "state", "how long"], rows,
                     left=("state", "how long")),
        tables.folded("All changes as a table", tables.table("Changes of state, by time", [
            "UTC", "path", "state", "lasted", "because [under]"], listed, left=("path", "state", "because [under]")),
            tables.paragraphs(note)),
    )  # fmt: skip
