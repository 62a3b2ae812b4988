"""A GPU's timer against its host's clock, from pings: the estimator of hosts' clocks, fed with round trips. Pure.

A ping is (host before, GPU, host after) in int64 nanoseconds. Its delay forward is that of the GPU's read of host
memory, its delay back that of the GPU's write.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.clocks import EdgeFit, fit_edge
from pytools.estimators.offsets import APART_S, WANDER_PPB_PER_S, Offset, wander

ASYMMETRY_SHARE: Final = 0.1  # stated allowance: the two directions differ by no more than this of the round trip
NOISE_NS: Final = 30.0  # standard deviation of one stamp; globaltimer steps by 32 ns on recent GPUs, 1 µs on older ones
_FASTEST: Final = 8  # of a burst; even: two make a pair
_TOLERANCE_NS: Final = 1_000_000  # of a pair: the round trips have chosen already
_BEGIN_S: Final = 0.5  # from one window of drifts to the next
_LEAST_BURSTS: Final = 5  # of such a window
_UNKNOWN_PPB_PER_S: Final = 500.0  # stated allowance for a timer that is hardly known
_SURE: Final = 3.0  # standard deviations of a change that counts by itself
_SETTLED_S: Final = 8.0  # of bursts, until which the allowance below counts too
MEMORY_NS: Final = 30 * 10**9  # of bursts: an oscillator may rest for a while

Pings = NDArray[np.int64]  # (n, 3)


def fastest(burst: Pings) -> Pings:
    """The pings of a burst with the shortest round trips, in the order of time: the others waited for something."""
    if len(burst) < _FASTEST:
        return burst[:0]
    chosen = np.argpartition(burst[:, 2] - burst[:, 0], _FASTEST - 1)[:_FASTEST]
    return burst[np.sort(chosen)]


def wander_of(bursts: Sequence[Pings]) -> float:
    """How fast the drift of a GPU's timer changes at most, in ppb per second, from its bursts of MEMORY_NS.

    The drifts are those of the middles of the bursts, over windows of APART_S. The power of all of them lags behind an
    oscillator that has just begun to change, so the largest single change counts too.
    """
    whole = [each for each in bursts if len(each) == _FASTEST]
    if not whole:
        return _UNKNOWN_PPB_PER_S
    before, gpu, after = np.moveaxis(np.stack(whole), 2, 0)
    at_s = (before - before[0, 0]).mean(axis=1) * 1e-9
    ahead_ns = (2 * (gpu - (gpu[0, 0] - before[0, 0])) - before - after).mean(axis=1) / 2
    times_s, drifts, sigmas = [], [], []
    for begin_s in np.arange(at_s[-1] - APART_S, -_BEGIN_S, -_BEGIN_S)[::-1]:
        chosen = (at_s > begin_s) & (at_s <= begin_s + APART_S)
        if np.count_nonzero(chosen) < _LEAST_BURSTS:
            continue
        x, y = at_s[chosen] - at_s[chosen].mean(), ahead_ns[chosen] - ahead_ns[chosen].mean()
        square = float(x @ x)
        slope = float(x @ y) / square
        rest = y - slope * x
        times_s.append(begin_s + APART_S / 2)
        drifts.append(slope)
        sigmas.append(math.sqrt(float(rest @ rest) / (len(x) - 2) / square))
    times, slopes, errors = np.array(times_s), np.array(drifts), np.array(sigmas)
    later, earlier = np.nonzero(np.abs(times[:, None] - times - APART_S) < _BEGIN_S / 2)
    if not len(later):
        return _UNKNOWN_PPB_PER_S
    changes = np.abs(slopes[later] - slopes[earlier]) / APART_S
    sure = changes > _SURE * np.hypot(errors[later], errors[earlier]) / APART_S
    least = _UNKNOWN_PPB_PER_S if at_s[-1] - at_s[0] < _SETTLED_S else WANDER_PPB_PER_S
    return max(wander(times, slopes, errors), float(np.where(sure, changes, 0.0).max()), least)


def fit_pings(pings: Pings, prior: EdgeFit | None, wander_ppb_per_s: float = WANDER_PPB_PER_S) -> EdgeFit | None:
    """The line through the pings of a window (those of `fastest`, in the order of time); None without any.

    Parameters
    ----------
    prior : EdgeFit, optional
        Of the window before.
    wander_ppb_per_s : float
        As `wander_of` gives it.
    """
    pairs = pings[: len(pings) // 2 * 2].reshape(-1, 2, 3)
    if not len(pairs):
        return None
    before, gpu, after = pairs[:, :, 0], pairs[:, :, 1], pairs[:, :, 2]
    return fit_edge(
        before,
        gpu - before,
        after,
        after - gpu,
        tolerance_ns=_TOLERANCE_NS,
        asymmetry_share=ASYMMETRY_SHARE,
        prior=prior,
        noise_ns=NOISE_NS,
        wander_ppb_per_s=wander_ppb_per_s,
    )


def between(pings: Pings, slack_ns: int) -> tuple[int, float, int]:
    """Another timer minus ours, from a burst of pings (ours before, the other, ours after) that have symmetric ways.

    Parameters
    ----------
    slack_ns : int
        Pings whose round trip exceeds the smallest by no more are averaged.

    Returns
    -------
    at_ns : int
        Our timer at the first of them.
    difference_ns : float
    round_trip_ns : int
        The smallest.
    """
    trips = pings[:, 2] - pings[:, 0]
    chosen = trips <= trips.min() + slack_ns
    ahead = pings[chosen, 1] - pings[chosen, 0]  # integers: a float64 of a timer is no better than 256 ns
    return int(pings[chosen, 0][0]), float((ahead - trips[chosen] / 2).mean()), int(trips.min())


def offset(fit: EdgeFit) -> Offset:
    hard_ns = max(fit.hard_high_ns - fit.offset_ns, fit.offset_ns - fit.hard_low_ns)
    return Offset(**fit.line, hard_bound_ns=hard_ns, wander_ppb_per_s=fit.wander_ppb_per_s)
