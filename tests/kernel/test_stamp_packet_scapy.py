"""scapy's STAMP layer as an independent judge of what we send and of what we accept."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scapy.contrib import stamp as scapy_stamp
from scapy.packet import Raw

from pytools.config import Peer
from pytools.kernel import netns
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing.reflector import Reflector

PORT, NOW_NS = 20862, 123_000_000_456
SENDER = scapy_stamp.STAMPSessionSenderTestUnauthenticated
REFLECTOR = scapy_stamp.STAMPSessionReflectorTestUnauthenticated
LOOPBACK = {4: "127.0.0.1", 6: "::1"}


def our_request(seq: int = 3, ssid: int = 9) -> bytes:
    payload = np.zeros((1, wire.PROBE_BYTES), np.uint8)
    packets = wire.requests(payload)
    wire.prepare_requests(packets)
    wire.write_requests(packets, np.array([seq]), np.array([ssid]), NOW_NS, wire.error_estimate(200, True))
    return payload.tobytes()


class Served:
    """A reflector on the loopback of a namespace, and a plain socket that asks it."""

    def __init__(self, namespace: str, family: int, peers: list[Peer], wait_until: Callable[..., object]) -> None:
        kind = socket.AF_INET if family == 4 else socket.AF_INET6
        with netns.inside(namespace):
            self.reflector = Reflector(PORT, 0, peers)
            self.asking = socket.socket(kind, socket.SOCK_DGRAM)
            self.asking.bind((LOOPBACK[family], 0))
        self.asking.setblocking(False)
        self._address, self._wait_until = (LOOPBACK[family], PORT), wait_until
        self._kind, self._namespace = kind, namespace
        self.now_ns = NOW_NS

    def ask(self, *requests: bytes, source_port: int | None = None) -> list[bytes]:
        """Send these and return the replies, once the reflector has had them all."""
        asking = self.asking
        if source_port is not None:
            with netns.inside(self._namespace):
                asking = socket.socket(self._kind, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
                asking.bind((self._address[0], source_port))
        before = self._seen()
        for request in requests:
            asking.sendto(request, self._address)
        replies: list[bytes] = []

        def all_seen() -> bool:
            self.now_ns += 1_000_000
            self.reflector.receive()
            self.reflector.answer(self.now_ns)
            replies.extend(_waiting(asking))
            return self._seen() - before == len(requests)

        self._wait_until(all_seen, 5, "the reflector has had all requests")
        replies.extend(_waiting(asking))  # loopback delivers within the send
        if asking is not self.asking:
            asking.close()
        return replies

    def _seen(self) -> int:
        drops = self.reflector.drops
        refused = sum(drops.values()) - drops["unstamped_requests"] - drops["reply_refused"]
        return refused + self.reflector.answered

    def close(self) -> None:
        self.asking.close()
        self.reflector.close()


def _waiting(sock: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            yield sock.recv(65535)
        except BlockingIOError:
            return


@pytest.fixture(params=[4, 6])
def served(request: pytest.FixtureRequest, namespace: str, wait_until: Callable[..., object]) -> Iterator[Served]:
    family = request.param
    made = Served(namespace, family, [Peer("me", LOOPBACK[family], "shared")], wait_until)
    yield made
    made.close()


def test_scapy_reads_our_request() -> None:
    packet = SENDER(our_request())
    assert (packet.seq, packet.ssid, packet.mbz) == (3, 9, 0)
    assert (packet.err_estimate.S, packet.err_estimate.Z) == (1, 1)
    assert packet.err_estimate.multiplier > 0
    assert packet.ts == 123 << 32 | 456
    (tlv,) = packet.tlv_objects
    assert (tlv.type, tlv.len, tlv.value) == (7, 16, bytes(16))
    assert our_request()[44] == 0x80, "U is set by the sender (RFC 8972, section 4)"
    assert bytes(packet) == our_request(), "scapy builds the same bytes again"


def test_scapy_reads_our_reply(served: Served) -> None:
    first, second = served.ask(our_request(3)) + served.ask(our_request(4))
    for reply, seq, number in ((first, 3, 0), (second, 4, 1)):
        assert len(reply) == wire.PROBE_BYTES
        packet = REFLECTOR(reply)
        assert (packet.seq, packet.ssid, packet.seq_sender) == (number, 9, seq)
        assert packet.ts_sender == 123 << 32 | 456
        assert (packet.err_estimate.S, packet.err_estimate.Z) == (1, 1)
        assert bytes(packet.err_estimate_sender) == our_request()[12:14]
        assert packet.ttl_sender == 64
        assert (packet.mbz1, packet.mbz2) == (0, 0)
        assert packet.ts >= packet.ts_rx > 0
        assert packet.err_estimate.scale > 16, "no hook was there: an estimate of this size says so"
        (tlv,) = packet.tlv_objects
        assert (tlv.type, tlv.len, reply[44]) == (7, 16, 0)
        assert bytes(packet) == reply


def test_a_base_packet_built_by_scapy_is_answered_in_kind(served: Served) -> None:
    request = bytes(SENDER(seq=8, ssid=0, ts=5 << 32, err_estimate=scapy_stamp.ErrorEstimate(S=0, Z=0)))
    assert len(request) == 44
    (reply,) = served.ask(request)
    assert len(reply) == 44
    packet = REFLECTOR(reply)
    assert (packet.seq_sender, packet.ssid) == (8, 0)
    assert bytes(reply[24:38]) == request[:14], "an NTP timestamp goes back as it came"


def test_unknown_tlvs_come_back_marked(served: Served) -> None:
    tlvs = [
        scapy_stamp.STAMPTestTLV(type=1, len=4, value=b"abcd"),
        scapy_stamp.STAMPTestTLV(type=99, len=2, value=b"xy"),
    ]
    request = bytes(SENDER(seq=1, ssid=2, tlv_objects=tlvs))
    (reply,) = served.ask(request)
    assert len(reply) == len(request)
    assert reply[44:52] == bytes([0, 1, 0, 4]) + b"abcd"
    assert reply[52:58] == bytes([0x80, 99, 0, 2]) + b"xy"


def test_a_reply_is_never_longer_than_the_request_and_padding_comes_back(served: Served) -> None:
    for length in (44, 45, 63, 64, 65, 600, 1400):
        request = our_request() + bytes(range(256)) * 6
        (reply,) = served.ask(request[:length])
        assert len(reply) == length
    assert served.reflector.drops["malformed_requests"] == 0


def test_what_is_too_short_or_too_long_is_counted_and_not_answered(served: Served) -> None:
    assert served.ask(b"", b"x", our_request()[:43], bytes(9189)) == []
    assert served.reflector.drops["malformed_requests"] == 4


def test_good_requests_among_bad_ones_get_their_own_replies(served: Served) -> None:
    requests = [b"x", our_request(10, 4), bytes(9189), our_request(11, 5) + bytes(30), bytes(43), our_request(12, 6)]
    replies = served.ask(*requests)
    assert [(REFLECTOR(each).seq_sender, REFLECTOR(each).ssid, len(each)) for each in replies] == [
        (10, 4, 64),
        (11, 5, 94),
        (12, 6, 64),
    ]
    assert served.reflector.drops["malformed_requests"] == 3


def test_probes_about_size_are_answered_among_others_in_full_or_as_short_as_can_be(served: Served) -> None:
    requests = [our_request(10, 4), *(wire.size_request(9188, seq, NOW_NS, seq == 8) for seq in (7, 8))]
    asked = SENDER(requests[1])
    assert [(tlv.type, tlv.len) for tlv in asked.tlv_objects] == [(wire.REPLY_SIZE, 4), (1, 9188 - 56)]
    replies = served.ask(*requests, our_request(11, 5))
    assert [(REFLECTOR(each).seq_sender, REFLECTOR(each).ssid, len(each)) for each in replies] == [
        (10, 4, 64),
        (7, wire.SIZE_SSID, 9188),
        (8, wire.SIZE_SSID, wire.SHORT_REPLY_BYTES),
        (11, 5, 64),
    ]
    assert [wire.size_reply(each) for each in replies[1:3]] == [(7, 9188), (8, 9188)]
    for reply in replies[1:3]:
        (tlv, *_) = REFLECTOR(reply).tlv_objects
        assert (int(tlv.flags), tlv.type, tlv.value) == (0, wire.REPLY_SIZE, reply[48:52])


def test_a_source_port_that_might_answer_back_is_not_answered(served: Served) -> None:
    for port in (7, 862, 1023, PORT + 1):
        replies = served.ask(our_request(), source_port=port)
        assert len(replies) == (1 if port >= 1024 else 0)
    assert served.reflector.drops["requests_from_refused_port"] == 3


def test_nobody_but_a_peer_is_answered(namespace: str, wait_until: Callable[..., object]) -> None:
    served = Served(namespace, 4, [Peer("other", "10.0.0.1", "shared")], wait_until)
    try:
        assert served.ask(our_request(), our_request()) == []
        assert served.reflector.drops["requests_of_no_peer"] == 2
    finally:
        served.close()


def test_replies_to_one_peer_are_bounded_by_rate(served: Served) -> None:
    burst = 2000  # a tenth of a second's worth, and a little that is earned while the batches come
    replies = served.ask(*[our_request(seq) for seq in range(1000)])
    assert len(replies) == 1000
    served.reflector._tokens[:] = 5
    served.reflector._tokens_at_ns = served.now_ns + 1_000_000
    asked = [our_request(seq) for seq in range(20)]
    replies = served.ask(*asked)
    assert len(replies) == 5
    assert served.reflector.drops["requests_over_rate"] == 15
    served.now_ns += 10**9
    assert len(served.ask(*asked)) == 20
    assert served.reflector._tokens[0] <= burst


def test_sessions_of_one_peer_are_bounded_and_silent_ones_give_way(served: Served) -> None:
    requests = [our_request(0, ssid) for ssid in range(300)]
    replies = [reply for start in range(0, 300, 50) for reply in served.ask(*requests[start : start + 50])]
    assert len(replies) == 256
    assert served.reflector.drops["requests_over_sessions"] == 44
    served.now_ns += 11 * 10**9
    (reply,) = served.ask(our_request(0, 299))
    assert REFLECTOR(reply).seq == 0, "a new session"
    assert len(served.reflector._rows) == 256


def test_a_session_counts_its_own_replies(served: Served) -> None:
    numbers = [REFLECTOR(reply).seq for reply in served.ask(*[our_request(seq, 5) for seq in (10, 12, 11)])]
    assert numbers == [0, 1, 2]
    (other,) = served.ask(our_request(13, 6))
    assert REFLECTOR(other).seq == 0


def test_scapy_finds_no_stray_bytes(served: Served) -> None:
    (reply,) = served.ask(our_request())
    assert Raw not in REFLECTOR(reply)
