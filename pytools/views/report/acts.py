"""What was done, what happened, and what the weights were: acts with their reasons, events, weights over time. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from pytools.views.report import chart, format, scales, tables
from pytools.views.report.aggregate import GroupHistory, Report
from pytools.views.report.chart import HEIGHT, Curve, Mark
from pytools.views.report.scales import Span


def drawn(report: Report, span: Span) -> Markup:
    """Every act, explained."""
    if not report.acts:
        nothing = "Nothing was done or wanted within this time: no controller told of an act."
        return tables.section("acts", "Acts", tables.paragraphs(nothing))
    rows = [
        [
            str(each.number),
            span.clock(each.act.unix_ns, 3),
            each.act.host,
            each.act.what,
            format.moved(each.act),
            each.act.because,
            each.act.under,
            format.outcome(each.act),
            format.took(each.act),
            each.act.moves,
        ]
        for each in report.acts
    ]
    headings = ["act", "UTC", "host", "what", "from → to", "because", "under", "outcome", "took", "moves"]
    table = tables.table(
        "By time; took: from the measurement to the kernel's acknowledgement",
        headings,
        rows,
        left=[name for name in headings if name not in ("act", "took")],
        ids=[f"act-{each.number}" for each in report.acts],
    )
    return tables.section("acts", "Acts", table, tables.paragraphs(_older(report, "acts")))


def events(report: Report, span: Span) -> Markup:
    """What happened to links, and alerts."""
    if not report.events:
        return tables.section("events", "Events", tables.paragraphs("No link event and no alert within this time."))
    headings = ["UTC", "host", "where", "what", "detail", "under"]
    rows = [
        [span.clock(each.unix_ns, 3), each.host, each.where, each.what, each.detail, each.under]
        for each in report.events
    ]
    table = tables.table("Events of links and paths, and alerts, by time", headings, rows, left=headings)
    return tables.section("events", "Events", table, tables.paragraphs(_older(report, "events")))


def _older(report: Report, what: str) -> str:
    count = report.forgotten.get(what, 0)
    return f"{count:,} older {what} are not listed: ask for a shorter time to see them." if count else ""


def weights(report: Report, span: Span, made: Mapping[int, Mark]) -> Markup:
    """The weights of every nexthop group."""
    told = [each for each in report.groups if each.members]
    if not told:
        return tables.section("weights", "Weights", tables.paragraphs("No nexthop group was told of."))
    how = "What the kernel had, looked at once a second. Flags are the acts on the group."
    return tables.section(
        "weights", "Weights", tables.paragraphs(how), *(_group(each, span, made, len(told) <= 4) for each in told)
    )


def _group(history: GroupHistory, span: Span, made: Mapping[int, Mark], opened: bool) -> Markup:
    curves = [Curve(name, line, stepped=True) for name, line in history.members.items()]
    values = [point.value for curve in curves for point in curve.line.points]
    group = history.last
    behind = ", ".join(group.destinations[:4]) + (" …" if len(group.destinations) > 4 else "")
    name = f"{group.host}: nexthop group {group.group_id} to {behind}"
    marks = [made[number] for number in history.acts if number in made]
    label = f"Weights of {name} over time. Arrow keys read values, plus and minus look closer; a table follows."
    return tables.folded(
        f"{name}, {format.counted(len(marks), 'act')}",
        tables.figure(
            "Weights",
            chart.legend([curve.name for curve in curves]),
            chart.lines(span, curves, scales.linear(values, HEIGHT / 2, whole=True), "number", label, _whole, marks),
            tables.lines_table(span, curves, _whole),
        ),
        opened=opened,
    )


def _whole(value: float) -> str:
    return f"{value:,.0f}"
