"""The routing objects of one namespace at one moment: links, rules, nexthops, groups and routes.

One thread; nothing is cached.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pytools.kernel.leftovers import FAMILIES, is_our_table
from pytools.kernel.netlink.routing import Family, Link, Netlink, Nexthop, NexthopGroup, Route, Rule

Table = tuple[Family, int]
LOCAL_TABLE = 255
_ZEBRA = 11  # RTPROT_ZEBRA
_EXPIRING_NS = 5_000_000_000  # the kernel does not announce that a route expired, nor that its time has changed
_TICKS_NS = 20_000_000  # it says the time in hundredths of a second, and 0 for no end, too
_OWNERS = {2: "kernel", 3: "boot", 4: "static", _ZEBRA: "zebra", 12: "bird", 16: "dhcp", 186: "bgp"}  # RTPROT_*


@dataclass(frozen=True, slots=True)
class Objects:
    links: Mapping[int, Link]  # by index
    nexthops: Mapping[int, Nexthop]
    groups: Mapping[int, NexthopGroup]
    rules: tuple[Rule, ...]  # both families, in the order of their priorities
    routes: Mapping[Table, tuple[Route, ...]]
    by_name: Mapping[str, Link] = field(default_factory=dict)

    def interface(self, index: int | None) -> str:
        """An interface's name; empty for none."""
        link = self.links.get(index or 0)
        return "" if index is None else f"if{index}" if link is None else link.name

    def carries(self, index: int) -> bool:
        """Whether an interface is there, up, and has its carrier, as far as the kernel has taken notice.

        One that was made again has another index: routes over the old one are gone.
        """
        link = self.links.get(index)
        return link is not None and link.up and link.carrier and link.running

    @property
    def zebra_runs(self) -> bool:
        """Whether FRR's zebra has made nexthops here."""
        return any(each.protocol == _ZEBRA for each in self.nexthops.values())

    @property
    def lasts_ns(self) -> int | None:
        """How long it holds for routes that expire; None when none does. Only IPv6 has them."""
        read = (route for (family, _), routes in self.routes.items() if family == 6 for route in routes)
        times = [int(route.expires_s * 1e9) for route in read if route.expires_s is not None]
        return min((_EXPIRING_NS, *(left + _TICKS_NS for left in times if left > 0))) if times else None

    @property
    def shape(self) -> tuple[object, ...]:
        """What must be as it was for routes to be as they were, unless news of routes came."""
        links = frozenset((link.index, link.name, link.up, link.carrier, link.master) for link in self.links.values())
        return links, self.groups.keys(), self.nexthops.keys(), self.rules


def tables_of(rules: Iterable[Rule], links: Iterable[Link], vrfs: Collection[str]) -> set[Table]:
    """The tables that are looked up for packets that leave, but for ours and `local`; of VRFs only the named ones."""
    known = list(rules)
    found: set[Table] = {
        (rule.family, rule.table)
        for rule in known
        if rule.action == "table" and not rule.l3mdev and rule.table != LOCAL_TABLE and not is_our_table(rule.table)
    }
    by_device = {rule.family for rule in known if rule.l3mdev}
    found |= {(f, link.vrf_table) for link in links if link.name in vrfs and link.vrf_table for f in by_device}
    return found


def read(
    netlink: Netlink, families: Collection[Family] = FAMILIES, vrfs: Collection[str] = (), before: Objects | None = None
) -> Objects:
    """All of it, as it is now.

    Parameters
    ----------
    netlink : Netlink
        A socket in the namespace.
    families : collection of int
        Of rules and routes.
    vrfs : collection of str
        VRF devices whose tables are read as well.
    before : Objects, optional
        An earlier reading, if no news of routes came since: they are read again only where they may have gone
        unannounced.
    """
    links = netlink.links()
    rules = sorted((r for f in families for r in netlink.rules(f)), key=lambda r: (r.family, r.priority))
    found = Objects(
        {link.index: link for link in links},
        {nexthop.id: nexthop for nexthop in netlink.nexthops()},
        {group.id: group for group in netlink.groups()},
        tuple(rules),
        {} if before is None else before.routes,
        {link.name: link for link in links},
    )
    if before is not None and before.shape == found.shape:
        return found
    tables = sorted(tables_of(rules, links, vrfs))
    return replace(found, routes={(f, table): tuple(netlink.routes(f, table)) for f, table in tables})


def owner_name(protocol: int) -> str:
    """Whose a protocol number is; the number where no name is known."""
    return _OWNERS.get(protocol, str(protocol))
