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
from steering.flows.plan import FlowAct, Held, Kind, Renewal, Trouble
from steering.flows.relabel import Relabelled
from steering.flows.returns import Avoided
from steering.plan import FlowKey, Group, Pin, Target
from steering.policy import Policy

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
    """All of them.

    Parameters
    ----------
    policy : Policy
        The policy.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._held: dict[tuple[Held, FlowKey], Holding] = {}
        self._returning: dict[Trouble, int] = {}  # how many flows were away when they began to return
        self._moved: dict[FlowKey, deque[int]] = {}

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
                        self._held["pin", pin.flow] = Holding(act.troubles[0], act.target, now, pin.expires_ns, pin=pin)
                        self._moved.setdefault(pin.flow, deque(maxlen=64)).append(now)
            case "relabel":
                for change in act.labels:
                    known = self._held.get(("relabel", change.flow))
                    tries = 1 + (known.label.tries if known and known.label else 0)
                    if change.flow not in refused:
                        label = Relabelled(change, tries, now)
                        held = Holding(act.troubles[0], act.target, now, change.expires_ns, label=label)
                        self._held["relabel", change.flow] = held
            case "unpin":
                self._drop("pin", act.flows)
            case "unlabel":
                self._drop("relabel", act.flows)

    def renewed(self, renewal: Renewal, missing: Iterable[FlowKey]) -> None:
        """Leases were renewed, but for those that were there no more."""
        self._drop(renewal.kind, missing)
        for key in renewal.flows:
            if (held := self._held.get((renewal.kind, key))) is not None:
                self._held[renewal.kind, key] = replace(held, expires_ns=renewal.expires_ns)

    def returns(self, trouble: Trouble) -> None:
        """The flows that were moved on account of this begin to return."""
        self._returning[trouble] = sum(held.trouble == trouble for held in self._held.values())

    def _drop(self, kind: Held, flows: Iterable[FlowKey]) -> None:
        for key in flows:
            self._held.pop((kind, key), None)

    # ---- what is to be done ----

    def may_move(self, key: FlowKey, now: int) -> bool:
        """Whether a flow was moved less often than it may be."""
        moved, limit = self._moved.get(key), self._policy.safety.max_moves_per_flow
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
    ) -> Iterator[FlowAct]:
        """What is held and no longer wanted, by reason."""
        found: dict[tuple[Held, Target, Trouble, str], list[FlowKey]] = {}
        kept: dict[Trouble, int] = {}
        for (kind, key), held in sorted(self._held.items(), key=lambda item: item[0]):
            why = "" if lives(key) else "the connection is over"
            why = why or _lost(key, held, paths, groups.get(held.target), now)
            if not why and kept.get(held.trouble, 0) >= self._kept(held.trouble, avoided.get(held.trouble)):
                why = f"{held.trouble[0]} is good again"
            if why:
                found.setdefault((kind, held.target, held.trouble, why), []).append(key)
            else:
                kept[held.trouble] = kept.get(held.trouble, 0) + 1
        for (kind, target, trouble, why), keys in found.items():
            act: Kind = "unpin" if kind == "pin" else "unlabel"
            rule = self._policy.rules[trouble[1]]
            yield FlowAct(act, target, tuple(keys), why, rule.name, now, troubles=(trouble,))

    def _kept(self, trouble: Trouble, avoided: Avoided | None) -> float:
        """How many flows stay away on account of something."""
        if avoided is None or avoided.state == "over":
            return 0
        if avoided.state == "away":
            return math.inf
        share = 1 - self._policy.rules[trouble[1]].return_.steps[avoided.step]
        return math.floor(share * self._returning.get(trouble, 0))


def lease_ns(policy: Policy, number: int) -> int:
    """How long what is held under a rule lasts without renewal."""
    then = policy.rules[number].then
    action = then.pin or then.relabel
    assert action is not None
    return action.lease


def _lost(key: FlowKey, held: Holding, paths: Mapping[Path, PathHealth], group: Group | None, now: int) -> str:
    """Why a flow can be held no longer; empty when it can."""
    if group is None:
        return f"{held.target} is not ours to steer any more"
    if now >= held.expires_ns:
        return "its lease has ended"
    if held.pin is None:
        return ""
    onto = [path for nexthop, path in group.paths if nexthop == held.pin.nexthop_id and path.address == key.remote]
    if not onto:
        return "its nexthop is not a member any more"
    blind = next((path for path in onto if path in paths and paths[path].state == "unmeasured"), None)
    return "" if blind is None else f"{blind} is not measured any more"
