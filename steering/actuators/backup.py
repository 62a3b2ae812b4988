"""Backup routes: a packet has a route even in the moment in which a steered target loses the last hop it was left with.

Every managed prefix gets a second route, of the worst metric, over all hops that its target ever had: those that were
drained, too. It uses nexthops and groups of its own, so nothing of anybody else's changes with it, and the kernel falls
back to it by itself. Pure but for `Backups.keep`; one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pytools.kernel.leftovers import BACKUP_METRIC, FIRST_ID, LAST_ID, is_backup, is_our_nexthop, sweep
from pytools.kernel.netlink import PROTOCOL, Family, Netlink, NetlinkError, Route
from pytools.kernel.netlink import Member as KernelMember
from pytools.kernel.netlink_messages import family_of, group_body, nexthop_body, nexthop_remade
from pytools.kernel.netlink_routes import by_nexthop, hops_of
from steering.actuators.objects import Objects
from steering.actuators.restore import KeptGroup, KeptNexthop, KeptRoute, Memory
from steering.actuators.topology import DAEMONS
from steering.plan import Target

RouteKey = tuple[str, int]  # prefix, id of the group of ours; one for each prefix


@dataclass(frozen=True, slots=True)
class Wanted:
    """What shall be there of ours."""

    nexthops: Mapping[int, bytes] = field(default_factory=dict)
    groups: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    routes: Mapping[RouteKey, Route] = field(default_factory=dict)  # those that they stand in for


class Ids:
    """A number for everything of ours that is made: the same for the same thing, and never used twice."""

    def __init__(self) -> None:
        self._known: dict[object, int] = {}

    def of(self, what: object) -> int:
        """Its number."""
        return self._known.setdefault(what, FIRST_ID + len(self._known) % (LAST_ID - FIRST_ID))


def wanted(memory: Memory, objects: Objects, ids: Ids) -> Wanted:
    """The backups of all steered targets, over the hops whose links carry now."""
    nexthops: dict[int, bytes] = {}
    groups: dict[int, tuple[int, ...]] = {}
    best: dict[str, tuple[Route, int]] = {}
    for target, managed, hops in _targets(memory, objects, ids):
        if not hops:
            continue  # the kernel has deleted ours as well, and will be told when a link is back
        nexthops |= hops
        group = ids.of(target)
        groups[group] = tuple(sorted(hops))
        for route in managed:
            better = route.destination not in best or route.metric < best[route.destination][0].metric
            if better and route.metric < BACKUP_METRIC:
                best[route.destination] = route, group
    return Wanted(nexthops, groups, {(prefix, group): route for prefix, (route, group) in best.items()})


def _targets(
    memory: Memory, objects: Objects, ids: Ids
) -> Iterable[tuple[Target, tuple[Route, ...], dict[int, bytes]]]:
    """Each target, its managed routes, and the nexthops of ours that stand for its hops.

    What a routing daemon made and is gone may have been withdrawn: it has no backup.
    """
    for target, group in memory.groups.items():
        if group.lost and group.group.protocol in DAEMONS:
            continue
        there, gone = ((), group.routes) if group.lost else (group.routes, group.owed)
        managed = (*there, *(route for route in gone if route.protocol not in DAEMONS))
        yield target, managed, _of_objects(memory, group, objects, ids)
    for target, route in memory.routes.items():
        if not (route.lost and route.route.protocol in DAEMONS):
            yield target, (route.route,), _of_hops(route, objects, ids)


def _of_objects(memory: Memory, group: KeptGroup, objects: Objects, ids: Ids) -> dict[int, bytes]:
    found = {}
    for member in group.first.members:
        kept: KeptNexthop | None = memory.nexthops.get(member.nexthop_id)
        link = objects.link(member.interface)
        if kept is None or link is None or not objects.carries(link.name):
            continue
        body = nexthop_remade(kept.nexthop.body, 0, PROTOCOL, link.index)
        number = ids.of(body)
        found[number] = nexthop_remade(kept.nexthop.body, number, PROTOCOL, link.index)
    return found


def _of_hops(kept: KeptRoute, objects: Objects, ids: Ids) -> dict[int, bytes]:
    found = {}
    for member, hop in zip(kept.first.members, hops_of(kept.route), strict=True):
        link = objects.link(member.interface)
        if link is None or not objects.carries(link.name) or hop.encapsulates:
            continue
        family: Family = family_of(hop.gateway) if hop.gateway else kept.route.family
        number = ids.of((family, hop.gateway, link.index, hop.onlink))
        found[number] = nexthop_body(number, family, hop.gateway, link.index, hop.onlink, PROTOCOL)
    return found


class Backups:
    """The backup routes of one namespace.

    Parameters
    ----------
    netlink : Netlink
        A socket in that namespace; stays the caller's.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink
        self._ids = Ids()

    def keep(self, memory: Memory, objects: Objects) -> list[str]:
        """Remove what is too much, make what is missing; what could not be made."""
        want = wanted(memory, objects, self._ids)
        there = {number for number, nexthop in objects.nexthops.items() if is_our_nexthop(nexthop)}
        groups = {
            number: tuple(sorted(member.nexthop_id for member in group.members))
            for number, group in objects.groups.items()
            if is_our_nexthop(group)
        }
        routes = {(route.destination, route.nexthop_id or 0): route for route in objects.routes if is_backup(route)}
        # Routes first: another group's backup for the same prefix would be in the way.
        self._netlink.drop_routes([route for key, route in routes.items() if key not in want.routes])
        failed = self._make(want, there, groups, routes)
        for number in (*(groups.keys() - want.groups.keys()), *(there - want.nexthops.keys())):
            self._drop(number)
        return failed

    def remove(self) -> None:
        """Remove all that is ours."""
        sweep(self._netlink)

    def _make(
        self,
        want: Wanted,
        there: set[int],
        groups: Mapping[int, tuple[int, ...]],
        routes: Mapping[RouteKey, Route],
    ) -> list[str]:
        failed = []
        for number, body in want.nexthops.items():
            if number not in there:
                try:
                    self._netlink.make_nexthop(body)
                except NetlinkError as refusal:
                    failed.append(f"backup nexthop: {refusal.sentence or refusal}")
                    continue
                there.add(number)
        usable = set()
        for number, members in want.groups.items():
            present = [KernelMember(member, 1) for member in members if member in there]
            if groups.get(number) == members:
                usable.add(number)
            elif present:
                try:
                    self._netlink.make_nexthop(group_body(number, present, PROTOCOL), replace=number in groups)
                except NetlinkError as refusal:
                    failed.append(f"backup group: {refusal.sentence or refusal}")
                    continue
                usable.add(number)
        missing = {key: route for key, route in want.routes.items() if key not in routes and key[1] in usable}
        bodies = [by_nexthop(route.body, key[1], BACKUP_METRIC, PROTOCOL) for key, route in missing.items()]
        refusals = [error for error in self._netlink.make_routes(bodies) if error is not None]
        if refusals:
            failed.append(f"{len(refusals)} backup routes cannot be made: {refusals[0].sentence or refusals[0]}")
        return failed

    def _drop(self, number: int) -> None:
        try:
            self._netlink.del_nexthop(number)
        except NetlinkError:  # gone with its carrier, or with its group's last member
            return
