"""Sends probes as Ethernet frames to `bpf/probe.c`, many at once, on one packet socket.

A packet socket uses neither routes nor neighbours, so a probe reaches its path's interface whatever the routes are and
whichever gateway is dead; there probe.c redirects it to the path's gateway. Numbers are in host byte order.
Non-blocking; one thread.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.errors import CapabilityError
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.kernel.bpf import contract
from pytools.sources.probing import stamp_packet, udp
from pytools.sources.probing.paths import Session
from pytools.sources.probing.schedule import Schedule
from pytools.sources.probing.stamp_packet import PROBE_BYTES

_SEND_MARK: Final = contract.constant("SWERVE_MARK_SEND")
ETHERNET_BYTES: Final = 14
_UDP_BYTES = 8
_IP_BYTES: Final = {4: 20, 6: 40}
_ETHERTYPE: Final = {4: 0x0800, 6: 0x86DD}
_NATIVE = struct.Struct("=H")
_DONT_FRAGMENT = 0x4000
_LINK_ADDRESS = np.dtype(
    [
        ("family", "u2"),
        ("protocol", ">u2"),
        ("ifindex", "i4"),
        ("hardware", "u2"),
        ("kind", "u1"),
        ("bytes", "u1"),
        ("address", "V8"),
    ]
)


class Frames:
    """Room for a probe of each session at each of several times, all of one family.

    Parameters
    ----------
    port : int
        UDP port of the reflectors.
    dscp : int
        Differentiated services code point of the probes.
    memory : Schedule
        Where they are put together, for whoever sends them.

    Attributes
    ----------
    headers : ndarray, shape (times, sessions)
        The messages, as sendmmsg(2) takes them.
    """

    def __init__(
        self, family: udp.Family, sessions: Sequence[Session], port: int, dscp: int, times: int, memory: Schedule
    ) -> None:
        self.wire_bytes = ETHERNET_BYTES + _IP_BYTES[family] + _UDP_BYTES + PROBE_BYTES  # of one frame
        rows = [_frame(family, session, port, dscp) for session in sessions]
        grid = times, len(rows)
        frames = memory.array((*grid, self.wire_bytes), np.uint8)
        frames[:] = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), self.wire_bytes)
        payload = self.wire_bytes - PROBE_BYTES
        nonce = payload + stamp_packet.NONCE_AT
        self._seq = frames[..., payload : payload + 4].view("u4")[..., 0]
        self._nonce = frames[..., nonce : nonce + 8].view("u4")
        self._checksum = frames[..., payload - 2 : payload].view("u2")[..., 0]
        self._sums = np.array([_checked_sum(family, row) for row in rows], np.uint64)
        names = memory.array((len(rows),), _LINK_ADDRESS)
        names["family"], names["protocol"] = socket.AF_PACKET, _ETHERTYPE[family]
        names["ifindex"] = [session.pinned.ifindex for session in sessions]
        vectors = memory.array((times * len(rows),), udp.VECTOR)
        vectors["base"] = memory.addresses(frames.reshape(-1, self.wire_bytes))
        vectors["length"] = self.wire_bytes
        self.headers = memory.array(grid, udp.HEADER)
        self.headers["name"], self.headers["name_bytes"] = memory.addresses(names), _LINK_ADDRESS.itemsize
        self.headers["vectors"], self.headers["vector_count"] = memory.addresses(vectors).reshape(grid), 1
        self._pointed_at = names, vectors

    def fill(self, places: NDArray[np.intp], seq: NDArray[np.int64]) -> None:
        """Make the probes of some times ready to be sent.

        Parameters
        ----------
        places : ndarray of int, shape (n,)
            Which times.
        seq : ndarray of int64, shape (n, sessions)
            Sequence numbers as they go on the wire, modulo 2^32.
        """
        nonces = np.frombuffer(os.urandom(8 * seq.size), "u4").reshape(*seq.shape, 2)
        big_endian = seq.astype(">u4").view("u4")
        self._seq[places] = big_endian
        self._nonce[places] = nonces
        self._checksum[places] = _checksum(self._sums + big_endian + nonces[..., 0] + nonces[..., 1])
        self.headers["bytes"][places] = 0

    def results(self, places: NDArray[np.intp]) -> NDArray[np.int32]:
        """What became of the messages: bytes that were sent, 0 (never tried), or an errno, negated."""
        found: NDArray[np.int32] = self.headers["bytes"][places]
        return found


def open_socket(marked: bool = True) -> socket.socket:
    """A packet socket that sends frames of ours to `bpf/probe.c`, unless they go unmarked, and receives nothing.

    Raises
    ------
    CapabilityError
        If this process may not have one.
    """
    sock = None
    try:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _SEND_MARK if marked else 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise CapabilityError(
            f"a packet socket for probes: {error.strerror}", "run as root, or grant CAP_NET_RAW and CAP_NET_ADMIN"
        ) from None
    return sock


class Frame:
    """One packet at a time along one path, of whatever size; probe.c sends it to the path's gateway, and no more.

    Where packets begin with the IP header it leaves as it is: with a header in front, the longest would be too long.
    """

    def __init__(self, session: Session, port: int, dscp: int) -> None:
        pinned = session.pinned
        self._session, self._family, self._port, self._dscp = session, pinned.family, port, dscp
        self._begins_at = ETHERNET_BYTES if pinned.bare else 0
        self._checksum_at = ETHERNET_BYTES + _IP_BYTES[pinned.family] + _UDP_BYTES - 2
        self.address = (pinned.path.interface, _ETHERTYPE[pinned.family])  # where a packet socket sends it

    def around(self, payload: bytes) -> bytes:
        frame = bytearray(_headers(self._family, self._session, self._port, self._dscp, len(payload)) + payload)
        _NATIVE.pack_into(frame, self._checksum_at, _checksum(_checked_sum(self._family, frame)))
        return bytes(frame[self._begins_at :])


def _frame(family: udp.Family, session: Session, port: int, dscp: int) -> bytes:
    """One probe with everything but sequence number, timestamp, nonce and UDP checksum."""
    estimate = stamp_packet.error_estimate(STAMP_BOUND_NS, session.pinned.shared_clock)
    return _headers(family, session, port, dscp, PROBE_BYTES) + stamp_packet.probe(0, estimate, session.row + 1)


def _headers(family: udp.Family, session: Session, port: int, dscp: int, payload_bytes: int) -> bytes:
    # The destination says which path and whether it counts; probe.c replaces both addresses by those of the link.
    ethernet = struct.pack("!3xBH6xH", session.counts, session.pinned.index, _ETHERTYPE[family])
    length = _UDP_BYTES + payload_bytes
    transport = struct.pack("!HHHH", session.source_port, port, length, 0)
    ends = session.pinned.source, session.pinned.path.address
    source, destination = (ipaddress.ip_address(each).packed for each in ends)
    if family == 6:
        first = 6 << 28 | dscp << 22 | session.flow_label
        network = struct.pack("!IHBB", first, length, socket.IPPROTO_UDP, session.ttl) + source + destination
    else:
        fields = (0x45, dscp << 2, _IP_BYTES[4] + length, 0, _DONT_FRAGMENT, session.ttl, socket.IPPROTO_UDP)
        network = struct.pack("!BBHHHBBH", *fields, 0) + source + destination
        network = network[:10] + _NATIVE.pack(_checksum(_sum(network))) + network[12:]
    return ethernet + network + transport


# Internet checksums (RFC 1071) come out right in whichever byte order words are added; here it is the machine's own.


def _sum(data: bytes | bytearray) -> int:
    return int.from_bytes(data, sys.byteorder) % 0xFFFF  # as 65,536 leaves a remainder of 1


def _checked_sum(family: udp.Family, frame: bytes | bytearray) -> int:
    """What the UDP checksum covers, as the frame stands, pseudo header included."""
    addresses = 8 if family == 4 else 32
    udp_at = ETHERNET_BYTES + _IP_BYTES[family]
    pseudo = struct.pack("!HH", socket.IPPROTO_UDP, len(frame) - udp_at)
    return _sum(frame[udp_at - addresses :] + bytes(len(frame) % 2) + pseudo)


def _checksum(sums: Any) -> Any:
    """The checksums of words of 16 or 32 bits that add up to these sums; never 0, which would mean "none"."""
    return 0xFFFF - sums % 0xFFFF
