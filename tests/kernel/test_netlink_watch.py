"""News of the kernel: heard when others change something, not when we do; who deleted what."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import support

from pytools.kernel.netlink import MAIN_TABLE, Member, Netlink, Nexthop, Route
from pytools.kernel.netlink_watch import Heard, NetlinkWatch


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

    ip("link", "add", "east", "type", "veth", "peer", "name", "west")
    ip("link", "set", "east", "up")
    ip("link", "set", "west", "up")
    ip("address", "add", "10.1.0.1/24", "dev", "east")
    ip("address", "add", "fd00:1::1/64", "dev", "east", "nodad")
    support.wait_until(lambda: "tentative" not in ip("-6", "address"), 10, "the addresses are settled")
    with Netlink(netns) as ours, NetlinkWatch([ours.socket.port], netns) as watch:
        yield Place(ip, ours, watch, netns)


def index(netlink):
    return next(link.index for link in netlink.links() if link.name == "east")


def heard(watch, condition):
    """All news until there is what is waited for."""
    found = watch.read()

    def more():
        nonlocal found
        found = found.then(watch.read())
        return condition(found)

    support.wait_until(more, 10, "the news comes")
    return found


@pytest.mark.guest
def test_our_own_changes_are_no_news(place):
    ip, ours, watch, _ = place
    heard(watch, lambda _: True)
    ours.replace_nexthop(Nexthop(11, 4, "10.1.0.2", index(ours), 4))
    ours.replace_group(102, [Member(11, 1)], create=True)
    ours.replace_route(Route("10.9.0.0/24", 4, MAIN_TABLE, nexthop_id=102, protocol=4))
    ours.replace_group(102, [Member(11, 3)])  # tells of every route, by default
    ours.del_nexthop(102)
    assert watch.read() == Heard()
    ip("nexthop", "add", "id", "12", "via", "10.1.0.3", "dev", "east")
    assert watch.read() == Heard(True, made=frozenset({12}))


@pytest.mark.guest
def test_what_somebody_deleted_is_told_and_what_the_kernel_deleted_is_not(place):
    ip, ours, watch, _ = place
    for number in (11, 12):
        ip("nexthop", "add", "id", str(number), "via", f"10.1.0.{number}", "dev", "east")
    ip("nexthop", "add", "id", "21", "via", "fd00:1::2", "dev", "east")
    ip("-6", "route", "add", "fd00:9::/64", "nhid", "21")
    ip("route", "add", "10.9.0.0/24", "via", "10.1.0.2", "metric", "7")
    watch.read()
    ip("nexthop", "delete", "id", "11")
    ip("route", "delete", "10.9.0.0/24")
    news = heard(watch, lambda each: each.routes)
    assert (news.nexthops, news.routes, news.missed) == ({11}, {(MAIN_TABLE, "10.9.0.0/24", 7)}, False)
    ip("link", "set", "west", "down")
    support.wait_until(lambda: ours.nexthops() == [], 10, "the kernel has deleted what went with the carrier")
    news = heard(watch, lambda each: each.changed)
    assert (news.nexthops, news.routes) == (frozenset(), frozenset())


def test_what_was_made_again_is_not_deleted(place):
    ip, _, watch, _ = place
    add, delete = ("nexthop", "add", "id", "11", "via", "10.1.0.2", "dev", "east"), ("nexthop", "delete", "id", "11")
    ip(*add)
    ip(*delete)
    deleted = watch.read()
    assert deleted.nexthops == {11}
    ip(*add)
    again = deleted.then(watch.read())
    assert again.nexthops == frozenset()
    ip(*delete)
    assert again.then(watch.read()).nexthops == {11}


def test_a_flood_says_no_more_than_that_something_was_missed(place):
    _, _, watch, netns = place
    lines = "".join(f"route add 10.9.{n >> 8}.{n & 255}/32 via 10.1.0.2 dev east\n" for n in range(2_000))
    support.run(["ip", "-n", netns, "-batch", "-"], text_in=lines)
    news = watch.read()
    assert news.changed and news.missed and news.route_news
    assert len(news.made) < 2_000
    assert watch.read() == Heard()
