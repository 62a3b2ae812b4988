"""How a peer's clock runs against ours, from the probes of one path over one window. Pure; docs/clocks.md derives it.

Stamps are int64 nanoseconds and offsets may be days: references are subtracted in integers, and only what is left
goes to float64. A forward difference is delay + offset, a reverse one delay - offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from pytools.estimators.clock_steps import BLATANT_NS, consistent_since, impossible, is_step, small_step, stray
from pytools.estimators.corridor import Corridor, Floats, ceiling, corridor
from pytools.estimators.delays import DRIFT_PPM, STAMP_BOUND_NS
from pytools.estimators.drift_trends import DriftTrend
from pytools.estimators.lower_edges import LowerEdges, lower_edges
from pytools.estimators.offsets import SIGMAS, WANDER_PPB_PER_S, WANDER_SIGMAS, Line
from pytools.estimators.pairs import Probes, joined, sift, with_singles
from pytools.estimators.windows import Times

STAMP_NOISE_NS: Final = 20.0  # standard deviation of one stamp
MOST_DRIFT_PPB: Final = 2 * 2 * DRIFT_PPM * 1000.0  # two free oscillators, and each may be slewed by as much again
LEAST_FOUND: Final = 0.01  # a line that no unqueued probe carries still has this share of its weight
_ENOUGH_FOUND: Final = 0.9  # below this probability, or with fewer kept pairs, all probes are fitted as well
_ENOUGH_KEPT: Final = 8
_WRONG_SHARE: Final = 0.01  # of the stamps may be wrong and thus lie below the line
_NEAR: Final = 35.0  # standard deviations of noise above a line: what the fit looks at
_BENT: Final = 2 / 3  # of a parabola's curvature: what a line through its middle part is off by at the end
_LONGEST_S: Final = 10.0  # of probes of earlier windows
_TRUSTED_SHARE: Final = 0.25  # of the pairs kept: then the kept ones alone say where to start


Singles = tuple[Times, Times, Times, Times]  # forward_at, forward, reverse_at, reverse of single probes


@dataclass(frozen=True)
class EdgeFit(Line):
    """The peer's clock minus ours: `offset_ns` when ours reads `epoch_ns`, growing by `drift_ppb` ns a second."""

    hard_low_ns: int  # the offset at the epoch lies between these as long as no delay is negative
    hard_high_ns: int
    round_trip_min_ns: int
    kept: int  # pairs, of both directions
    rejected: int
    stepped: bool  # the newest samples contradict the older ones, in this window or in the prior
    wait_ns: float = 0.0  # root mean square of what the offset is off by besides, in case no probe was unqueued
    found: float = 1.0  # probability that unqueued probes carry both lines
    wander_ppb_per_s: float = WANDER_PPB_PER_S  # the drift changes no faster, as was known then
    span_ns: int = 0  # from the oldest to the newest probe that it rests on: those behind the last step
    floor_ns: int | None = None  # the round trip when nothing waits, where this window says too much
    trend_ppb_per_s: float = 0.0  # the drift's, from the epoch on
    carried: bool = False  # whether the drift is the prior's, carried on
    probes: tuple[Probes, Probes] | None = field(default=None, compare=False, repr=False)  # for the next window

    @property
    def unqueued_ns(self) -> int:
        """The round trip when nothing waits, as far as it is known."""
        return self.round_trip_min_ns if self.floor_ns is None else self.floor_ns

    @property
    def spread_ns(self) -> float:
        """What the offset may be off by at the epoch, all in all (root mean square)."""
        return math.hypot(self.sigma_ns * math.sqrt(max(self.found, LEAST_FOUND)), self.wait_ns)

    def at(self, clock_ns: int) -> int:
        """The offset when our clock reads `clock_ns`."""
        seconds = (clock_ns - self.epoch_ns) * 1e-9
        return self.offset_ns + round((self.drift_ppb + self.trend_ppb_per_s * seconds / 2) * seconds)

    def drift_at(self, clock_ns: int) -> float:
        """The drift then."""
        return self.drift_ppb + self.trend_ppb_per_s * ((clock_ns - self.epoch_ns) * 1e-9)

    def sigma_at(self, clock_ns: int) -> float:
        """Its standard deviation then, the wander of the oscillators included."""
        seconds = abs(clock_ns - self.epoch_ns) * 1e-9
        wandered = self.wander_ppb_per_s * seconds * seconds / 2
        return math.hypot(self.sigma_ns, self.wait_ns, self.drift_sigma_ppb * seconds, wandered)


def fit_edge(
    forward_at_ns: Times,
    forward_ns: Times,
    reverse_at_ns: Times,
    reverse_ns: Times,
    *,
    tolerance_ns: int,
    asymmetry_share: float,
    prior: EdgeFit | None = None,
    noise_ns: float = STAMP_NOISE_NS,
    singles: Singles | None = None,
    wander_ppb_per_s: float = WANDER_PPB_PER_S,
) -> EdgeFit | None:
    """Offset and drift of a peer's clock over one window.

    Parameters
    ----------
    forward_at_ns, forward_ns : ndarray of int64, shape (pairs, 2)
        Our egress stamps of both probes of each pair, and the peer's ingress stamps less these; MISSING where lost.
    reverse_at_ns, reverse_ns : ndarray of int64, shape (pairs, 2)
        Our ingress stamps, and what these exceed the peer's egress stamps by.
    tolerance_ns : int
        A pair is kept when the differences of its probes differ by no more.
    asymmetry_share : float
        Stated allowance: the smallest delays of the directions differ by no more than this share of the round trip.
    prior : EdgeFit, optional
        What an earlier window gave. Its drift, let loose by the wander, guides this one; its offset never does. Where
        this window has too few unqueued probes, the earlier ones near the prior's line are fitted with it.
    noise_ns : float
        Standard deviation of one stamp.
    singles : tuple of four ndarray of int64, shape (n,), optional
        All answered probes, as the first four. They are looked at where the pairs do not tell enough.
    wander_ppb_per_s : float
        How fast the drift changes at most.

    Returns
    -------
    EdgeFit or None
        None when a direction has no probe at all.
    """
    forward = sift(forward_at_ns, forward_ns, tolerance_ns)
    reverse = sift(reverse_at_ns, reverse_ns, tolerance_ns)
    if not len(forward.at_ns) or not len(reverse.at_ns):
        return None
    noise_ns *= math.sqrt(2)
    if prior is not None:
        prior = replace(prior, wander_ppb_per_s=wander_ppb_per_s)
    fit = None
    if singles is None or prior is None or 2 * prior.span_ns < 3 * int(np.ptp(forward.at_ns)):
        fit = _fit(_Window.over(forward, reverse, wander_ppb_per_s), asymmetry_share, prior, noise_ns)
        if singles is None or (fit.found > _ENOUGH_FOUND and fit.kept >= _ENOUGH_KEPT):
            return fit
    # Where the last window needed earlier probes as well, pairs alone will hardly do in this one.
    forward = with_singles(forward, singles[0], singles[1], forward_at_ns)
    reverse = with_singles(reverse, singles[2], singles[3], reverse_at_ns)
    everything = _Window.over(forward, reverse, wander_ppb_per_s)
    other = _fit(everything, asymmetry_share, prior, noise_ns, trusted=False)
    fits = [other] if fit is None else [other, fit]
    best = min(fits, key=lambda each: (everything.unexplained(each, noise_ns), each.spread_ns))
    if prior is None or other.found > _ENOUGH_FOUND or any(each.stepped for each in fits):
        return replace(best, probes=other.probes)
    longer = _Window.over(*_remembered(forward, reverse, prior, noise_ns), wander_ppb_per_s)
    long = _aged(_fit(longer, asymmetry_share, prior, noise_ns, trusted=False), everything)
    # Which of them has the smallest error cannot be told from a window without unqueued probes: it passes for empty.
    if everything.unexplained(long, noise_ns) > everything.unexplained(best, noise_ns):
        return replace(best, probes=long.probes)
    return long


def _aged(fit: EdgeFit, window: _Window) -> EdgeFit:
    """A fit over more than a window: its drift is that of an earlier moment."""
    older_s = max(fit.span_ns * 0.5e-9 - window.half_span_s, 0.0)
    changed_ppb = fit.wander_ppb_per_s / WANDER_SIGMAS * older_s
    return replace(fit, drift_sigma_ppb=math.hypot(fit.drift_sigma_ppb, changed_ppb))


def _remembered(forward: Probes, reverse: Probes, prior: EdgeFit, noise_ns: float) -> tuple[Probes, Probes]:
    """Both directions with those earlier probes that may have met no queue.

    They reach back as far as the wander turns the line's end by less than two probes' noise.
    """
    if prior.probes is None:
        return forward, reverse
    newest = max(int(forward.at_ns.max()), int(reverse.at_ns.max()))
    bent_s = 2 * math.sqrt(2 * noise_ns * WANDER_SIGMAS / (_BENT * prior.wander_ppb_per_s))
    begin_ns = newest - round(min(bent_s, _LONGEST_S) * 1e9)
    oldest = min(int(forward.at_ns.min()), int(reverse.at_ns.min()))
    both = []
    for probes, earlier, sign in ((forward, prior.probes[0], 1), (reverse, prior.probes[1], -1)):
        chosen = (earlier.at_ns >= begin_ns) & (earlier.at_ns < oldest)
        since_s = (earlier.at_ns - prior.epoch_ns) * 1e-9
        above = earlier.difference_ns - sign * prior.offset_ns - sign * prior.drift_ppb * since_s
        above -= prior.unqueued_ns / 2
        chosen &= (above < _NEAR * noise_ns + prior.bound_ns) & (above > -BLATANT_NS)
        both.append(joined(earlier.take(chosen), probes))
    return both[0], both[1]


def _fit(
    window: _Window, asymmetry_share: float, prior: EdgeFit | None, noise_ns: float, trusted: bool = True
) -> EdgeFit:
    """Fit what lies behind the last step."""
    rest, stepped = window, False
    first = rest.first(prior, trusted)
    if impossible(first):
        odd = stray(rest.times_s, rest.values_ns, MOST_DRIFT_PPB, first)
        if odd is not None:
            return _fit(window.without(*odd), asymmetry_share, prior, noise_ns, trusted)
        stepped = True
        before, after = rest.split(consistent_since(rest.times_s, rest.values_ns, MOST_DRIFT_PPB))
        if prior is None and before is not None:  # its drift still holds, and its round trip
            prior = before.fit(before.first(None), None, asymmetry_share, noise_ns)
        rest = after or before or rest
    if prior is not None:
        begin_s = small_step(rest.times_s, rest.values_ns, prior.drift_at(rest.origin_ns), prior.unqueued_ns, noise_ns)
        if begin_s is not None:
            stepped = True
            rest = rest.split(begin_s)[1] or rest
    if rest is not window:
        first = rest.first(prior, trusted)
    fit = _steadied(rest.fit(first, prior, asymmetry_share, noise_ns), prior)
    return replace(
        fit,
        stepped=stepped or (prior is not None and _contradict(fit, prior, noise_ns)),
        kept=window.forward.kept + window.reverse.kept,
        rejected=window.forward.rejected + window.reverse.rejected,
    )


def _steadied(fit: EdgeFit, prior: EdgeFit | None) -> EdgeFit:
    """The fit, with the prior's drift where that is known better."""
    if prior is None:
        return fit
    apart_s = abs(fit.epoch_ns - prior.epoch_ns) * 1e-9
    known_ppb = math.hypot(prior.drift_sigma_ppb, prior.wander_ppb_per_s * apart_s)
    if known_ppb >= fit.drift_sigma_ppb:
        return fit
    return replace(fit, drift_ppb=prior.drift_at(fit.epoch_ns), drift_sigma_ppb=known_ppb, carried=True)


def _contradict(fit: EdgeFit, prior: EdgeFit, noise_ns: float) -> bool:
    """Whether the clock was stepped between two windows: the prior's line makes delays negative, or nearly so."""
    expected, sigma = prior.at(fit.epoch_ns), SIGMAS * prior.sigma_at(fit.epoch_ns)
    if not fit.hard_low_ns - BLATANT_NS - sigma <= expected <= fit.hard_high_ns + BLATANT_NS + sigma:
        return True
    return is_step(
        fit.offset_ns - expected,
        fit.round_trip_min_ns - prior.unqueued_ns,
        fit.round_trip_min_ns,
        noise_ns + math.hypot(fit.sigma_ns, prior.sigma_at(fit.epoch_ns)),
    )


def headed(fit: EdgeFit, trend: DriftTrend) -> EdgeFit:
    """The fit, with the slope of its path's drifts; its own is added to these if it was measured."""
    if not fit.carried:
        trend.push(fit.epoch_ns, fit.drift_ppb, fit.drift_sigma_ppb)
    return replace(fit, trend_ppb_per_s=trend.ppb_per_s)


@dataclass(frozen=True)
class _Window:
    """Both directions as floats about an origin: `origin_ns` of our clock, `offset_ns` of the peer's minus ours."""

    forward: Probes
    reverse: Probes
    origin_ns: int
    offset_ns: int
    times_s: tuple[Floats, Floats]
    values_ns: tuple[Floats, Floats]
    half_span_s: float  # how far the oldest and the newest probe are from the origin
    wander_ppb_per_s: float

    @classmethod
    def over(cls, forward: Probes, reverse: Probes, wander_ppb_per_s: float) -> _Window:
        oldest = min(int(forward.at_ns.min()), int(reverse.at_ns.min()))
        newest = max(int(forward.at_ns.max()), int(reverse.at_ns.max()))
        origin = oldest + (newest - oldest) // 2
        offset = (int(forward.difference_ns.min()) - int(reverse.difference_ns.min())) // 2
        return cls(
            forward,
            reverse,
            origin,
            offset,
            ((forward.at_ns - origin).astype(np.float64) * 1e-9, (reverse.at_ns - origin).astype(np.float64) * 1e-9),
            ((forward.difference_ns - offset).astype(np.float64), (reverse.difference_ns + offset).astype(np.float64)),
            (newest - oldest) * 0.5e-9,
            wander_ppb_per_s,
        )

    def split(self, begin_s: float) -> tuple[_Window | None, _Window | None]:
        """What lies before a moment and what does not; None for either that lacks a direction."""
        parts = []
        for later in (False, True):
            forward, reverse = (
                probes.take((times >= begin_s) == later)
                for probes, times in zip((self.forward, self.reverse), self.times_s, strict=True)
            )
            whole = len(forward.at_ns) and len(reverse.at_ns)
            parts.append(_Window.over(forward, reverse, self.wander_ppb_per_s) if whole else None)
        return parts[0], parts[1]

    def without(self, direction: int, place: int) -> _Window:
        probes = [self.forward, self.reverse]
        mask = np.arange(len(probes[direction].at_ns)) != place
        probes[direction] = probes[direction].take(mask)
        return _Window.over(probes[0], probes[1], self.wander_ppb_per_s)

    def fit(self, first: Corridor, prior: EdgeFit | None, asymmetry_share: float, noise_ns: float) -> EdgeFit:
        """Fit all probes, whatever they say."""
        guess = self._guess(first, prior)
        edges = lower_edges(
            self.times_s, self.values_ns, (self.forward.means, self.reverse.means), first, noise_ns, guess
        )
        return self._result(edges, asymmetry_share, guess[1])

    def unexplained(self, fit: EdgeFit, noise_ns: float) -> float:
        """How many more probes lie below a line than wrong stamps explain, of the direction where it is worse."""
        edges = self.edges(fit)
        most = 0.0
        for direction, sign in ((0, 1.0), (1, -1.0)):
            times, values = self.times_s[direction], self.values_ns[direction]
            below = np.count_nonzero(values - edges[direction] - sign * fit.drift_ppb * times < -3 * noise_ns)
            wrong = len(times) * _WRONG_SHARE
            most = max(most, float(below) - wrong - math.sqrt(wrong))
        return most

    def edges(self, fit: EdgeFit) -> tuple[float, float]:
        """Where a fit's lines lie at our origin."""
        middle = float(fit.at(self.origin_ns) - self.offset_ns)
        return middle + fit.round_trip_min_ns / 2, fit.round_trip_min_ns / 2 - middle

    def first(self, prior: EdgeFit | None, trusted: bool = True) -> Corridor:
        """The widest corridor, of the kept pairs alone where these are many (wrong stamps are mostly in others)."""
        chosen = [
            slice(probes.means if trusted and probes.means > _TRUSTED_SHARE * len(probes.at_ns) else None)
            for probes in (self.forward, self.reverse)
        ]
        return corridor(
            self.times_s[0][chosen[0]],
            self.values_ns[0][chosen[0]],
            self.times_s[1][chosen[1]],
            self.values_ns[1][chosen[1]],
            -MOST_DRIFT_PPB,
            MOST_DRIFT_PPB,
            prior.drift_ppb if prior else 0.0,
        )

    def _guess(self, first: Corridor, prior: EdgeFit | None) -> tuple[float, float]:
        """A drift and how far it may be off: the corridor bounds it, the prior may know it better."""
        span_s = 2 * self.half_span_s
        loose = MOST_DRIFT_PPB if span_s <= 0 else min(MOST_DRIFT_PPB, (abs(first.width_ns) + 1000.0) / span_s)
        if prior is None:
            return first.drift, loose
        apart_s = abs(self.origin_ns - prior.epoch_ns) * 1e-9
        fresh = min(max(apart_s / span_s, 0.05), 1.0) if span_s > 0 else 1.0  # windows overlap: no probe counts twice
        return prior.drift_at(self.origin_ns), math.hypot(
            prior.drift_sigma_ppb / math.sqrt(fresh), prior.wander_ppb_per_s * apart_s
        )

    def _result(self, edges: LowerEdges, asymmetry_share: float, loose_ppb: float) -> EdgeFit:
        forward, reverse, drift = edges.covariance.tolist()
        variance = (forward[0] + reverse[1]) / 4 - forward[1] / 2
        shared = (forward[2] - reverse[2]) / 2
        drift_variance = drift[2]
        wait = math.hypot(*edges.waits_ns) / 2
        epoch_s = min(max(-shared / drift_variance, -self.half_span_s), self.half_span_s)
        noise = math.sqrt(max(variance + 2 * epoch_s * shared + epoch_s**2 * drift_variance, 1e-6))
        # The line lies this far off a parabola's vertex.
        spread = _variance(*self.times_s)
        noise = math.hypot(noise, self.wander_ppb_per_s / WANDER_SIGMAS * spread / 2)
        certain = max(edges.found, LEAST_FOUND)
        sigma = noise / math.sqrt(certain)
        # A line through queued probes has a slope as uncertain as its height, but no more so than the guess.
        turned = wait**2 / max(spread, 1e-9)
        turned = drift_variance / certain if certain > LEAST_FOUND else drift_variance + turned
        drift_variance = min(turned, max(loose_ppb**2, drift_variance))
        epoch = round(epoch_s * 1e9)
        offset = (edges.forward_ns - edges.reverse_ns) / 2 + edges.drift * (epoch * 1e-9)
        round_trip = max(edges.forward_ns + edges.reverse_ns, 0.0)
        high = self._ceiling(0, edges.forward_ns, edges.drift, epoch_s)
        low = -self._ceiling(1, edges.reverse_ns, -edges.drift, epoch_s)
        return EdgeFit(
            epoch_ns=self.origin_ns + epoch,
            offset_ns=self.offset_ns + round(offset),
            drift_ppb=edges.drift,
            sigma_ns=sigma,
            wait_ns=wait,
            span_ns=round(self.half_span_s * 2e9),
            found=edges.found,
            wander_ppb_per_s=self.wander_ppb_per_s,
            drift_sigma_ppb=math.sqrt(drift_variance),
            bound_ns=math.ceil(SIGMAS * noise + sum(edges.most_ns) / 2 + asymmetry_share * round_trip / 2),
            hard_low_ns=self.offset_ns + math.floor(low) - 2 * STAMP_BOUND_NS,
            hard_high_ns=self.offset_ns + math.ceil(high) + 2 * STAMP_BOUND_NS,
            round_trip_min_ns=round(round_trip),
            kept=self.forward.kept + self.reverse.kept,
            rejected=self.forward.rejected + self.reverse.rejected,
            stepped=False,
            probes=(self.forward, self.reverse),
        )

    def _ceiling(self, direction: int, edge_ns: float, drift: float, epoch_s: float) -> float:
        """What the probes of one direction leave possible at the epoch; one that is far too fast is a wrong stamp."""
        times, values = self.times_s[direction], self.values_ns[direction]
        right = values - drift * times > edge_ns - BLATANT_NS
        if not right.all():
            times, values = times[right], values[right]
        return ceiling(times - epoch_s, values, -MOST_DRIFT_PPB, MOST_DRIFT_PPB, drift)


def _variance(one: Floats, other: Floats) -> float:
    count = len(one) + len(other)
    mean = (float(np.add.reduce(one)) + float(np.add.reduce(other))) / count
    return (float(one @ one) + float(other @ other)) / count - mean * mean
