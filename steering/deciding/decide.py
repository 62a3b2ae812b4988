"""What the weights should be: a pure function of the policy, the paths' states, the groups and the time.

Whatever the rules say: a group keeps at least one healthy path at its whole weight; nothing is shifted toward a path
without a fresh measurement; when every path to a destination looks bad nothing is changed on its account; what one
address says moves the traffic of no other; at most `max_drained_share` of a group is taken away. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from pytools.signals import Path
from steering.deciding import health
from steering.deciding.capacity import Estimate, shares_by
from steering.deciding.health import PathHealth
from steering.deciding.overrides import NONE, Overrides
from steering.plan import Change, Group, Weights, scaled
from steering.policy.model import Policy, Rule

NO_CAPACITIES: Mapping[str, Estimate] = {}


@dataclass(frozen=True, slots=True)
class _Vote:
    """What one measured path says about the member it runs over."""

    member: int
    path: Path
    health: PathHealth
    due: int | None  # the rule under which it ought to be taken down


def decide(
    policy: Policy,
    paths: Mapping[Path, PathHealth],
    groups: Iterable[Group],
    now: int,
    capacities: Mapping[str, Estimate] = NO_CAPACITIES,
    overrides: Overrides = NONE,
) -> list[Change]:
    """The weights wanted for each of these groups, in their order.

    Parameters
    ----------
    paths : mapping of Path to PathHealth
        The state of every measured path, after `observe` and `advance`.
    groups : iterable of Group
        The groups to look at, with their current weights.
    capacities : mapping of str to Estimate
        What each interface was measured to carry.
    overrides : Overrides
        What the operator wants whatever is measured.
    """
    return [_decide_group(policy, paths, group, now, capacities, overrides) for group in groups]


def _decide_group(
    policy: Policy,
    paths: Mapping[Path, PathHealth],
    group: Group,
    now: int,
    capacities: Mapping[str, Estimate],
    overrides: Overrides,
) -> Change:
    votes = _votes(policy, paths, group.paths)
    if overrides.held(group):
        return _hold(group, votes, f"hold: {overrides.held(group)}")
    ordered = overrides.drained(group)
    # A destination of which nothing is heard at all (a peer that was removed) has no say about the others'.
    live = {vote.path.address for vote in votes if vote.health.state != "unmeasured"}
    never = [v for v in votes if health.unanswered(policy, v.health, now)]
    unmeasured = next(
        (v for v in votes if v.health.state == "unmeasured" and v.path.address in live and v not in never), None
    )
    if not live or unmeasured is not None:
        which = "no path of it is measured" if unmeasured is None else f"{unmeasured.path} is not measured"
        plan = _back_to_original(group, votes, f"original weights: {which}", ordered)
        return plan if unmeasured is None else replace(plan, paths=(unmeasured.path, *plan.paths))
    votes = [vote for vote in votes if vote.path.address in live]
    why = _not_to_be_told(policy, group, votes, live, now)
    # Weight taken from another path would reach this one, unless the operator drained it.
    dark = next((v for v in never if v.path.address in live and v.member not in ordered), None)
    if not why and dark is not None:
        why = f"{dark.path}: {health.NEVER_ANSWERED}"
    if why:
        return _ordered(group, _hold(group, votes, f"hold: {why}"), ordered)
    witnesses = [v for v in _votes(policy, paths, group.witnesses) if v.health.state != "unmeasured"]
    return _decide_measured(policy, group, votes, witnesses, now, capacities, ordered)


def _votes(policy: Policy, paths: Mapping[Path, PathHealth], over: Iterable[tuple[int, Path]]) -> list[_Vote]:
    return [_Vote(member, path, paths[path], health.due(policy, paths[path])) for member, path in over if path in paths]


def _decide_measured(
    policy: Policy,
    group: Group,
    votes: list[_Vote],
    witnesses: list[_Vote],
    now: int,
    capacities: Mapping[str, Estimate],
    ordered: Mapping[int, str],
) -> Change:
    """The weights of a group of which every path is measured."""
    before = {
        member.nexthop_id: min(
            (health.share(vote.health) for vote in votes if vote.member == member.nexthop_id), default=1.0
        )
        for member in group.members
    }
    before |= dict.fromkeys(ordered, 0.0)
    if not any(before.values()):
        why = "held: the operator's order would leave no nexthop"
        plan = _back_to_original(group, votes, why, {})
        return replace(plan, held=tuple((vote.path, why) for vote in votes))
    alone = _alone(votes, witnesses)
    shares, granted, held = _grant(policy, group, votes, before, capacities, alone)
    wanted = _weights(group, shares)
    if not wanted:  # possible only when the group itself was changed by somebody else
        return _back_to_original(group, votes, "original weights: no path would be left", {})
    because, under, about = _why(policy, group, votes, shares, {vote.path: vote for vote, _ in granted}, ordered)
    down = tuple((vote.path, share) for vote, share in granted)
    failure = any(vote.due is not None and vote.health.readings[vote.due].failure for vote, _ in granted)
    return Change(
        *(group.target, group.current, wanted, because, under, down, tuple(held)),
        failure=failure,
        alone=alone,
        paths=about,
    )


def _alone(votes: list[_Vote], witnesses: list[_Vote]) -> frozenset[str]:
    """Addresses that want weight taken from a member that no other peer says anything against.

    They may be wrong, or their own side of the path is bad; they get a target of their own. Where no other peer is
    measured there is no second opinion: the addresses of one peer are one.
    """
    everyone = [*votes, *witnesses]
    if len({vote.path.destination for vote in everyone}) < 2:
        return frozenset()
    against = {(vote.member, vote.path.destination) for vote in everyone if vote.due is not None or vote.health.down}
    said = Counter(member for member, _ in against)
    down = [vote for vote in votes if vote.due is not None or vote.health.state == "drained"]
    return frozenset(vote.path.address for vote in down if said[vote.member] == 1)


def _weights(group: Group, shares: Mapping[int, float]) -> Weights:
    """The weights that give every member its share; one that stands by carries all when no other may, or only one may.

    A single route is not split: it carries everything, or the best of those that stand by does.
    """
    if all(shares[member] == 1 for member, _ in group.original) and group.original:
        return group.original
    if group.exclusive:
        carriers = [member for member in group.members if member.weight]
        standbys = [member for member in group.members if not member.weight]
        if len(carriers) == 1 or not any(shares[member.nexthop_id] for member in carriers):
            best = max((*carriers, *standbys), key=lambda member: shares[member.nexthop_id])
            return ((best.nexthop_id, best.weight or 1),) if shares[best.nexthop_id] else ()
    return scaled(group.original, shares)


def _not_to_be_told(policy: Policy, group: Group, votes: list[_Vote], live: set[str], now: int) -> str:
    """Why the present measurements are not enough to decide; empty when they are."""
    missing = _never_measured(group, votes, live)
    if missing:
        return f"no measurement yet of {missing}"
    old = next((vote for vote in votes if health.stale(policy, vote.health, now)), None)
    return "" if old is None else f"no fresh measurement of {old.path}"


def _never_measured(group: Group, votes: list[_Vote], addresses: set[str]) -> str:
    """The first member over which one of these addresses was never probed; empty if there is none."""
    known = {(vote.path.address, vote.member) for vote in votes}
    for address in sorted(addresses):
        for member in group.members:
            if (address, member.nexthop_id) not in known:
                return f"{address} {member.name}"
    return ""


def _hold(group: Group, votes: list[_Vote], why: str) -> Change:
    held = tuple((vote.path, why) for vote in votes if vote.due is not None)
    return Change(group.target, group.current, group.current, why, "", held=held, undecided=True)


def _ordered(group: Group, plan: Change, ordered: Mapping[int, str]) -> Change:
    """A plan that was made without measurements, with what the operator wants out of it left out."""
    wanted = _without(group, plan.after, ordered)
    if wanted == plan.after:
        return plan
    return replace(plan, after=wanted, because="; ".join(dict.fromkeys(ordered.values())), under="operator")


def _without(group: Group, weights: Weights, out: Collection[int]) -> Weights:
    """Weights without these members, unless nothing would be left."""
    left = tuple(pair for pair in weights if pair[0] not in out)
    if not left and group.exclusive:
        left = _weights(group, {member: float(member not in out) for member in group.nominal})
    return left or weights


def _back_to_original(group: Group, votes: list[_Vote], why: str, ordered: Mapping[int, str]) -> Change:
    """The original weights, but for what was left and was dead: that comes back by its rule."""
    down = [vote for vote in votes if vote.health.down]
    dead = {vote.member for vote in down if health.left_dead(vote.health)}
    if dead == group.nominal.keys():
        dead = set()
    names = ", ".join(member.name for member in group.members if member.nexthop_id in dead)
    # What else was down is no longer: to go down again it must be bad again, with all the limits that hold then.
    lifted = frozenset(vote.path for vote in down if vote.member not in dead)
    wanted, because = _without(group, group.original, dead), f"{why}; without {names}: dead" if dead else why
    plan = replace(_hold(group, votes, because), after=wanted, lifted=lifted, undecided=False)
    return _ordered(group, plan, ordered)


def _grant(
    policy: Policy,
    group: Group,
    votes: list[_Vote],
    before: dict[int, float],
    capacities: Mapping[str, Estimate],
    alone: Collection[str],
) -> tuple[dict[int, float], list[tuple[_Vote, float]], list[tuple[Path, str]]]:
    """Shares by member, the votes that were followed and to what share, and those that were not, with the reason."""
    shares = dict(before)
    granted: list[tuple[_Vote, float]] = []
    held: list[tuple[Path, str]] = []
    for vote in sorted((v for v in votes if v.due is not None), key=_age):
        assert vote.due is not None
        floor, why = _floor(policy.rules[vote.due], group, vote, capacities)
        lower = health.wanted_share(policy, vote.health, floor)
        if not why and vote.health.state == "drained" and lower >= vote.health.share:
            continue  # as low as the rule goes
        if not why and vote.health.state == "suspect" and lower >= 1:
            why = "it carries as much as any"
        share = min(shares[vote.member], lower)
        why = why or _objection(policy, group, votes, shares | {vote.member: share}, vote)
        if not why and vote.path.address in alone:
            why = f"only {vote.path.destination} says so; it will have a route of its own"
        if why:
            held.append((vote.path, f"held: {why}"))
            continue
        shares[vote.member] = share
        granted.append((vote, lower))
    return shares, granted, held


def _floor(rule: Rule, group: Group, vote: _Vote, capacities: Mapping[str, Estimate]) -> tuple[float, str]:
    """The share that a rule leaves a path at last, and why that cannot be told (empty: it can)."""
    shift = rule.then.shift
    if shift is None or shift.by == "share":
        return rule.then.share, ""
    found = shares_by(shift.by, group, capacities)
    if found is None:
        return 1.0, f"the {shift.by} of a path is not measured yet"
    return found[vote.member], ""


def _age(vote: _Vote) -> tuple[int, Path]:
    """Those bad for longest first."""
    assert vote.due is not None
    return vote.health.readings[vote.due].since_ns, vote.path


def _objection(policy: Policy, group: Group, votes: list[_Vote], shares: Mapping[int, float], vote: _Vote) -> str:
    """Why these shares must not be, on account of this vote; empty if they may."""
    peers = [other for other in votes if other.path.address == vote.path.address]
    if all(_troubled(other) for other in peers):
        return f"every path to {vote.path.destination} looks bad"
    others = [member for member in group.members if member.nexthop_id != vote.member]
    for member in others:
        if shares[member.nexthop_id] > 0 and not all(v.health.measured for v in _of(votes, member.nexthop_id)):
            return f"it would shift toward {member.name}, of which there is no measurement"
    whole = [_of(votes, member.nexthop_id) for member in others if shares[member.nexthop_id] == 1]
    sound = [each for each in whole if all(_sound(v.health) for v in each)]
    if not sound:
        return "no healthy path would be left at its whole weight"
    assert vote.due is not None
    urgent = vote.health.readings[vote.due].failure
    if not urgent and not any(all(health.recovered(policy, v.health, vote.due) for v in each) for each in sound):
        return "the other paths were bad a moment ago"
    taken = sum(counts * (1 - shares[member]) for member, counts in group.nominal.items())
    if taken > policy.safety.max_drained_share * sum(group.nominal.values()) + 1e-9:
        return f"more than max_drained_share ({policy.safety.max_drained_share:g}) would be taken away"
    return ""


def _of(votes: list[_Vote], member: int) -> list[_Vote]:
    return [vote for vote in votes if vote.member == member]


def _troubled(vote: _Vote) -> bool:
    return vote.due is not None or (vote.health.down and vote.health.bad)


def _sound(path: PathHealth) -> bool:
    return path.state == "healthy" and path.measured and not path.bad


def _why(
    policy: Policy,
    group: Group,
    votes: list[_Vote],
    shares: Mapping[int, float],
    granted: Mapping[Path, _Vote],
    ordered: Mapping[int, str],
) -> tuple[str, str, tuple[Path, ...]]:
    """Because and under, of what differs from the weights in force, and the paths that it is about."""
    before, after = shares_of(group, group.current), shares
    if group.exclusive:
        after = shares_of(group, _weights(group, shares))
    moved = {member for member, share in after.items() if abs(share - before[member]) > 0.01}
    said = [v for v in votes if v.member in moved and (v.path in granted or v.health.rule is not None)]
    reasons = [ordered[member] for member in sorted(moved & ordered.keys())]
    rules = ["operator"] if reasons else []
    about = said or list(granted.values())
    for vote in about:
        number = vote.due if vote.path in granted else vote.health.rule
        assert number is not None
        rule = policy.rules[number]
        if vote.path in granted:
            reasons.append(f"{vote.path}: {vote.health.readings[number].text}")
        elif vote.health.state == "returning":
            reasons.append(f"{vote.path}: {vote.health.because}, step {vote.health.step} on the way back")
        else:
            reasons.append(f"{vote.path}: {vote.health.because}")
        rules.append(rule.name)
    because = "; ".join(dict.fromkeys(reasons)) or "as the paths' states ask"
    return because, ", ".join(dict.fromkeys(rules)), tuple(vote.path for vote in about)


def shares_of(group: Group, weights: Weights) -> dict[int, float]:
    """Share of its original weight that these weights give each member, the highest being 1."""
    given = dict(weights)
    ratio = {member: given.get(member, 0) / counts for member, counts in group.nominal.items()}
    highest = max(ratio.values(), default=0) or 1
    return {nexthop: value / highest for nexthop, value in ratio.items()}
