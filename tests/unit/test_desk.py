"""The operator's desk beside a controller that is made up: deadlines, the stop file, orders that cannot be kept."""

from __future__ import annotations

import time

import pytest
from steering_kit import FIRST, MS, POLICY, SECOND, SECOND_HOP, TARGET, group, measured, path

from pytools.errors import RefusedError, SwerveError
from steering.acting import journal
from steering.control import kept_orders, requests
from steering.control.desk import Desk
from steering.control.server import Peer
from steering.control.site import Site
from steering.deciding.engine import Engine
from steering.guarding import confirming
from steering.policy import parse

ASKER = Peer(1, 0)


class Made:
    """A controller that writes down what it is asked to do."""

    def __init__(self, folder, apply=True, deadline=None):
        self.engine, self.said, self.sent, self.stopped = Engine(parse(POLICY)), [], [], []
        self.engine.arrange([group({1: [], 2: []})], {"10.9.0.2": TARGET}.get, time.monotonic_ns())
        for _ in range(3):
            now = time.monotonic_ns()
            for rail in (1, 2):
                self.engine.take(measured(path(rail), now, 0), now)
        site = Site(
            folder=folder,
            engine=self.engine,
            apply=apply,
            host=lambda: "h1",
            say=self.said.append,
            send=self.sent.append,
            act=self._act,
            take_back=self._take_back,
            pin=lambda _: "no pins here",
            unpin=lambda _: False,
            pinned=list,
            stop=self.stopped.append,
            guardian=lambda: 7,
        )
        self.desk = Desk(site, deadline)

    def _act(self, changes):
        for change in changes:
            self.engine.carried_out(change, time.monotonic_ns(), change.after)

    def _take_back(self, change, name):
        self._act([change])
        return ""

    def weights(self):
        return dict(self.engine.groups[TARGET].current)


@pytest.fixture
def made(tmp_path):
    found = Made(tmp_path)
    with found.desk:
        yield found


def ask(made, request):
    return made.desk._answer(request, ASKER)


def _journalled(folder, *kinds):
    with journal.Journal(folder / journal.FILE) as log:
        for kind in kinds:
            log.write(confirming._entry(kind, "run-1", "because", "scope", "test"))


@pytest.mark.parametrize(("kinds", "stops"), [((), True), (("confirmed",), False), (("expired",), True)])
def test_a_controller_whose_guardian_is_missing_at_the_deadline_ends_by_itself(tmp_path, kinds, stops):
    now = time.monotonic_ns()
    made = Made(tmp_path, deadline=confirming.Deadline("run-1", now))
    _journalled(tmp_path, *kinds)
    with made.desk as desk:
        desk.tick(now + 100 * MS)
        assert made.stopped == [], "the guardian comes first"
        desk.tick(now + SECOND)
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
    assert kept_orders.load(made.desk._site.folder, 0).orders == ()
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
    assert all(standing.reason.startswith("frozen: noon") for standing in made.engine.standings(0))
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
