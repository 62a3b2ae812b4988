"""The guardian and the controller's end of it, over real pipes and real processes that are made up otherwise."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import support
from steering_kit import MS, SECOND, group

from pytools.errors import SwerveError
from steering.acting import journal
from steering.acting.lock import Lock
from steering.guarding import abandoned, guardian, link
from steering.guarding.guardian import LEAVE, READY, RENEW, watch
from steering.guarding.link import GuardianLink

# ---- the guardian ----


def test_it_loads_little():
    """Beside every controller there is one, all the time, and one that is started anew has to be ready soon."""
    script = (
        "import sys, steering.guarding.guardian; print(*sys.modules);"
        "from pyroute2 import IPRoute, config, netlink; print(IPRoute.__name__, file=sys.stderr)"
    )
    done = support.run([sys.executable, "-c", script])
    loaded = set(done.stdout.split())
    assert "pyroute2.netlink" in loaded
    assert not loaded & {"pydantic", "yaml", "numpy", "click", "rich", "asyncio", "pyroute2.iproute"}
    assert done.stderr == "IPRoute\n", "the rest is there for whoever asks"


class Watched:
    """A process that stands for a controller, and the pipes between it and its guardian."""

    def __init__(self):
        self.process = subprocess.Popen(["sleep", "100"])
        self.pidfd = os.pidfd_open(self.process.pid)
        self.renewals, self.theirs = os.pipe()
        self.heard, self.echo = os.pipe()

    def watch(self, lease_ns=SECOND, **deadline):
        return watch(self.pidfd, self.renewals, self.echo, lease_ns, **deadline)

    def close(self):
        self.process.kill()
        self.process.wait()
        for fd in (self.pidfd, self.renewals, self.theirs, self.heard, self.echo):
            if fd >= 0:
                os.close(fd)

    def hang_up(self, name):
        os.close(getattr(self, name))
        setattr(self, name, -1)

    def ended(self):
        return self.process.wait(20) is not None


@pytest.fixture
def watched():
    found = Watched()
    yield found
    found.close()


def test_it_leaves_with_a_controller_that_leaves_in_order(watched):
    os.write(watched.theirs, RENEW + LEAVE)
    assert watched.watch() == ""
    assert watched.process.poll() is None


def test_a_controller_that_dies_is_noticed_at_once(watched):
    watched.process.kill()
    watched.hang_up("theirs")
    assert watched.watch(lease_ns=1000 * SECOND) == "died"


def test_a_controller_that_stops_renewing_is_killed_first(watched):
    begun = time.monotonic_ns()
    os.write(watched.theirs, RENEW)
    assert "stopped renewing" in watched.watch(lease_ns=20 * MS)
    assert time.monotonic_ns() - begun >= 20 * MS and watched.ended()
    assert os.read(watched.heard, 9) == RENEW, "each renewal is echoed"


def test_a_controller_that_died_between_renewal_and_echo_is_undone_all_the_same(watched):
    """Its end of the echo is closed already: the answer fails, and must not be the guardian's end."""
    os.write(watched.theirs, RENEW)
    watched.hang_up("heard")
    watched.hang_up("theirs")
    watched.process.kill()
    assert watched.watch() == "died"


@pytest.mark.parametrize("expired", [True, False])
def test_at_the_deadline_the_journal_decides(watched, expired):
    asked = []

    def overdue():
        asked.append(True)
        os.write(watched.theirs, LEAVE)
        return expired

    why = watched.watch(deadline_ns=time.monotonic_ns() + 5 * MS, overdue=overdue)
    assert asked == [True] and ("not confirmed" in why) is expired
    if expired:
        assert watched.ended()


class Kernel:
    """What a guardian asks of it, in order."""

    def __init__(self, monkeypatch, refusals=0):
        self.asked, self.refusals = [], refusals
        monkeypatch.setattr(guardian, "switch_off", self.switch_off)
        monkeypatch.setattr(guardian, "sweep", lambda _: self.asked.append("sweep") or ["2 nexthops"])
        monkeypatch.setattr(guardian, "_RETRY_S", 0)

    def switch_off(self, _):
        self.asked.append("off")
        if len(self.asked) <= self.refusals:
            raise SwerveError("not now")


def left_in_force(log):
    known = group({1: [], 2: []})
    log.write(journal.entry_now("applied", "a", known, known.current, ((12, 1),), "because", "rule", "scope"))


def test_the_rules_go_first_then_it_is_noted_then_the_rest_goes(tmp_path, monkeypatch):
    kernel = Kernel(monkeypatch)
    with journal.Journal(tmp_path / journal.FILE) as log:
        left_in_force(log)
        append = journal.append_line
        monkeypatch.setattr(journal, "append_line", lambda *a: (kernel.asked.append("note"), append(*a))[1])
        code, acts = guardian.undo(None, log.path, "scope", "the controller died")
        assert (code, kernel.asked) == (0, ["off", "note", "sweep"])
        assert log.read().in_force("scope") == {}
    [act] = acts
    assert (act.outcome, list(act.after.values()), act.because) == ("undone", [1, 1], "the controller died")


def test_a_full_disk_keeps_nothing_in_force(tmp_path, monkeypatch):
    kernel = Kernel(monkeypatch)

    def full(*_):
        raise OSError(28, "No space left on device")

    with journal.Journal(tmp_path / journal.FILE) as log:
        left_in_force(log)
        monkeypatch.setattr(journal, "append_line", full)
        assert guardian.undo(None, log.path, "scope", "died") == (1, [])
    assert kernel.asked == ["off"]


@pytest.mark.parametrize(("refusals", "code"), [(3, 0), (1000, 1)])
def test_a_kernel_that_refuses_is_asked_again(tmp_path, monkeypatch, refusals, code):
    kernel = Kernel(monkeypatch, refusals)
    with journal.Journal(tmp_path / journal.FILE) as log:
        assert guardian.undo(None, log.path, "scope", "died")[0] == code
    assert kernel.asked.count("off") == (4 if code == 0 else guardian.TRIES)


# ---- from outside ----


class Outside(Kernel):
    """What a second guardian finds."""

    def __init__(self, monkeypatch, folder):
        super().__init__(monkeypatch)
        self.rules, self.said, self.lock_file = True, [], folder / journal.LOCK_FILE

    def switch_off(self, _):
        super().switch_off(_)
        self.rules = False

    def guarded(self, *steps):
        """Guard; whoever else is there does one of these after each look."""
        left = iter(steps)
        return abandoned.guard(None, lambda _: next(left)() or 0)


@pytest.fixture
def outside(monkeypatch, tmp_path):
    made = Outside(monkeypatch, tmp_path)
    monkeypatch.setattr(abandoned, "Netlink", contextlib.nullcontext)
    monkeypatch.setattr(guardian, "in_force", lambda _: made.rules)
    for module in (guardian, abandoned):
        monkeypatch.setattr(module, "_say", made.said.append)
    monkeypatch.setattr(abandoned, "NamespaceLock", contextlib.nullcontext)
    monkeypatch.setattr(abandoned.messages, "tell", lambda *_: None)
    for what in ("state_dir", "bond_ports", "steering_memory"):
        place = tmp_path if what == "state_dir" else tmp_path / what
        monkeypatch.setattr(abandoned.directories, what, lambda _, place=place: place)
    return made


def nothing():
    return 0


def test_what_is_in_force_is_undone_once_nobody_holds_the_lock(outside):
    lock = Lock(outside.lock_file)
    assert outside.guarded(nothing, lock.close, lambda: signal.SIGTERM) == signal.SIGTERM
    assert outside.asked == ["off", "sweep"]
    assert support.mentions(outside.said[0], "controller", "guardian", "gone", "rules", "deleted")


def test_asked_to_end_it_stays_as_long_as_somebody_steers_and_looks_a_last_time(outside):
    lock = Lock(outside.lock_file)
    assert outside.guarded(lambda: signal.SIGTERM, nothing, lock.close, nothing) == signal.SIGTERM
    assert outside.asked == ["off", "sweep"]


def test_nothing_is_undone_where_nobody_ever_steered_or_somebody_has_just_begun(outside, monkeypatch):
    assert outside.guarded(nothing, lambda: signal.SIGTERM) == signal.SIGTERM
    lock = Lock(outside.lock_file)
    monkeypatch.setattr(abandoned, "holder", lambda _: None)  # when it looked
    assert outside.guarded(nothing, lambda: signal.SIGINT) == signal.SIGINT
    lock.close()
    assert outside.asked == [] and len(outside.said) == 1 and outside.said[0].startswith("cannot undo: ")


def test_a_port_of_a_bond_alone_is_put_back_too(outside, monkeypatch):
    outside.rules, selected = False, [True]
    monkeypatch.setattr(abandoned.bond_ports, "load", lambda *_: selected)
    monkeypatch.setattr(guardian.bond_ports, "restore", lambda *_: selected.clear() or [])
    outside.lock_file.touch()
    outside.guarded(lambda: signal.SIGTERM, nothing)
    assert outside.asked == ["off", "sweep"]


# ---- the controller's end ----

_start = subprocess.Popen
ECHOES = f"printf {READY.decode()}; exec cat"


class Linked:
    """A link whose guardians are shells that say `r` and then echo what they read."""

    def __init__(self, lease_ns, begin):
        self.said, self.lock, self.begin = [], os.open(os.devnull, os.O_RDONLY), begin
        self.locks = SimpleNamespace(former=None, filenos=lambda: [self.lock])
        self.link = GuardianLink(None, lease_ns, self.locks, self.said.append)
        self.selector = selectors.DefaultSelector()

    def spawn(self, command, *, pass_fds, **_):
        _, renewals, echo, _ = pass_fds
        return _start(["sh", "-c", self.begin], stdin=renewals, stdout=echo, start_new_session=True)

    def turn(self):
        self.link.tick(time.monotonic_ns())
        for key, events in self.selector.select(0):
            key.data(events)

    def ready(self):
        def live():
            self.turn()
            return self.link.live()

        support.wait_until(live, 10, "the guardian is ready", every_s=0.001)

    def close(self):
        if self.link.pid is not None:
            os.kill(self.link.pid, signal.SIGKILL)
        self.link.leave()
        self.selector.close()
        os.close(self.lock)


@pytest.fixture
def linked(monkeypatch):
    made = []

    def make(lease_ns=100 * SECOND, begin=ECHOES):
        made.append(Linked(lease_ns, begin))
        monkeypatch.setattr(link.subprocess, "Popen", made[0].spawn)
        made[0].link.register(made[0].selector)
        return made[0]

    yield make
    made[0].close()


def test_a_guardian_counts_from_the_moment_it_is_ready_until_it_dies(linked):
    linked = linked()
    assert not linked.link.live(), "it has not said that it is ready"
    linked.ready()
    first = linked.link.pid
    os.kill(first, 9)
    support.wait_until(lambda: not linked.link.live(), 20, "its death is known without a turn of the loop")
    support.wait_until(lambda: linked.turn() or linked.link.pid not in (None, first), 20, "another is started")
    linked.ready()
    assert linked.link.starts == 2 and "died (exit status -9)" in linked.said[0]


def test_after_a_stall_of_ours_its_answers_are_read_before_it_is_judged(linked):
    linked = linked(lease_ns=400 * MS)
    linked.ready()
    first, renew_ns = linked.link.pid, linked.link.tick(time.monotonic_ns())
    support.wait_until(lambda: time.monotonic_ns() >= renew_ns, 20, "the lease is to be renewed")
    linked.link.tick(time.monotonic_ns())
    over = time.monotonic_ns() + 410 * MS
    support.wait_until(lambda: linked.selector.select(0), 20, "it has answered")
    support.wait_until(lambda: time.monotonic_ns() > over, 20, "the lease is over")
    linked.link.tick(time.monotonic_ns())
    assert linked.link.live() and linked.link.pid == first and linked.said == []


def test_a_guardian_that_does_not_answer_is_replaced(linked):
    linked = linked(lease_ns=20 * MS, begin=f"printf {READY.decode()}; exec sleep 100")
    linked.ready()
    first = linked.link.pid
    support.wait_until(lambda: linked.turn() or linked.link.pid != first, 20, "it is given up")
    assert "does not answer" in linked.said[0]
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_late_news_of_a_guardian_that_was_replaced_is_not_about_the_next_one(linked):
    linked = linked()
    linked.ready()
    there = linked.link.pid
    for key in list(linked.selector.get_map().values()):
        key.data(selectors.EVENT_READ)
    assert linked.link.pid == there and linked.link.live() and linked.said == []


def test_the_end_of_an_echo_may_be_read_twice(linked):
    linked = linked(begin="exec >&-; exec sleep 100")
    support.wait_until(lambda: linked.selector.select(0), 20, "its end is closed")
    [(key, _)] = linked.selector.select(0)
    for _ in range(2):
        key.data(selectors.EVENT_READ)
    assert not linked.link.live()


def test_a_guardian_that_cannot_be_started_is_tried_again_and_leaks_nothing(linked, monkeypatch):
    linked = linked()
    linked.ready()
    before = len(os.listdir("/proc/self/fd"))

    def none_left(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(link, "_RESPAWN_NS", 0)
    monkeypatch.setattr(link.subprocess, "Popen", none_left)
    os.kill(linked.link.pid, 9)
    support.wait_until(lambda: linked.turn() or linked.link.pid is None, 20, "its death is noticed")
    for _ in range(5):
        linked.turn()
    assert not linked.link.live()
    assert [said for said in linked.said if "cannot be started" in said] == linked.said[1:2], "said once"
    assert len(os.listdir("/proc/self/fd")) == before - 3
    monkeypatch.setattr(link.subprocess, "Popen", linked.spawn)
    linked.ready()
    assert len(os.listdir("/proc/self/fd")) == before
