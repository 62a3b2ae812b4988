"""Which way a flow label takes: segments of live IPv6 TCP connections with that label, which die at a router.

A segment has the addresses and ports of the connection, no payload, and a sequence number that is drawn, so that
neither end takes it for its own should it arrive; the router's answer carries it back. steer.c leaves it as it is, by
its mark. One thread, in the namespace whose connections are steered. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from pytools.closing import Closing
from pytools.errors import CapabilityError
from pytools.kernel.bpf import contract
from steering.actuators.flow_keys import TCP
from steering.plan import FlowKey

_WAIT_NS: Final = 800_000_000
_MARK: Final = contract.constant("SWERVE_MARK_PLAIN")
_FILTER, _TIME_EXCEEDED = 1, 3  # ICMPV6_FILTER, ICMPV6_TIME_EXCEED
_ICMP_BYTES, _IP, _SEGMENT = 8, struct.Struct("!IHBB16s16s"), struct.Struct("!HHIIBBHHH")
_ACK: Final = 0x10
_LABEL_BITS: Final = (1 << 20) - 1

Answered = Callable[[str | None], None]  # the router where a segment died; None: nothing was heard


class _Key(NamedTuple):
    """What of a segment comes back."""

    label: int
    ends: bytes  # addresses
    ports: bytes


class LabelAsking(Closing):
    """Segments under way.

    Raises
    ------
    CapabilityError
        If this process may not have raw sockets.
    """

    def __init__(self) -> None:
        self._waiting: dict[_Key, tuple[int, Answered]] = {}
        with contextlib.ExitStack() as undo:
            try:
                self._sending = undo.enter_context(_socket(socket.IPPROTO_RAW))
                self._hearing = undo.enter_context(_socket(socket.IPPROTO_ICMPV6))
                self._sending.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _MARK)
                blocked = bytearray(b"\xff" * 32)
                blocked[0] = 0xFF & ~(1 << _TIME_EXCEEDED)
                words = struct.pack("=8I", *struct.unpack("<8I", blocked))
                self._hearing.setsockopt(socket.IPPROTO_ICMPV6, _FILTER, words)
            except OSError as error:
                raise CapabilityError(f"a raw socket: {error.strerror}", "run as root, or grant CAP_NET_RAW") from None
            self._closing = undo.pop_all()

    def close(self) -> None:
        """Give up what is under way."""
        self._closing.close()
        self._waiting = {}

    def ask(self, flow: FlowKey, label: int, hops: int, interface: str, now: int, answered: Answered) -> None:
        """Send a segment of a connection that lives for so many hops."""
        packet, key = _packet(flow, label, hops)
        with contextlib.suppress(OSError):
            self._sending.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
            self._sending.sendto(packet, (flow.remote, 0))
        self._waiting[key] = now + _WAIT_NS, answered

    def receive(self, now: int) -> None:
        """Take the answers that are there, and give up what was waited for long enough."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, address = self._hearing.recvfrom(256)
                key = _key(message[_ICMP_BYTES:])
                if key is not None and (waiting := self._waiting.pop(key, None)) is not None:
                    waiting[1](str(ipaddress.ip_address(address[0].partition("%")[0])))
        for key, (until_ns, answered) in list(self._waiting.items()):
            if now >= until_ns:
                del self._waiting[key]
                answered(None)


def _socket(protocol: int) -> socket.socket:
    return socket.socket(socket.AF_INET6, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)


def _packet(flow: FlowKey, label: int, hops: int) -> tuple[bytes, _Key]:
    ends = b"".join(ipaddress.IPv6Address(each).packed for each in (flow.local, flow.remote))
    numbers = flow.local_port, flow.remote_port, random.getrandbits(32), random.getrandbits(32), 5 << 4, _ACK
    segment = _SEGMENT.pack(*numbers, 0, 0, 0)
    pseudo = ends + struct.pack("!II", len(segment), TCP)
    checksum = 0xFFFF - int.from_bytes(pseudo + segment) % 0xFFFF
    segment = _SEGMENT.pack(*numbers, 0, checksum, 0)
    header = struct.pack("!IHBB", 6 << 28 | label, len(segment), TCP, hops)
    return header + ends + segment, _Key(label, ends, segment[:4])


def _key(quoted: bytes) -> _Key | None:
    """Of the packet that a router quotes."""
    if len(quoted) < _IP.size + 4:
        return None
    first, _, protocol, _, source, destination = _IP.unpack_from(quoted)
    if protocol != TCP:
        return None
    return _Key(first & _LABEL_BITS, source + destination, quoted[_IP.size : _IP.size + 4])


def drawn_label() -> int:
    """A flow label."""
    return random.randint(1, _LABEL_BITS)
