"""What the ranks of this host send: their TCP connections and queue pairs, summed by path over a window.

Connections are joined by process; those of other network namespaces, whose process is not known, by control group.
Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from pytools.ipc.bus import Published
from pytools.signals import Path, RdmaQueuePair, TcpFlow
from pytools.sources.jobs.processes import Member

TYPES: Final = frozenset({"tcp_flow", "rdma_qp"})
_MOST: Final = 65_536  # connections and queue pairs
_SILENT_NS: Final = 15 * 10**9  # every fourth window all are published

Holder = tuple[Hashable, int]  # job, rank
Where = tuple[Hashable, Path | None, str]  # job, path, interface or device
Signal = TypeVar("Signal", TcpFlow, RdmaQueuePair)


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

    def add_flows(self, uses: Iterable[_Use[TcpFlow]]) -> None:
        """Count what connections did within the window. In one loop over local variables: there are thousands."""
        all_sent = all_received = all_segments = all_retransmitted = 0
        for use in uses:
            signal, before = use.signal, use.before
            if signal is before:
                continue
            use.before = signal
            sent, received, timeouts = signal.sent_bytes, signal.received_bytes, signal.timeouts
            segments, retransmitted = signal.segments_out, signal.retransmitted_segments
            if before is not None:
                sent -= before.sent_bytes
                received -= before.received_bytes
                timeouts -= before.timeouts
                segments -= before.segments_out
                retransmitted -= before.retransmitted_segments
            if sent < 0 or received < 0:  # counts went back
                continue
            all_sent += sent
            all_received += received
            all_segments += segments
            all_retransmitted += retransmitted
            self.flows.append(sent)
            if timeouts or signal.stall is not None:
                self.timeouts += timeouts
                self.stalls.append((timeouts, signal))
        self.sent += all_sent
        self.received += all_received
        self.segments += all_segments
        self.retransmitted += all_retransmitted

    def add_pairs(self, uses: Iterable[_Use[RdmaQueuePair]]) -> None:
        """Count what queue pairs completed within the window."""
        for use in uses:
            signal, before = use.signal, use.before
            use.before = signal
            if before is not None:
                sent = signal.completed_bytes - before.completed_bytes
                received = signal.received_bytes - before.received_bytes
                if sent >= 0 and received >= 0:  # else the counts went back
                    self.sent += sent
                    self.received += received


@dataclass(slots=True)
class _Use(Generic[Signal]):
    """A connection or queue pair, as last reported, and as it was when the window began."""

    holder: Holder
    where: Where
    signal: Signal
    before: Signal | None  # None: it began within the window


class _Uses(Generic[Signal]):
    """All connections, or all queue pairs, by what they are and by path."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, _Use[Signal]] = {}
        self.by_path: dict[Where, dict[Hashable, _Use[Signal]]] = {}
        self.held: dict[Holder, int] = {}  # how many each rank has

    def put(self, key: Hashable, holder: Holder, name: str, signal: Signal, before: Signal | None) -> None:
        """Add one, or have it belong to another rank or path than before."""
        use = self.by_key.get(key)
        if use is not None:
            before = use.before
            self._leave(key, use)
        where = holder[0], signal.path, name
        self.by_key[key] = self.by_path.setdefault(where, {})[key] = _Use(holder, where, signal, before)
        self.held[holder] = self.held.get(holder, 0) + 1

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Forget these."""
        for key in keys:
            self._leave(key, self.by_key.pop(key))

    def _leave(self, key: Hashable, use: _Use[Signal]) -> None:
        self.held[use.holder] -= 1
        if not self.held[use.holder]:
            del self.held[use.holder]
        del self.by_path[use.where][key]
        if not self.by_path[use.where]:
            del self.by_path[use.where]


class Traffic:
    """Connections and queue pairs of ranks, from the signals about them."""

    def __init__(self) -> None:
        self._flows, self._pairs = _Uses[TcpFlow](), _Uses[RdmaQueuePair]()
        self._by_pid: dict[int, Holder] = {}
        self._by_group: dict[str, Holder | None] = {}  # None: of several ranks
        self._began_ns = 0
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
                use = self._flows.by_key.get(ends)
                if use is not None and use.holder is holder and use.signal.path is signal.path:  # as nearly always
                    use.signal = signal
                else:
                    before = None if signal.first_ns >= self._began_ns > 0 else signal
                    self._keep(self._flows, ends, holder, name, signal, before)
        elif isinstance(signal, RdmaQueuePair):
            holder = self._by_pid.get(signal.owner.pid)
            if holder is not None:
                name = signal.path.interface if signal.path else signal.device
                key = signal.device, signal.qp_number, signal.owner.pid
                self._keep(self._pairs, key, holder, name, signal, signal)

    def _keep(
        self, uses: _Uses[Signal], key: Hashable, holder: Holder, name: str, signal: Signal, before: Signal | None
    ) -> None:
        use = uses.by_key.get(key)
        if use is not None and use.holder is holder and use.where[1] == signal.path:
            use.signal = signal
        elif use is not None or len(self._flows.by_key) + len(self._pairs.by_key) < _MOST:
            uses.put(key, holder, name, signal, before)
        else:
            self.too_many += 1

    def window(self, now_ns: int) -> list[Sum]:
        """What each job has on each path, since the last call; begins another window."""
        sums: dict[Where, Sum] = {}
        for where, flows in self._flows.by_path.items():
            sums[where] = Sum(where)
            sums[where].add_flows(flows.values())
        for where, pairs in self._pairs.by_path.items():
            sums.setdefault(where, Sum(where)).add_pairs(pairs.values())
        silent_ns = now_ns - _SILENT_NS
        known = self._flows.by_key.items()
        self._flows.drop([key for key, use in known if use.signal.state == "close" or use.signal.at_ns < silent_ns])
        had = self._pairs.by_key.items()
        self._pairs.drop([key for key, use in had if use.signal.closed or use.signal.at_ns < silent_ns])
        for where, flows in self._flows.by_path.items():
            sums[where].connections = len(flows)
        for where, pairs in self._pairs.by_path.items():
            sums[where].pairs = [each.signal for each in pairs.values()]
        self._began_ns = now_ns
        return [each for each in sums.values() if each.connections or each.pairs or each.sent or each.received]

    def held(self, job: Hashable, rank: int) -> tuple[int, int]:
        """How many connections and queue pairs a rank had at the end of the window."""
        return self._flows.held.get((job, rank), 0), self._pairs.held.get((job, rank), 0)

    def forget(self) -> None:
        """Nobody listens, or there is no job: begin anew then."""
        self._flows, self._pairs = _Uses[TcpFlow](), _Uses[RdmaQueuePair]()
        self._began_ns = 0
