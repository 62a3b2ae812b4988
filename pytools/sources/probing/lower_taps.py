"""Which port of a bond or team each probe leaves by, from packet sockets that are open only during a search.

The driver's hash is not computed here: kernels differ, and a team's is a program of its daemon. Non-blocking; one
thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import select
import socket
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pytools.kernel import socket_filter as bpf

_ETH_P_ALL: Final = 3
_OUTGOING: Final = 4  # PACKET_OUTGOING
_PORT_AT: Final = {4: 22, 6: 42}  # the destination's; the source's is before it. Probes have no options.
_DESTINATION: Final = {4: slice(16, 20), 6: slice(24, 40)}


class Left(NamedTuple):
    source_port: int
    destination: str
    lower: str


class LowerTaps:
    """What is seen of probes at these interfaces.

    Parameters
    ----------
    wakeups : epoll
        Readable when a probe was seen, until `seen` is called.

    Raises
    ------
    OSError
        If an interface is not there any more.
    """

    def __init__(self, wakeups: select.epoll, lowers: Iterable[str], port: int) -> None:
        self._sockets: dict[str, socket.socket] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for lower in lowers:
                sock = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 0)
                self._sockets[lower] = sock
                bpf.attach(sock, _outgoing_to(port))
                sock.bind((lower, _ETH_P_ALL))
                wakeups.register(sock, select.EPOLLIN)
            undo.pop_all()

    def seen(self) -> Iterator[Left]:
        """What has left since the last call."""
        for lower, sock in self._sockets.items():
            while True:
                try:
                    packet = sock.recv(64)
                except OSError:
                    break
                family = packet[0] >> 4
                if family not in _PORT_AT:
                    continue
                at = _PORT_AT[family]
                destination = str(ipaddress.ip_address(packet[_DESTINATION[family]]))
                yield Left(int.from_bytes(packet[at - 2 : at], "big"), destination, lower)

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}


def _outgoing_to(port: int) -> list[bpf.Instruction]:
    """Lets UDP packets to a port pass that leave here, whether IPv4 or IPv6; they begin with the IP header."""
    return [
        (bpf.LOAD_WORD, 0, 0, bpf.PACKET_TYPE),
        (bpf.EQUAL, 0, 11, _OUTGOING),
        (bpf.LOAD_BYTE, 0, 0, 0),
        (bpf.EQUAL, 0, 4, 0x45),
        (bpf.LOAD_BYTE, 0, 0, 9),
        (bpf.EQUAL, 0, 7, socket.IPPROTO_UDP),
        (bpf.LOAD_HALF, 0, 0, _PORT_AT[4]),
        (bpf.EQUAL, 4, 5, port),
        (bpf.LOAD_BYTE, 0, 0, 6),  # whatever else: IPv6, unless it is not sent by us
        (bpf.EQUAL, 0, 3, socket.IPPROTO_UDP),
        (bpf.LOAD_HALF, 0, 0, _PORT_AT[6]),
        (bpf.EQUAL, 0, 1, port),
        (bpf.RETURN, 0, 0, bpf.ALL),
        (bpf.RETURN, 0, 0, 0),
    ]
