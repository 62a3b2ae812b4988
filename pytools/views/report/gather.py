"""Signals, in whatever order and number, folded into what a report says; bounded memory. No I/O, no clock.

For a path its longest windows count, as everywhere for people: figures do not jump. What there is no room for (paths
beyond `PATHS`, and so on) is counted by kind.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from pytools.figures import FOLLOWED
from pytools.ipc.wire import TAGS
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
from pytools.views.model import match
from pytools.views.report.aggregate import (
    ClockHistory,
    Event,
    GroupHistory,
    HostHistory,
    JobHistory,
    NumberedAct,
    PathHistory,
    QueuePairHistory,
    Report,
    Told,
)

_Remembered = TypeVar("_Remembered")
_ROUTES: Final = re.compile(r"overlay:[^:]*:(?P<prefix>.+)")


def acts_of_group(acts: Iterable[NumberedAct], group: NexthopGroup) -> tuple[int, ...]:
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


def prefixes_of(target: str) -> tuple[str, ...]:
    """The prefix that a target of acts is named after; empty for what has none."""
    match = _ROUTES.fullmatch(target)
    return (match["prefix"],) if match else ()


def _inside(address: str, prefix: str) -> bool:
    """Whether a prefix covers an address; what cannot be read is taken to."""
    try:
        return match(prefix, address) >= 0
    except ValueError:
        return True


PATHS: Final = 256
ACTS: Final = 1000
EVENTS: Final = 1000
_HOSTS: Final = 256
_SLOTS: Final = 30_000  # of all lines of paths together
_FEWEST, _MOST = 40, 300  # of one line
_LATEST_NS: Final = 1 << 62


class _Kind(NamedTuple):
    """What signals are about: its name where there is no room for another, what tells it apart, how many are kept."""

    name: str
    key: Callable[[Any], Hashable]
    most: int
    make: Callable[[Any], Any]


_HOST: Final = _Kind("hosts", lambda row: row.host, _HOSTS, lambda row: HostHistory(row.host))
_PATH: Final = _Kind("paths", lambda row: (row.host, row.path), PATHS, lambda row: PathHistory(row.host, row.path))
_KINDS: Final[dict[type[Any], _Kind]] = {
    **dict.fromkeys((PathDelay, PathState, HoldState, TcpPath), _PATH),
    NexthopGroup: _Kind("nexthop groups", lambda row: (row.host, row.group_id), 64, lambda _: GroupHistory()),
    Clock: _Kind("clocks", lambda row: (row.reference, row.of), 128, lambda row: ClockHistory(row.host)),
    RdmaQueuePair: _Kind("queue pairs", lambda row: (row.host, *row.key), 128, lambda _: QueuePairHistory()),
    Job: _Kind("jobs", lambda row: (row.host, row.job, row.uid), 64, lambda _: JobHistory()),
    **dict.fromkeys((Self, RdmaSight, RdmaSuspects), _HOST),
}
TYPES: Final = frozenset(TAGS[kind] for kind in _KINDS.keys() | {Act, LinkEvent})


class Gathering:
    """Takes signals in, gives a report."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Hashable, Any]] = {kind.name: {} for kind in (_HOST, *_KINDS.values())}
        self._acts: deque[Act] = deque()
        self._events: deque[Event] = deque()
        self._forgotten = {"acts": 0, "events": 0}
        self._crowded = Counter[str]()
        self._since_ns, self._until_ns = _LATEST_NS, 0
        self._records = self._broken = 0

    def add(self, signals: Iterable[AnySignal]) -> None:
        for signal in signals:
            if not 0 < signal.unix_ns < _LATEST_NS:
                self._broken += 1
                continue
            host = self._room(_HOST, signal)
            if host is None:
                continue
            host.heard(signal.unix_ns)
            self._records += 1
            self._since_ns = min(self._since_ns, signal.unix_ns)
            self._until_ns = max(self._until_ns, signal.unix_ns)
            self._take(signal)

    def _take(self, signal: AnySignal) -> None:
        match signal:
            case Act(outcome="alert" | "alert_over"):
                alert = Event(signal.unix_ns, signal.host, signal.what, signal.outcome, signal.because, signal.under)
                self._remember(self._events, alert, EVENTS, "events")
            case Act():
                self._remember(self._acts, signal, ACTS, "acts")
            case LinkEvent():
                event = Event(signal.unix_ns, signal.host, signal.interface, signal.what, signal.detail)
                self._remember(self._events, event, EVENTS, "events")
            case TcpPath(path=None):
                pass
            case _:
                kind = _KINDS.get(type(signal))
                history = None if kind is None else self._room(kind, signal)
                if history is not None:
                    history.update(signal)

    def _room(self, kind: _Kind, signal: AnySignal) -> Any:
        """What a signal is about; None, and counted, when there is no room for another."""
        known, key = self._known[kind.name], kind.key(signal)
        found = known.get(key)
        if found is None:
            if len(known) >= kind.most:
                self._crowded[kind.name] += 1
                return None
            found = known[key] = kind.make(signal)
        return found

    def _remember(self, row: deque[_Remembered], new: _Remembered, most: int, what: str) -> None:
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
        hosts, paths, groups, clocks, pairs, jobs = (tuple(each.values()) for each in self._known.values())
        told = replace(
            told,
            records=self._records,
            broken=told.broken + self._broken,
            late=told.late + sum(each.late for each in paths),
            crowded=dict(self._crowded),
        )
        if not self._records:
            return Report(told=told)
        acts = [
            NumberedAct(number, each)
            for number, each in enumerate(sorted(self._acts, key=lambda act: act.unix_ns), start=1)
        ]
        slots = max(_FEWEST, min(_MOST, _SLOTS // max(1, len(FOLLOWED) * len(paths))))
        numbers = acts_by_path([each.path for each in paths], acts, [each.last for each in groups])
        for path in paths:
            path.close(self._until_ns, slots, numbers[path.path])
        for group in groups:
            group.close(acts_of_group(acts, group.last))
        for each in (*clocks, *pairs, *jobs):
            each.close(self._until_ns)
        return Report(
            self._since_ns,
            self._until_ns,
            told,
            tuple(sorted(hosts, key=lambda host: host.host)),
            tuple(sorted(paths, key=lambda path: (-path.worst, path.host, str(path.path)))),
            tuple(sorted(groups, key=lambda group: (group.last.host, group.last.group_id))),
            tuple(acts),
            tuple(sorted(self._events, key=lambda event: event.unix_ns)),
            tuple(sorted(clocks, key=lambda clock: (clock.last.reference, clock.last.of))),
            pairs,
            jobs,
            {what: count for what, count in self._forgotten.items() if count},
        )
