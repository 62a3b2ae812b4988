"""The overlay on routes that routers announce and DHCP clients make: some expire, are equal, or have a source each."""

from __future__ import annotations

import json
import socket
import struct

import pytest
import support
from overlay_kit import MANAGED, SERVICE, Host

from pytools.kernel.netns import inside

_RAILS = (1, 2)
_ROUTER_ADVERTISEMENT = struct.Struct("!BBHBBHII")  # RFC 4861, 4.2; the kernel fills the checksum in
_PREFERENCES = {"low": 3, "medium": 0, "high": 1}  # RFC 4191


class Announced(Host):
    """A host with a router on each rail, which runs in the same namespace."""

    def __init__(self, netns):
        self.routers = {}
        super().__init__(netns, 6)

    def add_rail(self, rail):
        super().add_rail(rail)
        self.write(f"net/ipv6/conf/rail{rail}/accept_ra_from_local", 1)
        with inside(self.netns):
            router = socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6)
        router.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 255)
        router.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, f"far{rail}".encode())
        self.routers[rail] = router
        support.wait_until(lambda: "fe80" in self.ip("-6", "address", "show", "dev", f"far{rail}"), 5, "it can speak")

    def announce(self, rail, seconds, preference="medium"):
        body = _ROUTER_ADVERTISEMENT.pack(134, 0, 0, 64, _PREFERENCES[preference] << 3, seconds, 0, 0)
        self.routers[rail].sendto(body, ("ff02::1", 0))

        def heard():
            rows = [row for row in self.defaults() if row["dev"] == f"rail{rail}"]
            if seconds == 0:
                return not rows
            return [(row["pref"], seconds - row["expires"] <= 1) for row in rows] == [(preference, True)]

        support.wait_until(heard, 5, "it was heard")

    def defaults(self):
        return json.loads(self.ip("-6", "-d", "-j", "route", "show", "default", "proto", "ra") or "[]")

    def mirrored(self):
        return self.ip("-6", "-d", "route", "show", "table", "20000")

    def theirs(self):
        return [row.split('"expires"')[0] for row in self.others()]


@pytest.fixture
def announced(namespace):
    found = Announced(namespace)
    yield found
    for each in found.routers.values():
        each.close()
    if found.overlay is not None:
        found.overlay.close()
        found.netlink.close()


def test_each_of_two_equal_routers_can_be_left(announced):
    """The kernel uses either, and does not say which."""
    for rail in _RAILS:
        announced.announce(rail, 600)
    found, before = announced.start(), announced.theirs()
    for rail, other in (1, 2), (2, 1):
        group = announced.leave(rail, found)
        assert announced.rules() and announced.ways() == {f"rail{other}"} and announced.theirs() == before
        announced.put_back(group)
        assert announced.ways() <= {"rail1", "rail2"} and announced.ours() and not announced.rules()
        found = announced.look()


def test_a_better_router_is_the_one_in_use(announced):
    announced.announce(1, 600, "low")
    announced.announce(2, 600, "high")
    [group] = announced.start().groups.values()
    assert {m.interface: m.weight for m in group.members} == {"rail2": 1, "rail1": 0}
    assert announced.way() == "rail2"
    announced.leave(2)
    assert announced.ways() == {"rail1"}


def test_a_router_that_is_heard_again_changes_nothing_of_ours(announced):
    for rail in _RAILS:
        announced.announce(rail, 600)
    announced.leave(1, announced.start())
    ours = announced.mirrored(), announced.rules()
    for seconds in (900, 300):
        for rail in _RAILS:
            announced.announce(rail, seconds)
        announced.overlay.receive()
        announced.look()
        assert (announced.mirrored(), announced.rules()) == ours


def test_a_router_that_goes_leaves_our_group_and_comes_back_without_weight(announced):
    announced.add_rail(3)
    for rail in announced.routers:
        announced.announce(rail, 600)
    announced.leave(1, announced.start())
    assert announced.ways() == {"rail2", "rail3"}
    announced.announce(2, 0)
    announced.hear(lambda: announced.ways() == {"rail3"})
    announced.announce(2, 600)
    announced.look()
    assert announced.ways() == {"rail3"}


def test_a_router_whose_time_is_over_leaves_our_group(announced):
    """The kernel announces neither that a time was cut short, nor that it is over, and keeps the route for a while."""
    announced.add_rail(3)
    for rail in announced.routers:
        announced.announce(rail, 600)
    announced.leave(1, announced.start())
    announced.announce(2, 1)
    announced.look()
    announced.hear(lambda: announced.ways() == {"rail3"})
    assert any(row["dev"] == "rail2" for row in announced.defaults()), "the route itself is still there"
    announced.announce(2, 600)
    announced.look()
    assert len(next(iter(announced.look().groups.values())).members) == 3, "it is heard again"


@pytest.fixture
def leased(namespace):
    found = Host(namespace, 4)
    yield found
    if found.overlay is not None:
        found.overlay.close()
        found.netlink.close()


def lease(host, rail):
    """What a DHCP client makes of a lease and its renewal."""
    words = ("default", *host.hop(rail), "proto", "dhcp", "src", f"10.{rail}.1.2", "metric", str(100 + rail))
    host.route("replace", *words)


def test_packets_leave_with_the_source_address_of_their_link(leased):
    for rail in _RAILS:
        lease(leased, rail)
    before = leased.others()
    assert leased.source() == "10.1.1.2"
    group = leased.leave(1, leased.start())
    assert leased.source() == "10.2.1.2" and leased.others() == before
    lease(leased, 1)
    leased.look()
    assert leased.source() == "10.2.1.2" and leased.others() == before, "a renewed lease"
    leased.put_back(group)
    assert leased.source() == "10.1.1.2"


def test_a_source_that_all_hops_have_is_kept(leased):
    for rail in _RAILS:
        leased.route("add", MANAGED[4], *leased.hop(rail), "src", SERVICE[4], "metric", str(50 + rail))
    leased.leave(1, leased.start())
    assert leased.source() == SERVICE[4]


def test_a_route_over_a_gateway_is_steered_though_it_says_that_it_is_the_kernels(leased):
    """Cilium's routes do."""
    for rail in _RAILS:
        leased.route("add", MANAGED[4], *leased.hop(rail), "proto", "kernel", "metric", str(50 + rail))
    leased.leave(1, leased.start())
    assert leased.ways() == {"rail2"}
