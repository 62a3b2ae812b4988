"""Which way the outer packets of a tunnel leave, where the route to the peer's outer address has two."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path as File

import probe_kit
import pytest
import support

from pytools.config import Peer
from pytools.kernel.bpf import attach, loader
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.signals import Path, Underlay
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.underlays import Underlays

RAILS = ("r1", "r2")
OUTER = {4: ("10.9.0.1", "10.9.0.2"), 6: ("fd00:9::1", "fd00:9::2")}
FAR = "10.77.0.2"
MAC = "02:00:00:00:00:02"
NEIGHBOUR = f"neighbour add {FAR} lladdr {MAC} dev t0"
FLOWS = 64
PATH = Path("h1", "h2", FAR, "", "t0")
GUEST = pytest.mark.guest(only=True)
VXLAN = ("vxlan", "id", "7", "dstport", "4789")
KINDS = [
    pytest.param((*VXLAN, "local", "{0}", "remote", "{1}"), 4, id="vxlan"),
    pytest.param((*VXLAN, "local", "{0}", "remote", "{1}"), 6, id="vxlan over IPv6"),
    pytest.param(VXLAN, 4, id="vxlan by its forwarding table"),
    pytest.param(("geneve", "id", "7", "remote", "{1}"), 4, id="geneve", marks=GUEST),
    pytest.param(("gretap", "local", "{0}", "remote", "{1}"), 4, id="gretap", marks=GUEST),
    pytest.param(("gre", "local", "{0}", "remote", "{1}"), 4, id="gre", marks=GUEST),
    pytest.param(("wireguard",), 4, id="wireguard", marks=GUEST),
]


class Host:
    """A host with two rails to a peer; tunnels `t0` are made on it alone, but of WireGuard."""

    def __init__(self, netns: str, far: str) -> None:
        self.netns, self.far = netns, far
        for end, place in enumerate((netns, far)):
            commands = [support.joining(far, name) for name in RAILS if place == netns]
            for rail, name in enumerate(RAILS, 1):
                commands.append(f"address add 10.{rail}.0.{end + 1}/24 dev {name}")
                commands.append(f"address add fd00:{rail}::{end + 1}/64 dev {name} nodad")
                commands.append(f"link set dev {name} up")
            support.ip(place, *commands, *(f"address add {outer[end]} dev lo" for outer in OUTER.values()))
        for end, place in enumerate((netns, far)):
            support.ip(place, *(self.route(1 - end, family, *RAILS) for family in OUTER))
            with inside(place):
                for family in OUTER:
                    File(f"/proc/sys/net/ipv{family}/fib_multipath_hash_policy").write_text("1")

    @staticmethod
    def route(to: int, family: int, *rails: str) -> str:
        """The command that lets packets to the other end's outer address leave by these rails."""
        hops = [
            f"nexthop via {f'10.{rail[1]}.0.{to + 1}' if family == 4 else f'fd00:{rail[1]}::{to + 1}'} dev {rail}"
            for rail in rails
        ]
        source = f"src {OUTER[family][1 - to]}" if family == 4 else ""
        return f"route replace {OUTER[family][to]} {source} {' '.join(hops)}"

    def tunnel(self, words: tuple[str, ...], family: int) -> None:
        support.ip(self.netns, " ".join(("link add t0 type", *words)).format(*OUTER[family]))
        if words == ("wireguard",):
            self._exchange_keys()
        with inside(self.netns):
            File("/proc/sys/net/ipv6/conf/t0/disable_ipv6").write_text("1")  # nothing but what the test sends
        neighbour = [NEIGHBOUR] if words[0] in ("vxlan", "geneve", "gretap") else []
        support.ip(self.netns, "address add 10.77.0.1/24 dev t0", "link set dev t0 up", *neighbour)
        if words == VXLAN:
            self.forward(MAC, OUTER[4][1])

    def forward(self, to: str, outer: str) -> None:
        """Add to the forwarding table of the tunnel."""
        support.run(["bridge", "-n", self.netns, "fdb", "append", to, "dev", "t0", "dst", outer, "self", "permanent"])

    def _exchange_keys(self) -> None:
        from pyroute2 import WireGuard

        support.ip(self.far, "link add t0 type wireguard")
        public = []
        for netns in (self.netns, self.far):
            with inside(netns), WireGuard() as guard:
                guard.set("t0", listen_port=51820, private_key=base64.b64encode(os.urandom(32)).decode())
                public.append(next(iter(guard.info("t0"))).get_attr("WGDEVICE_A_PUBLIC_KEY"))
        for netns, key, there in zip((self.netns, self.far), public[::-1], OUTER[4][::-1], strict=True):
            peer = {"public_key": key, "endpoint_addr": there, "endpoint_port": 51820, "allowed_ips": ["10.77.0.0/24"]}
            with inside(netns), WireGuard() as guard:
                guard.set("t0", peer=peer)
        support.ip(self.far, "link set dev t0 up")

    def send(self, mark: int) -> None:
        """One datagram to the other end of the tunnel, on each of many flows."""
        with inside(self.netns):
            for _ in range(FLOWS):
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as flow:
                    flow.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
                    flow.bind(("10.77.0.1", 0))
                    flow.sendto(b"x", (FAR, 9))


@pytest.fixture
def host(make_namespace: Callable[[], str]) -> Host:
    support.require("bcc", "netns")
    return Host(make_namespace(), make_namespace())


class Seen:
    """What leaves by the rails to an address, as a packet socket sees it."""

    def __init__(self, netns: str, address: str) -> None:
        self._to = socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
        self._at, self._protocol = (24, 0x86DD) if ":" in address else (16, 0x0800)
        self._sockets = {}
        for rail in RAILS:
            with inside(netns):
                self._sockets[rail] = found = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))
            found.bind((rail, 3))
            found.setblocking(False)

    def read(self) -> dict[str, int]:
        """Packets since the last call."""
        found = dict.fromkeys(RAILS, 0)
        for rail, sock in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet, (_, protocol, kind, *_) = sock.recvfrom(200)
                    to = packet[self._at : self._at + len(self._to)]
                    found[rail] += kind == socket.PACKET_OUTGOING and protocol == self._protocol and to == self._to
        return found

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()


class Watched:
    """The host's observers, and what is known below its one path."""

    def __init__(self, host: Host, loaded: loader.Loaded, netlink: Netlink) -> None:
        self.underlays, self._netlink = Underlays(netlink, loaded), netlink
        self.look()

    def look(self) -> None:
        links = {link.index: link for link in self._netlink.links()}
        (index,) = [each.index for each in links.values() if each.name == "t0"]
        path = PinnedPath(0, PATH, Peer("h2", FAR), 4, index, "10.77.0.1", None, False)
        self.underlays.look([path], links)

    def counted(self) -> dict[str, int | None]:
        return {each.interface: each.packets for each in self.underlays.counted()[PATH]}


@contextlib.contextmanager
def watching(host: Host) -> Iterator[Watched]:
    with contextlib.ExitStack() as on:
        on.enter_context(inside(host.netns))
        loaded = on.enter_context(loader.load([probe_kit.PROGRAMS[-1]]))
        assert loaded.failed == {}
        for rail in RAILS:
            on.enter_context(attach.attach_tc(loaded.programs["observe_egress"], rail, "egress"))
        yield Watched(host, loaded, on.enter_context(Netlink()))


@pytest.mark.guest
@pytest.mark.parametrize(("words", "family"), KINDS)
def test_outer_packets_are_counted_where_they_leave(host: Host, words: tuple[str, ...], family: int) -> None:
    host.tunnel(words, family)
    with watching(host) as watched, contextlib.closing(Seen(host.netns, OUTER[family][1])) as seen:
        assert watched.counted() == dict.fromkeys(RAILS), "nothing yet"
        assert watched.underlays.interfaces() == set(RAILS)
        for mark in (0, 7):  # with one the kernel does not remember the route
            host.send(mark)
            left, counted = dict.fromkeys(RAILS, 0), dict.fromkeys(RAILS, 0)

            def all_counted(left: dict[str, int] = left, counted: dict[str, int] = counted) -> bool:
                for rail, more in seen.read().items():
                    left[rail] += more
                for rail, told in watched.counted().items():
                    counted[rail] += told or 0
                return sum(left.values()) >= FLOWS and counted == left

            support.wait_until(all_counted, 10, f"what left by each rail is counted: {left}, {counted}")
        if words[0] == "vxlan":
            assert min(left.values()) > 0, "the outer source port decides"
        support.ip(host.netns, host.route(1, family, "r2"))
        watched.look()
        gateway = "10.2.0.2" if family == 4 else "fd00:2::2"
        assert watched.underlays.counted() == {PATH: [Underlay(OUTER[family][1], gateway, "r2")]}
        assert watched.underlays.interfaces() == set()


def test_without_marks_the_kernel_remembers_the_route_of_a_tunnel(host: Host) -> None:
    host.tunnel((*VXLAN, "local", "{0}", "remote", "{1}"), 4)
    with watching(host) as watched:
        cpus = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(cpus)})
        try:
            host.send(0)
        finally:
            os.sched_setaffinity(0, cpus)
        assert sorted(watched.counted().values()) == [0, FLOWS]


def test_a_peer_whose_outer_address_is_not_known_has_unknown_ways(host: Host) -> None:
    host.tunnel(VXLAN, 4)
    support.ip(host.netns, f"neighbour del {FAR} dev t0")
    with watching(host) as watched:
        assert watched.underlays.counted() == {PATH: []}, "there is no entry for everybody"
        host.forward("00:00:00:00:00:00", OUTER[4][1])
        watched.look()
        assert set(watched.counted()) == set(RAILS)
        host.forward("00:00:00:00:00:00", "10.9.0.3")
        watched.look()
        assert watched.underlays.counted() == {PATH: []}, "there are two"


def test_ways_by_one_interface_are_named_but_not_counted(host: Host) -> None:
    host.tunnel((*VXLAN, "local", "{0}", "remote", "{1}"), 4)
    hops = " ".join(f"nexthop via 10.1.0.{end} dev r1" for end in (2, 3))
    support.ip(host.netns, f"route replace {OUTER[4][1]} src {OUTER[4][0]} {hops}")
    with watching(host) as watched:
        assert watched.underlays.counted() == {PATH: [Underlay(OUTER[4][1], f"10.1.0.{end}", "r1") for end in (2, 3)]}
        assert watched.underlays.interfaces() == set()


def test_a_tunnel_from_another_namespace_has_its_ways_there(host: Host) -> None:
    tunnel = f"link add t0 type {' '.join(VXLAN)} remote {OUTER[4][1]} dev r1"
    support.ip(host.netns, tunnel, f"link set dev t0 netns {host.far}")
    with inside(host.far), Netlink() as netlink:
        (link,) = [each for each in netlink.links() if each.name == "t0"]
    assert link.tunnel is None
