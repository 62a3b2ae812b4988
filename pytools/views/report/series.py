"""What becomes of many values over time: a bounded number of points, with every minimum and maximum among them. Pure.

Nobody knows beforehand how long a recording is, so time is cut into slots that double whenever there are too many of
them: memory is bounded, and two neighbours that become one keep the smaller minimum and the larger maximum. Times are
CLOCK_REALTIME nanoseconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, Generic, NamedTuple, TypeVar

SLOTS: Final = 300
RUNS: Final = 300
_NARROWEST_NS: Final = 1_000_000
_MISSING: Final = 1.7  # so many steps without a value, and the line is broken: one was left out
_MANTISSA_BITS: Final = 7

Slot = TypeVar("Slot")


class Point(NamedTuple):
    """One value, its error, and when."""

    unix_ns: int
    value: float
    bound: float | None = None


class Measured(NamedTuple):
    value: float
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A series to be drawn: points in the order of time, broken where nothing is known."""

    pieces: tuple[tuple[Point, ...], ...] = ()
    slot_ns: int = _NARROWEST_NS  # of each so long stretch the smallest and the largest value are kept
    step_ns: int = 0  # how far apart values are as long as none is missing
    values: int = 0  # how many there were
    unknown: int = 0  # how many more were not known

    @property
    def points(self) -> list[Point]:
        return [point for piece in self.pieces for point in piece]


def _merge(slots: dict[int, Slot], number: int, new: Slot, merged: Callable[[Slot, Slot], Slot]) -> None:
    slots[number] = merged(slots[number], new) if number in slots else new


class _Slots(Generic[Slot]):
    """Slots by number, merged two by two whenever there are more than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit, self.width_ns = limit, _NARROWEST_NS
        self.slots: dict[int, Slot] = {}

    def put(self, unix_ns: int, new: Slot) -> None:
        _merge(self.slots, unix_ns // self.width_ns, new, self.merged)
        if len(self.slots) > self.limit:
            self.narrow(self.limit)

    def narrow(self, limit: int) -> None:
        """Make slots wider until there are no more than so many."""
        doublings = 0
        while len({number >> doublings for number in self.slots}) > max(1, limit):
            doublings += 1
        if not doublings:
            return
        wider: dict[int, Slot] = {}
        for number, slot in self.slots.items():
            _merge(wider, number >> doublings, slot, self.merged)
        self.slots, self.width_ns = wider, self.width_ns << doublings

    def merged(self, one: Slot, other: Slot) -> Slot:
        raise NotImplementedError


_Ends = tuple[Point, Point] | None  # smallest and largest; None: only unknown ones


def _by_value(point: Point) -> float:
    return point.value


class Series(_Slots[_Ends]):
    """Values over time, in any order: of each slot the smallest and the largest."""

    def __init__(self, limit: int = SLOTS) -> None:
        super().__init__(limit)
        self._values = self._unknown = 0

    def merged(self, one: _Ends, other: _Ends) -> _Ends:
        if one is None or other is None:
            return other if one is None else one
        return min(one[0], other[0], key=_by_value), max(one[1], other[1], key=_by_value)

    def add(self, unix_ns: int, value: float | None, bound: float | None = None) -> None:
        """One more; None is not known."""
        if value is None:
            self._unknown += 1
            self.put(unix_ns, None)
            return
        self._values += 1
        point = Point(unix_ns, value, bound)
        self.put(unix_ns, (point, point))

    def line(self, step_ns: int, limit: int = SLOTS) -> Line:
        """What is to be drawn.

        Parameters
        ----------
        step_ns : int
            How far apart values are as long as none is missing.
        limit : int
            At most so many slots; the series itself stays coarser from then on.
        """
        self.narrow(limit)
        pieces: list[list[Point]] = []
        before = None  # number of the last slot with values
        for number, ends in sorted(self.slots.items(), key=itemgetter(0)):
            if ends is None:
                before = None
                continue
            points = sorted(set(ends))
            follows = before is not None and (
                number == before + 1 or points[0].unix_ns - pieces[-1][-1].unix_ns <= _MISSING * step_ns
            )
            if follows:
                pieces[-1] += points
            else:
                pieces.append(points)
            before = number
        return Line(tuple(map(tuple, pieces)), self.width_ns, step_ns, self._values, self._unknown)


@dataclass(frozen=True, slots=True)
class Bars:
    """Counts by kind over time: of each stretch of `slot_ns` the sum."""

    slots: tuple[tuple[int, Mapping[str, int]], ...] = ()  # (beginning, counts)
    slot_ns: int = _NARROWEST_NS

    @property
    def totals(self) -> dict[str, int]:
        return _summed(counts for _, counts in self.slots)


class Sums(_Slots[Mapping[str, int]]):
    """Counts by kind over time; nothing is lost where slots become one."""

    def __init__(self, limit: int = SLOTS) -> None:
        super().__init__(limit)

    def add(self, unix_ns: int, counts: Mapping[str, int]) -> None:
        counted = {kind: count for kind, count in counts.items() if count}
        if counted:
            self.put(unix_ns, counted)

    def merged(self, one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
        return _summed((one, other))

    def bars(self, limit: int = SLOTS) -> Bars:
        self.narrow(limit)
        return Bars(
            tuple((number * self.width_ns, counts) for number, counts in sorted(self.slots.items())), self.width_ns
        )


def _summed(several: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for counts in several:
        for kind, count in counts.items():
            found[kind] = found.get(kind, 0) + count
    return found


@dataclass(slots=True)
class Spread:
    """How values are distributed, in bounded memory: a quantile is a measured value, at most 1.6 % too large."""

    count: int = 0
    _cells: dict[tuple[int, int], tuple[int, Measured]] = field(default_factory=dict)

    def add(self, value: int, bound: int | None = None) -> None:
        """One more value, not below zero."""
        shift = max(0, value.bit_length() - _MANTISSA_BITS)
        cell = (shift, value >> shift)
        count, most = self._cells.get(cell, (0, None))
        if most is None or value > most.value:
            most = Measured(value, bound)
        self._cells[cell] = count + 1, most
        self.count += 1

    def quantile(self, share: float) -> Measured | None:
        """By nearest rank; None without values."""
        left = max(1, math.ceil(share * self.count))
        for cell in sorted(self._cells):
            count, most = self._cells[cell]
            left -= count
            if left <= 0:
                return most
        return None


# ---- states over time: a bounded number of stretches, the oldest go first, and are counted ----


class Run(NamedTuple):
    word: str
    began_ns: int
    ended_ns: int
    note: str


@dataclass(frozen=True, slots=True)
class Bands:
    """States in the order of time; between two of them nothing may be known."""

    runs: tuple[Run, ...] = ()
    forgotten: int = 0  # older ones that found no room

    def lasted_ns(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for run in self.runs:
            found[run.word] = found.get(run.word, 0) + run.ended_ns - run.began_ns
        return found


class Runs:
    """Collects states.

    Parameters
    ----------
    silence_ns : int
        A state holds so long after it was last said, unless another comes before.
    limit : int
        How many stretches are kept.
    """

    def __init__(self, silence_ns: int, limit: int = RUNS) -> None:
        self._silence_ns, self._limit = silence_ns, limit
        self._runs: deque[Run] = deque()
        self._said_ns = 0
        self._forgotten = 0

    def add(self, unix_ns: int, word: str, note: str = "") -> None:
        """What is said now; what comes later than something newer is left out."""
        if unix_ns < self._said_ns:
            return
        last = self._runs[-1] if self._runs else None
        if last is not None:
            reaches_ns = min(unix_ns, self._said_ns + self._silence_ns)
            self._runs[-1] = last = last._replace(ended_ns=reaches_ns)
        self._said_ns = unix_ns
        if last is not None and last.word == word and last.ended_ns == unix_ns:
            return
        self._runs.append(Run(word, unix_ns, unix_ns, note))
        if len(self._runs) > self._limit:
            self._runs.popleft()
            self._forgotten += 1

    def bands(self, until_ns: int) -> Bands:
        """All of them, the last one up to then at most."""
        found = list(self._runs)
        if found:
            ended_ns = max(found[-1].began_ns, min(until_ns, self._said_ns + self._silence_ns))
            found[-1] = found[-1]._replace(ended_ns=ended_ns)
        return Bands(tuple(found), self._forgotten)
