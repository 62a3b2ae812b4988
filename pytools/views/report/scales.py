"""From values to places on a chart, and where ticks stand: time, logarithmic and linear. Pure; times in nanoseconds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from pytools.units import SECOND

WIDTH: Final = 880.0
STEPS_S: Final = (  # between ticks; page.js has the same row
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000, 31536000),
)
_TICKS: Final = 8
_LOWEST: Final = 1.0
_LEAST: Final = 1e-9  # what is no larger is nothing


@dataclass(frozen=True, slots=True)
class Span:
    since_ns: int
    until_ns: int

    @property
    def length_ns(self) -> int:
        """How long it is; never 0."""
        return max(1, self.until_ns - self.since_ns)

    def x(self, unix_ns: int) -> float:
        """Where a time is."""
        return (unix_ns - self.since_ns) / self.length_ns * WIDTH

    def ms(self, unix_ns: int) -> int:
        """A time as scripts have it: milliseconds since the beginning."""
        return (unix_ns - self.since_ns) // 1_000_000

    @property
    def dated(self) -> bool:
        """Whether a time of day alone does not say when: it lies on more than one day of UTC."""
        return moment(self.since_ns).date() != moment(self.until_ns).date()

    def clock(self, unix_ns: int, digits: int = 0) -> str:
        """A time within it in UTC."""
        words = moment(unix_ns).strftime("%m-%d %H:%M:%S" if self.dated else "%H:%M:%S")
        return words + (f".{unix_ns % SECOND:09d}"[: digits + 1] if digits else "")

    def ticks(self) -> list[int]:
        """Round times to write below the chart."""
        step_s = next((step for step in STEPS_S if self.length_ns / _TICKS <= step * SECOND), STEPS_S[-1])
        step_ns = round(step_s * SECOND)
        first = -(-self.since_ns // step_ns) * step_ns
        return [at for number in range(2 * _TICKS + 1) if (at := first + number * step_ns) <= self.until_ns]


@dataclass(frozen=True, slots=True)
class Scale:
    height: float
    low: float
    high: float
    logarithmic: bool
    ticks: tuple[float, ...]

    def y(self, value: float) -> float:
        """Where a value is; what lies outside is put on the edge."""
        share = self._share(value)
        return self.height * (1 - min(1.0, max(0.0, share)))

    def _share(self, value: float) -> float:
        if not self.logarithmic:
            return (value - self.low) / (self.high - self.low)
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)


def logarithmic(values: Iterable[float], height: float) -> Scale:
    """For delays, which are microseconds and tens of milliseconds on one chart; zero stands on the lower edge."""
    positive = [value for value in values if _LOWEST <= value < math.inf]
    low, high = (min(positive), max(positive)) if positive else (100.0, 1000.0)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high) + 1e-9)
    last = max(last, first + 1)
    every = 1 + (last - first) // 7
    ticks = tuple(10.0**power for power in range(first, last + 1, every))
    return Scale(height, 10.0**first, 10.0**last, True, ticks)


def linear(values: Iterable[float], height: float, whole: bool = False) -> Scale:
    most = max((value for value in values if _LEAST < value < math.inf), default=1.0)
    step = _round_step(most / 4)
    step = max(1.0, step) if whole else step
    count = max(1, math.ceil(most / step - 1e-9))
    return Scale(height, 0.0, count * step, False, tuple(number * step for number in range(count + 1)))


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * each for each in (1, 2, 5, 10) if power * each >= least * (1 - 1e-9))


def moment(unix_ns: int) -> datetime:
    """A time as a date in UTC, to the second."""
    return datetime.fromtimestamp(unix_ns // SECOND, UTC)


def slots(span: Span, count: int) -> list[tuple[int, int]]:
    edges = [span.since_ns + span.length_ns * number // count for number in range(count + 1)]
    return list(itertools.pairwise(edges))
