"""What a report says: what was read, and what is known of paths, hosts, acts and so on; bounded. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pytools.signals import Act
from pytools.views.report.aggregate import (
    ClockHistory,
    GroupHistory,
    HostHistory,
    JobHistory,
    PathHistory,
    QueuePairHistory,
)


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
