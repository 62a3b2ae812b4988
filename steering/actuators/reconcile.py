"""What a target that is not as we left it means: the kernel took a member away, or somebody else changed it. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from steering.actuators.weighted import present
from steering.plan import Group, Weights, same


def reconcile(
    first: Group,
    known: Group,
    found: Group,
    usable: AbstractSet[int],
    deleted: AbstractSet[int] = frozenset(),
) -> tuple[Group, str]:
    """The target to go on with, and why it is somebody else's now (empty: it is not).

    Parameters
    ----------
    first : Group
        As it was before we touched it.
    known : Group
        As we believe it to be.
    found : Group
        As the kernel has it; its members carry the present weights.
    usable : set of int
        The members that can be used now. The kernel drops a nexthop from its group with its carrier, which is nobody's
        act; when it can be used again, it is a member again, to be given its weight.
    deleted : set of int
        Nexthop objects that somebody deleted, which is an act.
    """
    members = tuple(member for member in first.members if member.nexthop_id in usable)
    group = replace(known, destinations=found.destinations, members=members or known.members, current=found.current)
    if _explained(first, known, found, usable | deleted):
        return group, ""
    before, after = (_named(first, weights) for weights in (known.current, found.current))
    why = f"somebody changed it (expected {before}; found {after}): hands off until a restart"
    return group, why


def _explained(first: Group, known: Group, found: Group, answered_for: AbstractSet[int]) -> bool:
    """Whether the weights are ours, but for members that went with their link or came back with it."""
    if same(found.current, known.current):
        return True
    left = tuple(pair for pair in known.current if pair[0] in answered_for)
    if left != known.current and (same(found.current, left) if left else _ways(found) <= _ways(first)):
        return True
    had = {member.nexthop_id for member in known.members}
    returned = {member.nexthop_id for member in first.members} - had
    rest = tuple(pair for pair in found.current if pair[0] not in returned)
    return bool(returned) and (found.current == first.original or same(rest, known.current))


def only_lost_members(known: Weights, found: Weights, nexthops: AbstractSet[int]) -> bool:
    """Whether a group is as we left it but for nexthops that are gone, whoever deleted them: what we drained still is.

    Parameters
    ----------
    known, found : Weights
        As we believe it to be, and as the kernel has it.
    nexthops : set of int
        The nexthop objects that there are.
    """
    return bool(found) and same(found, tuple(pair for pair in known if pair[0] in nexthops))


def is_part(found: Group, first: Group) -> bool:
    """Whether a target that was gone is what it was before us, or as much of it as is back."""
    there = frozenset(member.nexthop_id for member in found.members)
    return _ways(found) <= _ways(first) and same(found.current, present(first.original, there))


def _ways(group: Group) -> set[tuple[int, str, str]]:
    return {(member.nexthop_id, member.gateway, member.interface) for member in group.members}


def _named(first: Group, weights: Weights) -> str:
    names = {member.nexthop_id: member.name for member in first.members}
    return ", ".join(f"{names.get(number, number)} weight {weight}" for number, weight in weights) or "nothing"
