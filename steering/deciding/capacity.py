"""What each interface was measured to carry, as far as this host can tell. Pure.

While a queue stands on a path, what we get through is our share of its capacity; without one it is a lower bound, and
the speed that the driver tells an upper one. Rates are bits per second, times CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pytools.signals import Link
from steering.plan import Group

_REMEMBERED_NS: Final = 60_000_000_000
_LEAST_SHARE: Final = 0.01


@dataclass(frozen=True, slots=True)
class Estimate:
    carries_bps: float  # with a queue: what we get; without: the speed, or the most that was seen
    load_bps: float  # what it carries now
    at_ns: int
    queued: bool  # whether a queue stood when it was measured
    seen_bps: float = 0.0  # the most that it carried within the last minute
    seen_ns: int = 0


def updated(known: Estimate | None, link: Link, queued: bool) -> Estimate | None:
    """The estimate after one more window of an interface's counters; None while nothing was measured."""
    if link.window_ns <= 0 or (known is not None and link.at_ns <= known.at_ns):
        return known
    load = 8e9 * link.window.sent_bytes / link.window_ns
    if queued:
        return Estimate(load, load, link.at_ns, True, load, link.at_ns)
    speed = 1e6 * link.speed_mbps if link.speed_mbps else 0.0
    seen, seen_ns = load, link.at_ns
    if known is not None and known.seen_bps > load and link.at_ns - known.seen_ns < _REMEMBERED_NS:
        seen, seen_ns = known.seen_bps, known.seen_ns
    return Estimate(max(speed, seen), load, link.at_ns, False, seen, seen_ns)


def shares_by(
    by: Literal["share", "capacity", "headroom"], group: Group, estimates: Mapping[str, Estimate]
) -> dict[int, float] | None:
    """Shares of the original weights that make the weights proportional to what each member carries, or has to spare.

    The largest is 1, none is below 0.01; all are 1 when none has anything to spare. None when one of the members was
    never measured. A member with a queue has nothing to spare, and one that lets nothing through carries nothing.
    """
    found: dict[int, float] = {}
    for member in group.members:
        estimate = estimates.get(member.interface)
        if estimate is None or (estimate.carries_bps <= 0 and not estimate.queued):
            return None
        spare = 0.0 if estimate.queued else estimate.carries_bps - estimate.load_bps
        carries = spare if by == "headroom" else estimate.carries_bps
        found[member.nexthop_id] = carries / group.nominal[member.nexthop_id]
    largest = max(found.values())
    if largest <= 0:
        return dict.fromkeys(found, 1.0)
    return {member: max(_LEAST_SHARE, value / largest) for member, value in found.items()}
