"""Routing-netlink messages and what they say: kernel bytes to frozen records, in plain Python types.

Holds what pyroute2 0.9.7 lacks: nexthop objects (linux/nexthop.h) and RTA_NH_ID on routes. Pure: no socket.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pyroute2.netlink import nla, nlmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg_base

from pytools.errors import UsageError

GroupKind = Literal["mpath", "resilient"]
Family = Literal[4, 6]

PROTOCOL = 201  # what we put into the kernel carries this, so that it can be found and swept
MAIN_TABLE = 254
UNICAST, LOCAL = 1, 2  # rtm_type
MAX_WEIGHT = 256

_DEAD, _ONLINK, _LINKDOWN = 1, 4, 16  # RTNH_F_*
_GROUP_KINDS: tuple[GroupKind, ...] = ("mpath", "resilient")
_GROUP_ENTRY = struct.Struct("=IBBH")  # id, weight - 1, high byte of the weight (6.12), reserved


class NexthopMessage(nlmsg):  # type: ignore[misc]
    """`struct nhmsg` and its attributes."""

    prefix = "NHA_"
    fields = (("family", "B"), ("scope", "B"), ("protocol", "B"), ("reserved", "B"), ("flags", "I"))
    nla_map = (
        ("NHA_UNSPEC", "none"),
        ("NHA_ID", "uint32"),
        ("NHA_GROUP", "cdata"),
        ("NHA_GROUP_TYPE", "uint16"),
        ("NHA_BLACKHOLE", "flag"),
        ("NHA_OIF", "uint32"),
        ("NHA_GATEWAY", "cdata"),
        ("NHA_ENCAP_TYPE", "uint16"),
        ("NHA_ENCAP", "cdata"),
        ("NHA_GROUPS", "flag"),
        ("NHA_MASTER", "uint32"),
        ("NHA_FDB", "flag"),
        ("NHA_RES_GROUP", "resilient"),
        ("NHA_RES_BUCKET", "cdata"),
        ("NHA_OP_FLAGS", "uint32"),
        ("NHA_GROUP_STATS", "statistics"),
    )

    class resilient(nla):  # type: ignore[misc]  # noqa: N801 (pyroute2 looks the name up)
        """Parameters of a resilient group; timers in USER_HZ ticks."""

        nla_flags = 0x8000  # NLA_F_NESTED: the kernel refuses a group whose parameters lack it
        nla_map = (
            ("NHA_RES_GROUP_PAD", "none"),
            ("NHA_RES_GROUP_BUCKETS", "uint16"),
            ("NHA_RES_GROUP_IDLE_TIMER", "uint32"),
            ("NHA_RES_GROUP_UNBALANCED_TIMER", "uint32"),
        )

    class statistics(nla):  # type: ignore[misc]  # noqa: N801
        """Packets per member."""

        nla_map = (("NHA_GROUP_STATS_UNSPEC", "none"), ("NHA_GROUP_STATS_ENTRY", "entry"))

        class entry(nla):  # type: ignore[misc]  # noqa: N801
            """One member; the counter is 4 or 8 bytes long, as large as its value asks."""

            nla_map = (
                ("NHA_GROUP_STATS_ENTRY_UNSPEC", "none"),
                ("NHA_GROUP_STATS_ENTRY_ID", "uint32"),
                ("NHA_GROUP_STATS_ENTRY_PACKETS", "cdata"),
            )


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
class Nexthop:
    """One nexthop object."""

    id: int
    family: Family
    gateway: str | None  # None when on-link
    ifindex: int | None  # None for a blackhole
    protocol: int
    flags: int = 0  # RTNH_F_*
    blackhole: bool = False

    @property
    def dead(self) -> bool:
        """Whether the kernel will not use it."""
        return bool(self.flags & (_DEAD | _LINKDOWN))


@dataclass(frozen=True, slots=True)
class Member:
    """A nexthop's part in a group."""

    nexthop_id: int
    weight: int
    packets: int | None = None  # since the group was last replaced; None where the kernel does not count


@dataclass(frozen=True, slots=True)
class NexthopGroup:
    """A nexthop group as the kernel has it."""

    id: int
    members: tuple[Member, ...]
    kind: GroupKind
    protocol: int

    @property
    def weights(self) -> dict[int, int]:
        """Weight by nexthop."""
        return {member.nexthop_id: member.weight for member in self.members}


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of a route that lists its hops itself."""

    gateway: str | None
    ifindex: int
    weight: int


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


def family_of(address: str) -> Family:
    """4 or 6, of an address or a prefix."""
    return 6 if ":" in address else 4


def socket_family(family: int) -> int:
    """AF_INET or AF_INET6."""
    return socket.AF_INET6 if family == 6 else socket.AF_INET


def ip_family(family: int) -> Family:
    """4 or 6, of an AF_ constant."""
    return 6 if family == socket.AF_INET6 else 4


def packed(address: str) -> bytes:
    """An address as the kernel has it."""
    return ipaddress.ip_address(address).packed


def nexthop_message(nexthop: Nexthop) -> NexthopMessage:
    """The message that describes one nexthop."""
    message = NexthopMessage()
    message["family"] = socket_family(nexthop.family)
    message["protocol"] = nexthop.protocol
    message["flags"] = nexthop.flags & _ONLINK
    attributes: list[tuple[str, Any]] = [("NHA_ID", nexthop.id)]
    if nexthop.blackhole:
        attributes.append(("NHA_BLACKHOLE", None))
    if nexthop.ifindex is not None:
        attributes.append(("NHA_OIF", nexthop.ifindex))
    if nexthop.gateway is not None:
        attributes.append(("NHA_GATEWAY", packed(nexthop.gateway)))
    message["attrs"] = attributes
    return message


def group_message(group_id: int, members: Sequence[Member], kind: GroupKind, protocol: int) -> NexthopMessage:
    """The message that describes a whole group.

    Raises
    ------
    UsageError
        If there is no member, one appears twice, or a weight is not within 1 and 256.
    """
    if not members:
        raise UsageError(f"nexthop group {group_id} needs at least one member")
    if len({member.nexthop_id for member in members}) != len(members):
        raise UsageError(f"nexthop group {group_id}: a nexthop is named twice")
    for member in members:
        if not 1 <= member.weight <= MAX_WEIGHT:
            raise UsageError(
                f"nexthop group {group_id}: weight {member.weight} of nexthop {member.nexthop_id} "
                f"is not within 1 and {MAX_WEIGHT}"
            )
    message = NexthopMessage()
    message["protocol"] = protocol
    entries = b"".join(_GROUP_ENTRY.pack(member.nexthop_id, member.weight - 1, 0, 0) for member in members)
    message["attrs"] = [
        ("NHA_ID", group_id),
        ("NHA_GROUP", entries),
        ("NHA_GROUP_TYPE", _GROUP_KINDS.index(kind)),
    ]
    return message


def nexthop_of(message: NexthopMessage) -> Nexthop:
    """The nexthop in a decoded message."""
    gateway = message.get_attr("NHA_GATEWAY")
    return Nexthop(
        id=message.get_attr("NHA_ID"),
        family=ip_family(message["family"]),
        gateway=None if gateway is None else str(ipaddress.ip_address(bytes(gateway))),
        ifindex=message.get_attr("NHA_OIF"),
        protocol=message["protocol"],
        flags=message["flags"],
        blackhole=_has(message, "NHA_BLACKHOLE"),
    )


def is_group(message: NexthopMessage) -> bool:
    """Whether a decoded message describes a group."""
    return _has(message, "NHA_GROUP")


def group_of(message: NexthopMessage) -> NexthopGroup:
    """The group in a decoded message."""
    packets = _packets(message)
    members = tuple(
        Member(nexthop_id, weight + 1 + (high << 8), packets.get(nexthop_id))
        for nexthop_id, weight, high, _ in _GROUP_ENTRY.iter_unpack(bytes(message.get_attr("NHA_GROUP")))
    )
    kind = _GROUP_KINDS[message.get_attr("NHA_GROUP_TYPE") or 0]
    return NexthopGroup(message.get_attr("NHA_ID"), members, kind, message["protocol"])


def _packets(message: NexthopMessage) -> dict[int, int]:
    """Packets by nexthop; empty where the kernel sent no counts."""
    statistics = message.get_attr("NHA_GROUP_STATS")
    if statistics is None:
        return {}
    return {
        entry.get_attr("NHA_GROUP_STATS_ENTRY_ID"): int.from_bytes(
            entry.get_attr("NHA_GROUP_STATS_ENTRY_PACKETS"), sys.byteorder
        )
        for entry in statistics.get_attrs("NHA_GROUP_STATS_ENTRY")
    }


def _has(message: nlmsg, name: str) -> bool:
    return any(slot.name == name for slot in message["attrs"])


def route_message(route: Route) -> RouteMessage:
    """The message that describes one route."""
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


def route_of(message: RouteMessage) -> Route:
    """The route in a decoded message."""
    family = ip_family(message["family"])
    nowhere = "::" if family == 6 else "0.0.0.0"
    hops = message.get_attr("RTA_MULTIPATH") or ()
    return Route(
        destination=f"{message.get_attr('RTA_DST', nowhere)}/{message['dst_len']}",
        family=family,
        table=message.get_attr("RTA_TABLE", message["table"]),
        nexthop_id=message.get_attr("RTA_NH_ID"),
        gateway=message.get_attr("RTA_GATEWAY"),
        ifindex=message.get_attr("RTA_OIF"),
        hops=tuple(Hop(hop.get_attr("RTA_GATEWAY"), hop["oif"], hop["hops"] + 1) for hop in hops),
        metric=message.get_attr("RTA_PRIORITY", 0),
        protocol=message["proto"],
        prefsrc=message.get_attr("RTA_PREFSRC"),
        kind=message["type"],
    )
