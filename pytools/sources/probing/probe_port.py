"""The probe port of this host: held, so that nobody else can have it, and watched for interfaces without our program.

probe.c answers requests before they reach a socket. What does reach this one came in by an interface where the program
is not attached yet. Non-blocking; one thread.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable
from typing import Any, Final

from pytools.sources.probing import udp

_AT_ONCE: Final = 64  # datagrams; a flood is dropped in the socket
_ROOM: Final = 64  # for control messages


class ProbePort:
    """A socket per address family on the reflectors' port.

    Attributes
    ----------
    ifindexes : set of int
        Interfaces by which requests of peers have come in.
    unanswered : int
        Requests that came in by them before the program was there.
    """

    def __init__(self, port: int) -> None:
        self.ifindexes: set[int] = set()
        self.unanswered = 0
        self._port = port
        self._peers: set[bytes] = set()
        self._sockets: dict[udp.Family, socket.socket] = {}

    def open(self, families: Iterable[udp.Family]) -> None:
        """Hold the port in these address families too.

        Raises
        ------
        SwerveError
            If the port cannot be had.
        """
        for family in families:
            if family not in self._sockets:
                self._sockets[family] = udp.open_socket(family, self._port)

    def set_peers(self, addresses: Iterable[str]) -> None:
        """Learn interfaces from these hosts alone."""
        self._peers = {udp.mapped(address).tobytes() for address in addresses}

    def look(self) -> None:
        """Take what has come in."""
        for sock in self._sockets.values():
            for _ in range(_AT_ONCE):
                try:
                    _, control, _, source = sock.recvmsg(1, _ROOM)
                except OSError:  # nothing more, or an ICMP error
                    break
                if udp.mapped(source[0].partition("%")[0]).tobytes() in self._peers:
                    self.ifindexes |= set(map(_ifindex, control))
                    self.unanswered += 1

    def close(self) -> None:
        """Give the port back."""
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}


def _ifindex(message: tuple[int, int, bytes]) -> int:
    """The interface that a control message names: in_pktinfo begins with it, in6_pktinfo ends with it."""
    level, _, data = message
    found: tuple[Any, ...] = struct.unpack_from("=i", data, 0 if level == socket.IPPROTO_IP else 16)
    return int(found[0])
