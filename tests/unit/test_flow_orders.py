"""Rules about flows beside the operator: what is drained or held, and flows that are pinned by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import steering_kit as kit
from flow_world import MBIT, SECOND, World
from support import mentions

from steering.acting.flows import FlowActing
from steering.acting.messages import Output
from steering.commands import status
from steering.deciding.overrides import Override, Overrides
from steering.flows.engine import FlowEngine
from steering.plan import Pin


def order(world: World, **values: str) -> None:
    world.engine.overrides = Overrides((Override(**values),))  # type: ignore[arg-type]


def cut_world(routed: list[int], rails: int = 2) -> World:
    """Flows on rails, three seconds later, when rail 1 is about to be cut."""
    world = World(routed, rails)
    world.run(3)
    world.cut()
    return world


# ---- orders about nexthops and targets ----


def test_nothing_is_pinned_to_a_nexthop_that_the_operator_drained() -> None:
    world = cut_world([1, 1, 1, 1], rails=3)
    order(world, kind="drain", interface="rail2")
    world.run(2)
    assert world.counts() == [0, 0, 4]


def test_pins_onto_a_nexthop_end_when_the_operator_drains_it() -> None:
    world = cut_world([1, 1, 2, 2])
    world.run(1)
    assert world.counts() == [0, 4]
    order(world, kind="drain", interface="rail2", why="cable")
    (act,) = world.run(1)
    assert (act.kind, len(act.flows)) == ("unpin", 2)
    assert mentions(act.because, "operator drained", "10.2.1.1", "rail2", "cable")


def test_no_flow_of_a_held_target_is_moved_until_the_hold_ends() -> None:
    world = cut_world([1, 1, 2, 2])
    order(world, kind="hold", target=world.group.target)
    assert world.run(3) == []
    world.engine.overrides = Overrides()
    world.run(1)
    assert world.counts() == [0, 4]


def test_what_is_pinned_stays_so_while_the_target_is_held() -> None:
    world = cut_world([1, 1, 2, 2])
    world.run(1)
    world.capacity[1] = 100 * MBIT
    order(world, kind="hold")
    assert world.run(40) == []
    assert world.counts() == [0, 4], "although the rail has been good again for longer than the dwell"
    world.engine.overrides = Overrides()
    world.run(1)
    assert world.counts() != [0, 4]


# ---- pins by hand ----


def by_hand(world: World, index: int, rail: int, seconds: float) -> Pin:
    """The operator pins a connection."""
    connection = world.connections[index]
    pin = Pin(connection.key, world.group.target, 10 + rail, world.now + int(seconds * SECOND))
    connection.pinned, connection.until_ns = rail, pin.expires_ns
    world.flows.held.pinned_by_hand(pin)
    return pin


def test_a_flow_that_is_pinned_by_hand_is_not_moved_by_a_rule_until_that_ends() -> None:
    world = cut_world([1, 1, 2, 2], rails=3)
    ours = by_hand(world, 0, rail=1, seconds=20)
    world.run(2)
    assert world.connections[0].rail(world.now) == 1
    assert world.connections[1].rail(world.now) == 3
    world.run(19)
    assert world.connections[0].until_ns > ours.expires_ns, "a rule has it now"
    assert world.on(1) == 0


def test_a_flow_that_a_rule_holds_is_the_operators_once_it_is_pinned_by_hand() -> None:
    world = cut_world([1, 1, 2, 2], rails=3)
    world.run(1)
    ours = by_hand(world, 0, rail=2, seconds=600)
    world.capacity[1] = 100 * MBIT
    acts = world.run(60)
    assert acts, "the others come back"
    assert all(ours.flow not in act.flows for act in acts)
    assert world.connections[0].until_ns == ours.expires_ns, "no renewal cuts it short"


def test_what_the_operator_lets_go_may_be_moved_again() -> None:
    world = cut_world([1, 1, 2, 2], rails=3)
    by_hand(world, 0, rail=1, seconds=600)
    world.run(2)
    world.flows.held.unpinned_by_hand(world.connections[0].key)
    world.connections[0].pinned = None
    world.run(2)
    assert world.on(1) == 0


class Kernel:
    """Takes every pin, but for those that it shall refuse."""

    error, outdated = "", False

    def __init__(self, refuse: bool = False) -> None:
        self.refuse = refuse

    def install(self, pins: list[Pin]) -> dict[Any, str]:
        return dict.fromkeys((pin.flow for pin in pins), "its gateway is not alive") if self.refuse else {}

    def remove(self, flows: list[Any]) -> list[Any]:
        return flows


def acting_over(flows: FlowEngine, kernel: Kernel, said: list[str]) -> FlowActing:
    engine: Any = SimpleNamespace(groups={}, paths={})
    acting = FlowActing(flows, engine, Output("h1", said.append, lambda _: None))
    acting.table = acting.pins = kernel  # type: ignore[assignment]
    return acting


def test_pins_by_hand_are_known_to_the_rules_as_far_as_the_kernel_takes_them() -> None:
    world = World([1])
    flow = world.connections[0].key
    pin = Pin(flow, world.group.target, 12, 1 << 62)
    assert acting_over(world.flows, Kernel(refuse=True), []).pin(pin)
    assert not world.flows.held.by_hand(flow, world.now)
    acting = acting_over(world.flows, Kernel(), [])
    assert acting.pin(pin) == ""
    assert world.flows.held.by_hand(flow, world.now)
    assert acting.by_hand(pin.expires_ns - 1) == (pin,)
    assert acting.unpin(flow)
    assert acting.by_hand(0) == ()
    assert not world.flows.held.by_hand(flow, world.now)


def test_targets_whose_flows_cannot_be_told_apart_are_said_once() -> None:
    world, said = World([1]), list[str]()
    acting = acting_over(world.flows, Kernel(), said)
    world.flows.skipped = {kit.TARGET: "two members leave by rail1"}
    for _ in range(3):
        acting.say_skipped()
    assert len(said) == 1 and mentions(said[0], "nexthop group 102", "stay", "two members leave by rail1")
    world.flows.skipped = {}
    acting.say_skipped()
    world.flows.skipped = {kit.TARGET: "two members leave by rail1"}
    acting.say_skipped()
    assert len(said) == 2


def test_status_says_what_rules_about_flows_left_out() -> None:
    facts = {
        "instance": "host",
        "running": False,
        "frozen": "",
        "orders": [],
        "in_force": [],
        "paths": [],
        "torn_lines": 0,
    }
    world = World([1])
    world.flows.skipped, world.flows.flows.forgotten = {kit.TARGET: "two members leave by rail1"}, 3
    told, plain = (list(status.lines_of(facts | more)) for more in (world.flows.facts(), {}))
    [skipped, forgotten] = [line for line in told if line not in plain]
    assert mentions(skipped, "nexthop group 102", "stay", "two members leave by rail1")
    assert mentions(forgotten, "3 connections", "forgotten")
