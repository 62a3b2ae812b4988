"""What is sent when: probes are planned ahead in the schedule, and what became of them is noted in the sessions.

A tick is one probe of each session, in some also a coded pair where the peer has a clock of its own: ticks
are of one kind or of two. Times are CLOCK_MONOTONIC nanoseconds. One thread.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import Clocks, Probe
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.windows import how_many, occurrence
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing import udp
from pytools.sources.probing.frames import Frames, Lane
from pytools.sources.probing.measurements import LOST, SENT, Measurements
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.program import NUMBERS, ProbeProgram
from pytools.sources.probing.schedule import Group, Schedule
from pytools.sources.probing.sessions import (
    AHEAD_NS,
    FIRST,
    FREE,
    LEAST_TICKS,
    OUTSTANDING,
    SECOND,
    SINGLE,
    TIMED_OUT,
    Sessions,
)

_PATIENCE_NS: Final = 100_000_000  # what would be later is left out: a long pause must not end in a large burst
_MOST_AHEAD: Final = 20_000  # probes that are planned; with more sessions it is for a shorter time

_Probe = tuple[tuple[int, PinnedPath], int]  # a session's row and path, and the probe's part in a coded pair
_Salvo = Sequence[tuple[Sequence[_Probe], int]]  # volleys, and how long after the one before each is to leave


class Volley:
    """Probes of one family that leave at one moment, at each of several ticks.

    Parameters
    ----------
    rows : ndarray of int
        Session of each; those of one session follow each other.
    turns : ndarray of int
        Which probe of its session in the tick each is, from 0.
    parts : ndarray of uint8
        SINGLE, FIRST or SECOND.
    first_seq : ndarray of int
        Of each, the sequence number on the wire of its session's number 0.
    groups : sequence of Group
        Of each time, how the schedule knows it.
    """

    def __init__(
        self,
        made: Frames,
        rows: NDArray[np.intp],
        turns: NDArray[np.intp],
        parts: NDArray[np.uint8],
        first_seq: NDArray[np.int64],
        flows: int,
        groups: Sequence[Group],
    ) -> None:
        self.frames, self.rows, self.turns, self.parts, self.groups = made, rows, turns, parts, groups
        self.first_seq, self.paths = first_seq, rows // flows
        self.counts = (parts == SINGLE) & (rows % flows == 0)  # for silence
        self.at = np.zeros(made.headers.shape, np.intp)  # where in the flat arrays the probes of each time are


class Kind:
    """Ticks of one kind: all that they send.

    Attributes
    ----------
    probes : ndarray of int64
        How many each session sends in one.
    by_path, counting : ndarray of int64
        The same for each path, and of those the ones that count for silence.
    """

    def __init__(self, volleys: Sequence[Volley], times: int, sessions: int, flows: int) -> None:
        self.volleys, self.times = tuple(volleys), times
        self.probes = np.zeros(sessions, np.int64)
        self.by_path, self.counting = np.zeros((2, sessions // flows + 1), np.int64)
        for volley in volleys:
            np.add.at(self.probes, volley.rows, 1)
            np.add.at(self.by_path, volley.paths, 1)
            np.add.at(self.counting, volley.paths[volley.counts], 1)


class Planner(Sessions):
    """The probes of all sessions.

    Attributes
    ----------
    next_ns : int
        When the next tick to be planned is due; 0: as soon as it can.
    wire_bytes : int
        Of requests sent, headers included.
    """

    def __init__(
        self,
        probe: Probe,
        clocks: Clocks | None,
        measurements: Measurements,
        program: ProbeProgram,
        schedule: Schedule,
    ) -> None:
        super().__init__(probe, clocks, measurements)
        self.schedule, self._program = schedule, program
        self.drops = dict.fromkeys(("send_refused", "send_buffer_full", "missed_sends"), 0)
        self.wire_bytes = self.next_ns = 0
        self._interval_ns = int(probe.interval_ms * 1e6)
        self._pair_every = 1 if clocks is None else clocks.pair_every(probe)
        self._spacing_ns = 0 if clocks is None else int(clocks.spacing_us * 1000)
        self._kinds: tuple[Kind, ...] = ()  # ticks with pairs, and those without if there are any
        self._ticks = 1  # that can be planned ahead
        self._noted = 0  # of so many it is known what became of them
        self._ports: list[int] = []  # of ours, by flow

    @property
    def probes(self) -> int:
        """How many leave at once, at most."""
        return int(self._kinds[0].probes.sum()) if self._kinds else 0

    def _lay_out(self, dealt: Mapping[udp.Family, Sequence[tuple[int, PinnedPath]]]) -> None:
        """Make room for the probes of as many ticks as are planned ahead."""
        if not dealt:
            self._kinds, self.next_ns = (), 0
            return
        every = self._pair_every
        salvos = [self._salvo(sessions) for sessions in dealt.values()]
        largest = sum(len(volley) for salvo in salvos for volley, _ in salvo)
        wanted = min(AHEAD_NS // self._interval_ns, _MOST_AHEAD // max(1, largest))
        self._ticks = every * max(-(-LEAST_TICKS // every), wanted // every)
        self.schedule.set_ticks(self._ticks)
        singles = [[([(each, SINGLE) for each in sessions], 0)] for sessions in dealt.values()]
        with_pairs = self._ticks // every
        self._kinds = tuple(
            Kind(
                list(self._volleys(zip(dealt, of_kind, strict=True), times)),
                times,
                len(self._next_seq),
                self._probe.flows,
            )
            for of_kind, times in ((salvos, with_pairs), (singles, self._ticks - with_pairs))
            if times
        )

    def _salvo(self, sessions: Sequence[tuple[int, PinnedPath]]) -> _Salvo:
        """A coded pair for the first session of each path whose peer has its own clock, one probe for all others."""
        paired = [each for each in sessions if self._is_paired(*each)]
        if self._spacing_ns and paired:
            alone, first, second = (
                [(each, part) for each in chosen]
                for chosen, part in ((sessions, SINGLE), (paired, FIRST), (paired, SECOND))
            )
            return (alone, 0), (first, 0), (second, self._spacing_ns)
        parts = [
            (each, part)
            for each in sessions
            for part in ((SINGLE, FIRST, SECOND) if self._is_paired(*each) else (SINGLE,))
        ]
        return ((parts, 0),)

    def _is_paired(self, row: int, pinned: PinnedPath) -> bool:
        return pinned.peer.clock != "shared" and row % self._probe.flows == 0

    def _volleys(self, salvos: Iterable[tuple[udp.Family, _Salvo]], times: int) -> Iterator[Volley]:
        flows, before = self._probe.flows, np.zeros(len(self._next_seq), np.intp)
        for family, salvo in salvos:
            for probes, spacing_ns in salvo:
                lanes = [self._lane(row, pinned, part) for (row, pinned), part in probes]
                made = Frames(family, lanes, self._probe.port, self._probe.dscp, times, self.schedule)
                rows = np.array([lane.session for lane in lanes], np.intp)
                parts = np.array([part for _, part in probes], np.uint8)
                first_seq = self._program.seq(rows, np.zeros(len(rows), np.int64))
                groups = [self.schedule.group(each, spacing_ns) for each in made.headers]
                yield Volley(made, rows, before[rows] + occurrence(rows), parts, first_seq, flows, groups)
                np.add.at(before, rows, 1)

    def _lane(self, row: int, pinned: PinnedPath, part: int) -> Lane:
        flow = row % self._probe.flows
        return Lane(
            session=row,
            path=pinned.index,
            ifindex=pinned.ifindex,
            source=pinned.source,
            destination=pinned.path.address,
            source_port=self._ports[flow],
            error_estimate=wire.error_estimate(STAMP_BOUND_NS, pinned.peer.clock == "shared"),
            counts=part == SINGLE and flow == 0,  # one an interval: three lost at once are no silence
        )

    # ---- ahead ----

    def plan(self, now_ns: int) -> None:
        """Plan ahead, when less than two thirds of what could be is planned."""
        left = self.schedule.planned - self._noted
        if not self.probes or 3 * left > 2 * self._ticks:
            return
        if self.next_ns + self._interval_ns < now_ns:  # we were kept waiting for longer than we had planned
            if self.next_ns:
                self.drops["missed_sends"] += (now_ns - self.next_ns) // self._interval_ns
            self.next_ns = now_ns
        due_ns = self.next_ns + np.arange(self._ticks - left) * self._interval_ns
        self.add(due_ns, max(_PATIENCE_NS, self._interval_ns))

    def add(self, due_ns: NDArray[np.int64], patience_ns: int) -> None:
        """Plan one tick for each of these times, which ascend; those that would be later by so much are left out."""
        first = self.schedule.planned
        ticks = np.arange(first, first + len(due_ns))
        groups: list[list[Group]] = [[] for _ in ticks]
        kinds = [(kind, *self._of_kind(index, ticks)) for index, kind in enumerate(self._kinds)]
        # How many probes of each kind of tick come before each tick: their sessions' numbers go on from there.
        before = [np.cumsum(np.isin(np.arange(len(ticks)), chosen)) for _, chosen, _ in kinds]
        for kind, chosen, places in kinds:
            starts = self._next_seq + sum(
                (count - (each is kind))[chosen, None] * each.probes
                for (each, _, _), count in zip(kinds, before, strict=True)
            )
            for volley in kind.volleys:
                numbers = starts[:, volley.rows] + volley.turns
                at = volley.rows * self._slots + (numbers & (self._slots - 1))
                volley.at[places] = at
                self._seq.reshape(-1)[at], self._sent_ns.reshape(-1)[at] = numbers, due_ns[chosen, None]
                self._state.reshape(-1)[at], self._part.reshape(-1)[at] = OUTSTANDING, volley.parts
                volley.frames.fill(places, volley.first_seq + (numbers & (NUMBERS - 1)))
                for tick, place in zip(chosen.tolist(), places.tolist(), strict=True):
                    groups[tick].append(volley.groups[place])
        for kind, chosen, _ in kinds:
            self._next_seq += len(chosen) * kind.probes
        self.next_ns = int(due_ns[-1]) + self._interval_ns
        self.schedule.plan(due_ns, due_ns + patience_ns, groups)

    def _of_kind(self, kind: int, ticks: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Which of these ticks are of a kind, and the place of each among its times."""
        every = self._pair_every
        chosen = np.flatnonzero((ticks % every == 0) == (kind == 0))
        numbers = ticks[chosen] // every if kind == 0 else ticks[chosen] - (ticks[chosen] + every - 1) // every
        return chosen, numbers % self._kinds[kind].times

    # ---- afterwards ----

    def note_sent(self) -> None:
        """Take note of what has been sent; in vain or not, but not what the socket had no room for."""
        ticks = np.arange(self._noted, self.schedule.begun)
        if not len(ticks):
            return
        self._noted += len(ticks)
        began_ns = self.schedule.began(ticks)
        counts = np.zeros((len(ticks), len(self._measurements.counts)), np.int64)
        for index, kind in enumerate(self._kinds):
            chosen, places = self._of_kind(index, ticks)
            left = began_ns[chosen] > 0
            if not left.all():
                for volley in kind.volleys:
                    self._state.reshape(-1)[volley.at[places[~left]]] = FREE
                chosen, places = chosen[left], places[left]
            paths = counts.shape[1]
            counts[chosen] = kind.counting[:paths]
            self._measurements.sent(kind.by_path[:paths] * len(chosen))
            for volley in kind.volleys:
                self._sent_ns.reshape(-1)[volley.at[places]] = began_ns[chosen, None]
                self.wire_bytes += len(places) * len(volley.rows) * volley.frames.wire_bytes
                results = volley.frames.results(places)
                if not (results > 0).all():
                    self._refused(volley, places, results, counts, chosen)
        self.drops["missed_sends"] += how_many(began_ns == 0)
        self._measurements.liveness.sent(began_ns[began_ns > 0], counts[began_ns > 0])

    def _refused(
        self,
        volley: Volley,
        places: NDArray[np.intp],
        results: NDArray[np.int32],
        counts: NDArray[np.int64],
        ticks: NDArray[np.intp],
    ) -> None:
        """Take back what was noted of messages that the kernel did not take."""
        at, paths = volley.at[places], np.broadcast_to(volley.paths, results.shape)
        # A full buffer is our own fault, not the path's; probe.c counts what it dropped.
        full = (results == 0) | (results == -errno.EAGAIN) | (results == -errno.ENOBUFS)
        self.drops["send_buffer_full"] += how_many(full)
        self.wire_bytes -= how_many(full) * volley.frames.wire_bytes
        self._state.reshape(-1)[at[full]] = FREE
        self._measurements.count(SENT, paths[full], -1)
        np.subtract.at(counts, (ticks[:, None], volley.paths), full & volley.counts)
        # No interface any more: as lost as if the network had dropped it, and known at once.
        gone = (results < 0) & ~full
        self.drops["send_refused"] += how_many(gone)
        self._state.reshape(-1)[at[gone]] = TIMED_OUT
        self._measurements.count(LOST, paths[gone])

    def _withdraw(self, begun: int, planned: int) -> None:
        """Let go of the ticks that are not sent any more: their numbers and their times are given out again."""
        ticks = np.arange(begun, planned)
        if len(ticks):
            self.next_ns -= len(ticks) * self._interval_ns
        for index, kind in enumerate(self._kinds):
            chosen, places = self._of_kind(index, ticks)
            self._next_seq -= len(chosen) * kind.probes
            for volley in kind.volleys:
                self._state.reshape(-1)[volley.at[places]] = FREE
