"""Two rails that are both bad: nothing is removed, and the controller says why."""

from __future__ import annotations

import math
import time

import pytest
import steering_kit as kit
import support
from steering_kit import FIRST, MS, SECOND, SECOND_HOP, controlled

EVEN = {FIRST: 1, SECOND_HOP: 1}
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 3s, max_drained_share: 0.5}
rules:
  - name: dead
    when: {signal: loss, above: 0.9, for: 100ms, clear_below: 0.01}
    then: {drain: {}}
  - name: silent
    when: {signal: silence, missed: 3}
    then: {drain: {}}
  - name: congested
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 1s, clear_below: 1ms}
    then: {shift: {share: 0}}
"""
LOAD, CONGESTED, QUEUE = "9mbit", "6mbit", 256_000  # of 20; full, it lasts for a third of a second without load
BAD_NS, ASKED_NS = 5 * MS, {"dead": 100 * MS, "silent": 100 * MS, "congested": 1000 * MS}  # of the policy
WATCHED_S = 3.0  # three times what a rule waits for
LAB = {"rate": "20mbit"}


def states(observer, host):
    found = {}
    observer.wait_for(lambda record: found.update(record.latest) or True, 0)
    return {path.interface: state for (name, path), state in found.items() if name == host.name}


def held(observer, host):
    """Whether the controller says of both paths why it leaves them as they are."""
    now = states(observer, host)
    return len(now) == 2 and all("every path to h2 looks bad" in state.reason for state in now.values())


def loaded(lab):
    """Whether the load of both rails has begun."""
    before = lab.sent_bytes()
    return lambda: all(sent - before[port] > 20_000 for port, sent in lab.sent_bytes().items() if port[1] == 2)


def drains(record):
    """The acts that took all weight from a rail."""
    return [act for act in record.acts if act.outcome == "applied" and 0 in act.after.values()]


def measured_to(record, act):
    """What was measured of the rail that an act moved traffic to, for as long as its rule asks; infinite: no answer."""
    (to,) = [hop.rpartition(" ")[2] for hop, weight in act.after.items() if weight]
    since_ns = act.decided_ns - max(ASKED_NS[rule] for rule in act.under.split(", "))
    return [
        delay.forward.queueing_p50_ns if delay.received else math.inf
        for delay in record.delays
        if delay.host == "h1" and delay.path.interface == to and since_ns < delay.at_ns < act.seen_ns
        if delay.window_ns < SECOND  # what rules of a short time are judged by
    ]


@pytest.mark.parametrize("trouble", ["full queues", "blackholes"])
def test_two_rails_that_are_both_bad_lose_nothing(lab, policy, observer, trouble):
    """On a machine that starves a load a rail may recover for a while: then it is no mistake to move there."""
    sender = lab.hosts[0]
    host = kit.Host(sender.netns)
    with controlled(host, policy, "--apply") as controller:
        support.wait_until(
            lambda: [state.state for state in states(observer, sender).values()] == ["healthy"] * 2, 30, "all is well"
        )
        if trouble == "blackholes":
            for rail in (1, 2):
                lab.blackhole(rail)
        else:
            for rail in (1, 2):
                lab.load(rail, LOAD, toward=2)
            support.wait_until(loaded(lab), 20, "both rails carry their load")
            for rail in (1, 2):
                lab.congest(rail, CONGESTED, QUEUE, toward=2)
        support.wait_until(
            lambda: held(observer, sender) or observer.wait_for(drains, 0), 20, "the controller says that both are bad"
        )
        seen, deadline = [], time.monotonic() + WATCHED_S
        while time.monotonic() < deadline:
            seen.append(host.weights())
            time.sleep(0.05)
        if any(weights != EVEN for weights in seen):
            assert observer.wait_for(drains, 10), "weights that no act changed"
        record = observer.take()
        for act in drains(record):
            measured = measured_to(record, act)
            assert measured and max(measured) <= BAD_NS, (act, measured)
        assert controller.end() == 0
    assert host.weights() == EVEN
