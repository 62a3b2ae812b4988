"""One-way, queueing and round-trip delays from stamps, each with its bound. Pure functions of int64 nanoseconds.

A one-way delay is the difference of two clocks. Where these are one clock, it is a fact, good to the clock's
reading; where they run freely, only its excess over the recent minimum means anything, and what that is good to
grows with the age of the minimum. What it is compared with is the base delay (base_delays.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.base_delays import Base, BaseDelays
from pytools.estimators.offsets import UNBOUNDED_NS
from pytools.estimators.windows import MISSING, Rows, Samples, Times, nearest_rank
from pytools.signals import Delay, Histogram

# Stated allowances, each for one end.
STAMP_BOUND_NS: Final = 100  # reading one clock in a kernel hook, on whichever CPU
FOREIGN_BOUND_NS: Final = 1_000_000  # a stamp of a reflector that takes it in user space
DRIFT_PPM: Final = 50  # a free-running oscillator against true time
_NS_A_DRIFTED_NS: Final = 1_000_000 // (2 * DRIFT_PPM)  # of two against each other
_PERCENT: Final = np.array([0, 50, 99])[:, None, None]
_NONE: Final = np.array(None)
_GAIN: Final = 1 / 16
_WEIGHTS: Final = _GAIN * (1.0 - _GAIN) ** np.arange(1024)  # beyond, nothing counts
_DRIFTING_NS: Final = 10_000_000_000  # what is longer is no delay, and its drift would not fit a float


def stamp_bound(foreign: NDArray[np.bool_]) -> Times:
    """What a difference of one stamp of ours and one of the peer's is good to, clocks apart."""
    return np.where(foreign, STAMP_BOUND_NS + FOREIGN_BOUND_NS, 2 * STAMP_BOUND_NS)


@dataclass(frozen=True)
class Clocks:
    """How the two clocks of each path stand, one element per path."""

    absolute: NDArray[np.bool_]  # whether a one-way delay is a fact
    bound_ns: Times  # what the peer's clock against ours is known to; 0 where both ends read one clock
    hard_bound_ns: Times
    free: NDArray[np.bool_]  # whether nothing is known of how the two drift
    jitter_ns: Times  # by how much corrections made at different times may differ


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
    drift = clocks.jitter_ns
    if np.count_nonzero(clocks.free):
        drift = np.where(clocks.free, -(base_age_ns // -_NS_A_DRIFTED_NS), drift)
    return 2 * stamps_ns + drift


@dataclass(frozen=True)
class Figures:
    """Both directions of several paths over one window; MISSING where there is nothing."""

    samples: NDArray[np.int64]  # forward and reverse: (2, paths)
    delays: Times  # smallest, p50, p99 and last: (4, 2, paths)
    base: Base  # what the queueing delays are measured against
    round_trip_min: Times
    jitter: Times
    jitter_drift: Times  # how far free clocks may have drifted between two samples of it, weighted as they are


def summarise(samples: Samples, base: BaseDelays, rows: Rows, begin_ns: int, now_ns: int, at_most: int) -> Figures:
    """Figures of some paths over the window from `begin_ns` to now.

    Parameters
    ----------
    samples : Samples
        Of a row for each path: forward and reverse delay, and round trip.
    at_most : int
        Look at this many of the newest samples of each row.
    """
    ordered, counts, last, came = samples.since(rows, begin_ns, at_most)
    ranked = nearest_rank(ordered, counts, _PERCENT)
    delays_ns = np.concatenate([ranked[:, :2], last[None, :2]])
    drift_ns = -(-(now_ns - begin_ns) // _NS_A_DRIFTED_NS)
    swing = jitter(came[:2], counts[:2])
    weights = _GAIN / _settled(np.maximum(counts[:2] - 1, 1))  # the largest; all gaps make a window at most
    return Figures(
        counts[:2], delays_ns, base.at(rows, now_ns), ranked[0, 2], swing, np.ceil(weights * drift_ns).astype(np.int64)
    )


def jitter(came: Times, counts: NDArray[np.int64]) -> Times:
    """How much delays of successive samples differ: J += (|D| - J) / 16 of RFC 3550, 6.4.1, over a window.

    A window begins anew, so the figure is divided by what J lacks for having begun at 0: it is of the same size in
    short windows and in long ones, where both are the same.

    Parameters
    ----------
    came : ndarray of int64, shape (..., k)
        As `Samples.since` gives them: the newest first.
    counts : ndarray of int64, shape (...)

    Returns
    -------
    ndarray of int64
        MISSING where there are fewer than two samples.
    """
    width = came.shape[-1]
    known = came != MISSING
    if width and np.count_nonzero(known[..., 1:] > known[..., :-1]):  # gaps between samples
        order = np.argsort(~known, axis=-1, kind="stable")
        came, known = np.take_along_axis(came, order, -1), np.take_along_axis(known, order, -1)
    apart = np.where(known[..., 1:], came[..., :-1] - np.where(known[..., 1:], came[..., 1:], 0), 0)
    told = min(apart.shape[-1], len(_WEIGHTS))
    swing = np.abs(apart[..., :told]) @ _WEIGHTS[:told]
    pairs = np.maximum(counts - 1, 1)
    return np.where(counts > 1, np.rint(swing / _settled(pairs)).astype(np.int64), MISSING)


def _settled(pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """The share of its value that J has reached after so many differences."""
    return np.asarray(1.0 - (1.0 - _GAIN) ** pairs, np.float64)


class Published(NamedTuple):
    """Of each path, in the form of signals: both directions, and their difference, see `published`."""

    forward: list[Delay]
    reverse: list[Delay]
    asymmetry_ns: list[int | None]
    asymmetry_bound_ns: list[int | None]


def published(
    figures: Figures,
    clocks: Clocks,
    foreign: NDArray[np.bool_],
    now_ns: int,
    queueing: Sequence[Sequence[Histogram | None]],
) -> Published:
    """The public records of both directions, and smallest forward minus smallest reverse delay.

    A one-way delay below zero but within its bound is given as zero: the interval around it is still true. An error of
    the offset makes one direction longer and the other shorter, so it counts twice in their difference.

    Parameters
    ----------
    foreign : ndarray of bool
        Whether the peer's stamps are taken in user space.
    queueing : sequence of sequence of Histogram
        Of single probes, for each direction one per path; None where there is none.
    """
    stamps, measured = stamp_bound(foreign), figures.samples > 0
    bound_ns, absolute = stamps + clocks.bound_ns, measured & clocks.absolute
    base = figures.base
    compared = measured & (base.delays != MISSING)
    table = np.empty((10, *measured.shape), np.int64)  # columns of Delay
    known = np.empty(table.shape, np.bool_)
    table[0], known[0] = figures.samples, True
    np.maximum(figures.delays[:3], 0, out=table[1:4])
    table[4], known[1:6] = bound_ns, absolute
    # Half of the smallest round trip bounds a one-way delay whatever the clocks do.
    table[5] = np.where(clocks.hard_bound_ns > 0, clocks.hard_bound_ns + stamps, figures.round_trip_min // 2)
    known[5] &= (figures.round_trip_min != MISSING) & (clocks.hard_bound_ns < UNBOUNDED_NS)
    np.subtract(figures.delays[1:], base.delays, out=table[6:9])
    np.maximum(table[6:9], 0, out=table[6:9])
    age_ns = np.where(compared, now_ns - base.taken_ns, 0)
    table[9], known[6:] = queueing_bound(stamps, age_ns, clocks) + base.slack, compared
    swings = or_none(figures.jitter, figures.jitter != MISSING)
    drift = np.where(clocks.free, figures.jitter_drift, clocks.jitter_ns)
    bounds = or_none(2 * stamps + drift, figures.jitter != MISSING)
    rows = zip(or_none(table.transpose(1, 2, 0), known.transpose(1, 2, 0)), queueing, swings, bounds, strict=True)
    forward, reverse = ([Delay(*row, *rest) for row, *rest in zip(*each, strict=True)] for each in rows)
    both, difference_ns = absolute[0] & absolute[1], figures.delays[0, 0] - figures.delays[0, 1]
    return Published(forward, reverse, or_none(difference_ns, both), or_none(2 * bound_ns, both))


def or_none(values: NDArray[np.int64], known: NDArray[np.bool_]) -> list[Any]:
    """An array as lists, with None where it is not known."""
    listed: list[Any] = np.where(known, values, _NONE).tolist()
    return listed
