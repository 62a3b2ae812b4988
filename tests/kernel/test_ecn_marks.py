"""Congestion marks (ECN) of packets made by hand: what probe_ingress counts, of whom, and what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import packets as p
import pytest
import support
from probe_kit import DROPPED, REDIRECTED, UNSPEC, TestRun, request

from pytools.kernel import loader

pytestmark = pytest.mark.guest

OUT, IN = "probe_egress", "probe_ingress"
FAMILIES = {"ipv4": (p.ipv4, "10.9.0.1"), "ipv6": (p.ipv6, "fd00:9::1")}
TAGS = {"untagged": (), "802.1Q": (p.TAG_8021Q,), "802.1ad over 802.1Q": (p.TAG_8021AD, p.TAG_8021Q)}
ECT0, ECT1, CE = 2, 1, 3
PLAIN = p.udp(b"x" * 60, 5000, 5001)
REQUEST = p.udp(request())


class Marks(TestRun):
    """With the counts of marks."""

    def take(self, frame: bytes, segments: int = 0, verdict: int = UNSPEC) -> None:
        assert self.run(IN, frame, segments)[0] == verdict

    def marks(self) -> dict[bytes, tuple[int, int]]:
        """By remote address: packets that can be marked, and those that are."""
        keys, values = self.ecn.read()
        return {
            key["remote"]["bytes"].tobytes(): (int(each["packets"].sum()), int(each["ce_packets"].sum()))
            for key, each in zip(keys, values, strict=True)
        }

    def forget_marks(self) -> None:
        for key in self.ecn.read()[0]:
            self.ecn.delete(key)


@pytest.fixture(scope="module")
def probes(make_lasting_namespace: Callable[[], str]) -> Iterator[Marks]:
    support.require("root", "bcc", "netns")
    with loader.load([loader.Program("probe.c", (OUT, IN), {"SWERVE_PROBE_PORT": p.PORT})]) as loaded:
        assert loaded.failed == {}
        made = Marks(loaded, make_lasting_namespace())
        yield made
        made.close()


@pytest.fixture(autouse=True)
def _from_zero(probes: Marks) -> None:
    probes.counted()
    probes.forget_marks()


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
    probes: Marks, family: str, tags: tuple[int, ...], what: bytes
) -> None:
    build, source = FAMILIES[family]
    frame = build(what, protocol=p.TCP if what == b"x" * 30 else p.UDP, tags=tags)
    for ecn, times in ((0, 2), (ECT0, 3), (ECT1, 5), (CE, 7)):
        for _ in range(times):
            marked = with_ecn(frame, ecn, tags)
            probes.take(marked, verdict=REDIRECTED if what == REQUEST else UNSPEC)
            assert probes.run(OUT, marked) == (UNSPEC, marked)
    assert probes.marks() == {p.mapped(source): (15, 7)}
    assert probes.counted() == ({"reflected": 17} if what == REQUEST else {})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_has_the_class_of_its_request_without_the_mark(probes: Marks, family: str) -> None:
    frame = with_ecn(FAMILIES[family][0](REQUEST), CE)
    _, left = probes.run(IN, frame)
    (was, now) = (int.from_bytes(each[14:16]) & (0xFF if family == "ipv4" else 0xFF0) for each in (frame, left))
    ecn_bits = 3 if family == "ipv4" else 0x30
    assert was & ecn_bits == ecn_bits and now == was & ~ecn_bits


def test_a_merged_buffer_counts_as_what_it_was_merged_from(probes: Marks) -> None:
    frame = p.ipv4(b"x" * 60, protocol=p.TCP)
    probes.take(with_ecn(frame, CE), segments=44)
    probes.take(with_ecn(frame, ECT0), segments=3)
    probes.take(with_ecn(frame, ECT0), segments=1)
    assert probes.marks() == {p.mapped("10.9.0.1"): (48, 44)}


def test_marks_of_options_fragments_and_malformed_probes_count_and_those_of_strangers_do_not(probes: Marks) -> None:
    probes.take(with_ecn(p.ipv4(PLAIN, options=b"\x01" * 12), CE))
    probes.take(with_ecn(p.ipv4(PLAIN, fragment=5), CE))
    probes.take(with_ecn(p.ipv4(p.udp(b"short")), CE), verdict=DROPPED)
    probes.take(with_ecn(p.ipv4(PLAIN, source="10.9.0.77"), CE))
    probes.take(with_ecn(p.ipv6(PLAIN, source="fd00:9::77"), CE))
    assert probes.marks() == {p.mapped("10.9.0.1"): (3, 3)}
    assert probes.counted() == {"malformed": 1}


def test_counts_are_whole_machine_words(probes: Marks) -> None:
    probes.repeat(IN, with_ecn(p.ipv4(PLAIN), CE), 70_000, segments=65_535)
    assert probes.marks() == {p.mapped("10.9.0.1"): (70_000 * 65_535, 70_000 * 65_535)}


def test_marks_without_room_are_counted_as_such(probes: Marks) -> None:
    for number in range(probes.ecn.max_entries):
        key = np.zeros((), probes.ecn.key)
        key["ifindex"] = 1_000_000 + number
        probes.ecn.update(key, np.zeros((), probes.ecn.value))
    probes.take(with_ecn(p.ipv4(b"x" * 60, protocol=p.TCP), CE), segments=10)
    assert p.mapped("10.9.0.1") not in probes.marks()
    assert probes.counted() == {"ecn_full": 10}
