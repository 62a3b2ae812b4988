"""Bandwidth of queue pairs from their counters: now, and what is usual. How much to time. Pure; one row per pair.

Times are int64 nanoseconds of CLOCK_MONOTONIC that the caller passes in. One thread.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.queue_pairs import Figures, Floats, Ints, Rows, bits_per_s
from pytools.estimators.windows import MISSING

NOW_REQUESTS: Final = 8  # what "bandwidth now" looks back on
MEAN_REQUESTS: Final = 16  # a mean of fewer is none
MEAN_READINGS: Final = 4  # where readings lie far apart, a mean of fewer is only the last one again
_STRETCHES: Final = NOW_REQUESTS  # with at least one request each


class Growth(NamedTuple):
    """How much rows grew between two readings; one element per row."""

    requests: Ints  # retired
    bytes: Ints
    outstanding: Ints  # at the end
    outstanding_bytes: Ints
    busy_ns: Ints  # from timed requests; MISSING where these do not cover all
    ended_ns: Ints  # the last completion; MISSING where it is not known


class Rates:
    """Bandwidth now, and the recent means of bandwidth and of outstanding bytes.

    Bandwidth now is that of the last NOW_REQUESTS completed requests, or of the last reading when it saw more, the time
    since then included while requests are outstanding. Idle time does not count; neither does a reading within which a
    burst began or ended, unless timed requests tell when. The means forget exponentially: over `mean_ns`, or over
    MEAN_REQUESTS requests or MEAN_READINGS readings where these take longer; one reading, however long, is a quarter of
    a mean at most, but for the first few.
    """

    def __init__(self, rows: int, mean_ns: int) -> None:
        self._mean_ns = mean_ns
        shape = (rows, _STRETCHES)
        self._requests, self._bytes, self._busy = (np.zeros(shape, np.int64) for _ in range(3))
        self._turn = np.zeros(rows, np.int64)
        self._open_ns = np.full(rows, MISSING)
        self._moved = np.zeros(rows, np.int64)  # requests of the last reading
        self._new = np.zeros(rows, np.bool_)  # the last reading made a stretch
        self._sums = np.zeros((5, rows))  # bytes, ns; outstanding bytes * ns, ns; requests
        self._told = np.zeros((3, rows))  # bytes, ns, stretches since `restart`
        self._extremes = np.full((2, rows), np.nan)
        self._last_ns = np.full(rows, MISSING)

    def forget(self, rows: Rows) -> None:
        for each in (self._requests, self._bytes, self._busy, self._turn, self._moved, self._new):
            each[rows] = 0
        self._open_ns[rows] = MISSING
        self._sums[:, rows] = 0.0
        self._clear(rows)

    def forget_means(self, rows: Rows) -> None:
        """These rows have been idle for so long that what was usual is usual no more."""
        self._sums[:, rows] = 0.0

    def update(self, rows: Rows, since_ns: int, at_ns: int, growth: Growth) -> None:
        """Take in what happened between two readings."""
        opened_ns, moved = self._open_ns[rows], self._moved[rows]
        was_open = opened_ns != MISSING
        some = growth.requests > 0
        exact = some & (growth.busy_ns != MISSING)
        began = ~was_open & (moved == 0)
        ended = (growth.outstanding == 0) & (2 * growth.requests < moved)
        counts = exact | (some & ~began & ~ended)
        busy_ns = np.where(exact, growth.busy_ns, at_ns - np.where(was_open, opened_ns, since_ns))
        self._stretch(rows[counts], growth.requests[counts], growth.bytes[counts], busy_ns[counts], at_ns)
        begun_ns = np.where(some, np.where(exact, growth.ended_ns, at_ns), np.where(was_open, opened_ns, at_ns))
        self._open_ns[rows] = np.where(growth.outstanding > 0, begun_ns, MISSING)
        self._moved[rows], self._new[rows] = growth.requests, counts

    def _stretch(self, rows: Rows, requests: Ints, amount: Ints, busy_ns: Ints, at_ns: int) -> None:
        busy_ns = np.maximum(busy_ns, 1)
        turn = self._turn[rows] % _STRETCHES
        self._requests[rows, turn], self._bytes[rows, turn], self._busy[rows, turn] = requests, amount, busy_ns
        self._turn[rows] += 1
        self._told[:, rows] += amount, busy_ns, np.ones(len(rows))
        bps = bits_per_s(amount, busy_ns)
        self._extremes[0, rows] = np.fmin(self._extremes[0, rows], bps)
        self._extremes[1, rows] = np.fmax(self._extremes[1, rows], bps)
        self._last_ns[rows] = at_ns

    def counted(self, rows: Rows) -> Figures:
        """Bandwidth of the stretches since `restart`."""
        amount, busy_ns, stretches = self._told[:, rows]
        turn = (self._turn[rows] - 1) % _STRETCHES
        some = stretches > 0
        last = np.where(some, bits_per_s(self._bytes[rows, turn], self._busy[rows, turn]), np.nan)
        mean = np.where(some, bits_per_s(amount, busy_ns), np.nan)
        return Figures(
            stretches.astype(np.int64),
            last,
            mean,
            self._extremes[0, rows],
            self._extremes[1, rows],
            self._last_ns[rows],
        )

    def restart(self) -> None:
        self._clear(slice(None))

    def _clear(self, rows: Any) -> None:
        self._told[:, rows], self._extremes[:, rows], self._last_ns[rows] = 0.0, np.nan, MISSING

    def learn(self, rows: Rows, since_ns: int, at_ns: int, growth: Growth) -> None:
        """Let the last reading of some rows into their means; those that were idle are left alone."""
        chosen = rows[self._new[rows]]
        turn = (self._turn[chosen] - 1) % _STRETCHES
        count, busy_ns = self._requests[chosen, turn], self._busy[chosen, turn]
        self._blend(0, chosen, self._bytes[chosen, turn], busy_ns, count)
        self._sums[4, chosen] += count
        busy = (growth.requests > 0) | (growth.outstanding > 0)
        passed_ns = np.full(np.count_nonzero(busy), at_ns - since_ns)
        waiting = growth.outstanding_bytes[busy] * passed_ns.astype(np.float64)
        self._blend(2, rows[busy], waiting, passed_ns, growth.requests[busy])

    def _blend(self, place: int, rows: Rows, amount: Ints | Floats, ns: Ints, requests: Ints) -> None:
        """Let one reading into a mean: amounts at `place` of the sums, the time they took at the next."""
        gone = np.minimum(np.minimum(ns / self._mean_ns, requests / MEAN_REQUESTS), 1 / MEAN_READINGS)
        before = self._sums[place : place + 2, rows] * np.exp(-gone)
        most_ns = np.maximum(before[1], self._mean_ns) * np.expm1(1 / MEAN_READINGS)  # what `gone` leaves room for
        weight = np.minimum(1.0, most_ns / np.maximum(ns, 1))
        self._sums[place : place + 2, rows] = before + weight * np.stack((amount, ns))

    def now(self, rows: Rows, at_ns: int) -> tuple[Floats, Floats]:
        """Bandwidth now, with and without the time since the last completion; NaN where nothing was completed."""
        back = (self._turn[rows, None] - 1 - np.arange(_STRETCHES)) % _STRETCHES
        places = (rows[:, None], back)
        requests = self._requests[places]
        before = np.cumsum(requests, axis=1) - requests
        # The newest stretch counts as a whole, of earlier ones what is needed to come to NOW_REQUESTS.
        share = np.clip((NOW_REQUESTS - before) / np.maximum(requests, 1), 0.0, 1.0)
        share[:, 0] = 1.0
        amount = (self._bytes[places] * share).sum(axis=1)
        busy_ns = (self._busy[places] * share).sum(axis=1)
        return bits_per_s(amount, busy_ns + self.waited_ns(rows, at_ns) * (busy_ns > 0)), bits_per_s(amount, busy_ns)

    def waited_ns(self, rows: Rows, at_ns: int) -> Ints:
        """For how long requests have been outstanding without any being retired."""
        opened_ns = self._open_ns[rows]
        return np.where(opened_ns == MISSING, 0, np.maximum(at_ns - np.where(opened_ns == MISSING, 0, opened_ns), 0))

    def means(self, rows: Rows) -> tuple[Floats, Floats]:
        """Mean bandwidth (NaN before MEAN_REQUESTS requests), and mean outstanding bytes."""
        amount, busy_ns, waiting, passed_ns, requests = self._sums[:, rows]
        bandwidth = np.where(requests >= MEAN_REQUESTS, bits_per_s(amount, busy_ns), np.nan)
        return bandwidth, np.divide(waiting, passed_ns, out=np.zeros(len(rows)), where=passed_ns > 0)


def run_masks(requests_per_s: Floats, group: Rows, budget_per_s: int, readable_per_s: float) -> NDArray[np.uint64]:
    """How to time requests so that each process stays within its budget: run numbers ANDed with it must be zero.

    Parameters
    ----------
    requests_per_s : ndarray of float64
        Of each queue pair.
    group : ndarray of int
        Its process, from 0.
    budget_per_s : int
        Timed requests a second per process; 0: none are timed.
    readable_per_s : float
        Timed requests a second of one queue pair that can be read before they are written over.

    Returns
    -------
    ndarray of uint64
        2^k - 1: one run in 2^k; all ones for none.
    """
    if budget_per_s == 0:
        return np.full(len(requests_per_s), np.iinfo(np.uint64).max)
    processes = int(group.max()) + 1 if len(group) else 0
    total = np.bincount(group, requests_per_s, processes)[group]
    excess = np.maximum(total / budget_per_s, requests_per_s / readable_per_s)
    shift = np.ceil(np.log2(np.maximum(excess, 1.0))).astype(np.uint64)
    return (np.uint64(1) << np.minimum(shift, 40)) - np.uint64(1)
