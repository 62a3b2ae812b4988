"""The changes of one decision go together: intents on disk, kernel, outcomes on disk. A death anywhere is undone."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path as File
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from steering_kit import ORIGINAL, group

from steering.acting import journal, settle
from steering.acting.weights import Acting
from steering.actuators.weighted import Outcome, among
from steering.plan import Change, nexthop_group, same

DRAINED = ((12, 1),)
SCOPE = journal.scope()


def change(number, before=ORIGINAL, after=DRAINED):
    return Change(nexthop_group(number), before, after, "because", "rule")


class Killed(BaseException):
    """The process dies here."""


class World:
    """Targets in a kernel, a journal, and the order of what is asked of both."""

    def __init__(self, folder, targets=3, dies_at=None):
        self.groups = {
            each: replace(group({1: [], 2: []}), target=each) for each in map(nexthop_group, range(1, targets + 1))
        }
        self.file = folder / journal.FILE
        self.log = journal.Journal(self.file)
        self.steps, self.sent, self.said, self.done, self.rejected = [], [], [], [], {}
        self.outcomes, self._dies_at = {}, dies_at
        engine = SimpleNamespace(
            groups=self.groups,
            seen=lambda _: 0,
            carried_out=lambda each, *_: self.done.append(each.target),
            rejected=lambda each, why: self.rejected.update({each.target: why}),
        )
        self.acting = Acting(engine, self, self.log, lambda: "h1", self.said.append, self.sent.append)
        self.acting.first = dict(self.groups)

    def step(self, what):
        if self._dies_at is not None and len(self.steps) == self._dies_at:
            raise Killed
        self.steps.append(what)

    def apply(self, known, expected, wanted):
        self.step(f"kernel {known.target}")
        now = self.groups[known.target].current
        if not among(now, expected):
            return Outcome("manual", now, None, "somebody changed it")
        kind = self.outcomes.get(known.target, "applied")
        if kind == "applied":
            self.groups[known.target] = replace(self.groups[known.target], current=wanted)
            return Outcome("applied", wanted, time.monotonic_ns())
        return Outcome(kind, now, None, "refused")

    def undo(self, known, ours):
        now = self.groups[known.target].current
        if not same(now, known.original) and not among(now, ours):
            return Outcome("manual", now, None, "not ours")
        self.groups[known.target] = replace(self.groups[known.target], current=known.original)
        return Outcome("applied", known.original, time.monotonic_ns())

    def written(self):
        return [(entry.kind, entry.target) for entry in journal.read(self.file).entries]


@pytest.fixture
def world(tmp_path, monkeypatch):
    made = World(tmp_path)
    append, sync = journal.append_line, os.fdatasync
    monkeypatch.setattr(journal, "append_line", lambda *a: (made.step("write"), append(*a))[1])
    monkeypatch.setattr(os, "fdatasync", lambda fd: (made.step("sync"), sync(fd))[1])
    return made


def test_one_write_for_all_intents_and_one_for_all_outcomes(world):
    done = world.acting.carry_out_all([change(1), change(2), change(3)])
    targets = [nexthop_group(number) for number in (1, 2, 3)]
    assert world.steps == ["write", "sync", *(f"kernel {each}" for each in targets), "write", "sync"]
    assert (done.as_thought, done.left, world.done) == (True, (), targets)
    assert world.written() == [*(("intent", each) for each in targets), *(("applied", each) for each in targets)]
    assert [act.outcome for act in world.sent] == ["applied"] * 3
    assert len({act.act_id for act in world.sent}) == 3


def test_nothing_to_do_costs_no_write(world):
    assert world.acting.carry_out_all([]).as_thought
    assert world.steps == []


@pytest.mark.parametrize("kind", ["failed", "manual", "gone", "uncertain"])
def test_after_a_failure_the_rest_is_not_tried_and_its_intents_are_withdrawn(world, kind):
    world.outcomes[nexthop_group(2)] = kind
    done = world.acting.carry_out_all([change(1), change(2), change(3)])
    assert (done.as_thought, done.left) == (False, (change(3),))
    assert world.done == [nexthop_group(1)] and world.rejected == {nexthop_group(2): "refused"}
    outstanding = world.acting.outstanding()
    assert nexthop_group(1) in outstanding and nexthop_group(3) not in outstanding
    assert (nexthop_group(2) in outstanding) is (kind in ("gone", "uncertain")), "as far as it may be in force"
    again = world.acting.carry_out_all([change(2), change(3)])
    assert (again.as_thought, again.left) == (True, ()), "what failed a moment ago is left out"
    assert world.done == [nexthop_group(1), nexthop_group(3)]


def test_without_a_guardian_the_rest_is_not_tried(world):
    asked = []
    done = world.acting.carry_out_all([change(1), change(2), change(3)], lambda: bool(asked.append(1)))
    assert (done.as_thought, done.left, world.done) == (True, (change(2), change(3)), [nexthop_group(1)])
    assert set(world.acting.outstanding()) == {nexthop_group(1)}


def test_a_journal_that_cannot_be_written_changes_nothing(world, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", refuse)
    done = world.acting.carry_out_all([change(1), change(2)])
    assert (done.as_thought, done.left, world.done) == (True, (), [])
    assert set(world.rejected.values()) == {"the journal cannot be written: No space left on device"}
    assert not any(step.startswith("kernel") for step in world.steps)


def test_an_outcome_that_cannot_be_written_leaves_the_intents_outstanding(world, monkeypatch):
    sync = os.fdatasync
    syncs = iter([sync])

    def once(fd):
        try:
            next(syncs)(fd)
        except StopIteration:
            raise OSError(5, "Input/output error") from None

    monkeypatch.setattr(os, "fdatasync", once)
    monkeypatch.setattr(
        journal, "append_line", lambda *_: None if world.done else os.write(world.log._fd, _[1] + b"\n")
    )
    assert world.acting.carry_out_all([change(1), change(2)]).as_thought
    assert world.done == [nexthop_group(1), nexthop_group(2)]
    assert set(world.acting.outstanding()) == {nexthop_group(1), nexthop_group(2)}
    assert world.said == ["the journal cannot be written: Input/output error"]


@given(
    st.integers(1, 5),
    st.integers(0, 40),
    st.dictionaries(st.integers(1, 5), st.sampled_from(["failed", "gone", "uncertain"]), max_size=2),
    st.integers(0, 400),
)
def test_a_death_anywhere_is_undone(targets, dies_at, refusals, torn):
    """The intent is on disk before the kernel is asked; who comes later puts every target back."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        world = World(File(folder), targets, dies_at)
        world.outcomes = {nexthop_group(number): kind for number, kind in refusals.items()}
        sync, on_disk = os.fdatasync, [0]

        def synced(fd):
            world.step("sync")
            sync(fd)
            on_disk[0] = os.fstat(fd).st_size

        patch.setattr(os, "fdatasync", synced)
        try:
            left = world.acting.carry_out_all([change(number) for number in range(1, targets + 1)]).left
            world.acting.carry_out_all(left)
        except Killed:
            size = world.file.stat().st_size
            os.truncate(world.file, min(size, on_disk[0] + torn))  # of what was not synced a part may be there
        world._dies_at = None
        changed = {each.target for each in world.groups.values() if each.current != each.original}
        with journal.Journal(world.file) as log:
            assert changed <= set(log.outstanding(SCOPE))
            settle.settle(log, world, SCOPE, "guardian")
            assert not log.outstanding(SCOPE)
        assert all(each.current == each.original for each in world.groups.values())
