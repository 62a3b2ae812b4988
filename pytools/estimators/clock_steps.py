"""Steps of a clock among probes: queueing only ever lengthens delays, so a probe that is far too early is no queue.

Pure functions of float64: seconds and nanoseconds from a common origin, as in `corridor`. A step moves forward and
reverse differences in opposite directions and leaves their sum alone; queueing moves either one up.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pytools.estimators.corridor import Corridor, Floats, corridor

Pair = tuple[Floats, Floats]  # forward and reverse

BLATANT_NS: Final = 1000.0  # a round trip this far below zero is no wrong stamp
_SAME: Final = 6.0  # round trips are one and the same within so many times the noise,
_SMALL: Final = 12.0  # and a step is one from so many times,
_SMALL_SHARE: Final = 0.1  # or from this share of the round trip


def impossible(found: Corridor) -> bool:
    """Whether no line fits: some delays would be negative."""
    return found.width_ns < -BLATANT_NS


def stray(times_s: Pair, values_ns: Pair, limit: float, found: Corridor) -> tuple[int, int] | None:
    """The one probe without which a line fits: (direction, place). None when there is no such one.

    One probe is no step: two probes of the new time are asked for before a clock is said to have been stepped.
    """
    for direction, sign, edge in ((0, 1.0, found.forward_ns), (1, -1.0, found.reverse_ns)):
        if len(times_s[direction]) < 2:
            continue
        place = int((values_ns[direction] - sign * found.drift * times_s[direction] - edge).argmin())
        times, values = list(times_s), list(values_ns)
        times[direction] = np.delete(times[direction], place)
        values[direction] = np.delete(values[direction], place)
        if not impossible(corridor(times[0], values[0], times[1], values[1], -limit, limit, 0.0)):
            return direction, place
    return None


def consistent_since(times_s: Pair, values_ns: Pair, limit: float) -> float:
    """The earliest time from which on a line fits all probes: the fewer probes, the more lines, so halving finds it."""
    moments = np.unique(np.concatenate(times_s))
    low, high = 0, len(moments) - 1
    while low < high:
        middle = (low + high) // 2
        kept = [times >= moments[middle] for times in times_s]
        if kept[0].any() and kept[1].any():
            times = [times[mask] for times, mask in zip(times_s, kept, strict=True)]
            values = [values[mask] for values, mask in zip(values_ns, kept, strict=True)]
            fits = not impossible(corridor(times[0], values[0], times[1], values[1], -limit, limit, 0.0))
        else:
            fits = True
        low, high = (low, middle) if fits else (middle + 1, high)
    return float(moments[low])


def small_step(times_s: Pair, values_ns: Pair, drift: float, round_trip_ns: float, noise_ns: float) -> float | None:
    """When a step happened that leaves no delay negative, given drift and round trip from an earlier window.

    The smallest differences before and after a moment tell, if both make up the known round trip: then neither has
    waited. The smallest but one stands for the smallest, for fear of a wrong stamp.

    Returns
    -------
    float or None
        The moment at which the step is plainest.
    """
    if _leaves(times_s, values_ns, drift) > round_trip_ns + _SAME * noise_ns - _least_step(round_trip_ns, noise_ns):
        return None
    splits = np.sort(np.concatenate(times_s))
    before, after = np.empty((2, len(splits))), np.empty((2, len(splits)))
    for direction, sign in ((0, -1.0), (1, 1.0)):
        order = np.argsort(times_s[direction], kind="stable")
        times = times_s[direction][order]
        values = values_ns[direction][order] + sign * drift * times
        places = np.searchsorted(times, splits)
        before[direction] = _second_smallest_before(values, places)
        after[direction] = _second_smallest_before(values[::-1], len(values) - places)
    known = np.isfinite(before).all(axis=0) & np.isfinite(after).all(axis=0)
    before, after = np.where(known, before, 0.0), np.where(known, after, 0.0)
    moved = (after[0] - before[0] - after[1] + before[1]) / 2
    excess = np.stack([before.sum(axis=0), after.sum(axis=0)]) - round_trip_ns
    # The smallest of many lie well below the middle of the unqueued ones.
    unqueued = known & ((excess < _SAME * noise_ns) & (excess > -2 * _SAME * noise_ns)).all(axis=0)
    size = np.where(unqueued, np.abs(moved), 0.0)
    best = int(size.argmax())
    return float(splits[best]) if is_step(size[best], 0.0, round_trip_ns, noise_ns) else None


def _leaves(times_s: Pair, values_ns: Pair, drift: float) -> float:
    """The round trip that lines of this drift leave: less than the known one by what the clock was stepped by."""
    above = values_ns[0] - drift * times_s[0]
    below = values_ns[1] + drift * times_s[1]
    return float(above.min() + below.min())


def _least_step(round_trip_ns: float, noise_ns: float) -> float:
    return max(_SMALL * noise_ns, _SMALL_SHARE * round_trip_ns)


def is_step(moved_ns: float, round_trip_grew_ns: float, round_trip_ns: float, noise_ns: float) -> bool:
    """Whether an offset that moved, and a round trip that did not, are a step and not a queue."""
    return abs(round_trip_grew_ns) < _SAME * noise_ns and abs(moved_ns) > _least_step(round_trip_ns, noise_ns)


def _second_smallest_before(values: Floats, places: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Floats:
    """The smallest but one of the first so many values; infinite where there are fewer than two."""
    smallest = np.minimum.accumulate(values)
    loser = np.maximum(values[1:], smallest[:-1])  # of each value and the smallest before it
    second = np.concatenate([[np.inf, np.inf], np.minimum.accumulate(loser)]) if len(values) > 1 else np.full(2, np.inf)
    return second[np.minimum(places, len(second) - 1)]
