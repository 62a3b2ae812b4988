"""TCP transfers over a lab that loses segments, the source that watches them, and the kernel's own figures of both.

What is compared with is read here without a line of the product: `ss`, `nstat`, TCP_INFO of a socket of ours, and a
capture.
"""

from __future__ import annotations

import contextlib
import json
import re
import selectors
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path as File
from typing import Final, Literal, TypeVar

import support

from pytools.agent.hooks import link_observers
from pytools.config import AgentConfig, Tcp, Windows
from pytools.ipc.bus import Bus, Subscription
from pytools.kernel.bpf.attach import attach_tc
from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.netlink.routing import Member, Netlink
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.lab.topology import group_id
from pytools.signals import PacketDrops, Path, TcpFlow, TcpHost, TcpNamespace, TcpPath
from pytools.sources.interfaces import Interfaces
from pytools.sources.programs import observers, packet_drops, probes, tcp_connections
from pytools.sources.tcp.source import TcpSource

RECEIVER, RECEIVER6 = "10.9.0.2", "fd00:9::2"
RAILS: Final = ("rail1", "rail2")
MEASURED: Final = Path("h1", "h2", RECEIVER, "", "rail1")
MEGABYTE = 1_000_000
S = TypeVar("S", TcpFlow, TcpPath, TcpHost, TcpNamespace, PacketDrops)


def program(causes: bool, **sizes: int) -> Program:
    """tcp.c alone, with its entry points and with what it counts of causes."""
    known = {"SWERVE_TCP_CONGESTION": 1} if causes else {}
    defines = {"SWERVE_TCP_FLOWS": 1024, "SWERVE_TCP_PATHS": 64, **known, **sizes}
    functions = ("tcp_egress", "tcp_ingress", "tcp_callbacks")
    return Program("tcp.c", functions, defines, {"tcp_callbacks": "sock_ops"})


def path_of(remote: str, interface: str) -> Path | None:
    """The IPv4 service address of the receiver is measured on rail 1; nothing else is."""
    return MEASURED if (remote, interface) == (RECEIVER, "rail1") else None


def sender(lab: Lab) -> str:
    return lab.hosts[0].netns


def receiver(lab: Lab) -> str:
    return lab.hosts[1].netns


def route_over(lab: Lab, rail: int) -> None:
    """Have the sender send over this rail from now on."""
    interface = lab.hosts[0].interfaces[rail - 1]
    with Netlink(sender(lab)) as netlink:
        for family, nexthop in ((4, interface.nexthop_id), (6, interface.nexthop6_id)):
            netlink.replace_group(group_id(2, family), [Member(nexthop, weight=1)])


# ---- the source at work ----


@dataclass
class Watching:
    """The source at work, as the agent runs it."""

    loaded: Loaded
    source: TcpSource
    subscription: Subscription
    slowest_tick_ns: int = 0

    def tick(self, now_ns: int) -> int:
        """Once, with an eye on the processor time that it takes."""
        began_ns = time.thread_time_ns()
        due_ns = self.source.tick(now_ns)
        self.slowest_tick_ns = max(self.slowest_tick_ns, time.thread_time_ns() - began_ns)
        return due_ns

    def run(self, seconds: float) -> None:
        """Tick for so long."""
        end_ns = time.monotonic_ns() + int(seconds * 1e9)
        while (now_ns := time.monotonic_ns()) < end_ns:
            due_ns = self.tick(now_ns)
            time.sleep(max(0.0, min(due_ns, end_ns) - time.monotonic_ns()) / 1e9)

    def newest(self, kind: type[S]) -> list[S]:
        """What has been published of a kind since the last call, whatever it was."""
        return [signal for signal in self.subscription.read() if isinstance(signal, kind)]

    def flows(self, seconds: float = 2.5) -> dict[int, TcpFlow]:
        """The newest of every connection by local port, after all of them were told."""
        self.run(seconds)
        return {flow.local_port: flow for flow in self.newest(TcpFlow)}

    def host(self) -> TcpHost:
        """The sums now."""
        self.source.read(time.monotonic_ns())
        return self.newest(TcpHost)[-1]

    def totals(self) -> dict[tuple[str, Path | None], int]:
        """Segments retransmitted by interface and path, now."""
        self.source.read(time.monotonic_ns())
        return {(each.interface, each.path): each.total_segments for each in self.newest(TcpPath)}


@contextlib.contextmanager
def watching(
    namespace: str,
    flows: int = 16384,
    long_ms: float = 500.0,
    interfaces: Iterable[str] = RAILS,
    namespaces: Literal["auto", "all", "own"] = "auto",
) -> Iterator[Watching]:
    """Watch a namespace, on both rails; the calling thread is inside it meanwhile."""
    settings = Tcp(flows=flows, refresh_ms=10, namespaces=namespaces)
    with contextlib.ExitStack() as stack:
        together = observers(probes(AgentConfig("", [])), tcp_connections(settings))
        loaded = stack.enter_context(load([*together, *packet_drops()]))
        assert not loaded.failed
        stack.enter_context(inside(namespace))
        bus = Bus()
        types = frozenset({"tcp_flow", "tcp_path", "tcp_host", "tcp_namespace", "packet_drops"})
        subscription = bus.subscribe(types, 1_000_000)
        config = AgentConfig(host="h1", peers=[], tcp=settings, windows=Windows(long_ms=long_ms))
        source = TcpSource(config, loaded, Interfaces(), bus, path_of, lambda: [MEASURED])
        stack.callback(source.close)
        assert not source.failed
        source.register(stack.enter_context(selectors.DefaultSelector()))
        for interface in interfaces:
            for hook, direction in link_observers(loaded):
                stack.enter_context(attach_tc(loaded.programs[hook], interface, direction))
        yield Watching(loaded, source, subscription)


# ---- traffic ----


@contextlib.contextmanager
def listener(lab: Lab, address: str = RECEIVER) -> Iterator[socket.socket]:
    with inside(receiver(lab)):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, 0), family=family, backlog=1024)
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


def transfer(pairs: Iterable[tuple[socket.socket, socket.socket]], size: int, chunk_bytes: int = 1 << 16) -> None:
    """Send so many bytes over each pair at once, and receive them all, in one thread."""
    chunk = memoryview(bytes(chunk_bytes))
    owners = {far: near for near, far in pairs}
    left = {near: [size, size] for near in owners.values()}
    unreceived = len(left)
    with selectors.DefaultSelector() as selector:
        for far, near in owners.items():
            near.setblocking(False)
            far.setblocking(False)
            selector.register(near, selectors.EVENT_WRITE)
            selector.register(far, selectors.EVENT_READ)
        while unreceived:
            ready = selector.select(30 * support.slow_factor())
            assert ready, "stuck"
            for key, _ in ready:
                end = key.fileobj
                assert isinstance(end, socket.socket)
                if end in owners:
                    counts = left[owners[end]]
                    counts[1] -= len(end.recv(1 << 20))
                    unreceived -= counts[1] == 0
                    continue
                counts = left[end]
                counts[0] -= end.send(chunk[: counts[0]])
                if counts[0] == 0:
                    selector.unregister(end)


def all_acknowledged(namespace: str) -> bool:
    """No connection of the namespace has anything unacknowledged, so its counts stand still."""
    listed = support.run(["ss", "-N", namespace, "-Htn", "state", "established"]).stdout
    return all(line.split()[1] == "0" for line in listed.splitlines())


def settled(namespace: str) -> bool:
    """No connection of the namespace is there any more, so nothing can be retransmitted."""
    listed = support.run(["ss", "-N", namespace, "-Htan"]).stdout.splitlines()
    return not any(line.split()[0] not in ("LISTEN", "TIME-WAIT") for line in listed)


@contextlib.contextmanager
def iperf3_server(namespace: str) -> Iterator[None]:
    server = subprocess.Popen(
        ["ip", "netns", "exec", namespace, "iperf3", "-s", "--forceflush"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for_output(server, b"Server listening")
        yield
    finally:
        server.kill()
        server.communicate()


def wait_for_output(process: subprocess.Popen[bytes], words: bytes) -> None:
    """Wait until a process has written this."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        said = b""
        while words not in said:
            assert selector.select(10 * support.slow_factor()), f"it does not start: {said!r}"
            part = process.stdout.read1(4096)  # type: ignore[attr-defined]
            assert part, f"it ended: {said!r}"
            said += part


# ---- the kernel's own figures ----


def nstat(namespace: str) -> dict[str, int]:
    """The counters of a namespace since it was made."""
    shown = support.run(["ip", "netns", "exec", namespace, "nstat", "-asz", "--json"]).stdout
    return {name: int(value) for name, value in json.loads(shown)["kernel"].items()}


@dataclass(frozen=True)
class SsCounts:
    """What `ss -ti` says of a connection."""

    segments: int
    bytes: int
    spurious: int


def ss_counts(namespace: str) -> dict[int, SsCounts]:
    """By local port, of the established connections."""
    found = {}
    for line in support.run(["ss", "-N", namespace, "-OHtin", "state", "established"]).stdout.splitlines():
        port = re.search(r"^\s*\d+\s+\d+\s+\S+:(\d+)\s", line)
        assert port is not None, line
        figures = [re.search(pattern, line) for pattern in (r"\bretrans:\d+/(\d+)", r"\bbytes_retrans:(\d+)")]
        figures.append(re.search(r"\bdsack_dups:(\d+)", line))
        found[int(port.group(1))] = SsCounts(*(int(each.group(1)) if each else 0 for each in figures))
    return found


def causes_agree(count: Callable[[], tuple[object, object]]) -> None:
    """In one of three attempts our causes are the kernel's.

    Causes need every change of the congestion state, and now and then the kernel runs no program at one: `docs/tcp.md`,
    known gap. All that does not need them is for `count` itself to compare, in each attempt.
    """
    seen = []
    for _ in range(3):
        ours, kernels = count()
        if ours == kernels:
            return
        seen.append(f"{ours}, the kernel {kernels}")
    raise AssertionError("causes differ each time: " + "; ".join(seen))


def timeouts_of(end: socket.socket) -> int | None:
    """`tcpi_total_rto` of a socket of ours; None where the kernel has no such field (before 6.7)."""
    raw = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
    return int(struct.unpack_from("=H", raw, 240)[0]) if len(raw) >= 242 else None


# ---- a capture ----


@dataclass
class Repeats:
    """What one connection retransmitted, by its sequence numbers."""

    segments: int = 0
    bytes: int = 0
    syns: int = 0


@contextlib.contextmanager
def captured(namespace: str, interface: str, file: File) -> Iterator[None]:
    """Capture what leaves by an interface; complete when the context is left."""
    command = ["ip", "netns", "exec", namespace, "tcpdump", "-i", interface, "-Q", "out", "-s", "128", "-B", "65536"]
    process = subprocess.Popen(
        [*command, "-U", "-w", str(file), "tcp"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    said = b""
    try:
        wait_for_output(process, b"listening on")
        yield
        until(lambda: _is_written(file), "the capture is written")
    finally:
        process.terminate()
        said = process.communicate()[0]
    assert b"\n0 packets dropped by kernel" in said, said


def _is_written(file: File, quiet_s: float = 0.5) -> bool:
    """Whether nothing has come to a file for a while; packets wait in the kernel until they are."""
    return time.time() - file.stat().st_mtime > quiet_s


def repeats(file: File) -> dict[int, Repeats]:
    """By local port: segments whose first byte had been sent before. Each captured packet is one segment."""
    found: dict[int, Repeats] = {}
    ends: dict[int, int] = {}
    for source, sequence, flags, size in _segments(file.read_bytes()):
        repeated = found.setdefault(source, Repeats())
        if flags & 0x02:
            repeated.syns += source in ends
            ends[source] = (sequence + 1) & 0xFFFFFFFF
            continue
        length = size + (flags & 1)
        if not length:
            continue
        behind = (ends[source] - sequence) & 0xFFFFFFFF
        if 0 < behind < 1 << 31:
            repeated.segments += 1
            repeated.bytes += size
        else:
            ends[source] = (sequence + length) & 0xFFFFFFFF
    return found


def _segments(pcap: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Source port, sequence number, flags and payload bytes of the TCP packets of a capture of Ethernet."""
    offset = 24
    while offset + 16 <= len(pcap):
        kept = struct.unpack_from("<I", pcap, offset + 8)[0]
        frame = pcap[offset + 16 : offset + 16 + kept]
        offset += 16 + kept
        if frame[12:14] == b"\x08\x00":
            header = (frame[14] & 0xF) * 4
            size = struct.unpack_from("!H", frame, 16)[0] - header
        else:
            header = 40
            size = struct.unpack_from("!H", frame, 18)[0]
        tcp = frame[14 + header :]
        source, _, sequence = struct.unpack_from("!HHI", tcp)
        yield source, sequence, tcp[13], size - (tcp[12] >> 4) * 4


def until(condition: Callable[[], bool], what: str) -> None:
    support.wait_until(condition, 30, what)
