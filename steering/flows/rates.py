"""How fast each TCP connection is, and what it asks for, from successive `TcpFlow` signals. Pure.

A signal says what the kernel had counted at `last_ns`, at most once per `tcp.refresh` (100 ms) of a busy connection.
The rate is what was delivered between two of these, over a short memory: after a rail was cut the old rate is wrong.
Delivered means acknowledged, in order or not (`delivered_segments` times the mean segment), so that a recovery does not
look like a pause with a burst behind it.

What it asks for: a connection that the network holds back (something was retransmitted, a mark came, it is not in the
state Open, or its window is full: rate times round trip fills cwnd) would take more, so its demand has no bound. Any
other is limited by its application, and asks for what it has. A sender that keeps half of its window empty on purpose
(BBR) passes for one of these until a queue grows: then it is left where it is rather than moved in vain.

Rates are bits per second, times CLOCK_MONOTONIC nanoseconds. Bounded: at most `capacity` connections; the least
recently heard of makes room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from pytools.signals import Owner, Path, TcpFlow
from pytools.units import MS
from steering.flows.maxmin import INFINITE
from steering.plan import FlowKey

TCP: Final = 6
MEMORY_NS: Final = 200 * MS  # what a rate reaches back
SILENT_NS: Final = 250 * MS  # a busy connection is heard of sooner
FORGOTTEN_NS: Final = 10_000 * MS  # an idle one is told every few seconds
PEAK_NS: Final = 10_000 * MS  # how long it counts that it was faster
MEAN_NS: Final = 2_000 * MS  # what a mean reaches back: many steps of a job whose connections rest between two
MEAN_LEAST_NS: Final = 400 * MS  # the shortest time of which there is one
_MARK_NS: Final = 200 * MS  # between two looks that are kept for it
HELD_NS: Final = 1_000 * MS  # and that the network held it back: windows are not full all the time
_SHORTEST_NS: Final = 40 * MS  # two looks closer than this make no rate
_FULL: Final = 0.7  # of cwnd in flight on average: the window holds it back
_HELD: Final = frozenset({"cwr", "recovery", "loss"})
OVER: Final = frozenset({"close", "time_wait", "last_ack", "closing", "fin_wait1", "fin_wait2"})


class _Look(NamedTuple):
    at_ns: int
    delivered: int  # segments
    retransmitted: int
    marked: int
    timeouts: int


@dataclass(frozen=True, slots=True)
class FlowRate:
    """One connection as it goes now."""

    key: FlowKey
    path: Path | None  # the measured path it goes over
    interface: str
    owner: Owner
    rate_bps: float
    recent_bps: float  # since the last look but one
    before_bps: float  # between that and the one before; the same while there is none
    mean_bps: float | None  # of the last two seconds; None of one that is too new
    peak_bps: float  # of the last ten seconds
    demand_bps: float  # infinite for one that the network holds back
    troubled: bool  # something of it was lost or marked within the memory, or it waits for its retransmission timer
    srtt_ns: int
    sent_bytes: int  # since it began
    looked_ns: int  # the newest count behind it


class _Track:
    __slots__ = ("first_ns", "held_ns", "looks", "marks", "peak_bps", "peak_ns", "signal")

    def __init__(self, signal: TcpFlow) -> None:
        self.signal, self.first_ns = signal, signal.first_ns
        self.looks: deque[_Look] = deque([_look(signal)])
        self.marks: deque[_Look] = deque(self.looks)
        self.peak_bps, self.peak_ns, self.held_ns = 0.0, 0, -HELD_NS

    def take(self, signal: TcpFlow) -> None:
        self.signal = signal
        new, last = _look(signal), self.looks[-1]
        if new.at_ns - last.at_ns < _SHORTEST_NS:
            return
        self.looks.append(new)
        while len(self.looks) > 2 and self.looks[1].at_ns <= new.at_ns - MEMORY_NS:
            self.looks.popleft()
        if new.at_ns - self.marks[-1].at_ns >= _MARK_NS:
            self.marks.append(new)
            while self.marks[1].at_ns <= new.at_ns - MEAN_NS:
                self.marks.popleft()
        rate = self._between(last, new)
        if rate >= self.peak_bps or new.at_ns - self.peak_ns > PEAK_NS:
            self.peak_bps, self.peak_ns = rate, new.at_ns
        if _lost(last, new) or signal.congestion in _HELD or self._full(rate):
            self.held_ns = new.at_ns

    def rate(self, now: int) -> FlowRate:
        looks, signal = self.looks, self.signal
        last, first = looks[-1], looks[0]
        rate = self._between(first, last)
        recent = self._between(looks[-2], last) if len(looks) > 1 else rate
        before = self._between(looks[-3], looks[-2]) if len(looks) > 2 else recent
        silent = now - last.at_ns
        stopped = silent > SILENT_NS
        if stopped and len(looks) > 1:  # what it delivered is spread over the time in which nothing was heard
            rate *= (last.at_ns - first.at_ns) / (now - first.at_ns)
            recent = 0.0
        held = last.at_ns - self.held_ns < HELD_NS
        return FlowRate(
            key_of(signal),
            *(signal.path, signal.interface, signal.owner),
            *(rate, recent, before),
            mean_bps=self._mean(now),
            peak_bps=max(self.peak_bps, rate),
            demand_bps=INFINITE if held else rate,
            # One that stopped is not: it may wait for the others of its job.
            troubled=_lost(first, last) or signal.stall is not None,
            srtt_ns=signal.srtt_ns or 0,
            sent_bytes=signal.sent_bytes,
            looked_ns=last.at_ns,
        )

    def _mean(self, now: int) -> float | None:
        """What was delivered over a time that begins and ends about when that of every other connection does."""
        first, last = self.marks[0], self.looks[-1]
        lasted = last.at_ns - first.at_ns
        if lasted < MEAN_LEAST_NS:
            return None if now - first.at_ns < FORGOTTEN_NS else 0.0
        return self._between(first, last) * lasted / max(lasted, now - first.at_ns)

    def _between(self, first: _Look, last: _Look) -> float:
        if last.at_ns <= first.at_ns:
            return 0.0
        segments = max(0, last.delivered - first.delivered)
        return 8e9 * segments * _segment_bytes(self.signal) / (last.at_ns - first.at_ns)

    def _full(self, rate_bps: float) -> bool:
        signal = self.signal
        if not signal.srtt_ns or not signal.cwnd_segments:
            return False
        in_flight = rate_bps / 8e9 * signal.srtt_ns
        return in_flight >= _FULL * signal.cwnd_segments * _segment_bytes(signal)


class FlowRates:
    """All connections that are heard of.

    Parameters
    ----------
    capacity : int
        So many are remembered at most.
    """

    def __init__(self, capacity: int = 8192) -> None:
        self._capacity = capacity
        self._tracks: dict[FlowKey, _Track] = {}  # the least recently heard of first
        self.forgotten = 0  # connections that made room

    def take(self, signal: TcpFlow) -> None:
        """Digest a signal. A connection that began later, or whose counts went back, is a new one."""
        key = key_of(signal)
        track = self._tracks.pop(key, None)
        if signal.state in OVER:
            return
        if track is None or _is_another(track, signal):
            track = _Track(signal)
            if len(self._tracks) >= self._capacity:
                del self._tracks[next(iter(self._tracks))]
                self.forgotten += 1
        else:
            track.take(signal)
        self._tracks[key] = track

    def rates(self, now: int) -> Iterator[FlowRate]:
        """Every connection of which a rate is known, and that was heard of lately."""
        for key in [key for key, track in self._tracks.items() if now - track.signal.at_ns > FORGOTTEN_NS]:
            del self._tracks[key]
        for track in self._tracks.values():
            if len(track.looks) > 1:
                yield track.rate(now)

    def new(self, now: int) -> Iterator[FlowRate]:
        """Every connection that was looked at only once, lately: the next step of its job may be seconds away."""
        for track in self._tracks.values():
            if len(track.looks) == 1 and now - track.looks[0].at_ns < FORGOTTEN_NS:
                yield track.rate(now)

    def lives(self, key: FlowKey, now: int) -> bool:
        """Whether a connection is still heard of."""
        track = self._tracks.get(key)
        return track is not None and now - track.signal.at_ns <= FORGOTTEN_NS

    def __len__(self) -> int:
        return len(self._tracks)


def key_of(signal: TcpFlow) -> FlowKey:
    """The connection that a signal is about."""
    return FlowKey(TCP, signal.local, signal.local_port, signal.remote, signal.remote_port)


def _is_another(track: _Track, signal: TcpFlow) -> bool:
    newest = track.signal
    return (
        signal.first_ns != track.first_ns
        or signal.last_ns < newest.last_ns
        or signal.delivered_segments < newest.delivered_segments
        or signal.sent_bytes < newest.sent_bytes
    )


def _look(signal: TcpFlow) -> _Look:
    return _Look(
        signal.last_ns,
        signal.delivered_segments,
        signal.retransmitted_segments,
        signal.delivered_ce_segments,
        signal.timeouts,
    )


def _segment_bytes(signal: TcpFlow) -> float:
    """The mean size of what was sent; of a connection that mostly receives, acknowledgements make it small."""
    fresh = signal.segments_out - signal.retransmitted_segments
    return signal.sent_bytes / fresh if fresh > 0 else 0.0


def _lost(first: _Look, last: _Look) -> bool:
    """Whether something was lost or marked between two looks."""
    return first[2:] != last[2:]
