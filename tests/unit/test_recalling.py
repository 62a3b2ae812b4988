"""What a successor makes of what is remembered and of what the kernel has. Made-up measurements and times; no I/O."""

from __future__ import annotations

import json
from collections.abc import Sequence

import msgspec
import pytest
from engine_world import ORIGINAL, POLICY, RAIL_2_ONLY, World, left_for_dead
from hypothesis import given, settings
from hypothesis import strategies as st
from steering_kit import MS, SECOND, path

from steering.acting.memory import Succession
from steering.actuators.overlay_memory import OverlayMemory
from steering.deciding.engine import Engine
from steering.deciding.memory import PathMemory
from steering.deciding.overrides import Override, Overrides
from steering.policy.file import parse

TENTHS = st.integers(0, 10).map(lambda tenths: tenths / 10)
NOTHING = OverlayMemory(20_000, None, (), "object", (), (), ())
OTHER_NAMES = parse(
    """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: queue
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 40ms, clear_below: 1ms}
    then: {drain: {}}
  - name: silent
    when: {signal: silence}
    then: {drain: {}}
"""
)


class Successor(World):
    left: Sequence[object] = ()  # what it leaves of its predecessor's


def successor(world, after_ns=3 * SECOND, policy=POLICY, current=None, memories=None):
    """The same host under another controller, which begins so much later."""
    memories = world.engine.remember(world.now) if memories is None else memories
    made = Successor(Engine(policy), world.now + after_ns, current=world.weights if current is None else current)
    made.left = made.engine.recall(memories, made.now)
    return made


def left_for_its_queue():
    world = World()
    world.measure(SECOND)
    world.measure(SECOND, queueing=(1,))
    assert world.weights == RAIL_2_ONLY
    return world


def test_a_dead_rail_stays_left_without_an_agent_and_comes_back_by_its_rule():
    world = successor(left_for_dead())
    assert world.left == [path(1)] and world.state() == "drained"
    world.pause(20 * SECOND)
    assert world.weights == RAIL_2_ONLY
    world.measure(5 * SECOND, dead=(1,))
    world.measure(SECOND)
    assert world.weights == RAIL_2_ONLY and world.log == [], "the dwell is two seconds"
    world.measure(20 * SECOND)
    assert world.weights == ORIGINAL


def test_a_dead_rail_is_kept_no_longer_for_all_the_restarts():
    world = left_for_dead()
    for _ in range(10):
        world.pause(POLICY.safety.dead_baseline_after // 10)
        world = successor(world)
    world.pause(SECOND)
    assert world.weights == ORIGINAL


def test_a_queue_that_cannot_be_seen_any_more_is_left_for_a_dwell_and_not_tried_too_soon():
    world = left_for_its_queue()
    world.measure(3 * SECOND)
    assert world.state() == "returning"
    world.measure(SECOND, queueing=(1,))
    tried = world.engine.paths[path(1)].tried_ns
    strikes = world.engine.paths[path(1)].strikes
    world = successor(world)
    assert (world.engine.paths[path(1)].tried_ns, world.engine.paths[path(1)].strikes) == (tried, strikes) != (None, 0)
    while world.weights == RAIL_2_ONLY:
        world.measure(SECOND)
    assert world.now - tried >= 60 * SECOND, "retry_after runs on over the restart"


def test_one_on_its_way_back_keeps_what_it_has():
    world = left_for_its_queue()
    while world.state() != "returning":
        world.measure(100 * MS)
    half = world.weights
    assert half not in (ORIGINAL, RAIL_2_ONLY)
    world = successor(world)
    assert (world.state(), world.weights) == ("drained", half)
    world.measure(SECOND)
    assert world.weights == half
    world.measure(70 * SECOND)
    assert world.weights == ORIGINAL and world.state() == "healthy"


def test_strikes_are_remembered_of_a_rail_that_is_whole_again():
    world = left_for_its_queue()
    while world.state() != "healthy":
        world.measure(SECOND)
    strikes = world.engine.paths[path(1)].strikes
    world = successor(world)
    assert strikes == 1 and world.weights == ORIGINAL and world.left == []
    world.measure(100 * MS)
    assert world.state() == "healthy" and world.engine.paths[path(1)].strikes == strikes


def test_an_act_that_was_the_last_before_the_death_is_known_by_the_kernel_alone():
    """It is remembered a moment after the kernel has it: that the path is healthy is older."""
    world = World()
    world.measure(SECOND)
    world = successor(world, current=RAIL_2_ONLY)
    assert world.left == [path(1)] and world.state() == "drained"
    assert POLICY.rules[world.engine.paths[path(1)].rule].name == "dead"
    world.pause(10 * SECOND)
    world.measure(SECOND, unknown=(1,))
    assert world.weights == RAIL_2_ONLY


def test_a_way_back_that_was_the_last_act_is_not_taken_back():
    world = left_for_its_queue()
    memories = world.engine.remember(world.now)
    world = successor(world, current=ORIGINAL, memories=memories)
    assert world.left == []
    world.measure(SECOND)
    assert world.weights == ORIGINAL and world.log == []


def test_under_another_policy_a_left_rail_comes_back_by_its_rule_about_failures():
    world = successor(left_for_its_queue(), policy=OTHER_NAMES)
    known = world.engine.paths[path(1)]
    assert known.state == "drained" and OTHER_NAMES.rules[known.rule].name == "silent"


def test_what_the_operator_ordered_out_is_no_path_that_was_left():
    world = World()
    world.measure(SECOND)
    memories = world.engine.remember(world.now)
    made = World(Engine(POLICY), world.now + SECOND, current=RAIL_2_ONLY)
    made.engine.overrides = Overrides((Override("drain", interface="rail1"),))
    assert made.engine.recall(memories, made.now) == []
    made.measure(SECOND)
    assert made.weights == RAIL_2_ONLY
    made.engine.overrides = Overrides(())
    made.measure(100 * MS)
    assert made.weights == ORIGINAL, "at once, as ever"


def test_paths_of_targets_that_are_not_there_any_more_are_nobodys():
    world = left_for_dead()
    made = Engine(POLICY)
    made.arrange([], lambda _: (), world.now)
    assert made.recall(world.engine.remember(world.now), world.now) == [] and made.paths == {}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.builds(
            PathMemory,
            path=st.sampled_from([path(1), path(2), path(3), path(1, "h3")]),
            state=st.sampled_from(["unmeasured", "healthy", "suspect", "drained", "returning"]),
            since_ns=st.integers(0, 10**12),
            rule=st.sampled_from(["", "dead", "congested", "another"]),
            also=st.lists(st.sampled_from(["dead", "congested", "another"])).map(tuple),
            share=TENTHS,
            held_share=TENTHS,
            strikes=st.integers(0, 5),
            tried_ns=st.none() | st.integers(0, 10**12),
            dead=st.booleans(),
        ),
        unique_by=lambda each: each.path,
    ),
    st.sampled_from([ORIGINAL, RAIL_2_ONLY, ((11, 1),), ((11, 1), (12, 10))]),
)
def test_whatever_is_remembered_a_successor_puts_nothing_more_onto_a_left_rail(memories, current):
    """All are measured and good: for the first half of a second nothing comes back that is known to be left."""
    made = World(Engine(POLICY), 10**12, current=dict(current))
    left = made.engine.recall(memories, made.now)
    assert {known.state for known in made.engine.paths.values()} <= {"drained", "unmeasured"}
    states = made.engine.states("h1", made.now, 0)
    assert [each.state for each in states if each.path in left] == ["drained"] * len(left)
    made.measure(500 * MS)
    if {path(1), path(2)} >= set(left):
        assert made.weights in (current, ORIGINAL)
        shares = {path(rail): dict(made.weights).get(10 + rail, 0) for rail in (1, 2)}
        before = {path(rail): dict(current).get(10 + rail, 0) for rail in (1, 2)}
        assert all(shares[each] <= before[each] for each in left) or len(left) == 2


# ---- the file ----


@pytest.fixture
def said():
    return []


@pytest.fixture
def file(tmp_path, said):
    tmp_path.chmod(0o700)
    return Succession(tmp_path / "steering.json", "boot/cookie:1", True, said.append)


def test_what_is_written_is_read_and_written_once(file, said, tmp_path):
    memories = left_for_dead().engine.remember(10**13)
    file.write(NOTHING, memories)
    inode = (tmp_path / "steering.json").stat().st_ino
    file.write(NOTHING, memories)
    assert (tmp_path / "steering.json").stat().st_ino == inode
    assert file.load().paths == memories and said == []
    assert (tmp_path / "steering.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("what", ["torn", "empty", "rubbish", "writable", "version", "scope", "missing"])
def test_a_file_that_must_not_be_believed_is_none(file, tmp_path, what):
    place = tmp_path / "steering.json"
    file.write(NOTHING, left_for_dead().engine.remember(10**13))
    whole = place.read_bytes()
    if what == "writable":
        place.chmod(0o666)
    elif what == "missing":
        place.unlink()
    elif what in ("version", "scope"):
        place.write_text(json.dumps(json.loads(whole) | {what: 2 if what == "version" else "boot/cookie:2"}))
    else:
        place.write_bytes({"torn": whole[:-9], "empty": b"", "rubbish": b"[1, 2"}[what])
    assert file.load() is None


@given(st.integers(0, 10**4))
def test_no_cut_of_a_file_is_read(cut):
    data = msgspec.json.encode(left_for_dead_memory())
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(data[: cut % len(data)], type=tuple[PathMemory, ...])


def left_for_dead_memory():
    return (PathMemory(path(1), "drained", 5, rule="dead", share=0.0, dead=True, because="silent"), PathMemory(path(2)))


def test_a_disk_that_is_full_is_said_once_and_costs_no_act(tmp_path):
    said = []
    file = Succession(tmp_path / "steering.json" / "steering.json", "boot/cookie:1", True, said.append)
    (tmp_path / "steering.json").write_text("a file where a directory should be")
    for _ in range(2):
        file.write(NOTHING, ())
    assert len(said) == 1 and "could not take over" in said[0]
    (tmp_path / "steering.json").unlink()
    file.write(NOTHING, ())
    assert file.load() is not None, "what could not be written is written when it can be"
