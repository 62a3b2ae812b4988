"""What metrics are made from: a fold of signals, bounded whatever the network does. Pure.

Single connections never enter it, and queue pairs only as sums: what has a row is a path, an interface, a nexthop
group, a port, the host. Times are CLOCK_MONOTONIC nanoseconds of the agent's host. One thread at a time: a lock is the
caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from pytools.ipc.wire import TAGS
from pytools.signals import AnySignal, Clock, PathState, RdmaQueuePair, Self
from pytools.units import SECOND
from pytools.views.metrics.counting import ROWS, SUBJECTS, Table, pair_grown, row_of
from pytools.views.model import SCRAPED_SILENT_NS, is_over

# `self` is not among them: it is asked for in short looks, because the kernel times every program meanwhile.
TYPES: Final = frozenset(TAGS[kind] for kind in (SUBJECTS.keys() | {Clock, RdmaQueuePair}) - {Self})
FORGOTTEN_NS: Final = 3600 * SECOND  # totals of what was not heard of for so long go
_ONE_LOOK_NS: Final = 5 * SECOND
QUEUE_PAIRS: Final = 16_384  # have no series of their own
CLOCKS: Final = 16_384  # nor have the clocks of other hosts


class Model:
    """The newest of everything, and sums over all that was heard."""

    def __init__(self) -> None:
        self.connected = False
        self.connects = 0  # connections to an agent so far
        self.epoch = 0  # which agent: counters that agents keep begin anew with each
        self.connected_ns = self.heard_ns = self.heard_unix_ns = 0
        self.host = ""
        self.signals = 0
        self.dropped = self.malformed = 0  # by the agent for us, and lines that were no signal
        self.refused = 0  # scrapes, because too many were under way
        self.paused = 0  # times that none could be accepted for want of a descriptor
        # Signals for which there was no room, by kind; and round trips below zero.
        self.left_out = Counter(dict.fromkeys((*ROWS, "way", "queue_pair", "name", "round_trip"), 0))
        self.of_host = row_of("host", (), self.left_out)
        self.tables = {kind: Table(kind, most, self.left_out) for kind, most in ROWS.items()}
        self.pairs = Table("queue_pair", QUEUE_PAIRS, self.left_out)
        self.clocks: dict[str, Clock] = {}
        self.cost: Self | None = None  # of the longest window of the last look
        self.steering_heard_ns: int | None = None  # when a controller last spoke

    # ---- the agent comes and goes ----

    def connect(self, now_ns: int, same_agent: bool) -> None:
        """There is an agent; whether it is the one that was there before."""
        self.connected, self.connected_ns = True, now_ns
        self.connects += 1
        if not same_agent:
            self.epoch += 1

    def disconnect(self) -> None:
        """There is none: what it said is no fact any more, what it counted stays counted."""
        self.connected = False

    def is_up(self, now_ns: int) -> bool:
        """Whether an agent is there, and speaks: one that hangs is not up."""
        return self.connected and not is_over(max(self.heard_ns, self.connected_ns), now_ns, SCRAPED_SILENT_NS)

    def is_fresh(self, at_ns: int, now_ns: int, window_ns: int = 0) -> bool:
        """Whether something said then still stands."""
        return self.connected and not is_over(at_ns, now_ns, SCRAPED_SILENT_NS, window_ns)

    def forget(self, now_ns: int) -> None:
        """Make room: rows of what has not been heard of for an hour go."""
        for table in (*self.tables.values(), self.pairs):
            table.forget(now_ns - FORGOTTEN_NS)
        self.clocks = {of: clock for of, clock in self.clocks.items() if now_ns - clock.at_ns < FORGOTTEN_NS}

    # ---- signals ----

    def take(self, signals: Iterable[AnySignal]) -> None:
        """Signals in their order; single connections, and what was not asked for, pass by."""
        for signal in signals:
            self.signals += 1
            self.host = signal.host
            self.heard_ns = max(self.heard_ns, signal.at_ns)
            self.heard_unix_ns = signal.unix_ns
            kind = type(signal)
            if kind in _BESIDES:
                _BESIDES[kind](self, signal)
            subject = SUBJECTS.get(kind)
            labels = None if subject is None else subject.labels(signal)
            if subject is None or labels is None:
                continue
            row = self.tables[subject.table].row(labels, signal.at_ns) if subject.table else self.of_host
            if row is not None:
                subject.take(row, signal, self.epoch)

    def _take_clock(self, signal: Clock) -> None:
        if signal.of in self.clocks or len(self.clocks) < CLOCKS:
            self.clocks[signal.of] = signal
        else:
            self.left_out["name"] += 1

    def _take_pair(self, signal: RdmaQueuePair) -> None:
        key = tuple(map(str, signal.key))
        row = self.pairs.row(key, signal.at_ns)
        if row is not None:
            pair_grown(row, signal, self.of_host)
            if signal.closed:
                self.pairs.remove(key)

    def _take_cost(self, signal: Self) -> None:
        old = self.cost
        if old is None or signal.window_ns >= old.window_ns or signal.at_ns - old.at_ns > _ONE_LOOK_NS:
            self.cost = signal

    def _take_state(self, signal: PathState) -> None:
        self.steering_heard_ns = signal.at_ns


# What is done with some kinds besides what is done with the row that they are about.
_BESIDES: Final[dict[type, Callable[[Model, Any], None]]] = {
    Clock: Model._take_clock,
    RdmaQueuePair: Model._take_pair,
    Self: Model._take_cost,
    PathState: Model._take_state,
}
