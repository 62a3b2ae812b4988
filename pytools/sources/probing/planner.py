"""Plans probes ahead in the schedule, and records in the sessions what became of them.

A tick is one probe of each session, in some also a coded pair where the peer has its own clock. With several peers
there are two ticks in an interval, each for every other peer, so a fault of an interface shows in half the time. Extra
ticks are planned between them for a moment when a peer's answers are late. Times are CLOCK_MONOTONIC nanoseconds. One
thread.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import Clocks, Probe
from pytools.estimators.windows import MISSING, Rows, how_many
from pytools.sources.probing.measurements import LOST, SENT, Measurements
from pytools.sources.probing.paths import Session
from pytools.sources.probing.program import ProbeProgram
from pytools.sources.probing.schedule import Group, Schedule
from pytools.sources.probing.sessions import (
    AHEAD_NS,
    EXTRA,
    EXTRA_EVERY_NS,
    EXTRA_TICKS,
    FREE,
    LEAST_TICKS,
    OUTSTANDING,
    TIMED_OUT,
    Sessions,
)
from pytools.sources.probing.ticks import LEAST_HALVED_NS, Kind, Messages, Salvo, halves, one_each, with_pairs

_PATIENCE_NS: Final = 100_000_000  # what would be later is left out: a long pause must not end in a large burst
_EXTRA_PATIENCE_NS: Final = EXTRA_EVERY_NS  # until the next of them
_MOST_AHEAD: Final = 20_000  # probes that are planned; with more sessions it is for a shorter time
_MOST_EXTRA: Final = 32  # sessions that an extra tick probes; paths share queues, so those of other peers show as much

_BETWEEN, _STEADY = range(2)  # kinds of ticks: extra ones, and from here on with pairs and without, for each half

_NO_TIMES: Final = np.zeros(0, np.int64)


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
        self, probe: Probe, clocks: Clocks | None, measurements: Measurements, program: ProbeProgram, schedule: Schedule
    ) -> None:
        super().__init__(probe, clocks, measurements)
        self.schedule, self._program = schedule, program
        self.drops = dict.fromkeys(("send_refused", "send_buffer_full", "missed_sends", "missed_extra"), 0)
        self.wire_bytes = self.next_ns = 0
        self._interval_ns = self._step_ns = int(probe.interval_ms * 1e6)  # of a session, and between two ticks
        self._pair_every = 1 if clocks is None else clocks.pair_every(probe)
        self._spacing_ns = 0 if clocks is None else int(clocks.spacing_us * 1000)  # of a coded pair
        self._kinds: list[Kind] = []
        self._probed: Sequence[Session] = ()
        self._parts = 1  # of an interval, each with a tick of its own
        self._ticks = 1  # that can be planned ahead, without extra ones
        self._by_path = np.zeros((0, 2, 0), np.int64)  # see `_by_path_of_kinds`; not known yet
        self._ahead = 0  # of these, that are planned and of which it is not known yet what became of them
        self._given = np.zeros(1, np.int64)  # ticks of each kind that were planned and not withdrawn
        self._kind_of, self._place_of = np.zeros((2, 1), np.intp)  # by tick, modulo: its kind, and its place among them
        self._laid_out_bytes = 0  # of the schedule's memory: what follows is for extra ticks
        self._noted = 0  # of so many it is known what became of them
        self.ports: list[int] = []  # of ours, by flow

    @property
    def probes(self) -> int:
        """How many leave in an interval, at most."""
        return sum(len(kind.rows) for kind in self._kinds[_STEADY::2])

    def _lay_out(self, sessions: Sequence[Session]) -> None:
        """Make room for the probes of as many ticks as are planned ahead."""
        self._probed = sessions
        if not sessions:
            self._kinds, self.next_ns = [], 0
            return
        every = self._pair_every
        parts = halves(sessions, self._interval_ns)
        salvos = [with_pairs(part, self._spacing_ns) for part in parts]
        largest = sum(len(volley) for salvo in salvos for volley, _ in salvo)
        wanted = min(AHEAD_NS // self._interval_ns, _MOST_AHEAD // max(1, largest))
        intervals = every * max(-(-LEAST_TICKS // every), wanted // every)
        self._parts, self._ticks = len(parts), len(parts) * intervals
        self._step_ns = self._interval_ns // self._parts
        self.schedule.set_ticks(self._ticks + EXTRA_TICKS)
        self._kind_of, self._place_of = np.zeros((2, self._ticks + EXTRA_TICKS), np.intp)
        paired = intervals // every  # ticks of each half that have pairs
        self._kinds = [self._kind((), 0)]
        for part, salvo in zip(parts, salvos, strict=True):
            self._kinds.append(self._kind(salvo, paired))
            self._kinds.append(self._kind(one_each(part), intervals - paired))
        self._given = np.zeros(len(self._kinds), np.int64)
        self._by_path = self._by_path[..., :0]
        self._laid_out_bytes = self.schedule.used_bytes

    def _kind(self, salvo: Salvo, times: int) -> Kind:
        return Kind(salvo, times, self._probe, self.schedule, len(self._next_seq))

    # ---- ahead ----

    def plan(self, now_ns: int) -> None:
        """Plan ahead, when less than two thirds of what could be is planned."""
        if self._kinds and 3 * self._ahead <= 2 * self._ticks:
            self._add_steady(now_ns, self._ticks - self._ahead)

    def _add_steady(self, now_ns: int, ticks: int, extra_ns: NDArray[np.int64] = _NO_TIMES) -> None:
        """Plan so many more of those that come every interval, and extra ones at these times."""
        if self.next_ns + self._interval_ns < now_ns:  # we were kept waiting for longer than we had planned
            if self.next_ns:
                self.drops["missed_sends"] += (now_ns - self.next_ns) // self._step_ns
            self.next_ns = now_ns
        due_ns = self.next_ns + np.arange(ticks) * self._step_ns
        self.add(due_ns, max(_PATIENCE_NS, self._interval_ns), extra_ns)

    def hurry(self, paths: Rows, alone: bool = False) -> bool:
        """For a moment probe more often: the peers of these paths along all their paths, and others as there is room.

        Or these paths alone.

        Returns whether extra probes leave: where those of every interval are as frequent, none do.

        An answer is overdue: either the probe was lost, or it waits in a queue. Through a queue that has just grown the
        first answers come back late; by then extra probes along other paths have overtaken several of those along it.

        Raises
        ------
        CapabilityError
            If the process that sends has gone, and cannot be started again.
        """
        if self._interval_ns < LEAST_HALVED_NS:
            return False
        asked = np.isin(self._peer, self._peer[paths * self._probe.flows])
        only = set(paths.tolist())
        sessions = [each for each in self._probed if each.counts and (not alone or each.pinned.index in only)]
        sessions.sort(key=lambda each: not asked[each.row])  # those asked for first
        if not sessions:
            return False
        with self.schedule.held() as withdrawn:
            self.note_sent()
            self._withdraw(*withdrawn)
            self.schedule.rewind(self._laid_out_bytes)
            self._kinds[_BETWEEN] = self._kind(one_each(sessions[:_MOST_EXTRA], EXTRA), EXTRA_TICKS)
            self._by_path = self._by_path[..., :0]
        now_ns = time.monotonic_ns()
        self._add_steady(now_ns, self._ticks, now_ns + np.arange(EXTRA_TICKS) * EXTRA_EVERY_NS)
        return True

    def add(self, due_ns: NDArray[np.int64], patience_ns: int, extra_ns: NDArray[np.int64] = _NO_TIMES) -> None:
        """Plan one tick for each of these times, which ascend, and an extra one for each of those.

        Those that would be later by `patience_ns` are left out; extra ones by the time to the next of them.
        """
        interval, part = np.divmod(self._given[_STEADY:].sum() + np.arange(len(due_ns)), self._parts)
        kind_of = _STEADY + 2 * part + (interval % self._pair_every != 0)
        self.next_ns = int(due_ns[-1]) + self._step_ns
        self._ahead += len(due_ns)
        if len(extra_ns):
            due_ns = np.concatenate([due_ns, extra_ns])
            kind_of = np.concatenate([kind_of, np.full(len(extra_ns), _BETWEEN)])
            order = np.argsort(due_ns, kind="stable")
            due_ns, kind_of = due_ns[order], kind_of[order]
        self._oldest_ns = min(self._oldest_ns, int(due_ns[0]))
        ticks = (self.schedule.planned + np.arange(len(due_ns))) % len(self._kind_of)
        self._kind_of[ticks] = kind_of
        groups: list[list[Group]] = [[] for _ in ticks]
        # How many ticks of each kind come before each: its sessions' numbers go on from there.
        is_of = kind_of[:, None] == np.arange(len(self._kinds))
        before = is_of.cumsum(axis=0) - is_of
        starts = self._next_seq + before @ np.array([kind.by_session for kind in self._kinds])
        for number, kind in enumerate(self._kinds):
            chosen = is_of[:, number].nonzero()[0]
            if not len(chosen):
                continue
            places = (self._given[number] + np.arange(len(chosen))) % kind.times
            self._place_of[ticks[chosen]] = places
            numbers = starts[chosen][:, kind.rows] + kind.turns
            kind.at[places] = at = kind.rows * self._slots + (numbers & (self._slots - 1))
            self._seq.put(at, numbers)
            self._state.put(at, OUTSTANDING)
            self._there.put(at, MISSING)
            self._sent_ns.reshape(-1)[at], self._part.reshape(-1)[at] = due_ns[chosen, None], kind.parts
            seq = self._program.seq(kind.rows, numbers)
            for made in kind.messages:
                made.frames.fill(places, seq[:, made.within])
                for tick, place in zip(chosen.tolist(), places.tolist(), strict=True):
                    groups[tick] += made.groups[place]
            self._given[number] += len(chosen)
            self._next_seq += len(chosen) * kind.by_session
        too_late_ns = due_ns + np.where(kind_of == _BETWEEN, _EXTRA_PATIENCE_NS, patience_ns)
        self.schedule.plan(due_ns, too_late_ns, groups)

    def _kinds_of(self, ticks: NDArray[np.int64]) -> NDArray[np.intp]:
        return self._kind_of[ticks % len(self._kind_of)]

    # ---- afterwards ----

    def note_sent(self) -> None:
        """Record what has been sent, failed or not, but not what the socket had no room for."""
        first, self._noted = self._noted, self.schedule.done
        if self._noted == first:
            return
        ticks = np.arange(first, self._noted)
        kinds, began_ns = self._kinds_of(ticks), self.schedule.began(ticks)
        extra = kinds.tolist().count(_BETWEEN)
        self._ahead -= len(ticks) - extra
        if 0 in began_ns.tolist():
            self._left_out(ticks[began_ns == 0])
            ticks, kinds, began_ns = (each[began_ns != 0] for each in (ticks, kinds, began_ns))
        counts = self._by_path_of_kinds()[kinds]
        for kind, chosen, places in self._by_kind(ticks):
            self._sent_ns.reshape(-1)[kind.at[places]] = began_ns[chosen, None]
            self.wire_bytes += len(places) * kind.wire_bytes
            for made in kind.messages:
                results = made.frames.results(places)
                if how_many(results > 0) < results.size:
                    self._refused(kind, made, places, results, counts[:, 1], chosen)
        self._measurements.sent(counts[:, 0].sum(axis=0))
        liveness, between = self._measurements.liveness, kinds == _BETWEEN
        for log, chosen in (liveness.extra, between), (liveness.steady, ~between):
            if np.count_nonzero(chosen):
                log.sent(began_ns[chosen], counts[chosen, 1])

    def _by_path_of_kinds(self) -> NDArray[np.int64]:
        """What each kind of ticks sends on each path that is measured, and how many count: shape (kinds, 2, paths)."""
        paths = len(self._measurements.counts)
        if self._by_path.shape[2] != paths:
            self._by_path = np.zeros((len(self._kinds), 2, paths), np.int64)
            for of_kind, kind in zip(self._by_path, self._kinds, strict=True):
                of_kind[:, : kind.by_path.shape[1]] = kind.by_path[:, :paths]
        return self._by_path

    def _left_out(self, ticks: NDArray[np.int64]) -> None:
        steady = how_many(self._kinds_of(ticks) != _BETWEEN)
        self.drops["missed_sends"] += steady
        self.drops["missed_extra"] += len(ticks) - steady
        for kind, _, places in self._by_kind(ticks):
            self._state.put(kind.at[places], FREE)

    def _refused(
        self,
        kind: Kind,
        made: Messages,
        places: NDArray[np.intp],
        results: NDArray[np.int32],
        counts: NDArray[np.int64],
        ticks: NDArray[np.intp],
    ) -> None:
        """Take back what was noted of messages that the kernel did not take."""
        at, within = kind.at[places, made.within], kind.paths[made.within]
        paths = np.broadcast_to(within, results.shape)
        # A full buffer is our own fault, not the path's; probe.c counts what it dropped.
        full = (results == 0) | (results == -errno.EAGAIN) | (results == -errno.ENOBUFS)
        self.drops["send_buffer_full"] += how_many(full)
        self.wire_bytes -= how_many(full) * made.frames.wire_bytes
        self._state.put(at[full], FREE)
        self._measurements.count(SENT, paths[full], -1)
        np.subtract.at(counts, (ticks[:, None], within), full & kind.counts[made.within])
        # No interface any more: as lost as if the network had dropped it, and known at once.
        gone = (results < 0) & ~full
        self.drops["send_refused"] += how_many(gone)
        self._state.put(at[gone], TIMED_OUT)
        self._measurements.count(LOST, paths[gone])

    def _withdraw(self, begun: int, planned: int) -> None:
        """Let go of the ticks that are not sent any more: their numbers and their times are given out again."""
        ticks = np.arange(begun, planned)
        kinds = self._kinds_of(ticks)
        steady = how_many(kinds != _BETWEEN)
        self._ahead -= steady
        self.next_ns -= steady * self._step_ns
        self._given -= np.bincount(kinds, minlength=len(self._given))
        for kind, chosen, places in self._by_kind(ticks):
            self._next_seq -= len(chosen) * kind.by_session
            self._state.put(kind.at[places], FREE)

    def _by_kind(self, ticks: NDArray[np.int64]) -> Iterator[tuple[Kind, NDArray[np.intp], NDArray[np.intp]]]:
        """Of each kind that there are any of: which of these ticks, and the place of each among its times."""
        kinds, places = self._kinds_of(ticks), self._place_of[ticks % len(self._place_of)]
        for number in set(kinds.tolist()):
            chosen = (kinds == number).nonzero()[0]
            yield self._kinds[number], chosen, places[chosen]
