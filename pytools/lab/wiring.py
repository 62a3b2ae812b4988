"""What a lab asks of one namespace over netlink: links, addresses and shapers.

A port is shaped by a token bucket with a queue limited in bytes, on the rail's side only, so that stamps and
captures at the hosts show when a packet really left and arrived.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from typing import Any

from pyroute2.netlink import nla, nlmsg
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg

from pytools.kernel.netlink.nexthops import family_of, socket_family
from pytools.kernel.netlink.routes import route_message
from pytools.kernel.netlink.routing import Netlink, NetlinkError, Route
from pytools.kernel.netlink.socket import CREATE, EXCLUSIVE, REPLACE
from pytools.lab.filters import TrafficControl
from pytools.lab.namespaces import NAMED

_NEW_LINK, _NEW_ADDRESS, _NEW_ROUTE, _NEW_QDISC, _DEL_QDISC, _GET_QDISC = 16, 20, 24, 36, 37, 38
_LOCK_MTU = 1 << 2  # RTAX_LOCK: a bit per metric; without it IPv6 forwards by the interface's MTU
_IFF_UP, _IFA_F_NODAD = 1, 2
_ROOT = 0xFFFFFFFF
_HANDLE = 0x1_0000
_RATESPEC = struct.Struct("=BBHhHI")  # cell log, link layer, overhead, cell align, smallest packet, bytes/s
_QUEUE_STATISTICS = struct.Struct("=IIIII")  # packets waiting, bytes waiting, drops, requeues, overlimits
_ETHERNET = 1
_FRAME_BYTES = 1514
# How far the bucket may run ahead of the rate: a timer that is late by less than this costs no throughput.
_BURST_NS = 1_000_000


class QdiscMessage(TrafficControl, nlmsg):  # type: ignore[misc]
    """`struct tcmsg` with the options of a token bucket; other kinds of queue keep theirs undecoded."""

    nla_map = (
        ("TCA_UNSPEC", "none"),
        ("TCA_KIND", "asciiz"),
        ("TCA_OPTIONS", "bucket"),
        ("TCA_STATS", "cdata"),
        ("TCA_XSTATS", "cdata"),
        ("TCA_RATE", "cdata"),
        ("TCA_FCNT", "cdata"),
        ("TCA_STATS2", "statistics"),
    )

    class bucket(nla):  # type: ignore[misc]  # noqa: N801 (pyroute2 looks the name up)
        nla_map = (
            ("TCA_TBF_UNSPEC", "none"),
            ("TCA_TBF_PARMS", "cdata"),
            ("TCA_TBF_RTAB", "cdata"),
            ("TCA_TBF_PTAB", "cdata"),
            ("TCA_TBF_RATE64", "uint64"),
            ("TCA_TBF_PRATE64", "uint64"),
            ("TCA_TBF_BURST", "uint32"),
        )

    class statistics(nla):  # type: ignore[misc]  # noqa: N801
        """What passed, waits and was lost."""

        nla_map = (
            ("TCA_STATS_UNSPEC", "none"),
            ("TCA_STATS_BASIC", "cdata"),
            ("TCA_STATS_RATE_EST", "cdata"),
            ("TCA_STATS_QUEUE", "cdata"),
        )


@dataclass(frozen=True, slots=True)
class End:
    name: str
    index: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How a port is shaped now, and what its queue went through."""

    rate_bit_s: int
    queue_bytes: int
    waiting_bytes: int
    dropped_packets: int
    sent_bytes: int  # since the port was first shaped; Ethernet frames


def add_veth(netlink: Netlink, end: End, peer: End, peer_netns: str) -> None:
    """Make a veth pair: one end here, the other in another namespace.

    The two indexes must differ: the kernel takes a veth end whose index is its peer's for a plain interface, and
    notices its carrier up to a second late.
    """
    fd = os.open(NAMED / peer_netns, os.O_RDONLY | os.O_CLOEXEC)
    try:
        other = {"index": peer.index, "attrs": [("IFLA_IFNAME", peer.name), ("IFLA_NET_NS_FD", fd)]}
        message = ifinfmsg()
        message["index"] = end.index
        message["attrs"] = [
            ("IFLA_IFNAME", end.name),
            (
                "IFLA_LINKINFO",
                {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", {"attrs": [("VETH_INFO_PEER", other)]})]},
            ),
        ]
        netlink.socket.change(message, _NEW_LINK, CREATE | EXCLUSIVE, f"making link {end.name}")
    finally:
        os.close(fd)


def set_up(netlink: Netlink, index: int, up: bool = True) -> None:
    """Set an interface up or down; the other end of a veth pair loses its carrier with it."""
    message = ifinfmsg()
    message["index"] = index
    message["flags"] = _IFF_UP if up else 0
    message["change"] = _IFF_UP
    netlink.socket.change(message, _NEW_LINK, 0, f"setting interface {index} {'up' if up else 'down'}")


def add_address(netlink: Netlink, index: int, address: str, prefix_length: int) -> None:
    """Give an interface an address that is ready at once (no duplicate address detection)."""
    message = ifaddrmsg()
    message["family"] = socket_family(family_of(address))
    message["prefixlen"] = prefix_length
    message["index"] = index
    message["attrs"] = [("IFA_LOCAL", address), ("IFA_ADDRESS", address), ("IFA_FLAGS", _IFA_F_NODAD)]
    netlink.socket.change(message, _NEW_ADDRESS, CREATE | EXCLUSIVE, f"adding address {address}")


def replace_narrow_route(netlink: Netlink, route: Route, mtu_bytes: int) -> None:
    """Make or change a route that takes no packet longer than this; who sends one is told so."""
    message = route_message(route)
    message["attrs"].append(("RTA_METRICS", {"attrs": [("RTAX_LOCK", _LOCK_MTU), ("RTAX_MTU", mtu_bytes)]}))
    netlink.socket.change(message, _NEW_ROUTE, CREATE | REPLACE, f"narrowing route {route.destination}")


def burst_bytes(rate_bit_s: int) -> int:
    """Size of the bucket at this rate: a millisecond's worth, and never less than two frames."""
    return max(2 * _FRAME_BYTES, rate_bit_s * _BURST_NS // (8 * 10**9))


def shape(netlink: Netlink, index: int, rate_bit_s: int, queue_bytes: int, before_bit_s: int | None = None) -> None:
    """Shape an interface, or change how it is shaped; what waits in the queue stays there.

    `before_bit_s` is a rate at which it was shaped before: buffers of several packets that were let in then wait, and
    one that is larger than the bucket would never leave, nor anything behind it.
    """
    rate = rate_bit_s // 8
    spec = _RATESPEC.pack(0, _ETHERNET, 0, 0, 0, min(rate, 0xFFFFFFFF))
    burst = max(burst_bytes(rate_bit_s), burst_bytes(before_bit_s or 0))
    parameters = spec + bytes(_RATESPEC.size) + struct.pack("=III", queue_bytes, 0, 0)
    message = _qdisc(index)
    message["handle"] = _HANDLE
    message["attrs"] = [
        ("TCA_KIND", "tbf"),
        (
            "TCA_OPTIONS",
            {
                "attrs": [
                    ("TCA_TBF_PARMS", parameters),
                    ("TCA_TBF_BURST", burst),
                    *([("TCA_TBF_RATE64", rate)] if rate > 0xFFFFFFFF else []),
                ]
            },
        ),
    ]
    netlink.socket.change(message, _NEW_QDISC, CREATE | REPLACE, f"shaping interface {index}")


def unshape(netlink: Netlink, index: int) -> None:
    """Remove the shaper of an interface, if it has one."""
    try:
        netlink.socket.change(_qdisc(index), _DEL_QDISC, 0, f"removing the shaper of interface {index}")
    except NetlinkError as error:
        if error.code != errno.ENOENT:
            raise


def shapes(netlink: Netlink) -> dict[int, Shape]:
    """Every shaped interface of a namespace, by its index."""
    found = netlink.socket.dump(_qdisc(0), _GET_QDISC, "reading shapers")
    return {each["index"]: _shape_of(each) for each in found if each.get_attr("TCA_KIND") == "tbf"}


def _qdisc(index: int) -> QdiscMessage:
    message = QdiscMessage()
    message["index"] = index
    message["parent"] = _ROOT if index else 0
    return message


def _shape_of(message: QdiscMessage) -> Shape:
    options: Any = message.get_attr("TCA_OPTIONS")
    parameters = bytes(options.get_attr("TCA_TBF_PARMS"))
    rate = options.get_attr("TCA_TBF_RATE64") or _RATESPEC.unpack_from(parameters)[-1]
    (limit,) = struct.unpack_from("=I", parameters, 2 * _RATESPEC.size)
    statistics: Any = message.get_attr("TCA_STATS2")
    _, waiting, dropped, _, _ = _QUEUE_STATISTICS.unpack_from(bytes(statistics.get_attr("TCA_STATS_QUEUE")))
    (sent,) = struct.unpack_from("=Q", bytes(statistics.get_attr("TCA_STATS_BASIC")))
    return Shape(rate * 8, limit, waiting, dropped, sent)
