"""How long flows stay away from a path that they were moved off, and how they come back. Pure.

The same thinking as for weights (`health`): a path that is bad only under load looks idle once its flows have gone. So
it must look good for a dwell; then some flows are let go as they are routed, in the rule's steps, and a bad measurement
on the way is a relapse, which doubles the dwell. What is not measured counts neither way: while a path is silent
nothing begins and nothing comes back. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from steering.deciding import health, hold_down
from steering.deciding.condition_eval import Verdict
from steering.deciding.health import PathHealth
from steering.deciding.rule_eval import Reading
from steering.policy.model import Policy

State = Literal["away", "returning", "over"]


@dataclass(frozen=True, slots=True)
class Avoided:
    """A path under one rule about flows, from the first time that the rule held."""

    state: State
    acting: bool  # the rule holds now
    since_ns: int  # since when it holds, or did at last
    seen_ns: int  # the measurement behind that
    measured_ns: int  # the newest measurement of the path, whatever it said
    because: str
    failure: bool = False  # nothing passes: no damping is in place
    strikes: int = 1
    clear_since: int | None = None
    tried_ns: int | None = None
    step: int = 0
    step_since: int = 0
    forgive_ns: int = 0


def observe(policy: Policy, number: int, known: Avoided | None, path: PathHealth, now: int) -> Avoided | None:
    """The path under a rule after what was newly measured of it; None when there is nothing to remember."""
    if path.state == "unmeasured":
        return None if known is None else _let_go(policy, number, known, now)
    if health.stale(policy, path, now):
        return None if known is None else replace(known, acting=False)
    reading = path.readings[number]
    if reading.verdict is Verdict.BAD:
        return _bad(known, path, reading, now)
    if known is None:
        return None
    if path.seen_ns - known.measured_ns > policy.safety.stale_after:  # what ran before the silence does not count on
        known = replace(known, clear_since=None, step_since=path.seen_ns)
    return _later(policy, number, replace(known, acting=False, measured_ns=path.seen_ns), path, now)


def _let_go(policy: Policy, number: int, known: Avoided, now: int) -> Avoided:
    """Nobody knows any more how the path is; how often it was bad, and when it was tried, is remembered."""
    if known.state == "over":
        return known
    forgive_ns = now + hold_down.dwell(policy.rules[number], known.strikes)
    return replace(known, state="over", acting=False, clear_since=None, forgive_ns=forgive_ns)


def _bad(known: Avoided | None, path: PathHealth, reading: Reading, now: int) -> Avoided:
    fresh = Avoided("away", True, now, reading.at_ns, path.seen_ns, reading.text, reading.failure)
    if known is None:
        return fresh
    relapse = known.state != "away"
    return replace(
        fresh,
        since_ns=now if relapse or known.clear_since is not None else known.since_ns,
        strikes=known.strikes + relapse,
        tried_ns=known.tried_ns,
    )


def _later(policy: Policy, number: int, known: Avoided, path: PathHealth, now: int) -> Avoided | None:
    reading = path.readings[number]
    clear = reading.over
    match known.state:
        case "over":
            return _forgiven(policy, number, known, now)
        case "returning":
            return _next_step(policy, number, known, path, now) if clear else known
        case "away":
            if reading.verdict is Verdict.PENDING:
                return replace(known, clear_since=None)
            if known.clear_since is None:
                return replace(known, clear_since=path.seen_ns if clear else None)
            return _returning(policy, number, known, path, now) if clear else known


def _returning(policy: Policy, number: int, known: Avoided, path: PathHealth, now: int) -> Avoided:
    rule, reading = policy.rules[number], path.readings[number]
    assert known.clear_since is not None
    if reading.run < rule.return_.rise and not reading.idle:
        return known
    if path.seen_ns - known.clear_since < hold_down.dwell(rule, known.strikes):
        return known
    if known.tried_ns is not None and now - known.tried_ns < rule.return_.retry_after:
        return known
    return replace(known, state="returning", step=0, step_since=now, tried_ns=now)


def _next_step(policy: Policy, number: int, known: Avoided, path: PathHealth, now: int) -> Avoided:
    rule = policy.rules[number]
    if path.seen_ns - known.step_since < rule.return_.step:
        return known
    if known.step + 1 < len(rule.return_.steps):
        return replace(known, step=known.step + 1, step_since=now)
    return replace(known, state="over", forgive_ns=now + hold_down.dwell(rule, known.strikes))


def _forgiven(policy: Policy, number: int, known: Avoided, now: int) -> Avoided | None:
    if now < known.forgive_ns:
        return known
    if known.strikes <= 1:
        return None
    strikes = known.strikes - 1
    return replace(known, strikes=strikes, forgive_ns=now + hold_down.dwell(policy.rules[number], strikes))
