"""What the kernel's table is told of members and leases, with a table that is made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import steering_kit as kit
from flow_world import POLICY, World
from steering_kit import SECOND
from support import mentions

from pytools.errors import SwerveError
from steering.acting import flows as acting_flows
from steering.acting.flows import FlowActing
from steering.acting.messages import Output
from steering.actuators.pins import PinTarget
from steering.flows.plan import FlowPlan
from steering.plan import FlowKey, Group, Pin

DRAINED_WHERE_SILENT = """\
  - name: silent
    when: {signal: silence, missed: 3, lasting: 0ms}
    then: {drain: {}}
"""

FLOW = FlowKey(6, "10.9.0.1", 40_000, "10.9.0.2", 80)
OTHER = FlowKey(6, "10.9.0.1", 40_001, "10.9.0.2", 80)


class Leases:
    """Pins or labels."""

    error, outdated = "", False

    def __init__(self) -> None:
        self.told: list[list[PinTarget]] = []
        self.failing = ""
        self.held: list[Pin] = []

    def targets(self, targets: Any) -> dict[Any, str]:
        self.told.append(list(targets))
        if self.failing:
            raise SwerveError(self.failing)
        return {}

    def read(self) -> dict[FlowKey, Any]:
        return {pin.flow: SimpleNamespace(pin=pin) for pin in self.held}


class Desk:
    """A `FlowActing` over made-up leases, with two peers behind each of two rails."""

    def __init__(self) -> None:
        self.said: list[str] = []
        peers = {rail: [kit.path(rail, peer) for peer in ("h2", "h3")] for rail in (1, 2)}
        self.group: Group = kit.group(peers)
        self.failed: set[Any] = set()
        flows = SimpleNamespace(decide=lambda *_: FlowPlan(), skipped={})
        groups = {self.group.target: self.group}
        self.engine = SimpleNamespace(groups=groups, paths=_Paths(self.failed), overrides=None)
        self.acting = FlowActing(flows, self.engine, Output("h1", self.said.append, lambda _: None))  # type: ignore[arg-type]
        self.pins, self.labels = Leases(), Leases()
        self.swept_at: list[int] = []
        self.acting.table = SimpleNamespace(sweep=self.swept_at.append, mend=lambda: None)  # type: ignore[assignment]
        self.acting.pins, self.acting.labels = self.pins, self.labels  # type: ignore[assignment]

    def alive(self) -> dict[int, bool]:
        self.acting.turn(SECOND)
        return {each.nexthop_id: each.alive for each in self.pins.told[-1]}


class _Paths(dict[Any, Any]):
    def __init__(self, failed: set[Any]) -> None:
        super().__init__()
        self._failed = failed

    def __missing__(self, path: Any) -> Any:
        return SimpleNamespace(failed=path in self._failed)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(acting_flows, "socket", SimpleNamespace(if_nametoindex=lambda name: int(name[-1])))
    return Desk()


def test_a_dead_peer_ends_no_pins_of_others_and_a_dead_rail_ends_all(desk: Desk) -> None:
    assert desk.alive() == {11: True, 12: True}
    desk.failed.add(kit.path(1, "h2"))
    assert desk.alive() == {11: True, 12: True}
    desk.failed.add(kit.path(1, "h3"))
    assert desk.alive() == {11: False, 12: True}


def test_a_member_without_a_path_is_as_its_neighbour_is(desk: Desk) -> None:
    desk.engine.groups[kit.TARGET] = kit.group({1: [], 2: []})
    assert desk.alive() == {11: True, 12: True}


def test_targets_that_could_not_be_told_are_told_again_and_the_failure_is_said_once(desk: Desk) -> None:
    desk.alive()
    desk.pins.outdated, desk.pins.failing = True, "no memory"
    desk.alive()
    desk.pins.outdated = False  # it took note of the interface, and then failed
    desk.alive()
    desk.pins.failing = ""
    desk.alive()
    assert len(desk.pins.told) == 4
    desk.alive()
    assert len(desk.pins.told) == 4, "nothing is new"
    [said] = desk.said
    assert mentions(said, "flows", "cannot be pinned", "no memory")


def test_leases_that_nobody_renews_are_cleared_away_once_a_second(desk: Desk) -> None:
    for now in (SECOND, SECOND + 1, 2 * SECOND - 1, 2 * SECOND):
        desk.acting.turn(now)
    assert desk.swept_at == [SECOND, 2 * SECOND]


def test_a_pin_whose_lease_has_ended_is_not_shown(desk: Desk) -> None:
    lasting = Pin(FLOW, kit.TARGET, 11, 1 << 62)
    desk.pins.held = [lasting, Pin(OTHER, kit.TARGET, 11, 1)]
    assert desk.acting.pinned() == [lasting]


def test_pins_onto_a_path_over_which_nothing_passes_are_let_go() -> None:
    world = World([1, 1, 2, 2], text=POLICY + DRAINED_WHERE_SILENT)
    world.run(3)
    world.cut()
    world.run(1)
    assert world.counts() == [0, 4]
    world.kill(2)
    (act,) = world.run(1)
    assert (act.kind, len(act.flows), act.because) == ("unpin", 2, f"nothing passes over {world.paths[2]}")
