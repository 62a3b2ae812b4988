"""One routing-netlink socket: send a request, read its answers, turn a refusal into a sentence.

pyroute2 encodes and decodes the messages; the exchange itself is here because its own request methods know no
nexthop objects. Blocking, one request at a time, one thread; every read has a deadline.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from pyroute2.netlink import nlmsg

from pytools.errors import CapabilityError, SwerveError

REQUEST, ACK, DUMP_INTERRUPTED = 0x1, 0x4, 0x10
REPLACE, EXCLUSIVE, CREATE, DUMP = 0x100, 0x200, 0x400, 0x300

_SOL_NETLINK, _CAP_ACK, _EXT_ACK, _STRICT_CHECK = 270, 10, 11, 12
_ERROR, _DONE = 2, 3
_HAS_ATTRIBUTES, _CAPPED = 0x200, 0x100
_HEADER = struct.Struct("=IHHII")
_TIMEOUT_S = 10.0
_DUMP_ATTEMPTS = 5
_AT_ONCE = (
    200  # requests in one datagram: their acknowledgements fit the receive buffer, failed ones with their request
)
T = TypeVar("T")


class NetlinkError(SwerveError):
    """The kernel answered a netlink request with an error."""

    def __init__(self, what: str, code: int, sentence: str) -> None:
        super().__init__(f"{what}: {sentence or os.strerror(code)}")
        self.code = code  # the errno, positive
        self.sentence = sentence  # the kernel's own explanation; empty when it gave none


class _InterruptedDumpError(Exception):
    """A table changed while it was being dumped."""


class NetlinkSocket:
    """A request-and-answer socket in the namespace of the thread that makes it.

    Parameters
    ----------
    family : int
        The netlink protocol, NETLINK_ROUTE unless told.
    """

    def __init__(self, family: int = socket.NETLINK_ROUTE) -> None:
        # what requests go by and answers come by
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, family)
        for option in (_CAP_ACK, _EXT_ACK, _STRICT_CHECK):
            self.sock.setsockopt(_SOL_NETLINK, option, 1)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.sock.bind((0, 0))
        self.sock.settimeout(_TIMEOUT_S)
        self._sequence = 0

    @property
    def port(self) -> int:
        """The number by which the kernel knows this socket: it stands in what it tells of changes made by it."""
        port: int = self.sock.getsockname()[0]
        return port

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self.sock.close()

    def change(self, message: nlmsg, msg_type: int, msg_flags: int, what: str) -> None:
        """Ask for a change and wait for the kernel's acknowledgement.

        Raises
        ------
        NetlinkError
            With the kernel's own sentence, `what` in front of it.
        CapabilityError
            If the privilege is missing.
        """
        self._exchange(self._encoded(message, msg_type, msg_flags | ACK), _decoder(type(message)), what, until_end=True)

    def get(self, message: nlmsg, msg_type: int, what: str) -> Any:
        """Ask for one object; refusals as for `change`."""
        answers = self._exchange(self._encoded(message, msg_type, 0), _decoder(type(message)), what, until_end=False)
        return answers[0]

    def get_body(self, body: bytes, msg_type: int, what: str) -> bytes:
        """Ask for one object with a request that is encoded already; the answer without its header, not decoded."""
        return self._exchange(self._framed(body, msg_type, 0), _body, what, until_end=False)[0]

    def get_bodies(self, body: bytes, msg_type: int, what: str) -> list[bytes]:
        """The same for an answer of several parts, whose end is marked."""
        return self._exchange(self._framed(body, msg_type, 0), _body, what, until_end=True)

    def change_bodies(
        self, bodies: Sequence[bytes], msg_type: int, msg_flags: int, what: str
    ) -> list[NetlinkError | None]:
        """Ask for many changes at once, encoded already; each one's refusal, or None for those that were made.

        Raises
        ------
        CapabilityError
            If the privilege is missing.
        """
        found: list[NetlinkError | None] = []
        for first in range(0, len(bodies), _AT_ONCE):
            found += self._change_some(bodies[first : first + _AT_ONCE], msg_type, msg_flags, what)
        return found

    def _change_some(
        self, bodies: Sequence[bytes], msg_type: int, msg_flags: int, what: str
    ) -> list[NetlinkError | None]:
        requests, places = [], {}
        for place, body in enumerate(bodies):
            requests.append(self._framed(body, msg_type, msg_flags | ACK))
            places[self._sequence] = place
        self.sock.send(b"".join(request + bytes(-len(request) % 4) for request in requests))
        found: list[NetlinkError | None] = [None] * len(bodies)
        while places:
            data = self._receive(what)
            for offset, kind, flags, sequence in messages(data):
                if kind != _ERROR or sequence not in places:
                    continue
                place = places.pop(sequence)
                try:
                    raise_refusal(data, offset, kind, flags, what)
                except NetlinkError as refusal:
                    found[place] = refusal
        return found

    def dump(self, message: nlmsg, msg_type: int, what: str) -> list[Any]:
        """Ask for a whole table; asks again when the table changed under the dump."""
        return self._dump(self._encoded(message, msg_type, DUMP), _decoder(type(message)), what)

    def dump_bodies(self, body: bytes, msg_type: int, what: str) -> list[bytes]:
        """The same with a request that is encoded already; the answers without their headers, not decoded."""
        return self._dump(self._framed(body, msg_type, DUMP), _body, what)

    def _dump(self, request: bytes, decode: Callable[[bytes, int], T], what: str) -> list[T]:
        for _ in range(_DUMP_ATTEMPTS):
            try:
                return self._exchange(request, decode, what, until_end=True)
            except _InterruptedDumpError:
                continue
        raise SwerveError(f"{what}: the table keeps changing while it is read", "try again")

    def _framed(self, body: bytes, msg_type: int, msg_flags: int) -> bytes:
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        return _HEADER.pack(_HEADER.size + len(body), msg_type, msg_flags | REQUEST, self._sequence, 0) + body

    def _encoded(self, message: nlmsg, msg_type: int, msg_flags: int) -> bytes:
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        message["header"] = {
            "type": msg_type,
            "flags": msg_flags | REQUEST,
            "sequence_number": self._sequence,
            "pid": 0,
        }
        message.encode()
        return bytes(message.data)

    def _exchange(self, request: bytes, decode: Callable[[bytes, int], T], what: str, until_end: bool) -> list[T]:
        """Send, and read until the acknowledgement, the end of the dump, or the one answer."""
        self.sock.send(request)
        interrupted = False
        answers: list[T] = []
        while True:
            data = self._receive(what)
            for offset, kind, flags, sequence in messages(data):
                if sequence != self._sequence:
                    continue  # the rest of an earlier exchange that was given up
                interrupted |= bool(flags & DUMP_INTERRUPTED)
                if kind in (_ERROR, _DONE):
                    raise_refusal(data, offset, kind, flags, what)
                    if interrupted:
                        raise _InterruptedDumpError
                    return answers
                answers.append(decode(data, offset))
            if answers and not until_end:
                return answers

    def _receive(self, what: str) -> bytes:
        try:
            size = self.sock.recv_into(bytearray(1), 1, socket.MSG_PEEK | socket.MSG_TRUNC)
            return self.sock.recv(max(size, 65536))
        except TimeoutError:
            raise SwerveError(f"{what}: the kernel did not answer within {_TIMEOUT_S:g} s") from None


def _decoder(message: type[nlmsg]) -> Callable[[bytes, int], Any]:
    """How pyroute2 decodes the message of a kind that begins at an offset."""

    def decode(data: bytes, offset: int) -> Any:
        decoded = message(data, offset=offset)
        decoded.decode()
        return decoded

    return decode


def _body(data: bytes, offset: int) -> bytes:
    return data[offset + _HEADER.size : offset + _HEADER.unpack_from(data, offset)[0]]


def messages(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Offset, type, flags and sequence number of every message in one datagram."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags, sequence, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        yield offset, kind, flags, sequence
        offset += (length + 3) & ~3


def bodies(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Type and body of every message in one datagram."""
    return ((kind, _body(data, offset)) for offset, kind, _, _ in messages(data))


def raise_refusal(data: bytes, offset: int, kind: int, flags: int, what: str) -> None:
    """Raise what an error or end-of-dump message says, if it says that something failed."""
    length = _HEADER.unpack_from(data, offset)[0]
    body = data[offset + _HEADER.size : offset + length]
    code = -struct.unpack_from("=i", body)[0] if len(body) >= 4 else 0
    if code == 0:
        return
    sentence = ""
    if flags & _HAS_ATTRIBUTES:
        start = 4
        if kind == _ERROR:
            inner = struct.unpack_from("=I", body, 4)[0]
            start += _HEADER.size if flags & _CAPPED else (inner + 3) & ~3
        sentence = _explanation(body[start:])
    if code in (errno.EPERM, errno.EACCES):
        raise CapabilityError(f"{what}: {sentence or os.strerror(code)}", "run it as root (CAP_NET_ADMIN)")
    raise NetlinkError(what, code, sentence)


def _explanation(attributes: bytes) -> str:
    """The kernel's sentence among the attributes of an extended acknowledgement."""
    offset = 0
    while offset + 4 <= len(attributes):
        length, kind = struct.unpack_from("=HH", attributes, offset)
        if length < 4:
            break
        if kind == 1:
            return attributes[offset + 4 : offset + length].rstrip(b"\0").decode(errors="replace").rstrip(". ")
        offset += (length + 3) & ~3
    return ""


_HEAD = struct.Struct("=HH")  # length, type
_TYPE_MASK = 0x3FFF  # without the flags "nested" and "in network order"


def attributes(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Type and value of every attribute from an offset on; stops at one that does not fit in."""
    end = len(data)
    while offset + 4 <= end:
        length, name = _HEAD.unpack_from(data, offset)
        if not 4 <= length <= end - offset:
            return
        yield name & _TYPE_MASK, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def attribute(name: int, value: bytes) -> bytes:
    return _HEAD.pack(4 + len(value), name) + value + bytes(-len(value) % 4)
