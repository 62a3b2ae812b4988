"""Packets that the kernel dropped, by its own reasons: of the whole machine, and of single connections.

One thread: the agent's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.kernel import tracefs
from pytools.kernel.bpf.loader import Loaded
from pytools.signals import DropReason, PacketDrops

_READINGS: Final = 3


class Drops:
    """Reads what drops.c counts.

    Parameters
    ----------
    loaded : Loaded
        Where drops.c was loaded; stays the caller's.
    names : mapping of int to str
        The kernel's names of its reasons.
    """

    def __init__(self, loaded: Loaded, names: Mapping[int, str]) -> None:
        self._by_reason, self._sockets_full = loaded.map("drops_by_reason"), loaded.map("drops_sockets_full")
        self._by_socket, self._latest = loaded.map("drops_by_socket"), loaded.map("drops_latest")
        self._sockets = SocketDrops()
        self._names = names
        self._last = self._by_reason.max_entries - 1  # stands for all that are beyond the table
        self._before = self._totals()

    def read(self, window_ns: int, **common: Any) -> PacketDrops:
        """What was dropped since the last reading, and since the program was loaded."""
        totals = self._totals()
        window = np.maximum(totals - self._before, 0)
        self._before = totals
        reasons = [
            DropReason(self._name(reason), int(window[reason]), int(totals[reason]))
            for reason in np.flatnonzero(totals).tolist()
        ]
        return PacketDrops(window_ns=window_ns, reasons=reasons, **common)

    def refresh(self, now_ns: int) -> None:
        """Read anew what single sockets have lost, for `of`."""
        self._sockets.refresh(*self.by_socket(), now_ns)

    def by_socket(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and packets since the program was loaded; packets of a key that comes more than once are to be added.

        A run goes to the table when another socket's begins. If that happens while the table is read, the run may be in
        neither, and the table is read again; where sockets change faster than that, it waits for the next reading.
        """
        runs = self._latest.read()[1].ravel()
        for _ in range(_READINGS):
            keys, packets = self._by_socket.read()
            before, runs = runs, self._latest.read()[1].ravel()
            if np.array_equal(before["key"], runs["key"]) and (before["packets"] <= runs["packets"]).all():
                break
        keys, packets = np.concatenate([keys, runs["key"]]), np.concatenate([packets, runs["packets"]])
        counted = np.flatnonzero(packets)
        return keys.take(counted), packets.take(counted)

    def of(self, rows: NDArray[Any]) -> list[dict[str, int]]:
        """Packets of each of these connections that were dropped, by reason, as of the last `refresh`."""
        return [{self._name(reason): packets for reason, packets in lost.items()} for lost in self._sockets.of(rows)]

    def counters(self) -> dict[str, int]:
        """What could not be told apart, by counter: by reason as of the last reading."""
        return {
            "drops_other": int(self._before[self._last]),
            "drops_sockets_full": int(self._sockets_full.read_percpu_sum()[0]),
        }

    def _totals(self) -> NDArray[np.int64]:
        return self._by_reason.read_percpu_sum().astype(np.int64)

    def _name(self, reason: int) -> str:
        return "other" if reason == self._last else tracefs.name(reason, self._names)


class SocketDrops:
    """Dropped packets by the address that a socket has in the kernel, and by reason.

    An address belongs to another socket once its own is gone. What it had lost until then is not the new one's, but for
    what came between two readings, and while nobody read.
    """

    def __init__(self) -> None:
        self._lost = self._previous = _Sorted(np.zeros(0, np.uint64), np.zeros(0, np.uint64), np.zeros(0, np.uint64))
        self._previous_ns = self._read_ns = 0
        self._tenants: dict[int, tuple[int, int, dict[int, int]]] = {}  # address -> since when, cookie, lost before

    def __len__(self) -> int:
        return len(self._tenants)

    def refresh(self, keys: NDArray[Any], packets: NDArray[Any], now_ns: int = 0) -> None:
        """Takes all that there is, as `Drops.by_socket` gives it."""
        self._previous_ns, self._read_ns = self._read_ns, now_ns
        self._previous, self._lost = self._lost, _Sorted(keys["rx_sk"], keys["reason"], packets)
        there = set(self._lost.sockets.tolist())
        self._tenants = {sock: tenant for sock, tenant in self._tenants.items() if sock in there}

    def of(self, rows: NDArray[Any]) -> list[dict[int, int]]:
        """Packets by reason of the connections in these rows of the table."""
        found: list[dict[int, int]] = [{} for _ in range(len(rows))]
        for at in np.flatnonzero(np.isin(rows["skaddr"], self._lost.sockets)).tolist():
            row = rows[at]
            found[at] = self._of(int(row["skaddr"]), int(row["cookie"]), int(row["first_ns"]))
        return found

    def _of(self, sock: int, cookie: int, first_ns: int) -> dict[int, int]:
        known = self._tenants.get(sock)
        if known is None:  # newer than the last reading but one: what had been lost by then was another's
            newer = 0 < self._previous_ns < first_ns
            known = first_ns, cookie, self._previous.of(sock) if newer else {}
        since_ns, tenant, before = known
        if tenant != cookie:
            if first_ns < since_ns:
                return {}  # an earlier connection, whose socket is gone
            before = self._previous.of(sock)
        self._tenants[sock] = first_ns, cookie, before
        lost = {reason: count - before.get(reason, 0) for reason, count in self._lost.of(sock).items()}
        return {reason: count for reason, count in lost.items() if count > 0}


class _Sorted:
    """Packets by socket and reason, by the address of the socket: there may be many, and few are asked for."""

    def __init__(self, sockets: NDArray[Any], reasons: NDArray[Any], packets: NDArray[Any]) -> None:
        order = np.argsort(sockets, kind="stable")
        self.sockets, self._reasons, self._packets = sockets[order], reasons[order], packets[order]

    def of(self, sock: int) -> dict[int, int]:
        address = np.uint64(sock)
        first = int(np.searchsorted(self.sockets, address, side="left"))
        end = int(np.searchsorted(self.sockets, address, side="right"))
        lost: Counter[int] = Counter()
        for reason, packets in zip(self._reasons[first:end].tolist(), self._packets[first:end].tolist(), strict=True):
            lost[reason] += packets
        return lost
