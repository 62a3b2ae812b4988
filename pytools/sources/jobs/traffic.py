"""What the ranks of this host send: their TCP connections and queue pairs, summed by path over a window.

Connections are joined by process; those of other network namespaces, whose process is not known, by control group.
Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Final

from pytools.ipc.bus import Published
from pytools.signals import JobPath, Path, RdmaQueuePair, TcpFlow
from pytools.sources.jobs.processes import Member

TYPES: Final = frozenset({"tcp_flow", "rdma_qp"})
_MOST: Final = 65_536  # connections and queue pairs
_SILENT_NS: Final = 15 * 10**9  # every fourth window all are published

Holder = tuple[Hashable, int]  # job, rank


@dataclass(slots=True)
class _Sum:
    """What a rank has on a path."""

    where: tuple[Holder, Path | None, str]
    uses: list[int]  # connections, queue pairs
    sent: int = 0  # in this window, as `received`
    received: int = 0


@dataclass(slots=True)
class _Use:
    """A connection or queue pair, as last reported."""

    sum: _Sum
    sent: int  # so far, as `received`
    received: int
    at_ns: int
    closed: bool
    is_queue_pair: bool


class Traffic:
    """Connections and queue pairs of ranks, from the signals about them."""

    def __init__(self) -> None:
        self._uses: dict[Hashable, _Use] = {}
        self._sums: dict[tuple[Holder, Path | None, str], _Sum] = {}
        self._by_pid: dict[int, Holder] = {}
        self._by_group: dict[str, Holder | None] = {}  # None: of several ranks
        self._began_ns = 0
        self.too_many = 0

    def set_ranks(self, jobs: Mapping[Hashable, list[Member]]) -> None:
        """Say which processes are ranks."""
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
                ends = signal.local, signal.local_port, signal.remote, signal.remote_port
                use = self._use((*ends, signal.interface, signal.namespace), (holder, signal.path, signal.interface))
                is_new = signal.first_ns >= self._began_ns > 0
                _update(use, signal.sent_bytes, signal.received_bytes, is_new)
                use.at_ns, use.closed = signal.at_ns, signal.state == "close"
        elif isinstance(signal, RdmaQueuePair):
            holder = self._by_pid.get(signal.owner.pid)
            if holder is not None:
                name = signal.path.interface if signal.path else signal.device
                use = self._use((signal.device, signal.qp_number, signal.owner.pid), (holder, signal.path, name))
                _update(use, signal.completed_bytes, signal.received_bytes, False)
                use.at_ns, use.closed, use.is_queue_pair = signal.at_ns, signal.closed, True

    def _use(self, key: Hashable, where: tuple[Holder, Path | None, str]) -> _Use:
        use = self._uses.get(key)
        if use is not None and use.sum.where == where:
            return use
        if where not in self._sums:
            self._sums[where] = _Sum(where, [0, 0])
        if use is None:
            use = _Use(self._sums[where], -1, -1, 0, False, False)
            if len(self._uses) < _MOST:
                self._uses[key] = use
            else:
                self.too_many += 1
        use.sum = self._sums[where]
        return use

    def window(self, now_ns: int) -> list[tuple[Holder, JobPath]]:
        """What each rank has on each path, with the bytes since the last call; begins another window."""
        over: list[Hashable] = []
        for key, use in self._uses.items():
            if use.closed or now_ns - use.at_ns > _SILENT_NS:
                over.append(key)
            else:
                use.sum.uses[use.is_queue_pair] += 1
        for key in over:
            del self._uses[key]
        found = []
        for where, each in list(self._sums.items()):
            if not any(each.uses) and not each.sent and not each.received:
                del self._sums[where]
                continue
            holder, path, interface = where
            connections, queue_pairs = each.uses
            found.append((holder, JobPath(path, interface, connections, queue_pairs, each.sent, each.received)))
            each.uses, each.sent, each.received = [0, 0], 0, 0
        self._began_ns = now_ns
        return found

    def forget(self) -> None:
        """Nobody listens: begin anew when somebody does."""
        self._uses.clear()
        self._sums.clear()
        self._began_ns = 0


def _update(use: _Use, sent: int, received: int, is_new: bool) -> None:
    """Count what was sent since the last report; bytes of before it was first seen are of no window."""
    if is_new and use.sent < 0:
        use.sent = use.received = 0
    if 0 <= use.sent <= sent and use.received <= received:
        use.sum.sent += sent - use.sent
        use.sum.received += received - use.received
    use.sent, use.received = sent, received
