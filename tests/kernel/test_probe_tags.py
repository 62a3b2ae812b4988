"""With a cluster key, through the real program: probes and replies carry tags, and what carries none ends here."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import numpy as np
import packets as p
import pytest
import support
from probe_kit import (
    DROPPED,
    IN,
    MARK_REPLY,
    OUT,
    PEERS,
    REDIRECTED,
    SENDER_PORT,
    UNSPEC,
    Hosts,
    TestRun,
    hosts,
    probes,
    request,
    two,
)
from probe_tags import BUILD, ENDS, KEY, OTHER_KEY, SWERVE, TAG_AT, framed, reply_tag, signed_request
from siphash import siphash_2_4

from pytools.sources.probing.program import OURS

__all__ = ["hosts", "probes"]  # fixtures

pytestmark = pytest.mark.guest(thorough=True)  # a tag is the same number in every kernel

SIZE, PAYLOAD_AT = 252, {4: 42, 6: 62}


@pytest.fixture
def keyed(probes: TestRun) -> Iterator[TestRun]:
    probes.program.set_key(KEY)
    probes.program.read()
    probes.program.forget_session(0)
    probes.counted()
    yield probes
    probes.program.set_key(b"")


def test_the_tests_own_siphash_gives_the_vectors_of_its_authors() -> None:
    key = bytes(range(16))
    assert siphash_2_4(key, b"").hex() == "310e0edd47db6f72"
    assert siphash_2_4(key, bytes(range(8))).hex() == "6224939a79f5f593"
    assert siphash_2_4(key, bytes(range(15))).hex() == "e545be4961ca29a1"


@pytest.mark.guest
@pytest.mark.parametrize("family", [4, 6])
def test_a_signed_request_gets_a_signed_reply(keyed: TestRun, family: int) -> None:
    verdict, turned = keyed.run(IN, framed(family, signed_request(family)))
    assert verdict == REDIRECTED
    transport = PAYLOAD_AT[family] - 8
    assert turned[PAYLOAD_AT[family] :][TAG_AT : TAG_AT + 8] == bytes(8), "the request's tag does not go back"
    verdict, left = keyed.run(OUT, turned, mark=MARK_REPLY | transport)
    assert verdict == UNSPEC
    reply = left[PAYLOAD_AT[family] :]
    assert reply[TAG_AT : TAG_AT + 8] == reply_tag(reply, *reversed(ENDS[family]))
    assert reply[4:12] > reply[16:24] > bytes(8), "t3 is after t2"
    assert p.with_checksums(left) == left
    assert keyed.counted() == {"reflected": 1}


@pytest.mark.parametrize("family", [4, 6])
def test_requests_that_are_unsigned_or_forged_get_no_reply_and_cost_the_peer_nothing(
    keyed: TestRun, family: int
) -> None:
    true = signed_request(family)
    before = keyed.peers.read()[1].tobytes()
    assert keyed.run(IN, framed(family, true[:TAG_AT] + bytes(8) + true[TAG_AT + 8 :]))[0] == DROPPED
    assert keyed.counted() == {"unsigned_request": 1}
    lies = [signed_request(family, OTHER_KEY)]
    lies += [true[:at] + bytes([true[at] ^ 1]) + true[at + 1 :] for at in (*range(16), *range(48, 72))]
    for lie in lies:
        assert keyed.run(IN, framed(family, lie))[0] == DROPPED
    moved = p.with_checksums(BUILD[family](p.udp(true, SENDER_PORT + 1)))
    assert keyed.run(IN, moved)[0] == DROPPED, "from another port"
    away = p.with_checksums(BUILD[family](p.udp(true, SENDER_PORT), source=ENDS[family][1]))
    assert keyed.run(IN, away)[0] == DROPPED, "from another peer"
    assert keyed.counted() == {"forged_request": len(lies) + 2}
    assert keyed.peers.read()[1].tobytes() == before
    assert keyed.run(IN, framed(family, true))[0] == REDIRECTED


def test_foreign_senders_and_size_probes_have_a_share_of_their_own(keyed: TestRun) -> None:
    """Anybody can send them in a peer's name: so they cannot use up what its probes need."""
    peer = np.frombuffer(p.mapped(ENDS[4][0]), keyed.peers.key)[0]
    for payload in (request(), request((SIZE, bytes(4))), request((99, bytes(24)))):
        assert keyed.run(IN, framed(4, payload))[0] == REDIRECTED
    used_up = np.zeros((), keyed.peers.value)
    used_up["unsigned_due_ns"] = time.monotonic_ns() + 10**11
    keyed.peers.update(peer, used_up)
    assert keyed.run(IN, framed(4, request()))[0] == DROPPED
    assert keyed.run(IN, framed(4, signed_request(4)))[0] == REDIRECTED
    assert keyed.counted() == {"reflected": 4, "over_rate": 1}


def test_a_replayed_request_is_answered_again_to_its_sender_alone(keyed: TestRun) -> None:
    """The reflector keeps no state by which it could know: the reply goes to the peer, where it answers no probe."""
    frame = framed(4, signed_request(4))
    for _ in range(2):
        assert keyed.run(IN, frame)[0] == REDIRECTED
    assert keyed.counted() == {"reflected": 2}


@pytest.mark.guest
def test_a_reply_is_believed_only_with_its_tag(keyed: TestRun) -> None:
    base = keyed.remember_probe(PEERS[0])
    bare = base + struct.pack("!BBH8sI16x", 0, SWERVE, 28, bytes(8), 7)

    def arrives(payload: bytes) -> dict[str, int]:
        assert keyed.run(IN, p.ipv4(p.udp(payload, p.PORT, SENDER_PORT)))[0] == DROPPED
        return keyed.counted()

    signed = bare[:TAG_AT] + reply_tag(bare, *ENDS[4]) + bare[TAG_AT + 8 :]
    assert arrives(base) == {"unsigned_reply": 1}, "of a foreign reflector"
    assert arrives(bare) == {"unsigned_reply": 1}, "of a swerve without a key"
    assert arrives(bare[:44] + b"\x80" + bare[45:]) == {"unsigned_reply": 1}, "our own TLV come back as it was"
    assert arrives(bare[:TAG_AT] + reply_tag(bare, *ENDS[4], OTHER_KEY) + bare[TAG_AT + 8 :]) == {"forged": 1}
    for at in (0, 4, 12, 16, 36, 56, 60, 62, 64, 67, TAG_AT):  # what no other check looks at
        lie = signed[:at] + bytes([signed[at] ^ 1]) + signed[at + 1 :]
        assert arrives(lie).keys() <= {"forged", "malformed"}, f"byte {at}"
    echoed = signed_request(4)[TAG_AT : TAG_AT + 8]
    assert arrives(bare[:TAG_AT] + echoed + bare[TAG_AT + 8 :]) == {"forged": 1}, "a request's tag is none of a reply"
    assert len(keyed.program.read()) == 0
    assert arrives(signed) == {"recorded": 1}
    assert keyed.program.read()["flags"].tolist() == [OURS]
    assert arrives(signed) == {"recorded": 1}, "a replay is a duplicate, as any second reply"
    assert keyed.program.read()["flags"].tolist() == [OURS | 1]


def test_random_forgeries_of_a_signed_reply_are_never_believed(keyed: TestRun) -> None:
    base = keyed.remember_probe(PEERS[0])
    bare = base + struct.pack("!BBH8sI16x", 0, SWERVE, 28, bytes(8), 7)
    random = np.random.default_rng(253)
    for _ in range(3000):
        tag = random.bytes(8)
        keyed.run(IN, p.ipv4(p.udp(bare[:TAG_AT] + tag + bare[TAG_AT + 8 :], p.PORT, SENDER_PORT)))
    assert keyed.counted() == {"forged": 3000}
    assert len(keyed.program.read()) == 0


# ---- two hosts ----


@pytest.mark.guest(every=4)
@pytest.mark.parametrize("offloads", ["on", "off"])
@pytest.mark.parametrize("family", [4, 6])
def test_two_hosts_with_one_key_measure(hosts: Hosts, veth_pair: tuple[str, str], family: int, offloads: str) -> None:
    support.require("ethtool")
    for namespace in veth_pair:
        support.run(["ip", "netns", "exec", namespace, "ethtool", "-K", "v0", "tx", offloads, "rx", offloads])
    first, second = two(hosts, veth_pair, family)
    for each in (first, second):
        each.program.set_key(KEY)
    first.send(family, 5)
    assert set(first.records(5)["flags"]) == {OURS}
    assert (first.counted(), second.counted()) == ({"recorded": 5}, {"reflected": 5})


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        (b"", KEY, ({}, {"unsigned_request": 1})),
        (KEY, b"", ({"unsigned_reply": 1}, {"reflected": 1})),
        (KEY, OTHER_KEY, ({}, {"forged_request": 1})),
    ],
    ids=["only the peer has a key", "the peer has none", "different keys"],
)
def test_hosts_that_do_not_share_a_key_are_told_apart_by_what_is_counted(
    hosts: Hosts,
    veth_pair: tuple[str, str],
    ours: bytes,
    theirs: bytes,
    expected: tuple[dict[str, int], dict[str, int]],
) -> None:
    first, second = two(hosts, veth_pair, 4)
    first.program.set_key(ours)
    second.program.set_key(theirs)
    first.send(4)
    support.wait_until(lambda: (first.counted(), second.counted()) == expected, 10, "it is counted")
    assert len(first.program.read()) == 0
