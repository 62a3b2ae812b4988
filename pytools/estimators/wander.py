"""Wander: how fast a clock's rate changes, from the drifts that successive windows gave. Pure functions of float64.

A drift is an average over its window, so two drifts tell of a change only when their windows do not overlap. What the
drifts' own errors explain is subtracted. The least that is returned is the stated allowance: a calm past is no promise.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.offsets import WANDER_PPB_PER_S

MEMORY_S: Final = 12.0  # drifts older than this no longer count
APART_S: Final = 2.0  # windows this far apart do not overlap
_SLACK_S: Final = 1e-3


def wander(times_s: NDArray[np.float64], drifts_ppb: NDArray[np.float64], sigmas_ppb: NDArray[np.float64]) -> float:
    """How fast a rate changes at most, in ppb per second: the amplitude of a sinusoid of the same power.

    Parameters
    ----------
    times_s : ndarray
        When each drift was found, ascending.
    drifts_ppb, sigmas_ppb : ndarray
        Each drift and its standard deviation.

    Returns
    -------
    float
        Not below WANDER_PPB_PER_S; that where there are no two windows apart.
    """
    earlier = np.searchsorted(times_s, times_s - APART_S + _SLACK_S, side="right") - 1
    later = np.flatnonzero(earlier >= 0)
    if not len(later):
        return WANDER_PPB_PER_S
    earlier = earlier[later]
    apart_s = times_s[later] - times_s[earlier]
    changes = (drifts_ppb[later] - drifts_ppb[earlier]) / apart_s
    errors = (sigmas_ppb[later] ** 2 + sigmas_ppb[earlier] ** 2) / apart_s**2
    power = float(np.mean(changes**2 - errors))
    return max(WANDER_PPB_PER_S, math.sqrt(max(2 * power, 0.0)))
