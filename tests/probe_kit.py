"""probe.c under test: on both ends of a veth pair, or run on single packets without a network."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import packets as p
import pytest
import support
from numpy.typing import NDArray
from packet_runs import PacketRuns

from pytools.agent.hooks import link_observers
from pytools.config import AgentConfig, Peer, Probe, Tcp
from pytools.kernel import netns
from pytools.kernel.bpf import attach, loader
from pytools.kernel.netlink.routing import Netlink
from pytools.signals import Path
from pytools.sources import programs
from pytools.sources.probing import frames
from pytools.sources.probing.frames import Frames
from pytools.sources.probing.paths import PinnedPath, Session
from pytools.sources.probing.program import ProbeProgram

PORT = p.PORT
OUT, IN = programs.OBSERVE_EGRESS, programs.OBSERVE_INGRESS
PROGRAMS = programs.observers(
    programs.probes(AgentConfig("", [], Probe(port=PORT))), programs.tcp_connections(Tcp(flows=1024))
)
ADDRESSES = {4: ("10.77.0.1", "10.77.0.2"), 6: ("fd77::1", "fd77::2")}
ESTIMATE = 0xC001
LOOPBACK = 1  # interface index that a test run's packets come in by
SENDER_PORT = 5000


def session(
    remote: str,
    port: int = SENDER_PORT,
    shared: bool = False,
    source: str = "",
    gateway: str = "",
    ifindex: int = LOOPBACK,
    row: int = 0,
) -> Session:
    """One with a path of its own, of the same number."""
    peer = Peer("b", remote, clock="shared" if shared else "free_running")
    path = Path("a", "b", remote, gateway, "v0")
    pinned = PinnedPath(row, path, peer, 6 if ":" in remote else 4, ifindex, source, None, False)
    return Session(pinned, port, row, counts=True)


class Host:
    """One end: the programs at its interface, the sender's port, and a socket that shows what reaches processes."""

    def __init__(self, namespace: str, interface: str, force_clsact: bool = False, slots: int = 64) -> None:
        self.namespace, self.interface = namespace, interface
        self._closing = contextlib.ExitStack()
        keep = self._closing.enter_context
        try:
            with netns.inside(namespace):
                loaded = keep(loader.load(PROGRAMS))
                assert loaded.failed == {}
                self.program = keep(contextlib.closing(ProbeProgram(loaded, slots)))
                self.slots, self.peers = loaded.map("probe_slots"), loaded.map("probe_peers")
                self.settings_fd = loaded.map("probe_settings").fd
                with Netlink() as netlink:
                    self.program.set_locals(each.address for each in netlink.addresses())
                for hook, direction in link_observers(loaded):
                    keep(attach.attach_tc(loaded.programs[hook], interface, direction, force_clsact))
                self.ifindex = socket.if_nametoindex(interface)
                self._packet = keep(frames.open_socket())
                self.reflector = {4: keep(udp_socket(socket.AF_INET, PORT)), 6: keep(udp_socket(socket.AF_INET6, PORT))}
                self.held = {4: keep(udp_socket(socket.AF_INET)), 6: keep(udp_socket(socket.AF_INET6))}
        except BaseException:
            self._closing.close()
            raise
        self.ports = {family: int(sock.getsockname()[1]) for family, sock in self.held.items()}
        self.program.set_ports(self.ports.values())
        self._frames: dict[int, Frames] = {}
        self.sent = 0

    def probe(self, family: int, source: str, destination: str, gateway: str = "", shared: bool = True) -> None:
        """Have one path to a peer; session and path are number 0."""
        made = session(destination, self.ports[family], shared, source, gateway, self.ifindex)
        self.program.set_path(made.pinned)
        self.program.set_session(made)
        self._frames[family] = Frames(made.pinned.family, [made], PORT, 0, 1, p.OwnMemory())  # type: ignore[arg-type]

    def send(self, family: int, count: int = 1) -> None:
        assert self.try_to_send(family, count) == 0

    def try_to_send(self, family: int, count: int = 1) -> int:
        """How many the kernel refused."""
        refused, made = 0, self._frames[family]
        for _ in range(count):
            made.fill(np.array([0]), self.program.seq(np.zeros((1, 1), np.int64), np.array([[self.sent]])))
            try:
                p.send_message(self._packet, made.headers[0])
            except OSError:
                refused += 1
            self.sent += 1
        return refused

    def records(self, count: int) -> NDArray[Any]:
        """The next records, once there are so many."""
        got: list[NDArray[Any]] = []

        def enough() -> bool:
            got.append(self.program.read())
            return sum(map(len, got)) >= count

        support.wait_until(enough, 10, f"{count} records", every_s=0.001)
        return np.concatenate(got)

    def counted(self) -> dict[str, int]:
        """The counters that are not zero, but for bytes."""
        return {name: value for name, value in self.program.counters().items() if value and name != "wire_bytes"}

    def also_close(self, sock: socket.socket) -> None:
        """Close this socket with the host."""
        self._closing.callback(sock.close)

    def close(self) -> None:
        self._closing.close()


def udp_socket(family: int, port: int = 0, address: str = "") -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind((address, port))
    return sock


Hosts = Callable[..., Host]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    support.require("bcc", "netns")
    made: list[Host] = []

    def make(namespace: str, interface: str = "v0", force_clsact: bool = False) -> Host:
        made.append(Host(namespace, interface, force_clsact))
        return made[-1]

    yield make
    for each in made:
        each.close()


def two(hosts: Hosts, ends: tuple[str, str], family: int, **how: object) -> tuple[Host, Host]:
    ours, theirs = ADDRESSES[family]
    first, second = (hosts(end, **how) for end in ends)
    first.probe(family, ours, theirs)
    second.program.set_peers({ours: ESTIMATE})
    return first, second


def ask(host: Host, peer: tuple[str, str], family: int, payload: bytes, port: int = 0) -> bytes:
    """A request from an ordinary socket, as another implementation would send it; the reply."""
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    with netns.inside(host.namespace):
        sock = socket.socket(kind, socket.SOCK_DGRAM)
    with sock:
        sock.settimeout(10)
        sock.bind((peer[0], port))
        sock.sendto(payload, (peer[1], PORT))
        reply, source = sock.recvfrom(9300)
        assert source[:2] == (peer[1], PORT)
    return reply


def request(*tlvs: tuple[int, bytes]) -> bytes:
    """A request of another STAMP sender: its flags are U, as RFC 8972 has it."""
    base = struct.pack("!III", 7, 11, 13) + struct.pack("!HH", 0x4001, 9) + bytes(28)
    return base + b"".join(struct.pack("!BBH", 0x80, kind, len(value)) + value for kind, value in tlvs)


class Replies:
    """A reflector in user space, which lets the test answer."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def take(self) -> tuple[bytes, Any]:
        got: list[tuple[bytes, Any]] = []

        def came() -> bool:
            with contextlib.suppress(BlockingIOError):
                got.append(self.socket.recvfrom(2048))
            return bool(got)

        support.wait_until(came, 10, "the request is there", every_s=0.001)
        return got[0]


@pytest.fixture
def one_sided(hosts: Hosts, veth_pair: tuple[str, str]) -> tuple[Host, Replies]:
    """A sender with our programs, and a peer without: its reflector is the test."""
    first = hosts(veth_pair[0])
    first.probe(4, *ADDRESSES[4])
    with netns.inside(veth_pair[1]):
        sock = udp_socket(socket.AF_INET, PORT)
    first.also_close(sock)
    return first, Replies(sock)


# ---- single packets, without a network ----

UNSPEC, DROPPED, REDIRECTED = 0xFFFFFFFF, 2, 7  # what TC is told
MARK_PLAIN, MARK_REPLY = 0x5E770003, 0x5E770100
PEERS = ("10.9.0.1", "10.9.0.2", "fd00:9::1", "fd00:9::2")


class TestRun:
    """The loaded program, run on single packets, all of them to addresses that it takes for this host's."""

    __test__ = False

    def __init__(self, loaded: loader.Loaded, namespace: str) -> None:
        link_observers(loaded)
        self.hooks, self.namespace, self._runs = loaded.programs, namespace, PacketRuns()
        self.program = ProbeProgram(loaded, 64)
        self.program.set_peers(dict.fromkeys(PEERS, ESTIMATE))
        self.program.set_locals(PEERS)
        self.program.set_ports([SENDER_PORT])
        self.peers, self.ecn, self._slots = (loaded.map(name) for name in ("probe_peers", "path_ecn", "probe_slots"))
        self._before = self._counters()

    def run(self, hook: str, frame: bytes, segments: int = 0, mark: int = 0, ifindex: int = 0) -> tuple[int, bytes]:
        """The verdict, and the packet as the program left it."""
        with netns.inside(self.namespace):
            done = self._runs.run(self.hooks[hook], frame, mark, ifindex, segments)
        return done.verdict, done.frame

    def marked(self, hook: str, frame: bytes, mark: int) -> tuple[int, int]:
        """The verdict on a packet with this mark, and the mark that it leaves with."""
        with netns.inside(self.namespace):
            done = self._runs.run(self.hooks[hook], frame, mark)
        return done.verdict, done.mark

    def repeat(self, hook: str, frame: bytes, count: int, segments: int = 0) -> None:
        """Run it so often on one packet, which must be one that it leaves as it is."""
        with netns.inside(self.namespace):
            self._runs.run(self.hooks[hook], frame, segments=segments, repeat=count)

    def _counters(self) -> dict[str, int]:
        return {name: value for name, value in self.program.counters().items() if name != "wire_bytes"}

    def counted(self) -> dict[str, int]:
        """Counters that have moved since the last call, but for bytes."""
        before, self._before = self._before, self._counters()
        return {name: value - before[name] for name, value in self._before.items() if value != before[name]}

    def remember_probe(self, remote: str = PEERS[0], number: int = 7) -> bytes:
        """Have session 0 wait for the reply to one probe, sent just now; returns that reply as a foreign host's."""
        self.program.set_path(session(remote).pinned)
        self.program.set_session(session(remote))
        (seq,) = self.program.seq(np.zeros(1, np.int64), np.array([number])).tolist()
        slot = np.zeros((), self._slots.value)
        slot["seq"], slot["state"], slot["t1_ns"] = seq, 2, 3_000_000_004
        slot["sent_ns"] = time.monotonic_ns()
        self._slots.update(number % self.program.slots, slot)
        stamp = struct.pack("!II", 3, 4)
        return (struct.pack("!I8sHH8sI8sH", seq, stamp, 0x4001, 1, stamp, seq, stamp, ESTIMATE)).ljust(44, b"\0")

    def close(self) -> None:
        self.program.close()


@pytest.fixture(scope="module")
def probes(make_lasting_namespace: Callable[[], str]) -> Iterator[TestRun]:
    support.require("root", "bcc", "netns")
    with loader.load(PROGRAMS) as loaded:
        assert loaded.failed == {}
        with contextlib.closing(TestRun(loaded, make_lasting_namespace())) as made:
            yield made
