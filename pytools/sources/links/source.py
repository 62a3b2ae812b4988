"""Interfaces that carry paths or are below one that does, and RDMA ports: what happens at once, what they count later.

Counters are told once per long window. A message of the kernel only wakes: the interface is then asked, so that states
never go back and forth, and what the messages missed is in its counters. Neighbours are believed message by message.
Made and used in the network namespace it watches; one thread; times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.ipc.bus import Bus
from pytools.kernel.ethtool import Ethtool
from pytools.kernel.netlink.bonds import Bundle
from pytools.kernel.netlink.links import Heard, LinkMonitor, NeighbourRow, Stack, Tables
from pytools.kernel.netlink.routing import Netlink
from pytools.signals import Path
from pytools.sources.links.driver import Statistics
from pytools.sources.links.events import Happening, Neighbour, NeighbourHistory
from pytools.sources.links.interface import Interface
from pytools.sources.links.rdma_ports import RdmaPorts
from pytools.sources.links.rdma_sysfs import Sysfs
from pytools.sources.source import pace_ns
from pytools.units import MS, SECOND

_DRIVER_EVERY_NS: Final = SECOND
_LOWERS_EVERY_NS: Final = SECOND  # at most so often: where pods come and go, messages are many
_DRIVER_SHARE: Final = 200  # asking drivers takes at most one part in so many of the time


class LinkSource:
    """Watches the interfaces that carry paths.

    Parameters
    ----------
    interfaces : callable
        Names of the interfaces that carry paths now.
    all_paths : callable
        Every path that is measured now.
    carrier_changed : callable
        Called with the index of an interface that has lost its carrier (False), or has it again (True).
    bundles_changed : callable, optional
        Called with the bond or team below each interface with paths, by its name, where that hashes flows over ports.
    sysfs : Sysfs
        Where RDMA ports are shown.
    room_bytes : int
        How much of what the kernel tells may wait to be read.
    """

    def __init__(
        self,
        config: AgentConfig,
        netlink: Netlink,
        bus: Bus,
        interfaces: Callable[[], Iterable[str]],
        all_paths: Callable[[], Iterable[Path]],
        carrier_changed: Callable[[int, bool], None],
        sysfs: Sysfs | None = None,
        room_bytes: int = 1 << 20,
        bundles_changed: Callable[[Mapping[str, Bundle]], None] = lambda _bundles: None,
    ) -> None:
        self._host, self._bus = config.host, bus
        self._wanted, self._all_paths, self._carrier_changed = interfaces, all_paths, carrier_changed
        self._bundles_changed = bundles_changed
        self._bundles: dict[str, Bundle] = {}  # as was told last
        self._poll_ns = int(config.links.interval_ms * MS)
        self._window_ns = config.windows.long_ns
        self._flap_window_ns = int(config.links.flap_window_s * SECOND)
        self._tables = Tables(netlink)
        self._watched: dict[int, Interface] = {}
        self._stack = Stack({}, {}, {}, {})
        self._restacked, self._stacked_ns = True, 0  # they may have changed; when they were read
        self._neighbours = NeighbourHistory()
        self._gateways: dict[Neighbour, list[Path]] = {}
        self._due = {"poll": 0, "driver": 0, "window": 0}
        self._overruns = self._failed_reads = 0
        with contextlib.ExitStack() as undo:
            self._monitor = LinkMonitor(room_bytes)
            undo.callback(self._monitor.close)
            self._statistics = Statistics(Ethtool())
            undo.callback(self._statistics.close)
            self._ports = RdmaPorts(config.host, bus, self._paths_of, self._window_ns, sysfs or Sysfs())
            self._close = undo.pop_all().close

    def register(self, selector: selectors.BaseSelector) -> None:
        """Be woken when interfaces, neighbours or addresses change."""
        selector.register(self._monitor.fileno(), selectors.EVENT_READ, self._told)

    def tick(self, now_ns: int) -> int:
        """Do what is due; returns when to be called next."""
        if now_ns >= self._due["poll"]:
            self._due["poll"] = now_ns + pace_ns(self._bus, "link_event", self._poll_ns, self._window_ns)
            with self._counting_failures():
                self._poll(now_ns)
        if now_ns >= self._due["driver"]:
            self._ask_drivers(now_ns)
        if now_ns >= self._due["window"]:
            self._due["window"] = now_ns + self._window_ns
            for interface in self._watched.values():
                self._publish(interface, now_ns)
                interface.next_window(now_ns)
        return min(*self._due.values(), self._ports.tick(now_ns))

    def drops(self) -> dict[str, int]:
        """What was told and lost (the tables were read anew each time), and readings that failed."""
        return {
            "link_messages_overrun": self._overruns,
            "link_reads_failed": self._failed_reads,
            "link_statistics_failed": self._statistics.failed,
        }

    def close(self) -> None:
        self._close()

    # ---- what the kernel tells ----

    def _told(self, _mask: int) -> None:
        with self._counting_failures():
            self._hear(self._monitor.read())

    def _hear(self, heard: Heard) -> None:
        now_ns = time.monotonic_ns()
        self._overruns += heard.overrun
        self._restacked |= bool(heard.changed or heard.removed or heard.overrun)
        for index in heard.removed & self._watched.keys():
            self._remove(self._watched[index], "it was removed", now_ns)
        touched = self._watched.keys() if heard.overrun else heard.changed & self._watched.keys()
        for index in list(touched):
            self._read_link(self._watched[index])
        self._take_neighbours(heard.neighbours)
        if heard.overrun:
            self._take_neighbours(self._tables.neighbours())
        if heard.overrun or heard.addresses or heard.changed:
            self._ports.changed(now_ns)
            self._ports.tick(now_ns)

    def _take_neighbours(self, rows: Sequence[NeighbourRow]) -> None:
        if not rows:
            return
        for (index, address), happening in self._neighbours.take(rows, frozenset(self._gateways), time.monotonic_ns()):
            interface = self._watched.get(index)
            if interface is not None:
                self._tell(interface, [happening], self._gateways[index, address])

    # ---- what the kernel is asked ----

    def _poll(self, now_ns: int) -> None:
        self._hear(self._monitor.read())  # first what came before, then what is now
        self._follow_paths(now_ns)
        for interface in list(self._watched.values()):
            self._read_link(interface)
        if not self._watched:
            return
        queues = self._tables.qdiscs(set(self._watched))
        read_ns = time.monotonic_ns()
        for index, interface in self._watched.items():
            rows = [row for row in queues if row.index == index]
            self._tell(interface, interface.take_queues(rows, read_ns))

    def _read_link(self, interface: Interface) -> None:
        row = self._tables.link(interface.index)
        now_ns = time.monotonic_ns()
        if row is None or row.name != interface.name:
            self._remove(interface, "it was removed" if row is None else f"it is called {row.name} now", now_ns)
        else:
            if row.carrier != interface.row.carrier and not interface.upper:
                self._carrier_changed(interface.index, row.carrier)
            self._tell(interface, interface.take_link(row, now_ns))

    def _follow_paths(self, now_ns: int) -> None:
        """Watch what carries paths; what carries none any more is watched until it has been idle and up for a while."""
        paths: dict[str, list[Path]] = {}
        for path in self._all_paths():
            paths.setdefault(path.interface, []).append(path)
        wanted = {*self._wanted(), *paths}
        by_name = {interface.name: interface for interface in self._watched.values()}
        for name in wanted - by_name.keys():
            with contextlib.suppress(OSError):  # not there (any more)
                self._watch(socket.if_nametoindex(name), now_ns)
        uppers = self._uppers(wanted, now_ns)
        for index in uppers.keys() - self._watched.keys():
            self._watch(index, now_ns)
        for index, interface in list(self._watched.items()):
            interface.bond, interface.device = self._stack.bonds.get(index), self._stack.devices.get(index, "")
            interface.take_paths(paths.get(interface.name, ()), now_ns)
            used = interface.name in wanted or index in uppers
            if used:
                interface.upper = uppers.get(index, "")
            if used or not interface.row.carrier:
                interface.wanted_ns = now_ns
            elif now_ns - interface.wanted_ns > self._flap_window_ns:
                self._forget(index)
        self._follow_gateways()

    def _watch(self, index: int, now_ns: int) -> None:
        row = self._tables.link(index)
        if row is not None:
            self._watched[row.index] = Interface(self._host, row, now_ns, self._flap_window_ns)
            self._due["driver"] = now_ns

    def _uppers(self, wanted: set[str], now_ns: int) -> dict[int, str]:
        """Indexes of the interfaces that carry packets of these, and for which of them; these themselves left out."""
        if self._restacked and now_ns >= self._stacked_ns + _LOWERS_EVERY_NS:
            self._stack = self._tables.stack()
            self._restacked, self._stacked_ns = False, now_ns
        found: dict[int, str] = {}
        bundles: dict[str, Bundle] = {}
        carrying = [interface for interface in self._watched.values() if interface.name in wanted]
        for interface in carrying:
            chain = below = {interface.index}
            while below:
                for each in below & self._stack.bundles.keys():
                    bundles[interface.name] = self._stack.bundles[each]
                below = {lower for each in below for lower in self._stack.lowers.get(each, ())} - chain
                chain = chain | below
            found |= dict.fromkeys(chain, interface.name)
        for interface in carrying:
            found.pop(interface.index, None)
        if bundles != self._bundles:
            self._bundles = bundles
            self._bundles_changed(bundles)
        return found

    def _follow_gateways(self) -> None:
        gateways: dict[Neighbour, list[Path]] = {}
        for index, interface in self._watched.items():
            for path in interface.paths:
                gateways.setdefault((index, path.gateway or _written(path.address)), []).append(path)
        new = gateways.keys() - self._gateways.keys()
        if gateways.keys() != self._gateways.keys():
            self._neighbours.keep(frozenset(gateways))
        self._gateways = gateways
        if new:
            self._take_neighbours([row for row in self._tables.neighbours() if (row.index, row.address) in new])

    def _ask_drivers(self, now_ns: int) -> None:
        begin_ns = time.monotonic_ns()
        for index, interface in self._watched.items():
            reading = self._statistics.read(index, interface.name, now_ns)
            happened = interface.take_driver(reading.meaning, reading.values, reading.speed_mbps, time.monotonic_ns())
            self._tell(interface, happened)
        cost_ns = time.monotonic_ns() - begin_ns
        self._due["driver"] = now_ns + max(_DRIVER_EVERY_NS, _DRIVER_SHARE * cost_ns)

    # ---- what others are told ----

    def _tell(self, interface: Interface, happened: Iterable[Happening], paths: Sequence[Path] | None = None) -> None:
        told = False
        for happening in happened:
            self._bus.publish(interface.event(happening, interface.paths if paths is None else paths))
            told = True
        if told:
            self._publish(interface, time.monotonic_ns())

    def _publish(self, interface: Interface, now_ns: int) -> None:
        if self._bus.wanted("link"):
            self._bus.publish(interface.signal(self._neighbours.failed(interface.index), now_ns))

    def _remove(self, interface: Interface, words: str, now_ns: int) -> None:
        if not interface.upper:
            self._carrier_changed(interface.index, False)
        self._bus.publish(interface.event(Happening("removed", now_ns, words), interface.paths))
        self._forget(interface.index)

    def _forget(self, index: int) -> None:
        self._watched.pop(index, None)
        self._statistics.forget(index)

    def _paths_of(self, name: str) -> Sequence[Path]:
        return next((each.paths for each in self._watched.values() if each.name == name), ())

    @contextlib.contextmanager
    def _counting_failures(self) -> Iterator[None]:
        """A table that keeps changing while it is read is read again at the next poll."""
        try:
            yield
        except SwerveError:
            self._failed_reads += 1


@functools.lru_cache(maxsize=8192)
def _written(address: str) -> str:
    """An address as the kernel's neighbours are written, however the configuration writes it."""
    return str(ipaddress.ip_address(address))
