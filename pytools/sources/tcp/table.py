"""The kernel's table of connections, read a part at a time: the thread that reads also sends probes, on time.

A part is at most `SLICE` rows; between two parts there is a pause that keeps the reading to its share of the time. How
many connections had to make room for others is what is missing: rows made less those taken over and those that are
there. The kernel keeps the first two; the third is known without counting until the table is nearly full, and counted
after that: the figure is exact when nothing was made during the count. One thread: the agent's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from numpy.typing import NDArray

from pytools.kernel.bpf.maps import Map, possible_cpus

SLICE: Final = 256
_LISTENED_TO: Final = 5  # a part and its pause take so many times what the part takes
_COUNTING: Final = 50
_NEVER_NS: Final = 1 << 62
_RECOUNT_NS: Final = 10 * 10**9
_HELD_BACK: Final = 128  # rows that a processor may hold free for itself while others already have to make room

Take = Callable[[NDArray[Any], NDArray[Any]], None]


class Table:
    """Walks over `tcp_flows`.

    Parameters
    ----------
    flows : Map
        The table; it may change meanwhile.
    made : callable
        How many rows were made so far, less those that were taken over.
    """

    def __init__(self, flows: Map, made: Callable[[], int], cpus: int | None = None) -> None:
        self._flows, self._made = flows, made
        self.capacity = flows.max_entries
        self._certain = max(0, self.capacity - _HELD_BACK * (possible_cpus() if cpus is None else cpus))
        self._evicted, self._counted_at = 0, 0  # at the last count, and how many had been made then
        self._walk: Iterator[None] | None = None
        self._share = _LISTENED_TO
        self._due_ns = self._recount_due_ns = 0

    def remembered(self) -> tuple[int, int]:
        """Connections in the table now, and those that had to make room so far."""
        made = self._made()
        if made <= self._certain:
            return made, 0
        present = min(made - self._evicted, self.capacity)
        return present, made - present

    @property
    def walking(self) -> bool:
        return self._walk is not None

    def walk(self, take: Take) -> None:
        """Have every row given to `take`, in parts."""
        self._walk, self._share = self._parts(take), _LISTENED_TO

    def tick(self, now_ns: int) -> int:
        """Read a part when one is due; says when the next one is. Begins to count now and then when that is needed."""
        if self._walk is None and now_ns >= self._recount_due_ns:
            self._recount_due_ns = now_ns + _RECOUNT_NS
            made = self._made()
            if made > self._certain and made != self._counted_at:
                self._walk, self._share = self._parts(_nothing), _COUNTING
        if self._walk is not None and now_ns >= self._due_ns:
            began_ns = time.monotonic_ns()
            if next(self._walk, self) is self:
                self._walk = None
            took_ns = time.monotonic_ns() - began_ns
            self._due_ns = now_ns + took_ns * self._share
        return self._due_ns if self._walk is not None else _NEVER_NS

    def _parts(self, take: Take) -> Iterator[None]:
        made, present = self._made(), 0
        for keys, rows in self._flows.batches(SLICE):
            present += len(rows)
            take(keys, rows)
            yield
        self._evicted, self._counted_at = max(0, made - present), made


def _nothing(_keys: NDArray[Any], _rows: NDArray[Any]) -> None:
    """Only counted."""
