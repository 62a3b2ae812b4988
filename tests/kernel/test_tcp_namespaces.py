"""Connections inside other network namespaces: counted exactly, named by their control groups, kept apart from ours.

A host forwards between twenty pods and a server; what arrives at the server is lost by choice (drop_chosen.c).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import support
import tcp_kit as kit

from pytools.errors import SwerveError
from pytools.kernel import features
from pytools.kernel.bpf import cgroups
from pytools.kernel.bpf.attach import attach_tc
from pytools.kernel.bpf.loader import Program, load
from pytools.kernel.netns import cookie, inside
from pytools.signals import TcpFlow, TcpNamespace

PODS = 20
SERVER = "10.88.0.2"
PORT = 5000
BYTES = 400_000
PAYLOAD = 1  # what drop_chosen.c loses
ALL = 2

# A pod's process: joins its group, enters its namespace, then sends, to the server or to whoever connects to it.
CHILD = """
import ctypes, os, socket, sys
group, netns, server, port, size, listens = sys.argv[1:]
open(group + "/cgroup.procs", "w").write("0")
assert ctypes.CDLL(None).setns(os.open("/run/netns/" + netns, os.O_RDONLY), 0) == 0
if listens == "True":
    listener = socket.create_server(("", int(port)))
    print("ready", flush=True)
    sock, _ = listener.accept()
    listener.close()
else:
    print("ready", flush=True)
    sys.stdin.readline()
    sock = socket.create_connection((server, int(port)), timeout=90)
sock.settimeout(90)
sock.sendall(bytes(int(size)))
sock.shutdown(socket.SHUT_WR)
while sock.recv(65536):
    pass
"""


@dataclass(frozen=True)
class Pod:
    """One of them: its namespace, its control group, and what it has to be called."""

    number: int
    netns: str
    group: Path
    container: str
    name: str

    @property
    def address(self) -> str:
        return f"10.88.{self.number}.2"

    @property
    def listens(self) -> bool:
        return self.number % 2 == 0

    def counted(self) -> dict[str, int]:
        """The namespace's own counters, as nstat has them."""
        with inside(self.netns):
            lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
        heads, values = (line.split()[1:] for line in lines if line.startswith("Tcp:"))
        return dict(zip(heads, map(int, values), strict=True))

    def cookie(self) -> int:
        with inside(self.netns):
            return cookie()


@pytest.fixture
def groups(unique_name: Callable[[], str]) -> Iterator[Path]:
    """A control group of ours, removed with all below it."""
    try:
        mine = cgroups.root() / Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    except SwerveError as error:
        pytest.skip(f"missing: {error}")
    top = mine / f"swerve-{unique_name()}"
    top.mkdir()
    try:
        yield top
    finally:
        for directory, _, _ in os.walk(top, topdown=False):
            os.rmdir(directory)


@pytest.fixture
def pods(make_namespace: Callable[[], str], groups: Path) -> tuple[str, str, list[Pod]]:
    """The host's namespace, the server's, and the pods."""
    support.require("bcc", "tracefs")
    host, server = make_namespace(), make_namespace()
    support.join(host, server, "v0")
    batch = {host: ["address add 10.88.0.1/24 dev v0", "link set v0 up"]}
    batch[server] = [f"address add {SERVER}/24 dev v0", "link set v0 up", "route add default via 10.88.0.1"]
    made = []
    for number in range(1, PODS + 1):
        netns = make_namespace()
        uid = f"{number:08x}-0000-4000-8000-00000000abcd"
        container = f"{number:02x}".ljust(64, "a")
        shapes = (
            f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{uid.replace('-', '_')}.slice"
            f"/cri-containerd-{container}.scope",
            f"kubepods/besteffort/pod{uid}/{container}",
            f"system.slice/docker-{container}.scope",
            f"system.slice/sample{number}.service",
        )
        names = (f"pod:{uid}", f"pod:{uid}", f"container:{container[:12]}", f"sample{number}.service")
        group = groups / shapes[number % 4]
        group.mkdir(parents=True)
        made.append(Pod(number, netns, group, container if number % 4 < 3 else "", names[number % 4]))
        support.run(
            ["ip", "-n", host, "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", netns]
        )
        batch[host] += [f"address add 10.88.{number}.1/24 dev p{number}", f"link set p{number} up"]
        batch[netns] = [f"address add 10.88.{number}.2/24 dev eth0", "link set eth0 up"]
        batch[netns] += [f"route add default via 10.88.{number}.1"]
    for netns, lines in batch.items():
        support.ip(netns, *lines)
    with inside(host):
        Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    return host, server, made


@contextlib.contextmanager
def losing(server: str, what: int, every: int) -> Iterator[None]:
    """Lose every so manieth packet that arrives at the server."""
    dropper = Program(str(Path(__file__).with_name("drop_chosen.c")), ("drop_far",))
    with load([dropper]) as loaded:
        assert loaded.failed == {}
        loaded.map("choice").update(1, (what, 2, 1, every, 0, 0))
        with inside(server):
            link = attach_tc(loaded.programs["drop_far"], "v0", "ingress")
        with link:
            yield


def started(pod: Pod) -> subprocess.Popen[str]:
    words = [str(pod.group), pod.netns, SERVER, str(PORT), str(BYTES), str(pod.listens)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def transfer(server: str, pods: list[Pod], watch: kit.Watching) -> None:
    """Each pod sends once, some of them as servers; all connections have ended when this returns."""
    children = [started(pod) for pod in pods]
    try:
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        with contextlib.ExitStack() as stack:
            selector = stack.enter_context(selectors.DefaultSelector())
            with inside(server):
                listener = stack.enter_context(socket.create_server((SERVER, PORT), backlog=PODS))
                calls = [socket.socket() for pod in pods if pod.listens]
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ)
            for pod, call in zip([pod for pod in pods if pod.listens], calls, strict=True):
                stack.enter_context(call)
                call.setblocking(False)
                assert call.connect_ex((pod.address, PORT)) in (0, 115)
                selector.register(call, selectors.EVENT_READ)
            for child in children:
                assert child.stdin is not None
                child.stdin.close()
            drain(selector, listener, len(pods), watch)
        for child in children:
            assert child.wait(60) == 0
    finally:
        for child in children:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()
    for pod in pods:
        support.wait_until(lambda pod=pod: ended(pod), 60, "the connections of the pods are over")


def drain(selector: selectors.BaseSelector, listener: socket.socket, count: int, watch: kit.Watching) -> None:
    """Read all that comes until each connection has ended, and have the source work beside that."""
    end = time.monotonic() + 90 * support.slow_factor()
    while count:
        assert time.monotonic() < end, f"{count} connections have not ended"
        for key, _ in selector.select(0.01):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            if sock is listener:
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                selector.register(accepted, selectors.EVENT_READ)
            elif not sock.recv(1 << 20):
                selector.unregister(sock)
                sock.close()
                count -= 1
        watch.tick(time.monotonic_ns())


def ended(pod: Pod) -> bool:
    lines = support.run(["ss", "-N", pod.netns, "-Htan"]).stdout.splitlines()
    return all(line.split()[0] in ("TIME-WAIT", "LISTEN") for line in lines)


@pytest.mark.parametrize(("what", "every"), [(PAYLOAD, 7), (ALL, 13)], ids=["payload", "handshakes too"])
def test_retransmissions_of_twenty_namespaces_equal_their_own(
    pods: tuple[str, str, list[Pod]], what: int, every: int
) -> None:
    host, server, made = pods
    before = [pod.counted()["RetransSegs"] for pod in made]
    with kit.watching(host, interfaces=("v0",), namespaces="all") as watch, losing(server, what, every):
        transfer(server, made, watch)
        watch.source.read(time.monotonic_ns())
        watch.run(1.2)
        told = watch.subscription.read()
        totals = watch.host()
        drops = watch.source.drops()
    kernel = {pod.cookie(): pod.counted()["RetransSegs"] - old for pod, old in zip(made, before, strict=True)}
    assert sum(kernel.values()) > PODS, "hardly anything was lost: the test shows nothing"
    ours = {each.netns: each for each in told if isinstance(each, TcpNamespace)}
    assert {cookie: ours[cookie].total_segments for cookie in kernel} == kernel
    flows = {each.namespace: each for each in told if isinstance(each, TcpFlow)}
    for pod in made:
        mine = ours[pod.cookie()]
        assert (mine.namespace, mine.connections) == (pod.name, 1)
        flow = flows[pod.name]
        assert (flow.local, flow.sent_bytes, flow.state) == (pod.address, BYTES, "close")
        assert flow.retransmitted_segments == mine.total_segments
        assert (flow.interface, flow.path, flow.owner.container) == ("", None, pod.container)
    assert totals.retransmitted_segments == totals.sent_bytes == 0, "they are not in the sums of the host"
    # A change of congestion state may go unseen; what is sent again is counted all the same.
    assert not any(count for name, count in drops.items() if name != "tcp_congestion_missed")


def test_a_macvlan_pod_leaves_by_a_known_interface(make_namespace: Callable[[], str]) -> None:
    """A macvlan hands packets to the host's interface with their socket: egress sees them, and counts none twice."""
    host, server, pod = (make_namespace() for _ in range(3))
    joined = support.joining(server, "v0"), "link set v0 up", "link add link v0 name m0 type macvlan mode bridge"
    support.ip(host, *joined, f"link set m0 netns {pod} name eth0")
    for netns, device, last in ((server, "v0", 2), (pod, "eth0", 3)):
        support.ip(netns, f"address add 10.88.0.{last}/24 dev {device}", f"link set {device} up")
    with inside(server):
        listener = socket.create_server((SERVER, PORT))
    with inside(pod):
        older = socket.create_connection((SERVER, PORT), timeout=30)
    with listener, older, kit.watching(host, interfaces=("v0",), namespaces="all") as watch:
        with inside(pod):
            newer = socket.create_connection((SERVER, PORT), timeout=30)
        ports = [sock.getsockname()[1] for sock in (older, newer)]
        with newer:

            def shown() -> TcpFlow | None:
                for sock in (older, newer):
                    sock.send(bytes(1000))
                return watch.flows(0.2).get(ports[1])

            flow = support.wait_until(shown, 20, "the newer connection is shown")
            assert (flow.interface, flow.path, bool(flow.namespace)) == ("v0", None, True)
            if features.program(features.TCP_NAMESPACE).present:
                assert ports[0] not in watch.flows(), "it precedes the agent, and is not the host's"
                assert watch.host().sent_bytes == 0
