"""MPTCP connections over one NIC leave a bad way of four hidden ones: another subflow, then the end of the bad one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import ports_kit as kit
import pytest
import steering_kit
import support

from pytools import directories
from pytools.lab import namespaces
from steering.acting import acts_file

LAB = {"hosts": 2, "rails": 1, "inner": 4}
IPPROTO_MPTCP = 262
CONNECTIONS = 8
KEEP = 16
POLICY = f"""\
version: 1
manage: {{destinations: [10.9.0.2/32]}}
ports: {{keep: {KEEP}, every: 20ms, dwell: 3s, mptcp: true}}
"""


def status(host):
    """What is known of subflows and ports."""
    facts = steering_kit.status(host)
    return facts.get("subflows", {"known": 0}), facts.get("ports", []), facts.get("subflows_missing", "")


@pytest.mark.deadline(300)
def test_mptcp_connections_leave_a_bad_way(lab, policy):
    if not Path("/proc/sys/net/mptcp/pm_type").exists():
        pytest.skip("this kernel has no userspace path manager of MPTCP")
    first, second = lab.hosts
    for way in lab.rails[0].inner:
        namespaces.set_sysctls(way.netns, {"ipv4/icmp_ratelimit": 0})  # so that learning takes no minutes
    steering_kit.agents(lab)
    with contextlib.ExitStack() as stack:
        with steering_kit.controlled(steering_kit.Host(first.netns), policy, "--apply"):
            support.wait_until(lambda: "pm_type=1" in status(first)[2] or "is off" in status(first)[2], 60, "said why")
        namespaces.set_sysctls(first.netns, {"mptcp/pm_type": 1})
        live = stack.enter_context(kit.Live(first, second, second.service, CONNECTIONS, protocol=IPPROTO_MPTCP))
        ways = stack.enter_context(kit.LiveWays(lab.rails[0], first, family=4))
        stack.enter_context(steering_kit.controlled(steering_kit.Host(first.netns), policy, "--apply"))

        def taken():
            """The ways that subflows take from now on; a second of them."""
            ways.taken()
            found, sent = {}, live.sent

            def heard():
                for port, each in ways.taken().items():
                    found.setdefault(port, set()).update(each)
                return live.sent > sent + 20

            support.wait_until(heard, 30, "all have sent")
            return found

        def learnt():
            subflows, ports, _ = status(first)
            return subflows["known"] == CONNECTIONS and any(each["known"] >= 2 * KEEP for each in ports)

        support.wait_until(learnt, 120, "ways of subflows and ports are learnt")
        before = taken()
        assert before.keys() == live.ports
        assert all(len(each) == 1 for each in before.values())
        slow = min(set().union(*before.values()))  # one that their hash has drawn
        lab.congest(1, "10mbit", 40_000, toward=2, inner=slow)
        lab.load(1, "11mbit", toward=2, inner=slow)
        support.wait_until(lambda: slow not in set().union(*taken().values()), 60, "the slow way is left")
        after = taken()
        stayed = {port for port, way in before.items() if slow not in way}
        assert stayed <= after.keys() and len(after) == CONNECTIONS, "those on good ways stay"
        acts = [act for _, act in acts_file.read(directories.state_dir(first.netns)) if act.actuator == "subflow"]
        assert len(acts) == CONNECTIONS - len(stayed) and {act.outcome for act in acts} == {"applied"}
        assert "is slow" in acts[0].because and live.failed == 0
