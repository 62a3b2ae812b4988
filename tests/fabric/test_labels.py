"""Live IPv6 connections over one NIC leave bad ways of four hidden ones by their flow labels, and come back.

Ways are bad in one direction only: acknowledgements have labels of the other host.
"""

from __future__ import annotations

import contextlib
import signal

import ports_kit as kit
import pytest
import steering_kit
import support

from pytools import directories
from pytools.lab import namespaces
from steering.acting import acts_file

LAB = {"hosts": 2, "rails": 1, "inner": 4, "ipv6": True}
CONNECTIONS = 40  # none on one of four ways: once in 25,000 times
UNMANAGED_PORT = 5902
SLOW, DEAD = 2, 3  # of the four ways
POLICY = """\
version: 1
manage: {destinations: ["fd00:9::2/128"]}
labels: {every: 20ms, dwell: 3s}
"""


def status(host):
    """What is known of the connections."""
    return next(iter(steering_kit.status(host).get("label_ways", [])), {"known": 0, "avoided": []})


@pytest.mark.deadline(300)
def test_live_connections_leave_bad_ways(lab, policy):
    first, second = lab.hosts
    for way in lab.rails[0].inner:
        namespaces.set_sysctls(way.netns, {"ipv6/icmp/ratelimit": 0})  # so that learning takes no minutes
    for host in lab.hosts:
        namespaces.set_sysctls(host.netns, {"core/txrehash": 0})  # so that what changes is our doing
    routers = {way: lab.rails[0].inner[way - 1].ports[0].address6 for way in (SLOW, DEAD)}
    steering_kit.agents(lab)

    def acts():
        return [act for _, act in acts_file.read(directories.state_dir(first.netns))]

    with contextlib.ExitStack() as stack:
        live = stack.enter_context(kit.Live(first, second, second.service6, CONNECTIONS))
        other = stack.enter_context(kit.Live(first, second, second.interfaces[0].address6, CONNECTIONS, UNMANAGED_PORT))
        ways = stack.enter_context(kit.LiveWays(lab.rails[0], first))
        others = stack.enter_context(kit.LiveWays(lab.rails[0], first, UNMANAGED_PORT))
        controller = stack.enter_context(steering_kit.controlled(steering_kit.Host(first.netns), policy, "--apply"))

        def taken(ways=ways, live=live, without=frozenset()):
            """The ways that each connection takes from now on."""
            ways.taken()
            found = {}

            def silent():
                for port, each in ways.taken().items():
                    found.setdefault(port, set()).update(each)
                return live.ports - found.keys() - without

            support.wait_until(lambda: not silent(), 60, "all connections are heard of")
            return {port: tuple(sorted(each)) for port, each in found.items() if port not in without}

        support.wait_until(lambda: status(first)["known"] == CONNECTIONS, 120, "ways of connections are learnt")
        before, before_others = taken(), taken(others, other)
        assert set(before.values()) == {(way,) for way in range(1, 5)}, "no way is avoided yet"

        lab.congest(1, "10mbit", 40_000, toward=2, inner=SLOW)
        lab.load(1, "11mbit", toward=2, inner=SLOW)
        lab.blackhole(1, (1, 2), inner=DEAD)
        support.wait_until(lambda: not {SLOW, DEAD} & set().union(*taken().values()), 60, "both are left")
        after = taken()
        assert not {SLOW, DEAD} & set().union(*after.values()), after
        stayed = {port for port, way in before.items() if not {SLOW, DEAD} & set(way)}
        assert all(after[port] == before[port] for port in stayed), "those on good ways stay"
        support.wait_until(lambda: status(first)["avoided"] == sorted(routers.values()), 60, "both are named")
        dead = {port for port, way in before_others.items() if DEAD in way}  # these wait longer and longer
        still = {port: way for port, way in before_others.items() if port not in dead}
        assert taken(others, other, dead) == still, "unmanaged ones stay"
        assert {(act.actuator, act.outcome, act.under) for act in acts()} == {("label", "applied", "labels")}
        assert sum(sum(act.after.values()) for act in acts()[-1:]) == CONNECTIONS
        because = " ".join(act.because for act in acts())
        for way, state in ((SLOW, "slow"), (DEAD, "dead")):
            assert f"the way by {routers[way]} is {state}" in because

        lab.heal()
        support.wait_until(lambda: acts()[-1].outcome == "undone", 60, "all ways are good again")
        assert taken() == before, "back to their own labels"

        lab.blackhole(1, (1, 2), inner=DEAD)
        support.wait_until(lambda: acts()[-1].outcome == "applied", 60, "a way is left again")
        lab.heal()
        controller.end(signal.SIGKILL)
        assert taken() == before, "the kernel's labels again"
        assert live.failed == other.failed == 0
