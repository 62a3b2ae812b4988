"""A peer says which of its interfaces has lost the carrier: the path that leads there is silent, if it is believed."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import packets as p
import pytest
from probe_kit import (
    DROPPED,
    IN,
    LOOPBACK,
    MARK_REPLY,
    OUT,
    PEERS,
    REDIRECTED,
    SENDER_PORT,
    UNSPEC,
    TestRun,
    probes,
    request,
)
from probe_tags import KEY, OTHER_KEY, TAG_AT, framed, reply_tag, signed_request

__all__ = ["probes"]  # fixture

pytestmark = pytest.mark.guest

SWERVE, LIMIT, GRACE_NS = 253, 3, 10**9
NEAR, FAR, UNKNOWN = 5, 65_535, 77  # interfaces of the peer


@pytest.fixture(params=[False, True], ids=["without a key", "with a key"])
def run(request: pytest.FixtureRequest, probes: TestRun) -> Iterator[TestRun]:
    """Path 0 leads to the interface NEAR of a peer, path 1 to FAR; session 0 is now of path 1."""
    probes.program.set_key(KEY if request.param else b"")
    probes.program.forget_session(0)
    probes.peers.update(np.frombuffer(p.mapped(PEERS[0]), probes.peers.key)[0], np.zeros((), probes.peers.value))
    for path, interface in enumerate((NEAR, FAR)):
        probes.program.forget_path(path)
        reply(probes, request.param, path, 10 + path, interface)
        probes.program.paths["limit"][path], probes.program.paths["grace_ns"][path] = LIMIT, GRACE_NS
    probes.program.read()
    probes.counted()
    yield probes
    probes.program.set_key(b"")
    probes.program.set_lost_interface(0)
    for path in range(2):
        probes.program.forget_path(path)
    probes.program.forget_session(0)


def reply(run: TestRun, keyed: bool, path: int, number: int, interface: int, lost: int = 0, nonce: int = 0) -> None:
    """Have the reply to one more probe of a path come in."""
    base = run.remember_probe(number=number)
    run.program.set_path(path, LOOPBACK, PEERS[0], PEERS[0])
    run.program.set_session(0, path, PEERS[0], SENDER_PORT, shared=False)
    said = base + struct.pack("!BBHQIHH8x", 0, SWERVE, 24, nonce, 7, interface, lost)
    if keyed:
        said = said[:TAG_AT] + reply_tag(said, PEERS[0], PEERS[1])
    assert run.run(IN, p.ipv4(p.udp(said, p.PORT, SENDER_PORT)))[0] == DROPPED


def silent(run: TestRun) -> list[bool]:
    """Of both paths."""
    return [bool(each["silent_at_ns"]) for each in run.program.paths[:2]]


def announcement(lost: int, key: bytes, sent_s: int = 11) -> bytes:
    """A peer's probe that names an interface."""
    payload = request((SWERVE, bytes(range(100, 108)) + struct.pack("!IHH8x", 0, 0, lost)))
    payload = payload[:4] + struct.pack("!I", sent_s) + payload[8:]
    return framed(4, signed_request(4, key, payload) if key else payload)


def keyed(run: TestRun) -> bool:
    return bool(run.program._settings["keyed"][0])


def test_each_path_knows_the_peers_interface_that_it_leads_to(run: TestRun) -> None:
    assert run.program.paths["peer_interface"][:2].tolist() == [NEAR, FAR]
    assert silent(run) == [False, False]


def test_a_reply_by_another_path_silences_the_path_to_the_lost_interface(run: TestRun) -> None:
    reply(run, keyed(run), 1, 20, FAR, UNKNOWN)
    assert silent(run) == [False, False]
    reply(run, keyed(run), 1, 21, FAR, NEAR)
    assert silent(run) == [True, False]
    path: Any = run.program.paths[0]
    assert path["unanswered"] == LIMIT
    assert path["first_ns"] == path["answered_ns"] - GRACE_NS
    assert run.program._settings["silence_ns"][0] == path["silent_at_ns"]
    assert run.counted() == {"recorded": 2, "lost_carriers": 1}
    reply(run, keyed(run), 1, 22, FAR, NEAR)
    assert "lost_carriers" not in run.counted(), "it is silent already"


def test_an_answer_ends_it_and_the_path_that_answers_is_not_silenced_by_its_own_reply(run: TestRun) -> None:
    reply(run, keyed(run), 1, 20, FAR, NEAR)
    reply(run, keyed(run), 0, 21, NEAR, NEAR)
    assert silent(run) == [False, False]
    assert run.program.paths["unanswered"][0] == 0


def test_a_reply_to_another_probe_silences_nothing(run: TestRun) -> None:
    reply(run, keyed(run), 1, 20, FAR, NEAR, nonce=1)
    assert silent(run) == [False, False]
    assert run.counted() == {"forged": 1}


def test_a_path_that_has_no_limit_is_not_silenced(run: TestRun) -> None:
    """It never answered."""
    run.program.paths["limit"][0] = 0
    reply(run, keyed(run), 1, 20, FAR, NEAR)
    assert silent(run) == [False, False]


def test_a_peers_probe_is_believed_only_with_its_tag(run: TestRun) -> None:
    assert run.run(IN, announcement(NEAR, b""))[0] == (DROPPED if keyed(run) else REDIRECTED)
    assert run.run(IN, announcement(NEAR, OTHER_KEY))[0] == (DROPPED if keyed(run) else REDIRECTED)
    assert silent(run) == [False, False], "anybody can have sent these"
    verdict, _ = run.run(IN, announcement(NEAR, KEY))
    assert verdict == REDIRECTED
    assert silent(run) == [keyed(run), False]


def test_a_recorded_probe_of_a_peer_says_nothing_again(run: TestRun) -> None:
    silent_after: list[bool] = []
    for sent_s in (20, 20, 19, 21):
        assert run.run(IN, announcement(NEAR, KEY, sent_s))[0] == REDIRECTED
        silent_after.append(silent(run)[0])
        reply(run, keyed(run), 0, 30 + len(silent_after), NEAR)
    assert silent_after == [keyed(run), False, False, keyed(run)]


def test_a_peers_probe_says_nothing_of_another_peer(run: TestRun) -> None:
    run.program.paths["remote"]["bytes"][0] = np.frombuffer(p.mapped(PEERS[1]), np.uint8)
    run.run(IN, announcement(NEAR, KEY))
    reply(run, keyed(run), 1, 20, FAR, NEAR)
    assert silent(run) == [False, False]


def test_replies_and_signed_probes_name_our_own_lost_interface(run: TestRun) -> None:
    run.program.set_lost_interface(0x1_0007)
    asked = signed_request(4) if keyed(run) else request((SWERVE, bytes(24)))
    verdict, turned = run.run(IN, framed(4, asked))
    assert verdict == REDIRECTED
    assert struct.unpack_from("!HH", turned, 42 + 60) == (LOOPBACK, 7), "the low bits of the index"
    verdict, left = run.run(OUT, turned, mark=MARK_REPLY | 34)
    assert verdict == UNSPEC
    assert p.with_checksums(left) == left
