"""stamp.c on packets made by hand: what is recorded, what is counted instead, and what is counted as marked."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import packets as p
import pytest

from pytools.kernel import bpf, loader
from pytools.kernel.maps import Map
from pytools.kernel.rings import Ring

pytestmark = pytest.mark.guest

UNSPEC = 0xFFFFFFFF
COUNTERS = ("recorded", "ring_full", "malformed", "foreign", "merged", "ecn_full")
OUT, IN = "stamp_egress", "stamp_ingress"


class Stamp:
    """The loaded program with its ring and counters."""

    def __init__(self, loaded: loader.Loaded) -> None:
        self.programs = loaded.programs
        self.ring: Ring = loaded.ring("stamps", "stamp")
        self._counters: Map = loaded.map("stamp_counters")
        self._before = self._counters.read_percpu_sum()
        self._ecn: Map = loaded.map("stamp_ecn")
        self.peers: Map = loaded.map("stamp_peers")

    def run(self, hook: str, frame: bytes, segments: int = 0) -> list[dict[str, int]]:
        verdict, _ = bpf.test_run(self.programs[hook], frame, segments=segments)
        assert verdict == UNSPEC, "an observer must let other programs decide"
        records = self.ring.read()
        return [{name: record[name] for name in record.dtype.names} for record in records]

    def counted(self) -> dict[str, int]:
        """Counters that have moved since the last call."""
        now = self._counters.read_percpu_sum()
        moved = now - self._before
        self._before = now
        return {name: int(value) for name, value in zip(COUNTERS, moved, strict=True) if value}

    def marks(self) -> dict[bytes, tuple[int, int]]:
        """By remote address: packets that can be marked, and those that are."""
        keys, values = self._ecn.read()
        return {
            key["remote"]["bytes"].tobytes(): (int(each["packets"].sum()), int(each["ce_packets"].sum()))
            for key, each in zip(keys, values, strict=True)
        }

    def forget_marks(self) -> None:
        for key in self._ecn.read()[0]:
            self._ecn.delete(key)


@pytest.fixture(scope="module")
def stamp(require: object) -> Iterator[Stamp]:
    with loader.load([loader.Program("stamp.c", (OUT, IN), {"SWERVE_PROBE_PORT": p.PORT})]) as loaded:
        assert loaded.failed == {}
        peers = loaded.map("stamp_peers")
        for address in ("10.9.0.1", "10.9.0.2", "fd00:9::1", "fd00:9::2"):
            key = np.zeros((), peers.key)
            key["bytes"] = np.frombuffer(p.mapped(address), np.uint8)
            peers.update(key, 1)
        yield Stamp(loaded)


@pytest.fixture(autouse=True)
def _from_zero(stamp: Stamp) -> None:
    stamp.ring.read()
    stamp.counted()
    stamp.forget_marks()


FAMILIES = {"ipv4": (p.ipv4, "10.9.0.1", "10.9.0.2"), "ipv6": (p.ipv6, "fd00:9::1", "fd00:9::2")}
TAGS = {"untagged": (), "802.1Q": (p.TAG_8021Q,), "802.1ad over 802.1Q": (p.TAG_8021AD, p.TAG_8021Q)}
REQUEST, REPLY = p.udp(p.stamp_request(7, 9)), p.udp(p.stamp_reply(7, 9, 123), p.PORT, 5000)


@pytest.mark.guest(every=5)
@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS.keys())
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("hook", "payload", "kind"), [(OUT, REQUEST, 1), (IN, REQUEST, 2), (OUT, REPLY, 3), (IN, REPLY, 4)]
)
def test_a_probe_is_recorded_with_everything_that_names_it(
    stamp: Stamp, hook: str, payload: bytes, kind: int, family: str, tags: tuple[int, ...]
) -> None:
    build, source, destination = FAMILIES[family]
    (record,) = stamp.run(hook, build(payload, tags=tags))
    assert (record["seq"], record["ssid"], record["kind"], record["sender_port"]) == (7, 9, kind, 5000)
    assert record["ttl"] == 61
    remote, local = (destination, source) if hook == OUT else (source, destination)
    assert bytes(record["remote"]["bytes"]) == p.mapped(remote)
    assert bytes(record["local"]["bytes"]) == p.mapped(local)
    assert stamp.counted() == {"recorded": 1}


def test_every_probe_is_recorded_once_and_in_order(stamp: Stamp) -> None:
    frames = [p.ipv4(p.udp(p.stamp_request(seq, 9))) for seq in range(23)]
    records = [record for frame in frames for record in stamp.run(OUT, frame)]
    assert [record["seq"] for record in records] == list(range(23))
    times = [int(record["ts_ns"]) for record in records]
    assert times == sorted(times)


@pytest.mark.guest(every=3)
@pytest.mark.parametrize(
    "frame",
    [
        p.ipv4(p.udp(p.stamp_request(1, 1)[:43])),
        p.ipv4(p.udp(p.stamp_request(1, 1), length=51)),
        p.ipv4(p.udp(p.stamp_request(1, 1), length=600)),
        p.ipv4(p.udp(p.stamp_request(1, 1)), fragment=0x2000),
        p.ipv6(p.udp(b"")),
        p.ipv4(p.udp(b"x" * 43, p.PORT, 5000)),
    ],
    ids=["short", "length too small", "length too large", "first fragment", "empty", "short reply"],
)
def test_what_is_no_whole_probe_is_counted_malformed(stamp: Stamp, frame: bytes) -> None:
    assert stamp.run(IN, frame) == []
    assert stamp.counted() == {"malformed": 1}


@pytest.mark.parametrize(("segments", "counted"), [(1, {"recorded": 1}), (2, {"merged": 1})])
def test_merged_probes_are_counted_and_not_taken_for_one(stamp: Stamp, segments: int, counted: dict[str, int]) -> None:
    assert len(stamp.run(IN, p.ipv4(REQUEST), segments=segments)) == counted.get("recorded", 0)
    assert stamp.counted() == counted


def test_a_stranger_is_counted_foreign(stamp: Stamp) -> None:
    assert stamp.run(IN, p.ipv4(REQUEST, source="10.9.0.77")) == []
    assert stamp.run(OUT, p.ipv6(REPLY, destination="fd00:9::77")) == []
    assert stamp.counted() == {"foreign": 2}


@pytest.mark.guest(every=4)
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
def test_ordinary_packets_leave_no_trace(stamp: Stamp, frame: bytes) -> None:
    assert stamp.run(IN, frame) == []
    assert stamp.counted() == {}


def test_ip_options_do_not_hide_a_probe(stamp: Stamp) -> None:
    (record,) = stamp.run(IN, p.ipv4(REQUEST, options=b"\x01" * 12))
    assert record["seq"] == 7


def test_a_full_ring_is_counted_and_nothing_is_torn(stamp: Stamp) -> None:
    capacity = 128 * 4096 // 64
    sent = capacity + 100
    bpf.test_run(stamp.programs[OUT], p.ipv4(REQUEST), sent)
    records = stamp.ring.read()
    counted = stamp.counted()
    assert counted["recorded"] == len(records)
    assert counted["recorded"] + counted["ring_full"] == sent
    assert counted["ring_full"] >= 100
    assert set(records["seq"].tolist()) == {7}
    assert stamp.run(OUT, p.ipv4(REQUEST))[0]["seq"] == 7, "a ring that was full works again"


ECT0, ECT1, CE = 2, 1, 3
PLAIN = p.udp(b"x" * 60, 5000, 5001)


def with_ecn(frame: bytes, ecn: int, tags: tuple[int, ...] = ()) -> bytes:
    """The frame with this ECN field, and an odd DSCP beside it that must not matter."""
    at = 14 + 4 * len(tags)
    changed = bytearray(frame)
    if frame[at] >> 4 == 4:
        changed[at + 1] = 0xA8 | ecn
    else:
        changed[at] |= 0x0A
        changed[at + 1] |= 0x80 | ecn << 4
    return bytes(changed)


@pytest.mark.guest(every=5)
@pytest.mark.parametrize("what", [PLAIN, REQUEST, b"x" * 30], ids=["udp", "probe", "tcp"])
@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_marks_of_a_peer_are_counted_where_they_come_in(
    stamp: Stamp, family: str, tags: tuple[int, ...], what: bytes
) -> None:
    build, source, _ = FAMILIES[family]
    protocol = p.TCP if what == b"x" * 30 else p.UDP
    frame = build(what, protocol=protocol, tags=tags)
    for ecn, times in ((0, 2), (ECT0, 3), (ECT1, 5), (CE, 7)):
        for _ in range(times):
            stamp.run(IN, with_ecn(frame, ecn, tags))
            stamp.run(OUT, with_ecn(frame, ecn, tags))
    assert stamp.marks() == {p.mapped(source): (15, 7)}


def test_a_merged_buffer_counts_as_what_it_was_merged_from(stamp: Stamp) -> None:
    frame = p.ipv4(b"x" * 60, protocol=p.TCP)
    stamp.run(IN, with_ecn(frame, CE), segments=44)
    stamp.run(IN, with_ecn(frame, ECT0), segments=3)
    stamp.run(IN, with_ecn(frame, ECT0), segments=1)
    assert stamp.marks() == {p.mapped("10.9.0.1"): (48, 44)}


def test_marks_of_options_fragments_and_malformed_probes_count_and_those_of_strangers_do_not(stamp: Stamp) -> None:
    stamp.run(IN, with_ecn(p.ipv4(PLAIN, options=b"\x01" * 12), CE))
    stamp.run(IN, with_ecn(p.ipv4(PLAIN, fragment=5), CE))
    stamp.run(IN, with_ecn(p.ipv4(p.udp(b"short")), CE))
    stamp.run(IN, with_ecn(p.ipv4(PLAIN, source="10.9.0.77"), CE))
    stamp.run(IN, with_ecn(p.ipv6(PLAIN, source="fd00:9::77"), CE))
    assert stamp.marks() == {p.mapped("10.9.0.1"): (3, 3)}
    assert stamp.counted() == {"malformed": 1}


def test_counts_are_whole_machine_words(stamp: Stamp) -> None:
    bpf.test_run(stamp.programs[IN], with_ecn(p.ipv4(PLAIN), CE), 70_000, segments=65_535)
    assert stamp.marks() == {p.mapped("10.9.0.1"): (70_000 * 65_535, 70_000 * 65_535)}


def test_marks_without_room_are_counted_as_such(stamp: Stamp) -> None:
    ecn = stamp._ecn
    for number in range(ecn.max_entries):
        key = np.zeros((), ecn.key)
        key["ifindex"] = 1_000_000 + number
        ecn.update(key, np.zeros((), ecn.value))
    stamp.run(IN, with_ecn(p.ipv4(b"x" * 60, protocol=p.TCP), CE), segments=10)
    assert p.mapped("10.9.0.1") not in stamp.marks()
    assert stamp.counted() == {"ecn_full": 10}
