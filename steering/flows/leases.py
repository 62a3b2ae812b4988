"""Which flows are pinned or relabelled, until when, why, and for how long they still are. Pure.

One thread; times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from pytools.signals import Path
from steering.deciding.health import PathHealth
from steering.deciding.overrides import NONE, Overrides
from steering.flows.plan import FlowAct, Held, Kind, Renewal, Trouble
from steering.flows.relabel import Relabelled
from steering.flows.returns import Avoided
from steering.plan import FlowKey, Group, Pin, Target
from steering.policy.actions import Pin as PinAction
from steering.policy.actions import Relabel, Spread
from steering.policy.model import Moves, Policy

_MANY: Final = 10_000  # moves of so many flows are remembered before old ones are looked for


@dataclass(frozen=True, slots=True)
class Holding:
    """A flow that is pinned or relabelled."""

    trouble: Trouble
    target: Target
    since_ns: int
    expires_ns: int
    pin: Pin | None = None
    label: Relabelled | None = None


class Holdings:
    """All of them."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._held: dict[tuple[Held, FlowKey], Holding] = {}
        self._returning: dict[Trouble, int] = {}  # how many flows were away when they began to return
        self._moved: dict[FlowKey, deque[int]] = {}
        self._by_hand: dict[FlowKey, Pin] = {}  # set by the operator

    def __len__(self) -> int:
        return len(self._held)

    def get(self, kind: Held, key: FlowKey) -> Holding | None:
        """How a flow is held; None when it is not."""
        return self._held.get((kind, key))

    def under(self, number: int) -> int:
        """How many flows are held under a rule."""
        return sum(held.trouble[1] == number for held in self._held.values())

    # ---- what was done ----

    def note(self, act: FlowAct, refused: Collection[FlowKey], now: int) -> None:
        """An act was carried out, but for the flows that were refused."""
        match act.kind:
            case "pin":
                for pin in act.pins:
                    if pin.flow not in refused:
                        trouble = self._trouble(act, pin.flow)
                        self._held["pin", pin.flow] = Holding(trouble, act.target, now, pin.expires_ns, pin=pin)
                        times = self._moved.setdefault(pin.flow, deque(maxlen=self._limit.count))
                        times.append(now)
            case "relabel":
                for change, tries in zip(act.labels, act.tries, strict=True):
                    if change.flow not in refused:
                        label = Relabelled(change, tries, now)
                        trouble = self._trouble(act, change.flow)
                        held = Holding(trouble, act.target, now, change.expires_ns, label=label)
                        self._held["relabel", change.flow] = held
            case "unpin":
                self._drop("pin", act.flows)
            case "unlabel":
                self._drop("relabel", act.flows)

    def _trouble(self, act: FlowAct, key: FlowKey) -> Trouble:
        """What a flow is held on account of: what it left first if that still holds, else what it leaves now."""
        known = self._held.get(("relabel" if act.kind == "relabel" else "pin", key))
        if known is not None and known.trouble in act.troubles:
            return known.trouble
        left = dict(zip(act.flows, act.left, strict=False)).get(key)
        return next((trouble for trouble in act.troubles if trouble[0] == left), act.troubles[0])

    def renewed(self, renewal: Renewal, missing: Iterable[FlowKey]) -> None:
        """Leases were renewed, but for those that were there no more."""
        self._drop(renewal.kind, missing)
        for key in renewal.flows:
            if (held := self._held.get((renewal.kind, key))) is not None:
                self._held[renewal.kind, key] = replace(held, expires_ns=renewal.expires_ns)

    def returns(self, trouble: Trouble) -> None:
        """The flows that were moved on account of this begin to return."""
        self._returning[trouble] = sum(held.trouble == trouble for held in self._held.values())

    # ---- what the operator did ----

    def pinned_by_hand(self, pin: Pin) -> None:
        """The operator pinned a flow: it is the operator's until then, and ours no more."""
        self._by_hand[pin.flow] = pin
        self._drop("pin", [pin.flow])

    def unpinned_by_hand(self, flow: FlowKey) -> None:
        """The operator removed the pin of a flow, whoever set it."""
        self._by_hand.pop(flow, None)
        self._drop("pin", [flow])

    def by_hand(self, flow: FlowKey, now: int) -> bool:
        """Whether a flow is pinned by the operator."""
        pin = self._by_hand.get(flow)
        return pin is not None and now < pin.expires_ns

    def pins_by_hand(self, now: int) -> tuple[Pin, ...]:
        """The operator's pins that have not run out; the others are forgotten."""
        self._by_hand = {flow: pin for flow, pin in self._by_hand.items() if now < pin.expires_ns}
        return tuple(self._by_hand.values())

    def _drop(self, kind: Held, flows: Iterable[FlowKey]) -> None:
        for key in flows:
            self._held.pop((kind, key), None)

    # ---- what is to be done ----

    @property
    def _limit(self) -> Moves:
        return self._policy.safety.max_moves_per_flow

    def may_move(self, key: FlowKey, now: int) -> bool:
        """Whether a flow was pinned less often than it may be."""
        moved, limit = self._moved.get(key), self._limit
        if len(self._moved) > _MANY:
            self._moved = {key: times for key, times in self._moved.items() if now - times[-1] < limit.per}
        return moved is None or sum(now - at < limit.per for at in moved) < limit.count

    def renewals(self, now: int, besides: Collection[FlowKey]) -> Iterator[Renewal]:
        """Leases of which half is over, but for flows with which something else is done."""
        due: dict[tuple[Held, int], list[FlowKey]] = {}
        for (kind, key), held in self._held.items():
            lease = lease_ns(self._policy, held.trouble[1])
            if key not in besides and held.expires_ns - now < lease // 2:
                due.setdefault((kind, now + lease), []).append(key)
        for (kind, expires), keys in due.items():
            yield Renewal(kind, tuple(keys), expires)

    def releases(
        self,
        avoided: Mapping[Trouble, Avoided],
        paths: Mapping[Path, PathHealth],
        groups: Mapping[Target, Group],
        lives: Callable[[FlowKey], bool],
        now: int,
        overrides: Overrides = NONE,
    ) -> Iterator[FlowAct]:
        """What is held and no longer wanted, by reason; of a target that the operator holds, what cannot be kept."""
        found: dict[tuple[Held, Target, Trouble, str], list[FlowKey]] = {}
        kept: dict[Trouble, int] = {}
        stays = {target for target, group in groups.items() if overrides.held(group)}
        drained = {target: overrides.drained(group) for target, group in groups.items() if target not in stays}
        for (kind, key), held in sorted(self._held.items(), key=lambda item: item[0]):
            why = "" if lives(key) else "the connection is over"
            why = why or _lost(key, held, paths, groups.get(held.target), now)
            if held.pin is not None:
                why = why or drained.get(held.target, {}).get(held.pin.nexthop_id, "")
                why = why or self._left(key, held.pin, held.trouble, paths, groups[held.target])
            if not why and held.target not in stays:
                enough = kept.get(held.trouble, 0) >= self._kept(held.trouble, avoided.get(held.trouble))
                why = _over(held.trouble[0], paths) if enough else ""
            if why:
                found.setdefault((kind, held.target, held.trouble, why), []).append(key)
            else:
                kept[held.trouble] = kept.get(held.trouble, 0) + 1
        for (kind, target, trouble, why), keys in found.items():
            act: Kind = "unpin" if kind == "pin" else "unlabel"
            rule = self._policy.rules[trouble[1]]
            yield FlowAct(act, target, tuple(keys), why, rule.name, now, troubles=(trouble,))

    def _left(self, key: FlowKey, pin: Pin, trouble: Trouble, paths: Mapping[Path, PathHealth], group: Group) -> str:
        """Why a flow that was spread is not to stay on a path that has lost weight; empty when it is."""
        if self._policy.rules[trouble[1]].then.spread is None:
            return ""
        left = (path for path in _onto(key, pin, group) if path in paths and paths[path].down)
        return next((f"{path} has less weight" for path in left), "")

    def _kept(self, trouble: Trouble, avoided: Avoided | None) -> float:
        """How many flows stay away on account of something; those that were spread stay as long as they last."""
        if self._policy.rules[trouble[1]].then.spread is not None:
            return math.inf
        if avoided is None or avoided.state == "over":
            return 0
        if avoided.state == "away":
            return math.inf
        share = 1 - self._policy.rules[trouble[1]].return_.steps[avoided.step]
        return math.floor(share * self._returning.get(trouble, 0))


def lease_ns(policy: Policy, number: int) -> int:
    """How long what is held under a rule lasts without renewal."""
    action = policy.rules[number].then.action
    assert isinstance(action, PinAction | Spread | Relabel)
    return action.lease


def _onto(key: FlowKey, pin: Pin, group: Group) -> list[Path]:
    return [path for nexthop, path in group.paths if nexthop == pin.nexthop_id and path.address == key.remote]


def _over(path: Path, paths: Mapping[Path, PathHealth]) -> str:
    """Why flows need not stay away from a path any more."""
    known = paths.get(path)
    if known is None:
        return f"{path} is gone"
    return f"{path} is {'not measured any more' if known.state == 'unmeasured' else 'good again'}"


def _lost(key: FlowKey, held: Holding, paths: Mapping[Path, PathHealth], group: Group | None, now: int) -> str:
    """Why a flow can be held no longer; empty when it can."""
    if group is None:
        return f"{held.target} is not ours to steer any more"
    if now >= held.expires_ns:
        return "its lease has ended"
    if held.pin is None:
        return ""
    onto = _onto(key, held.pin, group)
    if not onto:
        return "its nexthop is not a member any more"
    blind = next((path for path in onto if path in paths and paths[path].state == "unmeasured"), None)
    if blind is not None:
        return f"{blind} is not measured any more"
    dead = next((path for path in onto if path in paths and paths[path].failed), None)
    return "" if dead is None else f"nothing passes over {dead}"
