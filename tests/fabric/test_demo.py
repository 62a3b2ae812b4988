"""The main job in short: real traffic, a congested rail, four controllers, and back again."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import support

from steering.demo.run import POLICY, Result, Script, play


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    support.require("iperf3")
    policy = tmp_path_factory.mktemp("policy") / "policy.yaml"
    policy.write_text(POLICY.read_text().replace("dwell: 30s", "dwell: 8s").replace("step: 3s", "step: 1s"))
    policy.chmod(0o600)
    script = Script(name="tdemo", settled_s=3, steady_s=6, returned_s=3, policy=policy)
    return play(script, said.append)


said: list[str] = []


def test_all_phases_are_played_and_nothing_breaks(result: Result) -> None:
    assert [each.name for each in result.phases] == ["healthy", "control", "congested", "steered", "returned"]
    assert [each.broken for each in result.phases] == [()] * 5
    assert [each.resets for each in result.phases] == [0] * 5
    assert any("congested" in line for line in said)


def test_congestion_hurts_and_steering_ends_that(result: Result) -> None:
    figures = {each.name: each for each in result.phases}
    assert figures["congested"].goodput_share < 0.9
    assert figures["steered"].goodput_share > figures["congested"].goodput_share + 0.1
    assert figures["steered"].detect_ms is not None
    assert figures["steered"].onset_to_act_ms is not None


def test_the_acts_explain_themselves(result: Result) -> None:
    acts = next(each for each in result.phases if each.name == "steered").acts
    assert acts
    for act in acts:
        assert "queueing delay" in act.because
        assert act.under == "leave-congested-rail"
        assert act.outcome == "applied"
        assert act.seen_ns <= act.decided_ns <= (act.acknowledged_ns or 0)


def test_traffic_leaves_the_bad_rail_and_comes_back(result: Result) -> None:
    figures = {each.name: each for each in result.phases}
    assert result.return_s is not None
    for name in ("healthy", "returned"):
        packets = figures[name].packets
        assert min(packets.values()) > 0.1 * sum(packets.values())
    steered = figures["steered"].packets
    assert steered["rail2"] > 4 * steered["rail1"]


def test_nothing_is_left(result: Result) -> None:
    assert result.steered
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "tdemo" not in listed
    assert not list(Path("/run/netns").glob("*tdemo*"))
