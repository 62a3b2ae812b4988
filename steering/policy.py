"""The policy: what may be touched, when a path counts as bad, what to do then, and how it comes back.

Frozen models; durations are `int` nanoseconds, shares `float` within 0 and 1. Pure: `policy_file` reads and
checks the YAML, docs/policy.md explains every key.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidationInfo

Quantile = Literal["p50", "p99", "last"]

UNITS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
DURATION_PATTERN: Final = r"^(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>ns|us|µs|ms|s|m|h)$"
_SCHEMA_DURATION: Final = r"^[0-9]+(\.[0-9]+)?(ns|us|µs|ms|s|m|h)$"  # JSON Schema has no named groups
_SECOND: Final = UNITS["s"]


def parse_duration(text: object) -> int:
    """Nanoseconds in a duration such as `40ms` or `1.5s`.

    Raises
    ------
    PydanticCustomError
        If it is not a string of a number and a unit.
    """
    match = re.match(DURATION_PATTERN, text.strip()) if isinstance(text, str) else None
    if match is None:
        raise PydanticCustomError("duration", "not a duration", {"given": text})
    number, unit = match["number"], match["unit"]
    whole, _, fraction = number.partition(".")
    return int(whole + fraction) * UNITS[unit] // int(10 ** len(fraction))


def duration_text(ns: int) -> str:
    """A duration in the unit that keeps it short: `40 ms`, `1.5 s`."""
    for unit in ("h", "m", "s", "ms", "us"):
        size = UNITS[unit]
        if ns >= size and (ns % size == 0 or unit not in "hm"):
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns} ns"


def duration_yaml(ns: int) -> str:
    """A duration exactly, as it is written in a file."""
    return next(f"{ns // UNITS[unit]}{unit}" for unit in ("h", "m", "s", "ms", "us", "ns") if ns % UNITS[unit] == 0)


def _bad(expected: str, at: tuple[str | int, ...] = ()) -> PydanticCustomError:
    """A value that parses but makes no sense; `at` is where, seen from the model that found it."""
    return PydanticCustomError("policy", "{expected}", {"expected": expected, "at": list(at)})


Duration = Annotated[
    int,
    BeforeValidator(parse_duration),
    WithJsonSchema({"type": "string", "pattern": _SCHEMA_DURATION, "examples": ["40ms", "3s", "1m"]}),
]
Step = Annotated[float, Field(strict=True, gt=0, le=1)]


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _prefix(value: object) -> str:
    if not isinstance(value, str):
        raise PydanticCustomError("prefix", "not a prefix", {"given": value})
    try:
        return str(ipaddress.ip_network(value))
    except ValueError as error:
        raise PydanticCustomError("prefix", "not a prefix", {"given": value, "why": str(error)}) from None


Prefix = Annotated[
    str,
    BeforeValidator(_prefix),
    WithJsonSchema({"type": "string", "examples": ["10.9.0.0/16", "fd00:9::/64"]}),
]


class Manage(_Model):
    """What may be touched: nexthop groups that carry a route inside one of these prefixes."""

    destinations: Annotated[tuple[Prefix, ...], Field(min_length=1)]


class Safety(_Model):
    """Limits that hold whatever the rules say."""

    lease: Duration = Field(default=3 * _SECOND, description="without a sign of life for so long, every act is undone")
    max_drained_share: Annotated[float, Field(strict=True, gt=0, le=1)] = Field(
        default=0.5, description="of a group's original weight, at most this much may be taken away at once"
    )
    stale_after: Duration = Field(default=_SECOND // 2, description="a path not heard of for so long is stale: hold")
    baseline_after: Duration = Field(
        default=5 * _SECOND, description="a path not heard of for so long is unmeasured: back to the original weights"
    )

    @field_validator("lease")
    @classmethod
    def _lease_within_reason(cls, lease: int) -> int:
        if not 2 * _SECOND <= lease <= 60 * _SECOND:
            raise _bad("between 2s and 1m")
        return lease

    @field_validator("stale_after")
    @classmethod
    def _stale_within_reason(cls, stale: int) -> int:
        if not _SECOND // 10 <= stale <= 60 * _SECOND:
            raise _bad("between 100ms and 1m")
        return stale

    @field_validator("baseline_after")
    @classmethod
    def _baseline_after_stale(cls, baseline: int, info: ValidationInfo) -> int:
        stale = info.data.get("stale_after")
        if stale is not None and baseline < stale:
            raise _bad(f"at least stale_after ({duration_text(stale)})")
        return baseline


class QueueingDelay(_Model):
    """Bad while the forward queueing delay of a path is above a threshold by more than its error."""

    signal: Literal["queueing_delay"]
    quantile: Quantile = "p50"
    above: Duration
    for_: Duration = Field(default=0, alias="for", description="how long it must last before the rule acts")
    clear_below: Duration = Field(description="only below this does the path count as good again")

    @field_validator("above")
    @classmethod
    def _positive(cls, above: int) -> int:
        if above == 0:
            raise _bad("more than 0")
        return above

    @field_validator("clear_below")
    @classmethod
    def _clear_is_lower(cls, clear: int, info: ValidationInfo) -> int:
        above = info.data.get("above")
        if above is not None and clear >= above:
            raise _bad(f"less than above ({duration_text(above)}), so that the state does not flutter")
        if clear == 0:
            raise _bad("more than 0: a delay is never below 0")
        return clear


class Loss(_Model):
    """Bad while the share of probes lost on a path is above a threshold."""

    signal: Literal["loss"]
    above: Annotated[float, Field(strict=True, ge=0, lt=1)]
    for_: Duration = Field(default=0, alias="for", description="how long it must last before the rule acts")
    clear_below: Annotated[float, Field(strict=True, gt=0, le=1)]

    @field_validator("clear_below")
    @classmethod
    def _clear_is_lower(cls, clear: float, info: ValidationInfo) -> float:
        above = info.data.get("above")
        if above is not None and clear > above:
            raise _bad(f"at most above ({above:g})")
        return clear


Condition = Annotated[QueueingDelay | Loss, Field(discriminator="signal")]


class Shift(_Model):
    """Leave this share of its original weight on the bad path; 0 takes it out of the group."""

    share: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.0


class Then(_Model):
    """What a rule does."""

    shift: Shift


class Return(_Model):
    """How a path comes back."""

    dwell: Duration = Field(default=20 * _SECOND, description="how long it must look good before its first step")
    max_dwell: Duration = Field(default=600 * _SECOND, description="each relapse doubles the dwell, up to this")
    retry_after: Duration = Field(
        default=60 * _SECOND, description="after a relapse, the next try comes no sooner than this after the last one"
    )
    steps: Annotated[tuple[Step, ...], Field(min_length=1)] = Field(
        default=(0.1, 0.5, 1.0), description="shares of the original weight, in order; the last is 1"
    )
    step: Duration = Field(default=3 * _SECOND, description="how long each step lasts")

    @field_validator("max_dwell")
    @classmethod
    def _cap_above_dwell(cls, cap: int, info: ValidationInfo) -> int:
        dwell = info.data.get("dwell")
        if dwell is not None and cap < dwell:
            raise _bad(f"at least dwell ({duration_text(dwell)})")
        return cap

    @field_validator("steps")
    @classmethod
    def _rising_to_one(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        for i in range(1, len(steps)):
            if steps[i] <= steps[i - 1]:
                raise _bad(f"more than the step before it ({steps[i - 1]:g})", (i,))
        if steps[-1] != 1.0:
            raise _bad("1.0, or the path would never get its whole share back", (len(steps) - 1,))
        return steps


class Rule(_Model):
    """One condition, what to do about it, and how to come back."""

    name: Annotated[str, Field(strict=True, pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    when: Condition
    then: Then
    return_: Return = Field(default_factory=Return, alias="return")

    @model_validator(mode="after")
    def _returns_upwards(self) -> Rule:
        share, first = self.then.shift.share, self.return_.steps[0]
        if first <= share:
            raise _bad(f"more than then.shift.share ({share:g})", ("return", "steps", 0))
        return self


def _not_true(version: object) -> object:
    return str(version) if isinstance(version, bool) else version  # True == 1, and would pass for it


class Policy(_Model):
    """A whole policy. The rules are tried in order: the first whose condition holds decides."""

    version: Annotated[Literal[1], BeforeValidator(_not_true)]
    manage: Manage
    safety: Safety = Field(default_factory=Safety)
    rules: Annotated[tuple[Rule, ...], Field(min_length=1)]


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a policy file, for editors and other tooling."""
    schema = Policy.model_json_schema(by_alias=True)
    for part in schema["$defs"].values():
        for field in part.get("properties", {}).values():
            if field.get("pattern") == _SCHEMA_DURATION and "default" in field:
                field["default"] = duration_yaml(field["default"])  # as it is written in a file
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$comment": "docs/policy.md"} | schema


def explain(policy: Policy) -> str:
    """The policy in words, one sentence a line."""
    safety = policy.safety
    lines = [
        f"Touches only nexthop groups that carry a route inside {', '.join(policy.manage.destinations)}.",
        f"At most {safety.max_drained_share:.0%} of a group's weight is taken away at once; "
        "a group keeps at least one healthy path; when every path looks bad nothing is changed.",
        f"A path not heard of for {duration_text(safety.stale_after)} freezes its group; after "
        f"{duration_text(safety.baseline_after)} the group gets its original weights back.",
        f"If the controller dies or hangs for {duration_text(safety.lease)}, everything is undone.",
        "The first of these rules that holds decides:",
    ]
    for number, rule in enumerate(policy.rules, 1):
        lines += _explain_rule(number, rule)
    return "\n".join(lines)


def _explain_rule(number: int, rule: Rule) -> list[str]:
    share, back = rule.then.shift.share, rule.return_
    act = "it is taken out of its group" if share == 0 else f"{share:.0%} of its weight stays on it"
    steps = ", ".join(f"{step:.0%}" for step in back.steps)
    return [
        f"{number}. {rule.name}: when {condition_text(rule.when)} on a path, {act}.",
        f"   It is good again once {clear_text(rule.when)}. After {duration_text(back.dwell)} of that "
        f"it gets {steps} of its weight back, each for {duration_text(back.step)}.",
        f"   Each relapse doubles the wait (at most {duration_text(back.max_dwell)}), and the next try "
        f"comes no sooner than {duration_text(back.retry_after)} after the last.",
    ]


def condition_text(condition: QueueingDelay | Loss) -> str:
    """When a condition holds, in words."""
    lasting = f" for {duration_text(condition.for_)}" if condition.for_ else ""
    if isinstance(condition, QueueingDelay):
        return (
            f"the {condition.quantile} queueing delay is above {duration_text(condition.above)} "
            f"by more than its error{lasting}"
        )
    return f"more than {condition.above:.3g} of the probes are lost{lasting}"


def clear_text(condition: QueueingDelay | Loss) -> str:
    """When a condition has cleared, in words."""
    if isinstance(condition, QueueingDelay):
        return f"that is below {duration_text(condition.clear_below)} by more than its error"
    return f"less than {condition.clear_below:.3g} of the probes are lost"
