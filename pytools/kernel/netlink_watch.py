"""What others change about links, routes and nexthops, as the kernel tells it: enough to know when to read again.

The receive buffer is small on purpose: a flood of news says no more than that all must be read again, so it is not
worth reading. News of changes made by sockets of ours are left out by the kernel itself. One thread.
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
from pytools.kernel.netlink_attributes import attributes
from pytools.kernel.netlink_routes import route_of
from pytools.kernel.netlink_socket import messages

RouteName = tuple[int, str, int]  # table, prefix, metric

_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_GROUPS = (1, 7, 11, 32)  # RTNLGRP_LINK, _IPV4_ROUTE, _IPV6_ROUTE, _NEXTHOP
_NEW_ROUTE, _DEL_ROUTE, _NEW_NEXTHOP, _DEL_NEXTHOP = 24, 25, 104, 105
_NHA_ID = 1
_ROOM_BYTES = 64 << 10
_HEADER = struct.Struct("=IHHII")
_PORT_AT = 12  # nlmsg_pid


@dataclass(frozen=True, slots=True)
class Heard:
    """What was told since the last time. The kernel itself deletes nexthops and IPv4 routes without a word."""

    changed: bool = False
    missed: bool = False  # there was more than there was room for
    nexthops: frozenset[int] = frozenset()  # that somebody deleted and nobody made again, groups included
    routes: frozenset[RouteName] = frozenset()  # the same of routes
    made: frozenset[int | RouteName] = frozenset()  # nexthops and routes that somebody made or changed
    route_news: bool = False  # a route was made, changed or deleted, by the kernel or by somebody

    def then(self, later: Heard) -> Heard:
        """This, and what was told after it."""
        return Heard(
            self.changed or later.changed,
            self.missed or later.missed,
            self.nexthops - later.made | later.nexthops,
            self.routes - later.made | later.routes,
            self.made | later.made,
            self.route_news or later.route_news,
        )


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

    def read(self) -> Heard:
        """All that was told since the last time; does not wait."""
        heard = Heard()
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                return heard
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                heard = heard.then(Heard(changed=True, missed=True, route_news=True))
                continue
            for offset, kind, _, _ in messages(data):
                length, *_, port = _HEADER.unpack_from(data, offset)
                heard = heard.then(_told(kind, data[offset + _HEADER.size : offset + length], port))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _told(kind: int, body: bytes, port: int) -> Heard:
    """What one message says."""
    if kind in (_NEW_NEXTHOP, _DEL_NEXTHOP):
        numbers = frozenset(int.from_bytes(v, sys.byteorder) for name, v in attributes(body, 8) if name == _NHA_ID)
        return Heard(True, nexthops=numbers) if kind == _DEL_NEXTHOP else Heard(True, made=numbers)
    if kind in (_NEW_ROUTE, _DEL_ROUTE):
        route = route_of(body)
        names = frozenset([(route.table, route.destination, route.metric)])
        if kind == _NEW_ROUTE:
            return Heard(True, made=names, route_news=True)
        return Heard(True, routes=names if port else frozenset(), route_news=True)  # without a port it was the kernel
    return Heard(True)


def _leave_out(sock: socket.socket, ports: list[int]) -> None:
    """Have the kernel drop what it would tell of changes that these sockets made."""
    swapped = [int.from_bytes(port.to_bytes(4, sys.byteorder), "big") for port in ports]
    code = [(bpf.LOAD_WORD, 0, 0, _PORT_AT)]
    code += [(bpf.EQUAL, len(swapped) - place, 0, port) for place, port in enumerate(swapped)]
    bpf.attach(sock, [*code, (bpf.RETURN, 0, 0, bpf.ALL), (bpf.RETURN, 0, 0, 0)])
