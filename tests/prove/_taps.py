"""How many datagrams of the proof's traffic pass an interface, counted by the kernel.

A packet socket that nobody reads: what its filter lets through is counted, even when there is no room for it. It sees
what comes in before any program at TC or a route can lose it, and what goes out behind the queue. No thread.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

from _traffic import PORT

from pytools.kernel import socket_filter

_ETH_P_ALL, _ETH_P_IP = 3, 0x0800
_SOL_PACKET, _STATISTICS = 263, 6
_LOAD_BYTE: Final = 0x30
_PROTOCOL_AT, _PORT_AT = 23, 36  # in an Ethernet frame with an IPv4 packet without options
_DATAGRAMS: Final = (
    (socket_filter.LOAD_HALF, 0, 0, 12),
    (socket_filter.EQUAL, 0, 5, _ETH_P_IP),
    (_LOAD_BYTE, 0, 0, _PROTOCOL_AT),
    (socket_filter.EQUAL, 0, 3, socket.IPPROTO_UDP),
    (socket_filter.LOAD_HALF, 0, 0, _PORT_AT),
    (socket_filter.EQUAL, 0, 1, PORT),
    (socket_filter.RETURN, 0, 0, 1),
    (socket_filter.RETURN, 0, 0, 0),
)


class Tap:
    """Counts the datagrams that pass an interface of the network namespace that the caller is in; close it."""

    def __init__(self, interface: str) -> None:
        self._passed = 0
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        try:
            socket_filter.attach(self._socket, _DATAGRAMS)
            self._socket.bind((interface, _ETH_P_ALL))
        except BaseException:
            self._socket.close()
            raise

    def passed(self) -> int:
        """So many since it was made."""
        more, _ = struct.unpack("@II", self._socket.getsockopt(_SOL_PACKET, _STATISTICS, 8))  # which sets it to zero
        self._passed += more
        return self._passed

    def close(self) -> None:
        """Count no more."""
        self._socket.close()
