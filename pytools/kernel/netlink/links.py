"""Interfaces, queue disciplines and neighbours over routing netlink, for those who read them several times a second.

The same tables as netlink/tables.py, but only the fields that links are watched by, unpacked in place. Counters are
since the interface (the queue) was made. `Tables` asks, `Monitor` is told of changes; both belong to the network
namespace of the thread that makes them.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from pytools.kernel.netlink.bonds import BondRow, Bundle, PortRow, bond_of, port_of
from pytools.kernel.netlink.monitor import OVERRUN, Group, Monitor
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netlink.socket import NetlinkError
from pytools.kernel.netlink.teams import hashing

_NEW_LINK, _DEL_LINK, _GET_LINK = 16, 17, 18
_NEW_ADDRESS, _DEL_ADDRESS = 20, 21
_NEW_NEIGHBOUR, _DEL_NEIGHBOUR, _GET_NEIGHBOUR = 28, 29, 30
_GET_QDISC = 38
_LINK_HEADER = struct.Struct("=BxHiII")  # family, hardware type, index, flags, changed flags
_QDISC_HEADER = struct.Struct("=BxxxiIII")  # family, interface index, handle, parent, info
_NEIGHBOUR_HEADER = struct.Struct("=BxxxiHBB")  # family, interface index, state, flags, type
_ATTRIBUTE = struct.Struct("=HH")
_TYPE_MASK = 0x3FFF  # without NLA_F_NESTED and NLA_F_NET_BYTEORDER
_U32, _U64 = struct.Struct("=I"), struct.Struct("=Q")
# Packets, bytes, errors and drops, each received and sent: the head of struct rtnl_link_stats64.
_COUNTERS = struct.Struct("=8Q")
_QUEUE = struct.Struct("=5I")  # packets and bytes waiting, drops, requeues, overlimits
_IFLA_NAME, _IFLA_MTU, _IFLA_STATS64, _IFLA_CARRIER_CHANGES = 3, 4, 23, 35
_IFLA_CARRIER_UPS, _IFLA_CARRIER_DOWNS = 47, 48
_IFLA_LINK, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_LINK_NETNSID = 5, 10, 18, 37
_INFO_KIND, _INFO_DATA, _INFO_SLAVE_KIND, _INFO_SLAVE_DATA = 1, 2, 4, 5
_TCA_KIND, _TCA_OPTIONS, _TCA_STATS2, _STATS_BASIC, _STATS_QUEUE = 1, 2, 7, 1, 3
_NDA_DST = 1
_IFF_UP, _IFF_NOARP, _IFF_LOWER_UP = 0x1, 0x80, 0x10000
_ROOT, _INGRESS = 0xFFFFFFFF, 0xFFFFFFF1


REACHED: Final = 0x02 | 0x04 | 0x08 | 0x10 | 0x40 | 0x80  # NUD_VALID: its link-layer address is believed
FAILED: Final = 0x20

# Kind of queue -> (attribute that holds the limit, or None for a plain struct, offset in it, what it limits).
_LIMITS: Mapping[str, tuple[int | None, int, Literal["bytes", "packets"]]] = {
    "tbf": (1, 24, "bytes"),
    "bfifo": (None, 0, "bytes"),
    "pfifo": (None, 0, "packets"),
    "pfifo_head_drop": (None, 0, "packets"),
    "red": (1, 0, "bytes"),
    "choke": (1, 0, "packets"),
    "sfq": (None, 8, "packets"),
    "netem": (None, 4, "packets"),
    "codel": (2, 0, "packets"),
    "fq_codel": (2, 0, "packets"),
    "pie": (2, 0, "packets"),
    "fq_pie": (1, 0, "packets"),
    "fq": (1, 0, "packets"),
    "hhf": (1, 0, "packets"),
}


@dataclass(frozen=True, slots=True)
class LinkRow:
    index: int
    name: str
    up: bool  # administratively
    carrier: bool
    carrier_changes: int
    carrier_ups: int
    carrier_downs: int
    mtu: int
    received_packets: int
    sent_packets: int
    received_bytes: int
    sent_bytes: int
    received_errors: int
    sent_errors: int
    received_drops: int
    sent_drops: int
    asks: bool = True  # for the link-layer addresses of its neighbours
    bond: BondRow | None = None  # what it is itself
    port: PortRow | None = None  # what it is in a bond


class Stack(NamedTuple):
    lowers: dict[int, set[int]]  # those that carry its packets: ports of a bond or team, what a VLAN is made on
    bundles: dict[int, Bundle]  # the bonds and teams that hash flows over several ports
    bonds: dict[int, BondRow]  # by index of a port
    devices: dict[int, str]  # by index: the bond or team that it is, is a port of, or is above and leaves by alone


@dataclass(frozen=True, slots=True)
class QdiscRow:
    index: int
    kind: str
    handle: int
    parent: int
    backlog_bytes: int
    backlog_packets: int
    drops: int
    overlimits: int
    requeues: int
    limit_bytes: int | None  # what may wait; None where the kind has no such limit, or it is not known here
    limit_packets: int | None

    @property
    def is_ingress(self) -> bool:
        """Whether it only holds filters for what arrives: nothing waits there."""
        return self.parent == _INGRESS


@dataclass(frozen=True, slots=True)
class NeighbourRow:
    """One entry of a neighbour table; `state` is NUD_*, 0 when the entry was deleted."""

    index: int
    address: str
    state: int


def handle_text(number: int) -> str:
    """A handle as `tc` writes it: `8001:`."""
    return f"{number >> 16:x}:"


def parent_text(number: int) -> str:
    """A parent as `tc` writes it: `root`, or `1:2`."""
    return "root" if number == _ROOT else f"{number >> 16:x}:{number & 0xFFFF:x}"


def link_of(body: bytes) -> LinkRow:
    """The interface in the body of a message."""
    _, _, index, flags, _ = _LINK_HEADER.unpack_from(body)
    name, mtu, counters = "", 0, (0,) * 8
    changes = ups = downs = 0
    bond = port = None
    for kind, start, end in _attributes(body, _LINK_HEADER.size, len(body)):
        if kind == _IFLA_NAME:
            name = body[start : end - 1].decode(errors="replace")
        elif kind == _IFLA_MTU:
            mtu = _U32.unpack_from(body, start)[0]
        elif kind == _IFLA_STATS64:
            counters = _COUNTERS.unpack_from(body, start)
        elif kind == _IFLA_CARRIER_CHANGES:
            changes = _U32.unpack_from(body, start)[0]
        elif kind == _IFLA_CARRIER_UPS:
            ups = _U32.unpack_from(body, start)[0]
        elif kind == _IFLA_CARRIER_DOWNS:
            downs = _U32.unpack_from(body, start)[0]
        elif kind == _IFLA_LINKINFO:
            bond, port = _bonding(body, start, end)
    up, carrier = bool(flags & _IFF_UP), bool(flags & _IFF_LOWER_UP)
    return LinkRow(index, name, up, carrier, changes, ups, downs, mtu, *counters, not flags & _IFF_NOARP, bond, port)


def qdisc_of(body: bytes) -> QdiscRow:
    """The queue discipline in the body of a message."""
    _, index, handle, parent, _ = _QDISC_HEADER.unpack_from(body)
    kind, options, queue = "", None, (0,) * 5
    for attribute, start, end in _attributes(body, _QDISC_HEADER.size, len(body)):
        if attribute == _TCA_KIND:
            kind = body[start : end - 1].decode(errors="replace")
        elif attribute == _TCA_OPTIONS:
            options = body[start:end]
        elif attribute == _TCA_STATS2:
            for inner, inner_start, _ in _attributes(body, start, end):
                if inner == _STATS_QUEUE:
                    queue = _QUEUE.unpack_from(body, inner_start)
    waiting_packets, waiting_bytes, drops, requeues, overlimits = queue
    limit_bytes, limit_packets = _limits(kind, options)
    counts = (waiting_bytes, waiting_packets, drops, overlimits, requeues)
    return QdiscRow(index, kind, handle, parent, *counts, limit_bytes, limit_packets)


def neighbour_of(body: bytes, deleted: bool = False) -> NeighbourRow | None:
    """The neighbour in the body of a message; None for one of another family than IP."""
    family, index, state, _, _ = _NEIGHBOUR_HEADER.unpack_from(body)
    if family not in (socket.AF_INET, socket.AF_INET6):
        return None
    for kind, start, end in _attributes(body, _NEIGHBOUR_HEADER.size, len(body)):
        if kind == _NDA_DST:
            return NeighbourRow(index, socket.inet_ntop(family, body[start:end]), 0 if deleted else state)
    return None


class Tables:
    """Reads the kernel's tables of interfaces, queues and neighbours.

    Parameters
    ----------
    netlink : Netlink
        In the namespace that is watched; stays the caller's.
    """

    def __init__(self, netlink: Netlink) -> None:
        self._socket = netlink.socket

    def links(self) -> dict[int, LinkRow]:
        body = _LINK_HEADER.pack(0, 0, 0, 0, 0)
        rows = [link_of(each) for each in self._socket.dump_bodies(body, _GET_LINK, "reading interfaces")]
        return {row.index: row for row in rows}

    def link(self, index: int) -> LinkRow | None:
        """One interface; None when there is none of this index."""
        body = _LINK_HEADER.pack(0, 0, index, 0, 0)
        try:
            return link_of(self._socket.get_body(body, _GET_LINK, f"reading interface {index}"))
        except NetlinkError as refusal:
            if refusal.code in (errno.ENODEV, errno.ENXIO):
                return None
            raise

    def stacked(self) -> set[tuple[int, int]]:
        """Pairs of interfaces, by index: what leaves by the first leaves by the second too, looking the same.

        A VLAN's packets do not: they are tagged there. Nor do those of a virtual cable, which come in at the other end.
        """
        return {(upper, lower) for upper, lower, kind in self._pairs() if kind not in (b"vlan", b"veth")}

    def stack(self) -> Stack:
        """What carries the packets of which interface, by index."""
        lowers: dict[int, set[int]] = {}
        several: dict[int, bool] = {}  # by index of a bond or team: whether it is a team
        bodies = self._dump()
        for body in bodies:
            for upper, lower, kind in _pairs(body):
                if kind not in (b"bridge", b"vrf", b"veth"):
                    lowers.setdefault(upper, set()).add(lower)
                if kind in (b"bond", b"team"):
                    several[upper] = kind == b"team"
        if not several:
            return Stack(lowers, {}, {}, {})
        rows = {row.index: row for row in map(link_of, bodies)}
        teams = hashing([index for index, is_team in several.items() if is_team]) if any(several.values()) else set()
        found = {index: _bundle(index, index in teams, lowers[index], rows) for index in several}
        bundles = {index: bundle for index, bundle in found.items() if bundle is not None}
        bonds = {index: bond for index in several if index in rows and (bond := rows[index].bond) is not None}
        ports = {port: index for index in several for port in lowers[index]}
        above = {index: below for index in lowers.keys() | several if (below := _first(several, index, lowers))}
        devices = {index: rows[device].name for index, device in (above | ports).items() if device in rows}
        return Stack(lowers, bundles, {port: bonds[index] for port, index in ports.items() if index in bonds}, devices)

    def _pairs(self) -> Iterator[tuple[int, int, bytes]]:
        for each in self._dump():
            yield from _pairs(each)

    def _dump(self) -> list[bytes]:
        body = _LINK_HEADER.pack(0, 0, 0, 0, 0)
        return list(self._socket.dump_bodies(body, _GET_LINK, "reading interfaces"))

    def qdiscs(self, indexes: set[int] | None) -> list[QdiscRow]:
        """The queue disciplines of these interfaces, or of all, in the kernel's order."""
        body = _QDISC_HEADER.pack(0, 0, 0, 0, 0)
        found = self._socket.dump_bodies(body, _GET_QDISC, "reading queues")
        rows = map(qdisc_of, found)
        return [row for row in rows if indexes is None or row.index in indexes]

    def neighbours(self) -> list[NeighbourRow]:
        body = _NEIGHBOUR_HEADER.pack(0, 0, 0, 0, 0)
        rows = [neighbour_of(each) for each in self._socket.dump_bodies(body, _GET_NEIGHBOUR, "reading neighbours")]
        return [row for row in rows if row is not None]


@dataclass(slots=True)
class Heard:
    """What the kernel has told since the last call."""

    changed: set[int] = field(default_factory=set)  # interfaces that are not what they were
    removed: set[int] = field(default_factory=set)  # interfaces that went; one that came back is in both
    neighbours: list[NeighbourRow] = field(default_factory=list)  # in order
    addresses: bool = False  # an address came or went
    overrun: bool = False  # and more, which the socket had no room for

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed or self.neighbours or self.addresses or self.overrun)

    def take(self, kind: int, body: bytes) -> None:
        if kind in (_NEW_LINK, _DEL_LINK):
            family, _, index, _, _ = _LINK_HEADER.unpack_from(body)
            if family != socket.AF_UNSPEC:  # a bridge tells of its ports
                return
            if kind == _NEW_LINK:
                self.changed.add(index)
            else:
                self.removed.add(index)
                self.changed.discard(index)
        elif kind in (_NEW_NEIGHBOUR, _DEL_NEIGHBOUR):
            neighbour = neighbour_of(body, kind == _DEL_NEIGHBOUR)
            if neighbour is not None:
                self.neighbours.append(neighbour)
        elif kind in (_NEW_ADDRESS, _DEL_ADDRESS):
            self.addresses = True


class LinkMonitor(Monitor):
    """Is told by the kernel when interfaces, neighbours and addresses change."""

    def __init__(self, room_bytes: int = 1 << 20) -> None:
        super().__init__((Group.LINK, Group.NEIGHBOUR, Group.ADDRESS4, Group.ADDRESS6), room_bytes=room_bytes)

    def read(self) -> Heard:
        """Everything that has been told since the last call."""
        heard = Heard()
        for kind, body in self.messages():
            if kind == OVERRUN:
                heard.overrun = True
            else:
                heard.take(kind, body)
        return heard


def _attributes(body: bytes, offset: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Type, begin and end of the value of every attribute."""
    while offset + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(body, offset)
        if length < 4 or offset + length > end:
            return
        yield kind & _TYPE_MASK, offset + 4, offset + length
        offset += (length + 3) & ~3


def _pairs(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Index of an upper interface and of a lower one, and the kind of the upper, as one of the two tells."""
    _, _, index, _, _ = _LINK_HEADER.unpack_from(body)
    found = {kind: (start, end) for kind, start, end in _attributes(body, _LINK_HEADER.size, len(body))}
    inner = {kind: body[start:end] for kind, start, end in _attributes(body, *found.get(_IFLA_LINKINFO, (0, 0)))}
    if _IFLA_MASTER in found:
        upper_kind = inner.get(_INFO_SLAVE_KIND, b"").rstrip(b"\0")
        yield _U32.unpack_from(body, found[_IFLA_MASTER][0])[0], index, upper_kind
    lower = _U32.unpack_from(body, found[_IFLA_LINK][0])[0] if _IFLA_LINK in found else 0
    if lower and _IFLA_LINK_NETNSID not in found:  # a tunnel that is bound to none says zero
        yield index, lower, inner.get(_INFO_KIND, b"").rstrip(b"\0")


def _bonding(body: bytes, start: int, end: int) -> tuple[BondRow | None, PortRow | None]:
    """What an interface is as a bond, and what it is in one."""
    found = {kind: (first, last) for kind, first, last in _attributes(body, start, end)}

    def inner(what: int, of: int) -> dict[int, bytes] | None:
        if what not in found or of not in found or body[slice(*found[what])].rstrip(b"\0") != b"bond":
            return None
        return {kind: body[first:last] for kind, first, last in _attributes(body, *found[of])}

    bond, port = inner(_INFO_KIND, _INFO_DATA), inner(_INFO_SLAVE_KIND, _INFO_SLAVE_DATA)
    return None if bond is None else bond_of(bond), None if port is None else port_of(port)


def _first(of: Collection[int], index: int, lowers: Mapping[int, set[int]]) -> int:
    """The first of these by which alone the packets of an interface leave; 0: there is none."""
    for _ in lowers:
        if index in of or len(below := lowers.get(index, set())) != 1:
            break
        [index] = below
    return index if index in of else 0


def _bundle(index: int, is_hashing: bool, ports: set[int], rows: Mapping[int, LinkRow]) -> Bundle | None:
    """A bond or team as one that hashes flows; None: it does not, as far as is known, or it has one port."""
    above = rows.get(index)
    members = [rows[each] for each in sorted(ports) if each in rows]
    if above is None or len(members) < 2 or not (is_hashing or (above.bond is not None and above.bond.hashes)):
        return None
    states = tuple((row.name, row.carrier, row.port and (row.port.active, row.port.aggregator)) for row in members)
    policy = "" if above.bond is None else f"{above.bond.mode} {above.bond.policy}"
    return Bundle(above.name, policy, tuple(row.name for row in members), states)


def _limits(kind: str, options: bytes | None) -> tuple[int | None, int | None]:
    """How many bytes, and how many packets, a queue of this kind holds."""
    where = _LIMITS.get(kind)
    if where is None or options is None:
        return None, None
    attribute, offset, unit = where
    start, end = 0, len(options)
    if attribute is not None:
        found = [each for each in _attributes(options, 0, len(options)) if each[0] == attribute]
        if not found:
            return None, None
        _, start, end = found[0]
    if start + offset + 4 > end:
        return None, None
    limit = _U32.unpack_from(options, start + offset)[0]
    return (limit, None) if unit == "bytes" else (None, limit)
