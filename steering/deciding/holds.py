"""On which paths packets may be held, and how (docs/hold.md). Pure.

The kernel decides about every packet by itself, from its own samples of the queue; so a hold is armed wherever a rule
covers a path that works, and, if the rule has a condition, for some time after that was last true.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pytools.signals import Path
from steering.deciding.condition_eval import Verdict
from steering.deciding.evidence import Facts
from steering.deciding.health import PathHealth
from steering.deciding.overrides import NONE, Overrides
from steering.deciding.rule_eval import Memory, judge
from steering.deciding.thresholds import LeafLimits
from steering.plan import Group, Hold, HoldLimits
from steering.policy.actions import Hold as Action
from steering.policy.model import Policy, Rule
from steering.policy.scope import inside

_WHOLE: Final = 256  # a pause is to drain all that lies above the threshold


@dataclass(frozen=True, slots=True)
class Condition:
    """How the condition of a rule stands on a path."""

    memory: Memory = ()
    true_ns: int = 0  # when it was last, CLOCK_MONOTONIC; 0: never
    text: str = ""  # what was measured then

    def lasts(self, now: int, dwell_ns: int) -> bool:
        return self.true_ns > 0 and now - self.true_ns <= dwell_ns


Conditions = Mapping[tuple[str, Path], Condition]  # by rule


def conditions(
    policy: Policy,
    paths: Iterable[Path],
    facts: Callable[[Path], Facts],
    limits: Callable[[Path], tuple[LeafLimits, ...]],
    before: Conditions,
    now: int,
) -> Conditions:
    """How the conditions of holds stand now.

    Parameters
    ----------
    facts, limits : callable
        What is known of a path, and what relative thresholds are there, by rule; empty when none is.
    before : Conditions
        What this returned the last time; what is neither true nor clear stays as it was.
    """
    found = dict[tuple[str, Path], Condition]()
    for number, rule in enumerate(policy.rules):
        if rule.then.hold is None or rule.when is None:
            continue
        for path in (path for path in paths if rule.scope.covers(path)):
            known = before.get((rule.name, path), Condition())
            by_rule = limits(path)
            limit = by_rule[number] if by_rule else ()
            reading, memory = judge(rule.when, facts(path), known.memory, now, policy.safety.stale_after, limit)
            true_ns, text = known.true_ns, known.text
            if reading.verdict is Verdict.BAD:
                true_ns, text = now, reading.text
            elif known.lasts(now, rule.then.hold.dwell) and not reading.over and reading.at_ns:
                true_ns = now
            found[rule.name, path] = Condition(memory, true_ns, text)
    return found


def needed(policy: Policy) -> bool:
    return any(rule.then.hold is not None for rule in policy.rules)


def holds(
    policy: Policy,
    paths: Mapping[Path, PathHealth],
    groups: Iterable[Group],
    overrides: Overrides = NONE,
    standing: Conditions | None = None,
    now: int = 0,
) -> tuple[Hold, ...]:
    """The hold of every path that a rule covers, sorted; the first such rule whose condition lasts counts.

    Only packets to the measured address are held: others behind the same prefix may pass another queue. A target that
    the operator holds is left alone. The first four arguments are those of `standbys`.
    """
    rules = [rule for rule in policy.rules if rule.then.hold is not None]
    if not rules:
        return ()
    left_alone = {path for group in groups if overrides.held(group) for _, path in group.paths}
    found = []
    for path, known in paths.items():
        covering = (rule for rule in rules if rule.scope.covers(path))
        rule = next((rule for rule in covering if lasts(rule, path, standing or {}, now)), None)
        if rule is None or path in left_alone or known.failed or known.state == "unmeasured":
            continue
        if inside(path.address, policy.manage.destinations):
            found.append(_hold(path, rule, (standing or {}).get((rule.name, path))))
    return tuple(sorted(found, key=lambda each: each.path))


def lasts(rule: Rule, path: Path, standing: Conditions, now: int) -> bool:
    """Whether a rule that holds packets does so on a path now: it has no condition, or that was true lately."""
    assert rule.then.hold is not None
    known = standing.get((rule.name, path), Condition())
    return rule.when is None or known.lasts(now, rule.then.hold.dwell)


def _hold(path: Path, rule: Rule, condition: Condition | None) -> Hold:
    action = rule.then.hold
    assert action is not None
    whole = ipaddress.ip_address(path.address).max_prefixlen
    hold = Hold(path, (f"{path.address}/{whole}",), _limits(action), rule.name, action.qdisc == "fq")
    return hold if condition is None else replace(hold, because=condition.text)


def _limits(action: Action) -> HoldLimits:
    return HoldLimits(action.threshold, action.longest, action.fresh, action.floor // 8, _WHOLE)
