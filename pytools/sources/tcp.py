"""TCP retransmissions by flow and by path, read from what tcp.c aggregates in the kernel.

Counts are segments, times CLOCK_MONOTONIC nanoseconds. One thread: the agent's. Order at the start: the program is
loaded, a `TcpSource` is made (it notes what every socket had retransmitted before), then `tcp_egress` is attached
to the interfaces. So everything counted happened after the source was made, and nothing after it is missed.
"""

from __future__ import annotations

import ipaddress
import selectors
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.bus import Bus
from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.kernel import sockdiag
from pytools.kernel.loader import Loaded
from pytools.kernel.netlink import Netlink
from pytools.signals import Path, TcpFlow, TcpPath

PathOf = Callable[[str, str], Path | None]  # (remote address, interface) -> the path, if it is a measured one

_IDLE_NS: Final = 60 * 10**9  # a flow silent for so long may lose its row
_SYNACK_IDLE_NS: Final = 300 * 10**9  # a request whose SYN-ACK was last sent so long ago is dead
_MARGIN_NS: Final = 10**9  # a row may be stamped a little before it is written
_PRUNED_AT_ONCE: Final = 1024  # bounds the time that one tick takes
_COUNTERS: Final = ("retransmitted", "flows_full", "interfaces_full", "synacks_full", "deferred")


class TcpSource:
    """Reads the maps once per long window; publishes what changed.

    Parameters
    ----------
    loaded : Loaded
        Where tcp.c was loaded; stays the caller's. The program is not attached yet.
    netlink : Netlink
        For the names of interfaces.
    path_of : callable
        Which measured path, if any, a remote address and an interface make.
    known : callable
        The measured paths: they are reported even while nothing is retransmitted on them.
    """

    def __init__(
        self,
        config: AgentConfig,
        loaded: Loaded,
        netlink: Netlink,
        bus: Bus,
        path_of: PathOf,
        known: Callable[[], Iterable[Path]] = tuple,
    ) -> None:
        self._host, self._netlink, self._bus = config.host, netlink, bus
        self._path_of, self._known = path_of, known
        self._interval_ns = int(config.windows.long_ms * 1e6)
        self._flows = loaded.map("tcp_flows")
        self._interfaces = loaded.map("tcp_interfaces")
        self._accounted = loaded.map("tcp_accounted")
        self._counters = loaded.map("tcp_counters")
        self._counted: dict[bytes, tuple[int, int]] = {}  # row -> (segments, first_ns) at the last reading
        self._unrecorded: dict[int, int] = {}
        self._totals: dict[tuple[str, Path | None], int] = {}
        self._names: dict[int, str] = {}
        self._baselines_full = self._note_earlier()
        self._previous_ns = time.monotonic_ns()
        self._due_ns = self._previous_ns + self._interval_ns
        self._synacks_due_ns = self._previous_ns + _SYNACK_IDLE_NS

    def register(self, selector: selectors.BaseSelector) -> None:
        """Nothing to wait for: the maps are read when it is time."""

    def tick(self, now_ns: int) -> int:
        """Read and publish when it is time; says when that is next."""
        if now_ns >= self._due_ns:
            self.read(now_ns)
            self._due_ns += self._interval_ns
            if self._due_ns <= now_ns:  # the agent was held up: do not catch up in a burst
                self._due_ns = now_ns + self._interval_ns
        return self._due_ns

    def read(self, now_ns: int) -> None:
        """Read the maps, publish the flows that changed and every path that is measured or has retransmitted."""
        unix_ns = time.time_ns()
        window: dict[tuple[str, Path | None], int] = dict.fromkeys(self._totals, 0)
        window |= {(path.interface, path): 0 for path in self._known()}
        keys, rows = self._flows.read()
        changed = rows["last_ns"].astype(np.int64) >= self._previous_ns - _MARGIN_NS
        for key, row in zip(keys[changed], rows[changed], strict=True):
            self._take_flow(key, row, window, now_ns, unix_ns)
        for ifindex, total in zip(*self._interfaces.read(), strict=True):
            new = int(total["unrecorded_segments"]) - self._unrecorded.get(int(ifindex), 0)
            self._unrecorded[int(ifindex)] = int(total["unrecorded_segments"])
            if new:
                where = (self._name(int(ifindex)), None)
                window[where] = window.get(where, 0) + new
        for (interface, path), segments in window.items():
            total_segments = self._totals.get((interface, path), 0) + segments
            self._totals[interface, path] = total_segments
            self._bus.publish(
                TcpPath(
                    host=self._host,
                    at_ns=now_ns,
                    unix_ns=unix_ns,
                    interface=interface,
                    path=path,
                    window_ns=now_ns - self._previous_ns,
                    retransmitted_segments=segments,
                    total_segments=total_segments,
                )
            )
        self._previous_ns = now_ns
        self._prune(keys, rows, now_ns)

    def drops(self) -> dict[str, int]:
        """What could not be recorded, by counter."""
        counted = dict(zip(_COUNTERS, self._counters.read_percpu_sum().tolist(), strict=True))
        del counted["retransmitted"]
        return {"tcp_baselines_full": self._baselines_full} | {f"tcp_{name}": n for name, n in counted.items()}

    def close(self) -> None:
        """Nothing is held: maps and attachments are the caller's."""

    def _note_earlier(self) -> int:
        """Tell the kernel program what sockets had retransmitted before; returns how many did not fit."""
        left_out = 0
        for cookie, segments in sockdiag.retransmitted_segments().items():
            try:
                self._accounted.update(cookie, (segments, 0))
            except SwerveError:
                left_out += 1
        return left_out

    def _take_flow(
        self,
        key: np.void,
        row: np.void,
        window: dict[tuple[str, Path | None], int],
        now_ns: int,
        unix_ns: int,
    ) -> None:
        segments, first_ns = int(row["retransmitted_segments"]), int(row["first_ns"])
        before, before_first_ns = self._counted.get(key.tobytes(), (0, 0))
        if before_first_ns != first_ns:  # a new row, or one that was pruned and came back
            before = 0
        if segments == before:
            return
        self._counted[key.tobytes()] = (segments, first_ns)
        interface, remote = self._name(int(key["ifindex"])), address(key["remote"])
        path = self._path_of(remote, interface)
        window[interface, path] = window.get((interface, path), 0) + segments - before
        if self._bus.wanted("tcp_flow"):
            self._bus.publish(
                TcpFlow(
                    host=self._host,
                    at_ns=now_ns,
                    unix_ns=unix_ns,
                    local=address(key["local"]),
                    local_port=int(key["local_port"]),
                    remote=remote,
                    remote_port=int(key["remote_port"]),
                    interface=interface,
                    path=path,
                    retransmitted_segments=segments,
                    last_ns=int(row["last_ns"]),
                )
            )

    def _prune(self, keys: NDArray[Any], rows: NDArray[Any], now_ns: int) -> None:
        """Make room: drop the flows that have been idle longest; their segments stay in the totals."""
        if len(rows) > self._flows.max_entries * 3 // 4:
            for index in longest_idle(rows["last_ns"], now_ns - _IDLE_NS, _PRUNED_AT_ONCE):
                self._flows.delete(keys[index])
                self._counted.pop(keys[index].tobytes(), None)
        if now_ns >= self._synacks_due_ns:
            self._synacks_due_ns = now_ns + _SYNACK_IDLE_NS
            cookies, accounted = self._accounted.read()
            dead = (accounted["last_ns"] != 0) & (accounted["last_ns"] < np.uint64(now_ns - _SYNACK_IDLE_NS))
            for cookie in cookies[dead]:
                self._accounted.delete(cookie)

    def _name(self, ifindex: int) -> str:
        if ifindex not in self._names:
            self._names |= {link.index: link.name for link in self._netlink.links()}
        return self._names.setdefault(ifindex, f"if{ifindex}")  # gone already


def longest_idle(last_ns: NDArray[np.uint64], before_ns: int, at_most: int) -> NDArray[np.intp]:
    """Indices of those last active before `before_ns`, the longest idle first."""
    order = np.argsort(last_ns, kind="stable")[:at_most]
    return order[last_ns[order].astype(np.int64) < before_ns]


def address(mapped: np.void) -> str:
    """A `struct swerve_addr` as text; IPv4-mapped ones as IPv4."""
    ip = ipaddress.IPv6Address(mapped["bytes"].tobytes())
    return str(ip.ipv4_mapped or ip)
