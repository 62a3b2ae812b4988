"""What is remembered of one path, and what its rules make due. Pure; CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from pytools.signals import Path, SteeringState
from steering.deciding.condition_eval import Verdict
from steering.deciding.rule_eval import Memory, Reading
from steering.policy.actions import WEIGHT_KINDS
from steering.policy.conditions import leaves
from steering.policy.model import Policy, Rule

NEVER_ANSWERED: Final = "no probe of it was answered yet"
SHARE_DIGITS: Final = 9  # of a share: ten steps of 0.1 lead to 0


class PathHealth(msgspec.Struct, frozen=True):
    """Everything remembered about one path. Tuples have one entry per rule of the policy."""

    state: SteeringState
    since_ns: int
    readings: tuple[Reading, ...] = ()
    memories: tuple[Memory, ...] = ()
    covered: tuple[bool, ...] = ()  # whether it is in the scope of each rule
    seen_ns: int = 0  # end of the latest measurement
    answered: bool = False  # whether any of its probes was answered, since it was last unmeasured
    measured: bool = False  # whether the latest measurement had an answer with a value
    dead: bool = False  # whether it failed, and has not begun to return since
    bad: bool = False  # whether it was bad under a rule that moves something, for however short a time
    confirmed_ns: int | None = None  # when it was last bad for as long, and as often, as a rule that moves weight asks
    clear_since: int | None = None  # start of the time without a bad measurement, while drained
    rule: int | None = None  # under which it was taken down
    also: frozenset[int] = frozenset()  # other rules under which it was bad, by answered probes, since it was drained
    share: float = 1.0  # of its original weight, while drained or returning
    act_ns: int | None = None  # not before this is it lowered (further) for load; None while nothing is wrong
    held_share: float = 0.0  # the largest share with which it was good for a whole step: a relapse goes back to it
    lag: float = 0.0  # by what share of a dwell it returns later than others of a herd
    step: int = 0  # how many it has taken while returning
    step_since: int | None = None  # since when the share of its step is in force; None: it is not yet
    strikes: int = 0  # drains that are remembered; each after the first doubles the dwell
    forgive_ns: int = 0  # when the next strike is forgotten, while healthy
    tried_ns: int | None = None  # when the last return began
    because: str = ""

    @property
    def down(self) -> bool:
        """Whether part of its weight is taken away."""
        return self.state in ("drained", "returning")

    @property
    def failed(self) -> bool:
        """Whether nothing passes, as its silence or its link shows."""
        return failed(self.readings)


def failed(readings: Iterable[Reading]) -> bool:
    """Whether nothing passes, by these readings."""
    return any(reading.failure and reading.verdict is Verdict.BAD for reading in readings)


def unknown(now: int) -> PathHealth:
    """A path nobody has measured."""
    return PathHealth("unmeasured", now, because="not measured")


def unanswered(policy: Policy, path: PathHealth, now: int) -> bool:
    """Whether a path is probed, and not one of its probes was answered yet."""
    return path.state == "unmeasured" and path.seen_ns > 0 and not stale(policy, path, now)


def stale(policy: Policy, path: PathHealth, now: int) -> bool:
    """Whether the latest measurement is too old to act on."""
    return now - path.seen_ns > policy.safety.stale_after


def left_dead(path: PathHealth) -> bool:
    """Whether a path was left and failed, and has not begun to return since."""
    return path.state == "drained" and path.dead


def share(path: PathHealth) -> float:
    """The share of its original weight that its state gives the path."""
    return path.share if path.down else 1.0


def due(policy: Policy, path: PathHealth) -> int | None:
    """The rule under which the path ought to be taken down (further) now; the first in the policy that holds.

    A path that is down goes further down under an earlier rule, and under the same one in steps, on what was measured
    a settle time after the last. A failure takes over what is down, or waits, for load under an earlier rule.
    """
    if path.state not in ("suspect", "drained", "returning"):
        return None
    for number, (rule, reading) in enumerate(zip(policy.rules, path.readings, strict=False)):
        if reading.verdict is not Verdict.BAD or rule.then.kind not in WEIGHT_KINDS:
            continue
        if path.state == "drained" and _below(path, number, rule, reading):
            continue
        patient = not reading.failure and path.state != "returning"  # who came back last makes room first
        if patient and path.act_ns is not None and path.seen_ns < path.act_ns:
            continue
        return number
    return None


def _below(path: PathHealth, number: int, rule: Rule, reading: Reading) -> bool:
    """Whether a drained path is down already as far as this rule has a say."""
    if path.rule is None or number < path.rule:
        return False
    return (number > path.rule and not reading.failure) or path.share <= lowest(rule)


def lowest(rule: Rule) -> float:
    """The least share that the rule can leave."""
    return rule.then.share if rule.then.shift is None or rule.then.shift.by == "share" else 0.0


def recovered(policy: Policy, path: PathHealth, number: int) -> bool:
    """Whether a path may take the load of one that is bad under this rule.

    One that was bad for as long as a rule asks must have been good for as long: between two bursts it looks idle, too.
    """
    asked = max((leaf.for_ for leaf in leaves(policy.rules[number].when)), default=0)
    return path.confirmed_ns is None or path.seen_ns - path.confirmed_ns >= asked


def rule_about_failures(policy: Policy, which: Path) -> int | None:
    """The first rule that takes weight from this path when it fails; None where there is none."""
    for number, rule in enumerate(policy.rules):
        if rule.then.kind in WEIGHT_KINDS and rule.scope.covers(which) and any(x.failure for x in leaves(rule.when)):
            return number
    return None


def wanted_share(policy: Policy, path: PathHealth, floor: float) -> float:
    """The share that the rule under which a path is due leaves it; `floor` is what the rule goes down to at last.

    Load goes down in the rule's steps, and a relapse then goes back to the share that held; failures go down at once.
    It is never more than the path has.
    """
    number = due(policy, path)
    assert number is not None
    rule, now_has = policy.rules[number], share(path)
    if path.readings[number].failure:
        return min(floor, now_has)
    step = 1.0 if rule.then.shift is None else rule.then.shift.step
    relapse = step < 1 and path.state == "returning" and path.rule == number
    return min(now_has, max(floor, path.held_share if relapse else round(now_has - step, SHARE_DIGITS)))
