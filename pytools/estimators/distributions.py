"""Percentiles and histograms of many groups of values at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import MISSING, Times
from pytools.signals import DELAY_BOUNDS_NS, Histogram

_BOUNDS_NS = np.array(DELAY_BOUNDS_NS)


class Distribution(NamedTuple):
    """Of each group: how many values, the smallest, and the percentiles asked for; MISSING where there is none."""

    counts: NDArray[np.int64]
    minimum: NDArray[np.int64]
    percentiles: NDArray[np.int64]  # shape (percentages, groups)


def by_group(values: NDArray[np.int64], group: NDArray[Any], groups: int, percent: Sequence[int]) -> Distribution:
    """Nearest-rank percentiles: the smallest value with `percent` % of its group at or below it.

    Parameters
    ----------
    group : ndarray of int
        Of each value, from 0.
    percent : sequence of int
        1 to 100; 100 is the largest.
    """
    ordered = values[np.lexsort((values, group))]
    count = np.bincount(group, minlength=groups).astype(np.int64)
    start = np.cumsum(count) - count

    def ranked(rank: NDArray[np.int64]) -> NDArray[np.int64]:
        found = np.full(groups, MISSING)
        some = count > 0
        found[some] = ordered[(start + rank)[some]]
        return found

    ranks = [-(-count * each // 100) - 1 for each in percent]
    return Distribution(count, ranked(np.zeros(groups, np.int64)), np.array([ranked(rank) for rank in ranks]))


def histograms(delays_ns: Times, known: NDArray[np.bool_]) -> list[Histogram]:
    """How many delays of each row are of each class, and their sum; what is below zero counts as zero.

    Parameters
    ----------
    delays_ns : ndarray of int64, shape (rows, k)
    known : ndarray of bool, shape (rows, k)
        Which of them count.
    """
    classes = len(DELAY_BOUNDS_NS) + 1
    values = np.maximum(delays_ns, 0)
    row, _ = np.nonzero(known)
    of_class = np.searchsorted(_BOUNDS_NS, values[known])  # equal to a bound: the class that ends there
    table = np.bincount(row * classes + of_class, minlength=len(known) * classes).reshape(len(known), classes)
    used = np.where(table.any(axis=1), classes - (table[:, ::-1] != 0).argmax(axis=1), 0)
    sums = np.where(known, values, 0).sum(axis=1)
    rows = zip(table.tolist(), used.tolist(), sums.tolist(), strict=True)
    return [Histogram(counts[:length], sum_ns) for counts, length, sum_ns in rows]
