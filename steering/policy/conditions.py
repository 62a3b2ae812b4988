"""When a rule holds: a tree of `all`, `any` and `not` over leaves, each a threshold on one signal. Pure.

Durations are nanoseconds, shares are within 0 and 1.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, create_model, field_validator
from pydantic_core.core_schema import ValidationInfo
from typing_extensions import TypeAliasType

from pytools.figures import RULED, Measure
from pytools.units import SECOND, duration_text
from steering.policy.base import Count, Duration, LongerThanZero, Model, Share, ShareAboveZero, bad
from steering.policy.levels import (
    DELAY,
    SHARE,
    AboveDelay,
    AboveShare,
    ClearDelay,
    ClearShare,
    FigureKind,
    OfAbove,
    Usual,
)

Cause = Literal["any", "fast", "timeout", "tail_probe", "syn"]
Direction = Literal["out", "back"]
LinkWord = Literal[
    "carrier_lost", "neighbour_failed", "mtu_mismatch", "port_down", "flap", "queue_full", "pause_storm", "gid_changed"
]
RdmaWord = Literal["congested", "slow_receiver", "dead", "no_demand"]
JobWord = Literal["any", "network", "straggler", "gpu", "host", "imbalance"]
OF_JOBS: Final = ("job_step", "straggler")  # say nothing about a path, so that no rule moves anything by them

# What ends a state of a link; a word that is not here is over after `hold`.
OPPOSITES: Final[dict[str, str]] = {
    "carrier_lost": "carrier_found",
    "neighbour_failed": "neighbour_reachable",
    "mtu_mismatch": "mtu_agrees",
    "port_down": "port_up",
}


class Leaf(Model):
    """One threshold on one signal."""

    by_traffic: ClassVar[bool] = False  # measured by the host's own traffic: says nothing about an idle path

    for_: Duration = Field(
        default=0, alias="for", description="how long it must be bad without a break before the rule acts"
    )
    fall: Count = Field(default=1, description="how many bad measurements in a row before the rule acts")

    @property
    def failure(self) -> bool:
        """Whether what it sees is a failure, not a load: then no damping of herds and no wait is in place."""
        return False


class MeasuredDelay(Leaf):
    """A threshold on a delay of the catalogue; its subclasses are the conditions."""

    measure: ClassVar[Measure]

    above: AboveDelay = Field(description="threshold: a value, or relative to what is usual on the path (policy.md)")
    clear_below: ClearDelay = Field(description="below this the path is clear; a lower value, or a share of above")
    samples: Count = Field(
        default=1, description="in place of for: how many probes in a row above the threshold before the rule acts"
    )
    signal: str

    @field_validator("above")
    @classmethod
    def _positive(cls, above: int | Usual) -> int | Usual:
        if above == 0:
            raise bad("more than 0")
        return above

    @field_validator("clear_below")
    @classmethod
    def _clear_is_lower(cls, clear: int | OfAbove, info: ValidationInfo) -> int | OfAbove:
        lowest, name = _lowest(info.data.get("above"))
        if isinstance(clear, OfAbove):
            return clear
        if lowest is not None and clear >= lowest:
            raise bad(f"less than {name} ({duration_text(round(lowest))}), so that the state does not flutter")
        if clear == 0:
            raise bad("more than 0: a delay is never below 0")
        return clear


def _lowest(above: float | Usual | None) -> tuple[float | None, str]:
    """The lowest that a threshold can be, and what the file calls that."""
    return (above.at_least, "at least") if isinstance(above, Usual) else (above, "above")


class _ShareLeaf(Leaf):
    above: AboveShare = Field(description="threshold: a value, or relative to what is usual on the path (policy.md)")
    clear_below: ClearShare = Field(description="below this the path is clear; a value up to above, or a share of it")

    @field_validator("clear_below")
    @classmethod
    def _clear_is_lower(cls, clear: float | OfAbove, info: ValidationInfo) -> float | OfAbove:
        lowest, name = _lowest(info.data.get("above"))
        if lowest is not None and not isinstance(clear, OfAbove) and clear > lowest:
            raise bad(f"at most {name} ({lowest:g})")
        return clear


class MeasuredShare(_ShareLeaf):
    """The same of a share."""

    measure: ClassVar[Measure]

    signal: str


Measured: TypeAlias = MeasuredDelay | MeasuredShare


def _condition(measure: Measure) -> type[Measured]:
    """The condition about a measure: its name, and which of its quantiles is meant where it has several."""
    name = "".join(word.capitalize() for word in measure.name.split("_"))
    fields: dict[str, Any] = {"signal": (Literal[measure.name], ...)}
    if len(measure.parts) > 1:
        fields["quantile"] = (
            Literal[tuple(measure.parts)],
            Field(default="p50", description="which value of a window"),
        )
    base: Any = MeasuredShare if measure.unit == "share" else MeasuredDelay
    made: type[Measured] = create_model(name, __base__=base, __doc__=measure.rule, __module__=__name__, **fields)
    made.measure = measure
    return made


MEASURED: Final = {measure.name: _condition(measure) for measure in RULED}
QueueingDelay: Final = MEASURED["queueing_delay"]
Loss: Final = MEASURED["loss"]


class Silence(Leaf):
    """Bad while probes in a row are unanswered and the path is the cause (failover.md), clear when one is answered."""

    signal: Literal["silence"]
    missed: Annotated[int, Field(strict=True, ge=2, le=1_000_000)] = Field(
        default=3, description="how many probes in a row without an answer"
    )
    lasting: Duration = Field(
        default=400_000_000,
        description="and no answer for this long, because a queue that has just grown may delay as much",
    )

    @property
    def failure(self) -> bool:
        """It is."""
        return True


class Retransmits(_ShareLeaf):
    """Bad while the share of TCP segments that are retransmitted exceeds above, clear below clear_below."""

    by_traffic: ClassVar[bool] = True

    signal: Literal["retransmits"]
    cause: Cause = Field(default="any", description="which retransmissions count, by cause (tcp.md)")
    at_least: Count = Field(default=100, description="segments sent in a window; with fewer there is no measurement")


class CeShare(_ShareLeaf):
    """Bad while the share of packets with ECN CE exceeds above, clear below clear_below."""

    by_traffic: ClassVar[bool] = True

    signal: Literal["ce_share"]
    direction: Direction = Field(
        default="out",
        description="out: of acknowledged TCP segments, towards the peer; back: of all packets from the peer",
    )
    at_least: Count = Field(default=100, description="packets in a window; with fewer there is no measurement")


class LinkState(Leaf):
    """Bad from an event of the path's link until its opposite, or for `hold`; clear after that."""

    signal: Literal["link"]
    event: LinkWord = Field(description="which event (links.md)")
    hold: LongerThanZero = Field(
        default=10 * SECOND,
        description="how long an event counts that has no opposite: flap, queue_full, pause_storm, gid_changed",
    )

    @property
    def failure(self) -> bool:
        """Whether nothing passes while it lasts."""
        return self.event in ("carrier_lost", "neighbour_failed", "port_down")

    @field_validator("hold")
    @classmethod
    def _where_it_counts(cls, hold: int, info: ValidationInfo) -> int:
        event = info.data.get("event")
        if event in OPPOSITES:
            raise bad(f"no hold: {event} lasts until {OPPOSITES[event]}")
        return hold


class Rdma(Leaf):
    """Bad while enough of the path's queue pairs have a verdict (rdma.md)."""

    by_traffic: ClassVar[bool] = True

    signal: Literal["rdma"]
    verdict: RdmaWord = Field(description="which verdict")
    share: ShareAboveZero = Field(
        default=0.6,
        description="bad when at least this share has it; each user has one vote: the share of its own queue pairs",
    )
    clear_below: Share = Field(default=0.0, description="clear below this share, or when none has it")

    @field_validator("clear_below")
    @classmethod
    def _clear_is_lower(cls, clear: float, info: ValidationInfo) -> float:
        share = info.data.get("share")
        if share is not None and clear > share:
            raise bad(f"at most share ({share:g})")
        return clear


class _OfJob(Leaf):
    by_traffic: ClassVar[bool] = True

    at_least: ShareAboveZero = Field(
        default=0.1, description="share of the time of a step that the cause explains at least, without its error"
    )


class JobSteps(_OfJob):
    """Bad while the first cause of a job's verdict (jobs.md) is this one, for its path or all paths of the job."""

    signal: Literal["job_step"]
    cause: JobWord = Field(default="any", description="which cause")


class Late(_OfJob):
    """Bad while a rank of a job on this host comes late to its collectives (jobs.md), for all paths of the job."""

    signal: Literal["straggler"]


class All(Model):
    """Bad when every part is bad."""

    all: Annotated[tuple[Condition, ...], Field(min_length=1)] = Field(description="conditions")


class AnyOf(Model):
    """Bad when at least one part is bad."""

    any: Annotated[tuple[Condition, ...], Field(min_length=1)]


class Not(Model):
    """Bad when its part is clear, and clear when its part is bad."""

    not_: Condition = Field(alias="not")


TREES: Final = {"all": "all of", "any": "any of", "not": "none of"}  # key -> tag, which is no key


def _tag(value: Any) -> str | None:
    """Which member of the union a value is: by its signal, else by the key of a tree."""
    if isinstance(value, Leaf):
        return str(getattr(value, "signal"))  # noqa: B009 (every leaf has one, of its own type)
    if isinstance(value, All | AnyOf | Not):
        return {All: "all of", AnyOf: "any of", Not: "none of"}[type(value)]
    if not isinstance(value, dict):
        return None
    if "signal" in value:
        return str(value["signal"])
    return next((tag for key, tag in TREES.items() if key in value), None)


AnyLeaf: TypeAlias = (
    MeasuredDelay | MeasuredShare | Silence | Retransmits | CeShare | LinkState | Rdma | JobSteps | Late
)
WithThreshold: TypeAlias = MeasuredDelay | MeasuredShare | Retransmits | CeShare
_OTHERS: Final = {
    "silence": Silence,
    "retransmits": Retransmits,
    "ce_share": CeShare,
    "link": LinkState,
    "rdma": Rdma,
    "job_step": JobSteps,
    "straggler": Late,
}
SIGNALS: Final = (*MEASURED, *_OTHERS)
if TYPE_CHECKING:
    Condition: TypeAlias = AnyLeaf | All | AnyOf | Not
else:
    _TAGGED = {**MEASURED, **_OTHERS, "all of": All, "any of": AnyOf, "none of": Not}
    Condition = TypeAliasType(
        "Condition",
        Annotated[
            functools.reduce(operator.or_, (Annotated[each, Tag(tag)] for tag, each in _TAGGED.items())),
            Discriminator(_tag),
        ],
    )
for _tree in (All, AnyOf, Not):
    _tree.model_rebuild()


def leaves(condition: Condition | None) -> Iterator[AnyLeaf]:
    """The leaves of a tree, in the order of the file: the order in which `judging` remembers them."""
    match condition:
        case None:
            return
        case All():
            for part in condition.all:
                yield from leaves(part)
        case AnyOf():
            for part in condition.any:
                yield from leaves(part)
        case Not():
            yield from leaves(condition.not_)
        case _:
            yield condition


def samples_of(leaf: AnyLeaf) -> int:
    """How many samples must be beyond the threshold before a leaf holds."""
    return leaf.samples if isinstance(leaf, MeasuredDelay) else 1


def relative(leaf: AnyLeaf) -> Usual | None:
    """The threshold of a leaf that follows what is usual; None if it has none."""
    return leaf.above if isinstance(leaf, WithThreshold) and isinstance(leaf.above, Usual) else None


def with_threshold(condition: Condition | None) -> Iterator[WithThreshold]:
    """The leaves of a tree that have a threshold."""
    return (leaf for leaf in leaves(condition) if isinstance(leaf, WithThreshold))


def subject(leaf: WithThreshold) -> str:
    """What a leaf measures: leaves about the same have the same usual value."""
    match leaf:
        case Retransmits():
            return f"{leaf.signal} {leaf.cause}"
        case CeShare():
            return f"{leaf.signal} {leaf.direction}"
        case _:
            return f"{leaf.signal} {part_of(leaf)}".strip()


def part_of(leaf: Measured) -> str:
    """Which figure of its measure a leaf is about: a quantile, or nothing where there is one figure."""
    return str(getattr(leaf, "quantile", ""))


def figures_of(leaf: WithThreshold) -> FigureKind:
    """How the figures of a leaf are read and written."""
    return DELAY if isinstance(leaf, MeasuredDelay) else SHARE
