"""What is known of a peer's clock against ours at one moment, as a line in our own time. Pure; int64 nanoseconds.

Offset of the peer = its clock minus ours. The line is good near its epoch; `aged` says what it is good to later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import Times
from pytools.signals import ClockState

SIGMAS: Final = 4.5  # how many standard deviations a bound takes in
WANDER_PPB_PER_S: Final = (
    20.0  # stated allowance, the least: two oscillators' rates change against each other no faster
)
WANDER_SIGMAS: Final = 3.0  # a wander stands for so many standard deviations
FREE_PPM: Final = 100.0  # stated allowance without any assumption: 50 ppm for each of the two
HOLDOVER_AGE_NS: Final = 4_000_000_000  # a line older than this is no longer called synchronised
UNBOUNDED_NS: Final = 2**61  # a hard bound so large means that there is none
FREE_BOUND_NS: Final = 1_000_000  # a line that is good to no more than this says nothing any more


@dataclass(frozen=True)
class Line:
    """A clock minus another: `offset_ns` at the epoch, growing by `drift_ppb` ns a second."""

    epoch_ns: int  # where offset and drift are known independently of each other
    offset_ns: int
    drift_ppb: float
    sigma_ns: float  # standard deviation of the offset at the epoch, by statistics alone: what its weight rests on
    drift_sigma_ppb: float
    bound_ns: int  # of the offset at the epoch: statistics and the stated allowance for asymmetry

    @property
    def line(self) -> dict[str, Any]:
        """These figures by name, as the records of clocks have them."""
        return {figure.name: getattr(self, figure.name) for figure in fields(Line)}


@dataclass(frozen=True)
class Offset(Line):
    """A peer's clock minus ours: `offset_ns` when ours read `epoch_ns`, growing by `drift_ppb` per second of ours.

    `hard_bound_ns` rests on no assumption but that no packet arrives before it was sent.
    """

    hard_bound_ns: int
    state: ClockState = "synchronised"
    wander_ppb_per_s: float = WANDER_PPB_PER_S  # as estimated: the drift changes no faster

    def at(self, ours_ns: Times | int) -> Times:
        """The offset when our clock read this; a line, so also beyond the window it comes from."""
        grown: Times = np.rint((ours_ns - self.epoch_ns) * (self.drift_ppb * 1e-9)).astype(np.int64)
        return self.offset_ns + grown

    def aged(self, ours_ns: int) -> Offset:
        """The same line as it is to be judged when our clock reads `ours_ns`.

        The bound grows by what is not known of the drift and by how much the drift may have changed since; the hard
        bound by what no pair of oscillators exceeds, and by the line's own drift, which may be wrong. Past
        HOLDOVER_AGE_NS the state is holdover, and free running once the bound says nothing any more.
        """
        age_s = max(0, ours_ns - self.epoch_ns) * 1e-9
        grown = (SIGMAS * self.drift_sigma_ppb + 0.5 * self.wander_ppb_per_s * age_s) * age_s
        bound_ns = self.bound_ns + math.ceil(grown)
        state: ClockState = "synchronised" if age_s * 1e9 <= HOLDOVER_AGE_NS else "holdover"
        if bound_ns > FREE_BOUND_NS:
            state = "free_running"
        sigma_ns = math.hypot(self.sigma_ns, self.drift_sigma_ppb * age_s)
        hard_ns = self.hard_bound_ns + math.ceil((FREE_PPM * 1000 + abs(self.drift_ppb)) * age_s)
        return replace(self, sigma_ns=sigma_ns, bound_ns=bound_ns, hard_bound_ns=hard_ns, state=state)


MEMORY_S: Final = 12.0  # drifts older than this no longer count
APART_S: Final = 2.0  # windows this far apart do not overlap
_SLACK_S: Final = 1e-3
_SIGNIFICANT: Final = 2.0  # standard deviations of what errors alone leave: less is no wander
_STATED_POWER: Final = WANDER_PPB_PER_S**2 / 2  # mean square of such a sinusoid


def wander(times_s: NDArray[np.float64], drifts_ppb: NDArray[np.float64], sigmas_ppb: NDArray[np.float64]) -> float:
    """How fast a rate changes at most, in ppb per second: the amplitude of a sinusoid of the same power.

    Parameters
    ----------
    times_s : ndarray
        When each drift was found, ascending.
    drifts_ppb, sigmas_ppb : ndarray
        Each drift and its standard deviation.

    Returns
    -------
    float
        Not below WANDER_PPB_PER_S; that where there are no two windows apart.
    """
    earlier = np.searchsorted(times_s, times_s - APART_S + _SLACK_S, side="right") - 1
    later = np.flatnonzero(earlier >= 0)
    if not len(later):
        return WANDER_PPB_PER_S
    earlier = earlier[later]
    apart_s = times_s[later] - times_s[earlier]
    changes = (drifts_ppb[later] - drifts_ppb[earlier]) / apart_s
    errors = (sigmas_ppb[later] ** 2 + sigmas_ppb[earlier] ** 2) / apart_s**2
    # The square of a change scatters by its own size, so the few vague drifts of a bad start would outweigh all others.
    weights = (errors + _STATED_POWER) ** -2
    power = float(weights @ (changes**2 - errors) / weights.sum())
    # Windows overlap: no more changes are independent than windows fit side by side.
    alike = len(later) / (1 + (times_s[-1] - times_s[later[0]]) / APART_S)
    scatter = math.sqrt(2 * alike) * float(np.linalg.norm(weights * errors) / weights.sum())
    if power <= max(_STATED_POWER, _SIGNIFICANT * scatter):
        return WANDER_PPB_PER_S
    return math.sqrt(2 * power)


def wander_between(one_ppb_per_s: float, other_ppb_per_s: float) -> float:
    """The wander of the drift between two hosts, from that of each: the stated one, and what each has beyond it."""
    return math.sqrt(one_ppb_per_s**2 + other_ppb_per_s**2 - WANDER_PPB_PER_S**2)
