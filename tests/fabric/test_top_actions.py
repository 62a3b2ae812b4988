"""`swerve top --allow-actions` at a terminal, with a real agent and controller: what is typed, the kernel has."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import steering_kit as kit
import support
from steering_kit import FIRST, SECOND_HOP, controlled
from tmux import Tmux

from pytools.lab import Lab

pytestmark = pytest.mark.beside

EVEN = {FIRST: 1, SECOND_HOP: 1}
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 3s}
rules:
  - name: dead
    when: {signal: loss, above: 0.9, for: 10s, clear_below: 0.01}
    then: {drain: {}}
"""


@pytest.fixture
def lab(lab: Lab) -> Lab:
    kit.agents(lab)
    return lab


@pytest.fixture
def screen() -> Iterator[Tmux]:
    if shutil.which("tmux") is None:
        pytest.skip("missing: the command tmux (package tmux)")
    terminal = Tmux((120, 30))
    yield terminal
    terminal.close()


def status(netns: str) -> dict[str, list[dict[str, object]]]:
    found: dict[str, list[dict[str, object]]] = json.loads(support.swerve("steer", "status", "-j", "-n", netns).stdout)
    return found


def test_an_interface_is_drained_and_taken_back_by_what_is_typed(lab: Lab, screen: Tmux, tmp_path: Path) -> None:
    host = kit.Host(lab.hosts[0].netns)
    with controlled(host, kit.policy_file(tmp_path, POLICY), "--apply") as controller:
        screen.enter(*support.SWERVE, "top", "-n", host.netns, "--allow-actions")
        screen.until(lambda: "h2 rail1" in screen.text(), "the view has the path")
        screen.press("/", "rail1", "Enter")
        screen.shows("filter: rail1 (1 of 2)")
        screen.until(lambda: "h2 rail1 healthy" in screen.text(), "the path is steered, and the view knows")
        assert host.weights() == EVEN

        screen.press("d")
        screen.shows("type `drain rail1`")
        screen.press("drain rail2", "Enter")
        screen.shows("nothing was done")
        assert host.weights() == EVEN and status(host.netns)["orders"] == []

        screen.press("d")
        screen.shows("type `drain rail1`")
        screen.press("drain rail1", "Enter")
        support.wait_until(lambda: host.weights() == {SECOND_HOP: 1}, 10, f"rail 1 is left\n{screen.text()}")
        (order,) = status(host.netns)["orders"]
        assert (order["interface"], order["why"]) == ("rail1", "from swerve top")

        screen.press("u")
        screen.shows("type `undrain rail1`")
        screen.press("undrain rail1", "Enter")
        support.wait_until(lambda: host.weights() == EVEN, 10, f"rail 1 carries again\n{screen.text()}")
        assert status(host.netns)["orders"] == []
        screen.press("q")
        screen.ended(0)
        acts = [(entry.kind, list(entry.group.named(entry.after).values())) for entry in controller.journal()]
        assert acts == [("applied", [0, 1]), ("applied", [1, 1])]
        assert controller.end() == 0
    assert host.weights() == EVEN
