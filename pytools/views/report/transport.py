"""What TCP retransmitted and why, what RDMA queue pairs went through, and why steps of jobs were slow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from pytools.units import bit_rate, duration
from pytools.views.report import chart, format, scales, tables
from pytools.views.report.aggregate import PathHistory, QueuePairHistory, Report
from pytools.views.report.chart import HEIGHT, Curve
from pytools.views.report.markup import element
from pytools.views.report.scales import Span
from pytools.views.report.series import Bars, Sums

CAUSES: Final = {  # as in signals -> as people say it
    "fast": "fast",
    "timeout": "RTO",
    "tail_probe": "TLP",
    "syn": "SYN",
    "unknown": "unknown",
}
_DRAWN: Final = 16  # queue pairs with a chart


def tcp(report: Report, span: Span) -> Markup:
    """Segments retransmitted, by cause."""
    told = [history for history in report.paths if history.segments_out or history.resent.slots]
    if not told:
        nothing = "No TCP on a measured path was told of."
        return tables.section("tcp", "Retransmissions by cause", tables.paragraphs(nothing))
    charts = [
        _host(host, [history for history in told if history.host == host], span)
        for host in sorted({history.host for history in told})
    ]
    rows = [
        [format.way(history.path), *(f"{history.resent.totals.get(cause, 0):,}" for cause in CAUSES),
         f"{history.segments_out:,}", format.share(_again(history))]
        for history in sorted(told, key=lambda each: -sum(each.resent.totals.values()))
    ]  # fmt: skip
    how = (
        "Fast: acknowledgements showed the loss, a queue that overflows. RTO: nothing came back, a way that was dead "
        "or the end of a burst. TLP: the end of a burst, retransmitted as a probe. SYN: of a handshake."
    )
    headings = ["path", *CAUSES.values(), "segments sent", "share retransmitted"]
    table = tables.table("Segments retransmitted by path, over the whole time", headings, rows)
    return tables.section("tcp", "Retransmissions by cause", tables.paragraphs(how), table, *charts)


def _again(history: PathHistory) -> float | None:
    return sum(history.resent.totals.values()) / history.segments_out if history.segments_out else None


def _host(host: str, histories: Sequence[PathHistory], span: Span) -> Markup:
    counts = together([history.resent for history in histories])
    if not counts.slots:
        return tables.paragraphs(f"{host} sent nothing again.")
    kinds = [cause for cause in CAUSES if counts.totals.get(cause)]
    named = Bars(
        tuple((at, {CAUSES[cause]: count for cause, count in slot.items()}) for at, slot in counts.slots),
        counts.slot_ns,
    )
    names = [CAUSES[cause] for cause in kinds]
    scale = scales.linear([sum(slot.values()) for _, slot in named.slots], HEIGHT / 2, whole=True)
    label = f"Segments that {host} retransmitted, by cause, over time. Arrow keys read values; a table follows."
    return tables.figure(
        f"{host}: segments retransmitted in each {duration(named.slot_ns)}",
        chart.legend(names, "bar"),
        chart.bars(span, named, names, scale, label, lambda value: f"{value:,.0f}"),
        tables.bars_table(span, named, names),
    )


def together(several: Sequence[Bars]) -> Bars:
    sums = Sums()
    widest_ns = max((each.slot_ns for each in several if each.slots), default=1)
    for each in several:
        for began_ns, counts in each.slots:
            sums.add(began_ns, counts)
    found = sums.bars()
    if found.slot_ns >= widest_ns:
        return found
    wider: dict[int, dict[str, int]] = {}
    for began_ns, counts in found.slots:
        slot = wider.setdefault(began_ns // widest_ns * widest_ns, {})
        for cause, count in counts.items():
            slot[cause] = slot.get(cause, 0) + count
    return Bars(tuple(sorted(wider.items())), widest_ns)


def rdma(report: Report, span: Span) -> Markup:
    """Queue pairs: verdicts over time, bandwidth, and who is suspected."""
    title = "RDMA"
    if not report.queue_pairs:
        reasons = {
            f"{host.host}: {host.sight.reason}" for host in report.hosts if host.sight and not host.sight.available
        }
        why = " ".join(sorted(reasons)) or "No queue pair was told of."
        return tables.section("rdma", title, tables.paragraphs(f"No RDMA within this time. {why}"))
    rows = [
        [
            _name(history),
            chart.strip(span, history.verdicts, format.state),
            format.lasted(history.verdicts.lasted_ns()),
            history.last.verdict,
            history.last.reason,
        ]
        for history in report.queue_pairs
    ]
    headings = ["queue pair", "verdict over time", "how long", "last verdict", "reason"]
    table = tables.table("The higher the band, the worse", headings, rows, left=headings)
    charts = [_bandwidth(history, span) for history in report.queue_pairs[:_DRAWN] if history.bandwidth.points]
    return tables.section("rdma", title, table, _suspects(report), *charts)


def _name(history: QueuePairHistory) -> str:
    last = history.last
    remote = f" to {last.remote}" if last.remote else ""
    return f"{last.host} {last.device} {last.qp_number}{remote} ({last.owner.command or 'unknown'})"


def jobs(report: Report, span: Span) -> Markup:
    """Why the steps of distributed jobs took as long as they did."""
    title = "Jobs"
    if not report.jobs:
        nothing = "No distributed job was told of. Records have jobs only while somebody asks for them, as metrics do."
        return tables.section("jobs", title, tables.paragraphs(nothing))
    rows = []
    for history in report.jobs:
        worst, at = history.worst, ""
        if worst is not None:
            at = f"{scales.moment(history.worst_unix_ns):%H:%M:%S} UTC: "
            at += f"{worst.kind}, {format.share(worst.share)} of a step"
        rows.append(
            [
                f"{history.last.host} {history.last.job}",
                chart.strip(span, history.verdicts, format.state),
                format.lasted(history.verdicts.lasted_ns()),
                at or "nothing",
                "" if worst is None else worst.reason,
            ]
        )
    headings = ["job", "verdict over time", "how long", "explained most", "reason"]
    return tables.section("jobs", title, tables.table("The higher the band, the worse", headings, rows, left=headings))


def _suspects(report: Report) -> Markup:
    rows = [
        [f"{each.kind} {each.name}", format.share(each.slowness), f"{each.agreeing} of {each.queue_pairs}", host.host,
         each.reason]
        for host in report.hosts
        for each in host.suspects
    ]  # fmt: skip
    if not rows:
        return tables.paragraphs("No host and no link was suspected to be slow at the end.")
    headings = ["suspect", "bandwidth missing", "queue pairs agreeing", "told by", "reason"]
    return tables.table("Suspected to be slow, at the end", headings, rows, left=("told by", "reason"))


def _bandwidth(history: QueuePairHistory, span: Span) -> Markup:
    curves = [Curve("mean of 8-message windows", history.bandwidth)]
    scale = scales.linear([point.value for point in history.bandwidth.points], HEIGHT / 2)
    label = f"Bandwidth of {_name(history)} over time. Arrow keys read values; a table follows."
    figure = tables.figure(
        "Bandwidth over sliding windows of 8 messages, mean",
        element("div", chart.lines(span, curves, scale, "bps", label, bit_rate)),
        tables.lines_table(span, curves, bit_rate),
    )
    return tables.folded(_name(history), figure)
