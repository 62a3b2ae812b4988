"""What metrics are made from: a fold of signals, bounded whatever the network does. Pure.

Single connections never enter it, and queue pairs only as sums: what has a row is a path, an interface, a nexthop, a
reason. Times are CLOCK_MONOTONIC nanoseconds of the agent's host. One thread at a time: a lock is the caller's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from pytools.signals import (
    Act,
    AnySignal,
    AppDelay,
    Clock,
    Link,
    LinkEvent,
    NexthopGroup,
    PacketDrops,
    Path,
    PathDelay,
    PathEcn,
    PathLiveness,
    PathMtu,
    PathState,
    ProbeSamples,
    RdmaPort,
    RdmaQueuePair,
    RdmaSight,
    RdmaSuspects,
    Self,
    TcpHost,
    TcpPath,
)
from pytools.views.metrics.parts import Histogram, Table, Totals
from pytools.views.metrics.rows import CAUSES, AppRow, GroupRow, LinkRow, PairRow, PathRow, PortRow

# `self` is not among them: it is asked for in short looks, because the kernel times every program meanwhile.
TYPES: Final = frozenset(
    {
        *("path_delay", "path_liveness", "probe_samples", "path_mtu", "path_ecn", "app_delay", "clock"),
        *("tcp_path", "tcp_host", "packet_drops", "link", "link_event", "nexthop_group", "path_state", "act"),
        *("rdma_port", "rdma_qp", "rdma_suspects", "rdma_sight"),
    }
)
_SECOND_NS: Final = 1_000_000_000
FRESH_NS: Final = 15 * _SECOND_NS  # what was not heard of for so long (or three windows) is not vouched for
COST_FRESH_NS: Final = 60 * _SECOND_NS  # of what the agent costs, which is looked at now and then
FORGOTTEN_NS: Final = 3600 * _SECOND_NS  # totals of what was not heard of for so long go
_ONE_LOOK_NS: Final = 5 * _SECOND_NS

PATHS: Final = 512
INTERFACES: Final = 64
GROUPS: Final = 512
MEMBERS: Final = 16  # of a group
PORTS: Final = 64
NAMES: Final = 256  # drop counters, reasons of dropped packets, programs, hooks: each so many
QUEUE_PAIRS: Final = 16_384  # have no series of their own
CLOCKS: Final = 16_384  # nor have the clocks of other hosts
PAIR_COUNTS: Final = ("posted", "completed", "posted_bytes", "completed_bytes", "refused_posts", "untracked")


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
        self.paths: Table[Path, PathRow] = Table(PATHS, PathRow)
        self.apps: Table[tuple[Path, str], AppRow] = Table(2 * PATHS, lambda key: AppRow(*key))
        self.links: Table[str, LinkRow] = Table(INTERFACES, LinkRow)
        self.groups: Table[int, GroupRow] = Table(GROUPS, GroupRow)
        self.pairs: Table[tuple[str, int, int], PairRow] = Table(QUEUE_PAIRS, PairRow)
        self.ports: Table[tuple[str, int], PortRow] = Table(PORTS, PortRow)
        self.impossible = 0  # round trips below zero
        self.names_left_out = 0  # names beyond NAMES and members beyond MEMBERS, each time they were heard
        self.clocks: dict[str, Clock] = {}
        self.tcp: TcpHost | None = None
        self.tcp_totals = Totals()
        self.packet_drops = Totals()
        self.drops = Totals()
        self.program_runs, self.program_times = Totals(), Totals()
        self.cost: Self | None = None  # of the longest window of the last look
        self.newest_cost: Self | None = None
        self.acts: Counter[tuple[str, str]] = Counter()  # by actuator and outcome
        self.time_to_act = Histogram()
        self.steering_heard_ns: int | None = None  # when a controller last spoke
        self.pair_sums: Counter[str] = Counter()
        self.pair_errors: Counter[str] = Counter()
        self.suspects: RdmaSuspects | None = None
        self.sight: RdmaSight | None = None
        of_paths = (PathDelay, PathLiveness, ProbeSamples, PathMtu, PathEcn, TcpPath, PathState)
        self._takers: dict[type, Callable[[Any], None]] = dict.fromkeys(of_paths, self._take_path) | {
            AppDelay: self._take_app,
            Clock: self._take_clock,
            Link: self._take_link,
            LinkEvent: self._take_link,
            NexthopGroup: self._take_group,
            TcpHost: self._take_host,
            PacketDrops: self._take_drops,
            Self: self._take_cost,
            Act: self._take_act,
            RdmaQueuePair: self._take_pair,
            RdmaPort: self._take_port,
            RdmaSuspects: self._take_suspects,
            RdmaSight: self._take_sight,
        }

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
        return self.connected and now_ns - max(self.heard_ns, self.connected_ns) <= FRESH_NS

    def is_fresh(self, at_ns: int, now_ns: int, window_ns: int = 0) -> bool:
        """Whether something said then still stands."""
        return self.connected and now_ns - at_ns <= max(FRESH_NS, 3 * window_ns)

    def left_out(self) -> dict[str, int]:
        """Signals for which there was no room, by kind."""
        return {
            "path": self.paths.left_out,
            "app": self.apps.left_out,
            "interface": self.links.left_out,
            "group": self.groups.left_out,
            "queue_pair": self.pairs.left_out,
            "port": self.ports.left_out,
            "name": self.names_left_out,
            "round_trip": self.impossible,
        }

    def forget(self, now_ns: int) -> None:
        """Make room: rows of what has not been heard of for an hour go."""
        for table in (self.paths, self.apps, self.links, self.groups, self.pairs, self.ports):
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
            taker = self._takers.get(type(signal))
            if taker is not None:
                taker(signal)

    def _take_path(
        self, signal: PathDelay | PathLiveness | ProbeSamples | PathMtu | PathEcn | TcpPath | PathState
    ) -> None:
        if isinstance(signal, PathState):
            self.steering_heard_ns = signal.at_ns
        key = Path(signal.host, "", "", "", signal.interface) if isinstance(signal, TcpPath) else signal.path
        if isinstance(signal, TcpPath) and signal.path is not None:
            key = signal.path
        row = self.paths.row(key, signal.at_ns)
        if row is None:
            return
        match signal:
            case PathDelay():
                row.take_delay(signal)
            case PathLiveness():
                row.liveness = signal
            case ProbeSamples():
                self.impossible += row.take_samples(signal)
            case PathMtu():
                row.mtu = signal
            case PathEcn():
                row.take_marks(signal, self.epoch)
            case TcpPath():
                row.take_tcp(signal)
            case PathState():
                row.state = signal

    def _take_app(self, signal: AppDelay) -> None:
        if signal.path is None or signal.local:  # of no measured path, or of a single flow
            return
        row = self.apps.row((signal.path, signal.protocol), signal.at_ns)
        if row is not None:
            row.take(signal)

    def _take_clock(self, signal: Clock) -> None:
        if signal.of in self.clocks or len(self.clocks) < CLOCKS:
            self.clocks[signal.of] = signal
        else:
            self.names_left_out += 1

    def _take_link(self, signal: Link | LinkEvent) -> None:
        row = self.links.row(signal.interface, signal.at_ns)
        if row is None:
            return
        if isinstance(signal, Link):
            row.take(signal)
        else:
            row.take_event(signal)

    def _take_group(self, signal: NexthopGroup) -> None:
        row = self.groups.row(signal.group_id, signal.at_ns)
        if row is None:
            return
        row.group = signal
        for member in signal.members:
            labels = (member.interface, member.gateway)
            if labels in row.packets or len(row.packets) < MEMBERS:  # those that left the group may come back
                row.packets.take(labels, member.packets)
            else:
                self.names_left_out += 1

    def _take_host(self, signal: TcpHost) -> None:
        self.tcp, take = signal, self.tcp_totals.take
        for cause in CAUSES:
            take(("retransmitted", cause), getattr(signal.retransmitted, cause), self.epoch)
        for name in (
            *("retransmitted_bytes", "timeouts", "spurious_segments", "sent_bytes", "zero_windows", "created"),
            *("evicted", "resets_sent", "resets_refused", "resets_received"),
        ):
            take((name,), getattr(signal, name), self.epoch)

    def _take_drops(self, signal: PacketDrops) -> None:
        for each in signal.reasons:
            self._count(self.packet_drops, each.reason, each.total_packets)

    def _take_cost(self, signal: Self) -> None:
        old = self.cost
        if old is None or signal.window_ns >= old.window_ns or signal.at_ns - old.at_ns > _ONE_LOOK_NS:
            self.cost = signal
        self.newest_cost = signal
        for name, count in signal.drops.items():
            self._count(self.drops, name, count)
        for program in signal.programs:
            self._count(self.program_runs, program.name, program.runs)
            self._count(self.program_times, program.name, program.run_time_ns)

    def _take_act(self, signal: Act) -> None:
        if (signal.actuator, signal.outcome) in self.acts or len(self.acts) < NAMES:
            self.acts[signal.actuator, signal.outcome] += 1
        if signal.outcome == "applied" and signal.acknowledged_ns is not None:
            self.time_to_act.observe(max(signal.acknowledged_ns - signal.seen_ns, 0))

    def _take_pair(self, signal: RdmaQueuePair) -> None:
        key = (signal.device, signal.qp_number, signal.owner.pid)
        row = self.pairs.row(key, signal.at_ns)
        if row is None:
            return
        row.pair = signal
        for name in PAIR_COUNTS:
            self.pair_sums[name] += row.grown(name, getattr(signal, name))
        for status, count in signal.errors.items():
            if status in self.pair_errors or len(self.pair_errors) < NAMES:
                self.pair_errors[status] += row.grown(f"error {status}", count)
        if signal.closed:
            self.pairs.remove(key)

    def _take_port(self, signal: RdmaPort) -> None:
        row = self.ports.row((signal.device, signal.port), signal.at_ns)
        if row is not None:
            row.take(signal)

    def _take_suspects(self, signal: RdmaSuspects) -> None:
        self.suspects = signal

    def _take_sight(self, signal: RdmaSight) -> None:
        self.sight = signal

    def _count(self, totals: Totals, name: str, reading: int | None) -> None:
        """A counter that an agent keeps under a name, of which there may be any number."""
        if (name,) in totals or len(totals) < NAMES:
            totals.take((name,), reading, self.epoch)
        else:
            self.names_left_out += 1
