"""A controller that is killed or restarted: its guardian keeps what is in force, and its successor goes on with it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import pytest
import steering_kit as kit
import support
from steering_kit import EVEN, STEERED, controlled, steered

from pytools import directories
from steering.acting.lock import holder
from steering.guarding.takeover import SOCKET

pytestmark = pytest.mark.beside

KEPT_S = 15.0
POLICY = kit.POLICY.replace("takeover: 0s", "takeover: 15s")
SHORT = kit.POLICY.replace("takeover: 0s", "takeover: 1s")


@contextlib.contextmanager
def deletions(host):
    """What of rules, groups and routes is deleted meanwhile: a list that is filled at the end."""
    found = []
    words = ["ip", "-n", host.netns, "-o", "monitor", "nexthop", "rule", "route"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield found
        finally:
            process.terminate()
            found += [line for line in process.communicate(timeout=10)[0].splitlines() if "Deleted" in line]


def kept(controller):
    """Whether a guardian keeps what is in force for a successor."""
    return (controller.folder / SOCKET).exists()


def killed(controller):
    controller.kill()
    controller.process.wait(10)
    support.wait_until(lambda: kept(controller), 10, "the guardian keeps what is in force")


def left(host, agent):
    """Rail 1 is left, and everybody knows it."""
    steered(host, agent)
    support.wait_until(lambda: agent.states[kit.path(1)].state == "drained", 10, "rail 1 is drained")


def goes_on(host, agent, controller):
    """Wait until a successor is in charge and speaks of both paths."""
    support.wait_until(lambda: len(agent.states) == 2, 20, "the successor speaks of both paths")
    support.wait_until(lambda: not kept(controller), 20, "the guardian before has gone")
    support.wait_until(controller.guardian, 10, "its own guardian is there")


def test_a_successor_goes_on_with_what_a_killed_controller_has_in_force(host, agent, policy):
    before = host.others()
    with controlled(host, policy, "--apply") as first:
        left(host, agent)
        since = agent.states[kit.path(1)].since_ns
        killed(first)
        assert host.weights() == STEERED and host.ours() == 1
        agent.states.clear()
        with controlled(host, policy, "--apply") as second:
            goes_on(host, agent, second)
            state = agent.states[kit.path(1)]
            assert (state.state, state.since_ns, state.under) == ("drained", since, "leave-congested-rail")
            assert host.weights() == STEERED and host.ours() == 1
            agent.queueing_ns[1] = 0
            support.wait_until(lambda: len(agent.acts_of("applied")) > 1, 30, "rail 1 comes back as ever")
            assert second.end() == 0
    shares = [act.after["10.1.1.1 dev rail1"] / act.after["10.2.1.1 dev rail2"] for act in agent.acts_of("applied")]
    assert shares[:2] == [0, 0.1], "left once, by the first; back in steps, by the second"
    assert support.mentions(second.errors, "took over", "1 targets", "1 paths")
    assert host.others() == before and "proto 201" not in host.ip("nexthop")


def test_while_a_successor_takes_over_nothing_is_deleted(host, agent, policy):
    with controlled(host, policy, "--apply") as first, deletions(host) as deleted:
        left(host, agent)
        killed(first)
        agent.states.clear()
        with controlled(host, policy, "--apply") as second:
            goes_on(host, agent, second)
            killed(second)
            agent.states.clear()
            with controlled(host, policy, "--apply") as third:
                goes_on(host, agent, third)
                third.kill()  # the end would delete
                support.wait_until(lambda: kept(third), 10, "its guardian keeps it")
                assert host.weights() == STEERED and deleted == []
                support.swerve("steer", "off", "-n", host.netns)
                assert host.weights() == EVEN


def test_without_a_successor_the_rules_are_deleted_in_the_end(host, agent, tmp_path):
    with controlled(host, kit.policy_file(tmp_path, SHORT), "--apply") as controller:
        left(host, agent)
        killed(controller)
        assert host.weights() == STEERED, "for a second"
        support.wait_until(lambda: host.weights() == EVEN, 10, "the weights are back")
        support.wait_until(controller.lock_is_free, 10, "the guardian has gone")
    last = controller.journal()[-1]
    assert (last.kind, last.by) == ("undone", "guardian") and "no successor took over" in last.because
    assert "stays for 1 s, for a successor" in controller.errors and not kept(controller)


@pytest.mark.parametrize("why", ["policy", "confirm"])
def test_a_policy_may_have_nothing_kept_and_a_run_that_nobody_confirmed_is_not(host, agent, policy, tmp_path, why):
    file, more = (kit.policy_file(tmp_path), ()) if why == "policy" else (policy, ("--confirm", "60s"))
    with controlled(host, file, "--apply", *more) as controller:
        left(host, agent)
        controller.kill()
        support.wait_until(lambda: host.weights() == EVEN, 20, "the weights are back")
    assert "stays for" not in controller.errors


def test_a_guardian_that_is_killed_while_it_waits_leaves_the_rest_to_the_next_start(host, agent, policy):
    with controlled(host, policy, "--apply") as first:
        left(host, agent)
        guardian = first.guardian()
        killed(first)
        os.kill(guardian, signal.SIGKILL)
        support.wait_until(first.lock_is_free, 10, "nobody guards any more")
        assert host.weights() == STEERED
        agent.queueing_ns[1] = 0
        agent.states.clear()
        with controlled(host, policy, "--apply") as second:
            support.wait_until(lambda: host.weights() == EVEN, 10, "what nobody guarded is taken back")
            support.wait_until(lambda: len(agent.states) == 2, 20, "and it goes on")
            assert not kept(second), "of the guardian nothing is left, its socket either"
            assert second.end() == 0
    assert "took over" not in second.errors


@pytest.mark.parametrize("what", ["torn", "missing", "of another policy"])
def test_what_cannot_be_understood_is_taken_back(host, agent, policy, tmp_path, what):
    memory = directories.steering_memory(host.netns)
    with controlled(host, policy, "--apply") as first:
        left(host, agent)
        killed(first)
        if what == "torn":
            memory.write_bytes(memory.read_bytes()[:-100])
        elif what == "missing":
            memory.unlink()
        else:
            kit.policy_file(tmp_path, POLICY.replace("manage: {", "manage: {table: 25000, "))
        agent.queueing_ns[1] = 0
        with controlled(host, policy, "--apply") as second:
            support.wait_until(lambda: host.weights() == EVEN, 20, "the weights are back")
            support.wait_until(lambda: not kept(second), 20, "the guardian before has gone")
            support.wait_until(lambda: host.ours() == 0, 10, "no rule is left")
            assert second.end() == 0
    assert ("is undone" if what == "of another policy" else "nothing is taken over") in second.errors


def test_a_rule_that_the_next_policy_lacks_leaves_its_path_to_another(host, agent, policy, tmp_path):
    with controlled(host, policy, "--apply") as first:
        left(host, agent)
        killed(first)
        kit.policy_file(tmp_path, POLICY.replace("leave-congested-rail", "another-name"))
        agent.states.clear()
        with controlled(host, policy, "--apply") as second:
            goes_on(host, agent, second)
            state = agent.states[kit.path(1)]
            assert (state.state, state.under) == ("drained", "another-name") and host.weights() == STEERED
            assert second.end() == 0


def test_a_dry_run_takes_back_what_is_kept(host, agent, policy):
    with controlled(host, policy, "--apply") as first:
        left(host, agent)
        killed(first)
        agent.states.clear()
        with controlled(host, policy) as second:
            support.wait_until(lambda: host.weights() == EVEN, 10, "the weights are back")
            support.wait_until(lambda: len(agent.states) == 2 and not kept(second), 20, "it runs dry")
            assert second.end() == 0


def test_the_operator_switches_off_what_a_guardian_keeps(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        left(host, agent)
        killed(controller)
        said = support.swerve("steer", "off", "-n", host.netns).stdout
        assert "original weights are back" in said and host.weights() == EVEN and host.ours() == 0
        support.wait_until(controller.lock_is_free, 10, "the guardian has gone")
    assert controller.journal()[-1].by == "command"


def test_a_planned_restart_hands_over_and_an_interrupt_puts_back(host, agent, policy):
    with controlled(host, policy, "--apply", "--hand-over") as first, deletions(host) as deleted:
        left(host, agent)
        first.kill(signal.SIGTERM)
        assert first.process.wait(10) == 0
        assert host.weights() == STEERED
        agent.states.clear()
        with controlled(host, policy, "--apply", "--hand-over") as second:
            goes_on(host, agent, second)
            assert host.weights() == STEERED
            began = len(deleted)
            assert second.end(signal.SIGINT) == 130
            assert host.weights() == EVEN and second.lock_is_free() and began == 0


def test_a_successor_that_ends_before_it_is_ready_leaves_all_to_the_next(host, agent, policy):
    with controlled(host, policy, "--apply") as first:
        left(host, agent)
        killed(first)
        lock = first.folder / "lock"
        for _ in range(2):
            with kit.Controller(host, policy, "--apply").process as process:
                pid = process.pid
                support.wait_until(lambda pid=pid: (holder(lock) or {}).get("pid") == pid, 20, "it has the locks")
                process.kill()
                process.communicate(timeout=10)
        assert host.weights() == STEERED
        agent.states.clear()
        with controlled(host, policy, "--apply") as last:
            goes_on(host, agent, last)
            assert host.weights() == STEERED and last.end() == 0


def test_status_says_what_is_kept_and_for_how_long(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        left(host, agent)
        killed(controller)
        assert "kept for a successor" in support.swerve("steer", "status", "-n", host.netns).stdout
        found = kit.status(host)
        assert found["running"] is False and 0 < found["kept_for_s"] <= KEPT_S and len(found["in_force"]) == 1
        support.swerve("steer", "off", "-n", host.netns)
