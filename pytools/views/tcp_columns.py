"""Columns of the TCP tables: by path, by connection, and by the kernel's reason for a drop. Pure."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.text import Text

from pytools import units
from pytools.signals import DropReason, TcpFlow, TcpNamespace, TcpPath
from pytools.units import duration, share
from pytools.views import tables
from pytools.views.columns import Column, Listing, figure, figures, little, much, named
from pytools.views.tables import alarm, amber, number

# Field of Retransmissions -> what --sort calls it, heading.
CAUSES: Final[Mapping[str, tuple[str, str]]] = {
    "fast": ("fast", "fast"),
    "timeout": ("rto", "RTO"),
    "tail_probe": ("tlp", "TLP"),
    "syn": ("syn", "SYN"),
    "unknown": ("other", "other"),
}
# How soon each is left out where room is short.
_SPARE: Final[Mapping[str, int]] = {"fast": 1, "timeout": 1, "tail_probe": 2, "syn": 5, "unknown": 13}


def _causes() -> Iterator[Column[Any]]:
    """A column each, of paths as of connections."""
    for name, (word, heading) in CAUSES.items():
        yield figure(heading, word, amber, operator.attrgetter(f"retransmitted.{name}"), _SPARE[name])


def paths(_now_ns: int) -> Listing[TcpPath]:
    """One row per path or interface: the last window."""
    return Listing(
        (
            figure("path", "path", str, _where, order=named),
            figure("retx", "retx", alarm, lambda row: row.retransmitted_segments),
            figure("share", "share", share, lambda row: row.retransmitted_share if row.segments_out else None),
            *_causes(),
            figure("spurious", "spurious", number, lambda row: row.spurious_segments, 6),
            figure("time-\nouts", "timeouts", alarm, lambda row: row.timeouts, 4),
            figure("zero\nwindows", "zero", alarm, lambda row: row.zero_windows, 7),
            figure("CE", "ce", share, _marked, 8),
            Column(
                "resets\nout / in",
                _resets,
                {"resets": much(lambda row: row.resets_sent + row.resets_received)},
                spare=12,
            ),
            figure("sent", "sent", units.bit_rate, _sending, 9),
            figure("retx\ntotal", "total", number, lambda row: row.total_segments, 11),
        ),
        lambda row: (-row.retransmitted_segments, row.interface, str(row.path or "")),
    )


def namespaces(_now_ns: int) -> Listing[TcpNamespace]:
    """One row per other network namespace: the last window in which anything was counted."""
    return Listing(
        (
            figure("pod or namespace", "pod", str, lambda row: row.namespace, order=named),
            figure("retx", "retx", alarm, lambda row: row.retransmitted_segments),
            figure("share", "share", share, lambda row: row.retransmitted_share if row.segments_out else None),
            *_causes(),
            figure("spurious", "spurious", number, lambda row: row.spurious_segments, 6),
            figure("time-\nouts", "timeouts", alarm, lambda row: row.timeouts, 4),
            figure("CE", "ce", share, _marked, 8),
            figure("sent", "sent", units.bit_rate, _sending, 9),
            figure("connections", "connections", number, lambda row: row.connections, 10),
            figure("retx\ntotal", "total", number, lambda row: row.total_segments, 11),
        ),
        lambda row: (-row.retransmitted_segments, -row.sent_bytes, row.namespace),
    )


def flows(now_ns: int) -> Listing[TcpFlow]:
    """One row per connection, since it began."""
    return Listing(
        (
            Column("connection", _ends, {"local": named(_local), "remote": named(_remote)}),
            tables.owner(spare=3),
            figure("pod", "pod", str, lambda row: row.namespace, 2, named, True),
            figure("retx", "retx", alarm, lambda row: row.retransmitted_segments),
            *_causes(),
            figure("spur-\nious", "spurious", number, lambda row: row.spurious_segments, 8),
            figure("time-\nouts", "timeouts", alarm, lambda row: row.timeouts, 7),
            figures(
                "srtt\nmin",
                duration,
                {"srtt": much(lambda row: row.srtt_ns), "min": much(lambda row: row.min_rtt_ns)},
                spare=3,
            ),
            figures(
                "cwnd\nssthresh",
                number,
                {"cwnd": little(lambda row: row.cwnd_segments), "ssthresh": little(lambda row: row.ssthresh_segments)},
                spare=10,
            ),
            Column(
                "rate\nsent",
                lambda row: f"{units.bit_rate(row.delivery_rate_bps)}\n{units.size(row.sent_bytes)}",
                {"rate": little(lambda row: row.delivery_rate_bps), "sent": much(lambda row: row.sent_bytes)},
                spare=4,
            ),
            figure("zero\nwin.", "zero", alarm, lambda row: row.zero_windows, 9),
            Column("CE", _marks, {"ce": much(_marked)}, spare=11),
            Column(
                "resets\ndrops",
                _resets_and_drops,
                {
                    "resets": much(lambda row: row.resets_sent + row.resets_received),
                    "drops": much(lambda row: sum(row.drops.values())),
                },
                left=True,
                spare=12,
            ),
            Column(
                "state\nlast look",
                lambda row: _state_now(row, now_ns),
                {
                    "state": named(_state),
                    "last": little(lambda row: -row.last_ns),
                    "stall": much(lambda row: row.stall.lasted_ns if row.stall else None),
                },
                left=True,
                spare=11,
            ),
            Column("path", _two_lines, {"path": named(_where)}, left=True, spare=6),
        ),
        lambda row: (-row.retransmitted_segments, -row.sent_bytes, row.local, row.local_port, row.remote),
    )


def reasons(_now_ns: int) -> Listing[DropReason]:
    """One row per reason of the kernel."""
    return Listing(
        (
            figure("reason", "reason", str, lambda row: row.reason, order=named),
            figure("in window", "window", alarm, lambda row: row.window_packets),
            figure("total", "total", number, lambda row: row.total_packets),
        ),
        lambda row: (-row.window_packets, -row.total_packets, row.reason),
    )


def _where(row: TcpPath | TcpFlow) -> str:
    return tables.place(row.path, row.interface)


def _marked(row: TcpPath | TcpFlow | TcpNamespace) -> float | None:
    return row.delivered_ce_segments / row.delivered_segments if row.delivered_segments else None


def _sending(row: TcpPath | TcpNamespace) -> float | None:
    return row.sent_bytes * 8e9 / row.window_ns if row.window_ns else None


def _marks(row: TcpFlow) -> str:
    return "off" if row.ecn == "off" else share(_marked(row))


def _resets(row: TcpPath) -> str:
    return f"{row.resets_sent:,} / {row.resets_received:,}"


def _resets_and_drops(row: TcpFlow) -> str:
    dropped = ", ".join(f"{name} {count:,}" for name, count in sorted(row.drops.items(), key=lambda item: -item[1]))
    return f"{row.resets_sent:,} out, {row.resets_received:,} in\n{dropped or '0'}"


def _local(row: TcpFlow) -> str:
    return tables.endpoint(row.local, row.local_port)


def _remote(row: TcpFlow) -> str:
    return tables.endpoint(row.remote, row.remote_port)


def _ends(row: TcpFlow) -> str:
    return f"{_local(row)}\n  → {_remote(row)}"


def _state(row: TcpFlow) -> str:
    return row.state if row.congestion == "open" else f"{row.state}, {row.congestion}"


def _state_now(row: TcpFlow, now_ns: int) -> str | Text:
    """A stall takes the place of the state, which is `established, loss` then."""
    looked = f"\n{tables.ago(row.last_ns, now_ns)}"
    if row.stall is None:
        return _state(row) + looked
    stalled = f"stalled {duration(row.stall.lasted_ns)}, RTO ×{row.stall.timeouts}"
    return Text().append(stalled, "red").append(looked)


def _two_lines(row: TcpFlow) -> str:
    if row.path is None:
        return f"{row.interface or tables.NO_INTERFACE}\n  {tables.NO_PATH}"
    rest = f"via {row.path.gateway}" if row.path.gateway else f"to {row.path.address}"
    return f"{tables.way(row.path, short=True)}\n  {rest}"
