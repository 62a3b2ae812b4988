"""Where the drift of a clock is heading: lines are fitted to seconds that have passed, and used for those to come.

An oscillator that warms up changes its rate steadily for minutes. A line through a window of two seconds has the rate
of its middle; two seconds later it is off by twice the change per second, which is more than all noise of the stamps.
So the slope of the last drifts carries offset and drift on. A rate that jumps (a time service that slews) has no slope:
what was before the jump is forgotten.

Pure; times are nanoseconds of one clock, drifts ppb against it. One thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.offsets import MEMORY_S, SIGMAS, WANDER_PPB_PER_S

Floats = NDArray[np.float64]

_LEAST_SPAN_NS: Final = 4_000_000_000  # of the drifts that a slope rests on: two windows that do not overlap, and some
_LEAST_DRIFTS: Final = 4
_LEAST_SIGMA_PPB: Final = 0.1


@dataclass(frozen=True)
class Trends:
    """What a solution for many clocks is to take into account, see `clock_graph.solve`."""

    ppb_per_s: Floats  # by clock: how fast its drift changes; 0 for the reference
    window_s: float = 0.0  # over which the edges were fitted
    ahead_s: float = 0.0  # the drift is told for so long after the moment asked for


class DriftTrend:
    """The last drifts of one clock against another, as they were measured, and their slope.

    Parameters
    ----------
    window_s : float
        Over which each drift is fitted.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._drifts: deque[tuple[int, float, float]] = deque()  # time, drift, standard deviation
        self.ppb_per_s = 0.0  # how fast the drift changes; 0 where that cannot be told

    def push(self, at_ns: int, drift_ppb: float, sigma_ppb: float) -> None:
        """Take one more drift into account: it was that at this time, in the middle of its window."""
        drifts, now = self._drifts, (at_ns, drift_ppb, max(sigma_ppb, _LEAST_SIGMA_PPB))
        if drifts and (at_ns <= drifts[-1][0] or _jumped(drifts[-1], now)):
            drifts.clear()
        drifts.append(now)
        while at_ns - drifts[0][0] > MEMORY_S * 1e9:
            drifts.popleft()
        told = len(drifts) >= _LEAST_DRIFTS and at_ns - drifts[0][0] >= _LEAST_SPAN_NS
        self.ppb_per_s = slope(drifts, self._window_s) if told else 0.0


def _jumped(before: tuple[int, float, float], now: tuple[int, float, float]) -> bool:
    """Whether two drifts differ by more than an oscillator's wander and their errors."""
    wandered = WANDER_PPB_PER_S * (now[0] - before[0]) * 1e-9
    return abs(now[1] - before[1]) > wandered + SIGMAS * math.hypot(now[2], before[2])


def slope(drifts: Sequence[tuple[int, float, float]], window_s: float) -> float:
    """How fast a drift changes, in ppb per second: least squares, less what errors alone make of it.

    Within the stated allowance WANDER_PPB_PER_S, which bounds take in, so that no slope makes a bound wrong.

    Parameters
    ----------
    drifts : sequence of (int, float, float)
        Time, drift and standard deviation of each, in the order of time.
    window_s : float
        Over which each was fitted.
    """
    begin_ns, first_ppb = drifts[0][0], drifts[0][1]
    rows = [(sigma**-2, (at_ns - begin_ns) * 1e-9, ppb - first_ppb) for at_ns, ppb, sigma in drifts]
    weight = sum(row[0] for row in rows)
    middle_s = sum(row[0] * row[1] for row in rows) / weight
    information = sum(row[0] * (row[1] - middle_s) ** 2 for row in rows)
    found = sum(row[0] * (row[1] - middle_s) * row[2] for row in rows) / information
    # Windows overlap: no more drifts are independent than windows fit side by side.
    alike = max(1.0, len(rows) / (1 + rows[-1][1] / window_s)) if window_s > 0 else 1.0
    certain = found * found * information
    if certain <= alike:
        return 0.0
    return min(max(found * (1 - alike / certain), -WANDER_PPB_PER_S), WANDER_PPB_PER_S)


class DriftTrends:
    """The trends of all clocks of a solution.

    Parameters
    ----------
    window_s : float
        Over which edges are fitted.
    ahead_s : float
        How long after each solution its drifts are to be right.
    """

    def __init__(self, window_s: float, ahead_s: float) -> None:
        self._window_s, self._ahead_s = window_s, ahead_s
        self._trends: dict[str, DriftTrend] = {}

    def of(self, hosts: Sequence[str]) -> Trends:
        slopes = [self._trends[host].ppb_per_s if host in self._trends else 0.0 for host in hosts]
        return Trends(np.array(slopes, np.float64), self._window_s, self._ahead_s)

    def push(self, at_ns: int, hosts: Sequence[str], drifts_ppb: Floats, sigmas_ppb: Floats, ago_s: Floats) -> None:
        """Take a solution into account; hosts that are not in it are forgotten.

        Parameters
        ----------
        at_ns : int
            What the solution is for.
        drifts_ppb, sigmas_ppb : ndarray, shape (hosts,)
            Drifts as measured, and their standard deviations.
        ago_s : ndarray, shape (hosts,)
            How long before `at_ns` each was measured.
        """
        before, self._trends = self._trends, {}
        times_ns = at_ns - np.rint(ago_s * 1e9).astype(np.int64)
        columns = (each.tolist() for each in (times_ns, drifts_ppb, sigmas_ppb))
        for host, *measured in zip(hosts, *columns, strict=True):
            trend = self._trends[host] = before.get(host) or DriftTrend(self._window_s)
            trend.push(*measured)
