"""RDMA ports: their state, counters and GIDs, told once a second and when something changes.

Reads as seldom as costs demand: every file may be a question to a firmware. GIDs are looked at when links or addresses
have changed (the kernel then needs a moment to bring its table up to date) and every ten seconds; never so often that
it takes more than its share of the time. Times are CLOCK_MONOTONIC nanoseconds; runs in the agent's thread.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pytools.ipc.bus import Bus
from pytools.signals import LinkEvent, LinkEventKind, Path, RdmaPort, header
from pytools.sources.links.rdma_sysfs import Port, Sysfs, meanings
from pytools.units import MS, SECOND


@dataclass(frozen=True, slots=True)
class GidChange:
    """What changed between two readings."""

    detail: str
    values: dict[str, int]


class GidHistory:
    """The GIDs of one port, reading by reading; remembers what an index held before it was empty."""

    def __init__(self, gids: Mapping[int, str]) -> None:
        self._now = dict(gids)
        self._last = dict(gids)

    def take(self, gids: Mapping[int, str]) -> GidChange | None:
        """What changed, vanished, moved or came back; an address that is new and takes nobody's place is no news."""
        words: list[str] = []
        counts = {"changed": 0, "vanished": 0, "returned": 0, "moved": 0, "appeared": 0}
        first: int | None = None
        for index in sorted(self._now.keys() | gids.keys()):
            old, new = self._now.get(index), gids.get(index)
            if old == new:
                continue
            kind, text = self._change(index, old, new, gids)
            counts[kind] += 1
            if kind != "appeared":
                words.append(f"index {index}: {text}")
                first = index if first is None else first
        self._now = dict(gids)
        self._last.update(gids)
        if first is None:
            return None
        return GidChange("; ".join(words), {"index": first, **counts})

    def _change(self, index: int, old: str | None, new: str | None, gids: Mapping[int, str]) -> tuple[str, str]:
        if new is None:
            return "vanished", f"{old} → gone"
        before = old or self._last.get(index)
        if before == new:
            return "returned", f"gone → {new} again"
        if before is not None:
            return "changed", f"{before} → {new}"
        place = next((each for each, gid in self._last.items() if gid == new and gids.get(each) != new), None)
        return ("appeared", "") if place is None else ("moved", f"nothing → {new}, which was index {place}")


_STATES_EVERY_NS: Final = SECOND
_GIDS_EVERY_NS: Final = 10 * SECOND
_GIDS_AFTER_CHANGE_NS: Final = (0, 50 * MS, 250 * MS, 1000 * MS, 3000 * MS)
_SHARE: Final = 200  # a reading takes at most one part in so many of the time
_SHARE_AFTER_CHANGE: Final = 50
_COSTS: Final = 4  # readings, of which the cheapest says what one costs: a guest counts time that its host took away
_UP: Final = "active"


@dataclass(slots=True)
class _Known:
    state: str
    gids: dict[int, str]
    history: GidHistory
    interface: str
    window_ns: int
    counters: dict[str, int] = field(default_factory=dict)


class RdmaPorts:
    """Watches all RDMA ports that this process's /sys shows.

    Parameters
    ----------
    paths_of : callable
        The paths of a network interface of this namespace.
    window_ns : int
        How often a port's counters are told.
    """

    def __init__(
        self, host: str, bus: Bus, paths_of: Callable[[str], Sequence[Path]], window_ns: int, sysfs: Sysfs
    ) -> None:
        self._host, self._bus, self._paths_of, self._window_ns, self._sysfs = host, bus, paths_of, window_ns, sysfs
        self._known: dict[Port, _Known] = {}
        self._due = {"states": 0, "gids": 0, "counters": 0}
        self._looks: list[int] = []  # when else to look at the GIDs
        self._gids_ns = self._cost_ns = 0  # when they were read, and what that costs
        self._costs_ns: deque[int] = deque(maxlen=_COSTS)

    def changed(self, now_ns: int) -> None:
        """Links or addresses have changed: look at states and GIDs now, and again while the kernel catches up."""
        if not self._known:
            return
        self._due["states"] = now_ns
        self._looks = [now_ns + after for after in _GIDS_AFTER_CHANGE_NS]

    def tick(self, now_ns: int) -> int:
        """Do what is due; returns when to be called next."""
        if now_ns >= self._due["states"]:
            self._due["states"] = now_ns + _STATES_EVERY_NS
            self._read_states(now_ns)
        if not self._known:
            return self._due["states"]
        if self._looks and now_ns >= max(self._looks[0], self._gids_ns + _SHARE_AFTER_CHANGE * self._cost_ns):
            self._looks = [look for look in self._looks if look > now_ns]
            self._due["gids"] = now_ns
        if now_ns >= self._due["gids"]:
            self._read_gids(now_ns)
        if now_ns >= self._due["counters"]:
            self._read_counters(now_ns)
        look_ns = [max(self._looks[0], self._gids_ns + _SHARE_AFTER_CHANGE * self._cost_ns)] if self._looks else []
        return min(*self._due.values(), *look_ns)

    def _read_states(self, now_ns: int) -> None:
        ports = self._sysfs.ports()
        for gone in self._known.keys() - set(ports):
            lost = self._known.pop(gone)
            if lost.state == _UP:
                self._tell("port_down", gone, lost, now_ns, f"RDMA port {gone} is gone", {})
        for port in ports:
            state = self._sysfs.state(port)
            known = self._known.get(port)
            if known is None:
                gids = self._sysfs.gids(port)
                interface = self._sysfs.interface(port, gids)
                self._known[port] = _Known(state, gids, GidHistory(gids), interface, now_ns)
                self._due["counters"] = min(self._due["counters"], now_ns)
                continue
            before, known.state = known.state, state
            if (before == _UP) != (state == _UP):
                what: LinkEventKind = "port_up" if state == _UP else "port_down"
                self._tell(what, port, known, now_ns, f"RDMA port {port} went from {before} to {state}", {})
                if not self._looks:
                    self._looks = [now_ns + after for after in _GIDS_AFTER_CHANGE_NS]

    def _read_gids(self, now_ns: int) -> None:
        begin_ns = time.thread_time_ns()
        for port, known in self._known.items():
            known.gids = self._sysfs.gids(port)
            known.interface = self._sysfs.interface(port, known.gids) or known.interface
            change = known.history.take(known.gids)
            if change is not None:
                detail = f"GIDs of RDMA port {port}: {change.detail}"
                self._tell("gid_changed", port, known, now_ns, detail, change.values)
        self._costs_ns.append(time.thread_time_ns() - begin_ns)
        self._gids_ns, self._cost_ns = now_ns, min(self._costs_ns)
        self._due["gids"] = now_ns + max(_GIDS_EVERY_NS, _SHARE * self._cost_ns)

    def _read_counters(self, now_ns: int) -> None:
        begin_ns = time.thread_time_ns()
        if self._bus.wanted("rdma_port"):
            for port, known in self._known.items():
                self._publish(port, known, now_ns)
        self._due["counters"] = now_ns + max(self._window_ns, _SHARE * (time.thread_time_ns() - begin_ns))

    def _publish(self, port: Port, known: _Known, now_ns: int) -> None:
        counters = self._sysfs.counters(port)
        means: dict[str, Any] = {**meanings(counters)}
        grown = {name: value - known.counters.get(name, value) for name, value in counters.items()}
        self._bus.publish(
            RdmaPort(
                **header(self._host, now_ns),
                device=port.device,
                port=port.number,
                interface=known.interface,
                state=known.state,
                rate=self._sysfs.rate(port),
                gids={str(index): gid for index, gid in known.gids.items()},
                window_ns=now_ns - known.window_ns,
                counters=counters,
                window={name: change for name, change in grown.items() if change},
                **means,
            )
        )
        known.counters, known.window_ns = counters, now_ns

    def _tell(
        self, what: LinkEventKind, port: Port, known: _Known, now_ns: int, detail: str, values: dict[str, int]
    ) -> None:
        self._bus.publish(
            LinkEvent(
                **header(self._host, time.monotonic_ns()),
                interface=known.interface,
                paths=list(self._paths(known.interface)),
                what=what,
                happened_ns=now_ns,
                detail=detail,
                values={"port": port.number, **values},
            )
        )

    def _paths(self, interface: str) -> Sequence[Path]:
        """The paths of an interface, if /sys means the one of this namespace: names repeat across namespaces."""
        if not interface:
            return ()
        try:
            here = socket.if_nametoindex(interface)
        except OSError:
            return ()
        return self._paths_of(interface) if self._sysfs.index_of(interface) == here else ()
