"""tcp.c on real connections over a veth pair: every figure against the kernel's own, every cause forced by itself.

The near host is the one whose connections are counted. What it sends is lost on arrival at the far one, by choice
(drop_chosen.c), so that the kernel under test sends every packet and only the wire loses it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import support
import tcp_kit as kit
from numpy.typing import NDArray

from pytools.kernel.bpf import cgroups
from pytools.kernel.bpf.attach import OTHERS, attach_tc
from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.netns import inside

CAUSES: Final = ("fast", "timeout", "tail_probe", "syn", "unknown")
COUNTERS: Final = (
    *("flows_created", "flows_replaced", "flows_full", "paths_full", "interfaces_full", "lost", "synacks_full"),
    *("deferred", "congestion_full", "unsized", "met", "congestion_missed", "namespaces_full"),
)
HOSTS: Final = ("near", "far")
NEAR, FAR = ("10.77.0.1", "fd77::1"), ("10.77.0.2", "fd77::2")
SO_NETNS_COOKIE, TCP_INFO, TCP_USER_TIMEOUT = 71, 11, 18
SETTINGS = {  # what follows depends on nothing but what is lost
    "ipv4/tcp_early_retrans": 0,  # no tail loss probes unless a test wants them
    "ipv4/tcp_no_metrics_save": 1,
}
REFRESH_NS = 1_000_000
NEVER_NS = 1 << 62
YOUNG = 8  # segments sent, from which on a connection has a row, as in tcp.c
SECOND = 10**9
MSS_BYTES = 1448
OLDER, CALLED, ACTIVE, FIN_SENT, CLOSED = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class Info:
    """The part of TCP_INFO that is compared; None where the kernel is too old to have it."""

    congestion: int
    retransmitted: int
    retransmitted_bytes: int
    sent_bytes: int
    timeouts: int | None
    segments_out: int
    delivered: int
    spurious: int

    @staticmethod
    def of(sock: socket.socket) -> Info:
        raw = sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 512)

        def word(offset: int) -> int:
            return int(struct.unpack_from("=I", raw, offset)[0])

        sent, again = struct.unpack_from("=QQ", raw, 200)
        timeouts = struct.unpack_from("=H", raw, 240)[0] if len(raw) >= 248 else None
        return Info(raw[1], word(100), again, sent - again, timeouts, word(136), word(192), word(216))


class Agent:
    """The programs at work in one namespace, and what they have counted."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded

    def flows(self) -> dict[int, Any]:
        """Rows by local port."""
        keys, rows = self.loaded.map("tcp_flows").read()
        return dict(zip(keys["local_port"].tolist(), rows, strict=True))

    def flow(self, sock: socket.socket) -> Any:
        return self.flows()[sock.getsockname()[1]]

    def total(self) -> dict[str, int]:
        """The host's counts: all interfaces, whatever became of rows."""
        rows = self.loaded.map("tcp_interfaces").read()[1]
        return counts_of([row for per_cpu in rows for row in per_cpu])

    def paths(self) -> dict[str, int]:
        return counts_of(list(self.loaded.map("tcp_paths").read()[1]))

    def causes(self) -> dict[str, int]:
        return {name: n for name, n in self.total().items() if name in CAUSES and n}

    def counters(self) -> dict[str, int]:
        values = self.loaded.map("tcp_counters").read_percpu_sum().tolist()
        return dict(zip(COUNTERS, values, strict=True))

    def troubles(self) -> dict[str, int]:
        """Counters that tell of something lost, put off or without a place."""
        harmless = ("flows_created", "flows_replaced", "met")
        return {name: n for name, n in self.counters().items() if n and name not in harmless}


def counts_of(rows: list[Any]) -> dict[str, int]:
    """The sum of records of counts, by name; retransmissions by cause and as `segments`."""
    summed: dict[str, int] = {"segments": 0}
    for row in rows:
        for name in row.dtype.names:
            if name == "retransmitted":
                for cause, n in zip(CAUSES, row[name].tolist(), strict=True):
                    summed[cause] = summed.get(cause, 0) + n
                    summed["segments"] += n
            else:
                summed[name] = summed.get(name, 0) + int(row[name])
    return summed


def causes_of(row: Any) -> dict[str, int]:
    named = zip(CAUSES, row["counts"]["retransmitted"].tolist(), strict=True)
    return {name: n for name, n in named if n}


class Hosts:
    """Two namespaces joined by a veth pair, and what is lost between them."""

    def __init__(self, near: str, far: str, droppers: Loaded) -> None:
        self.near, self.far, self._choice = near, far, droppers.map("choice")

    def lose(self, what: str, skip: int = 0, lose: int = 1 << 40, every: int = 0, towards: str = "far") -> None:
        """Lose packets from now on: `payload`, `all`, `syn`, `bare` or `nothing`."""
        kind = ("nothing", "payload", "all", "syn", "bare").index(what)
        self._choice.update(HOSTS.index(towards), (kind, skip, lose, every, 0, 0))

    def lost(self, towards: str = "far") -> int:
        return int(self._choice.read()[1]["lost"][HOSTS.index(towards)])

    def kernel(self, name: str, where: str = "near") -> int:
        """A counter of the kernel's own, by the name that nstat has for it."""
        namespace = self.near if where == "near" else self.far
        with inside(namespace):
            text = "".join(Path("/proc/thread-self/net", each).read_text() for each in ("snmp", "netstat"))
        lines = text.splitlines()
        for heads, values in zip(lines[::2], lines[1::2], strict=True):
            prefix, *names = heads.split()
            found = dict(zip((prefix[:-1] + each for each in names), values.split()[1:], strict=True))
            if name in found:
                return int(found[name])
        raise AssertionError(f"the kernel has no counter {name}")

    @contextlib.contextmanager
    def listener(self, family: int = 0, where: str = "far", **options: int) -> Iterator[socket.socket]:
        address = (FAR if where == "far" else NEAR)[family]
        with inside(self.far if where == "far" else self.near):
            server = socket.socket(socket.AF_INET6 if family else socket.AF_INET)
        with server:
            for name, value in options.items():
                server.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
            server.bind((address, 0))
            server.listen(128)
            yield server

    @contextlib.contextmanager
    def connected(self, server: socket.socket, port: int = 0) -> Iterator[tuple[socket.socket, socket.socket]]:
        """A connection from the near host, from this port or any: both ends."""
        with self.socket(server.family) as near:
            near.settimeout(30)
            if port:
                near.bind(("", port))
            near.connect(server.getsockname()[:2])
            far, _ = server.accept()
            with far:
                far.settimeout(30)
                yield near, far

    @contextlib.contextmanager
    def socket(self, family: int = socket.AF_INET, where: str = "near") -> Iterator[socket.socket]:
        with inside(self.near if where == "near" else self.far):
            sock = socket.socket(family)
        with sock:
            yield sock

    @contextlib.contextmanager
    def agent(
        self,
        where: str = "near",
        callbacks: bool = True,
        older: bool = False,
        causes: bool = True,
        refresh_ns: int = REFRESH_NS,
        **sizes: int,
    ) -> Iterator[Agent]:
        """Count in one of the namespaces, as a source does."""
        namespace = self.near if where == "near" else self.far
        with contextlib.ExitStack() as stack:
            loaded = stack.enter_context(load([kit.program(causes, **sizes)]))
            assert loaded.failed == {}
            stack.enter_context(inside(namespace))
            with socket.socket() as any_socket:
                cookie = struct.unpack("=Q", any_socket.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0]
            loaded.map("tcp_settings").update(0, (cookie, refresh_ns, 0))
            loaded.map("tcp_interfaces").update(0, np.zeros((), loaded.map("tcp_interfaces").value))
            if older:
                note_older(loaded)
            if callbacks:
                stack.enter_context(cgroups.attach(loaded.programs["tcp_callbacks"]))
            for direction in ("egress", "ingress"):  # behind what drops packets in the network's place
                stack.enter_context(attach_tc(loaded.programs[f"tcp_{direction}"], "v0", direction, role=OTHERS))
            yield Agent(loaded)


def note_older(loaded: Loaded) -> None:
    """What every socket of the calling thread's namespace has counted so far, from socket diagnostics."""
    from pytools.kernel.netlink.sockdiag import Diagnostics

    accounted = loaded.map("tcp_accounted")
    for each in Diagnostics().sockets():
        if each.info is None:
            accounted.update(each.cookie, (each.request_retransmits, 0, 0, 0, 0))
        else:
            accounted.update(each.cookie, (each.info.retransmitted_segments, 0, 0, 1, each.info.congestion))


@pytest.fixture(scope="module")
def droppers() -> Iterator[Loaded]:
    support.require("bcc", "tracefs")
    functions = tuple(f"drop_{host}" for host in HOSTS)
    with load([Program(str(Path(__file__).with_name("drop_chosen.c")), functions)]) as loaded:
        assert loaded.failed == {}
        yield loaded


@pytest.fixture
def hosts(veth_pair: tuple[str, str], droppers: Loaded) -> Iterator[Hosts]:
    """The near and the far host: packets leave one by one, and nothing is lost yet."""
    support.require("ethtool", "ping", "ss")
    near, far = veth_pair
    with contextlib.ExitStack() as stack:
        for namespace, host in zip(veth_pair, HOSTS, strict=True):
            for word in ("tso", "gso", "gro"):
                support.run(["ip", "netns", "exec", namespace, "ethtool", "-K", "v0", word, "off"])
            with inside(namespace):
                for path, value in SETTINGS.items():
                    Path("/proc/sys/net", path).write_text(f"{value}")
                stack.enter_context(attach_tc(droppers.programs[f"drop_{host}"], "v0", "ingress"))
        for family in (0, 1):  # who does not know its neighbour yet sends its first SYN late
            support.run(["ip", "netns", "exec", near, "ping", "-c1", "-W5", FAR[family]])
            support.run(["ip", "netns", "exec", far, "ping", "-c1", "-W5", NEAR[family]])
        made = Hosts(near, far, droppers)
        made.lose("nothing", towards="far")
        made.lose("nothing", towards="near")
        yield made


def setting(namespace: str, path: str, value: int) -> None:
    with inside(namespace):
        Path("/proc/sys/net", path).write_text(f"{value}")


def exchange(near: socket.socket, far: socket.socket, size: int) -> None:
    """Send so many bytes one way until the far end has them and the near one knows it."""
    kit.transfer([(near, far)], size)
    acknowledged(near)
    near.settimeout(30)
    far.settimeout(30)


def acknowledged(sock: socket.socket) -> None:
    """Wait until the peer has acknowledged all that was sent."""

    def outstanding() -> int:
        return int(struct.unpack_from("=I", sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 104), 24)[0])

    support.wait_until(lambda: outstanding() == 0, 20, "everything is acknowledged")


def gone(hosts: Hosts, port: int) -> None:
    """Wait until the near host has no connection from this port any more, but for TIME-WAIT."""

    def left() -> list[str]:
        listed = support.run(["ss", "-N", hosts.near, "-Htan", f"sport = {port}"]).stdout.splitlines()
        return [line for line in listed if line.split()[0] not in ("TIME-WAIT", "LISTEN")]

    support.wait_until(lambda: not left(), 20, "the connection is over")


@pytest.mark.parametrize("family", [pytest.param(0, marks=pytest.mark.guest), 1], ids=["ipv4", "ipv6"])
def test_a_connection_that_loses_nothing(hosts: Hosts, family: int) -> None:
    with hosts.agent() as agent, hosts.listener(family) as server, hosts.connected(server) as (near, far):
        exchange(near, far, 300_000)
        exchange(far, near, 70_000)
        near.send(b"x")  # shows what came in since
        exchange(near, far, 1)
        far.recv(1)
        info, row = Info.of(near), agent.flow(near)
        # none, unless a processor was taken from the kernel for longer than its timers wait
        assert info.retransmitted <= sum(causes_of(row).values()) <= Info.of(near).retransmitted
        assert row["flags"] == CALLED | ACTIVE
        assert row["state"] == 1
        assert row["ecn_flags"] == 0
        assert 0 < row["srtt_us"] < SECOND // 1000
        assert 0 < row["min_rtt_us"] <= row["srtt_us"] * 8 + 8
        assert row["cwnd"] >= 10
        assert row["ssthresh"] >= 2
        assert row["cgroup"] != 0
        assert row["first_ns"] < row["last_ns"]
        port, remote_port = near.getsockname()[1], near.getpeername()[1]
        near.shutdown(socket.SHUT_WR)
        far.close()
        gone(hosts, port)
        (key,) = [key for key in agent.loaded.map("tcp_flows").read()[0] if key["local_port"] == port]
        row = agent.flows()[port]
        assert row["counts"]["sent_bytes"] == info.sent_bytes == 300_002
        assert row["counts"]["segments_out"] >= info.segments_out
        assert row["counts"]["received_bytes"] in (70_000, 70_001)  # the peer's FIN counts, as the kernel has it
        assert row["flags"] == CALLED | ACTIVE | FIN_SENT | CLOSED
        assert key["remote_port"] == remote_port
        mapped = {
            0: b"\0" * 10 + b"\xff\xff" + socket.inet_aton(NEAR[0]),
            1: socket.inet_pton(socket.AF_INET6, NEAR[1]),
        }
        assert key["local"]["bytes"].tobytes() == mapped[family]
        total = agent.total()
        assert total["sent_bytes"] == 300_002
        assert agent.paths() == total
        assert agent.troubles() == {}


@pytest.mark.parametrize(
    ("lost", "family"),
    [(1, 0), (3, 0), pytest.param(1, 1, marks=pytest.mark.guest), (3, 1)],
    ids=lambda each: f"{each}",
)
def test_fast_retransmission(hosts: Hosts, lost: int, family: int) -> None:
    with hosts.agent() as agent, hosts.listener(family) as server, hosts.connected(server) as (near, far):
        hosts.lose("payload", skip=2, lose=lost)
        exchange(near, far, 10 * 1400)
        assert hosts.lost() == lost
        info, row = Info.of(near), agent.flow(near)
        assert hosts.kernel("TcpExtTCPFastRetrans") == lost
        assert info.retransmitted == lost
        assert agent.causes() == causes_of(row) == {"fast": lost}
        assert row["counts"]["retransmitted_bytes"] == info.retransmitted_bytes > 1000 * lost
        assert row["counts"]["timeouts"] == 0
        assert agent.troubles() == {}


@pytest.mark.parametrize("callbacks", [True, False], ids=["callbacks", "egress"])
@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.guest(thorough=True)), 2])
def test_timeouts(hosts: Hosts, times: int, callbacks: bool) -> None:
    with hosts.agent(callbacks=callbacks) as agent, hosts.listener() as server, hosts.connected(server) as (near, far):
        hosts.lose("payload", lose=times)
        exchange(near, far, 1000)
        info, row = Info.of(near), agent.flow(near)
        assert info.retransmitted == times
        assert info.timeouts in (None, times)
        assert hosts.kernel("TcpExtTCPTimeouts") == times
        assert agent.causes() == causes_of(row) == {"timeout": times}
        assert row["counts"]["retransmitted_bytes"] == info.retransmitted_bytes == 1000 * times
        assert row["counts"]["timeouts"] == agent.total()["timeouts"] == times

        hosts.lose("payload", lose=1)  # what was acknowledged in between starts a new series
        exchange(near, far, 500)
        assert agent.total()["timeouts"] == hosts.kernel("TcpExtTCPTimeouts") == times + 1
        assert agent.flow(near)["counts"]["timeouts"] == times + 1


def test_headers_with_options_in_front(hosts: Hosts) -> None:
    """Out of sight of the short way: no look at every packet, and nothing missed."""
    no_operation = b"\x01" * 4
    with hosts.agent() as agent, hosts.agent("far") as other, hosts.listener() as server:
        server.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, no_operation)
        with hosts.socket() as near:
            near.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, no_operation)
            near.settimeout(30)
            near.connect(server.getsockname())
            far, _ = server.accept()
            with far:
                hosts.lose("all", lose=1)
                exchange(near, far, 1000)
                info, row = Info.of(near), agent.flow(near)
                assert causes_of(row) == {"timeout": 1}
                assert row["counts"]["retransmitted_bytes"] == info.retransmitted_bytes == 1000
                exchange(near, far, 50_000)
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                near.close()
                assert agent.total()["resets_sent"] == 1
                assert agent.total()["sent_bytes"] == 51_000
                support.wait_until(lambda: other.total()["resets_received"], 20, "the reset arrives")
                assert agent.troubles() == other.troubles() == {}


def test_everything_after_a_timeout_is_its_work(hosts: Hosts) -> None:
    """A whole window lost: one timeout, many segments retransmitted, none of them fast."""
    with hosts.agent() as agent, hosts.listener() as server, hosts.connected(server) as (near, far):
        hosts.lose("payload", lose=10)
        exchange(near, far, 10 * MSS_BYTES)
        info, row = Info.of(near), agent.flow(near)
        assert info.retransmitted >= 10
        assert causes_of(row) == {"timeout": info.retransmitted}
        assert hosts.kernel("TcpExtTCPFastRetrans") == 0
        assert row["counts"]["timeouts"] == hosts.kernel("TcpExtTCPTimeouts")
        assert row["counts"]["retransmitted_bytes"] == info.retransmitted_bytes


@pytest.mark.guest(thorough=True)
def test_tail_loss_probe(hosts: Hosts) -> None:
    setting(hosts.near, "ipv4/tcp_early_retrans", 3)
    with hosts.agent() as agent, hosts.listener() as server, hosts.connected(server) as (near, far):
        exchange(near, far, 100)
        hosts.lose("payload", skip=4, lose=1)
        exchange(near, far, 5 * 1400)
        info, row = Info.of(near), agent.flow(near)
        probes = hosts.kernel("TcpExtTCPLossProbes")
        if hosts.kernel("TcpExtTCPTimeouts"):
            pytest.skip("the processor was too busy for the probe's timer")
        assert probes == info.retransmitted == 1
        assert causes_of(row) == {"tail_probe": 1}
        assert row["counts"]["retransmitted_bytes"] == info.retransmitted_bytes
        assert row["counts"]["timeouts"] == 0


def test_syn(hosts: Hosts) -> None:
    hosts.lose("syn", lose=1)
    with hosts.agent() as agent, hosts.listener() as server, hosts.connected(server) as (near, _):
        assert hosts.kernel("TcpExtTCPSynRetrans") == 1
        row = agent.flow(near)
        assert causes_of(row) == agent.causes() == {"syn": 1}
        assert row["counts"]["retransmitted_bytes"] == Info.of(near).retransmitted_bytes == 0
        assert row["counts"]["timeouts"] == agent.total()["timeouts"] == hosts.kernel("TcpExtTCPTimeouts") == 1


@pytest.mark.parametrize("callbacks", [True, False], ids=["callbacks", "egress"])
def test_synack(hosts: Hosts, callbacks: bool) -> None:
    """Counted where it is sent from, and not once more with the connection that the request becomes."""
    hosts.lose("syn", lose=1, towards="near")
    with (
        hosts.agent("far", callbacks=callbacks) as agent,
        hosts.listener() as server,
        hosts.connected(server) as (_, far),
    ):
        far.send(b"first packet of the connection")
        again = hosts.kernel("TcpRetransSegs", "far")
        row = agent.flow(far)
        assert again >= 1
        assert causes_of(row) == agent.causes() == {"syn": again}
        assert Info.of(far).retransmitted == again
        timeouts = hosts.kernel("TcpExtTCPTimeouts", "far")
        assert row["counts"]["timeouts"] == agent.total()["timeouts"] == timeouts
        assert agent.counters()["met"] == 1


def test_the_timeout_that_ends_a_connection(hosts: Hosts) -> None:
    with hosts.agent() as agent, hosts.listener() as server, hosts.connected(server) as (near, _):
        near.setsockopt(socket.IPPROTO_TCP, TCP_USER_TIMEOUT, 700)
        hosts.lose("all")
        near.send(bytes(1000))
        with pytest.raises(OSError) as refused:
            near.recv(1)
        assert refused.value.errno == errno.ETIMEDOUT
        timeouts = hosts.kernel("TcpExtTCPTimeouts")
        row = agent.flows()[near.getsockname()[1]]
        assert timeouts >= 2
        assert row["counts"]["timeouts"] == agent.total()["timeouts"] == timeouts
        assert agent.causes() == {"timeout": hosts.kernel("TcpRetransSegs")}
        assert row["flags"] & CLOSED


def test_a_connection_that_never_comes_to_be(hosts: Hosts) -> None:
    setting(hosts.near, "ipv4/tcp_syn_retries", 1)
    with contextlib.suppress(FileNotFoundError):
        setting(hosts.near, "ipv4/tcp_syn_linear_timeouts", 0)
    hosts.lose("syn")
    with hosts.agent() as agent, hosts.listener() as server, hosts.socket() as near:
        with pytest.raises(TimeoutError):
            near.connect(server.getsockname())
        assert hosts.kernel("TcpExtTCPTimeouts") == 2
        assert agent.total()["timeouts"] == 2
        assert agent.causes() == {"syn": 1}
        assert agent.total()["sent_bytes"] == 0


@pytest.mark.guest(thorough=True)
def test_windows_that_close(hosts: Hosts) -> None:
    with hosts.agent() as agent, hosts.listener(SO_RCVBUF=8192) as server, hosts.connected(server) as (near, far):
        near.setblocking(False)

        def closed() -> int:
            return hosts.kernel("TcpExtTCPToZeroWindowAdv", "far")

        for times in range(1, 4):
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(bytes(4096))
            support.wait_until(lambda: closed() >= times, 10, "the window closes")  # noqa: B023
            probes = hosts.kernel("TcpExtTCPWinProbe")
            support.wait_until(lambda: hosts.kernel("TcpExtTCPWinProbe") > probes, 10, "it is asked for")  # noqa: B023
            before = closed()
            far.recv(1 << 20)
            assert closed() == before
        support.wait_until(lambda: agent.total()["zero_windows"] == closed(), 20, "all are counted")
        assert agent.flow(near)["counts"]["zero_windows"] == agent.total()["zero_windows"] >= 3


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_resets_of_a_connection(hosts: Hosts, family: int) -> None:
    """Two agents on one machine: each counts its own host's."""
    with (
        hosts.agent() as agent,
        hosts.agent("far") as other,
        hosts.listener(family) as server,
        hosts.connected(server) as (near, far),
    ):
        port, far_port = near.getsockname()[1], far.getsockname()[1]
        far.send(b"x")
        near.recv(1)
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.close()
        support.wait_until(lambda: other.total()["resets_received"], 20, "the reset arrives")
        assert hosts.kernel("TcpOutRsts") == 1
        assert {name: n for name, n in agent.total().items() if n and "resets" in name} == {"resets_sent": 1}
        assert {name: n for name, n in other.total().items() if n and "resets" in name} == {"resets_received": 1}
        assert agent.flows()[port]["counts"]["resets_sent"] == 1
        assert other.flows()[far_port]["counts"]["resets_received"] == 1
        assert other.flows()[far_port]["flags"] & CLOSED
        assert agent.counters()["met"] == other.counters()["met"] == 1


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_a_connection_that_is_refused(hosts: Hosts, family: int) -> None:
    with hosts.listener(family) as server:
        place = server.getsockname()[:2]
    with (
        hosts.agent() as agent,
        hosts.agent("far") as other,
        hosts.socket((socket.AF_INET, socket.AF_INET6)[family]) as near,
    ):
        with pytest.raises(ConnectionRefusedError):
            near.connect(place)
        assert hosts.kernel("TcpOutRsts", "far") == 1
        assert {name: n for name, n in other.total().items() if n} == {"resets_refused": 1}
        assert other.flows() == {}
        (row,) = agent.flows().values()
        assert row["counts"]["resets_received"] == agent.total()["resets_received"] == 1
        assert agent.total()["resets_sent"] == 0


@pytest.mark.parametrize("family", [0, 1], ids=["ipv4", "ipv6"])
def test_a_short_connection_is_looked_at_once_it_ends(hosts: Hosts, family: int) -> None:
    """Both ends, each by an agent of its own: what the kernel counted of the whole namespace."""
    with hosts.agent(refresh_ns=NEVER_NS) as agent, hosts.agent("far", refresh_ns=NEVER_NS) as other:
        with hosts.listener(family) as server, hosts.connected(server) as (near, far):
            near.sendall(bytes(900))
            far.recv(900, socket.MSG_WAITALL)
            far.sendall(bytes(300))
            near.recv(300, socket.MSG_WAITALL)
            port, far_port = near.getsockname()[1], far.getsockname()[1]
            assert agent.flows() == other.flows() == {}
            near.shutdown(socket.SHUT_WR)
            assert far.recv(1) == b""
        gone(hosts, port)
        for each, mine, sent, received in ((agent, port, 900, 300), (other, far_port, 300, 900)):
            support.wait_until(lambda: each.total()["sent_bytes"], 20, "it has ended")  # noqa: B023
            row, total = each.flows()[mine], each.total()
            assert row["counts"]["sent_bytes"] == total["sent_bytes"] == sent
            assert row["counts"]["received_bytes"] == total["received_bytes"]
            assert total["received_bytes"] in (received, received + 1), "a FIN counts, as the kernel has it"
            assert each.paths() == total
            assert row["cookie"] != 0
            assert row["cgroup"] != 0
            assert row["state"] == 7
            assert row["flags"] == (CALLED | ACTIVE | FIN_SENT | CLOSED if mine == port else CALLED | FIN_SENT | CLOSED)
            assert 0 < row["first_ns"] < row["last_ns"]
            assert row["congestion_ns"].tolist() == [row["last_ns"] - row["first_ns"], 0, 0, 0, 0]
            assert each.counters()["met"] == each.counters()["flows_created"] == 1
            assert each.troubles() == {}


def test_a_loss_before_there_is_a_row(hosts: Hosts) -> None:
    """Its state was followed from the beginning."""
    with hosts.agent(refresh_ns=NEVER_NS) as agent, hosts.listener() as server, hosts.connected(server) as (near, far):
        hosts.lose("payload", lose=1)
        exchange(near, far, 5 * MSS_BYTES)
        assert agent.causes() == causes_of(agent.flow(near)) == {"fast": 1}
        assert agent.troubles() == {}


@pytest.mark.parametrize("how", ["segments", "time", "loss"])
def test_a_connection_gets_its_row(hosts: Hosts, how: str) -> None:
    """With its eighth segment, with the first one after the time of a refresh, or with one that is retransmitted."""
    refresh_ns = 1_000_000 if how == "time" else NEVER_NS
    with hosts.agent(refresh_ns=refresh_ns) as agent, hosts.listener() as server, hosts.connected(server) as ends:
        if how == "segments":
            for sent in range(3, YOUNG):  # the handshake has had two
                assert agent.flows() == {}, sent
                exchange(*ends, 1)
            exchange(*ends, 1)
            assert agent.flow(ends[0])["counts"]["segments_out"] == YOUNG
        elif how == "time":
            support.wait_until(lambda: exchange(*ends, 1) or agent.flows(), 10, "there is a row")
        else:
            hosts.lose("payload", lose=1)
            exchange(*ends, 500)
            assert causes_of(agent.flow(ends[0])) == agent.causes() == {"timeout": 1}
            assert agent.flow(ends[0])["counts"]["retransmitted_bytes"] == 500


def test_rows_that_make_room(hosts: Hosts) -> None:
    """Many short connections through a small map: totals exact, evictions as counted."""
    connections, size = 300, 700
    with hosts.agent(SWERVE_TCP_FLOWS=64) as agent, hosts.listener() as server:
        for _ in range(connections):
            with hosts.connected(server) as (near, far):
                near.send(bytes(size))
                far.recv(size, socket.MSG_WAITALL)
                port = near.getsockname()[1]
        gone(hosts, port)
        counters, total = agent.counters(), agent.total()
        support.wait_until(lambda: agent.total()["sent_bytes"] >= connections * size, 20, "all have ended")
        present = len(agent.flows())
        assert counters["met"] == connections
        assert 0 < present <= 64
        assert counters["flows_created"] - counters["flows_replaced"] - present >= connections - 64
        assert total["sent_bytes"] == connections * size
        assert agent.paths() == total
        assert agent.troubles() == {}


def test_a_map_of_paths_that_is_full(hosts: Hosts) -> None:
    with hosts.agent(SWERVE_TCP_PATHS=1) as agent, hosts.listener(0) as server, hosts.listener(1) as server6:
        for each in (server, server6):
            with hosts.connected(each) as (near, far):
                exchange(near, far, 1000)
        assert agent.total()["sent_bytes"] == 2000
        assert agent.paths()["sent_bytes"] == 1000
        assert agent.counters()["paths_full"] > 0


def test_a_map_of_interfaces_that_is_full(hosts: Hosts) -> None:
    """The row of interface 0 was there first; it stands for all that find no place."""
    with hosts.agent(SWERVE_TCP_INTERFACES=1) as agent, hosts.listener() as server, hosts.connected(server) as ends:
        exchange(*ends, 1000)
        port = ends[0].getsockname()[1]
        for end in ends:
            end.close()
        gone(hosts, port)
        assert agent.total()["sent_bytes"] == 1000
        assert set(agent.troubles()) == {"interfaces_full"}


@pytest.mark.parametrize("callbacks", [pytest.param(True, marks=pytest.mark.guest), False], ids=["callbacks", "egress"])
def test_a_connection_older_than_the_program(hosts: Hosts, callbacks: bool) -> None:
    with hosts.listener() as server, hosts.connected(server) as (near, far):
        hosts.lose("payload", lose=1)
        exchange(near, far, 1000)
        hosts.lose("payload", skip=2, lose=1)
        exchange(near, far, 14_000)
        before, timeouts = Info.of(near), hosts.kernel("TcpExtTCPTimeouts")
        assert before.retransmitted == 2
        with hosts.agent(callbacks=callbacks, older=True) as agent:
            hosts.lose("payload", lose=2)
            exchange(near, far, 900)
            hosts.lose("payload", skip=2, lose=1)
            exchange(near, far, 14_000)
            info, row = Info.of(near), agent.flow(near)
            assert info.retransmitted == before.retransmitted + 3
            assert causes_of(row) == agent.causes() == {"timeout": 2, "fast": 1}
            assert row["flags"] == OLDER
            assert row["counts"]["retransmitted_bytes"] == info.retransmitted_bytes - before.retransmitted_bytes
            assert row["counts"]["timeouts"] == agent.total()["timeouts"] == 2
            assert hosts.kernel("TcpExtTCPTimeouts") == timeouts + 2
            assert agent.loaded.map("tcp_accounted").read()[0].size <= 1, "the far end is in another namespace"


def test_an_older_connection_in_the_middle_of_its_timeouts(hosts: Hosts) -> None:
    with hosts.listener() as server, hosts.connected(server) as (near, far):

        def kernel() -> NDArray[np.int64]:
            return np.array([Info.of(near).retransmitted, hosts.kernel("TcpExtTCPTimeouts")])

        hosts.lose("payload")
        near.send(bytes(1000))
        support.wait_until(lambda: kernel()[1] >= 2, 10, "it times out twice")
        before = kernel()
        with hosts.agent(older=True) as agent:
            begun = kernel()  # one may have come while it started
            support.wait_until(lambda: kernel()[1] > begun[1], 20, "it times out again")
            hosts.lose("nothing")
            acknowledged(near)
            row = agent.flow(near)
            assert far.recv(1000) == bytes(1000)
            counted = np.array([causes_of(row)["timeout"], row["counts"]["timeouts"]])
            assert (kernel() - begun <= counted).all() and (counted <= kernel() - before).all()
            assert set(causes_of(row)) == {"timeout"}


def test_a_socket_that_connects_anew_starts_anew(hosts: Hosts) -> None:
    with hosts.agent() as agent, hosts.listener() as server, hosts.connected(server) as (near, far):
        hosts.lose("payload", lose=2)
        exchange(near, far, 1000)
        unspecified = struct.pack("=H14x", socket.AF_UNSPEC)
        disconnect(near, unspecified)
        near.connect(server.getsockname())
        again, _ = server.accept()
        with again:
            hosts.lose("payload", lose=1)
            exchange(near, again, 800)
            row = agent.flow(near)
            assert causes_of(row) == {"timeout": 1}
            assert row["counts"]["sent_bytes"] + 0 <= 800
            assert agent.causes() == {"timeout": 3}
            assert agent.total()["timeouts"] == hosts.kernel("TcpExtTCPTimeouts") == 3
            assert agent.counters()["met"] == 2


def disconnect(sock: socket.socket, address: bytes) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.connect(sock.fileno(), address, len(address)) == 0, os.strerror(ctypes.get_errno())


def test_a_key_that_is_taken_over(hosts: Hosts) -> None:
    with hosts.agent() as agent, hosts.listener() as server:
        for size in (1000, 500):
            with hosts.socket() as near:
                near.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                near.bind((NEAR[0], 40_000))
                near.connect(server.getsockname())
                far, _ = server.accept()
                with far:
                    near.send(bytes(size))
                    far.recv(size, socket.MSG_WAITALL)
                    near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    near.close()
        row = agent.flows()[40_000]
        assert row["counts"]["sent_bytes"] == 500
        assert agent.total()["sent_bytes"] == 1500
        assert {name: n for name, n in agent.counters().items() if n} == {
            "flows_created": 2,
            "flows_replaced": 1,
            "met": 2,
        }


def test_needless_retransmissions(hosts: Hosts) -> None:
    """Only acknowledgements are lost: what is retransmitted was there already, and the peer says so."""
    with hosts.agent() as agent, hosts.listener() as server, hosts.connected(server) as (near, far):
        hosts.lose("bare", lose=2, towards="near")
        exchange(near, far, 1000)
        near.send(b"x")
        acknowledged(near)
        near.send(b"y")
        acknowledged(near)
        info = Info.of(near)
        assert info.spurious >= 1
        near.close()
        far.close()
        assert agent.total()["spurious"] == info.spurious == hosts.kernel("TcpExtTCPDSACKRecv")


def test_times_in_congestion_states(hosts: Hosts) -> None:
    with hosts.agent() as agent, hosts.listener() as server, hosts.connected(server) as (near, far):
        hosts.lose("payload", lose=2)
        exchange(near, far, 1000)

        def shown() -> bool:
            before = Info.of(near).congestion
            near.send(b".")
            acknowledged(near)
            return bool(agent.flow(near)["congestion"] == before == 0)

        support.wait_until(shown, 10, "the kernel and the row both say Open")
        row = agent.flow(near)
        spent = row["congestion_ns"].tolist()
        assert spent[4] > 0.15 * SECOND, "from the first timeout until the acknowledgement"
        assert sum(spent) == int(row["last_ns"] - row["first_ns"])


def test_sockets_of_other_namespaces_are_left_alone(hosts: Hosts) -> None:
    """Socket operations are called for the whole machine; here our own namespace is made a foreign one."""
    with hosts.agent() as agent, hosts.listener() as server:
        agent.loaded.map("tcp_settings").update(0, (1 << 60, REFRESH_NS, 0))
        with hosts.connected(server) as (near, far):
            exchange(near, far, 1000)
            assert agent.flow(near)["flags"] == ACTIVE


def test_without_the_tracepoint_causes_are_unknown(hosts: Hosts) -> None:
    with hosts.agent(causes=False) as agent, hosts.listener() as server, hosts.connected(server) as (near, far):
        assert agent.loaded.tracepoints == {}
        hosts.lose("payload", skip=2, lose=2)
        exchange(near, far, 14_000)
        assert agent.causes() == {"unknown": 2}
        hosts.lose("payload", lose=1)  # of this one the callback tells
        exchange(near, far, 1000)
        assert agent.causes() == {"unknown": 2, "timeout": 1}
        assert agent.flow(near)["congestion"] == 0xFF


@pytest.mark.parametrize("offload", ["on", "off"])
def test_twenty_transfers_equal_ss(hosts: Hosts, offload: str) -> None:
    """Losses of all kinds at once: every connection's segments and bytes, and the causes of all together."""
    setting(hosts.near, "ipv4/tcp_early_retrans", 3)
    for word in ("tso", "gso"):
        support.run(["ip", "netns", "exec", hosts.near, "ethtool", "-K", "v0", word, offload])
    kit.causes_agree(lambda: twenty_transfers(hosts))


def twenty_transfers(hosts: Hosts) -> tuple[object, object]:
    """Compare all but the causes: these are returned."""
    names = ("TcpRetransSegs", "TcpExtTCPFastRetrans", "TcpExtTCPTimeouts")
    before = {name: hosts.kernel(name) for name in names}
    with hosts.agent() as agent, contextlib.ExitStack() as stack:
        servers = [stack.enter_context(hosts.listener(family)) for family in (0, 1)]
        # Rows go by port here, and the kernel may give one to a connection of each address family.
        ends = [stack.enter_context(hosts.connected(servers[n % 2], 40_000 + n)) for n in range(20)]
        hosts.lose("payload", skip=5, lose=1, every=17)
        for near, far in ends:
            exchange(near, far, 150_000)
        hosts.lose("nothing")
        kernel = {port: (each.segments, each.bytes) for port, each in kit.ss_counts(hosts.near).items()}
        ours = {
            port: (sum(causes_of(row).values()), int(row["counts"]["retransmitted_bytes"]))
            for port, row in agent.flows().items()
        }
        assert sum(segments for segments, _ in kernel.values()) > 20
        assert ours == {port: kernel[port] for port in ours}
        assert len(ours) == 20
        total = agent.total()
        grown = {name: hosts.kernel(name) - before[name] for name in names}
        assert total["segments"] == grown["TcpRetransSegs"]
        assert total["timeouts"] == grown["TcpExtTCPTimeouts"]
        assert total["unknown"] == total["syn"] == 0
        for near, _ in ends:
            timeouts = Info.of(near).timeouts
            assert timeouts in (None, int(agent.flow(near)["counts"]["timeouts"]))
        assert agent.troubles().keys() <= {"congestion_missed"}
        return total["fast"], grown["TcpExtTCPFastRetrans"]
