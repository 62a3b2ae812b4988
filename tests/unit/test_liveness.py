"""Misses and answers in a row, counted on made-up probes; and against a slow count over every probe there was."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytools.config import Peer
from pytools.kernel.addresses import mapped
from pytools.signals import Path, PathLiveness
from pytools.sources.probing.liveness import (
    BURSTS,
    HURRY_EVERY_NS,
    LEAST_GRACE_NS,
    MOST_RUN,
    TOLD_EVERY_NS,
    TOLD_SILENT_EVERY_NS,
    TOLD_SINGLY,
    YOUNG_INTERVALS,
    Liveness,
)
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.send_log import SendLog

MS = 1_000_000
INTERVAL_NS = 10 * MS
START_NS = 10**12


def pinned(index: int) -> PinnedPath:
    path = Path("h1", "h2", "10.9.0.2", f"10.{index}.1.1", f"rail{index}")
    return PinnedPath(index, path, Peer("h2", path.address), 4, 100 + index, "10.9.0.1", None, False)


@dataclass
class World:
    """Paths that are probed once an interval; answers come as told."""

    paths: int = 1
    now_ns: int = START_NS
    told: list[PathLiveness] = field(default_factory=list)
    interval_ns: int = INTERVAL_NS

    def __post_init__(self) -> None:
        self.liveness = Liveness(self.interval_ns)
        self.liveness.grow(self.paths)
        self.liveness.set_paths([pinned(index) for index in range(self.paths)])

    def send(self, *paths: int) -> int:
        """One probe on each of these; when it left."""
        self.liveness.steady.sent(np.array([self.now_ns]), np.bincount(paths, minlength=self.paths)[None])
        return self.now_ns

    def answer(
        self, path: int, sent_ns: int, arrived_ns: int | None = None, passed: bool = False, counting: bool = True
    ) -> None:
        at_ns = self.now_ns if arrived_ns is None else arrived_ns
        where, sent = np.array([path]), np.array([sent_ns])
        self.liveness.arrived(where, sent, np.array([at_ns]), np.array([at_ns]) - sent)
        self.liveness.answered(where, sent, np.array([counting]), np.array([passed]))

    def look(self) -> int | None:
        due_ns = self.liveness.look(self.now_ns)
        self.told += self.liveness.signals("h1", self.now_ns, 1)
        return due_ns

    def wait(self, ns: int) -> None:
        self.now_ns += ns

    def now(self, path: int = 0) -> PathLiveness:
        return self.liveness.signal(path, "h1", self.now_ns, 1)

    def silence(self, probes: int) -> None:
        """Probes that are not answered, and a look after each."""
        for _ in range(probes):
            self.send(0)
            self.wait(INTERVAL_NS)
            self.look()

    def steady(self, probes: int, turnaround_ns: int = 4 * MS, path: int = 0) -> None:
        """Probes that are answered, and a look at each answer."""
        for _ in range(probes):
            sent_ns = self.send(path)
            self.wait(turnaround_ns)
            self.answer(path, sent_ns)
            self.look()
            self.wait(self.interval_ns - turnaround_ns)


def test_an_answered_path_misses_nothing_and_counts_its_answers() -> None:
    world = World()
    world.steady(50)
    assert (world.now().missed, world.now().silent_ns, world.now().answered_run) == (0, 0, 50)
    assert world.now().last_answer_ns == world.now_ns - 6 * MS
    assert len(world.told) == 1, "nothing happened, so it was told once, at first"


def test_paths_that_answer_are_known() -> None:
    world = World(paths=3)
    one, two, three = (pinned(index).path for index in range(3))
    assert world.liveness.answering() == {one: False, two: False, three: False}  # not yet
    sent_ns = world.send(0, 1, 2)
    world.wait(MS)
    world.answer(0, sent_ns)
    world.answer(1, sent_ns)
    world.look()
    assert world.liveness.answering() == {one: True, two: True, three: False}
    world.wait(INTERVAL_NS)
    sent_ns = world.send(0, 1, 2)
    world.wait(MS)
    world.answer(0, sent_ns)
    world.wait(INTERVAL_NS)
    world.look()
    assert world.liveness.answering() == {one: True, two: False, three: False}
    world.liveness.set_paths([pinned(1)])
    assert world.liveness.answering() == {two: False}


def test_misses_are_told_one_by_one_as_their_grace_passes() -> None:
    world = World()
    world.steady(20, turnaround_ns=MS)  # so that the grace is the least there is
    world.told.clear()
    began_ns, told_after = world.now_ns, []
    for _ in range(5):
        world.send(0)
        world.wait(LEAST_GRACE_NS - 1)
        world.look()
        before = len(world.told)
        world.wait(1)
        world.look()
        if len(world.told) > before:
            told_after.append((world.told[-1].missed, world.now_ns - began_ns, world.told[-1].silent_ns))
        world.wait(INTERVAL_NS - LEAST_GRACE_NS)
    every = range(1, 5)  # the first miss is not told
    assert told_after == [(n + 1, n * INTERVAL_NS + LEAST_GRACE_NS, n * INTERVAL_NS + LEAST_GRACE_NS) for n in every]


def test_the_grace_is_twice_the_largest_recent_turnaround_up_to_an_interval() -> None:
    for turnaround_ns, grace_ns in ((1, 2 * MS), (MS, 2 * MS), (3 * MS, 6 * MS), (7 * MS, 10 * MS)):
        world = World()
        world.steady(400, turnaround_ns)  # the grace of a new path is a whole interval, and is forgotten
        world.send(0)
        world.wait(grace_ns - 1)
        world.look()
        early = world.now().missed
        world.wait(1 + grace_ns // 50)  # what is left of the first turnaround
        world.look()
        assert (early, world.now().missed) == (0, 1)


def test_the_kernel_is_told_a_limit_once_a_path_has_answered_and_a_grace_that_no_interval_bounds() -> None:
    world = World(2)
    world.send(0, 1)
    limits, graces_ns = world.liveness.for_kernel()
    assert (limits.tolist(), graces_ns.tolist()) == ([0, 0], [LEAST_GRACE_NS] * 2)
    under_way = [world.send(0)]
    for _ in range(50):
        world.wait(INTERVAL_NS)
        under_way.append(world.send(0))
        if len(under_way) > 8:
            world.answer(0, under_way.pop(0))
            world.look()
    limits, graces_ns = world.liveness.for_kernel()
    assert limits[0] >= 3
    assert graces_ns[0] == 2 * 8 * INTERVAL_NS
    assert (limits[1], graces_ns[1]) == (0, LEAST_GRACE_NS), "it has not answered"


def silent_with_extra(world: World, misses: int, extra: int) -> None:
    """Path 0 of two misses all; then extra probes on it alone, which are missed as well."""
    for _ in range(misses):
        sent_ns = world.send(0, 1)
        world.wait(MS)
        world.answer(1, sent_ns)
        world.wait(INTERVAL_NS - MS)
    times_ns = world.now_ns - INTERVAL_NS + 2 * MS + np.arange(extra)
    world.liveness.extra.sent(times_ns, np.tile([1, 0], (extra, 1)))
    world.look()


@pytest.mark.parametrize(("misses", "counted"), [(2, 0), (3, 3), (5, 3)])
def test_extra_probes_count_half_after_three_other_misses_until_an_answer(misses: int, counted: int) -> None:
    world = World(2)
    world.steady(50, turnaround_ns=MS)
    world.liveness._limits[:] = 10
    silent_with_extra(world, misses, extra=7)
    assert (world.now().missed, world.now().missed_extra, world.now(1).missed_extra) == (misses, counted, 0)
    assert world.liveness.for_kernel()[0].tolist()[0] == 10 - counted
    world.answer(0, world.now_ns - MS, counting=False)
    world.look()
    assert (world.now().missed, world.now().missed_extra) == (0, 0)
    assert world.liveness.for_kernel()[0].tolist()[0] == world.now().limit
    silent_with_extra(world, 3, extra=4)
    assert world.now().missed_extra == 2, "those before the answer are forgotten"


@pytest.mark.parametrize(("extra", "learnt"), [(9, True), (10, False)])
def test_what_extra_probes_called_dead_is_no_random_loss_afterwards(extra: int, learnt: bool) -> None:
    world = World(2)
    world.steady(95, turnaround_ns=MS)
    world.liveness._limits[:] = 10
    silent_with_extra(world, 5, extra)
    world.answer(0, world.now_ns - MS, counting=False)
    world.look()
    assert (world.now().recent_loss != 0) is learnt


def test_a_path_that_loses_hardly_a_probe_is_dead_after_three_misses_whatever_extra_probes_show() -> None:
    world = World(2)
    world.steady(300, turnaround_ns=MS)
    silent_with_extra(world, 3, extra=9)
    assert (world.now().missed, world.now().limit) == (3, 3)
    assert world.liveness.for_kernel()[0].tolist()[0] == 3
    assert not len(world.liveness.suspected(world.now_ns))


def test_a_miss_by_extra_probes_is_told_at_once_up_to_the_limit() -> None:
    world = World(2)
    world.steady(50, turnaround_ns=MS)
    world.liveness._limits[:] = 6
    silent_with_extra(world, 4, extra=0)
    world.told.clear()
    for _ in range(8):
        world.liveness.extra.sent(np.array([world.now_ns - 3 * MS]), np.array([[1, 0]]))
        world.look()
    told = [signal.missed_extra for signal in world.told if signal.path.interface == "rail0"]
    assert told == [1, 2]


def test_extra_probes_leave_where_a_lossy_path_may_be_dead_but_not_for_ever() -> None:
    world = World(2)
    for path in (0, 1):
        world.steady(50, turnaround_ns=MS, path=path)
    world.liveness._limits[:] = 25
    silent_with_extra(world, 4, extra=0)
    assert not len(world.liveness.suspected(world.now_ns))
    world.send(0)
    world.wait(INTERVAL_NS)
    world.look()
    rounds = [world.liveness.suspected(world.now_ns).tolist() for _ in range(BURSTS + 1)]
    assert rounds == [[0]] * BURSTS + [[]]
    world.wait(HURRY_EVERY_NS + 1)
    assert world.liveness.suspected(world.now_ns).tolist() == [0]


def test_a_silence_is_young_for_some_intervals() -> None:
    world = World(2)
    world.steady(50, turnaround_ns=MS)
    assert not world.liveness.young(world.now_ns).any()
    world.send(0)
    world.wait((YOUNG_INTERVALS - 1) * INTERVAL_NS)
    world.look()
    assert world.liveness.young(world.now_ns).tolist() == [True, False]
    world.wait(2 * INTERVAL_NS)
    world.look()
    assert not world.liveness.young(world.now_ns).any()


def test_where_an_answer_is_overdue_is_known_but_not_of_paths_that_lose_many_or_are_silent_for_long() -> None:
    world = World(paths=3)
    for turn in range(100):
        sent_ns = world.send(0, 1, 2)
        world.wait(1 * MS)
        for path in range(3 if turn % 5 else 2):  # the last loses 20 %
            world.answer(path, sent_ns)
        world.look()
        world.wait(9 * MS)
    assert not len(world.liveness.begun(world.now_ns))
    sent_ns = world.send(0, 1, 2)
    world.wait(1 * MS)
    world.answer(0, sent_ns)
    world.wait(2 * MS)
    world.look()
    assert world.liveness.begun(world.now_ns).tolist() == [1]
    world.wait(30 * MS)
    world.look()
    assert not len(world.liveness.begun(world.now_ns))


@pytest.mark.parametrize(("turnaround_ms", "begins"), [(4, True), (7, True), (9, False)])
def test_with_short_round_trips_an_answer_is_overdue_after_9_ms_but_not_missed(
    turnaround_ms: int, begins: bool
) -> None:
    """Where they are longer, an answer that is a little late is no news."""
    world = World(interval_ns=20 * MS)
    world.steady(50, turnaround_ns=turnaround_ms * MS)
    world.send(0)
    world.wait(8 * MS if turnaround_ms > 4 else 7 * MS)
    assert not len(world.liveness.begun(world.now_ns))
    world.wait(2 * MS)
    world.look()
    assert len(world.liveness.begun(world.now_ns)) == begins
    assert world.liveness.missed[0] == (turnaround_ms == 4), "the grace of a miss is what it was"


def test_what_was_long_is_forgotten_by_answers_however_many_are_taken_at_once() -> None:
    one_by_one, at_once = World(), World()
    for world in (one_by_one, at_once):
        world.answer(0, world.send(0) - 8 * MS)
    for _ in range(64):
        one_by_one.answer(0, one_by_one.now_ns - 10)
    for _ in range(8):
        times = np.full(8, at_once.now_ns)
        at_once.liveness.arrived(np.zeros(8, np.intp), times - 10, times, np.full(8, 10))
    graces = [world.liveness.for_kernel()[1][0] for world in (one_by_one, at_once)]
    assert graces[0] == pytest.approx(graces[1], rel=0.02)
    assert graces[0] < 15 * MS


def test_a_long_queue_is_no_silence() -> None:
    """Answers that come 200 ms late, but come, leave nothing missed."""
    world, under_way = World(), []
    for turn in range(100):
        under_way.append(world.send(0))
        world.wait(INTERVAL_NS // 2)
        if turn >= 20:
            world.answer(0, under_way.pop(0))
            world.look()
            assert world.now().missed == 0
        else:
            world.look()
        world.wait(INTERVAL_NS // 2)
    assert world.now().answered_run == 80


def test_one_answer_ends_a_silence_and_that_is_told_at_once() -> None:
    world = World(2)
    for _ in range(10):
        first = world.send(0, 1)
        world.wait(INTERVAL_NS)
        world.answer(1, first)
        world.look()
    assert (world.now(0).missed, world.now(1).missed) == (10, 0)
    world.told.clear()
    world.answer(0, world.send(0, 1), passed=True)
    world.look()
    (told,) = world.told
    assert (told.path, told.missed, told.answered_run, told.silent_ns) == (pinned(0).path, 0, 1, 0)


def test_the_run_begins_anew_behind_a_gap_a_loss_and_a_silence() -> None:
    world = World()
    world.steady(30)
    skipped = world.send(0)
    world.wait(INTERVAL_NS)
    world.answer(0, world.send(0), passed=True)
    world.look()
    assert world.now().answered_run == 1
    world.wait(INTERVAL_NS)
    world.steady(10)
    assert world.now().answered_run == 11
    world.liveness.lost(np.array([0]), np.array([skipped]))
    assert world.now().answered_run == 11, "the probe that ended the last run does not end this one too"
    world.liveness.lost(np.array([0]), np.array([world.now_ns - 3 * INTERVAL_NS]))
    assert world.now().answered_run == 0
    world.steady(5)
    assert world.now().answered_run == 5
    for _ in range(3):
        last = world.send(0)
        world.wait(INTERVAL_NS)
        world.look()
    assert (world.now().missed, world.now().answered_run) == (3, 0)
    world.answer(0, last)
    world.look()
    assert (world.now().missed, world.now().answered_run) == (0, 1)


def test_probes_that_do_not_count_end_a_silence_and_a_run_but_lengthen_none() -> None:
    """Coded pairs and further source ports."""
    world = World()
    world.steady(10)
    for _ in range(3):
        world.answer(0, world.now_ns, counting=False)
    assert world.now().answered_run == 10
    world.silence(4)
    assert world.now().missed == 4
    world.answer(0, world.now_ns - INTERVAL_NS, counting=False)
    world.look()
    assert (world.now().missed, world.now().answered_run) == (0, 0)
    world.wait(INTERVAL_NS)
    world.steady(5)
    assert world.now().answered_run == 5
    world.answer(0, world.now_ns, counting=False, passed=True)
    assert world.now().answered_run == 0


def test_a_long_silence_is_told_in_ever_so_many_probes_only() -> None:
    world = World()
    world.silence(200)
    told = [(signal.missed, signal.at_ns) for signal in world.told]
    assert [missed for missed, _ in told][1:TOLD_SINGLY] == list(range(2, TOLD_SINGLY + 1))
    later = [at_ns for missed, at_ns in told if missed >= TOLD_SINGLY]
    assert set(np.diff(later)) == {TOLD_SILENT_EVERY_NS}


def test_a_path_of_which_there_is_no_news_is_told_once_a_second() -> None:
    world = World()
    world.steady(1000)
    assert set(np.diff([signal.at_ns for signal in world.told])) == {TOLD_EVERY_NS}


def test_the_other_paths_to_the_peer_are_told_with_each_miss() -> None:
    world = World(paths=2)
    for path in (0, 1):
        world.steady(20, turnaround_ns=MS, path=path)
    world.told.clear()
    for _ in range(4):
        sent_ns = world.send(0, 1)
        world.wait(MS)
        world.answer(1, sent_ns)
        world.wait(LEAST_GRACE_NS)
        world.look()
        world.wait(INTERVAL_NS - MS - LEAST_GRACE_NS)
    told = [(signal.path.interface, signal.missed) for signal in world.told]
    assert told == [("rail0", 2), ("rail1", 0), ("rail0", 3), ("rail1", 0), ("rail0", 4), ("rail1", 0)]
    assert world.told[-1].answered_sent_ns == sent_ns


def test_when_the_next_miss_falls_due_is_known_while_a_silence_is_young() -> None:
    world = World()
    world.steady(20)
    due = []
    for _ in range(12):
        sent_ns = world.send(0)
        world.wait(INTERVAL_NS)
        wanted = world.look()
        due.append(wanted is not None and wanted - sent_ns)
    assert due[:7] == [2 * INTERVAL_NS - 2 * MS] * 7, "an interval after this one's, whose grace was 8 ms"
    assert not any(due[8:]), "a path that is known to be dead is looked at as often as others"


def test_the_age_of_the_peers_agent_is_that_of_the_latest_answer() -> None:
    world = World(paths=2)
    live = world.liveness
    assert live.signal(0, "h1", world.now_ns, 0).peer_agent_age_ns is None
    live.beats(np.array([0, 1, 0]), np.array([70_000, 0xFFFFFFFF, 12], np.uint32))
    ages = [live.signal(index, "h1", world.now_ns, 0).peer_agent_age_ns for index in (0, 1)]
    assert ages == [12 * MS, None]


def test_requests_of_the_peer_are_told_by_interface() -> None:
    world = World(2)
    peer, other = (mapped(address) for address in ("10.9.0.2", "10.9.0.3"))
    assert world.now(0).last_request_ns is None
    world.liveness.requested({(peer, 100): 9, (peer, 7): 11})
    assert (world.now(0).last_request_ns, world.now(1).last_request_ns) == (9, None)
    world.liveness.requested({(peer, 100): 9, (peer, 7): 11, (other, 100): 99, (other, 101): 99})
    assert (world.now(0).last_request_ns, world.now(1).last_request_ns) == (9, None), "another peer"
    world.liveness.requested({(peer, 100): 12, (peer, 101): 13})
    assert (world.now(0).last_request_ns, world.now(1).last_request_ns) == (12, 13)


def test_what_is_counted_of_a_path_survives_more_paths_and_its_absence() -> None:
    world = World()
    world.steady(7)
    world.liveness.grow(300)
    world.liveness.set_paths([])
    assert world.liveness.look(world.now_ns) is None
    assert world.liveness.signals("h1", world.now_ns, 1) == []
    world.liveness.set_paths([pinned(0), pinned(1)])
    world.steady(3)
    assert world.now().answered_run == 10


def test_runs_are_counted_up_to_a_million() -> None:
    world = World()
    sent_ns = world.send(0)
    many, counting = np.zeros(MOST_RUN + 5, np.int64), np.ones(MOST_RUN + 5, np.bool_)
    world.liveness.answered(many, many + sent_ns, counting, ~counting)
    assert world.now().answered_run == MOST_RUN


@pytest.mark.parametrize("at_once", [1, 2, 7, 31, 32, 33, 90])
def test_the_log_remembers_at_least_as_many_times_as_it_should(at_once: int) -> None:
    log = SendLog(32)
    log.grow(2)
    for begin in range(1, 500, at_once):
        turns = np.arange(begin, min(begin + at_once, 500))
        log.sent(turns * 10, np.stack([np.ones_like(turns), turns // 3 - (turns - 1) // 3], axis=1))
        turn = int(turns[-1])
        back = np.array([turn - each for each in range(min(turn, 32))])
        for path, counts in ((0, back), (1, back // 3)):
            assert log.sent_by(back * 10, np.full(len(back), path)).tolist() == counts.tolist()
        assert log.sent_by(np.array([turn * 10 + 5]), np.array([0])).tolist() == [turn]
    assert log.miss_ns(np.zeros(3, np.intp), after=np.array([498, 499, 497])).tolist() == [4990, 0, 4980]


# ---- against a slow count ----

FATE = st.one_of(st.none(), st.integers(MS // 10, 80 * MS))  # lost, or answered after so long


@pytest.mark.slow
@settings(max_examples=100)
@given(
    fates=st.lists(st.tuples(st.integers(1, 3), FATE), min_size=1, max_size=60),
    looks=st.lists(st.integers(MS // 2, 25 * MS), min_size=1, max_size=10),
)
def test_any_answers_give_what_counting_all_probes_gives(fates: list[tuple[int, int | None]], looks: list[int]) -> None:
    """The probes that left after the last answer had arrived, those within their grace left out."""
    world = World()
    sends = [(START_NS + turn * INTERVAL_NS, count) for turn, (count, _) in enumerate(fates)]
    answers = sorted(
        (sent_ns + fate, sent_ns) for (sent_ns, _), (_, fate) in zip(sends, fates, strict=True) if fate is not None
    )
    end_ns = sends[-1][0] + 100 * MS
    at_ns, turn = START_NS, 0
    look_times = []
    while at_ns < end_ns:
        at_ns += looks[turn % len(looks)]
        turn += 1
        look_times.append(at_ns)
    pending_sends, pending_answers, told = list(sends), list(answers), []
    for look_ns in look_times:
        while pending_sends and pending_sends[0][0] <= look_ns:
            world.now_ns, count = pending_sends.pop(0)
            world.send(*[0] * count)
        world.now_ns = look_ns
        arrived = [answer for answer in pending_answers if answer[0] <= look_ns]
        pending_answers = pending_answers[len(arrived) :]
        for came_ns, sent_ns in arrived:
            world.answer(0, sent_ns, came_ns)
        grace_ns = int(world.liveness._grace_ns[0])
        before = len(world.told)
        due_ns = world.look()
        last_ns = max((came_ns for came_ns, _ in answers if came_ns <= look_ns), default=0)
        left = [(sent_ns, count) for sent_ns, count in sends if last_ns < sent_ns <= look_ns - grace_ns]
        now = world.now()
        assert LEAST_GRACE_NS <= grace_ns <= INTERVAL_NS
        assert now.missed == sum(count for _, count in left)
        assert now.silent_ns == (look_ns - left[0][0] if left else 0)
        assert now.last_answer_ns == (last_ns or None)
        assert due_ns is None or due_ns > look_ns
        assert now.missed == 0 or now.answered_run == 0
        assert now.answered_run <= sum(came_ns <= look_ns for came_ns, _ in answers)
        told = world.told[before:]
        was = world.told[before - 1].missed if before else 0
        if now.missed > max(was, 1) or (was and not now.missed):
            assert [signal.missed for signal in told] == [now.missed], "told at once"


@pytest.mark.parametrize("loss_every", [2, 5, 40])
def test_the_run_is_what_lies_behind_the_last_loss(loss_every: int) -> None:
    world = World()
    passed, run = False, 0
    for turn in range(200):
        sent_ns = world.send(0)
        world.wait(4 * MS)
        if turn % loss_every:
            run = 1 if passed else run + 1
            world.answer(0, sent_ns, passed=passed)
            passed = False
        else:
            passed = True
        world.look()
        if not passed:
            assert world.now().answered_run == run
        world.wait(INTERVAL_NS - 4 * MS)


def test_an_outage_is_not_taken_for_random_loss() -> None:
    """Nor is what was lost before the first answer: a path that answers again is judged as quickly as before."""
    world = World()
    world.silence(20)
    world.steady(300, turnaround_ns=MS)
    assert world.now().limit == 3
    world.silence(100)
    world.steady(5, turnaround_ns=MS)
    assert (world.now().recent_loss, world.now().limit) == (0.0, 3)


def test_random_loss_is_learnt_although_it_comes_suddenly() -> None:
    world = World()
    world.steady(300, turnaround_ns=MS)
    for turn in range(60):
        sent_ns = world.send(0)
        world.wait(MS)
        if turn % 2:
            world.answer(0, sent_ns)
        world.wait(INTERVAL_NS - MS)
        world.look()
    assert world.now().recent_loss > 0.4
    assert (world.now().limit or 0) >= 15
