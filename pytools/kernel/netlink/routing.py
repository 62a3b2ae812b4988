"""Routing netlink in plain records: links, addresses, neighbours, nexthops, groups, routes and rules.

One `Netlink` is one socket, for one thread, blocking; an answer takes microseconds. Errors carry the kernel's
own sentence. Nothing is cached: what a method returns is what the kernel has now.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from typing import Any

from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg

from pytools.closing import Closing
from pytools.errors import UsageError
from pytools.kernel import netns as namespaces
from pytools.kernel.netlink.nexthops import (
    LOCAL,
    MAIN_TABLE,
    MAX_WEIGHT,
    PROTOCOL,
    UNICAST,
    Family,
    GroupKind,
    Member,
    Nexthop,
    NexthopGroup,
    NexthopMessage,
    family_of,
    group_message,
    group_of,
    group_of_body,
    groups_request,
    is_group,
    nexthop_message,
    nexthop_of,
    socket_family,
)
from pytools.kernel.netlink.routes import Hop, Route, lookup_request, remade, route_message, route_of, routes_request
from pytools.kernel.netlink.socket import CREATE, EXCLUSIVE, REPLACE, NetlinkError, NetlinkSocket
from pytools.kernel.netlink.tables import (
    Address,
    Link,
    Neighbour,
    Rule,
    address_of,
    link_of,
    neighbour_of,
    rule_message,
    rule_of,
)

__all__ = [
    "LOCAL",
    "MAIN_TABLE",
    "MAX_WEIGHT",
    "PROTOCOL",
    "UNICAST",
    "Address",
    "Family",
    "GroupKind",
    "Hop",
    "Link",
    "Member",
    "Neighbour",
    "Netlink",
    "NetlinkError",
    "Nexthop",
    "NexthopGroup",
    "Route",
    "Rule",
]

_NEW_ROUTE, _DEL_ROUTE, _GET_ROUTE = 24, 25, 26
_NEW_RULE, _DEL_RULE, _GET_RULE = 32, 33, 34
_GET_LINK, _GET_ADDRESS, _GET_NEIGHBOUR = 18, 22, 30
_NEW_NEXTHOP, _DEL_NEXTHOP, _GET_NEXTHOP = 104, 105, 106
_ANY_SCOPE = 255  # RT_SCOPE_NOWHERE
_COUNT_PACKETS = 1  # NHA_OP_FLAG_DUMP_STATS


class Netlink(Closing):
    """A netlink socket in a namespace.

    Parameters
    ----------
    netns : str, optional
        A named namespace; the thread's own unless given. The socket stays there, the thread does not.

    Raises
    ------
    UsageError, CapabilityError
        If the namespace does not exist or may not be entered.
    """

    def __init__(self, netns: str | None = None) -> None:
        with namespaces.inside(netns):
            self.socket = NetlinkSocket()
        self._counts = True  # until the kernel says that it cannot (before 6.9)

    def close(self) -> None:
        self.socket.close()

    # ---- links, addresses, neighbours ----

    def links(self) -> list[Link]:
        return [link_of(each) for each in self.socket.dump(ifinfmsg(), _GET_LINK, "reading interfaces")]

    def addresses(self) -> list[Address]:
        found = self.socket.dump(ifaddrmsg(), _GET_ADDRESS, "reading addresses")
        return [address_of(each) for each in found]

    def neighbours(self) -> list[Neighbour]:
        found = self.socket.dump(ndmsg(), _GET_NEIGHBOUR, "reading neighbours")
        return [neighbour_of(each) for each in found if each["family"] in (socket.AF_INET, socket.AF_INET6)]

    # ---- nexthops and groups ----

    def nexthops(self) -> list[Nexthop]:
        """All nexthop objects that are not groups."""
        found: list[Any] = self.socket.dump(NexthopMessage(), _GET_NEXTHOP, "reading nexthops")
        return [nexthop_of(each) for each in found if not is_group(each)]

    def groups(self, stats: bool = False) -> list[NexthopGroup]:
        """All nexthop groups.

        Parameters
        ----------
        stats : bool
            Ask for packets per member as well (Linux 6.9 and later; else they stay None).
        """
        if stats and self._counts:
            try:
                return self._dump_groups(_COUNT_PACKETS)
            except NetlinkError as refusal:
                if refusal.code != errno.EINVAL:
                    raise
                self._counts = False
        return self._dump_groups()

    def _dump_groups(self, op_flags: int = 0) -> list[NexthopGroup]:
        found = self.socket.dump_bodies(groups_request(op_flags), _GET_NEXTHOP, "reading nexthop groups")
        return [group_of_body(each) for each in found]

    def group(self, group_id: int, stats: bool = False) -> NexthopGroup | None:
        """One group, or None when there is none of this id."""
        what = f"reading nexthop group {group_id}"
        try:
            answer = self._get_nexthop(group_id, stats, what)
        except NetlinkError as refusal:
            if refusal.code == errno.ENOENT:
                return None
            raise
        if not is_group(answer):
            raise UsageError(f"nexthop {group_id} is not a group", "give the id of a group")
        return group_of(answer)

    def replace_group(
        self,
        group_id: int,
        members: Sequence[Member],
        protocol: int | None = None,
        create: bool = False,
        kind: GroupKind | None = None,
    ) -> None:
        """Give a group these members and weights, in one request.

        The kernel counts packets per member afresh after each replace.

        Parameters
        ----------
        members : sequence of Member
            All members it shall have; their packet counts are ignored.
        protocol : int, optional
            Whose the group is; kept as it is unless given (PROTOCOL for a new group).
        create : bool
            Whether to make the group when there is none.
        kind : str, optional
            `mpath` or `resilient`: kept as it is unless given (`mpath` for a new group). Giving protocol and
            kind spares the look at the group.

        Raises
        ------
        NetlinkError
            With errno ENOENT when there is no such group and `create` is false.
        """
        if protocol is None or kind is None:
            present = self.group(group_id)
            if present is None and not create:
                raise NetlinkError(f"replacing nexthop group {group_id}", errno.ENOENT, "there is no such group")
            protocol = protocol if protocol is not None else present.protocol if present else PROTOCOL
            kind = kind or (present.kind if present else "mpath")
        message = group_message(group_id, members, kind, protocol)
        self._change_nexthop(message, REPLACE | (CREATE if create else 0), f"replacing nexthop group {group_id}")

    def make_nexthop(self, body: bytes, replace: bool = False) -> None:
        """Make a nexthop or a group from its bytes, or replace one; never one in another's place."""
        flags = REPLACE if replace else CREATE | EXCLUSIVE
        (error,) = self.socket.change_bodies([body], _NEW_NEXTHOP, flags, "making a nexthop")
        if error is not None:
            raise error

    def replace_nexthop(self, nexthop: Nexthop) -> None:
        """Make a nexthop, or change the one with its id."""
        self._change_nexthop(nexthop_message(nexthop), REPLACE | CREATE, f"replacing nexthop {nexthop.id}")

    def del_nexthop(self, nexthop_id: int) -> None:
        """Delete a nexthop or a group; routes and groups that use it lose it."""
        message = NexthopMessage()
        message["attrs"] = [("NHA_ID", nexthop_id)]
        self.socket.change(message, _DEL_NEXTHOP, 0, f"deleting nexthop {nexthop_id}")

    def _change_nexthop(self, message: NexthopMessage, flags: int, what: str) -> None:
        self.socket.change(message, _NEW_NEXTHOP, flags, what)

    def _get_nexthop(self, nexthop_id: int, stats: bool, what: str) -> Any:
        message = NexthopMessage()
        message["attrs"] = [("NHA_ID", nexthop_id)]
        if not (stats and self._counts):
            return self.socket.get(message, _GET_NEXTHOP, what)
        message["attrs"].append(("NHA_OP_FLAGS", _COUNT_PACKETS))
        try:
            return self.socket.get(message, _GET_NEXTHOP, what)
        except NetlinkError as refusal:
            if refusal.code != errno.EINVAL:
                raise
            self._counts = False
            return self._get_nexthop(nexthop_id, False, what)

    # ---- routes ----

    def routes(self, family: Family, table: int = MAIN_TABLE, protocol: int = 0) -> list[Route]:
        """The routes of one table, or of all when it is 0; of one protocol only, unless that is 0."""
        try:
            request = routes_request(family, table, protocol)
            found = self.socket.dump_bodies(request, _GET_ROUTE, f"reading routes of table {table}")
        except NetlinkError as refusal:
            if refusal.code == errno.ENOENT:  # a table exists only while it has routes
                return []
            raise
        routes = [route_of(each) for each in found]
        return [route for route in routes if table in (0, route.table)]

    def replace_route(self, route: Route) -> None:
        """Make a route, or change the one to the same destination with the same metric."""
        self.socket.change(route_message(route), _NEW_ROUTE, REPLACE | CREATE, f"replacing route {route.destination}")

    def del_route(self, route: Route) -> None:
        """Delete a route; every field that is given must fit."""
        message = route_message(route)
        message["scope"] = _ANY_SCOPE
        self.socket.change(message, _DEL_ROUTE, 0, f"deleting route {route.destination}")

    def route_get(
        self, address: str, mark: int = 0, matched: bool = False, oif: int = 0, source: str | None = None
    ) -> Route:
        """Ask the kernel which way a packet to an address would go.

        Parameters
        ----------
        mark : int
            The firewall mark of the packet.
        matched : bool
            Answer with the route that matches (and its nexthop_id), not with the hop that was chosen.
        oif : int
            The interface by which the packet must leave; 0 for any.
        source : str, optional
            The address of ours that the packet comes from.

        Raises
        ------
        NetlinkError
            If there is no way there, or the source is none of ours.
        """
        request = lookup_request(address, family_of(address), mark, matched, oif, source)
        return route_of(self.socket.get_body(request, _GET_ROUTE, f"looking up the route to {address}"))

    def make_routes(self, bodies: Sequence[bytes], replace: bool = False) -> list[NetlinkError | None]:
        """Make many routes from their bytes, or replace them; what became of each, None when it is there.

        Neither ever takes another route's place: made is only what is not there, replaced only what is.
        """
        flags = REPLACE if replace else CREATE | EXCLUSIVE
        return self.socket.change_bodies(bodies, _NEW_ROUTE, flags, "making a route")

    def drop_routes(self, routes: Sequence[Route]) -> list[NetlinkError | None]:
        """Delete many routes, as they were read; what became of each."""
        bodies = [remade(route.body) for route in routes]
        return self.socket.change_bodies(bodies, _DEL_ROUTE, 0, "deleting a route")

    # ---- rules ----

    def rules(self, family: Family) -> list[Rule]:
        """All policy rules of a family, in no particular order."""
        request = bytes([socket_family(family)]) + bytes(11)
        return [rule_of(each) for each in self.socket.dump_bodies(request, _GET_RULE, "reading rules")]

    def add_rule(self, rule: Rule) -> None:
        """Add a rule; the same rule twice is refused.

        To the kernel a rule that leaves a selector out is the same as one of its priority that has it.
        """
        self.socket.change(rule_message(rule), _NEW_RULE, CREATE | EXCLUSIVE, f"adding rule {rule.priority}")

    def del_rule(self, rule: Rule) -> None:
        """Delete the first rule that fits."""
        self.socket.change(rule_message(rule), _DEL_RULE, 0, f"deleting rule {rule.priority}")

    def make_rules(self, bodies: Sequence[bytes]) -> list[NetlinkError | None]:
        """Make rules from their bytes; what became of each. One that is there already is refused."""
        return self.socket.change_bodies(bodies, _NEW_RULE, CREATE | EXCLUSIVE, "making a rule")

    def drop_rules(self, bodies: Sequence[bytes]) -> list[NetlinkError | None]:
        """Delete rules, as they were made; what became of each."""
        return self.socket.change_bodies(bodies, _DEL_RULE, 0, "deleting a rule")
