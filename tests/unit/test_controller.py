"""The controller's loop, with an overlay and a guardian that are made up: what it does when things go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import replace

import pytest
from steering_kit import MS, POLICY, SECOND_HOP, AtOnce, group, measured, path
from support import mentions

from pytools import directories
from pytools.errors import SwerveError
from pytools.kernel import netns
from steering import controller, elapsed
from steering.acting import journal
from steering.acting.hooks import HookActing
from steering.acting.rto_min import RETRY_NS
from steering.actuators.overlay import Found
from steering.actuators.overlay_memory import OverlayMemory
from steering.actuators.rto_min import Chosen
from steering.agent_link import AgentLink
from steering.control import kept_orders
from steering.control.requests import Status
from steering.control.server import Peer
from steering.controller import Controller, Options
from steering.plan import Change, overlay_target
from steering.policy.file import parse

AFTER = ((SECOND_HOP, 1),)


def target(number):
    return overlay_target("main", f"10.9.0.{number}/32")


class Kernel:
    """Stands for the overlay: targets with their weights; `refuses` says why every request fails."""

    due_ns = 1 << 62
    held, rto_min = False, Chosen(20, 200)
    memory = OverlayMemory(20_000, None, (), "object", (), (), ())

    def __init__(self, *numbers):
        self.groups = {name: replace(group({1: [], 2: []}), target=name) for name in map(target, numbers)}
        self.refuses, self.asked, self.stuck, self.closed = "", [], None, []
        self._news = os.eventfd(0)
        self.meanwhile = lambda: None  # happens while the kernel works

    def apply(self, which, wanted):
        self.asked.append(which)
        self.meanwhile()
        if which not in self.groups:
            raise SwerveError("it is gone")
        if self.refuses:
            raise SwerveError(self.refuses)
        self.groups[which] = replace(self.groups[which], current=wanted)
        return wanted

    def hold(self):
        self.asked.append("hold")
        if self.refuses:
            raise SwerveError(self.refuses)
        self.held = True

    def off(self):
        self.asked.append("off")
        if self.stuck is not None:
            raise self.stuck
        self.groups = {name: replace(each, current=each.original) for name, each in self.groups.items()}

    def refresh(self):
        return Found(dict(self.groups), {}, frozenset(), frozenset(), (), ())

    @property
    def in_force(self):
        return any(each.current != each.original for each in self.groups.values())

    def fileno(self):
        return self._news

    def close(self, remove):
        self.closed.append(remove)
        os.close(self._news)


class Guardian:
    """Lives, unless told otherwise; counts what it is asked."""

    pid, alive, ticks, left, handed = 7, True, 0, False, False

    def register(self, selector):
        pass

    def tick(self, now):
        self.ticks += 1
        return now

    def live(self):
        return self.alive

    def leave(self):
        self.left = True

    def hand_over(self):
        self.handed = self.alive
        return self.alive


class Made:
    """A controller and what it stands on."""

    def __init__(self, monkeypatch, kernel):
        self.kernel, self.guardian, self.said, self.recovered, self.told = kernel, Guardian(), [], set(), []
        self.controller: Controller | None = None
        monkeypatch.setattr(controller, "Netlink", contextlib.nullcontext)
        monkeypatch.setattr(controller, "switch_off", lambda _: kernel.asked.append("off"))
        monkeypatch.setattr(controller, "Later", AtOnce)
        monkeypatch.setattr(controller, "Overlay", lambda *_: kernel)
        monkeypatch.setattr(controller, "GuardianLink", lambda *_: self.guardian)

    def start(self, **options):
        how = Options(**{"apply": True, **options})
        self.controller = Controller(parse(POLICY), how, self.said.append, self.told.append)
        self.controller.refresh(time.monotonic_ns())
        self.kernel.asked.clear()
        self.controller.engine.changes = lambda now, only=None: self.changes(only)
        return self.controller

    def set_rto_min(self, now=0):
        """What a turn of the loop does about it."""
        self.controller._rto_min.turn(now, self.controller._refusal)

    def changes(self, only=None):
        """What is wanted: every target without rail 1, but for those that have recovered."""
        known = self.controller.engine.groups
        wanted = [each for each in known if each not in self.recovered and (only is None or each in only)]
        return [Change(each, known[each].current, AFTER, "because", "rule") for each in wanted]


@pytest.fixture
def made(monkeypatch, tmp_path):
    monkeypatch.setenv("SWERVE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("SWERVE_RUNTIME_DIR", str(tmp_path / "run"))
    found = Made(monkeypatch, Kernel(101, 102, 103))
    yield found
    if found.controller is not None:
        found.controller.close()


def in_force():
    return journal.read(directories.state_dir(None) / journal.FILE).in_force(netns.scope())


def left_behind(which):
    """A controller and its guardian died in the same instant."""
    known = replace(group({1: [], 2: []}), target=which)
    with journal.Journal(journal.directory(None) / journal.FILE) as log:
        log.write(journal.entry_now("applied", "a", known, known.current, AFTER, "", "", netns.scope()))


# ---- the minimum RTO ----


def rto_min_acts(made):
    return [(act.outcome, act.before, act.after) for act in made.told if act.actuator == "rto_min"]


def test_a_minimum_rto_is_in_force_once_it_is_guarded_and_told_when_it_is_over(made):
    theirs, ours = {"rto_min_ms": 200}, {"rto_min_ms": 20}
    made.start().stop(signal.SIGTERM)
    made.guardian.alive = False
    made.set_rto_min()
    assert "hold" not in made.kernel.asked, "who would undo it?"
    made.guardian.alive, made.kernel.refuses = True, "not now"
    made.set_rto_min()
    made.set_rto_min(RETRY_NS - 1)
    assert made.kernel.asked.count("hold") == 1, "a refusal is not asked for again and again"
    made.set_rto_min(RETRY_NS)
    made.kernel.refuses = ""
    made.set_rto_min(2 * RETRY_NS)
    made.set_rto_min(3 * RETRY_NS)
    assert made.kernel.asked.count("hold") == 3
    made.controller.run()
    outcomes = [("failed", theirs, ours), ("applied", theirs, ours), ("undone", ours, theirs)]
    assert rto_min_acts(made) == outcomes


def test_a_dry_run_says_once_which_minimum_rto_it_would_set(made):
    made.start(apply=False)
    made.set_rto_min()
    made.set_rto_min()
    assert [outcome for outcome, *_ in rto_min_acts(made)] == ["dry_run"] and "hold" not in made.kernel.asked


def test_a_freeze_holds_a_minimum_rto_back(made):
    made.start()
    (directories.state_dir(None) / "freeze").write_text("noon")
    made.set_rto_min()
    assert "hold" not in made.kernel.asked and made.controller._facts()["rto_min_wanted_ms"] == 20


# ---- acts ----


def test_targets_that_vanish_together_cost_nothing_but_themselves(made):
    made.start()
    changes = made.changes()
    made.kernel.groups = {each: known for each, known in made.kernel.groups.items() if each.endswith("103/32")}
    made.controller.act(changes)
    assert made.kernel.asked == [target(101), target(103)], "the second was not asked for any more"
    assert made.kernel.groups[target(103)].current == AFTER


def test_the_lease_is_renewed_between_changes(made):
    made.start()
    made.controller.act(made.changes())
    assert made.guardian.ticks >= len(made.kernel.asked) == 3


def test_without_a_live_guardian_nothing_is_changed(made):
    made.start()
    made.guardian.alive = False
    made.controller.act(made.changes())
    assert made.kernel.asked == []
    assert "no live guardian" in made.controller.engine.why_rejected(target(101))


def test_status_says_what_only_the_controller_knows(made):
    made.start()
    facts = made.controller.desk.answer(Status(), Peer(1, 0)).facts
    assert (facts["guardian_pid"], facts["guarded"], facts["managed"]["targets"]) == (Guardian.pid, True, 3)
    assert (facts["signals_missed"], facts["signals_missed_urgent"], facts["acts_lost"]) == (0, 0, 0)
    assert facts["flows_forgotten"] == 0


def test_what_was_under_way_when_the_host_slept_moves_nothing(made):
    """The first thing after a suspend may be signals of before it, which were waiting in the socket."""
    made.start()
    now, hour = time.monotonic_ns(), 3600 * 10**9
    made.controller.desk.sleeps = elapsed.Sleeps(iter([(now, now, now), (now, now + hour, now)]).__next__)
    made.controller.receive([measured(path(rail), now - MS, 50 * MS) for rail in (1, 2)])
    assert made.controller.engine.evidence.refused == 2 and made.kernel.asked == []
    assert any(mentions(said, "suspended", "1 h") for said in made.said)


def test_a_freeze_holds_what_is_decided_and_not_done_yet(made):
    made.start()
    stop_file = directories.state_dir(None) / "freeze"
    made.kernel.meanwhile = stop_file.touch
    made.controller.act(made.changes())
    assert made.kernel.asked == [target(101)]
    assert "frozen" in made.controller.engine.why_rejected(target(102))
    made.kernel.asked.clear()
    made.controller.act(made.changes(target(102)))
    stop_file.unlink()
    assert made.kernel.asked == [], "nor is the first one of a decision carried out"


def test_what_has_recovered_meanwhile_is_left_alone(made, monkeypatch):
    """While the kernel worked for one target, something was heard of another."""
    heard, polled = AgentLink.poll, []
    monkeypatch.setattr(AgentLink, "poll", lambda agent: (polled.append(len(made.kernel.asked)), heard(agent)))
    made.start()
    made.kernel.meanwhile = lambda: made.recovered.add(target(102))
    made.controller.act(made.changes())
    assert made.kernel.asked == [target(101), target(103)]
    assert polled == [0, 1, 1], "what has arrived is read before the kernel is asked, each time"


def test_a_guardian_that_dies_between_decision_and_act_holds_even_the_first(made, monkeypatch):
    monkeypatch.setattr(AgentLink, "poll", lambda _: setattr(made.guardian, "alive", False))
    made.start()
    changes = made.changes()
    made.controller.act(changes)
    assert made.kernel.asked == []
    assert "no live guardian" in made.controller.engine.why_rejected(target(101))


def test_what_arrives_while_changes_are_carried_out_is_decided_after_them(made, monkeypatch):
    made.start()
    changes, nested = made.changes([target(101)]), []
    monkeypatch.setattr(made.controller.engine, "take", lambda *_: {target(103)})
    monkeypatch.setattr(made.controller.packets, "take", lambda *_: None)

    def hear_of_another():
        if made.kernel.asked == [target(101)]:
            made.controller.receive([object()])
            nested.append(made.kernel.asked != [target(101)])

    made.kernel.meanwhile = hear_of_another
    made.controller.act(changes)
    assert made.kernel.asked == [target(101), target(103)] and nested == [False]


def test_a_full_disk_does_not_end_the_loop_when_a_target_goes(made, monkeypatch):
    made.start()
    made.controller.act(made.changes())

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal.Journal, "write", full)
    made.kernel.groups.clear()
    made.controller.refresh(time.monotonic_ns())
    assert any("cannot be written: No space" in said for said in made.said)


@pytest.mark.parametrize("goes", [True, False])
def test_what_others_change_ends_what_was_in_force_there(made, goes):
    made.start()
    made.controller.act(made.changes())
    name = target(102)
    if goes:
        del made.kernel.groups[name]
    else:
        made.kernel.groups[name] = replace(made.kernel.groups[name], current=made.kernel.groups[name].original)
    made.controller.refresh(time.monotonic_ns())
    assert in_force().keys() == {target(101), target(103)}


# ---- begin and end ----


def test_what_was_left_behind_is_taken_back_before_anything_else_can_fail(made):
    left_behind(target(102))
    orders = directories.state_dir(None) / kept_orders.FILE
    orders.write_text("rubbish")
    orders.chmod(0o600)
    memory = directories.steering_memory(None)
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text("of a controller that was killed together with its guardian")
    with pytest.raises(SwerveError, match="not a file of orders"):
        made.start(keep=True)
    assert not memory.exists()
    assert made.kernel.asked[0] == "off" and in_force() == {} and made.kernel.closed == [True]


def test_a_guardian_leaves_once_everything_is_put_back(made):
    made.start().stop(signal.SIGTERM)
    made.controller.act(made.changes())
    assert made.controller.run() == signal.SIGTERM
    assert made.guardian.left and in_force() == {} and made.kernel.closed == [True]


def test_what_is_kept_stays_in_force(made):
    made.start(keep=True).stop(signal.SIGTERM)
    made.controller.act(made.changes())
    assert made.controller.run() == signal.SIGTERM
    assert made.guardian.left and len(in_force()) == 3 and made.kernel.closed == [False]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("alive", [True, False])
def test_what_is_in_force_is_handed_over_to_a_guardian_that_lives_when_a_service_is_stopped(made, number, alive):
    made.start(hand_over=True).stop(number)
    made.controller.act(made.changes())
    made.guardian.alive = alive
    made.controller.run()
    kept = alive and number == signal.SIGTERM
    assert (made.guardian.handed, made.guardian.left, made.kernel.closed) == (kept, not kept, [not kept])
    assert len(in_force()) == (3 if kept else 0)
    assert directories.steering_memory(None).exists() is kept


def test_nothing_is_handed_over_where_nothing_is_in_force(made):
    made.start(hand_over=True).stop(signal.SIGTERM)
    made.controller.run()
    assert made.guardian.left and not made.guardian.handed and made.kernel.closed == [True]


def test_what_hooks_were_told_is_handed_over_too(made, monkeypatch):
    taken_back = []
    monkeypatch.setattr(HookActing, "outstanding", True)
    monkeypatch.setattr(HookActing, "take_back", lambda *_: taken_back.append(1))
    made.start(hand_over=True).stop(signal.SIGTERM)
    made.controller.run()
    assert made.guardian.handed and not made.guardian.left and taken_back == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_stop_ends_what_hooks_were_told_unless_all_is_kept(made, monkeypatch, keep):
    taken_back = []
    monkeypatch.setattr(HookActing, "take_back", lambda *_: taken_back.append(1))
    made.start(keep=keep).stop(signal.SIGTERM)
    made.controller.run()
    assert taken_back == [1] * (not keep)


def test_a_guardian_stays_while_the_rules_cannot_be_deleted(made):
    made.start().stop(signal.SIGTERM)
    made.controller.act(made.changes())
    made.kernel.stuck = SwerveError("not now")
    with pytest.raises(SwerveError, match="the rules cannot be deleted: not now"):
        made.controller.run()
    assert not made.guardian.left and len(in_force()) == 3


def test_a_second_signal_does_not_cut_the_end_short(made):
    handlers, close = [], made.kernel.close
    made.start().stop(signal.SIGTERM)
    made.kernel.close = lambda remove: (handlers.append(signal.getsignal(signal.SIGTERM)), close(remove))
    before = signal.getsignal(signal.SIGTERM)
    made.controller.run()
    assert len(handlers) == 1 and handlers[0] != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_acts_of_the_operator_are_kept_for_the_history(made):
    made.start()
    (directories.state_dir(None) / "freeze").write_text("noon")
    made.controller.desk.tick(time.monotonic_ns())
    [line] = (directories.state_dir(None) / "acts.jsonl").read_text().splitlines()
    assert json.loads(line)["what"] == "freeze"


def test_hooks_are_called_after_the_acts(made):
    made.kernel.set_apart = lambda _: False
    running, at_hooks = made.start(), []
    running._hooks.turn = lambda now, frozen: at_hooks.append((list(made.kernel.asked), frozen))
    running._look_around()
    assert at_hooks == [([target(101), target(102), target(103)], False)]
