"""One interface that is watched: its counters, queues, pauses and paths, from the first reading to the last. No I/O.

Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from pytools.kernel.netlink.bonds import ALWAYS, BondRow, flags, trouble
from pytools.kernel.netlink.links import LinkRow, QdiscRow, handle_text, parent_text
from pytools.signals import BondPort, Link, LinkCounters, LinkEvent, Path, Pause, Qdisc, header
from pytools.sources.links import driver
from pytools.sources.links.events import Happening, LinkHistory, PauseHistory, QueueHistory

_ROUTES_BACK_NS: Final = 5_000_000_000  # for so long after the carrier came back, routes may still be missing


class Interface:
    """What is known of one interface.

    Parameters
    ----------
    row : LinkRow
        Its first reading.
    flap_window_ns : int
        A carrier that is found again within it has flapped.
    """

    def __init__(self, host: str, row: LinkRow, now_ns: int, flap_window_ns: int) -> None:
        self.index, self.name = row.index, row.name
        self.wanted_ns = now_ns  # when it last carried paths
        self.paths: tuple[Path, ...] = ()
        self.upper = ""  # the interface with paths whose packets it carries; empty when it has paths itself
        self.bond: BondRow | None = None  # what it is a port of
        self.device = ""  # the bond or team that it is, is a port of, or is above
        self._pathless_ns = now_ns  # when it last had paths, or no carrier
        self._host = host
        self._history = LinkHistory(row, now_ns, flap_window_ns)
        self._queue_history, self._pause_history = QueueHistory(), PauseHistory()
        self._queues: Sequence[QdiscRow] = ()
        self._window_ns, self._window_counters = now_ns, counters_of(row)
        self._pauses: dict[int | None, Pause] = {}
        self._storms: int | None = None
        self._driver_ns: int | None = None
        self._speed_mbps: int | None = None
        self._trouble: dict[str, int] = {}

    @property
    def row(self) -> LinkRow:
        return self._history.row

    def take_paths(self, paths: Sequence[Path], now_ns: int) -> None:
        """The paths it carries now. Routes go with the carrier: what happens then concerns those that it carried."""
        if paths or not self.row.carrier:
            self._pathless_ns = now_ns
        if (paths and self.row.carrier) or not self.paths or now_ns - self._pathless_ns > _ROUTES_BACK_NS:
            self.paths = tuple(paths)

    def take_link(self, row: LinkRow, now_ns: int) -> list[Happening]:
        if row.carrier and not self.row.carrier:
            self._pathless_ns = now_ns
        return self._history.take(row, now_ns)

    def take_queues(self, rows: Sequence[QdiscRow], now_ns: int) -> list[Happening]:
        self._queues = rows
        full = self._queue_history.take(rows, self.row.mtu, now_ns)
        return [full] if full else []

    def take_driver(
        self, meaning: driver.Meaning, values: Sequence[int], speed_mbps: int | None, now_ns: int
    ) -> list[Happening]:
        pauses, storms = driver.pauses_of(meaning, values), driver.storms_of(meaning, values)
        before_ns, before, counted = self._driver_ns, self._pauses, self._storms
        self._pauses, self._driver_ns, self._speed_mbps = pauses, now_ns, speed_mbps
        self._storms = storms if meaning else None  # refused: what is counted next is not all new
        self._trouble = driver.trouble_of(meaning, values)
        if before_ns is None:
            return []
        held = driver.held(before, pauses, now_ns - before_ns, speed_mbps)
        grown = 0 if counted is None else max(storms - counted, 0)
        storm = self._pause_history.take(held, grown, now_ns)
        return [storm] if storm else []

    def event(self, happening: Happening, paths: Sequence[Path]) -> LinkEvent:
        return LinkEvent(
            **header(self._host, time.monotonic_ns()),
            interface=self.name,
            paths=list(paths),
            what=happening.what,
            happened_ns=happening.happened_ns,
            detail=f"{self.name}{f', below {self.upper}' if self.upper else ''}: {happening.detail}",
            values=happening.values,
        )

    def signal(self, failed_neighbours: list[str], now_ns: int) -> Link:
        row, total = self.row, counters_of(self.row)
        return Link(
            **header(self._host, now_ns),
            interface=self.name,
            upper=self.upper,
            bond=self.device,
            port=self._port(),
            paths=list(self.paths),
            window_ns=now_ns - self._window_ns,
            up=row.up,
            carrier=row.carrier,
            carrier_changes=row.carrier_changes,
            mtu_bytes=row.mtu,
            speed_mbps=self._speed_mbps,
            counters=total,
            window=grown(self._window_counters, total),
            qdiscs=[_qdisc(each) for each in self._queues],
            pauses=driver.listed(self._pauses),
            failed_neighbours=failed_neighbours,
            driver=self._trouble,
        )

    def _port(self) -> BondPort | None:
        port = self.row.port
        if port is None:
            return None
        sides = flags(port.actor), flags(port.partner)
        figures = port.active, port.status, trouble(port), port.failures, port.queue_id, port.aggregator
        if (bond := self.bond) is None:
            return BondPort("", "", *figures, *sides)
        preferred = bond.primary == self.index and bond.reselect == ALWAYS
        return BondPort(bond.mode, bond.policy, *figures, *sides, preferred)

    def next_window(self, now_ns: int) -> None:
        self._window_ns, self._window_counters = now_ns, counters_of(self.row)


def counters_of(row: LinkRow) -> LinkCounters:
    return LinkCounters(**{name: getattr(row, name) for name in LinkCounters.__struct_fields__})


def grown(before: LinkCounters, now: LinkCounters) -> LinkCounters:
    """By how much each counter grew; from zero when a driver set it back."""
    pairs = ((name, getattr(before, name), getattr(now, name)) for name in LinkCounters.__struct_fields__)
    return LinkCounters(**{name: new - old if new >= old else new for name, old, new in pairs})


def _qdisc(row: QdiscRow) -> Qdisc:
    return Qdisc(
        kind=row.kind,
        handle=handle_text(row.handle),
        parent=parent_text(row.parent),
        backlog_bytes=row.backlog_bytes,
        backlog_packets=row.backlog_packets,
        drops=row.drops,
        overlimits=row.overlimits,
        requeues=row.requeues,
    )
