"""Wander: how fast a clock's rate changes, from the drifts that successive windows gave. Pure functions of float64.

A drift is an average over its window, so two drifts tell of a change only when their windows do not overlap. What the
drifts' own errors explain is subtracted, and what is left must be more than chance leaves. The least that is returned
is the stated allowance: a calm past is no promise.
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
_SIGNIFICANT: Final = 2.0  # standard deviations of what errors alone leave: less is no wander
_STATED_POWER: Final = WANDER_PPB_PER_S**2 / 2  # mean square of such a sinusoid


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
    # The square of a change scatters by its own size, so the few vague drifts of a bad start would outweigh all others.
    weights = (errors + _STATED_POWER) ** -2
    power = float(weights @ (changes**2 - errors) / weights.sum())
    # Windows overlap: no more changes are independent than windows fit side by side.
    alike = len(later) / (1 + (times_s[-1] - times_s[later[0]]) / APART_S)
    scatter = math.sqrt(2 * alike) * float(np.linalg.norm(weights * errors) / weights.sum())
    if power <= max(_STATED_POWER, _SIGNIFICANT * scatter):
        return WANDER_PPB_PER_S
    return math.sqrt(2 * power)


def wander_between(one_ppb_per_s: float, other_ppb_per_s: float) -> float:
    """The wander of the drift between two hosts, from that of each: the stated one, and what each has beyond it."""
    return math.sqrt(one_ppb_per_s**2 + other_ppb_per_s**2 - WANDER_PPB_PER_S**2)
