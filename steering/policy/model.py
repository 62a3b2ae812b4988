"""The policy: what may be touched, within which limits, by which rules. Frozen; docs/policy.md has every key. Pure.

Durations are `int` nanoseconds, rates `int` bits per second, shares `float` within 0 and 1.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from pytools.units import SECOND, duration_text
from steering.policy.actions import Return, Then
from steering.policy.base import Address, Count, Duration, Model, NotNull, Prefix, ShareAboveZero, Some, bad
from steering.policy.conditions import Condition
from steering.policy.scope import Scope

FIRST_TABLE: Final = 20_000  # as in pytools.kernel.leftovers
LAST_TABLE: Final = 29_999

Interface = Annotated[str, Field(strict=True, min_length=1, max_length=15)]


class Hop(Model):
    """A hop that no route names."""

    via: Address
    dev: Interface


class Manage(Model):
    """What may be steered, and which numbers are ours in the kernel."""

    destinations: Some[Prefix]
    alternatives: Some[Hop] = Field(
        default=(), description="further hops for these prefixes; each stands by until all that the route has are left"
    )
    vrfs: Some[Interface] = Field(default=(), description="VRF devices whose routes are steered as well")
    table: Annotated[int, Field(strict=True, ge=FIRST_TABLE, le=LAST_TABLE - 100)] = Field(
        default=FIRST_TABLE, description="the first of our routing tables; one above each of theirs that is used"
    )
    priority: NotNull[Annotated[int, Field(strict=True, ge=1, le=32_765)]] = Field(
        default=None, description="of our rule above the main table; directly above theirs unless given"
    )


class Herd(Model):
    """So that many hosts with the same policy do not all move at once. Failures are not waited with."""

    jitter: Duration = Field(default=0, description="an act waits for a random time up to this, drawn by host and path")
    fraction: ShareAboveZero = Field(default=1.0, description="of the flows that ought to move, so many in one step")

    @field_validator("jitter")
    @classmethod
    def _within_reason(cls, jitter: int) -> int:
        if jitter > 60 * SECOND:
            raise bad("at most 1m")
        return jitter


class Moves(Model):
    """How often one flow may be moved."""

    count: Count = 1
    per: Duration = 10 * SECOND

    @field_validator("per")
    @classmethod
    def _some_time(cls, per: int) -> int:
        if per == 0:
            raise bad("more than 0")
        return per


class Safety(Model):
    """Limits that hold whatever the rules say."""

    lease: Duration = Field(default=3 * SECOND, description="without a sign of life for so long, every act is undone")
    takeover: Duration = Field(
        default=15 * SECOND,
        description="a controller that dies leaves what is in force for so long to a successor; then it is undone",
    )
    max_drained_share: ShareAboveZero = Field(
        default=0.5, description="of a group's original weight, at most this much may be taken away at once"
    )
    stale_after: Duration = Field(default=SECOND // 2, description="a path not heard of for so long is stale: hold")
    baseline_after: Duration = Field(
        default=5 * SECOND, description="a path not heard of for so long is unmeasured: back to the original weights"
    )
    dead_baseline_after: Duration = Field(
        default=600 * SECOND,
        description="the same for a path that was left, had failed, and has not come back since",
    )
    reroute_hold: Duration = Field(
        default=SECOND,
        description="packets that the kernel moved off a silent path stay away for so long after it answers again; "
        "0: the kernel moves none by itself",
    )
    herd: Herd = Field(default_factory=Herd)
    max_moves_per_flow: Moves = Field(default_factory=Moves)

    @field_validator("lease")
    @classmethod
    def _lease_within_reason(cls, lease: int) -> int:
        if not 2 * SECOND <= lease <= 60 * SECOND:
            raise bad("between 2s and 1m")
        return lease

    @field_validator("takeover")
    @classmethod
    def _takeover_within_reason(cls, takeover: int) -> int:
        if takeover > 15 * SECOND:
            raise bad("at most 15s")
        return takeover

    @field_validator("reroute_hold")
    @classmethod
    def _hold_within_reason(cls, hold: int) -> int:
        if hold > 5 * SECOND:
            raise bad("at most 5s")
        return hold

    @field_validator("dead_baseline_after")
    @classmethod
    def _dead_within_reason(cls, dead: int) -> int:
        if dead > 3600 * SECOND:
            raise bad("at most 1h")
        return dead

    @field_validator("stale_after")
    @classmethod
    def _stale_within_reason(cls, stale: int) -> int:
        if not SECOND // 10 <= stale <= 60 * SECOND:
            raise bad("between 100ms and 1m")
        return stale

    @field_validator("baseline_after")
    @classmethod
    def _baseline_after_stale(cls, baseline: int, info: ValidationInfo) -> int:
        stale = info.data.get("stale_after")
        if stale is not None and baseline < stale:
            raise bad(f"at least stale_after ({duration_text(stale)})")
        return baseline


class Rule(Model):
    """One condition, where it is looked for, what to do about it, and how to come back."""

    name: Annotated[str, Field(strict=True, pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    priority: NotNull[Annotated[int, Field(strict=True, ge=0, le=65_535)]] = Field(
        default=None, description="lower comes first; all rules have one, or none and the order of the file counts"
    )
    when: Condition
    then: Then
    scope: Scope = Field(default_factory=Scope)
    return_: Return = Field(default_factory=Return, alias="return", validate_default=True)

    @field_validator("return_")
    @classmethod
    def _returns_upwards(cls, back: Return, info: ValidationInfo) -> Return:
        then = info.data.get("then")
        if then is not None and then.shift is not None and then.share < 1 and back.steps[0] <= then.share:
            raise bad(f"more than then.shift.share ({then.share:g})", ("steps", 0))
        return back


def _not_true(version: object) -> object:
    return str(version) if isinstance(version, bool) else version  # True == 1, and would pass for it


class Policy(Model):
    """A whole policy. The rules are tried in order: the first whose condition holds decides."""

    version: Annotated[Literal[1], BeforeValidator(_not_true)]
    manage: Manage
    safety: Safety = Field(default_factory=Safety)
    rules: Some[Rule]

    @field_validator("rules")
    @classmethod
    def _in_order(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        if any(rule.priority is None for rule in rules):
            return rules
        return tuple(sorted(rules, key=lambda rule: rule.priority or 0))
