"""What a group that is not as we left it means: the kernel took a member away, or somebody else changed it. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from steering.plan import Group


def reconcile(first: Group, known: Group, found: Group, nexthops: AbstractSet[int]) -> tuple[Group, str]:
    """The group to go on with, and why it is somebody else's now (empty: it is not).

    Parameters
    ----------
    first : Group
        As it was before we touched it.
    known : Group
        As we believe it to be.
    found : Group
        As the kernel has it; its members carry the present weights.
    nexthops : set of int
        All nexthops the kernel has: it drops one from its groups with its carrier, which is nobody's act.
    """
    if found.current == known.current:
        return replace(known, destinations=found.destinations), ""
    reduced = len(known.members) < len(first.members)
    if reduced and found.current == first.original:  # the lost member was put back
        return replace(first, destinations=found.destinations, current=found.current, paths=known.paths), ""
    left = tuple(pair for pair in known.current if pair[0] in nexthops)
    if left and found.current == left:
        members = tuple(member for member in known.members if member.nexthop_id in nexthops)
        return replace(known, destinations=found.destinations, members=members, current=left), ""
    before, after = (", ".join(f"{n} weight {w}" for n, w in g.current) for g in (known, found))
    why = f"somebody changed the group (expected {before}; found {after}): hands off until a restart"
    return replace(known, destinations=found.destinations, current=found.current), why
