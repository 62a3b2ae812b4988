"""Retransmissions counted against the kernel's own figures, over links that really lose segments.

Host 1 of a lab sends to host 2; the queues of the rails are short, so a TCP flow that fills them loses segments.
"""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import support

from pytools.bus import Bus, Subscription
from pytools.config import AgentConfig
from pytools.kernel.attach import attach_tc
from pytools.kernel.loader import Loaded, load
from pytools.kernel.netlink import Member, Netlink
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.lab.topology import group_id
from pytools.signals import Path, TcpFlow, TcpPath
from pytools.sources.programs import TCP_ENTRY, TCP_FLOWS, retransmissions
from pytools.sources.tcp import TcpSource

RECEIVER, RECEIVER6 = "10.9.0.2", "fd00:9::2"
RAILS = ("rail1", "rail2")
MEGABYTE = 1_000_000


@pytest.fixture
def lossy(unique_name: Callable[[], str]) -> Iterator[Lab]:
    """Two hosts, two rails; queues shorter than a burst, so that a flow that fills a rail loses some."""
    support.require("nstat", "ss", "bcc")
    rate = "400mbit" if support.slow_factor() == 1 else "50mbit"
    with Lab.up(unique_name(), hosts=2, rails=2, rate=rate, queue_bytes=40_000) as lab:
        yield lab


def route_over(lab: Lab, rail: int) -> None:
    """Have the sender send over this rail from now on."""
    interface = lab.hosts[0].interfaces[rail - 1]
    with Netlink(sender(lab)) as netlink:
        for family, nexthop in ((4, interface.nexthop_id), (6, interface.nexthop6_id)):
            netlink.replace_group(group_id(2, family), [Member(nexthop, weight=1)])


def sender(lab: Lab) -> str:
    return lab.hosts[0].netns


def receiver(lab: Lab) -> str:
    return lab.hosts[1].netns


def lose(lab: Lab, source: int, destination: int) -> None:
    """Drop silently, on both rails, what this host sends to that one."""
    for rail in (1, 2):
        lab.blackhole(rail, (source, destination))


def path_of(remote: str, interface: str) -> Path | None:
    """The IPv4 service address of the receiver is measured on rail 1; nothing else is."""
    return Path("h1", "h2", remote, "", interface) if (remote, interface) == (RECEIVER, "rail1") else None


@dataclass(frozen=True)
class Counting:
    """The source at work."""

    loaded: Loaded
    source: TcpSource
    subscription: Subscription

    def of_flows(self) -> int:
        return int(self.loaded.map("tcp_flows").read()[1]["retransmitted_segments"].sum())

    def by_interface(self) -> dict[str, int]:
        """Called inside the namespace that is watched."""
        keys, values = self.loaded.map("tcp_interfaces").read()
        return {
            socket.if_indextoname(key): int(value["retransmitted_segments"])
            for key, value in zip(keys.tolist(), values, strict=True)
        }

    def all_exact(self, kernel: int) -> bool:
        """Flows, interfaces and the per-CPU counters all agree with the kernel."""
        counters = self.loaded.map("tcp_counters").read_percpu_sum()
        return {self.of_flows(), sum(self.by_interface().values()), int(counters[0])} == {kernel}


@contextlib.contextmanager
def counting(namespace: str, flows: int = TCP_FLOWS) -> Iterator[Counting]:
    """Count in a namespace, on both rails; the calling thread is inside it meanwhile."""
    with contextlib.ExitStack() as stack:
        loaded = stack.enter_context(load([retransmissions(flows)]))
        assert not loaded.failed
        stack.enter_context(inside(namespace))
        netlink = stack.enter_context(Netlink())
        bus = Bus()
        subscription = bus.subscribe(frozenset({"tcp_flow", "tcp_path"}), 10_000)
        config = AgentConfig(host="h1", peers=[])
        source = TcpSource(config, loaded, netlink, bus, path_of)
        stack.callback(source.close)
        source.register(stack.enter_context(selectors.DefaultSelector()))
        for interface in RAILS:
            stack.enter_context(attach_tc(loaded.programs[TCP_ENTRY], interface, "egress"))
        yield Counting(loaded, source, subscription)


def kernel_count(namespace: str) -> int:
    """Segments that the kernel says it has retransmitted in a namespace."""
    nstat = ["ip", "netns", "exec", namespace, "nstat", "-asz", "--json", "TcpRetransSegs"]
    return int(json.loads(support.run(nstat).stdout)["kernel"]["TcpRetransSegs"])


def ss_counts(namespace: str) -> dict[int, int]:
    """By local port, segments that `ss -ti` says each connection has retransmitted."""
    text = support.run(["ss", "-N", namespace, "-OHtin", "state", "established"]).stdout
    found = {}
    for line in text.splitlines():
        port = re.search(r"^\s*\d+\s+\d+\s+\S+:(\d+)\s", line)
        total = re.search(r"\bretrans:\d+/(\d+)", line)
        assert port is not None, line
        found[int(port.group(1))] = int(total.group(1)) if total else 0
    return found


@contextlib.contextmanager
def iperf3_server(namespace: str) -> Iterator[None]:
    server = subprocess.Popen(
        ["ip", "netns", "exec", namespace, "iperf3", "-s", "--forceflush"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        assert server.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(server.stdout, selectors.EVENT_READ)
            said = b""
            while b"Server listening" not in said:
                assert selector.select(10 * support.slow_factor()), f"iperf3 does not start: {said!r}"
                part = server.stdout.read1(4096)
                assert part, f"iperf3 ended: {said!r}"
                said += part
        yield
    finally:
        server.kill()
        server.communicate()


def settled(namespace: str) -> bool:
    """No connection of the namespace is there any more, so nothing can be retransmitted."""
    listed = support.run(["ss", "-N", namespace, "-Htan"]).stdout.splitlines()
    return not any(line.split()[0] not in ("LISTEN", "TIME-WAIT") for line in listed)


@contextlib.contextmanager
def listener(lab: Lab, address: str = RECEIVER) -> Iterator[socket.socket]:
    with inside(receiver(lab)):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family)
    with server:
        yield server


@contextlib.contextmanager
def connected(lab: Lab, server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from the sender to the listener: both its ends."""
    with inside(sender(lab)):
        near = socket.create_connection(server.getsockname()[:2], timeout=20)
    with near:
        far, _ = server.accept()
        with far:
            yield near, far


def transfer(near: socket.socket, far: socket.socket, size: int) -> None:
    """Send so many bytes and receive them all, in one thread."""
    chunk = memoryview(bytes(1 << 16))
    near.setblocking(False)
    far.setblocking(False)
    sent = received = 0
    with selectors.DefaultSelector() as selector:
        selector.register(near, selectors.EVENT_WRITE)
        selector.register(far, selectors.EVENT_READ)
        while received < size:
            ready = selector.select(30 * support.slow_factor())
            assert ready, f"stuck after {received} of {size} bytes"
            for key, _ in ready:
                if key.fileobj is far:
                    received += len(far.recv(1 << 20))
                    continue
                sent += near.send(chunk[: size - sent])
                if sent == size:
                    selector.unregister(near)
    near.setblocking(True)
    far.setblocking(True)


def transfer_with_loss(lab: Lab, near: socket.socket, far: socket.socket) -> None:
    """Send until something was retransmitted and everything is acknowledged."""
    before = kernel_count(sender(lab))
    for _ in range(50):
        transfer(near, far, 4 * MEGABYTE)
        if kernel_count(sender(lab)) > before:
            break
    else:
        pytest.fail("nothing was lost: the test shows nothing")
    support.wait_until(lambda: all_acknowledged(sender(lab)), 20, "all is acknowledged")


def all_acknowledged(namespace: str) -> bool:
    """No connection of the namespace has anything unacknowledged, so its counts stand still."""
    listed = support.run(["ss", "-N", namespace, "-Htn", "state", "established"]).stdout
    return all(line.split()[1] == "0" for line in listed.splitlines())


@pytest.mark.parametrize("offload", ["on", "off"])
@pytest.mark.parametrize(
    ("target", "options"),
    [
        (RECEIVER, ("-n", "100M")),
        (RECEIVER, ("-n", "100M", "-P", "4")),
        (RECEIVER, ("-n", "100M", "-l", "1400")),
        (RECEIVER6, ("-n", "100M")),
    ],
    ids=["one", "four", "small", "ipv6"],
)
def test_segments_equal_nstat(lossy: Lab, offload: str, target: str, options: tuple[str, ...]) -> None:
    support.require("iperf3", "ethtool")
    offloads = ["tso", offload, "gso", offload]
    for interface in RAILS:
        support.run(["ip", "netns", "exec", sender(lossy), "ethtool", "-K", interface, *offloads])
    with iperf3_server(receiver(lossy)), counting(sender(lossy)) as counts:
        before = kernel_count(sender(lossy))
        support.run(["ip", "netns", "exec", sender(lossy), "iperf3", "-c", target, *options], timeout_s=120)
        support.wait_until(lambda: settled(sender(lossy)), 30, "the connections are closed")
        kernel = kernel_count(sender(lossy)) - before
        assert kernel > 0, "nothing was lost: the test shows nothing"
        assert counts.all_exact(kernel)
        assert not any(counts.source.drops().values())


@pytest.mark.parametrize("address", [RECEIVER, RECEIVER6], ids=["ipv4", "ipv6"])
def test_every_flow_equals_ss(lossy: Lab, address: str) -> None:
    with (
        counting(sender(lossy)) as counts,
        listener(lossy, address) as server,
        connected(lossy, server) as first,
        connected(lossy, server) as second,
    ):
        transfer(*first, 60 * MEGABYTE)
        transfer(*second, 40 * MEGABYTE)
        transfer_with_loss(lossy, *first)
        keys, rows = counts.loaded.map("tcp_flows").read()
        ours = dict(zip(keys["local_port"].tolist(), rows["retransmitted_segments"].tolist(), strict=True))
        kernel = ss_counts(sender(lossy))
        assert ours == {port: segments for port, segments in kernel.items() if segments}

        counts.source.read(time.monotonic_ns())
        flows = [signal for signal in counts.subscription.read() if isinstance(signal, TcpFlow)]
        assert {flow.local_port: flow.retransmitted_segments for flow in flows} == ours
        assert {(flow.remote, flow.remote_port) for flow in flows} == {(address, server.getsockname()[1])}
        assert {flow.local for flow in flows} == {address[:-1] + "1"}


def test_a_flow_that_moves_has_a_row_per_interface(lossy: Lab) -> None:
    with counting(sender(lossy)) as counts, listener(lossy) as server, connected(lossy, server) as ends:
        before = kernel_count(sender(lossy))
        route_over(lossy, 1)
        transfer_with_loss(lossy, *ends)
        assert counts.by_interface() == {"rail1": kernel_count(sender(lossy)) - before}
        route_over(lossy, 2)
        transfer_with_loss(lossy, *ends)
        kernel = kernel_count(sender(lossy)) - before
        assert counts.all_exact(kernel)
        by_interface = counts.by_interface()
        assert by_interface["rail1"] > 0
        assert by_interface["rail2"] > 0
        assert by_interface["rail1"] + by_interface["rail2"] == kernel

        counts.source.read(time.monotonic_ns())
        paths = [signal for signal in counts.subscription.read() if isinstance(signal, TcpPath)]
        totals = {(signal.interface, signal.path): signal.total_segments for signal in paths}
        measured = path_of(RECEIVER, "rail1")
        assert totals["rail1", measured] == by_interface["rail1"]
        assert totals["rail2", None] == by_interface["rail2"]
        assert sum(totals.values()) == kernel


@pytest.mark.guest
def test_what_precedes_the_source_is_not_counted(lossy: Lab) -> None:
    with listener(lossy) as server, connected(lossy, server) as ends:
        transfer_with_loss(lossy, *ends)
        earlier = kernel_count(sender(lossy))
        with counting(sender(lossy)) as counts:
            transfer_with_loss(lossy, *ends)
            assert counts.all_exact(kernel_count(sender(lossy)) - earlier)


def test_syn_retransmissions(lossy: Lab) -> None:
    lose(lossy, 1, 2)
    with counting(sender(lossy)) as counts, listener(lossy) as server:
        before = kernel_count(sender(lossy))
        with socket.socket() as near:
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                near.connect(server.getsockname())
            support.wait_until(lambda: kernel_count(sender(lossy)) - before >= 2, 20, "two more SYNs are sent")
        assert counts.all_exact(kernel_count(sender(lossy)) - before)


def test_fin_retransmissions(lossy: Lab) -> None:
    with counting(sender(lossy)) as counts, listener(lossy) as server:
        before = kernel_count(sender(lossy))
        with connected(lossy, server):
            lose(lossy, 1, 2)
        support.wait_until(lambda: kernel_count(sender(lossy)) - before >= 2, 20, "two more FINs are sent")
        lossy.heal()
        support.wait_until(lambda: settled(sender(lossy)), 30, "the connection is closed")
        assert counts.all_exact(kernel_count(sender(lossy)) - before)


@pytest.mark.parametrize(
    "completes", [pytest.param(True, marks=pytest.mark.guest), False], ids=["completes", "half_open"]
)
def test_synack_retransmissions(lossy: Lab, completes: bool) -> None:
    lose(lossy, 2, 1)
    with counting(receiver(lossy)) as counts, listener(lossy) as server:
        before = kernel_count(receiver(lossy))
        with inside(sender(lossy)):
            near = socket.socket()
        with near:
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                near.connect(server.getsockname())
            support.wait_until(lambda: kernel_count(receiver(lossy)) - before >= 2, 20, "two more SYN-ACKs are sent")
            if not completes:
                server.close()  # its requests go with it
                assert counts.all_exact(kernel_count(receiver(lossy)) - before)
                return
            lossy.heal()
            far, _ = server.accept()
        with far:
            far.settimeout(20)
            far.sendall(b"first packet of the new socket: its total holds the SYN-ACKs")
        support.wait_until(lambda: settled(receiver(lossy)), 30, "the connection is closed")
        assert counts.all_exact(kernel_count(receiver(lossy)) - before)


def test_a_half_open_request_that_precedes_the_source(lossy: Lab) -> None:
    lose(lossy, 2, 1)
    with listener(lossy) as server:
        with inside(sender(lossy)):
            near = socket.socket()
        with near:
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                near.connect(server.getsockname())
            support.wait_until(lambda: kernel_count(receiver(lossy)) >= 1, 20, "a SYN-ACK is sent again")
            with counting(receiver(lossy)) as counts:
                before = kernel_count(receiver(lossy))
                support.wait_until(lambda: kernel_count(receiver(lossy)) > before, 20, "another one is sent")
                lossy.heal()
                far, _ = server.accept()
                with far:
                    far.sendall(b"x")
                near.close()
                support.wait_until(lambda: settled(receiver(lossy)), 30, "the connection is closed")
                kernel = kernel_count(receiver(lossy)) - before
                assert kernel > 0
                assert counts.all_exact(kernel)


def test_totals_stay_exact_when_the_flow_map_is_full(lossy: Lab) -> None:
    with (
        counting(sender(lossy), flows=1) as counts,
        listener(lossy) as server,
        connected(lossy, server) as first,
        connected(lossy, server) as second,
    ):
        before = kernel_count(sender(lossy))
        route_over(lossy, 1)
        transfer_with_loss(lossy, *first)
        transfer_with_loss(lossy, *second)
        kernel = kernel_count(sender(lossy)) - before
        full = counts.source.drops()["tcp_flows_full"]
        assert 0 < full < kernel
        assert counts.by_interface() == {"rail1": kernel}
        assert counts.of_flows() + full == kernel
        counts.source.read(time.monotonic_ns())
        paths = [signal for signal in counts.subscription.read() if isinstance(signal, TcpPath)]
        totals = {signal.path: signal.total_segments for signal in paths}
        assert totals[None] == full
        assert sum(totals.values()) == kernel
