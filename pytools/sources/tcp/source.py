"""What TCP connections go through: by connection, path and host, from what tcp.c and drops.c count in the kernel.

Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's. Order at the start: the programs are loaded, a
`TcpSource` is made (it tells them what every socket had done before, and has the kernel call back about timeouts), then
they are attached to the interfaces. So everything counted happened after the source was made, and nothing after it is
missed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.ipc.bus import Bus
from pytools.kernel import tracefs
from pytools.kernel.bpf import cgroups, contract, syscall
from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.netlink.sockdiag import Diagnostics, Socket
from pytools.signals import Path, Stall
from pytools.sources.interfaces import Interfaces
from pytools.sources.programs import TCP_CALLBACKS, TCP_CREATED
from pytools.sources.source import Source
from pytools.sources.tcp import baselines
from pytools.sources.tcp.busiest import Busiest
from pytools.sources.tcp.connections import Feed
from pytools.sources.tcp.containers import Cgroups
from pytools.sources.tcp.drops import Drops
from pytools.sources.tcp.kernel_counters import KernelCounters
from pytools.sources.tcp.namespaces import Names, Namespaces
from pytools.sources.tcp.owners import Identity, Owners
from pytools.sources.tcp.pods import Pods
from pytools.sources.tcp.rows import CLOSED, Rows
from pytools.sources.tcp.table import Table
from pytools.sources.tcp.totals import PathOf, Totals, host_signal, path_signal

_MARGIN_NS: Final = 10**9  # a row may be stamped a little before it is written
_ALL_EVERY: Final = 4  # windows; in between only connections that were looked at since are told
_REQUEST_IDLE_NS: Final = 300 * 10**9  # a request whose SYN-ACK was last sent so long ago is dead
_FORGOTTEN_AT_ONCE: Final = 1024  # bounds the time that one tick takes
_NOT_LOST: Final = ("flows_created", "flows_replaced", "met")  # of the counters


class TcpSource(Source):
    """Reads the sums once per long window, and single connections while somebody listens to them.

    Parameters
    ----------
    loaded : Loaded
        Where tcp.c was loaded, and drops.c where the kernel has it; stays the caller's. Nothing is attached to an
        interface yet.
    interfaces : Interfaces
        The names of those that packets pass.
    known : callable
        The measured paths: they are reported even while nothing is sent over them.
    feed : Feed
        For a reader in this process, which is given every connection that a `tcp_flow` would be made of.
    """

    def __init__(
        self,
        config: AgentConfig,
        loaded: Loaded,
        interfaces: Interfaces,
        bus: Bus,
        path_of: PathOf,
        known: Callable[[], Iterable[Path]] = tuple,
        feed: Feed | None = None,
    ) -> None:
        self._host, self._bus, self._known, self._feed = config.host, bus, known, feed or Feed()
        self._interval_ns = config.windows.long_ns
        self.failed: dict[str, str] = {}
        with contextlib.ExitStack() as undo:
            self._diagnostics: Diagnostics | None = None
            self._baselines_full = 0
            baselines.configure(loaded, int(config.tcp.refresh_ms * 1e6), config.tcp.namespaces)
            self._note_earlier(loaded, undo)
            self._call_back(loaded, undo)
            self._kernel = KernelCounters()
            self._counters, self._accounted = loaded.map("tcp_counters"), loaded.map("tcp_accounted")
            has_drops = loaded.has_map("drops_by_reason")
            self._drops = Drops(loaded, tracefs.drop_reasons()) if has_drops else None
            self._interfaces = interfaces
            name = self._interfaces.name
            self._totals = Totals(loaded.map("tcp_paths"), loaded.map("tcp_interfaces"), name, path_of)
            self._table = Table(loaded.map("tcp_flows"), self._made)
            self._busiest = Busiest(loaded.map("tcp_flows"), config.tcp.busiest, int(config.tcp.busiest_ms * 1e6))
            cgroups_by_id = Cgroups()
            self._owners = Owners(self._inode, cgroups_by_id, self._table.capacity)
            undo.callback(self._owners.close)
            self._names = Names(cgroups_by_id, Pods())
            self._namespaces = Namespaces(loaded.map("tcp_namespaces"), self._totals.columns, self._names)
            asked = self._owners.known, self._owners.ask, self._names.known, self._stall
            self._rows = Rows(self._host, name, path_of, *asked)
            self._close = undo.pop_all().close
        self._previous_ns = time.monotonic_ns()
        self._due_ns = self._previous_ns + self._interval_ns
        self._requests_due_ns = self._previous_ns + _REQUEST_IDLE_NS
        self._walks, self._walk_ns = 0, 0

    def tick(self, now_ns: int) -> int:
        """Read and publish what is due, a few milliseconds of it at most; says when there is more."""
        if now_ns >= self._due_ns:
            self.read(now_ns)
            self._due_ns += self._interval_ns
            if self._due_ns <= now_ns:  # the agent was held up: do not catch up in a burst
                self._due_ns = now_ns + self._interval_ns
            self._start_walk(now_ns)
        due_ns = min(self._due_ns, self._table.tick(now_ns), self._tell_busiest(now_ns))
        return min(due_ns, self._owners.work(now_ns)) if self._owners.busy else due_ns

    def _tell_busiest(self, now_ns: int) -> int:
        if not self._table.walking:
            self._busiest.settle(now_ns)
        if now_ns >= self._busiest.due_ns():
            if self._bus.wanted("tcp_flow"):
                keys, rows = self._busiest.read(now_ns)
                self._publish(keys, rows, self._rows.stalls(keys, rows), now_ns)
            else:
                self._busiest.forget()
        return self._busiest.due_ns()

    def _publish(self, keys: NDArray[Any], rows: NDArray[Any], stalls: Mapping[int, Stall], now_ns: int) -> None:
        lost: list[dict[str, int]] = [{}] * len(rows) if self._drops is None else self._drops.of(rows)
        for signal in self._rows.signals(keys, rows, lost, stalls, now_ns, time.time_ns()):
            self._bus.publish(signal)

    def read(self, now_ns: int) -> None:
        common = {"host": self._host, "at_ns": now_ns, "unix_ns": time.time_ns()}
        window_ns, self._previous_ns = now_ns - self._previous_ns, now_ns
        self._interfaces.reread()
        for where, counts in self._totals.read(self._known()).items():
            segments = self._totals.retransmitted[where]
            self._bus.publish(path_signal(self._totals.columns, where, counts, segments, window_ns, **common))
        wanted = self._bus.wanted("tcp_namespace")
        for each in self._namespaces.read(now_ns, wanted, host=self._host, unix_ns=common["unix_ns"]):
            self._bus.publish(each)
        if self._bus.wanted("tcp_host"):
            present, evicted = self._table.remembered()
            self._bus.publish(
                host_signal(
                    self._totals.columns,
                    self._totals.host,
                    window_ns=window_ns,
                    flows=present,
                    capacity=self._table.capacity,
                    created=self._counted()["met"],
                    evicted=evicted,
                    kernel=self._kernel.since_start(),
                    **common,
                )
            )
        if self._drops is not None:
            self._bus.publish(self._drops.read(window_ns, **common))
        if now_ns >= self._requests_due_ns:
            self._requests_due_ns = now_ns + _REQUEST_IDLE_NS
            self._forget_requests(now_ns - _REQUEST_IDLE_NS)

    def drops(self) -> dict[str, int]:
        """What could not be recorded, by counter."""
        counted = {f"tcp_{name}": count for name, count in self._counted().items() if name not in _NOT_LOST}
        others = {} if self._drops is None else self._drops.counters()
        refused = {"tcp_names_refused": self._names.pods.refused}
        return {"tcp_baselines_full": self._baselines_full} | counted | refused | others

    def close(self) -> None:
        """Have the kernel call back no more; maps and attachments are the caller's."""
        self._close()

    def _note_earlier(self, loaded: Loaded, undo: contextlib.ExitStack) -> None:
        """Without socket diagnostics, all sockets are taken for new ones, and their processes are not known."""
        try:
            self._diagnostics = undo.enter_context(Diagnostics())
            self._baselines_full = baselines.note(loaded.map("tcp_accounted"), list(self._diagnostics.sockets()))
        except SwerveError as error:
            self.failed["earlier TCP connections"] = str(error)

    def _call_back(self, loaded: Loaded, undo: contextlib.ExitStack) -> None:
        for name, kind in ((TCP_CREATED, syscall.SOCK_CREATE), (TCP_CALLBACKS, syscall.SOCK_OPS)):
            if name not in loaded.programs:
                continue
            try:
                undo.enter_context(cgroups.attach(loaded.programs[name], kind))
            except SwerveError as error:
                self.failed[name] = str(error)

    def _counted(self) -> dict[str, int]:
        return dict(zip(contract.counters("tcp"), self._counters.read_percpu_sum().tolist(), strict=True))

    def _made(self) -> int:
        counted = self._counted()
        return counted["flows_created"] - counted["flows_replaced"]

    def _start_walk(self, now_ns: int) -> None:
        """Tell the connections, unless the last walk over them is not done yet."""
        signals, reader = self._bus.wanted("tcp_flow"), self._feed.reader
        if not signals and reader is None:
            self._walks = 0  # whoever listens next is told everything first
            return
        if self._table.walking:
            return
        since_ns, self._walk_ns = self._walk_ns - _MARGIN_NS, now_ns
        everything = self._walks % _ALL_EVERY == 0
        self._walks += 1
        if signals and self._drops is not None:
            self._drops.refresh(now_ns)

        def take(keys: NDArray[Any], rows: NDArray[Any]) -> None:
            wanted = rows["last_ns"].astype(np.int64) >= since_ns
            if everything:
                wanted |= rows["flags"] & CLOSED == 0
            if signals:
                self._busiest.weigh(keys, rows, since_ns)
            keys, rows = keys[wanted], rows[wanted]
            stalls = self._rows.stalls(keys, rows)
            if signals:
                self._publish(keys, rows, stalls, now_ns)
            if reader is not None:
                reader(self._rows.connections(keys, rows, stalls, now_ns))

        self._table.walk(take)

    def _forget_requests(self, before_ns: int) -> None:
        cookies, accounted = self._accounted.read()
        dead = (accounted["last_ns"] != 0) & (accounted["last_ns"].astype(np.int64) < before_ns)
        gone = cookies[dead]
        for cookie in gone[:_FORGOTTEN_AT_ONCE]:
            self._accounted.delete(cookie)
        if len(gone) > _FORGOTTEN_AT_ONCE:  # after a flood of SYNs: the rest with the next window
            self._requests_due_ns = 0

    def _inode(self, identity: Identity) -> int:
        found = self._find(identity)
        return 0 if found is None else found.inode

    def _stall(self, identity: Identity) -> Stall | None:
        found = self._find(identity, info=True)
        if found is None or found.info is None or not found.info.retransmits:
            return None
        return Stall(found.info.retransmits, found.info.rto_ns, found.info.last_ack_ns)

    def _find(self, identity: Identity, info: bool = False) -> Socket | None:
        if self._diagnostics is None:
            return None
        ends = identity.local, identity.local_port, identity.remote, identity.remote_port
        return self._diagnostics.find(*ends, identity.interface, identity.cookie, info)
