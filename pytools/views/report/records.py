"""What a report says, as frozen records: figures, lines, bands and lists, all of a bounded number. Pure.

Times are CLOCK_REALTIME nanoseconds of the host that published, everything else is in the units of its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from operator import sub

from pytools.figures import ONE_WAY, QUEUEING, Figure
from pytools.signals import Act, Clock, Job, JobCause, LinkEvent, Path, RdmaQueuePair, RdmaSight, Suspect
from pytools.views.report.runs import Bands
from pytools.views.report.series import Bars, Line, Measured

_DELAY, _QUEUEING = Figure(ONE_WAY, "p99"), Figure(QUEUEING, "p99")


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
class Direction:
    """One direction of a path over the whole time."""

    # What is known of `FOLLOWED`: of p50 the median of the windows, of others what 99 % of the windows do not exceed.
    figures: Mapping[Figure, Measured] = field(default_factory=dict)

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

    def grown(self, before: Held) -> Held:
        """What came after an earlier reading; counters that are smaller now began anew."""
        now, then = astuple(self), astuple(before)
        return self if any(a < b for a, b in zip(now, then, strict=True)) else Held(*map(sub, now, then))


@dataclass(frozen=True, slots=True)
class PathStory:
    """What one path went through, as its source measured it."""

    host: str  # that published
    path: Path
    window_ns: int
    windows: int
    forward: Direction
    reverse: Direction
    lines: Mapping[Figure, Line]  # there
    lost: int
    settled: int  # probes answered or lost
    clocks: Mapping[str, int]  # windows by the state of the clocks
    states: Bands
    acts: tuple[int, ...]  # numbers of the acts on targets that carry it
    resent: Bars  # TCP segments retransmitted, by cause
    segments_out: int
    held: Held | None = None  # None: no controller said that packets were held

    @property
    def key(self) -> tuple[str, Path]:
        """What tells it from others."""
        return self.host, self.path

    @property
    def loss(self) -> float | None:
        """Share of its probes that were lost; None when none was sent."""
        return self.lost / self.settled if self.settled else None

    @property
    def worst(self) -> float:
        """To put the worst first: one that lost probes, and of which no delay is known, is worse than any other."""
        return math.inf if self.lost and self.forward.worst < 0 else self.forward.worst


@dataclass(frozen=True, slots=True)
class WeightStory:
    """The weights of one nexthop group."""

    host: str
    group_id: int
    destinations: tuple[str, ...]
    members: Mapping[str, Line]  # by what a person calls a member
    acts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NumberedAct:
    """One act, and the number by which charts refer to it."""

    number: int
    act: Act


@dataclass(frozen=True, slots=True)
class ClockStory:
    """How well one clock was known against a reference."""

    of: str
    reference: str
    host: str  # that published
    last: Clock
    bound: Line
    states: Bands
    most: Measured | None  # the largest bound


@dataclass(frozen=True, slots=True)
class QueuePairStory:
    """One RDMA queue pair."""

    last: RdmaQueuePair
    bandwidth: Line
    verdicts: Bands


@dataclass(frozen=True, slots=True)
class JobStory:
    """One distributed job on one host."""

    last: Job
    worst: JobCause | None  # the cause that explained most of a step
    worst_unix_ns: int
    verdicts: Bands


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
class HostStory:
    """What an agent says of itself."""

    host: str
    first_unix_ns: int
    last_unix_ns: int
    silences: int = 0  # how often nothing was heard of it for a while in between
    silent_ns: int = 0  # how long these were in all
    drops: Mapping[str, int] = field(default_factory=dict)  # what it lost within this time, by counter
    drops_known: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)  # hooks that are not attached
    sight: RdmaSight | None = None
    suspects: tuple[Suspect, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    since_ns: int = 0
    until_ns: int = 0
    told: Told = Told()
    hosts: tuple[HostStory, ...] = ()
    paths: tuple[PathStory, ...] = ()  # the worst first
    weights: tuple[WeightStory, ...] = ()
    acts: tuple[NumberedAct, ...] = ()
    events: tuple[Event, ...] = ()
    clocks: tuple[ClockStory, ...] = ()
    queue_pairs: tuple[QueuePairStory, ...] = ()
    forgotten: Mapping[str, int] = field(default_factory=dict)  # of the lists above, older ones without room
    jobs: tuple[JobStory, ...] = ()


def link_event(signal: LinkEvent) -> Event:
    """A link event as one of the list."""
    return Event(signal.unix_ns, signal.host, signal.interface, signal.what, signal.detail)


def alert(signal: Act) -> Event:
    """An alert as one of the list."""
    return Event(signal.unix_ns, signal.host, signal.what, signal.outcome, signal.because, signal.under)
