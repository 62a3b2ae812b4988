"""Steering as a whole against a made-up kernel: links come and go, people interfere, processes die anywhere.

Real: engine, acting, journal, actuators, keeper, settling. Made up: kernel (model_kernel), measurements, time. A
process can die before and after each line of the journal and each request to the kernel, the guardian, too.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import tempfile
from pathlib import Path as File
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_kernel import OTHERS, OURS, ModelKernel, ModelNetlink, ModelWatch
from steering_kit import GROUP, MS, SECOND, TARGET, measured, path

from pytools.kernel.leftovers import FIRST_ID, is_backup
from pytools.kernel.netlink import NetlinkError
from steering.acting import journal, weights
from steering.acting.settle import regain, settle
from steering.acting.weights import Acting
from steering.actuators import keeper
from steering.actuators.keeper import Keeper
from steering.actuators.memory_file import MemoryFile
from steering.actuators.registry import Actuators
from steering.deciding.engine import Engine
from steering.plan import same, weights_of
from steering.policy import parse

RAILS = (1, 2, 3)
DESTINATION = "10.9.0.2/32"
ORIGINAL = weights_of({10 + rail: 1 for rail in RAILS})
TICK = 100 * MS
SCOPE = journal.scope()
POLICY = parse("""\
version: 1
manage: {destinations: [10.9.0.0/16], backup_route: true}
safety: {lease: 3s, max_drained_share: 0.67, stale_after: 500ms, baseline_after: 2s}
rules:
  - name: lossy
    when: {signal: loss, above: 0.5, for: 200ms, clear_below: 0.1}
    then: {drain: {}}
    return: {dwell: 1s, max_dwell: 2s, steps: [1.0], step: 200ms, retry_after: 2s}
  - name: congested
    when: {signal: queueing_delay, quantile: p50, above: 5ms, for: 200ms, clear_below: 1ms}
    then: {shift: {share: 0}}
    return: {dwell: 1s, max_dwell: 2s, steps: [0.1, 0.5, 1.0], step: 300ms, retry_after: 2s}
""")
HEALED = 12 * SECOND  # dwell, steps, what is between two tries, and the longest wait after refusals


class Killed(BaseException):
    """A process dies here."""


class SteppedJournal(journal.Journal):
    """One whose writer can die before and after each line."""

    def __init__(self, file, step):
        super().__init__(file)
        self._step = step

    def write(self, *entries):
        self._step()
        for each in entries:
            super().write(each)
            self._step()


class Controller:
    """What steering/controller.py puts together, without its sockets."""

    def __init__(self, kernel, folder, now):
        self.engine = Engine(POLICY)
        self.refreshed = False
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._stack.close)
            netlink = ModelNetlink(kernel, OURS)
            log = self._stack.enter_context(SteppedJournal(folder / journal.FILE, kernel.before_step))
            actuators = Actuators(netlink)
            self.acting = Acting(self.engine, actuators, log, lambda: "h1", lambda _: None, lambda _: None)
            self.acting.settle("it was left by a controller before this one")
            in_force = journal.read(folder / journal.FILE).last_in_force(SCOPE)
            self.keeper = Keeper(netlink, ["10.9.0.0/16"], True, MemoryFile(folder, SCOPE), in_force=in_force)
            self._stack.callback(lambda: self.keeper.close(remove=False))
            self.refresh(now)
            undo.pop_all()

    def refresh(self, now):
        self.acting.read_back()
        view = self.keeper.refresh(self.engine.groups, self.engine.manual.keys())
        self.acting.first |= view.first
        for target, why in view.manual.items():
            self.engine.manual[target] = why
            self.acting.release(self.engine.groups[target], view.groups[target].current, why)
        for target in self.engine.groups.keys() - view.groups.keys() - view.lost:
            known = self.engine.groups[target]
            self.engine.manual.pop(target, None)
            if known.current != known.original:
                self.acting.settle("it is gone", target)
        self.acting.adopt(group for target, group in view.groups.items() if target not in self.engine.manual)
        self.engine.arrange(view.groups.values(), view.target_of, now, view.lost)
        self.refreshed = True

    def turn(self, signals, now):
        self.refreshed = False
        self.keeper.heard()
        for each in signals:
            self.engine.take(each, now)
        if not self.acting.carry_out_all(self.engine.changes(now)).as_thought:
            self.refresh(now)
        if now >= self.keeper.due_ns:
            self.refresh(now)

    def stop(self):
        self.acting.settle("the controller was stopped")
        self.acting.regain()
        self.keeper.close()
        self.die()

    def die(self):
        self._stack.close()


class Steering(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 10**12
        self.stack = contextlib.ExitStack()
        self.folder = File(self.stack.enter_context(tempfile.TemporaryDirectory()))
        clock = SimpleNamespace(monotonic_ns=lambda: self.now)
        for target, name, value in (
            (os, "fdatasync", lambda _: None),
            (os, "fsync", lambda _: None),
            (weights, "time", clock),
            (keeper, "time", clock),
            (keeper, "NetlinkWatch", lambda ours: ModelWatch(self.kernel, ours)),
        ):
            self.stack.enter_context(mock.patch.object(target, name, value))
        self.kernel = ModelKernel(RAILS, GROUP, DESTINATION)
        self.kernel.before_step = self.step
        self.controller = None
        self.steps_to_live = None
        self.condition = dict.fromkeys(RAILS, "good")
        self.original = ORIGINAL  # before whatever controller is to be undone
        self.theirs = None  # what somebody else made of the group since the controller began
        self.removed = set()  # nexthops that somebody else deleted
        self.others_acts = 0
        self.dropped = set()  # nexthops that went with their links since a controller last looked
        self.meddled = False  # somebody deleted something: theirs or the original are both right
        self.undoable = None  # the state in which the journal was found to suffice
        self.given_up = False  # the controller called it manual: what is lost then is nobody's to make again
        self.protected = set(dict(ORIGINAL))  # nexthops that were there when the controller last looked

    def teardown(self):
        self.kernel.before_step = lambda: None
        if self.controller is not None:
            self.controller.die()
        self.stack.close()

    def state(self):
        size = (self.folder / journal.FILE).stat().st_size
        there = sorted(self.kernel.nexthop_objects)
        return size, self.kernel.weights(GROUP), there, self.original, self.theirs, self.meddled

    # ---- processes ----

    def step(self):
        """Called before and after everything that a process leaves behind."""
        if self.steps_to_live is None:
            return
        self.steps_to_live -= 1
        if self.steps_to_live < 0:
            self.steps_to_live = None
            raise Killed

    def mortal(self, act):
        """Let a controller do something; whether it lives."""
        try:
            act()
        except Killed:
            if self.controller is not None:
                self.controller.die()
            self.controller = None
            self.kernel.watches.clear()
            return False
        return True

    @initialize()
    def begin(self):
        self.start()

    @precondition(lambda self: self.controller is None)
    @rule()
    def start(self):
        def begin():
            self.controller = Controller(self.kernel, self.folder, self.now)

        found = frozenset(self.kernel.nexthop_objects)
        if self.mortal(begin):
            self.look_back(found)

    def look_back(self, found):
        """What a controller finds when it begins is what it will leave; these nexthops were there before it did."""
        there = dict(self.kernel.weights(GROUP) or ())
        if self.theirs is not None or self.given_up:
            self.original = weights_of(there)
        elif self.meddled:
            self.original = weights_of({n: w for n, w in self.original if n not in found} | there)
        self.theirs, self.meddled, self.given_up = None, False, False
        # Gone, and its link carries: a successor cannot tell that nobody deleted it.
        self.removed |= {number for number in self.dropped if self.kernel.carrier[number - 10]}
        self.protect()

    @rule(steps=st.integers(0, 8))
    def doom(self, steps):
        """Whoever runs dies after so many steps."""
        self.steps_to_live = steps

    @precondition(lambda self: self.controller is not None)
    @rule(guardian=st.sampled_from(["undoes", "dies", "is dead"]), steps=st.integers(0, 6))
    def kill(self, guardian, steps):
        self.controller.die()
        self.controller = None
        self.kernel.watches.clear()
        self.steps_to_live = None if guardian != "dies" else steps
        if guardian != "is dead":
            self.guard()

    @precondition(lambda self: self.controller is None)
    @rule()
    def guard(self):
        """The guardian, or `steer undo`."""
        try:
            self.undo(self.kernel, self.folder / journal.FILE, self.step)
        except Killed:
            return
        if not self.kernel.refuses:
            self.is_undone(self.kernel)
            assert not any(is_backup(route) for route in self.kernel.route_objects.values())
            assert all(number < FIRST_ID for number in self.kernel.nexthop_objects)

    @staticmethod
    def undo(kernel, file, step):
        actuators = Actuators(ModelNetlink(kernel, OTHERS))
        with SteppedJournal(file, step) as log:
            settle(log, actuators, SCOPE, "guardian")
            regain(log, actuators, SCOPE, "guardian")
        actuators.sweep()

    @precondition(lambda self: self.controller is not None)
    @rule()
    def stop(self):
        self.steps_to_live = None
        refused, self.kernel.refuses = self.kernel.refuses, False
        self.controller.stop()
        self.controller = None
        self.kernel.refuses = refused
        self.is_undone(self.kernel)
        assert not any(is_backup(route) for route in self.kernel.route_objects.values())

    # ---- the world ----

    @rule(ticks=st.integers(1, 8))
    def time_passes(self, ticks):
        for _ in range(ticks):
            self.tick()

    def tick(self):
        self.now += TICK
        if self.controller is None:
            return
        manual = TARGET in self.controller.engine.manual
        before = self.kernel.weights(GROUP)
        signals = [each for rail in RAILS if (each := self.measure(rail)) is not None]
        if not self.mortal(lambda: self.controller.turn(signals, self.now)):
            return
        assert not manual or self.kernel.weights(GROUP) == before, "a manual target was written"
        if self.controller.refreshed:
            self.protect()
            self.given_up |= TARGET in self.controller.engine.manual
            if not self.given_up and self.controller.keeper.due_ns > self.now + TICK:
                self.nothing_is_missing()

    def protect(self):
        self.dropped.clear()
        self.protected = dict(self.original).keys() & self.kernel.nexthop_objects.keys()

    def nothing_is_missing(self):
        members = {number for number, _ in self.original} - self.removed
        back = {number for number in members if self.kernel.carrier[number - 10]}
        assert back <= self.kernel.nexthop_objects.keys(), "a nexthop is made again when its link is back"

    def measure(self, rail):
        condition = self.condition[rail] if self.kernel.carrier[rail] else "dead"
        if condition == "silent":
            return None
        loaded = 10 + rail in dict(self.kernel.weights(GROUP) or ())
        value = {"good": 0, "bad": 20 * MS, "bad under load": 20 * MS * loaded, "dead": None}[condition]
        return measured(path(rail), self.now, value, lost=5 * (value is None), received=5 * (value is not None))

    @rule(rail=st.sampled_from(RAILS), condition=st.sampled_from(["good", "bad", "bad under load", "dead", "silent"]))
    def becomes(self, rail, condition):
        self.condition[rail] = condition
        self.time_passes(4)

    @rule(rail=st.sampled_from(RAILS), there=st.booleans())
    def link(self, rail, there):
        if not there and self.told_apart_without(10 + rail):
            return
        if self.kernel.carrier[rail] and not there:
            self.dropped.add(10 + rail)
        self.kernel.set_carrier(rail, there)
        if not there:
            self.protected.discard(10 + rail)
            if self.theirs is not None:
                self.theirs = tuple(pair for pair in self.theirs if pair[0] != 10 + rail)

    def told_apart_without(self, number):
        """Whether it takes this nexthop to tell whose weights there are: of a single one the weight does not count."""
        return self.theirs is not None and len([pair for pair in self.theirs if pair[0] != number]) < 2

    @rule(refuses=st.booleans())
    def kernel_refuses(self, refuses):
        self.kernel.refuses = refuses

    @precondition(lambda self: len(self.kernel.weights(GROUP) or ()) >= 2)
    @rule(data=st.data())
    def somebody_gives_other_weights(self, data):
        there = [number for number in dict(ORIGINAL) if number in self.kernel.nexthop_objects]
        chosen = data.draw(st.lists(st.sampled_from(there), min_size=2, max_size=3, unique=True))
        self.others_acts += 1  # never the same twice: else nobody could tell
        self.theirs = weights_of({number: 20 + (3 * self.others_acts + number) % 230 for number in chosen})
        self.kernel.reweight(GROUP, self.theirs)

    @precondition(lambda self: len(self.kernel.weights(GROUP) or ()) >= 2)
    @rule(data=st.data())
    def somebody_deletes_a_nexthop(self, data):
        there = [number for number in dict(ORIGINAL) if number in self.kernel.nexthop_objects]
        number = data.draw(st.sampled_from(there))
        if self.told_apart_without(number):
            return
        self.kernel.delete(number)
        self.removed.add(number)
        self.protected.discard(number)
        self.meddled = True
        if self.theirs is not None:
            self.theirs = tuple(pair for pair in self.theirs if pair[0] != number)

    @rule()
    def all_is_well_for_long(self):
        """However it got here: what it was before comes back, unless somebody else has it now."""
        self.steps_to_live, self.kernel.refuses = None, False
        if self.controller is None:
            self.start()
        for rail in RAILS:
            self.condition[rail] = "good"
            self.link(rail, True)
        for _ in range(HEALED // TICK):
            self.tick()
        if self.theirs is None and not self.meddled and not self.given_up:
            # One that was deleted while nobody watched looks like one that went with its link: it may be back.
            found, wanted = (
                tuple(pair for pair in weights if pair[0] not in self.removed)
                for weights in (self.kernel.weights(GROUP) or (), self.original)
            )
            assert same(found, wanted), f"all is well, and the weights are {found}, not {wanted}"

    # ---- what must hold ----

    def is_undone(self, kernel):
        """The group is as it was before us, or as somebody else made it."""
        found = kernel.weights(GROUP)
        if found is None:
            return
        right = [tuple(pair for pair in self.original if pair[0] in kernel.nexthop_objects)]
        if self.theirs is not None:
            right = [self.theirs]
        if self.meddled:
            right.append(self.kernel.weights(GROUP) or ())
        assert any(same(found, each) for each in right), f"{found} is none of {right}"

    @invariant()
    def the_kernel_is_whole(self):
        self.kernel.check()

    @invariant()
    def there_is_a_way_while_there_is_a_nexthop(self):
        if self.given_up and self.controller is None:
            return  # backups end with the controller, and what is somebody else's is not put back
        if self.protected & self.kernel.nexthop_objects.keys():
            assert self.kernel.reaches(DESTINATION)

    @invariant()
    def what_somebody_else_made_stays(self):
        if self.theirs is not None:
            assert self.kernel.weights(GROUP) == self.theirs

    @invariant()
    def the_journal_alone_suffices_to_undo(self):
        if self.kernel.refuses:
            return
        state = self.state()
        if state == self.undoable:
            return  # nothing has changed since the last time
        self.undoable = state
        copied, file = self.kernel.copy(), self.folder / "copy.jsonl"
        shutil.copy(self.folder / journal.FILE, file)
        self.undo(copied, file, lambda: None)
        copied.check()
        self.is_undone(copied)


Steering.TestCase.settings = settings(max_examples=30, stateful_step_count=25)
TestSteering = pytest.mark.slow(Steering.TestCase)


def with_a_lost_and_found_link(condition, ticks):
    machine = Steering()
    machine.begin()
    machine.time_passes(8)
    machine.link(1, False)
    machine.time_passes(8)
    machine.condition[1] = condition
    machine.link(1, True)
    machine.time_passes(ticks)
    assert 11 in machine.kernel.nexthop_objects and machine.kernel.weights(GROUP) == ORIGINAL[1:]
    return machine


def test_a_nexthop_made_again_joins_its_group_although_the_controller_died_in_between():
    machine = with_a_lost_and_found_link("good", 2)
    machine.kill("is dead", 0)
    machine.all_is_well_for_long()
    assert machine.kernel.weights(GROUP) == ORIGINAL
    machine.teardown()


def test_a_stop_gives_back_what_the_kernel_took_and_a_rule_kept_out():
    machine = with_a_lost_and_found_link("dead", 30)
    machine.stop()
    assert machine.kernel.weights(GROUP) == ORIGINAL
    machine.teardown()


def with_a_flap(drained, steps_to_live=None):
    """Rail 2 is away for a moment, and has no weight yet when it is back; rail 3 may be drained by a rule."""
    machine = Steering()
    machine.begin()
    machine.time_passes(8)
    if drained:
        machine.condition[3] = "dead"
        machine.time_passes(8)
        assert machine.kernel.weights(GROUP) == ORIGINAL[:2]
    machine.link(2, False)
    machine.link(2, True)
    machine.condition[2] = "silent"
    machine.steps_to_live = steps_to_live
    machine.time_passes(3)
    return machine


@pytest.mark.parametrize("end", [Steering.stop, lambda machine: machine.kill("undoes", 0)])
def test_a_flap_while_another_rail_is_drained_is_undone_with_it(end):
    machine = with_a_flap(drained=True)
    assert 12 in machine.kernel.nexthop_objects and machine.kernel.weights(GROUP) == ORIGINAL[:1]
    end(machine)
    assert machine.kernel.weights(GROUP) == ORIGINAL
    machine.teardown()


@pytest.mark.parametrize("drained", [True, False])
def test_whoever_dies_at_whatever_step_of_a_flap_it_is_undone(drained):
    for steps in itertools.count():
        machine = with_a_flap(drained, steps)
        lives = machine.controller is not None
        machine.steps_to_live = None
        if not lives:
            machine.guard()
        machine.teardown()
        if lives:
            break
    assert steps > 4, "it died at least in making the nexthop and in journalling its absence"


def test_a_change_that_could_not_be_read_back_is_nobody_elses(monkeypatch):
    machine = Steering()
    machine.begin()
    machine.time_passes(8)
    replace_group, group, unreadable = ModelNetlink.replace_group, ModelNetlink.group, []

    def replaced(netlink, *args, **kwargs):
        replace_group(netlink, *args, **kwargs)
        unreadable.append("once")

    def read(netlink, *args):
        if unreadable:
            unreadable.pop()
            raise NetlinkError("reading a group", errno.ENOBUFS, "there is no room")
        return group(netlink, *args)

    monkeypatch.setattr(ModelNetlink, "replace_group", replaced)
    monkeypatch.setattr(ModelNetlink, "group", read)
    machine.condition[3] = "dead"
    machine.time_passes(8)
    assert machine.kernel.weights(GROUP) == ORIGINAL[:2]
    assert machine.controller.engine.manual == {}
    assert [each.last.kind for each in machine.controller.acting.outstanding().values()] == ["applied"]
    monkeypatch.setattr(ModelNetlink, "replace_group", replace_group)
    machine.stop()
    assert machine.kernel.weights(GROUP) == ORIGINAL
    machine.teardown()


def with_a_drained_rail_of_somebody_elses():
    """Rail 2 is drained when somebody deletes rail 3's nexthop: hands off, and rail 2 is still out."""
    machine = Steering()
    machine.begin()
    machine.time_passes(8)
    machine.becomes(2, "dead")
    machine.time_passes(8)
    machine.kernel.delete(13)
    machine.removed.add(13)
    machine.meddled = True
    machine.time_passes(8)
    assert machine.given_up and machine.kernel.weights(GROUP) == ORIGINAL[:1]
    return machine


def test_what_was_drained_before_somebody_deleted_a_nexthop_still_stands_in():
    machine = with_a_drained_rail_of_somebody_elses()
    machine.link(1, False)
    for _ in range(3):
        assert machine.kernel.weights(GROUP) is None and machine.kernel.reaches(DESTINATION)
        machine.time_passes(8)
    machine.stop()
    machine.teardown()


def test_a_backup_of_what_is_somebody_elses_goes_when_he_gives_other_weights():
    machine = with_a_drained_rail_of_somebody_elses()
    assert any(is_backup(route) for route in machine.kernel.route_objects.values())
    machine.kernel.reweight(GROUP, ((11, 7), (12, 9)))
    machine.time_passes(8)
    assert not any(is_backup(route) for route in machine.kernel.route_objects.values())
    machine.teardown()


@pytest.mark.parametrize("guardian", ["undoes", "is dead"])
def test_a_group_that_went_after_its_controller_is_made_again_although_a_drained_hop_of_it_is_left(guardian):
    """All it had left went with links; that its drained nexthop is there does not mean that somebody deleted it."""
    machine = Steering()
    machine.begin()
    machine.time_passes(8)
    machine.link(2, False)
    machine.time_passes(8)
    machine.becomes(3, "dead")
    machine.time_passes(8)
    assert machine.kernel.weights(GROUP) == ORIGINAL[:1]
    machine.kill("is dead", 0)
    machine.link(1, False)
    assert machine.kernel.weights(GROUP) is None and 13 in machine.kernel.nexthop_objects
    if guardian == "undoes":
        machine.guard()
    machine.all_is_well_for_long()
    assert machine.kernel.weights(GROUP) == ORIGINAL
    machine.teardown()
