"""A host with two NICs and a default route of a DHCP client over each: the lease of the one left goes and returns."""

from __future__ import annotations

import pytest
import steering_kit as kit
import support
from steering_kit import FIRST, SECOND_HOP, controlled, path

pytestmark = pytest.mark.beside


@pytest.fixture
def host(make_namespace):
    made = kit.two_rails(make_namespace(), make_namespace())
    made.ip("route", "del", "10.9.0.2/32")
    for number in (kit.GROUP, FIRST, SECOND_HOP):
        made.ip("nexthop", "del", "id", str(number))
    for rail in (1, 2):
        lease(made, rail)
    return made


def lease(host, rail):
    hop = ("via", f"10.{rail}.1.1", "dev", f"rail{rail}", "src", f"10.{rail}.1.2")
    host.ip("route", "add", "default", *hop, "proto", "dhcp", "metric", str(100 + rail))


def test_its_path_stays_left(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        support.wait_until(lambda: len(agent.states) == 2, 20, "the controller speaks of both paths")
        kit.steered(host, agent)
        support.wait_until(lambda: agent.states[path(1)].state == "drained", 10, "rail 1 is left")
        before = host.others()
        seen = len(agent.state_log)
        host.ip("route", "del", "default", "metric", "101")
        support.wait_until(lambda: host.ours() == 0, 10, "with one hop nothing is steered")
        lease(host, 1)
        support.wait_until(lambda: host.ours() == 1 and host.weights() == kit.STEERED, 10, "rail 1 is left again")
        heard = {each.state for each in agent.state_log[seen:] if each.path == path(1)}
        assert heard <= {"drained"}, "what was known of it was forgotten"
        assert sorted(host.others()) == sorted(before)
        assert controller.end() == 0
    assert host.ours() == 0 and sorted(host.others()) == sorted(before)
