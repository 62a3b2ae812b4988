"""What is counted of one subject (a path, an interface, a queue pair): the newest signals, and sums over all of them.

Pure; times are CLOCK_MONOTONIC nanoseconds of the agent's host. A row takes signals as they come, some of them fifty
times a second, and is read when somebody asks for metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from pytools.figures import DIRECTIONS
from pytools.signals import (
    AppDelay,
    Link,
    LinkEvent,
    NexthopGroup,
    Path,
    PathDelay,
    PathEcn,
    PathLiveness,
    PathMtu,
    PathState,
    ProbeSamples,
    RdmaPort,
    RdmaQueuePair,
    TcpPath,
)
from pytools.views.metrics.parts import Histogram, Totals
from pytools.views.model import is_shown

CAUSES: Final = ("fast", "timeout", "tail_probe", "syn", "unknown")
TCP_COUNTS: Final = (
    *("sent_bytes", "segments_out", "retransmitted_bytes", "spurious_segments", "timeouts", "delivered_segments"),
    *("delivered_ce_segments", "zero_windows", "resets_sent", "resets_received"),
)
PORT_EVENTS: Final = ("cnp_received", "cnp_sent", "ecn_marked", "out_of_sequence", "timeouts", "receiver_not_ready")


@dataclass(slots=True)
class PathRow:
    """One path; or, where only the interface is named, all TCP on it that is on no measured path."""

    path: Path
    heard_ns: int = 0
    delay: PathDelay | None = None  # of the longest window
    liveness: PathLiveness | None = None
    mtu: PathMtu | None = None
    state: PathState | None = None
    round_trips: Histogram = field(default_factory=Histogram)
    queueing: dict[str, Histogram] = field(default_factory=lambda: {each: Histogram() for each in DIRECTIONS})
    answered: int = 0
    lost: int = 0
    retransmitted: dict[str, int] | None = None  # segments by cause; None before TCP was heard of
    tcp: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TCP_COUNTS, 0))
    marks: Totals = field(default_factory=Totals)

    def take_delay(self, signal: PathDelay) -> None:
        """A window; the longest one is shown."""
        for direction, delay in zip(DIRECTIONS, (signal.forward, signal.reverse), strict=True):
            if delay.queueing_histogram is not None:
                self.queueing[direction].add(delay.queueing_histogram)
        old = self.delay
        if old is None or is_shown(signal.window_ns, old.window_ns, signal.at_ns - old.at_ns):
            self.delay = signal

    def take_samples(self, signal: ProbeSamples) -> int:
        """Probes whose fate is settled, each once; how many round trips are below zero: a clock was stepped."""
        impossible = 0
        for forward, reverse in zip(signal.forward_ns, signal.reverse_ns, strict=True):
            if forward is None and reverse is None:
                self.lost += 1
                continue
            self.answered += 1
            if forward is None or reverse is None:
                continue
            if forward + reverse < 0:
                impossible += 1
            else:
                self.round_trips.observe(forward + reverse)
        return impossible

    def take_tcp(self, signal: TcpPath) -> None:
        """What one window counted."""
        if self.retransmitted is None:
            self.retransmitted = dict.fromkeys(CAUSES, 0)
        for cause in CAUSES:
            self.retransmitted[cause] += getattr(signal.retransmitted, cause)
        for name in TCP_COUNTS:
            self.tcp[name] += getattr(signal, name)

    def take_marks(self, signal: PathEcn, epoch: int) -> None:
        """What arrived marked since the agent started."""
        self.marks.take(("markable",), signal.total_packets, epoch)
        self.marks.take(("marked",), signal.total_ce_packets, epoch)


@dataclass(slots=True)
class AppRow:
    """Application packets of one protocol on a path."""

    path: Path
    protocol: str
    heard_ns: int = 0
    delay: AppDelay | None = None
    samples: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("joined", "ambiguous", "unmatched"), 0))

    def take(self, signal: AppDelay) -> None:
        """A window."""
        self.delay = signal
        for fate in self.samples:
            self.samples[fate] += getattr(signal, fate)


@dataclass(slots=True)
class LinkRow:
    """One interface. Its counters are the kernel's: they begin anew when the interface or its queue is made anew."""

    interface: str
    heard_ns: int = 0
    link: Link | None = None
    counters: Totals = field(default_factory=Totals)
    queue: Totals = field(default_factory=Totals)
    pause_frames: Totals = field(default_factory=Totals)
    paused_us: Totals = field(default_factory=Totals)
    events: dict[str, tuple[int, int]] = field(default_factory=dict)  # how many, and when the newest happened

    def take(self, signal: Link) -> None:
        """A reading."""
        self.link, counters = signal, signal.counters
        for direction in ("received", "sent"):
            for what in ("bytes", "packets", "errors", "drops"):
                self.counters.take((what, direction), getattr(counters, f"{direction}_{what}"))
        self.counters.take(("carrier_changes",), signal.carrier_changes)
        for queue in signal.qdiscs:
            if queue.parent == "root":  # what hangs below it is in its figures
                for what in ("drops", "overlimits", "requeues"):
                    self.queue.take((what,), getattr(queue, what))
        for pause in signal.pauses:
            priority = "all" if pause.priority is None else str(pause.priority)
            self.pause_frames.take((priority, "received"), pause.received)
            self.pause_frames.take((priority, "sent"), pause.sent)
            self.paused_us.take((priority, "received"), pause.received_duration_us)
            self.paused_us.take((priority, "sent"), pause.sent_duration_us)

    def take_event(self, signal: LinkEvent) -> None:
        """Something happened; the same event may be told again to those who come late."""
        count, newest_ns = self.events.get(signal.what, (0, -1))
        if signal.happened_ns > newest_ns:
            self.events[signal.what] = (count + 1, signal.happened_ns)


@dataclass(slots=True)
class GroupRow:
    """One nexthop group."""

    group_id: int
    heard_ns: int = 0
    group: NexthopGroup | None = None
    packets: Totals = field(default_factory=Totals)  # by nexthop; the kernel begins anew with each change of weights


@dataclass(slots=True)
class PairRow:
    """One queue pair: of its counts only what they grew by is kept, in sums over all of them."""

    key: tuple[str, int, int]
    heard_ns: int = 0
    pair: RdmaQueuePair | None = None
    last: dict[str, int] = field(default_factory=dict)

    def grown(self, name: str, reading: int) -> int:
        """By how much a count grew since the last signal."""
        last = self.last.get(name, 0)
        self.last[name] = reading
        return reading - last if reading >= last else reading


@dataclass(slots=True)
class PortRow:
    """One port of an RDMA device."""

    key: tuple[str, int]
    heard_ns: int = 0
    port: RdmaPort | None = None
    events: Totals = field(default_factory=Totals)

    def take(self, signal: RdmaPort) -> None:
        """A reading; the counters are the device's."""
        self.port = signal
        for name in PORT_EVENTS:
            self.events.take((name,), getattr(signal, name))
