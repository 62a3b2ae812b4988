"""What the tests of pins and labels share: two hosts joined by rails, and the table that steers one of them.

Imported as `pin_kit`. The near host has one nexthop group a family to the far host's service addresses; the far host
answers over its own. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import support

from pytools.closing import Closing
from pytools.kernel.bpf import contract, loader
from pytools.kernel.bpf.maps import Map
from pytools.kernel.netns import inside
from steering.actuators import flow_table
from steering.actuators.flow_table import FlowTable
from steering.actuators.pins import Pins, PinTarget
from steering.plan import FlowKey, Pin, nexthop_group

SECOND = 1_000_000_000
MARK_SEND = contract.constant("SWERVE_MARK_SEND")
SO_RCVBUFFORCE, SO_MARK = 33, 36  # Python has no names for them
NEAR, FAR = ("10.9.0.1", "fd00:9::1"), ("10.9.0.2", "fd00:9::2")
GROUPS = (nexthop_group(102), nexthop_group(202))
versions = pytest.mark.parametrize("version", [4, 6], ids=["ipv4", "ipv6"])
_SETTINGS = {
    "ipv4/conf/all/rp_filter": 0,
    "ipv4/conf/default/rp_filter": 0,
    "ipv4/fib_multipath_hash_policy": 1,
    "ipv6/fib_multipath_hash_policy": 1,
    "ipv6/conf/default/accept_dad": 0,  # neighbours are asked for from the link-local address, which is there at once
}


def soon(seconds: float = 60.0) -> int:
    """A moment that lies so far ahead."""
    return time.monotonic_ns() + int(seconds * SECOND)


@dataclass(frozen=True)
class Rails:
    """Two joined hosts, by their namespaces."""

    near: str
    far: str
    count: int

    def ip(self, *words: str) -> str:
        """Run `ip` in the near host."""
        return support.run(["ip", "-n", self.near, *words]).stdout

    def index(self, rail: int) -> int:
        """The near interface's index."""
        return int(json.loads(self.ip("-j", "link", "show", f"rail{rail}"))[0]["ifindex"])

    def gateway(self, rail: int, version: int = 4) -> str:
        """The far end of a rail."""
        return f"10.{rail}.1.1" if version == 4 else f"fd00:{rail}:1::1"

    def targets(self) -> list[PinTarget]:
        """Every rail, for both families."""
        return [
            PinTarget(first + rail, self.index(rail), self.gateway(rail, version), True, group)
            for version, first, group in ((4, 10, GROUPS[0]), (6, 20, GROUPS[1]))
            for rail in range(1, self.count + 1)
        ]

    def sent(self) -> dict[int, int]:
        """Bytes that each near interface has sent, by the interface's own counters."""
        links = json.loads(self.ip("-j", "-s", "link"))
        found = {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links}
        return {rail: found[f"rail{rail}"] for rail in range(1, self.count + 1)}

    def only(self, rail: int) -> None:
        """Have routing use one rail from now on."""
        for group, first in ((102, 10), (202, 20)):
            self.ip("nexthop", "replace", "id", str(group), "group", str(first + rail))


def join(near: str, far: str, count: int = 2) -> Rails:
    """Join two fresh namespaces by rails, in both families."""
    for number, netns in enumerate((near, far)):
        with inside(netns):
            for name, value in _SETTINGS.items():
                Path("/proc/sys/net", name).write_text(str(value))
        # Without nodad the kernel takes a moment to allow an address as a source, also on lo.
        services = zip((NEAR, FAR)[number], ("/32 dev lo", "/128 dev lo nodad"), strict=True)
        commands = [f"address add {address}{there}" for address, there in services]
        for rail in range(1, count + 1):
            name, host = f"rail{rail}", 2 - number
            commands += [support.joining(far, name)] if netns == near else []
            commands.append(f"address add 10.{rail}.1.{host}/24 dev {name}")
            commands += [f"address add fd00:{rail}:1::{host}/64 dev {name} nodad", f"link set {name} up"]
        support.ip(netns, *commands)
    for netns, host, (to4, to6), (from4, from6) in ((near, 1, FAR, NEAR), (far, 2, NEAR, FAR)):
        commands = []
        for rail in range(1, count + 1):
            commands.append(f"nexthop add id {10 + rail} via 10.{rail}.1.{host} dev rail{rail}")
            commands.append(f"nexthop add id {20 + rail} via fd00:{rail}:1::{host} dev rail{rail}")
        for group, first, to, source in (("102", 10, to4, from4), ("202", 20, to6, from6)):
            members = "/".join(str(first + rail) for rail in range(1, count + 1))
            commands.append(f"nexthop add id {group} group {members}")
            commands.append(f"route add {to} nhid {group} src {source}")
        support.ip(netns, *commands)
    return Rails(near, far, count)


@contextlib.contextmanager
def table(netns: str | None = None, force_clsact: bool = False) -> Iterator[FlowTable]:
    """The table at work in a namespace; the test is inside meanwhile."""
    loaded = loader.load([flow_table.PROGRAM])
    with inside(netns), FlowTable(loaded, force_clsact) as made:
        yield made


def flow(protocol: int, local_port: int, remote_port: int, version: int = 4) -> FlowKey:
    """From the near host's service address to the far one's."""
    which = 0 if version == 4 else 1
    return FlowKey(protocol, NEAR[which], local_port, FAR[which], remote_port)


def pin(over: FlowKey, rail: int, expires_ns: int | None = None) -> Pin:
    """Hold a flow on a rail."""
    first, group = (20, GROUPS[1]) if ":" in over.remote else (10, GROUPS[0])
    return Pin(over, group, first + rail, soon() if expires_ns is None else expires_ns)


class Capture:
    """Every IP packet that reaches a far interface, from the moment this is made. Frames as they were received."""

    def __init__(self, netns: str, interface: str) -> None:
        with inside(netns):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
            self._socket.bind((interface, 3))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 16 << 20)
        self._socket.setblocking(False)

    def frames(self, port: int) -> list[bytes]:
        """Those of TCP or UDP to this port that have come since the last call."""
        found = []
        while True:
            try:
                frame, address = self._socket.recvfrom(1 << 17)
            except BlockingIOError:
                return found
            if address[2] != socket.PACKET_OUTGOING and _port(frame) == port:
                found.append(frame)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def _port(frame: bytes) -> int:
    """Destination port of an IPv4 or IPv6 packet without options; 0 for others."""
    kind = int.from_bytes(frame[12:14])
    offset = {0x0800: 14 + 20, 0x86DD: 14 + 40}.get(kind)
    if offset is None or frame[offset - 40 + 6 if kind == 0x86DD else 23] not in (6, 17):
        return 0
    return int.from_bytes(frame[offset + 2 : offset + 4])


class Wire(Closing):
    """A UDP flow from the near host to the far one, and what of it arrives on each rail."""

    def __init__(self, rails: Rails, version: int = 4, port: int = 7000) -> None:
        which = 0 if version == 4 else 1
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        self._captures = {rail: Capture(rails.far, f"rail{rail}") for rail in range(1, rails.count + 1)}
        with inside(rails.near):
            self.socket = socket.socket(family, socket.SOCK_DGRAM)
        with inside(rails.far):
            self.far = socket.socket(family, socket.SOCK_DGRAM)
        self.far.bind((FAR[which], port))
        self.far.settimeout(5 * support.slow_factor())
        self.socket.bind((NEAR[which], 0))
        self.socket.connect((FAR[which], port))
        self.flow = flow(socket.IPPROTO_UDP, self.socket.getsockname()[1], port, version)

    def send(self, payload: bytes = b"x" * 64) -> tuple[int, bytes]:
        """Send one datagram; the rail that it came by, and its frame there. The far application got it too."""
        self.socket.send(payload)
        assert self.far.recv(1 << 16) == payload
        found = self.arrived()
        ((rail, (frame,)),) = ((rail, frames) for rail, frames in found.items() if frames)
        return rail, frame

    def arrived(self) -> dict[int, list[bytes]]:
        """Frames by rail that have come since the last call."""
        return {rail: capture.frames(self.flow.remote_port) for rail, capture in self._captures.items()}

    def close(self) -> None:
        """Both ends, and the captures."""
        self.socket.close()
        self.far.close()
        for capture in self._captures.values():
            capture.close()


_compiled: dict[bool, tuple[FlowTable, Map]] = {}  # and its counters


@contextlib.contextmanager
def pinning(rails: Rails, force_clsact: bool = False) -> Iterator[Pins]:
    """Pins at work in the near host, with every rail as a target that is alive; the test is inside meanwhile."""
    with pinning_in(rails.near, rails.targets(), force_clsact) as pins:
        yield pins


@contextlib.contextmanager
def pinning_in(netns: str, targets: list[PinTarget], force_clsact: bool = False) -> Iterator[Pins]:
    """The same in any namespace.

    The program is compiled once for all tests of a module, which imports `compiled_once`; each finds it as new.
    """
    with inside(netns):
        if force_clsact not in _compiled:
            loaded = loader.load([flow_table.PROGRAM])
            table = FlowTable(loaded, force_clsact)
            _compiled[force_clsact] = table, loaded.map("steer_counters")
        made, counters = _compiled[force_clsact]
        for counter in range(len(contract.counters("steer"))):
            counters.update(counter, 0)
        try:
            with Pins(made) as pins:
                assert pins.targets(targets) == {}
                assert pins.wait_alive(10 * support.slow_factor())
                yield pins
        finally:
            made.attach(())
            made.targets[:] = 0
            assert made.read() == []


@pytest.fixture(scope="module", autouse=True)
def compiled_once() -> Iterator[None]:
    """Take away, after a module, what was compiled for it."""
    yield
    for made, _ in _compiled.values():
        made.close()
    _compiled.clear()


@pytest.fixture
def rails(make_namespace: Callable[[], str]) -> Rails:
    support.require("bcc", "tc")
    return join(make_namespace(), make_namespace())
