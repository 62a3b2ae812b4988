"""What others change about links, routes, rules and nexthops, as the kernel announces it: enough to know when to read.

The receive buffer is small on purpose: a flood of news says no more than that all must be read again. The kernel
itself leaves out the news of changes that sockets of ours made. It does not announce what it deletes together with a
link, only the link. One thread.
"""

from __future__ import annotations

import errno
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from pytools.kernel import netns as namespaces
from pytools.kernel import socket_filter as bpf
from pytools.kernel.netlink.socket import messages

_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_GROUPS = (1, 7, 8, 11, 19, 32)  # RTNLGRP_LINK, _IPV4_ROUTE, _IPV4_RULE, _IPV6_ROUTE, _IPV6_RULE, _NEXTHOP
_OF_ROUTES = frozenset({24, 25})  # RTM_NEWROUTE, RTM_DELROUTE
_ROOM_BYTES = 64 << 10
_PORT_AT = 12  # nlmsg_pid


@dataclass(frozen=True, slots=True)
class News:
    """What was announced since the last time."""

    changed: bool = False
    routes: bool = False  # a route was made, changed or deleted, or news was lost


class NetlinkWatch:
    """Listens in one namespace.

    Parameters
    ----------
    ours : iterable of int
        Ports of sockets whose own changes are no news (`NetlinkSocket.port`).
    netns : str, optional
        A named namespace; the thread's own unless given.
    """

    def __init__(self, ours: Iterable[int] = (), netns: str | None = None) -> None:
        with namespaces.inside(netns):
            self._socket = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE
            )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _ROOM_BYTES)
        _leave_out(self._socket, list(ours))
        self._socket.bind((0, 0))
        for group in _GROUPS:
            self._socket.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, struct.pack("=I", group))

    def fileno(self) -> int:
        """What to wait on."""
        return self._socket.fileno()

    def read(self) -> News:
        """All that was announced since the last time; does not wait."""
        changed = routes = False
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return News(changed, routes)
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                changed = routes = True
                continue
            changed = True
            routes = routes or any(kind in _OF_ROUTES for _, kind, _, _ in messages(data))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _leave_out(sock: socket.socket, ports: list[int]) -> None:
    """Have the kernel drop what it would announce of changes that these sockets made."""
    swapped = [int.from_bytes(port.to_bytes(4, sys.byteorder), "big") for port in ports]
    code = [(bpf.LOAD_WORD, 0, 0, _PORT_AT)]
    code += [(bpf.EQUAL, len(swapped) - place, 0, port) for place, port in enumerate(swapped)]
    bpf.attach(sock, [*code, (bpf.RETURN, 0, 0, bpf.ALL), (bpf.RETURN, 0, 0, 0)])
