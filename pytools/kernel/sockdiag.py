"""TCP sockets as the kernel's socket diagnostics list them: what each has retransmitted so far.

Lists the sockets of the calling thread's network namespace, by cookie (the same that BPF programs read).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from pytools.errors import SwerveError

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST_DUMP = 0x1 | 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48x")  # struct inet_diag_req_v2, any address
_MESSAGE = struct.Struct("=BBBB40xII20x")  # struct inet_diag_msg: family, state, timer, retrans, cookie
_ATTRIBUTE = struct.Struct("=HH")
_INFO = 2  # INET_DIAG_INFO
_TOTAL_RETRANS = struct.Struct("=100xI")  # struct tcp_info
_SYN_RECV, _NEW_SYN_RECV, _TIME_WAIT, _LISTEN = 3, 12, 6, 10
_STATES = 0x1FFE & ~(1 << _TIME_WAIT) & ~(1 << _LISTEN)  # the two others keep no total


def retransmitted_segments() -> dict[int, int]:
    """Segments retransmitted so far, by socket cookie; half-open requests included, whatever their count.

    Raises
    ------
    SwerveError
        If the kernel was built without socket diagnostics for TCP.
    """
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as sock:
        sock.settimeout(10.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES)
            sock.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 0, 0) + body)
            for message in _messages(sock):
                state, cookie, segments = _parsed(message)
                if segments or state == _SYN_RECV:
                    found[cookie] = segments
    return found


def _messages(sock: socket.socket) -> Iterator[bytes]:
    """The bodies of one dump."""
    while True:
        data = sock.recv(1 << 17)
        offset = 0
        while offset + _HEADER.size <= len(data):
            length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
            body = data[offset + _HEADER.size : offset + length]
            if kind == _DONE:
                return
            if kind == _ERROR:
                code = -struct.unpack_from("=i", body)[0]
                if code == errno.ENOENT:
                    return  # no such family here: IPv6 is off
                raise SwerveError(f"listing TCP sockets failed: {os.strerror(code)}", "run `swerve doctor`")
            yield body
            offset += (length + 3) & ~3


def _parsed(message: bytes) -> tuple[int, int, int]:
    """State, cookie and segments retransmitted."""
    _, state, _, retrans, low, high = _MESSAGE.unpack_from(message)
    cookie = high << 32 | low
    segments = retrans if state == _SYN_RECV else 0  # a request socket has no tcp_info
    offset = _MESSAGE.size
    while offset + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, offset)
        if length < _ATTRIBUTE.size:
            break
        if kind == _INFO and length - _ATTRIBUTE.size >= _TOTAL_RETRANS.size:
            segments = _TOTAL_RETRANS.unpack_from(message, offset + _ATTRIBUTE.size)[0]
        offset += (length + 3) & ~3
    return state, cookie, segments
