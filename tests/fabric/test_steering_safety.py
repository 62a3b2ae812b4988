"""A real controller and guardian on a real nexthop group, fed by a fake agent."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from pathlib import Path

import pytest
import steering_kit as kit
import support
from steering_kit import EVEN, FIRST, GROUP, MS, SECOND_HOP, STEERED, controlled, steered

from pytools import directories

pytestmark = pytest.mark.beside


def settled(agent):
    support.wait_until(lambda: len(agent.states) == 2, 20, "the controller speaks of both paths")


def test_congestion_is_steered_away_and_back(host, agent, policy):
    before = host.others()
    with controlled(host, policy, "--apply") as controller:
        settled(agent)
        assert host.weights() == EVEN and host.ours() == 0
        steered(host, agent)
        assert host.others() == before
        act = support.wait_until(lambda: agent.acts_of("applied"), 10, "the act is published")[0]
        assert act.what == "routes to 10.9.0.2/32"
        assert act.before == {"10.1.1.1 dev rail1": 1, "10.2.1.1 dev rail2": 1}
        assert act.after == {"10.1.1.1 dev rail1": 0, "10.2.1.1 dev rail2": 1}
        assert act.under == "leave-congested-rail"
        assert "20 ms" in act.because and "above 5 ms" in act.because
        assert act.seen_ns <= act.decided_ns <= act.acknowledged_ns
        agent.queueing_ns[1] = 0
        support.wait_until(lambda: host.weights() == EVEN, 20, "rail 1 is back at its whole weight")
        acts = support.wait_until(lambda: list(agent.acts) if len(agent.acts) > 3 else [], 10, "all acts are published")
        shares = [each.after["10.1.1.1 dev rail1"] / each.after["10.2.1.1 dev rail2"] for each in acts]
        assert shares == [0, 0.1, 0.5, 1]
        support.wait_until(lambda: agent.states[kit.path(1)].state == "healthy", 10, "rail 1 is healthy")
        assert host.ours() == 0, "undone: nothing leads to our table"
        assert controller.end() == 0
    assert host.others() == before
    kinds = [entry.kind for entry in controller.journal()]
    assert kinds == ["applied"] * 4
    assert controller.errors.count("died") == 0


def test_a_dry_run_changes_nothing_and_says_each_act_once(host, agent, policy):
    with controlled(host, policy) as controller:
        settled(agent)
        agent.queueing_ns[1] = 20 * MS
        support.wait_until(lambda: agent.acts_of("dry_run"), 20, "the act is reported")
        seen = len(agent.state_log)
        support.wait_until(lambda: len(agent.state_log) > seen + 4, 20, "time passes")
        assert [act.outcome for act in agent.acts] == ["dry_run"]
        assert host.weights() == EVEN
        assert controller.guardian() is None
        assert controller.end() == 0
    assert controller.journal() == []
    assert controller.output.count('"dry_run"') == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_puts_the_weights_back(host, agent, policy, number):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        assert controller.end(number) == (0 if number == signal.SIGTERM else 130)
        assert host.weights() == EVEN
        undone = support.wait_until(lambda: agent.acts_of("undone"), 10, "the undoing is published")[0]
        assert undone.after == {"10.1.1.1 dev rail1": 1, "10.2.1.1 dev rail2": 1}
        assert undone.decided_ns < undone.acknowledged_ns <= undone.at_ns
        assert controller.lock_is_free()
    assert controller.journal()[-1].kind == "undone"
    assert controller.journal()[-1].by == "controller"


def test_keep_leaves_the_weights_until_they_are_undone(host, agent, policy):
    with controlled(host, policy, "--apply", "--keep") as controller:
        steered(host, agent)
        assert controller.end() == 0
    assert host.weights() == STEERED
    done = support.swerve("steer", "undo", "-n", host.netns)
    assert "original weights are back" in done.stdout
    assert host.weights() == EVEN
    again = support.swerve("steer", "undo", "-n", host.netns)
    assert again.stdout == "nothing to undo\n"


@pytest.mark.guest(thorough=True)
def test_a_killed_controller_is_undone_by_its_guardian(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        controller.kill()
        support.wait_until(lambda: host.weights() == EVEN, 20, "the weights are back")
        support.wait_until(controller.lock_is_free, 10, "the guardian has gone")
    last = controller.journal()[-1]
    assert (last.kind, last.by, [weight for _, weight in last.after]) == ("undone", "guardian", [1, 1])
    assert last.because == kit.DIED, "it did not wait for the lease"


def test_the_operator_switches_off_whoever_steers(host, agent, policy):
    before = host.others()
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        said = support.swerve("steer", "off", "-n", host.netns).stdout
        assert "rule" in said
        assert host.weights() == EVEN and host.ours() == 0
        assert controller.process.wait(10) == 0
    assert host.others() == before and "201" not in host.ip("nexthop")


def test_a_last_link_that_goes_while_steered_leaves_their_route(host, agent, policy):
    """Rail 1 was left; with rail 2 our group is gone, and what the others have left decides."""
    with controlled(host, policy, "--apply"):
        steered(host, agent)
        host.ip("link", "set", "rail2", "down")
        support.wait_until(lambda: host.weights() == {FIRST: 1}, 20, "packets take what is left")


@pytest.mark.parametrize("delay_ms", [0.0, 0.7, 2.0])
def test_a_controller_killed_in_the_middle_of_an_act_is_undone(host, agent, policy, delay_ms):
    killed = kit.kill_mid_act(host, agent, policy, delay_ms / 1e3)
    assert killed.by in ("guardian", ""), "what was not noted yet is undone all the same"
    assert killed.at_once, "its guardian did not wait for the lease"


def test_a_hung_controller_is_killed_and_undone(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        controller.kill(signal.SIGSTOP)
        support.wait_until(lambda: host.weights() == EVEN, 20, "the weights are back after the lease")
        assert controller.process.wait(10) == -signal.SIGKILL
        support.wait_until(controller.lock_is_free, 10, "the guardian has gone")
    assert "stopped renewing its lease" in controller.errors


def stopped_before_it_is_ready(controller, former):
    """Another guardian than the former, stopped before it says that it is ready: it ignores SIGTERM before that."""

    def stopped():
        pid = controller.guardian()
        if pid in (None, former):
            return None
        os.kill(pid, signal.SIGSTOP)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        ignored = next(int(line.split()[1], 16) for line in lines if line.startswith("SigIgn:"))
        if not ignored >> signal.SIGTERM - 1 & 1:
            return pid
        os.kill(pid, signal.SIGKILL)  # too late: the next one
        return None

    return support.wait_until(stopped, 20, "another guardian is stopped while it starts")


def test_a_killed_guardian_is_replaced_before_anything_is_changed(host, agent, policy):
    stop_file = directories.state_dir(host.netns) / "freeze"
    with controlled(host, policy, "--apply") as controller:
        settled(agent)
        first = support.wait_until(controller.guardian, 10, "the guardian runs")
        stop_file.touch()
        agent.queueing_ns[1] = 20 * MS
        support.wait_until(lambda: agent.states[kit.path(1)].state == "suspect", 10, "an act is due")
        os.kill(first, signal.SIGKILL)
        second = stopped_before_it_is_ready(controller, first)
        stop_file.unlink()
        support.wait_until(lambda: "no live guardian" in agent.states[kit.path(1)].reason, 10, "the act is held")
        assert host.weights() == EVEN and agent.acts_of("applied") == []
        os.kill(second, signal.SIGCONT)
        steered(host, agent)
        controller.kill()
        support.wait_until(lambda: host.weights() == EVEN, 20, "the second guardian undid it")


def test_a_hung_guardian_is_replaced(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        settled(agent)
        first = support.wait_until(controller.guardian, 10, "the guardian runs")
        os.kill(first, signal.SIGSTOP)
        support.wait_until(lambda: controller.guardian() not in (None, first), 15, "another guardian runs")
        steered(host, agent)


def test_silence_holds_and_then_gives_the_original_weights_back(host, agent, policy):
    with controlled(host, policy, "--apply"):
        steered(host, agent)
        agent.silent = True
        support.wait_until(lambda: "hold" in agent.states[kit.path(1)].reason, 10, "the controller says that it holds")
        assert host.weights() == STEERED
        support.wait_until(lambda: host.weights() == EVEN, 15, "the original weights are back")
        assert agent.states[kit.path(1)].state in ("unmeasured", "drained")


def test_weights_that_somebody_else_changes_are_his_and_come_back(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        theirs = {FIRST: 7, SECOND_HOP: 3}
        host.ip("nexthop", "replace", "id", str(GROUP), "group", f"{FIRST},7/{SECOND_HOP},3")
        seen = len(agent.state_log)
        support.wait_until(lambda: len(agent.state_log) > seen + 6, 20, "time passes")
        assert set(host.weights()) == {SECOND_HOP}, "rail 1 stays left"
        controller.kill()
        support.wait_until(controller.lock_is_free, 10, "the guardian has gone")
        assert host.weights() == theirs
    assert controller.journal()[-1].kind == "undone"


def test_every_path_bad_changes_nothing(host, agent, policy):
    with controlled(host, policy, "--apply"):
        settled(agent)
        agent.queueing_ns = {1: 20 * MS, 2: 20 * MS}
        support.wait_until(
            lambda: "every path" in agent.states[kit.path(1)].reason, 10, "the controller says why it holds"
        )
        assert host.weights() == EVEN
        assert agent.states[kit.path(1)].state == "suspect"
    assert agent.acts == []


def test_a_second_controller_is_refused(host, agent, policy):
    with controlled(host, policy, "--apply"):
        settled(agent)
        done = support.run([*support.SWERVE, "steer", "run", "-n", host.netns, "--policy", str(policy)], check=False)
        assert done.returncode == 4
        assert "already runs" in done.stderr and done.stderr.count("\n") == 1


def test_undo_is_refused_while_a_controller_runs_unless_it_may_stop_it(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        refused = support.swerve("steer", "undo", "-n", host.netns, check=False)
        assert refused.returncode == 4 and "--stop" in refused.stderr
        assert host.weights() == STEERED
        support.swerve("steer", "undo", "--stop", "-n", host.netns)
        assert host.weights() == EVEN
        assert controller.process.wait(10) == 0


def test_a_controller_that_never_acted_is_stopped_as_well(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        settled(agent)
        assert controller.journal() == []
        assert "weights" not in support.swerve("steer", "undo", "--stop", "-n", host.netns).stdout
        assert controller.process.wait(10) == 0


def test_a_restart_settles_the_journal_first(host, agent, policy):
    """Both processes are gone at once: the next controller takes the act back before it does anything else."""
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        guardian = controller.guardian()
        controller.kill(signal.SIGSTOP)
        os.kill(guardian, signal.SIGKILL)
        controller.kill()
        controller.process.wait(10)
        support.wait_until(controller.lock_is_free, 10, "the lock is free")
        assert host.weights() == STEERED
    agent.queueing_ns[1] = 0
    with controlled(host, policy, "--apply") as controller:
        support.wait_until(lambda: host.weights() == EVEN, 10, "the act is taken back")
        support.wait_until(lambda: "undone" in [e.kind for e in controller.journal()], 10, "the journal says so")
        support.wait_until(lambda: host.ours() == 0, 10, "no rule is left")


def test_a_guardian_from_outside_undoes_what_both_have_left(host, agent, policy):
    """As in a container: they are killed together, and nobody starts them again."""
    command = [*support.SWERVE, "steer", "guard", "-n", host.netns]
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        outside = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        controller.kill(signal.SIGSTOP)
        os.kill(controller.guardian(), signal.SIGKILL)
        controller.kill()
        controller.process.wait(10)
        support.wait_until(lambda: host.weights() == EVEN and host.ours() == 0, 20, "the act is taken back")
        support.wait_until(lambda: "undone" in [e.kind for e in controller.journal()], 10, "the journal says so")
    outside.terminate()
    assert support.mentions(outside.communicate(timeout=20)[1], "guardian", "gone", "rules are deleted")
    assert outside.returncode == 0


@pytest.mark.parametrize("writable", [stat.S_IWGRP, stat.S_IWOTH])
@pytest.mark.parametrize("what", ["file", "directory"])
def test_a_policy_that_others_can_write_is_refused(host, policy, writable, what):
    target = policy if what == "file" else policy.parent
    target.chmod(stat.S_IMODE(target.stat().st_mode) | writable)
    done = support.swerve("steer", "run", "--apply", "-n", host.netns, "--policy", str(policy), check=False)
    assert done.returncode == 4
    assert "writable by" in done.stderr and done.stderr.count("\n") == 1
    assert not Path(directories.state_dir(host.netns) / "journal.jsonl").exists()


def test_a_policy_of_another_user_is_refused(host, policy):
    os.chown(policy, 65534, -1)
    done = support.swerve("steer", "run", "-n", host.netns, "--policy", str(policy), check=False)
    assert done.returncode == 4 and "65534" in done.stderr


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (
            [("route", "replace", "10.9.0.2/32", "via", "10.1.1.1")],
            ["nothing is managed: no rule can move anything", "not managed: 10.9.0.2/32: it has one hop"],
        ),
        (
            [("route", "del", "10.9.0.2/32")],
            ["nothing is managed", "not managed: 10.9.0.0/16: no route over a gateway"],
        ),
        (  # a table of their own for a source, and default routes
            [
                ("route", "del", "10.9.0.2/32"),
                ("route", "add", "default", "nhid", str(kit.GROUP)),
                ("rule", "add", "from", "10.9.0.1", "lookup", "100"),
                (
                    *("route", "add", "10.9.0.2/32", "table", "100"),
                    *["nexthop", "via", "10.1.1.1", "nexthop", "via", "10.2.1.1"],
                ),
            ],
            [
                "managed: 2 targets with 2 prefixes",
                "  routes to 10.9.0.2/32 in table 100: 10.1.1.1 dev rail1 weight 1, 10.2.1.1 dev rail2 weight 1",
                "  routes to 10.9.0.0/16: 10.1.1.1 dev rail1 weight 1, 10.2.1.1 dev rail2 weight 1",
            ],
        ),
    ],
    ids=["one hop", "no route", "source table and default"],
)
def test_the_start_says_what_is_managed_and_what_is_not(host, agent, policy, changes, shown):
    for words in changes:
        host.ip(*words)
    with controlled(host, policy, "--apply") as controller:
        facts = support.wait_until(lambda: kit.status(host).get("managed"), 20, "the controller answers")
        text = support.swerve("steer", "status", "-n", host.netns).stdout
        controller.end()
    for line in shown:
        assert f"swerve steer: {line}" in controller.errors, controller.errors
        assert line in text, text
    assert (facts["targets"] > 0) == shown[0].startswith("managed")
    assert all(each["reason"] and each["remedy"] for each in facts["not_managed"])


def test_status_and_history_say_what_was_done(host, agent, policy):
    with controlled(host, policy, "--apply") as controller:
        steered(host, agent)
        found = json.loads(support.swerve("steer", "status", "-n", host.netns, "-j").stdout)
        assert (found["running"], found["pid"], found["apply"]) == (True, controller.process.pid, True)
        [act] = found["in_force"]
        assert (list(act["kernel"].values()), list(act["original"].values())) == ([1], [1, 1])
        assert {state["state"] for state in found["paths"]} == {"drained", "healthy"}
        brief = json.loads(support.swerve("status", "-n", host.netns, "-j").stdout)
        assert (brief["steering"]["pid"], len(brief["steering"]["in_force"])) == (controller.process.pid, 1)
        controller.end()
    lines = support.swerve("steer", "history", "-n", host.netns, "-j").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["applied", "undone"]
    text = support.swerve("steer", "status", "-n", host.netns).stdout
    assert "not running" in text and "nothing of ours is in force" in text
