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

from pytools.estimators.clocks import EdgeFit
from pytools.estimators.offsets import SIGMAS, WANDER_PPB_PER_S

FLOOR_S: Final = 60.0
_STEADY_WINDOWS: Final = 6
_NOISE_SIGMAS: Final = 3.0


class Floor:
    """The round trip of one path when nothing waits; times are nanoseconds of any one clock."""

    def __init__(self, span_ns: int = int(FLOOR_S * 1e9)) -> None:
        self._span_ns = span_ns
        self._kept: deque[tuple[int, int]] = deque()  # time, round trip: both ascending
        self._recent: deque[int] = deque(maxlen=_STEADY_WINDOWS)

    @property
    def settled(self) -> bool:
        """Whether enough windows have been seen to call the smallest round trip one in which nothing waited."""
        return len(self._recent) == _STEADY_WINDOWS

    def add(self, at_ns: int, round_trip_ns: int, tolerance_ns: float) -> int:
        """Take one window's smallest round trip into account.

        Parameters
        ----------
        tolerance_ns : float
            Round trips that differ by no more are the same.

        Returns
        -------
        int
            The smallest of the recent past, or of the last few windows where these are all the same.
        """
        self._recent.append(round_trip_ns)
        if len(self._recent) == _STEADY_WINDOWS and max(self._recent) - min(self._recent) <= tolerance_ns:
            self._kept.clear()
            round_trip_ns = min(self._recent)
        while self._kept and self._kept[-1][1] >= round_trip_ns:
            self._kept.pop()
        self._kept.append((at_ns, round_trip_ns))
        while self._kept[0][0] < at_ns - self._span_ns:
            self._kept.popleft()
        return self._kept[0][1]


def tolerance_ns(fit: EdgeFit, asymmetry_share: float) -> float:
    """By how much the round trips of two windows differ without meaning anything."""
    return 2 * _NOISE_SIGMAS * fit.sigma_ns + asymmetry_share * fit.round_trip_min_ns


def doubted(fit: EdgeFit) -> EdgeFit:
    """A window's line while it is not known how long the round trip is when nothing waits: half of it is open."""
    half_ns = fit.round_trip_min_ns / 2
    return replace(
        fit,
        sigma_ns=math.hypot(fit.sigma_ns, half_ns / SIGMAS),
        bound_ns=math.ceil(SIGMAS * fit.sigma_ns + half_ns),
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
    if excess_ns <= tolerance_ns(fit, asymmetry_share):  # half of it is allowed for already
        return fit
    half_ns = excess_ns / 2
    if prior is None or fit.stepped:
        return replace(
            fit,
            sigma_ns=math.hypot(fit.sigma_ns, half_ns / SIGMAS),
            bound_ns=math.ceil(SIGMAS * fit.sigma_ns + half_ns + allowance_ns),
        )
    expected_ns = prior.at(fit.epoch_ns) - fit.offset_ns
    moved_ns = min(max(expected_ns, -half_ns), half_ns)
    sigma_ns = math.hypot(fit.sigma_ns, min(prior.sigma_at(fit.epoch_ns), half_ns))
    apart_s = abs(fit.epoch_ns - prior.epoch_ns) * 1e-9
    return replace(
        fit,
        offset_ns=fit.offset_ns + round(moved_ns),
        drift_ppb=prior.drift_ppb,
        sigma_ns=sigma_ns,
        drift_sigma_ppb=math.hypot(prior.drift_sigma_ppb, WANDER_PPB_PER_S * apart_s),
        bound_ns=math.ceil(SIGMAS * sigma_ns + allowance_ns),
    )
