"""Probes of a chosen size along one path, never fragmented, and the routers' answers to those that are too large.

A socket per path, bound to its interface, receives replies and ICMP; the probes themselves leave as frames, which
probe.c redirects to the path's gateway. They are STAMP packets with a session identifier of their own
(`stamp_packet.SIZE_SSID`). Sizes are bytes of IP packets. Non-blocking; one thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from pytools.errors import SwerveError
from pytools.kernel import error_queue
from pytools.sources.probing import frames
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing.frames import Frame
from pytools.sources.probing.paths import PinnedPath, Session

HEADER_BYTES: Final = {4: 28, 6: 48}  # IP and UDP
SMALLEST: Final = {family: header + wire.SMALLEST_SIZED_BYTES for family, header in HEADER_BYTES.items()}
LARGEST: Final = 9216  # what Ethernet's longest frames carry; interfaces that take more are not probed beyond

_SO_BINDTODEVICE = 25
_ACCEPTS_ANSWERS = 4  # IP_PMTUDISC_INTERFACE: ICMP errors are reported, and change no route
_IP_MTU_DISCOVER, _IPV6_MTU_DISCOVER = 10, 23
_PMTUDISC_PROBE = 3
_BUFFER_BYTES: Final = 1 << 20
_GET_MTU = 0x8921  # SIOCGIFMTU
_room = bytearray(LARGEST)
_MOST_AT_ONCE: Final = 1024  # replies; a flood waits in the socket, or is lost there


class Reply(NamedTuple):
    seq: int
    size: int
    longest: int  # request that the reflector answers, as an IP packet; 0: it does not say


class Told(NamedTuple):
    """What somebody on the way says the path takes."""

    mtu_bytes: int
    by: str


class SizeProbes:
    """The socket of one path.

    Raises
    ------
    SwerveError
        If it cannot be had.
    """

    def __init__(self, pinned: PinnedPath, port: int, dscp: int) -> None:
        self._remote = (str(ipaddress.ip_address(pinned.path.address)), port)  # as the kernel's answers name it
        self._interface = pinned.path.interface
        self._header = HEADER_BYTES[pinned.family]
        self.wire_bytes = 0
        family = socket.AF_INET if pinned.family == 4 else socket.AF_INET6
        with contextlib.ExitStack() as undo:
            try:
                self._socket = undo.enter_context(socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK))
                self._packet = undo.enter_context(frames.open_socket(marked=not pinned.bare))
                self._prepare(pinned)
                self._frame = Frame(Session(pinned, int(self._socket.getsockname()[1])), port, dscp)
            except OSError as error:
                raise SwerveError(f"a socket for probes of {pinned.path}: {error.strerror}") from None
            undo.pop_all()

    def _prepare(self, pinned: PinnedPath) -> None:
        if pinned.family == 4:
            options = [(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _ACCEPTS_ANSWERS)]
        else:
            options = [
                (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1),
                (socket.IPPROTO_IPV6, _IPV6_MTU_DISCOVER, _PMTUDISC_PROBE),  # others keep the answers to themselves
            ]
        for level, option, value in (*options, (*error_queue.RECVERR[pinned.family], 1)):
            self._socket.setsockopt(level, option, value)
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, self._interface.encode() + b"\0")
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._socket.bind((pinned.source, 0))

    def interface_mtu(self) -> int | None:
        """What the interface takes now; None when it is gone."""
        request = struct.pack("16si20x", self._interface.encode(), 0)
        try:
            return int(struct.unpack_from("16si", fcntl.ioctl(self._socket, _GET_MTU, request))[1])
        except OSError:
            return None

    def send(self, size: int, seq: int, now_ns: int, short_reply: bool) -> int:
        """Send one; 0, or the errno of the refusal."""
        frame = self._frame.around(wire.size_request(size - self._header, seq, now_ns, short_reply))
        try:
            self._packet.sendto(frame, self._frame.address)
        except OSError as error:
            return error.errno or errno.EIO
        self.wire_bytes += len(frame)
        return 0

    def replies(self) -> Iterator[Reply]:
        """What has come back since the last call."""
        for _ in range(_MOST_AT_ONCE):
            try:
                count, source = self._socket.recvfrom_into(_room)
            except BlockingIOError:
                return
            except OSError:  # told by a router, or refused by the host: `told` reads what it was
                continue
            self.wire_bytes += count + self._header + frames.ETHERNET_BYTES
            reply = wire.size_reply(bytes(_room[: min(count, wire.SHORT_REPLY_BYTES)]))
            if reply is not None and source[:2] == self._remote:
                longest = reply.longest + self._header if reply.longest else 0
                yield Reply(reply.seq, count + self._header, longest)

    def told(self) -> Told | None:
        """The smallest size that somebody on the way has told since the last call."""
        told = filter(None, (mtu_told(said) for said, _, _ in error_queue.read(self._socket)))
        return min(told, key=lambda each: each.mtu_bytes, default=None)

    def close(self) -> None:
        self._socket.close()
        self._packet.close()


def mtu_told(said: error_queue.Entry | None) -> Told | None:
    """What an ICMP "fragmentation needed" or ICMPv6 "packet too big" says."""
    if said is None or said.code != errno.EMSGSIZE or not said.information:
        return None
    return Told(said.information, said.offender)
