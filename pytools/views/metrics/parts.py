"""What metrics are made of: totals that never go back, histograms, and tables with a limit. Pure.

Times are CLOCK_MONOTONIC nanoseconds. Nothing here knows a label: rows are found by the key that signals carry, and
labels are made once for each row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from itertools import accumulate
from typing import Final, Generic, Protocol, TypeVar

from pytools import signals
from pytools.signals import DELAY_BOUNDS_NS

_LE: Final = (*(repr(bound / 1e9) for bound in DELAY_BOUNDS_NS), "+Inf")  # a bound is written in one way only
BUCKETS: Final = len(_LE)


class Total:
    """The sum of everything that a counter elsewhere has counted, across the times when it began anew at zero."""

    __slots__ = ("_epoch", "_last", "value")

    def __init__(self) -> None:
        self.value = 0
        self._last = self._epoch = 0

    def take(self, reading: int, epoch: int = 0) -> None:
        """The counter's reading now; a smaller one than the last, or another epoch, means that it began anew."""
        begins = epoch != self._epoch or reading < self._last
        self.value += reading if begins else reading - self._last
        self._last, self._epoch = reading, epoch


class Totals(dict[tuple[str, ...], Total]):
    """Totals by the labels that tell them apart within one subject."""

    def take(self, labels: tuple[str, ...], reading: int | None, epoch: int = 0) -> None:
        """A reading; None: this counter does not exist here."""
        if reading is None:
            return
        total = self.get(labels)
        if total is None:
            total = self[labels] = Total()
        total.take(reading, epoch)


class Histogram:
    """Delays by size; what a bucket holds is no larger than its bound."""

    __slots__ = ("_counts", "sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.sum_ns = 0

    def observe(self, value_ns: int) -> None:
        """One delay more."""
        self._counts[bisect_left(DELAY_BOUNDS_NS, value_ns)] += 1
        self.sum_ns += value_ns

    def add(self, counted: signals.Histogram) -> None:
        """Delays that were counted elsewhere."""
        for place, count in enumerate(counted.by_class()):
            self._counts[place] += count
        self.sum_ns += counted.sum_ns

    def cumulative(self) -> list[tuple[str, int]]:
        """For each bound in seconds, as it is written, how many were no larger."""
        return list(zip(_LE, accumulate(self._counts), strict=True))


class Heard(Protocol):
    """What a table holds."""

    heard_ns: int


Key = TypeVar("Key", bound=Hashable)
Row = TypeVar("Row", bound=Heard)


class Table(Generic[Key, Row]):
    """Rows by key, no more than a limit; whoever comes when it is full is counted and not remembered.

    Parameters
    ----------
    limit : int
        How many rows at most.
    make : callable
        A new row for a key.

    Attributes
    ----------
    left_out : int
        Signals that found no row.
    """

    def __init__(self, limit: int, make: Callable[[Key], Row]) -> None:
        self.limit, self._make = limit, make
        self._rows: dict[Key, Row] = {}
        self.left_out = 0

    def row(self, key: Key, at_ns: int) -> Row | None:
        """The row of this key, which was heard of then; None, and counted, when there is no room for another."""
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= self.limit:
                self.left_out += 1
                return None
            row = self._rows[key] = self._make(key)
        row.heard_ns = max(row.heard_ns, at_ns)
        return row

    def remove(self, key: Key) -> None:
        """Remember it no more."""
        self._rows.pop(key, None)

    def forget(self, before_ns: int) -> None:
        """Remove what was last heard of before then."""
        for key in [key for key, row in self._rows.items() if row.heard_ns < before_ns]:
            del self._rows[key]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def __len__(self) -> int:
        return len(self._rows)
