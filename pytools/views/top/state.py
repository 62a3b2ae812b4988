"""What the live view knows: the newest of everything, the last 40 seconds of every path, and what happened.

Takes lines as the agent sends them. Nanoseconds of CLOCK_MONOTONIC of the agent's host, but for `unix_ns`. Bounded:
paths, flows, queue pairs, events. One thread.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from pytools.signals import (
    UNREADABLE,
    Act,
    AnySignal,
    Clock,
    LinkEvent,
    NexthopGroup,
    Path,
    PathDelay,
    PathEcn,
    PathState,
    Self,
    TcpFlow,
    TcpPath,
    decode,
)
from pytools.units import SECOND
from pytools.views import tables
from pytools.views.link_tables import GOOD_NEWS
from pytools.views.model import FlowKey, Model, flow_key, fold
from pytools.views.top.group_traffic import Shares
from pytools.views.top.rings import Ring

EVENTS: Final = 500
EVENTS_OF_PATH: Final = 50
PATHS: Final = 4096
_LOT: Final = 10_000  # signals that may wait to be put together
_BAD_STATES: Final = ("drained", "suspect")


class Event(NamedTuple):
    """Something that happened, in words."""

    at_ns: int
    unix_ns: int
    kind: str  # act, state, link, clock
    place: str
    what: str
    why: str
    style: str
    path: Path | None  # the one it is about; None: several, or none
    signal: Act | PathState | LinkEvent | Clock


class Counted(NamedTuple):
    """Counters of a connection when everything was last zeroed."""

    retransmitted: int
    timeouts: int
    sent_bytes: int


class Known:
    """A fold of signals with a memory."""

    def __init__(self) -> None:
        self._model, self._unfolded = Model(), list[AnySignal]()
        self.rings: dict[Path, Ring] = {}
        self.shares = Shares()
        self.events: deque[Event] = deque(maxlen=EVENTS)
        self.of_path: dict[Path, deque[Event]] = {}
        self._states: dict[Path, str] = {}
        self._clocks: dict[str, str] = {}
        self.malformed = 0
        self.zeroed_ns: int | None = None
        self._drops_then: Mapping[str, int] = {}
        self._missed_then = 0
        self._flows_then: dict[FlowKey, Counted] = {}

    @property
    def model(self) -> Model:
        """The newest of everything; put together when it is asked for."""
        if self._unfolded:
            self._model, self._unfolded = fold(self._model, self._unfolded), []
        return self._model

    def take(self, lines: Iterable[bytes]) -> None:
        """Take lines as they came, in their order."""
        signals = []
        for line in lines:
            try:
                signals.append(decode(line))
            except UNREADABLE:
                self.malformed += 1
        self.take_signals(signals)

    def take_signals(self, signals: Iterable[AnySignal]) -> None:
        signals = list(signals)
        for signal in signals:
            match signal:
                case PathDelay():
                    self._ring(signal.path).add(signal)
                case TcpPath():
                    if signal.path is not None:
                        self._ring(signal.path).add_tcp(signal)
                case PathEcn():
                    self._ring(signal.path).add_marks(signal)
                case NexthopGroup():
                    self.shares.count(signal)
                case TcpFlow():
                    self._first_counts(signal)
                case Act() | PathState() | LinkEvent() | Clock():
                    self._happened(signal)
                case _:
                    pass
        self._unfolded += signals
        if len(self._unfolded) > _LOT:
            _ = self.model

    def _ring(self, path: Path) -> Ring:
        ring = self.rings.get(path)
        if ring is None:
            if len(self.rings) >= PATHS:  # the one heard of longest ago goes
                oldest = min(self.rings, key=lambda each: self.rings[each].at_ns)
                del self.rings[oldest]
            ring = self.rings[path] = Ring()
        return ring

    # ---- what happened ----

    def _happened(self, signal: Act | PathState | LinkEvent | Clock) -> None:
        event: Event | None
        match signal:
            case Act():
                event = _of_act(signal)
            case PathState():
                event = self._of_state(signal)
            case LinkEvent():
                event = None if self._is_told(signal) else _of_link(signal)
            case Clock():
                event = self._of_clock(signal)
        if event is not None:
            self.events.append(event)
            if event.path is not None:
                self.of_path.setdefault(event.path, deque(maxlen=EVENTS_OF_PATH)).append(event)

    def _is_told(self, event: LinkEvent) -> bool:
        """Whether it is here already: events are told again to those who come late."""
        key = event.interface, event.what, event.happened_ns
        links = (each.signal for each in self.events if isinstance(each.signal, LinkEvent))
        return any((each.interface, each.what, each.happened_ns) == key for each in links)

    def _of_state(self, signal: PathState) -> Event | None:
        before = self._states.get(signal.path)
        self._states[signal.path] = signal.state
        if before == signal.state or (before is None and signal.state not in _BAD_STATES):
            return None
        what = signal.state if before is None else f"{before} → {signal.state}"
        style = tables.STATE_STYLES.get(signal.state, "")
        place, why = place_of(signal.path), said(signal.reason, signal.under)
        return Event(signal.at_ns, signal.unix_ns, "state", place, what, why, style, signal.path, signal)

    def _of_clock(self, signal: Clock) -> Event | None:
        before = self._clocks.get(signal.of)
        self._clocks[signal.of] = signal.state
        if before is None or before == signal.state:
            return None
        style = tables.CLOCK_STYLES[signal.state]
        what = f"{before} → {signal.state}"
        return Event(signal.at_ns, signal.unix_ns, "clock", signal.of, what, "", style, None, signal)

    def about(self, path: Path) -> list[Event]:
        """The acts and states of a path, and what happened to its interface, the newest first."""
        carrier = self.shares.carrier(self.model, path)
        group = None if carrier is None else self.model.of(NexthopGroup).get(carrier[0])
        ends = tuple(f":{prefix}" for prefix in group.destinations) if group is not None else ()
        found = [*self.of_path.get(path, ())]
        for event in self.events:
            match event.signal:
                case Act():
                    if path in event.signal.paths or event.signal.target.endswith(ends):
                        found.append(event)
                case LinkEvent():
                    if event.signal.interface == path.interface:
                        found.append(event)
        return sorted(found, key=lambda event: -event.at_ns)

    # ---- zero, and freeze ----

    def zero(self, now_ns: int, missed: int) -> None:
        """From now on: horizons and counters begin anew; what is known of the present stays, and what happened."""
        self.zeroed_ns = now_ns
        self.rings = {path: Ring() for path in self.rings}
        self.shares.clear()
        self._drops_then = dict(self._drops_now())
        self._missed_then = missed
        self._flows_then = {key: _counted(flow) for key, flow in self.model.of(TcpFlow).items()}

    def _first_counts(self, flow: TcpFlow) -> None:
        """Of a connection that began before all was zeroed, and is heard of first after that."""
        if self.zeroed_ns is not None and flow_key(flow) not in self._flows_then and flow.first_ns < self.zeroed_ns:
            self._flows_then[flow_key(flow)] = _counted(flow)

    def flow_counts(self, flow: TcpFlow) -> Counted:
        """Counters of a connection since it began, or since all was zeroed."""
        now, then = _counted(flow), self._flows_then.get(flow_key(flow))
        return now if then is None else Counted(*(max(0, a - b) for a, b in zip(now, then, strict=True)))

    def drops(self) -> dict[str, int]:
        """Records that the agent lost, by name, since it started or since all was zeroed; those that are not zero."""
        now = self._drops_now()
        grown = {name: count - self._drops_then.get(name, 0) for name, count in now.items()}
        return {name: count if count >= 0 else now[name] for name, count in grown.items() if count}

    def _drops_now(self) -> Mapping[str, int]:
        cost = self.model.one(Self)
        return {} if cost is None else cost.drops

    def missed(self, told: int) -> int:
        """Signals this view was too slow for, since it started or since all was zeroed."""
        return told - self._missed_then

    def frozen(self) -> Known:
        """What is known now, whatever comes."""
        _ = self.model
        other = copy.copy(self)
        other.rings = {path: ring.copy() for path, ring in self.rings.items()}
        other.shares = self.shares.copy()
        other._unfolded = []
        other.events = self.events.copy()
        other.of_path = {path: log.copy() for path, log in self.of_path.items()}
        other._flows_then = dict(self._flows_then)
        return other


def since_ns(now_ns: int, horizon_s: int) -> int:
    return now_ns - horizon_s * SECOND


def _counted(flow: TcpFlow) -> Counted:
    return Counted(flow.retransmitted_segments, flow.timeouts, flow.sent_bytes)


def place_of(path: Path) -> str:
    return f"{path.source}>{path.destination} dev {path.interface}"


def said(reason: str, under: str) -> str:
    return reason + (f" [under {under}]" if under else "")


def _of_act(act: Act) -> Event:
    names = sorted(set(act.before) | set(act.after))
    change = ", ".join(f"{name} {act.before.get(name, 0)}→{act.after.get(name, 0)}" for name in names)
    what = f"{act.outcome.replace('_', ' ')}: {change}" if change else act.outcome.replace("_", " ")
    style = {"failed": "red", "dry_run": "cyan", "alert": "yellow"}.get(act.outcome, "bold")
    return Event(act.at_ns, act.unix_ns, "act", act.what, what, said(act.because, act.under), style, None, act)


def _of_link(event: LinkEvent) -> Event:
    style = "green" if event.what in GOOD_NEWS else "yellow"
    what = event.what.replace("_", " ")
    return Event(event.at_ns, event.unix_ns, "link", event.interface, what, event.detail, style, None, event)
