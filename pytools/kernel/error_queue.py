"""What the error queue of a socket holds (MSG_ERRQUEUE) of ICMP messages: struct sock_extended_err."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

#: Level and name of the option that asks for it, which each entry carries too, by address family: IP(V6)_RECVERR.
RECVERR: Final = {4: (socket.IPPROTO_IP, 11), 6: (socket.IPPROTO_IPV6, 25)}

_MOST: Final = 64  # taken at once
_ERROR: Final = struct.Struct("=IBBBBII")
_ADDRESS: Final = {2: slice(4, 8), 3: slice(8, 24)}  # by SO_EE_ORIGIN_ICMP, _ICMP6: where in the offender's sockaddr
_TIME_EXCEEDED: Final = frozenset({(2, 11), (3, 3)})  # origin and ICMP type


class Entry(NamedTuple):
    """One ICMP or ICMPv6 message."""

    code: int  # errno
    time_exceeded: bool  # a TTL or hop limit ended there
    information: int  # of EMSGSIZE: the MTU in bytes
    offender: str  # who sent it; empty where that is not said


def entry(level: int, kind: int, content: bytes) -> Entry | None:
    """What a control message of the queue says; None: it is none of ICMP."""
    if (level, kind) not in RECVERR.values() or len(content) < _ERROR.size:
        return None
    code, origin, icmp_type, _, _, information, _ = _ERROR.unpack_from(content)
    if origin not in _ADDRESS:
        return None
    where = _ADDRESS[origin]
    address = content[_ERROR.size :][where]
    offender = str(ipaddress.ip_address(address)) if len(address) == where.stop - where.start else ""
    return Entry(code, (origin, icmp_type) in _TIME_EXCEEDED, information, offender)


def read(sock: socket.socket, bufsize: int = 64) -> Iterator[tuple[Entry, bytes, Any]]:
    """What a non-blocking socket has been told: the message, the start of the packet, and where that was sent to."""
    for _ in range(_MOST):
        try:
            payload, ancillary, _, address = sock.recvmsg(bufsize, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return
        for each in ancillary:
            said = entry(*each)
            if said is not None:
                yield said, payload, address
