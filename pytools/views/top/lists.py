"""The panels beside the paths: flows, links, RDMA queue pairs, events, jobs.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host, but for the time of day of an event (UTC).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from rich.text import Text

from pytools import units
from pytools.signals import Job, Link, RdmaQueuePair, RdmaSight, TcpFlow
from pytools.units import UNKNOWN
from pytools.views import job_tables, link_tables, rdma_tables, tables, tcp_columns
from pytools.views.columns import Column, Listing, Order, little, named
from pytools.views.model import flow_key, is_silent
from pytools.views.tables import alarm, amber, number
from pytools.views.top.fields import Cell, Rows, field, figure
from pytools.views.top.paths import short_time
from pytools.views.top.state import Event, Known

Row = TypeVar("Row")
_KINDS: Final = ("act", "state", "link", "clock")


def _part(cell: Cell, index: int) -> Cell:
    """One line of a cell that may have two."""
    if isinstance(cell, Text):
        lines = cell.split("\n")
        found = lines[index] if index < len(lines) else Text(UNKNOWN)
        return Text(found.plain.strip(), style=cell.style or (found.spans[0].style if found.spans else ""))
    return (cell.split("\n") + [UNKNOWN] * index)[index].strip()


def _of(listing: Listing[Row]) -> Callable[..., Column[Row]]:
    """Makes a column of a list out of one of a table; of a cell of two lines, one of them."""
    columns: dict[str, Column[Row]] = {column.heading: column for column in listing.columns}

    def of(
        name: str, heading: str, width: int, meaning: str, word: str = "", part: int = 0, left: bool = False
    ) -> Column[Row]:
        column = columns[name]
        order: Order[Row] | None = column.orders.get(word)
        return field(heading, width, lambda row: _part(column.show(row), part), meaning, order, left or column.left)

    return of


def flows(known: Known, now_ns: int) -> Rows[TcpFlow]:
    """TCP connections; counts since each began, or since all was zeroed."""
    of, counts = _of(tcp_columns.flows(now_ns)), known.flow_counts

    def ends(row: TcpFlow) -> str:
        return f"{tables.endpoint(row.local, row.local_port)} → {tables.endpoint(row.remote, row.remote_port)}"

    fields: tuple[Column[TcpFlow], ...] = (
        figure("connection", 42, str, ends, "both ends", named, True),
        figure(
            "retx",
            7,
            alarm,
            lambda row: counts(row).retransmitted,
            "segments retransmitted since the connection began, or since `z`",
        ),
        of("srtt\nmin", "srtt", 8, "smoothed round trip", "srtt"),
        of("srtt\nmin", "min", 8, "smallest round trip the kernel remembers", "min", 1),
        of("process", "process", 18, "process that holds it", "command"),
        figure("RTO", 5, amber, lambda row: counts(row).timeouts, "retransmission timeouts"),
        of("cwnd\nssthresh", "cwnd", 6, "congestion window, segments", "cwnd"),
        of("rate\nsent", "rate", 12, "the kernel's last delivery rate", "rate"),
        figure("sent", 9, units.size, lambda row: counts(row).sent_bytes, "bytes sent, without retransmissions"),
        of("CE", "CE", 6, "share of segments acknowledged as marked (CE)", "ce"),
        of("zero\nwin.", "zero", 5, "zero windows: the receiver does not read", "zero"),
        of("path", "path", 18, "the measured path, or the interface", "path"),
        of("pod", "pod", 24, "pod or other network namespace; none: the agent's own", "pod"),
        of("state\nlast look", "state", 22, "of the connection, and of its congestion control", "state"),
    )
    return Rows(
        Listing(fields, lambda row: (-counts(row).retransmitted, -counts(row).sent_bytes, flow_key(row))),
        list(known.model.of(TcpFlow).values()),
        text=lambda row: (
            f"{ends(row)} {tables.process(row.owner)} {row.interface} {row.path or ''} {row.namespace} {row.state}"
        ),
        dim=lambda row: row.state == "close" or is_silent(row, now_ns),
        nothing="no TCP connection has been reported yet",
        by="most retx first",
    )


def links(known: Known, now_ns: int) -> Rows[Link]:
    """Interfaces that carry paths."""
    of = _of(link_tables.links(now_ns))
    fields: tuple[Column[Link], ...] = (
        of("interface", "interface", 16, "its name", "interface"),
        of("state", "state", 12, "administrative state and carrier", "state"),
        of("out", "out", 12, "rate sent over the last window", "out"),
        of("in", "in", 12, "rate received over the last window", "in"),
        of("queue", "queue", 12, "backlog of the fullest queue", "queue"),
        of("queue\ndrops", "q drops", 8, "packets dropped by its queues since they were created", "queue-drops"),
        of("drops\nin / out", "drops in/out", 12, "packets dropped by the interface in the last window", "drops"),
        of("errors", "errors", 7, "errors in the last window", "errors"),
        of("carrier\nchanges", "carrier", 7, "changes of carrier since it was created", "changes"),
        figure("silent", 6, alarm, lambda row: len(row.failed_neighbours), "neighbours that do not answer"),
        of("pauses\nin / out", "pauses in/out", 16, "pause frames received and sent", "pauses"),
        of("MTU", "MTU", 6, "largest packet", "mtu"),
        of("speed", "speed", 12, "speed by the driver", "speed"),
        of("driver says", "driver says", 40, "error counters of the driver that are not zero"),
    )
    return Rows(
        Listing(fields, lambda row: (row.up and row.carrier, row.interface)),
        list(known.model.of(Link).values()),
        text=lambda row: f"{row.interface} {' '.join(map(str, row.paths))}",
        dim=lambda row: is_silent(row, now_ns),
        nothing="no interface that carries a path has been reported yet",
        by="down first",
    )


def queue_pairs(known: Known, now_ns: int) -> Rows[RdmaQueuePair]:
    of, model = _of(rdma_tables.queue_pairs(now_ns)), known.model
    fields: tuple[Column[RdmaQueuePair], ...] = (
        field(
            "queue pair",
            20,
            lambda row: f"{row.device} {row.qp_number}",
            "device and number",
            named(lambda row: f"{row.device} {row.qp_number:>9}"),
            True,
        ),
        of("verdict", "verdict", 14, "verdict; `?`: not repeated recently", "verdict"),
        of("bandwidth\nmean", "bandwidth", 12, "bandwidth over the last 8 messages", "bandwidth"),
        of("bandwidth\nmean", "mean", 12, "the same, mean of the window", "mean", 1),
        of("outstanding", "outst.", 7, "work requests outstanding", "outstanding"),
        of("latency\np50, p99", "p50", 8, "median latency from post to completion", "p50"),
        of("latency\np50, p99", "p99", 8, "the same, 99th percentile", "p99", 1),
        field("remote", 16, lambda row: row.remote or UNKNOWN, "the peer", named(lambda row: row.remote), True),
        of("process", "process", 20, "process that holds it", "command"),
        of("errors", "errors", 16, "failed completions", "errors"),
        figure("posted", 12, number, lambda row: row.posted, "work requests posted"),
        field("reason", 60, lambda row: row.reason, "the measurement behind the verdict", None, True, 16),
    )
    sight = model.one(RdmaSight)
    nothing = sight.reason if sight is not None and not sight.available else "no queue pair has been seen yet"
    return Rows(
        Listing(
            fields,
            lambda row: (rdma_tables.WORST_FIRST.index(row.verdict), -row.outstanding_bytes, row.device, row.qp_number),
        ),
        [row for row in model.of(RdmaQueuePair).values() if not row.closed],
        text=lambda row: (
            f"{row.device} {row.qp_number} {row.owner.command} {row.remote} {row.path or ''} {row.verdict}"
        ),
        dim=lambda row: is_silent(row, now_ns),
        nothing=nothing,
    )


def jobs(known: Known, now_ns: int) -> Rows[Job]:
    """Distributed jobs, and why their steps are slow."""
    of = _of(job_tables.jobs(now_ns))
    fields: tuple[Column[Job], ...] = (
        field("job", 32, lambda row: row.job, "launcher and identifiers", named(lambda row: row.job), True),
        of("why slow", "why slow", 16, "verdict, and the share of a step that it explains", "verdict"),
        of("ranks\nhere / all", "ranks", 12, "on this host, and in all", "ranks"),
        of("sent", "sent", 12, "rate sent over the last window", "sent"),
        of("received", "received", 12, "rate received over the last window", "received"),
        of("connec-\ntions", "conns", 6, "TCP connections", "connections"),
        of("queue\npairs", "pairs", 6, "RDMA queue pairs", "qps"),
        of("RAS", "RAS", 12, "what NCCL's RAS says"),
        field("reason", 60, _why_slow, "the measurement behind the verdict", None, True, 16),
    )
    return Rows(
        Listing(fields, job_tables.jobs(now_ns).usual),
        list(known.model.of(Job).values()),
        text=lambda row: f"{row.job} {_why_slow(row)}",
        dim=lambda row: is_silent(row, now_ns),
        nothing="no process here is a rank of a job by its environment, or none has been reported yet",
        by="most explained first",
    )


def _why_slow(row: Job) -> str:
    return UNKNOWN if row.why is None else row.why.reason


def clock_time(unix_ns: int) -> str:
    """Time of day, UTC."""
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%H:%M:%S")


def events(known: Known, now_ns: int) -> Rows[Event]:
    """What happened, the newest first."""
    fields: tuple[Column[Event], ...] = (
        field("UTC", 8, lambda row: clock_time(row.unix_ns), "time of day", little(lambda row: -row.at_ns), True),
        field("ago", 4, lambda row: short_time(now_ns - row.at_ns), "how long ago", little(lambda row: -row.at_ns)),
        field(
            "kind",
            5,
            lambda row: row.kind,
            "act of steering, state of a path, link, clock",
            little(lambda row: _KINDS.index(row.kind)),
            True,
        ),
        figure("where", 20, str, lambda row: row.place, "path, target, interface or host", named, True),
        field("what", 24, lambda row: Text(row.what, style=row.style), "from → to", named(lambda row: row.what), True),
        field("why", 120, lambda row: row.why, "the measurement, and the rule", None, True, 12),
    )
    return Rows(
        Listing(fields, lambda row: -row.at_ns),
        list(known.events),
        key=lambda row: (row.at_ns, row.kind, row.place, row.what),
        signals=lambda row: (row.signal,),
        text=lambda row: f"{row.kind} {row.place} {row.what} {row.why}",
        nothing="nothing has happened since this view was opened",
        by="newest first",
    )


PANELS: Final[dict[str, Callable[[Known, int], Rows[Any]]]] = {
    "flows": flows,
    "links": links,
    "rdma": queue_pairs,
    "events": events,
    "jobs": jobs,
}
