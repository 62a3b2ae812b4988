"""Eight live connections leave a rail that is cut, by pins of `swerve steer run`: the benchmark's trial, once.

How soon is the bench's business (bench/elephants.py). Here, that it ends well: no connection is reset, none is moved
twice, no more are moved than needed, and the lab ends as near to the max-min fair optimum as the rule asks.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import support

sys.path.append(str(support.ROOT / "bench"))

import _elephants

pytestmark = pytest.mark.beside


@pytest.mark.deadline(240)
def test_live_flows_leave_a_rail_that_is_cut(tmp_path: Path) -> None:
    support.require("bcc", "tc", "netns", "iperf3")
    trial = _elephants.play(4, _elephants.command, tmp_path, patience_s=60.0)
    said = _elephants.said(trial)
    assert trial.resets == 0, said
    assert trial.placed_share(10**15) >= 0.9, said
    assert trial.cut_rail not in trial.end.values() or list(trial.end.values()).count(trial.cut_rail) == 1, said
    assert trial.moved() <= 1.5 * trial.fewest(), said
    pins = [act for act in trial.acts if act.actuator == "pin" and act.outcome == "applied"]
    assert all("queueing delay" in act.because and act.under == "move-elephants" for act in pins), said
    moved = [port for port, rail in trial.end.items() if rail != trial.start[port]]
    assert len(moved) == trial.moved(), "each once, and they are where the acts say"
