"""Beside FRR and bird: they route in the very namespace that is steered, and nothing of theirs is ever written.

What swerve has written is counted by the kernel's own notices, which carry the netlink port of whoever caused them.
"""

from __future__ import annotations

import contextlib
import json

import pytest
import routing_daemons
import steering_kit as kit
import support
from routing_daemons import Writes
from steering_kit import FIRST, MS, SECOND_HOP, controlled

pytestmark = pytest.mark.beside

PREFIX = "10.9.0.2"
RAIL1, RAIL2, THIRD = ("10.1.1.1", "rail1"), ("10.2.1.1", "rail2"), ("10.2.1.9", "rail2")
BIRD = """\
router id 10.1.1.2;
protocol device {{ }}
protocol kernel {{ ipv4 {{ export all; }}; merge paths yes; scan time 1; }}
protocol static {{ ipv4; {routes} }}
"""


class Frr:
    """FRR with a static route."""

    def __init__(self, zebra):
        self.zebra = zebra

    @contextlib.contextmanager
    def routes(self, host, *hops):
        with routing_daemons.frr(host.netns, self.zebra, staticd="\n".join(self._lines(hops))) as daemon:
            self._daemon, self._hops = daemon, hops
            yield

    def set(self, *hops):
        gone = [f"no {line}" for line in self._lines([hop for hop in self._hops if hop not in hops])]
        self._daemon.configure(*self._lines([hop for hop in hops if hop not in self._hops]), *gone)
        self._hops = hops

    @staticmethod
    def _lines(hops):
        return [f"ip route {PREFIX}/32 {gateway} {interface}" for gateway, interface in hops]


class Bird:
    """bird with a static route; it compares the kernel with what it wants every second."""

    @contextlib.contextmanager
    def routes(self, host, *hops):
        with routing_daemons.bird(host.netns, self._text(hops)) as daemon:
            self._daemon = daemon
            yield

    def set(self, *hops):
        self._daemon.configure(self._text(hops))

    @staticmethod
    def _text(hops):
        ways = " ".join(f"via {gateway}" for gateway, _ in hops)
        return BIRD.format(routes=f"route {PREFIX}/32 {ways};" if hops else "")


DAEMONS = {
    "frr as installed": lambda: Frr(""),
    "frr classic": lambda: Frr("no zebra nexthop kernel enable\n"),
    "bird": Bird,
}


@pytest.fixture(params=DAEMONS)
def daemon(request):
    return DAEMONS[request.param]()


@pytest.fixture
def host(make_namespace):
    """Two rails and no route over them."""
    support.require("vtysh", "bird", "birdc")
    made = kit.two_rails(make_namespace(), make_namespace())
    for number in (kit.GROUP, FIRST, SECOND_HOP):
        made.ip("nexthop", "del", "id", str(number))
    return made


def theirs(host):
    """Gateways and interfaces of the daemon's route; empty without one."""
    found = json.loads(host.ip("-j", "route", "show", f"{PREFIX}/32"))
    return {(each["gateway"], each["dev"]) for route in found for each in route.get("nexthops") or [route]}


def used(host):
    """Gateways and interfaces that packets may leave by."""
    [route] = json.loads(host.ip("-j", "route", "get", "fibmatch", PREFIX))
    return {(each["gateway"], each["dev"]) for each in route.get("nexthops") or [route]}


def has(host, *wanted):
    support.wait_until(lambda: theirs(host) == set(wanted), 20, f"its route leads over {wanted}")


def steers(agent):
    """Congest rail 1 and wait until that was acted upon."""
    support.wait_until(lambda: len(agent.states) == 2, 20, "the controller speaks of both paths")
    agent.queueing_ns[1] = 20 * MS
    return support.wait_until(lambda: agent.acts_of("applied"), 20, "rail 1 is left")[0]


def unchanged(host, before):
    """Whether all of theirs is as it was; zebra has a nexthop object more for each hop that it sees in our routes."""
    now = host.others()
    spares = [row for row in set(now) - set(before) if '"protocol": "zebra"' in row and row.startswith('{"id": ')]
    return [row for row in now if row not in spares] == before


def ours(host):
    """How many rules, routes and nexthops of ours there are."""
    words = (("rule",), ("route", "show", "table", "all"), ("nexthop",))
    return sum(host.ip("-d", *each).count("proto 201") for each in words)


def test_an_act_stays_and_nothing_of_theirs_changes(host, agent, policy, daemon):
    with daemon.routes(host, RAIL1, RAIL2), Writes(host.netns) as writes:
        has(host, RAIL1, RAIL2)
        before = host.others()
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            assert used(host) == {RAIL2}
            seen = agent.published
            support.wait_until(lambda: agent.published > seen + 150, 30, "rail 1 stays bad for three seconds")
            assert used(host) == {RAIL2} and unchanged(host, before), "also after its scans"
            assert len(agent.acts_of("applied")) == 1
            agent.queueing_ns[1] = 0
            support.wait_until(lambda: used(host) == {RAIL1, RAIL2} and host.ours() == 0, 20, "rail 1 is back")
            written = writes.by(controller.process.pid, controller.guardian())
            assert controller.end() == 0
        assert unchanged(host, before) and ours(host) == 0
        assert {what for what, _ in written} <= {
            "route",
            "no route",
            "nexthop",
            "no nexthop",
            "rule",
            "no rule",
        } and written


def test_hops_that_it_adds_and_withdraws_are_followed(host, agent, policy, daemon):
    with daemon.routes(host, RAIL1, RAIL2):
        has(host, RAIL1, RAIL2)
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            daemon.set(RAIL1, RAIL2, THIRD)
            has(host, RAIL1, RAIL2, THIRD)
            support.wait_until(lambda: used(host) == {RAIL2, THIRD}, 10, "the new hop joins; rail 1 stays left")
            daemon.set(RAIL1, RAIL2)
            has(host, RAIL1, RAIL2)
            support.wait_until(lambda: used(host) == {RAIL2}, 10, "it leaves again")
            daemon.set(RAIL1, THIRD)
            has(host, RAIL1, THIRD)
            support.wait_until(lambda: used(host) <= {RAIL1, THIRD}, 10, "nothing leads over what was withdrawn")
            assert controller.end() == 0
        assert used(host) == {RAIL1, THIRD} and ours(host) == 0


def test_a_route_that_it_withdraws_has_none_of_ours(host, agent, policy, daemon):
    with daemon.routes(host, RAIL1, RAIL2):
        has(host, RAIL1, RAIL2)
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            daemon.set()
            has(host)
            support.wait_until(lambda: ours(host) == 0, 10, "our rule and our route are gone")
            assert controller.end() == 0
        assert theirs(host) == set() and ours(host) == 0


@pytest.mark.parametrize("ends", ["killed", "off"])
def test_a_controller_that_ends_leaves_what_they_have(host, agent, policy, daemon, ends):
    with daemon.routes(host, RAIL1, RAIL2):
        has(host, RAIL1, RAIL2)
        before = host.others()
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            if ends == "killed":
                controller.kill()
            else:
                support.run([*support.SWERVE, "steer", "off", "-n", host.netns])
            support.wait_until(controller.lock_is_free, 20, "both have gone")
        assert used(host) == {RAIL1, RAIL2} and unchanged(host, before) and ours(host) == 0
