"""What the newest fact says about one leaf of a condition: numbers, a verdict, and since when. Pure.

The error of a figure never helps to a verdict, and what makes no sense is no measurement. Times are CLOCK_MONOTONIC
nanoseconds.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import Final

import msgspec

from pytools.figures import QUEUEING
from pytools.signals import Job, JobCause, JobSensor, PathDelay
from pytools.units import SECOND, duration_text
from steering.deciding.evidence import Facts
from steering.deciding.failure_classifier import classify
from steering.deciding.link_states import REPORT_LIVES_NS, link_state
from steering.deciding.thresholds import Limits, Said, unlearnt, words
from steering.policy.conditions import (
    AnyLeaf,
    CeShare,
    JobSteps,
    Late,
    LinkState,
    MeasuredDelay,
    MeasuredShare,
    Rdma,
    Retransmits,
    Silence,
    part_of,
)

_ROUNDING: Final = 1e-9  # of a sum of shares
_LONGEST_WINDOW: Final = 60 * SECOND  # a window that claims to be longer makes no fact live longer


class Verdict(enum.Enum):
    BAD = "bad"  # it holds
    PENDING = "pending"  # it would, but not for so long or not so often yet
    BETWEEN = "between"  # neither bad nor clear
    CLEAR = "clear"  # it does not hold
    NONE = "none"  # nothing was measured


class Measurement(msgspec.Struct, frozen=True):
    """What one fact says about one leaf."""

    at_ns: int  # when it was measured: a measurement counts once
    lives_ns: int  # older than this it says nothing
    verdict: Verdict
    said: Said
    beyond: Said = ""  # the threshold, said when it is bad
    since_ns: int | None = None  # since when, where the fact itself says so
    run: int | None = None  # how many in a row, where the fact itself says so
    idle: bool = False  # nothing measured for want of traffic
    empty: bool = False  # nothing measured for want of samples: what is remembered stands
    samples: int = 1  # at least so many probes bear the verdict out
    window_ns: int = 0  # they came within so long before `at_ns`
    last_ns: int | None = None  # the value of the only sample that counts, where it is the last one
    value: float | None = None  # the figure that was compared with a threshold; None for a limit of it, or none

    @property
    def text(self) -> str:
        """What was measured, in words."""
        return words(self.said)


def nothing(text: str, idle: bool = False) -> Measurement:
    """No fact."""
    return Measurement(0, 0, Verdict.NONE, text, idle=idle)


def measure(  # noqa: PLR0911
    leaf: AnyLeaf, facts: Facts, now: int, stale_after: int, limits: Limits | None = None
) -> Measurement:
    """What the newest fact says about a leaf.

    Parameters
    ----------
    stale_after : int
        Facts of short windows are of no use after so many nanoseconds.
    limits : Limits, optional
        The figures of a threshold that follows what is usual on the path; as long as nothing is learnt when left out.
    """
    match leaf:
        case MeasuredDelay():
            return _delay(leaf, facts, stale_after, limits or unlearnt(leaf))
        case MeasuredShare():
            return _loss(leaf, facts, stale_after, limits or unlearnt(leaf))
        case Silence():
            return _silence(leaf, facts, stale_after)
        case Retransmits():
            return _retransmits(leaf, facts, stale_after, limits or unlearnt(leaf))
        case CeShare():
            return _marks(leaf, facts, stale_after, limits or unlearnt(leaf))
        case LinkState():
            return _link(leaf, facts, now, stale_after)
        case Rdma():
            return _rdma(leaf, facts, now, stale_after)
        case JobSteps() | Late():
            return _jobs(leaf, facts, now, stale_after)


def _lives(window_ns: int, stale_after: int) -> int:
    return max(stale_after, 2 * min(window_ns, _LONGEST_WINDOW))


def _between(bad: bool, clear: bool) -> Verdict:
    return Verdict.BAD if bad else Verdict.CLEAR if clear else Verdict.BETWEEN


def _delay(leaf: MeasuredDelay, facts: Facts, stale_after: int, limits: Limits) -> Measurement:
    signal = facts.delay
    if signal is None:
        return nothing("no delay was measured")
    lives, counts = _lives(signal.window_ns, stale_after), (signal.overtaken, signal.forward.samples)
    answered = _answered(leaf, signal, lives, limits)
    if leaf.measure is not QUEUEING or answered.verdict is Verdict.BAD:
        return answered
    both, there = signal.overtaken_p50_ns, signal.overtaken_forward_p50_ns
    if there is not None and there > limits.above:
        half, said = _half(sum(counts)), (_overtaken, there, *counts)
        return Measurement(
            signal.at_ns, lives, Verdict.BAD, said, limits.said, samples=half, window_ns=signal.window_ns
        )
    if both is None:
        return answered
    # Neither clear nor a value: probes are still under way, and it is not known that they wait on the way there.
    return Measurement(signal.at_ns, lives, Verdict.BETWEEN, (_either_way, both, *counts), window_ns=signal.window_ns)


def _answered(leaf: MeasuredDelay, signal: PathDelay, lives: int, limits: Limits) -> Measurement:
    """What the probes that were answered say."""
    measure, part, at_ns, samples = leaf.measure, part_of(leaf), signal.at_ns, signal.forward.samples
    what = measure.words
    if measure.compared and signal.clock != "synchronised":
        why = f"no {what}: the clocks are {signal.clock.replace('_', ' ')}"
        return Measurement(at_ns, lives, Verdict.NONE, why)
    value, bound = measure.value(signal, signal.forward, part), measure.bound(signal, signal.forward)
    if samples <= 0 or value is None:
        empty = samples <= 0  # answers without a value, as of probes before a pause of the host, say nothing either
        return Measurement(at_ns, lives, Verdict.NONE, f"no {what} was measured", empty=empty)
    if bound is None or bound < 0:
        return Measurement(at_ns, lives, Verdict.NONE, f"the {what} came without its error")
    verdict = _between(value - bound > limits.above, value + bound < limits.clear_below)
    said = _value, f"{what} {part}".strip(), value, bound
    if part == "last":
        return Measurement(at_ns, lives, verdict, said, limits.said, last_ns=round(value), value=value)
    least = {"min": samples, "p50": _half(samples)}.get(part, 1)
    return Measurement(at_ns, lives, verdict, said, limits.said, samples=least, window_ns=signal.window_ns, value=value)


def _half(samples: int) -> int:
    """How many samples are at or beyond their median."""
    return (max(samples, 0) + 1) // 2


def _value(what: str, value: float, bound: int) -> str:
    return f"{what} {duration_text(round(value))} ± {duration_text(bound)}"


def _overtaken(waited: int, overtaken: int, answered: int) -> str:
    late = f"{overtaken} probes overtaken by other paths, {answered} answered"
    return f"queueing delay at least {duration_text(waited)}: {late}"


def _either_way(waited: int, overtaken: int, answered: int) -> str:
    late = f"{overtaken} probes overtaken by other paths, {answered} answered"
    return f"queueing there and back together at least {duration_text(waited)}, which way is not known: {late}"


def _loss(leaf: MeasuredShare, facts: Facts, stale_after: int, limits: Limits) -> Measurement:
    signal, measure = facts.delay, leaf.measure
    if signal is None:
        return nothing(f"no {measure.words} was measured")
    lives, (part, settled) = _lives(signal.window_ns, stale_after), measure.counts(signal)
    share = measure.value(signal, None, "")
    if part < 0 or settled < part or share is None:
        return Measurement(signal.at_ns, lives, Verdict.NONE, "no probe was due", empty=settled == 0)
    verdict = _between(share > limits.above, share < limits.clear_below or part == 0)
    said = _lost, measure.words, part, settled, share
    return Measurement(signal.at_ns, lives, verdict, said, limits.said, value=share)


def _lost(what: str, lost: int, settled: int, share: float) -> str:
    return f"{what} {lost} of {settled} probes ({share:.0%})"


def _silence(leaf: Silence, facts: Facts, stale_after: int) -> Measurement:
    signal = facts.liveness
    if signal is None:
        return nothing("nothing is known of its probes")
    found = classify(signal, facts.siblings)
    lives = max(stale_after, 2 * SECOND)  # told once a second when nothing happens
    if found.cause == "answers":
        run = max(signal.answered_run, 0)
        verdict = Verdict.CLEAR if run else Verdict.BETWEEN
        return Measurement(signal.at_ns, lives, verdict, found.text, run=max(run, 1))
    if found.cause == "unmeasured":
        return Measurement(signal.at_ns, lives, Verdict.NONE, found.text)
    needed = max(leaf.missed, signal.limit or 0)
    enough = signal.missed >= leaf.missed and signal.missed + signal.missed_extra >= (signal.limit or 0)
    lasted = signal.silent_ns >= leaf.lasting
    verdict = _between(found.cause == "path_dead" and enough and lasted, False)
    since_ns = signal.at_ns - max(signal.silent_ns, 0)
    said = found.text
    if found.cause == "path_dead" and not lasted:
        said += f"; silent for {duration_text(signal.silent_ns)}, a queue may hold {duration_text(leaf.lasting)}"
    if not enough and needed > leaf.missed:
        loss = "" if signal.recent_loss is None else f" at a recent loss of {signal.recent_loss:.0%}"
        said += f", {needed} needed{loss}"
    return Measurement(signal.at_ns, lives, verdict, said, "silent", since_ns=since_ns)


def _share(
    part: int, total: int, units: str, done: str, leaf: Retransmits | CeShare, limits: Limits
) -> tuple[Verdict, str, bool, float | None]:
    """Verdict, words, whether traffic is wanting, and the share, of a part of all packets or segments."""
    if part < 0 or total < leaf.at_least:
        return Verdict.NONE, f"too little to say: {max(total, 0)} {units}, {leaf.at_least} needed", part >= 0, None
    share = min(part / total, 1.0)
    verdict = _between(share > limits.above, share < limits.clear_below or part == 0)
    return verdict, f"{part} of {total} {units} {done} ({share:.2%})", False, share


def _retransmits(leaf: Retransmits, facts: Facts, stale_after: int, limits: Limits) -> Measurement:
    signal = facts.tcp
    if signal is None:
        return nothing("nothing is known of its TCP connections")
    causes = signal.retransmitted
    part = {
        "any": signal.retransmitted_segments,
        "fast": causes.fast,
        "timeout": causes.timeout,
        "tail_probe": causes.tail_probe,
        "syn": causes.syn,
    }[leaf.cause]
    done = "retransmitted" if leaf.cause == "any" else f"retransmitted ({leaf.cause})"
    verdict, text, idle, share = _share(part, signal.segments_out, "TCP segments", done, leaf, limits)
    lives = _lives(signal.window_ns, stale_after)
    return Measurement(signal.at_ns, lives, verdict, text, limits.said, idle=idle, value=share)


def _marks(leaf: CeShare, facts: Facts, stale_after: int, limits: Limits) -> Measurement:
    back, out = facts.ecn, facts.tcp
    if leaf.direction == "back" and back is not None:
        found = _share(back.ce_packets, back.packets, "packets", "marked on the way back", leaf, limits)
        at_ns, window_ns = back.at_ns, back.window_ns
    elif leaf.direction == "out" and out is not None:
        counts = out.delivered_ce_segments, out.delivered_segments
        found = _share(*counts, "TCP segments", "marked on the way there", leaf, limits)
        at_ns, window_ns = out.at_ns, out.window_ns
    else:
        return nothing("nothing is known of marked packets")
    verdict, text, idle, share = found
    return Measurement(at_ns, _lives(window_ns, stale_after), verdict, text, limits.said, idle=idle, value=share)


def _link(leaf: LinkState, facts: Facts, now: int, stale_after: int) -> Measurement:
    state = link_state(leaf.event, leaf.hold, facts, now)
    if state is None:
        return nothing(f"nothing is known about {leaf.event.replace('_', ' ')}")
    verdict = Verdict.BAD if state.bad else Verdict.CLEAR
    return Measurement(state.at_ns, max(stale_after, REPORT_LIVES_NS), verdict, state.text, since_ns=state.since_ns)


def _rdma(leaf: Rdma, facts: Facts, now: int, stale_after: int) -> Measurement:
    fresh = [pair for pair in facts.queue_pairs if now - pair.at_ns <= _lives(pair.window_ns, stale_after)]
    if not fresh:
        return nothing("no queue pair on it", idle=True)
    newest = max(fresh, key=lambda pair: pair.at_ns)
    lives = _lives(newest.window_ns, stale_after)
    judged = [pair for pair in fresh if pair.verdict != "unknown"]
    having = [pair for pair in judged if pair.verdict == leaf.verdict]
    word = leaf.verdict.replace("_", " ")
    if not judged:
        return Measurement(newest.at_ns, lives, Verdict.NONE, "its queue pairs are not judged yet", idle=True)
    users = Counter(pair.uid for pair in judged)
    share = sum(1 / users[pair.uid] for pair in having) / len(users)  # a user has one vote, however many pairs it has
    verdict = _between(bool(having) and share >= leaf.share - _ROUNDING, not having or share < leaf.clear_below)
    text = f"{len(having)} of {len(judged)} queue pairs {word}"
    if len(users) > 1:
        text += f", {share:.0%} with one vote for each of {len(users)} users"
    if having:
        worst = min(having, key=lambda pair: pair.since_ns)
        text += f" (pair {worst.qp_number}: {worst.reason})"
    beyond = f"at least {leaf.share:.0%}"
    return Measurement(newest.at_ns, lives, verdict, text, beyond)


# What must have been measured before a cause is known not to be there.
_SENSORS: Final[dict[str, JobSensor]] = {
    "network": "network",
    "imbalance": "network",
    "straggler": "ranks",
    "gpu": "gpu",
    "host": "host",
}


def _jobs(leaf: JobSteps | Late, facts: Facts, now: int, stale_after: int) -> Measurement:
    fresh = [job for job in facts.jobs if now - job.at_ns <= _lives(job.window_ns, stale_after)]
    if not fresh:
        return nothing("no job on it", idle=True)
    newest = max(fresh, key=lambda job: job.at_ns)
    lives, beyond = _lives(newest.window_ns, stale_after), f"at least {leaf.at_least:.0%}"
    found = [(cause, job) for job in fresh if (cause := _cause(leaf, job, facts)) is not None]
    if found:
        cause, job = max(found, key=lambda item: item[0].low)
        said = f"job {job.job}: {cause.kind} explains {cause.share:.0%} of a step ({cause.low:.0%} to {cause.high:.0%})"
        return Measurement(
            job.at_ns, lives, Verdict.BAD, f"{said}: {cause.reason}", beyond, window_ns=job.window_ns, value=cause.share
        )
    unknown = [why for job in fresh if (why := _unknown(leaf, job))]
    if unknown:
        return Measurement(newest.at_ns, lives, Verdict.NONE, unknown[0])
    said = f"no such cause in {len(fresh)} job{'s' if len(fresh) > 1 else ''}"
    return Measurement(newest.at_ns, lives, Verdict.CLEAR, said)


def _cause(leaf: JobSteps | Late, job: Job, facts: Facts) -> JobCause | None:
    """What makes a leaf hold, if it is of this path or of none."""
    listed = [] if job.why is None else job.why.causes
    if isinstance(leaf, JobSteps):
        wanted = [each for each in listed[:1] if leaf.cause in ("any", each.kind)]
    else:
        wanted = [each for each in listed if each.kind == "straggler"]
    here = [each for each in wanted if each.path in (None, facts.path) and each.low >= leaf.at_least]
    return here[0] if here else None


def _unknown(leaf: JobSteps | Late, job: Job) -> str:
    """Why it cannot be told that a leaf does not hold; empty if it can."""
    if job.why is None:
        return f"job {job.job} has no verdict"
    cause = "straggler" if isinstance(leaf, Late) else leaf.cause
    needed = set(_SENSORS.values()) if cause == "any" else {_SENSORS[cause]}
    why = next((f"{sensor} not measured: {why}" for sensor, why in job.why.missing.items() if sensor in needed), "")
    return f"job {job.job}: {why}" if why else ""
