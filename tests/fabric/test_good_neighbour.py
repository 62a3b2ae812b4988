"""Beside FRR and bird: swerve touches what it was given and nothing else, and hands off what they change.

The two daemons route in the very namespace that is steered. What swerve has written is counted by the kernel's own
notices, which carry the netlink port of whoever caused them.
"""

from __future__ import annotations

import ipaddress
import json

import pytest
import routing_daemons
import steering_kit as kit
import support
from routing_daemons import Writes
from steering_kit import FIRST, GROUP, MS, SECOND_HOP, controlled

pytestmark = pytest.mark.beside

PREFIX = "10.9.0.2"
RAIL1, RAIL2, THIRD = ("10.1.1.1", "rail1"), ("10.2.1.1", "rail2"), ("10.2.1.9", "rail2")
CLASSIC, OBJECTS = "no zebra nexthop kernel enable\n", ""
PROTO_ONLY = "zebra nexthop proto only\n"  # else zebra takes others' groups for its own, and writes back what they were
BIRD = """\
router id 10.1.1.2;
protocol device {{ }}
protocol kernel {{ ipv4 {{ export all; }}; merge paths yes; scan time 1; }}
protocol static {{ ipv4; route 10.9.0.2/32 {hops}; }}
"""
EVEN = BIRD.format(hops="via 10.1.1.1 via 10.2.1.1")


def told(*hops, prefix=f"{PREFIX}/32"):
    """Lines of FRR's configuration."""
    return [f"ip route {prefix} {gateway} {interface}" for gateway, interface in hops]


@pytest.fixture
def host(make_namespace):
    """Two rails and no route over them."""
    support.require("vtysh", "bird", "birdc")
    made = kit.two_rails(make_namespace(), make_namespace())
    made.ip("nexthop", "flush", "proto", "201")
    return made


@pytest.fixture
def policy(tmp_path):
    manage = "manage: {destinations: [10.9.0.0/16]"
    assert manage in kit.POLICY
    return kit.policy_file(tmp_path, kit.POLICY.replace(manage, f"{manage}, objects: [nexthop_groups, multipath]"))


def hops(host):
    """Gateways, interfaces and weights of the managed route according to iproute2; empty without one."""
    found = json.loads(host.ip("-j", "route", "show", f"{PREFIX}/32"))
    several = [each for route in found for each in route.get("nexthops") or [route]]
    return {(each["gateway"], each["dev"]): each.get("weight", 1) for each in several}


def has(host, *wanted):
    """Wait until the managed route has these hops."""
    support.wait_until(lambda: set(hops(host)) == set(wanted), 20, f"the route has {wanted}")


def steers(agent):
    """Congest rail 1 and wait until that was acted upon."""
    support.wait_until(lambda: len(agent.states) == 2, 20, "the controller speaks of both paths")
    agent.queueing_ns[1] = 20 * MS
    return support.wait_until(lambda: agent.acts_of("applied"), 20, "rail 1 is left")[0]


def becomes_manual(agent):
    """Wait until both paths are called manual, with a reason."""
    support.wait_until(
        lambda: {each.state for each in agent.states.values()} == {"manual"}, 10, "the state is manual", every_s=0.002
    )
    assert all("somebody changed" in each.reason for each in agent.states.values())


def ours(writes, controller):
    """What the controller and its guardian have written so far."""
    return writes.by(controller.process.pid, controller.guardian())


def tempt(agent):
    """Give every reason to act, and to take it back, for long enough that each would be acted upon."""
    acts = len(agent.acts_of("applied"))
    for queueing_ns in (20 * MS, 0, 20 * MS):
        agent.queueing_ns[1] = queueing_ns
        seen = agent.published
        support.wait_until(lambda seen=seen: agent.published > seen + 100, 30, "two seconds of measurements")
    assert len(agent.acts_of("applied")) == acts


def number(nexthop_id):
    """A nexthop's number, as Writes has it."""
    return str(ipaddress.ip_address(nexthop_id.to_bytes(4, "little")))


@pytest.mark.parametrize("zebra", [PROTO_ONLY, CLASSIC], ids=["nexthop objects", "classic multipath"])
def test_what_was_not_given_is_not_touched(host, agent, policy, zebra):
    """A route of FRR outside the managed prefixes, over the same rails."""
    for nexthop_id, (gateway, interface) in ((FIRST, RAIL1), (SECOND_HOP, RAIL2)):
        host.ip("nexthop", "add", "id", str(nexthop_id), "via", gateway, "dev", interface, "proto", "201")
    host.ip("nexthop", "add", "id", str(GROUP), "group", f"{FIRST}/{SECOND_HOP}", "proto", "201")
    host.ip("route", "add", f"{PREFIX}/32", "nhid", str(GROUP), "proto", "201")

    def zebras():
        objects = [each for each in json.loads(host.ip("-j", "nexthop")) if each["protocol"] == "zebra"]
        return objects, json.loads(host.ip("-j", "route", "show", "10.8.0.0/16"))

    static = "\n".join(told(RAIL1, RAIL2, prefix="10.8.0.0/16"))
    with routing_daemons.frr(host.netns, zebra, static), Writes(host.netns) as writes:
        support.wait_until(lambda: len(zebras()[1]) == 1, 20, "FRR has its route")
        before = zebras()
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            has(host, RAIL2)
            agent.queueing_ns[1] = 0
            support.wait_until(lambda: hops(host) == {RAIL1: 1, RAIL2: 1}, 20, "rail 1 is back")
            acts = support.wait_until(lambda: len(agent.acts_of("applied")) == 4 and agent.acts, 20, "all is told")
            counted = ours(writes, controller)
            # By default the kernel tells of every route of a group that is replaced, too.
            assert set(counted) <= {("nexthop", number(GROUP)), ("route", PREFIX)}
            assert counted["nexthop", number(GROUP)] == len(acts)
            assert controller.end() == 0
        assert zebras() == before


def test_frr_adds_a_hop_and_has_it(host, agent, policy):
    static = "\n".join(told(RAIL1, RAIL2))
    with routing_daemons.frr(host.netns, CLASSIC, static) as frr, Writes(host.netns) as writes:
        has(host, RAIL1, RAIL2)
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            seen = agent.published
            support.wait_until(lambda: agent.published > seen + 150, 30, "rail 1 stays bad for three seconds")
            has(host, RAIL2)
            assert ours(writes, controller) == {("route", PREFIX): 1}, "a route of one hop left is still ours"
            frr.configure(*told(THIRD))
            has(host, RAIL1, RAIL2, THIRD)
            becomes_manual(agent)
            tempt(agent)
            assert ours(writes, controller) == {("route", PREFIX): 1}, "hands off"
            controller.end()
        assert set(hops(host)) == {RAIL1, RAIL2, THIRD}, "also at the end"


def test_frr_leaves_one_hop_and_has_it(host, agent, policy):
    static = "\n".join(told(RAIL1, RAIL2))
    with routing_daemons.frr(host.netns, CLASSIC, static) as frr, Writes(host.netns) as writes:
        has(host, RAIL1, RAIL2)
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            has(host, RAIL2)
            frr.configure(*(f"no {line}" for line in told(RAIL2)))
            has(host, RAIL1)
            tempt(agent)
            assert ours(writes, controller) == {("route", PREFIX): 1}, "hands off"
            controller.end()
        assert set(hops(host)) == {RAIL1}, "also at the end"


def test_zebra_puts_its_nexthop_group_back_and_has_it(host, agent, policy):
    """Zebra installs a group of its own again as soon as somebody else has changed it; then it makes another one."""
    static = "\n".join(told(RAIL1, RAIL2))
    with routing_daemons.frr(host.netns, OBJECTS, static) as frr, Writes(host.netns) as writes:
        has(host, RAIL1, RAIL2)
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            becomes_manual(agent)
            has(host, RAIL1, RAIL2)
            before = ours(writes, controller)
            frr.configure(*told(THIRD))
            has(host, RAIL1, RAIL2, THIRD)
            tempt(agent)
            assert ours(writes, controller) == before, "hands off, also from the group that is new"
            controller.end()
        assert set(hops(host)) == {RAIL1, RAIL2, THIRD}, "also at the end"


@pytest.mark.parametrize("zebra", [OBJECTS, CLASSIC], ids=["nexthop objects", "classic multipath"])
def test_a_route_that_frr_withdraws_stays_withdrawn(host, agent, policy, zebra):
    static = "\n".join(told(RAIL1, RAIL2))
    with routing_daemons.frr(host.netns, zebra, static) as frr, Writes(host.netns) as writes:
        has(host, RAIL1, RAIL2)
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            frr.configure(*(f"no {line}" for line in told(RAIL1, RAIL2)))
            has(host)
            before = ours(writes, controller)
            tempt(agent)
            assert ours(writes, controller) == before
            controller.end()
        assert hops(host) == {}


def test_bird_puts_its_route_back_and_has_it(host, agent, policy):
    """Bird compares every second and does not like what it did not do itself."""
    with routing_daemons.bird(host.netns, EVEN), Writes(host.netns) as writes:
        has(host, RAIL1, RAIL2)
        with controlled(host, policy, "--apply") as controller:
            steers(agent)
            becomes_manual(agent)
            has(host, RAIL1, RAIL2)
            tempt(agent)
            assert ours(writes, controller) == {("route", PREFIX): 1}, "hands off"
            controller.end()
        assert hops(host) == {RAIL1: 1, RAIL2: 1}


def test_bird_changes_weights_before_anything_is_steered_and_has_them(host, agent, policy):
    with routing_daemons.bird(host.netns, EVEN) as bird, Writes(host.netns) as writes:
        has(host, RAIL1, RAIL2)
        with controlled(host, policy, "--apply") as controller:
            support.wait_until(lambda: len(agent.states) == 2, 20, "the controller speaks of both paths")
            bird.configure(BIRD.format(hops="via 10.1.1.1 weight 5 via 10.2.1.1 weight 2"))
            support.wait_until(lambda: hops(host) == {RAIL1: 5, RAIL2: 2}, 20, "bird's weights are there")
            becomes_manual(agent)
            tempt(agent)
            assert ours(writes, controller) == {}
            controller.end()
        assert hops(host) == {RAIL1: 5, RAIL2: 2}
