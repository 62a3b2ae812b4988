"""What a rule does once it holds, and how a path comes back. Pure.

Shifts and drains change weights, which new flows follow; pins and labels move one live flow; a hold makes packets wait;
an alert moves nothing.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, TypeAlias

from pydantic import ConfigDict, Field, StrictBool, field_validator

from pytools.units import SECOND
from steering.policy.base import (
    Count,
    Duration,
    LongerThanZero,
    Model,
    NotNull,
    Rate,
    ShareAboveZero,
    ShareBelowOne,
    Some,
    Within,
    at_least,
    bad,
)
from steering.policy.hooks import HookName

Kind = Literal["shift", "drain", "pin", "spread", "relabel", "hold", "alert"]
KINDS: Final[tuple[Kind, ...]] = ("shift", "drain", "pin", "spread", "relabel", "hold", "alert")
FLOW_KINDS: Final[tuple[Kind, ...]] = ("pin", "spread", "relabel")
MAX_FLOWS: Final = 1000  # pins that one rule may hold
WEIGHT_KINDS: Final[tuple[Kind, ...]] = ("shift", "drain")
STANDING_KINDS: Final[tuple[Kind, ...]] = ("spread", "hold")  # which need no condition; hold may have one


class Shift(Model):
    """Leave a share of its original weight on the bad path, or as much as it can carry."""

    share: ShareBelowOne = Field(
        default=0.0, description="share of its original weight that the path retains; 0 takes it out of its group"
    )
    by: Literal["share", "capacity", "headroom"] = Field(
        default="share",
        description="share: as above; capacity, headroom (without share): weights in proportion to what each path was "
        "measured to carry, or to have spare; a path with a queue has no headroom",
    )
    step: ShareAboveZero = Field(default=1.0, description="largest change per act, as a share of the original weight")
    settle: LongerThanZero = Field(default=SECOND, description="least time between two such steps of one path")


class Drain(Model):
    """Take the bad path out of its group; the same as a shift to share 0."""


class PinFlows(Model):
    """Which flows are moved."""

    min_rate: Rate = Field(default=10_000_000, description="slower flows are not moved")
    at_most: Annotated[int, Field(strict=True, ge=1, le=MAX_FLOWS)] = Field(
        default=16, description="most flows that are moved under this rule at once"
    )


class _Leased(Model):
    lease: Annotated[Duration, Within(SECOND, 600 * SECOND)] = Field(
        default=10 * SECOND, description="expires in the kernel after this time without renewal"
    )


class Pin(_Leased):
    """Send some live flows of the bad path over another nexthop; weights stay."""

    flows: PinFlows = Field(default_factory=PinFlows)
    gain: ShareBelowOne = Field(
        default=0.1, description="stop when the slowest flow would gain a smaller share of its rate than this"
    )


class Spread(_Leased):
    """Place live flows that move together evenly over the healthy paths, by pins (elephants.md); without when."""

    flows: PinFlows = Field(default_factory=PinFlows)
    gain: ShareBelowOne = Field(
        default=0.05, description="stop when the busiest path would be relieved of a smaller share than this"
    )


class Relabel(_Leased):
    """Give some live IPv6 flows another flow label, so that a hash in the fabric chooses another path."""

    flows: PinFlows = Field(default_factory=PinFlows)


class Hold(Model):
    """Let packets wait at this host while the queue on their path is long (hold.md); when is not required."""

    threshold: Annotated[Duration, Within(SECOND // 10_000, SECOND)] = Field(
        default=SECOND // 1000, description="queueing to allow on the path"
    )
    longest: Annotated[Duration, Within(SECOND // 1000, SECOND)] = Field(
        default=SECOND // 20, description="no packet waits longer"
    )
    floor: Rate = Field(
        default=1_000_000,
        description="rate to each destination that is never held back; four times this is what a host begins with",
    )
    fresh: Annotated[Duration, Within(SECOND // 100, SECOND)] = Field(
        default=SECOND // 5, description="without a measurement of the queue for this long nothing is held"
    )
    dwell: Duration = Field(
        default=10 * SECOND, description="with when: packets are still held for so long after it was last true"
    )
    qdisc: Literal["keep", "fq"] = Field(
        default="keep",
        description="keep: hold only where the interface has the queue discipline fq already; fq: put it there "
        "meanwhile, where the kernel's default is",
    )


class AroundWays(_Leased):
    """What leads around bad ways behind one nexthop."""

    avoid: Annotated[tuple[Literal["slow", "lossy", "dead"], ...], Field(min_length=1)] = Field(
        default=("slow", "lossy", "dead"), description="which states of a way are bad (probes.md)"
    )
    every: Annotated[Duration, Within(SECOND // 100, 60 * SECOND)] = Field(
        default=SECOND // 2, description="time between two packets that find a way; routers limit answers"
    )
    dwell: Duration = Field(default=10 * SECOND, description="how long a way must be good before it is used again")


class Ports(AroundWays):
    """Have new IPv4 TCP connections take local ports whose hash leads around bad ways behind one nexthop (ports.md)."""

    keep: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(
        default=64, description="ports of good ways to know per destination: the limit of connections at once"
    )
    mptcp: StrictBool = Field(
        default=False, description="replace MPTCP subflows on bad ways; needs net.mptcp.pm_type=1, and no other manager"
    )


class Labels(AroundWays):
    """Give live IPv6 TCP connections flow labels whose hash leads around bad ways behind one nexthop (ports.md)."""


class Bonds(Model):
    """Select another port of an active-backup bond while all paths over it are bad (neighbours.md)."""

    trial: LongerThanZero = Field(
        default=10 * SECOND, description="a port that is no better after this time is left again"
    )
    retry_after: Duration = Field(
        default=60 * SECOND,
        description="a port that was left is not selected for this long; doubles each time it is no better, up to ten "
        "times this",
    )


class Alert(Model):
    """Report, change nothing, and block no other rule."""


Action: TypeAlias = Shift | Drain | Pin | Spread | Relabel | Hold | Alert


class Then(Model):
    """What the rule does: at most one act, and which hooks it calls. With notify alone it is an alert."""

    model_config = ConfigDict(
        json_schema_extra={
            "minProperties": 1,
            "maxProperties": 2,
            "if": {"not": {"required": ["notify"]}},
            "then": {"maxProperties": 1},
        }
    )

    shift: NotNull[Shift] = None
    drain: NotNull[Drain] = None
    pin: NotNull[Pin] = None
    spread: NotNull[Spread] = None
    relabel: NotNull[Relabel] = None
    hold: NotNull[Hold] = None
    alert: NotNull[Alert] = None
    notify: NotNull[Some[HookName]] = Field(
        default=None, description="names of hooks, which are called after the act, and again when the path is well"
    )

    @property
    def kind(self) -> Kind:
        """Which of the acts it is."""
        return next((kind for kind in KINDS if getattr(self, kind) is not None), "alert")

    @property
    def action(self) -> Action:
        """What is to be done, with its settings."""
        action: Action | None = getattr(self, self.kind)
        return Alert() if action is None else action

    @property
    def share(self) -> float:
        """Share of its original weight that a path keeps under this rule, as far as the rule alone says."""
        if self.drain is not None:
            return 0.0
        return self.shift.share if self.shift is not None and self.shift.by == "share" else 1.0


class Return(Model):
    """How a path comes back."""

    dwell: Duration = Field(default=20 * SECOND, description="how long the path must be clear before its first step")
    max_dwell: Duration = Field(
        default=600 * SECOND, description="every relapse doubles the dwell, up to this; at least dwell"
    )
    retry_after: Duration = Field(default=60 * SECOND, description="least time between two attempts to return")
    steps: Annotated[tuple[ShareAboveZero, ...], Field(min_length=1)] = Field(
        default=(0.1, 0.5, 1.0),
        description="shares of the original weight (pin, relabel: of the moved flows) during the return; rising, the "
        "last is 1, the first above then.shift.share",
    )
    step: Duration = Field(
        default=3 * SECOND, description="how long each step lasts, from when its weights are in force"
    )
    rise: Count = Field(
        default=1,
        description="how many clear measurements (of silence: probes answered) in a row before its first step",
    )

    _cap_above_dwell = field_validator("max_dwell")(at_least("dwell"))

    @field_validator("steps")
    @classmethod
    def _rising_to_one(cls, steps: tuple[float, ...]) -> tuple[float, ...]:
        for i in range(1, len(steps)):
            if steps[i] <= steps[i - 1]:
                raise bad(f"more than the step before it ({steps[i - 1]:g})", (i,))
        if steps[-1] != 1.0:
            raise bad("1.0, or the path would never get its whole share back", (len(steps) - 1,))
        return steps
