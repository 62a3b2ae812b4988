"""The policy: what may be touched, within which limits, by which rules. Frozen. Pure.

Durations are `int` nanoseconds, rates `int` bits per second, shares `float` within 0 and 1. Descriptions of fields, or
else the docstring of what they hold, become docs/policy.txt.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from pytools.units import MS, SECOND
from steering.policy.actions import FLOW_KINDS, Bonds, Labels, Ports, Return, Then
from steering.policy.base import (
    Address,
    Count,
    Duration,
    LongerThanZero,
    Model,
    NotNull,
    Prefix,
    ShareAboveZero,
    Some,
    Within,
    at_least,
    bad,
)
from steering.policy.conditions import Condition, leaves
from steering.policy.hooks import Hook, HookName
from steering.policy.scope import Scope

_ALWAYS: Final = frozenset({"path_delay"})
_BY_CONDITION: Final = {
    "silence": {"path_liveness"},
    "retransmits": {"tcp_path"},
    "ce_share": {"path_ecn", "tcp_path"},
    "link": {"link", "link_event", "path_mtu", "rdma_port"},
    "rdma": {"rdma_qp"},
    "job_step": {"job"},
    "straggler": {"job"},
}
FIRST_TABLE: Final = 20_000  # as in pytools.kernel.leftovers
LAST_TABLE: Final = 29_999

Interface = Annotated[str, Field(strict=True, min_length=1, max_length=15)]


class Hop(Model):
    """A hop that no route names."""

    via: Address = Field(description="address of its gateway")
    dev: Interface = Field(description="interface that leads there")


class Manage(Model):
    """What may be steered, and the routing tables and rules that swerve uses for it."""

    destinations: Some[Prefix] = Field(description="prefixes to steer, by routes of swerve's own (overlay.md)")
    alternatives: Some[Hop] = Field(
        default=(),
        description="further hops for these prefixes; each stands by until all that the routes have are left",
    )
    vrfs: Some[Interface] = Field(default=(), description="VRF devices whose routes are steered too")
    table: Annotated[int, Field(strict=True, ge=FIRST_TABLE, le=LAST_TABLE - 100)] = Field(
        default=FIRST_TABLE, description="the first of swerve's routing tables; one above each of theirs that is used"
    )
    priority: NotNull[Annotated[int, Field(strict=True, ge=1, le=32_765)]] = Field(
        default=None, description="priority of swerve's rule above the main table; by default directly above theirs"
    )
    rto_min: NotNull[Annotated[Duration, Within(2 * MS, 200 * MS)]] = Field(
        default=None,
        description="minimum TCP retransmission timeout of the managed routes, in whole milliseconds; puts swerve's "
        "routes in force from the start (steering.md); the kernel's own is 200ms",
    )

    @field_validator("rto_min")
    @classmethod
    def _whole_milliseconds(cls, rto_min: int | None) -> int | None:
        if rto_min is not None and rto_min % MS:
            raise bad("whole milliseconds")
        return rto_min


class Herd(Model):
    """Damping, so that many hosts with the same policy do not all move at once; failures are never delayed."""

    jitter: Annotated[Duration, Within(most=60 * SECOND)] = Field(
        default=0,
        description="largest random delay before an act for load, drawn by host and path; above 0 each dwell is drawn "
        "too, up to twice its length",
    )
    fraction: ShareAboveZero = Field(default=1.0, description="share of the flows to move that move in one step")


class Moves(Model):
    """How often pins may move one flow, except off a failed path."""

    count: Count = Field(default=1, description="number of moves")
    per: LongerThanZero = Field(default=10 * SECOND, description="time in which they count")


class Safety(Model):
    """Limits that hold whatever the rules say."""

    lease: Annotated[Duration, Within(2 * SECOND, 60 * SECOND)] = Field(
        default=3 * SECOND, description="a controller without a sign of life for this long is killed"
    )
    takeover: Annotated[Duration, Within(most=15 * SECOND)] = Field(
        default=15 * SECOND,
        description="how long weights stay in force for a successor when the controller died; then they are undone",
    )
    max_drained_share: ShareAboveZero = Field(
        default=0.5, description="largest share of a group's original weight that is taken away at once"
    )
    stale_after: Annotated[Duration, Within(SECOND // 10, 60 * SECOND)] = Field(
        default=SECOND // 2,
        description="a path not measured for this long freezes its group; more than the agent's windows.short",
    )
    baseline_after: Duration = Field(
        default=5 * SECOND,
        description="a path not measured for this long gives its group the original weights back; at least stale_after",
    )
    dead_baseline_after: Annotated[Duration, Within(most=3600 * SECOND)] = Field(
        default=600 * SECOND, description="the same for a path that failed and has not come back"
    )
    reroute_hold: Annotated[Duration, Within(most=5 * SECOND)] = Field(
        default=SECOND,
        description="how long the kernel keeps packets off a silent path after it answers again; 0s: no fast reroute",
    )
    herd: Herd = Field(default_factory=Herd)
    max_moves_per_flow: Moves = Field(default_factory=Moves)

    _baseline_after_stale = field_validator("baseline_after")(at_least("stale_after"))


class Rule(Model):
    """A condition, where it applies, what to do about it, and how the path comes back."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": {"properties": {"then": {"required": ["hold"]}}},
            "then": {"not": {"required": ["return"]}},
            "else": {
                "if": {"properties": {"then": {"required": ["spread"]}}},
                "then": {"not": {"anyOf": [{"required": ["when"]}, {"required": ["return"]}]}},
                "else": {"required": ["when"]},
            },
        }
    )

    name: Annotated[str, Field(strict=True, pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")] = Field(
        description="lower-case letters, digits, - and _; appears in every act"
    )
    priority: NotNull[Annotated[int, Field(strict=True, ge=0, le=65_535)]] = Field(
        default=None, description="lower comes first, in place of the order of the file; in every rule or in none"
    )
    when: NotNull[Condition] = Field(
        default=None,
        description="a signal with a threshold, or a tree of all, any and not; required, but for spread and hold",
    )
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

    version: Annotated[Literal[1], BeforeValidator(_not_true)] = Field(description="version of this format")
    manage: Manage
    safety: Safety = Field(default_factory=Safety)
    ports: NotNull[Ports] = None
    labels: NotNull[Labels] = None
    bonds: NotNull[Bonds] = None
    hooks: dict[HookName, Hook] = Field(
        default_factory=dict,
        max_length=32,
        json_schema_extra={"additionalProperties": False},
        description="hooks that rules with then.notify call, by name: lower-case letters, digits, - and _",
    )
    rules: Some[Rule] = ()

    def __hash__(self) -> int:
        """Of all but the hooks: a mapping has none."""
        return hash((self.manage, self.safety, self.rules))

    @field_validator("rules")
    @classmethod
    def _in_order(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        if any(rule.priority is None for rule in rules):
            return rules
        return tuple(sorted(rules, key=lambda rule: rule.priority or 0))


def signals_of(policy: Policy) -> frozenset[str]:
    """The kinds of signals, by their tags, that a policy needs, so that nothing else is sent to the controller."""
    found = set(_ALWAYS)
    if policy.ports is not None or policy.labels is not None:
        found |= {"path_way", "tcp_flow"}
    for rule in policy.rules:
        for leaf in leaves(rule.when):
            found |= _BY_CONDITION.get(leaf.signal, set())
        if rule.then.shift is not None and rule.then.shift.by != "share":
            found |= {"link"}
        if rule.then.kind in FLOW_KINDS:
            found |= {"tcp_flow", "link"}
    return frozenset(found)
