"""What the kernel announces of links, addresses, neighbours, routes, rules and nexthops.

The kernel does not announce what it deletes together with a link, only the link. One thread.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from pytools.closing import Closing
from pytools.kernel import netns as namespaces
from pytools.kernel import socket_filter as bpf
from pytools.kernel.netlink.socket import bodies

_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_OF_ROUTES = frozenset({24, 25})  # RTM_NEWROUTE, RTM_DELROUTE
_ROOM_BYTES = 64 << 10
_PORT_AT = 12  # nlmsg_pid
OVERRUN: Final = -1  # in the place of a message type: something was announced that the socket had no room for


class Group(IntEnum):
    LINK = 1
    NEIGHBOUR = 3
    TC = 4
    ADDRESS4 = 5
    ROUTE4 = 7
    RULE4 = 8
    ADDRESS6 = 9
    ROUTE6 = 11
    RULE6 = 19
    NEXTHOP = 32


class Monitor(Closing):
    """Receives what is announced to some groups, in one namespace.

    Parameters
    ----------
    groups : iterable of Group
        Those that this kernel has not (of IPv6) are left out.
    ours : iterable of int
        Ports of sockets whose own changes are no news (`NetlinkSocket.port`).
    netns : str, optional
        A named namespace; the thread's own unless given.
    room_bytes : int
        How much may wait to be read; what does not fit is lost, and told as `OVERRUN`.
    """

    def __init__(
        self, groups: Iterable[Group], ours: Iterable[int] = (), netns: str | None = None, room_bytes: int = 1 << 20
    ) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        with namespaces.inside(netns):
            # what is read from; it does not block
            self.sock = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, room_bytes)
            if ports := list(ours):
                _leave_out(self.sock, ports)
            self.sock.bind((0, 0))
            for group in groups:
                with contextlib.suppress(FileNotFoundError):
                    self.sock.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, struct.pack("=I", group))
        except BaseException:
            self.sock.close()
            raise

    def fileno(self) -> int:
        return self.sock.fileno()

    def messages(self) -> Iterator[tuple[int, bytes]]:
        """Type and body of all that was announced since the last time; does not wait."""
        while True:
            try:
                data = self.sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                yield OVERRUN, b""
                continue
            yield from bodies(data)

    def close(self) -> None:
        self.sock.close()


@dataclass(frozen=True, slots=True)
class News:
    """What was announced since the last time."""

    changed: bool = False
    routes: bool = False  # a route was made, changed or deleted, or news was lost


class NetlinkWatch(Monitor):
    """What others change about links, routes, rules and nexthops: enough to know when to read.

    The receive buffer is small on purpose: a flood of news says no more than that all must be read again.
    """

    def __init__(self, ours: Iterable[int] = (), netns: str | None = None) -> None:
        groups = (Group.LINK, Group.ROUTE4, Group.RULE4, Group.ROUTE6, Group.RULE6, Group.NEXTHOP)
        super().__init__(groups, ours, netns, _ROOM_BYTES)

    def read(self) -> News:
        """All that was announced since the last time; does not wait."""
        kinds = {kind for kind, _ in self.messages()}
        return News(bool(kinds), bool(kinds & _OF_ROUTES) or OVERRUN in kinds)


def _leave_out(sock: socket.socket, ports: list[int]) -> None:
    """Have the kernel drop what it would announce of changes that these sockets made."""
    swapped = [int.from_bytes(port.to_bytes(4, sys.byteorder), "big") for port in ports]
    code = [(bpf.LOAD_WORD, 0, 0, _PORT_AT)]
    code += [(bpf.EQUAL, len(swapped) - place, 0, port) for place, port in enumerate(swapped)]
    bpf.attach(sock, [*code, (bpf.RETURN, 0, 0, bpf.ALL), (bpf.RETURN, 0, 0, 0)])
