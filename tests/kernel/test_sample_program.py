"""sample.c on packets made by hand: which bytes are sampled, the same both ways, and what is counted instead."""

from __future__ import annotations

import select
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import packets as p
import pytest
import support
from packet_runs import PacketRuns

from pytools.agent.hooks import link_observers
from pytools.config import AgentConfig, Probe, Tcp
from pytools.kernel.bpf import contract, loader
from pytools.kernel.bpf.maps import Map
from pytools.kernel.bpf.rings import Ring
from pytools.sources import programs

UNSPEC = 0xFFFFFFFF
COUNTERS = ("recorded", "ring_full", "fragments", "malformed", "multiple", "segments")
OUT, IN = "sample_egress", "sample_ingress"
EGRESS, INGRESS = 1, 2
RATE = 16
ANCHOR = 1 << RATE
MASK = (1 << 64) - 1


class Sample:
    """The loaded program with its ring, its settings and its counters."""

    def __init__(self, loaded: loader.Loaded, hooks: dict[str, int]) -> None:
        self.programs, self.runs = hooks, PacketRuns()
        self.ring: Ring = loaded.ring("samples", "sample")
        self._counters: Map = loaded.map("sample_counters")
        self._settings: Map = loaded.map("sample_settings")
        self.peers: Map = loaded.map("sample_peers")
        self._before = self._counters.read_percpu_sum()

    def set(self, directions: int = EGRESS | INGRESS, tcp_rate: int = RATE, udp_rate: int = 0) -> None:
        self._settings.update(0, (directions, tcp_rate, udp_rate, 0))

    def peer(self, address: str, directions: int = EGRESS | INGRESS) -> None:
        key = np.zeros((), self.peers.key)
        key["bytes"] = np.frombuffer(p.mapped(address), np.uint8)
        self.peers.update(key, directions)

    def run(self, hook: str, frame: bytes, segment_bytes: int = 0) -> list[Any]:
        done = self.runs.run(self.programs[hook], frame, segment_bytes=segment_bytes)
        assert done.verdict == UNSPEC, "an observer must let other programs decide"
        return list(self.ring.read())

    def keys(self, hook: str, frame: bytes, segment_bytes: int = 0) -> list[int]:
        return [int(record["key"]) for record in self.run(hook, frame, segment_bytes)]

    def counted(self) -> dict[str, int]:
        """Counters that have moved since the last call."""
        now = self._counters.read_percpu_sum()
        moved = now - self._before
        self._before = now
        return {name: int(value) for name, value in zip(COUNTERS, moved, strict=True) if value}


@pytest.fixture(scope="module", params=["together", "alone"])
def sample(request: pytest.FixtureRequest) -> Iterator[Sample]:
    config = AgentConfig("", [], Probe(port=p.PORT))
    parts = [programs.probes(config), programs.tcp_connections(Tcp(flows=1024)), programs.samples(config)]
    with loader.load(programs.observers(*parts) if request.param == "together" else parts[-1:]) as loaded:
        assert loaded.failed == {}
        hooks = {direction: loaded.programs[name] for name, direction in link_observers(loaded)}
        yield Sample(loaded, {OUT: hooks["egress"], IN: hooks["ingress"]})


@pytest.fixture(autouse=True)
def _from_zero(sample: Sample) -> None:
    sample.set()
    for address in ("10.9.0.1", "10.9.0.2", "fd00:9::1", "fd00:9::2"):
        sample.peer(address)
    sample.ring.read()
    sample.counted()


def tcp(seq: int, payload: bytes = b"", options: bytes = b"", flags: int = 0x10, words: int | None = None) -> bytes:
    """A TCP segment from port 5000 to port 6000."""
    words = 5 + len(options) // 4 if words is None else words
    head = struct.pack("!HHIIBBHHH", 5000, 6000, seq & 0xFFFFFFFF, 0, words << 4, flags, 0, 0, 0)
    return head + options + payload


def hashed(payload: bytes, source: int = 5000, destination: int = 6000) -> int:
    """What the program makes of a datagram, written down a second time."""
    ports = int.from_bytes(struct.pack("!H", source), "little") << 16
    ports |= int.from_bytes(struct.pack("!H", destination), "little")
    value = len(payload)
    for word in (ports, *struct.unpack("<4Q", payload[:32].ljust(32, b"\0"))):
        value = (value ^ word) * 0x9E3779B97F4A7C15 & MASK
        value ^= value >> 32
    return value


Build = Callable[..., bytes]
FAMILIES: dict[str, tuple[Build, str, str]] = {
    "ipv4": (p.ipv4, "10.9.0.1", "10.9.0.2"),
    "ipv6": (p.ipv6, "fd00:9::1", "fd00:9::2"),
}
families = pytest.mark.parametrize("family", FAMILIES)
tagging = pytest.mark.parametrize("tags", p.TAGS.values(), ids=p.TAGS.keys())
hooks = pytest.mark.parametrize("hook", [OUT, IN])
DATAGRAM = bytes(range(100, 200))


@pytest.mark.guest(every=5)
@tagging
@families
@hooks
@pytest.mark.parametrize("protocol", ["tcp", "udp"])
def test_a_sample_says_everything_that_names_it(
    sample: Sample, protocol: str, hook: str, family: str, tags: tuple[int, ...]
) -> None:
    build, source, destination = FAMILIES[family]
    if protocol == "tcp":
        frame = build(tcp(ANCHOR - 40, bytes(100)), protocol=p.TCP, tags=tags)
    else:
        frame = build(p.udp(DATAGRAM, 5000, 6000), tags=tags)
    (record,) = sample.run(hook, frame)
    assert record["key"] == (ANCHOR if protocol == "tcp" else hashed(DATAGRAM))
    ends = {"source": (p.mapped(source), 5000), "destination": (p.mapped(destination), 6000)}
    local, remote = ("source", "destination") if hook == OUT else ("destination", "source")
    assert (bytes(record["local"]["bytes"]), record["local_port"]) == ends[local]
    assert (bytes(record["remote"]["bytes"]), record["remote_port"]) == ends[remote]
    assert record["protocol"] == (p.TCP if protocol == "tcp" else p.UDP)
    assert record["direction"] == (EGRESS if hook == OUT else INGRESS)
    assert record["rate"] == (RATE if protocol == "tcp" else 0)
    assert 0 < record["ts_ns"] == record["seen_ns"]
    assert sample.counted() == {"recorded": 1}


@pytest.mark.parametrize(
    ("seq", "size", "anchors"),
    [
        (1, 100, []),
        (ANCHOR - 100, 100, []),
        (ANCHOR - 100, 101, [ANCHOR]),
        (ANCHOR, 1, [ANCHOR]),
        (ANCHOR, 0, []),
        (ANCHOR + 1, 1000, []),
        (7 * ANCHOR - 5, 1000, [7 * ANCHOR]),
        (-50, 50, []),
        (-50, 51, [0]),
        (0, 1, [0]),
        (-1, 1, []),
        ((1 << 31) - 1, 2, [1 << 31]),
    ],
)
@tagging
def test_the_byte_at_a_multiple_is_sampled(
    sample: Sample, seq: int, size: int, anchors: list[int], tags: tuple[int, ...]
) -> None:
    assert sample.keys(OUT, p.ipv4(tcp(seq, bytes(size)), protocol=p.TCP, tags=tags)) == anchors
    assert sample.keys(IN, p.ipv6(tcp(seq, bytes(size), b"\1" * 12), protocol=p.TCP, tags=tags)) == anchors


@pytest.mark.guest
def test_both_ends_pick_the_same_bytes_however_the_stream_is_cut(sample: Sample) -> None:
    """Around the wrap of the sequence numbers: merged here, in packets of all sizes there."""
    sample.set(tcp_rate=12)
    begin, size, most = -100_000, 200_000, 3000
    rng = np.random.default_rng(1)

    def sampled(hook: str, sizes: list[int]) -> list[int]:
        seq, found = begin, []
        for each in sizes:
            each = min(each, begin + size - seq)  # noqa: PLW2901
            frame = p.ipv4(tcp(seq, bytes(each)), protocol=p.TCP)
            found += sample.keys(hook, frame, 1448 if each > 1448 else 0)
            seq += each
        assert seq == begin + size
        return found

    expected = [each & 0xFFFFFFFF for each in range(begin + -begin % 4096, begin + size, 4096)]
    assert sampled(OUT, [2 * 1448] * 70) == expected
    assert sampled(IN, rng.integers(1, most, 400).tolist()) == expected
    assert sampled(IN, [1] * 100 + [1448] * 200) == expected


@pytest.mark.guest
def test_of_several_bytes_the_roundest_is_taken(sample: Sample) -> None:
    sample.set(tcp_rate=4)
    for seq, size, picked in ((1, 15, []), (1, 100, [64]), (65, 50, [96]), (100, 60, [128]), (-20, 40, [0])):
        assert sample.keys(OUT, p.ipv4(tcp(seq, bytes(size)), protocol=p.TCP)) == picked
    assert sample.counted() == {"recorded": 4, "multiple": 4}


@pytest.mark.guest
def test_rates_are_nested(sample: Sample) -> None:
    frames = [p.ipv4(p.udp(struct.pack("!Q", n) * 4, 5000, 6000)) for n in range(512)]
    found = []
    for rate in range(7):
        sample.set(udp_rate=rate)
        found.append({key for frame in frames for key in sample.keys(OUT, frame)})
        assert all(key % (1 << rate) == 0 for key in found[-1])
    assert len(found[0]) == 512
    for coarse, fine in zip(found[1:], found, strict=False):
        assert coarse == {key for key in fine if key in coarse}
        assert 0.3 * len(fine) < len(coarse) < 0.7 * len(fine), "half of them"


@pytest.mark.guest
@pytest.mark.parametrize(
    "payload",
    [tcp(ANCHOR - 10, bytes(20), flags=0x02), tcp(ANCHOR - 10, bytes(20), flags=0x12)],
    ids=["syn", "syn-ack"],
)
def test_a_syn_has_no_place_in_the_stream(sample: Sample, payload: bytes) -> None:
    assert sample.run(OUT, p.ipv4(payload, protocol=p.TCP)) == []
    assert sample.counted() == {}


@pytest.mark.guest
@families
def test_padding_behind_a_short_packet_is_no_payload(sample: Sample, family: str) -> None:
    build = FAMILIES[family][0]
    assert sample.run(IN, build(tcp(ANCHOR - 2), protocol=p.TCP) + bytes(6)) == []
    short = b"short"
    assert sample.keys(IN, build(p.udp(short, 5000, 6000)) + bytes(13)) == [hashed(short)]


@tagging
@families
@pytest.mark.parametrize("size", [0, 1, 7, 8, 31, 32, 33, 1400])
def test_datagrams_of_every_size(sample: Sample, size: int, family: str, tags: tuple[int, ...]) -> None:
    payload = bytes(range(1, 256)) * 6
    frame = FAMILIES[family][0](p.udp(payload[:size], 5000, 6000), tags=tags)
    assert sample.keys(OUT, frame) == [hashed(payload[:size])]
    assert sample.keys(IN, frame) == [hashed(payload[:size])]


@pytest.mark.guest
def test_what_hops_alter_is_not_hashed(sample: Sample) -> None:
    frame = bytearray(p.ipv4(p.udp(DATAGRAM, 5000, 6000), ttl=64))
    (before,) = sample.keys(OUT, bytes(frame))
    frame[15] = 0x2F  # DSCP and ECN
    frame[18:20] = b"\xbe\xef"  # identifier
    frame[22] = 3  # TTL
    frame[24:26] = b"\x12\x34"  # header checksum
    frame[40:42] = b"\x56\x78"  # UDP checksum
    assert sample.keys(IN, bytes(frame)) == [before]


@pytest.mark.guest(every=3)
@pytest.mark.parametrize("alter", [34, 36, 42, 73], ids=["source port", "destination port", "first", "last hashed"])
def test_what_tells_datagrams_apart_is_hashed(sample: Sample, alter: int) -> None:
    frame = bytearray(p.ipv4(p.udp(DATAGRAM, 5000, 6000)))
    (before,) = sample.keys(OUT, bytes(frame))
    frame[alter] ^= 1
    assert sample.keys(OUT, bytes(frame)) != [before]


@tagging
@families
@pytest.mark.parametrize(("count", "each", "rest"), [(2, 100, 0), (30, 100, 1), (3, 5, 2), (128, 25, 9), (1, 100, 99)])
def test_merged_datagrams_are_looked_at_one_by_one(
    sample: Sample, count: int, each: int, rest: int, family: str, tags: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(2)
    payload = rng.bytes(count * each + rest)
    parts = [payload[begin : begin + each] for begin in range(0, len(payload), each)]
    build = FAMILIES[family][0]
    expected = [hashed(part) for part in parts]
    assert sample.keys(OUT, build(p.udp(payload, 5000, 6000), tags=tags), each) == expected
    # A list of packets keeps the length of its first one in its header.
    first = p.udp(payload, 5000, 6000, length=each + 8)
    assert sample.keys(IN, build(first, tags=tags), each) == expected
    assert [key for part in parts for key in sample.keys(IN, build(p.udp(part, 5000, 6000), tags=tags))] == expected


@pytest.mark.guest
def test_datagrams_beyond_what_is_looked_at_are_counted(sample: Sample) -> None:
    payload = np.random.default_rng(3).bytes(131 * 20)
    expected = [hashed(payload[begin : begin + 20]) for begin in range(0, 128 * 20, 20)]
    assert sample.keys(OUT, p.ipv4(p.udp(payload, 5000, 6000)), 20) == expected
    assert sample.counted() == {"recorded": 128, "segments": 3}


@pytest.mark.guest
def test_a_merged_stream_longer_than_its_length_field(sample: Sample) -> None:
    """BIG TCP: the IPv4 field is zero; IPv6 has a jumbo option in front, which never leaves a host."""
    sample.set(tcp_rate=11)
    frame = bytearray(p.ipv4(tcp(1, bytes(3000)), protocol=p.TCP))
    frame[16:18] = b"\0\0"
    assert sample.keys(OUT, bytes(frame), 1448) == [2048]
    inner = tcp(1, bytes(3000))
    jumbo = struct.pack("!BBBBI", p.TCP, 0, 0xC2, 4, len(inner) + 8)
    frame6 = bytearray(p.ipv6(jumbo + inner, protocol=0))
    frame6[18:20] = b"\0\0"
    assert sample.keys(IN, bytes(frame6), 1448) == [2048]
    assert sample.counted() == {"recorded": 2}


FRAGMENTS = {
    "first": p.ipv4(p.udp(DATAGRAM, 5000, 6000), fragment=0x2000),
    "later": p.ipv4(DATAGRAM, fragment=7),
    "tagged tcp": p.ipv4(tcp(ANCHOR, bytes(9)), protocol=p.TCP, fragment=0x2000, tags=(p.TAG_8021Q,)),
    "ipv6": p.ipv6(struct.pack("!BBHI", p.UDP, 0, 1, 9) + p.udp(DATAGRAM), protocol=44),
}
CONTRADICTING = {  # lengths
    "words": p.ipv4(tcp(ANCHOR, bytes(9), words=4), protocol=p.TCP),
    "options": p.ipv4(tcp(ANCHOR, b"", words=9), protocol=p.TCP),
    "cut": p.ipv4(tcp(ANCHOR)[:19], protocol=p.TCP),
    "cut 6": p.ipv6(tcp(ANCHOR)[:12], protocol=p.TCP),
    "too small": p.ipv4(p.udp(DATAGRAM, 5000, 6000, length=7)),
    "too large": p.ipv4(p.udp(DATAGRAM, 5000, 6000, length=109)),
    "cut payload": p.ipv4(p.udp(DATAGRAM, 5000, 6000))[:60],
    "cut udp": p.ipv6(p.udp(b"", 5000, 6000)[:6]),
}
OTHERS = {
    "icmp": p.ipv4(p.udp(DATAGRAM), protocol=1),
    "probe": p.ipv4(p.udp(DATAGRAM, 5000, p.PORT)),
    "short probe": p.ipv4(p.udp(DATAGRAM[:9], p.PORT, 5000)),
    "options": p.ipv6(p.udp(DATAGRAM), protocol=60),
    "arp": p.ethernet(0x0806, bytes(60)),
    "cut options": p.ethernet(0x0800, b"\x4f" + bytes(20)),
    "cut header": p.ethernet(0x0800, b"\x45" + bytes(5), (p.TAG_8021Q,)),
    "empty": bytes(14),
}


@pytest.mark.guest(every=3)
@pytest.mark.parametrize(
    ("hook", "frame", "counted"),
    [
        *(pytest.param(OUT, frame, {"fragments": 1}, id=f"fragment: {name}") for name, frame in FRAGMENTS.items()),
        *(pytest.param(IN, frame, {"malformed": 1}, id=f"lengths: {name}") for name, frame in CONTRADICTING.items()),
        *(pytest.param(OUT, frame, {}, id=f"other: {name}") for name, frame in OTHERS.items()),
    ],
)
def test_what_cannot_be_sampled_is_counted_and_what_is_not_ours_leaves_no_trace(
    sample: Sample, hook: str, frame: bytes, counted: dict[str, int]
) -> None:
    assert sample.run(hook, frame) == []
    assert sample.counted() == counted


@pytest.mark.guest
def test_ip_options_move_the_transport_header(sample: Sample) -> None:
    options = b"\x01" * 12
    assert sample.keys(OUT, p.ipv4(tcp(ANCHOR, bytes(9)), protocol=p.TCP, options=options)) == [ANCHOR]
    assert sample.keys(OUT, p.ipv4(p.udp(DATAGRAM, 5000, 6000), options=options)) == [hashed(DATAGRAM)]


@pytest.mark.guest
@hooks
def test_only_what_is_asked_for_is_sampled(sample: Sample, hook: str) -> None:
    own, other = (EGRESS, INGRESS) if hook == OUT else (INGRESS, EGRESS)
    remote = "10.9.0.2" if hook == OUT else "10.9.0.1"
    frame = p.ipv4(p.udp(DATAGRAM, 5000, 6000))
    fragment = p.ipv4(p.udp(DATAGRAM, 5000, 6000), fragment=0x2000)
    stranger = {"source": "10.9.0.77", "destination": "10.9.0.77"}
    assert sample.run(hook, p.ipv4(p.udp(DATAGRAM, 5000, 6000), **stranger)) == []
    sample.set(directions=other)
    assert sample.run(hook, frame) == []
    sample.set(directions=own)
    sample.peer(remote, other)
    assert sample.run(hook, frame) + sample.run(hook, fragment) == []
    assert sample.counted() == {}
    sample.peer(remote, own)
    assert len(sample.run(hook, frame)) == 1
    sample.set(directions=0)
    assert sample.run(hook, frame) == []
    assert sample.counted() == {"recorded": 1}


def test_many_samples_at_once_wake_the_agent(sample: Sample) -> None:
    burst, frame = contract.constant("SWERVE_SAMPLE_BURST"), p.ipv4(p.udp(DATAGRAM, 5000, 6000))
    with select.epoll() as woken:
        woken.register(sample.ring.fileno(), select.EPOLLIN | select.EPOLLET)

        def wakes(samples: int) -> bool:
            sample.runs.run(sample.programs[OUT], frame, repeat=samples)
            woke = bool(woken.poll(0.05))
            assert len(sample.ring.read()) == samples
            return woke

        support.wait_until(lambda: wakes(burst), 20, "so many wake it")
        assert not wakes(burst - 1), "fewer do not, nor more soon after"
        support.wait_until(lambda: wakes(burst), 20, "they do again after some time")


@pytest.mark.guest
def test_a_full_ring_is_counted(sample: Sample) -> None:
    frame = p.ipv4(p.udp(DATAGRAM, 5000, 6000))
    capacity = 128 * 4096 // (sample.ring.record.itemsize + 8)
    sample.runs.run(sample.programs[OUT], frame, repeat=capacity + 50)
    records = sample.ring.read()
    counted = sample.counted()
    assert counted["recorded"] == len(records)
    assert counted["recorded"] + counted["ring_full"] == capacity + 50
    assert counted["ring_full"] >= 50
    assert len(sample.run(OUT, frame)) == 1, "a ring that was full works again"
