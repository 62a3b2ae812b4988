"""The probe port of this host: bound, so that no other process can, and watched for interfaces without our program.

probe.c answers requests before they reach a socket. Packets that reach this socket arrived on an interface where the
program is not attached yet, or are for an address that no interface has (`ip route add local`). Non-blocking; one
thread.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable
from typing import Final

from pytools.kernel import socket_filter as bpf
from pytools.kernel.addresses import mapped
from pytools.kernel.netlink.nexthops import LOCAL
from pytools.kernel.netlink.routing import Netlink, NetlinkError
from pytools.sources.probing import udp

_AT_ONCE: Final = 64  # datagrams; a flood is dropped in the socket
_ROOM: Final = 64  # for control messages
_MOST_ADDRESSES: Final = 1024
_PKTINFO, _PKTINFO6 = struct.Struct("=i4s4s"), struct.Struct("=16si")
_LOOPBACK: Final = 1  # its index in every namespace
# No peer comes in by loopback, where no program of ours is: what is sent there is of this host's own users.
_NOT_FROM_LOOPBACK: Final = (
    (bpf.LOAD_WORD, 0, 0, bpf.INTERFACE),
    (bpf.EQUAL, 0, 1, _LOOPBACK),
    (bpf.RETURN, 0, 0, 0),
    (bpf.RETURN, 0, 0, bpf.ALL),
)


class ProbePort:
    """A socket per address family on the reflectors' port.

    Attributes
    ----------
    addresses : set of str
        Of this host, to which they were sent: those that no interface has are known from here alone.
    unanswered : int
        Requests that came in where the program was not yet, or to an address that it did not know.
    """

    def __init__(self, port: int) -> None:
        self._ifindexes: set[int] = set()  # by which requests of peers have come in
        self.addresses: set[str] = set()
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
                self._sockets[family] = sock = udp.open_socket(family, self._port)
                bpf.attach(sock, _NOT_FROM_LOOPBACK)

    def set_peers(self, addresses: Iterable[str]) -> None:
        """Learn interfaces from these hosts alone."""
        self._peers = {mapped(address) for address in addresses}

    def look(self) -> None:
        for sock in self._sockets.values():
            for _ in range(_AT_ONCE):
                try:
                    _, control, _, source = sock.recvmsg(1, _ROOM)
                except OSError:  # nothing more, or an ICMP error
                    break
                if mapped(source[0].partition("%")[0]) in self._peers:
                    self.unanswered += 1
                    for message in control:
                        ifindex, address = _arrival(message)
                        self._ifindexes.add(ifindex)
                        if len(self.addresses) < _MOST_ADDRESSES:
                            self.addresses.add(address)

    def interfaces(self) -> set[str]:
        """Names of those by which requests of peers have come in."""
        names = set()
        for ifindex in self._ifindexes:
            with contextlib.suppress(OSError):  # gone by now
                names.add(socket.if_indextoname(ifindex))
        return names

    def local_addresses(self, netlink: Netlink) -> set[str]:
        """This host's addresses: those of its interfaces, and others that were asked for and are delivered here.

        Raises
        ------
        SwerveError
            If the kernel does not report it.
        """
        found = {each.address for each in netlink.addresses()}
        for address in self.addresses - found:
            with contextlib.suppress(NetlinkError):  # it was until lately
                if netlink.route_get(address).kind == LOCAL:
                    found.add(address)
        return found

    def close(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets = {}


def _arrival(message: tuple[int, int, bytes]) -> tuple[int, str]:
    """The interface and the destination that a control message names: struct in_pktinfo or in6_pktinfo."""
    level, _, data = message
    if level == socket.IPPROTO_IP:
        ifindex, _, destination = _PKTINFO.unpack_from(data)
        return ifindex, socket.inet_ntop(socket.AF_INET, destination)
    destination, ifindex = _PKTINFO6.unpack_from(data)
    return ifindex, socket.inet_ntop(socket.AF_INET6, destination)
