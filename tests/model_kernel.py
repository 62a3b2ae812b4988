"""A made-up kernel: links, nexthops, groups, routes and rules of both families, with what rtnetlink does by itself.

It takes the bytes that the product sends, below `Netlink`. What the real kernel does was measured (tests/kernel): with
its carrier a nexthop is deleted and leaves its groups, a group goes with its last member and takes its routes along;
with its device every route over it goes; and only the link is announced. Each request of a process of ours is a step:
`before_step` may raise, which is how a test lets a process die anywhere. What it must not write is noted.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pytools.kernel.leftovers import FIRST_ID, LAST_ID, is_our_rule, is_our_table
from pytools.kernel.netlink.monitor import News
from pytools.kernel.netlink.nexthops import group_body, nexthop_body
from pytools.kernel.netlink.routes import Hop, hop_of, hops_of, route_of
from pytools.kernel.netlink.routing import PROTOCOL, UNICAST, Link, Netlink, NetlinkError, Nexthop
from pytools.kernel.netlink.socket import attribute, attributes
from pytools.kernel.netlink.tables import rule_of

THROW, BLACKHOLE = 9, 6
_NEW_ROUTE, _DEL_ROUTE, _NEW_RULE, _DEL_RULE, _NEW_NEXTHOP, _DEL_NEXTHOP = 24, 25, 32, 33, 104, 105
KINDS = {_NEW_ROUTE: "route", _DEL_ROUTE: "route", _NEW_RULE: "rule", _DEL_RULE: "rule"}
_REPLACE = 0x100

_route, _rule, _network = (functools.cache(each) for each in (route_of, rule_of, ipaddress.ip_network))

RouteKey = tuple[int, int, str, int]  # family, table, prefix, metric


@dataclass(frozen=True)
class Answer:
    """What a look-up finds: where packets leave, by gateway and interface with weights."""

    prefix: str
    table: int
    kind: int
    hops: tuple[tuple[str, str, int], ...] = ()


def route_body(
    prefix: str, table: int, protocol: int, over: int | Sequence[Hop] = (), metric: int = 0, kind: int = UNICAST
) -> bytes:
    """A route as the kernel describes it."""
    network = ipaddress.ip_network(prefix)
    family = socket.AF_INET6 if network.version == 6 else socket.AF_INET
    body = struct.pack("=BBBBBBBBI", family, network.prefixlen, 0, 0, 0, protocol, 0, kind, 0)
    if network.prefixlen:
        body += attribute(1, network.network_address.packed)
    body += attribute(15, struct.pack("=I", table))
    if metric:
        body += attribute(6, struct.pack("=I", metric))
    if isinstance(over, int):
        return body + attribute(30, struct.pack("=I", over))
    return body + (attribute(9, b"".join(hop.body for hop in over)) if over else b"")


def rule_body(family: int, priority: int, table: int, source: str = "", protocol: int = 2) -> bytes:
    """A rule as the kernel describes it."""
    af, length = (socket.AF_INET6 if family == 6 else socket.AF_INET), 0
    body = attribute(6, struct.pack("=I", priority)) + attribute(15, struct.pack("=I", table))
    body += attribute(21, bytes([protocol]))
    if source:
        length = ipaddress.ip_network(source).prefixlen
        body += attribute(2, ipaddress.ip_network(source).network_address.packed)
    return struct.pack("=BBBBBBBBI", af, 0, length, 0, 0, 0, 0, 1, 0) + body


class ModelKernel:
    """Rails, `rail<r>` with index 100 + r at first, and the rules that every namespace has."""

    def __init__(self, rails: Sequence[int]) -> None:
        self.links = {100 + rail: f"rail{rail}" for rail in rails}
        self.carrier = {f"rail{rail}": True for rail in rails}
        self.nexthops: dict[int, bytes] = {}
        self.groups: dict[int, tuple[int, dict[int, int]]] = {}  # protocol, and weights by member
        self.routes: dict[RouteKey, bytes] = {}
        self.rules = [
            rule_body(f, number, table) for f in (4, 6) for number, table in ((0, 255), (32766, 254), (32767, 253))
        ]
        self.failing: Counter[str] = Counter()  # how many of the next requests of each kind fail
        self.violations: list[str] = []
        self.requests = 0  # changes that processes of ours asked for
        self.before_step: Callable[[], None] = lambda: None
        self.watches: list[ModelWatch] = []
        self._next_index = 200

    # ---- what a test looks at ----

    def index(self, name: str) -> int:
        """The index of an interface; 0 while there is none."""
        return next((number for number, each in self.links.items() if each == name), 0)

    def ours(self) -> list[str]:
        """Everything of ours."""
        found = [f"rule {rule_of(body)}" for body in self.rules if is_our_rule(rule_of(body))]
        found += [f"route {key}" for key, body in self.routes.items() if self.is_ours(key[1], body[5])]
        found += [f"nexthop {number}" for number, body in self.nexthops.items() if self._our_id(number, body[2])]
        return found + [f"group {number}" for number, (owner, _) in self.groups.items() if self._our_id(number, owner)]

    @staticmethod
    def is_ours(table: int, protocol: int) -> bool:
        return is_our_table(table) and protocol == PROTOCOL

    @staticmethod
    def _our_id(number: int, protocol: int) -> bool:
        return FIRST_ID <= number <= LAST_ID and protocol == PROTOCOL

    def hops(self, body: bytes) -> tuple[tuple[str, str, int], ...]:
        """Where a route leads: gateway, interface and weight of each hop."""
        route = _route(body)
        if route.nexthop_id is None:
            return tuple((hop.gateway or "", self.links[hop.ifindex], hop.weight) for hop in hops_of(route))
        _, members = self.groups.get(route.nexthop_id, (0, {route.nexthop_id: 1}))
        found = []
        for number, weight in members.items():
            nexthop = self.nexthop_of(self.nexthops[number])
            found.append((nexthop.gateway or "", self.links[nexthop.ifindex or 0], weight))
        return tuple(found)

    def look_up(self, address: str, source: str = "", ours: bool = True) -> Answer | None:
        """What becomes of a packet, with our rules or as if there were none."""
        where, origin = ipaddress.ip_address(address), ipaddress.ip_address(source) if source else None
        for rule in sorted(map(_rule, self.rules), key=lambda rule: rule.priority):
            if rule.family != where.version or rule.iif or (not ours and is_our_rule(rule)):
                continue
            if rule.source and (origin is None or origin not in _network(rule.source)):
                continue
            fitting = [
                (-_network(prefix).prefixlen, metric, body)
                for (family, table, prefix, metric), body in self.routes.items()
                if family == where.version and table == rule.table and where in _network(prefix)
            ]
            if not fitting:
                continue
            route = _route(min(fitting)[2])
            if route.kind != THROW:
                hops = self.hops(route.body) if route.kind == UNICAST else ()
                return Answer(route.destination, route.table, route.kind, hops)
        return None

    # ---- what others do ----

    def put(self, body: bytes) -> None:
        """Somebody makes a route, or replaces one."""
        route = route_of(body)
        self.routes[route.family, route.table, route.destination, route.metric] = body
        self.tell(News(True, True))

    def withdraw(self, family: int, table: int, prefix: str) -> None:
        """Somebody deletes all routes to a prefix."""
        self.routes = {key: body for key, body in self.routes.items() if key[:3] != (family, table, prefix)}
        self.tell(News(True, True))

    def put_nexthop(self, number: int, family: int, gateway: str, name: str, protocol: int) -> None:
        """Somebody makes a nexthop."""
        self.nexthops[number] = nexthop_body(number, family, gateway, self.index(name), False, protocol)
        self.tell(News(True))

    def put_group(self, number: int, members: dict[int, int], protocol: int) -> None:
        """Somebody makes a group, or gives one other members; whose it is stays so."""
        self.groups[number] = (self.groups.get(number, (protocol,))[0], dict(members))
        self.tell(News(True))

    def delete(self, number: int) -> None:
        """Somebody deletes a nexthop or a group."""
        self._forget(number)
        self.tell(News(True, True))

    def set_carrier(self, name: str, there: bool) -> None:
        """A cable is pulled or plugged in."""
        if self.carrier[name] == there:
            return
        self.carrier[name] = there
        if not there:
            self._forget_nexthops(self.index(name))
        self.tell(News(True))

    def remove(self, name: str) -> None:
        """A device goes, with all routes over it; another one of its name comes."""
        number = self.index(name)
        self._forget_nexthops(number)
        self.routes = {
            key: body
            for key, body in self.routes.items()
            if not any(hop.ifindex == number for hop in hops_of(route_of(body)))
        }
        del self.links[number]
        self._next_index += 1
        self.links[self._next_index] = name
        self.tell(News(True))

    def tell(self, news: News, port: int = 0) -> None:
        """Announce it to everybody but whoever did it."""
        for watch in self.watches:
            if watch.port != port:
                watch.news = News(True, watch.news.routes or news.routes)

    def _forget_nexthops(self, index: int) -> None:
        for number in [n for n, body in self.nexthops.items() if self.nexthop_of(body).ifindex == index]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if self.nexthops.pop(number, None) is not None:
            for group, (_, members) in list(self.groups.items()):
                members.pop(number, None)
                if not members:
                    self._forget(group)
        else:
            del self.groups[number]
        self.routes = {key: body for key, body in self.routes.items() if route_of(body).nexthop_id != number}

    @staticmethod
    def nexthop_of(body: bytes) -> Nexthop:
        found = dict(attributes(body, 8))
        family = 6 if body[0] == socket.AF_INET6 else 4
        number, index = (struct.unpack("=I", found[name])[0] for name in (1, 5))
        gateway = str(ipaddress.ip_address(found[6])) if 6 in found else None
        return Nexthop(number, family, gateway, index, body[2], 0, False, body)

    # ---- what processes of ours ask for ----

    def request(self, kind: int, flags: int, body: bytes, port: int) -> NetlinkError | None:
        """Carry out one request; why not."""
        self.before_step()
        name = KINDS.get(kind) or ("group" if 2 in dict(attributes(body, 8)) else "nexthop")
        error: NetlinkError | None = None
        if self.failing[name]:
            self.failing[name] -= 1
            error = NetlinkError(f"changing a {name}", errno.ENOBUFS, "")
        else:
            self.requests += 1
            code = {
                _NEW_ROUTE: self._new_route,
                _DEL_ROUTE: self._del_route,
                _NEW_RULE: self._new_rule,
                _DEL_RULE: self._del_rule,
                _NEW_NEXTHOP: self._new_nexthop,
                _DEL_NEXTHOP: self._del_nexthop,
            }[kind](body, bool(flags & _REPLACE))
            error = NetlinkError(f"changing a {name}", code, "") if code else None
            if not code:
                self.tell(News(True, kind in (_NEW_ROUTE, _DEL_ROUTE)), port)
        self.before_step()
        return error

    def _may(self, allowed: bool, what: object) -> None:
        if not allowed:
            self.violations.append(f"wrote {what}")

    def _new_route(self, body: bytes, replace: bool) -> int:
        route = route_of(body)
        key = (route.family, route.table, route.destination, route.metric)
        self._may(self.is_ours(route.table, route.protocol), key)
        if (key in self.routes) != replace:
            return errno.ENOENT if replace else errno.EEXIST
        if replace:
            self._may(self.is_ours(route.table, self.routes[key][5]), f"somebody's route {key}")
        if route.nexthop_id is not None and not {route.nexthop_id} & (self.nexthops.keys() | self.groups.keys()):
            return errno.EINVAL
        if any(hop.ifindex not in self.links for hop in hops_of(route)):
            return errno.ENODEV
        self.routes[key] = body
        return 0

    def _del_route(self, body: bytes, _: bool) -> int:
        route = route_of(body)
        key = (route.family, route.table, route.destination, route.metric)
        there = self.routes.get(key)
        if there is None or there[5] != route.protocol:
            return errno.ESRCH
        self._may(self.is_ours(route.table, there[5]), f"somebody's route {key}")
        del self.routes[key]
        return 0

    def _new_rule(self, body: bytes, _: bool) -> int:
        self._may(is_our_rule(rule_of(body)), rule_of(body))
        if rule_of(body) in map(rule_of, self.rules):
            return errno.EEXIST
        self.rules.append(body)
        return 0

    def _del_rule(self, body: bytes, _: bool) -> int:
        there = next((each for each in self.rules if rule_of(each) == rule_of(body)), None)
        if there is None:
            return errno.ENOENT
        self._may(is_our_rule(rule_of(there)), f"somebody's rule {rule_of(there)}")
        self.rules.remove(there)
        return 0

    def _new_nexthop(self, body: bytes, replace: bool) -> int:
        found = dict(attributes(body, 8))
        number = struct.unpack("=I", found[1])[0]
        there = self.nexthops[number][2] if number in self.nexthops else self.groups.get(number, (None,))[0]
        self._may(self._our_id(number, body[2]), f"nexthop {number}")
        if (there is not None) != replace:
            return errno.ENOENT if replace else errno.EEXIST
        if there is not None:
            self._may(self._our_id(number, there), f"somebody's nexthop {number}")
        if 2 in found:
            return self._new_group(number, body[2], found[2])
        index = self.nexthop_of(body).ifindex
        if number in self.groups or index not in self.links:
            return errno.EINVAL
        if not self.carrier[self.links[index]]:
            return errno.ENETDOWN
        self.nexthops[number] = body
        return 0

    def _new_group(self, number: int, protocol: int, entries: bytes) -> int:
        members = {n: low + 1 for n, low, _, _ in struct.iter_unpack("=IBBH", entries)}
        if number in self.nexthops or not members or members.keys() - self.nexthops.keys():
            return errno.EINVAL
        self.groups[number] = (protocol, members)
        return 0

    def _del_nexthop(self, body: bytes, _: bool) -> int:
        number = struct.unpack("=I", dict(attributes(body, 8))[1])[0]
        there = self.nexthops[number][2] if number in self.nexthops else self.groups.get(number, (None,))[0]
        if there is None:
            return errno.ENOENT
        self._may(self._our_id(number, there), f"somebody's nexthop {number}")
        self._forget(number)
        return 0

    def dump(self, kind: int, request: bytes) -> Iterator[bytes]:
        """The answers to a request for many objects."""
        if self.failing["dump"]:
            self.failing["dump"] -= 1
            raise NetlinkError("reading", errno.ENOBUFS, "")
        if kind == 38:
            return  # no queue discipline
        if kind == 34:
            yield from (body for body in self.rules if body[0] == request[0])
        elif kind == 106:
            for number, (owner, members) in self.groups.items():
                yield group_body(number, [Weighed(*pair) for pair in members.items()], owner)
        else:
            family, protocol = (6 if request[0] == socket.AF_INET6 else 4), request[5]
            wanted = struct.unpack("=I", dict(attributes(request, 12))[15])[0]
            tables = [key for key in self.routes if key[0] == family and wanted in (0, key[1])]
            if not tables and wanted:
                raise NetlinkError("reading routes", errno.ENOENT, "FIB table does not exist")
            for key in tables:
                if protocol in (0, self.routes[key][5]):
                    yield self.routes[key]


@dataclass(frozen=True)
class Weighed:
    """A member of a group."""

    nexthop_id: int
    weight: int


class ModelSocket:
    """A process's socket; it does nothing more once the process is dead."""

    ports = 0

    def __init__(self, kernel: ModelKernel) -> None:
        ModelSocket.ports += 1
        self.port, self.dead, self._kernel = ModelSocket.ports, False, kernel

    def change_bodies(self, bodies: Sequence[bytes], kind: int, flags: int, what: str) -> list[NetlinkError | None]:
        return [self._request(kind, flags, body) for body in bodies]

    def change(self, message: Any, kind: int, flags: int, what: str) -> None:
        message.encode()
        error = self._request(kind, flags, bytes(message.data)[16:])
        if error is not None:
            raise error

    def dump_bodies(self, body: bytes, kind: int, what: str) -> list[bytes]:
        if self.dead:
            raise NetlinkError(what, errno.EBADF, "the process is dead")
        return list(self._kernel.dump(kind, body))

    def close(self) -> None:
        self.dead = True

    def _request(self, kind: int, flags: int, body: bytes) -> NetlinkError | None:
        if self.dead:
            return NetlinkError("changing", errno.EBADF, "the process is dead")
        try:
            return self._kernel.request(kind, flags, body, self.port)
        except BaseException:
            self.dead = True
            raise


class ModelNetlink(Netlink):
    """The product's `Netlink` on a socket of the model."""

    def __init__(self, kernel: ModelKernel) -> None:
        self.socket: Any = ModelSocket(kernel)
        self._counts, self._kernel = False, kernel

    def links(self) -> list[Link]:
        return [
            Link(number, name, True, there, there, 1, "veth", 1500, "")
            for number, name in self._kernel.links.items()
            for there in [self._kernel.carrier[name]]
        ]

    def nexthops(self) -> list[Nexthop]:
        return [self._kernel.nexthop_of(body) for body in self._kernel.nexthops.values()]


class ModelWatch:
    """What others change, as a `NetlinkWatch` tells it."""

    def __init__(self, kernel: ModelKernel, ours: Sequence[int]) -> None:
        self._kernel, self.port, self.news = kernel, ours[0], News()
        kernel.watches.append(self)

    def fileno(self) -> int:
        return -1

    def read(self) -> News:
        news, self.news = self.news, News()
        return news

    def close(self) -> None:
        if self in self._kernel.watches:
            self._kernel.watches.remove(self)


def hop(rail: int, family: int, kernel: ModelKernel, weight: int = 1) -> Hop:
    """The hop over a rail."""
    return hop_of(gateway(rail, family), kernel.index(f"rail{rail}"), family, weight)


def gateway(rail: int, family: int) -> str:
    """The gateway on a rail."""
    return f"10.{rail}.1.1" if family == 4 else f"fd00:{rail}::1"
