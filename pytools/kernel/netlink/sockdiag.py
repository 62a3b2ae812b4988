"""TCP sockets as the kernel's socket diagnostics list them: what each has done so far, and whose it is.

Of the network namespace in which a `Diagnostics` is made, by cookie (the same that BPF programs read). Times are
nanoseconds. `struct tcp_info` grows from kernel to kernel: a field that this one does not have is None. One thread per
`Diagnostics`.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.kernel.netlink.socket import attributes

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_QUERY = struct.Struct("=BBBxI")  # struct inet_diag_req_v2: family, protocol, extensions, states; then the identity
_IDENTITY = struct.Struct("!HH16s16s")  # struct inet_diag_sockid: ports, addresses; then interface and cookie
_IDENTITY_END = struct.Struct("=III")
_ANY = bytes(48)
_NO_COOKIE = 0xFFFFFFFF
_MESSAGE = struct.Struct("=BBBB48xIIIII")  # struct inet_diag_msg: family, state, timer, retrans; expires ... uid, inode
_INFO, _PROTOCOL_ABOVE, _CGROUP = 2, 19, 21  # INET_DIAG_INFO, _ULP_INFO, _CGROUP_ID
_MPTCP, _TOKEN, _LOCAL_ID = 3, 2, 10  # INET_ULP_INFO_MPTCP; in it MPTCP_SUBFLOW_ATTR_TOKEN_LOC, _ID_LOC
_NEVER_LOST: Final = 0x7FFFFFFF  # TCP_INFINITE_SSTHRESH

SYN_RECV, TIME_WAIT, LISTEN = 3, 6, 10
_STATES: Final = 0x1FFE & ~(1 << TIME_WAIT) & ~(1 << LISTEN)  # the two others keep no totals
_RECEIVE_BYTES: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """The part of `struct tcp_info` that is of use here, since the connection began."""

    state: int
    congestion: int  # TCP_CA_Open and so on
    retransmits: int  # unanswered timeouts in a row
    rto_ns: int  # doubled by each of these
    last_ack_ns: int  # since an acknowledgement arrived
    srtt_ns: int
    cwnd_segments: int
    ssthresh_segments: int | None  # None: has not met congestion
    retransmitted_segments: int
    acknowledged_bytes: int | None
    received_bytes: int | None
    segments_out: int | None
    segments_in: int | None
    min_rtt_ns: int | None
    delivered: int | None
    delivered_ce: int | None
    sent_bytes: int | None  # retransmissions included
    retransmitted_bytes: int | None
    dsack_duplicates: int | None
    timeouts: int | None  # since 6.7


@dataclass(frozen=True, slots=True)
class Socket:
    """One socket, or one half-open request (state SYN_RECV, without `info`)."""

    cookie: int
    family: int
    state: int
    local: str
    local_port: int
    remote: str
    remote_port: int
    interface: int  # index of the one that it is bound to, 0 for none
    inode: int  # 0: no descriptor holds it
    uid: int
    cgroup: int  # identifier, 0 when the kernel does not say
    request_retransmits: int  # SYN-ACKs retransmitted, while it is a request
    info: TcpInfo | None
    mptcp: tuple[int, int] | None = None  # of a subflow: the token of its connection, and the id of its local address


class Diagnostics(Closing):
    """A way to ask about the TCP sockets of the namespace that it was made in.

    Raises
    ------
    SwerveError
        If the kernel was built without socket diagnostics.
    """

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        except OSError as error:
            raise _refused(error.errno or 0) from None
        self._socket.settimeout(10.0)
        self._sequence = 0

    def sockets(self) -> Iterator[Socket]:
        """All but listening ones and those in TIME-WAIT; half-open requests included.

        Raises
        ------
        SwerveError
            If the kernel refuses.
        """
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _QUERY.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), _STATES) + _ANY
            for message in self._ask(body, _DUMP):
                found = parsed(message)
                if found is not None:
                    yield found

    def find(
        self,
        local: bytes,
        local_port: int,
        remote: bytes,
        remote_port: int,
        interface: int,
        cookie: int,
        info: bool = False,
    ) -> Socket | None:
        """The socket with this identity; None when there is none (any more).

        Parameters
        ----------
        local, remote : bytes
            16 bytes; IPv4-mapped ones are IPv4.
        interface : int
            Index; matters only for sockets bound to one.
        cookie : int
            Of this very socket; 0: any.
        """
        family = socket.AF_INET6
        if local[:12] == remote[:12] == _MAPPED:  # finds the sockets of both families
            family, local, remote = socket.AF_INET, local[12:], remote[12:]
        low, high = (cookie & 0xFFFFFFFF, cookie >> 32) if cookie else (_NO_COOKIE, _NO_COOKIE)
        identity = _IDENTITY.pack(local_port, remote_port, local, remote) + _IDENTITY_END.pack(interface, low, high)
        extensions = 1 << (_INFO - 1) if info else 0
        body = _QUERY.pack(family, socket.IPPROTO_TCP, extensions, 0xFFFFFFFF) + identity
        try:
            return next((found for message in self._ask(body, 0) if (found := parsed(message)) is not None), None)
        except SwerveError:
            return None

    def _ask(self, body: bytes, flags: int) -> Iterator[bytes]:
        self._sequence = (self._sequence + 1) & 0xFFFFFFFF
        header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST | flags, self._sequence, 0)
        try:
            self._socket.send(header + body)
            while True:
                data = self._socket.recv(_RECEIVE_BYTES)
                for kind, sequence, answer in messages(data):
                    if sequence != self._sequence:
                        continue  # of a question that was given up
                    if kind == _DONE:
                        return
                    if kind == _ERROR:
                        code = -struct.unpack_from("=i", answer)[0] if len(answer) >= 4 else errno.EPROTO
                        if code == errno.ENOENT:
                            return  # no such socket, or no such family here: IPv6 is off
                        raise _refused(code)
                    yield answer
                    if not flags & _DUMP:
                        return
        except OSError as error:
            raise _refused(error.errno or errno.EPROTO) from None

    def close(self) -> None:
        self._socket.close()


_MAPPED: Final = bytes(10) + b"\xff\xff"


def _refused(code: int) -> SwerveError:
    return SwerveError(f"listing TCP sockets failed: {os.strerror(code)}", "run `swerve doctor`")


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Type, sequence number and body of the netlink messages in a datagram; stops at one that does not fit in."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
        if not _HEADER.size <= length <= len(data) - offset:
            return
        yield kind, sequence, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def parsed(message: bytes) -> Socket | None:
    """A `struct inet_diag_msg` with its attributes; None when it is too short to be one."""
    if len(message) < _MESSAGE.size:
        return None
    family, state, _, retransmits, _, _, _, uid, inode = _MESSAGE.unpack_from(message)
    local_port, remote_port, local, remote = _IDENTITY.unpack_from(message, 4)
    interface, low, high = _IDENTITY_END.unpack_from(message, 4 + _IDENTITY.size)
    info, cgroup, mptcp = None, 0, None
    for kind, value in attributes(message, _MESSAGE.size):
        if kind == _INFO and state != SYN_RECV:
            info = tcp_info(value)
        elif kind == _PROTOCOL_ABOVE:
            mptcp = _mptcp(value)
        elif kind == _CGROUP and len(value) >= 8:
            cgroup = struct.unpack_from("=Q", value)[0]
    return Socket(
        cookie=high << 32 | low,
        family=family,
        state=state,
        local=_address(family, local),
        local_port=local_port,
        remote=_address(family, remote),
        remote_port=remote_port,
        interface=interface,
        inode=inode,
        uid=uid,
        cgroup=cgroup,
        request_retransmits=retransmits if state == SYN_RECV else 0,
        info=info,
        mptcp=mptcp,
    )


def _mptcp(above: bytes) -> tuple[int, int] | None:
    """Token and local id of a subflow, from what is said of the protocol above TCP."""
    nested = next((value for kind, value in attributes(above) if kind == _MPTCP), b"")
    found = dict(attributes(nested))
    if len(found.get(_TOKEN, b"")) < 4 or not found.get(_LOCAL_ID):
        return None
    return struct.unpack_from("=I", found[_TOKEN])[0], found[_LOCAL_ID][0]


def tcp_info(raw: bytes) -> TcpInfo | None:
    """`struct tcp_info` as long as this kernel has it; None when not even the totals of 2.6 are there."""
    if len(raw) < 104:
        return None

    def at(offset: int, code: str = "=I") -> int | None:
        if offset + struct.calcsize(code) > len(raw):
            return None
        value: int = struct.unpack_from(code, raw, offset)[0]
        return value

    srtt_us, ssthresh, cwnd = struct.unpack_from("=I4xII", raw, 68)
    min_rtt_us = at(148)
    return TcpInfo(
        state=raw[0],
        congestion=raw[1],
        retransmits=raw[2],
        rto_ns=struct.unpack_from("=I", raw, 8)[0] * 1000,
        last_ack_ns=struct.unpack_from("=I", raw, 56)[0] * 1_000_000,
        srtt_ns=srtt_us * 1000,
        cwnd_segments=cwnd,
        ssthresh_segments=None if ssthresh >= _NEVER_LOST else ssthresh,
        retransmitted_segments=struct.unpack_from("=I", raw, 100)[0],
        acknowledged_bytes=at(120, "=Q"),
        received_bytes=at(128, "=Q"),
        segments_out=at(136),
        segments_in=at(140),
        min_rtt_ns=None if min_rtt_us is None or min_rtt_us == 0xFFFFFFFF else min_rtt_us * 1000,
        delivered=at(192),
        delivered_ce=at(196),
        sent_bytes=at(200, "=Q"),
        retransmitted_bytes=at(208, "=Q"),
        dsack_duplicates=at(216),
        timeouts=at(240, "=H"),
    )


def _address(family: int, raw: bytes) -> str:
    if family == socket.AF_INET:
        return str(ipaddress.IPv4Address(raw[:4]))
    ip = ipaddress.IPv6Address(raw)
    return str(ip.ipv4_mapped or ip)
