"""Which of several routes to one prefix is preferred: by a copy of it with a better metric, which is ours alone.

Nobody else's route is touched: the copy carries our protocol, and to undo is to remove it. The weights of such a target
are one member of weight 1, the route in force. Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from pytools.kernel.leftovers import is_backup, is_copy
from pytools.kernel.netlink import PROTOCOL, UNICAST, Netlink, NetlinkError, Route
from pytools.kernel.netlink_messages import family_of
from pytools.kernel.netlink_routes import copied, hops_of
from steering.actuators.route_names import hop_id, route_of
from steering.actuators.weighted import Outcome, among, judged
from steering.plan import Group, Weights, canonical


@dataclass(frozen=True, slots=True)
class _Routes:
    """All routes to one prefix."""

    theirs: tuple[tuple[int, Route], ...]  # by where they lead, best metric first
    ours: tuple[tuple[int, Route], ...]

    @property
    def in_force(self) -> int | None:
        """Where the best of all leads."""
        best = min((*self.theirs, *self.ours), key=lambda pair: pair[1].metric, default=None)
        return None if best is None else best[0]


class RouteMetrics:
    """The prefixes with several routes in one namespace.

    Parameters
    ----------
    netlink : Netlink
        A socket in that namespace; stays the caller's.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink

    def weights(self, group: Group) -> Weights | None:
        """Which route is in force now; None when there is none."""
        hop = self._read(group).in_force
        return None if hop is None else ((hop, 1),)

    def apply(self, group: Group, expected: Iterable[Weights], wanted: Weights) -> Outcome:
        """Have another route preferred, provided that an expected one is in force.

        Parameters
        ----------
        group : Group
            The prefix's routes before we touched them.
        expected : iterable of Weights
            What may be in force now: anything else was made by somebody else, and stays.
        wanted : Weights
            The one that shall be in force; its weight is of no account.

        Raises
        ------
        ValueError
            If it is not one.
        """
        if len(wanted) != 1:
            raise ValueError(f"{group.target}: exactly one route is in force, not {len(wanted)}")
        found = self._read(group)
        if not found.theirs:
            return Outcome("gone", (), None, "the routes are gone")
        now = ((found.in_force or 0, 1),)
        if now[0][0] == wanted[0][0]:
            return Outcome("applied", wanted, time.monotonic_ns(), "it was in force already")
        if not among(now, expected):
            return Outcome("manual", now, None, "somebody made another route the preferred one")
        return self._prefer(group, found, wanted)

    def _prefer(self, group: Group, found: _Routes, wanted: Weights) -> Outcome:
        before: Weights = ((found.in_force or 0, 1),)
        hop, best = wanted[0][0], found.theirs[0]
        source = next((route for where, route in found.theirs if where == hop), None)
        why = ""
        if hop == best[0]:
            self._remove(found.ours)
        elif source is None:
            return Outcome("failed", before, None, "there is no such route any more")
        elif best[1].metric < 2:
            return Outcome("failed", before, None, f"none can be preferred to a metric of {best[1].metric}")
        else:
            why = self._copy(source, best[1].metric - 1, found.ours)
        return judged(before, lambda: self.weights(group), wanted, why)

    def undo(self, group: Group, ours: Iterable[Weights]) -> Outcome:
        """Remove what is ours; whatever else there is, is somebody else's and stays."""
        found = self._read(group)
        why = self._remove(found.ours)
        now = self.weights(group)
        if now is None:
            return Outcome("gone", (), None, "the routes are gone")
        if why and self._read(group).ours:
            return Outcome("failed", now, None, why)
        others = "" if now == group.original else "by now somebody prefers another route"
        return Outcome("applied", now, time.monotonic_ns(), others)

    def _copy(self, source: Route, metric: int, ours: Iterable[tuple[int, Route]]) -> str:
        """Make the copy, or have it take the place of an older one of ours; why not, or empty."""
        olds = [route for _, route in ours]
        there = any(route.metric == metric for route in olds)
        (refusal,) = self._netlink.make_routes([copied(source.body, metric, PROTOCOL)], replace=there)
        if refusal is not None:
            return str(refusal)
        self._netlink.drop_routes([route for route in olds if route.metric != metric])
        return ""

    def _remove(self, ours: Iterable[tuple[int, Route]]) -> str:
        refusals = self._netlink.drop_routes([route for _, route in ours])
        return next((str(refusal) for refusal in refusals if isinstance(refusal, NetlinkError)), "")

    def _read(self, group: Group) -> _Routes:
        table, prefix, _ = route_of(group.target)
        routes = [
            route
            for route in self._netlink.routes(family_of(prefix), table)
            if route.destination == prefix and route.kind == UNICAST and not route.special and not is_backup(route)
        ]
        routes.sort(key=lambda route: route.metric)
        names = {link.index: link.name for link in self._netlink.links()}
        nexthops = {nexthop.id: nexthop for nexthop in self._netlink.nexthops()}

        def leads(route: Route) -> int:
            if route.nexthop_id is not None:
                nexthop = nexthops.get(route.nexthop_id)
                gateway, index = (nexthop.gateway, nexthop.ifindex) if nexthop else ("", None)
            else:
                hop = hops_of(route)[0]
                gateway, index = hop.gateway, hop.ifindex
            return hop_id(canonical(gateway or ""), names.get(index or 0, f"if{index}"))

        pairs = [(leads(route), route) for route in routes]
        return _Routes(
            tuple(pair for pair in pairs if not is_copy(pair[1])), tuple(pair for pair in pairs if is_copy(pair[1]))
        )
