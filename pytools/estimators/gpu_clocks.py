"""A GPU's timer against its host's clock, from pings: the estimator of hosts' clocks, fed with both directions. Pure.

A ping is (host before, GPU, host after) in int64 nanoseconds. Its delay forward is that of the GPU's read of host
memory, its delay back that of the GPU's write. The fastest pings of either direction of a burst are kept, whatever the
other direction of the same ping took: a ping waits up to 700 ns for the GPU's next look, so those with the shortest
round trips are the fastest in neither direction.

Errors of the offset, and what the bound takes in for each:

- jitter of the bus and of the host's stamps, and tails of both: SIGMAS standard deviations of the fit of both lower
  edges, with `NOISE_NS` a stamp;
- waits of even the fastest pings of a burst: `_WAITED` times the difference between the two fastest;
- steps of the timer, 32 ns on recent GPUs and 1 µs on older ones: a reading is up to a step old, so forward each counts
  as one of a step later. The offset is that of a timer without steps, half a step ahead of the mean reading;
- directions that differ where nothing waits: `ASYMMETRY_SHARE` of the round trip, stated and not measured;
- changes of the drift: `wander_of`.

Host clocks that differ between CPUs are not taken in: see `pytools.sources.gpu.pings`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.clocks import EdgeFit, fit_edge
from pytools.estimators.offsets import APART_S, WANDER_PPB_PER_S, Offset, wander

ASYMMETRY_SHARE: Final = 0.1  # stated allowance: the two directions differ by no more than this of the round trip
NOISE_NS: Final = 30.0  # standard deviation of one stamp; that of a coarse timer is larger
_FASTEST: Final = 2  # of each direction of a burst: a pair
_LEAST_PINGS: Final = 8  # of a burst: one that was interrupted may have met no free moment
_TOLERANCE_NS: Final = 1_000_000  # of a pair: the direction has chosen already
_WAITED: Final = 2.5  # how long the two fastest pings of a burst waited on average, in differences between the two
_BEGIN_S: Final = 0.5  # from one window of drifts to the next
_LEAST_BURSTS: Final = 5  # of such a window, and of one that tells the step of a timer
_COARSEST_NS: Final = 1024  # step of a timer, at most
_UNKNOWN_PPB_PER_S: Final = 500.0  # stated allowance for a timer that is hardly known
_SURE: Final = 3.0  # standard deviations of a change that counts by itself
_SETTLED_S: Final = 8.0  # of bursts, until which the allowance below counts too
MEMORY_NS: Final = 30 * 10**9  # of bursts: an oscillator may rest for a while

Pings = NDArray[np.int64]  # (n, 3)


def fastest(burst: Pings) -> Pings:
    """The two pings of a burst with the shortest delay forward, then the two with the shortest delay back.

    A ping may be among both. Each two are in the order of time. None of an interrupted burst. A timer that runs 16 ppm
    fast gains 3 ns during a burst, too little to change the choice.
    """
    if len(burst) < _LEAST_PINGS:
        return burst[:0]
    ways = np.diff(burst, axis=1).T  # the offset is in both, and the same for all
    chosen = np.sort(np.argpartition(ways, _FASTEST - 1, axis=1)[:, :_FASTEST], axis=1)
    return burst[chosen.ravel()]


def _by_direction(pings: Pings) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What `fastest` has kept of whole bursts: those forward and those back, each (bursts, 2, 3)."""
    bursts = pings[: len(pings) // (2 * _FASTEST) * 2 * _FASTEST].reshape(-1, 2 * _FASTEST, 3)
    return bursts[:, :_FASTEST], bursts[:, _FASTEST:]


def step_of(stamps: NDArray[np.int64]) -> int:
    """By how many nanoseconds a timer steps: the largest divisor of all differences of stamps, up to _COARSEST_NS."""
    return min(max(int(np.gcd.reduce(stamps - stamps[0])), 1), _COARSEST_NS)


def wander_of(bursts: Sequence[Pings]) -> float:
    """How fast the drift of a GPU's timer changes at most, in ppb per second, from its bursts of MEMORY_NS.

    The drifts are those of the middles of the bursts, over windows of APART_S. The power of all of them lags behind an
    oscillator that has just begun to change, so the largest single change counts too.
    """
    whole = [each for each in bursts if len(each) == 2 * _FASTEST]
    if not whole:
        return _UNKNOWN_PPB_PER_S
    forward, back = _by_direction(np.concatenate(whole))
    first = forward[0, 0]
    ahead_of_us = first[1] - first[0]  # integers: a float64 of an offset may be no better than 256 ns
    at_s = (forward[:, :, 0] + back[:, :, 2] - 2 * first[0]).mean(axis=1) * 0.5e-9
    both = (forward[:, :, 1] - forward[:, :, 0]) + (back[:, :, 1] - back[:, :, 2]) - 2 * ahead_of_us
    ahead_ns = both.mean(axis=1) / 2
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
    """The line through the pings of a window; None with fewer bursts than tell by how much the timer steps.

    Parameters
    ----------
    pings : ndarray of int64, shape (n, 3)
        What `fastest` has kept of each burst, in the order of time, nanoseconds.
    prior : EdgeFit, optional
        Of the window before.
    wander_ppb_per_s : float
        As `wander_of` gives it.
    """
    forward, back = _by_direction(pings)
    if len(forward) < _LEAST_BURSTS:
        return None
    step_ns = step_of(pings[:, 1])
    forward_ns = forward[:, :, 1] - forward[:, :, 0] + (step_ns - 1)
    back_ns = back[:, :, 2] - back[:, :, 1]
    fit = fit_edge(
        forward[:, :, 0],
        forward_ns,
        back[:, :, 2],
        back_ns,
        tolerance_ns=_TOLERANCE_NS,
        asymmetry_share=ASYMMETRY_SHARE,
        prior=prior,
        noise_ns=max(NOISE_NS, step_ns / math.sqrt(12)),
        wander_ppb_per_s=wander_ppb_per_s,
    )
    if fit is None:
        return None
    waited_ns = _WAITED * max(float(np.abs(np.diff(each, axis=1)).mean()) for each in (forward_ns, back_ns))
    return replace(fit, bound_ns=fit.bound_ns + math.ceil(waited_ns / 2))


def cpu_differences(
    cpus: Sequence[int], bursts: Sequence[Pings], drifts_ppb: Sequence[float]
) -> dict[tuple[int, int], list[float]]:
    """What the clocks of two CPUs differ by, from bursts of one GPU that follow each other on different CPUs.

    Parameters
    ----------
    cpus : sequence of int
        The CPU of each burst.
    bursts : sequence of ndarray
        What `fastest` has kept of each, in the order of time.
    drifts_ppb : sequence of float
        The drift of the GPU's timer at each.

    Returns
    -------
    dict
        By (lower CPU, higher CPU): the clock of the lower minus that of the higher, nanoseconds, for each change.
    """
    found: dict[tuple[int, int], list[float]] = {}
    middles = [_middle(each) for each in bursts]
    for place in range(1, len(cpus)):
        one, other = cpus[place - 1], cpus[place]
        if one == other:
            continue
        (at_ns, ahead_ns), (later_ns, further_ns) = middles[place - 1], middles[place]
        change_ns = further_ns - ahead_ns - drifts_ppb[place] * ((later_ns - at_ns) * 1e-9)
        found.setdefault((min(one, other), max(one, other)), []).append(change_ns if one < other else -change_ns)
    return found


def _middle(burst: Pings) -> tuple[int, int]:
    """Our time in the middle of what `fastest` has kept of a burst, and the timer less that."""
    (forward,), (back,) = _by_direction(burst)
    ahead_ns = (forward[:, 1] - forward[:, 0]).sum() + (back[:, 1] - back[:, 2]).sum()
    return int((forward[:, 0] + back[:, 2]).sum()) // (2 * _FASTEST), int(ahead_ns) // (2 * _FASTEST)


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
