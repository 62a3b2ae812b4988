"""The whole page: title, what was read and lost, the sections, and what keeps it to itself. Pure.

Nothing is fetched and nothing is sent: a content security policy allows the one script and the one style sheet that
are in the page, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from datetime import datetime
from typing import Final

from markupsafe import Markup

from pytools.units import duration
from pytools.views.report import acts, clocks, format, matrix, paths, scales, tables, transport
from pytools.views.report.aggregate import Report
from pytools.views.report.markup import TEMPLATES, asset
from pytools.views.report.scales import Span

_SECTIONS: Final = {
    "matrix": "Delays between hosts",
    "paths": "Paths",
    "states": "States",
    "acts": "Acts",
    "weights": "Weights",
    "tcp": "Retransmissions",
    "rdma": "RDMA",
    "jobs": "Jobs",
    "clocks": "Clock errors",
    "rings": "Rings",
    "events": "Events",
    "agents": "Agents",
}
_NAMED: Final = 8  # hosts in the title


def page(report: Report, local: Callable[[datetime], datetime] | None = None) -> str:
    """The report as an HTML document.

    Parameters
    ----------
    local : callable, optional
        Gives a time in the zone that people here have, to say the span in it besides UTC.
    """
    span = Span(report.since_ns, report.until_ns)
    style, script = asset("page.css"), asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    told = report.told
    return TEMPLATES.get_template("page.html").render(
        policy=policy,
        style=Markup(style),
        script=Markup(script),
        title=f"swerve report: {_hosts(report)}",
        told=told,
        times=_times(span, local),
        records=format.counted(told.records, "record"),
        losses=_losses(report),
        cut=format.counted(told.cut, "file") if told.cut else "",
        sections=_SECTIONS,
        content=_sections(report, span),
        since_ms=span.since_ns // 1_000_000,
        length_ms=max(1, span.length_ns // 1_000_000),
    )


def _sections(report: Report, span: Span) -> list[Markup]:
    made = paths.marks(report, span)
    if not report.told.records:
        return [tables.section("matrix", "Nothing to show", tables.paragraphs(
            "There was no signal within this time. Look at another time with --since and --until, or whether the agent "
            "runs (swerve doctor)."))]  # fmt: skip
    return [
        matrix.drawn(report, paths.anchors(report)),
        paths.drawn(report, span),
        paths.states(report, span),
        acts.drawn(report, span),
        acts.weights(report, span, made),
        transport.tcp(report, span),
        transport.rdma(report, span),
        transport.jobs(report, span),
        clocks.drawn(report, span),
        tables.section("rings", "Rings of collective communication", tables.paragraphs(
            "The bottleneck of a ring is not known: this version does not look for rings.")),
        acts.events(report, span),
        _agents(report, span),
    ]  # fmt: skip


def _hosts(report: Report) -> str:
    names = [host.host for host in report.hosts]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return (", ".join(names[:_NAMED]) or "no host") + more


def _times(span: Span, local: Callable[[datetime], datetime] | None) -> str:
    since, until = scales.moment(span.since_ns), scales.moment(span.until_ns)
    times = f"{since:%Y-%m-%d %H:%M:%S} to {_end(since, until)} UTC"
    if local is None:
        return times
    here, there = local(since), local(until)
    return f"{times}; {here:%Y-%m-%d %H:%M:%S} to {_end(here, there)} {here:%Z} where this page was made"


def _end(since: datetime, until: datetime) -> str:
    return f"{until:%H:%M:%S}" if since.date() == until.date() else f"{until:%Y-%m-%d %H:%M:%S}"


def _losses(report: Report) -> list[str]:
    """What is missing."""
    told = report.told
    found = [
        (told.broken, "lines were not signals of this version and were skipped"),
        (told.dropped, "signals were missed while listening"),
        (
            told.late,
            "records came after newer ones (published twice, or a clock was set back) and were not counted again",
        ),
        *((count, f"signals of further {what} found no room") for what, count in told.crowded.items()),
    ]
    said = [f"{count:,} {what}" for count, what in found if count]
    said += [
        f"No signal from {host.host} for {duration(host.silent_ns)} ({format.counted(host.silences, 'time')})"
        for host in report.hosts
        if host.silences
    ]
    lost = sum(sum((host.drops or {}).values()) for host in report.hosts)
    if lost:
        said.append(f"What the agents themselves count as lost grew by {lost:,} (see Agents)")
    return said


def _agents(report: Report, span: Span) -> Markup:
    rows = [
        [
            host.host,
            f"{span.clock(host.first_unix_ns, 1)} to {span.clock(host.last_unix_ns, 1)}",
            "unknown"
            if host.drops is None
            else ", ".join(f"{name} {count:,}" for name, count in sorted(host.drops.items())) or "nothing",
            "; ".join(f"{hook}: {why}" for hook, why in host.failed.items())
            or ("unknown" if host.drops is None else "none"),
        ]
        for host in report.hosts
    ]
    headings = ["host", "signals (UTC)", "lost within this time", "hooks that failed"]
    unknown = (
        "What an agent lost is recorded while somebody watches it (swerve top, swerve self), else it is unknown."
        if any(host.drops is None for host in report.hosts)
        else ""
    )
    table = tables.table("What the agents say of themselves", headings, rows, left=headings)
    return tables.section("agents", "Agents", table, tables.paragraphs(unknown))


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
