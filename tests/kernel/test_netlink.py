"""Netlink records against what `ip -j` says of the same namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import support

from pytools.errors import RefusedError, SwerveError, UsageError
from pytools.kernel.netlink.monitor import NetlinkWatch, News
from pytools.kernel.netlink.routing import MAIN_TABLE, Hop, Member, Netlink, NetlinkError, Nexthop, Route, Rule
from pytools.kernel.netns import inside
from steering.acting.lock import Lock
from steering.acting.namespace_lock import NamespaceLock


def ip(netns, *words):
    """What iproute2 says, as JSON."""
    output = support.run(["ip", "-n", netns, "-j", *words]).stdout
    return json.loads(output) if output.strip() else []


@pytest.fixture
def wired(veth_pair):
    """A namespace with an interface, a netlink socket there, and the interface's index."""
    netns = veth_pair[0]
    with Netlink(netns) as netlink:
        (index,) = (link.index for link in netlink.links() if link.name == "v0")
        yield netns, netlink, index


@pytest.fixture
def grouped(wired):
    """The same with two IPv4 nexthops (11, 12) and group 101 of both."""
    _, netlink, index = wired
    netlink.replace_nexthop(Nexthop(11, 4, "10.77.0.2", index, 201))
    netlink.replace_nexthop(Nexthop(12, 4, "10.77.0.3", index, 201))
    netlink.replace_group(101, [Member(11, 1), Member(12, 3)], 201, create=True)
    return wired


def weights_by_ip(netns, group_id):
    (group,) = ip(netns, "nexthop", "show", "id", str(group_id))
    return {each["id"]: each.get("weight", 1) for each in group["group"]}


def test_links_are_those_ip_shows(wired):
    netns, netlink, _ = wired
    shown = {
        each["ifname"]: (each["ifindex"], each["mtu"], "UP" in each["flags"], "LOWER_UP" in each["flags"])
        for each in ip(netns, "link")
    }
    assert {each.name: (each.index, each.mtu, each.up, each.carrier) for each in netlink.links()} == shown
    kinds = {each.name: (each.kind, each.arphrd) for each in netlink.links()}
    assert kinds == {"lo": ("", 772), "v0": ("veth", 1)}


def test_a_lost_carrier_is_seen(veth_pair):
    support.run(["ip", "-n", veth_pair[1], "link", "set", "v0", "down"])
    with Netlink(veth_pair[0]) as netlink:
        (link,) = (each for each in netlink.links() if each.name == "v0")
    assert link.up
    assert not link.carrier


def test_addresses_are_those_ip_shows(wired):
    netns, netlink, _ = wired
    shown = {
        (each["ifindex"], info["local"], info["prefixlen"])
        for each in ip(netns, "address")
        for info in each["addr_info"]
    }
    assert {(each.ifindex, each.address, each.prefix_length) for each in netlink.addresses()} == shown
    assert "10.77.0.0/24" in {each.network for each in netlink.addresses()}


def test_neighbours_are_those_ip_shows(wired):
    netns, netlink, index = wired
    support.run(["ip", "-n", netns, "neighbour", "add", "10.77.0.9", "lladdr", "02:00:00:00:00:09", "dev", "v0"])
    entries = {each.address: each for each in netlink.neighbours()}
    shown = {each["dst"]: each for each in ip(netns, "neighbour")}
    assert shown["10.77.0.9"]["state"] == ["PERMANENT"]
    found = entries["10.77.0.9"]
    assert (found.link_address, found.state, found.ifindex) == ("02:00:00:00:00:09", "PERMANENT", index)
    assert set(shown) <= set(entries)


def test_nexthops_are_made_read_and_deleted(wired):
    netns, netlink, index = wired
    wanted = [
        Nexthop(11, 4, "10.77.0.2", index, 201),
        Nexthop(21, 6, "fd77::2", index, 201),
        Nexthop(31, 4, None, index, 201),
    ]
    for nexthop in wanted:
        netlink.replace_nexthop(nexthop)
    assert netlink.nexthops() == wanted
    shown = {each["id"]: (each.get("gateway"), each["dev"], each["protocol"]) for each in ip(netns, "nexthop")}
    assert shown == {11: ("10.77.0.2", "v0", "201"), 21: ("fd77::2", "v0", "201"), 31: (None, "v0", "201")}
    netlink.replace_nexthop(Nexthop(11, 4, "10.77.0.3", index, 201))
    assert ip(netns, "nexthop", "show", "id", "11")[0]["gateway"] == "10.77.0.3"
    for nexthop in wanted:
        netlink.del_nexthop(nexthop.id)
    assert netlink.nexthops() == []


@pytest.mark.guest
def test_replacing_a_group_sets_the_weights_and_keeps_the_rest(grouped):
    netns, netlink, _ = grouped
    assert weights_by_ip(netns, 101) == {11: 1, 12: 3}
    netlink.replace_group(101, [Member(11, 256), Member(12, 2)])
    assert weights_by_ip(netns, 101) == {11: 256, 12: 2}
    group = netlink.group(101)
    assert (group.weights, group.kind, group.protocol) == ({11: 256, 12: 2}, "mpath", 201)
    assert netlink.groups() == [group]


@pytest.mark.guest
def test_a_resilient_group_stays_resilient_with_its_buckets(grouped):
    netns, netlink, _ = grouped
    words = "nexthop add id 102 group 11,1/12,1 type resilient buckets 32 idle_timer 7 proto 99"
    support.run(["ip", "-n", netns, *words.split()])
    netlink.replace_group(102, [Member(11, 9), Member(12, 1)])
    group = netlink.group(102)
    assert (group.kind, group.weights, group.protocol) == ("resilient", {11: 9, 12: 1}, 99)
    (shown,) = ip(netns, "nexthop", "show", "id", "102")
    assert shown["type"] == "resilient"
    assert shown["resilient_args"]["buckets"] == 32
    assert shown["resilient_args"]["idle_timer"] == 7


def test_a_replace_asks_the_kernel_for_one_change(grouped):
    netns, netlink, _ = grouped
    monitor = Netlink(netns)
    with monitor:
        monitor.socket.sock.setsockopt(270, 1, 32)  # NETLINK_ADD_MEMBERSHIP, RTNLGRP_NEXTHOP
        netlink.replace_group(101, [Member(11, 5), Member(12, 6)])
        monitor.socket.sock.settimeout(1)
        data = monitor.socket.sock.recv(65536)
        assert int.from_bytes(data[4:6], "little") == 104
        monitor.socket.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            monitor.socket.sock.recv(65536)


def test_packets_are_counted_per_member_where_the_kernel_can(grouped):
    netns, netlink, _ = grouped
    netlink.replace_route(Route("10.99.0.0/16", 4, MAIN_TABLE, nexthop_id=101, protocol=201))
    counted = netlink.group(101, stats=True)
    assert counted == netlink.groups(stats=True)[0]
    before = [member.packets for member in counted.members]
    if before == [None, None]:
        pytest.skip("missing: packet counts of nexthop groups (Linux 6.9)")
    assert before == [0, 0]
    support.run(["ip", "-n", netns, "neighbour", "add", "10.77.0.3", "lladdr", "02:00:00:00:00:03", "dev", "v0"])
    script = (
        "import socket\n"
        "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "for host in range(200): s.sendto(b'x', (f'10.99.0.{host}', 9))\n"
    )
    support.run(["ip", "netns", "exec", netns, support.sys.executable, "-c", script])
    packets = {member.nexthop_id: member.packets for member in netlink.group(101, stats=True).members}
    assert sum(packets.values()) == 200
    assert packets[12] > packets[11] > 0
    assert [member.packets for member in netlink.group(101).members] == [None, None]


def test_what_is_no_group_is_said(grouped):
    _, netlink, _ = grouped
    assert netlink.group(999) is None
    with pytest.raises(UsageError, match="nexthop 11 is not a group"):
        netlink.group(11)
    with pytest.raises(NetlinkError, match="replacing nexthop group 999: there is no such group"):
        netlink.replace_group(999, [Member(11, 1)])


def test_a_refused_change_leaves_the_group_and_says_why(grouped):
    _, netlink, _ = grouped
    with pytest.raises(NetlinkError, match="replacing nexthop group 101: Invalid nexthop id"):
        netlink.replace_group(101, [Member(11, 1), Member(77, 1)])
    assert netlink.group(101).weights == {11: 1, 12: 3}
    with pytest.raises(NetlinkError, match="different type"):
        netlink.replace_group(101, [Member(11, 1)], 201, kind="resilient")


def test_routes_are_those_ip_shows(grouped):
    netns, netlink, index = grouped
    wanted = [
        Route("10.9.0.2/32", 4, MAIN_TABLE, nexthop_id=101, protocol=201, prefsrc="10.77.0.1"),
        Route("10.9.0.3/32", 4, 20101, gateway="10.77.0.2", ifindex=index, protocol=201),
        Route("0.0.0.0/0", 4, 20101, gateway="10.77.0.2", ifindex=index, protocol=201, metric=9),
        Route("fd00:9::2/128", 6, 20101, gateway="fd77::2", ifindex=index, protocol=201, metric=5),
        Route("10.8.0.0/16", 4, 20101, ifindex=index, protocol=201),
    ]
    hops = (Hop("10.77.0.2", index, 1), Hop("10.77.0.3", index, 4))
    wanted.append(Route("10.9.0.4/32", 4, 20101, hops=hops, protocol=201))
    for route in wanted:
        netlink.replace_route(route)
    assert set(netlink.routes(4, 20101)) == {each for each in wanted if (each.family, each.table) == (4, 20101)}
    assert netlink.routes(6, 20101) == [wanted[3]]
    (by_id,) = (each for each in netlink.routes(4) if each.protocol == 201)
    assert (by_id.destination, by_id.nexthop_id, by_id.prefsrc) == ("10.9.0.2/32", 101, "10.77.0.1")
    shown = {each["dst"]: each for each in ip(netns, "route", "show", "table", "20101")}
    assert set(shown) == {"default", "10.9.0.3", "10.9.0.4", "10.8.0.0/16"}
    assert [each["weight"] for each in shown["10.9.0.4"]["nexthops"]] == [1, 4]
    assert shown["default"]["metric"] == 9
    assert ip(netns, "route", "show", "10.9.0.2")[0]["nhid"] == 101
    for route in [*netlink.routes(4, 20101), *netlink.routes(6, 20101), by_id]:
        netlink.del_route(route)
    assert netlink.routes(4, 20101) == netlink.routes(6, 20101) == []
    assert [each for each in netlink.routes(4) if each.protocol == 201] == []


def test_a_replaced_route_is_one_route(grouped):
    _, netlink, index = grouped
    netlink.replace_route(Route("10.9.0.2/32", 4, 20101, nexthop_id=101, protocol=201))
    netlink.replace_route(Route("10.9.0.2/32", 4, 20101, gateway="10.77.0.2", ifindex=index, protocol=201))
    (route,) = netlink.routes(4, 20101)
    assert (route.nexthop_id, route.gateway) == (None, "10.77.0.2")


@pytest.mark.parametrize("address", ["10.9.0.2", "fd00:9::2"])
def test_a_look_up_names_the_table_that_answers(grouped, address):
    netns, netlink, _ = grouped
    family = "-6" if ":" in address else "-4"
    support.run(["ip", "-n", netns, family, "route", "add", address, "dev", "v0", "table", "20101"])
    support.run(["ip", "-n", netns, family, "rule", "add", "pref", "5001", "fwmark", "7", "lookup", "20101"])
    for matched in (False, True):
        assert netlink.route_get(address, mark=7, matched=matched).table == 20101


@pytest.mark.parametrize(("ours", "address"), [("10.9.0.1", "10.9.0.2"), ("fd00:9::1", "fd00:9::2")])
def test_a_look_up_follows_the_source(grouped, ours, address):
    netns, netlink, _ = grouped
    family = "-6" if ":" in address else "-4"
    support.run(["ip", "-n", netns, "address", "add", ours, "dev", "lo"])
    support.run(["ip", "-n", netns, family, "route", "add", address, "dev", "v0", "table", "20101"])
    support.run(["ip", "-n", netns, family, "rule", "add", "pref", "5001", "from", ours, "lookup", "20101"])
    for matched in (False, True):
        assert netlink.route_get(address, source=ours, matched=matched).table == 20101
    with pytest.raises(NetlinkError, match="looking up the route to"):
        netlink.route_get(address)


def test_a_look_up_follows_the_mark(grouped):
    _, netlink, index = grouped
    netlink.replace_route(Route("10.9.0.2/32", 4, MAIN_TABLE, nexthop_id=11, protocol=201))
    netlink.replace_route(Route("10.9.0.2/32", 4, 20101, gateway="10.77.0.3", ifindex=index, protocol=201))
    rule = Rule(5001, 4, table=20101, mark=0x5E000001, mask=0xFF000FFF, protocol=201)
    netlink.add_rule(rule)
    assert netlink.route_get("10.9.0.2").gateway == "10.77.0.2"
    assert netlink.route_get("10.9.0.2", mark=0x5E000001).gateway == "10.77.0.3"
    assert netlink.route_get("10.9.0.2", mark=0x5E000002).gateway == "10.77.0.2"
    assert netlink.route_get("10.9.0.2", matched=True).nexthop_id == 11
    netlink.del_rule(rule)
    assert netlink.route_get("10.9.0.2", mark=0x5E000001).gateway == "10.77.0.2"
    with pytest.raises(NetlinkError, match=r"looking up the route to 192\.0\.2\.1"):
        netlink.route_get("192.0.2.1")


def test_rules_are_those_ip_shows(wired):
    netns, netlink, _ = wired
    rules = [
        Rule(5001, 4, table=20101, mark=0x5E000001, mask=0xFF000FFF, protocol=201),
        Rule(100, 4, "blackhole", iif="v0", destination="10.9.0.2/32", protocol=201),
        Rule(100, 6, "blackhole", iif="v0", destination="fd00:9::2/128", protocol=201),
    ]
    for rule in rules:
        netlink.add_rule(rule)
    found = [each for each in netlink.rules(4) + netlink.rules(6) if each.protocol == 201]
    assert set(found) == set(rules)
    shown = {each["priority"]: each for each in ip(netns, "rule")}
    assert (shown[5001]["fwmark"], shown[5001]["fwmask"]) == ("0x5e000001", "0xff000fff")
    assert shown[5001]["table"] == "20101"
    assert (shown[100]["iif"], shown[100]["dst"], shown[100]["action"]) == ("v0", "10.9.0.2", "blackhole")
    with pytest.raises(NetlinkError, match="adding rule 5001: File exists"):
        netlink.add_rule(rules[0])
    for rule in rules:
        netlink.del_rule(rule)
    assert [each for each in netlink.rules(4) + netlink.rules(6) if each.protocol == 201] == []


def test_a_table_of_thousands_is_read_whole(wired):
    _, netlink, index = wired
    for number in range(3000):
        prefix = f"10.200.{number // 250}.{number % 250}/32"
        netlink.replace_route(Route(prefix, 4, 20102, ifindex=index, protocol=201))
    routes = netlink.routes(4, 20102)
    assert len({route.destination for route in routes}) == len(routes) == 3000


def test_a_namespace_that_does_not_exist_is_named():
    with pytest.raises(UsageError, match="swerve-nowhere"):
        Netlink("swerve-nowhere")


# ---- who listens for changes ----


class Place(NamedTuple):
    """A namespace with a cable, our socket in it, and what listens there."""

    ip: Callable[..., str]
    ours: Netlink
    watch: NetlinkWatch
    netns: str


@pytest.fixture
def place(make_namespace):
    netns = make_namespace()

    def ip(*words):
        return support.run(["ip", "-n", netns, *words]).stdout

    support.ip(netns, "link add east type veth peer name west", "link set east up", "link set west up")
    support.ip(netns, "address add 10.1.0.1/24 dev east", "address add fd00:1::1/64 dev east nodad")
    support.wait_for_own_routes(netns, "east", "west")
    with Netlink(netns) as ours, NetlinkWatch([ours.socket.port], netns) as watch:
        yield Place(ip, ours, watch, netns)


def index(netlink):
    return next(link.index for link in netlink.links() if link.name == "east")


@pytest.mark.guest
def test_our_own_changes_are_no_news(place):
    ip, ours, watch, _ = place
    watch.read()
    ours.replace_nexthop(Nexthop(11, 4, "10.1.0.2", index(ours), 4))
    ours.replace_group(102, [Member(11, 1)], create=True)
    ours.replace_route(Route("10.9.0.0/24", 4, MAIN_TABLE, nexthop_id=102, protocol=4))
    ours.replace_group(102, [Member(11, 3)])  # tells of every route, by default
    ours.del_nexthop(102)
    assert watch.read() == News()
    ip("nexthop", "add", "id", "12", "via", "10.1.0.3", "dev", "east")
    assert watch.read() == News(True, False)


@pytest.mark.parametrize(
    ("words", "routes"),
    [
        (("nexthop", "add", "id", "11", "via", "10.1.0.2", "dev", "east"), False),
        (("route", "add", "10.9.0.0/24", "via", "10.1.0.2"), True),
        (("-6", "route", "add", "fd00:9::/64", "via", "fd00:1::2"), True),
        (("rule", "add", "from", "10.9.0.1", "lookup", "100"), False),
        (("-6", "rule", "add", "from", "fd00:9::1", "lookup", "100"), False),
        (("link", "set", "west", "down"), False),
    ],
)
def test_what_others_do_is_news(place, words, routes):
    ip, _, watch, _ = place
    watch.read()
    ip(*words)
    news = watch.read()
    support.wait_until(lambda: news.changed or watch.read().changed, 10, "the news comes")
    assert news.routes is routes or words[0] == "link"


def test_a_flood_says_that_everything_may_have_changed(place):
    _, _, watch, netns = place
    support.ip(netns, *(f"route add 10.9.{n >> 8}.{n & 255}/32 via 10.1.0.2 dev east" for n in range(2_000)))
    assert watch.read() == News(True, True)
    assert watch.read() == News()


# ---- threads that enter namespaces ----

NOBODY = 65534

_SQUATTER = """
import os, socket, sys
os.setuid(int(sys.argv[1]))
taken = socket.socket(socket.AF_UNIX)
taken.bind("\\0swerve-steer")
taken.listen(0)
fill = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(int(sys.argv[2]))]
for each in fill:
    each.connect_ex("\\0swerve-steer")
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_second_controller_of_the_namespace_is_refused_and_told_by_whom(namespace: str) -> None:
    refused = pytest.raises(RefusedError, match=rf"another name \(process {os.getpid()}\)")
    with inside(namespace), NamespaceLock(), refused:
        NamespaceLock(0.05)
    with inside(namespace), NamespaceLock() as again:
        assert again.fileno() >= 0


def test_another_namespace_is_another_lock(make_namespace: Callable[[], str]) -> None:
    one, other = make_namespace(), make_namespace()  # in that of the machine another test may hold it
    with inside(other), NamespaceLock(), inside(one), NamespaceLock():
        pass


def test_what_a_guardian_inherited_is_waited_for(namespace: str) -> None:
    with inside(namespace):
        lock = NamespaceLock()
        guardian = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(lock.fileno(),))
        lock.close()
        with pytest.raises(RefusedError):
            NamespaceLock(0.05)
        assert guardian.stdin is not None
        guardian.stdin.close()
        with NamespaceLock(5):
            pass
        assert guardian.wait(20) == 0


@pytest.mark.parametrize("pending", [0, 4], ids=["asked", "queue-full"])
def test_another_user_keeps_nobody_from_steering(namespace: str, pending: int) -> None:
    with inside(namespace):
        command = [sys.executable, "-c", _SQUATTER, str(NOBODY), str(pending)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as squatter:
            assert squatter.stdout is not None and squatter.stdin is not None
            assert squatter.stdout.readline() == "taken\n"
            with NamespaceLock(0.05):
                pass
            squatter.stdin.close()


def test_a_guardian_that_still_undoes_is_no_refusal(tmp_path: Path) -> None:
    """As a service the controller is started again after a failure, and not after a refusal."""
    first = Lock(tmp_path / "lock")
    guardian = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=(first.fd,))
    first.say({"pid": 2**22 + 1})  # a controller that is gone
    first.close()
    with pytest.raises(SwerveError, match="is being undone") as failure:
        Lock(tmp_path / "lock")
    assert failure.value.exit_code == 1
    assert guardian.stdin is not None
    guardian.stdin.close()
    guardian.wait(20)
    Lock(tmp_path / "lock").close()
