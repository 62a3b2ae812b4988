"""Nexthop objects and their groups (linux/nexthop.h), which pyroute2 0.9.7 lacks: bytes to frozen records and back.

Also what all records here share: families, protocols, kinds of route. Pure: no socket.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pyroute2.netlink import nla, nlmsg

from pytools.errors import UsageError
from pytools.kernel.netlink.socket import attribute, attributes

GroupKind = Literal["mpath", "resilient"]
Family = Literal[4, 6]

PROTOCOL = 201  # what we put into the kernel carries this, so that it can be found and swept
MAIN_TABLE = 254
UNICAST, LOCAL = 1, 2  # rtm_type
MAX_WEIGHT = 256

_DEAD, _ONLINK, _LINKDOWN = 1, 4, 16  # RTNH_F_*
_GROUP_KINDS: tuple[GroupKind, ...] = ("mpath", "resilient")
_HEADER = struct.Struct("=BBBBI")  # struct nhmsg: family, scope, protocol, reserved, flags
_NUMBER = struct.Struct("=I")
_ID, _GROUP, _GROUP_TYPE, _BLACKHOLE, _OIF, _GATEWAY, _ENCAP_TYPE, _ENCAP, _FDB = (*range(1, 9), 11)
_GROUPS, _OP_FLAGS, _GROUP_STATS = 9, 14, 15
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


@dataclass(frozen=True, slots=True)
class Nexthop:
    id: int
    family: Family
    gateway: str | None  # None when on-link
    ifindex: int | None  # None for a blackhole
    protocol: int
    flags: int = 0  # RTNH_F_*
    blackhole: bool = False
    body: bytes = field(default=b"", compare=False, repr=False)  # as the kernel wrote it

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
    body: bytes = field(default=b"", compare=False, repr=False)  # as the kernel wrote it

    @property
    def weights(self) -> dict[int, int]:
        return {member.nexthop_id: member.weight for member in self.members}


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
    return ipaddress.ip_address(address).packed


def nexthop_message(nexthop: Nexthop) -> NexthopMessage:
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
    message["attrs"] = [
        ("NHA_ID", group_id),
        ("NHA_GROUP", _entries(members)),
        ("NHA_GROUP_TYPE", _GROUP_KINDS.index(kind)),
    ]
    return message


def nexthop_of(message: NexthopMessage) -> Nexthop:
    gateway = message.get_attr("NHA_GATEWAY")
    return Nexthop(
        id=message.get_attr("NHA_ID"),
        family=ip_family(message["family"]),
        gateway=None if gateway is None else str(ipaddress.ip_address(bytes(gateway))),
        ifindex=message.get_attr("NHA_OIF"),
        protocol=message["protocol"],
        flags=message["flags"],
        blackhole=_has(message, "NHA_BLACKHOLE"),
        body=_body(message),
    )


def is_group(message: NexthopMessage) -> bool:
    """Whether a decoded message describes a group."""
    return _has(message, "NHA_GROUP")


def group_of(message: NexthopMessage) -> NexthopGroup:
    return group_of_body(_body(message))


def group_of_body(body: bytes) -> NexthopGroup:
    """The group in a message without its netlink header: they are read every second, and pyroute2 takes half a ms."""
    found = dict(attributes(body, _HEADER.size))
    packets = _packets(found.get(_GROUP_STATS, b""))
    members = tuple(
        Member(nexthop_id, weight + 1 + (high << 8), packets.get(nexthop_id))
        for nexthop_id, weight, high, _ in _GROUP_ENTRY.iter_unpack(found[_GROUP])
    )
    kind = _GROUP_KINDS[_integer(found.get(_GROUP_TYPE, b""))]
    protocol = _HEADER.unpack_from(body)[2]
    return NexthopGroup(_integer(found[_ID]), members, kind, protocol, body)


def groups_request(op_flags: int = 0) -> bytes:
    """What asks for all groups, and for packets per member if the flags say so."""
    flags = attribute(_OP_FLAGS, _NUMBER.pack(op_flags)) if op_flags else b""
    return bytes(_HEADER.size) + attribute(_GROUPS, b"") + flags


def _packets(statistics: bytes) -> dict[int, int]:
    """Packets by member; the counter is 4 or 8 bytes long, as large as its value asks."""
    entries = [dict(attributes(entry)) for _, entry in attributes(statistics)]
    return {_integer(entry[1]): _integer(entry[2]) for entry in entries if 2 in entry}


def _integer(value: bytes) -> int:
    return int.from_bytes(value, sys.byteorder)


def _body(message: NexthopMessage) -> bytes:
    """A decoded message without its netlink header."""
    return bytes(message.data[message.offset + 16 : message.offset + message["header"]["length"]])


def nexthop_body(
    nexthop_id: int, family: Family, gateway: str | None, ifindex: int, onlink: bool, protocol: int
) -> bytes:
    parts = [attribute(_ID, _NUMBER.pack(nexthop_id)), attribute(_OIF, _NUMBER.pack(ifindex))]
    if gateway is not None:
        parts.append(attribute(_GATEWAY, packed(gateway)))
    return _HEADER.pack(socket_family(family), 0, protocol, 0, _ONLINK if onlink else 0) + b"".join(parts)


def group_body(group_id: int, members: Sequence[Member], protocol: int) -> bytes:
    head = _HEADER.pack(0, 0, protocol, 0, 0)
    return head + attribute(_ID, _NUMBER.pack(group_id)) + attribute(_GROUP, _entries(members))


def _entries(members: Sequence[Member]) -> bytes:
    return b"".join(_GROUP_ENTRY.pack(member.nexthop_id, member.weight - 1, 0, 0) for member in members)


def _has(message: nlmsg, name: str) -> bool:
    return any(slot.name == name for slot in message["attrs"])
