"""UDP sockets on the probes' ports, and messages as sendmmsg(2) has them.

Non-blocking; one thread.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from typing import Final, Literal

import numpy as np

from pytools.errors import SwerveError

Family = Literal[4, 6]

_IP_PKTINFO: Final = 8

# struct iovec and struct mmsghdr
VECTOR = np.dtype([("base", "u8"), ("length", "u8")])
HEADER = np.dtype(
    [
        ("name", "u8"),
        ("name_bytes", "u4"),
        ("pad0", "u4"),
        ("vectors", "u8"),
        ("vector_count", "u8"),
        ("control", "u8"),
        ("control_bytes", "u8"),
        ("flags", "i4"),
        ("pad1", "u4"),
        ("bytes", "i4"),
        ("pad2", "u4"),
    ]
)


def open_socket(family: Family, port: int) -> socket.socket:
    """A non-blocking UDP socket on every local address of a family, which reports by which interface datagrams came in.

    Parameters
    ----------
    port : int
        0 lets the kernel choose.

    Raises
    ------
    SwerveError
        If the port is taken, or must not be used.
    """
    sock = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        if family == 4:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        sock.bind(("" if family == 4 else "::", port))
    except OSError as error:
        sock.close()
        raise SwerveError(
            f"UDP port {port or 'of the sender'} for IPv{family} probes: {error.strerror}",
            "stop what uses it (`ss -ulnp`), or set another probe.port on every host",
        ) from None
    return sock


def families(addresses: Iterable[str]) -> list[Family]:
    return sorted({6 if ":" in address else 4 for address in addresses})
