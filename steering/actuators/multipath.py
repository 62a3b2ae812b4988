"""Weights of routes that list several hops themselves: apply a change in place, read it back, undo it.

The route is replaced by itself with other weights, in one request; a hop of weight 0 is left out. Every other attribute
is kept as the kernel gave it. IPv4 replaces in one step; IPv6, which keeps the hops as sibling routes, by the first hop
at once and then the others behind it, so the first is one that may have all traffic for those microseconds. Times are
CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pytools.kernel.netlink import Hop, Link, Netlink, NetlinkError, Route
from pytools.kernel.netlink_messages import family_of
from pytools.kernel.netlink_routes import hop_of, hops_of, remade, with_hops
from pytools.kernel.netlink_routes import route_of as route_in
from steering.actuators.route_names import hop_id, route_of
from steering.actuators.weighted import Outcome, among, judged, present, text_of, without
from steering.plan import Group, Member, Weights, canonical, same, weights_of


class MultipathRoutes:
    """The multipath routes of one namespace.

    Parameters
    ----------
    netlink : Netlink
        A socket in that namespace; stays the caller's.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink

    def weights(self, group: Group) -> Weights | None:
        """A route's weights now; None when there is no such route."""
        route = self._find(group)
        return None if route is None else _weights(route, self._links())

    def apply(self, group: Group, expected: Iterable[Weights], wanted: Weights) -> Outcome:
        """Give a route these weights, provided that it has one of the expected ones.

        Hops whose interface is not up are left out: the kernel would refuse the route.

        Parameters
        ----------
        group : Group
            The route before we touched it.
        expected : iterable of Weights
            What it may have now: anything else was made by somebody else, and stays.
        wanted : Weights
            What it shall have.

        Raises
        ------
        ValueError
            If the route would be left without a hop.
        """
        if not wanted:
            raise ValueError(f"{group.target} would be left without a hop")
        return self._apply(group, expected, wanted, original_order=False)

    def undo(self, group: Group, ours: Iterable[Weights]) -> Outcome:
        """Give a route its original weights, in the original order, provided that it has weights of ours."""
        usable = _usable(group, self._links())
        expected = {*ours, group.original}
        expected |= {present(weights, usable) for weights in expected}
        outcome = self._apply(group, expected, group.original, original_order=True)
        if outcome.kind != "applied":
            return outcome
        return Outcome("applied", outcome.weights, outcome.acknowledged_ns, without(group, usable))

    def _apply(self, group: Group, expected: Iterable[Weights], wanted: Weights, original_order: bool) -> Outcome:
        links, route = self._links(), self._find(group)
        if route is None:
            return Outcome("gone", (), None, "the route is gone")
        wanted = present(wanted, _usable(group, links))
        if not wanted:
            return Outcome("failed", (), None, "none of its interfaces is up")
        now = _weights(route, links)
        if same(now, wanted):
            return Outcome("applied", wanted, time.monotonic_ns(), "it had these weights already")
        if not among(now, expected):
            return Outcome("manual", now, None, f"somebody changed the route to {_named(group, now)}")
        hops = _hops(group, route, links, dict(wanted), original_order)
        return self._replace(group, route, with_hops(route.body, hops), wanted, links)

    def _replace(self, group: Group, route: Route, body: bytes, wanted: Weights, links: Mapping[int, Link]) -> Outcome:
        before = _weights(route, links)
        (refusal,) = self._netlink.make_routes([body], replace=True)
        if refusal is None:
            return judged(before, lambda: self.weights(group), wanted, "")
        left = self.weights(group)
        if left != before and (left is not None or refusal.code != errno.ENOENT):
            # IPv6 adds one hop after the other, and may delete those again: what is half done is taken back.
            body = remade(route.body)
            if route.family == 6:  # a look-up names the hop first that it has chosen, by a hash of this boot
                body = with_hops(route.body, _hops(group, route, links, dict(before), original_order=True))
            self._netlink.make_routes([body], replace=left is not None)
        return judged(before, lambda: self.weights(group), wanted, str(refusal))

    def _links(self) -> dict[int, Link]:
        return {link.index: link for link in self._netlink.links()}

    def _find(self, group: Group) -> Route | None:
        """The route, by a look-up where that leads to it, else by reading the table."""
        table, prefix, metric = route_of(group.target)
        address = prefix.partition("/")[0]
        try:
            route = self._netlink.route_get(address, matched=True)
        except NetlinkError:
            route = None
        if route is not None and (route.table, route.destination, route.metric) == (table, prefix, metric):
            return None if route.special else route
        routes = self._netlink.routes(family_of(prefix), table)
        return next((r for r in routes if (r.destination, r.metric) == (prefix, metric) and not r.special), None)


def _id(hop: Hop, links: Mapping[int, Link]) -> int:
    link = links.get(hop.ifindex)
    return hop_id(canonical(hop.gateway or ""), link.name if link else f"if{hop.ifindex}")


def _weights(route: Route, links: Mapping[int, Link]) -> Weights:
    return weights_of((_id(hop, links), hop.weight) for hop in hops_of(route))


def _usable(group: Group, links: Mapping[int, Link]) -> frozenset[int]:
    up = {link.name for link in links.values() if link.up}
    return frozenset(member.nexthop_id for member in group.members if member.interface in up)


def _hops(
    group: Group, route: Route, links: Mapping[int, Link], wanted: Mapping[int, int], original_order: bool
) -> Sequence[Hop]:
    """The hops with their weights, each as the kernel or, if it has left the route, the record has it."""
    indexes = {link.name: link.index for link in links.values()}
    known = {_id(hop, links): hop for hop in hops_of(route)}
    recorded = hops_of(route_in(bytes.fromhex(group.origin))) if group.origin else ()
    hops = []
    for member in group.members:
        if member.nexthop_id not in wanted:
            continue
        index = indexes[member.interface]
        hop = known.get(member.nexthop_id) or _recorded(recorded, member, index)
        hop = hop or hop_of(member.gateway or None, index, route.family)
        hops.append(replace(hop, ifindex=index, weight=wanted[member.nexthop_id]))
    if route.family == 6 and not original_order:
        hops.sort(key=lambda hop: -hop.weight)
    return hops


def _recorded(hops: Sequence[Hop], member: Member, index: int) -> Hop | None:
    """A hop as it was; where its interface was made anew, and has another index, the only one with its gateway."""
    alike = [hop for hop in hops if canonical(hop.gateway or "") == member.gateway]
    exact = [hop for hop in alike if hop.ifindex == index]
    return exact[0] if exact else alike[0] if len(alike) == 1 else None


def _named(group: Group, weights: Weights) -> str:
    """Weights by the names of the hops, where they have one."""
    names = {member.nexthop_id: member.name for member in group.members}
    if all(hop in names for hop, _ in weights):
        return ", ".join(f"{names[hop]} weight {weight}" for hop, weight in weights)
    return text_of(weights)
