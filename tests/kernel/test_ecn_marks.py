"""Congestion marks (ECN) of packets made by hand: what probe_ingress counts, of whom, and what it leaves out."""

from __future__ import annotations

import numpy as np
import packets as p
import pytest
from probe_kit import DROPPED, IN, OUT, REDIRECTED, UNSPEC, TestRun, probes, request

__all__ = ["probes"]  # fixtures

pytestmark = pytest.mark.guest

FAMILIES = {"ipv4": (p.ipv4, "10.9.0.1"), "ipv6": (p.ipv6, "fd00:9::1")}
ECT0, ECT1, CE = 2, 1, 3
PLAIN = p.udp(b"x" * 60, 5000, 5001)
REQUEST = p.udp(request())


def take(probes: TestRun, frame: bytes, segments: int = 0, verdict: int = UNSPEC) -> None:
    assert probes.run(IN, frame, segments)[0] == verdict


def marks(probes: TestRun) -> dict[bytes, tuple[int, int]]:
    """By remote address: packets that can be marked, and those that are."""
    keys, values = probes.ecn.read()
    return {
        key["remote"]["bytes"].tobytes(): (int(each["packets"].sum()), int(each["ce_packets"].sum()))
        for key, each in zip(keys, values, strict=True)
    }


@pytest.fixture(autouse=True)
def _from_zero(probes: TestRun) -> None:
    probes.counted()
    for key in probes.ecn.read()[0]:
        probes.ecn.delete(key)


def with_ecn(frame: bytes, ecn: int, tags: tuple[int, ...] = ()) -> bytes:
    """The frame with this ECN field, and an odd DSCP beside it that must not matter."""
    at = 14 + 4 * len(tags)
    changed = bytearray(frame)
    if frame[at] >> 4 == 4:
        changed[at + 1] = 0xA8 | ecn
        changed[at + 10 : at + 12] = p.ipv4_checksum(bytes(changed[at : at + 20]))
    else:
        changed[at] |= 0x0A
        changed[at + 1] |= 0x80 | ecn << 4
    return bytes(changed)


@pytest.mark.guest(every=5)
@pytest.mark.parametrize("what", [PLAIN, REQUEST, b"x" * 30], ids=["udp", "probe", "tcp"])
@pytest.mark.parametrize("tags", p.TAGS.values(), ids=p.TAGS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_marks_of_a_peer_are_counted_where_they_come_in(
    probes: TestRun, family: str, tags: tuple[int, ...], what: bytes
) -> None:
    build, source = FAMILIES[family]
    frame = build(what, protocol=p.TCP if what == b"x" * 30 else p.UDP, tags=tags)
    for ecn, times in ((0, 2), (ECT0, 3), (ECT1, 5), (CE, 7)):
        for _ in range(times):
            marked = with_ecn(frame, ecn, tags)
            take(probes, marked, verdict=REDIRECTED if what == REQUEST else UNSPEC)
            assert probes.run(OUT, marked) == (UNSPEC, marked)
    assert marks(probes) == {p.mapped(source): (15, 7)}
    assert probes.counted() == ({"reflected": 17} if what == REQUEST else {})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_has_the_class_of_its_request_without_the_mark(probes: TestRun, family: str) -> None:
    frame = with_ecn(FAMILIES[family][0](REQUEST), CE)
    _, left = probes.run(IN, frame)
    (was, now) = (int.from_bytes(each[14:16]) & (0xFF if family == "ipv4" else 0xFF0) for each in (frame, left))
    ecn_bits = 3 if family == "ipv4" else 0x30
    assert was & ecn_bits == ecn_bits and now == was & ~ecn_bits


def test_a_merged_buffer_counts_as_what_it_was_merged_from(probes: TestRun) -> None:
    frame = p.ipv4(b"x" * 60, protocol=p.TCP)
    take(probes, with_ecn(frame, CE), segments=44)
    take(probes, with_ecn(frame, ECT0), segments=3)
    take(probes, with_ecn(frame, ECT0), segments=1)
    assert marks(probes) == {p.mapped("10.9.0.1"): (48, 44)}


def test_marks_of_options_fragments_and_malformed_probes_count_and_those_of_strangers_do_not(probes: TestRun) -> None:
    take(probes, with_ecn(p.ipv4(PLAIN, options=b"\x01" * 12), CE))
    take(probes, with_ecn(p.ipv4(PLAIN, fragment=5), CE))
    take(probes, with_ecn(p.ipv4(p.udp(b"short")), CE), verdict=DROPPED)
    take(probes, with_ecn(p.ipv4(PLAIN, source="10.9.0.77"), CE))
    take(probes, with_ecn(p.ipv6(PLAIN, source="fd00:9::77"), CE))
    assert marks(probes) == {p.mapped("10.9.0.1"): (3, 3)}
    assert probes.counted() == {"malformed": 1}


def test_counts_are_whole_machine_words(probes: TestRun) -> None:
    probes.repeat(IN, with_ecn(p.ipv4(PLAIN), CE), 70_000, segments=65_535)
    assert marks(probes) == {p.mapped("10.9.0.1"): (70_000 * 65_535, 70_000 * 65_535)}


def test_marks_without_room_are_counted_as_such(probes: TestRun) -> None:
    for number in range(probes.ecn.max_entries):
        key = np.zeros((), probes.ecn.key)
        key["ifindex"] = 1_000_000 + number
        probes.ecn.update(key, np.zeros((), probes.ecn.value))
    take(probes, with_ecn(p.ipv4(b"x" * 60, protocol=p.TCP), CE), segments=10)
    assert p.mapped("10.9.0.1") not in marks(probes)
    assert probes.counted() == {"ecn_full": 10}
