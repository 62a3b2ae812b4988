"""What was heard of one path, group, clock, queue pair or host, as it comes in; `story` freezes it. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from operator import add
from typing import Final

import msgspec

from pytools.figures import FOLLOWED, Figure, supports_one_way
from pytools.signals import (
    Clock,
    HoldState,
    Job,
    JobCause,
    NexthopGroup,
    PathDelay,
    PathState,
    RdmaQueuePair,
    RdmaSight,
    RdmaSuspects,
    Self,
    TcpPath,
    nexthop_name,
)
from pytools.views.model import is_shown
from pytools.views.report.records import (
    ClockStory,
    Direction,
    Held,
    HostStory,
    JobStory,
    PathStory,
    QueuePairStory,
    WeightStory,
)
from pytools.views.report.runs import Runs
from pytools.views.report.series import SLOTS, Series, Spread, Sums

SILENCE_NS: Final = 5_000_000_000  # of what is told about once a second
_MESSAGES: Final = 8  # bandwidth over sliding windows of so many
_MEMBERS: Final = 16


class HeardPath:
    """One path."""

    def __init__(self) -> None:
        self._lines = {each: Series() for each in FOLLOWED}
        self._forward, self._reverse = ({each: Spread() for each in FOLLOWED} for _ in range(2))
        self._clocks: dict[str, int] = {}
        self._states, self._resent = Runs(SILENCE_NS), Sums()
        self._last: PathDelay | None = None
        self._any: PathDelay | PathState | HoldState | TcpPath | None = None
        self._hold: Held | None = None
        self._held = Held()
        self._tcp_ns = self._windows = self._lost = self._settled = self._segments_out = 0
        self.late = 0

    def take(self, signal: PathDelay | PathState | HoldState | TcpPath) -> None:
        """One more word of it."""
        self._any = signal
        match signal:
            case PathDelay():
                self._delay(signal)
            case PathState():
                note = f"{signal.reason} [{signal.under}]" if signal.under else signal.reason
                self._states.add(signal.unix_ns, signal.state, note)
            case HoldState():
                self._holding(signal)
            case TcpPath():
                self._tcp(signal)

    def _delay(self, new: PathDelay) -> None:
        last = self._last
        if last is not None and not is_shown(new.window_ns, last.window_ns, new.unix_ns - last.unix_ns):
            return
        self._last = new
        self._windows += 1
        self._clocks[new.clock] = self._clocks.get(new.clock, 0) + 1
        self._lost += new.lost
        self._settled += new.received + new.lost
        for way, spreads in ((new.forward, self._forward), (new.reverse, self._reverse)):
            for figure, spread in spreads.items():
                value, bound = figure.value(new, way), figure.measure.bound(new, way)
                known = None if value is None or value < 0 else round(value)
                if known is not None:
                    spread.add(known, bound)
                if spreads is self._forward:
                    self._lines[figure].add(new.unix_ns, known, bound)

    def _holding(self, new: HoldState) -> None:
        """Counters began with the hold: of one that was there before this time only what came since counts."""
        now = Held(new.held_packets, new.held_bytes, new.waited_ns, new.samples, new.samples_above)
        if self._hold is not None:
            self._held = Held(*map(add, astuple(self._held), astuple(now.grown(self._hold))))
        self._hold = now

    def _tcp(self, new: TcpPath) -> None:
        if new.unix_ns <= self._tcp_ns:
            self.late += 1
            return
        self._tcp_ns = new.unix_ns
        self._segments_out += new.segments_out
        self._resent.add(new.unix_ns, msgspec.structs.asdict(new.retransmitted))

    def story(self, until_ns: int, slots: int) -> PathStory:
        """All of it."""
        assert self._any is not None and self._any.path is not None
        step_ns = self._last.window_ns if self._last is not None else SILENCE_NS
        return PathStory(
            self._any.host,
            self._any.path,
            step_ns if self._last is not None else 0,
            self._windows,
            _direction(self._forward),
            _direction(self._reverse),
            {figure: series.line(step_ns, slots) for figure, series in self._lines.items()},
            self._lost,
            self._settled,
            self._clocks,
            self._states.bands(until_ns),
            (),
            self._resent.bars(slots),
            self._segments_out,
            None if self._hold is None else self._held,
        )


def _direction(spreads: Mapping[Figure, Spread]) -> Direction:
    measured = ((figure, spread.quantile(figure.share)) for figure, spread in spreads.items())
    return Direction({figure: value for figure, value in measured if value is not None})


class HeardGroup:
    """One nexthop group."""

    def __init__(self) -> None:
        self.last: NexthopGroup | None = None
        self._members: dict[str, Series] = {}

    def take(self, signal: NexthopGroup) -> None:
        """Its weights now; a member that is gone has none."""
        self.last = signal
        weights = {nexthop_name(each.gateway, each.interface): each.weight for each in signal.members}
        for name, weight in weights.items():
            if name in self._members or len(self._members) < _MEMBERS:
                self._members.setdefault(name, Series()).add(signal.unix_ns, weight)
        for name in self._members.keys() - weights.keys():
            self._members[name].add(signal.unix_ns, 0)

    def story(self, acts: tuple[int, ...]) -> WeightStory:
        """All of it."""
        assert self.last is not None
        lines = {name: series.line(SILENCE_NS) for name, series in sorted(self._members.items())}
        return WeightStory(self.last.host, self.last.group_id, tuple(self.last.destinations), lines, acts)


class HeardClock:
    """One clock against one reference, as the reference's host tells it where that is heard, else as the first does."""

    def __init__(self) -> None:
        self._last: Clock | None = None
        self._begin()

    def _begin(self) -> None:
        self._bound, self._spread, self._states = Series(), Spread(), Runs(SILENCE_NS)

    def take(self, signal: Clock) -> None:
        """One more word of it."""
        if self._last is not None and signal.host != self._last.host:
            if signal.host != signal.reference:
                return
            self._begin()
        self._last = signal
        bound_ns = signal.bound_ns if supports_one_way(signal.state) else None
        self._bound.add(signal.unix_ns, bound_ns)
        if bound_ns is not None and bound_ns >= 0:
            self._spread.add(bound_ns)
        self._states.add(signal.unix_ns, signal.state)

    def story(self, until_ns: int) -> ClockStory:
        """All of it."""
        last = self._last
        assert last is not None
        most = self._spread.quantile(1.0)
        line, states = self._bound.line(SILENCE_NS, SLOTS), self._states.bands(until_ns)
        return ClockStory(last.of, last.reference, last.host, last, line, states, most)


class HeardQueuePair:
    """One RDMA queue pair."""

    def __init__(self) -> None:
        self._last: RdmaQueuePair | None = None
        self._bandwidth, self._verdicts = Series(), Runs(SILENCE_NS)

    def take(self, signal: RdmaQueuePair) -> None:
        """One more word of it."""
        self._last = signal
        of = next((each for each in signal.bandwidths if each.messages == _MESSAGES), None)
        self._bandwidth.add(signal.unix_ns, of.mean_bps if of is not None else None)
        self._verdicts.add(signal.unix_ns, signal.verdict, signal.reason)

    def story(self, until_ns: int) -> QueuePairStory:
        """All of it."""
        assert self._last is not None
        return QueuePairStory(self._last, self._bandwidth.line(SILENCE_NS), self._verdicts.bands(until_ns))


class HeardJob:
    """One distributed job on one host."""

    def __init__(self) -> None:
        self._last: Job | None = None
        self._worst: JobCause | None = None
        self._worst_ns = 0
        self._verdicts = Runs(SILENCE_NS)

    def take(self, signal: Job) -> None:
        """One more word of it."""
        self._last = signal
        if signal.why is None:
            return
        self._verdicts.add(signal.unix_ns, signal.why.verdict, signal.why.reason)
        for cause in signal.why.causes[:1]:
            if self._worst is None or cause.share > self._worst.share:
                self._worst, self._worst_ns = cause, signal.unix_ns

    def story(self, until_ns: int) -> JobStory:
        """All of it."""
        assert self._last is not None
        return JobStory(self._last, self._worst, self._worst_ns, self._verdicts.bands(until_ns))


class HeardHost:
    """What an agent says of itself, and of RDMA on its host."""

    def __init__(self) -> None:
        self._first_ns = self._last_ns = self._silences = self._silent_ns = 0
        self._host = ""
        self._before: Self | None = None
        self._now: Self | None = None
        self._sight: RdmaSight | None = None
        self._suspects: RdmaSuspects | None = None

    def heard(self, host: str, unix_ns: int) -> None:
        """Something was told by it."""
        self._host = host
        if self._last_ns and unix_ns - self._last_ns > SILENCE_NS:
            self._silences += 1
            self._silent_ns += unix_ns - self._last_ns
        self._first_ns = min(self._first_ns or unix_ns, unix_ns)
        self._last_ns = max(self._last_ns, unix_ns)

    def take(self, signal: Self | RdmaSight | RdmaSuspects) -> None:
        """One of these."""
        match signal:
            case Self():
                self._before, self._now = self._before or signal, signal
            case RdmaSight():
                self._sight = signal
            case RdmaSuspects():
                self._suspects = signal

    def story(self) -> HostStory:
        """All of it."""
        before, now = self._before, self._now
        drops: dict[str, int] = {}
        if before is not None and now is not None:
            grown = {name: count - before.drops.get(name, 0) for name, count in now.drops.items()}
            drops = {name: count for name, count in grown.items() if count > 0}
        return HostStory(
            self._host,
            self._first_ns,
            self._last_ns,
            self._silences,
            self._silent_ns,
            drops,
            now is not None,
            now.failed if now is not None else {},
            self._sight,
            tuple(self._suspects.suspects) if self._suspects is not None else (),
        )
