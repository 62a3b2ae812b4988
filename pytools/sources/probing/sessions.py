"""The sessions of a sender: the state of each outstanding probe, and its timeout.

A session is one path and one source port. Its row in the arrays is `path index * flows + flow`, its SSID the row
plus one. The state of a probe lies in the row's slot `number mod slots`. Stamps and the differences of stamps are
nanoseconds of the stamping clock, all other times of CLOCK_MONOTONIC. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.config import Clocks, Probe
from pytools.errors import UsageError
from pytools.estimators.delays import or_none
from pytools.estimators.overtaken import LATE_NS, NONE, Overtaken, may_be_lost
from pytools.estimators.windows import MISSING, Growing, power_of_two
from pytools.sources.probing.liveness import BURSTS, HURRY_EVERY_NS
from pytools.sources.probing.measurements import LOST, Measurements
from pytools.sources.probing.program import NUMBERS, SEQ_WRAP

SINGLE, FIRST, SECOND, EXTRA = range(4)  # a probe's part: in a coded pair, or between those that leave every interval
PROBES: Final = 3  # to a pair: the one that leads it included

FREE, OUTSTANDING, ANSWERED, TIMED_OUT, LATE = range(5)  # what has become of the probe in a slot
_MOST_SLOTS: Final = 65_536
AHEAD_NS: Final = 1_920_000_000  # for so long probes are planned ahead, where that is so many ticks
LEAST_TICKS: Final = 4
EXTRA_TICKS: Final = 24  # between the others, so far apart, when a peer keeps us waiting
EXTRA_EVERY_NS: Final = 1_000_000


class Stamps(NamedTuple):
    """What the probes of one path show, in arrays of one shape; MISSING what is not known."""

    forward_at: NDArray[np.int64]  # our stamping clock at the request's egress
    forward: NDArray[np.int64]  # the peer's clock at its ingress minus that
    reverse_at: NDArray[np.int64]  # our stamping clock at the reply's ingress
    reverse: NDArray[np.int64]  # that minus the peer's clock at the reply's egress


class Results(NamedTuple):
    """What became of some probes of one session, as in ProbeSamples."""

    seq: list[int]
    sent_ns: list[int]
    forward_ns: list[int | None]
    reverse_ns: list[int | None]
    extra: list[int]


class Sessions(Growing):
    """Arrays over all sessions and their most recent probes.

    Parameters
    ----------
    clocks : Clocks, optional
        How coded pairs are sent; None when no peer has a clock of its own.

    Raises
    ------
    UsageError
        If more probes could be under way than there is room for.
    """

    def __init__(self, probe: Probe, clocks: Clocks | None, measurements: Measurements) -> None:
        self._probe, self._measurements = probe, measurements
        self._timeout_ns = int(probe.timeout_ms * 1e6)
        self._slots = self.slots_for(probe, clocks)
        self._oldest_ns = 0  # no probe that waits for its answer was sent before
        self.grow(64)

    @staticmethod
    def slots_for(probe: Probe, clocks: Clocks | None) -> int:
        """How many probes of one session are remembered: a power of two.

        Raises
        ------
        UsageError
            If that is more than there is room for.
        """
        remembered_ms, per_interval = probe.timeout_ms + 1000, 1.0
        if clocks is not None:
            remembered_ms = max(remembered_ms, clocks.window_ms + 500)
            per_interval += (PROBES - 1) / clocks.pair_every(probe)
        remembered_ms += max(AHEAD_NS / 1e6, LEAST_TICKS * probe.interval_ms)
        # Along all paths where an answer is overdue, and along those alone that may be dead.
        extra = (2 * remembered_ms * 1e6 / HURRY_EVERY_NS + 1 + BURSTS) * EXTRA_TICKS
        slots = max(64, power_of_two(remembered_ms / probe.interval_ms * per_interval + extra + 8))
        if slots > _MOST_SLOTS:
            raise UsageError(
                f"with a timeout of {probe.timeout_ms:g} ms and an interval of {probe.interval_ms:g} ms too many "
                "probes are under way",
                "shorten probe.timeout or probe less often",
            )
        return slots

    def _allocate(self, rows: int) -> None:
        """The arrays, [row] and [row, slot]."""
        self._next_seq = np.zeros(rows, np.int64)
        self._highest = np.full(rows, -1, np.int64)  # sequence number answered so far
        self._answered_ns = np.zeros(rows, np.int64)  # when the latest probe that was answered had been sent
        self._late_ns = np.zeros(rows, np.int64)  # when a probe was sent that showed one before it to come late
        self._peer = np.full(rows, -1, np.intp)  # sessions with one peer, of one family, have the same number
        self._told = np.zeros(rows, np.int64)  # raw results were given out up to here
        grid = (rows, self._slots)
        self._state = np.full(grid, FREE, np.uint8)
        self._seq = np.full(grid, -1, np.int64)
        self._sent_ns = np.zeros(grid, np.int64)
        self._part = np.full(grid, SINGLE, np.uint8)
        # How much later a probe by another path was that came to the peer first, as answers say; MISSING: none does.
        self._there = np.full(grid, MISSING, np.int64)
        # Of probes that were answered, late or in time; what stands there of others is of an earlier one. In the order
        # of Stamps: when the request left, the forward delay, when the reply came back, the reverse delay.
        self._stamps = np.full((*grid, 4), MISSING, np.int64)

    def expire(self, now_ns: int) -> None:
        """Count probes as lost that were not answered within the timeout."""
        if now_ns - self._timeout_ns <= self._oldest_ns:
            return
        waiting = self._waiting()
        sent_ns = self._sent_ns.take(waiting)
        overdue = sent_ns < now_ns - self._timeout_ns
        if np.count_nonzero(overdue):
            self._state.put(waiting[overdue], TIMED_OUT)
            paths = waiting[overdue] // (self._slots * self._probe.flows)
            self._measurements.count(LOST, paths)
            self._measurements.liveness.lost(paths, sent_ns[overdue])
        self._oldest_ns = int(sent_ns[~overdue].min(initial=now_ns))

    def _waiting(self) -> NDArray[np.intp]:
        """Where in the arrays the probes are that were not answered yet: mostly few."""
        used = len(self._measurements.counts) * self._probe.flows
        waiting: NDArray[np.intp] = (self._state[:used].reshape(-1) == OUTSTANDING).nonzero()[0]
        return waiting

    def note_newest(self, rows: NDArray[np.int64], sent_ns: NDArray[np.int64], newest: NDArray[np.int64]) -> None:
        """Take note of how far behind the probes by other paths were when these probes came to the peer.

        Parameters
        ----------
        rows, sent_ns : ndarray of int64, shape (n,)
            Of each answered probe its session, and when it was sent.
        newest : ndarray of int64, shape (n,)
            Session and number (`session * NUMBERS + number`) of the newest probe that had come in by another interface.
        """
        others, numbers = newest // NUMBERS, newest % NUMBERS
        told = (others < len(self._next_seq)) & (others != rows)
        others = np.where(told, others, 0)
        flows = self._probe.flows
        # Where answers come as they should, a later one of the other path is there by now.
        told &= (self._peer[others] == self._peer[rows]) & (sent_ns > self._answered_ns[others])
        at = others * self._slots + (numbers & (self._slots - 1))
        told &= (self._seq.take(at) & (NUMBERS - 1)) == numbers
        told &= (others // flows != rows // flows) & (self._state.take(at) != FREE)
        if not np.count_nonzero(told):
            return
        paths, sent_ns, by = others[told] // flows, sent_ns[told], rows[told] // flows
        came_ns = self._sent_ns.take(at[told])
        longer_ns = self._measurements.longer_there(paths, by, int(sent_ns.max()))
        for path in np.unique(paths).tolist():
            chosen = paths == path
            waiting = np.flatnonzero(self._state[path * flows : (path + 1) * flows] == OUTSTANDING)
            waiting += path * flows * self._slots
            left_ns = self._sent_ns.take(waiting)
            leads = sent_ns[chosen, None] - left_ns
            behind = np.where(left_ns > came_ns[chosen, None], np.maximum(leads - longer_ns[chosen, None], 0), 0)
            found = np.where(leads > 0, behind, MISSING).max(axis=0, initial=MISSING)
            self._there.put(waiting, np.maximum(found, self._there.take(waiting)))
        late = self._there.take(at[told]) > LATE_NS
        if np.count_nonzero(late):
            np.maximum.at(self._late_ns, others[told][late], sent_ns[late])

    def overtaken(self, since_ns: int) -> Overtaken:
        """Probes sent since then, unanswered although a later one to the same peer by another path is answered.

        Such a probe has been delayed, both ways together, by at least the time between the two sends more than the
        other; and that neither we nor the peer are asleep, the other shows.
        """
        waiting = self._waiting()
        sent_ns, rows = self._sent_ns.take(waiting), waiting // self._slots
        # What a later one of its session has passed is lost.
        last = (sent_ns < self._answered_ns.max(initial=0)) & (sent_ns > self._answered_ns.take(rows))
        if not np.count_nonzero(last & (sent_ns >= since_ns)):
            return NONE
        waiting, sent_ns, rows = waiting[last], sent_ns[last], rows[last]
        flows = self._probe.flows
        leads = latest_of_others(self._answered_ns, self._peer, flows)[rows] - sent_ns
        ahead = leads > 0
        waiting, sent_ns, rows, leads = waiting[ahead], sent_ns[ahead], rows[ahead], leads[ahead]
        there = self._there.take(waiting)
        paths = rows // flows
        # Of several at once one counts.
        alone = is_alone(self._part.take(waiting))
        runs = np.bincount(paths[alone], minlength=len(self._next_seq) // flows)
        losses = np.zeros(len(runs))
        for path in np.unique(paths).tolist():
            losses[path] = self._may_be_lost(path, since_ns, int(sent_ns[paths == path].min()))
        recent = sent_ns >= since_ns
        late = self._late_ns[: len(runs) * flows].reshape(-1, flows).max(axis=1) >= since_ns
        return Overtaken(paths[recent], sent_ns[recent], leads[recent], there[recent], late, runs, losses)

    def _may_be_lost(self, path: int, since_ns: int, silent_since_ns: int) -> float:
        """How large the share of lost probes may be, see `Overtaken.losses`."""
        flows = self._probe.flows
        own = np.arange(path * flows, (path + 1) * flows)
        of_peer = self._peer == self._peer[own[0]]
        of_peer[own] = False
        others = of_peer.nonzero()[0]
        passed, _ = self._fates(own, since_ns)
        mine = (0, 0)
        if len(passed):
            lost, answered = self._fates(own, int(passed.min()))
            mine = len(lost), len(answered)
        lost, answered = self._fates(others, silent_since_ns)
        return max(may_be_lost(*mine), may_be_lost(len(lost), len(answered)))

    def _fates(self, rows: NDArray[np.intp], since_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When the probes of some sessions left that a later one has passed, and those that were answered."""
        row, slot = (self._sent_ns[rows] >= since_ns).nonzero()
        row = rows[row]
        state, sent_ns = self._state[row, slot], self._sent_ns[row, slot]
        alone = is_alone(self._part[row, slot])
        answered = (state == ANSWERED) | (state == LATE)
        passed = ((state == OUTSTANDING) | (state == TIMED_OUT)) & (sent_ns < self._answered_ns[row])
        return sent_ns[alone & passed], sent_ns[alone & answered]

    def pairs(self, path: int, since_ns: int) -> Stamps:
        """The coded pairs of a path that were sent since then, oldest first, shape (pairs, 2).

        Both probes of each are in sending order; MISSING what was lost.
        """
        row, mask = path * self._probe.flows, self._slots - 1
        first = np.flatnonzero((self._part[row] == FIRST) & (self._sent_ns[row] >= since_ns))
        second = (first + 1) & mask
        whole = (self._part[row, second] == SECOND) & (self._seq[row, second] == self._seq[row, first] + 1)
        first = first[whole]
        first = first[np.argsort(self._seq[row, first])]
        both = np.stack([first, (first + 1) & mask], axis=1)
        state = self._state[row, both]
        answered = (state == ANSWERED) | (state == LATE)
        return Stamps(*np.where(answered, np.moveaxis(self._stamps[row, both], -1, 0), MISSING).copy())

    def singles(self, path: int, since_ns: int) -> Stamps:
        """All answered probes of a path that were sent since then, those of pairs included, in no order."""
        row = path * self._probe.flows
        answered = (self._state[row] == ANSWERED) | (self._state[row] == LATE)
        return Stamps(*self._stamps[row, answered & (self._sent_ns[row] >= since_ns)].T.copy())

    def results(self) -> Iterator[tuple[int, Results]]:
        """What became of the probes since the last call: per session its path index, and columns.

        A probe is given out once nothing more is to be learnt about it, or about one before it.
        """
        first = np.maximum(self._told, self._next_seq - self._slots)
        seq = first[:, None] + np.arange(int((self._next_seq - first).max(initial=0)))
        at = np.arange(len(seq))[:, None] * self._slots + (seq & (self._slots - 1))
        state = self._state.take(at)
        over = ~np.logical_or.accumulate((state == OUTSTANDING) | (seq >= self._next_seq[:, None]), axis=1)
        self._told = first + over.sum(axis=1)
        known = over & (self._seq.take(at) == seq) & (state != FREE)
        at, came = at[known], state[known] != TIMED_OUT
        left, forward, _, reverse = self._stamps.reshape(-1, 4)[at].T
        numbers = (seq[known] & (SEQ_WRAP - 1)).tolist()
        sent_ns = np.where(came, left, self._sent_ns.take(at)).tolist()  # without a stamp, the time of the call
        there, back = (or_none(each, came & (each != MISSING)) for each in (forward, reverse))
        extra, begin = (self._part.take(at) == EXTRA).tolist(), 0
        for row, end in enumerate(known.sum(axis=1).cumsum().tolist()):
            if end > begin:
                of_row = slice(begin, end)
                extra_numbers = [
                    number for number, is_extra in zip(numbers[of_row], extra[of_row], strict=True) if is_extra
                ]
                columns = numbers[of_row], sent_ns[of_row], there[of_row], back[of_row]
                yield row // self._probe.flows, Results(*columns, extra_numbers)
            begin = end

    def skip_results(self) -> None:
        """Let `results` begin with the probes sent from now on."""
        self._told[:] = self._next_seq


def is_alone(part: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which probes leave by themselves: of several at once, none says of the others whether it was lost by chance."""
    alone: NDArray[np.bool_] = (part == SINGLE) | (part == EXTRA)
    return alone


def latest_of_others(times_ns: NDArray[np.int64], peers: NDArray[np.intp], flows: int) -> NDArray[np.int64]:
    """For each session the largest time among sessions with the same peer over other paths; 0 where there is none.

    Parameters
    ----------
    times_ns : ndarray of int64, shape (sessions,)
        Above 0 where there is one.
    peers : ndarray of int, shape (sessions,)
        Which peer a session is with, -1 for none.
    flows : int
        Sessions per path; those of one path follow each other.
    """
    paths = np.arange(len(times_ns)) // flows
    best, best_path = np.zeros((2, int(peers.max(initial=-1)) + 2), np.int64)  # the last place is that of no peer
    np.maximum.at(best, peers, times_ns)
    of_best = times_ns == best[peers]
    best_path[peers[of_best]] = paths[of_best]
    elsewhere = paths != best_path[peers]
    second = np.zeros_like(best)
    np.maximum.at(second, peers[elsewhere], times_ns[elsewhere])
    found: NDArray[np.int64] = np.where(peers < 0, 0, np.where(elsewhere, best[peers], second[peers]))
    return found
