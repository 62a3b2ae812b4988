"""What is wanted of flows: frozen records. Times are CLOCK_MONOTONIC nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pytools.signals import Path
from steering.plan import FlowKey, LabelChange, Pin, Target

Kind = Literal["pin", "unpin", "relabel", "unlabel"]
Held = Literal["pin", "relabel"]
Trouble = tuple[Path, int]  # a path, and the number of the rule that is about it


@dataclass(frozen=True, slots=True)
class FlowAct:
    """Something to do to some flows, all of one target and for one reason."""

    kind: Kind
    target: Target
    flows: tuple[FlowKey, ...]
    because: str
    under: str  # name of the rule
    seen_ns: int  # the measurement that led to it
    pins: tuple[Pin, ...] = ()
    labels: tuple[LabelChange, ...] = ()
    tries: tuple[int, ...] = ()  # by label: which try it is
    before: tuple[tuple[str, int], ...] = ()  # flows by member, for people
    after: tuple[tuple[str, int], ...] = ()
    troubles: tuple[Trouble, ...] = ()
    left: tuple[Path | None, ...] = ()  # by flow: the path that it is taken off
    urgent: bool = False  # off a dead path: no damping is in place


@dataclass(frozen=True, slots=True)
class Renewal:
    kind: Held
    flows: tuple[FlowKey, ...]
    expires_ns: int


@dataclass(frozen=True, slots=True)
class FlowPlan:
    acts: tuple[FlowAct, ...] = ()
    renewals: tuple[Renewal, ...] = ()
