"""What a rule does once it holds, and how a path comes back. Pure.

Shifts and drains change weights, which new flows follow; pins and labels move one live flow; an alert moves nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, ValidationInfo, field_validator

from pytools.units import SECOND, duration_text
from steering.policy.base import Count, Duration, Model, NotNull, Rate, ShareAboveZero, ShareBelowOne, bad

Kind = Literal["shift", "drain", "pin", "relabel", "alert"]
KINDS: Final[tuple[Kind, ...]] = ("shift", "drain", "pin", "relabel", "alert")
FLOW_KINDS: Final[tuple[Kind, ...]] = ("pin", "relabel")
MAX_FLOWS: Final = 1000  # pins that one rule may hold
WEIGHT_KINDS: Final[tuple[Kind, ...]] = ("shift", "drain")


class Shift(Model):
    """Leave a share of its original weight on the bad path (0 takes it out), or as much as it can carry."""

    share: ShareBelowOne = 0.0
    by: Literal["share", "capacity", "headroom"] = Field(
        default="share", description="or: weights in proportion to what each path was measured to carry, or to spare"
    )
    step: ShareAboveZero = Field(default=1.0, description="of the original weight, at most this much in one act")
    settle: Duration = Field(default=SECOND, description="between two such steps of one path")

    @field_validator("settle")
    @classmethod
    def _some_time(cls, settle: int) -> int:
        if settle == 0:
            raise bad("more than 0")
        return settle


class Drain(Model):
    """Take the bad path out of its group; the same as a shift to share 0."""


class PinFlows(Model):
    """Which flows are worth a pin."""

    min_rate: Rate = Field(default=10_000_000, description="a flow slower than this is left where it is")
    at_most: Count = Field(default=16, description="so many flows pinned under this rule at once")

    @field_validator("at_most")
    @classmethod
    def _fits_the_table(cls, count: int) -> int:
        if count > MAX_FLOWS:
            raise bad(f"at most {MAX_FLOWS}")
        return count


class _Leased(Model):
    lease: Duration = Field(default=10 * SECOND, description="without renewal it lapses in the kernel after this")

    @field_validator("lease")
    @classmethod
    def _within_reason(cls, lease: int) -> int:
        if not SECOND <= lease <= 600 * SECOND:
            raise bad("between 1s and 10m")
        return lease


class Pin(_Leased):
    """Send some live flows of the bad path over another nexthop, packet by packet."""

    flows: PinFlows = Field(default_factory=PinFlows)
    gain: ShareBelowOne = Field(
        default=0.1, description="stop when the slowest flow would gain less than this share of its rate"
    )


class Relabel(_Leased):
    """Give some live IPv6 flows another flow label, so that a hash in the fabric chooses another way for them."""

    flows: PinFlows = Field(default_factory=PinFlows)


class Alert(Model):
    """Say it, and change nothing."""


Action: TypeAlias = Shift | Drain | Pin | Relabel | Alert


class Then(Model):
    """What a rule does: exactly one of these."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    shift: NotNull[Shift] = None
    drain: NotNull[Drain] = None
    pin: NotNull[Pin] = None
    relabel: NotNull[Relabel] = None
    alert: NotNull[Alert] = None

    @property
    def kind(self) -> Kind:
        """Which of them it is."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def action(self) -> Action:
        """What is to be done, with its settings."""
        action: Action = getattr(self, self.kind)
        return action

    @property
    def share(self) -> float:
        """Share of its original weight that a path keeps under this rule, as far as the rule alone says."""
        if self.drain is not None:
            return 0.0
        return self.shift.share if self.shift is not None and self.shift.by == "share" else 1.0


class Return(Model):
    """How a path comes back."""

    dwell: Duration = Field(default=20 * SECOND, description="how long it must look good before its first step")
    max_dwell: Duration = Field(default=600 * SECOND, description="each relapse doubles the dwell, up to this")
    retry_after: Duration = Field(
        default=60 * SECOND, description="after a relapse, the next try comes no sooner than this after the last one"
    )
    steps: Annotated[tuple[ShareAboveZero, ...], Field(min_length=1)] = Field(
        default=(0.1, 0.5, 1.0), description="shares of the original weight, in order; the last is 1"
    )
    step: Duration = Field(default=3 * SECOND, description="how long each step lasts")
    rise: Count = Field(default=1, description="how many good measurements in a row before its first step")

    @field_validator("max_dwell")
    @classmethod
    def _cap_above_dwell(cls, cap: int, info: ValidationInfo) -> int:
        dwell = info.data.get("dwell")
        if dwell is not None and cap < dwell:
            raise bad(f"at least dwell ({duration_text(dwell)})")
        return cap

    @field_validator("steps")
    @classmethod
    def _rising_to_one(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        for i in range(1, len(steps)):
            if steps[i] <= steps[i - 1]:
                raise bad(f"more than the step before it ({steps[i - 1]:g})", (i,))
        if steps[-1] != 1.0:
            raise bad("1.0, or the path would never get its whole share back", (len(steps) - 1,))
        return steps
