"""The state of one path: a pure machine of frozen records; `now` and signal times are CLOCK_MONOTONIC nanoseconds.

    unmeasured ─signal─▶ healthy ─bad─▶ suspect ─granted─▶ drained ─dwell─▶ returning ─steps─▶ healthy
                                                              ▲                 │
                                                              └──bad (relapse)──┘

A path that is due stays suspect until `decide` grants the drain and it was carried out: the state never claims
what was not done. Silence moves nothing (stale: hold), and after long silence the path is unmeasured again.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Literal

from pytools.signals import PathDelay
from steering.policy import Loss, Policy, QueueingDelay, Rule, duration_text

State = Literal["unmeasured", "healthy", "suspect", "drained", "returning"]


class Verdict(enum.Enum):
    """What one measurement says about one condition."""

    BAD = "bad"  # above the threshold, by more than its error
    CLEAR = "clear"  # below the lower threshold, by more than its error
    BETWEEN = "between"  # neither
    NONE = "none"  # nothing was measured


@dataclass(frozen=True, slots=True)
class Reading:
    """A verdict with the numbers behind it, for people."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class PathHealth:
    """Everything remembered about one path. Tuples have one entry per rule of the policy."""

    state: State
    since_ns: int
    readings: tuple[Reading, ...] = ()
    bad_since: tuple[int | None, ...] = ()  # first of the unbroken run of bad measurements
    seen_ns: int = 0  # end of the latest measurement
    measured: bool = False  # whether the latest measurement had an answer with a value
    clear_since: int | None = None  # start of the time without a bad measurement, while drained
    rule: int | None = None  # under which it was taken down
    step: int = 0  # while returning
    step_since: int = 0
    strikes: int = 0  # drains that are remembered; each after the first doubles the dwell
    forgive_ns: int = 0  # when the next strike is forgotten, while healthy
    tried_ns: int | None = None  # when the last return began
    because: str = ""

    @property
    def bad(self) -> bool:
        """Whether the latest measurement was bad under any rule."""
        return any(reading.verdict is Verdict.BAD for reading in self.readings)


def judge(condition: QueueingDelay | Loss, signal: PathDelay) -> Reading:
    """What a measurement says about a condition; its error never helps to a verdict."""
    if isinstance(condition, Loss):
        settled = signal.received + signal.lost
        if settled == 0:
            return Reading(Verdict.NONE, "no probe was due")
        verdict = _between(signal.loss > condition.above, signal.loss < condition.clear_below or signal.loss == 0)
        return Reading(verdict, f"loss {signal.lost} of {settled} probes ({signal.loss:.0%})")
    if signal.overtaken_p50_ns is not None:
        # Neither clear nor a value: a lower bound, of both directions together, from probes that are still under way.
        verdict = _between(signal.overtaken_p50_ns > condition.above, False)
        waited, answered = duration_text(signal.overtaken_p50_ns), signal.forward.samples
        late = f"{signal.overtaken} probes overtaken by other paths, {answered} answered"
        return Reading(verdict, f"queueing delay at least {waited}: {late}")
    delay = signal.forward
    value = {
        "p50": delay.queueing_p50_ns,
        "p99": delay.queueing_p99_ns,
        "last": delay.queueing_last_ns,
    }[condition.quantile]
    if value is None or delay.samples == 0:
        return Reading(Verdict.NONE, "no queueing delay was measured")
    bound = delay.queueing_bound_ns
    if bound is None:
        return Reading(Verdict.NONE, "the queueing delay came without its error")
    verdict = _between(value - bound > condition.above, value + bound < condition.clear_below)
    return Reading(verdict, f"queueing delay {condition.quantile} {duration_text(value)} ± {duration_text(bound)}")


def _between(bad: bool, clear: bool) -> Verdict:
    return Verdict.BAD if bad else Verdict.CLEAR if clear else Verdict.BETWEEN


def unknown(now: int) -> PathHealth:
    """A path nobody has measured."""
    return PathHealth("unmeasured", now, because="not measured")


def stale(policy: Policy, path: PathHealth, now: int) -> bool:
    """Whether the latest measurement is too old to act on."""
    return now - path.seen_ns > policy.safety.stale_after


def observe(policy: Policy, path: PathHealth, signal: PathDelay, now: int) -> PathHealth:
    """The path after one more measurement, and after what the clock allows.

    A measurement that is not newer than the last one, stale on arrival, or from the future changes nothing.
    """
    at = signal.at_ns
    if at <= path.seen_ns or abs(now - at) > policy.safety.stale_after:
        return path
    readings = tuple(judge(rule.when, signal) for rule in policy.rules)
    broken = at - path.seen_ns > policy.safety.stale_after  # what ran before the silence does not count on
    before = (None,) * len(readings) if broken or not path.bad_since else path.bad_since
    bad_since = tuple(
        (at if since is None else since) if reading.verdict is Verdict.BAD else None
        for reading, since in zip(readings, before, strict=True)
    )
    path = replace(
        path,
        readings=readings,
        bad_since=bad_since,
        seen_ns=at,
        measured=signal.received > 0 and any(reading.verdict is not Verdict.NONE for reading in readings),
        step_since=at if broken else path.step_since,
    )
    return advance(policy, _clearing(path, at, broken), now)


def _clearing(path: PathHealth, at: int, broken: bool) -> PathHealth:
    """Keep the time since which a drained path looks good: a bad measurement ends it, a clear one starts it."""
    since = None if broken else path.clear_since
    if path.state != "drained" or path.bad or path.rule is None:
        return replace(path, clear_since=None)
    if since is None and path.readings[path.rule].verdict is Verdict.CLEAR:
        since = at
    return replace(path, clear_since=since)


def advance(  # noqa: PLR0911 (one return per state)
    policy: Policy, path: PathHealth, now: int
) -> PathHealth:
    """The path after what the clock alone changes."""
    if path.state == "unmeasured" and path.seen_ns == 0:
        return path
    silent = now - path.seen_ns
    if silent > policy.safety.baseline_after:
        if path.state == "unmeasured":
            return path
        why = f"not measured for {duration_text(silent)}"
        return replace(path, state="unmeasured", since_ns=now, because=why, step=0, clear_since=None)
    if silent > policy.safety.stale_after:
        return path
    match path.state:
        case "unmeasured":
            return _settle(policy, _healthy(policy, path, now, "measured"), now)
        case "healthy" | "suspect":
            return _settle(policy, path, now)
        case "drained":
            return _return_when_clear(policy, path, now)
        case "returning":
            return _next_step(policy, path, now)


def _settle(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    """Healthy or suspect, whichever the latest measurement says; strikes are forgotten while healthy."""
    if path.bad:
        why = next(reading.text for reading in path.readings if reading.verdict is Verdict.BAD)
        if path.state == "suspect":
            return replace(path, because=why)
        return replace(path, state="suspect", since_ns=now, because=why)
    if path.state == "suspect":
        path = replace(path, state="healthy", since_ns=now, because="no longer bad")
    if path.strikes and path.rule is not None and now >= path.forgive_ns:
        strikes = path.strikes - 1
        path = replace(path, strikes=strikes, forgive_ns=now + dwell(policy.rules[path.rule], strikes))
    return path


def _healthy(policy: Policy, path: PathHealth, now: int, why: str) -> PathHealth:
    wait = 0 if path.rule is None else dwell(policy.rules[path.rule], path.strikes)
    return replace(path, state="healthy", since_ns=now, step=0, forgive_ns=now + wait, because=why)


def due(policy: Policy, path: PathHealth) -> int | None:
    """The rule under which the path ought to be taken down (further) now; the first in the policy that holds."""
    if path.state not in ("suspect", "returning", "drained"):
        return None
    limit = path.rule if path.state == "drained" else None
    for number, (rule, since) in enumerate(zip(policy.rules, path.bad_since, strict=False)):
        if limit is not None and number >= limit:
            return None  # already down under this one
        if since is not None and path.seen_ns - since >= rule.when.for_:
            return number
    return None


def drained(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    """The path after its drain was carried out.

    Raises
    ------
    ValueError
        If it was not due.
    """
    number = due(policy, path)
    if number is None:
        raise ValueError(f"a {path.state} path is not due to be drained")
    rule = policy.rules[number]
    strikes = path.strikes + (path.state != "drained")
    return replace(
        path,
        state="drained",
        since_ns=now,
        rule=number,
        strikes=strikes,
        step=0,
        clear_since=None,
        because=reason(rule, path, number),
    )


def lifted(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    """The path after its weight was put back although it has not recovered. Going down again is no relapse."""
    if path.state not in ("drained", "returning"):
        return path
    back = _healthy(policy, path, now, "the original weights were put back")
    return replace(back, strikes=max(0, path.strikes - 1), bad_since=(None,) * len(path.bad_since), clear_since=None)


def reason(rule: Rule, path: PathHealth, number: int) -> str:
    """Why a path is taken down: the measurement, the threshold, and for how long."""
    since = path.bad_since[number]
    lasted = path.seen_ns - since if since is not None else 0
    when = rule.when
    threshold = duration_text(when.above) if isinstance(when, QueueingDelay) else f"{when.above:.0%}"
    return f"{path.readings[number].text}, above {threshold} for {duration_text(lasted)}"


def dwell(rule: Rule, strikes: int) -> int:
    """How long a path must look good before it returns: doubled by each strike after the first."""
    doublings = min(max(0, strikes - 1), 32)
    return min(rule.return_.dwell << doublings, rule.return_.max_dwell)


def share(policy: Policy, path: PathHealth) -> float:
    """The share of its original weight that its state gives the path."""
    if path.rule is None or path.state not in ("drained", "returning"):
        return 1.0
    rule = policy.rules[path.rule]
    return rule.return_.steps[path.step] if path.state == "returning" else rule.then.shift.share


def _return_when_clear(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    assert path.rule is not None
    rule = policy.rules[path.rule]
    clear = path.readings[path.rule].verdict is Verdict.CLEAR
    if path.clear_since is None or not clear:
        return path
    if path.seen_ns - path.clear_since < dwell(rule, path.strikes):
        return path
    # However short the dwell: steady congestion must not become many tries.
    if path.tried_ns is not None and now - path.tried_ns < rule.return_.retry_after:
        return path
    why = f"{path.readings[path.rule].text}, good for {duration_text(path.seen_ns - path.clear_since)}"
    return replace(path, state="returning", since_ns=now, step=0, step_since=now, tried_ns=now, because=why)


def _next_step(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    assert path.rule is not None
    back = policy.rules[path.rule].return_
    if path.bad or not path.measured or path.seen_ns - path.step_since < back.step:
        return path
    text = path.readings[path.rule].text
    if path.step + 1 < len(back.steps):
        return replace(path, step=path.step + 1, step_since=now, because=f"{text}, still good")
    return _healthy(policy, path, now, f"{text}, still good")
