"""The changes of one decision: the kernel one by one, all notes in one write; what fails, and what is taken back."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from steering_kit import ORIGINAL, group, path
from support import mentions

from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.signals import decode, encode
from steering.acting import journal, messages
from steering.acting.messages import Output
from steering.acting.weights import Acting
from steering.actuators.standbys import Moved
from steering.deciding.engine import Alert
from steering.flows.hidden_ways import WayAct
from steering.flows.labels import LabelAct
from steering.flows.plan import FlowAct
from steering.plan import Change, Hold, HoldLimits, StandBy, overlay_target

DRAINED = ((12, 1),)
SCOPE = netns.scope()


def target(number):
    return overlay_target("main", f"10.9.0.{number}/32")


def change(number, before=ORIGINAL, after=DRAINED):
    return Change(target(number), before, after, "because", "rule")


class World:
    """Targets in a kernel, a journal, and the order of what is asked of both."""

    def __init__(self, folder, targets=3):
        self.groups = {each: replace(group({1: [], 2: []}), target=each) for each in map(target, range(1, targets + 1))}
        self.file = folder / journal.FILE
        self.log = journal.Journal(self.file)
        self.steps, self.sent, self.said, self.done, self.rejected = [], [], [], [], {}
        self.refuses, self.cannot = {}, None
        engine = SimpleNamespace(
            groups=self.groups,
            seen=lambda _: 0,
            carried_out=lambda each, *_: self.done.append(each.target),
            rejected=lambda each, why: self.rejected.update({each.target: why}),
        )
        self.acting = Acting(engine, self, self.log, Output("h1", self.said.append, self.sent.append))

    def apply(self, which, wanted):
        self.steps.append(f"kernel {which}")
        if which in self.refuses:
            raise SwerveError(self.refuses[which])
        self.groups[which] = replace(self.groups[which], current=wanted)
        return wanted

    def off(self):
        self.steps.append("off")
        if self.cannot is not None:
            raise self.cannot

    def written(self):
        return [(entry.kind, entry.target) for entry in journal.read(self.file).entries]


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path)
    append = journal.append_line
    monkeypatch.setattr(journal, "append_line", lambda *a: (made.steps.append("write"), append(*a))[1])
    return made


def full(*_):
    raise OSError(28, "No space left on device")


def test_the_kernel_comes_first_and_all_notes_are_one_write(world):
    done = world.acting.carry_out_all([change(1), change(2), change(3)])
    targets = [target(number) for number in (1, 2, 3)]
    assert world.steps == [*(f"kernel {each}" for each in targets), "write"]
    assert (done.as_thought, done.left, world.done) == (True, (), targets)
    assert world.written() == [("applied", each) for each in targets]
    assert [act.outcome for act in world.sent] == ["applied"] * 3
    assert len({act.act_id for act in world.sent}) == 3


def test_nothing_to_do_costs_no_write(world):
    assert world.acting.carry_out_all([]).as_thought
    assert world.steps == []


def test_after_a_failure_the_rest_is_not_tried(world):
    world.refuses[target(2)] = "refused"
    done = world.acting.carry_out_all([change(1), change(2), change(3)])
    assert (done.as_thought, done.left) == (False, (change(3),))
    assert world.done == [target(1)] and world.rejected == {target(2): "refused"}
    assert world.written() == [("applied", target(1)), ("failed", target(2))]
    again = world.acting.carry_out_all([change(2), change(3)])
    assert (again.as_thought, again.left) == (True, ()), "what failed a moment ago is left out"
    assert world.done == [target(1), target(3)]


def test_each_change_is_looked_at_immediately_before_the_kernel_is_asked(world):
    """The first one as well: it may be another one by then, or none."""

    def look(seen):
        world.steps.append(f"look {seen.target}")
        return {target(1): None, target(2): replace(seen, after=((11, 1),))}.get(seen.target, seen)

    done = world.acting.carry_out_all([change(1), change(2), change(3)], look)
    looked = [step for number in (1, 2, 3) for step in (f"look {target(number)}", f"kernel {target(number)}")]
    looked.remove(f"kernel {target(1)}")
    assert world.steps == [*looked, "write"] and done.left == ()
    assert world.groups[target(2)].current == ((11, 1),)


def failed(world, wanted):
    world.refuses[wanted.target] = "refused"
    world.acting.carry_out_all([wanted])
    del world.refuses[wanted.target]


def test_a_change_that_failed_keeps_no_other_change_of_its_target_waiting(world):
    """A rail that was to be left for its queue dies: that is another change."""
    failed(world, change(1))
    world.acting.carry_out_all([change(1)])
    assert world.done == []
    world.acting.carry_out_all([replace(change(1), after=((11, 1),), failure=True)])
    assert world.done == [target(1)]
    world.acting.carry_out_all([change(1)])
    assert len(world.done) == 2, "after a success nothing waits"


def test_a_dead_path_is_tried_to_leave_again_within_a_tenth_of_a_second(world, monkeypatch):
    now = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    world.refuses[target(1)] = "refused"
    tried = []
    for _ in range(100):
        before = len(world.steps)
        world.acting.carry_out_all([replace(change(1), failure=True)])
        if len(world.steps) > before:
            tried.append(now[0])
        now[0] += 10_000_000
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert max(gaps) <= 100_000_000 and min(gaps) >= 50_000_000
    failed(world, change(2))
    now[0] += 900_000_000
    world.acting.carry_out_all([change(2)])
    assert world.done == [], "a load can wait"


def test_a_journal_that_cannot_be_written_stops_no_act(world, monkeypatch):
    """It is history: what is in force is in the kernel."""
    monkeypatch.setattr(journal, "append_line", full)
    assert world.acting.carry_out_all([change(1)]).as_thought
    assert world.done == [target(1)] and [act.outcome for act in world.sent] == ["applied"]
    [said] = world.said
    assert mentions(said, "journal", "No space left on device")


def test_the_rule_goes_before_anything_is_noted(world):
    world.acting.carry_out_all([change(1), change(2)])
    world.steps.clear()
    world.acting.take_back("stopped")
    assert world.steps == ["off", "write"]
    assert world.written()[2:] == [("undone", target(1)), ("undone", target(2))]
    undone = [act for act in world.sent if act.outcome == "undone"]
    assert [list(act.after.values()) for act in undone] == [[1, 1], [1, 1]]
    assert journal.read(world.file).in_force(SCOPE) == {}


def test_what_the_kernel_does_not_take_back_is_not_noted_as_such(world):
    world.acting.carry_out_all([change(1)])
    world.cannot = SwerveError("not now")
    with pytest.raises(SwerveError, match="not now"):
        world.acting.take_back("stopped")
    assert set(journal.read(world.file).in_force(SCOPE)) == {target(1)}


def test_a_full_disk_keeps_nothing_in_force(world, monkeypatch):
    world.acting.carry_out_all([change(1)])
    monkeypatch.setattr(journal, "append_line", full)
    world.acting.take_back("stopped")
    assert world.steps[-1] == "off" and "No space left" in world.said[-1]


def test_a_target_whose_route_went_is_not_in_force_any_more(world):
    world.acting.carry_out_all([change(1)])
    world.acting.follow({name: each for name, each in world.groups.items() if name != target(1)})
    assert journal.read(world.file).in_force(SCOPE) == {}


ONE, TWO = path(1), path(2)
WAY = WayAct(ONE, {}, {}, "dead", 1)
FLOWS = FlowAct("pin", target(1), (), "", "", 1, troubles=((TWO, 0),), left=(ONE, None, TWO))


@pytest.mark.parametrize(
    ("act", "paths"),
    [
        (messages.act("h1", group({1: []}), replace(change(1), paths=(ONE, TWO, ONE)), "applied", 1, 2), [ONE, TWO]),
        (messages.alert("h1", Alert(ONE, "rule", True, "slow", 1)), [ONE]),
        (
            messages.rerouted("h1", Moved(StandBy(ONE, (), TWO, target(1), 12, "dead"), 1, 9, 1, 1, True), 2),
            [ONE, TWO],
        ),
        (
            messages.flow_act(
                "h1",
                FLOWS,
                "applied",
                2,
            ),
            [TWO, ONE],
        ),
        (messages.port_act("h1", WAY, "applied", 2), [ONE]),
        (messages.label_act("h1", LabelAct(WAY), "applied", 2), [ONE]),
        (messages.subflow_act("h1", WAY, "applied", 2, 3), [ONE]),
        (messages.hold_act("h1", Hold(ONE, (), HoldLimits(1, 2, 3, 4, 5), "short"), "applied", "", 2), [ONE]),
        (messages.order("h1", "freeze", "", True), []),
    ],
    ids=lambda value: getattr(value, "actuator", ""),
)
def test_an_act_names_each_of_its_paths_once(act, paths):
    assert act.paths == paths
    assert decode(encode(act)) == act
