"""How the state of a path changes: a pure machine; `now` and signal times are CLOCK_MONOTONIC nanoseconds.

    unmeasured ─signal─▶ healthy ─bad─▶ suspect ─granted─▶ drained ─dwell─▶ returning ─steps─▶ healthy
                                                              ▲                 │
                                                              └──bad (relapse)──┘

A path that is due stays suspect until `decide` grants the change and it was carried out: the state never claims what
was not done. A drained path keeps `share` of its weight: a rule that goes down in steps lowers it again after each
settle time while the path is still bad. Silence moves nothing (stale: hold); after long silence the path is
unmeasured again, after much longer silence if it was dead before. A path of which no probe was ever answered stays
unmeasured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from pytools.signals import Path, SteeringState
from pytools.units import duration_text
from steering.deciding import health, hold_down
from steering.deciding.condition_eval import Verdict
from steering.deciding.evidence import Facts
from steering.deciding.health import PathHealth
from steering.deciding.rule_eval import Memory, Reading, judge
from steering.deciding.thresholds import LeafLimits
from steering.policy.actions import WEIGHT_KINDS
from steering.policy.model import Policy, Rule

_OUT_OF_SCOPE: Final[tuple[Reading, Memory]] = Reading(Verdict.NONE, "out of the rule's scope"), ()


def observe(policy: Policy, path: PathHealth, facts: Facts, now: int, limits: Sequence[LeafLimits] = ()) -> PathHealth:
    """The path after what was newly measured of it, and after what the clock allows.

    Facts that are older than the last ones, stale on arrival, or from the future change nothing. `limits` are, by rule,
    what relative thresholds are on this path; empty when nothing is learnt.
    """
    at = measured_ns(facts)
    if at < path.seen_ns or abs(now - at) > policy.safety.stale_after:
        return path
    broken = at - path.seen_ns > policy.safety.stale_after  # what ran before the silence does not count on
    memories = path.memories if path.memories and not broken else ((),) * len(policy.rules)
    covered = path.covered or tuple(rule.scope.covers(facts.path) for rule in policy.rules)
    judged = [
        judge(rule.when, facts, memory, now, policy.safety.stale_after, limit)
        if within and rule.when
        else _OUT_OF_SCOPE
        for rule, within, memory, limit in zip(
            policy.rules, covered, memories, limits or ((),) * len(policy.rules), strict=True
        )
    ]
    path = replace(
        path,
        also=path.also | _bad_while_drained(policy, path, [reading for reading, _ in judged], facts),
        covered=covered,
        readings=tuple(reading for reading, _ in judged),
        memories=tuple(memory for _, memory in judged),
        seen_ns=at,
        answered=path.answered or facts.answered,
        measured=_measured(facts),
        dead=health.failed(reading for reading, _ in judged) or health.left_dead(path),
        bad=any(_bad(rule, reading) for rule, (reading, _) in zip(policy.rules, judged, strict=True)),
        confirmed_ns=at if _confirmed(policy, (reading for reading, _ in judged)) else path.confirmed_ns,
        act_ns=_patience(policy, path, [reading for reading, _ in judged], facts, at),
        step_since=at if broken and path.step_since is not None else path.step_since,
    )
    return advance(policy, _clearing(path, at, broken), now)


def _bad_while_drained(policy: Policy, path: PathHealth, readings: Sequence[Reading], facts: Facts) -> frozenset[int]:
    """Rules that move weight under which a drained path is bad although it answers.

    Of a path that is silent, or was until just now, a delay is not known: only that probes wait or are lost.
    """
    silent = any(reading.failure and reading.verdict in (Verdict.BAD, Verdict.PENDING) for reading in readings)
    overtaken = facts.delay is not None and facts.delay.overtaken_p50_ns is not None
    if path.state != "drained" or silent or overtaken or not _measured(facts):
        return frozenset()
    return frozenset(
        number
        for number, (rule, reading) in enumerate(zip(policy.rules, readings, strict=True))
        if rule.then.kind in WEIGHT_KINDS and number != path.rule and _bad(rule, reading)
    )


def measured_ns(facts: Facts) -> int:
    """When a path was last measured: by its delay or its liveness, whichever is newer; 0 for never."""
    return max((fact.at_ns for fact in (facts.delay, facts.liveness) if fact is not None), default=0)


def _bad(rule: Rule, reading: Reading) -> bool:
    return reading.verdict in (Verdict.BAD, Verdict.PENDING) and rule.then.kind not in ("alert", "hold")


def _confirmed(policy: Policy, readings: Iterable[Reading]) -> bool:
    return any(
        reading.verdict is Verdict.BAD and rule.then.kind in WEIGHT_KINDS
        for rule, reading in zip(policy.rules, readings, strict=True)
    )


def _measured(facts: Facts) -> bool:
    """Whether the latest window had an answer with a value."""
    delay = facts.delay
    return delay is not None and delay.received > 0 and delay.forward.queueing_p50_ns is not None


def _clearing(path: PathHealth, at: int, broken: bool) -> PathHealth:
    """Keep the time since which a drained path looks good: a bad measurement or none ends it, a clear one starts it."""
    if path.state != "drained" or path.bad or not path.measured or path.rule is None:
        return replace(path, clear_since=None)
    since = None if broken else path.clear_since
    return replace(path, clear_since=at if since is None and path.readings[path.rule].over else since)


def advance(  # noqa: PLR0911 (one return per state)
    policy: Policy, path: PathHealth, now: int
) -> PathHealth:
    """The path after what the clock alone changes."""
    if path.state == "unmeasured" and path.seen_ns == 0:
        return path
    silent = now - path.seen_ns
    if silent > _believed_for(policy, path):
        if path.state == "unmeasured":
            return path
        why = f"not measured for {duration_text(silent)}"
        return replace(_whole(path, "unmeasured", now, why), answered=False, dead=False, clear_since=None)
    if silent > policy.safety.stale_after:
        return path
    match path.state:
        case "unmeasured":
            if not path.answered:
                return replace(path, because=health.NEVER_ANSWERED)
            return _settle(policy, _healthy(policy, path, now, "measured"), now)
        case "healthy" | "suspect":
            return _settle(policy, path, now)
        case "drained":
            return _return_when_clear(policy, path, now)
        case "returning":
            return _next_step(policy, path, now)


def _believed_for(policy: Policy, path: PathHealth) -> int:
    """How long after its latest measurement a path's state stands: one that was left and is dead stays left."""
    safety = policy.safety
    return max(safety.baseline_after, safety.dead_baseline_after) if health.left_dead(path) else safety.baseline_after


def _settle(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    """Healthy or suspect, whichever the latest measurement says; strikes are forgotten while healthy."""
    if path.bad:
        why = next(r.text for rule, r in zip(policy.rules, path.readings, strict=True) if _bad(rule, r))
        if path.state == "suspect":
            return replace(path, because=why)
        return replace(path, state="suspect", since_ns=now, because=why)
    if path.state == "suspect":
        path = replace(path, state="healthy", since_ns=now, because="no longer bad")
    if path.strikes and path.rule is not None and now >= path.forgive_ns:
        strikes = path.strikes - 1
        path = replace(path, strikes=strikes, forgive_ns=now + hold_down.dwell(policy.rules[path.rule], strikes))
    return path


def _whole(path: PathHealth, state: SteeringState, now: int, why: str) -> PathHealth:
    return replace(path, state=state, since_ns=now, because=why, share=1.0, step=0)


def _healthy(policy: Policy, path: PathHealth, now: int, why: str) -> PathHealth:
    wait = 0 if path.rule is None else hold_down.dwell(policy.rules[path.rule], path.strikes)
    return replace(_whole(path, "healthy", now, why), forgive_ns=now + wait, held_share=0.0)


def _settle_ns(rule: Rule) -> int:
    return rule.then.shift.settle if rule.then.shift is not None else 0


def lowered(policy: Policy, which: Path, path: PathHealth, share: float, now: int) -> PathHealth:
    """The path after a change that leaves it this share of its weight was carried out.

    Raises
    ------
    ValueError
        If it was not due.
    """
    number = health.due(policy, path)
    if number is None:
        raise ValueError(f"a {path.state} path is not due to be drained")
    down = _down(path, number, share, path.readings[number].text, now)
    return replace(
        down,
        act_ns=now + _settle_ns(policy.rules[number]) + hold_down.drawn(policy, which, now),
        lag=hold_down.fraction(which, now) if policy.safety.herd.jitter else 0.0,
    )


def _down(path: PathHealth, number: int, share: float, because: str, now: int) -> PathHealth:
    """The path taken down under a rule; further down is no relapse."""
    return replace(
        path,
        state="drained",
        since_ns=now,
        rule=number,
        also=path.also - {number} if path.state == "drained" else frozenset(),
        share=share,
        strikes=path.strikes + (path.state != "drained"),
        step=0,
        clear_since=None,
        because=because,
    )


def taken_away(policy: Policy, which: Path, path: PathHealth, now: int) -> PathHealth:
    """The path after the kernel took its nexthop away with the link: it comes back as by the rule about failures.

    Without such a rule it comes back at once.
    """
    number = health.rule_about_failures(policy, which)
    if number is None:
        return path
    lowest = health.lowest(policy.rules[number])
    if path.state == "drained" and path.share <= lowest:
        return path
    return _down(path, number, lowest, "its nexthop went with the link", now)


def lifted(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    """The path after its weight was put back although it has not recovered. Going down again is no relapse."""
    if not path.down:
        return path
    back = _healthy(policy, path, now, "the original weights were put back")
    return replace(back, strikes=max(0, path.strikes - 1), memories=(), clear_since=None)


def _return_when_clear(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    assert path.rule is not None
    rule = policy.rules[path.rule]
    reading = path.readings[path.rule]
    if path.clear_since is None or hold_down.lacks(policy, path):
        return path
    if path.seen_ns - path.clear_since < hold_down.dwell_of(policy, path):
        return path
    # However short the dwell: steady congestion must not become many tries.
    if path.tried_ns is not None and now - path.tried_ns < hold_down.retry_after(policy, path):
        return path
    why = f"{reading.text}, good for {duration_text(path.seen_ns - path.clear_since)}"
    return replace(
        path,
        state="returning",
        since_ns=now,
        held_share=path.share,
        share=_raised(rule, path.share),
        step=1,
        step_since=None,
        tried_ns=now,
        because=why,
    )


def _next_step(policy: Policy, path: PathHealth, now: int) -> PathHealth:
    assert path.rule is not None
    back = policy.rules[path.rule].return_
    if path.step_since is None or path.bad or not path.measured or path.seen_ns - path.step_since < back.step:
        return path
    text = path.readings[path.rule].text
    if path.share >= 1:
        return _healthy(policy, path, now, f"{text}, still good")
    return replace(
        path,
        step=path.step + 1,
        share=_raised(policy.rules[path.rule], path.share),
        held_share=path.share,
        step_since=None,
        because=f"{text}, still good",
    )


def in_force(path: PathHealth, now: int) -> PathHealth:
    """The path after the share of its state was put in force: only from then on does a step on the way back last."""
    pending = path.state == "returning" and path.step_since is None
    return replace(path, step_since=now) if pending else path


def _raised(rule: Rule, share: float) -> float:
    """The next share on the way back; a rule that goes down in small steps comes back in no larger ones."""
    wanted = next((each for each in rule.return_.steps if each > share + 1e-9), 1.0)
    step = 1.0 if rule.then.shift is None else rule.then.shift.step
    return min(wanted, round(share + step, health.SHARE_DIGITS)) if step < 1 else wanted


def _patience(policy: Policy, path: PathHealth, readings: Sequence[Reading], facts: Facts, at: int) -> int | None:
    """Not before when a path may be lowered for load: each host draws its own time, so that a herd does not move."""
    if not any(
        reading.verdict is Verdict.BAD and rule.then.kind in WEIGHT_KINDS and not reading.failure
        for rule, reading in zip(policy.rules, readings, strict=True)
    ):
        return path.act_ns if path.down and path.act_ns is not None and at < path.act_ns else None
    return path.act_ns if path.act_ns is not None else at + hold_down.drawn(policy, facts.path, at)
