"""What the kernel says of TCP, taken apart: socket diagnostics, counters, drop reasons."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.kernel import tracefs
from pytools.kernel.netlink import sockdiag
from pytools.sources.tcp import kernel_counters

FORMAT = """name: kfree_skb
format:
\tfield:enum skb_drop_reason reason;\toffset:36;\tsize:4;\tsigned:0;

print fmt: "skbaddr=%p reason: %s", REC->skbaddr, __print_symbolic(REC->reason, { 2, "NOT_SPECIFIED" }, \
{ 0x3, "NO_SOCKET" }, { 3, "AGAIN" }, { 64, "QDISC_DROP" })
"""


def test_drop_reasons() -> None:
    names = tracefs.reasons_in(FORMAT)
    assert names == {2: "NOT_SPECIFIED", 3: "NO_SOCKET", 64: "QDISC_DROP"}
    assert tracefs.name(64, names) == "QDISC_DROP"
    assert tracefs.name(65, names) == "reason_65"
    assert tracefs.reasons_in("") == tracefs.reasons_in("print fmt: {") == {}


def test_kernel_counters() -> None:
    text = (
        "Ip: Forwarding DefaultTTL\nIp: 1 64\n"
        "Tcp: RtoAlgorithm MaxConn CurrEstab RetransSegs OutRsts\nTcp: 1 -1 7 12 3\n"
        "Udp: InDatagrams\nUdp: 9\n"
    )
    assert kernel_counters.parsed(text, ("Tcp",)) == {"TcpRetransSegs": 12, "TcpOutRsts": 3}
    assert kernel_counters.parsed("Tcp: A B\nTcp: 1\nTcp: 5 6\n", ("Tcp",)) == {"TcpA": 5, "TcpB": 6}
    assert kernel_counters.parsed("Tcp:\nTcp: 1 2\nTcp", ("Tcp",)) == {}
    before, after = {"TcpA": 5, "TcpB": 6, "TcpGone": 1}, {"TcpA": 5, "TcpB": 9, "TcpNew": 2}
    assert kernel_counters.difference(before, after) == {"TcpB": 3, "TcpNew": 2}


def test_this_kernels_counters() -> None:
    counters = kernel_counters.KernelCounters()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        assert counters.since_start()["TcpActiveOpens"] >= 1


def diagnostics(state: int, retrans: int, attributes: bytes, family: socket.AddressFamily = socket.AF_INET) -> bytes:
    """A `struct inet_diag_msg` with cookie 0x200000001 and inode 4711."""
    local, remote = (socket.inet_pton(family, text).ljust(16, b"\0") for text in _ADDRESSES[family])
    identity = struct.pack("!HH16s16s", 40000, 5201, local, remote) + struct.pack("=III", 3, 1, 2)
    return (
        struct.pack("=BBBB", family, state, 0, retrans)
        + identity
        + struct.pack("=5I", 0, 0, 0, 1000, 4711)
        + attributes
    )


_ADDRESSES = {socket.AF_INET: ("10.9.0.1", "10.9.0.2"), socket.AF_INET6: ("fd00:9::1", "::ffff:10.9.0.2")}


def attribute(kind: int, body: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(body), kind) + body + bytes(-len(body) % 4)


def info(length: int) -> bytes:
    """A `struct tcp_info` as far as a kernel has it; all that is not set below is zero."""
    raw = bytearray(256)
    raw[0:3] = 1, 4, 2
    for offset, code, value in (
        (8, "I", 816_000),
        (56, "I", 612),
        (68, "I", 250),
        (76, "I", 0x7FFFFFFF),
        (80, "I", 10),
        (100, "I", 77),
        (120, "Q", 1 << 40),
        (148, "I", 0xFFFFFFFF),
        (208, "Q", 3 << 33),
        (216, "I", 5),
        (240, "H", 6),
    ):
        struct.pack_into(f"={code}", raw, offset, value)
    return attribute(2, bytes(raw[:length]))


def test_a_socket_taken_apart() -> None:
    message = diagnostics(1, 3, attribute(8, b"\0") + info(248) + attribute(21, struct.pack("=Q", 99)))
    found = sockdiag.parsed(message)
    assert found is not None
    assert (found.cookie, found.inode, found.uid, found.cgroup, found.interface) == (2 << 32 | 1, 4711, 1000, 99, 3)
    assert (found.local, found.local_port, found.remote, found.remote_port) == ("10.9.0.1", 40000, "10.9.0.2", 5201)
    assert found.request_retransmits == 0
    assert found.info is not None
    assert (found.info.congestion, found.info.retransmits, found.info.srtt_ns) == (4, 2, 250_000)
    assert (found.info.rto_ns, found.info.last_ack_ns) == (816_000_000, 612_000_000)
    assert (found.info.ssthresh_segments, found.info.cwnd_segments, found.info.min_rtt_ns) == (None, 10, None)
    assert (found.info.retransmitted_segments, found.info.retransmitted_bytes) == (77, 3 << 33)
    assert (found.info.acknowledged_bytes, found.info.dsack_duplicates, found.info.timeouts) == (1 << 40, 5, 6)


def test_what_an_older_kernel_does_not_tell_is_not_known() -> None:
    found = sockdiag.parsed(diagnostics(1, 0, info(232)))
    assert found is not None
    assert found.info is not None
    assert found.info.timeouts is None
    assert found.info.retransmitted_bytes == 3 << 33
    for length in (208, 212):
        found = sockdiag.parsed(diagnostics(1, 0, info(length)))
        assert found is not None
        assert found.info is not None
        assert found.info.retransmitted_bytes is None
    for length in (0, 60, 103):
        found = sockdiag.parsed(diagnostics(1, 0, info(length)))
        assert found is not None
        assert found.info is None


def test_a_half_open_request() -> None:
    found = sockdiag.parsed(diagnostics(3, 4, b"", socket.AF_INET6))
    assert found is not None
    assert (found.request_retransmits, found.info) == (4, None)
    assert (found.local, found.remote) == ("fd00:9::1", "10.9.0.2")


@given(st.binary(max_size=600))
def test_no_bytes_break_the_parser(data: bytes) -> None:
    for _, _, body in sockdiag.messages(data):
        sockdiag.parsed(body)
    sockdiag.parsed(data)
    sockdiag.tcp_info(data)
    sockdiag.parsed(diagnostics(1, 0, data))
    tracefs.reasons_in(data.decode(errors="replace"))
    kernel_counters.parsed(data.decode(errors="replace"), ("Tcp", ""))


def test_messages_that_follow_each_other() -> None:
    def message(kind: int, body: bytes) -> bytes:
        return struct.pack("=IHHII", 16 + len(body), kind, 0, 9, 0) + body + bytes(-len(body) % 4)

    whole = message(20, b"abcde") + message(3, b"")
    assert list(sockdiag.messages(whole)) == [(20, 9, b"abcde"), (3, 9, b"")]
    assert list(sockdiag.messages(whole + b"\1\0\0\0" + bytes(12))) == [(20, 9, b"abcde"), (3, 9, b"")]
    assert list(sockdiag.messages(whole[:20])) == []


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_finding_a_socket_of_this_host(family: socket.AddressFamily, address: str) -> None:
    try:
        server = socket.create_server((address, 0), family=family)
    except OSError:
        pytest.skip(f"no {address} here")
    packed = socket.inet_pton(family, address)
    raw = packed if family == socket.AF_INET6 else bytes(10) + b"\xff\xff" + packed
    with server, socket.create_connection(server.getsockname()[:2]) as near, sockdiag.Diagnostics() as diagnosis:
        port, remote_port = near.getsockname()[1], server.getsockname()[1]
        listed = [each for each in diagnosis.sockets() if (each.local_port, each.remote_port) == (port, remote_port)]
        assert [each.local for each in listed] == [address]
        cookie = struct.unpack("=Q", near.getsockopt(socket.SOL_SOCKET, 57, 8))[0]  # SO_COOKIE
        found = diagnosis.find(raw, port, raw, remote_port, 0, cookie)
        assert found is not None
        assert found.cookie == listed[0].cookie == cookie
        assert diagnosis.find(raw, port, raw, remote_port, 0, cookie + 1) is None
        assert diagnosis.find(raw, port, raw, remote_port, 0, 0) == found
        assert diagnosis.find(raw, port, raw, 1, 0, 0) is None
