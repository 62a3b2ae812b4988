"""News of the kernel: heard when others change something, not when we do."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import support

from pytools.kernel.netlink.monitor import NetlinkWatch, News
from pytools.kernel.netlink.routing import MAIN_TABLE, Member, Netlink, Nexthop, Route


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
    support.wait_for_link_local(netns, "east", "west")
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
    lines = "".join(f"route add 10.9.{n >> 8}.{n & 255}/32 via 10.1.0.2 dev east\n" for n in range(2_000))
    support.run(["ip", "-n", netns, "-batch", "-"], text_in=lines)
    assert watch.read() == News(True, True)
    assert watch.read() == News()
