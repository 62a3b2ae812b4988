"""A GPU's timer against its host's clock, from pings: the estimator of hosts' clocks, fed with round trips. Pure.

A ping is (host before, GPU, host after) in int64 nanoseconds. Its delay forward is that of the GPU's read of host
memory, its delay back that of the GPU's write.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.clocks import EdgeFit, fit_edge
from pytools.estimators.offsets import Offset

ASYMMETRY_SHARE: Final = 0.1  # stated allowance: the two directions differ by no more than this of the round trip
NOISE_NS: Final = 30.0  # standard deviation of one stamp; globaltimer steps by 32 ns on recent GPUs, 1 µs on older ones
_FASTEST: Final = 8  # of a burst; even: two make a pair
_TOLERANCE_NS: Final = 1_000_000  # of a pair: the round trips have chosen already

Pings = NDArray[np.int64]  # (n, 3)


def fastest(burst: Pings) -> Pings:
    """The pings of a burst with the shortest round trips, in the order of time: the others waited for something."""
    if len(burst) < _FASTEST:
        return burst[:0]
    chosen = np.argpartition(burst[:, 2] - burst[:, 0], _FASTEST - 1)[:_FASTEST]
    return burst[np.sort(chosen)]


def fit_pings(pings: Pings, prior: EdgeFit | None) -> EdgeFit | None:
    """The line through the pings of a window (those of `fastest`, in the order of time); None without any.

    Parameters
    ----------
    prior : EdgeFit, optional
        Of the window before.
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
    """The fit as a line that ages."""
    return Offset(
        fit.epoch_ns,
        fit.offset_ns,
        fit.drift_ppb,
        fit.sigma_ns,
        fit.drift_sigma_ppb,
        fit.bound_ns,
        max(fit.hard_high_ns - fit.offset_ns, fit.offset_ns - fit.hard_low_ns),
        wander_ppb_per_s=fit.wander_ppb_per_s,
    )
