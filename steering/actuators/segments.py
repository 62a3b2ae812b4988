"""Which way a live TCP connection takes, with its flow label or another: by segments that die at a router.

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
from typing import Final, Literal, NamedTuple

from pytools.closing import Closing
from pytools.errors import CapabilityError
from pytools.kernel.bpf import contract
from steering.actuators.flow_keys import TCP
from steering.plan import FlowKey

_WAIT_NS: Final = 800_000_000
_MARK: Final = contract.constant("SWERVE_MARK_PLAIN")
_FAMILY: Final = {4: socket.AF_INET, 6: socket.AF_INET6}
_ICMP: Final = {4: socket.IPPROTO_ICMP, 6: socket.IPPROTO_ICMPV6}
_TIME_EXCEEDED: Final = {4: 11, 6: 3}
_SOL_RAW, _FILTER = 255, 1  # ICMP_FILTER, ICMPV6_FILTER
_ICMP_BYTES, _SEGMENT = 8, struct.Struct("!HHIIBBHHH")
_IPV4, _IPV6 = struct.Struct("!BBHHHBBH4s4s"), struct.Struct("!IHBB16s16s")
_DONT_FRAGMENT, _ACK = 0x4000, 0x10
_LABEL_BITS: Final = (1 << 20) - 1

Answered = Callable[[str | None], None]  # the router where a segment died; None: nothing was heard


class _Key(NamedTuple):
    label: int
    ends: bytes  # addresses
    ports: bytes


class Segments(Closing):
    """Segments under way, of one family.

    Raises
    ------
    CapabilityError
        If this process may not have raw sockets.
    """

    def __init__(self, family: Literal[4, 6]) -> None:
        self._family = family
        self._waiting: dict[_Key, tuple[int, Answered]] = {}
        with contextlib.ExitStack() as undo:
            try:
                self._sending = undo.enter_context(_socket(family, socket.IPPROTO_RAW))
                self._hearing = undo.enter_context(_socket(family, _ICMP[family]))
                self._sending.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, _MARK)
                blocked = ~(1 << _TIME_EXCEEDED[family]) & 0xFFFFFFFF
                if family == 4:
                    self._hearing.setsockopt(_SOL_RAW, _FILTER, struct.pack("=I", blocked))
                else:
                    words = struct.pack("=8I", blocked, *[0xFFFFFFFF] * 7)
                    self._hearing.setsockopt(socket.IPPROTO_ICMPV6, _FILTER, words)
            except OSError as error:
                raise CapabilityError(f"a raw socket: {error.strerror}", "run as root, or grant CAP_NET_RAW") from None
            self._closing = undo.pop_all()

    def close(self) -> None:
        self._closing.close()
        self._waiting = {}

    def ask(self, flow: FlowKey, label: int, hops: int, interface: str, now: int, answered: Answered) -> None:
        """Send a segment of a connection that lives for so many hops; the label is of IPv6."""
        packet, key = _packet(self._family, flow, label, hops)
        with contextlib.suppress(OSError):
            self._sending.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode() + b"\0")
            self._sending.sendto(packet, (flow.remote, 0))
        self._waiting[key] = now + _WAIT_NS, answered

    def receive(self, now: int) -> None:
        """Take the answers that are there, and give up what was waited for long enough."""
        with contextlib.suppress(BlockingIOError):
            while True:
                message, address = self._hearing.recvfrom(512)
                header = (message[0] & 15) * 4 if self._family == 4 and message else 0
                key = _key(self._family, message[header + _ICMP_BYTES :])
                if key is not None and (waiting := self._waiting.pop(key, None)) is not None:
                    waiting[1](str(ipaddress.ip_address(address[0].partition("%")[0])))
        for key, (until_ns, answered) in list(self._waiting.items()):
            if now >= until_ns:
                del self._waiting[key]
                answered(None)


def _socket(family: Literal[4, 6], protocol: int) -> socket.socket:
    return socket.socket(_FAMILY[family], socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)


def _packet(family: Literal[4, 6], flow: FlowKey, label: int, hops: int) -> tuple[bytes, _Key]:
    local, remote = (ipaddress.ip_address(each).packed for each in (flow.local, flow.remote))
    numbers = flow.local_port, flow.remote_port, random.getrandbits(32), random.getrandbits(32), 5 << 4, _ACK
    segment = _SEGMENT.pack(*numbers, 0, 0, 0)
    pseudo = local + remote + struct.pack("!II", len(segment), TCP)
    checksum = 0xFFFF - int.from_bytes(pseudo + segment) % 0xFFFF
    segment = _SEGMENT.pack(*numbers, 0, checksum, 0)
    if family == 4:  # the kernel fills in the header's checksum
        size = _IPV4.size + len(segment)
        header = _IPV4.pack(0x45, 0, size, 0, _DONT_FRAGMENT, hops, TCP, 0, local, remote)
    else:
        header = _IPV6.pack(6 << 28 | label, len(segment), TCP, hops, local, remote)
    return header + segment, _Key(label if family == 6 else 0, local + remote, segment[:4])


def _key(family: Literal[4, 6], quoted: bytes) -> _Key | None:
    if family == 4:
        size, protocol, label = ((quoted[0] & 15) * 4, quoted[9:10], 0) if quoted else (0, b"", 0)
        ends = quoted[12:20]
    else:
        size, protocol, label = _IPV6.size, quoted[6:7], int.from_bytes(quoted[:4]) & _LABEL_BITS
        ends = quoted[8:40]
    ports = quoted[size : size + 4]
    return _Key(label, ends, ports) if protocol == bytes([TCP]) and len(ports) == 4 else None


def drawn_label() -> int:
    return random.randint(1, _LABEL_BITS)
