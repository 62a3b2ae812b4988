"""What metrics are made of: totals that never go back, histograms, and rows of them. Pure.

Times are CLOCK_MONOTONIC nanoseconds. Nothing here knows a metric.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, Final

from pytools import signals
from pytools.signals import DELAY_BOUNDS_NS

_LE: Final = (*(repr(bound / 1e9) for bound in DELAY_BOUNDS_NS), "+Inf")  # a bound is written in one way only
BUCKETS: Final = len(_LE)
NAMES: Final = 256  # drop counters, reasons of dropped packets, programs, hooks: each so many


class Total:
    """The sum of everything that a counter elsewhere has counted, across the times when it began anew at zero."""

    __slots__ = ("_epoch", "_last", "value")

    def __init__(self) -> None:
        self.value = 0
        self._last = self._epoch = 0

    def take(self, reading: int, epoch: int = 0) -> int:
        """The counter's reading now; a smaller one than the last, or another epoch, means that it began anew.

        Returns
        -------
        int
            By how much it grew.
        """
        begins = epoch != self._epoch or reading < self._last
        grown = reading if begins else reading - self._last
        self.value += grown
        self._last, self._epoch = reading, epoch
        return grown


class Histogram:
    """Delays by size; what a bucket holds is no larger than its bound."""

    __slots__ = ("_counts", "sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self.sum_ns = 0

    def observe(self, value_ns: int) -> None:
        self._counts[bisect_left(DELAY_BOUNDS_NS, value_ns)] += 1
        self.sum_ns += value_ns

    def add(self, counted: signals.Histogram) -> None:
        for place, count in enumerate(counted.by_class()):
            self._counts[place] += count
        self.sum_ns += counted.sum_ns

    def cumulative(self) -> list[tuple[str, int]]:
        """For each bound in seconds, as it is written, how many were no larger."""
        return list(zip(_LE, accumulate(self._counts), strict=True))


Key = tuple[str, ...]  # a metric, and its labels behind those of the row


class Totals(dict[Key, Total]):
    """Totals by metric and labels; those of one metric are no more than a limit.

    Parameters
    ----------
    zeros : iterable of Key
        Those that are there from the beginning.
    limit : int
        Totals of one metric.
    left_out : Counter
        Where it is counted that one found no room.
    """

    __slots__ = ("_left_out", "_limit", "_of_metric")

    def __init__(self, zeros: Iterable[Key], limit: int, left_out: Counter[str]) -> None:
        super().__init__((key, Total()) for key in zeros)
        self._limit, self._left_out = limit, left_out
        self._of_metric = Counter(key[0] for key in self)

    def __missing__(self, key: Key) -> Total:
        """A new one; where there is no room, one that nobody will see."""
        total = Total()
        if self._of_metric[key[0]] < self._limit:
            self._of_metric[key[0]] += 1
            self[key] = total
        else:
            self._left_out["name"] += 1
        return total

    def read(self, key: Key, reading: int | None, epoch: int = 0) -> int:
        """A reading of a counter that is kept elsewhere, None: there is none here; by how much it grew."""
        return 0 if reading is None else self[key].take(reading, epoch)


class Row:
    """One subject: the newest signals about it, and what was counted of it, by metric.

    Parameters
    ----------
    labels : tuple of str
        The labels of its series; or what it is known by, where it has none.
    left_out : Counter
        Where what has no room is counted, by kind.
    zeros, histograms : iterable of Key
        Totals and histograms that it has from the beginning.
    limit : int
        Series of one metric.
    """

    __slots__ = ("heard_ns", "histograms", "labels", "left_out", "newest", "totals")

    def __init__(
        self,
        labels: Key,
        left_out: Counter[str],
        zeros: Iterable[Key] = (),
        histograms: Iterable[Key] = (),
        limit: int = NAMES,
    ) -> None:
        self.labels, self.left_out, self.heard_ns = labels, left_out, 0
        self.newest: dict[Any, Any] = {}  # by kind; of events by what happened, too
        self.totals = Totals(zeros, limit, left_out)
        self.histograms = {key: Histogram() for key in histograms}
