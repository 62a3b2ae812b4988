"""The busiest connections, told between two walks over the table: who steers needs the rates of a few, and soon.

Each walk picks them by the kernel's last delivery rate, among those that were looked at lately. They are then looked up
one by one, a slice at a time, and only those that were looked at since are told. So the cost has a bound whatever the
table holds, and a connection that has just become busy is among them after the next walk. One thread: the agent's.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.kernel.bpf.maps import Map
from pytools.sources.tcp.rows import CLOSED, delivery_rates

SLICE: Final = 128
_NEVER_NS: Final = 1 << 62


class Busiest:
    """Picks them and looks them up.

    Parameters
    ----------
    most : int
        So many at most; 0 for none.
    interval_ns : int
        How often each is looked up.
    """

    def __init__(self, flows: Map, most: int, interval_ns: int) -> None:
        self._flows, self._most, self._interval_ns = flows, most, interval_ns
        self._keys = np.empty(0, flows.key)
        self._told_ns = np.empty(0, np.int64)
        self._picked: tuple[NDArray[Any], NDArray[np.float64], NDArray[np.int64]] | None = None
        self._next, self._due_ns = 0, _NEVER_NS

    def weigh(self, keys: NDArray[Any], rows: NDArray[Any], since_ns: int) -> None:
        rates, measured = delivery_rates(rows)
        last_ns = rows["last_ns"].astype(np.int64)
        busy = measured & (last_ns >= since_ns) & (rows["flags"] & CLOSED == 0)
        busy &= rows["netns"] == 0  # who steers can move no others
        part = keys[busy], rates[busy].astype(np.float64), last_ns[busy]
        if self._picked is not None:
            part = tuple(np.concatenate(pair) for pair in zip(self._picked, part, strict=True))  # type: ignore[assignment]
        if len(part[0]) > self._most:
            chosen = np.argpartition(-part[1], self._most)[: self._most]
            part = part[0][chosen], part[1][chosen], part[2][chosen]
        self._picked = part

    def settle(self, now_ns: int) -> None:
        """The walk is over: those that were picked are looked up from now on."""
        if self._picked is None:
            return
        self._keys, _, self._told_ns = self._picked
        self._picked, self._next = None, 0
        self._due_ns = now_ns + self._interval_ns if len(self._keys) else _NEVER_NS

    def forget(self) -> None:
        self._keys, self._picked, self._due_ns = self._keys[:0], None, _NEVER_NS

    def due_ns(self) -> int:
        """When there is something to do."""
        return self._due_ns

    def read(self, now_ns: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Keys and rows of the next slice that were looked at since they were told last."""
        part = slice(self._next, self._next + SLICE)
        keys = self._keys[part]
        found, rows = self._flows.lookup_many(keys)
        last_ns = rows["last_ns"].astype(np.int64)
        fresh = found & (last_ns > self._told_ns[part])
        self._told_ns[part] = np.where(found, last_ns, self._told_ns[part])
        slices = -(-len(self._keys) // SLICE)
        self._next = part.stop if part.stop < len(self._keys) else 0
        self._due_ns = max(self._due_ns + self._interval_ns // slices, now_ns)
        return keys[fresh], rows[fresh]
