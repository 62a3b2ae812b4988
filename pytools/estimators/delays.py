"""One-way, queueing and round-trip delays from stamps, each with its bound. Pure functions of int64 nanoseconds.

A one-way delay is the difference of two clocks. Where these are one clock, it is a fact, good to the clock's
reading; where they run freely, only its excess over the recent minimum means anything, and what that is good to
grows with the age of the minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import MISSING, Rows, Samples, SlidingMinimum, Times, nearest_rank
from pytools.signals import Delay

# Stated allowances, each for one end.
STAMP_BOUND_NS: Final = 100  # reading one clock in a kernel hook, on whichever CPU
FOREIGN_BOUND_NS: Final = 1_000_000  # a stamp of a reflector that takes it in user space
DRIFT_PPM: Final = 50  # a free-running oscillator against true time


def difference(later: Times, earlier: Times) -> Times:
    """`later - earlier` where both are known, else MISSING."""
    known = (later != MISSING) & (earlier != MISSING)
    return np.where(known, later - np.where(known, earlier, 0), MISSING)


def total(first: Times, second: Times) -> Times:
    """`first + second` where both are known, else MISSING."""
    known = (first != MISSING) & (second != MISSING)
    return np.where(known, first + np.where(known, second, 0), MISSING)


def stamp_bound(foreign: NDArray[np.bool_]) -> Times:
    """What a difference of one stamp of ours and one of the peer's is good to, clocks apart."""
    return np.where(foreign, STAMP_BOUND_NS + FOREIGN_BOUND_NS, 2 * STAMP_BOUND_NS)


def queueing_bound(stamps_ns: Times, base_age_ns: Times, shared: NDArray[np.bool_]) -> Times:
    """What a queueing delay is good to: two differences of stamps, and the drift of free clocks between them.

    Parameters
    ----------
    stamps_ns : ndarray of int64
        As `stamp_bound` gives it.
    base_age_ns : ndarray of int64
        How long ago the minimum was taken that the delay is compared with.
    shared : ndarray of bool
        Whether both ends read one clock.
    """
    drift = np.where(shared, 0, -(-base_age_ns * 2 * DRIFT_PPM // 1_000_000))
    return 2 * stamps_ns + drift


@dataclass(frozen=True)
class Direction:
    """Figures of one direction of several paths over one window; MISSING where there is none."""

    samples: NDArray[np.int64]
    minimum: Times
    p50: Times
    p99: Times
    last: Times
    base: Times  # the minimum behind the queueing delays
    base_at: Times


def summarise(
    samples: Samples, base: SlidingMinimum, rows: Rows, begin_ns: int, now_ns: int, at_most: int
) -> Direction:
    """Figures of some rows over the window from `begin_ns` to now.

    Parameters
    ----------
    at_most : int
        Look at this many of the newest samples of each row.
    """
    ordered, counts, last = samples.since(rows, begin_ns, at_most)
    minima, taken = base.at(rows, now_ns)
    return Direction(
        samples=counts,
        minimum=np.where(counts > 0, ordered[:, 0], MISSING),
        p50=nearest_rank(ordered, counts, 50),
        p99=nearest_rank(ordered, counts, 99),
        last=last,
        base=minima,
        base_at=taken,
    )


def half_waited(paths: Rows, leads_ns: Times, answered: NDArray[np.int64], rows: Rows) -> tuple[Times, Times]:
    """How many probes of each path were overtaken, and what at least half of its probes have waited.

    The answered ones are all taken to have waited less, so the figure errs on the low side.

    Parameters
    ----------
    paths : ndarray of int, shape (n,)
        Path of each overtaken probe.
    leads_ns : ndarray of int64, shape (n,)
        By how much it was overtaken: it has waited at least so long.
    answered : ndarray of int64, shape (rows,)
        How many probes of each row were answered in the window.
    rows : ndarray of int, shape (rows,)
        The paths asked for.

    Returns
    -------
    overtaken, waited_ns : ndarray of int64, shape (rows,)
        `waited_ns` is MISSING where fewer than half, or a single one, were overtaken.
    """
    counts, waited = np.zeros(len(rows), np.int64), np.full(len(rows), MISSING)
    if not len(paths):
        return counts, waited
    for place in np.flatnonzero(np.isin(rows, paths)):
        leads = np.sort(leads_ns[paths == rows[place]])
        counts[place] = len(leads)
        rank = (len(leads) + answered[place] + 1) // 2 - answered[place]
        if rank > 0 and len(leads) > 1:  # a single lost probe says nothing
            waited[place] = leads[rank - 1]
    return counts, waited


def delays(
    figures: Direction,
    round_trip_min_ns: Times,
    shared: NDArray[np.bool_],
    foreign: NDArray[np.bool_],
    now_ns: int,
) -> list[Delay]:
    """The public records of one direction, one per path.

    Parameters
    ----------
    round_trip_min_ns : ndarray of int64
        Smallest round trip in the same window; half of it bounds a one-way delay whatever the clocks do.
    shared : ndarray of bool
        Whether both ends read one clock: only then is the one-way delay given.
    foreign : ndarray of bool
        Whether the peer's stamps are taken in user space.
    """
    stamps = stamp_bound(foreign)
    measured = figures.samples > 0
    absolute = measured & shared
    queueing = measured & (figures.base != MISSING)
    age = np.where(queueing, now_ns - figures.base_at, 0)
    columns = zip(
        figures.samples.tolist(),
        _or_none(figures.minimum, absolute),
        _or_none(figures.p50, absolute),
        _or_none(figures.p99, absolute),
        _or_none(stamps, absolute),
        _or_none(round_trip_min_ns // 2, absolute & (round_trip_min_ns != MISSING)),
        _or_none(figures.p50 - figures.base, queueing),
        _or_none(figures.p99 - figures.base, queueing),
        _or_none(figures.last - figures.base, queueing),
        _or_none(queueing_bound(stamps, age, shared), queueing),
        strict=True,
    )
    return [Delay(*column) for column in columns]


def _or_none(values: NDArray[np.int64], known: NDArray[np.bool_]) -> list[int | None]:
    listed: list[int | None] = values.tolist()
    if known.all():
        return listed
    return [value if is_known else None for value, is_known in zip(listed, known.tolist(), strict=True)]
