"""Which targets may be steered, and which target an address is reached through.

One of three kinds for each prefix: a nexthop group that its route uses, a route that lists several hops itself, or
several routes to it with different metrics. `find` does the I/O, `arrange` is pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pytools.kernel.leftovers import is_backup, is_copy
from pytools.kernel.netlink import UNICAST, Hop, Netlink, NexthopGroup, Route
from pytools.kernel.netlink_routes import hops_of
from steering.actuators.objects import Objects, read
from steering.actuators.prefixes import Key, LongestPrefix, Within, key_of
from steering.actuators.route_names import hop_member, route_target
from steering.plan import MAX_WEIGHT, Group, Member, Target, canonical, kind_of, nexthop_group, weights_of

_KERNELS_OWN = frozenset({1, 2, 9})  # RTPROT_REDIRECT, _KERNEL, _RA: made anew whenever the kernel thinks fit
DAEMONS = frozenset({11, 12, 13, 14, 15, 17, 42, 99, 186, 187, 188, 189, 192})  # zebra, bird, … eigrp
_PLAIN = "new flows, and those live flows whose hash then falls to another nexthop"
_METRIC = "all flows, live ones too"


@dataclass(frozen=True, slots=True)
class Topology:
    """What was found; `refused` names the targets that carry a managed route but must be left alone, and why."""

    groups: dict[Target, Group]  # without paths
    refused: dict[Target, str]
    objects: Objects
    routes: LongestPrefix[Target | None]  # what the route in force to every prefix is

    @property
    def nexthops(self) -> frozenset[int]:
        """Ids of all plain nexthops there are."""
        return frozenset(self.objects.nexthops)

    def usable(self, group: Group) -> frozenset[int]:
        """Which members of a target the kernel could use: it deletes a nexthop object with its carrier."""
        if kind_of(group.target) == "nexthop_group":
            return frozenset(member.nexthop_id for member in group.members if self.objects.has(member))
        found = {link.name for link in self.objects.links.values() if link.up}
        return frozenset(m.nexthop_id for m in group.members if m.interface in found)

    def target_of(self, address: str) -> Target | None:
        """Which target the route to an address is, one of ours or another; None if it is none."""
        return self.routes.get(address)


def find(netlink: Netlink, managed: Iterable[str], steered: Iterable[Group] = ()) -> Topology:
    """The targets that carry a route inside one of the managed prefixes; see `arrange`."""
    return arrange(read(netlink), managed, steered)


def arrange(objects: Objects, managed: Iterable[str], steered: Iterable[Group] = ()) -> Topology:
    """The targets in what the kernel has. Pure.

    Parameters
    ----------
    objects : Objects
        What the kernel has.
    managed : iterable of str
        Prefixes.
    steered : iterable of Group
        Targets known already: a route that we left with one hop is still one of several.
    """
    return _Arranging(objects, Within(managed), frozenset(group.target for group in steered)).result()


class _Arranging:
    def __init__(self, objects: Objects, within: Within, steered: frozenset[Target]) -> None:
        self._objects, self._steered = objects, steered
        self._groups: dict[Target, Group] = {}
        self._refused: dict[Target, str] = {}
        self._in_force: dict[Key, Route] = {}
        self._targets: dict[Key, Target | None] = {}
        self._inside: dict[int, list[str]] = defaultdict(list)  # nexthop id -> managed prefixes
        self._outside: dict[int, str] = {}  # nexthop id -> one that is not
        self._to: dict[Key, list[Route]] = defaultdict(list)  # managed routes that say themselves where they lead
        self._sort(within)

    def result(self) -> Topology:
        for group in self._objects.groups.values():
            if group.id in self._inside:
                self._take_nexthop_group(group)
        for key, routes in self._to.items():
            self._take_routes(key, sorted(routes, key=lambda route: route.metric))
        return Topology(self._groups, self._refused, self._objects, LongestPrefix(self._targets))

    def _sort(self, within: Within) -> None:
        """Every route to its place."""
        names: dict[int | None, Target | None] = {None: None}
        for route in self._objects.routes:
            if is_backup(route) or route.special:
                continue
            key = key_of(route.destination)
            by = route.nexthop_id
            if key not in self._in_force or route.metric < self._in_force[key].metric:
                self._in_force[key] = route
                self._targets[key] = names[by] if by in names else names.setdefault(by, nexthop_group(by or 0))
            inside = within.holds(key)
            if by in self._objects.groups:
                assert by is not None
                if inside:
                    self._inside[by].append(route.destination)
                else:
                    self._outside.setdefault(by, route.destination)
            elif inside and route.kind == UNICAST:
                self._to[key].append(route)

    # ---- nexthop groups ----

    def _take_nexthop_group(self, group: NexthopGroup) -> None:
        target, nexthops = nexthop_group(group.id), self._objects.nexthops
        if group.id in self._outside:
            self._refused[target] = f"it also carries {self._outside[group.id]}, which the policy does not manage"
        elif any(member.nexthop_id not in nexthops for member in group.members):
            self._refused[target] = "it has a member that is no plain nexthop"
        elif any(member.weight > MAX_WEIGHT for member in group.members):
            self._refused[target] = f"a weight is above {MAX_WEIGHT}, which could not be put back"
        else:
            members = tuple(
                Member(m.nexthop_id, *self._objects.leaves_by(nexthops[m.nexthop_id]), m.weight)
                for m in sorted(group.members, key=lambda member: member.nexthop_id)
            )
            self._groups[target] = Group(
                target,
                tuple(sorted(self._inside[group.id])),
                members,
                weights_of(group.weights),
                moves=_moved_by(group),
            )

    # ---- routes that say themselves where they lead ----

    def _take_routes(self, key: Key, routes: Sequence[Route]) -> None:
        theirs = [route for route in routes if not is_copy(route)]
        if not theirs or theirs[0].protocol in _KERNELS_OWN:
            return
        best = theirs[0]
        if self._in_force[key] is not best and not is_copy(self._in_force[key]):
            return  # by a nexthop group, or to nowhere
        several = route_target("multipath", best)
        if best.hops or (several in self._steered and best.nexthop_id is None):
            self._take_multipath(key, several, best, theirs)
        elif len(theirs) > 1 or route_target("metric", best) in self._steered:
            self._take_metric(key, route_target("metric", best), theirs)

    def _take_multipath(self, key: Key, target: Target, route: Route, routes: Sequence[Route]) -> None:
        self._targets[key] = target
        hops = hops_of(route)
        members = tuple(self._member(hop, hop.weight) for hop in hops)
        if any(other is not route and other.metric == route.metric for other in routes):
            self._refused[target] = f"there is another route with metric {route.metric}: they would be mixed up"
        elif len({member.nexthop_id for member in members}) < len(members):
            self._refused[target] = "it has the same hop twice"
        else:
            weights = weights_of((m.nexthop_id, m.weight) for m in members)
            self._groups[target] = Group(
                target, (route.destination,), members, weights, moves=_PLAIN, origin=route.body.hex()
            )

    def _take_metric(self, key: Key, target: Target, theirs: Sequence[Route]) -> None:
        self._targets[key] = target
        members: dict[int, Member] = {}
        for route in theirs:
            member = self._way(route, 0 if members else 1)
            if member is None:
                self._refused[target] = "a route to it leads over several hops"
                return
            members.setdefault(member.nexthop_id, member)
        now = self._way(self._in_force[key], 1)
        if any(route.nexthop_id is None and route.gateway is None for route in theirs):
            self._refused[target] = "a route to it has no gateway: a copy could not be told from a route to a link"
        elif any(route.protocol in DAEMONS for route in theirs):
            self._refused[target] = "a routing daemon made a route to it: it would take ours for a better one of others"
        elif theirs[0].metric < 2:
            self._refused[target] = f"a route to it has metric {theirs[0].metric}: none can be preferred to that"
        elif now is None or now.nexthop_id not in members:
            self._refused[target] = "the route that ours is a copy of is gone"
        else:
            current = ((now.nexthop_id, 1),)
            self._groups[target] = Group(
                target, (theirs[0].destination,), tuple(members.values()), current, moves=_METRIC
            )

    def _way(self, route: Route, weight: int) -> Member | None:
        """Where a route with one hop leads, by nexthop object or not."""
        if route.nexthop_id is not None:
            nexthop = self._objects.nexthops.get(route.nexthop_id)
            return None if nexthop is None else hop_member(*self._objects.leaves_by(nexthop), weight)
        hops = hops_of(route)
        return self._member(hops[0], weight) if len(hops) == 1 else None

    def _member(self, hop: Hop, weight: int) -> Member:
        return hop_member(canonical(hop.gateway or ""), self._objects.interface(hop.ifindex), weight)


def _moved_by(group: NexthopGroup) -> str:
    """What a change of a group's weights moves."""
    how = group.resilience
    if how is None:
        return _PLAIN
    late = f", and all after {how.unbalanced_s:g} s" if how.unbalanced_s else ""
    return f"new flows; live ones at once where a nexthop is left out, else when idle for {how.idle_s:g} s{late}"
