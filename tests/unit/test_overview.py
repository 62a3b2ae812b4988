"""`swerve status`: what it makes of what agent and controller say."""

from __future__ import annotations

import json

import pytest
import samples
from click.testing import CliRunner

from pytools.signals import Delay
from steering import cli
from steering.commands import overview

QUEUED = Delay(samples=50, queueing_p50_ns=9_000_000, queueing_p99_ns=12_000_000, queueing_bound_ns=400)
STILL = {"running": False, "instance": "host", "running_elsewhere": [], "frozen": "", "in_force": [], "orders": []}


def facts(agent: object, **steering: object) -> dict[str, object]:
    return {"version": "1", "instance": "host", "agent": agent, "steering": STILL | steering}


def test_the_latest_of_each_path_counts_and_the_longest_window() -> None:
    first, second = samples.path_delay(1), samples.path_delay(2, received=0, lost=50)
    brief = samples.path_delay(1, window_ns=100_000_000, received=0)
    told = overview.summary([first, second, brief, samples.clock("h1"), samples.clock("h2")])
    assert (told["host"], told["paths"], told["peers"]) == ("h1", 2, 1)
    assert told["states"] == {"answered": 1, "not answered": 1}
    assert [each["path"] for each in told["worst"]] == ["h1>h2 dev rail2"], "paths that are not well come alone"
    assert (told["clocks"], told["clock_bound_ns"]) == ({"synchronised": 2}, 430)


def test_where_all_is_well_the_path_with_the_longest_queue_is_shown() -> None:
    told = overview.summary([samples.path_delay(1), samples.path_delay(2, forward=QUEUED)])
    assert [(each["path"], each["queueing_p99_ns"]) for each in told["worst"]] == [("h1>h2 dev rail2", 12_000_000)]


def test_a_controller_names_the_states_and_why() -> None:
    told = overview.summary([*(samples.path_delay(rail) for rail in (1, 2)), samples.path_state(1)])
    assert told["states"] == {"drained": 1, "answered": 1}
    assert [(each["state"], each["why"]) for each in told["worst"]] == [("drained", samples.path_state(1).reason)]


def test_the_lines_are_few_and_say_what_to_do_next() -> None:
    told = overview.summary([samples.path_delay(rail, forward=QUEUED, received=0) for rail in range(1, 9)])
    lines = list(overview.lines(facts(told), " -n h1"))
    assert len(lines) <= 10
    assert "8 not answered" in lines[2]
    assert "swerve top -n h1" in lines[-1]
    held = facts(told, frozen="the stop file is there", in_force=[{}], orders=[{}])
    lines = list(overview.lines(held, ""))
    assert len(lines) == 10 and "FROZEN" in lines[7] and "next" in lines[9], "what holds traffic comes before paths"
    lines = list(overview.lines(facts(None) | {"why": "no agent serves x; start it with: swerve agent"}, ""))
    assert ("swerve agent" in lines[1], "swerve doctor" in lines[-1]) == (True, True)


@pytest.mark.parametrize(
    ("steering", "line"),
    [
        ({"frozen": "the stop file is there"}, "FROZEN"),
        ({"in_force": [{}, {}]}, "2 targets"),
        ({"in_force": [{}], "orders": [{}], "pin_count": 3}, "1 target, 1 order, 3 pins"),
    ],
)
def test_what_holds_traffic_is_said(steering: dict[str, object], line: str) -> None:
    known = facts(overview.summary([]), **steering)
    assert any(line in each for each in overview.lines(known, ""))


def test_swerve_alone_and_swerve_status_say_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    for name in ("SWERVE_RUNTIME_DIR", "SWERVE_STATE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    alone, named, written = (CliRunner().invoke(cli.root, words) for words in ([], ["status"], ["status", "-j"]))
    assert [each.exit_code for each in (alone, named, written)] == [0, 0, 0]
    assert alone.output == named.output and "swerve agent" in alone.output
    found = json.loads(written.output)
    assert (found["agent"], found["steering"]["running"]) == (None, False)
