"""The operator's desk beside a controller that is made up: deadlines, the stop file, orders that cannot be kept."""

from __future__ import annotations

import threading
import time
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest
from steering_kit import FIRST, MS, POLICY, SECOND, SECOND_HOP, TARGET, group, measured, path
from support import mentions

from pytools.errors import RefusedError, SwerveError
from pytools.kernel import netns
from steering import elapsed
from steering.acting import journal
from steering.acting.background import Later
from steering.acting.messages import Output
from steering.control import kept_orders, requests
from steering.control import operator_api as desk
from steering.control.host import Site
from steering.control.operator_api import Desk
from steering.control.pins import MOST
from steering.control.server import Peer
from steering.deciding import health
from steering.deciding.engine import Engine
from steering.deciding.overrides import Moment
from steering.guarding import confirming
from steering.plan import FlowKey, Pin
from steering.policy.file import parse

ASKER = Peer(1, 0)


class Made:
    """A controller that writes down what it is asked to do."""

    def __init__(self, folder, apply=True, deadline=None):
        self.engine, self.said, self.sent, self.stopped = Engine(parse(POLICY)), [], [], []
        self.folder, self.pins, self.why_no_pin = folder, {}, "no pins here"
        self.later = Later()
        self.engine.arrange([group({1: [], 2: []})], lambda _: (TARGET,), time.monotonic_ns())
        for _ in range(3):
            now = time.monotonic_ns()
            for rail in (1, 2):
                self.engine.take(measured(path(rail), now, 0), now)
        site = Site(
            folder=folder,
            later=self.later,
            engine=self.engine,
            flows=SimpleNamespace(
                pin=lambda pin: self.why_no_pin or self.pins.update({pin.flow: pin}) or "",
                unpin=lambda flow: self.pins.pop(flow, None) is not None,
                pinned=lambda: list(self.pins.values()),
                by_hand=lambda now: tuple(pin for pin in self.pins.values() if pin.expires_ns > now),
                labelled=list,
            ),
            apply=apply,
            output=Output("h1", self.said.append, self.sent.append),
            act=self._act,
            take_back=self._take_back,
            stop=self.stopped.append,
            facts=lambda: {"guardian_pid": 7},
        )
        self.desk = Desk(site, deadline)
        self.refuses, self.forgets = "", False  # why no change is made; whether its target turns out to be gone

    def _act(self, changes):
        for change in changes:
            if self.forgets:
                self.engine.groups.clear()
            elif self.refuses:
                self.engine.rejected(change, self.refuses)
            else:
                self.engine.carried_out(change, time.monotonic_ns(), change.after)

    def _take_back(self, change, name):
        self._act([change])
        return self.refuses

    def weights(self):
        return dict(self.engine.groups[TARGET].current)


@pytest.fixture
def made(tmp_path):
    found = Made(tmp_path)
    with found.desk:
        yield found


def ask(made, request):
    return made.desk.answer(request, ASKER)


def _journalled(folder, *kinds):
    with journal.Journal(folder / journal.FILE) as log:
        for kind in kinds:
            log.write(confirming.entry(kind, "run-1", "because", "scope", "test"))


@pytest.mark.parametrize(("kinds", "stops"), [((), True), (("confirmed",), False), (("expired",), True)])
def test_a_controller_whose_guardian_is_missing_at_the_deadline_ends_by_itself(tmp_path, monkeypatch, kinds, stops):
    now = elapsed.now_ns()
    made = Made(tmp_path, deadline=confirming.Deadline("run-1", now))
    _journalled(tmp_path, *kinds)
    with made.desk as desk:
        monkeypatch.setattr(elapsed, "now_ns", lambda: now + 100 * MS)
        desk.tick(time.monotonic_ns())
        assert made.stopped == [], "the guardian comes first"
        monkeypatch.setattr(elapsed, "now_ns", lambda: now + SECOND)
        desk.tick(time.monotonic_ns())
        assert bool(made.stopped) is stops
        assert desk.confirmed is not stops


def test_an_order_that_cannot_be_kept_is_not_carried_out(made, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_orders, "save", full)
    with pytest.raises(SwerveError, match="No space left"):
        ask(made, requests.Drain("rail1"))
    assert made.weights() == {FIRST: 1, SECOND_HOP: 1} and made.engine.overrides.orders == ()


def test_orders_are_told_with_who_gave_them(made):
    ask(made, requests.Drain("rail1", why="optics"))
    assert made.weights() == {SECOND_HOP: 1}
    ask(made, requests.Undrain("rail1"))
    assert made.weights() == {FIRST: 1, SECOND_HOP: 1}
    told = [(act.what, act.outcome) for act in made.sent]
    assert told == [("drain rail1 (optics)", "alert"), ("drain rail1 (optics)", "alert_over")]
    assert all("user 0" in act.because and act.under == "operator" for act in made.sent)


def test_an_order_ends_with_its_time(made):
    ask(made, requests.Drain("rail1", for_ns=1))
    made.desk.tick(time.monotonic_ns())
    assert made.weights() == {FIRST: 1, SECOND_HOP: 1}
    assert kept_orders.load(made.folder, elapsed.moment()).orders == ()
    assert "has run out" in made.sent[-1].because


def test_everything_can_be_held(made):
    ask(made, requests.Hold(why="look first"))
    ask(made, requests.Drain("rail1"))
    assert made.weights() == {FIRST: 1, SECOND_HOP: 1}
    ask(made, requests.Unhold())
    assert made.weights() == {SECOND_HOP: 1}


def test_a_dry_run_takes_orders_but_undoes_and_pins_nothing(tmp_path):
    made = Made(tmp_path, apply=False)
    with made.desk:
        assert "dry run" in ask(made, requests.Drain("rail1")).lines[0]
        for request in (requests.Undo(), requests.PinFlow(6, "10.9.0.1", 1, "10.9.0.2", 2, "rail1", SECOND)):
            with pytest.raises(RefusedError, match="dry run"):
                ask(made, request)


def test_the_stop_file_is_seen_at_the_next_tick(made, tmp_path):
    (tmp_path / "freeze").write_text("noon")
    made.desk.tick(time.monotonic_ns())
    assert made.desk.frozen == made.engine.frozen == "noon"
    assert all(state.reason.startswith("frozen: noon") for state in made.engine.states("h1", 0, 0))
    with pytest.raises(RefusedError, match="frozen"):
        ask(made, requests.Undo())
    (tmp_path / "freeze").unlink()
    made.desk.tick(time.monotonic_ns())
    assert made.engine.frozen == ""
    assert [(act.what, act.outcome) for act in made.sent] == [("freeze", "alert"), ("freeze", "alert_over")]


def test_too_many_orders_are_refused(made, monkeypatch):
    monkeypatch.setattr(kept_orders, "MOST", 1)
    ask(made, requests.Hold())
    with pytest.raises(RefusedError, match="more than 1 orders"):
        ask(made, requests.Drain("rail1"))


# ---- what cannot be carried out ----


@pytest.mark.parametrize("request_", [requests.Drain("rail1"), requests.Undrain("rail1")])
def test_a_target_may_go_while_an_order_about_it_is_carried_out(made, request_):
    if isinstance(request_, requests.Undrain):
        ask(made, requests.Drain("rail1"))
    made.forgets = True
    reply = ask(made, request_)
    assert reply.code == 0 and len(reply.lines) == 1 and mentions(reply.lines[0], "nexthop group 102", "gone")


def test_a_drain_that_is_not_carried_out_does_not_look_like_success(made):
    made.refuses = "held: there is no live guardian"
    reply = ask(made, requests.Drain("rail1"))
    assert reply.code == 1 and made.refuses in reply.lines[0] and "the order stands" in reply.next_step
    made.refuses = ""
    assert ask(made, requests.Drain("rail1")).code == 0


def test_a_failure_while_orders_are_kept_leaves_the_former_ones(made, tmp_path, monkeypatch):
    ask(made, requests.Hold(why="first"))

    def broken(_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(kept_orders, "sync_folder", broken)
    with pytest.raises(SwerveError, match="not in force"):
        ask(made, requests.Drain("rail1"))
    assert made.later.wait(10) and kept_orders.load(tmp_path, elapsed.moment()) == made.engine.overrides
    assert [order.kind for order in made.engine.overrides.orders] == ["hold"]


def test_an_order_for_which_the_disk_does_not_answer_is_refused_and_not_kept(made, tmp_path, monkeypatch):
    ask(made, requests.Hold(why="first"))
    monkeypatch.setattr(desk, "_DISK_S", 0.01)
    hangs = threading.Event()
    made.later.put(hangs.wait)
    with pytest.raises(SwerveError, match="does not answer"):
        ask(made, requests.Drain("rail1"))
    assert [order.kind for order in made.engine.overrides.orders] == ["hold"]
    hangs.set()
    assert made.later.wait(10) and kept_orders.load(tmp_path, elapsed.moment()) == made.engine.overrides


def test_a_hold_of_what_went_with_its_link_can_be_ended(made):
    ask(made, requests.Hold(TARGET))
    made.engine.groups.clear()
    assert "no more" in ask(made, requests.Unhold("102")).lines[0]
    assert made.engine.overrides.orders == ()


# ---- what only the controller knows ----


def test_only_wanted_weights_that_are_not_so_yet_are_told(made):
    ask(made, requests.Drain("rail1"))
    assert ask(made, requests.Status()).facts["wanted"] == {}
    made.refuses = "the kernel refuses"
    ask(made, requests.Undrain("rail1"))
    facts = ask(made, requests.Status()).facts
    assert (
        facts["wanted"] == {TARGET: {"10.1.1.1 dev rail1": 1, "10.2.1.1 dev rail2": 1}}
        and facts["signals_refused"] == 0
    )
    assert facts["guardian_pid"] == 7


def test_it_is_told_how_many_paths_are_spoken_of(made):
    assert ask(made, requests.Status()).facts["path_count"] == len(made.engine.known_paths) == 2


# ---- taking back ----


def _acted(made, tmp_path):
    """The policy took rail 1 out, and said so in the journal."""
    known, after = made.engine.groups[TARGET], ((SECOND_HOP, 1),)
    with journal.Journal(tmp_path / journal.FILE) as log:
        facts = (known.current, after, "congestion", "rule", netns.scope())
        log.write(journal.entry_now("applied", "act", known, *facts))
    made.engine.groups[TARGET] = replace(known, current=after)


# ---- time, suspends, and steps of the wall clock ----

HOUR = 3600 * SECOND


def _later(monkeypatch, wall_ns=0, boot_ns=0, boot_id="this"):
    """The clocks as they stand after so much more of wall clock and of CLOCK_BOOTTIME."""
    started = _later.__dict__.setdefault("at", elapsed.moment())
    found = Moment(started.unix_ns + wall_ns, started.boot_ns + boot_ns, boot_id)
    monkeypatch.setattr(elapsed, "moment", lambda: found)


@pytest.mark.parametrize("request_", [requests.Hold(TARGET, 2 * HOUR), requests.Drain("rail1", for_ns=2 * HOUR)])
@pytest.mark.parametrize("step", [-24 * HOUR, 0, 24 * HOUR])
def test_an_order_ends_in_real_time_whatever_becomes_of_the_wall_clock(made, monkeypatch, request_, step):
    _later(monkeypatch)
    assert ask(made, request_).code == 0
    _later(monkeypatch, HOUR + step, HOUR)
    made.desk.tick(time.monotonic_ns())
    [order] = ask(made, requests.Status()).facts["orders"]
    assert order["left_s"] == 3600.0
    _later(monkeypatch, 2 * HOUR + step, 2 * HOUR)  # most of it suspended: CLOCK_MONOTONIC has not moved
    made.desk.tick(time.monotonic_ns())
    assert made.engine.overrides.orders == () and "has run out" in made.said[-1]
    assert made.weights() == {FIRST: 1, SECOND_HOP: 1}


def test_an_undo_is_held_no_longer_for_a_step_of_the_wall_clock(made, tmp_path, monkeypatch):
    _later(monkeypatch)
    _acted(made, tmp_path)
    ask(made, requests.Undo(hold_ns=HOUR))
    _later(monkeypatch, -24 * HOUR, HOUR)
    made.desk.tick(time.monotonic_ns())
    assert made.engine.overrides.orders == ()


def test_after_a_suspend_what_was_measured_before_moves_nothing(made, monkeypatch):
    """The controller looks before it digests what has arrived, so that not even one old measurement counts."""
    now = time.monotonic_ns()
    stale = made.engine.policy.safety.stale_after
    assert not any(health.stale(made.engine.policy, known, now) for known in made.engine.paths.values())
    made.desk.sleeps = elapsed.Sleeps(iter([(now, now, now), (now, now + HOUR, now)]).__next__)
    made.desk.look_for_sleep()
    assert "the host was suspended for 1 h" in made.said[-1]
    assert all(health.stale(made.engine.policy, known, now) for known in made.engine.paths.values())
    refused = made.engine.evidence.refused
    made.engine.take(measured(path(1), now - 1, 0), now)
    assert made.engine.evidence.refused == refused + 1, "it was under way to us"
    assert health.stale(made.engine.policy, made.engine.paths[path(1)], now)
    made.engine.take(measured(path(1), now + MS, 0), now + MS)
    assert not health.stale(made.engine.policy, made.engine.paths[path(1)], now + MS)
    assert now - made.engine.paths[path(2)].seen_ns <= stale + 1, "it waits to be measured: that is no long silence"


def test_pins_by_hand_end_in_real_time(made):
    """The kernel ends them by a clock that stood still, so they are given less of it."""
    now, made.why_no_pin = time.monotonic_ns(), ""
    for port, hours in ((1, 1), (2, 3)):
        ask(made, requests.PinFlow(6, "10.9.0.1", port, "10.9.0.2", 80, "rail1", hours * HOUR))
    made.desk.sleeps = elapsed.Sleeps(iter([(now, now, now), (now, now + 2 * HOUR, now)]).__next__)
    made.desk.tick(now)
    [left] = made.pins.values()
    assert left.flow.local_port == 2 and HOUR - SECOND < left.expires_ns - now < HOUR + SECOND
    assert [act.outcome for act in made.sent] == ["applied", "applied", "undone"]
    assert "while the host was suspended" in made.sent[-1].because


def test_pins_by_hand_are_bounded_and_make_room_when_they_run_out(made):
    now, made.why_no_pin = time.monotonic_ns(), ""
    flows = [FlowKey(6, "10.9.0.1", port, "10.9.0.2", 80) for port in range(1, MOST + 2)]
    made.pins.update((flow, Pin(flow, TARGET, FIRST, now + HOUR)) for flow in flows[:-1])
    with pytest.raises(RefusedError, match=f"{MOST} flows are pinned by hand already"):
        ask(made, requests.PinFlow(*astuple(flows[-1]), via="rail1", for_ns=HOUR))
    assert ask(made, requests.PinFlow(*astuple(flows[0]), via="rail1", for_ns=HOUR)).code == 0, (
        "it has its place already"
    )
    made.pins[flows[1]] = replace(made.pins[flows[1]], expires_ns=now)
    assert ask(made, requests.PinFlow(*astuple(flows[-1]), via="rail1", for_ns=HOUR)).code == 0


def test_a_deadline_to_confirm_does_not_stand_still_in_a_suspend(tmp_path, monkeypatch):
    made = Made(tmp_path, deadline=confirming.deadline_in(HOUR))
    later = elapsed.now_ns() + HOUR + SECOND
    with made.desk as desk:
        desk.tick(time.monotonic_ns())
        assert made.stopped == []
        monkeypatch.setattr(elapsed, "now_ns", lambda: later)
        desk.tick(time.monotonic_ns())
        assert made.stopped


def test_what_is_taken_back_is_held_and_the_reply_says_so(made, tmp_path):
    _acted(made, tmp_path)
    reply = ask(made, requests.Undo())
    assert reply.code == 0 and made.weights() == {FIRST: 1, SECOND_HOP: 1}
    assert "congestion" in reply.lines[0] and "the operator holds it" in reply.lines[1]
    [order] = made.engine.overrides.orders
    assert order.target == TARGET and order.until_unix_ns > time.time_ns()


def test_a_longer_hold_is_not_cut_short(made, tmp_path):
    _acted(made, tmp_path)
    ask(made, requests.Hold(TARGET, why="mine"))
    assert ask(made, requests.Undo()).code == 0
    assert [order.why for order in made.engine.overrides.orders] == ["mine"]


def test_what_could_not_be_taken_back_is_not_held(made, tmp_path):
    _acted(made, tmp_path)
    made.refuses = "held: there is no live guardian"
    reply = ask(made, requests.Undo())
    assert reply.code == 1 and len(reply.lines) == 1 and made.refuses in reply.lines[0]
    assert made.engine.overrides.orders == ()


def test_a_hold_that_cannot_be_kept_is_told(made, tmp_path, monkeypatch):
    _acted(made, tmp_path)
    monkeypatch.setattr(kept_orders, "MOST", 0)
    reply = ask(made, requests.Undo())
    assert reply.code == 1 and reply.lines[-1].startswith("not held")


def test_taking_back_does_not_break_a_drain(made, tmp_path):
    _acted(made, tmp_path)
    ask(made, requests.Drain("rail1"))
    reply = ask(made, requests.Undo())
    assert reply.code == 1 and "undrain" in reply.lines[0]
    assert made.weights() == {SECOND_HOP: 1}
