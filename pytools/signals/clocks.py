"""Clocks of hosts against each other, and which of them share an oscillator."""

from __future__ import annotations

import msgspec

from pytools.signals.base import ClockState, Path, Signal


class ClockEdge(Signal, frozen=True, kw_only=True, tag="clock_edge"):
    """A peer's clock against ours, from the coded probes of one path over the last window.

    Per path and `clocks.interval`.
    """

    path: Path
    epoch_ns: int  # the time of our clock for which the offset is given
    window_ns: int
    offset_ns: int  # peer's clock minus ours
    drift_ppb: float  # growth: at t the offset is offset_ns + drift_ppb * (t - epoch_ns) / 1e9
    sigma_ns: float  # standard deviation of the offset by statistics alone
    drift_sigma_ppb: float  # standard deviation of the drift
    bound_ns: int  # of the offset: statistics and the allowance for asymmetry
    hard_low_ns: int  # the offset is between this and hard_high_ns, because no delay is negative
    hard_high_ns: int  # upper end
    round_trip_min_ns: int  # smallest round trip in the window
    pairs_kept: int  # pairs of both directions that were used
    pairs_rejected: int  # the spacing changed by more than `clocks.tolerance`, or a probe was lost
    stepped: bool  # a clock was stepped; the line is of the samples after it


class Clock(Signal, frozen=True, kw_only=True, tag="clock"):
    """A host's clock against the reference's, from all hosts together. Figures are None while it is free running.

    Per host and `clocks.interval`.
    """

    of: str  # the host whose clock it is
    reference: str  # the host whose clock is the common one; empty: none
    epoch_ns: int  # the time of that host's clock for which the offset is given
    state: ClockState  # of that host's clock
    offset_ns: int | None  # that host's clock minus the reference's
    drift_ppb: float | None  # growth of the offset, from any cause
    bound_ns: int | None  # statistics, the allowance for asymmetry, and in holdover the drift since
    hard_bound_ns: int | None  # from the smallest round trips; assumes only that clocks keep within DRIFT_PPM
    slew_ppb: float | None  # of drift_ppb, the present slew by that host's time service; null if unreadable
    neighbours: int  # hosts with an edge to it that was used
    pairs_kept: int  # of all its edges
    pairs_rejected: int  # of all its edges
    outlier_edges: int  # edges that contradict the others (an asymmetric path) and have little weight


class Collocated(msgspec.Struct, frozen=True):
    """Hosts that share one oscillator."""

    hosts: list[str]  # with one oscillator
    confidence: float  # probability that all of them share it


class Collocation(Signal, frozen=True, kw_only=True, tag="collocation"):
    """Which hosts share an oscillator, from the history of their drifts.

    Every five seconds with a subscriber.
    """

    span_ns: int  # length of the history
    groups: list[Collocated]  # hosts that share an oscillator
    alone: list[str]  # hosts that share with no other
    unknown: list[str]  # too little history, or drifts too alike
