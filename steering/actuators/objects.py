"""The routing objects of one namespace at one moment: links, nexthops, groups, and the routes of the main table.

One thread; nothing is cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pytools.kernel.netlink import Family, Link, Netlink, Nexthop, NexthopGroup, Route
from steering.plan import Member, canonical

_FAMILIES: tuple[Family, ...] = (4, 6)


@dataclass(frozen=True, slots=True)
class Objects:
    """What there is."""

    links: Mapping[int, Link]  # by index
    nexthops: Mapping[int, Nexthop]
    groups: Mapping[int, NexthopGroup]
    routes: tuple[Route, ...]  # of the main table, both families
    by_name: Mapping[str, Link] = field(default_factory=dict)

    def interface(self, index: int | None) -> str:
        """An interface's name; empty for none."""
        if index is None:
            return ""
        link = self.links.get(index)
        return f"if{index}" if link is None else link.name

    def link(self, name: str) -> Link | None:
        """An interface by its name."""
        return self.by_name.get(name)

    def carries(self, name: str) -> bool:
        """Whether an interface is there, up, and has its carrier, as far as the kernel has taken notice."""
        link = self.link(name)
        return link is not None and link.up and link.carrier and link.running

    def has(self, member: Member) -> bool:
        """Whether the nexthop object that a member names is there, and leads where it did."""
        nexthop = self.nexthops.get(member.nexthop_id)
        return nexthop is not None and self.leaves_by(nexthop) == (member.gateway, member.interface)

    def leaves_by(self, nexthop: Nexthop) -> tuple[str, str]:
        """Gateway and interface of a nexthop; the gateway is empty when on-link."""
        return canonical(nexthop.gateway or ""), self.interface(nexthop.ifindex)

    @property
    def shape(self) -> tuple[object, ...]:
        """What must be as it was for routes to be as they were, unless something was told of them."""
        return frozenset((link.index, link.name, link.up) for link in self.links.values()), self.groups.keys()


def read(netlink: Netlink, before: Objects | None = None) -> Objects:
    """All of it, as it is now.

    Parameters
    ----------
    netlink : Netlink
        A socket in the namespace.
    before : Objects, optional
        An earlier reading, if nothing was told of routes since: they are read again only where they may have gone
        without a word.
    """
    links = netlink.links()
    found = Objects(
        {link.index: link for link in links},
        {nexthop.id: nexthop for nexthop in netlink.nexthops()},
        {group.id: group for group in netlink.groups()},
        () if before is None else before.routes,
        {link.name: link for link in links},
    )
    if before is not None and before.shape == found.shape:
        return found
    return replace(found, routes=tuple(route for family in _FAMILIES for route in netlink.routes(family)))
