"""A made-up kernel: links, nexthop objects, groups and routes as rtnetlink has them, with what it does by itself.

Stands in for `Netlink` and `NetlinkWatch`. What the real one does was measured (tests/kernel): with its carrier a
nexthop is deleted, leaves its groups, a group goes with its last nexthop and takes its routes along, and only the link
is told of. Every change counts as a step; `before_step` may raise, which is how a test lets a process die anywhere.
"""

from __future__ import annotations

import copy
import errno
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from pytools.kernel.netlink import MAIN_TABLE, Link, Member, NetlinkError, Nexthop, NexthopGroup, Route
from pytools.kernel.netlink_attributes import attributes
from pytools.kernel.netlink_messages import group_body, nexthop_body
from pytools.kernel.netlink_routes import by_nexthop, hop_of, route_of, routes_request, with_hops
from pytools.kernel.netlink_watch import Heard
from steering.plan import Weights, weights_of

STATIC = 4
OURS, OTHERS = 1, 2  # ports
_ID, _GROUP, _OIF, _GATEWAY = 1, 2, 5, 6


def _nothing() -> None:
    pass


class ModelKernel:
    """Rails with one nexthop each (10 + rail), one group of them, one route by it.

    Parameters
    ----------
    rails : iterable of int
        Rail r is the interface `rail<r>`, number 100 + r, with the gateway 10.r.1.1.
    group_id, destination : int, str
        The group, and the prefix of its route.
    """

    def __init__(self, rails: Iterable[int], group_id: int, destination: str) -> None:
        self.carrier = dict.fromkeys(rails, True)
        self.nexthop_objects: dict[int, Nexthop] = {}
        self.group_objects: dict[int, NexthopGroup] = {}
        self.route_objects: dict[tuple[str, int], Route] = {}  # by prefix and metric
        self.refuses = False  # to give a group other weights
        self.before_step: Callable[[], None] = _nothing
        self.watches: list[ModelWatch] = []
        for rail in self.carrier:
            body = nexthop_body(10 + rail, 4, f"10.{rail}.1.1", 100 + rail, False, STATIC)
            self._put_nexthop(body)
        self._put_group(group_body(group_id, [Member(10 + rail, 1) for rail in self.carrier], STATIC))
        plain = with_hops(routes_request(4, MAIN_TABLE), [hop_of("10.1.1.1", 101, 4)])
        head = bytearray(by_nexthop(plain, group_id, 0, STATIC))
        head[1], head[7] = 32, 1  # prefix length, RTN_UNICAST
        address = bytes(int(part) for part in destination.partition("/")[0].split("."))
        body = bytes(head) + struct.pack("=HH", 8, 1) + address
        self._put_route(route_of(body))

    def copy(self) -> ModelKernel:
        """Another one in the same state, to try something on."""
        watches, step = self.watches, self.before_step
        self.watches, self.before_step = [], _nothing
        found = copy.deepcopy(self)
        self.watches, self.before_step = watches, step
        return found

    # ---- what a test looks at ----

    def weights(self, group_id: int) -> Weights | None:
        """A group's weights; None when there is none."""
        group = self.group_objects.get(group_id)
        return None if group is None else weights_of(group.weights)

    def reaches(self, destination: str) -> list[int]:
        """The nexthops that the best route to a prefix leads to; empty when there is no route."""
        routes = [route for (prefix, _), route in self.route_objects.items() if prefix == destination]
        if not routes:
            return []
        best = min(routes, key=lambda route: route.metric)
        return [member.nexthop_id for member in self.group_objects[best.nexthop_id or 0].members]

    def check(self) -> None:
        """What holds of every kernel: no group is empty or has a member that is not there, no route leads nowhere."""
        for group in self.group_objects.values():
            assert group.members, f"group {group.id} is empty"
            assert all(member.nexthop_id in self.nexthop_objects for member in group.members)
        assert all(route.nexthop_id in self.group_objects for route in self.route_objects.values())

    # ---- what happens to it ----

    def set_carrier(self, rail: int, there: bool) -> None:
        """A cable is pulled, or plugged in."""
        if self.carrier[rail] == there:
            return
        self.carrier[rail] = there
        if not there:
            for number in [n for n, nexthop in self.nexthop_objects.items() if nexthop.ifindex == 100 + rail]:
                self._forget_nexthop(number)
        self._tell(OTHERS, Heard(changed=True))

    def reweight(self, group_id: int, weights: Weights, port: int = OTHERS) -> None:
        """Somebody gives a group other members or weights."""
        group = self.group_objects[group_id]
        entries = tuple(Member(nexthop, weight) for nexthop, weight in weights)
        assert entries, "an empty group was asked for"
        self.group_objects[group_id] = replace(
            group, members=entries, body=group_body(group_id, entries, group.protocol)
        )
        self._tell(port, Heard(changed=True, made=frozenset([group_id])))

    def delete(self, number: int, port: int = OTHERS) -> None:
        """Somebody deletes a nexthop, which is told, or a group."""
        gone = {number}
        if number in self.nexthop_objects:
            gone |= self._forget_nexthop(number)
        else:
            self._forget_group(number)
        self._tell(port, Heard(changed=True, nexthops=frozenset(gone)))

    def _forget_nexthop(self, number: int) -> set[int]:
        del self.nexthop_objects[number]
        gone = set()
        for group in list(self.group_objects.values()):
            left = tuple(member for member in group.members if member.nexthop_id != number)
            if not left:
                self._forget_group(group.id)
                gone.add(group.id)
            elif left != group.members:
                self.group_objects[group.id] = replace(
                    group, members=left, body=group_body(group.id, left, group.protocol)
                )
        return gone

    def _forget_group(self, number: int) -> None:
        del self.group_objects[number]
        self.route_objects = {key: r for key, r in self.route_objects.items() if r.nexthop_id != number}

    def _tell(self, port: int, news: Heard) -> None:
        for watch in self.watches:
            watch.tell(port, news)

    def _put_nexthop(self, body: bytes) -> int:
        found = dict(attributes(body, 8))
        number, index = (int.from_bytes(found[name], "little") for name in (_ID, _OIF))
        gateway = ".".join(map(str, found[_GATEWAY]))
        if not self.carrier[index - 100]:
            raise NetlinkError("making a nexthop", errno.ENETDOWN, "the link is down")
        self.nexthop_objects[number] = Nexthop(number, 4, gateway, index, body[2], body=body)
        return number

    def _put_group(self, body: bytes) -> int:
        found = dict(attributes(body, 8))
        number = int.from_bytes(found[_ID], "little")
        entries = tuple(Member(n, low + 1) for n, low, _, _ in struct.iter_unpack("=IBBH", found[_GROUP]))
        if not entries or any(member.nexthop_id not in self.nexthop_objects for member in entries):
            raise NetlinkError("making a group", errno.EINVAL, "there is no such nexthop")
        self.group_objects[number] = NexthopGroup(number, entries, "mpath", body[2], body=body)
        return number

    def _put_route(self, route: Route) -> None:
        if route.nexthop_id not in self.group_objects:
            raise NetlinkError("making a route", errno.EINVAL, "there is no such group")
        self.route_objects[route.destination, route.metric] = route


class ModelNetlink:
    """One process's socket on it; `port` says whose."""

    def __init__(self, kernel: ModelKernel, port: int = OURS) -> None:
        self._kernel = kernel
        self.socket = SimpleNamespace(port=port)
        self.route_requests = 0

    def links(self) -> list[Link]:
        return [
            Link(100 + rail, f"rail{rail}", True, there, there, 1, "veth", 1500, "")
            for rail, there in self._kernel.carrier.items()
        ]

    def nexthops(self) -> list[Nexthop]:
        return list(self._kernel.nexthop_objects.values())

    def groups(self, stats: bool = False) -> list[NexthopGroup]:
        return list(self._kernel.group_objects.values())

    def group(self, group_id: int, stats: bool = False) -> NexthopGroup | None:
        return self._kernel.group_objects.get(group_id)

    def routes(self, family: int, table: int = MAIN_TABLE, protocol: int = 0) -> list[Route]:
        if family != 4:
            return []
        return [route for route in self._kernel.route_objects.values() if protocol in (0, route.protocol)]

    def replace_group(self, group_id: int, members: Sequence[Member], **_: Any) -> None:
        self._kernel.before_step()
        if self._kernel.refuses:
            raise NetlinkError("replacing a group", errno.EBUSY, "not now")
        if group_id not in self._kernel.group_objects:
            raise NetlinkError("replacing a group", errno.ENOENT, "there is no such group")
        if any(member.nexthop_id not in self._kernel.nexthop_objects for member in members):
            raise NetlinkError("replacing a group", errno.EINVAL, "there is no such nexthop")
        self._kernel.reweight(group_id, weights_of((m.nexthop_id, m.weight) for m in members), self.socket.port)
        self._kernel.before_step()

    def make_nexthop(self, body: bytes, replace: bool = False) -> None:
        self._kernel.before_step()
        found = dict(attributes(body, 8))
        number = int.from_bytes(found[_ID], "little")
        there = number in self._kernel.nexthop_objects or number in self._kernel.group_objects
        if there != replace:
            raise NetlinkError("making a nexthop", errno.ENOENT if replace else errno.EEXIST, "in the way, or missing")
        made = self._kernel._put_group(body) if _GROUP in found else self._kernel._put_nexthop(body)
        self._kernel._tell(self.socket.port, Heard(changed=True, made=frozenset([made])))

    def del_nexthop(self, nexthop_id: int) -> None:
        self._kernel.before_step()
        if nexthop_id not in self._kernel.nexthop_objects and nexthop_id not in self._kernel.group_objects:
            raise NetlinkError("deleting a nexthop", errno.ENOENT, "there is no such nexthop")
        self._kernel.delete(nexthop_id, self.socket.port)

    def make_routes(self, bodies: Sequence[bytes], replace: bool = False) -> list[NetlinkError | None]:
        self.route_requests += 1
        return [self._made(route_of(body)) for body in bodies]

    def _made(self, route: Route) -> NetlinkError | None:
        self._kernel.before_step()
        if (route.destination, route.metric) in self._kernel.route_objects:
            return NetlinkError("making a route", errno.EEXIST, "File exists")
        try:
            self._kernel._put_route(route)
        except NetlinkError as refusal:
            return refusal
        made = frozenset([(route.table, route.destination, route.metric)])
        self._kernel._tell(self.socket.port, Heard(changed=True, made=made, route_news=True))
        return None

    def drop_routes(self, routes: Sequence[Route]) -> list[NetlinkError | None]:
        self.route_requests += 1
        for route in routes:
            self._kernel.before_step()
            self._kernel.route_objects.pop((route.destination, route.metric), None)
        return [None for _ in routes]


class ModelWatch:
    """What others change, as a `NetlinkWatch` tells it."""

    def __init__(self, kernel: ModelKernel, ours: Iterable[int] = ()) -> None:
        self._kernel, self._ours = kernel, frozenset(ours)
        self._news = Heard()
        kernel.watches.append(self)

    def tell(self, port: int, news: Heard) -> None:
        if port not in self._ours:
            self._news = self._news.then(news)

    def fileno(self) -> int:
        return -1

    def read(self) -> Heard:
        news, self._news = self._news, Heard()
        return news

    def close(self) -> None:
        if self in self._kernel.watches:
            self._kernel.watches.remove(self)
