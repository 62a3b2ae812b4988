"""What the engine does while nothing is measured: a dead path stays left.

Made-up measurements and times; nothing here does I/O.
"""

from __future__ import annotations

from engine_world import ORIGINAL, POLICY, RAIL_2_ONLY, World, left_for_dead
from steering_kit import SECOND, TARGET, group

from steering.deciding.evidence import FORGET_NS


def test_a_dead_rail_stays_left_while_the_agent_is_stopped_and_when_another_begins():
    world = left_for_dead()
    world.pause(8 * SECOND)
    assert world.weights == RAIL_2_ONLY and world.state(2) == "unmeasured"
    world.measure(3 * SECOND, unknown=(1,))
    assert world.weights == RAIL_2_ONLY and world.state(2) == "healthy"
    world.pause(8 * SECOND)
    assert [change.after for _, change in world.log] == [RAIL_2_ONLY], "not once was it in use"
    world.measure(SECOND)
    assert world.weights == RAIL_2_ONLY, "answered for a second: the rule asks for two"
    world.measure(20 * SECOND)
    assert world.weights == ORIGINAL and world.state() == "healthy"


def test_a_rail_that_was_left_for_load_gets_its_weight_back_as_ever():
    world = World()
    world.measure(SECOND)
    world.measure(SECOND, queueing=(1,))
    assert world.weights == RAIL_2_ONLY
    world.pause(POLICY.safety.baseline_after + SECOND)
    assert world.weights == ORIGINAL


def test_a_dead_rail_is_not_forgotten_with_the_rest_of_what_is_long_unheard_of_but_in_the_end():
    world = left_for_dead()
    world.pause(FORGET_NS + 20 * SECOND)
    world.arrange()
    world.pause(SECOND)
    assert world.weights == RAIL_2_ONLY
    world.pause(POLICY.safety.dead_baseline_after - FORGET_NS)
    assert world.weights == ORIGINAL


def test_the_only_other_way_gone_takes_the_dead_one_back():
    """With nothing else left, what was dead is as good as anything."""
    world = left_for_dead()
    known = group({1: []}, current={11: 1})
    world.engine.arrange([known], lambda address: (TARGET,), world.now)
    world.pause(8 * SECOND)
    assert world.weights == ((11, 1),)
