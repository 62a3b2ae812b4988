"""What the ranks of this host send: their TCP connections and queue pairs, summed by path over a window.

Connections are joined by process; those of other network namespaces, whose process is not known, by control group.
Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytools.ipc.bus import Published
from pytools.signals import Path, RdmaQueuePair, TcpFlow
from pytools.sources.jobs.processes import Member

TYPES: Final = frozenset({"tcp_flow", "rdma_qp"})
_MOST: Final = 65_536  # connections and queue pairs
_SILENT_NS: Final = 15 * 10**9  # every fourth window all are published

Holder = tuple[Hashable, int]  # job, rank
Where = tuple[Holder, Path | None, str]


@dataclass(slots=True)
class Sum:
    """What a rank has on a path, in a window."""

    where: Where
    connections: int = 0
    queue_pairs: int = 0
    sent: int = 0
    received: int = 0
    segments: int = 0
    retransmitted: int = 0  # of these segments
    timeouts: int = 0
    flows: list[int] = field(default_factory=list)  # bytes sent by each connection that was told of
    stalls: list[tuple[int, TcpFlow]] = field(default_factory=list)  # timeouts of connections that had any, or wait
    pairs: list[RdmaQueuePair] = field(default_factory=list)


@dataclass(slots=True)
class _Use:
    """A connection or queue pair, as last reported, and as it was when the window began."""

    holder: Holder
    path: Path | None
    sum: list[Sum]  # of this window: one element
    signal: TcpFlow | RdmaQueuePair
    before: TcpFlow | RdmaQueuePair | None  # None: it began within the window


class Traffic:
    """Connections and queue pairs of ranks, from the signals about them."""

    def __init__(self) -> None:
        self._uses: dict[Hashable, _Use] = {}
        self._sums: dict[Where, list[Sum]] = {}
        self._by_pid: dict[int, Holder] = {}
        self._by_group: dict[str, Holder | None] = {}  # None: of several ranks
        self._began_ns = 0
        self.too_many = 0

    def set_ranks(self, jobs: Mapping[Hashable, list[Member]]) -> None:
        self._by_pid, self._by_group = {}, {}
        for job, members in jobs.items():
            for each in members:
                holder = job, each.place.rank
                self._by_pid[each.owner.pid] = holder
                group = each.owner.cgroup
                self._by_group[group] = holder if self._by_group.get(group, holder) == holder else None

    def offer(self, published: Published) -> None:
        """Take a signal, if it is about a rank."""
        signal = published.signal
        if isinstance(signal, TcpFlow):
            holder = self._by_pid.get(signal.owner.pid)
            if holder is None and signal.namespace:
                holder = self._by_group.get(signal.owner.cgroup)
            if holder is not None:
                name = signal.interface
                ends = signal.local, signal.local_port, signal.remote, signal.remote_port, name, signal.namespace
                self._keep(ends, holder, name, signal, signal.first_ns >= self._began_ns > 0)
        elif isinstance(signal, RdmaQueuePair):
            holder = self._by_pid.get(signal.owner.pid)
            if holder is not None:
                name = signal.path.interface if signal.path else signal.device
                self._keep((signal.device, signal.qp_number, signal.owner.pid), holder, name, signal, False)

    def _keep(self, key: Hashable, holder: Holder, name: str, signal: TcpFlow | RdmaQueuePair, is_new: bool) -> None:
        use = self._uses.get(key)
        if use is not None:
            use.signal, path = signal, signal.path
            if use.holder is not holder or (use.path is not path and use.path != path):
                use.holder, use.path, use.sum = holder, signal.path, self._sum((holder, signal.path, name))
        elif len(self._uses) < _MOST:
            before = None if is_new else signal
            self._uses[key] = _Use(holder, signal.path, self._sum((holder, signal.path, name)), signal, before)
        else:
            self.too_many += 1

    def _sum(self, where: Where) -> list[Sum]:
        found = self._sums.get(where)
        if found is None:
            found = self._sums[where] = [Sum(where)]
        return found

    def window(self, now_ns: int) -> list[Sum]:
        """What each rank has on each path, since the last call; begins another window."""
        over: list[Hashable] = []
        for key, use in self._uses.items():
            found, signal, before = use.sum[0], use.signal, use.before
            if isinstance(signal, TcpFlow):
                if signal is not before:
                    use.before = signal
                    _add_flow(found, signal, before)  # type: ignore[arg-type]  # what has one key is of one kind
                if signal.state != "close" and now_ns - signal.at_ns <= _SILENT_NS:
                    found.connections += 1
                else:
                    over.append(key)
                continue
            use.before = signal
            if before is not None:
                sent = signal.completed_bytes - before.completed_bytes  # type: ignore[union-attr]
                received = signal.received_bytes - before.received_bytes
                if sent >= 0 and received >= 0:  # else the counts went back
                    found.sent += sent
                    found.received += received
            if not signal.closed and now_ns - signal.at_ns <= _SILENT_NS:
                found.queue_pairs += 1
                found.pairs.append(signal)
            else:
                over.append(key)
        for key in over:
            del self._uses[key]
        self._began_ns = now_ns
        return list(self._taken())

    def _taken(self) -> Iterator[Sum]:
        """What was used in the window, each with an empty one in its place."""
        for where, held in list(self._sums.items()):
            found = held[0]
            if found.connections or found.queue_pairs or found.sent or found.received:
                held[0] = Sum(where)
                yield found
            else:
                del self._sums[where]

    def forget(self) -> None:
        """Nobody listens, or there is no job: begin anew then."""
        self._uses.clear()
        self._sums.clear()
        self._began_ns = 0


def _add_flow(found: Sum, signal: TcpFlow, before: TcpFlow | None) -> None:
    """Count what a connection did within the window."""
    sent, received, timeouts = signal.sent_bytes, signal.received_bytes, signal.timeouts
    segments, retransmitted = signal.segments_out, signal.retransmitted_segments
    if before is not None:
        sent -= before.sent_bytes
        received -= before.received_bytes
        timeouts -= before.timeouts
        segments -= before.segments_out
        retransmitted -= before.retransmitted_segments
    if sent < 0 or received < 0:  # counts went back
        return
    found.sent += sent
    found.received += received
    found.segments += segments
    found.retransmitted += retransmitted
    found.flows.append(sent)
    if timeouts or signal.stall is not None:
        found.timeouts += timeouts
        found.stalls.append((timeouts, signal))
