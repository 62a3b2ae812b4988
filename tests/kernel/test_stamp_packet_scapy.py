"""scapy's STAMP layer as an independent judge of what we send, and of what probe.c's reflector answers."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest
import support
from probe_kit import ADDRESSES, ESTIMATE, PORT, Host, Hosts, Replies, hosts, one_sided, two
from scapy.contrib import stamp as scapy_stamp
from scapy.fields import RawVal
from scapy.packet import Raw

from pytools.kernel import netns
from pytools.sources.probing import stamp_packet as wire

__all__ = ["hosts", "one_sided"]  # fixtures

pytestmark = pytest.mark.guest(thorough=True)  # what is in a packet, no kernel decides

SENDER = scapy_stamp.STAMPSessionSenderTestUnauthenticated
REFLECTOR = scapy_stamp.STAMPSessionReflectorTestUnauthenticated
TIMESTAMP = 123 << 32 | 456  # PTP: 123 s, 456 ns
NOW_NS = 123_000_000_456


def our_request(seq: int = 3, ssid: int = 9) -> bytes:
    """A request as our senders write it, built by scapy."""
    tlv = scapy_stamp.STAMPTestTLV(flags="U", type=wire.TLV_TYPE, len=wire.TLV_BYTES, value=bytes(range(28)))
    estimate = scapy_stamp.ErrorEstimate(S=1, Z=1, scale=0, multiplier=1)
    return bytes(SENDER(seq=seq, ssid=ssid, ts=RawVal(TIMESTAMP.to_bytes(8)), err_estimate=estimate, tlv_objects=[tlv]))


class Asked:
    """A host whose reflector is asked by a plain socket of another, over frames that take the longest request."""

    def __init__(self, hosts: Hosts, ends: tuple[str, str], family: int) -> None:
        for namespace in ends:
            support.run(["ip", "-n", namespace, "link", "set", "v0", "mtu", "9300"])
        _, self.host = two(hosts, ends, family)
        self._family, self._namespace = family, ends[0]

    def ask(self, *requests: bytes) -> list[bytes]:
        """Send these; the replies, once all requests are counted."""
        ours, theirs = ADDRESSES[self._family]
        before, answered = sum(self.host.counted().values()), self.reflected()
        with netns.inside(self._namespace):
            asking = socket.socket(socket.AF_INET if self._family == 4 else socket.AF_INET6, socket.SOCK_DGRAM)
        with asking:
            asking.bind((ours, 0))
            asking.setblocking(False)
            for request in requests:
                asking.sendto(request, (theirs, PORT))
            replies: list[bytes] = []

            def all_here() -> bool:
                replies.extend(_waiting(asking))
                seen = sum(self.host.counted().values()) - before
                return seen == len(requests) and len(replies) == self.reflected() - answered

            support.wait_until(all_here, 10, "all requests are counted, and their replies are here", every_s=0.001)
        return replies

    def reflected(self) -> int:
        return self.host.counted().get("reflected", 0)


def _waiting(sock: socket.socket) -> Iterator[bytes]:
    with contextlib.suppress(BlockingIOError):
        while True:
            yield sock.recv(65535)


@pytest.fixture(params=[4, 6])
def asked(request: pytest.FixtureRequest, hosts: Hosts, veth_pair: tuple[str, str]) -> Asked:
    return Asked(hosts, veth_pair, request.param)


def test_scapy_reads_our_request(one_sided: tuple[Host, Replies]) -> None:
    """As it is on the wire, once probe.c has stamped it."""
    first, reflector = one_sided
    first.send(4)
    request, _ = reflector.take()
    packet = SENDER(request)
    assert (packet.seq, packet.ssid, packet.mbz) == (first.program.seq_base, 1, 0)
    assert int.from_bytes(bytes(packet.err_estimate)) == 0xC1D7, "one clock, good to 100 ns"
    assert (packet.err_estimate.S, packet.err_estimate.Z, packet.err_estimate.multiplier) == (1, 1, 215)
    assert packet.ts >> 32 > 0
    assert packet.ts & 0xFFFFFFFF < 10**9, "PTPv2 truncated: nanoseconds"
    (tlv,) = packet.tlv_objects
    assert (tlv.type, tlv.len, tlv.value[8:]) == (wire.TLV_TYPE, wire.TLV_BYTES, bytes(20))
    assert tlv.value[:8] != bytes(8), "the nonce"
    assert request[44] == 0x80, "U is set by the sender (RFC 8972, section 4)"
    assert len(request) == wire.PROBE_BYTES
    assert bytes(packet) == request, "scapy builds the same bytes again"


def test_scapy_reads_our_reply(asked: Asked) -> None:
    first, second = asked.ask(our_request(3)) + asked.ask(our_request(4, 5))
    for reply, seq, ssid in ((first, 3, 9), (second, 4, 5)):
        assert len(reply) == wire.PROBE_BYTES
        packet = REFLECTOR(reply)
        assert (packet.seq, packet.ssid, packet.seq_sender) == (seq, ssid, seq), "stateless: the sender's number"
        assert packet.ts_sender == TIMESTAMP
        assert int.from_bytes(bytes(packet.err_estimate)) == ESTIMATE
        assert bytes(packet.err_estimate_sender) == our_request()[12:14]
        assert packet.ttl_sender == 64
        assert (packet.mbz1, packet.mbz2) == (0, 0)
        assert packet.ts >= packet.ts_rx > 0
        (tlv,) = packet.tlv_objects
        assert (tlv.type, tlv.len, reply[44]) == (wire.TLV_TYPE, wire.TLV_BYTES, 0)
        came_by = asked.host.ifindex.to_bytes(2)
        nonce_and_age = bytes(range(8)) + b"\xff" * 4
        assert tlv.value == nonce_and_age + came_by + bytes(2) + seq.to_bytes(4) + bytes(8), "the tag is last"
        assert bytes(packet) == reply and Raw not in packet
    assert asked.host.counted() == {"reflected": 2}


def test_a_base_packet_built_by_scapy_is_answered_in_kind(asked: Asked) -> None:
    request = bytes(SENDER(seq=8, ssid=0, ts=5 << 32, err_estimate=scapy_stamp.ErrorEstimate(S=0, Z=0)))
    assert len(request) == 44
    (reply,) = asked.ask(request)
    assert len(reply) == 44
    packet = REFLECTOR(reply)
    assert (packet.seq_sender, packet.ssid) == (8, 0)
    assert bytes(reply[24:38]) == request[:14], "an NTP timestamp goes back as it came"


def test_a_reply_is_never_longer_than_the_request_and_padding_comes_back(asked: Asked) -> None:
    lengths = (44, 45, 75, 76, 77, 600, 1400, 9188)
    whole = our_request() + bytes([0x80, 1]) + (9188 - 76).to_bytes(2) + (bytes(range(256)) * 36)[: 9188 - 76]
    for length in lengths:
        request = whole[:length]
        (reply,) = asked.ask(request)
        assert len(reply) == length
        assert reply[77:] == request[77:]
        if length >= 80:
            assert reply[76] == (0 if length == len(whole) else 0x40), "malformed: it ends before its padding does"
    assert asked.host.counted() == {"reflected": len(lengths)}


def test_good_requests_among_short_and_long_ones_get_their_own_replies(asked: Asked) -> None:
    requests = [
        b"",
        b"x",
        our_request(10, 4),
        bytes(9189),
        our_request(11, 5) + bytes(30),
        bytes(43),
        our_request(12, 6),
    ]
    replies = asked.ask(*requests)
    assert [(REFLECTOR(each).seq_sender, REFLECTOR(each).ssid, len(each)) for each in replies] == [
        (10, 4, 76),
        (11, 5, 106),
        (12, 6, 76),
    ]
    assert asked.host.counted() == {"malformed": 4, "reflected": 3}


def test_probes_about_size_are_answered_among_others_in_full_or_as_short_as_can_be(asked: Asked) -> None:
    requests = [our_request(10, 4), *(wire.size_request(9188, seq, NOW_NS, seq == 8) for seq in (7, 8))]
    sized = SENDER(requests[1])
    assert [(tlv.type, tlv.len) for tlv in sized.tlv_objects] == [(wire.REPLY_SIZE, 4), (1, 9188 - 56)]
    replies = asked.ask(*requests, our_request(11, 5))
    assert [(REFLECTOR(each).seq_sender, REFLECTOR(each).ssid, len(each)) for each in replies] == [
        (10, 4, 76),
        (7, wire.SIZE_SSID, 9188),
        (8, wire.SIZE_SSID, wire.SHORT_REPLY_BYTES),
        (11, 5, 76),
    ]
    assert [wire.size_reply(each) for each in replies[1:3]] == [(7, 9188), (8, 9188)]
    for reply in replies[1:3]:
        (tlv, *_) = REFLECTOR(reply).tlv_objects
        assert (int(tlv.flags), tlv.type, tlv.value) == (0, wire.REPLY_SIZE, reply[48:52])


def test_requests_are_many_and_each_gets_its_own_numbers_back(asked: Asked) -> None:
    """The reflector keeps nothing of a session, so there is no bound on them; a burst is answered whole."""
    wanted = [(number, number % 300) for number in range(1000)]
    replies = [
        reply
        for start in range(0, 1000, 50)
        for reply in asked.ask(*(our_request(seq, ssid) for seq, ssid in wanted[start : start + 50]))
    ]
    assert [(REFLECTOR(each).seq, REFLECTOR(each).ssid) for each in replies] == wanted
    assert asked.host.counted() == {"reflected": 1000}
