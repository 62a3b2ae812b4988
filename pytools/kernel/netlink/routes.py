"""Routes: kernel bytes to frozen records and back, and the same route again with a few fields changed.

Reading is plain `struct`: a table of 10,000 routes is read while somebody waits. A route keeps the bytes it came in, so
that it can be given back with every attribute it had, known here or not. Pure: no socket.
"""

from __future__ import annotations

import functools
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyroute2.netlink import nlmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg_base

from pytools.kernel.netlink.nexthops import UNICAST, Family, ip_family, socket_family
from pytools.kernel.netlink.socket import attribute, attributes

_HEADER = struct.Struct("=BBBBBBBBI")  # struct rtmsg: family, lengths, tos, table, protocol, scope, type, flags
_HOP = struct.Struct("=HBBI")  # struct rtnexthop: length, flags, weight - 1, ifindex
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF
_NUMBER = struct.Struct("=I")
_DST, _SRC, _OIF, _GATEWAY, _PRIORITY, _PREFSRC, _METRICS = 1, 2, 4, 5, 6, 7, 8
_MULTIPATH, _FLOW, _TABLE, _VIA, _PREF, _ENCAP_TYPE, _ENCAP, _TTL, _NH_ID = 9, 11, 15, 18, 20, 21, 22, 26, 30
_MARK = 16
_LOCK: Final = 1  # RTAX_LOCK: a bit for each metric; TCP obeys a minimum RTO only with its bit set
_RTO_MIN: Final = 13  # RTAX_RTO_MIN: milliseconds
_CACHEINFO: Final = 12
_EXPIRES: Final = struct.Struct("=8xi")  # struct rta_cacheinfo: hundredths of a second from now; 0: never
_PREFERENCES: Final = {0: 0, 1: 1, 3: -1}  # ICMPV6_ROUTER_PREF_*: medium, high, low
_THROW: Final = 9  # RTN_THROW
_KEPT: Final = frozenset({_DST, _SRC, _PRIORITY, _PREFSRC, _METRICS, _TABLE, _PREF, _TTL})  # what is no hop's
_OF_A_HOP: Final = frozenset({_GATEWAY, _VIA, _FLOW, _ENCAP_TYPE, _ENCAP})
_LOOKUP_TABLE = 0x1000  # RTM_F_LOOKUP_TABLE: name the table that answered; IPv6 always does, and refuses the flag
_FIB_MATCH = 0x2000  # RTM_F_FIB_MATCH: answer with the route, not with what came of it
_ONLINK = 4  # RTNH_F_ONLINK: the only flag that is the user's


class RouteMessage(rtmsg_base, nlmsg):  # type: ignore[misc]
    """pyroute2's route message plus the attributes it does not know.

    Derived from the base class: a subclass of `rtmsg` inherits the attribute table that `rtmsg` compiled.
    """

    nla_map = (
        *rtmsg_base.nla_map,
        ("RTA_PAD", "hex"),
        ("RTA_UID", "uint32"),
        ("RTA_TTL_PROPAGATE", "uint8"),
        ("RTA_IP_PROTO", "uint8"),
        ("RTA_SPORT", "hex"),
        ("RTA_DPORT", "hex"),
        ("RTA_NH_ID", "uint32"),
    )


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of a route that lists its hops itself."""

    gateway: str | None
    ifindex: int
    weight: int
    body: bytes = field(default=b"", compare=False, repr=False)  # as the kernel wrote it

    @property
    def onlink(self) -> bool:
        """Whether the gateway is taken to be on the link without a route that says so."""
        return bool(self.body) and bool(self.body[2] & _ONLINK)

    @property
    def encapsulates(self) -> bool:
        """Whether packets get another header on it."""
        return any(name == _ENCAP for name, _ in attributes(self.body, _HOP.size))


@dataclass(frozen=True, slots=True)
class Route:
    """One route, or the kernel's answer to a look-up."""

    destination: str  # prefix
    family: Family
    table: int
    nexthop_id: int | None = None
    gateway: str | None = None
    ifindex: int | None = None
    hops: tuple[Hop, ...] = ()  # empty unless the route has several hops
    metric: int = 0
    protocol: int = 0
    prefsrc: str | None = None
    kind: int = UNICAST  # rtm_type
    special: bool = field(default=False, compare=False)  # for some packets only: by type of service or by source
    preference: int = field(default=0, compare=False)  # of a router, among routes of one metric; the highest decides
    expires_s: float | None = field(default=None, compare=False)  # from the reading on; None: never
    body: bytes = field(default=b"", compare=False, repr=False)  # as the kernel wrote it


def route_message(route: Route) -> RouteMessage:
    prefix = ipaddress.ip_network(route.destination)
    message = RouteMessage()
    message["family"] = socket_family(prefix.version)
    message["dst_len"] = prefix.prefixlen
    message["table"] = min(route.table, 252) if route.table > 255 else route.table
    message["proto"] = route.protocol
    message["type"] = route.kind
    on_link = route.gateway is None and route.nexthop_id is None and route.kind == UNICAST
    message["scope"] = 253 if on_link and not route.hops and prefix.version == 4 else 0  # RT_SCOPE_LINK
    attributes: list[tuple[str, Any]] = [("RTA_TABLE", route.table)]
    if prefix.prefixlen:
        attributes.append(("RTA_DST", str(prefix.network_address)))
    direct = route.nexthop_id is None  # with an id, the kernel refuses to be told the hops as well
    for name, value in (
        ("RTA_NH_ID", route.nexthop_id),
        ("RTA_GATEWAY", route.gateway if direct else None),
        ("RTA_OIF", route.ifindex if direct else None),
        ("RTA_PRIORITY", route.metric or None),
        ("RTA_PREFSRC", route.prefsrc),
    ):
        if value is not None:
            attributes.append((name, value))
    if route.hops and direct:
        attributes.append(("RTA_MULTIPATH", [_hop_value(hop) for hop in route.hops]))
    message["attrs"] = attributes
    return message


def _hop_value(hop: Hop) -> dict[str, Any]:
    attributes = [] if hop.gateway is None else [("RTA_GATEWAY", hop.gateway)]
    return {"flags": 0, "hops": hop.weight - 1, "oif": hop.ifindex, "attrs": attributes}


def routes_request(family: Family, table: int, protocol: int = 0) -> bytes:
    """What asks for the routes of one table, of all or of one protocol."""
    head = _HEADER.pack(socket_family(family), 0, 0, 0, 0, protocol, 0, 0, 0)
    return head + attribute(_TABLE, _NUMBER.pack(table))


def lookup_request(
    address: str, family: Family, mark: int, matched: bool, oif: int = 0, source: str | None = None
) -> bytes:
    """What asks for the way to an address; see `Netlink.route_get`."""
    af = socket_family(family)
    packed, from_packed = socket.inet_pton(af, address), socket.inet_pton(af, source) if source else b""
    flags = (_LOOKUP_TABLE if family == 4 else 0) | (_FIB_MATCH if matched else 0)
    head = _HEADER.pack(af, 8 * len(packed), 8 * len(from_packed), 0, 0, 0, 0, 0, flags)
    chosen = [attribute(name, _NUMBER.pack(value)) for name, value in ((_MARK, mark), (_OIF, oif)) if value]
    if from_packed:
        chosen.append(attribute(_SRC, from_packed))
    return head + attribute(_DST, packed) + b"".join(chosen)


def route_of(body: bytes) -> Route:
    """The route in a message without its netlink header."""
    af, length, source_length, tos, table, protocol, _, kind, _ = _HEADER.unpack_from(body)
    family = ip_family(af)
    found = {}
    offset, end = _HEADER.size, len(body)
    while offset + 4 <= end:  # `attributes`, but for the call of each: this is where a large table is read
        size, name = _ATTRIBUTE.unpack_from(body, offset)
        if size < 4:
            break
        found[name & _TYPE_MASK] = body[offset + 4 : offset + size]
        offset += (size + 3) & ~3
    nowhere = "::" if family == 6 else "0.0.0.0"
    destination = found.get(_DST)
    source = found.get(_PREFSRC)
    ticks = _EXPIRES.unpack_from(found[_CACHEINFO])[0] if _CACHEINFO in found else 0
    return Route(
        f"{nowhere if destination is None else socket.inet_ntop(af, destination)}/{length}",
        family,
        _NUMBER.unpack(found[_TABLE])[0] if _TABLE in found else table,
        _NUMBER.unpack(found[_NH_ID])[0] if _NH_ID in found else None,
        _gateway(found),
        _NUMBER.unpack(found[_OIF])[0] if _OIF in found else None,
        _hops(found[_MULTIPATH]) if _MULTIPATH in found else (),
        _NUMBER.unpack(found[_PRIORITY])[0] if _PRIORITY in found else 0,
        protocol,
        None if source is None else socket.inet_ntop(af, source),
        kind,
        bool(tos or source_length),
        _PREFERENCES.get(found[_PREF][0], 0) if _PREF in found else 0,
        ticks / 100 if ticks else None,
        body,
    )


def hops_of(route: Route) -> tuple[Hop, ...]:
    """The hops of a route that lists them itself, be it one or several; none of a route by nexthop id."""
    if route.nexthop_id is not None or route.ifindex is None:
        return route.hops if route.nexthop_id is None else ()
    own = b"".join(attribute(name, value) for name, value in attributes(route.body, 12) if name in _OF_A_HOP)
    flags = _HEADER.unpack_from(route.body)[-1] & _ONLINK
    return (Hop(route.gateway, route.ifindex, 1, _HOP.pack(_HOP.size + len(own), flags, 0, route.ifindex) + own),)


def hop_of(gateway: str | None, ifindex: int, family: Family, weight: int = 1, onlink: bool = False) -> Hop:
    """A hop of a route of a family, of which no more is known."""
    own = b""
    if gateway:
        af = socket.AF_INET6 if ":" in gateway else socket.AF_INET
        packed = socket.inet_pton(af, gateway)
        other = ip_family(af) != family  # an IPv4 route over an IPv6 gateway
        own = attribute(_VIA, struct.pack("=H", af) + packed) if other else attribute(_GATEWAY, packed)
    flags = _ONLINK if onlink else 0
    return Hop(gateway, ifindex, weight, _HOP.pack(_HOP.size + len(own), flags, weight - 1, ifindex) + own)


def mirrored(body: bytes, destination: str, table: int, protocol: int, over: int | Sequence[Hop]) -> bytes:
    """A route like another one, to a prefix in another table, over a nexthop object or over hops with weights."""
    if isinstance(over, int):
        way = attribute(_NH_ID, _NUMBER.pack(over))
    else:
        way = attribute(_MULTIPATH, b"".join(hop.body for hop in over))
    head = list(_HEADER.unpack_from(body))
    address, _, length = destination.partition("/")
    head[1], head[4], head[5], head[8] = int(length), 0, protocol, 0
    kept = [
        attribute(name, value)
        for name, value in attributes(body, _HEADER.size)
        if name in _KEPT and name not in (_DST, _PRIORITY, _TABLE)
    ]
    kept += [attribute(_TABLE, _NUMBER.pack(table)), way]
    if head[1]:
        kept.append(attribute(_DST, socket.inet_pton(head[0], address)))
    return _HEADER.pack(*head) + b"".join(kept)


def without_source(body: bytes) -> bytes:
    """A route that leaves the source address to the kernel, which then takes that of the interface."""
    kept = [attribute(name, value) for name, value in attributes(body, _HEADER.size) if name != _PREFSRC]
    return body[: _HEADER.size] + b"".join(kept)


def rto_min_of(body: bytes) -> int | None:
    """The minimum TCP retransmission timeout of a route, in milliseconds; None where it has none."""
    value = _metrics(body).get(_RTO_MIN)
    return None if value is None else int(_NUMBER.unpack(value)[0])


def with_rto_min(body: bytes, milliseconds: int) -> bytes:
    """A route with a minimum TCP retransmission timeout; one that has its own keeps it."""
    metrics = _metrics(body)
    if _RTO_MIN in metrics:
        return body
    locked = _NUMBER.unpack(metrics[_LOCK])[0] if _LOCK in metrics else 0
    metrics |= {_LOCK: _NUMBER.pack(locked | 1 << _RTO_MIN), _RTO_MIN: _NUMBER.pack(milliseconds)}
    kept = [attribute(name, value) for name, value in attributes(body, _HEADER.size) if name != _METRICS]
    nested = b"".join(attribute(name, value) for name, value in metrics.items())
    return body[: _HEADER.size] + b"".join(kept) + attribute(_METRICS, nested)


def _metrics(body: bytes) -> dict[int, bytes]:
    return dict(attributes(dict(attributes(body, _HEADER.size)).get(_METRICS, b"")))


def throw_route(destination: str, family: Family, table: int, protocol: int) -> bytes:
    """A route that sends the look-up on to the next rule."""
    address, _, length = destination.partition("/")
    af = socket_family(family)
    head = _HEADER.pack(af, int(length), 0, 0, 0, protocol, 0, _THROW, 0)
    return head + attribute(_DST, socket.inet_pton(af, address)) + attribute(_TABLE, _NUMBER.pack(table))


def remade(body: bytes) -> bytes:
    """A route as it was read, in the form in which it can be made again."""
    found = dict(attributes(body, _HEADER.size))
    names = (_NH_ID,) if _NH_ID in found else (_OIF, _MULTIPATH, *_OF_A_HOP)
    way = b"".join(attribute(name, _clean(name, found[name])) for name in names if name in found)
    metric, protocol = route_of(body).metric, _HEADER.unpack_from(body)[5]
    return _rewritten(body, metric, protocol, keep_onlink=_NH_ID not in found) + way


def _rewritten(body: bytes, metric: int, protocol: int, keep_onlink: bool) -> bytes:
    """A route without its hops; flags and attributes that only the kernel sets are left out."""
    head = list(_HEADER.unpack_from(body))
    head[5] = protocol
    head[8] &= _ONLINK if keep_onlink else 0
    kept = [
        attribute(name, value) for name, value in attributes(body, _HEADER.size) if name in _KEPT and name != _PRIORITY
    ]
    if metric:
        kept.append(attribute(_PRIORITY, _NUMBER.pack(metric)))
    return _HEADER.pack(*head) + b"".join(kept)


def _clean(name: int, value: bytes) -> bytes:
    if name != _MULTIPATH:
        return value
    return b"".join(
        _HOP.pack(len(hop.body), hop.body[2] & _ONLINK, hop.weight - 1, hop.ifindex) + hop.body[_HOP.size :]
        for hop in _hops(value)
    )


@functools.lru_cache(maxsize=1024)
def _hops(value: bytes) -> tuple[Hop, ...]:
    """Most routes of a table have the same few lists of hops."""
    hops = []
    offset = 0
    while offset + _HOP.size <= len(value):
        length, _, weight, ifindex = _HOP.unpack_from(value, offset)
        if length < _HOP.size:
            break
        body = value[offset : offset + length]
        hops.append(Hop(_gateway(dict(attributes(body, _HOP.size))), ifindex, weight + 1, body))
        offset += (length + 3) & ~3
    return tuple(hops)


def _gateway(found: dict[int, bytes]) -> str | None:
    if _GATEWAY in found:
        value = found[_GATEWAY]
    elif _VIA in found:
        value = found[_VIA][2:]
    else:
        return None
    return socket.inet_ntop(socket.AF_INET6 if len(value) == 16 else socket.AF_INET, value)
