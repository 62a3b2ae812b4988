"""A recording that was made while a controller ran dry: its replay tells the acts that the controller told."""

from __future__ import annotations

import json
import subprocess

import steering_kit as kit
import support
from steering_kit import MS, controlled


def test_a_replay_tells_what_a_live_dry_run_told(host, agent, policy, tmp_path):
    recording = tmp_path / "recording.jsonl"
    watching = [*support.SWERVE, "watch", "-n", host.netns]
    with controlled(host, policy) as controller, recording.open("wb") as out:
        support.wait_until(lambda: len(agent.states) == 2, 20, "the controller speaks of both paths")
        with subprocess.Popen(watching, stdin=subprocess.DEVNULL, stdout=out) as watch:
            support.wait_until(lambda: recording.stat().st_size > 10_000, 20, "the recording has begun")
            agent.queueing_ns[1] = 20 * MS
            support.wait_until(lambda: agent.acts_of("dry_run"), 20, "the drain is told")
            agent.queueing_ns[1] = 0
            support.wait_until(lambda: len(agent.acts_of("dry_run")) == 3, 20, "the return is told")
            support.wait_until(lambda: agent.states[kit.path(1)].state == "healthy", 20, "rail 1 is healthy")
            watch.terminate()
        controller.end()
    told = agent.acts_of("dry_run")
    done = support.swerve("policy", "replay", str(recording), "--policy", str(policy), "-j")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    replayed = [line for line in lines if line["type"] == "act"]
    assert [act["after"] for act in replayed[:3]] == [act.after for act in told]
    assert [act["under"] for act in replayed[:3]] == [act.under for act in told]
    for ours, theirs in zip(replayed, told, strict=False):
        assert abs(ours["at_ns"] - theirs.at_ns) < 250 * MS * support.slow_factor(), (
            "at the same time, but for delivery"
        )
    # A dry run has nothing to put back in the end: the weights never were others.
    assert [act["after"] for act in replayed[3:]] == [{"10.1.1.1 dev rail1": 1, "10.2.1.1 dev rail2": 1}]
    assert lines[-1]["broken"] == 0 and lines[-1]["type"] == "replay_summary"
