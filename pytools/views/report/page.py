"""The whole page: title, what was read and lost, the sections, and what keeps it to itself. Pure.

Nothing is fetched and nothing is sent: a content security policy allows the one script and the one style sheet that
are in the page, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Callable
from datetime import datetime
from importlib import resources
from typing import Final

from pytools.units import duration
from pytools.views.report import acts, clocks, format, matrix, paths, scales, tables, transport
from pytools.views.report.aggregate import Report
from pytools.views.report.markup import Markup, element, joined, text
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
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    title = f"swerve report: {_hosts(report)}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title),
        element("style", Markup(style)),
    )
    body = element(
        "body",
        element("a", "Skip to the delays", href="#matrix", class_="skip"),
        element("header", element("h1", title), _heading(report, span, local)),
        element(
            "nav",
            element("ul", *(_item(anchor, name) for anchor, name in _SECTIONS.items())),
            aria_label="Sections",
        ),
        element("main", *_sections(report, span), data_since=span.since_ns // 1_000_000,
                data_length=max(1, span.length_ns // 1_000_000)),
        element("div", id="tip", role="status", aria_live="polite", hidden=True),
        element("script", Markup(script)),
    )  # fmt: skip
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _item(anchor: str, name: str) -> Markup:
    return element("li", element("a", name, href=f"#{anchor}"))


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


def _heading(report: Report, span: Span, local: Callable[[datetime], datetime] | None) -> Markup:
    told = report.told
    since, until = scales.moment(span.since_ns), scales.moment(span.until_ns)
    lines = [element("p", told.source)] if told.source else []
    if told.records:
        times = f"{since:%Y-%m-%d %H:%M:%S} to {_end(since, until)} UTC"
        if local is not None:
            here, there = local(since), local(until)
            times += f"; {here:%Y-%m-%d %H:%M:%S} to {_end(here, there)} {here:%Z} where this page was made"
        lines.append(element("p", times, class_="span"))
    lines.append(element("p", f"Made of {format.counted(told.records, 'record')}.", *_losses(report)))
    reading = (
        "Times are UTC, by the clock of the host that published. ± is an error: the true value lies within it. Of long "
        "times not every point is drawn: time is cut into equal stretches, and of each the smallest and the largest "
        "value are kept. Unknown is what nobody measured, or what the clocks do not support; it is never shown as zero."
    )
    keys = (
        "In a chart: arrow keys read values, + and - look closer, 0 shows all again, Home and End go to its ends, "
        "Escape closes what is said. With a pointer: drag to look closer, double click to see all."
    )
    return joined([*lines, tables.folded("How to read this page", tables.paragraphs(reading, keys))])


def _end(since: datetime, until: datetime) -> str:
    return f"{until:%H:%M:%S}" if since.date() == until.date() else f"{until:%Y-%m-%d %H:%M:%S}"


def _losses(report: Report) -> list[Markup]:
    """What is missing, in bold where something is."""
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
    said = [element("strong", f" {count:,} {what}.") for count, what in found if count]
    said += [
        element(
            "strong",
            f" No signal from {host.host} for {duration(host.silent_ns)} ({format.counted(host.silences, 'time')}).",
        )
        for host in report.hosts
        if host.silences
    ]
    lost = sum(sum((host.drops or {}).values()) for host in report.hosts)
    if lost:
        said.append(element("strong", f" What the agents themselves count as lost grew by {lost:,} (see Agents)."))
    cut = f" {format.counted(told.cut, 'file')} ended in the middle: written just now, or by an agent that was killed."
    return [*(said or [text(" Nothing was lost or broken in what was read.")]), text(cut if told.cut else "")]


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


@functools.cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text("utf-8")


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
