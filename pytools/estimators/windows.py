"""Windows over the measurements of many paths at once: recent samples, percentiles, sliding minima, counts.

Pure arrays, one row per path, times int64 nanoseconds of one clock that the caller passes in. One thread.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.int64]
Rows = NDArray[Any]  # of any integer type

MISSING: Final = np.iinfo(np.int64).min  # a time, delay or figure that is not known
NO_MINIMUM: Final = np.iinfo(np.int64).max  # of a part of a window that has no sample
PARTS: Final = 32  # of the window of a sliding minimum


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


def how_many(mask: NDArray[Any]) -> int:
    """How many elements are true, or not 0."""
    return int(np.count_nonzero(mask))


def power_of_two(least: float) -> int:
    """The smallest power of two that is not below `least`."""
    return 1 << max(0, math.ceil(least) - 1).bit_length()


class Growing:
    """Arrays of numpy with a row, or a column, for each of something of which there may be more later."""

    rows = -1  # that there are; -1: no array yet

    def _allocate(self, rows: int) -> None:
        """Make each of these arrays anew, with so many rows that know nothing."""
        raise NotImplementedError

    def grow(self, rows: int) -> None:
        """Have at least this many rows; those that there are keep what they hold."""
        if rows <= self.rows:
            return
        old = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        self._allocate(rows)
        self.rows = rows
        for name, value in old.items():
            vars(self)[name][tuple(map(slice, value.shape))] = value


class Samples(Growing):
    """The most recent samples of every row, in the order in which they were added; `grow` adds rows.

    Parameters
    ----------
    depth : int
        How many samples of a row are kept; rounded up to a power of two.
    shape : tuple of int
        Of a sample. Each of its values may be MISSING.
    """

    def __init__(self, depth: int, shape: tuple[int, ...] = ()) -> None:
        self.depth, self._shape = power_of_two(depth), shape
        self._ago = np.arange(1, self.depth + 1)
        self.grow(0)

    def _allocate(self, rows: int) -> None:
        self.values = np.full((*self._shape, rows, self.depth), MISSING, np.int64)
        self.times = np.full((rows, self.depth), MISSING, np.int64)
        self.counts = np.zeros(rows, np.int64)

    def add(self, rows: Rows, values: Times, times: Times) -> None:
        """Add samples, shape (*shape, n); several of one row in one call keep their order."""
        if not len(rows):
            return
        more = np.bincount(rows, minlength=len(self.counts))
        self.counts += more
        rank = np.empty(len(rows), np.intp)  # of each by row, those of one row in their order
        rank[rows.argsort(kind="stable")] = np.arange(len(rows))
        places = (self.counts - more.cumsum()).take(rows) + rank
        at = rows * self.depth + (places & (self.depth - 1))
        self.times.put(at, times)
        self._flat_values()[..., at] = values

    def _flat_values(self) -> Times:
        return self.values.reshape(*self.values.shape[:-2], -1)

    def forget(self, rows: Rows) -> None:
        self.times[rows] = MISSING

    def newest(self, rows: Rows, counts: NDArray[np.int64]) -> tuple[Times, NDArray[np.bool_]]:
        """The newest samples of some rows, so many of each, as far as they are held, whatever their time.

        Returns
        -------
        values : ndarray of int64, shape (*shape, len(rows), k)
        are_samples : ndarray of bool, shape (*shape, len(rows), k)
            Which of them were asked for and are held.
        """
        width = min(int(counts.max(initial=0)), self.depth)
        values, times = self._last(rows, width)
        return values, (values != MISSING) & (times != MISSING) & (self._ago[:width] <= counts[:, None])

    def _last(self, rows: Rows, width: int) -> tuple[Times, Times]:
        """Values and times of the newest places of some rows, from the newest on."""
        places = (self.counts.take(rows)[:, None] - self._ago[:width]) & (self.depth - 1)
        at = rows[:, None] * self.depth + places
        return self._flat_values().take(at, axis=-1), self.times.take(at)

    def since(self, rows: Rows, begin_ns: int, at_most: int) -> tuple[Times, NDArray[np.int64], Times, Times]:
        """The samples of some rows that are not older than `begin_ns`, ascending.

        Parameters
        ----------
        at_most : int
            Look at this many of the newest samples of each row.

        Returns
        -------
        ordered : ndarray of int64, shape (*shape, len(rows), k)
            Ascending in each row; what is beyond its count is no sample.
        counts : ndarray of int64, shape (*shape, len(rows))
        last : ndarray of int64, shape (*shape, len(rows))
            The newest sample in the window, or MISSING.
        newest_first : ndarray of int64, shape (*shape, len(rows), k)
            In the order in which they came, MISSING what is no sample in the window.
        """
        held, times = self._last(rows, min(power_of_two(at_most), self.depth))
        inside = (times >= begin_ns) & (held != MISSING)  # an empty place has a time before all others
        counts: NDArray[np.int64] = inside.sum(axis=-1)
        last = np.where(counts > 0, pick(held, inside.argmax(axis=-1)), MISSING)
        ordered = np.where(inside, held, NO_MINIMUM)
        came = np.where(inside, held, MISSING)
        ordered.sort(axis=-1)
        return ordered, counts, last, came


def pick(table: Times, places: NDArray[Any]) -> Times:
    """One element of each row of a table, or several: places may have more axes in front."""
    picked: Times = table.take(np.arange(0, table.size, table.shape[-1]).reshape(table.shape[:-1]) + places)
    return picked


def nearest_rank(ordered: Times, counts: NDArray[np.int64], percent: int | NDArray[np.int64]) -> Times:
    """A percentile of each row by the nearest-rank method: the smallest sample with `percent` % at or below it.

    It is always a value that was measured, and needs no float: delays keep their nanoseconds.

    Parameters
    ----------
    ordered, counts : ndarray
        As `Samples.since` gives them.
    percent : int or ndarray of int
        0: the smallest. Several, along axes in front of those of `counts`, give as many figures.

    Returns
    -------
    ndarray of int64
        MISSING where a row has no sample.
    """
    places = np.maximum((counts * percent - 1) // 100, 0)
    return np.where(counts > 0, pick(ordered, places), MISSING)


class SlidingMinimum(Growing):
    """The smallest sample of every row over the recent past, and when it was taken; `grow` adds rows.

    The past is kept in buckets of 1/32 of the window, so the minimum reaches back between one window and one
    bucket more.
    """

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self._width_ns = max(1, window_ns // PARTS)
        self._kept = PARTS + 1
        self.grow(0)

    def _allocate(self, rows: int) -> None:
        self._minima = np.full((rows, self._kept), NO_MINIMUM, np.int64)
        self._times = np.zeros((rows, self._kept), np.int64)
        self._buckets = np.full((rows, self._kept), MISSING, np.int64)

    def forget(self, rows: Rows) -> None:
        self._buckets[rows] = MISSING
        self._minima[rows] = NO_MINIMUM

    def add(self, rows: Rows, values: Times, times: Times) -> None:
        """Take samples into account; of one row, none may be older than a window before the newest."""
        if not len(rows):
            return
        buckets = times // self._width_ns
        at = rows * self._kept + buckets % self._kept
        held = self._buckets.take(at)
        if np.count_nonzero(held != buckets):  # about 32 times a window
            newer = held < buckets
            np.maximum.at(self._buckets.reshape(-1), at[newer], buckets[newer])
            self._minima.put(at[newer], NO_MINIMUM)
            current = buckets == self._buckets.take(at)
            at, values, times = at[current], values[current], times[current]
        np.minimum.at(self._minima.reshape(-1), at, values)
        smallest = self._minima.take(at) == values
        self._times.put(at[smallest], times[smallest])

    def at(self, rows: Rows, now_ns: int) -> tuple[Times, Times]:
        """Minimum and the time at which it was taken, for some rows, of whatever shape.

        Returns
        -------
        minima : ndarray of int64
            MISSING where a row has no sample in the window.
        times : ndarray of int64
            They mean nothing where there is no minimum.
        """
        inside = self._buckets[rows] >= now_ns // self._width_ns - PARTS
        minima = np.where(inside, self._minima[rows], NO_MINIMUM)
        chosen = minima.argmin(axis=-1)
        smallest = pick(minima, chosen)
        taken: Times = self._times.take(rows * self._kept + chosen)
        return np.where(smallest != NO_MINIMUM, smallest, MISSING), taken

    def parts(self, rows: Rows, now_ns: int) -> tuple[Times, Times]:
        """The minima of the parts of the window (1/32 each, and the one in progress) of some rows, in no order.

        Returns
        -------
        minima : ndarray of int64, shape (*rows.shape, 33)
            NO_MINIMUM where a part has no sample.
        times : ndarray of int64
            When each was taken; they mean nothing where there is no minimum.
        """
        inside = self._buckets[rows] >= now_ns // self._width_ns - PARTS
        return np.where(inside, self._minima[rows], NO_MINIMUM), self._times[rows]


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
