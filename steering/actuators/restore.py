"""What the kernel took away with a link, and what to make again when the link is back. Pure.

With its carrier a nexthop object is deleted, leaves its groups, and a group goes with its last nexthop and takes its
routes along; a multipath route goes with its last interface. Nothing tells so, and nothing comes back. What is gone
without somebody having deleted it was the kernel's doing, and is made again as it was; what a person or another program
deleted, or made in its place, is theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pytools.kernel.netlink import Member as KernelMember
from pytools.kernel.netlink import Nexthop, NexthopGroup, Route
from pytools.kernel.netlink_messages import group_remade, nexthop_remade
from pytools.kernel.netlink_routes import hops_of, remade, with_hops
from pytools.kernel.netlink_routes import route_of as route_in
from pytools.kernel.netlink_watch import Heard
from steering.actuators.objects import Objects
from steering.actuators.route_names import group_number, route_of
from steering.actuators.topology import DAEMONS
from steering.plan import Group, Target, Weights, kind_of


@dataclass(frozen=True, slots=True)
class KeptNexthop:
    """A nexthop object that a steered group has or had."""

    nexthop: Nexthop
    interface: str
    lost: bool = False  # the kernel took it


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """A steered group and the routes that use it."""

    group: NexthopGroup
    first: Group  # as it was before us
    routes: tuple[Route, ...]
    lost: bool = False
    owed: tuple[Route, ...] = ()  # that went with it, and are not back yet although it is


@dataclass(frozen=True, slots=True)
class KeptRoute:
    """A steered multipath route."""

    route: Route  # as it was before us
    first: Group
    lost: bool = False


LinkAge = tuple[int, int]  # interface index, how often its carrier went: another one means that it was away


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of the objects behind the steered targets."""

    nexthops: Mapping[int, KeptNexthop] = field(default_factory=dict)
    groups: Mapping[Target, KeptGroup] = field(default_factory=dict)
    routes: Mapping[Target, KeptRoute] = field(default_factory=dict)
    links: Mapping[str, LinkAge] = field(default_factory=dict)  # of the steered interfaces, at the last reading

    @property
    def lost(self) -> dict[Target, Group]:
        """Targets that are gone with their links, as they were before us."""
        return {each.first.target: each.first for each in self._kept() if each.lost}

    @property
    def lost_nexthops(self) -> frozenset[int]:
        """Nexthops that are gone with their links."""
        return frozenset(number for number, kept in self.nexthops.items() if kept.lost)

    @property
    def first(self) -> dict[Target, Group]:
        """All targets as they were before us."""
        return {each.first.target: each.first for each in self._kept()}

    def _kept(self) -> tuple[KeptGroup | KeptRoute, ...]:
        return (*self.groups.values(), *self.routes.values())

    @property
    def core(self) -> tuple[object, ...]:
        """All but the routes that use a group: what two memories must not differ in."""
        return self.nexthops, self.first, frozenset(self.lost), self.links

    def narrowed(self, steered: Callable[[Group], bool]) -> Memory:
        """Without the targets that are not steered any more."""
        groups = {target: each for target, each in self.groups.items() if steered(each.first)}
        routes = {target: each for target, each in self.routes.items() if steered(each.first)}
        members = {member.nexthop_id for each in groups.values() for member in each.first.members}
        nexthops = {number: each for number, each in self.nexthops.items() if number in members}
        return Memory(nexthops, groups, routes, self.links)


@dataclass(frozen=True, slots=True)
class Restoration:
    """What to make again, in this order. Each is made only where nothing is in its place."""

    nexthops: Mapping[int, bytes] = field(default_factory=dict)
    groups: Mapping[Target, bytes] = field(default_factory=dict)
    routes: Mapping[Target, tuple[bytes, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.nexthops or self.groups or self.routes)


def remember(
    before: Memory,
    steered: Iterable[Group],
    objects: Objects,
    heard: Heard,
    in_force: Mapping[Target, Sequence[Weights]] = MappingProxyType({}),
) -> Memory:
    """What is known after another reading.

    Parameters
    ----------
    before : Memory
        What was known.
    steered : iterable of Group
        The targets we are to keep whole, each as it was before us: not those that are somebody else's now.
    objects : Objects
        What the kernel has.
    heard : Heard
        What others deleted since the last reading.
    in_force : mapping of Target to sequence of Weights
        What each may have had since the last reading by our own acts.
    """
    using: dict[int, list[Route]] = {}
    nexthops: dict[int, KeptNexthop] = {}
    groups: dict[Target, KeptGroup] = {}
    routes: dict[Target, KeptRoute] = {}
    steered = list(steered)
    wanted = {group_number(group.target) for group in steered if kind_of(group.target) == "nexthop_group"}
    for route in objects.routes:
        if route.nexthop_id in wanted:
            using.setdefault(route.nexthop_id or 0, []).append(route)
    for first in steered:
        if kind_of(first.target) == "nexthop_group":
            nexthops |= _nexthops(before, first, objects, heard)
            group = _group(before, first, using.get(group_number(first.target), []), objects, heard, in_force)
            if group is not None:
                groups[first.target] = group
        elif kind_of(first.target) == "multipath":
            kept = _route(before, first, objects, heard)
            if kept is not None:
                routes[first.target] = kept
    interfaces = {member.interface for first in steered for member in first.members}
    ages = {name: _age(objects, name) or before.links.get(name) for name in interfaces}
    return Memory(nexthops, groups, routes, {name: age for name, age in ages.items() if age is not None})


def _age(objects: Objects, interface: str) -> LinkAge | None:
    link = objects.link(interface)
    return None if link is None else (link.index, link.carrier_downs)


def _went(before: Memory, interface: str, objects: Objects) -> bool:
    """Whether a link is away, or has been since the last reading."""
    return not objects.carries(interface) or before.links.get(interface) not in (None, _age(objects, interface))


def _nexthops(before: Memory, first: Group, objects: Objects, heard: Heard) -> dict[int, KeptNexthop]:
    found = {}
    for member in first.members:
        number, known = member.nexthop_id, before.nexthops.get(member.nexthop_id)
        if objects.has(member):
            found[number] = KeptNexthop(objects.nexthops[number], member.interface)
        elif known is None or number in heard.nexthops or number in objects.nexthops or number in objects.groups:
            continue  # somebody deleted it, or made another in its place
        elif known.lost or not heard.missed or _went(before, known.interface, objects):
            found[number] = replace(known, lost=True)
    return found


def _group(
    before: Memory,
    first: Group,
    routes: list[Route],
    objects: Objects,
    heard: Heard,
    in_force: Mapping[Target, Sequence[Weights]],
) -> KeptGroup | None:
    known, number = before.groups.get(first.target), group_number(first.target)
    there = objects.groups.get(number)
    if there is not None:
        present = {(route.destination, route.metric) for route in routes}
        gone = () if known is None else known.routes if known.lost else known.owed
        owed = [route for route in gone if (route.destination, route.metric) not in present]
        return KeptGroup(there, first, tuple(routes), owed=_not_deleted(owed, heard))
    if known is None or number in heard.nexthops or number in objects.nexthops:
        return None
    had = [{member.nexthop_id for member in known.group.members}]
    had += [{number for number, _ in weights} for weights in in_force.get(first.target, ())]
    if heard.missed and not known.lost and not any(_went_with_links(before, known, objects, each) for each in had):
        return None
    return replace(known, lost=True, routes=_not_deleted(known.routes, heard))


def _not_deleted(routes: Iterable[Route], heard: Heard) -> tuple[Route, ...]:
    return tuple(route for route in routes if (route.table, route.destination, route.metric) not in heard.routes)


def _went_with_links(before: Memory, known: KeptGroup, objects: Objects, had: AbstractSet[int]) -> bool:
    """Whether links explain that a group with these nexthops is gone: the kernel deletes it with the last one only."""
    went = any(_went(before, m.interface, objects) for m in known.first.members if m.nexthop_id in had)
    return went and not had & objects.nexthops.keys()


def _route(before: Memory, first: Group, objects: Objects, heard: Heard) -> KeptRoute | None:
    known, name = before.routes.get(first.target), route_of(first.target)
    if any((route.destination, route.metric) == name[1:] and not route.special for route in objects.routes):
        origin = _origin(first)
        return None if origin is None else KeptRoute(origin, first)
    if known is None or name in heard.routes:
        return None
    if known.lost:
        return known
    if heard.missed and not any(_went(before, member.interface, objects) for member in first.members):
        return None
    return replace(known, lost=True)


def _origin(first: Group) -> Route | None:
    return route_in(bytes.fromhex(first.origin)) if first.origin else None


def restoration(memory: Memory, objects: Objects, without: AbstractSet[int] = frozenset()) -> Restoration:
    """What can be made again now, without some nexthops.

    What a routing daemon made is left to it: it knows better whether the way is good, and makes it again itself.
    """
    nexthops = {}
    for number, kept in memory.nexthops.items():
        link = objects.link(kept.interface)
        if not kept.lost or number in without or kept.nexthop.protocol in DAEMONS:
            continue
        if link is not None and objects.carries(link.name):
            nexthops[number] = nexthop_remade(kept.nexthop.body, number, kept.nexthop.protocol, link.index)
    groups, routes = {}, {}
    for target, group in memory.groups.items():
        members = [
            KernelMember(member.nexthop_id, member.weight)
            for member in group.first.members
            if member.nexthop_id in nexthops or objects.has(member)
        ]
        if group.group.protocol in DAEMONS:
            continue
        if group.lost and members:
            groups[target] = group_remade(group.group.body, members)
        back = group.owed if not group.lost else group.routes if members else ()
        if back:
            routes[target] = tuple(remade(route.body) for route in back)
    for target, route in memory.routes.items():
        body = _over_what_is_up(route, objects) if route.lost and route.route.protocol not in DAEMONS else None
        if body is not None:
            routes[target] = (body,)
    return Restoration(nexthops, groups, routes)


def _over_what_is_up(kept: KeptRoute, objects: Objects) -> bytes | None:
    hops = []
    for member, hop in zip(kept.first.members, hops_of(kept.route), strict=True):
        link = objects.link(member.interface)
        if link is not None and objects.carries(link.name):
            hops.append(replace(hop, ifindex=link.index))
    return with_hops(kept.route.body, hops) if hops else None
