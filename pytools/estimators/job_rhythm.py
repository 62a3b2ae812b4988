"""The rhythm of a job: its steps from the collectives of one rank, and how much slower it is than usual. Pure.

A training step repeats the same collectives: its length, in collectives, is the shortest after which functions and
sizes are the same again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.stragglers import DOUBT, left_out

LONGEST: Final = 512  # collectives in a step
USUAL: Final = 30  # windows, from which on it is known what is usual
_SAME: Final = 0.9  # of the collectives are as one step earlier


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of one rank."""

    count: int  # how many were seen whole
    operations: int  # collectives in each
    duration_ns: float  # median
    bound_ns: float | None  # half the width of its interval; None with too few steps


def period(kinds: Sequence[Any] | NDArray[Any]) -> int | None:
    """After how many the same comes again; None if that is not seen twice.

    >>> period("abcabcab"), period("aaaa"), period("abcd")
    (3, 1, None)
    """
    values = np.unique(np.array(kinds if isinstance(kinds, np.ndarray) else list(kinds)), return_inverse=True)[1]
    for shift in range(1, min(LONGEST, len(values) // 2) + 1):
        if np.mean(values[shift:] == values[:-shift]) >= _SAME:
            return shift
    return None


def steps(operations: NDArray[Any]) -> Steps | None:
    """The steps in the collectives of one rank; of several samples, in the longest.

    Parameters
    ----------
    operations : ndarray of collectives.OPERATION
        Without gaps, but those between samples.
    """
    operations = operations[np.argsort(operations["start_ns"], kind="stable")]
    cuts = np.flatnonzero(np.diff(operations["sample"])) + 1  # the numbers of samples come again: they are not keys
    operations = max(np.split(operations, cuts), key=len)
    if len(operations) < 2:
        return None
    length = period(operations[["hash", "function", "bytes"]])
    if length is None:
        return None
    begins = operations["start_ns"][::length].astype(np.int64)
    durations = np.sort(np.diff(begins))
    out = left_out(len(durations), DOUBT)
    bound = None if out is None else float(durations[len(durations) - 1 - out] - durations[out]) / 2
    return Steps(len(durations), length, float(np.median(durations)), bound)


def slowdown(now: float, history: Sequence[float]) -> float | None:
    """How many times the usual time this is; None until enough is known.

    Parameters
    ----------
    now : float
        Time of a step, or for a byte.
    history : sequence of float
        The same in earlier windows.
    """
    usual = median(history) if len(history) >= USUAL else 0.0
    return now / usual if usual > 0 else None
