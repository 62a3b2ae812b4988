"""What a rail carries to one destination, as far as our own connections over it tell. Pure.

While the probes of a path find a queue, and a connection over it would take more, what its connections get delivered
together is our share of what it carries. Else that is only a lower bound; then the last measurement with a queue
stands for a minute. A rail that was not full in that time is taken to be like the best of its siblings that were, or,
if none was, to carry the largest sum that any had: rails are alike until one shows that it is not. Each estimate says
how it was come by and what its error is. Rates are bits per second, times CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from pytools.signals import Path, PathDelay
from pytools.units import MS
from steering.flows.maxmin import INFINITE
from steering.flows.rates import FlowRate

Place = tuple[str, str]  # destination, interface

QUEUE_NS: Final = 200_000  # a median probe that waited so long, beyond its error, met a queue
REMEMBERED_NS: Final = 60_000 * MS
_QUEUE_LIVES_NS: Final = 300 * MS  # a report of a queue that is older says nothing
_ERRORS: Final = {"measured": 0.05, "remembered": 0.1, "assumed": 0.2}
_STEADY: Final = 0.25  # a sum that changed by a larger share between two looks is still on its way

How = Literal["measured", "remembered", "assumed"]


@dataclass(frozen=True, slots=True)
class RailRate:
    """What one rail carries to one destination."""

    delivered_bps: float  # of ours, now
    capacity_bps: float
    error_bps: float
    how: How
    queued: bool
    steady: bool  # what is delivered did not change much from look to look
    looked_ns: int  # of the newest look at each of its connections, the oldest; 0 when it has none


@dataclass(frozen=True, slots=True)
class _Memory:
    queued: bool = False
    queue_ns: int = 0  # when that was said
    window_ns: int = 0
    full_bps: float = 0.0  # delivered while there was a queue, at last
    full_ns: int = 0
    largest_bps: float = 0.0
    largest_ns: int = 0


class RailRates:
    """All rails, by destination and interface."""

    def __init__(self) -> None:
        self._memory: dict[Place, _Memory] = {}

    def take(self, signal: PathDelay) -> None:
        """Note whether there is a queue; of a path that is measured over several windows the shortest counts."""
        place = place_of(signal.path)
        known = self._memory.get(place, _Memory())
        if known.window_ns and signal.window_ns > known.window_ns and signal.at_ns - known.queue_ns < _QUEUE_LIVES_NS:
            return
        queued = _queued(signal)
        if queued is not None:
            self._memory[place] = replace(known, queued=queued, queue_ns=signal.at_ns, window_ns=signal.window_ns)

    def forget(self, place: Place) -> None:
        """What was measured is not to count any more: the rail may have recovered, and only a try can tell."""
        known = self._memory.get(place)
        if known is not None:
            self._memory[place] = replace(known, full_bps=0.0, full_ns=0)

    def estimate(self, flows: Iterable[FlowRate], places: Iterable[Place], now: int) -> dict[Place, RailRate]:
        """What these rails carry, all of one destination, from the rates of all connections."""
        wanted = list(places)
        sums = dict.fromkeys(wanted, (0.0, 0.0, 0.0))
        wanting: set[Place] = set()
        looked: dict[Place, int] = {}
        for flow in flows:
            place = (flow.path.destination, flow.interface) if flow.path else None
            if place in sums:
                rate, recent, before = sums[place]
                sums[place] = (rate + flow.rate_bps, recent + flow.recent_bps, before + flow.before_bps)
                looked[place] = min(flow.looked_ns, looked.get(place, flow.looked_ns))
                if flow.demand_bps == INFINITE:
                    wanting.add(place)
        for place, (rate, _, _) in sums.items():
            self._remember(place, rate, place in wanting, now)
        full = [known.full_bps for place in wanted if now - (known := self._memory[place]).full_ns <= REMEMBERED_NS]
        like = max(full) if any(full) else max((self._largest(place, now) for place in wanted), default=0.0)
        return {place: self._estimate(place, *sums[place], like, looked.get(place, 0), now) for place in wanted}

    def _remember(self, place: Place, rate: float, wanting: bool, now: int) -> None:
        known = self._memory.get(place, _Memory())
        more = known.full_ns and rate > known.full_bps  # than it was thought to carry
        if more or (wanting and self._is_queued(known, now)):
            known = replace(known, full_bps=rate, full_ns=now)
        if rate >= known.largest_bps or now - known.largest_ns > REMEMBERED_NS:
            known = replace(known, largest_bps=rate, largest_ns=now)
        self._memory[place] = known

    def _largest(self, place: Place, now: int) -> float:
        known = self._memory.get(place, _Memory())
        return known.largest_bps if now - known.largest_ns <= REMEMBERED_NS else 0.0

    def _estimate(
        self, place: Place, rate: float, recent: float, before: float, like: float, looked_ns: int, now: int
    ) -> RailRate:
        known = self._memory[place]
        queued = self._is_queued(known, now)
        how: How = "assumed"
        capacity = max(rate, like)
        if known.full_ns == now:
            how, capacity = "measured", known.full_bps
        elif known.full_ns and now - known.full_ns <= REMEMBERED_NS:
            how, capacity = "remembered", known.full_bps
        steady = abs(recent - before) <= _STEADY * max(recent, before)
        return RailRate(rate, capacity, _ERRORS[how] * capacity, how, queued, steady, looked_ns)

    @staticmethod
    def _is_queued(known: _Memory, now: int) -> bool:
        return known.queued and now - known.queue_ns <= _QUEUE_LIVES_NS


def place_of(path: Path) -> Place:
    """Where the connections of a path share what it carries: families do."""
    return path.destination, path.interface


def _queued(signal: PathDelay) -> bool | None:
    """Whether a queue stands; None when the signal does not say."""
    if signal.overtaken_forward_p50_ns is not None and signal.overtaken_forward_p50_ns > QUEUE_NS:
        return True
    delay = signal.forward
    if not delay.samples or delay.queueing_p50_ns is None or delay.queueing_bound_ns is None:
        return None
    return delay.queueing_p50_ns - delay.queueing_bound_ns > QUEUE_NS
