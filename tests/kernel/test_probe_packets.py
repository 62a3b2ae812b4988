"""probe_ingress on packets made by hand: what it answers, what it takes, what it counts and drops, what it leaves."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable

import numpy as np
import packets as p
import pytest
from probe_kit import (
    DROPPED,
    ESTIMATE,
    IN,
    LOOPBACK,
    MARK_PLAIN,
    MARK_REPLY,
    OUT,
    PEERS,
    REDIRECTED,
    SENDER_PORT,
    UNSPEC,
    TestRun,
    probes,
    request,
    session,
)

from pytools.sources.probing.program import QUEUE, SWEEP
from pytools.sources.probing.stamp_packet import size_request

__all__ = ["probes"]  # fixtures

pytestmark = pytest.mark.guest

PADDING, SIZE = 1, 252


@pytest.fixture(autouse=True)
def _from_zero(probes: TestRun) -> None:
    probes.program.read()
    probes.program.forget_session(0)
    probes.counted()


FAMILIES = {"ipv4": (p.ipv4, "10.9.0.1", "10.9.0.2"), "ipv6": (p.ipv6, "fd00:9::1", "fd00:9::2")}
REQUEST = p.udp(request(), SENDER_PORT)


def turned(left: bytes, network_at: int, ipv6: bool) -> tuple[bytes, bytes, int]:
    """Source and destination address, and the TTL, of the packet that was left."""
    if ipv6:
        return left[network_at + 8 : network_at + 24], left[network_at + 24 : network_at + 40], left[network_at + 7]
    return left[network_at + 12 : network_at + 16], left[network_at + 16 : network_at + 20], left[network_at + 8]


@pytest.mark.guest(every=3)
@pytest.mark.parametrize("tags", p.TAGS.values(), ids=p.TAGS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_becomes_its_reply_behind_any_tags(probes: TestRun, family: str, tags: tuple[int, ...]) -> None:
    build, source, destination = FAMILIES[family]
    before_ns = time.monotonic_ns()
    asked = build(REQUEST, tags=tags)
    verdict, left = probes.run(IN, asked)
    assert (verdict, len(left)) == (REDIRECTED, len(asked))
    assert probes.counted() == {"reflected": 1}
    network_at = 14 + 4 * len(tags)
    assert left[12:network_at] == asked[12:network_at], "the tags go back with it"
    width = 12 if family == "ipv4" else 0
    ends = p.mapped(destination)[width:], p.mapped(source)[width:]
    assert turned(left, network_at, family == "ipv6") == (*ends, 255)
    transport = network_at + (20 if family == "ipv4" else 40)
    assert struct.unpack_from("!HH", left, transport) == (p.PORT, SENDER_PORT)
    reply = left[transport + 8 :]
    seq, _, _, error, ssid = struct.unpack_from("!IIIHH", reply)
    assert (seq, error, ssid) == (7, ESTIMATE, 9)
    seconds, nanoseconds = struct.unpack_from("!II", reply, 16)
    assert before_ns <= seconds * 10**9 + nanoseconds <= time.monotonic_ns()
    assert reply[24:38] == request()[:14]
    assert reply[40] == 61, "the sender's TTL on arrival"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checksums_of_replies_are_right_whatever_their_requests_held(probes: TestRun, family: str) -> None:
    """Seeded: any base packet and any TLVs, sound ones and others; through both hooks."""
    random = np.random.default_rng(8762)
    build, *_ = FAMILIES[family]
    for _ in range(400):
        base = random.bytes(44)
        tlvs = b""
        for _ in range(random.integers(0, 4)):
            kind = int(random.choice([PADDING, 99, 252, 253]))
            known = {252: 4, 253: 24}.get(kind, 0)
            length = known if known and random.random() < 0.8 else int(random.integers(0, 40))
            value = bytearray(random.bytes(length))
            if kind == SIZE:  # short replies leave out zeros only
                value[1:2] = bytes(len(value[1:2]))
            tlvs += struct.pack("!BBH", 0x80, kind, length if random.random() < 0.9 else 1000) + value
        asked = p.with_checksums(build(p.udp(base + tlvs, SENDER_PORT)))
        verdict, reply = probes.run(IN, asked)
        assert verdict == REDIRECTED
        assert len(reply) <= len(asked)
        transport = 14 + (20 if family == "ipv4" else 40)
        verdict, left = probes.run(OUT, reply, mark=MARK_REPLY | transport)
        assert verdict == UNSPEC
        assert p.with_checksums(left) == left
        assert left[transport + 8 + 4 : transport + 8 + 12] != bytes(8), "it has its Timestamp"
    assert probes.counted() == {"reflected": 400}


@pytest.mark.guest(every=3)
@pytest.mark.parametrize("tags", p.TAGS.values(), ids=p.TAGS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_is_recorded_with_everything_that_names_it(probes: TestRun, family: str, tags: tuple[int, ...]) -> None:
    build, source, _ = FAMILIES[family]
    reply = probes.remember_probe(source)
    verdict, _ = probes.run(IN, build(p.udp(reply, p.PORT, SENDER_PORT), tags=tags))
    assert verdict == DROPPED, "it ends in the kernel"
    (record,) = probes.program.read()
    assert (record["number"], record["session"], record["ttl"], record["bytes"]) == (7, 0, 61, 44)
    assert (record["flags"], record["agent_age_ms"]) == (0, 0xFFFFFFFF)
    assert {int(record[name]) for name in ("t1_ns", "t2_ns", "t3_ns")} == {3_000_000_004}
    assert record["t4_ns"] == record["seen_ns"] <= time.monotonic_ns()
    assert probes.counted() == {"recorded": 1}


@pytest.mark.guest(every=3)
@pytest.mark.parametrize("kind", ["request", "reply"])
@pytest.mark.parametrize(
    "frame",
    [
        lambda whole, ports: p.ipv4(p.udp(whole[:43], *ports)),
        lambda whole, ports: p.ipv4(p.udp(whole, *ports, length=51)),
        lambda whole, ports: p.ipv4(p.udp(whole, *ports, length=600)),
        lambda whole, ports: p.ipv4(p.udp(whole, *ports), fragment=0x2000),
        lambda whole, ports: p.ipv6(p.udp(b"", *ports)),
    ],
    ids=["short", "length too small", "length too large", "first fragment", "empty"],
)
def test_what_is_no_whole_probe_is_counted_malformed_and_ends_here(
    probes: TestRun, frame: Callable[[bytes, tuple[int, int]], bytes], kind: str
) -> None:
    reply = probes.remember_probe()
    whole, ports = (request(), (SENDER_PORT, p.PORT)) if kind == "request" else (reply, (p.PORT, SENDER_PORT))
    assert probes.run(IN, frame(whole, ports))[0] == DROPPED
    assert len(probes.program.read()) == 0
    assert probes.counted() == {"malformed": 1}


@pytest.mark.guest(every=2)
@pytest.mark.parametrize("kind", ["request", "reply"])
def test_merged_probes_are_counted_and_not_taken_for_one(probes: TestRun, kind: str) -> None:
    reply = probes.remember_probe()
    frame = p.ipv4(REQUEST if kind == "request" else p.udp(reply, p.PORT, SENDER_PORT))
    single = "reflected" if kind == "request" else "recorded"
    probes.run(IN, frame, segments=1)
    assert probes.counted() == {single: 1}
    assert probes.run(IN, frame, segments=2)[0] == DROPPED
    assert probes.counted() == {"merged": 1}


def test_a_stranger_gets_no_answer_and_is_counted(probes: TestRun) -> None:
    assert probes.run(IN, p.ipv4(REQUEST, source="10.9.0.77"))[0] == DROPPED
    assert probes.run(IN, p.ipv6(REQUEST, source="fd00:9::77"))[0] == DROPPED
    assert probes.counted() == {"no_peer": 2}
    assert probes.run(IN, p.ipv4(p.udp(b"short"), source="10.9.0.77"))[0] == DROPPED
    assert probes.counted() == {"no_peer": 1}, "whether it is well-formed does not matter"
    reply = p.udp(probes.remember_probe(), p.PORT, SENDER_PORT)
    assert probes.run(IN, p.ipv4(reply, source="10.9.0.77"))[0] == DROPPED
    assert probes.counted() == {"stray": 1}


@pytest.mark.parametrize("port", [7, p.PORT, 1023])
@pytest.mark.parametrize("build", [p.ipv4, p.ipv6])
def test_a_source_port_that_might_answer_a_reply_gets_none(
    probes: TestRun, build: Callable[[bytes], bytes], port: int
) -> None:
    assert probes.run(IN, build(p.udp(request(), port)))[0] == DROPPED
    assert probes.counted() == {"refused_port": 1}
    assert probes.run(IN, build(p.udp(request(), 1024)))[0] == REDIRECTED
    assert probes.counted() == {"reflected": 1}


def test_a_port_that_is_not_the_senders_is_left_alone(probes: TestRun) -> None:
    frame = p.ipv4(p.udp(probes.remember_probe(), p.PORT, SENDER_PORT + 1))
    assert probes.run(IN, frame) == (UNSPEC, frame)
    assert probes.counted() == {}


@pytest.mark.guest(every=4)
@pytest.mark.parametrize("hook", [OUT, IN])
@pytest.mark.parametrize(
    "frame",
    [
        p.ipv4(p.udp(p.stamp_request(1, 1), 5000, 5001)),
        p.ipv4(p.udp(p.stamp_request(1, 1)), protocol=p.TCP),
        p.ipv6(p.udp(p.stamp_request(1, 1)), protocol=p.TCP),
        p.ipv4(p.udp(p.stamp_request(1, 1)), fragment=5),
        p.ethernet(0x0806, bytes(60)),
        p.ethernet(0x0800, bytes(60), (p.TAG_8021Q,)),
        p.ethernet(0x0800, b"\x4f" + bytes(20)),
        p.ethernet(0x0800, b"\x45" + bytes(5), (p.TAG_8021Q,)),
        bytes(14),
    ],
    ids=["ports", "tcp", "tcp6", "fragment", "arp", "zeros", "cut options", "cut header", "no payload"],
)
def test_ordinary_packets_leave_no_trace(probes: TestRun, frame: bytes, hook: str) -> None:
    assert probes.run(hook, frame) == (UNSPEC, frame), "an observer must let other programs decide"
    assert probes.counted() == {}


@pytest.mark.parametrize("payload", [REQUEST, p.udp(request(), p.PORT, SENDER_PORT)], ids=["request", "reply"])
def test_a_probe_of_another_program_leaves_as_it_is(probes: TestRun, payload: bytes) -> None:
    """Only our marks name our own: a packet on the probe port that another program sends is not touched."""
    frame = p.ipv4(payload)
    assert probes.run(OUT, frame) == (UNSPEC, frame)
    assert probes.counted() == {}


def test_ip_options_do_not_hide_a_probe(probes: TestRun) -> None:
    verdict, left = probes.run(IN, p.ipv4(REQUEST, options=b"\x01" * 12))
    assert verdict == REDIRECTED
    assert struct.unpack_from("!HH", left, 14 + 32) == (p.PORT, SENDER_PORT)
    reply = p.udp(probes.remember_probe(), p.PORT, SENDER_PORT)
    probes.run(IN, p.ipv4(reply, options=b"\x01" * 12))
    assert probes.program.read()["number"].tolist() == [7]
    assert probes.counted() == {"reflected": 1, "recorded": 1}


def test_a_path_has_the_family_of_its_gateway(probes: TestRun) -> None:
    """An IPv4 peer may be routed by an IPv6 gateway (RFC 5549)."""
    record = probes.program.paths
    for gateway, family in (("fe80::1", socket.AF_INET6), ("10.9.0.9", socket.AF_INET), ("", socket.AF_INET)):
        probes.program.set_path(session(PEERS[0], gateway=gateway).pinned)
        assert (record["family"][0], record["gateway"][0].tobytes()) == (family, p.mapped(gateway or PEERS[0]))
    probes.program.forget_path(0)


@pytest.mark.parametrize(("sweep", "unanswered"), [(False, 0), (True, 5)])
def test_the_answer_to_a_sweep_says_nothing_of_silence(probes: TestRun, sweep: bool, unanswered: int) -> None:
    reply = probes.remember_probe()
    first = SENDER_PORT + 1000
    probes.program.set_session(session(PEERS[0], first + 3 if sweep else SENDER_PORT), SWEEP if sweep else 0)
    probes.program.paths["unanswered"][0] = 5
    probes.program.set_sweep_ports(first, 4)
    assert probes.run(IN, p.ipv4(p.udp(reply, p.PORT, first + 4)))[0] == UNSPEC, "not one of ours"
    probes.run(IN, p.ipv4(p.udp(reply, p.PORT, first + 3 if sweep else SENDER_PORT)))
    probes.program.set_sweep_ports(0, 0)
    assert probes.program.read()["number"].tolist() == [7]
    assert probes.counted() == {"recorded": 1} and probes.program.paths["unanswered"][0] == unanswered


MS = 1_000_000
SECOND_NS = 1000 * MS


@pytest.mark.guest(every=3)
@pytest.mark.parametrize("kind", [0, QUEUE], ids=["all", "queue"])
@pytest.mark.parametrize(
    ("why", "base", "waited"),
    [
        ("as the clocks say", {"base_ns": -5 * MS}, 5 * MS - 1000),
        ("less than nothing, within the error", {"base_ns": 900}, 0),
        ("less than nothing on the way there", {"base_ns": MS}, None),
        ("less than nothing on the way back", {"base_ns": -5 * SECOND_NS, "base_round_trip_ns": -2 * SECOND_NS}, None),
        (
            "the clocks drift",
            {"base_at_ns": 3 * SECOND_NS + 4 - SECOND_NS, "base_drift": -(1 << 32) // 1000},
            MS - 1000,
        ),
        ("the base holds no longer", {"base_ns": -5 * MS, "base_until_ns": 1}, None),
    ],
)
def test_what_a_probe_waited_is_noted(
    probes: TestRun, why: str, base: dict[str, int], waited: int | None, kind: int
) -> None:
    """The reply to hand says t2 - t1 = 0, and both clocks are far from it: what it has waited is as the base says."""
    reply = probes.remember_probe()
    probes.program.set_session(session(PEERS[0]), kind)
    record = probes.program.paths[0:1]
    usual = {"base_ns": 0, "base_drift": 0, "base_at_ns": 3 * SECOND_NS, "base_round_trip_ns": -60 * SECOND_NS}
    fresh = {"base_slack_ns": 1000, "base_until_ns": time.monotonic_ns() + 60 * SECOND_NS}
    for name, value in (usual | fresh | {"queue_ns": 77, "queue_sent_ns": 0} | base).items():
        record[name] = value
    probes.run(IN, p.ipv4(p.udp(reply, p.PORT, SENDER_PORT)))
    doubted = {"doubted": 1} if "way" in why else {}
    assert probes.counted() == {"recorded" if kind == 0 else "sensed": 1, **doubted}
    assert probes.program.read()["number"].tolist() == ([7] if kind == 0 else [])
    if waited is None:
        assert (record["queue_ns"][0], record["queue_sent_ns"][0]) == (77, 0)
    else:
        assert abs(int(record["queue_ns"][0]) - waited) <= 1
        assert 0 < record["queue_sent_ns"][0] <= time.monotonic_ns()


@pytest.mark.guest
def test_a_queue_is_no_longer_than_the_round_trip_shows(probes: TestRun) -> None:
    reply = probes.remember_probe()
    probes.program.set_session(session(PEERS[0]))
    record = probes.program.paths[0:1]
    base = {"base_ns": -5 * SECOND_NS, "base_drift": 0, "base_at_ns": 3 * SECOND_NS}
    base["base_round_trip_ns"], base["base_slack_ns"] = -4 * SECOND_NS, 2 * SECOND_NS
    for name, value in (base | {"base_until_ns": time.monotonic_ns() + 60 * SECOND_NS}).items():
        record[name] = value
    probes.run(IN, p.ipv4(p.udp(reply, p.PORT, SENDER_PORT)))
    assert 2 * SECOND_NS <= record["queue_ns"][0] < 3 * SECOND_NS, "4 s and what the probe was away, less the slack"


@pytest.mark.parametrize("mark", [MARK_PLAIN, MARK_PLAIN + 1])
def test_what_was_pinned_and_is_not_stamped_leaves_without_our_mark(probes: TestRun, mark: int) -> None:
    done = probes.marked(OUT, p.ipv4(p.udp(size_request(200, 1, 0, short_reply=True), p.PORT, SENDER_PORT)), mark)
    assert done == (UNSPEC, 0 if mark == MARK_PLAIN else mark)


def test_a_full_ring_is_counted_and_nothing_is_torn(probes: TestRun) -> None:
    frame = p.ipv4(p.udp(probes.remember_probe(), p.PORT, SENDER_PORT))
    record_bytes = 8 + probes.program.read().dtype.itemsize
    sent = 128 * 4096 // record_bytes + 100
    probes.repeat(IN, frame, sent)
    records = probes.program.read()
    counted = probes.counted()
    assert counted["recorded"] == len(records)
    assert counted["recorded"] + counted["ring_full"] == sent
    assert counted["ring_full"] >= 100
    assert set(records["number"].tolist()) == {7}
    assert (np.diff(records["seen_ns"].astype(np.int64)) >= 0).all()
    probes.run(IN, frame)
    assert probes.program.read()["number"].tolist() == [7], "a ring that was full works again"


def test_requests_are_remembered_by_peer_and_interface(probes: TestRun) -> None:
    key = p.mapped("10.9.0.2"), LOOPBACK
    before = probes.program.requests()[key].requests if key in probes.program.requests() else 0
    for _ in range(3):
        probes.run(IN, p.ipv4(REQUEST, source="10.9.0.2", destination="10.9.0.1"))
    seen = probes.program.requests()[key]
    assert seen.requests == before + 3
    assert 0 <= time.monotonic_ns() - seen.last_ns < 10**10


def test_only_requests_to_addresses_of_this_host_are_answered(probes: TestRun) -> None:
    """Whether or not the host forwards: the test run's namespace does not."""
    frame = p.ipv4(REQUEST, source="10.9.0.2", destination="10.9.0.50")
    assert probes.run(IN, frame)[0] == UNSPEC, "it is somebody else's"
    probes.program.set_locals(["10.9.0.50", "fd00:9::2"])
    assert probes.run(IN, frame)[0] == REDIRECTED
    assert probes.run(IN, p.ipv4(REQUEST))[0] == UNSPEC
    assert probes.run(IN, p.ipv6(REQUEST))[0] == REDIRECTED
    probes.program.set_locals([])
    assert probes.run(IN, frame)[0] == UNSPEC
    assert probes.counted() == {"reflected": 2}
    probes.program.set_locals(PEERS)


def pseudo_sum(frame: bytes, at: int) -> bytes:
    """What an offload leaves in the checksum of a UDP packet at this offset until it computes the rest."""
    whole = bytearray(frame)
    length = struct.unpack_from("!H", frame, at + 4)[0]
    ends = frame[26:34] if at == 34 else frame[22:54]
    words = struct.unpack(f"!{len(ends) // 2}H", ends)
    total = sum(words) + p.UDP + length
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    whole[at + 6 : at + 8] = struct.pack("!H", total)
    return bytes(whole)


@pytest.mark.parametrize("padding", [0, 1, 2, 3, 40, 460, 500, 511, 1453, 3000])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packet_with_a_wrong_checksum_is_not_believed(probes: TestRun, family: str, padding: int) -> None:
    payload = request((1, bytes(range(256)) * 40))[: 48 + padding] if padding else request()
    payload = payload[:46] + struct.pack("!H", padding) + payload[48:] if padding else payload
    frame = p.with_checksums(FAMILIES[family][0](p.udp(payload)))
    at = 34 if family == "ipv4" else 54
    assert probes.run(IN, frame)[0] == REDIRECTED
    assert probes.counted() == {"reflected": 1}
    for where in (at + 1, at + 12, len(frame) - 1):
        wrong = bytearray(frame)
        wrong[where] ^= 0x10
        assert probes.run(IN, bytes(wrong))[0] == DROPPED, where
        assert probes.counted() == {"malformed": 1}
    assert probes.run(IN, pseudo_sum(frame, at))[0] == REDIRECTED, "an offload has yet to compute it"
    none = frame[: at + 6] + b"\0\0" + frame[at + 8 :]
    assert probes.run(IN, none)[0] == (REDIRECTED if family == "ipv4" else DROPPED)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_with_a_wrong_checksum_is_not_believed(probes: TestRun, family: str) -> None:
    peer = PEERS[0] if family == "ipv4" else PEERS[2]
    reply = probes.remember_probe(remote=peer)
    make = FAMILIES[family][0]
    frame = p.with_checksums(make(p.udp(reply, p.PORT, SENDER_PORT)))
    wrong = bytearray(frame)
    wrong[-1] ^= 1
    assert probes.run(IN, bytes(wrong))[0] == DROPPED
    assert probes.counted() == {"malformed": 1}
    assert probes.run(IN, frame)[0] == DROPPED
    assert probes.counted() == {"recorded": 1}


@pytest.mark.parametrize("filling", [0, 0xA5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_without_its_padding_has_a_right_checksum(probes: TestRun, family: str, filling: int) -> None:
    """Whatever the padding was."""
    payload = request((252, b"\0\1\0\0"), (1, bytes([filling]) * 1001))
    verdict, left = probes.run(IN, p.with_checksums(FAMILIES[family][0](p.udp(payload))))
    assert verdict == REDIRECTED
    at = 34 if family == "ipv4" else 54
    left = left[: at + 8 + 52]
    assert struct.unpack_from("!H", left, at + 4)[0] == 60
    assert left == p.with_checksums(left)


def test_each_peer_has_its_own_share_of_replies_and_gets_it_back_with_time(probes: TestRun) -> None:
    frame = p.ipv4(REQUEST)
    key = np.frombuffer(p.mapped("10.9.0.1"), probes.peers.key)[0]
    value = np.zeros((), probes.peers.value)
    value["error_estimate"], value["due_ns"] = ESTIMATE, time.monotonic_ns() + 10**11
    probes.peers.update(key, value)
    assert probes.run(IN, frame)[0] == DROPPED
    assert probes.run(IN, p.ipv6(REQUEST))[0] == REDIRECTED
    assert probes.counted() == {"over_rate": 1, "reflected": 1}
    value["due_ns"] = time.monotonic_ns() + 10**8
    probes.peers.update(key, value)
    assert probes.run(IN, frame)[0] == REDIRECTED, "a tenth of a second's worth may come at once"
    assert probes.counted() == {"reflected": 1}
