"""Application delays between two agents of a lab: real traffic, cut and merged in every way there is here."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import by_unit
import pytest
import support
import yaml

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.kernel.netns import inside
from pytools.lab import Host, Lab
from pytools.signals import AppDelay

pytestmark = pytest.mark.deadline(180)

MS = 1_000_000
PORT = 5201
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104
OFFLOADS = {"merged": ("on", "on"), "cut": ("off", "off"), "merged there": ("off", "on"), "cut there": ("on", "off")}


@contextlib.contextmanager
def running(name: str, **how: Any) -> Iterator[Lab]:
    """A lab of two hosts whose agents run and talk to each other."""
    support.require("bcc", "ethtool", "iperf3")
    settings = {"hosts": 2, "rails": 1, "rate": "400mbit", "queue_bytes": 1 << 20, "bus": True} | how
    with Lab.up(name, **settings) as lab:
        for host in lab.hosts:
            tell_often(host)
            lab.start(host, [*support.SWERVE, "agent", "-n", host.netns])
        yield lab


def tell_often(host: Host) -> None:
    """Have its agent tell four times a second what it has joined."""
    file = directories.default_config(host.netns)
    settings = yaml.safe_load(file.read_text())
    settings["windows"]["long"] = "250ms"
    file.write_text(yaml.safe_dump(settings))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """One that serves most tests, one after the other."""
    with running(f"t{os.getpid()}app", ipv6=True) as lab:
        yield lab


@dataclass
class Told:
    """What an agent has said of all flows of a path, and of single ones."""

    paths: list[AppDelay] = field(default_factory=list)
    flows: list[AppDelay] = field(default_factory=list)

    def total(self, name: str, address: str = "") -> int:
        """Over all paths, or those to an address."""
        paths = [each for each in self.paths if not address or (each.path is not None and each.path.address == address)]
        return sum(getattr(signal, name) for signal in paths)

    def of_port(self, port: int, protocol: str | None = None) -> list[AppDelay]:
        flows = [signal for signal in self.flows if signal.remote_port == port]
        return [flow for flow in flows if protocol in (None, flow.protocol)]


class Listener:
    """Somebody who wants to know of a host's application delays."""

    def __init__(self, host: Host) -> None:
        self.told = Told()
        path = directories.agent_socket(host.netns)

        def connected() -> Client | None:
            with contextlib.suppress(SwerveError):
                return Client(path, frozenset({"app_delay"}))
            return None

        client = support.wait_until(connected, 20, f"the agent of {host.name} serves")
        assert client is not None
        self.client = client

    def listen(self) -> Told:
        """Take in what has come."""
        for signal in self.client.read():
            if isinstance(signal, AppDelay):
                (self.told.flows if signal.local else self.told.paths).append(signal)
        return self.told

    def until(self, condition: Callable[[Told], object], what: str, deadline_s: float = 40) -> Told:
        support.wait_until(lambda: condition(self.listen()), deadline_s, what, every_s=0.1)
        return self.told

    def from_now_on(self, address: str = "") -> None:
        """Forget what was said while the agents were finding each other, and of earlier traffic to other addresses."""
        self.until(lambda told: told.total("joined", address) >= 10, "samples are joined")
        self.told = Told()


@pytest.fixture
def listening() -> Iterator[Callable[[Host], Listener]]:
    with contextlib.ExitStack() as stack:

        def make(host: Host) -> Listener:
            listener = Listener(host)
            stack.callback(listener.client.close)
            return listener

        yield make


def offloads(lab: Lab, segmentation: str, receive: str) -> None:
    """Whether big buffers leave the sender and arrive at the receiver; between them packets are always cut."""
    for host in lab.hosts:
        words = ["tso", segmentation, "gso", segmentation, "gro", receive]
        lab.run(host, ["ethtool", "-K", "rail1", *words])
    for port in lab.rails[0].ports:
        lab.run(lab.rails[0], ["ethtool", "-K", port.name, "tso", "off", "gso", "off"])


@contextlib.contextmanager
def transfer(lab: Lab, address: str, *options: str) -> Iterator[None]:
    """An iperf3 client at host 1 and a server at host 2, for as long as it is wanted."""
    server = lab.start(lab.hosts[1], ["iperf3", "-s", "--forceflush"], stdout=subprocess.PIPE)
    assert server.stdout is not None
    for line in server.stdout:
        if "Server listening" in line:
            break
    client = lab.start(lab.hosts[0], ["iperf3", "-c", address, "-t", "120", *options])
    try:
        yield
        assert client.poll() is None, "the transfer ended by itself"
    finally:
        for process in (client, server):
            process.kill()
            process.wait()


def retransmitted(lab: Lab) -> int:
    """Segments that host 1 has sent more than once."""
    text = lab.run(lab.hosts[0], ["nstat", "-asz", "TcpRetransSegs"])
    return int(text.split()[-2])


@pytest.mark.parametrize(  # where buffers are merged does not depend on the family: for IPv6 both extremes
    ("family", "offload"), [*(("ipv4", each) for each in OFFLOADS), ("ipv6", "merged"), ("ipv6", "cut")]
)
def test_both_ends_pick_the_same_bytes_of_a_stream(
    lab: Lab, listening: Callable[[Host], Listener], family: str, offload: str
) -> None:
    offloads(lab, *OFFLOADS[offload])
    listener = listening(lab.hosts[0])
    address = lab.hosts[1].service if family == "ipv4" else lab.hosts[1].service6
    with transfer(lab, address, "-b", "150M"):
        listener.from_now_on(address)
        told = listener.until(lambda told: told.total("joined") >= 300, "three hundred samples are joined")
        again = retransmitted(lab)
    assert told.total("unmatched") <= again
    assert told.total("ambiguous") <= again
    assert told.total("joined") >= 0.95 * told.total("sampled")
    for signal in told.paths:
        assert signal.path is not None
        assert (signal.path.destination, signal.path.address, signal.path.interface) == ("h2", address, "rail1")
        assert (signal.clock, signal.bound_ns, signal.protocol) == ("synchronised", 200, "tcp")
        assert signal.owd.p50_ns is not None
        assert 0 < signal.owd.p50_ns <= (signal.owd.p99_ns or 0) <= (signal.owd.max_ns or 0)
    (port,) = {(flow.remote, flow.remote_port) for flow in told.of_port(PORT)}
    assert port == (address, PORT)


def test_retransmitted_bytes_are_left_out(
    unique_name: Callable[[], str], listening: Callable[[Host], Listener]
) -> None:
    """A byte that was lost and retransmitted would seem to have taken a round trip longer, or a timeout: 200 ms."""
    with running(unique_name(), rate="100mbit", queue_bytes=20_000) as lab:
        offloads(lab, "on", "on")
        listener = listening(lab.hosts[0])
        with transfer(lab, lab.hosts[1].service, "-P", "4"):
            listener.from_now_on()
            told = listener.until(lambda told: told.total("ambiguous") >= 20, "bytes are lost", 80)
            again = retransmitted(lab)
    assert 2 * again >= told.total("ambiguous"), "both of a pair are left out"
    assert told.total("joined") > told.total("ambiguous")
    for signal in told.paths:
        assert signal.joined + signal.ambiguous + signal.unmatched == signal.sampled
        assert signal.owd.max_ns is None or signal.owd.max_ns < 200 * MS


@contextlib.contextmanager
def datagrams(lab: Lab, segment_bytes: int, merging: bool) -> Iterator[Callable[[], None]]:
    """A pair of sockets; each call sends sixteen datagrams, no two alike, at once or one by one, and takes them in."""
    with inside(lab.hosts[1].netns):
        far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inside(lab.hosts[0].netns):
        near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with far, near:
        far.bind((lab.hosts[1].service, PORT))
        near.connect(far.getsockname())
        far.settimeout(10)
        if merging:
            near.setsockopt(SOL_UDP, UDP_SEGMENT, segment_bytes)
            far.setsockopt(SOL_UDP, UDP_GRO, 1)

        def send() -> None:
            payload = os.urandom(16 * segment_bytes - 1)
            if merging:
                near.send(payload)
            else:
                for begin in range(0, len(payload), segment_bytes):
                    near.send(payload[begin : begin + segment_bytes])
            taken = 0
            while taken < len(payload):
                taken += len(far.recv(1 << 16))

        yield send


@pytest.mark.parametrize("segment_bytes", [24, 1200])
@pytest.mark.parametrize("offload", ["merged", "cut there"])
@pytest.mark.parametrize("merging", [True, False], ids=["at once", "one by one"])
def test_both_ends_pick_the_same_datagrams(
    lab: Lab, listening: Callable[[Host], Listener], merging: bool, offload: str, segment_bytes: int
) -> None:
    offloads(lab, *OFFLOADS[offload])
    listener = listening(lab.hosts[0])
    with datagrams(lab, segment_bytes, merging) as send:

        def joined(count: int) -> Callable[[Told], object]:
            def condition(told: Told) -> bool:
                for _ in range(40):
                    send()
                return sum(flow.joined for flow in told.of_port(PORT, "udp")) >= count

            return condition

        listener.until(joined(1), "samples are joined")
        listener.told = Told()
        told = listener.until(joined(200), "two hundred samples are joined")
    flows = told.of_port(PORT, "udp")
    assert sum(flow.joined for flow in flows) == sum(flow.sampled for flow in flows)


def test_datagrams_that_are_alike_are_left_out(lab: Lab, listening: Callable[[Host], Listener]) -> None:
    """Each of a hundred is sent again and again: all that can be told is where the very first of a kind arrived."""
    listener = listening(lab.hosts[0])
    with inside(lab.hosts[0].netns):
        near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with near:
        near.connect((lab.hosts[1].service, PORT))
        port = near.getsockname()[1]

        def ours(told: Told) -> list[AppDelay]:
            return [flow for flow in told.flows if flow.local_port == port]

        def ambiguous(told: Told) -> bool:
            for number in range(100):
                with contextlib.suppress(ConnectionRefusedError):
                    near.send(b"this is a heartbeat of %5d, and so is the next one" % number)
            return sum(flow.ambiguous for flow in ours(told)) >= 300

        told = listener.until(ambiguous, "they are counted", 60)
    assert sum(flow.joined for flow in ours(told)) <= 100


def test_clocks_that_disagree_are_taken_out(
    unique_name: Callable[[], str], listening: Callable[[Host], Listener]
) -> None:
    """The hosts' clocks differ by up to two seconds, and nothing of that is left in the delays.

    Under the shipped unit: messages between hosts and samples of application packets need no root.
    """

    def facts(told: Told) -> bool:
        return sum(signal.owd.p50_ns is not None for signal in told.paths) >= 5

    with by_unit.agents_by_the_unit(), running(unique_name(), clocks=5) as lab:
        listener = listening(lab.hosts[0])
        with transfer(lab, lab.hosts[1].service, "-b", "100M"):
            told = listener.until(facts, "delays are facts", 60)
    known = [signal for signal in told.paths if signal.owd.p50_ns is not None]
    for signal in known:
        assert signal.clock == "synchronised"
        assert signal.bound_ns is not None
        assert signal.hard_bound_ns is not None
        assert 0 < signal.bound_ns < MS
        assert 0 <= (signal.owd.p50_ns or 0) < 100 * MS
    assert all(signal.owd.p50_ns is None for signal in told.paths if signal.clock != "synchronised")


def test_nothing_is_sampled_once_nobody_listens(lab: Lab, listening: Callable[[Host], Listener]) -> None:
    listener = listening(lab.hosts[0])
    with transfer(lab, lab.hosts[1].service, "-b", "50M"):
        listener.from_now_on()
        listener.client.close()
        quiet = time.monotonic() + 8  # longer than the lease
        support.wait_until(lambda: time.monotonic() > quiet, 20, "the lease has run out")
        again = listening(lab.hosts[0])
        first = again.until(lambda told: told.paths, "somebody listens again").paths[0]
    # What went by meanwhile was not sampled, so nothing of it can turn up.
    assert first.at_ns - first.window_ns > quiet * 1e9 - 2000 * MS
