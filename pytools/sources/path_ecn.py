"""Congestion marks per path: what the packets that a peer sent us carried when they arrived, counted by probe.c.

They came back along the path, so a mark belongs to a queue on the way from the peer to us. Times are CLOCK_MONOTONIC
nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from pytools.config import AgentConfig
from pytools.ipc.bus import Bus
from pytools.kernel.addresses import mapped
from pytools.kernel.bpf.loader import Loaded
from pytools.signals import LinkEvent, Path, PathEcn
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.source import Source, next_beat, pace_ns
from pytools.units import MS

_LOOK_NS: Final = 250 * MS
_AGAIN_NS: Final = 1000 * MS  # the same path is not told of more often

Key = tuple[bytes, int]  # remote address as the kernel keeps it, interface index
Marks = tuple[int, int]  # packets that can be marked, packets that are


class PathEcnSource(Source):
    """Publishes `path_ecn` once per long window, and `ce_marked` soon after marks have appeared.

    Packets not counted for want of room are in `probe_ecn_full`, with the other counters of probe.c.

    Parameters
    ----------
    loaded : Loaded
        With probe.c; stays the caller's.
    paths : callable
        The paths that are measured now.
    """

    def __init__(
        self, config: AgentConfig, loaded: Loaded, bus: Bus, paths: Callable[[], Sequence[PinnedPath]]
    ) -> None:
        self._host, self._bus, self._paths = config.host, bus, paths
        self._known: Sequence[PinnedPath] | None = None
        self._keys: Mapping[Key, Path] = {}
        self._map = loaded.map("path_ecn")
        self._window_ns = config.windows.long_ns
        self._window_end_ns = 0
        self._at_window: dict[Key, Marks] = {}
        self._told: dict[Key, tuple[int, int]] = {}  # when a path's marks were last told of, and how many there were

    def tick(self, now_ns: int) -> int:
        """Look at the counters; returns when to do so again."""
        if not self._window_end_ns:
            self._window_end_ns = now_ns + self._window_ns
        paths = self._by_key()
        marks, unix_ns = self.marks(), time.time_ns()
        for event in self._events(marks, paths, now_ns, unix_ns):
            self._bus.publish(event)
        if now_ns >= self._window_end_ns:
            self._publish(marks, paths, now_ns, unix_ns)
            self._window_end_ns = next_beat(self._window_end_ns, self._window_ns, now_ns)
        return min(self._window_end_ns, now_ns + pace_ns(self._bus, "link_event", _LOOK_NS, self._window_ns))

    def _by_key(self) -> Mapping[Key, Path]:
        current = self._paths()
        if current is not self._known:
            self._known = current
            self._keys = {(mapped(each.path.address), each.ifindex): each.path for each in current}
        return self._keys

    def marks(self) -> dict[Key, Marks]:
        keys, values = self._map.read()
        packets, marked = values["packets"].sum(axis=1).tolist(), values["ce_packets"].sum(axis=1).tolist()
        remotes, interfaces = keys["remote"]["bytes"], keys["ifindex"].tolist()
        return {
            (remote.tobytes(), interface): (packet, mark)
            for remote, interface, packet, mark in zip(remotes, interfaces, packets, marked, strict=True)
        }

    def _events(
        self, marks: Mapping[Key, Marks], paths: Mapping[Key, Path], now_ns: int, unix_ns: int
    ) -> Iterator[LinkEvent]:
        for key, (packets, marked) in marks.items():
            told_ns, before = self._told.get(key, (now_ns - _AGAIN_NS, 0))
            path = paths.get(key)
            if path is None or marked == before or now_ns < told_ns + _AGAIN_NS:
                continue
            self._told[key] = now_ns, marked
            yield LinkEvent(
                host=self._host,
                at_ns=now_ns,
                unix_ns=unix_ns,
                interface=path.interface,
                paths=[path],
                what="ce_marked",
                happened_ns=now_ns,
                detail=f"{marked - before} packets from {path.destination} came marked: a queue on their way is full",
                values={"ce_packets": marked - before, "total_ce_packets": marked, "total_packets": packets},
            )

    def _publish(self, marks: Mapping[Key, Marks], paths: Mapping[Key, Path], now_ns: int, unix_ns: int) -> None:
        for key, path in paths.items():
            packets, marked = marks.get(key, (0, 0))
            packets_before, marked_before = self._at_window.get(key, (0, 0))
            self._bus.publish(
                PathEcn(
                    host=self._host,
                    at_ns=now_ns,
                    unix_ns=unix_ns,
                    path=path,
                    window_ns=self._window_ns,
                    packets=packets - packets_before,
                    ce_packets=marked - marked_before,
                    total_packets=packets,
                    total_ce_packets=marked,
                )
            )
        self._at_window = dict(marks)
