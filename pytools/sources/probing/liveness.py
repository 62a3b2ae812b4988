"""Whether a path answers: how many probes in a row were unanswered, how many were answered, since when.

A probe is missed if no answer has ARRIVED on its path since it left and its grace has passed. An answer to an earlier
probe suffices: on a path with a long queue answers come late, but they come. The grace is twice the largest recent time
between a probe and its answer, at least `LEAST_GRACE_NS` and at most the probes' interval.

Misses and answers are counted once an interval, however many probes leave a path in it (coded pairs, several source
ports): three packets that one full queue drops within a microsecond are no silence. Extra probes, which leave between
two intervals, count half because losses come in bursts, at most 5/4 of the others, and only after `LEAST_BEFORE_EXTRA`
of these.

Pure counting in arrays, one row per path. Times are CLOCK_MONOTONIC nanoseconds. One thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import Growing, Rows, Times
from pytools.kernel.addresses import mapped
from pytools.kernel.bpf import contract
from pytools.signals import Path, PathLiveness
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.send_log import Counts, SendLog

LEAST_GRACE_NS: Final = 2_000_000
MOST_RUN: Final = 1_000_000
TOLD_EVERY_NS: Final = 1_000_000_000
# Of a path that is silent for long not every further miss is reported at once.
TOLD_SINGLY: Final = 32
TOLD_SILENT_EVERY_NS: Final = 100_000_000
YOUNG_INTERVALS: Final = TOLD_SINGLY  # a silence that is older is looked at as often as paths that answer
LEAST_BEFORE_EXTRA: Final = 3  # misses: a path that has lost hardly a probe is dead by then
_SUSPECTED: Final = 0.2  # of the misses that are needed: then extra probes may find the rest sooner
BURSTS: Final = 3  # of extra probes, along one path without a pause
HURRY_EVERY_NS: Final = 500_000_000  # at most, in the long run, extra probes leave
_LOGGED_EXTRA: Final = 128  # times that extra probes were sent: more than leave between two looks
_BEGUN_INTERVALS: Final = 3
_LATE_NS: Final = contract.constant("SWERVE_PROBE_LATE_NS")
_MOST_GRACE_NS: Final = contract.constant("SWERVE_PROBE_MOST_GRACE_NS")
_RARELY: Final = 0.05  # share of probes: where more are lost an answer that is overdue is mostly one
_ALERT_INTERVALS: Final = 8  # for so long after the first miss, the next ones are looked for when they fall due

_NO_AGE: Final = 0xFFFFFFFF  # not known: no swerve, or its agent never ran
_KEPT: Final = 63 / 64  # by one answer, of the longest round trip of the last second or so
_KEPT_AFTER: Final = _KEPT ** np.arange(4097)  # so many answers
_BLOCK: Final = 200  # probes; loss is that of the block under way and the one before
_SUDDEN_WEIGHT: Final = 1 / 16
_FEW: Final = 0.1  # share of probes: with fewer answers between two looks a path was silent
_BY_CHANCE: Final = 1e-6
_LEAST_LOSS, _MOST_LOSS = 0.005, 0.75  # assumed, whatever was seen

_LEAST_LOGGED: Final = 32  # times that probes were sent
_LOGGED_NS: Final = 2_000_000_000  # for so long they are remembered


class Liveness(Growing):
    """Misses and answers in a row, of every path.

    Attributes
    ----------
    missed : ndarray of int64
        By path index, as of the latest `look`.
    missed_extra : ndarray of int64
        What extra probes that were missed add to that.
    any_silent : bool
        Whether any path missed one, as of the latest `look`.
    steady, extra : SendLog
        When probes that count were sent: those of every interval, and extra ones.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self.steady = SendLog(max(_LEAST_LOGGED, 2 * _LOGGED_NS // interval_ns))  # of two halves of the peers
        self.extra = SendLog(_LOGGED_EXTRA)
        self._paths: dict[int, Path] = {}
        self._request_keys: dict[int, tuple[bytes, int]] = {}
        self._requests: Mapping[tuple[bytes, int], int] = {}
        self.any_silent = False
        self.grow(0)

    def _allocate(self, paths: int) -> None:
        self.steady.grow(paths)
        self.extra.grow(paths)
        self._rows = np.arange(paths)
        self._probed = np.zeros(paths, np.bool_)
        self.missed, self.missed_extra = np.zeros((2, paths), np.int64)
        self._arrived_ns = np.zeros(paths, np.int64)  # latest answer; 0: none
        self._extra_due_ns = np.zeros(paths, np.int64)  # see `suspected`
        self._answered_sent_ns = np.zeros(paths, np.int64)  # when the latest of the answered probes had left; 0: none
        self._peers, self._addresses = np.zeros((2, paths), np.int64)  # of each path, numbers of its peer's; 0: none
        self._turnaround_ns = np.zeros(paths, np.int64)  # largest recent time between a probe and its answer
        self._grace_ns = np.full(paths, self._interval_ns, np.int64)
        self._silent_since_ns = np.zeros(paths, np.int64)  # when the first missed probe left; 0: not known
        self._run = np.zeros(paths, np.int64)
        self._run_began_ns = np.zeros(paths, np.int64)  # when the first probe of that run was sent
        self._told, self._told_weight = np.zeros((2, paths), np.int64)  # missed, without and with extra, as published
        self._answered = np.zeros(paths, np.int64)  # probes that count and were answered, in all
        self._longest_ns = np.zeros(paths, np.int64)  # longest recent round trip
        self._recent_ns = np.zeros(paths, np.int64)  # the same, of the last second or so
        self._peer_age_ms = np.full(paths, _NO_AGE, np.uint32)  # of the peer's agent's last sign of life
        self._blocks = np.zeros((paths, 4), np.int64)  # sent and answered: when this block began, and the one before
        self._seen = np.zeros((paths, 2), np.int64)  # sent and answered, as of the latest look
        self._sudden = np.zeros(paths)  # share lost, of the last few probes
        self._lossy = np.zeros(paths, np.bool_)  # whether any of the recent probes was lost
        self._share = np.zeros(paths)  # lost, of the recent probes
        self._may_be = np.full(paths, _LEAST_LOSS)  # how large that may be: 1.5 standard deviations above
        self._limits = _unlikely(self._may_be)
        self._decisive = self._limits.copy()  # or a sibling's: a lossy one counts by its own limit
        self._tell_ns = np.zeros(paths, np.int64)  # when to publish again if nothing happens

    def set_paths(self, paths: Sequence[PinnedPath]) -> None:
        """Tell of these from now on; what was counted of a path that comes back is kept."""
        self._paths = {pinned.index: pinned.path for pinned in paths}
        self._probed[:] = False
        self._probed[list(self._paths)] = True
        peers = {peer: number for number, peer in enumerate({path.destination for path in self._paths.values()}, 1)}
        addresses = {each: number for number, each in enumerate({path.address for path in self._paths.values()}, 1)}
        self._peers[:] = self._addresses[:] = 0
        for index, path in self._paths.items():
            self._peers[index], self._addresses[index] = peers[path.destination], addresses[path.address]
        self._request_keys = {pinned.index: (mapped(pinned.path.address), pinned.ifindex) for pinned in paths}

    def answering(self) -> dict[Path, bool]:
        """Every path that is probed, and whether the last answer that was due came; as of the latest `look`."""
        answers = (self.missed == 0) & (self._arrived_ns > 0)
        return {path: bool(answers[index]) for index, path in self._paths.items()}

    # ---- what happens ----

    def arrived(self, paths: Rows, sent_ns: Times, arrived_ns: Times, round_trips_ns: Times) -> None:
        """Take note of answers, to whatever probes."""
        answers = np.bincount(paths, minlength=len(self._rows))
        longest, turnaround = self._longest_ns, self._turnaround_ns
        longest -= longest * np.minimum(answers, 512) >> 9  # half of it is forgotten after some 350 answers
        turnaround -= turnaround * np.minimum(answers, 64) >> 6  # so that what was long ago is forgotten
        # The first probe waits for its neighbour's address.
        self._recent_ns[:] = self._recent_ns * _KEPT_AFTER.take(answers, mode="clip")
        np.maximum.at(longest, paths, round_trips_ns)
        np.maximum.at(self._recent_ns, paths, round_trips_ns)
        np.maximum.at(turnaround, paths, arrived_ns - sent_ns)
        np.maximum.at(self._arrived_ns, paths, arrived_ns)
        np.maximum.at(self._answered_sent_ns, paths, sent_ns)
        grace_ns = np.minimum(np.maximum(2 * turnaround.take(paths), LEAST_GRACE_NS), self._interval_ns)
        self._grace_ns.put(paths, grace_ns)
        for log in (self.steady, self.extra):
            log.arrived(paths, self._arrived_ns.take(paths))
        if self.any_silent:
            self._silent_since_ns[paths] = 0

    def beats(self, paths: Rows, ages_ms: NDArray[Any]) -> None:
        """Take note of what answers say about the peers' agents; in the order in which they came."""
        self._peer_age_ms[paths] = ages_ms

    def answered(self, paths: Rows, sent_ns: Times, counting: NDArray[np.bool_], passed: NDArray[np.bool_]) -> None:
        """Take note of answers in time: which probes count, and which have passed one without an answer."""
        if np.count_nonzero(passed):
            broken = paths[passed]
            self._run[broken] = 0
            np.maximum.at(self._run_began_ns, broken, sent_ns[passed])
        counted, within = paths[counting], counting & (sent_ns >= self._run_began_ns.take(paths))
        self._answered += np.bincount(counted, minlength=len(self._answered))
        self._run += np.bincount(paths[within], minlength=len(self._run))

    def lost(self, paths: Rows, sent_ns: Times) -> None:
        """Take note of probes that were not answered in time."""
        within = sent_ns >= self._run_began_ns[paths]
        self._run[paths[within]] = 0
        np.maximum.at(self._run_began_ns, paths[within], sent_ns[within] + 1)

    def requested(self, requests: Mapping[tuple[bytes, int], int]) -> None:
        """Take note of when the peers' requests last came in, by address (IPv4-mapped) and interface."""
        self._requests = requests

    # ---- what it means ----

    def look(self, now_ns: int) -> int | None:
        """Count the misses; all answers that had arrived by now must have been noted.

        Returns
        -------
        int, optional
            When the next miss in a row falls due, where one has just begun.
        """
        self.missed = self.steady.missed(now_ns - self._grace_ns)
        self._measure_loss()
        self.any_silent = bool(np.count_nonzero(self.missed))
        if not self.any_silent:
            self.missed_extra = np.zeros_like(self.missed)
            return None
        self._run[self.missed > 1] = 0
        begins = ((self.missed > 0) & (self._silent_since_ns == 0)).nonzero()[0]
        self._silent_since_ns[begins] = self.steady.miss_ns(begins)
        self._count_extra(now_ns)
        young = now_ns - self._silent_since_ns < _ALERT_INTERVALS * self._interval_ns
        alert = np.flatnonzero((self.missed > 0) & young & self._probed)
        return self._next_miss(alert, now_ns) if len(alert) else None

    def _count_extra(self, now_ns: int) -> None:
        """Count what extra probes add to the misses, and how much would decide for every path that is silent."""
        extra = np.minimum(self.extra.missed(now_ns - self._grace_ns) // 2, 5 * self.missed // 4)
        self.missed_extra = np.where(self.missed >= LEAST_BEFORE_EXTRA, extra, 0)
        limits = np.zeros(self._addresses.max(initial=0) + 1, np.int64)
        np.maximum.at(limits, self._addresses, self._limits)
        self._decisive = limits[self._addresses]

    def _measure_loss(self) -> None:
        """Of the probes sent until the latest answer: those since are the silence that is to be judged.

        What was lost before the first answer, or while the path was silent, says nothing about chance.
        """
        sent, answered = self.steady.answered_by - self._seen[:, 0], self._answered - self._seen[:, 1]
        grown = sent > 0
        # Where none was lost, neither now nor lately, nothing else can change.
        counts = (sent != answered) | self._lossy | (self.steady.answered_by - self._blocks[:, 0] >= _BLOCK)
        counts &= grown
        if np.count_nonzero(counts):
            self._count_losses(counts.nonzero()[0], sent[counts], answered[counts])
        np.copyto(self._seen[:, 0], self.steady.answered_by, where=grown)
        np.copyto(self._seen[:, 1], self._answered, where=grown)

    def _count_losses(self, grown: Rows, sent: Counts, answered: Counts) -> None:
        silent = self._seen[grown, 1] == 0
        if (sent - answered).max() > 1:  # else below every limit
            weight = sent - answered + self.missed_extra[grown]  # as of the look before
            silent |= (weight >= self._limits[grown]) & (answered <= _FEW * sent)
        self._blocks[grown[silent], 0::2] += np.maximum(sent - answered, 0)[silent, None]
        forgotten = (1.0 - _SUDDEN_WEIGHT) ** sent
        lost = np.where(silent, self._sudden[grown], np.clip(1.0 - answered / sent, 0.0, 1.0))
        self._sudden[grown] = self._sudden[grown] * forgotten + lost * (1.0 - forgotten)
        self._seen[grown, 0], self._seen[grown, 1] = self.steady.answered_by[grown], self._answered[grown]
        full = grown[self._seen[grown, 0] - self._blocks[grown, 0] >= _BLOCK]
        self._blocks[full, 2:] = self._blocks[full, :2]
        self._blocks[full, :2] = self._seen[full]
        self._judge(grown)

    def loss(self, paths: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The share of recent probes that were lost, and how large it may be (1.5 standard deviations above)."""
        return self._share[paths], self._may_be[paths]

    def _judge(self, paths: Rows) -> None:
        """What follows from the losses of these paths."""
        sent, answered = (self._seen[paths] - self._blocks[paths, 2:]).T
        share = np.clip(1.0 - answered / np.maximum(sent, 1), 0.0, 1.0) * (sent > 0)
        may_be = share + 1.5 * np.sqrt(share * (1.0 - share) / np.maximum(sent, 1))
        sudden = self._sudden[paths]
        self._lossy[paths] = (share > 0) | (sudden > 0)
        self._share[paths] = np.where(sudden > 2 * share, sudden, share)  # it has just begun
        self._may_be[paths] = np.clip(np.maximum(may_be, sudden), _LEAST_LOSS, _MOST_LOSS)
        self._limits[paths] = _unlikely(self._may_be[paths])

    def for_kernel(self) -> tuple[Counts, Times]:
        """By path index, how many unanswered probes make it silent (0: it never answered), and how late answers may be.

        Unlike the grace of a miss here, that of the kernel is not bounded by the interval: what it concludes from
        silence, nobody looks at again before packets are redirected. It counts no extra probes: what they have shown
        is taken off its limit.
        """
        limits = np.maximum(self._limits - self.missed_extra, LEAST_BEFORE_EXTRA)
        return np.where(self._arrived_ns > 0, limits, 0), np.maximum(2 * self._recent_ns, LEAST_GRACE_NS)

    def begun(self, now_ns: int) -> Rows:
        """Paths that have lost hardly a probe lately, and on which an answer has just become overdue.

        Where round trips are short that is after `_LATE_NS`, before it is a miss: worth extra probes, and no more.
        """
        most_ns = np.where(2 * self._recent_ns <= _MOST_GRACE_NS, _LATE_NS, self._interval_ns)
        late_ns = np.minimum(self._grace_ns, most_ns)
        overdue = self.steady.missed(now_ns - late_ns) > 0
        chosen = np.flatnonzero(overdue & self._probed & (self._arrived_ns > 0))
        if not len(chosen):
            return chosen
        since_ns = self.steady.miss_ns(chosen)
        chosen = chosen[since_ns > now_ns - _BEGUN_INTERVALS * self._interval_ns]
        return chosen[self.loss(chosen)[0] <= _RARELY]

    def suspected(self, now_ns: int) -> Rows:
        """Paths that get extra probes because they may be dead, and lose too many to be sure soon.

        A path has `BURSTS` of them at once, and one in `HURRY_EVERY_NS` in the long run.
        """
        if not self.any_silent:
            return self._rows[:0]
        least = np.maximum(np.ceil(_SUSPECTED * self._limits), LEAST_BEFORE_EXTRA)
        suspected = (self.missed >= least) & (self.missed + self.missed_extra < self._decisive) & self._probed
        suspected &= (self._arrived_ns > 0) & (self._extra_due_ns < now_ns + BURSTS * HURRY_EVERY_NS)
        chosen: Rows = np.flatnonzero(suspected)
        self._extra_due_ns[chosen] = np.maximum(self._extra_due_ns[chosen], now_ns) + HURRY_EVERY_NS
        return chosen

    def young(self, now_ns: int) -> NDArray[np.bool_]:
        """Which paths have fallen silent a short while ago."""
        since_ns = now_ns - YOUNG_INTERVALS * self._interval_ns
        young: NDArray[np.bool_] = (self.missed > 0) & (self._silent_since_ns > since_ns)
        return young

    def _next_miss(self, paths: Rows, now_ns: int) -> int:
        """When the first of these paths has left one more probe unanswered for its grace."""
        grace, since = self._grace_ns[paths], self._silent_since_ns[paths]
        following = self.steady.miss_ns(paths, self.missed[paths])
        expected = since + ((now_ns - grace - since) // self._interval_ns + 1) * self._interval_ns
        return int((np.where(following > 0, following, expected) + grace).min())

    def signals(self, host: str, now_ns: int, unix_ns: int) -> list[PathLiveness]:
        """What is to be published now: misses that have just grown or ended, and every path from time to time."""
        missed, told = self.missed, self._told
        weight = np.minimum(missed + self.missed_extra, self._decisive)  # what is more changes nothing
        news = now_ns >= self._tell_ns
        if self.any_silent:
            grown = (missed > told) & (told < TOLD_SINGLY) | (weight > self._told_weight)
            grown &= (missed > 1) & self._probed
            # Only the peer's other paths show whether the path or the peer is dead: publish them in the same round.
            if np.count_nonzero(grown):
                news |= np.isin(self._peers, self._peers[grown])
        news |= (told > 0) & (missed == 0)
        news &= self._probed
        if not np.count_nonzero(news):
            return []
        chosen = np.flatnonzero(news)
        self._told[chosen], self._told_weight[chosen] = missed[chosen], weight[chosen]
        self._tell_ns[chosen] = now_ns + np.where(missed[chosen] < TOLD_SINGLY, TOLD_EVERY_NS, TOLD_SILENT_EVERY_NS)
        return [self.signal(index, host, now_ns, unix_ns) for index in chosen.tolist()]

    def signal(self, index: int, host: str, now_ns: int, unix_ns: int) -> PathLiveness:
        """The state of one path, whether or not it is to be published now."""
        missed, since_ns = int(self.missed[index]), int(self._silent_since_ns[index])
        age_ms = int(self._peer_age_ms[index])
        return PathLiveness(
            host=host,
            at_ns=now_ns,
            unix_ns=unix_ns,
            path=self._paths[index],
            missed=missed,
            answered_run=0 if missed else min(int(self._run[index]), MOST_RUN),
            silent_ns=now_ns - since_ns if missed else 0,
            last_answer_ns=int(self._arrived_ns[index]) or None,
            last_request_ns=self._requests.get(self._request_keys[index]),
            interval_ns=self._interval_ns,
            answered_sent_ns=int(self._answered_sent_ns[index]) or None,
            limit=int(self._limits[index]),
            missed_extra=int(self.missed_extra[index]),
            recent_loss=round(float(self._share[index]), 4),
            longest_rtt_ns=int(self._longest_ns[index]) or None,
            peer_agent_age_ns=None if age_ms == _NO_AGE else age_ms * 1_000_000,
        )


def _unlikely(loss: NDArray[np.float64]) -> Counts:
    """How many probes in a row are all lost by chance once in 10^6 at this loss: a sequential test."""
    return np.ceil(math.log(_BY_CHANCE) / np.log(loss)).astype(np.int64)
