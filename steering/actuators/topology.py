"""Which nexthop groups may be steered, and which group an address is reached through.

Reads the main table, the groups, their nexthops and the interface names; `find` does the I/O, the rest is pure. Held
by one thread.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytools.kernel.netlink import Family, Netlink, NexthopGroup, Route
from steering.plan import MAX_WEIGHT, Group, Member, canonical, weights_of

_FAMILIES: tuple[Family, ...] = (4, 6)


@dataclass(frozen=True, slots=True)
class Topology:
    """What was found; `refused` names the groups that carry a managed route but must be left alone, and why."""

    groups: dict[int, Group]  # without paths
    refused: dict[int, str]
    nexthops: frozenset[int]  # ids of all plain nexthops there are
    _routes: Mapping[tuple[int, int, int], Route]  # version, prefix length, network -> the route in force
    _lengths: Mapping[int, Sequence[int]]  # version -> prefix lengths that occur, longest first

    def group_of(self, address: str) -> int | None:
        """The nexthop object that the route to an address uses, if any: the id of a group of ours, or of another."""
        route = self._route(address)
        return None if route is None else route.nexthop_id

    def _route(self, address: str) -> Route | None:
        try:
            number = ipaddress.ip_address(address)
        except ValueError:  # a signal may come from any program
            return None
        for length in self._lengths.get(number.version, ()):
            shift = number.max_prefixlen - length
            route = self._routes.get((number.version, length, int(number) >> shift << shift))
            if route is not None:
                return route
        return None


def find(netlink: Netlink, managed: Iterable[str]) -> Topology:
    """The groups that carry a route inside one of the managed prefixes."""
    names = {link.index: link.name for link in netlink.links()}
    members = {
        nexthop.id: Member(
            nexthop.id,
            canonical(nexthop.gateway or ""),
            names.get(nexthop.ifindex or 0, "" if nexthop.ifindex is None else f"if{nexthop.ifindex}"),
            1,
        )
        for nexthop in netlink.nexthops()
    }
    routes = [route for family in _FAMILIES for route in netlink.routes(family)]
    return arrange(netlink.groups(), members, routes, managed)


def arrange(
    groups: Iterable[NexthopGroup],
    nexthops: Mapping[int, Member],
    routes: Iterable[Route],
    managed: Iterable[str],
) -> Topology:
    """The topology in what the kernel said. Pure."""
    inside: dict[int, list[str]] = defaultdict(list)
    outside: dict[int, list[str]] = defaultdict(list)
    prefixes = [ipaddress.ip_network(prefix) for prefix in managed]
    in_force: dict[tuple[int, int, int], Route] = {}
    for route in routes:
        network = ipaddress.ip_network(route.destination)
        key = (network.version, network.prefixlen, int(network.network_address))
        if key not in in_force or route.metric < in_force[key].metric:
            in_force[key] = route
        if route.nexthop_id is not None:
            (inside if _within(network, prefixes) else outside)[route.nexthop_id].append(route.destination)
    found: dict[int, Group] = {}
    refused: dict[int, str] = {}
    for group in groups:
        if group.id not in inside:
            continue
        if group.id in outside:
            refused[group.id] = f"it also carries {outside[group.id][0]}, which the policy does not manage"
        elif any(member.nexthop_id not in nexthops for member in group.members):
            refused[group.id] = "it has a member that is no plain nexthop"
        elif any(member.weight > MAX_WEIGHT for member in group.members):
            refused[group.id] = f"a weight is above {MAX_WEIGHT}, which could not be put back"
        else:
            found[group.id] = _group(group, nexthops, inside[group.id])
    lengths: dict[int, list[int]] = defaultdict(list)
    for version, length in sorted({key[:2] for key in in_force}, reverse=True):
        lengths[version].append(length)
    return Topology(found, refused, frozenset(nexthops), in_force, dict(lengths))


def _group(group: NexthopGroup, nexthops: Mapping[int, Member], destinations: list[str]) -> Group:
    members = tuple(
        Member(m.nexthop_id, nexthops[m.nexthop_id].gateway, nexthops[m.nexthop_id].interface, m.weight)
        for m in sorted(group.members, key=lambda member: member.nexthop_id)
    )
    return Group(group.id, tuple(sorted(destinations)), members, weights_of(group.weights))


def _within(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network,
    prefixes: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network],
) -> bool:
    return any(
        network.version == prefix.version and network.subnet_of(prefix)  # type: ignore[arg-type]
        for prefix in prefixes
    )
