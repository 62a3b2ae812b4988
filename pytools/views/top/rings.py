"""The last 40 seconds of every path: its windows as tuples, each with how many of its probes waited how long.

What is asked of them is a horizon: 2, 10 or 40 s back from now. Percentiles of windows cannot be put together: of the
50th the middle one of the windows is given, else the largest (a percentile of the whole horizon is no larger).
Counts add up exactly. Nanoseconds of CLOCK_MONOTONIC of the agent's host; bounded by time and by number. One thread.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Final, NamedTuple, TypeVar, get_args

from pytools.figures import FOLLOWED, OF_DIRECTIONS, QUEUEING, Figure, Measure
from pytools.signals import ClockState, Delay, Histogram, PathDelay, PathEcn, TcpPath
from pytools.units import SECOND
from pytools.views.model import is_shown

LONGEST_S: Final = 40
HORIZONS_S: Final = (2, 10, LONGEST_S)
WINDOWS: Final = 512  # of one path; more than that in 40 s: the horizon is as long as they reach
_STATES: Final = get_args(ClockState)  # the worst last
_QUEUEING: Final = FOLLOWED.index(Figure(QUEUEING, "p99"))


class Way(NamedTuple):
    figures: tuple[float | None, ...]  # of `FOLLOWED`
    bounds: tuple[int | None, ...]  # of `OF_DIRECTIONS`
    queued: Histogram | None


class Window(NamedTuple):
    at_ns: int
    window_ns: int
    clock: ClockState
    forward: Way
    reverse: Way
    received: int
    lost: int
    queueing_ns: float  # there, p99; 0 where it is not known


class TcpWindow(NamedTuple):
    """What TCP went through on a path in one window."""

    at_ns: int
    window_ns: int
    retransmitted: int
    timeouts: int
    delivered: int
    marked: int
    sent: int


def _way(delay: PathDelay, way: Delay) -> Way:
    return Way(
        tuple(each.value(delay, way) for each in FOLLOWED),
        tuple(each.bound(delay, way) for each in OF_DIRECTIONS),
        way.queueing_histogram,
    )


class Ring:
    __slots__ = ("marks", "tcp", "windows")

    def __init__(self) -> None:
        self.windows: deque[Window] = deque(maxlen=WINDOWS)
        self.tcp: deque[TcpWindow] = deque(maxlen=WINDOWS)
        self.marks: deque[tuple[int, int, int]] = deque(maxlen=WINDOWS)  # at_ns, packets, of these marked: back

    @property
    def at_ns(self) -> int:
        """When it was last heard of."""
        return self.windows[-1].at_ns if self.windows else 0

    def add(self, delay: PathDelay) -> None:
        """Take a window; an older one, the same again, or one shorter than those that people are shown is left out."""
        if self.windows:
            last = self.windows[-1]
            if delay.at_ns <= last.at_ns or not is_shown(delay.window_ns, last.window_ns, delay.at_ns - last.at_ns):
                return
        ways = _way(delay, delay.forward), _way(delay, delay.reverse)
        _forget(self.windows, delay.at_ns)
        # The first to be heard may be short ones: they go when a long one comes, which covers what they cover.
        while self.windows and self.windows[-1].window_ns < delay.window_ns:
            self.windows.pop()
        queueing_ns = ways[0].figures[_QUEUEING] or 0
        counts = delay.received, delay.lost
        self.windows.append(Window(delay.at_ns, delay.window_ns, delay.clock, *ways, *counts, queueing_ns))

    def add_tcp(self, row: TcpPath) -> None:
        if self.tcp and row.at_ns <= self.tcp[-1].at_ns:
            return
        _forget(self.tcp, row.at_ns)
        counts = row.retransmitted_segments, row.timeouts, row.delivered_segments, row.delivered_ce_segments
        self.tcp.append(TcpWindow(row.at_ns, row.window_ns, *counts, row.segments_out))

    def add_marks(self, row: PathEcn) -> None:
        """Take a window of marks on what came back."""
        if self.marks and row.at_ns <= self.marks[-1][0]:
            return
        while self.marks and self.marks[0][0] <= row.at_ns - LONGEST_S * SECOND:
            self.marks.popleft()
        self.marks.append((row.at_ns, row.packets, row.ce_packets))

    def copy(self) -> Ring:
        """What it is now, whatever comes."""
        other = Ring()
        other.windows.extend(self.windows)
        other.tcp.extend(self.tcp)
        other.marks.extend(self.marks)
        return other


def _forget(rows: deque[Window] | deque[TcpWindow], now_ns: int) -> None:
    """Without what is older than the longest horizon."""
    while rows and rows[0].at_ns <= now_ns - LONGEST_S * SECOND:
        rows.popleft()


@dataclass(frozen=True, slots=True)
class Direction:
    figures: Mapping[Figure, float | None] = field(default_factory=dict)
    bounds: Mapping[Measure, int | None] = field(default_factory=dict)  # the largest of the windows'


@dataclass(frozen=True, slots=True)
class Figures:
    """A path over a horizon."""

    forward: Direction = Direction()
    reverse: Direction = Direction()
    clock: ClockState | None = None  # the worst of the windows
    received: int = 0
    lost: int = 0
    windows: int = 0
    covered_ns: int = 0  # from the start of the first of these windows to the end of the last
    retransmitted_per_s: float | None = None
    timeouts: int | None = None
    marked_forward: float | None = None  # share of CE, of what TCP had acknowledged
    marked_reverse: float | None = None  # share of CE, of what came in

    @property
    def loss(self) -> float | None:
        """Share of the probes whose fate was settled that were lost."""
        settled = self.received + self.lost
        return self.lost / settled if settled else None


_Row = TypeVar("_Row", bound=tuple[object, ...])
_Value = TypeVar("_Value", int, float)
_at: Final = itemgetter(0)
# For all paths each frame: by place they are found without Python's help.
_received, _lost, _queueing_ns = (
    itemgetter(Window._fields.index(name)) for name in ("received", "lost", "queueing_ns")
)
_sent: Final = itemgetter(TcpWindow._fields.index("sent"))


def first_after(rows: deque[_Row], since_ns: int) -> int:
    """The place of the first that ended later; their times, which come first in each, ascend."""
    return bisect_right(rows, since_ns, key=_at)


def recent(rows: deque[_Row], since_ns: int) -> list[_Row]:
    """Those that ended later."""
    return list(islice(rows, first_after(rows, since_ns), None))


def _shown(ring: Ring, since_ns: int) -> list[Window]:
    """The windows that ended later, or, where none did, the last one."""
    return recent(ring.windows, since_ns) or list(ring.windows)[-1:]


def figures(ring: Ring, since_ns: int) -> Figures:
    """A path since then: of the windows that ended later, or, where none did, of the last one."""
    windows = _shown(ring, since_ns)
    tcp, marks = recent(ring.tcp, since_ns), recent(ring.marks, since_ns)
    tcp_ns = sum(each.window_ns for each in tcp)
    return Figures(
        forward=_over([each.forward for each in windows]),
        reverse=_over([each.reverse for each in windows]),
        clock=max((each.clock for each in windows), key=_STATES.index, default=None),
        received=sum(each.received for each in windows),
        lost=sum(each.lost for each in windows),
        windows=len(windows),
        covered_ns=windows[-1].at_ns - windows[0].at_ns + windows[0].window_ns if windows else 0,
        retransmitted_per_s=sum(each.retransmitted for each in tcp) * 1e9 / tcp_ns if tcp_ns else None,
        timeouts=sum(each.timeouts for each in tcp) if tcp else None,
        marked_forward=_share(sum(each.marked for each in tcp), sum(each.delivered for each in tcp)),
        marked_reverse=_share(sum(each[2] for each in marks), sum(each[1] for each in marks)),
    )


def segments(ring: Ring, since_ns: int) -> int:
    """TCP segments that left by a path since then."""
    return sum(map(_sent, recent(ring.tcp, since_ns)))


def trouble(ring: Ring, since_ns: int) -> tuple[float, float]:
    """Of the same: the share of probes that were lost, and the largest queueing there; what paths are ranked by."""
    windows = _shown(ring, since_ns)
    lost = sum(map(_lost, windows))
    settled = lost + sum(map(_received, windows)) if lost else 1
    return lost / settled, max(map(_queueing_ns, windows), default=0)


def queued(ring: Ring, since_ns: int) -> tuple[list[int], list[int]]:
    """Of the windows that ended since then: probes by class of queueing, there and back."""
    windows = recent(ring.windows, since_ns)
    return _summed(each.forward.queued for each in windows), _summed(each.reverse.queued for each in windows)


def _summed(parts: Iterable[Histogram | None]) -> list[int]:
    nothing = Histogram([], 0).by_class()
    return [sum(column) for column in zip(nothing, *(each.by_class() for each in parts if each), strict=True)]


def _over(ways: Sequence[Way]) -> Direction:
    if not ways:
        return Direction()
    figures, bounds, _ = zip(*ways, strict=True)
    return Direction(
        {each: (_middle if each.share == 0.5 else _largest)(some)
         for each, some in zip(FOLLOWED, zip(*figures, strict=True), strict=True)},
        {each: _largest(some) for each, some in zip(OF_DIRECTIONS, zip(*bounds, strict=True), strict=True)},
    )  # fmt: skip


def _largest(values: Iterable[_Value | None]) -> _Value | None:
    return max((each for each in values if each is not None), default=None)


def _middle(values: Iterable[float | None]) -> float | None:
    """The lower median: a value that was measured."""
    known = sorted(each for each in values if each is not None)
    return known[(len(known) - 1) // 2] if known else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def trend(ring: Ring, now_ns: int, cells: int) -> list[float | None]:
    """The largest queueing (p99, there) in each of so many equal parts of the last 40 s, the newest last."""
    part_ns = LONGEST_S * SECOND // cells
    last = now_ns // part_ns
    found: list[float | None] = [None] * cells
    for each in ring.windows:
        place = cells - 1 - (last - each.at_ns // part_ns)
        value = each.forward.figures[_QUEUEING]
        if 0 <= place < cells and value is not None:
            before = found[place]
            found[place] = value if before is None else max(before, value)
    return found
