"""Many datagrams per system call: sendmmsg and recvmmsg over arrays that are allocated once.

Payloads, addresses and control messages lie in numpy arrays; the kernel's message headers point into them, so
a batch is filled and read with array operations. Control messages have one fixed layout in each direction and
family. Non-blocking; one thread per `Datagrams`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Iterable
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError

Family = Literal[4, 6]
Addresses = NDArray[np.uint8]  # shape (n, 16); IPv4 addresses are kept IPv4-mapped, as in the kernel's records

_SO_MARK, _SO_MEMINFO, _MEMINFO_DROPS = 36, 55, 8
_MTU_DISCOVER, _PMTUDISC_PROBE = {4: 10, 6: 23}, 3
_IP_PKTINFO, _IP_RECVTTL, _IP_TTL = 8, 12, 2
_MSG_TRUNC, _MSG_CTRUNC = 0x20, 0x08
HEADER_BYTES: Final = {4: 42, 6: 62}  # Ethernet, IP and UDP in front of a payload
_MAPPED: Final = np.frombuffer(bytes(10) + b"\xff\xff", np.uint8)

_libc = ctypes.CDLL(None, use_errno=True)

VECTOR = np.dtype([("base", "u8"), ("length", "u8")])
HEADER = np.dtype(
    [
        ("name", "u8"),
        ("name_bytes", "u4"),
        ("pad0", "u4"),
        ("vectors", "u8"),
        ("vector_count", "u8"),
        ("control", "u8"),
        ("control_bytes", "u8"),
        ("flags", "i4"),
        ("pad1", "u4"),
        ("bytes", "u4"),
        ("pad2", "u4"),
    ]
)


def _record(itemsize: int, **fields: tuple[Any, int]) -> np.dtype[Any]:
    """A structured type from name=(format, offset)."""
    return np.dtype(
        {
            "names": list(fields),
            "formats": [kind for kind, _ in fields.values()],
            "offsets": [offset for _, offset in fields.values()],
            "itemsize": itemsize,
        }
    )


_NAME = {
    4: _record(28, family=("u2", 0), port=(">u2", 2), address=(("u1", 4), 4)),
    6: _record(28, family=("u2", 0), port=(">u2", 2), address=(("u1", 16), 8), scope=("u4", 24)),
}
_NAME_BYTES = {4: 16, 6: 28}
# What arrives with a datagram: where it was addressed to, by which interface it came, its TTL or hop limit.
_ARRIVAL = {
    4: _record(
        56,
        info=("u8", 8), ifindex=("u4", 16), address=(("u1", 4), 24),
        ttl_kind=("u8", 40), ttl=("i4", 48),
    ),
    6: _record(
        64,
        info=("u8", 8), address=(("u1", 16), 16), ifindex=("u4", 32),
        ttl_kind=("u8", 48), ttl=("i4", 56),
    ),
}  # fmt: skip
# What is said with a datagram: its mark, its source address, and (0: as routed) its interface.
_DEPARTURE = {
    4: _record(
        56,
        head=("u8", 0), kind=("u8", 8), mark=("u4", 16), info_head=("u8", 24), info=("u8", 32),
        ifindex=("u4", 40), address=(("u1", 4), 44), destination=("u4", 48),
    ),
    6: _record(
        64,
        head=("u8", 0), kind=("u8", 8), mark=("u4", 16), info_head=("u8", 24), info=("u8", 32),
        address=(("u1", 16), 40), ifindex=("u4", 56),
    ),
}  # fmt: skip


def _kind(level: int, kind: int) -> int:
    """Level and type of a control message, as the eight bytes that they are beside each other."""
    return int.from_bytes(struct.pack("=ii", level, kind), sys.byteorder)


_INFO = {
    4: _kind(socket.IPPROTO_IP, _IP_PKTINFO),
    6: _kind(socket.IPPROTO_IPV6, socket.IPV6_PKTINFO),
}
_TTL = {4: _kind(socket.IPPROTO_IP, _IP_TTL), 6: _kind(socket.IPPROTO_IPV6, socket.IPV6_HOPLIMIT)}


def open_socket(family: Family, port: int, dscp: int) -> socket.socket:
    """A non-blocking UDP socket that tells where datagrams came in, and sends them with TTL 255, never in fragments.

    Parameters
    ----------
    port : int
        To bind to on every local address; 0 lets the kernel choose.

    Raises
    ------
    SwerveError
        If the port is taken, or must not be used.
    """
    sock = socket.socket(socket.AF_INET if family == 4 else socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        if family == 4:
            sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
            sock.setsockopt(socket.IPPROTO_IP, _IP_RECVTTL, 1)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 255)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
        else:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVHOPLIMIT, 1)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_UNICAST_HOPS, 255)
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
        # Whatever the kernel has learnt of the path: a reply in fragments would hide how little a path takes.
        level = socket.IPPROTO_IP if family == 4 else socket.IPPROTO_IPV6
        sock.setsockopt(level, _MTU_DISCOVER[family], _PMTUDISC_PROBE)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        sock.bind(("" if family == 4 else "::", port))
    except OSError as error:
        sock.close()
        raise SwerveError(
            f"UDP port {port or 'of the sender'} for IPv{family} probes: {error.strerror}",
            "stop what uses it (`ss -ulnp`), or set another probe.port on every host",
        ) from None
    return sock


def dropped(sock: socket.socket) -> int:
    """Datagrams that the kernel dropped because this socket's receive buffer was full."""
    info = sock.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36)
    return int(struct.unpack("9I", info)[_MEMINFO_DROPS]) if len(info) == 36 else 0


def families(addresses: Iterable[str]) -> list[Family]:
    """Of which families these are."""
    return sorted({6 if ":" in address else 4 for address in addresses})


def mapped(address: str) -> NDArray[np.uint8]:
    """An address as 16 bytes, IPv4 addresses mapped into IPv6."""
    if ":" in address:
        return np.frombuffer(socket.inet_pton(socket.AF_INET6, address), np.uint8)
    return np.concatenate([_MAPPED, np.frombuffer(socket.inet_pton(socket.AF_INET, address), np.uint8)])


def keys(addresses: Addresses) -> list[bytes]:
    """Each row as bytes, for look-ups in a dictionary."""
    flat = np.ascontiguousarray(addresses)
    return flat.view(f"V{flat.shape[1]}").ravel().tolist()


class Datagrams:
    """Room for `capacity` datagrams of one family, to receive into and to send from.

    Parameters
    ----------
    payload_bytes : int
        Room per datagram; longer ones arrive truncated, and `received_whole` says so.

    Attributes
    ----------
    payload : ndarray of uint8, shape (capacity, payload_bytes)
    lengths : ndarray of int64, shape (capacity,)
        Of what was received, or is to be sent.
    """

    def __init__(self, family: Family, capacity: int, payload_bytes: int) -> None:
        self.family, self.capacity = family, capacity
        self.payload = np.zeros((capacity, payload_bytes), np.uint8)
        self.names = np.zeros(capacity, _NAME[family])
        self.names["family"] = socket.AF_INET if family == 4 else socket.AF_INET6
        self._vectors = np.zeros(capacity, VECTOR)
        self._vectors["base"] = addresses(self.payload)
        self._arrivals = np.zeros(capacity, _ARRIVAL[family])
        self._departures = np.zeros(capacity, _DEPARTURE[family])
        self._departures["head"], self._departures["kind"] = 20, _kind(socket.SOL_SOCKET, _SO_MARK)
        self._departures["info_head"] = 28 if family == 4 else 36
        self._departures["info"] = _INFO[family]
        # Sets of headers over the same payloads: as the kernel left them, as they were made, as they go out.
        self._received = np.zeros(capacity, HEADER)
        self._received["name"] = addresses(self.names)
        self._received["name_bytes"] = _NAME_BYTES[family]
        self._received["vectors"], self._received["vector_count"] = addresses(self._vectors), 1
        self._outgoing = self._received.copy()
        self._outgoing["control"] = addresses(self._departures)
        self._outgoing["control_bytes"] = self._departures.itemsize
        self._received["control"] = addresses(self._arrivals)
        self._received["control_bytes"] = self._arrivals.itemsize
        self._pristine = self._received.copy()
        self._vectors["length"] = payload_bytes
        self._filled = 0  # how many headers the last receive has touched

    @property
    def lengths(self) -> NDArray[np.uint64]:
        """Bytes of each datagram that is to be sent."""
        return self._vectors["length"]

    def receive(self, sock: socket.socket) -> int:
        """Take what is waiting, up to the capacity; returns how many datagrams came.

        Raises
        ------
        OSError
            If the socket fails for another reason than having nothing.
        """
        if self._filled:
            self._received[: self._filled] = self._pristine[: self._filled]
            self._vectors["length"][: self._filled] = self.payload.shape[1]
        count = _libc.recvmmsg(
            sock.fileno(),
            ctypes.c_void_p(self._received.ctypes.data),
            self.capacity,
            socket.MSG_DONTWAIT,
            None,
        )
        self._filled = max(count, 0)
        if count < 0:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR, errno.ECONNREFUSED):
                raise OSError(code, os.strerror(code))
            return 0
        return int(count)

    def keep(self, places: NDArray[np.intp]) -> None:
        """Move some of the datagrams received to the front, in this order; the others are forgotten."""
        kept = slice(len(places))
        longest = int(self._received["bytes"][places].max(initial=0))  # the room is much larger than most
        self.payload[kept, :longest] = self.payload[places, :longest]
        for rows in (self.names, self._arrivals):
            rows[kept] = rows[places]
        self._received["bytes"][kept] = self._received["bytes"][places]

    def received_lengths(self, count: int) -> NDArray[np.int64]:
        """Bytes that arrived of each of the first `count` datagrams."""
        return self._received["bytes"][:count].astype(np.int64)

    def received_whole(self, count: int) -> NDArray[np.bool_]:
        """Which of them fit, and carry the control messages that were asked for, in the order expected."""
        arrivals = self._arrivals[:count]
        whole: NDArray[np.bool_] = (self._received["flags"][:count] & (_MSG_TRUNC | _MSG_CTRUNC)) == 0
        whole &= arrivals["info"] == _INFO[self.family]
        whole &= arrivals["ttl_kind"] == _TTL[self.family]
        return whole

    def sources(self, count: int) -> Addresses:
        """Where each of them came from; see `Addresses`."""
        return self._as_mapped(self.names["address"][:count])

    def destinations(self, count: int) -> NDArray[np.uint8]:
        """The local address each was sent to, in the family's own width."""
        return self._arrivals["address"][:count]

    def ports(self, count: int) -> NDArray[Any]:
        """The UDP source port of each."""
        return self.names["port"][:count]

    def ifindexes(self, count: int) -> NDArray[Any]:
        """The interface each came in by."""
        return self._arrivals["ifindex"][:count]

    def ttls(self, count: int) -> NDArray[Any]:
        """TTL or hop limit on arrival."""
        return self._arrivals["ttl"][:count]

    def _as_mapped(self, addresses: NDArray[np.uint8]) -> Addresses:
        if self.family == 6:
            return addresses
        rows = np.empty((len(addresses), 16), np.uint8)
        rows[:, :12] = _MAPPED
        rows[:, 12:] = addresses
        return rows

    def depart(self, count: int, marks: Any, addresses: NDArray[np.uint8], ifindexes: Any = 0) -> None:
        """Set mark, source (in the family's own width) and interface (0: as routed) of the first `count`."""
        self._departures["mark"][:count] = marks
        self._departures["address"][:count] = addresses
        self._departures["ifindex"][:count] = ifindexes

    def send(self, sock: socket.socket, count: int) -> dict[int, int]:
        """Send the first `count` datagrams.

        Returns
        -------
        dict
            Place -> errno, of each that the kernel refused. When the socket's buffer is full, all that were still
            to go carry EAGAIN.
        """
        return send_messages(sock, self._outgoing, count)


def send_messages(sock: socket.socket, headers: NDArray[Any], count: int) -> dict[int, int]:
    """Send the first `count` messages that these headers describe, in as few system calls as can be.

    Returns
    -------
    dict
        Place -> errno, of each that the kernel refused. When the socket's buffer is full, all that were still to go
        carry EAGAIN.
    """
    start, base, refused = 0, headers.ctypes.data, {}
    while start < count:
        sent = _libc.sendmmsg(
            sock.fileno(),
            ctypes.c_void_p(base + start * HEADER.itemsize),
            count - start,
            socket.MSG_DONTWAIT,
        )
        if sent > 0:
            start += sent
            continue
        code = ctypes.get_errno()
        if code == errno.EAGAIN:
            refused.update(dict.fromkeys(range(start, count), code))
            break
        refused[start] = code  # sendmmsg stops at the first that fails, and says why only when it is the first
        start += 1
    return refused


def addresses(array: NDArray[Any]) -> NDArray[np.uint64]:
    """Where in memory each row of an array lies."""
    stride = array.strides[0]
    return (array.ctypes.data + np.arange(len(array), dtype=np.uint64) * np.uint64(stride)).astype(np.uint64)
