"""Coded pairs: which survived the network with their spacing, and what they and the others say about a clock.

Pure functions of int64 nanoseconds. A pair whose probes waited for different lengths of time is rejected: something
queued. The probes of a kept pair waited alike, so their mean is one measurement, and the better for it. Of a rejected
pair the slower probe surely waited, or its stamp is wrong; the faster one may still have met no queue, so it is
handed on under a class of its own, and the fit finds out how far that class can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import MISSING, Times

_HIGHEST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Probes:
    """Measurements of one direction of an edge: means of kept pairs first, then single probes of the others."""

    at_ns: Times
    difference_ns: Times
    means: int  # how many of them are means
    kept: int  # pairs
    rejected: int

    def take(self, mask: NDArray[np.bool_]) -> Probes:
        """Some of them; the counts of pairs stay what they were."""
        means = int(np.count_nonzero(mask[: self.means]))
        return Probes(self.at_ns[mask], self.difference_ns[mask], means, self.kept, self.rejected)


def sift(at_ns: Times, difference_ns: Times, tolerance_ns: int) -> Probes:
    """The mean of each kept pair, and the faster probe (or the only one that arrived) of every other pair.

    Parameters
    ----------
    at_ns, difference_ns : ndarray of int64, shape (pairs, 2)
        When each probe passed here, and the difference of its two stamps; MISSING where it was lost.
    tolerance_ns : int
        A pair is kept when its two differences differ by no more.
    """
    unknown = (at_ns == MISSING) | (difference_ns == MISSING)
    lost = bool(unknown.any())
    if lost:
        difference_ns = np.where(unknown, _HIGHEST, difference_ns)
    one, other = difference_ns[:, 0], difference_ns[:, 1]
    faster = np.minimum(one, other)
    apart = (np.maximum(one, other) - faster).view(np.uint64)  # right even where int64 wraps around
    near = apart <= tolerance_ns
    rejected = 0
    if lost:
        both = ~(unknown[:, 0] | unknown[:, 1])
        near &= both
        rejected = len(both) - int(np.count_nonzero(both))
    kept = np.flatnonzero(near)
    count = len(kept)
    rejected = len(near) - rejected - count
    first = at_ns[kept, 0]
    means_at = first + (at_ns[kept, 1] - first) // 2
    means = faster[kept] + apart[kept].astype(np.int64) // 2
    if count == len(near):
        return Probes(means_at, means, count, count, 0)
    others = np.flatnonzero(~near & (faster != _HIGHEST) if lost else ~near)
    at_faster = np.where(one[others] <= other[others], at_ns[others, 0], at_ns[others, 1])
    return Probes(
        at_ns=np.concatenate([means_at, at_faster]),
        difference_ns=np.concatenate([means, faster[others]]),
        means=count,
        kept=count,
        rejected=rejected,
    )


def with_singles(probes: Probes, at_ns: Times, difference_ns: Times, paired_ns: Times) -> Probes:
    """The same, and all single probes beside them: those that passed here when no probe of a pair did.

    Parameters
    ----------
    at_ns, difference_ns : ndarray of int64, shape (n,)
        All probes of this direction, those of pairs included; MISSING where lost.
    paired_ns : ndarray of int64
        When the probes of pairs passed here.
    """
    single = (at_ns != MISSING) & (difference_ns != MISSING) & ~np.isin(at_ns, paired_ns)
    return Probes(
        at_ns=np.concatenate([probes.at_ns, at_ns[single]]),
        difference_ns=np.concatenate([probes.difference_ns, difference_ns[single]]),
        means=probes.means,
        kept=probes.kept,
        rejected=probes.rejected,
    )


def joined(earlier: Probes, probes: Probes) -> Probes:
    """Both together, means first; the counts of pairs are those of `probes`."""
    parts = [
        np.concatenate([old[: earlier.means], new[: probes.means], old[earlier.means :], new[probes.means :]])
        for old, new in ((earlier.at_ns, probes.at_ns), (earlier.difference_ns, probes.difference_ns))
    ]
    return Probes(parts[0], parts[1], earlier.means + probes.means, probes.kept, probes.rejected)
