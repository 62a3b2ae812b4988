"""The corridor between two clocks: no delay is negative, so each direction bounds the offset from one side.

Pure functions of float64: times in seconds from a common origin, values in nanoseconds less a common offset, drift in
nanoseconds per second. The linear programme of one edge (the highest line below all forward differences and the one
below all reverse differences, both with one slope) has a single free variable once the slope is given, and is
concave in it: the tangents at two slopes meet where to look next, and a handful of looks solve it exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LOOKS: Final = 60
_CLOSE_NS: Final = 0.01


@dataclass(frozen=True)
class Corridor:
    """The lines below the forward and the reverse differences."""

    drift: float
    forward_ns: float  # at time zero: delay + offset
    reverse_ns: float  # at time zero: delay - offset

    @property
    def width_ns(self) -> float:
        """The round trip that the lines leave: the sum of the smallest delays."""
        return self.forward_ns + self.reverse_ns


def corridor(
    forward_s: Floats, forward_ns: Floats, reverse_s: Floats, reverse_ns: Floats, low: float, high: float, start: float
) -> Corridor:
    """The widest corridor whose drift lies between `low` and `high`; `start` is the drift to look at first."""

    def look(drift: float) -> tuple[float, float]:
        above = forward_ns - drift * forward_s
        below = reverse_ns + drift * reverse_s
        first, second = above.argmin(), below.argmin()
        return float(above[first] + below[second]), float(reverse_s[second] - forward_s[first])

    drift = _highest(look, low, high, start)
    return Corridor(drift, float((forward_ns - drift * forward_s).min()), float((reverse_ns + drift * reverse_s).min()))


def ceiling(times_s: Floats, values_ns: Floats, low: float, high: float, start: float) -> float:
    """How high a line below all values can lie at time zero, its slope between `low` and `high`.

    The lower convex hull of the values at time zero, unless its slope there is out of range.
    """

    def look(slope: float) -> tuple[float, float]:
        below = values_ns - slope * times_s
        first = below.argmin()
        return float(below[first]), -float(times_s[first])

    return look(_highest(look, low, high, start))[0]


def _highest(look: Callable[[float], tuple[float, float]], low: float, high: float, start: float) -> float:
    """Where a concave function, given with its slope, is highest (Kelley's cutting planes in one dimension)."""
    low_value, low_slope = look(low)
    if low_slope <= 0:
        return low
    high_value, high_slope = look(high)
    if high_slope >= 0:
        return high
    best, best_value = (low, low_value) if low_value >= high_value else (high, high_value)
    place = min(max(start, low), high)
    for _ in range(_LOOKS):
        value, slope = look(place)
        if value > best_value:
            best, best_value = place, value
        if slope > 0:
            low, low_value, low_slope = place, value, slope
        elif slope < 0:
            high, high_value, high_slope = place, value, slope
        else:
            return place
        place = (high_value - low_value + low_slope * low - high_slope * high) / (low_slope - high_slope)
        if low_value + low_slope * (place - low) - best_value < _CLOSE_NS:
            break
    return best
