"""Many paths at once, on a network that is a function: when what is told, and how much is under way for it."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from pytools.config import AgentConfig, Links, Peer
from pytools.errors import SwerveError
from pytools.ipc.bus import Bus
from pytools.kernel.error_queue import entry
from pytools.signals import LinkEvent, Path, PathMtu
from pytools.sources import path_mtu
from pytools.sources.path_mtu import PathMtuSource
from pytools.sources.probing import size_probes
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.size_probes import SMALLEST, Reply, Told

MS, SECOND = 1_000_000, 1_000_000_000
SHORT = 80  # IP bytes of a short reply


@dataclass
class Network:
    """What every path by an interface takes, and what is on its way."""

    now_ns: int = 0
    takes: dict[str, int] = field(default_factory=dict)
    interface_mtu: int = 1500
    longest: int = 9216  # request that the reflector says it answers
    refuse: int = 0  # errno of what is sent
    no_socket: bool = False
    mute: bool = False  # nothing comes back
    latency_ns: int = 20 * MS
    under_way: int = 0
    most_under_way: int = 0
    large_sent: int = 0


class Probes:
    """Stands in for a path's socket."""

    network: Network

    def __init__(self, pinned: PinnedPath, _port: int, _dscp: int) -> None:
        if self.network.no_socket:
            raise SwerveError("no")
        self._interface, self._smallest = pinned.path.interface, SMALLEST[pinned.family]
        self._coming: list[tuple[int, Reply]] = []
        self.wire_bytes = 0
        self.closed = False

    def interface_mtu(self) -> int:
        return self.network.interface_mtu

    def send(self, size: int, seq: int, now_ns: int, short_reply: bool) -> int:
        net = self.network
        assert size >= self._smallest, "a packet without room for what it asks"
        self.wire_bytes += size
        if net.refuse and size > self._smallest:
            return net.refuse
        net.large_sent += size > self._smallest
        if not net.mute and size <= net.takes.get(self._interface, 9216):
            self._coming.append((now_ns + net.latency_ns, Reply(seq, SHORT if short_reply else size, net.longest)))
            net.under_way += 1
            net.most_under_way = max(net.most_under_way, net.under_way)
        return 0

    def replies(self) -> Iterator[Reply]:
        ready = [reply for at_ns, reply in self._coming if at_ns <= self.network.now_ns]
        self._coming = [each for each in self._coming if each[0] > self.network.now_ns]
        self.network.under_way -= len(ready)
        yield from ready

    def told(self) -> Told | None:
        return None

    def close(self) -> None:
        self.closed = True


class Watched:
    """A source over that network, ticked when it is due."""

    def __init__(self, network: Network, peers: int, rails: int = 2, interval_s: float = 0.5) -> None:
        self.network = network
        bus = Bus()
        self.paths = tuple(
            _pinned(peer * rails + rail, f"h{peer}", f"rail{rail}") for peer in range(peers) for rail in range(rails)
        )
        self._told = bus.subscribe(frozenset({"link_event", "path_mtu"}), capacity=100_000)
        config = AgentConfig(
            "h",
            [Peer(f"h{peer}", f"10.9.0.{peer + 1}") for peer in range(peers)],
            links=Links(mtu_interval_s=interval_s),
        )
        self.source = PathMtuSource(config, bus, lambda: self.paths)
        self._due_ns = 0
        self.events: list[LinkEvent] = []
        self.mtus: list[PathMtu] = []

    def after(self, ns: int) -> None:
        until_ns = self.network.now_ns + ns
        while self._due_ns <= until_ns:
            self.network.now_ns = max(self.network.now_ns, self._due_ns)
            self._due_ns = self.source.tick(self.network.now_ns)
            assert self._due_ns > self.network.now_ns
        self.network.now_ns = until_ns
        for signal in self._told.read():
            if isinstance(signal, LinkEvent):
                self.events.append(signal)
            elif isinstance(signal, PathMtu):
                self.mtus.append(signal)

    def states(self) -> set[str]:
        return {state.state for state in {each.path: each for each in self.mtus}.values()}


def _pinned(index: int, peer: str, rail: str) -> PinnedPath:
    address = f"10.9.0.{index // 2 + 1}"
    path = Path("h", peer, address, "", rail)
    return PinnedPath(index, path, Peer(peer, address), 4, 10 + int(rail[-1]), "", None, False)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(Probes, "network", made, raising=False)
    monkeypatch.setattr(path_mtu, "SizeProbes", Probes)
    return made


@pytest.mark.parametrize("peers", [1, 3, 50])
def test_all_paths_of_a_rail_are_told_of_within_a_second(network: Network, peers: int) -> None:
    watched = Watched(network, peers)
    watched.after(5 * SECOND)
    assert watched.states() == {"agrees"}
    assert watched.events == []
    since_ns = network.now_ns
    network.takes["rail1"] = 1400
    watched.after(2 * SECOND)
    assert {event.paths[0] for event in watched.events} == {each.path for each in watched.paths if each.ifindex == 11}
    assert len(watched.events) == peers
    assert all(event.what == "mtu_mismatch" and event.at_ns - since_ns <= SECOND for event in watched.events)
    assert all((event.values["works_bytes"], event.values["fails_bytes"]) == (1400, 1401) for event in watched.events)

    watched.events.clear()
    since_ns = network.now_ns
    del network.takes["rail1"]
    watched.after(2 * SECOND)
    assert len(watched.events) == peers
    assert all(event.what == "mtu_agrees" and event.at_ns - since_ns <= SECOND for event in watched.events)
    assert watched.states() == {"agrees"}


@pytest.mark.parametrize(("peers", "a_second"), [(5, 20), (50, path_mtu.MOST_A_SECOND)])
def test_a_path_has_two_packets_a_second_but_all_together_no_more_than_so_many(
    network: Network, peers: int, a_second: int
) -> None:
    watched = Watched(network, peers)
    watched.after(5 * SECOND)
    before = network.large_sent
    watched.after(10 * SECOND)
    assert network.large_sent - before == a_second * 10


def test_what_is_under_way_is_bounded(network: Network) -> None:
    watched = Watched(network, 50)
    watched.after(15 * SECOND)
    assert network.most_under_way <= 2 * 100 // 5 + 2, "dealt over the interval"
    network.takes["rail0"] = network.takes["rail1"] = 1000
    watched.after(5 * SECOND)
    assert len(watched.events) == 100
    assert network.most_under_way <= path_mtu.MOST_SEARCHES * 13 + 100


def test_a_smaller_interface_is_no_mismatch_and_a_mismatch_ends_with_it(network: Network) -> None:
    network.takes["rail0"] = 1400
    watched = Watched(network, 1, rails=1)
    watched.after(3 * SECOND)
    assert [event.what for event in watched.events] == ["mtu_mismatch"]
    network.interface_mtu = 1300
    watched.after(2 * SECOND)
    assert [event.what for event in watched.events] == ["mtu_mismatch", "mtu_agrees"]
    assert (watched.mtus[-1].works_bytes, watched.mtus[-1].interface_mtu_bytes) == (1300, 1300)


@pytest.mark.parametrize(("longest", "interface_mtu"), [(1, 1500), (9216, 68)])
def test_what_others_say_never_makes_a_probe_too_small(network: Network, longest: int, interface_mtu: int) -> None:
    network.longest, network.interface_mtu = longest, interface_mtu
    watched = Watched(network, 1, rails=1)
    watched.after(5 * SECOND)
    assert watched.events == []


def test_signals_come_with_every_window_however_seldom_probes_are_sent(network: Network) -> None:
    watched = Watched(network, 1, rails=1, interval_s=60)
    watched.after(10 * SECOND)
    assert len(watched.mtus) >= 9


def test_what_never_left_this_host_is_not_the_path_s_fault(network: Network) -> None:
    watched = Watched(network, 1, rails=1)
    watched.after(3 * SECOND)
    network.refuse = errno.EMSGSIZE
    watched.after(5 * SECOND)
    assert watched.events == []
    assert watched.source.drops()["mtu_send_refused"] >= 9
    assert watched.mtus[-1].state == "agrees"


def test_a_peer_that_falls_silent_makes_its_paths_unknown(network: Network) -> None:
    watched = Watched(network, 1)
    watched.after(3 * SECOND)
    network.mute = True
    watched.after(6 * SECOND)
    assert watched.states() == {"unknown"}
    assert watched.events == []
    network.mute = False
    watched.after(3 * SECOND)
    assert watched.states() == {"agrees"}


def test_paths_come_and_go(network: Network) -> None:
    watched = Watched(network, 2)
    watched.after(2 * SECOND)
    sockets = [each.probes for each in watched.source.watched.values()]
    carried, all_of_them = watched.source.wire_bytes(), watched.paths
    watched.paths = all_of_them[:1]
    watched.after(SECOND)
    assert [each.closed for each in sockets] == [False, True, True, True]  # type: ignore[attr-defined]
    assert watched.source.wire_bytes() > carried
    network.no_socket = True
    watched.paths = all_of_them[:2]
    watched.after(3 * SECOND)
    assert 1 <= watched.source.drops()["mtu_no_socket"] <= 5, "tried again, but not all the time"
    network.no_socket = False
    watched.after(2 * SECOND)
    assert len(watched.source.watched) == 2
    watched.source.close()
    assert all(each.closed for each in sockets)  # type: ignore[attr-defined]


def test_zero_switches_it_off(network: Network) -> None:
    watched = Watched(network, 2, interval_s=0)
    watched.after(3 * SECOND)
    assert watched.mtus == []
    assert network.large_sent == 0


def error_queue(origin: int, code: int, mtu_bytes: int, offender: bytes) -> bytes:
    return struct.pack("=IBBBBII", code, origin, 3, 4, 0, mtu_bytes, 0) + offender


@pytest.mark.parametrize(
    ("level", "kind", "content", "told"),
    [
        (0, 11, error_queue(2, errno.EMSGSIZE, 1400, bytes(4) + socket.inet_aton("10.1.1.1") + bytes(8)), "10.1.1.1"),
        (
            41,
            25,
            error_queue(3, errno.EMSGSIZE, 1400, bytes(8) + socket.inet_pton(socket.AF_INET6, "fd00::1") + bytes(4)),
            "fd00::1",
        ),
        (0, 11, error_queue(1, errno.EMSGSIZE, 1400, bytes(16)), None),
        (0, 11, error_queue(2, errno.EHOSTUNREACH, 0, bytes(16)), None),
        (0, 11, error_queue(2, errno.EMSGSIZE, 0, bytes(16)), None),
        (0, 11, b"short", None),
        (0, 8, error_queue(2, errno.EMSGSIZE, 1400, bytes(16)), None),
    ],
    ids=["IPv4", "IPv6", "this kernel's own", "unreachable", "no size", "cut", "another message"],
)
def test_only_routers_words_about_size_are_taken(level: int, kind: int, content: bytes, told: str | None) -> None:
    found = size_probes.mtu_told(entry(level, kind, content))
    assert found == (None if told is None else Told(1400, told))
