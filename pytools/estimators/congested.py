"""Windows in which every probe waited: what may still be said of the clocks. Pure.

When a queue never empties during a window, its wait looks like an offset: half of it, for nothing within the window
tells it from one. The round trip gives it away, because it was shorter before. What it exceeds its recent minimum by is
queueing of the one direction or the other, so the offset lies within half of that excess around what the window says;
within this interval the line of the earlier windows says where. Without excess the interval is a point, and the past
has no say.

A queue does not hold still: a longer round trip that is the same over many windows is a path that became longer, or a
host that became slower, and is the new floor.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Final

from pytools.estimators.clocks import LEAST_FOUND, EdgeFit
from pytools.estimators.offsets import SIGMAS

FLOOR_S: Final = 60.0
# The same round trip for so long is a new floor: soon where it is at most twice the old one, for half of that is a
# small error; late else. Windows overlap, so one lucky probe is the smallest of several.
_STEADY_NS: Final = 3_400_000_000
_LONG_STEADY_NS: Final = 11_400_000_000
_LEAST_WINDOWS: Final = 4
_LONG_STEADY_SHARE: Final = 0.01  # of the round trip, that a longer path may jitter by
_NOISE_SIGMAS: Final = 3.0


class Floor:
    """The round trip of one path when nothing waits; times are nanoseconds of any one clock."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, int]] = deque()  # time, round trip: both ascending
        self._recent: deque[tuple[int, int]] = deque()  # time, round trip
        self._first_ns: int | None = None
        self._windows = 0
        self.settled = False  # whether enough was seen to call the smallest round trip one in which nothing waited

    def add(self, at_ns: int, round_trip_ns: int, noise_ns: float, share: float) -> int:
        """Take one window's smallest round trip into account.

        Parameters
        ----------
        noise_ns, share : float
            Round trips are the same when they differ by no more than this and this share of the floor.

        Returns
        -------
        int
            The smallest of the recent past, or of the last windows where these are all the same.
        """
        floor_ns = min(self._kept[0][1], round_trip_ns) if self._kept else round_trip_ns
        self._first_ns = at_ns if self._first_ns is None else self._first_ns
        self._windows += 1
        self.settled = self.settled or (self._windows >= _LEAST_WINDOWS and at_ns - self._first_ns >= _STEADY_NS)
        self._recent.append((at_ns, round_trip_ns))
        while len(self._recent) > _LEAST_WINDOWS and self._recent[1][0] <= at_ns - _LONG_STEADY_NS:
            self._recent.popleft()
        steady_ns = self._steady(floor_ns, noise_ns + share * floor_ns)
        if steady_ns is not None:
            self._kept.clear()
            round_trip_ns = steady_ns
        while self._kept and self._kept[-1][1] >= round_trip_ns:
            self._kept.pop()
        self._kept.append((at_ns, round_trip_ns))
        while self._kept[0][0] < at_ns - int(FLOOR_S * 1e9):
            self._kept.popleft()
        return self._kept[0][1]

    def _steady(self, floor_ns: int, tolerance_ns: float) -> int | None:
        """The smallest round trip of the last windows, if it has been the same for long enough."""
        now_ns, low = self._recent[-1]
        high = low
        for windows, (at_ns, round_trip_ns) in enumerate(reversed(self._recent), 1):
            low, high = min(low, round_trip_ns), max(high, round_trip_ns)
            if high - low > tolerance_ns + _LONG_STEADY_SHARE * low:
                return None
            if windows < _LEAST_WINDOWS or now_ns - at_ns < _STEADY_NS:
                continue
            if now_ns - at_ns >= _LONG_STEADY_NS or (high - low <= tolerance_ns and low <= 2 * floor_ns):
                return low
        return None


def noise_ns(fit: EdgeFit) -> float:
    """By how much a window's round trip may be off by noise; what waited can only make it longer."""
    return 2 * _NOISE_SIGMAS * _sigma_of_noise(fit)


def _sigma_of_noise(fit: EdgeFit) -> float:
    return fit.sigma_ns * math.sqrt(max(fit.found, LEAST_FOUND))


def doubted(fit: EdgeFit) -> EdgeFit:
    """A window's line while it is not known how long the round trip is when nothing waits: half of it is open."""
    return _open(fit, fit.round_trip_min_ns / 2, 0.0)


def tells_round_trip(fit: EdgeFit) -> bool:
    """Whether a window tells its own round trip; if it does not, neither does it tell what waited in it."""
    return noise_ns(fit) <= fit.round_trip_min_ns / 2


def _open(fit: EdgeFit, half_ns: float, allowance_ns: float) -> EdgeFit:
    """A line that may be off by so much either way.

    It is an allowance on top of the statistics, for it does not average out: edges of a host share its port's queue.
    Sigma takes it in as well, so that an edge that knows better weighs more.
    """
    sigma_ns = math.hypot(_sigma_of_noise(fit), half_ns / SIGMAS)
    return replace(
        fit, sigma_ns=sigma_ns, wait_ns=0.0, found=1.0, bound_ns=math.ceil(SIGMAS * sigma_ns + half_ns + allowance_ns)
    )


def tempered(fit: EdgeFit, prior: EdgeFit | None, floor_ns: int, asymmetry_share: float) -> EdgeFit:
    """A window's line, corrected by the earlier one as far as its probes waited.

    Parameters
    ----------
    fit : EdgeFit
        What the window says.
    prior : EdgeFit, optional
        What was said before it; after a step nothing that came before counts.
    floor_ns : int
        The round trip when nothing waits.
    asymmetry_share : float
        See `fit_edge`.

    Returns
    -------
    EdgeFit
        With sigma and bound that take the excess in where the prior does not help.
    """
    excess_ns = fit.round_trip_min_ns - floor_ns
    allowance_ns = asymmetry_share * floor_ns / 2
    if excess_ns <= noise_ns(fit) + asymmetry_share * floor_ns:  # half of it is allowed for already
        return fit if fit.wait_ns <= _sigma_of_noise(fit) else _weighed(fit, prior, max(excess_ns, 0) / 2, allowance_ns)
    half_ns = excess_ns / 2
    # The next window is held against the line without its queue, or the same queue would look like a step.
    fit = replace(fit, floor_ns=floor_ns)
    if prior is None or fit.stepped:
        return _open(fit, half_ns, allowance_ns)
    expected_ns = prior.at(fit.epoch_ns) - fit.offset_ns
    moved_ns = min(max(expected_ns, -half_ns), half_ns)
    past_ns = prior.sigma_at(fit.epoch_ns)
    apart_s = abs(fit.epoch_ns - prior.epoch_ns) * 1e-9
    return replace(
        _open(fit, min(SIGMAS * past_ns, half_ns), allowance_ns),
        offset_ns=fit.offset_ns + round(moved_ns),
        drift_ppb=prior.drift_at(fit.epoch_ns),
        carried=True,
        drift_sigma_ppb=math.hypot(prior.drift_sigma_ppb, prior.wander_ppb_per_s * apart_s),
    )


def _weighed(fit: EdgeFit, prior: EdgeFit | None, half_ns: float, allowance_ns: float) -> EdgeFit:
    """A line that may run through queued probes, weighed against the earlier line."""
    sure_ns = _sigma_of_noise(fit)
    wait_ns = min(fit.wait_ns, half_ns + sure_ns)  # no more waited than the round trip shows
    offset_ns = fit.offset_ns
    if prior is not None and not fit.stepped:
        most_ns = half_ns + 2 * sure_ns
        past_ns = prior.sigma_at(fit.epoch_ns)
        trust = wait_ns**2 / (wait_ns**2 + past_ns**2)
        offset_ns += round(trust * min(max(prior.at(fit.epoch_ns) - fit.offset_ns, -most_ns), most_ns))
        # Windows overlap, so both may err alike: their errors add up.
        wait_ns = (1 - trust) * wait_ns + trust * past_ns
    spread_ns = math.hypot(sure_ns, wait_ns)
    return replace(
        fit,
        offset_ns=offset_ns,
        sigma_ns=min(fit.sigma_ns, spread_ns),
        wait_ns=wait_ns,
        found=1.0,
        bound_ns=math.ceil(SIGMAS * spread_ns + allowance_ns),
    )
