"""What a controller remembers of paths for its successor, and what the successor makes of it. Pure.

Times are CLOCK_MONOTONIC nanoseconds of one boot. Rules are remembered by name: the policy may be another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from pytools.signals import Path, SteeringState
from steering.deciding import health
from steering.deciding.condition_eval import Verdict
from steering.deciding.health import PathHealth
from steering.deciding.rule_eval import Reading
from steering.policy.actions import WEIGHT_KINDS
from steering.policy.model import Policy

_NOT_YET: Final = Reading(Verdict.NONE, "not measured since the controller was started")


class PathMemory(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is remembered of a path; only its name, if it is as good as new."""

    path: Path
    state: SteeringState = "unmeasured"
    since_ns: int = 0
    unheard_since_ns: int | None = None  # when it was last measured, if that was too long ago to act on
    rule: str = ""
    also: tuple[str, ...] = ()
    share: float = 1.0
    held_share: float = 0.0
    lag: float = 0.0
    strikes: int = 0
    forgive_ns: int = 0
    tried_ns: int | None = None
    dead: bool = False
    because: str = ""


def remembered(policy: Policy, paths: Mapping[Path, PathHealth], now: int) -> tuple[PathMemory, ...]:
    return tuple(_of(policy, path, known, now) for path, known in sorted(paths.items()))


def _of(policy: Policy, path: Path, known: PathHealth, now: int) -> PathMemory:
    if known.rule is None or not (known.down or known.strikes):
        return PathMemory(path)
    names = [rule.name for rule in policy.rules]
    return PathMemory(
        path,
        state=known.state,
        since_ns=known.since_ns,
        unheard_since_ns=known.seen_ns if health.stale(policy, known, now) else None,
        rule=names[known.rule],
        also=tuple(names[number] for number in sorted(known.also)),
        share=health.share(known),
        held_share=known.held_share,
        lag=known.lag,
        strikes=known.strikes,
        forgive_ns=known.forgive_ns,
        tried_ns=known.tried_ns,
        dead=health.left_dead(known),
        because=known.because,
    )


def recalled(policy: Policy, memory: PathMemory, in_kernel: float, now: int) -> PathHealth:
    """A path as its last controller left it, stale until it is measured.

    One that was left, or was on its way back, is drained with what the kernel gives it, and has its dwell before it:
    no measurement is carried over. One that has its whole weight is unmeasured, and only its relapses are remembered.

    Parameters
    ----------
    policy : Policy
        The policy, perhaps another one.
    in_kernel : float
        The share of its original weight that its member has.
    """
    if memory.state not in ("drained", "returning") and not memory.strikes:
        return health.unknown(now)
    numbers = {rule.name: number for number, rule in enumerate(policy.rules) if rule.then.kind in WEIGHT_KINDS}
    number = numbers.get(memory.rule, fallback(policy, memory.path))
    share = max(memory.share, in_kernel)
    known = replace(
        health.unknown(now), rule=number, strikes=memory.strikes, forgive_ns=memory.forgive_ns, tried_ns=memory.tried_ns
    )
    if number is None or memory.state not in ("drained", "returning") or share >= 1:
        return known
    unheard = now if memory.unheard_since_ns is None else memory.unheard_since_ns
    rules = len(policy.rules)
    return replace(
        known,
        state="drained",
        since_ns=memory.since_ns,
        readings=(_NOT_YET,) * rules,
        memories=((),) * rules,
        seen_ns=min(unheard, now - policy.safety.stale_after - 1),
        also=frozenset(numbers[name] for name in memory.also if name in numbers) - {number},
        share=share,
        held_share=min(memory.held_share, share),
        lag=memory.lag,
        dead=memory.dead,
        because=memory.because,
    )


def left_before(policy: Policy, path: Path, in_kernel: float, now: int) -> PathHealth:
    """A path that the kernel gives less than its weight, for a reason that is not remembered: the act was the last."""
    because = "it was left by the controller before this one"
    memory = PathMemory(path, "drained", now, share=in_kernel, strikes=1, dead=in_kernel == 0, because=because)
    return recalled(policy, memory, in_kernel, now)


def fallback(policy: Policy, path: Path) -> int | None:
    """The rule by which a path comes back that was left under one which is no more: that about failures first."""
    number = health.rule_about_failures(policy, path)
    if number is not None:
        return number
    covering = (n for n, rule in enumerate(policy.rules) if rule.then.kind in WEIGHT_KINDS and rule.scope.covers(path))
    return next(covering, None)
