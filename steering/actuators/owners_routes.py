"""What others route the managed prefixes over: by every table that a rule leads to, with hops and weights. Pure.

A view is one such table, seen through the rules that lead to it. A prefix of it can be steered when it has a choice of
hops: several hops of its best route, worse routes to the same prefix, or alternatives that the policy names. The last
two stand by with weight 0. What lies inside a steered prefix and cannot be steered is *passed on*: our table sends the
look-up back to theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pytools.kernel.leftovers import is_our_table
from pytools.kernel.netlink.nexthops import family_of
from pytools.kernel.netlink.routes import hops_of, without_source
from pytools.kernel.netlink.routing import MAIN_TABLE, UNICAST, Family, Route, Rule
from pytools.kernel.netlink.socket import attributes
from pytools.kernel.netlink.tables import rule_suppresses_group
from steering.actuators.objects import LOCAL_TABLE, Objects
from steering.plan import MAX_WEIGHT, canonical
from steering.prefixes import Key, LongestPrefix, host_key, key_of

ONE_HOP: Final = "it has one hop: there is nothing to choose (manage.alternatives names more)"
_REDIRECT, _KERNEL = 1, 2  # RTPROT_*
_ENCAPSULATION: Final = 8  # NHA_ENCAP
_ONLINK: Final = 4  # RTNH_F_ONLINK
_DEAD: Final = 1  # RTNH_F_DEAD


@dataclass(frozen=True, slots=True, order=True)
class Way:
    """A hop: where packets leave."""

    family: Family  # of the gateway, or of the route when there is none
    gateway: str  # in its one spelling; empty when on-link
    interface: str
    ifindex: int
    onlink: bool = False


Ways = tuple[tuple[Way, int], ...]  # with weights; 0: stands by
ViewKey = tuple[Family, int, int | None]  # family, table, and what its rules suppress


@dataclass(frozen=True, slots=True)
class Selector:
    """A rule of theirs that leads to a table, or for a VRF the half of one."""

    priority: int
    body: bytes
    iif: str = ""
    oif: str = ""


@dataclass(frozen=True, slots=True)
class Steerable:
    """A managed prefix with a choice of hops."""

    destination: str
    body: bytes  # of the best route, in the kernel's form; another prefix than ours when it covers the managed one
    ways: Ways
    within: str = ""  # an address that is steered apart: the prefix that it was taken out of


@dataclass(frozen=True, slots=True)
class View:
    name: str
    family: Family
    table: int
    suppress: int | None
    selectors: tuple[Selector, ...]
    prefixes: tuple[Steerable, ...] = ()
    passed_on: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)  # managed routes that cannot be steered, and why

    @property
    def key(self) -> ViewKey:
        return self.family, self.table, self.suppress


def views(
    objects: Objects,
    managed: Collection[str],
    vrfs: Collection[str] = (),
    alternatives: Sequence[tuple[str, str]] = (),
    apart: Collection[str] = (),
) -> list[View]:
    """Every view with what it has of the managed prefixes.

    Parameters
    ----------
    objects : Objects
        What the kernel has.
    managed : collection of str
        Prefixes.
    vrfs : collection of str
        VRF devices whose tables count.
    alternatives : sequence of tuple of str
        Gateway and interface of further hops, for every managed prefix of the gateway's family.
    apart : collection of str
        Addresses that are steered apart from the prefixes that they are in.
    """
    families = {family_of(prefix) for prefix in managed}
    found: dict[ViewKey, list[Selector]] = defaultdict(list)
    names: dict[ViewKey, str] = {}
    for name, rule, table, selector in _lookups(objects, vrfs):
        if rule.family in families:
            key: ViewKey = (rule.family, table, rule.suppress)
            found[key].append(selector)
            names.setdefault(key, name)
    made = [
        _view(objects, names[key], key, selectors, managed, alternatives, apart) for key, selectors in found.items()
    ]
    return [view for view in made if view.prefixes or view.refused]


def _lookups(objects: Objects, vrfs: Collection[str]) -> Iterator[tuple[str, Rule, int, Selector]]:
    """Name, rule, table and selector of every look-up of theirs."""
    for rule in objects.rules:
        if rule.action != "table" or is_our_table(rule.table) or not rule.priority or rule_suppresses_group(rule):
            continue
        if rule.l3mdev:
            for link in objects.links.values():
                if link.name in vrfs and link.vrf_table:
                    for ends in ({"iif": link.name}, {"oif": link.name}):
                        yield link.name, rule, link.vrf_table, Selector(rule.priority, rule.body, **ends)
        elif rule.table != LOCAL_TABLE:
            name = "main" if rule.table == MAIN_TABLE else str(rule.table)
            if rule.suppress is not None:  # as wg-quick does: the same table may be looked up a second time, as a whole
                name += f" suppress_prefixlength {rule.suppress}"
            yield name, rule, rule.table, Selector(rule.priority, rule.body)


def _view(
    objects: Objects,
    name: str,
    key: ViewKey,
    selectors: Iterable[Selector],
    managed: Collection[str],
    alternatives: Sequence[tuple[str, str]],
    apart: Collection[str],
) -> View:
    family, table, suppress = key
    seen = _Table(objects, family, objects.routes.get((family, table), ()), suppress, alternatives)
    for prefix in managed:
        if family_of(prefix) == family:
            seen.add(prefix)
    seen.take_out(apart)
    return View(
        name,
        family,
        table,
        suppress,
        tuple(selectors),
        tuple(seen.steerable.values()),
        tuple(seen.passed_on()),
        seen.refused,
    )


class _Table:
    def __init__(
        self,
        objects: Objects,
        family: Family,
        routes: Iterable[Route],
        suppress: int | None,
        alternatives: Sequence[tuple[str, str]],
    ) -> None:
        self._objects, self._family = objects, family
        self._by_key: dict[Key, list[Route]] = defaultdict(list)
        for route in routes:
            if route.expires_s is not None and route.expires_s <= 0:  # no longer used, and deleted later
                continue
            key = key_of(route.destination)
            if suppress is None or key[1] > suppress:
                self._by_key[key].append(route)
        for several in self._by_key.values():
            several.sort(key=_rank)
        self._routes = LongestPrefix(self._by_key)
        self._alternatives = [way for gateway, name in alternatives if (way := self._alternative(gateway, name))]
        self.steerable: dict[str, Steerable] = {}
        self._by_object: dict[int, list[tuple[Way, int]] | None] = {}
        self.refused: dict[str, str] = {}

    def _alternative(self, gateway: str, interface: str) -> Way | None:
        link = self._objects.by_name.get(interface)
        if link is None or family_of(gateway) != self._family:
            return None
        return Way(self._family, canonical(gateway), interface, link.index)

    def add(self, prefix: str) -> None:
        """Look for what leads to a managed prefix: routes inside it, and what covers the rest of it."""
        exact = key_of(prefix)
        within = LongestPrefix({exact: True})
        for key, routes in self._by_key.items():
            if within.around(key):
                self._take(routes[0].destination, routes)
        if exact not in self._by_key and (covering := self._routes.around(exact)):
            self._take(prefix, covering)

    def take_out(self, addresses: Collection[str]) -> None:
        """Give addresses inside steered prefixes an entry each, with the hops of their prefix."""
        keys = {key: each for each in addresses if (key := host_key(each)) is not None and key[0] == self._family}
        if not keys:
            return
        there: dict[Key, Steerable | None] = dict.fromkeys(self._by_key)
        known = LongestPrefix(there | {key_of(name): each for name, each in self.steerable.items()})
        for key, address in keys.items():
            around = known.around(key)
            if around is not None:
                host = f"{address}/{key[1]}"
                self.steerable[host] = replace(around, destination=host, within=around.destination)

    def _take(self, destination: str, routes: Sequence[Route]) -> None:
        if any(route.special for route in routes):
            self.refused[destination] = "a route to it is for one type of service or one source only"
            return
        best = routes[0]
        if best.kind != UNICAST or _is_the_kernels(best):
            return
        ways: dict[Way, int] = {}
        used = [best, *(route for route in routes[1:] if _equals(route, best))]
        for way, weight in (pair for route in used for pair in self._ways(route) or ()):
            ways[way] = ways.get(way, 0) + weight
        if not ways or any(weight > MAX_WEIGHT for weight in ways.values()):
            self.refused[destination] = "a hop of it encapsulates, or leads nowhere" if not ways else "a weight > 256"
            return
        unicast = [route for route in routes if route.kind == UNICAST]
        others = [way for route in unicast for way, _ in self._ways(route) or ()]
        for way in (*others, *self._alternatives):
            ways.setdefault(way, 0)
        if len(ways) < 2:
            self.refused[destination] = ONE_HOP
            return
        self.refused.pop(destination, None)
        sources = {route.prefsrc for route in unicast if route.prefsrc}  # with DHCP each link has its own
        body = best.body if len(sources) < 2 else without_source(best.body)
        self.steerable.setdefault(destination, Steerable(destination, body, tuple(ways.items())))

    def _ways(self, route: Route) -> list[tuple[Way, int]] | None:
        """The hops of a route; None when one of them cannot be rebuilt."""
        if route.nexthop_id is None:
            hops = hops_of(route)
            if any(hop.encapsulates for hop in hops):
                return None
            return [
                (self._way(hop.gateway, hop.ifindex, hop.onlink), hop.weight)
                for hop in hops
                if not (hop.body and hop.body[2] & _DEAD)
            ]
        if route.nexthop_id not in self._by_object:  # 10,000 routes may use one
            self._by_object[route.nexthop_id] = self._members(route.nexthop_id)
        return self._by_object[route.nexthop_id]

    def _members(self, object_id: int) -> list[tuple[Way, int]] | None:
        group = self._objects.groups.get(object_id)
        members = {object_id: 1} if group is None else group.weights
        found = []
        for number, weight in members.items():
            nexthop = self._objects.nexthops.get(number)
            if nexthop is None or nexthop.ifindex is None or nexthop.blackhole:
                return None
            if any(name == _ENCAPSULATION for name, _ in attributes(nexthop.body, 8)):
                return None
            found.append((self._way(nexthop.gateway, nexthop.ifindex, bool(nexthop.flags & _ONLINK)), weight))
        return found

    def _way(self, gateway: str | None, ifindex: int, onlink: bool) -> Way:
        family = family_of(gateway) if gateway else self._family
        return Way(family, canonical(gateway or ""), self._objects.interface(ifindex), ifindex, onlink)

    def passed_on(self) -> Iterator[str]:
        """Prefixes inside steered ones that are not steered themselves."""
        steered = LongestPrefix({key_of(each): True for each in self.steerable})
        for key, routes in self._by_key.items():
            if key not in steered.values and steered.around(key):
                yield routes[0].destination


def _rank(route: Route) -> tuple[int, int]:
    return route.metric, -route.preference


def _equals(route: Route, best: Route) -> bool:
    """Whether the kernel may use it as well as the best: of equal routers it takes one that answers."""
    usable = route.kind == UNICAST and not _is_the_kernels(route)
    return route.family == 6 and usable and _rank(route) == _rank(best)


def _is_the_kernels(route: Route) -> bool:
    """Whether it leads to a link, or is a router's redirect. Cilium's routes over gateways say `kernel`, too."""
    return route.protocol == _REDIRECT or (route.protocol == _KERNEL and not route.gateway and not route.hops)
