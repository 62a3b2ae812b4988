"""Weights of nexthop groups: apply a change in place, read it back, undo it.

One netlink replace re-weights every route that uses the group; a member of weight 0 is left out. Never makes a group
empty, never touches one that somebody else changed in between. Times are CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from pytools.errors import SwerveError
from pytools.kernel.netlink import Member, Netlink, NexthopGroup
from steering.actuators.route_names import group_number
from steering.actuators.weighted import Outcome, among, judged, present, text_of, without
from steering.plan import Group, Weights, canonical, weights_of


class NexthopGroups:
    """The nexthop groups of one namespace.

    Parameters
    ----------
    netlink : Netlink
        A socket in that namespace; stays the caller's.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink

    def weights(self, group: Group) -> Weights | None:
        """A group's weights now; None when there is no such group."""
        return self._weights(group_number(group.target))

    def _weights(self, group_id: int) -> Weights | None:
        found = self._netlink.group(group_id)
        return None if found is None else weights_of(found.weights)

    def apply(self, group: Group, expected: Iterable[Weights], wanted: Weights) -> Outcome:
        """Give a group these weights, provided that it has one of the expected ones.

        Parameters
        ----------
        group : Group
            The group.
        expected : iterable of Weights
            What it may have now: anything else was made by somebody else, and stays.
        wanted : Weights
            What it shall have.

        Raises
        ------
        ValueError
            If the group would be left empty.
        """
        if not wanted:
            raise ValueError(f"{group.target} would be left without a nexthop")
        found = self._netlink.group(group_number(group.target))
        if found is None:
            return Outcome("gone", (), None, "the group is gone")
        now = weights_of(found.weights)
        if now == wanted:
            return Outcome("applied", wanted, time.monotonic_ns(), "it had these weights already")
        if not among(now, expected):
            return Outcome("manual", now, None, f"somebody changed the group to {text_of(now)}")
        return self._replace(found, wanted)

    def _replace(self, group: NexthopGroup, wanted: Weights) -> Outcome:
        why = ""
        try:
            # Type and owner are given as they are: a resilient group keeps its table and its timers.
            members = [Member(nexthop, weight) for nexthop, weight in wanted]
            self._netlink.replace_group(group.id, members, protocol=group.protocol, kind=group.kind)
        except SwerveError as error:
            why = str(error)
        return judged(weights_of(group.weights), lambda: self._weights(group.id), wanted, why)

    def undo(self, group: Group, ours: Iterable[Weights]) -> Outcome:
        """Give a group its original weights, provided that it has weights of ours.

        The kernel drops a nexthop from its groups with its carrier: those that are gone are left out, and weights
        of ours that only miss such nexthops are still ours.
        """
        original = group.original
        there = self._usable(group)
        wanted = present(original, there)
        if not wanted:
            return Outcome("gone", (), None, "none of its nexthops is left")
        expected = {*ours, original}
        outcome = self.apply(group, expected | {present(weights, there) for weights in expected}, wanted)
        if outcome.kind != "applied":
            return outcome
        return Outcome("applied", outcome.weights, outcome.acknowledged_ns, without(group, there))

    def _usable(self, group: Group) -> frozenset[int]:
        """The members whose nexthop is there, and leads where it did: an id may be somebody else's by now."""
        names = {link.index: link.name for link in self._netlink.links()}
        ways = {
            nexthop.id: (canonical(nexthop.gateway or ""), names.get(nexthop.ifindex or 0, ""))
            for nexthop in self._netlink.nexthops()
        }
        return frozenset(
            member.nexthop_id
            for member in group.members
            if member.nexthop_id in ways and ways[member.nexthop_id] == (member.gateway, member.interface)
        )
