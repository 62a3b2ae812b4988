"""Asking the kernel to look for a neighbour, or to make sure that it is still there.

States are NUD_* as in linux/neighbour.h. A request is answered at once; what came of it is told by the kernel's
notifications. Belongs to the network namespace of the socket; one thread.
"""

from __future__ import annotations

import errno
import socket
from typing import Final

from pyroute2.netlink.rtnl.ndmsg import ndmsg

from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netlink.socket import CREATE, EXCLUSIVE, NetlinkError

INCOMPLETE, REACHABLE, STALE, DELAY, PROBE, FAILED, NOARP, PERMANENT = (1 << bit for bit in range(8))
BELIEVED: Final = REACHABLE | STALE | DELAY | PROBE | NOARP | PERMANENT  # packets are sent to its link-layer address

_NEW_NEIGHBOUR = 28
_USE = 0x1  # NTF_USE: as if a packet were to be sent
_GONE = (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.EEXIST, errno.EINVAL, errno.ENETDOWN)


def look_for(netlink: Netlink, ifindex: int, address: str, known: bool) -> None:
    """Have the kernel ask for a neighbour's link-layer address, as the first packet to it would.

    Parameters
    ----------
    known : bool
        Whether there is an entry for it already (it must not be one that somebody made permanent).
    """
    _request(netlink, ifindex, address, 0, _USE, 0 if known else CREATE | EXCLUSIVE)


def verify(netlink: Netlink, ifindex: int, address: str) -> None:
    """Have the kernel ask a neighbour that it knows whether it is still there; it is believed meanwhile."""
    _request(netlink, ifindex, address, PROBE, 0, 0)


def give_up(netlink: Netlink, ifindex: int, address: str) -> None:
    """Have the kernel believe that a neighbour does not answer."""
    _request(netlink, ifindex, address, FAILED, 0, 0)


def _request(netlink: Netlink, ifindex: int, address: str, state: int, flags: int, msg_flags: int) -> None:
    """An entry or an interface that came or went meanwhile is no error: the kernel tells of that by itself."""
    message = ndmsg()
    message["family"] = socket.AF_INET6 if ":" in address else socket.AF_INET
    message["ifindex"], message["state"], message["flags"] = ifindex, state, flags
    message["attrs"] = [("NDA_DST", address)]
    try:
        netlink.socket.change(message, _NEW_NEIGHBOUR, msg_flags, f"asking for neighbour {address}")
    except NetlinkError as refusal:
        if refusal.code not in _GONE:
            raise
