"""RDMA: `rdma_qp` of every queue pair, `rdma_suspects`, and `rdma_sight`: how it is seen here, and why where it is not.

The tables of all ways in are read every `rdma.interval` while any queue pair moves, four times a second while none
does; a reading of tables that are empty costs microseconds. Signals go out once per long window, and at once when a
verdict changes. Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable, Sequence
from pathlib import Path as File
from typing import Final

import numpy as np

from pytools.config import AgentConfig
from pytools.estimators import verdicts
from pytools.ipc.bus import Bus
from pytools.kernel import addresses
from pytools.kernel.rdma_class import SYSFS, absent, listed
from pytools.signals import Path, RdmaSight, header
from pytools.sources.links.rdma_sysfs import Sysfs
from pytools.sources.rdma import table as tables
from pytools.sources.rdma.backups import Backups, PathsAnswering
from pytools.sources.rdma.owners import Process, process_owner
from pytools.sources.rdma.receivers import NotReady
from pytools.sources.rdma.register import QueuePair
from pytools.sources.rdma.reports import Reports
from pytools.sources.rdma.table import Columns, Table, Way
from pytools.sources.rdma.watching import Watch
from pytools.units import MS

_CALM_NS: Final = 250 * MS
_BUSY_NS: Final = 1000 * MS  # after the last move of any queue pair
_DETAILS_NS: Final = 250 * MS
_SIGHT_NS: Final = 5000 * MS
_AGAIN_NS: Final = 200 * MS  # a pair that falls idle and wakes is not told at once more often than that
_SUSPECTS_NS: Final = 100 * MS
_SAID: Final = ("device", "qp_type", "srq", "remote_qp_number", "local", "remote")
_HARMLESS: Final = (verdicts.OK, verdicts.NO_DEMAND, verdicts.UNKNOWN)


class RdmaSource:
    """Reads queue pairs and publishes what they are going through.

    Parameters
    ----------
    ways : sequence of Way
        The ways in; closed with this.
    answering : callable
        The measured paths, and whether each answers its probes.
    sysfs : Path, optional
        Where RDMA devices are listed.
    """

    def __init__(
        self,
        config: AgentConfig,
        bus: Bus,
        path_of: Callable[[str, str], Path | None],
        answering: PathsAnswering,
        ways: Sequence[Way],
        sysfs: File = SYSFS,
    ) -> None:
        self._host, self._bus, self._path_of, self._ways = config.host, bus, path_of, ways
        self._sysfs, self._ports = sysfs, Sysfs(sysfs)
        self.watch = Watch(config.rdma, self._describe, NotReady(sysfs))  # the state of every queue pair
        self._reports = Reports(config.host, self.watch, Backups(self._ports, answering))
        self._interval_ns = int(config.rdma.interval_ms * MS)
        self._window_ns = config.windows.long_ns
        self._way_due = [0] * len(ways)
        self._tables: list[Table] = []
        self._processes: dict[int, Process] = {}
        self._interfaces: dict[str, str] = {}
        self._devices = _devices(sysfs)
        self._read_due = self._details_due = self._window_due = self._sight_due = 0
        self._suspects_ns = 0
        self._told: tuple[str, list[str], dict[str, str]] | None = None  # of the sight
        self._told_ns = 0
        self._hits = (time.monotonic_ns(), 0)

    def register(self, selector: selectors.BaseSelector) -> None:
        for way in self._ways:
            way.register(selector)

    def tick(self, now_ns: int) -> int:
        """Do what is due; returns when to be called next."""
        for index, way in enumerate(self._ways):
            if now_ns >= self._way_due[index]:
                self._way_due[index] = way.tick(now_ns)
        if now_ns >= self._read_due:
            self._read(now_ns)
        if now_ns >= self._window_due:
            self._tell_window(now_ns)
        if now_ns >= self._sight_due:
            self._tell_sight(now_ns)
        return min(self._read_due, self._window_due, self._sight_due, *self._way_due)

    def drops(self) -> dict[str, int]:
        found = {**self.watch.drops, "rdma_no_row": self.watch.register.full}
        found["rdma_user_share"] = self.watch.register.over_share
        found["rdma_latencies"] = self.watch.timed.latencies_dropped
        for way in self._ways:
            found.update(way.drops())
        return found

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for way in self._ways:
                closing.callback(way.close)

    # ---- readings ----

    def _read(self, now_ns: int) -> None:
        self._tables = [table for way in self._ways for table in way.tables()]
        changed, over = self.watch.read(self._tables, now_ns)
        if changed:
            self._tell_changes(changed, now_ns)
        self._give_up(over, now_ns)
        if now_ns >= self._details_due:
            self._details_due = now_ns + _DETAILS_NS
            self._devices = _devices(self._sysfs)
            self._give_up(self._details(now_ns), now_ns)
        busy = now_ns - self.watch.moved_ns < _BUSY_NS
        self._read_due = now_ns + (self._interval_ns if busy else max(_CALM_NS, self._interval_ns))

    def _describe(self, table: Table, slot: int, columns: Columns, place: int, now_ns: int) -> QueuePair:
        pid = int(columns.tgid[place])
        if pid not in self._processes:
            self._processes[pid] = Process.of(pid)
        pair = QueuePair(
            table=table,
            slot=slot,
            created_ns=int(columns.created_ns[place]),
            context=int(columns.context[place]),
            tgid=pid,
            number=int(columns.qp_number[place]),
            first_ns=now_ns,
            owner=self._processes[pid].owner,
            uid=getattr(table, "uid", self._processes[pid].uid),
        )
        self._identify(pair)
        return pair

    def _identify(self, pair: QueuePair) -> None:
        """Learn what a row says besides counters; addresses come when the queue pair is connected."""
        record = pair.table.records[pair.slot]
        said = b"".join(record[name].tobytes() for name in _SAID)
        if said == pair.said:
            return
        pair.said = said
        pair.device = self._devices.get(tables.text(bytes(record["device"])), "")
        pair.qp_type = tables.QP_TYPES.get(int(record["qp_type"]), f"type {int(record['qp_type'])}")
        pair.shared_receives = bool(record["srq"])
        number = int(record["remote_qp_number"])
        pair.remote_number = None if number == tables.NO_QP else number
        pair.local = _address(record["local"])
        pair.remote = _address(record["remote"])
        pair.interface = self._interface(pair.device)
        pair.path = self._path_of(pair.remote, pair.interface) if pair.remote and pair.interface else None

    def _interface(self, device: str) -> str:
        """The network interface beneath a device, that of its first port that has one."""
        if device not in self._interfaces:
            ports = [port for port in self._ports.ports() if port.device == device]
            names = (self._ports.interface(port, self._ports.gids(port)) for port in ports)
            self._interfaces[device] = next((name for name in names if name), "")
        return self._interfaces[device]

    def _details(self, now_ns: int) -> list[int]:
        """What need not be looked at often; returns the rows whose process is gone."""
        watch = self.watch
        pairs = watch.register.pairs
        for row, pair in pairs.items():
            if watch.moved(row):
                self._identify(pair)
                watch.refresh(row)
        watch.receivers.look(pairs, now_ns)
        living = {pair.tgid for pair in pairs.values()}
        self._processes = {pid: process for pid, process in self._processes.items() if pid in living}
        gone = {process.owner.pid for process in self._processes.values() if process.gone()}
        return [row for row, pair in pairs.items() if pair.tgid in gone]

    def _give_up(self, over: list[int], now_ns: int) -> None:
        """Tell the last of these rows, and let their slots be used again."""
        over = [row for row in dict.fromkeys(over) if row in self.watch.register.pairs]
        if not over:
            return
        if self._bus.wanted("rdma_qp"):
            for signal in self._reports.signals(over, now_ns, closed=True):
                self._bus.publish(signal)
        present = {id(table) for table in self._tables}
        for row in over:
            pair = self.watch.give_up(row)
            if id(pair.table) in present and _still_there(pair):
                pair.table.free(pair.slot)
        for known in self.watch.register.tables() - present:
            self.watch.register.leave(known)

    # ---- signals ----

    def _tell_changes(self, changed: list[int], now_ns: int) -> None:
        if self._bus.wanted("rdma_qp"):
            due = [row for row in changed if self._worth_telling(row, now_ns)]
            for row in due:
                self.watch.register.pairs[row].told_ns = now_ns
            for signal in self._reports.signals(due, now_ns):
                self._bus.publish(signal)
        if now_ns - self._suspects_ns >= _SUSPECTS_NS:
            self._tell_suspects(now_ns)

    def _worth_telling(self, row: int, now_ns: int) -> bool:
        pair = self.watch.register.pairs[row]
        return int(self.watch.verdicts.verdict[row]) not in _HARMLESS or now_ns - pair.told_ns >= _AGAIN_NS

    def _tell_window(self, now_ns: int) -> None:
        self._window_due = now_ns + self._window_ns
        watch = self.watch
        if watch.register.pairs:
            watch.say_again()
            if self._bus.wanted("rdma_qp"):
                for signal in self._reports.signals(sorted(watch.register.pairs), now_ns):
                    self._bus.publish(signal)
            self._tell_suspects(now_ns)
        self._reports.begin_window(now_ns)

    def _tell_suspects(self, now_ns: int) -> None:
        self._suspects_ns = now_ns
        if self._bus.wanted("rdma_suspects"):
            self._bus.publish(self._reports.suspects(now_ns))

    def _tell_sight(self, now_ns: int) -> None:
        self._sight_due = now_ns + self._window_ns
        if not self._bus.wanted("rdma_sight"):
            return
        sight = self._sight(now_ns)
        news = sight.reason, sight.providers, sight.seen
        if news != self._told or now_ns - self._told_ns >= _SIGHT_NS:
            self._told, self._told_ns = news, now_ns
            self._bus.publish(sight)

    def _sight(self, now_ns: int) -> RdmaSight:
        sights = [way.sight() for way in self._ways]
        hits = sum(each.hits for each in sights)
        then_ns, before = self._hits
        self._hits = (now_ns, hits)
        seen = {pid: how for each in reversed(sights) for pid, how in each.seen}
        seen |= {pair.tgid: pair.table.seen_by for pair in self.watch.register.pairs.values()}
        reason = self._blind(sights)
        return RdmaSight(
            **header(self._host, now_ns),
            available=not reason,
            reason=reason,
            providers=sorted({provider for each in sights for provider in each.providers}),
            seen={f"{pid} {self._command(pid)}".strip(): how for pid, how in sorted(seen.items())},
            hits_per_s=max(0, hits - before) * 1e9 / max(now_ns - then_ns, 1),
            tap_processes=len({pid for pid, how in seen.items() if how == "tap"}),
        )

    def _blind(self, sights: Sequence[tables.Sight]) -> str:
        """Why nothing can be seen; empty when something can."""
        if self.watch.register.pairs:
            return ""
        if reason := absent(self._sysfs):
            return reason
        if not sights:
            return "both ways in are switched off (rdma.uprobes, rdma.tap)"
        reasons = [each.reason for each in sights]
        return "; ".join(reasons) if all(reasons) else ""

    def _command(self, pid: int) -> str:
        known = self._processes.get(pid)
        return known.owner.command if known else process_owner(pid).command


def _address(gid: np.void) -> str:
    """The address in a GID; empty for none."""
    raw = gid.tobytes()
    return addresses.text(raw) if any(raw) else ""


def _still_there(pair: QueuePair) -> bool:
    records = pair.table.records
    return int(records["state"][pair.slot]) != tables.FREE and int(records["created_ns"][pair.slot]) == pair.created_ns


def _devices(place: File) -> dict[str, str]:
    """Devices that there are, by what a row has room for of their names: what else a row says is no device."""
    return {name[: tables.DEVICE_LETTERS]: name for name in listed(place)}
