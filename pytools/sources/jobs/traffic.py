"""What the ranks of this host send: their TCP connections and queue pairs, summed by path over a window.

Connections are joined by process; those of other network namespaces, whose process is not known, by control group.
What a signal adds is counted when it comes, while it is in the processor's caches, and only numbers are kept of it:
to read thousands of signals once more at the end of a window costs more than all else of a job.

Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from pytools.ipc.bus import Published
from pytools.signals import Path, RdmaQueuePair, TcpFlow
from pytools.sources.jobs.processes import Member

TYPES: Final = frozenset({"tcp_flow", "rdma_qp"})
_MOST: Final = 65_536  # connections and queue pairs
_SILENT_NS: Final = 15 * 10**9  # every fourth window all are published
_SWEEP_NS: Final = 5 * 10**9  # between looks for connections that are silent

Holder = tuple[Hashable, int]  # job, rank
Where = tuple[Hashable, Path | None, str]  # job, path, interface or device


@dataclass(slots=True)
class Sum:
    """What the ranks of a job have on a path, in a window."""

    where: Where
    connections: int = 0
    sent: int = 0
    received: int = 0
    segments: int = 0
    retransmitted: int = 0  # of these segments
    timeouts: int = 0
    flows: list[int] = field(default_factory=list)  # bytes sent by each connection that was told of
    stalls: list[tuple[int, TcpFlow]] = field(default_factory=list)  # timeouts of connections that had any, or wait
    pairs: list[RdmaQueuePair] = field(default_factory=list)


class _Place:
    """A path of a job: what is there now, and the sum of this window."""

    __slots__ = ("connections", "stalls", "sum")

    def __init__(self, where: Where) -> None:
        self.connections = 0
        self.begin(where)

    def begin(self, where: Where) -> None:
        """Begin a window."""
        self.sum = Sum(where)
        self.stalls: dict[Hashable, tuple[int, TcpFlow]] = {}


@dataclass(slots=True)
class _Flow:
    """A connection, with its counts as last reported."""

    holder: Holder
    path: Path | None
    place: _Place
    at_ns: int
    sent: int = 0
    received: int = 0
    segments: int = 0
    retransmitted: int = 0
    timeouts: int = 0
    turn: int = -1  # the window in which it was last reported
    entry: int = 0  # among the flows of that window's sum

    def set(self, signal: TcpFlow) -> None:
        """Take these counts for what was before."""
        self.sent, self.received, self.segments = signal.sent_bytes, signal.received_bytes, signal.segments_out
        self.retransmitted, self.timeouts = signal.retransmitted_segments, signal.timeouts


@dataclass(slots=True)
class _Pair:
    """A queue pair, as last reported, and as it was when the window began."""

    holder: Holder
    where: Where
    signal: RdmaQueuePair
    before: RdmaQueuePair


class Traffic:
    """Connections and queue pairs of ranks, from the signals about them."""

    def __init__(self) -> None:
        self._flows: dict[Hashable, _Flow] = {}
        self._places: dict[Where, _Place] = {}
        self._closed: set[Hashable] = set()  # connections, within the window
        self._pairs: dict[Hashable, _Pair] = {}
        self._held: dict[Holder, int] = {}  # connections of each rank
        self._held_pairs: Counter[Holder] = Counter()
        self._by_pid: dict[int, Holder] = {}
        self._by_group: dict[str, Holder | None] = {}  # None: of several ranks
        self._began_ns = self._sweep_ns = self._turn = 0
        self.too_many = 0

    def set_ranks(self, jobs: Mapping[Hashable, list[Member]]) -> None:
        self._by_pid, self._by_group = {}, {}
        holders: dict[Holder, Holder] = {}  # one object of each, so that most comparisons are of identity
        for job, members in jobs.items():
            for each in members:
                holder = job, each.place.rank
                holder = self._by_pid[each.owner.pid] = holders.setdefault(holder, holder)
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
                flow = self._flows.get(ends)
                if flow is None or flow.holder is not holder or flow.path is not signal.path:  # seldom
                    flow = self._placed(ends, flow, holder, signal)
                if flow is not None:
                    self._count(ends, flow, signal)
        elif isinstance(signal, RdmaQueuePair):
            holder = self._by_pid.get(signal.owner.pid)
            if holder is not None:
                self._keep_pair(holder, signal)

    def _placed(self, ends: Hashable, flow: _Flow | None, holder: Holder, signal: TcpFlow) -> _Flow | None:
        """A connection that is new, or that has gone to another path or rank."""
        if flow is None and len(self._flows) + len(self._pairs) >= _MOST:
            self.too_many += 1
            return None
        where = holder[0], signal.path, signal.interface
        place = self._places.get(where)
        if place is None:
            place = self._places[where] = _Place(where)
        place.connections += 1
        self._held[holder] = self._held.get(holder, 0) + 1
        if flow is None:
            flow = self._flows[ends] = _Flow(holder, signal.path, place, signal.at_ns)
            if not signal.first_ns >= self._began_ns > 0:  # what it did before is not of this window
                flow.set(signal)
                flow.turn = self._turn
                flow.entry = len(place.sum.flows)
                place.sum.flows.append(0)
            return flow
        self._leave(flow)
        if place is not flow.place:
            flow.turn = -1
        flow.holder, flow.path, flow.place = holder, signal.path, place
        return flow

    def _leave(self, flow: _Flow) -> None:
        flow.place.connections -= 1
        self._held[flow.holder] -= 1
        if not self._held[flow.holder]:
            del self._held[flow.holder]

    def _count(self, ends: Hashable, flow: _Flow, signal: TcpFlow) -> None:
        """Add what a connection did since it was last reported."""
        flow.at_ns = signal.at_ns
        if signal.state == "close":
            self._closed.add(ends)
        sent, received = signal.sent_bytes, signal.received_bytes
        more, taken = sent - flow.sent, received - flow.received
        if more < 0 or taken < 0:  # counts went back: another one has the same ends
            flow.set(signal)
            if signal.state != "close":
                self._closed.discard(ends)
            return
        segments, retransmitted = signal.segments_out, signal.retransmitted_segments
        found = flow.place.sum
        if more or taken or segments != flow.segments:
            found.sent += more
            found.received += taken
            found.segments += segments - flow.segments
            flow.sent, flow.received, flow.segments = sent, received, segments
        if retransmitted != flow.retransmitted:
            found.retransmitted += retransmitted - flow.retransmitted
            flow.retransmitted = retransmitted
        if flow.turn != self._turn:
            flow.turn, flow.entry = self._turn, len(found.flows)
            found.flows.append(more)
        else:
            found.flows[flow.entry] += more
        if signal.timeouts != flow.timeouts or signal.stall is not None:
            timeouts = signal.timeouts - flow.timeouts
            found.timeouts += timeouts
            earlier = flow.place.stalls.get(ends)
            flow.place.stalls[ends] = timeouts + (0 if earlier is None else earlier[0]), signal
            flow.timeouts = signal.timeouts

    def _keep_pair(self, holder: Holder, signal: RdmaQueuePair) -> None:
        key = signal.device, signal.qp_number, signal.owner.pid
        where = holder[0], signal.path, signal.path.interface if signal.path else signal.device
        pair = self._pairs.get(key)
        if pair is not None:
            pair.holder, pair.where, pair.signal = holder, where, signal
        elif len(self._flows) + len(self._pairs) < _MOST:
            self._pairs[key] = _Pair(holder, where, signal, signal)
        else:
            self.too_many += 1

    def window(self, now_ns: int) -> list[Sum]:
        """What each job has on each path, since the last call; begins another window."""
        over: Iterable[Hashable] = self._closed
        if now_ns - self._sweep_ns >= _SWEEP_NS:
            self._sweep_ns, silent_ns = now_ns, now_ns - _SILENT_NS
            over = self._closed | {key for key, flow in self._flows.items() if flow.at_ns < silent_ns}
        for key in over:
            self._leave(self._flows.pop(key))
        self._closed.clear()
        sums: dict[Where, Sum] = {}
        for where, place in list(self._places.items()):
            found = sums[where] = place.sum
            found.connections, found.stalls = place.connections, list(place.stalls.values())
            place.begin(where)
            if not place.connections:
                del self._places[where]
        self._sum_pairs(sums, now_ns)
        self._began_ns = now_ns
        self._turn += 1
        return [each for each in sums.values() if each.connections or each.pairs or each.sent or each.received]

    def _sum_pairs(self, sums: dict[Where, Sum], now_ns: int) -> None:
        self._held_pairs.clear()
        for key, pair in list(self._pairs.items()):
            signal, before, pair.before = pair.signal, pair.before, pair.signal
            found = sums.setdefault(pair.where, Sum(pair.where))
            sent = signal.completed_bytes - before.completed_bytes
            received = signal.received_bytes - before.received_bytes
            if sent >= 0 and received >= 0:  # else the counts went back
                found.sent += sent
                found.received += received
            if signal.closed or now_ns - signal.at_ns > _SILENT_NS:
                del self._pairs[key]
            else:
                found.pairs.append(signal)
                self._held_pairs[pair.holder] += 1

    def held(self, job: Hashable, rank: int) -> tuple[int, int]:
        """How many connections and queue pairs a rank had at the end of the window."""
        return self._held.get((job, rank), 0), self._held_pairs[job, rank]

    def forget(self) -> None:
        """Nobody listens, or there is no job: begin anew then."""
        for each in (self._flows, self._places, self._closed, self._pairs, self._held, self._held_pairs):
            each.clear()
        self._began_ns = self._sweep_ns = 0
