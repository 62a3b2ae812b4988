"""One-way, queueing and round-trip delays from stamps, each with its bound. Pure functions of int64 nanoseconds.

A one-way delay is the difference of two clocks. Where these are one clock, it is a fact, good to the clock's
reading; where they run freely, only its excess over the recent minimum means anything, and what that is good to
grows with the age of the minimum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.offsets import UNBOUNDED_NS
from pytools.estimators.windows import MISSING, Rows, Samples, SlidingMinimum, Times, nearest_rank
from pytools.signals import Delay, Histogram

# Stated allowances, each for one end.
STAMP_BOUND_NS: Final = 100  # reading one clock in a kernel hook, on whichever CPU
FOREIGN_BOUND_NS: Final = 1_000_000  # a stamp of a reflector that takes it in user space
DRIFT_PPM: Final = 50  # a free-running oscillator against true time
_BY_CHANCE: Final = 1e-5
_DRIFTING_NS: Final = 10_000_000_000  # what is longer is no delay, and its drift would not fit a float


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


@dataclass(frozen=True)
class Clocks:
    """How the two clocks of each path stand, one element per path.

    Attributes
    ----------
    absolute : ndarray of bool
        Whether a one-way delay is a fact.
    bound_ns, hard_bound_ns : ndarray of int64
        What the peer's clock against ours is known to; 0 where both ends read one clock.
    free : ndarray of bool
        Whether nothing is known of how the two drift.
    jitter_ns : ndarray of int64
        By how much corrections made at different times may differ.
    """

    absolute: NDArray[np.bool_]
    bound_ns: Times
    hard_bound_ns: Times
    free: NDArray[np.bool_]
    jitter_ns: Times


def corrected(values_ns: Times, offsets_ns: Times, drifts_ppb: NDArray[np.float64]) -> Times:
    """One-way delays from differences of stamps of two clocks.

    Parameters
    ----------
    values_ns : ndarray of int64
        Forward: the peer's ingress stamp minus our egress stamp; reverse: our ingress stamp minus the peer's egress.
    offsets_ns : ndarray of int64
        Forward: the peer's clock minus ours at our stamp; reverse: ours minus the peer's at our stamp.
    drifts_ppb : ndarray of float
        How fast the peer's clock runs against ours: its stamp is taken one delay after ours (forward) or before it.
    """
    delays_ns = values_ns - offsets_ns
    drifting = np.where(np.abs(delays_ns) < _DRIFTING_NS, delays_ns, 0)
    return delays_ns - np.rint(drifting * (drifts_ppb * 1e-9)).astype(np.int64)


def queueing_bound(stamps_ns: Times, base_age_ns: Times, clocks: Clocks) -> Times:
    """What a queueing delay is good to: two differences of stamps, and the drift of free clocks between them.

    Parameters
    ----------
    stamps_ns : ndarray of int64
        As `stamp_bound` gives it.
    base_age_ns : ndarray of int64
        How long ago the minimum was taken that the delay is compared with.
    """
    drift = np.where(clocks.free, -(-base_age_ns * 2 * DRIFT_PPM // 1_000_000), clocks.jitter_ns)
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

    def part(self, rows: slice) -> Direction:
        """Some of the rows."""
        return Direction(*(getattr(self, each.name)[rows] for each in fields(self)))


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


def half_waited(
    paths: Rows, leads_ns: Times, answered: NDArray[np.int64], rows: Rows, loss: NDArray[np.float64]
) -> tuple[Times, Times]:
    """How many probes of each path were overtaken, and what at least half of its probes have waited.

    The answered ones are all taken to have waited less, so the figure errs on the low side. A probe that is lost has
    not waited: where so many may have been lost by chance, nothing is said.

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
    loss : ndarray of float, shape (rows,)
        How large the share of probes that are lost at random may be, above 0.

    Returns
    -------
    overtaken, waited_ns : ndarray of int64, shape (rows,)
        `waited_ns` is MISSING where fewer than half were overtaken, or as many would be lost by chance more often than
        once in 10^5 such windows.
    """
    counts, waited = np.zeros(len(rows), np.int64), np.full(len(rows), MISSING)
    if not len(paths):
        return counts, waited
    for place in np.flatnonzero(np.isin(rows, paths)):
        leads = np.sort(leads_ns[paths == rows[place]])
        counts[place] = len(leads)
        rank = (len(leads) + answered[place] + 1) // 2 - answered[place]
        if rank > 0 and _chance(len(leads), len(leads) + int(answered[place]), float(loss[place])) <= _BY_CHANCE:
            waited[place] = leads[rank - 1]
    return counts, waited


def _chance(lost: int, sent: int, share: float) -> float:
    """How likely so many at least of these are lost, each independently with this probability."""
    return sum(math.comb(sent, each) * share**each * (1.0 - share) ** (sent - each) for each in range(lost, sent + 1))


def delays(
    figures: Direction,
    round_trip_min_ns: Times,
    clocks: Clocks,
    foreign: NDArray[np.bool_],
    now_ns: int,
    queueing: Sequence[Histogram | None],
) -> list[Delay]:
    """The public records of one direction, one per path.

    A one-way delay below zero but within its bound is given as zero: the interval around it is still true.

    Parameters
    ----------
    round_trip_min_ns : ndarray of int64
        Smallest round trip in the same window; half of it bounds a one-way delay whatever the clocks do.
    foreign : ndarray of bool
        Whether the peer's stamps are taken in user space.
    queueing : sequence of Histogram
        Of single probes, one per path; None where there is none.
    """
    stamps = stamp_bound(foreign)
    measured = figures.samples > 0
    absolute = measured & clocks.absolute
    compared = measured & (figures.base != MISSING)
    age = np.where(compared, now_ns - figures.base_at, 0)
    hard_known = absolute & (round_trip_min_ns != MISSING) & (clocks.hard_bound_ns < UNBOUNDED_NS)
    hard = np.where(clocks.hard_bound_ns > 0, clocks.hard_bound_ns + stamps, round_trip_min_ns // 2)
    columns = zip(
        figures.samples.tolist(),
        _or_none(np.maximum(figures.minimum, 0), absolute),
        _or_none(np.maximum(figures.p50, 0), absolute),
        _or_none(np.maximum(figures.p99, 0), absolute),
        _or_none(stamps + clocks.bound_ns, absolute),
        _or_none(hard, hard_known),
        _or_none(figures.p50 - figures.base, compared),
        _or_none(figures.p99 - figures.base, compared),
        _or_none(figures.last - figures.base, compared),
        _or_none(queueing_bound(stamps, age, clocks), compared),
        queueing,
        strict=True,
    )
    return [Delay(*column) for column in columns]


def asymmetry(
    forward: Direction, reverse: Direction, clocks: Clocks, foreign: NDArray[np.bool_]
) -> tuple[list[int | None], list[int | None]]:
    """Smallest forward minus smallest reverse delay of each path, and what that is good to.

    An error of the offset makes the one longer and the other shorter, so it counts twice.
    """
    known = clocks.absolute & (forward.samples > 0) & (reverse.samples > 0)
    difference_ns = np.where(known, forward.minimum - np.where(known, reverse.minimum, 0), 0)
    return _or_none(difference_ns, known), _or_none(2 * (stamp_bound(foreign) + clocks.bound_ns), known)


def _or_none(values: NDArray[np.int64], known: NDArray[np.bool_]) -> list[int | None]:
    listed: list[int | None] = values.tolist()
    if known.all():
        return listed
    return [value if is_known else None for value, is_known in zip(listed, known.tolist(), strict=True)]
