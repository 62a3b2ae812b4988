"""What a report says: what was heard of each path, group, clock, queue pair, job and host, and of all. No I/O.

Call `close` of a history before reading it. Times are CLOCK_REALTIME nanoseconds of the host that published, everything
else is in the units of its name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from functools import cached_property
from operator import add, sub
from typing import Final

import msgspec

from pytools.figures import FOLLOWED, ONE_WAY, QUEUEING, Figure, supports_one_way
from pytools.signals import (
    Act,
    Clock,
    HoldState,
    Job,
    JobCause,
    NexthopGroup,
    Path,
    PathDelay,
    PathState,
    RdmaQueuePair,
    RdmaSight,
    RdmaSuspects,
    Self,
    Suspect,
    TcpPath,
    nexthop_name,
)
from pytools.views.model import SILENT_NS, is_shown
from pytools.views.report.series import SLOTS, Bands, Bars, Line, Measured, Runs, Series, Spread, Sums

_MESSAGES: Final = 8  # bandwidth over sliding windows of so many
_MEMBERS: Final = 16
_DELAY, _QUEUEING = Figure(ONE_WAY, "p99"), Figure(QUEUEING, "p99")


class Direction:
    """One direction of a path over the whole time."""

    def __init__(self) -> None:
        self.spreads = {each: Spread() for each in FOLLOWED}

    @cached_property
    def figures(self) -> Mapping[Figure, Measured]:
        """Those known: of p50 the median of the windows, of others what 99 % of the windows do not exceed."""
        measured = ((figure, spread.quantile(figure.share)) for figure, spread in self.spreads.items())
        return {figure: value for figure, value in measured if value is not None}

    @property
    def delay(self) -> Measured | None:
        """By which pairs of hosts are compared; None is not known."""
        return self.figures.get(_DELAY)

    @property
    def worst(self) -> float:
        """To put the worst first: by one-way delay, else by queueing."""
        measured = self.delay or self.figures.get(_QUEUEING)
        return measured.value if measured is not None else -1.0


@dataclass(frozen=True, slots=True)
class Held:
    """What waited at the source because of the queue on a path, over the whole time."""

    packets: int = 0
    bytes: int = 0
    waited_ns: int = 0  # the sum of the times that buffers were held for
    samples: int = 0
    above: int = 0  # of these, above the threshold

    def plus(self, now: Held, before: Held) -> Held:
        """With what came between two readings; counters that are smaller now began anew."""
        pairs = list(zip(astuple(now), astuple(before), strict=True))
        grown = astuple(now) if any(a < b for a, b in pairs) else [sub(*pair) for pair in pairs]
        return Held(*map(add, astuple(self), grown))


class PathHistory:
    """What one path went through, as its source measured it."""

    def __init__(self, host: str, path: Path) -> None:
        self.host, self.path = host, path
        self.window_ns = self.windows = 0
        self.lost = self.settled = 0  # probes lost; answered or lost
        self.forward, self.reverse = Direction(), Direction()
        self.clocks = Counter[str]()  # windows by the state of the clocks
        self.segments_out = 0
        self.held: Held | None = None  # None: no controller said that packets were held
        self.acts: tuple[int, ...] = ()  # numbers of the acts on targets that carry it
        self.late = 0
        self.lines: Mapping[Figure, Line] = {}  # there
        self.states, self.resent = Bands(), Bars()  # resent: TCP segments, by cause
        self._series = {each: Series() for each in FOLLOWED}
        self._runs, self._sums = Runs(SILENT_NS), Sums()
        self._delay_ns = self._tcp_ns = 0
        self._hold: Held | None = None

    def update(self, signal: PathDelay | PathState | HoldState | TcpPath) -> None:
        match signal:
            case PathDelay():
                self._delay(signal)
            case PathState():
                note = f"{signal.reason} [{signal.under}]" if signal.under else signal.reason
                self._runs.add(signal.unix_ns, signal.state, note)
            case HoldState():
                # Of a hold that was there before this time only what came since counts.
                now = Held(
                    signal.held_packets, signal.held_bytes, signal.waited_ns, signal.samples, signal.samples_above
                )
                self.held = Held() if self.held is None or self._hold is None else self.held.plus(now, self._hold)
                self._hold = now
            case TcpPath() if signal.unix_ns <= self._tcp_ns:
                self.late += 1
            case TcpPath():
                self._tcp_ns = signal.unix_ns
                self.segments_out += signal.segments_out
                self._sums.add(signal.unix_ns, msgspec.structs.asdict(signal.retransmitted))

    def _delay(self, new: PathDelay) -> None:
        if self.windows and not is_shown(new.window_ns, self.window_ns, new.unix_ns - self._delay_ns):
            return
        self.window_ns, self._delay_ns = new.window_ns, new.unix_ns
        self.windows += 1
        self.clocks[new.clock] += 1
        self.lost += new.lost
        self.settled += new.received + new.lost
        for way, direction in ((new.forward, self.forward), (new.reverse, self.reverse)):
            for figure, spread in direction.spreads.items():
                value, bound = figure.value(new, way), figure.measure.bound(new, way)
                known = None if value is None or value < 0 else round(value)
                if known is not None:
                    spread.add(known, bound)
                if direction is self.forward:
                    self._series[figure].add(new.unix_ns, known, bound)

    def close(self, until_ns: int, slots: int, acts: tuple[int, ...]) -> None:
        step_ns = self.window_ns if self.windows else SILENT_NS
        self.lines = {figure: series.line(step_ns, slots) for figure, series in self._series.items()}
        self.states, self.resent, self.acts = self._runs.bands(until_ns), self._sums.bars(slots), acts

    @property
    def key(self) -> tuple[str, Path]:
        return self.host, self.path

    @property
    def loss(self) -> float | None:
        """Share of its probes that were lost; None when none was sent."""
        return self.lost / self.settled if self.settled else None

    @property
    def worst(self) -> float:
        """To put the worst first: one that lost probes, and of which no delay is known, is worse than any other."""
        return math.inf if self.lost and self.forward.worst < 0 else self.forward.worst


class GroupHistory:
    def __init__(self) -> None:
        self.members: Mapping[str, Line] = {}  # by what a person calls a member
        self.acts: tuple[int, ...] = ()
        self._series: dict[str, Series] = {}

    def update(self, signal: NexthopGroup) -> None:
        """Take its weights now; a member that is gone has none."""
        self.last = signal
        weights = {nexthop_name(each.gateway, each.interface): each.weight for each in signal.members}
        for name, weight in weights.items():
            if name in self._series or len(self._series) < _MEMBERS:
                self._series.setdefault(name, Series()).add(signal.unix_ns, weight)
        for name in self._series.keys() - weights.keys():
            self._series[name].add(signal.unix_ns, 0)

    def close(self, acts: tuple[int, ...]) -> None:
        self.members = {name: series.line(SILENT_NS) for name, series in sorted(self._series.items())}
        self.acts = acts


class ClockHistory:
    """One clock against one reference, as the reference's host tells it where that is heard, else as the first does."""

    def __init__(self, host: str) -> None:
        self.bound, self.states = Line(), Bands()
        self.most: Measured | None = None  # the largest bound
        self._begin(host)

    def _begin(self, host: str) -> None:
        self.host = host
        self._series, self._spread, self._runs = Series(), Spread(), Runs(SILENT_NS)

    def update(self, signal: Clock) -> None:
        if signal.host not in (self.host, signal.reference):
            return
        if signal.host != self.host:
            self._begin(signal.host)
        self.last = signal
        bound_ns = signal.bound_ns if supports_one_way(signal.state) else None
        self._series.add(signal.unix_ns, bound_ns)
        if bound_ns is not None and bound_ns >= 0:
            self._spread.add(bound_ns)
        self._runs.add(signal.unix_ns, signal.state)

    def close(self, until_ns: int) -> None:
        self.bound, self.states = self._series.line(SILENT_NS, SLOTS), self._runs.bands(until_ns)
        self.most = self._spread.quantile(1.0)


class QueuePairHistory:
    def __init__(self) -> None:
        self.bandwidth, self.verdicts = Line(), Bands()
        self._series, self._runs = Series(), Runs(SILENT_NS)

    def update(self, signal: RdmaQueuePair) -> None:
        self.last = signal
        of = next((each for each in signal.bandwidths if each.messages == _MESSAGES), None)
        self._series.add(signal.unix_ns, of.mean_bps if of is not None else None)
        self._runs.add(signal.unix_ns, signal.verdict, signal.reason)

    def close(self, until_ns: int) -> None:
        self.bandwidth, self.verdicts = self._series.line(SILENT_NS), self._runs.bands(until_ns)


class JobHistory:
    def __init__(self) -> None:
        self.worst: JobCause | None = None  # the cause that explained most of a step
        self.worst_unix_ns = 0
        self.verdicts = Bands()
        self._runs = Runs(SILENT_NS)

    def update(self, signal: Job) -> None:
        self.last = signal
        if signal.why is None:
            return
        self._runs.add(signal.unix_ns, signal.why.verdict, signal.why.reason)
        for cause in signal.why.causes[:1]:
            if self.worst is None or cause.share > self.worst.share:
                self.worst, self.worst_unix_ns = cause, signal.unix_ns

    def close(self, until_ns: int) -> None:
        self.verdicts = self._runs.bands(until_ns)


class HostHistory:
    """What an agent says of itself, and of RDMA on its host."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.first_unix_ns = self.last_unix_ns = 0
        self.silences = self.silent_ns = 0  # how often nothing was heard of it in between, and how long in all
        self.failed: Mapping[str, str] = {}  # hooks that are not attached
        self.sight: RdmaSight | None = None
        self.suspects: tuple[Suspect, ...] = ()
        self._before: Mapping[str, int] | None = None
        self._drops: Mapping[str, int] = {}

    def heard(self, unix_ns: int) -> None:
        """Something was told by it."""
        if self.last_unix_ns and unix_ns - self.last_unix_ns > SILENT_NS:
            self.silences += 1
            self.silent_ns += unix_ns - self.last_unix_ns
        self.first_unix_ns = min(self.first_unix_ns or unix_ns, unix_ns)
        self.last_unix_ns = max(self.last_unix_ns, unix_ns)

    def update(self, signal: Self | RdmaSight | RdmaSuspects) -> None:
        match signal:
            case Self():
                self._before = signal.drops if self._before is None else self._before
                self._drops, self.failed = signal.drops, signal.failed
            case RdmaSight():
                self.sight = signal
            case RdmaSuspects():
                self.suspects = tuple(signal.suspects)

    @property
    def drops(self) -> dict[str, int] | None:
        """What it lost within this time, by counter; None: it did not say."""
        before = self._before
        if before is None:
            return None
        grown = {name: count - before.get(name, 0) for name, count in self._drops.items()}
        return {name: count for name, count in grown.items() if count > 0}


@dataclass(frozen=True, slots=True)
class Told:
    """What was read, and what was not."""

    source: str = ""  # in words
    records: int = 0  # that the report is made of
    broken: int = 0  # lines that are no signals
    cut: int = 0  # segments that end in the middle
    dropped: int = 0  # signals missed while listening
    late: int = 0  # counts and states that came after newer ones: told twice, or a clock that was set back
    crowded: Mapping[str, int] = field(default_factory=dict)  # what there was no room for -> how many signals of it


@dataclass(frozen=True, slots=True)
class NumberedAct:
    """One act, and the number by which charts refer to it."""

    number: int
    act: Act


@dataclass(frozen=True, slots=True)
class Event:
    """A link event, or an alert that began or is over."""

    unix_ns: int
    host: str
    where: str
    what: str
    detail: str
    under: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All of it; times are CLOCK_REALTIME nanoseconds of the host that published."""

    since_ns: int = 0
    until_ns: int = 0
    told: Told = Told()
    hosts: tuple[HostHistory, ...] = ()
    paths: tuple[PathHistory, ...] = ()  # the worst first
    groups: tuple[GroupHistory, ...] = ()
    acts: tuple[NumberedAct, ...] = ()
    events: tuple[Event, ...] = ()
    clocks: tuple[ClockHistory, ...] = ()
    queue_pairs: tuple[QueuePairHistory, ...] = ()
    jobs: tuple[JobHistory, ...] = ()
    forgotten: Mapping[str, int] = field(default_factory=dict)  # of acts and events, older ones without room
