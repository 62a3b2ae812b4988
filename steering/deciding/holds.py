"""On which paths packets may be held, and how (docs/hold.md). Pure.

The kernel decides about every packet by itself, from its own samples of the queue; so a hold is armed wherever a rule
covers a path that works.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Final

from pytools.signals import Path
from steering.deciding.health import PathHealth
from steering.deciding.overrides import NONE, Overrides
from steering.plan import Group, Hold, HoldLimits
from steering.policy.actions import Hold as Action
from steering.policy.model import Policy, Rule
from steering.policy.scope import inside

_WHOLE: Final = 256  # a pause is to drain all that lies above the threshold


def needed(policy: Policy) -> bool:
    return any(rule.then.hold is not None for rule in policy.rules)


def holds(
    policy: Policy, paths: Mapping[Path, PathHealth], groups: Iterable[Group], overrides: Overrides = NONE
) -> tuple[Hold, ...]:
    """The hold of every path that a rule covers, sorted; the first such rule counts.

    Only packets to the measured address are held: others behind the same prefix may pass another queue. A target that
    the operator holds is left alone. The arguments are those of `standbys`.
    """
    rules = [rule for rule in policy.rules if rule.then.hold is not None]
    if not rules:
        return ()
    left_alone = {path for group in groups if overrides.held(group) for _, path in group.paths}
    found = []
    for path, known in paths.items():
        rule = next((rule for rule in rules if rule.scope.covers(path)), None)
        if rule is None or path in left_alone or known.failed or known.state == "unmeasured":
            continue
        if inside(path.address, policy.manage.destinations):
            found.append(_hold(path, rule))
    return tuple(sorted(found, key=lambda each: each.path))


def _hold(path: Path, rule: Rule) -> Hold:
    action = rule.then.hold
    assert action is not None
    whole = ipaddress.ip_address(path.address).max_prefixlen
    return Hold(path, (f"{path.address}/{whole}",), _limits(action), rule.name, action.qdisc == "fq")


def _limits(action: Action) -> HoldLimits:
    return HoldLimits(action.threshold, action.longest, action.fresh, action.floor // 8, _WHOLE)
