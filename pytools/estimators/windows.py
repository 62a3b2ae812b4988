"""Windows over the measurements of many paths at once: recent samples, percentiles, sliding minima, counts.

Pure arrays, one row per path, times int64 nanoseconds of one clock that the caller passes in. One thread.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Rows = NDArray[Any]  # of any integer type

MISSING: Final = np.iinfo(np.int64).min  # a time, delay or figure that is not known
_HIGHEST: Final = np.iinfo(np.int64).max
_BUCKETS: Final = 32


def occurrence(rows: Rows) -> NDArray[np.intp]:
    """For each element, how many equal ones stand before it.

    Returns
    -------
    ndarray of intp
        Zeros where every element is the first of its kind.
    """
    count = len(rows)
    if len(set(rows.tolist())) == count:  # nearly always, and much cheaper than sorting
        return np.zeros(count, np.intp)
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    first = np.empty(count, np.bool_)
    first[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    places = np.arange(count)
    result = np.empty(count, np.intp)
    result[order] = places - np.maximum.accumulate(np.where(first, places, 0))
    return result


def how_many(mask: NDArray[np.bool_]) -> int:
    """How many elements are true."""
    return int(np.count_nonzero(mask))


def power_of_two(least: float) -> int:
    """The smallest power of two that is not below `least`."""
    return 1 << max(0, int(np.ceil(least)) - 1).bit_length()


class Samples:
    """The most recent samples of every row, in the order in which they were added.

    Parameters
    ----------
    rows : int
        How many rows; `grow` adds more.
    depth : int
        How many samples of a row are kept; rounded up to a power of two.
    """

    def __init__(self, rows: int, depth: int) -> None:
        self.depth = power_of_two(depth)
        self.values = np.full((rows, self.depth), MISSING, np.int64)
        self.times = np.full((rows, self.depth), MISSING, np.int64)
        self.counts = np.zeros(rows, np.int64)

    def grow(self, rows: int) -> None:
        """Have at least this many rows."""
        more = rows - len(self.counts)
        if more <= 0:
            return
        empty = np.full((more, self.depth), MISSING, np.int64)
        self.values = np.concatenate([self.values, empty])
        self.times = np.concatenate([self.times, empty])
        self.counts = np.concatenate([self.counts, np.zeros(more, np.int64)])

    def add(self, rows: Rows, values: Times, times: Times) -> None:
        """Add samples; several of one row in one call keep their order."""
        if not len(rows):
            return
        places = (self.counts[rows] + occurrence(rows)) & (self.depth - 1)
        self.values[rows, places] = values
        self.times[rows, places] = times
        np.add.at(self.counts, rows, 1)

    def forget(self, rows: Rows) -> None:
        """Hold nothing of these rows any more."""
        self.times[rows] = MISSING

    def newest(self, rows: Rows, counts: NDArray[np.int64]) -> tuple[Times, NDArray[np.bool_]]:
        """The newest samples of some rows, so many of each, as far as they are held, whatever their time.

        Returns
        -------
        values : ndarray of int64, shape (len(rows), k)
        are_samples : ndarray of bool, shape (len(rows), k)
            Which of them were asked for and are held.
        """
        width = min(int(counts.max(initial=0)), self.depth)
        places = (self.counts[rows, None] - 1 - np.arange(width)) & (self.depth - 1)
        held = self.times[rows[:, None], places] != MISSING
        return self.values[rows[:, None], places], held & (np.arange(width) < counts[:, None])

    def since(self, rows: Rows, begin_ns: int, at_most: int) -> tuple[Times, NDArray[np.int64], Times]:
        """The samples of some rows that are not older than `begin_ns`, ascending.

        Parameters
        ----------
        at_most : int
            Look at this many of the newest samples of each row.

        Returns
        -------
        ordered : ndarray of int64, shape (len(rows), k)
            Ascending in each row; what is beyond its count is no sample.
        counts : ndarray of int64, shape (len(rows),)
        last : ndarray of int64, shape (len(rows),)
            The newest sample in the window, or MISSING.
        """
        width = min(power_of_two(at_most), self.depth)
        places = (self.counts[rows, None] - 1 - np.arange(width)) & (self.depth - 1)
        held = self.values[rows[:, None], places]
        inside = self.times[rows[:, None], places] >= begin_ns  # an empty place has a time before all others
        counts = np.count_nonzero(inside, axis=1)
        newest = inside.argmax(axis=1)
        last = np.where(counts > 0, held[np.arange(len(rows)), newest], MISSING)
        ordered = np.where(inside, held, _HIGHEST)
        ordered.sort(axis=1)
        return ordered, counts, last


def nearest_rank(ordered: Times, counts: NDArray[np.int64], percent: int) -> Times:
    """A percentile of each row by the nearest-rank method: the smallest sample with `percent` % at or below it.

    It is always a value that was measured, and needs no float: delays keep their nanoseconds.

    Parameters
    ----------
    ordered, counts : ndarray
        As `Samples.since` gives them.

    Returns
    -------
    ndarray of int64
        MISSING where a row has no sample.
    """
    places = np.maximum(-(-counts * percent // 100), 1) - 1
    picked = ordered[np.arange(len(ordered)), places]
    return np.where(counts > 0, picked, MISSING)


class SlidingMinimum:
    """The smallest sample of every row over the recent past, and when it was taken.

    The past is kept in buckets of 1/32 of the window, so the minimum reaches back between one window and one
    bucket more.
    """

    def __init__(self, rows: int, window_ns: int) -> None:
        self.window_ns = window_ns
        self._width_ns = max(1, window_ns // _BUCKETS)
        self._kept = _BUCKETS + 1
        self._minima = np.full((rows, self._kept), _HIGHEST, np.int64)
        self._times = np.zeros((rows, self._kept), np.int64)
        self._buckets = np.full((rows, self._kept), MISSING, np.int64)

    def grow(self, rows: int) -> None:
        """Have at least this many rows."""
        more = rows - len(self._minima)
        if more <= 0:
            return
        shape = (more, self._kept)
        self._minima = np.concatenate([self._minima, np.full(shape, _HIGHEST, np.int64)])
        self._times = np.concatenate([self._times, np.zeros(shape, np.int64)])
        self._buckets = np.concatenate([self._buckets, np.full(shape, MISSING, np.int64)])

    def forget(self, rows: Rows) -> None:
        """Hold nothing of these rows any more."""
        self._buckets[rows] = MISSING
        self._minima[rows] = _HIGHEST

    def add(self, rows: Rows, values: Times, times: Times) -> None:
        """Take samples into account; of one row, none may be older than a window before the newest."""
        if not len(rows):
            return
        buckets = times // self._width_ns
        flat = rows * self._kept + buckets % self._kept
        held, minima, when = self._buckets.reshape(-1), self._minima.reshape(-1), self._times.reshape(-1)
        np.maximum.at(held, flat, buckets)
        stale = when[flat] // self._width_ns != held[flat]
        minima[flat[stale]] = _HIGHEST
        current = buckets == held[flat]
        flat, values, times = flat[current], values[current], times[current]
        np.minimum.at(minima, flat, values)
        smallest = minima[flat] == values
        when[flat[smallest]] = times[smallest]

    def at(self, rows: Rows, now_ns: int) -> tuple[Times, Times]:
        """Minimum and the time at which it was taken, for some rows.

        Returns
        -------
        minima, times : ndarray of int64
            MISSING where a row has no sample in the window.
        """
        oldest = now_ns // self._width_ns - _BUCKETS
        inside = self._buckets[rows] >= oldest
        minima = np.where(inside, self._minima[rows], _HIGHEST)
        chosen = minima.argmin(axis=1)
        place = np.arange(len(rows))
        smallest = minima[place, chosen]
        known = smallest != _HIGHEST
        return np.where(known, smallest, MISSING), np.where(known, self._times[rows][place, chosen], MISSING)


class CountHistory:
    """Counters as they stood some time ago, to tell how much they grew over a window."""

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._past: deque[tuple[int, NDArray[np.int64]]] = deque()

    def growth(self, now_ns: int, counters: NDArray[np.int64]) -> NDArray[np.int64]:
        """How much each counter grew since the latest call that lies at least a window back.

        Before one does, since the first call. Rows that came later started at zero.
        """
        while len(self._past) > 1 and self._past[1][0] <= now_ns - self._window_ns:
            self._past.popleft()
        grown = counters.copy()
        if self._past:
            then = self._past[0][1]
            grown[: len(then)] -= then
        self._past.append((now_ns, counters.copy()))
        return grown
