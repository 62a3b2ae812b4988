"""The outer address of the peer that a packet into a tunnel device goes to.

In the network namespace of the calling thread; any thread. A device with no remote address of its own is asked for the
peer: VXLAN by its forwarding table, WireGuard by its allowed addresses, GRE and IP-in-IP by the gateway.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import replace
from typing import Any, Final

from pyroute2.netlink.rtnl.ndmsg import ndmsg

from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netlink.tables import Link, Tunnel

_GET_NEIGHBOUR: Final = 30
_EVERYBODY: Final = "00:00:00:00:00:00"  # of a VXLAN forwarding table: where frames to unknown addresses go


def to_peer(netlink: Netlink, link: Link, hop: str, address: str) -> Tunnel | None:
    """What carries a packet by a tunnel; None: the peer's outer address is not known.

    Parameters
    ----------
    hop : str
        Where the packet goes next: the gateway, or its destination.
    """
    tunnel = link.tunnel
    if tunnel is None:
        return None
    if link.kind == "wireguard":
        return _wireguard(link.name, tunnel, address)
    if link.kind == "vxlan":
        return _vxlan(netlink, link.index, tunnel, hop)
    if not tunnel.remote and tunnel.protocol != socket.IPPROTO_UDP:
        tunnel = replace(tunnel, remote="" if ":" in hop else hop)
    return tunnel if tunnel.remote else None


def _vxlan(netlink: Netlink, index: int, tunnel: Tunnel, hop: str) -> Tunnel | None:
    """By the peer's link-layer address; before that is known, frames go to everybody: one address is an answer too."""
    known = [each.link_address for each in netlink.neighbours() if each.ifindex == index and each.address == hop]
    message = ndmsg()
    message["family"] = socket.AF_BRIDGE
    table: dict[str, list[Tunnel]] = {}
    for row in netlink.socket.dump(message, _GET_NEIGHBOUR, "reading forwarding tables"):
        remote, to = row.get_attr("NDA_DST"), row.get_attr("NDA_LLADDR")
        if row["ifindex"] == index and remote and to:
            port, by = row.get_attr("NDA_PORT") or tunnel.port, row.get_attr("NDA_IFINDEX") or tunnel.link
            table.setdefault(to, []).append(replace(tunnel, remote=remote, port=port, link=by))
    for each in (*known, _EVERYBODY):
        if each in table:
            return table[each][0] if len(table[each]) == 1 else None
    return None


def _wireguard(name: str, tunnel: Tunnel, address: str) -> Tunnel | None:
    """By the longest of the peers' allowed prefixes. The private key, which the answer has as well, is not kept."""
    from pyroute2 import WireGuard

    target, best, chosen = ipaddress.ip_address(address), -1, None
    with WireGuard() as guard:
        for part in guard.info(name):
            mark = part.get_attr("WGDEVICE_A_FWMARK") or 0
            for peer in part.get_attr("WGDEVICE_A_PEERS") or ():
                end, length = peer.get_attr("WGPEER_A_ENDPOINT"), _longest(peer, target)
                if end is not None and length > best:
                    best, chosen = length, replace(tunnel, remote=end["addr"], port=end["port"], mark=mark)
    return chosen


def _longest(peer: Any, target: ipaddress.IPv4Address | ipaddress.IPv6Address) -> int:
    """The length of a peer's longest allowed prefix with an address; -1: there is none."""
    allowed = (ipaddress.ip_network(each["addr"]) for each in peer.get_attr("WGPEER_A_ALLOWEDIPS") or ())
    return max((each.prefixlen for each in allowed if target in each), default=-1)
