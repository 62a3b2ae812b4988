"""What a queue pair is going through: the rule, and the state that keeps verdicts from flapping. Pure.

The rule alone (`rule`) looks at one moment and keeps nothing, so that others may ask it too; `Verdicts` adds how long a
condition must hold. Arrays, one element per queue pair; times are int64 nanoseconds that the caller passes in. One
thread.

Of several conditions the first one counts:

1. slow_receiver: a request failed because the receiver was not ready too often; or requests that need a receive wait or
   crawl while the port hears "receiver not ready", or while the receiver (when it is on this host) has posted none.
2. dead: a request failed because nobody answered; or completions are due and none has come for `dead_ns`
   in which readings were made: one that comes late may be as late as the application that takes completions.
3. congested: bandwidth below `share` of its recent mean, and outstanding bytes above `backlog` times theirs. Where the
   application keeps its queue full the backlog cannot grow; there it counts that it has not shrunk, and never drains.
4. no_demand: nothing outstanding and nothing posted for `idle_ns`, on a pair that was busy before.
5. ok; unknown while there is too little to judge by.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools import units
from pytools.signals import RdmaVerdict

NAMES: Final[tuple[RdmaVerdict, ...]] = ("unknown", "ok", "congested", "no_demand", "slow_receiver", "dead")
UNKNOWN, OK, CONGESTED, NO_DEMAND, SLOW_RECEIVER, DEAD = range(len(NAMES))
NOT_READY_NS: Final = 1_000_000_000  # the longest timer of a receiver that is not ready is 655 ms
FROZEN_NS: Final = 60_000_000_000  # what has been so for longer becomes the new mean
_FEW: Final = 8  # completed requests before anything is said
_UNSHRUNK: Final = 0.9  # of the mean of outstanding bytes
_SAME: Final = 1.2  # times the mean: told as a full queue
_SPENT_ANSWER, _SPENT_READY = 1, 2
_WRONG, _SLOW, _CALM = (  # by verdict; cheaper than a search
    np.isin(np.arange(len(NAMES)), some)
    for some in ((CONGESTED, SLOW_RECEIVER, DEAD), (CONGESTED, SLOW_RECEIVER), (OK, UNKNOWN))
)

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]


class Limits(NamedTuple):
    """Where the lines are drawn; share and backlog may be arrays."""

    share: Any  # of the mean bandwidth: below is low
    backlog: Any  # times the mean of outstanding bytes: above is a backlog
    mean_ns: int
    dead_ns: int

    @property
    def idle_ns(self) -> int:
        """Silence of an empty queue that is called no demand."""
        return 2 * self.mean_ns


class Facts(NamedTuple):
    """What is known of queue pairs at one reading; one element per pair."""

    outstanding: Ints
    outstanding_bytes: Ints
    due: Mask  # some of the outstanding ask for a completion
    posted: Ints  # since the last reading
    completed: Ints  # since the last reading
    completed_ever: Ints  # up to some small number
    drained: Mask  # completed at least what was outstanding at the last reading
    waited_ns: Ints  # outstanding without a completion
    watched_ns: Ints  # of that time, what readings were made in
    idle_ns: Ints  # nothing outstanding and nothing posted
    bandwidth_bps: Floats  # now, the time since the last completion included; NaN for none
    settled_bps: Floats  # up to the last completion
    mean_bps: Floats  # NaN for none
    mean_outstanding_bytes: Floats
    needs_receives: Mask  # has posted requests that take a receive at the peer
    not_ready: Ints  # "receiver not ready" heard by the port since the last reading
    not_ready_recently: Mask  # within NOT_READY_NS
    starved: Mask  # the receiver is on this host and has no receive posted
    spent_answer: Ints  # failed since the last reading: nobody answered
    spent_ready: Ints  # failed since the last reading: the receiver was not ready too often
    succeeded: Mask  # a completion without error since the last reading

    def take(self, chosen: NDArray[Any]) -> Facts:
        return Facts(*(each[chosen] for each in self))


def low(facts: Facts, share: Any) -> Mask:
    """Bandwidth well below its recent mean."""
    with np.errstate(invalid="ignore"):
        result: Mask = facts.bandwidth_bps < share * facts.mean_bps
    return result


def backlog_grew(facts: Facts, backlog: Any) -> Mask:
    """Outstanding bytes well above their recent mean."""
    result: Mask = (facts.outstanding > 0) & (facts.outstanding_bytes > backlog * facts.mean_outstanding_bytes)
    return result


def queue_stays_full(facts: Facts, share: Any) -> Mask:
    """Completions come slower, but outstanding bytes have not shrunk and the queue never drains between readings.

    A queue that drains at once when somebody looks was waiting for its application, not for the network.
    """
    with np.errstate(invalid="ignore"):
        slow = facts.settled_bps < share * facts.mean_bps
    full = facts.outstanding_bytes >= _UNSHRUNK * facts.mean_outstanding_bytes
    result: Mask = slow & full & ~facts.drained & (facts.outstanding > 1)
    return result


def rule(facts: Facts, limits: Limits) -> NDArray[np.int8]:
    """The verdict of this moment, as a place in NAMES, without regard to the past."""
    starving = (
        (facts.outstanding > 0)
        & facts.needs_receives
        & (facts.not_ready_recently | facts.starved)
        & ((facts.completed == 0) | low(facts, limits.share))
    )
    conditions = [
        (facts.spent_ready > 0) | starving,
        (facts.spent_answer > 0) | (facts.due & (facts.outstanding > 0) & (facts.watched_ns >= limits.dead_ns)),
        low(facts, limits.share) & backlog_grew(facts, limits.backlog) | queue_stays_full(facts, limits.share),
        (facts.outstanding == 0) & (facts.idle_ns >= limits.idle_ns) & (facts.completed_ever > 0),
        facts.completed_ever >= _FEW,
    ]
    chosen: NDArray[np.int8] = np.select(
        conditions, [SLOW_RECEIVER, DEAD, CONGESTED, NO_DEMAND, OK], default=UNKNOWN
    ).astype(np.int8)
    return chosen


class Verdicts:
    """The verdicts of many rows over time.

    - `slow_receiver`, `dead` and `no_demand` are told at the first reading that shows them: their conditions contain a
      wait already. `congested` must hold for two readings and a quarter of `mean_ns`; half of it where the queue was
      full all along.
    - Who is congested stays so until bandwidth is back above the middle between `share` and the mean, or the backlog
      below the middle between the mean and `backlog` times it, for `mean_ns`. `slow_receiver` ends when its condition
      has not held for `mean_ns`, `dead` with a completion without error.
    - After a request failed for want of an answer or of receives, that verdict stands until one succeeds.
    """

    def __init__(self, rows: int, limits: Limits) -> None:
        self._limits = limits
        self.verdict = np.zeros(rows, np.int8)
        self.since_ns = np.zeros(rows, np.int64)
        self._candidate = np.zeros(rows, np.int8)
        self._candidate_ns = np.zeros(rows, np.int64)
        self._readings = np.zeros(rows, np.int64)  # in which the candidate has held
        self._spent = np.zeros(rows, np.int8)

    def forget(self, rows: Rows, now_ns: int) -> None:
        self.verdict[rows] = self._candidate[rows] = UNKNOWN
        self.since_ns[rows] = self._candidate_ns[rows] = now_ns
        self._readings[rows], self._spent[rows] = 0, 0

    def update(self, rows: Rows, facts: Facts, now_ns: int) -> Mask:
        """Judge some rows by what is known of them now; says which verdicts changed."""
        before = self.verdict[rows]
        seen = self._latched(rows, facts, rule(facts, self._relaxed(rows, facts)))
        fresh = seen != self._candidate[rows]
        self._candidate[rows] = seen
        self._candidate_ns[rows] = np.where(fresh, now_ns, self._candidate_ns[rows])
        self._readings[rows] = np.where(fresh, 1, self._readings[rows] + 1)
        told: Mask = (seen != before) & self._held_long_enough(rows, facts, before, seen, now_ns)
        chosen = rows[told]
        self.verdict[chosen] = seen[told]
        self.since_ns[chosen] = self._candidate_ns[chosen]
        return told

    def unusual(self, rows: Rows, now_ns: int) -> Mask:
        """Whether what these rows show is not to become their usual: something is wrong, and not for long enough."""
        verdict, candidate = self.verdict[rows], self._candidate[rows]
        wrong = _WRONG[verdict]
        lately = now_ns - self.since_ns[rows] < FROZEN_NS
        result: Mask = np.where(wrong, lately, _SLOW[candidate])
        return result

    def _relaxed(self, rows: Rows, facts: Facts) -> Limits:
        """The limits by which a verdict that stands goes on standing."""
        congested = self.verdict[rows] == CONGESTED
        limits = self._limits
        return limits._replace(
            share=np.where(congested, (1 + limits.share) / 2, limits.share),
            backlog=np.where(congested, (1 + limits.backlog) / 2, limits.backlog),
        )

    def _latched(self, rows: Rows, facts: Facts, seen: NDArray[np.int8]) -> NDArray[np.int8]:
        spent = self._spent[rows]
        spent = np.where(facts.succeeded, 0, spent)
        spent = np.where(facts.spent_answer > 0, _SPENT_ANSWER, spent)
        spent = np.where(facts.spent_ready > 0, _SPENT_READY, spent)
        self._spent[rows] = spent
        seen = np.where(spent == _SPENT_ANSWER, DEAD, seen)
        return np.where(spent == _SPENT_READY, SLOW_RECEIVER, seen).astype(np.int8)

    def _held_long_enough(
        self, rows: Rows, facts: Facts, before: NDArray[np.int8], seen: NDArray[np.int8], now_ns: int
    ) -> Mask:
        held_ns, mean_ns = now_ns - self._candidate_ns[rows], self._limits.mean_ns
        grew = backlog_grew(facts, self._limits.backlog)
        congested_ns = np.where(grew, mean_ns // 4, mean_ns // 2)
        over = _SLOW[before] & _CALM[seen]
        needed_ns = np.where(seen == CONGESTED, congested_ns, np.where(over, mean_ns, 0))
        readings = np.where(seen == CONGESTED, 2, 1)
        enough: Mask = (held_ns >= needed_ns) & (self._readings[rows] >= readings)
        return enough


def reason(verdict: int, facts: Facts) -> str:
    """Why, as a sentence, of the first of these queue pairs."""
    one = facts.take(np.zeros(1, np.intp))
    waiting = units.size(int(one.outstanding_bytes[0]))
    speed = _against_mean(float(one.bandwidth_bps[0]), float(one.mean_bps[0]))
    done = int(one.completed_ever[0])
    sentences = {
        CONGESTED: f"{speed}, while {waiting} wait: {_backlog(one)}",
        SLOW_RECEIVER: _not_ready(one, waiting),
        DEAD: _unanswered(one, waiting),
        NO_DEMAND: f"nothing outstanding, nothing posted for {one.idle_ns[0] / 1e6:.0f} ms",
        OK: speed,
        UNKNOWN: f"only {done} requests completed so far" if done else "no request of it is completed yet",
    }
    return sentences[verdict]


def _backlog(one: Facts) -> str:
    mean = float(one.mean_outstanding_bytes[0])
    if mean <= 0:
        return "usually nothing does"
    times = float(one.outstanding_bytes[0]) / mean
    return f"{times:.1f} times the mean" if times > _SAME else "its queue stays full"


def _unanswered(one: Facts, waiting: str) -> str:
    if one.spent_answer[0] or not one.outstanding[0]:
        return "a request failed with retry_exc_err: the peer does not answer"
    return f"{one.outstanding[0]} requests ({waiting}) wait, none was completed for {one.waited_ns[0] / 1e6:.0f} ms"


def _not_ready(one: Facts, waiting: str) -> str:
    if one.starved[0]:
        return f"{waiting} wait, and the receiver has no receive posted"
    if one.spent_ready[0] or not one.outstanding[0]:
        return "a request failed with rnr_retry_exc_err: the receiver was not ready too often"
    times = f"{one.not_ready[0]} times since the last reading" if one.not_ready[0] else "within the last second"
    return f"{waiting} wait, and the port received 'receiver not ready' {times}"


def _against_mean(bps: float, mean_bps: float) -> str:
    if not np.isfinite(bps):
        return "nothing completed"
    rate = units.bit_rate(bps)
    return f"{rate}, {100 * bps / mean_bps:.0f} % of its recent mean" if mean_bps > 0 else rate
