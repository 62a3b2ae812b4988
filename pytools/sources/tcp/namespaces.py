"""Other network namespaces: what they are called, and what their TCP connections come to.

A namespace is called by the pod, container or service whose control group made sockets in it: of several, the one that
says most. Files are read for a bounded time per window, so a name may come some windows later. One thread: the agent's.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

import numpy as np

from pytools.kernel.bpf.maps import Map
from pytools.signals import TcpNamespace
from pytools.sources.tcp.containers import Cgroups
from pytools.sources.tcp.pods import Pods, pod, unit
from pytools.sources.tcp.totals import Columns, Growth, as_bytes

_REMEMBERED: Final = 8192
_BUDGET_NS: Final = 2_000_000  # per window
_AGAIN_NS: Final = 10 * 10**9
_AT_ONCE: Final = 200  # records per long window: of more namespaces each reading covers several
_ALL_EVERY: Final = 15  # readings; in between those alone of which something was counted
_PRUNED_AT_ONCE: Final = 1024
_NAMED, _POD, _CONTAINER, _UNIT, _UNKNOWN = range(5)  # how much a name says, the most first


class Names:
    """Names by cookie of the namespace.

    Parameters
    ----------
    cgroups : Cgroups
        Stays the caller's.
    pods : Pods
        Names by UID and by identifier of a container.
    """

    def __init__(self, cgroups: Cgroups, pods: Pods) -> None:
        self._cgroups, self.pods = cgroups, pods
        self._names: OrderedDict[int, tuple[int, str]] = OrderedDict()
        self._asked: OrderedDict[tuple[int, int], int] = OrderedDict()  # namespace and group -> not before this
        self._waiting: OrderedDict[tuple[int, int], None] = OrderedDict()
        self.renamed: set[int] = set()  # since this was emptied

    def known(self, netns: int, cgroup: int, now_ns: int) -> str:
        """What is known now; looked up better by `work` where that may help. Empty for the agent's own."""
        if not netns:
            return ""
        rank, name = self._names.get(netns, (_UNKNOWN, f"netns:{netns}"))
        if rank != _NAMED and cgroup and now_ns >= self._asked.get((netns, cgroup), 0):
            self._waiting[netns, cgroup] = None
        return name

    def work(self, now_ns: int) -> None:
        """Look up what was asked for, for a bounded time."""
        until_ns = time.monotonic_ns() + _BUDGET_NS
        self._cgroups.work(now_ns, until_ns)
        while self._waiting and time.monotonic_ns() < until_ns:
            (netns, cgroup), _ = self._waiting.popitem(last=False)
            self._asked[netns, cgroup] = now_ns + _AGAIN_NS
            found = self._look_up(cgroup, now_ns)
            if found < self._names.get(netns, (_UNKNOWN, "")):
                self._names[netns] = found
                self.renamed.add(netns)
        for remembered in (self._names, self._asked, self._waiting):
            while len(remembered) > _REMEMBERED:
                remembered.popitem(last=False)

    def _look_up(self, cgroup: int, now_ns: int) -> tuple[int, str]:
        path, container = self._cgroups.find(cgroup)
        uid = pod(path)
        name = self.pods.name(uid, container, now_ns) if uid or container else ""
        if name:
            return _NAMED, name
        if uid:
            return _POD, f"pod:{uid}"
        if container:
            return _CONTAINER, f"container:{container[:12]}"
        service = unit(path)
        return (_UNIT, service) if service else (_UNKNOWN, "")


class Namespaces:
    """Reads the kernel's sums.

    Parameters
    ----------
    sums : Map
        `tcp_namespaces`.
    columns : Columns
        Of the counts.
    names : Names
        What they are called.
    """

    def __init__(self, sums: Map, columns: Columns, names: Names) -> None:
        self._sums, self._columns, self._names = sums, columns, names
        self._previous_ns = time.monotonic_ns()
        self._growth = Growth()
        self._windows = self._readings = 0

    def read(self, now_ns: int, wanted: bool, **common: Any) -> Iterator[TcpNamespace]:
        """What was counted since the last reading, of each namespace with anything; now and then of all.

        Called once per long window.
        """
        self._windows -= 1
        if self._windows > 0:
            self._names.work(now_ns)
            return
        window_ns, self._previous_ns = now_ns - self._previous_ns, now_ns
        keys, values = self._sums.read()
        self._windows = -(-len(keys) // _AT_ONCE)
        counts = self._columns.flat(values["counts"])
        grown = self._growth.since_last(as_bytes(keys), counts)
        busy = grown.any(axis=1)
        if len(keys) > self._sums.max_entries * 3 // 4:
            for key in keys[~busy][:_PRUNED_AT_ONCE]:
                self._sums.delete(key)
        for netns, cgroup in zip(keys[busy].tolist(), values["cgroup"][busy].tolist(), strict=True):
            self._names.known(netns, cgroup, now_ns)
        self._names.work(now_ns)
        if not wanted:
            self._readings = 0
            return
        told = busy | np.isin(keys, list(self._names.renamed))
        if self._readings % _ALL_EVERY == 0:
            told[:] = True
        self._names.renamed.clear()
        self._readings += 1
        rows = (keys[told].tolist(), values["cgroup"][told].tolist(), values["connections"][told].tolist())
        for netns, cgroup, seen, window, total in zip(*rows, grown[told], counts[told], strict=True):
            retransmitted = self._columns.retransmitted(window)
            yield TcpNamespace(
                netns=netns,
                namespace=self._names.known(netns, cgroup, now_ns),
                window_ns=window_ns,
                connections=seen,
                retransmitted=retransmitted,
                retransmitted_segments=retransmitted.segments,
                spurious_segments=self._columns.of(window, "spurious"),
                timeouts=self._columns.of(window, "timeouts"),
                sent_bytes=self._columns.of(window, "sent_bytes"),
                received_bytes=self._columns.of(window, "received_bytes"),
                segments_out=self._columns.of(window, "segments_out"),
                delivered_segments=self._columns.of(window, "delivered"),
                delivered_ce_segments=self._columns.of(window, "delivered_ce"),
                total_segments=self._columns.retransmitted(total).segments,
                at_ns=now_ns,
                **common,
            )
