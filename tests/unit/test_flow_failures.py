"""Rules about flows when a path fails: its flows leave at once, and nothing else loses its damping."""

from __future__ import annotations

import itertools

import policy_kit
import pytest
from flow_world import MBIT, MS, POLICY, SECOND, World

from steering.flows import placing
from steering.flows.engine import LOOK_NS, SETTLE_NS

SILENT = POLICY.replace(
    "{signal: queueing_delay, above: 15ms, for: 20ms, clear_below: 8ms}",
    "{any: [{signal: queueing_delay, above: 15ms, for: 20ms, clear_below: 8ms}, "
    "{signal: silence, missed: 3, lasting: 0ms}]}",
)
HERD = SILENT.replace("safety: {", "safety: {herd: {fraction: 0.5}, ")


def test_a_failed_path_is_left_at_once_whatever_was_moved_before() -> None:
    world = World([1, 1, 2, 2], rails=3, text=SILENT)
    world.run(3)
    world.cut()
    world.run(1)
    assert world.counts() == [0, 2, 2]
    world.kill(3)
    world.run(0.3)
    assert world.counts() == [0, 4, 0], "although both were moved a second ago"


def test_only_the_flows_of_a_failed_path_are_moved_at_once() -> None:
    world = World([1, 1, 1, 1, 1, 1, 2, 3, 3], rails=3, text=HERD)
    world.run(3)
    world.kill(3)
    first, *_ = world.run(0.3)
    assert {flow.local_port for flow in first.flows} == {40_007, 40_008}, "all of them, and no others"


def test_flows_between_healthy_rails_are_moved_with_patience_while_a_rail_is_dead() -> None:
    world = World([1] * 8 + [2], rails=4, text=HERD)
    world.run(3)
    world.kill(4)
    world.run(10)
    (began, first), *others = world.acts
    assert len(first.flows) == 3, "half of those that ought to go"
    assert others
    assert others[0][0] - began >= SETTLE_NS


def test_a_flow_that_left_a_failed_path_and_is_not_looked_at_yet_is_not_moved_again() -> None:
    world = World([1, 1, 2, 3], rails=3, text=SILENT)
    world.run(3)
    world.kill(1)
    tell, slow = world.tell, {connection.port for connection in world.connections[:2]}
    world.tell = lambda connection: None if connection.port in slow else tell(connection)  # type: ignore[method-assign]
    world.run(3)
    assert [len(act.pins) for _, act in world.acts] == [2], "they wait for a retransmission timeout"


def test_flows_that_must_stay_on_a_failed_path_do_not_keep_others_from_being_moved() -> None:
    world = World(
        [1, 1, 2, 3], rails=3, text=SILENT.replace("at_most: 64", "at_most: 1").replace("count: 1", "count: 5")
    )
    world.run(3)
    world.kill(1)
    world.run(1)
    (pinned,) = (connection for connection in world.connections if connection.pinned)
    first = pinned.rail(world.now)
    world.cut(first)
    world.run(2)
    assert pinned.rail(world.now) not in (1, first), "it may move on, as it takes no further pin"


def test_a_refused_pin_off_a_failed_path_waits_a_moment() -> None:
    world = World([1, 1, 2], text=SILENT)
    world.run(3)
    world.kill(1)
    world.refuses = True
    world.run(2)
    assert 2 <= len(world.refused) <= 2 * SECOND // SETTLE_NS + 1


def test_a_dry_run_says_once_per_lease_that_it_would_leave_a_failed_path() -> None:
    world = World([1, 1, 2, 2], text=SILENT, dry=True)
    world.run(3)
    world.kill(1)
    assert len(world.run(3)) == 1
    assert len(world.run(4)) == 1


# ---- what deciding costs ----


def test_all_rates_are_looked_at_once_in_a_while_but_at_once_when_a_path_fails() -> None:
    world = World([1, 1, 2, 2], rails=3, text=SILENT)
    world.run(3)
    world.cut()
    world.run(0.1)
    looked, rates = [], world.flows.flows.rates
    world.flows.flows.rates = lambda now: looked.append(now) or rates(now)  # type: ignore[method-assign, func-returns-value]
    for _ in range(100):
        world.now += MS
        world.flows.decide(world.engine.paths, world.engine.groups.values(), world.now)
    assert 1 <= len(looked) <= 100 * MS // LOOK_NS + 1
    before = len(looked)
    world.now = looked[-1] + MS
    world.kill(3)
    for rail, path in world.paths.items():
        missed = 10 if rail == 3 else 0
        world.engine.take(policy_kit.liveness(path, world.now, missed=missed), world.now)
    world.flows.decide(world.engine.paths, world.engine.groups.values(), world.now)
    assert len(looked) == before + 1


def test_a_search_in_vain_is_not_repeated_at_every_look_but_at_once_when_another_path_is_bad(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World([1] + [2] * 5)
    world.run(3)
    searched: list[int] = []
    searching = placing.balance

    def counted(*given: object) -> object:
        searched.append(world.now)
        return searching(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(placing, "balance", counted)
    world.cut(1, 30 * MBIT)  # the flow that is alone there has more than it would have elsewhere
    assert world.run(4) == []
    assert 4 <= len(searched) <= 10
    assert min(later - earlier for earlier, later in itertools.pairwise(searched)) >= SETTLE_NS
    while world.now - searched[-1] > 50 * MS:
        world.run(0.05)
    world.cut(2, 30 * MBIT)
    world.run(0.2)
    assert searched[-1] - searched[-2] < SETTLE_NS, "a rail that has just become bad"
