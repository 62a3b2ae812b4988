"""What an overlay remembers for a successor: its numbers, and whose weights its targets have. Pure.

The kernel has the weights; this says which group is whose. Numbers are only of use in the same boot and namespace.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from pytools.kernel.leftovers import is_our_rule
from pytools.kernel.netlink.routing import NexthopGroup, Rule
from steering.actuators.owners_routes import Steerable, ViewKey, Way, Ways
from steering.actuators.steered import Steered, alike
from steering.policy.model import Manage

_Weights = tuple[tuple[Way, int], ...]
HopKey = tuple[int, str, str, bool]  # family, gateway, interface, on-link


class TargetMemory(msgspec.Struct, frozen=True):
    name: str
    view: ViewKey
    ways: Ways
    usable: Ways
    prefixes: tuple[str, ...]
    weights: _Weights | None  # ours; None: theirs
    away: tuple[Way, ...]
    beside: str = ""


class OverlayMemory(msgspec.Struct, frozen=True):
    table: int
    priority: int | None
    vrfs: tuple[str, ...]
    form: Literal["object", "inline"]
    tables: tuple[tuple[tuple[int, int | None], int], ...]  # number of ours by table and what its rules suppress
    ids: tuple[tuple[HopKey | str, int], ...]
    targets: tuple[TargetMemory, ...]


def of_target(target: Steered) -> TargetMemory:
    weights = None if target.weights is None else tuple(target.weights.items())
    prefixes = tuple(each.destination for each in target.prefixes)
    return TargetMemory(
        target.name,
        target.view,
        target.ways,
        target.usable,
        prefixes,
        weights,
        tuple(sorted(target.away)),
        target.beside,
    )


def objection(memory: OverlayMemory, manage: Manage, rules: Iterable[Rule]) -> str:
    """Why what a controller before us has in force cannot go on under this policy; empty when it can."""
    if (memory.table, memory.priority, memory.vrfs) != (manage.table, manage.priority, manage.vrfs):
        return "the policy has other numbers or VRFs"
    known = {(target.view[0], number) for (_, number) in memory.tables for target in memory.targets}
    unknown = [rule for rule in rules if is_our_rule(rule) and (rule.family, rule.table) not in known]
    return f"nothing is known of table {unknown[0].table}" if unknown else ""


def recalled(
    memory: TargetMemory, in_force: bool, group: NexthopGroup | None, ids: Mapping[HopKey | str, int]
) -> Steered:
    """A target as it was left, with the weights that the kernel has.

    Parameters
    ----------
    memory : TargetMemory
        What is remembered; it may be older than what the kernel has.
    in_force : bool
        Whether a rule of ours leads to its table.
    group : NexthopGroup | None
        Its group in the kernel; None where there is none, or its routes list their hops.
    ids : mapping
        Our numbers of hops.
    """
    found = Steered(
        memory.name,
        memory.view,
        memory.ways,
        [Steerable(each, b"", memory.ways) for each in memory.prefixes],
        memory.usable,
        dict(memory.weights) if memory.weights is not None and in_force else None,
        frozenset(memory.away),
        memory.beside,
    )
    if in_force and group is not None:
        ways = _ways(found, ids)
        if group.weights.keys() <= ways.keys():
            weights = {ways[number]: weight for number, weight in group.weights.items()}
            found.weights = None if alike(weights, found.theirs) else weights
    return found


def _ways(target: Steered, ids: Mapping[HopKey | str, int]) -> dict[int, Way]:
    every: Collection[Way] = {way for way, _ in (*target.ways, *target.usable)}
    found = {ids.get((way.family, way.gateway, way.interface, way.onlink)): way for way in every}
    return {number: way for number, way in found.items() if number is not None}
