"""What replies say of the requests that came in by other interfaces, on packets made by hand."""

from __future__ import annotations

import itertools
import socket
import struct
from collections.abc import Iterator

import packets as p
import pytest
import support
from probe_kit import DROPPED, IN, MARK_REPLY, OUT, REDIRECTED, SENDER_PORT, UNSPEC, TestRun, probes

from pytools.kernel import netns

__all__ = ["probes"]  # fixtures

pytestmark = pytest.mark.guest

INTERFACES, MOST = 10, 8  # there are more than the program tells apart
S = 1_000_000_000
MAC = bytes([2, 0, 0, 0, 0, 7])
TLV = struct.pack("!BBH28x", 0x80, 253, 28)
numbers = itertools.count(1)


@pytest.fixture(scope="module")
def others(probes: TestRun) -> Iterator[list[int]]:
    """Interfaces by which requests come in."""
    pairs = [(f"way{number}", f"way{number + 1}") for number in range(0, INTERFACES, 2)]
    with netns.inside(probes.namespace):
        for one, other in pairs:
            end = ["address", MAC.hex(":")]
            support.run(["ip", "link", "add", one, *end, "type", "veth", "peer", "name", other, *end])
        yield [socket.if_nametoindex(name) for pair in pairs for name in pair]
        for one, _ in pairs:
            support.run(["ip", "link", "delete", one])


@pytest.fixture
def peer(probes: TestRun) -> Iterator[str]:
    """The address of a host that has sent nothing yet."""
    address = f"10.9.7.{next(numbers)}"
    probes.program.set_peers({address: 0xC001})
    yield address
    probes.program.set_peers({})


def arriving(payload: bytes, source: str, port: int = SENDER_PORT) -> bytes:
    return MAC + p.with_checksums(p.ipv4(p.udp(payload, port), source=source))[6:]


def told(probes: TestRun, peer: str, ifindex: int, seq: int, sent_ns: int) -> int:
    """The number of the other request that the reply to this one names."""
    base = struct.pack("!III", seq, *divmod(sent_ns, S)) + struct.pack("!HH", 0x4001, 9) + bytes(28)
    verdict, left = probes.run(IN, arriving(base + TLV, peer), ifindex=ifindex)
    assert verdict == REDIRECTED
    assert probes.run(OUT, left, mark=MARK_REPLY | 34)[0] == UNSPEC
    assert p.with_checksums(left) == left
    (other,) = struct.unpack_from("!I", left, 42 + 64)
    return int(other)


def test_a_reply_names_the_newest_request_by_another_interface(probes: TestRun, peer: str, others: list[int]) -> None:
    first, second = others[:2]
    assert told(probes, peer, first, 11, 5 * S) == 11, "there is no other"
    assert told(probes, peer, first, 12, 6 * S) == 12
    assert told(probes, peer, second, 0xFFFFFFFE, 6 * S) == 12
    assert told(probes, peer, first, 13, 7 * S) == 0xFFFFFFFE
    assert told(probes, peer, second, 21, 7 * S) == 13


def test_a_request_that_was_overtaken_by_its_own_interface_is_not_the_newest(
    probes: TestRun, peer: str, others: list[int]
) -> None:
    first, second = others[:2]
    told(probes, peer, first, 12, 6 * S)
    told(probes, peer, first, 11, 6 * S - 1)
    assert told(probes, peer, second, 21, 6 * S) == 12
    told(probes, peer, first, 30, 4 * S)
    assert told(probes, peer, second, 22, 7 * S) == 30, "the peer's clock has gone back"


def test_all_other_interfaces_are_named_in_turn(probes: TestRun, peer: str, others: list[int]) -> None:
    for number, ifindex in enumerate(others[:MOST]):
        told(probes, peer, ifindex, 100 + number, S + number)
    named = [told(probes, peer, others[3], 200 + turn, 2 * S + turn) for turn in range(2 * (MOST - 1))]
    expected = {100 + number for number in range(MOST) if number != 3}
    assert set(named[: MOST - 1]) == set(named[MOST - 1 :]) == expected


def test_of_too_many_interfaces_the_ones_longest_without_a_request_are_forgotten(
    probes: TestRun, peer: str, others: list[int]
) -> None:
    for number, ifindex in enumerate(others):
        told(probes, peer, ifindex, 100 + number, S + number)
    named = {told(probes, peer, others[-1], 200 + turn, 2 * S + turn) for turn in range(MOST - 1)}
    assert named == {100 + number for number in range(INTERFACES - MOST, INTERFACES - 1)}


def test_requests_that_are_refused_are_not_named(probes: TestRun, peer: str, others: list[int]) -> None:
    first, second = others[:2]
    told(probes, peer, first, 11, S)
    base = struct.pack("!III", 12, 2, 0) + struct.pack("!HH", 0x4001, 9) + bytes(28)
    assert probes.run(IN, arriving(base + TLV, peer, port=80), ifindex=first)[0] == DROPPED
    assert probes.run(IN, arriving(base, peer), ifindex=first)[0] == REDIRECTED, "of another sender than swerve"
    assert told(probes, peer, second, 21, S) == 11
