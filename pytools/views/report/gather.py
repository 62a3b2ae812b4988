"""Signals, in whatever order and number, folded into what a report says; bounded memory. No I/O, no clock.

For a path its longest windows count, as everywhere for people: figures do not jump. What there is no room for (paths
beyond `PATHS`, and so on) is counted by kind.
"""

from __future__ import annotations

import ipaddress
import re
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Protocol, TypeVar

from pytools.figures import FOLLOWED
from pytools.signals import (
    Act,
    AnySignal,
    Clock,
    HoldState,
    Job,
    LinkEvent,
    NexthopGroup,
    Path,
    PathDelay,
    PathState,
    RdmaQueuePair,
    RdmaSight,
    RdmaSuspects,
    Self,
    TcpPath,
)
from pytools.views.report.aggregate import (
    HeardClock,
    HeardGroup,
    HeardHost,
    HeardJob,
    HeardPath,
    HeardQueuePair,
)
from pytools.views.report.records import Event, NumberedAct, PathStory, Report, Told, WeightStory, alert, link_event

_ROUTES: Final = re.compile(r"overlay:[^:]*:(?P<prefix>.+)")


def acts_of_group(acts: Iterable[NumberedAct], group: NexthopGroup) -> tuple[int, ...]:
    """Numbers of the acts on what a group carries."""
    return tuple(
        each.number
        for each in acts
        if each.act.host == group.host and not set(prefixes_of(each.act.target)).isdisjoint(group.destinations)
    )


def acts_by_path(
    paths: Sequence[Path], acts: Iterable[NumberedAct], groups: Iterable[NexthopGroup]
) -> dict[Path, tuple[int, ...]]:
    """Numbers of the acts that each path is about to feel.

    An act concerns the paths of its host to what lies behind its target; where that is not known, all of its host.
    """
    destinations = {
        (group.host, prefix): tuple(group.destinations) for group in groups for prefix in group.destinations
    }
    found: dict[Path, list[int]] = {path: [] for path in paths}
    reached: dict[tuple[tuple[str, ...], str], bool] = {}
    for each in acts:
        prefixes = prefixes_of(each.act.target)
        if prefixes:
            prefixes = destinations.get((each.act.host, prefixes[0]), prefixes)
        for path in paths:
            if path.source != each.act.host:
                continue
            key = (prefixes, path.address)
            if key not in reached:
                reached[key] = not prefixes or any(_inside(path.address, prefix) for prefix in prefixes)
            if reached[key]:
                found[path].append(each.number)
    return {path: tuple(dict.fromkeys(numbers)) for path, numbers in found.items()}


def with_acts(story: PathStory, numbers: Mapping[Path, tuple[int, ...]]) -> PathStory:
    """A path with the acts that concern it."""
    return replace(story, acts=numbers.get(story.path, ()))


def prefixes_of(target: str) -> tuple[str, ...]:
    """The prefix that a target of acts is named after; empty for what has none."""
    match = _ROUTES.fullmatch(target)
    return (match["prefix"],) if match else ()


def _inside(address: str, prefix: str) -> bool:
    """Whether a prefix covers an address; what cannot be read is taken to."""
    try:
        inside = ipaddress.ip_address(address)
        network = ipaddress.ip_network(("::/0", "0.0.0.0/0")[inside.version == 4] if prefix == "default" else prefix,
                                       strict=False)  # fmt: skip
    except ValueError:
        return True
    return inside.version == network.version and inside in network


TYPES: Final = frozenset(
    {
        *("path_delay", "path_state", "hold_state", "act", "nexthop_group", "tcp_path", "link_event"),
        *("clock", "rdma_qp", "rdma_suspects", "rdma_sight", "self", "job"),
    }
)
PATHS: Final = 256
GROUPS: Final = 64
CLOCKS: Final = 128
QUEUE_PAIRS: Final = 128
JOBS: Final = 64
HOSTS: Final = 256
ACTS: Final = 1000
EVENTS: Final = 1000
_SLOTS: Final = 30_000  # of all lines of paths together
_FEWEST, _MOST = 40, 300  # of one line
_LATEST_NS: Final = 1 << 62

_Heard = TypeVar("_Heard")


class _Takes(Protocol):
    def take(self, signal: Any, /) -> None:
        """One more word of it."""


class Gathering:
    """Takes signals in, gives a report."""

    def __init__(self) -> None:
        self._paths: dict[Hashable, HeardPath] = {}
        self._groups: dict[Hashable, HeardGroup] = {}
        self._clocks: dict[Hashable, HeardClock] = {}
        self._queue_pairs: dict[Hashable, HeardQueuePair] = {}
        self._jobs: dict[Hashable, HeardJob] = {}
        self._hosts: dict[Hashable, HeardHost] = {}
        self._acts: deque[Act] = deque()
        self._events: deque[Event] = deque()
        self._forgotten = {"acts": 0, "events": 0}
        self._crowded: dict[str, int] = {}
        self._since_ns, self._until_ns = _LATEST_NS, 0
        self._records = self._broken = 0

    def add(self, signals: Iterable[AnySignal]) -> None:
        for signal in signals:
            if not 0 < signal.unix_ns < _LATEST_NS:
                self._broken += 1
                continue
            host = self._room(self._hosts, signal.host, HOSTS, "hosts", HeardHost)
            if host is None:
                continue
            host.heard(signal.host, signal.unix_ns)
            self._records += 1
            self._since_ns = min(self._since_ns, signal.unix_ns)
            self._until_ns = max(self._until_ns, signal.unix_ns)
            self._take(signal, host)

    def _take(self, signal: AnySignal, host: HeardHost) -> None:
        match signal:
            case Act(outcome="alert" | "alert_over"):
                self._remember(self._events, alert(signal), EVENTS, "events")
            case Act():
                self._remember(self._acts, signal, ACTS, "acts")
            case LinkEvent():
                self._remember(self._events, link_event(signal), EVENTS, "events")
            case Self() | RdmaSight() | RdmaSuspects():
                host.take(signal)
            case _:
                heard = self._heard(signal)
                if heard is not None:
                    heard.take(signal)

    def _heard(self, signal: AnySignal) -> _Takes | None:  # noqa: PLR0911
        """What a signal is about; None where there is no room, or where the report says nothing of it."""
        match signal:
            case PathDelay() | PathState() | HoldState():
                return self._room(self._paths, (signal.host, signal.path), PATHS, "paths", HeardPath)
            case TcpPath(path=Path() as path):
                return self._room(self._paths, (signal.host, path), PATHS, "paths", HeardPath)
            case NexthopGroup():
                return self._room(self._groups, (signal.host, signal.group_id), GROUPS, "nexthop groups", HeardGroup)
            case Clock():
                return self._room(self._clocks, (signal.reference, signal.of), CLOCKS, "clocks", HeardClock)
            case RdmaQueuePair():
                key = (signal.host, signal.device, signal.qp_number)
                return self._room(self._queue_pairs, key, QUEUE_PAIRS, "queue pairs", HeardQueuePair)
            case Job():
                return self._room(self._jobs, (signal.host, signal.job, signal.uid), JOBS, "jobs", HeardJob)
        return None

    def _room(
        self, known: dict[Hashable, _Heard], key: Hashable, most: int, what: str, make: Callable[[], _Heard]
    ) -> _Heard | None:
        """What is known under a key; None, and counted, when there is no room for another."""
        found = known.get(key)
        if found is None:
            if len(known) >= most:
                self._crowded[what] = self._crowded.get(what, 0) + 1
                return None
            found = known[key] = make()
        return found

    def _remember(self, row: deque[_Heard], new: _Heard, most: int, what: str) -> None:
        row.append(new)
        if len(row) > most:
            row.popleft()
            self._forgotten[what] += 1

    def report(self, told: Told) -> Report:
        """Everything so far.

        Parameters
        ----------
        told : Told
            What the reader knows of what it read; what was found here is added.
        """
        if not self._records:
            return Report(told=_with(told, 0, self._broken, 0, self._crowded))
        since_ns, until_ns = self._since_ns, self._until_ns
        acts = [
            NumberedAct(number, each)
            for number, each in enumerate(sorted(self._acts, key=lambda act: act.unix_ns), start=1)
        ]
        slots = max(_FEWEST, min(_MOST, _SLOTS // max(1, len(FOLLOWED) * len(self._paths))))
        groups = [each for each in self._groups.values() if each.last is not None]
        paths = [each.story(until_ns, slots) for each in self._paths.values()]
        numbers = acts_by_path([each.path for each in paths], acts, [g.last for g in groups if g.last])
        late = sum(each.late for each in self._paths.values())
        return Report(
            since_ns,
            until_ns,
            _with(told, self._records, self._broken, late, self._crowded),
            tuple(sorted((each.story() for each in self._hosts.values()), key=lambda host: host.host)),
            tuple(sorted((with_acts(each, numbers) for each in paths), key=_worst_first)),
            tuple(sorted((each.story(acts_of_group(acts, g)) for each in groups if (g := each.last)), key=_named)),
            tuple(acts),
            tuple(sorted(self._events, key=lambda event: event.unix_ns)),
            tuple(sorted((each.story(until_ns) for each in self._clocks.values()), key=lambda c: (c.reference, c.of))),
            tuple(each.story(until_ns) for each in self._queue_pairs.values()),
            {what: count for what, count in self._forgotten.items() if count},
            tuple(each.story(until_ns) for each in self._jobs.values()),
        )


def _with(told: Told, records: int, broken: int, late: int, crowded: dict[str, int]) -> Told:
    return replace(told, records=records, broken=told.broken + broken, late=told.late + late, crowded=dict(crowded))


def _named(story: WeightStory) -> tuple[str, int]:
    return (story.host, story.group_id)


def _worst_first(story: PathStory) -> tuple[float, str, str]:
    return (-story.worst, story.host, str(story.path))
