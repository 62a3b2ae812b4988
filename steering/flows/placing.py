"""From one destination's connections, ways and rates to the acts that are wanted of them. Pure.

Rates are bits per second, times CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytools.signals import Path
from pytools.units import rate_text
from steering.flows.elephants import Balance, Move, balance
from steering.flows.elephants_search import Flow, Rail
from steering.flows.leases import Holdings
from steering.flows.maxmin import INFINITE
from steering.flows.plan import FlowAct, Trouble
from steering.flows.rail_rates import Place, RailRate, place_of
from steering.flows.rates import FlowRate
from steering.flows.relabel import relabelled, suffer_alike
from steering.flows.spread import Unit, even, jobs
from steering.plan import FlowKey, Group, Member, Pin
from steering.policy.actions import Pin as PinAction
from steering.policy.actions import Spread
from steering.policy.model import Policy, Rule


@dataclass(frozen=True, slots=True)
class Way:
    """A path to the destination, and the member of the group that it leaves by."""

    path: Path
    member: Member
    open: bool  # flows may be moved here
    dead: bool  # nothing passes


@dataclass(frozen=True, slots=True)
class Case:
    """One rule that holds for paths to one address, and what is known there."""

    policy: Policy
    number: int  # of the rule
    group: Group
    ways: tuple[Way, ...]
    troubles: tuple[Trouble, ...]
    because: str
    seen_ns: int
    flows: tuple[FlowRate, ...]  # to this destination, of both families
    now: int
    urgent: bool = False  # only flows off dead paths are moved, all at once

    @property
    def rule(self) -> Rule:
        return self.policy.rules[self.number]

    @property
    def destination(self) -> str:
        """The host that all ways lead to."""
        return self.ways[0].path.destination

    @property
    def dead(self) -> set[str]:
        """Interfaces by which nothing passes."""
        return {way.path.interface for way in self.ways if way.dead}

    @property
    def fraction(self) -> float:
        """Of the flows that ought to move, so many in one step."""
        return 1.0 if self.urgent else self.policy.safety.herd.fraction


def ways_of(
    group: Group,
    address: str,
    is_open: Callable[[Path], bool],
    is_dead: Callable[[Path], bool],
    drained: Collection[int] = (),
) -> tuple[Way, ...]:
    """The paths of a group to one address; members that the operator drained are not open."""
    members = {member.nexthop_id: member for member in group.members}
    return tuple(
        Way(path, members[nexthop], nexthop not in drained and is_open(path), is_dead(path))
        for nexthop, path in group.paths
        if path.address == address and nexthop in members
    )


def ambiguous(group: Group) -> str:
    """Why it cannot be told which member a flow takes; empty when it can."""
    seen: set[str] = set()
    for member in group.members:
        if member.interface in seen:
            return f"two members leave by {member.interface}: which one a flow takes cannot be told"
        seen.add(member.interface)
    return ""


def pin_act(case: Case, rails: Mapping[Place, RailRate], held: Holdings) -> FlowAct | None:
    """The pins that bring the rates near the optimum; None when they are near, or nothing helps."""
    action = case.rule.then.pin
    assert action is not None
    dead = case.dead

    def movable(flow: FlowRate) -> bool:
        if not _meant(case, flow, held):
            return False
        return flow.interface in dead or (not case.urgent and held.may_move(flow.key, case.now))

    members = {way.path.interface for way in case.ways}
    wanted = balance(
        [
            Flow(flow.key, flow.interface, INFINITE if flow.interface in dead else flow.demand_bps, movable(flow))
            for flow in case.flows
            if flow.interface in members
        ],
        [_rail(way, rails[place_of(way.path)]) for way in case.ways],
        action.gain,
    )
    return _moved(case, held, wanted.moves, case.flows, f"{case.because}; {_benefit(wanted)}")


def spread_act(case: Case, held: Holdings) -> FlowAct | None:
    """The pins that spread flows which move together evenly; None when they are, or none may be moved."""
    action = case.rule.then.spread
    assert action is not None
    members = {way.path.interface: way.member for way in case.ways}
    weights = {interface: member.weight for interface, member in members.items()}

    def movable(flow: FlowRate) -> bool:
        known = held.get("pin", flow.key)  # one that is not where its pin sends it would not obey another either
        elsewhere = (
            known is not None and known.pin is not None and known.pin.nexthop_id != members[flow.interface].nexthop_id
        )
        return not elsewhere and not held.by_hand(flow.key, case.now) and held.may_move(flow.key, case.now)

    counted: list[FlowRate] = []
    moves: list[Move[FlowKey]] = []
    before, after = Counter[str](), Counter[str]()
    here = (flow for flow in case.flows if flow.interface in weights and _covered(case, flow))
    for job in jobs(here, action.flows.min_rate):
        # of those that may go, the ones that have a pin already go first: they are the last here
        job.sort(key=lambda flow: (held.get("pin", flow.key) is not None, flow.key))
        wanted = even([Unit(flow.key, flow.interface, movable(flow)) for flow in job], weights, action.gain, after)
        counted += job
        moves += wanted
        before.update(flow.interface for flow in job)
        after.update(flow.interface for flow in job)
        for move in wanted:
            after[move.origin] -= 1
            after[move.rail] += 1
    if not moves:
        return None
    busiest = max(weights, key=lambda interface: before[interface] / weights[interface])
    why = f"{before[busiest]} of {len(counted)} flows that move together go by {busiest}, {after[busiest]} when even"
    return _moved(case, held, moves, counted, why)


def _moved(
    case: Case, held: Holdings, wanted: Sequence[Move[FlowKey]], flows: Iterable[FlowRate], because: str
) -> FlowAct | None:
    """The pins for as many of these moves as may be made now; `flows` are those that are counted for people."""
    action = case.rule.then.action
    assert isinstance(action, PinAction | Spread)
    members = {way.path.interface: way.member for way in case.ways}
    paths = {way.path.interface: way.path for way in case.ways}
    step = wanted[: math.ceil(case.fraction * len(wanted))]
    moves = _within(step, action.flows.at_most - held.under(case.number), held)
    if not moves:
        return None
    expires = case.now + action.lease
    before = {member.name: 0 for member in members.values()}
    for flow in flows:
        if flow.interface in members:
            before[members[flow.interface].name] += 1
    after = dict(before)
    for move in moves:
        after[members[move.origin].name] -= 1
        after[members[move.rail].name] += 1
    return FlowAct(
        "pin",
        case.group.target,
        tuple(move.key for move in moves),
        because,
        case.rule.name,
        case.seen_ns,
        pins=tuple(Pin(move.key, case.group.target, members[move.rail].nexthop_id, expires) for move in moves),
        before=tuple(before.items()),
        after=tuple(after.items()),
        troubles=case.troubles,
        left=tuple(paths[move.origin] for move in moves),
        urgent=case.urgent,
    )


def stranded(case: Case, held: Holdings) -> bool:
    """Whether a flow that the rule may move is on a path where nothing passes, and there is another for it."""
    dead = case.dead
    if not dead or not any(way.open and not way.dead for way in case.ways):
        return False
    return any(flow.interface in dead and _meant(case, flow, held) for flow in case.flows)


def label_act(case: Case, held: Holdings, seed: str) -> FlowAct | None:
    """Other labels for the flows of bad paths that do not get through while others do; None when there are none."""
    action = case.rule.then.relabel
    assert action is not None
    bad = {path for path, _ in case.troubles}
    room = action.flows.at_most - held.under(case.number)
    chosen = []
    meant = [flow for flow in case.flows if flow.path in bad and ":" in flow.key.remote and _meant(case, flow, held)]
    alike = {path for path in bad if suffer_alike([flow for flow in meant if flow.path == path])}
    for flow in meant:
        known = held.get("relabel", flow.key)
        if flow.path in alike or (known is None and room <= 0):
            continue
        label = relabelled(flow, known.label if known else None, seed, action.lease, case.now)
        if label is not None:
            room -= known is None
            chosen.append(label)
    chosen = chosen[: math.ceil(case.fraction * len(chosen))]
    if not chosen:
        return None
    leaves = {flow.key: flow.path for flow in case.flows}
    return FlowAct(
        "relabel",
        case.group.target,
        tuple(each.change.flow for each in chosen),
        f"{case.because}; try {max(each.tries for each in chosen)}",
        case.rule.name,
        case.seen_ns,
        labels=tuple(each.change for each in chosen),
        tries=tuple(each.tries for each in chosen),
        troubles=case.troubles,
        left=tuple(leaves[each.change.flow] for each in chosen),
    )


def _meant(case: Case, flow: FlowRate, held: Holdings) -> bool:
    """Whether the rule may move a flow: by address, rate and scope, and the operator has not pinned it."""
    action = case.rule.then.pin or case.rule.then.relabel
    assert action is not None
    if flow.peak_bps < action.flows.min_rate or held.by_hand(flow.key, case.now):
        return False
    return _covered(case, flow)


def _covered(case: Case, flow: FlowRate) -> bool:
    return flow.key.remote == case.ways[0].path.address and case.rule.scope.covers_flow(flow.key, flow.owner)


def _rail(way: Way, rate: RailRate) -> Rail:
    capacity, error = (0.0, 0.0) if way.dead else (rate.capacity_bps, rate.error_bps)
    return Rail(way.path.interface, capacity, error, way.open and not way.dead)


def _within(moves: Iterable[Move[FlowKey]], room: int, held: Holdings) -> Sequence[Move[FlowKey]]:
    """As many moves as there may be pins; to move a pinned flow takes no further one."""
    kept = []
    for move in moves:
        if held.get("pin", move.key) is None:
            room -= 1
            if room < 0:
                continue
        kept.append(move)
    return kept


def _benefit(wanted: Balance[FlowKey]) -> str:
    before, after = (rate_text(round(rate)) for rate in (wanted.lowest_before_bps, wanted.lowest_after_bps))
    return f"the slowest flow goes from {before} to {after}, {wanted.ratio_after:.0%} of what the best placing gives"
