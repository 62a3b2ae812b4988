"""What each kind of signal is about, and what is counted of it, by metric. Pure.

A row takes signals as they come, some of them fifty times a second, and is read when somebody asks for metrics. Totals
of metrics in seconds are nanoseconds here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, Final, NamedTuple, get_args, get_type_hints

import msgspec

from pytools import signals as sig
from pytools.figures import DIRECTIONS
from pytools.views.metrics.parts import Key, Row
from pytools.views.model import is_shown, is_whole_path

_PATHS: Final = 512
# Kind of row -> how many there can be.
ROWS: Final = {
    "path": _PATHS,
    "app": 2 * _PATHS,
    "interface": 64,
    "group": 512,
    "port": 64,
    "gpu": 64,
    "namespace": 256,
    "job": 256,
}
MEMBERS: Final = 16  # of a group
WAYS: Final = 64  # behind the first hop of a path
CAUSES: Final = sig.Retransmissions.__struct_fields__
PORT_EVENTS: Final = ("cnp_received", "cnp_sent", "ecn_marked", "out_of_sequence", "timeouts", "receiver_not_ready")
EVENTS: Final = get_args(get_type_hints(sig.LinkEvent)["what"])
ROUND_TRIPS: Final = ("swerve_path_round_trip_seconds",)
QUEUEING: Final = tuple(("swerve_path_queueing_delay_seconds", each) for each in DIRECTIONS)
TIME_TO_ACT: Final = ("swerve_time_to_act_seconds",)
_ANSWERED, _LOST = (("swerve_path_probes_total", each) for each in ("answered", "lost"))
_ACTS: Final = (
    *((each, how) for each in ("overlay", "pin", "label", "hold", "notify")
      for how in ("dry_run", "applied", "failed", "undone")),
    *((each, how) for each in ("alert", "operator") for how in ("alert", "alert_over")),
)  # fmt: skip

# Metric and labels behind those of the row -> field of the signal.
Counts = Mapping[Key, str]
_OF_TCP_PATH: Final[Counts] = {
    **{("swerve_path_tcp_retransmitted_segments_total", each): f"retransmitted.{each}" for each in CAUSES},
    ("swerve_path_tcp_retransmitted_bytes_total",): "retransmitted_bytes",
    ("swerve_path_tcp_spurious_segments_total",): "spurious_segments",
    ("swerve_path_tcp_timeouts_total",): "timeouts",
    ("swerve_path_tcp_segments_total",): "segments_out",
    ("swerve_path_tcp_sent_bytes_total",): "sent_bytes",
    ("swerve_path_tcp_delivered_segments_total",): "delivered_segments",
    ("swerve_path_tcp_delivered_ce_segments_total",): "delivered_ce_segments",
    ("swerve_path_tcp_zero_windows_total",): "zero_windows",
    **{("swerve_path_tcp_resets_total", each): f"resets_{each}" for each in ("sent", "received")},
}
_OF_TCP_HOST: Final[Counts] = {
    **{("swerve_tcp_retransmitted_segments_total", each): f"retransmitted.{each}" for each in CAUSES},
    ("swerve_tcp_retransmitted_bytes_total",): "retransmitted_bytes",
    ("swerve_tcp_spurious_segments_total",): "spurious_segments",
    ("swerve_tcp_timeouts_total",): "timeouts",
    ("swerve_tcp_sent_bytes_total",): "sent_bytes",
    ("swerve_tcp_zero_windows_total",): "zero_windows",
    ("swerve_tcp_connections_seen_total",): "created",
    ("swerve_tcp_connections_evicted_total",): "evicted",
    **{("swerve_tcp_resets_total", each): f"resets_{each}" for each in ("sent", "refused", "received")},
}
_OF_NAMESPACE: Final[Counts] = {
    **{("swerve_namespace_tcp_retransmitted_segments_total", each): f"retransmitted.{each}" for each in CAUSES},
    ("swerve_namespace_tcp_timeouts_total",): "timeouts",
    ("swerve_namespace_tcp_segments_total",): "segments_out",
    ("swerve_namespace_tcp_sent_bytes_total",): "sent_bytes",
}
_OF_MARKS: Final[Counts] = {
    ("swerve_path_markable_packets_total",): "total_packets",
    ("swerve_path_marked_packets_total",): "total_ce_packets",
}
_OF_HOLD: Final[Counts] = {
    ("swerve_path_held_packets_total",): "held_packets",
    ("swerve_path_held_bytes_total",): "held_bytes",
    ("swerve_path_held_seconds_total",): "waited_ns",
    ("swerve_path_hold_samples_total",): "samples",
    ("swerve_path_hold_samples_above_total",): "samples_above",
}
_OF_APP: Final[Counts] = {("swerve_app_samples_total", each): each for each in ("joined", "ambiguous", "unmatched")}
_OF_PORT: Final[Counts] = {("swerve_rdma_port_events_total", each): each for each in PORT_EVENTS}
_OF_LINK: Final[Counts] = {
    ("swerve_link_carrier_changes_total",): "carrier_changes",
    **{
        (f"swerve_link_{what}_total", way): f"counters.{way}_{what}"
        for way in ("received", "sent")
        for what in ("bytes", "packets", "errors", "drops")
    },
}
_OF_PAIR: Final[Counts] = {
    **{("swerve_rdma_requests_total", each): each for each in ("posted", "completed")},
    **{("swerve_rdma_bytes_total", each): f"{each}_bytes" for each in ("posted", "completed")},
    ("swerve_rdma_refused_posts_total",): "refused_posts",
    ("swerve_rdma_untracked_requests_total",): "untracked",
}

Take = Callable[[Row, Any, int], None]  # a row, a signal about it, and which agent it is from


def _newest(row: Row, signal: object, _epoch: int) -> None:
    row.newest[type(signal)] = signal


def _growing(counts: Counts) -> Take:
    """Of a window each: they are added up."""
    fields = [(key, attrgetter(field)) for key, field in counts.items()]

    def take(row: Row, signal: object, _epoch: int) -> None:
        row.newest[type(signal)] = signal
        for key, field in fields:
            row.totals[key].value += field(signal)

    return take


def _reading(counts: Counts, of_agent: bool) -> Take:
    """Readings of counters: the agent's, which begin anew with it, or those of somebody who is there before it."""
    fields = [(key, attrgetter(field)) for key, field in counts.items()]

    def take(row: Row, signal: object, epoch: int) -> None:
        row.newest[type(signal)] = signal
        for key, field in fields:
            row.totals.read(key, field(signal), epoch if of_agent else 0)

    return take


def _gpu(row: Row, signal: sig.Gpu, _epoch: int) -> None:
    row.newest[sig.Gpu] = signal
    for key, grown in (
        (("swerve_gpu_ecc_errors_total", "corrected"), signal.ecc_corrected),
        (("swerve_gpu_ecc_errors_total", "uncorrected"), signal.ecc_uncorrected),
        (("swerve_gpu_pcie_replays_total",), signal.pcie_replays),
        (("swerve_gpu_nvlink_errors_total",), signal.link_errors),
        (("swerve_gpu_xid_errors_total",), len(signal.xids)),
    ):
        if grown is not None:
            row.totals[key].value += grown


def _delay(row: Row, signal: sig.PathDelay, _epoch: int) -> None:
    """A window; the longest one is shown."""
    for key, delay in zip(QUEUEING, (signal.forward, signal.reverse), strict=True):
        if delay.queueing_histogram is not None:
            row.histograms[key].add(delay.queueing_histogram)
    old = row.newest.get(sig.PathDelay)
    if old is None or is_shown(signal.window_ns, old.window_ns, signal.at_ns - old.at_ns):
        row.newest[sig.PathDelay] = signal


def _samples(row: Row, signal: sig.ProbeSamples, _epoch: int) -> None:
    """Probes whose fate is settled, each once; a round trip below zero is left out: a clock was stepped."""
    answered = 0
    for forward, reverse in zip(signal.forward_ns, signal.reverse_ns, strict=True):
        answered += forward is not None or reverse is not None
        if forward is None or reverse is None:
            continue
        if forward + reverse < 0:
            row.left_out["round_trip"] += 1
        else:
            row.histograms[ROUND_TRIPS].observe(forward + reverse)
    row.totals[_ANSWERED].value += answered
    row.totals[_LOST].value += len(signal.forward_ns) - answered


class Ways(NamedTuple):
    at_ns: int  # of the newest record
    by_number: Mapping[int, sig.PathWay]


def _way(row: Row, signal: sig.PathWay, _epoch: int) -> None:
    before: Ways = row.newest.get(sig.PathWay, Ways(0, {}))
    known = {
        way: told
        for way, told in before.by_number.items()
        if told.ways == signal.ways and signal.at_ns - told.at_ns < sig.WAY_LASTS_NS
    }
    if signal.way in known or len(known) < WAYS:
        row.newest[sig.PathWay] = Ways(signal.at_ns, known | {signal.way: signal})
    else:
        row.left_out["way"] += 1


_link_counters: Final = _reading(_OF_LINK, of_agent=False)


def _link(row: Row, signal: sig.Link, epoch: int) -> None:
    """The kernel's counters begin anew when the interface or its queue is made anew."""
    _link_counters(row, signal, epoch)
    for queue in signal.qdiscs:
        if queue.parent == "root":  # what hangs below it is in its figures
            for what in ("drops", "overlimits", "requeues"):
                row.totals.read((f"swerve_link_queue_{what}_total",), getattr(queue, what))
    for pause in signal.pauses:
        priority = "all" if pause.priority is None else str(pause.priority)
        for way in ("received", "sent"):
            row.totals.read(("swerve_link_pause_frames_total", priority, way), getattr(pause, way))
            stopped_us = getattr(pause, f"{way}_duration_us")
            stopped_ns = None if stopped_us is None else stopped_us * 1000
            row.totals.read(("swerve_link_paused_seconds_total", priority, way), stopped_ns)


def _event(row: Row, signal: sig.LinkEvent, _epoch: int) -> None:
    """Something happened; the same event may be told again to those who come late."""
    before = row.newest.get((sig.LinkEvent, signal.what))
    if before is None or signal.happened_ns > before.happened_ns:
        row.newest[sig.LinkEvent, signal.what] = signal
        row.totals["swerve_link_events_total", signal.what].value += 1


def _group(row: Row, signal: sig.NexthopGroup, _epoch: int) -> None:
    """The kernel begins anew with each change of weights; nexthops that left the group may come back."""
    row.newest[sig.NexthopGroup] = signal
    for member in signal.members:
        row.totals.read(("swerve_nexthop_packets_total", member.interface, member.gateway), member.packets)


def _drops(row: Row, signal: sig.PacketDrops, epoch: int) -> None:
    for each in signal.reasons:
        row.totals.read(("swerve_kernel_dropped_packets_total", each.reason), each.total_packets, epoch)


def _cost(row: Row, signal: sig.Self, epoch: int) -> None:
    row.newest[sig.Self] = signal
    for name, count in signal.drops.items():
        row.totals.read(("swerve_drops_total", name), count, epoch)
    for program in signal.programs:
        row.totals.read(("swerve_program_runs_total", program.name), program.runs, epoch)
        row.totals.read(("swerve_program_run_time_seconds_total", program.name), program.run_time_ns, epoch)


def _act(row: Row, signal: sig.Act, _epoch: int) -> None:
    row.totals["swerve_acts_total", signal.actuator, signal.outcome].value += 1
    if signal.outcome == "applied" and signal.acknowledged_ns is not None:
        row.histograms[TIME_TO_ACT].observe(max(signal.acknowledged_ns - signal.seen_ns, 0))


_pair_fields: Final = [(key, attrgetter(field)) for key, field in _OF_PAIR.items()]


def pair_grown(row: Row, signal: sig.RdmaQueuePair, of_all: Row) -> None:
    """A queue pair has no series: what its counters grew by is added to those of all."""
    row.newest[sig.RdmaQueuePair] = signal
    for key, field in _pair_fields:
        if grown := row.totals[key].take(field(signal)):
            of_all.totals[key].value += grown
    for status, count in signal.errors.items():
        key = ("swerve_rdma_errors_total", status)
        of_all.totals[key].value += row.totals[key].take(count)


class Subject(NamedTuple):
    """What signals of a kind are about."""

    table: str  # kind of row; empty: the host
    labels: Callable[[Any], Key | None]  # None: nothing that has a row
    take: Take = _newest


def _of_path(signal: Any) -> Key:
    return msgspec.structs.astuple(signal.path)


def _of_tcp(signal: sig.TcpPath) -> Key:
    """Where only the interface is named: all TCP on it that is on no measured path."""
    return (signal.host, "", "", "", signal.interface) if signal.path is None else _of_path(signal)


def _of_app(signal: sig.AppDelay) -> Key | None:
    return (*_of_path(signal), signal.protocol) if signal.path is not None and is_whole_path(signal) else None


def _of_interface(signal: sig.Link | sig.LinkEvent) -> Key:
    return (signal.interface,)


def _of_host(_signal: object) -> Key:
    return ()


SUBJECTS: Final[dict[type, Subject]] = {
    sig.PathDelay: Subject("path", _of_path, _delay),
    sig.PathLiveness: Subject("path", _of_path),
    sig.ProbeSamples: Subject("path", _of_path, _samples),
    sig.PathMtu: Subject("path", _of_path),
    sig.PathEcn: Subject("path", _of_path, _reading(_OF_MARKS, of_agent=True)),
    sig.PathState: Subject("path", _of_path),
    sig.HoldState: Subject("path", _of_path, _reading(_OF_HOLD, of_agent=False)),
    sig.PathWay: Subject("path", _of_path, _way),
    sig.TcpPath: Subject("path", _of_tcp, _growing(_OF_TCP_PATH)),
    sig.AppDelay: Subject("app", _of_app, _growing(_OF_APP)),
    sig.Link: Subject("interface", _of_interface, _link),
    sig.LinkEvent: Subject("interface", _of_interface, _event),
    sig.NexthopGroup: Subject("group", lambda signal: (str(signal.group_id),), _group),
    sig.RdmaPort: Subject("port", lambda signal: (signal.device, str(signal.port)), _reading(_OF_PORT, of_agent=False)),
    sig.Gpu: Subject("gpu", lambda signal: (str(signal.gpu), signal.uuid), _gpu),
    sig.TcpHost: Subject("", _of_host, _reading(_OF_TCP_HOST, of_agent=True)),
    sig.TcpNamespace: Subject("namespace", lambda signal: (signal.namespace,), _growing(_OF_NAMESPACE)),
    sig.PacketDrops: Subject("", _of_host, _drops),
    sig.Self: Subject("", _of_host, _cost),
    sig.Act: Subject("", _of_host, _act),
    sig.RdmaSuspects: Subject("", _of_host),
    sig.Job: Subject("job", lambda signal: (signal.job, str(signal.uid))),
    sig.RdmaSight: Subject("", _of_host),
}


def row_of(kind: str, labels: Key, left_out: Counter[str]) -> Row:
    """A new row of this kind, with the totals and histograms that it has from the beginning."""
    match kind:
        case "path" if labels[1]:  # one without a destination is an interface, of which there is TCP alone
            return Row(labels, left_out, (_ANSWERED, _LOST), (ROUND_TRIPS, *QUEUEING))
        case "interface":
            return Row(labels, left_out, [("swerve_link_events_total", each) for each in EVENTS])
        case "group":
            return Row(labels, left_out, limit=MEMBERS)
        case "host":
            zeros = [*(("swerve_acts_total", *each) for each in _ACTS), *_OF_PAIR]
            return Row(labels, left_out, zeros, [TIME_TO_ACT])
    return Row(labels, left_out)


class Table:
    """Rows by their labels, no more than a limit; whoever comes when it is full is counted and not remembered.

    Parameters
    ----------
    limit : int
        How many rows at most.
    left_out : Counter
        Where signals that found no row are counted.
    """

    def __init__(self, kind: str, limit: int, left_out: Counter[str]) -> None:
        self._kind, self._limit, self._left_out = kind, limit, left_out
        self._rows: dict[Key, Row] = {}

    def row(self, labels: Key, at_ns: int) -> Row | None:
        """The row of these labels, which was heard of then; None, and counted, when there is no room for another."""
        row = self._rows.get(labels)
        if row is None:
            if len(self._rows) >= self._limit:
                self._left_out[self._kind] += 1
                return None
            row = self._rows[labels] = row_of(self._kind, labels, self._left_out)
        row.heard_ns = max(row.heard_ns, at_ns)
        return row

    def remove(self, labels: Key) -> None:
        self._rows.pop(labels, None)

    def forget(self, before_ns: int) -> None:
        """Remove what was last heard of before then."""
        self._rows = {labels: row for labels, row in self._rows.items() if row.heard_ns >= before_ns}

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())
