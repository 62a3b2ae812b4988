"""Retransmissions counted against the kernel's own figures, over links that really lose segments.

Two hosts joined by two rails; each rail is a forwarding namespace with a token bucket and a queue of few packets
toward either host, so that a TCP flow that fills it loses some.
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
from pytools.kernel.netlink import Netlink
from pytools.kernel.netns import inside
from pytools.signals import Path, TcpFlow, TcpPath
from pytools.sources.tcp import ENTRY, FLOWS, TcpSource, program

RECEIVER, RECEIVER6 = "10.9.0.2", "fd00:9::2"
RAILS = ("rail1", "rail2")
MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Fabric:
    """The names of the namespaces."""

    sender: str
    receiver: str
    rails: tuple[str, str]

    def lose(self, host: int) -> None:
        """Have rail 1 drop silently what it should carry to a host (IPv4)."""
        support.run(["ip", "-n", self.rails[0], "route", "replace", "blackhole", f"10.9.0.{host}"])

    def heal(self, host: int) -> None:
        route = [f"10.9.0.{host}", "via", f"10.1.{host}.2"]
        support.run(["ip", "-n", self.rails[0], "route", "replace", *route])


def _veth(host: str, interface: str, forwarder: str, device: str, network: str, network6: str) -> None:
    """Join a host and a forwarder: the host is .2, the forwarder .1."""
    support.run(
        ["ip", "-n", host, "link", "add", interface, "type", "veth", "peer", "name", device, "netns", forwarder]
    )
    for namespace, name, last in ((host, interface, 2), (forwarder, device, 1)):
        support.run(["ip", "-n", namespace, "address", "add", f"{network}.{last}/24", "dev", name])
        support.run(["ip", "-n", namespace, "address", "add", f"{network6}::{last}/64", "dev", name, "nodad"])
        support.run(["ip", "-n", namespace, "link", "set", name, "up"])


@pytest.fixture
def lossy(make_namespace: Callable[[], str]) -> Fabric:
    """Hosts 10.9.0.{1,2} and fd00:9::{1,2}: routed over rail 1; either rail can carry them."""
    support.require("iperf3", "nstat", "ss", "tc", "bcc")
    hosts = (make_namespace(), make_namespace())
    rails = (make_namespace(), make_namespace())
    for host, name in enumerate(hosts, start=1):
        for service in (f"10.9.0.{host}/32", f"fd00:9::{host}/128"):
            support.run(["ip", "-n", name, "address", "add", service, "dev", "lo"])
    for rail, forwarder in enumerate(rails, start=1):
        inside_it = ["ip", "netns", "exec", forwarder]
        support.run([*inside_it, "sysctl", "-q", "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1"])
        for host, name in enumerate(hosts, start=1):
            _veth(name, f"rail{rail}", forwarder, f"h{host}", f"10.{rail}.{host}", f"fd00:{rail}:{host}")
            bucket = ["root", "tbf", "rate", "600mbit", "burst", "64k", "limit", "90k"]
            support.run(["tc", "-n", forwarder, "qdisc", "add", "dev", f"h{host}", *bucket])
            for address, via in (
                (f"10.9.0.{host}", f"10.{rail}.{host}.2"),
                (f"fd00:9::{host}", f"fd00:{rail}:{host}::2"),
            ):
                support.run(["ip", "-n", forwarder, "route", "add", address, "via", via])
    fabric = Fabric(hosts[0], hosts[1], (rails[0], rails[1]))
    route_over(fabric, 1)
    return fabric


def route_over(fabric: Fabric, rail: int) -> None:
    """Have both hosts send over this rail from now on."""
    for host, name in ((1, fabric.sender), (2, fabric.receiver)):
        for service, via in (("10.9.0.{}", f"10.{rail}.{host}.1"), ("fd00:9::{}", f"fd00:{rail}:{host}::1")):
            route = [service.format(3 - host), "via", via, "src", service.format(host)]
            support.run(["ip", "-n", name, "route", "replace", *route])


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
def counting(namespace: str, flows: int = FLOWS) -> Iterator[Counting]:
    """Count in a namespace, on both rails; the calling thread is inside it meanwhile."""
    with contextlib.ExitStack() as stack:
        loaded = stack.enter_context(load([program(flows)]))
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
            stack.enter_context(attach_tc(loaded.programs[ENTRY], interface, "egress"))
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
def listener(fabric: Fabric, address: str = RECEIVER) -> Iterator[socket.socket]:
    with inside(fabric.receiver):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family)
    with server:
        yield server


@contextlib.contextmanager
def connected(fabric: Fabric, server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A connection from the sender to the listener: both its ends."""
    with inside(fabric.sender):
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


def transfer_with_loss(fabric: Fabric, near: socket.socket, far: socket.socket) -> None:
    """Send until something was retransmitted and everything is acknowledged."""
    before = kernel_count(fabric.sender)
    for _ in range(20):
        transfer(near, far, 20 * MEGABYTE)
        if kernel_count(fabric.sender) > before:
            break
    else:
        pytest.fail("nothing was lost: the test shows nothing")
    support.wait_until(lambda: all_acknowledged(fabric.sender), 20, "all is acknowledged")


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
def test_segments_equal_nstat(lossy: Fabric, offload: str, target: str, options: tuple[str, ...]) -> None:
    support.require("ethtool")
    offloads = ["tso", offload, "gso", offload]
    support.run(["ip", "netns", "exec", lossy.sender, "ethtool", "-K", "rail1", *offloads])
    with iperf3_server(lossy.receiver), counting(lossy.sender) as counts:
        before = kernel_count(lossy.sender)
        support.run(["ip", "netns", "exec", lossy.sender, "iperf3", "-c", target, *options], timeout_s=120)
        support.wait_until(lambda: settled(lossy.sender), 30, "the connections are closed")
        kernel = kernel_count(lossy.sender) - before
        assert kernel > 0, "nothing was lost: the test shows nothing"
        assert counts.all_exact(kernel)
        assert counts.by_interface() == {"rail1": kernel}
        assert not any(counts.source.drops().values())


@pytest.mark.parametrize("address", [RECEIVER, RECEIVER6], ids=["ipv4", "ipv6"])
def test_every_flow_equals_ss(lossy: Fabric, address: str) -> None:
    with (
        counting(lossy.sender) as counts,
        listener(lossy, address) as server,
        connected(lossy, server) as first,
        connected(lossy, server) as second,
    ):
        transfer(*first, 60 * MEGABYTE)
        transfer(*second, 40 * MEGABYTE)
        transfer_with_loss(lossy, *first)
        keys, rows = counts.loaded.map("tcp_flows").read()
        ours = dict(zip(keys["local_port"].tolist(), rows["retransmitted_segments"].tolist(), strict=True))
        kernel = ss_counts(lossy.sender)
        assert ours == {port: segments for port, segments in kernel.items() if segments}

        counts.source.read(time.monotonic_ns())
        flows = [signal for signal in counts.subscription.read() if isinstance(signal, TcpFlow)]
        assert {flow.local_port: flow.retransmitted_segments for flow in flows} == ours
        assert {(flow.remote, flow.remote_port) for flow in flows} == {(address, server.getsockname()[1])}
        assert {flow.local for flow in flows} == {address[:-1] + "1"}


def test_a_flow_that_moves_has_a_row_per_interface(lossy: Fabric) -> None:
    with counting(lossy.sender) as counts, listener(lossy) as server, connected(lossy, server) as ends:
        before = kernel_count(lossy.sender)
        transfer_with_loss(lossy, *ends)
        assert counts.by_interface() == {"rail1": kernel_count(lossy.sender) - before}
        route_over(lossy, 2)
        transfer_with_loss(lossy, *ends)
        kernel = kernel_count(lossy.sender) - before
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


def test_what_precedes_the_source_is_not_counted(lossy: Fabric) -> None:
    with listener(lossy) as server, connected(lossy, server) as ends:
        transfer_with_loss(lossy, *ends)
        earlier = kernel_count(lossy.sender)
        with counting(lossy.sender) as counts:
            transfer_with_loss(lossy, *ends)
            assert counts.all_exact(kernel_count(lossy.sender) - earlier)


def test_syn_retransmissions(lossy: Fabric) -> None:
    lossy.lose(2)
    with counting(lossy.sender) as counts, listener(lossy) as server:
        before = kernel_count(lossy.sender)
        with socket.socket() as near:
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                near.connect(server.getsockname())
            support.wait_until(lambda: kernel_count(lossy.sender) - before >= 2, 20, "two more SYNs are sent")
        assert counts.all_exact(kernel_count(lossy.sender) - before)


def test_fin_retransmissions(lossy: Fabric) -> None:
    with counting(lossy.sender) as counts, listener(lossy) as server:
        before = kernel_count(lossy.sender)
        with connected(lossy, server):
            lossy.lose(2)
        support.wait_until(lambda: kernel_count(lossy.sender) - before >= 2, 20, "two more FINs are sent")
        lossy.heal(2)
        support.wait_until(lambda: settled(lossy.sender), 30, "the connection is closed")
        assert counts.all_exact(kernel_count(lossy.sender) - before)


@pytest.mark.parametrize("completes", [True, False], ids=["completes", "half_open"])
def test_synack_retransmissions(lossy: Fabric, completes: bool) -> None:
    lossy.lose(1)
    with counting(lossy.receiver) as counts, listener(lossy) as server:
        before = kernel_count(lossy.receiver)
        with inside(lossy.sender):
            near = socket.socket()
        with near:
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                near.connect(server.getsockname())
            support.wait_until(lambda: kernel_count(lossy.receiver) - before >= 2, 20, "two more SYN-ACKs are sent")
            if not completes:
                server.close()  # its requests go with it
                assert counts.all_exact(kernel_count(lossy.receiver) - before)
                return
            lossy.heal(1)
            far, _ = server.accept()
        with far:
            far.settimeout(20)
            far.sendall(b"first packet of the new socket: its total holds the SYN-ACKs")
        support.wait_until(lambda: settled(lossy.receiver), 30, "the connection is closed")
        assert counts.all_exact(kernel_count(lossy.receiver) - before)


def test_a_half_open_request_that_precedes_the_source(lossy: Fabric) -> None:
    lossy.lose(1)
    with listener(lossy) as server:
        with inside(lossy.sender):
            near = socket.socket()
        with near:
            near.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                near.connect(server.getsockname())
            support.wait_until(lambda: kernel_count(lossy.receiver) >= 1, 20, "a SYN-ACK is sent again")
            with counting(lossy.receiver) as counts:
                before = kernel_count(lossy.receiver)
                support.wait_until(lambda: kernel_count(lossy.receiver) > before, 20, "another one is sent")
                lossy.heal(1)
                far, _ = server.accept()
                with far:
                    far.sendall(b"x")
                near.close()
                support.wait_until(lambda: settled(lossy.receiver), 30, "the connection is closed")
                kernel = kernel_count(lossy.receiver) - before
                assert kernel > 0
                assert counts.all_exact(kernel)


def test_totals_stay_exact_when_the_flow_map_is_full(lossy: Fabric) -> None:
    with (
        counting(lossy.sender, flows=1) as counts,
        listener(lossy) as server,
        connected(lossy, server) as first,
        connected(lossy, server) as second,
    ):
        before = kernel_count(lossy.sender)
        transfer_with_loss(lossy, *first)
        transfer_with_loss(lossy, *second)
        kernel = kernel_count(lossy.sender) - before
        full = counts.source.drops()["tcp_flows_full"]
        assert 0 < full < kernel
        assert counts.by_interface() == {"rail1": kernel}
        assert counts.of_flows() + full == kernel
        counts.source.read(time.monotonic_ns())
        paths = [signal for signal in counts.subscription.read() if isinstance(signal, TcpPath)]
        totals = {signal.path: signal.total_segments for signal in paths}
        assert totals[None] == full
        assert sum(totals.values()) == kernel
