"""Probes as Ethernet frames, and their way to `bpf/probe.c`: many per system call, on one packet socket.

A packet socket asks neither routes nor neighbours, so a probe reaches its path's interface whatever the routes say and
whichever gateway is dead; there probe.c hands it to the path's gateway. Numbers are in host byte order. Non-blocking;
one thread.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.errors import CapabilityError
from pytools.sources.probing import udp
from pytools.sources.probing.paths import PinnedPath

SEND_MARK: Final = 0x5E770001  # SWERVE_MARK_SEND
PROBE_BYTES: Final = 72  # UDP payload: the base packet and swerve's TLV
TLV_TYPE, TLV_BYTES = 253, 24

_SO_MARK = 36
_ETHERNET_BYTES, _UDP_BYTES, _BASE_BYTES, _TLV_HEADER_BYTES = 14, 8, 44, 4
_IP_BYTES: Final = {4: 20, 6: 40}
_ETHERTYPE: Final = {4: 0x0800, 6: 0x86DD}
_UNRECOGNISED = 0x80
_TTL = 255
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


@dataclass(frozen=True, slots=True)
class Lane:
    """What stays the same in all probes of one session."""

    session: int  # row of probe_sessions; its session identifier is one more
    path: int  # row of probe_paths
    ifindex: int
    source: str
    destination: str
    source_port: int
    error_estimate: int
    counts: bool = True  # whether an unanswered probe counts for silence


class Frames:
    """Room for one probe of each lane, all of one family.

    Parameters
    ----------
    port : int
        UDP port of the reflectors.
    dscp : int
        Differentiated services code point of the probes.
    """

    def __init__(self, family: udp.Family, lanes: Sequence[Lane], port: int, dscp: int) -> None:
        self.family, self.lanes = family, tuple(lanes)
        self.wire_bytes = _ETHERNET_BYTES + _IP_BYTES[family] + _UDP_BYTES + PROBE_BYTES  # of one frame
        rows = [_frame(family, lane, port, dscp) for lane in lanes]
        self._bytes = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), self.wire_bytes).copy()
        payload = self.wire_bytes - PROBE_BYTES
        self._seq = np.ndarray((len(rows),), ">u4", self._bytes, payload, (self.wire_bytes,))
        nonce = payload + _BASE_BYTES + _TLV_HEADER_BYTES
        self._nonce = self._bytes[:, nonce : nonce + 8]
        self._checksum = np.ndarray((len(rows),), ">u2", self._bytes, payload - 2, (self.wire_bytes,))
        self._sums = np.array([_checked_sum(family, row) for row in rows], np.int64)
        self._names = np.zeros(len(rows), _LINK_ADDRESS)
        self._names["family"], self._names["protocol"] = socket.AF_PACKET, _ETHERTYPE[family]
        self._names["ifindex"] = [lane.ifindex for lane in lanes]
        self._vectors = np.zeros(len(rows), udp.VECTOR)
        self._vectors["base"], self._vectors["length"] = udp.addresses(self._bytes), self.wire_bytes
        self._headers = np.zeros(len(rows), udp.HEADER)
        self._headers["name"], self._headers["name_bytes"] = udp.addresses(self._names), _LINK_ADDRESS.itemsize
        self._headers["vectors"], self._headers["vector_count"] = udp.addresses(self._vectors), 1

    def send(self, sock: socket.socket, seq: NDArray[Any]) -> dict[int, int]:
        """Send one probe of each lane.

        Parameters
        ----------
        seq : ndarray of int, shape (lanes,)
            Sequence numbers as they go on the wire.

        Returns
        -------
        dict
            Place -> errno, of each that the kernel refused.
        """
        nonces = np.frombuffer(os.urandom(8 * len(self.lanes)), np.uint8).reshape(-1, 8)
        self._seq[:] = seq
        self._nonce[:] = nonces
        words = nonces.view(">u2").sum(axis=1, dtype=np.int64) + (seq >> 16) + (seq & 0xFFFF)
        self._checksum[:] = _folded(self._sums + words)
        return udp.send_messages(sock, self._headers, len(self.lanes))


def open_socket() -> socket.socket:
    """A packet socket that sends frames of ours to `bpf/probe.c` and receives nothing.

    Raises
    ------
    CapabilityError
        If this process may not have one.
    """
    sock = None
    try:
        sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, 0)
        sock.setsockopt(socket.SOL_SOCKET, _SO_MARK, SEND_MARK)
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

    Attributes
    ----------
    address : tuple
        Where a packet socket sends it.
    """

    def __init__(self, pinned: PinnedPath, source_port: int, port: int, dscp: int) -> None:
        self._lane = Lane(0, pinned.index, pinned.ifindex, pinned.source, pinned.path.address, source_port, 0, False)
        self._family, self._port, self._dscp = pinned.family, port, dscp
        self.address = (pinned.path.interface, _ETHERTYPE[pinned.family])

    def around(self, payload: bytes) -> bytes:
        """The frame with this UDP payload."""
        frame = _headers(self._family, self._lane, self._port, self._dscp, len(payload)) + payload
        checksum = int(_folded(np.array([_checked_sum(self._family, frame)]))[0])
        at = len(frame) - len(payload) - 2
        return frame[:at] + struct.pack("!H", checksum) + frame[at + 2 :]


def _frame(family: udp.Family, lane: Lane, port: int, dscp: int) -> bytes:
    """One probe with everything but sequence number, timestamp, nonce and UDP checksum."""
    base = struct.pack("!I8xHH28x", 0, lane.error_estimate, lane.session + 1)
    tlv = struct.pack("!BBH24x", _UNRECOGNISED, TLV_TYPE, TLV_BYTES)
    return _headers(family, lane, port, dscp, PROBE_BYTES) + base + tlv


def _headers(family: udp.Family, lane: Lane, port: int, dscp: int, payload_bytes: int) -> bytes:
    # The destination says which path and whether it counts; probe.c replaces both addresses by those of the link.
    ethernet = struct.pack("!3xBH6xH", lane.counts, lane.path, _ETHERTYPE[family])
    length = _UDP_BYTES + payload_bytes
    transport = struct.pack("!HHHH", lane.source_port, port, length, 0)
    source, destination = (ipaddress.ip_address(each).packed for each in (lane.source, lane.destination))
    if family == 6:
        network = struct.pack("!IHBB", 6 << 28 | dscp << 22, length, socket.IPPROTO_UDP, _TTL) + source + destination
    else:
        fields = (0x45, dscp << 2, _IP_BYTES[4] + length, 0, _DONT_FRAGMENT, _TTL, socket.IPPROTO_UDP)
        network = struct.pack("!BBHHHBBH", *fields, 0) + source + destination
        checksum = int(_folded(np.array([_sum(network)]))[0])
        network = network[:10] + struct.pack("!H", checksum) + network[12:]
    return ethernet + network + transport


def _sum(data: bytes) -> int:
    return int(np.frombuffer(data, ">u2").sum(dtype=np.int64))


def _checked_sum(family: udp.Family, frame: bytes) -> int:
    """What the UDP checksum covers, as the frame stands, pseudo header included."""
    addresses = 8 if family == 4 else 32
    udp_at = _ETHERNET_BYTES + _IP_BYTES[family]
    length = len(frame) - udp_at
    padding = b"\0" * (len(frame) % 2)
    return _sum(frame[udp_at - addresses :] + padding) + socket.IPPROTO_UDP + length


def _folded(sums: NDArray[np.int64]) -> NDArray[np.int64]:
    """Internet checksums (RFC 1071) of these sums; never 0, which would mean "none"."""
    for _ in range(2):
        sums = (sums & 0xFFFF) + (sums >> 16)
    return np.where(sums == 0xFFFF, 0xFFFF, ~sums & 0xFFFF)
