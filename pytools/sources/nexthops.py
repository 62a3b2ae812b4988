"""Nexthop groups that carry routes to peers: their weights, and the packets the kernel counted per member.

Read over netlink once a second, and only while somebody subscribes; which routes lead to which group, and the members'
gateways, every five seconds and when there is another group or member. Counts restart when a group is replaced. Runs in
the agent's thread; times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from pytools.ipc.bus import Bus
from pytools.kernel.netlink.nexthops import Nexthop
from pytools.kernel.netlink.nexthops import NexthopGroup as KernelGroup
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netlink.socket import NetlinkError
from pytools.signals import GroupMember, NexthopGroup, header
from pytools.sources.source import Source

_INTERVAL_NS = 1_000_000_000
_ROUTES_NS = 5_000_000_000


class NexthopSource(Source):
    """Publishes a `NexthopGroup` per group and second.

    Parameters
    ----------
    addresses : sequence of str
        The peers' addresses; groups are found by the routes to them.
    """

    def __init__(self, host: str, addresses: Sequence[str], netlink: Netlink, bus: Bus) -> None:
        self._host, self._addresses = host, addresses
        self._netlink, self._bus = netlink, bus
        self._failed_reads = 0
        self._routes_due_ns = 0
        self._members: set[tuple[int, int]] = set()  # group and nexthop, as of the latest look at the routes
        self._destinations: dict[int, list[str]] = {}  # by group
        self._hops: dict[int, Nexthop] = {}
        self._names: dict[int, str] = {}  # of interfaces

    def tick(self, now_ns: int) -> int:
        """Publish when somebody listens; returns when to be called next."""
        if self._bus.wanted("nexthop_group"):
            try:
                self._publish(now_ns)
            except NetlinkError:  # an object changed between two reads; the next second asks again
                self._failed_reads += 1
        return now_ns + _INTERVAL_NS

    def drops(self) -> dict[str, int]:
        """Reads that failed because the kernel's objects changed meanwhile."""
        return {"nexthop_reads_failed": self._failed_reads}

    def _publish(self, now_ns: int) -> None:
        groups = self._netlink.groups(stats=True)
        present = {(group.id, member.nexthop_id) for group in groups for member in group.members}
        if now_ns >= self._routes_due_ns or present != self._members:
            self._destinations = self._look_up()
            self._hops = {hop.id: hop for hop in self._netlink.nexthops()} if self._destinations else {}
            self._names = dict(socket.if_nameindex())
            self._members, self._routes_due_ns = present, now_ns + _ROUTES_NS
        hops = self._hops
        for group in groups:
            if group.id not in self._destinations:
                continue
            members = [
                GroupMember(
                    nexthop_id=member.nexthop_id,
                    gateway=hops[member.nexthop_id].gateway or "",
                    interface=self._names.get(hops[member.nexthop_id].ifindex or 0, ""),
                    weight=member.weight,
                    packets=member.packets,
                )
                for member in group.members
                if member.nexthop_id in hops
            ]
            self._bus.publish(self._signal(group, self._destinations[group.id], members, now_ns))

    def _signal(
        self, group: KernelGroup, destinations: list[str], members: list[GroupMember], now_ns: int
    ) -> NexthopGroup:
        return NexthopGroup(
            **header(self._host, now_ns),
            group_id=group.id,
            destinations=destinations,
            members=members,
        )

    def _look_up(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for address in self._addresses:
            try:
                route = self._netlink.route_get(address, matched=True)
            except NetlinkError:
                continue  # no way there now; the paths to it say so
            if route.nexthop_id is not None and route.destination not in found.setdefault(route.nexthop_id, []):
                found[route.nexthop_id].append(route.destination)
        return found
