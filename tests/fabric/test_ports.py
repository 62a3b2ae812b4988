"""New connections over one NIC take good ways of four hidden ones, and others go as they go without us."""

from __future__ import annotations

import signal

import ports_kit as kit
import pytest
import steering_kit
import support

from pytools import directories
from pytools.lab import namespaces
from steering.acting import acts_file

LAB = {"hosts": 2, "rails": 1, "inner": 4}
CONNECTIONS = 200
SLOW, DEAD = 2, 3  # of the four ways
KEEP = 32
POLICY = f"""\
version: 1
manage: {{destinations: [10.9.0.2/32]}}
ports: {{keep: {KEEP}, every: 20ms, dwell: 3s}}
"""


def status(host):
    """What is known of the service: how many ports, which routers are avoided."""
    known = {each["peer"]: each for each in steering_kit.status(host).get("ports", [])}
    return known.get(f"10.9.0.2:{kit.SERVICE}", {"known": 0, "avoided": []})


@pytest.mark.deadline(300)
def test_new_connections_avoid_bad_ways(lab, policy):
    first, second = lab.hosts
    unmanaged = second.interfaces[0].address
    for way in lab.rails[0].inner:
        namespaces.set_sysctls(way.netns, {"ipv4/icmp_ratelimit": 0})  # so that learning takes no minutes
    routers = {way: lab.rails[0].inner[way - 1].ports[0].address for way in (SLOW, DEAD)}
    steering_kit.agents(lab)

    def acts():
        return [act for _, act in acts_file.read(directories.state_dir(first.netns))]

    def wait(enough, seconds, what):
        """The destination is one that this host uses."""
        support.wait_until(lambda: kit.connect(first, second.service, 2) < 3 and enough(status(first)), seconds, what)

    with (
        kit.serving(second, [second.service, unmanaged]),
        kit.Ways(lab.rails[0], first) as ways,
        steering_kit.controlled(steering_kit.Host(first.netns), policy, "--apply") as controller,
    ):

        def share(address=second.service, **how):
            """Connections by way, and how many were answered."""
            ways.taken()
            answered = kit.connect(first, address, CONNECTIONS, **how)
            taken = ways.taken(address)
            assert sum(taken.values()) == CONNECTIONS
            return taken, answered

        wait(lambda it: it["known"] >= 2 * KEEP, 120, "ports are learnt")
        taken, answered = share()
        assert answered == CONNECTIONS and min(taken.values()) > CONNECTIONS // 10, "no way is avoided yet"

        lab.congest(1, "10mbit", 40_000, toward=2, inner=SLOW)
        lab.load(1, "11mbit", toward=2, inner=SLOW)
        lab.blackhole(1, inner=DEAD)
        wait(lambda it: it["avoided"] == sorted(routers.values()), 60, "both are avoided")
        taken, answered = share()
        assert taken[SLOW] + taken[DEAD] <= CONNECTIONS // 50 and answered >= CONNECTIONS - CONNECTIONS // 50, taken
        taken, _ = share(unmanaged, at_once=CONNECTIONS, wait_s=0.5)
        assert len(taken) == 4 and min(taken.values()) > CONNECTIONS // 10, "unmanaged ones are left alone"
        act = acts()[-1]
        assert (act.actuator, act.outcome, act.under) == ("ports", "applied", "ports")
        for way, state in ((SLOW, "slow"), (DEAD, "dead")):
            assert f"the way by {routers[way]} is {state}" in act.because

        lab.heal()
        wait(lambda it: not it["avoided"], 60, "all ways are good again")
        assert acts()[-1].outcome == "undone"

        lab.blackhole(1, inner=DEAD)
        wait(lambda it: it["avoided"], 60, "a way is avoided again")
        controller.end(signal.SIGKILL)
        taken, _ = share(at_once=CONNECTIONS, wait_s=0.5)
        assert taken[DEAD] > CONNECTIONS // 10, "the kernel chooses again"
