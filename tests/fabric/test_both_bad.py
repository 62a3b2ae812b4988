"""Two rails that are both bad: nothing is removed, and the controller says why."""

from __future__ import annotations

import time

import pytest
import steering_kit as kit
import support
from steering_kit import FIRST, SECOND_HOP, controlled

from pytools.lab import Lab

EVEN = {FIRST: 1, SECOND_HOP: 1}
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 3s, max_drained_share: 0.5}
rules:
  - name: dead
    when: {signal: loss, above: 0.5, for: 100ms, clear_below: 0.01}
    then: {drain: {}}
  - name: silent
    when: {signal: silence, missed: 3}
    then: {drain: {}}
  - name: congested
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 500ms, clear_below: 1ms}
    then: {shift: {share: 0}}
"""
LOAD, CONGESTED = "8mbit", "6mbit"  # of 20: one rail is not bad long before the other
WATCHED_S = 3.0  # many times what either rule waits for


@pytest.fixture
def lab(unique_name):
    with Lab.up(unique_name(), hosts=2, rails=2, rate="20mbit") as made:
        yield made


@pytest.fixture
def policy(tmp_path):
    return kit.policy_file(tmp_path, POLICY)


@pytest.fixture
def observer(lab):
    with kit.measuring(lab) as heard:
        yield heard


def states(observer, host):
    found = {}
    observer.wait_for(lambda record: found.update(record.latest) or True, 0)
    return {path.interface: state for (name, path), state in found.items() if name == host.name}


def troubled(observer, host):
    now = states(observer, host)
    return len(now) == 2 and all(state.state == "suspect" for state in now.values())


@pytest.mark.parametrize("trouble", ["full queues", "blackholes"])
def test_two_rails_that_are_both_bad_lose_nothing(lab, policy, observer, trouble):
    sender = lab.hosts[0]
    host = kit.Host(sender.netns)
    with controlled(host, policy, "--apply") as controller:
        support.wait_until(
            lambda: [state.state for state in states(observer, sender).values()] == ["healthy"] * 2, 30, "all is well"
        )
        observer.take()
        if trouble == "blackholes":
            for rail in (1, 2):
                lab.blackhole(rail)
        else:
            for rail in (1, 2):
                lab.load(rail, LOAD, toward=2)
            observer.take()
            for rail in (1, 2):
                lab.congest(rail, CONGESTED, toward=2)
            support.wait_until(lambda: troubled(observer, sender), 20, "both rails are suspect")
        seen, deadline = [], time.monotonic() + WATCHED_S
        while time.monotonic() < deadline:
            seen.append(host.weights())
            time.sleep(0.05)
        assert all(weights == EVEN for weights in seen)
        assert [act for act in observer.take().acts if act.outcome == "applied" and 0 in act.after.values()] == []
        assert controller.end() == 0
    assert host.weights() == EVEN
