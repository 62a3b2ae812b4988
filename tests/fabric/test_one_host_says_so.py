"""A queue on the way to one host: its traffic goes another way, that to the other hosts stays where it was."""

from __future__ import annotations

import steering_kit as kit
import support
from steering_kit import controlled

POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 3s, max_drained_share: 0.5}
rules:
  - name: congested
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 100ms, clear_below: 1ms}
    then: {shift: {share: 0}}
"""
LOAD, CONGESTED = "8mbit", "6mbit"  # of 20
LAB = {"hosts": 3, "rate": "20mbit"}


def rails_to(host, address):
    """The rails that new flows to an address may take, by the route that the kernel finds."""
    words = ["ip", "-n", host.netns, "route", "get", "fibmatch", address]
    return {word for word in support.run(words).stdout.split() if word.startswith("rail")}


def test_congestion_toward_one_host_moves_its_traffic_alone(lab, policy, observer):
    sender = lab.hosts[0]
    with controlled(kit.Host(sender.netns), policy, "--apply") as controller:

        def healthy():
            found = {}
            observer.wait_for(lambda record: found.update(record.latest) or True, 0)
            mine = [state.state for (name, _), state in found.items() if name == sender.name]
            return mine == ["healthy"] * 4

        support.wait_until(healthy, 30, "all paths of the sender are healthy")
        before = {address: rails_to(sender, address) for address in ("10.9.0.2", "10.9.0.3")}
        lab.load(1, LOAD, toward=2)
        lab.congest(1, CONGESTED, toward=2)
        support.wait_until(lambda: rails_to(sender, "10.9.0.2") == {"rail2"}, 30, "the traffic to h2 has left rail 1")
        assert rails_to(sender, "10.9.0.3") == before["10.9.0.3"]
        acts = []

        def told():
            acts.extend(act for act in observer.take().acts if act.host == sender.name and act.outcome == "applied")
            return acts

        support.wait_until(told, 20, "the act is told, which follows it")
        assert all("h2" in act.because and "h3" not in act.because for act in acts)
        assert controller.end() == 0
    assert {address: rails_to(sender, address) for address in before} == before
