"""What a view knows of TCP, links and RDMA: folds of signals, beside the one in model.py.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host. Everything is bounded: where there are more connections
or queue pairs than are remembered, those heard of longest ago go first, and it is told that there were more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from pytools.signals import (
    AnySignal,
    Link,
    LinkEvent,
    PacketDrops,
    Path,
    PathEcn,
    PathMtu,
    RdmaPort,
    RdmaQueuePair,
    RdmaSight,
    RdmaSuspects,
    TcpFlow,
    TcpHost,
    TcpPath,
)

FLOWS: Final = 4096
QUEUE_PAIRS: Final = 4096
EVENTS: Final = 200
SILENT_NS: Final = 5_000_000_000  # what was not heard of for so long (or three windows) is not vouched for
FORGOTTEN_NS: Final = 60_000_000_000
_SECOND_NS: Final = 1_000_000_000

FlowKey = tuple[str, int, str, int, str]
TcpPathKey = tuple[str, Path | None]
QueuePairKey = tuple[str, int, int]
EventKey = tuple[str, str, int]


class _Told(Protocol):
    @property
    def at_ns(self) -> int: ...


Key = TypeVar("Key")
Row = TypeVar("Row", bound=_Told)


@dataclass(frozen=True)
class Tcp:
    """The newest of everything about TCP, and of the packets that this kernel drops."""

    paths: Mapping[TcpPathKey, TcpPath] = field(default_factory=dict)
    flows: Mapping[FlowKey, TcpFlow] = field(default_factory=dict)
    flows_left_out: bool = False  # there were more than are remembered
    host: TcpHost | None = None
    drops: PacketDrops | None = None


@dataclass(frozen=True)
class Links:
    """The newest of everything about interfaces, and what happened to them lately, the newest last."""

    links: Mapping[str, Link] = field(default_factory=dict)
    events: Mapping[EventKey, LinkEvent] = field(default_factory=dict)
    mtus: Mapping[Path, PathMtu] = field(default_factory=dict)
    ecns: Mapping[Path, PathEcn] = field(default_factory=dict)


@dataclass(frozen=True)
class Rdma:
    """The newest of everything about RDMA."""

    ports: Mapping[tuple[str, int], RdmaPort] = field(default_factory=dict)
    queue_pairs: Mapping[QueuePairKey, RdmaQueuePair] = field(default_factory=dict)
    queue_pairs_left_out: bool = False
    suspects: RdmaSuspects | None = None
    sight: RdmaSight | None = None


# What is folded here.
TCP_TYPES: Final = (TcpPath, TcpFlow, TcpHost, PacketDrops)
LINK_TYPES: Final = (Link, LinkEvent, PathMtu, PathEcn)
RDMA_TYPES: Final = (RdmaPort, RdmaQueuePair, RdmaSuspects, RdmaSight)


def fold_tcp(tcp: Tcp, signals: Iterable[AnySignal], now_ns: int) -> Tcp:
    """What is known of TCP after these signals, in their order."""
    paths, flows, host, drops = dict(tcp.paths), dict(tcp.flows), tcp.host, tcp.drops
    for signal in signals:
        match signal:
            case TcpPath():
                paths[(signal.interface, signal.path)] = signal
            case TcpFlow():
                flows[flow_key(signal)] = signal
            case TcpHost():
                host = signal
            case PacketDrops():
                drops = signal
            case _:
                pass
    flows = _remembered(flows, now_ns)
    # Of those heard of in one second the ones that retransmitted most stay.
    kept = _newest(flows, FLOWS, lambda flow: (flow.at_ns // _SECOND_NS, flow.retransmitted_segments))
    left_out = len(kept) < len(flows) or (tcp.flows_left_out and len(kept) == FLOWS)
    return Tcp(_remembered(paths, now_ns), kept, left_out, host, drops)


def fold_links(links: Links, signals: Iterable[AnySignal], now_ns: int) -> Links:
    """What is known of interfaces after these signals, in their order."""
    found, events = dict(links.links), dict(links.events)
    mtus, ecns = dict(links.mtus), dict(links.ecns)
    for signal in signals:
        match signal:
            case Link():
                found[signal.interface] = signal
            case LinkEvent():  # an event may be told again to those who come late
                events[(signal.interface, signal.what, signal.happened_ns)] = signal
            case PathMtu():
                mtus[signal.path] = signal
            case PathEcn():
                ecns[signal.path] = signal
            case _:
                pass
    return Links(
        _remembered(found, now_ns),
        _newest(events, EVENTS, lambda event: (event.happened_ns,)),
        _remembered(mtus, now_ns),
        _remembered(ecns, now_ns),
    )


def fold_rdma(rdma: Rdma, signals: Iterable[AnySignal], now_ns: int) -> Rdma:
    """What is known of RDMA after these signals, in their order."""
    ports, pairs, suspects, sight = dict(rdma.ports), dict(rdma.queue_pairs), rdma.suspects, rdma.sight
    for signal in signals:
        match signal:
            case RdmaPort():
                ports[(signal.device, signal.port)] = signal
            case RdmaQueuePair():
                pairs[(signal.device, signal.qp_number, signal.owner.pid)] = signal
            case RdmaSuspects():
                suspects = signal
            case RdmaSight():
                sight = signal
            case _:
                pass
    pairs = _remembered(pairs, now_ns)
    kept = _newest(pairs, QUEUE_PAIRS, lambda pair: (not pair.closed, pair.at_ns // _SECOND_NS, pair.outstanding_bytes))
    left_out = len(kept) < len(pairs) or (rdma.queue_pairs_left_out and len(kept) == QUEUE_PAIRS)
    return Rdma(_remembered(ports, now_ns), kept, left_out, suspects, sight)


def _remembered(rows: Mapping[Key, Row], now_ns: int) -> dict[Key, Row]:
    """Without those that nobody spoke of for long."""
    return {key: row for key, row in rows.items() if now_ns - row.at_ns <= FORGOTTEN_NS}


def _newest(rows: Mapping[Key, Row], most: int, rank: Callable[[Row], tuple[int, ...]]) -> dict[Key, Row]:
    """At most so many, those of the highest rank, in their order."""
    if len(rows) <= most:
        return dict(rows)
    return dict(sorted(rows.items(), key=lambda item: rank(item[1]))[-most:])


def flow_key(flow: TcpFlow) -> FlowKey:
    """What tells connections apart: a connection that moved to another interface has two rows."""
    return (flow.local, flow.local_port, flow.remote, flow.remote_port, flow.interface)


def is_silent(row: _Told, now_ns: int, window_ns: int = 0) -> bool:
    """Whether the last word about something is too old to stand for now."""
    return now_ns - row.at_ns > max(SILENT_NS, 3 * window_ns)
