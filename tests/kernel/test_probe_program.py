"""probe.c on real traffic between two namespaces: pinned, stamped, reflected and matched in the kernel, exactly."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from typing import Any

import numpy as np
import packets as p
import pytest
import support
from probe_kit import (
    ADDRESSES,
    ESTIMATE,
    PORT,
    Host,
    Hosts,
    Replies,
    ask,
    hosts,
    one_sided,
    request,
    session,
    two,
    udp_socket,
)

from pytools.kernel import netns
from pytools.sources.probing import frames, program
from pytools.sources.probing.frames import Frames
from pytools.sources.probing.program import DUPLICATE, OURS
from pytools.sources.probing.schedule import Schedule

__all__ = ["hosts", "one_sided"]  # fixtures

pytestmark = pytest.mark.guest(every=2)

SWERVE_TLV, SIZE_TLV, PADDING = 253, 252, 1
PROBES = 23
MS = 1_000_000


def assert_nothing_reached(host: Host) -> None:
    for sock in (*host.reflector.values(), *host.held.values()):
        with pytest.raises(BlockingIOError):
            sock.recv(2048)


@pytest.mark.guest(every=6)
@pytest.mark.parametrize("how", ["plain", "offloads off", "clsact"])
@pytest.mark.parametrize("family", [4, 6])
def test_23_probes_are_23_records_with_four_stamps_in_order(
    hosts: Hosts, veth_pair: tuple[str, str], family: int, how: str
) -> None:
    if how == "offloads off":
        support.without_offloads(*veth_pair)
    first, second = two(hosts, veth_pair, family, force_clsact=how == "clsact")
    first.send(family, PROBES)
    records = first.records(PROBES)
    assert records["number"].tolist() == list(range(PROBES))
    assert set(records["session"]) == {0}
    stamps = np.stack([records[name] for name in ("t1_ns", "t2_ns", "t3_ns", "t4_ns")]).astype(np.int64)
    assert (np.diff(stamps, axis=0) > 0).all(), "left, came in, left, came back"
    assert (records["seen_ns"] == records["t4_ns"]).all()
    assert set(records["flags"]) == {OURS}
    assert set(records["ttl"]) == set(records["sender_ttl"]) == {255}
    assert first.counted() == {"recorded": PROBES}
    assert second.counted() == {"reflected": PROBES}
    assert_nothing_reached(first)
    assert_nothing_reached(second)
    path = first.program.paths[0]
    assert (path["unanswered"], path["silent_at_ns"]) == (0, 0)
    assert path["answered_ns"] == records["seen_ns"][-1]
    ((remote, _), requests), *others = second.program.requests().items()
    assert (remote, requests.requests, others) == (p.mapped(ADDRESSES[family][0]), PROBES, [])


@pytest.mark.parametrize("family", [4, 6])
def test_a_probe_goes_by_its_paths_gateway_without_any_route(
    hosts: Hosts, veth_pair: tuple[str, str], family: int
) -> None:
    """No route leads to the peer: what decides is the path alone."""
    service, width = ("10.99.0.2", 32) if family == 4 else ("fd99::2", 128)
    support.run(["ip", "-n", veth_pair[1], "address", "add", f"{service}/{width}", "dev", "lo"])
    ours, gateway = ADDRESSES[family]
    first, second = (hosts(end) for end in veth_pair)
    first.probe(family, ours, service, gateway)
    second.program.set_peers({ours: ESTIMATE})
    first.send(family, PROBES)
    first.records(PROBES)
    assert first.counted() == {"recorded": PROBES}
    assert second.counted() == {"reflected": PROBES}


def test_what_waits_for_a_dead_gateway_counts_as_unanswered(hosts: Hosts, veth_pair: tuple[str, str]) -> None:
    first = hosts(veth_pair[0])
    first.probe(4, "10.77.0.1", "10.77.0.2", gateway="10.77.0.99")
    path = first.program.paths[0:1]
    path["grace_ns"], path["limit"] = 5_000_000, 3
    first.send(4, 2)
    assert (path["unanswered"][0], path["silent_at_ns"][0]) == (2, 0)
    first.send(4, 2)
    assert path["unanswered"][0] == 4
    assert path["silent_at_ns"][0] >= path["first_ns"][0] + 5_000_000 > 5_000_000
    assert first.counted() == {}
    first.program.forget_path(0)
    assert first.try_to_send(4) == 1, "the sender learns of it at once"
    assert first.counted() == {"unpinned": 1}


def test_the_agent_is_woken_by_what_is_news_and_by_nothing_else(hosts: Hosts, veth_pair: tuple[str, str]) -> None:
    first, _ = two(hosts, veth_pair, 4)
    program, never = first.program, 10**18
    with select.epoll() as poll:
        poll.register(program.fileno(), select.EPOLLIN)

        def wakes() -> bool:
            """Whether the answer to one more probe does."""
            recorded = program.counters()["recorded"]
            first.send(4)
            support.wait_until(lambda: program.counters()["recorded"] > recorded, 10, "the answer", every_s=0.001)
            woken = bool(poll.poll(0))
            assert len(program.read()) == 1, "there it is, woken or not"
            assert not poll.poll(0)
            return woken

        def limits(slow_ns: int, grace_ns: int) -> None:
            program.set_limits(np.array([5]), np.array([grace_ns]))
            program.set_slow(np.array([slow_ns]), np.array([3]))

        assert wakes(), "the first answer of a path"
        limits(slow_ns=-never, grace_ns=never)
        assert [wakes() for _ in range(5)] == [False, False, True, False, False], "the third slow sample in a row"
        assert program.slow[0] == 5
        limits(slow_ns=never, grace_ns=never)
        assert [wakes() for _ in range(3)] == [True, False, False], "the first that is not slow any more"
        limits(slow_ns=-never, grace_ns=never)
        assert not wakes()
        limits(slow_ns=never, grace_ns=never)
        assert not wakes(), "one was not a run"
        limits(slow_ns=never, grace_ns=0)
        assert wakes(), "an answer that was overdue"
        program.set_slow(np.array([-never]), np.array([0]))
        program.set_limits(np.array([5]), np.array([never]))
        assert not any([wakes() for _ in range(4)]), "without a limit nothing is slow"


@pytest.mark.guest(thorough=True)
def test_the_agent_is_woken_once_when_the_first_unanswered_probe_is_overdue(
    hosts: Hosts, veth_pair: tuple[str, str]
) -> None:
    first, second = two(hosts, veth_pair, 4)
    program, never = first.program, 10**18
    first.send(4)
    assert len(first.records(1)) == 1
    second.program.set_peers({})  # nobody answers any more
    with select.epoll() as poll:
        poll.register(program.fileno(), select.EPOLLIN)

        def wakes(grace_ns: int, limit: int = 3) -> bool:
            """Whether sending one more probe does."""
            program.set_limits(np.array([limit]), np.array([grace_ns]))
            first.send(4)
            woken = bool(poll.poll(0))
            assert len(program.read()) == 0, "there is nothing to read"
            return woken

        assert not wakes(0), "the first unanswered one has only just left"
        assert not wakes(never)
        assert not wakes(0, limit=0), "of a path that is not judged"
        assert [wakes(0) for _ in range(3)] == [True, False, False]
        second.program.set_peers({ADDRESSES[4][0]: ESTIMATE})
        first.send(4)
        assert len(first.records(1)) == 1
        second.program.set_peers({})
        assert [wakes(0) for _ in range(3)] == [False, True, False], "after an answer anew"


@pytest.mark.guest(thorough=True)
def test_between_two_probes_of_a_path_the_pacer_says_that_the_first_is_overdue(
    hosts: Hosts, veth_pair: tuple[str, str]
) -> None:
    """probe.c itself sees it only when the next one leaves."""
    first, second = two(hosts, veth_pair, 4)
    program, ticks = first.program, 8
    first.send(4)
    assert len(first.records(1)) == 1
    second.program.set_peers({})  # nobody answers any more
    program.set_limits(np.array([3]), np.array([2 * MS]))
    probed = session(ADDRESSES[4][1], first.ports[4], True, ADDRESSES[4][0], ifindex=first.ifindex)
    with contextlib.ExitStack() as keep:
        with netns.inside(veth_pair[0]):
            packets = keep.enter_context(frames.open_socket())
        schedule = keep.enter_context(contextlib.closing(Schedule(packets, program.paths_fd)))
        schedule.watch(1)
        with schedule.held():
            schedule.set_ticks(ticks)
            made = Frames(4, [probed], PORT, 0, ticks, schedule)
        made.fill(np.arange(ticks), program.seq(np.zeros((ticks, 1), np.int64), 1 + np.arange(ticks)[:, None]))
        due_ns = time.monotonic_ns() + 20 * MS * np.arange(ticks)
        schedule.plan(due_ns, due_ns + 10**10, [[schedule.group(each)] for each in made.headers])

        def said() -> bool:
            program.paths["overdue"][0] = 0  # as if probe.c had seen none: a look that is late is left out
            return bool(select.select([schedule], [], [], 0)[0])

        support.wait_until(said, 10, "the pacer says so", every_s=0.001)
        assert schedule.hear()


# ---- the reflector, asked by others ----


@pytest.mark.guest(thorough=True)
@pytest.mark.parametrize("offloads", ["on", "off"])
@pytest.mark.parametrize("family", [4, 6])
def test_a_foreign_sender_gets_a_reply_as_rfc_8762_has_it(
    hosts: Hosts, veth_pair: tuple[str, str], family: int, offloads: str
) -> None:
    """That a socket takes the reply shows its checksum."""
    support.require("ethtool")
    for namespace in veth_pair:
        support.run(["ip", "netns", "exec", namespace, "ethtool", "-K", "v0", "tx", offloads, "rx", offloads])
    first, second = two(hosts, veth_pair, family)
    unknown, odd = (99, b"abcd"), (98, b"abc")
    asked = request(odd, unknown, (PADDING, bytes(5)), unknown)
    reply = ask(first, ADDRESSES[family], family, asked)
    assert len(reply) == len(asked)
    seq, seconds, fraction, error, ssid = struct.unpack_from("!IIIHH", reply)
    assert (seq, error, ssid) == (7, ESTIMATE, 9), "a stateless reflector repeats the sender's number"
    came = struct.unpack_from("!II", reply, 16)
    assert (seconds, fraction) >= came > (0, 0)
    assert reply[24:38] == asked[:14], "what the sender wrote"
    assert reply[38:40] == bytes(2)
    assert reply[40] == 64, "the sender's TTL on arrival"
    tlvs = reply[44:]
    assert [tlvs[0], tlvs[7], tlvs[15], tlvs[24]] == [0x80, 0x80, 0, 0x80]
    assert tlvs[4:7] == b"abc"
    assert second.counted() == {"reflected": 1}


@pytest.mark.guest(thorough=True)
def test_tlvs_that_do_not_fit_come_back_malformed(hosts: Hosts, veth_pair: tuple[str, str]) -> None:
    first, _ = two(hosts, veth_pair, 4)
    reply = ask(first, ADDRESSES[4], 4, request() + struct.pack("!BBH", 0x80, PADDING, 1000) + bytes(8))
    assert reply[44] == 0x40
    reply = ask(first, ADDRESSES[4], 4, request((SWERVE_TLV, bytes(8))))
    assert reply[44] == 0x40


@pytest.mark.guest(every=12)
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("family", [4, 6])
@pytest.mark.parametrize("size", [56, 400, 1400])
def test_a_size_probe_is_answered_whole_or_short(
    hosts: Hosts, veth_pair: tuple[str, str], family: int, size: int, short: bool
) -> None:
    first, _ = two(hosts, veth_pair, family)
    tlv = (SIZE_TLV, struct.pack("!HH", short, 0))
    asked = request(tlv, (PADDING, bytes(size - 56)))
    assert len(asked) == size
    reply = ask(first, ADDRESSES[family], family, asked)
    assert len(reply) == (52 if short else size)
    assert reply[44] == 0
    assert struct.unpack_from("!H", reply, 50)[0] == 9188


@pytest.mark.guest(thorough=True)
@pytest.mark.parametrize("family", [4, 6])
def test_junk_on_the_probe_port_reaches_no_socket(hosts: Hosts, veth_pair: tuple[str, str], family: int) -> None:
    _, second = two(hosts, veth_pair, family)
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    address = "10.77.0.55/24" if family == 4 else "fd77::55/64"
    support.run(["ip", "-n", veth_pair[0], "address", "add", address, "dev", "v0", "nodad"])
    destination = (ADDRESSES[family][1], PORT)
    with netns.inside(veth_pair[0]):
        peer, low_port = udp_socket(kind, 0, ADDRESSES[family][0]), udp_socket(kind, 962, ADDRESSES[family][0])
        stranger = udp_socket(kind, 0, address.split("/", maxsplit=1)[0])
    with peer, low_port, stranger:
        for _ in range(5):
            stranger.sendto(request(), destination)
        for _ in range(4):
            low_port.sendto(request(), destination)
        for _ in range(3):
            peer.sendto(request()[:43], destination)
        peer.sendto(request(), destination)
        support.wait_until(lambda: second.counted().get("reflected") == 1, 10, "the request itself is answered")
    assert second.counted() == {"no_peer": 5, "refused_port": 4, "malformed": 3, "reflected": 1}
    assert_nothing_reached(second)


@pytest.mark.guest(thorough=True)
def test_one_peer_gets_no_more_replies_than_its_share(hosts: Hosts, veth_pair: tuple[str, str]) -> None:
    """2,000 at once and 20,000 a second: of what comes faster, every request is answered or counted.

    A busy machine may not send so fast: so the peer's share is used up first, for longer than the test lasts.
    """
    _, second = two(hosts, veth_pair, 4)
    asked = 30_000
    with netns.inside(veth_pair[0]):
        sock = udp_socket(socket.AF_INET)
    began = time.monotonic()
    with sock:
        for _ in range(asked):
            with contextlib.suppress(BlockingIOError):
                sock.sendto(request(), (ADDRESSES[4][1], PORT))
        took_s = time.monotonic() - began
        counted = second.counted()
        assert counted["reflected"] <= 2002 + 20_000 * took_s
        assert counted.keys() <= {"reflected", "over_rate"}
        assert sum(counted.values()) <= asked
        used_up = np.zeros((), second.peers.value)
        used_up["due_ns"] = time.monotonic_ns() + 3600 * 10**9
        address = np.frombuffer(p.mapped(ADDRESSES[4][0]), second.peers.key)[0]
        second.peers.update(address, used_up)
        for _ in range(7):
            sock.sendto(request(), (ADDRESSES[4][1], PORT))
        wanted = counted.get("over_rate", 0) + 7
        support.wait_until(lambda: second.counted().get("over_rate") == wanted, 10, "they are counted")
        assert second.counted()["reflected"] == counted["reflected"]


# ---- replies ----


def reply_to(asked: bytes, ours: bool = False, ssid: bool = True) -> bytes:
    """What a reflector sends that got this request."""
    sent = struct.unpack_from("!II", asked, 4)
    stamp = struct.pack("!II", *sent)
    head = asked[:4] + stamp + struct.pack("!H", 0x4001) + (asked[14:16] if ssid else bytes(2)) + stamp
    base = (head + asked[:14]).ljust(40, b"\0") + b"\xff" + bytes(3)
    tlv = bytes([0 if ours else 0x80]) + asked[45:]
    return base + tlv


def asked_once(one_sided: tuple[Host, Replies]) -> tuple[Host, Replies, bytes, Any]:
    """Both ends, the sender's first request, and where a reply goes."""
    first, reflector = one_sided
    first.send(4)
    return first, reflector, *reflector.take()


@pytest.mark.guest(thorough=True)
@pytest.mark.parametrize("how", ["STAMP", "TWAMP Light"])
def test_a_foreign_reflector_gives_records_that_say_so(one_sided: tuple[Host, Replies], how: str) -> None:
    first, reflector = one_sided
    for _ in range(5):
        first.send(4)
        asked, back = reflector.take()
        reply = reply_to(asked, ssid=how == "STAMP")
        reflector.socket.sendto(reply if how == "STAMP" else reply[:44], back)
    records = first.records(5)
    assert records["number"].tolist() == list(range(5))
    assert set(records["flags"]) == {0}
    assert set(records["agent_age_ms"]) == {0xFFFFFFFF}
    assert (records["t1_ns"] == records["t2_ns"]).all(), "the test's reflector repeats the sender's time"
    assert first.counted() == {"recorded": 5}


@pytest.mark.guest(thorough=True)
def test_a_second_reply_is_a_duplicate_and_a_strangers_is_none(one_sided: tuple[Host, Replies]) -> None:
    first, reflector, asked, back = asked_once(one_sided)
    for _ in range(3):
        reflector.socket.sendto(reply_to(asked), back)
    assert first.records(3)["flags"].tolist() == [0, DUPLICATE, DUPLICATE]
    assert first.counted() == {"recorded": 3}


@pytest.mark.parametrize("answered", [0, 3])
def test_how_long_a_silence_lasted_and_how_long_the_answer_took_that_ended_it(
    one_sided: tuple[Host, Replies], answered: int
) -> None:
    """The answer to the first probe is late, as after a queue; where those before were lost, it is the last one's."""
    first, reflector = one_sided
    path = first.program.paths[0:1]
    first.program.set_limits(np.array([3]), np.array([0]))
    asked = []
    for _ in range(4):
        first.send(4)
        asked.append(reflector.take())
    assert path["silent_at_ns"][0] > 0
    assert (path["lasted_ns"][0], path["waited_ns"][0]) == (0, 0)
    began_ns = int(path["first_ns"][0])
    reply, back = asked[answered]
    reflector.socket.sendto(reply_to(reply), back)
    (record,) = first.records(1)
    seen_ns = int(record["seen_ns"])
    assert (path["silent_at_ns"][0], path["back_ns"][0]) == (0, seen_ns)
    assert path["lasted_ns"][0] == seen_ns - began_ns
    assert path["waited_ns"][0] == seen_ns - int(record["t1_ns"])
    first.send(4)
    reflector.socket.sendto(reply_to(reflector.take()[0]), back)
    first.records(1)
    assert path["lasted_ns"][0] == seen_ns - began_ns, "no silence since"


@pytest.mark.guest(thorough=True)
def test_each_kind_of_forged_reply_is_refused_and_counted(one_sided: tuple[Host, Replies]) -> None:
    """Each differs from the true reply in one thing; the true one is accepted afterwards all the same."""
    first, reflector, asked, back = asked_once(one_sided)
    true = reply_to(asked, ours=True)

    def changed(at: int, data: bytes) -> bytes:
        return true[:at] + data + true[at + len(data) :]

    later = struct.pack("!I", struct.unpack_from("!I", true, 24)[0] + 1)
    minute = struct.pack("!I", struct.unpack_from("!I", true, 4)[0] + 60)
    lies = {
        "sequence number": (changed(24, later), "stray"),
        "session": (changed(14, b"\x00\x09"), "stray"),
        "timestamp": (changed(32, bytes([true[32] ^ 1])), "forged"),
        "nonce": (changed(48, bytes([true[48] ^ 1])), "forged"),
        "kept longer than it was away": (changed(4, minute), "impossible"),
        "came before it left": (changed(16, struct.pack("!I", 0)), "impossible"),
        "corrupt": (changed(12, b"\x40\x00"), "malformed"),
        "too short": (true[:43], "malformed"),
    }
    expected: dict[str, int] = {}
    for lie, counter in lies.values():
        reflector.socket.sendto(lie, back)
        expected[counter] = expected.get(counter, 0) + 1
    support.wait_until(lambda: first.counted() == expected, 10, f"all are counted: {first.counted()}")
    assert first.program.paths[0]["answered_ns"] == 0, "none of them is an answer"
    reflector.socket.sendto(true, back)
    (record,) = first.records(1)
    assert record["flags"] == OURS
    # From now on the peer is known to run swerve: a reply without its TLV can only be made up.
    first.send(4)
    asked, back = reflector.take()
    reflector.socket.sendto(reply_to(asked), back)
    reflector.socket.sendto(reply_to(asked)[:44], back)
    expected |= {"forged": expected["forged"] + 2, "recorded": 1}
    support.wait_until(lambda: first.counted() == expected, 10, "both are refused")
    assert_nothing_reached(first)


@pytest.mark.guest(thorough=True)
def test_a_reply_by_another_interface_is_not_the_paths(
    hosts: Hosts, veth_pair: tuple[str, str], one_sided: tuple[Host, Replies]
) -> None:
    first, reflector, asked, back = asked_once(one_sided)
    first.program.paths[0:1]["ifindex"] = first.ifindex + 1000
    reflector.socket.sendto(reply_to(asked), back)
    support.wait_until(lambda: first.counted() == {"other_path": 1}, 10, "it is refused")


@pytest.mark.guest(thorough=True)  # what is in a packet, no kernel decides
def test_the_agents_heartbeat_travels_in_replies(hosts: Hosts, veth_pair: tuple[str, str]) -> None:
    first, second = two(hosts, veth_pair, 4)
    first.send(4)
    (record,) = first.records(1)
    assert record["agent_age_ms"] == 0xFFFFFFFF, "no agent has shown that it works"
    second.program.beat(int(record["seen_ns"]) - 5_000_000_000)
    first.send(4)
    (record,) = first.records(1)
    assert 5_000 <= record["agent_age_ms"] < 65_000


@pytest.mark.guest(thorough=True)
@pytest.mark.parametrize("number", [program.NUMBERS - 2, 63])
def test_numbers_begin_again_without_a_gap(hosts: Hosts, veth_pair: tuple[str, str], number: int) -> None:
    first, _ = two(hosts, veth_pair, 4)
    first.sent = number
    first.send(4, 4)
    assert first.records(4)["number"].tolist() == [(number + each) % program.NUMBERS for each in range(4)]


@pytest.mark.guest(thorough=True)
def test_random_mutations_of_a_reply_are_never_believed(one_sided: tuple[Host, Replies]) -> None:
    """Seeded: whatever bits of what names the probe are flipped, no record comes of it."""
    first, reflector = one_sided
    random = np.random.default_rng(862)
    first.send(4)
    asked, back = reflector.take()
    true = np.frombuffer(reply_to(asked, ours=True), np.uint8)
    naming = [*range(24, 36), *range(48, 56)]  # sequence number, timestamp, nonce
    tries = 3000
    for turn in range(tries):
        lie = true.copy()
        for at in random.choice(naming, random.integers(1, 4), replace=False):
            lie[at] ^= random.integers(1, 256)
        reflector.socket.sendto(lie.tobytes(), back)
        if turn % 100 == 99:  # the receiver's queue is finite
            support.wait_until(lambda done=turn + 1: sum(first.counted().values()) == done, 10, "all are counted")
    assert first.counted().keys() <= {"stray", "forged"}
    assert len(first.program.read()) == 0
    assert_nothing_reached(first)
