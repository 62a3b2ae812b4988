"""The controller's loop, with a kernel, a keeper and a guardian that are made up: what it does when things go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from steering_kit import POLICY, SECOND_HOP, group

from pytools import places
from pytools.errors import SwerveError
from steering import controller
from steering.acting import journal
from steering.actuators.weighted import Outcome
from steering.control import kept_orders
from steering.controller import Controller, Options
from steering.plan import Change, nexthop_group
from steering.policy import parse

AFTER = ((SECOND_HOP, 1),)


class Kernel:
    """Targets with their weights; `refuses` says what becomes of every request."""

    def __init__(self, *numbers):
        self.groups = {nexthop_group(n): replace(group({1: [], 2: []}), target=nexthop_group(n)) for n in numbers}
        self.refuses, self.asked, self.again = "", [], []

    def apply(self, known, expected, wanted):
        self.asked.append(known.target)
        if known.target not in self.groups:
            return Outcome("gone", (), None, "it is gone")
        if self.refuses:
            return Outcome(self.refuses, known.current, None, "refused")
        self.groups[known.target] = replace(self.groups[known.target], current=wanted)
        return Outcome("applied", wanted, time.monotonic_ns())

    def undo(self, known, ours):
        return self.apply(known, ours, known.original)

    def regain(self, folder, scope, in_force):
        return self.again, [f"{each.target} is made again" for each in self.again]


class Keeper:
    """Finds what the kernel has."""

    due_ns = 1 << 62

    def __init__(self, kernel):
        self._kernel, self._news = kernel, os.eventfd(0)

    def refresh(self, *_):
        groups = dict(self._kernel.groups)
        return SimpleNamespace(
            groups=groups, first=groups, refused={}, manual={}, lost=frozenset(), told=(), target_of=lambda _: None
        )

    def fileno(self):
        return self._news

    def close(self, remove):
        os.close(self._news)


class Guardian:
    """Lives, unless told otherwise; counts what it is asked."""

    pid, alive, ticks, left = 7, True, 0, False

    def register(self, selector):
        pass

    def tick(self, now):
        self.ticks += 1
        return now

    def live(self):
        return self.alive

    def leave(self):
        self.left = True


class Made:
    """A controller and what it stands on."""

    def __init__(self, monkeypatch, kernel):
        self.kernel, self.guardian, self.said = kernel, Guardian(), []
        monkeypatch.setattr(controller, "Netlink", contextlib.nullcontext)
        monkeypatch.setattr(controller, "Actuators", lambda _: kernel)
        monkeypatch.setattr(controller, "Keeper", lambda *_, **__: Keeper(kernel))
        monkeypatch.setattr(controller, "GuardianLink", lambda *_: self.guardian)

    def start(self, **options):
        self.controller = Controller(parse(POLICY), Options(apply=True, **options), self.said.append)
        self.controller._refresh(time.monotonic_ns())
        return self.controller

    def changes(self):
        groups = self.controller._engine.groups.values()
        return [Change(known.target, known.current, AFTER, "because", "rule") for known in groups]


@pytest.fixture
def made(monkeypatch, tmp_path):
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    found = Made(monkeypatch, Kernel(101, 102, 103))
    found.controller = None
    yield found
    if found.controller is not None:
        found.controller._stack.close()


def outstanding():
    return journal.read(places.state_dir(None) / journal.FILE).outstanding(journal.scope())


def left_behind(target):
    """A controller and its guardian died in the same instant."""
    known = replace(group({1: [], 2: []}), target=target)
    with journal.Journal(journal.directory(None) / journal.FILE) as log:
        log.write(journal.entry_now("intent", "a", known, known.current, AFTER, "", "", journal.scope()))


# ---- acts ----


def test_targets_that_vanish_together_cost_nothing_but_themselves(made):
    made.start()
    changes = made.changes()
    made.kernel.groups = {target: known for target, known in made.kernel.groups.items() if target.endswith("103")}
    made.controller._act(changes)
    assert made.kernel.asked == [nexthop_group(101), nexthop_group(103)], "the second was not asked for any more"
    assert made.kernel.groups[nexthop_group(103)].current == AFTER


def test_what_is_made_again_at_the_end_is_an_act_like_any_other(made):
    made.start()
    made.controller._act(made.changes())
    gone = made.kernel.groups.pop(nexthop_group(102))
    made.kernel.again = [replace(gone, current=gone.original[:1])]
    sent = []
    made.controller._acting._send = sent.append
    made.controller._finish()
    told = {act.target: act for act in sent if act.outcome == "undone"}
    assert told.keys() == {nexthop_group(number) for number in (101, 102, 103)}
    again = told[nexthop_group(102)]
    assert again.before == {} and list(again.after.values()) == [1, 0]
    assert again.because.startswith("made again over the nexthops that are left") and again.under == "rule"
    assert again.decided_ns <= again.acknowledged_ns <= again.at_ns
    entry = journal.read(places.state_dir(None) / journal.FILE).entries[-1]
    assert (entry.kind, entry.by, entry.target, entry.before) == ("undone", "controller", again.target, ())
    assert entry.after == gone.original[:1] and entry.because == again.because
    assert any("is made again" in said for said in made.said)
    assert again.target not in journal.read(places.state_dir(None) / journal.FILE).last_in_force(journal.scope())


def test_what_turned_out_to_be_somebody_elses_meanwhile_is_not_touched(made):
    made.start()
    changes = made.changes()
    made.controller._engine.manual[changes[0].target] = "somebody changed it"
    made.controller._act(changes)
    assert changes[0].target not in made.kernel.asked and len(made.kernel.asked) == 2


def test_the_lease_is_renewed_between_changes(made):
    made.start()
    made.controller._act(made.changes())
    assert made.guardian.ticks == len(made.kernel.asked) == 3


def test_without_a_live_guardian_nothing_is_changed(made):
    made.start()
    made.guardian.alive = False
    made.controller._act(made.changes())
    assert made.kernel.asked == []
    assert "no live guardian" in made.controller._engine.why_rejected(nexthop_group(101))


def test_a_full_disk_does_not_end_the_loop_when_a_target_goes(made, monkeypatch):
    made.start()
    made.controller._act(made.changes())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.Journal, "write", full)
    made.kernel.groups.clear()
    made.controller._refresh(time.monotonic_ns())
    assert any("cannot be written: No space" in said for said in made.said)


def test_no_line_of_the_journal_is_read_twice_however_often_the_kernel_is_looked_at(made, monkeypatch):
    made.start()
    made.controller._act(made.changes())
    parse, lines = journal.parse, []

    def counted(line):
        lines.append(line)
        return parse(line)

    monkeypatch.setattr(journal, "parse", counted)
    for _ in range(3):
        made.controller._refresh(time.monotonic_ns())
    asked = [line for line in lines if line]
    assert asked and len(asked) == len(set(asked))


def test_a_target_that_went_while_frozen_is_settled_after_the_thaw(made):
    made.start()
    made.controller._act(made.changes())
    stop_file = places.state_dir(None) / "freeze"
    stop_file.write_text("noon")
    made.controller._desk.tick(time.monotonic_ns())
    made.kernel.groups.clear()
    for _ in range(2):
        made.controller._refresh(time.monotonic_ns())
    stop_file.unlink()
    made.controller._desk.tick(time.monotonic_ns() + 10**10)
    assert not made.controller._desk.frozen
    made.controller._act([replace(change, before=AFTER, after=change.before) for change in made.changes()])
    assert made.controller._engine.groups == {}
    assert outstanding() == {}


# ---- begin and end ----


def test_the_lease_is_renewed_while_many_targets_are_put_back(made, monkeypatch):
    made.start()
    made.controller._act(made.changes())
    ticks = []
    undo = made.kernel.undo
    monkeypatch.setattr(made.kernel, "undo", lambda *given: ticks.append(made.guardian.ticks) or undo(*given))
    made.controller._finish()
    assert len(ticks) == 3 and ticks == sorted(set(ticks))


def test_what_was_left_behind_is_taken_back_before_anything_else_can_fail(made):
    left_behind(nexthop_group(102))
    orders = places.state_dir(None) / kept_orders.FILE
    orders.write_text("rubbish")
    orders.chmod(0o600)
    with pytest.raises(SwerveError, match="not a file of orders"):
        made.start(keep=True)
    assert made.kernel.asked == [nexthop_group(102)] and outstanding() == {}


def test_a_guardian_leaves_once_everything_is_put_back(made):
    made.start()._stopping(signal.SIGTERM)
    made.controller._act(made.changes())
    assert made.controller.run() == signal.SIGTERM
    assert made.guardian.left and outstanding() == {}


def test_a_guardian_stays_while_something_could_not_be_put_back(made):
    made.start()._stopping(signal.SIGTERM)
    made.controller._act(made.changes())
    made.kernel.refuses = "failed"
    with pytest.raises(SwerveError, match="not all weights"):
        made.controller.run()
    assert not made.guardian.left and len(outstanding()) == 3


def test_a_second_signal_does_not_cut_the_end_short(made):
    handlers = []
    made.start()._stopping(signal.SIGTERM)
    made.controller._stack.callback(lambda: handlers.append(signal.getsignal(signal.SIGTERM)))
    before = signal.getsignal(signal.SIGTERM)
    made.controller.run()
    assert len(handlers) == 1 and handlers[0] != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_acts_of_the_operator_are_kept_for_the_history(made):
    made.start()
    (places.state_dir(None) / "freeze").write_text("noon")
    made.controller._desk.tick(time.monotonic_ns())
    [line] = (places.state_dir(None) / "acts.jsonl").read_text().splitlines()
    assert json.loads(line)["what"] == "freeze"
