"""What the weights should be: a pure function of the policy, the paths' states, the groups and the time.

Whatever the rules say: a group keeps at least one healthy path at its whole weight; nothing is shifted toward a path
without a fresh measurement; when every path to a destination looks bad nothing is changed on its account; at most
`max_drained_share` of a group is taken away. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from pytools.signals import Path
from steering import health
from steering.health import PathHealth
from steering.plan import Group, GroupPlan, Plan, scaled
from steering.policy import Policy


@dataclass(frozen=True, slots=True)
class _Vote:
    """What one measured path says about the member it runs over."""

    member: int
    path: Path
    health: PathHealth
    due: int | None  # the rule under which it ought to be taken down


def decide(policy: Policy, paths: Mapping[Path, PathHealth], groups: Iterable[Group], now: int) -> Plan:
    """The weights wanted for each of these groups.

    Parameters
    ----------
    policy : Policy
        The policy.
    paths : mapping of Path to PathHealth
        The state of every measured path, after `observe` and `advance`.
    groups : iterable of Group
        The groups to look at, with their current weights.
    now : int
        CLOCK_MONOTONIC nanoseconds.
    """
    return Plan(tuple(_decide_group(policy, paths, group, now) for group in groups))


def _decide_group(policy: Policy, paths: Mapping[Path, PathHealth], group: Group, now: int) -> GroupPlan:
    votes = [
        _Vote(member, path, paths[path], health.due(policy, paths[path]))
        for member, path in group.paths
        if path in paths
    ]
    # A destination of which nothing is heard at all (a peer that was removed) has no say about the others'.
    live = {vote.path.address for vote in votes if vote.health.state != "unmeasured"}
    if not live:
        return _back_to_original(group, votes, "original weights: no path of it is measured")
    votes = [vote for vote in votes if vote.path.address in live]
    silent = next((vote for vote in votes if vote.health.state == "unmeasured"), None)
    if silent is not None:
        return _back_to_original(group, votes, f"original weights: {silent.path} is not measured")
    missing = _never_measured(group, votes, live)
    if missing:
        return _hold(group, votes, f"hold: no measurement yet of {missing}")
    old = next((vote for vote in votes if health.stale(policy, vote.health, now)), None)
    if old is not None:
        return _hold(group, votes, f"hold: no fresh measurement of {old.path}")
    before = {
        member.nexthop_id: min(
            (health.share(policy, vote.health) for vote in votes if vote.member == member.nexthop_id),
            default=1.0,
        )
        for member in group.members
    }
    shares, granted, held = _grant(policy, group, votes, before)
    wanted = group.original if all(share == 1 for share in shares.values()) else scaled(group.original, shares)
    if not wanted:  # possible only when the group itself was changed by somebody else
        return _back_to_original(group, votes, "original weights: no path would be left")
    because, under = _why(policy, group, votes, shares, granted)
    return GroupPlan(group.group_id, wanted, because, under, frozenset(vote.path for vote in granted), tuple(held))


def _never_measured(group: Group, votes: list[_Vote], addresses: set[str]) -> str:
    """The first member over which one of these addresses was never probed; empty if there is none."""
    known = {(vote.path.address, vote.member) for vote in votes}
    for address in sorted(addresses):
        for member in group.members:
            if (address, member.nexthop_id) not in known:
                return f"{address} {member.name}"
    return ""


def _hold(group: Group, votes: list[_Vote], why: str) -> GroupPlan:
    held = tuple((vote.path, why) for vote in votes if vote.due is not None)
    return GroupPlan(group.group_id, group.current, why, "", held=held)


def _back_to_original(group: Group, votes: list[_Vote], why: str) -> GroupPlan:
    # What was down is no longer: to go down again it must be bad again, with all the limits that hold then.
    down = frozenset(vote.path for vote in votes if vote.health.state in ("drained", "returning"))
    return replace(_hold(group, votes, why), wanted=group.original, lifted=down)


def _grant(
    policy: Policy, group: Group, votes: list[_Vote], before: dict[int, float]
) -> tuple[dict[int, float], list[_Vote], list[tuple[Path, str]]]:
    """Shares by member, the votes that were followed, and those that were not, with the reason."""
    shares = dict(before)
    granted: list[_Vote] = []
    held: list[tuple[Path, str]] = []
    for vote in sorted((v for v in votes if v.due is not None), key=_age):
        assert vote.due is not None
        share = min(shares[vote.member], policy.rules[vote.due].then.shift.share)
        why = _objection(policy, group, votes, shares | {vote.member: share}, vote)
        if why:
            held.append((vote.path, f"held: {why}"))
            continue
        shares[vote.member] = share
        granted.append(vote)
    return shares, granted, held


def _age(vote: _Vote) -> tuple[int, Path]:
    """Those bad for longest first."""
    assert vote.due is not None
    return vote.health.bad_since[vote.due] or 0, vote.path


def _objection(policy: Policy, group: Group, votes: list[_Vote], shares: Mapping[int, float], vote: _Vote) -> str:
    """Why these shares must not be, on account of this vote; empty if they may."""
    peers = [other for other in votes if other.path.address == vote.path.address]
    if all(_troubled(other) for other in peers):
        return f"every path to {vote.path.destination} looks bad"
    others = [member for member in group.members if member.nexthop_id != vote.member]
    for member in others:
        if shares[member.nexthop_id] > 0 and not all(v.health.measured for v in _of(votes, member.nexthop_id)):
            return f"it would shift toward {member.name}, of which there is no measurement"
    if not any(
        shares[member.nexthop_id] == 1 and all(_sound(v.health) for v in _of(votes, member.nexthop_id))
        for member in others
    ):
        return "no healthy path would be left at its whole weight"
    total = sum(member.weight for member in group.members)
    taken = sum(member.weight * (1 - shares[member.nexthop_id]) for member in group.members)
    if taken > policy.safety.max_drained_share * total + 1e-9:
        return f"more than max_drained_share ({policy.safety.max_drained_share:g}) would be taken away"
    return ""


def _of(votes: list[_Vote], member: int) -> list[_Vote]:
    return [vote for vote in votes if vote.member == member]


def _troubled(vote: _Vote) -> bool:
    return vote.due is not None or (vote.health.state in ("drained", "returning") and vote.health.bad)


def _sound(path: PathHealth) -> bool:
    return path.state == "healthy" and path.measured and not path.bad


def _why(
    policy: Policy, group: Group, votes: list[_Vote], shares: Mapping[int, float], granted: list[_Vote]
) -> tuple[str, str]:
    """Because and under, of what differs from the weights in force."""
    in_force = _shares_in_force(group)
    moved = [vote for vote in votes if abs(shares[vote.member] - in_force[vote.member]) > 0.01]
    said = [vote for vote in moved if vote in granted or vote.health.rule is not None] or granted
    reasons, rules = [], []
    for vote in said:
        number = vote.due if vote in granted else vote.health.rule
        assert number is not None
        rule = policy.rules[number]
        if vote in granted:
            reasons.append(f"{vote.path}: {health.reason(rule, vote.health, number)}")
        elif vote.health.state == "returning":
            step = f"step {vote.health.step + 1} of {len(rule.return_.steps)}"
            reasons.append(f"{vote.path}: {vote.health.because}, {step}")
        else:
            reasons.append(f"{vote.path}: {vote.health.because}")
        rules.append(rule.name)
    return "; ".join(reasons) or "as the paths' states ask", ", ".join(dict.fromkeys(rules))


def _shares_in_force(group: Group) -> dict[int, float]:
    """Share of its original weight that each member has now, the highest being 1."""
    current = dict(group.current)
    ratio = {m.nexthop_id: current.get(m.nexthop_id, 0) / m.weight for m in group.members}
    highest = max(ratio.values(), default=0) or 1
    return {nexthop: value / highest for nexthop, value in ratio.items()}
