"""Messages between hosts without a network: format, signatures, sessions and replays; key files; configuration."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import support
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from pytools.config import AgentConfig, Clocks, HostBus, Peer, Samples, checked
from pytools.errors import SwerveError, UsageError
from pytools.ipc import hosts
from pytools.ipc.sealed import (
    MAX_BYTES,
    MAX_PAYLOAD,
    Kind,
    Message,
    Received,
    Sealer,
    decode,
    derived,
    encode,
    is_signed,
)

KEY = b"k" * 32
SECOND = 10**9
NAMES = st.text(max_size=60)  # at most 240 bytes
MESSAGES = st.builds(
    Message,
    st.sampled_from(Kind),
    NAMES,
    NAMES,
    NAMES,
    st.binary(min_size=16, max_size=16),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=300),
)


class World:
    """Hosts that hand each other messages at once, and remember everything that was ever on its way."""

    def __init__(self, *names: str) -> None:
        self.names, self.now_ns = names, 100 * SECOND
        self.numbers = random.Random(7)
        self.hosts = {name: self._host(name) for name in names}
        self.tape: list[tuple[str, bytes]] = []  # (to, message)
        self.heard: list[tuple[str, Received]] = []  # (by, what)

    def _host(self, name: str) -> Sealer:
        return Sealer(name, [other for other in self.names if other != name], KEY, self.numbers.randbytes)

    def restart(self, name: str) -> None:
        self.hosts[name] = self._host(name)

    def deliver(self, to: str, message: bytes) -> None:
        """Hand a message over, and whatever comes of it."""
        under_way = deque([(to, message)])
        while under_way:
            to, message = under_way.popleft()
            self.tape.append((to, message))
            received, replies = self.hosts[to].open(message, self.now_ns)
            if received is not None:
                self.heard.append((to, received))
            under_way += replies

    def tick(self, seconds: float = 1.0) -> None:
        """Time passes; then everybody asks whom it has to ask."""
        self.now_ns += int(seconds * SECOND)
        for host in list(self.hosts.values()):
            for to, message in host.asks(self.now_ns):
                self.deliver(to, message)

    def send(self, sender: str, to: str, text: str) -> bytes:
        message = self.hosts[sender].seal("news", text.encode(), to)
        self.deliver(to, message)
        return message

    def texts(self, by: str) -> list[str]:
        return [received.payload.decode() for who, received in self.heard if who == by]

    def believes(self, host: str, peer: str) -> bool:
        return self.hosts[host].confirmed(peer, self.now_ns)


@pytest.fixture
def pair() -> World:
    world = World("a", "b")
    world.tick()
    assert world.believes("a", "b") and world.believes("b", "a")
    return world


def refused(sealer: Sealer) -> dict[str, int]:
    return {cause: count for cause, count in sealer.refused.items() if count}


@given(MESSAGES)
def test_what_is_encoded_is_decoded(message: Message) -> None:
    raw = encode(message, KEY)
    assert decode(raw) == message
    assert is_signed(raw, KEY) and not is_signed(raw, b"x" * 32)


@given(st.binary(max_size=400))
@example(b"")
@example(b"swv1" + bytes(100))
@example(b"swv1\0\xff\xff\xff" + bytes(60))
def test_no_bytes_make_the_receiver_fail(raw: bytes) -> None:
    decode(raw)
    sealer = Sealer("a", ["b"], KEY)
    assert sealer.open(raw, SECOND) == (None, [])
    assert sealer.refused.total() == 1


@given(MESSAGES, st.data())
def test_a_changed_bit_or_a_cut_is_seen(message: Message, data: st.DataObject) -> None:
    raw = bytearray(encode(message._replace(sender="b", to="a"), KEY))
    if data.draw(st.booleans(), "cut"):
        del raw[data.draw(st.integers(0, len(raw) - 1)) :]
    else:
        bit = data.draw(st.integers(0, len(raw) * 8 - 1))
        raw[bit // 8] ^= 1 << bit % 8
    sealer = Sealer("a", ["b"], KEY)
    assert sealer.open(bytes(raw), SECOND)[0] is None
    assert not set(refused(sealer)) - {"malformed", "foreign", "forged"}


def test_the_signature_is_hmac_sha256_of_all_before_it() -> None:
    message = Message(Kind.DATA, "h1", "h2", "clock", bytes(range(16)), 7, b"payload")
    raw = encode(message, KEY)
    assert raw[:-32].hex() == (
        "73777631" "00" "020205" "000102030405060708090a0b0c0d0e0f" "0000000000000007" "6831" "6832"
        + b"clock".hex()
        + b"payload".hex()
    )  # fmt: skip
    assert (
        raw[-32:].hex() == "d3757f0053c43ed2473220148f45bc2bce91013e7ac3ed29495b2e5eec88ee89"
    )  # openssl dgst -sha256 -mac HMAC


def test_nothing_is_believed_before_a_challenge_is_answered() -> None:
    world = World("a", "b")
    early = world.hosts["a"].seal("news", b"too early", "b")
    world.deliver("b", early)
    assert world.heard == [] and refused(world.hosts["b"])["unconfirmed"] == 1
    assert world.believes("b", "a"), "the unknown session was challenged at once"
    world.send("a", "b", "now")
    assert world.texts("b") == ["now"]
    world.deliver("b", early)
    assert world.texts("b") == ["now"] and refused(world.hosts["b"])["replayed"] == 1


def test_whoever_is_confirmed_is_believed_by_the_other_end(pair: World) -> None:
    for number in range(3):
        pair.send("a", "b", f"to b {number}")
        pair.send("b", "a", f"to a {number}")
    assert pair.texts("b") == ["to b 0", "to b 1", "to b 2"] and pair.texts("a") == ["to a 0", "to a 1", "to a 2"]
    for host in pair.hosts.values():
        assert refused(host) == {}


def test_gaps_are_counted(pair: World) -> None:
    for text in (b"one", b"two", b"three"):
        pair.hosts["a"].seal("news", text, "b")  # never arrives
    pair.send("a", "b", "four")
    assert refused(pair.hosts["b"]) == {"lost": 3}


def test_a_message_arrives_once(pair: World) -> None:
    message = pair.send("a", "b", "once")
    later = pair.send("a", "b", "later")
    for again in (message, later, message):
        pair.deliver("b", again)
    assert pair.texts("b") == ["once", "later"] and refused(pair.hosts["b"]) == {"replayed": 3}


def test_for_another_host_from_a_stranger_and_from_ourselves() -> None:
    world = World("a", "b", "c")
    world.tick()
    message = world.hosts["a"].seal("news", b"for c", "c")
    world.deliver("b", message)
    assert refused(world.hosts["b"]) == {"misdirected": 1}
    for sender in ("d", "b", ""):
        strange = Message(Kind.DATA, sender, "b", "news", bytes(16), 99, b"?")
        world.deliver("b", encode(strange, KEY))
    assert refused(world.hosts["b"]) == {"misdirected": 1, "foreign": 3}
    assert world.heard == []


def test_a_wrong_key_is_counted_as_forged(pair: World) -> None:
    pair.hosts["a"].key = b"x" * 32
    pair.send("a", "b", "believe me")
    assert pair.heard == [] and refused(pair.hosts["b"]) == {"forged": 1}


def test_too_large() -> None:
    sealer = Sealer("b", ["a"], KEY)
    assert sealer.open(bytes(MAX_BYTES + 1), SECOND) == (None, [])
    assert refused(sealer) == {"oversize": 1}


def test_a_receiver_that_forgot_everything_takes_no_recording(pair: World) -> None:
    old = pair.send("a", "b", "pay")
    pair.tick()
    pair.restart("b")
    pair.deliver("b", old)  # the same session of a's still runs, and b knows of no sequence number
    assert pair.texts("b") == ["pay"] and refused(pair.hosts["b"]) == {"unconfirmed": 1}
    assert pair.believes("b", "a")
    pair.deliver("b", old)
    assert pair.texts("b") == ["pay"]
    pair.tick()
    pair.send("a", "b", "new")
    assert pair.texts("b") == ["pay", "new"]


def test_a_sender_that_restarts_goes_on_and_its_old_session_is_dead(pair: World) -> None:
    before = [*pair.tape, ("b", pair.send("a", "b", "first life"))]
    pair.restart("a")
    pair.tick()
    pair.send("a", "b", "second life")
    for _, message in before:
        pair.deliver("b", message)
        pair.tick()
    pair.send("a", "b", "goes on")
    assert pair.texts("b") == ["first life", "second life", "goes on"]


def test_a_late_answer_proves_nothing() -> None:
    world = World("a", "b")
    ((_, challenge),) = world.hosts["b"].asks(world.now_ns)
    _, replies = world.hosts["a"].open(challenge, world.now_ns)
    answer = next(raw for _, raw in replies if raw[4] == Kind.ANSWER)
    world.now_ns += 6 * SECOND
    world.deliver("b", answer)
    assert not world.believes("b", "a") and refused(world.hosts["b"]) == {"replayed": 1}
    world.tick()
    assert world.believes("b", "a")


def test_challenges_are_few() -> None:
    world = World("a", "b")
    message = world.hosts["a"].seal("news", b"x", "b")
    asked = sum(len(world.hosts["b"].open(message, world.now_ns + turn * SECOND // 1000)[1]) for turn in range(1000))
    assert asked == 5  # every 200 ms
    ((_, challenge),) = world.hosts["b"].asks(world.now_ns + 10 * SECOND)
    asked_one = world.hosts["a"]
    replies = [asked_one.open(challenge, world.now_ns + turn * SECOND // 1000)[1] for turn in range(1000)]
    answers = [raw for each in replies for _, raw in each if raw[4] == Kind.ANSWER]
    assert len(answers) == 20  # every 50 ms


def test_a_silent_peer_is_asked_and_then_given_up(pair: World) -> None:
    sealer = pair.hosts["a"]
    assert not sealer.asks(pair.now_ns + 2 * SECOND)
    assert [name for name, _ in sealer.asks(pair.now_ns + 4 * SECOND)] == ["b"]
    assert sealer.confirmed("b", pair.now_ns + 9 * SECOND)
    assert not sealer.confirmed("b", pair.now_ns + 11 * SECOND)
    for _ in range(20):
        pair.tick()
    assert pair.believes("a", "b") and pair.believes("b", "a"), "asked now and then, they stay confirmed"


def test_replayed_challenges_cannot_mute_a_host_for_long(pair: World) -> None:
    strange = [message for to, message in pair.tape if to == "a" and message[4] == Kind.CHALLENGE]
    pair.restart("b")
    for host, to, message in [("b", *ask) for ask in pair.hosts["b"].asks(pair.now_ns)]:
        assert host != to
        pair.deliver(to, message)
        for old in strange:
            pair.deliver("a", old)
    pair.tick(3)
    assert pair.believes("a", "b") and pair.believes("b", "a")


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from("abc"), st.sampled_from("abc")),
        st.tuples(st.just("lose"), st.sampled_from("abc"), st.sampled_from("abc")),
        st.tuples(st.just("replay"), st.integers(0, 10_000), st.sampled_from("abc")),
        st.tuples(st.just("restart"), st.sampled_from("abc"), st.none()),
        st.tuples(st.just("wait"), st.sampled_from([0.1, 1, 3, 12]), st.none()),
    ),
    max_size=60,
)


@given(STEPS)
def test_whatever_an_eavesdropper_repeats_nothing_is_heard_twice_or_by_others(steps: list[tuple]) -> None:
    world = World("a", "b", "c")
    world.tick()
    number = 0
    for what, one, other in steps:
        match what:
            case "send" | "lose" if one != other:
                number += 1
                message = world.hosts[one].seal("news", f"{number} to {other}".encode(), other)
                if what == "send":
                    world.deliver(other, message)
                else:
                    world.tape.append((other, message))
            case "replay" if world.tape:
                world.deliver(other, world.tape[one % len(world.tape)][1])
            case "restart":
                world.restart(one)
            case "wait":
                world.tick(one)
    texts = [received.payload for _, received in world.heard]
    assert len(set(texts)) == len(texts)
    assert all(received.payload.decode().endswith(f"to {by}") for by, received in world.heard)
    for _ in range(4):
        world.tick()
    for one in "abc":
        for other in set("abc") - {one}:
            assert world.believes(one, other)
            world.send(one, other, f"{one} to {other}")
    assert len(world.heard) == len(texts) + 6, "in the end everybody hears everybody"


def test_one_key_for_each_purpose() -> None:
    assert len({derived(KEY, "messages"), derived(KEY, "connections"), KEY}) == 3


# ---- key files ----


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(0o600)
    path.write_bytes(KEY)
    return path


def test_a_good_key_file(key_file: Path) -> None:
    assert hosts.read_key(key_file) == KEY
    key_file.chmod(0o400)
    assert hosts.read_key(key_file) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_key_file_that_others_may_touch(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(SwerveError, match="chmod 600"):
        hosts.read_key(key_file)


def test_a_key_that_is_too_short(key_file: Path) -> None:
    key_file.write_bytes(b"k" * 31)
    with pytest.raises(UsageError, match="31 bytes, must be at least 32"):
        hosts.read_key(key_file)


def test_no_key_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file.*urandom"):
        hosts.read_key(tmp_path / "none")
    with pytest.raises(UsageError, match="a directory"):
        hosts.read_key(tmp_path)


def test_a_pipe_instead_of_a_key_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UsageError, match="not a file"):
        hosts.read_key(tmp_path / "pipe")


def test_a_key_of_another_user(key_file: Path) -> None:
    support.require("root")
    os.chown(key_file, 12345, 0)
    with pytest.raises(SwerveError, match="belongs to user 12345"):
        hosts.read_key(key_file)


# ---- the end itself, as far as it needs no peer ----


def test_local_addresses() -> None:
    assert hosts.local_addresses(["127.0.0.1", "::1", "127.0.0.9"]) <= {"127.0.0.1", "::1"}
    assert "127.0.0.1" in hosts.local_addresses(["127.0.0.9"])
    assert hosts.local_addresses([]) == frozenset()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


Open = Callable[..., hosts.HostBus]


@pytest.fixture
def lonely(key_file: Path, free_port: int):  # type: ignore[no-untyped-def]
    bus = hosts.HostBus("a", [Peer("b/*?", "127.0.0.2")], HostBus(port=free_port, key_file=str(key_file)))
    yield bus
    bus.close()


def test_an_end_without_peers_that_answer(lonely: hosts.HostBus) -> None:
    lonely.send("news", b"to all")
    lonely.send("news", b"to one", to="b/*?")
    lonely.send("news", bytes(MAX_PAYLOAD + 1))
    with pytest.raises(UsageError, match="'c' is not a peer of a"):
        lonely.send("news", b"", to="c")
    due = lonely.tick(SECOND)
    assert SECOND < due <= 2 * SECOND
    assert lonely.receive("news") == [] and lonely.confirmed() == []
    counted = {cause: count for cause, count in lonely.drops().items() if count}
    assert counted == {"host_bus_unsent": 2, "host_bus_oversize": 1}
    lonely.close()
    lonely.send("news", b"after the end")
    assert lonely.receive("news") == []


def test_one_connection_a_pair(key_file: Path, free_port: int) -> None:
    peers = [Peer("d", "127.0.0.4"), Peer("a", "127.0.0.1"), Peer("c", "127.0.0.3"), Peer("c", "::3"), Peer("d", "::4")]
    with contextlib.closing(hosts.HostBus("b", peers, HostBus(port=free_port, key_file=str(key_file)))) as bus:
        assert sorted(bus.connects_to) == ["127.0.0.3", "127.0.0.4"]
        bus.send("news", b"")
        assert bus.drops()["host_bus_unsent"] == 3


def test_queues_are_bounded_and_only_wanted_topics_are_kept(lonely: hosts.HostBus) -> None:
    peer = Sealer("b/*?", ["a"], derived(KEY, "messages"))
    for _, ask in lonely.sealer.asks(SECOND):
        peer.open(ask, SECOND)
    for _, ask in peer.asks(SECOND):
        lonely.accept(ask, SECOND)
    ((_, challenge),) = lonely.sealer.asks(3 * SECOND)
    for _, raw in peer.open(challenge, 3 * SECOND)[1]:
        lonely.accept(raw, 3 * SECOND)
    lonely.accept(peer.seal("other", b"nobody asked", "a"), 3 * SECOND)
    assert lonely.receive("news") == []  # from now on it is wanted
    for number in range(18):
        lonely.accept(peer.seal("news", b"%d" % number + bytes(MAX_PAYLOAD - 2), "a"), 3 * SECOND)
    assert [(sender, payload[:2]) for sender, payload in lonely.receive("news")][:2] == [
        ("b/*?", b"0\0"),
        ("b/*?", b"1\0"),
    ]
    assert (lonely.drops()["host_bus_unwanted"], lonely.drops()["host_bus_full"]) == (1, 2)
    lonely.accept(peer.seal("news", b"room again", "a"), 3 * SECOND)
    assert lonely.receive("news") == [("b/*?", b"room again")]


def test_our_own_name_among_the_peers(key_file: Path) -> None:
    with pytest.raises(UsageError, match="a peer has the same name"):
        hosts.HostBus("a", [Peer("a", "127.0.0.2")], HostBus(key_file=str(key_file)))


# ---- configuration ----


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"bus": HostBus(port=0)}, "bus.port is 0"),
        ({"bus": HostBus(key_file="key")}, "bus.key_file is 'key'"),
        ({"samples": Samples(per_s=0)}, "samples.per_s is 0"),
        ({"clocks": Clocks(pair_interval_ms=0.5)}, "clocks.pair_interval is"),
        ({"clocks": Clocks(spacing_us=-1)}, "clocks.spacing is"),
        ({"clocks": Clocks(tolerance_ns=0)}, "clocks.tolerance is"),
        ({"clocks": Clocks(window_ms=99)}, "clocks.window is"),
        ({"clocks": Clocks(window_ms=1000, interval_ms=1001)}, "clocks.interval is 1001ms, .* 10ms and 1s"),
        ({"clocks": Clocks(asymmetry_share=float("nan"))}, "clocks.asymmetry_share is nan"),
        ({"clocks": Clocks(reference="h1\n")}, "clocks.reference"),
        ({"clocks": Clocks(chrony_socket="/" + 107 * "x")}, "clocks.chrony_socket"),
        ({"host": ""}, "host is ''"),
        ({"peers": [Peer("n" * 256, "10.0.0.2")]}, "a peer's name"),
        ({"virtual_clock": "", "peers": [Peer("\udcff", "10.0.0.2")]}, "a peer's name"),
    ],
)
def test_settings_that_make_no_sense(changed: dict[str, object], complaint: str) -> None:
    sound = AgentConfig("h1", [Peer("h2", "10.0.0.2")], bus=HostBus(key_file="/etc/swerve/bus.key"))
    assert checked(sound, "file") == sound
    with pytest.raises(UsageError, match=complaint):
        checked(replace(sound, **changed), "file")
