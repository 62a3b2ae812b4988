"""Base delays, against a path whose true delays are known: what stands must be seen, and other routes must settle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytools.estimators.base_delays import BaseDelays
from pytools.estimators.hop_counts import Hops
from pytools.estimators.remembered_bases import RememberedBase
from pytools.estimators.windows import MISSING

SECOND = 1_000_000_000
MS, US = 1_000_000, 1_000
WINDOW_S = 30
ALLOWED_NS = 10 * US  # what may stand unnoticed on a path as short as this one
LONG_S = 3600 + 4 * WINDOW_S  # a floor is forgotten an hour after it was seen last (_FORGET_NS)
SETTLED_BY_HOPS_S = WINDOW_S + 10  # docs/probes.md states both
SETTLED_BY_STEP_S = 2 * WINDOW_S + 10
EVERY_NS = 100 * MS  # between two probes
START_NS = 1_000 * SECOND


def nothing(_: random.Random) -> int:
    return 0


def idle(chance: random.Random) -> int:
    """What an idle machine adds to a delay."""
    return int(chance.expovariate(1 / 400))


def full(queue_ns: int, packet_ns: int) -> Callable[[random.Random], int]:
    """A queue that a steady load keeps full: short by what has been sent of the packet at its head."""
    return lambda chance: queue_ns - int(chance.random() * packet_ns)


@dataclass
class Path:
    """One path with both its true delays, probed ten times a second, and a second time for each update."""

    route_ns: list[int] = field(default_factory=lambda: [20_000, 25_000])
    queues: list[Callable[[random.Random], int]] = field(default_factory=lambda: [nothing, nothing])
    ttls: tuple[int, int] = (61, 62)  # of requests and replies
    lost: float = 0.0
    free: bool = False
    ahead_ns: int = 0  # what the peer's clock is ahead of ours
    drift_ppm: float = 0.0
    seed: int = 1

    def __post_init__(self) -> None:
        self.base = BaseDelays(WINDOW_S * SECOND)
        self.base.grow(1)
        self.now_ns = START_NS
        self.chance = random.Random(self.seed)
        self.last = [0, 0]  # queueing as told of the newest probe
        self.true = [0, 0]
        self.wrong: list[int] = []  # errors of the round trip, for the next probes
        self.also: set[tuple[int, int]] = set()

    def probe(self) -> list[int]:
        """What the next probe measures: forward, reverse and round trip."""
        self.now_ns += EVERY_NS
        self.true = [queue(self.chance) for queue in self.queues]
        there, back = (route + queue + idle(self.chance) for route, queue in zip(self.route_ns, self.true, strict=True))
        apart = self.ahead_ns + int(self.drift_ppm * 1e-6 * (self.now_ns - START_NS))
        wrong = self.wrong.pop() if self.wrong else 0
        return [there + apart + wrong, back - apart, there + back + wrong]

    def probes(self, count: int) -> None:
        """Add the next probes, which arrive together; see what is published of the last."""
        times = self.now_ns + EVERY_NS * np.arange(1, count + 1)
        values = np.array([self.probe() for _ in times]).T
        self.base.add(np.zeros(len(times), np.int64), values, np.ones(values.shape, np.bool_), times)
        told = self.base.at(np.array([0]), self.now_ns)
        self.last = [int(values[way, -1] - told.delays[way, 0]) for way in (0, 1)]
        self.slack = [int(each) for each in told.slack[:, 0]]

    def run(self, seconds: float, each_second: Callable[[], None] = lambda: None) -> None:
        """Probe for so long; look at what is told each second."""
        for _ in range(round(seconds)):
            self.probes(SECOND // EVERY_NS)
            ttls = [self.ttls, *self.also]
            hops = Hops(
                np.zeros(len(ttls), np.int64),
                np.array([ttl[1] for ttl in ttls], np.uint8),
                np.array([ttl[0] for ttl in ttls], np.uint8),
            )
            self.base.update(self.now_ns, [hops], np.array([self.free]), np.array([self.lost]))
            each_second()

    def restart(self, clocks: bool = True, changed: bool = False, away_s: float = 3) -> None:
        """Begin anew with what was known, as a file has it; the clocks may be other ones then."""
        known = msgspec.json.decode(msgspec.json.encode(self.base.known(0)), type=RememberedBase)
        left_ns, self.now_ns = self.now_ns, self.now_ns + int(away_s * SECOND)
        self.base = BaseDelays(WINDOW_S * SECOND)
        self.base.grow(1)
        self.base.restore(0, known if clocks else known.without_clocks(), left_ns, self.now_ns, changed)

    def sees_the_queue(self) -> None:
        """What is told is the truth, but for the slack that is told with it."""
        for told, slack, true in zip(self.last, self.slack, self.true, strict=True):
            assert abs(told - true) <= slack + ALLOWED_NS + 5 * US

    def bad(self, above_ns: int = 5 * MS) -> bool:
        return any(told - slack > above_ns for told, slack in zip(self.last, self.slack, strict=True))

    def clear(self, below_ns: int = 2 * MS) -> bool:
        return all(told + slack < below_ns for told, slack in zip(self.last, self.slack, strict=True))


@pytest.mark.parametrize("seconds", [2, 3, 5])
def test_a_queue_that_begins_soon_after_the_first_probes_is_none_of_the_base(seconds: int) -> None:
    path = Path(queues=[nothing, nothing])
    path.run(seconds)
    path.queues = [full(17 * MS, 600 * US), nothing]
    path.run(3 * WINDOW_S, path.sees_the_queue)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "packet_ns"), [(0, 0), (1, 1_200), (0, 120_000)], ids=["steady", "10gbit", "100mbit"])
def test_a_queue_that_stands_for_over_an_hour_is_told_as_long_as_it_stands(way: int, packet_ns: int) -> None:
    path = Path()
    path.run(20)
    path.queues[way] = full(17 * MS, packet_ns)

    def stands() -> None:
        path.sees_the_queue()
        assert path.bad()

    path.run(LONG_S, stands)
    path.queues[way] = nothing
    path.run(1)
    assert path.clear() and path.last[way] < ALLOWED_NS


@pytest.mark.parametrize("lost", [0.0, 0.05])
def test_equal_queues_both_ways_are_no_other_route(lost: float) -> None:
    """Loads of one rate in equal buffers: what tells them is that their packets take time, or that some are lost."""
    path = Path()
    path.run(60)
    path.queues = [full(15 * MS, 120_000 if not lost else 100)] * 2
    path.lost = lost
    path.run(900, path.sees_the_queue)
    assert path.bad()


@pytest.mark.parametrize("seconds", [12, 20, 22])
def test_equal_queues_that_begin_in_the_first_window_are_no_other_route(seconds: int) -> None:
    """How far round trips spread while a queue begins is not how far they spread without load."""
    path = Path()
    path.run(seconds)
    path.queues = [full(17 * MS, 1_200 * US), full(17 * MS, 1_200 * US)]
    path.run(10 * WINDOW_S, path.sees_the_queue)
    assert path.bad()


@pytest.mark.parametrize("step_ns", [200 * US, 3 * MS, 40 * MS])
def test_a_longer_route_both_ways_settles_though_no_hop_count_tells(step_ns: int) -> None:
    path = Path()
    path.run(60)
    path.route_ns = [each + step_ns for each in path.route_ns]
    path.run(WINDOW_S)
    assert path.last[0] + path.slack[0] >= step_ns - ALLOWED_NS, "not before it was seen for a window"
    path.run(SETTLED_BY_STEP_S - WINDOW_S)
    assert max(path.last) < ALLOWED_NS and path.slack == pytest.approx([0, 0], abs=ALLOWED_NS)


def test_a_longer_route_settles_though_a_clock_is_set_meanwhile() -> None:
    path = Path()
    path.run(60)
    path.route_ns = [each + 9 * MS for each in path.route_ns]
    for _ in range(3):
        path.run(15)
        path.ahead_ns += 5 * MS
        path.base.forget_clocks(0)
    path.run(SETTLED_BY_STEP_S + WINDOW_S)
    assert max(path.last) < ALLOWED_NS and path.clear()


@pytest.mark.parametrize("drift_ppm", [-30.0, 30.0])
def test_free_clocks_that_drift_make_no_route_of_a_queue(drift_ppm: float) -> None:
    """After five minutes half of the queue seems to stand in each direction."""
    path = Path(free=True, drift_ppm=drift_ppm)
    path.run(60)
    path.queues[0] = full(17 * MS, 100)

    def stands() -> None:
        assert not path.clear()

    path.run(900, stands)


@pytest.mark.parametrize("way", [0, 1])
def test_a_step_one_way_never_settles_by_itself(way: int) -> None:
    path = Path()
    path.run(60)
    path.route_ns[way] += 9 * MS
    path.run(1800)
    assert path.last[way] > 8 * MS and path.bad()


@pytest.mark.parametrize("ttls", [(60, 62), (61, 61), (59, 60)])
@pytest.mark.parametrize("ways", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("mixed", [False, True])
def test_another_hop_count_settles_a_longer_route(ttls: tuple[int, int], ways: tuple[int, ...], mixed: bool) -> None:
    """Also where the route changes between two updates, so that one of them sees both hop counts."""
    path = Path()
    path.run(60)
    path.also = {path.ttls} if mixed else set()
    path.ttls = ttls
    for way in ways:
        path.route_ns[way] += 9 * MS
    path.run(1)
    path.also = set()
    path.run(7)
    assert not path.bad() and not path.clear(), "neither, until it is settled: the slack says so"
    path.run(SETTLED_BY_HOPS_S - 8)
    assert path.clear() and max(path.last) < ALLOWED_NS
    for way in ways:
        path.route_ns[way] -= 9 * MS  # the old route, longer or not, must not remain
    path.run(10)
    path.queues = [full(17 * MS, 1_200), nothing]
    path.run(120, path.sees_the_queue)
    assert path.bad()


def test_a_route_that_changes_in_one_direction_does_not_hide_the_queue_of_the_other() -> None:
    path = Path()
    path.run(60)
    path.queues[0] = full(17 * MS, 1_200)
    path.run(60)
    path.ttls, path.route_ns[1] = (61, 60), path.route_ns[1] + 2 * MS
    path.run(900)
    assert path.last[0] == pytest.approx(17 * MS, abs=20 * US) and path.bad()


def test_an_own_route_that_comes_and_goes_does_not_hide_a_queue() -> None:
    path = Path()
    path.run(60)
    path.queues[0] = full(17 * MS, 120_000)
    path.run(60)
    for _ in range(20):
        path.base.route_changed(0, path.now_ns)
        path.run(17)
        assert not path.clear()
    path.run(600)
    assert not path.clear(), "the load shows: nothing is settled under it"
    path.queues[0] = nothing
    path.run(SETTLED_BY_STEP_S)
    assert path.clear() and max(path.last) < ALLOWED_NS


def of_two_ways() -> Path:
    """A path on which packets of another hop count have been seen for a minute."""
    path = Path()
    path.also = {(60, 60)}
    path.run(60)
    return path


def test_several_ways_at_once_are_no_other_route() -> None:
    path = of_two_ways()
    path.queues[0] = full(17 * MS, 1_200)
    path.also = set()
    path.run(100)
    path.ttls = (60, 60)
    path.run(300, path.sees_the_queue)
    assert path.bad()


def test_a_few_wrong_stamps_change_nothing() -> None:
    path = Path()
    path.run(40)
    path.wrong = [-30 * US]
    path.run(1, path.sees_the_queue)
    path.wrong = [-30 * US] * 5
    path.run(3, path.sees_the_queue)
    assert path.clear() and max(path.last) < ALLOWED_NS


@pytest.mark.slow
def test_a_floor_that_was_wrong_for_some_seconds_is_forgotten_after_an_hour() -> None:
    path = Path(route_ns=[200_000, 210_000])
    path.run(60)
    for _ in range(5):
        path.wrong = [-100 * US] * 5
        path.run(1)
    path.run(60)
    assert path.last[0] > 50 * US, "what five seconds showed counts"
    path.run(3700)
    assert max(path.last) < ALLOWED_NS


@pytest.mark.parametrize("drift_ppm", [-30.0, 7.0, 30.0])
def test_a_queue_stands_whatever_free_clocks_do(drift_ppm: float) -> None:
    """In its bound: never clear while it stands. And nothing is said to stand when nothing does."""
    path = Path(free=True, drift_ppm=drift_ppm, ahead_ns=10**12)
    quiet_ns = 100e-6 * WINDOW_S * SECOND
    path.run(600, lambda: None)
    assert max(abs(each) for each in path.last) <= quiet_ns and not path.bad()
    path.queues[0] = full(17 * MS, 120_000)

    def stands() -> None:
        assert not path.clear()
        assert path.last[0] + path.slack[0] >= 17 * MS - quiet_ns

    path.run(600, stands)
    path.queues[0] = nothing
    path.run(WINDOW_S + 5)
    assert max(abs(each) for each in path.last) <= quiet_ns and not path.bad()


@pytest.mark.parametrize("moved_ns", [-(10**9), -5 * MS, 30 * US, 10**12])
def test_a_clock_that_is_set_anew_hides_no_queue_and_makes_none(moved_ns: int) -> None:
    path = Path()
    path.run(60)
    path.ahead_ns += moved_ns
    path.base.forget_clocks(0)
    path.run(60, path.sees_the_queue)
    assert path.clear()
    path.queues[0] = full(17 * MS, 1_200)
    path.run(60)
    path.ahead_ns -= moved_ns
    path.base.forget_clocks(0)
    path.run(300, path.sees_the_queue)
    assert not path.clear() and path.last[0] > 16 * MS and path.last[1] < MS
    path.queues[0] = nothing
    path.run(WINDOW_S + 5)
    assert path.clear() and max(path.last) < ALLOWED_NS


def test_a_shorter_route_counts_within_seconds() -> None:
    path = Path(route_ns=[5 * MS, 5 * MS])
    path.run(60)
    path.route_ns = [1 * MS, 1 * MS]
    path.run(6)
    path.queues[0] = full(3 * MS, 1_200)
    path.run(1, path.sees_the_queue)
    assert path.last[0] > 2 * MS


levels = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 25), st.integers(1, 90)), min_size=1, max_size=6)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(levels, st.integers(0, 1000))
def test_on_one_route_what_stands_is_never_told_as_less(phases: list[tuple[int, int, int]], seed: int) -> None:
    """Whatever queues come and go, for however long, as long as they differ or their load shows."""
    path = Path(seed=seed)
    path.run(20)
    for there, back, seconds in phases:
        path.queues = [full(each * MS, 120_000) if each else nothing for each in (there, back)]
        path.run(seconds, path.sees_the_queue)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20_000), st.booleans()), min_size=1, max_size=4), st.integers(0, 1000))
def test_after_any_changes_of_the_route_an_idle_path_is_idle(changes: list[tuple[int, bool]], seed: int) -> None:
    path = Path(seed=seed)
    path.run(40)
    for number, (longer_us, told) in enumerate(changes):
        path.route_ns = [20 * US + longer_us * US, 25 * US + longer_us * US]
        if told:
            path.ttls = (61 - number, 62 - number)
        path.run(SETTLED_BY_STEP_S)
        assert path.clear() and max(path.last) < ALLOWED_NS


def test_a_path_of_which_only_one_direction_is_known_has_the_minimum_of_the_window() -> None:
    base = BaseDelays(WINDOW_S * SECOND)
    base.grow(1)
    known = np.array([[True], [False], [False]])
    for second in range(100):
        now_ns = START_NS + second * SECOND
        base.add(np.array([0]), np.array([[700 + second], [MISSING], [MISSING]]), known, np.array([now_ns]))
        base.update(now_ns, [], np.zeros(1, np.bool_), np.zeros(1))
        told = base.at(np.array([0]), now_ns).delays[:, 0]
        assert told.tolist() == [700 + max(0, second - WINDOW_S), MISSING] or second > WINDOW_S - 2
        assert 700 + second - WINDOW_S - 2 <= told[0] <= 700 + max(0, second - WINDOW_S + 2)


# ---- over a restart ----


@pytest.mark.parametrize("clocks", [True, False], ids=["one-clock", "two-clocks"])
@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("packet_ns", [0, 120_000], ids=["steady", "100mbit"])
def test_a_queue_that_stands_while_the_agent_restarts_is_told_as_long_as_it_stands(
    way: int, packet_ns: int, clocks: bool
) -> None:
    path = Path()
    path.run(60)
    path.queues[way] = full(17 * MS, packet_ns)
    path.run(60)

    def stands() -> None:
        path.sees_the_queue()
        assert path.last[way] > 16 * MS and not path.clear()

    for _ in range(3):
        path.ahead_ns += 0 if clocks else 10**9
        path.restart(clocks)
        path.probes(1)
        stands()
        path.run(2 * WINDOW_S, stands)
    assert path.bad() or not clocks
    path.queues[way] = nothing
    path.run(1 if clocks else WINDOW_S + 5)
    assert path.clear() and max(path.last) < ALLOWED_NS


@pytest.mark.parametrize("packet_ns", [100, 120_000], ids=["steady", "100mbit"])
@pytest.mark.parametrize("clocks", ["one", "free", "synchronised"])
def test_a_queue_that_began_while_no_agent_ran_is_no_route(packet_ns: int, clocks: str) -> None:
    """With clocks apart nobody can tell in which direction it stands, but that it does."""
    path = Path(free=clocks == "free")
    path.run(60)
    path.queues[0] = full(17 * MS, packet_ns)
    path.restart(clocks=clocks == "one")
    path.probes(1)

    def stands() -> None:
        assert not path.clear() and (path.bad() or clocks != "one")
        assert path.last[0] + path.slack[0] > 16 * MS

    stands()
    path.run(600, stands)
    path.queues[0] = nothing
    path.run(WINDOW_S + 5)
    assert path.clear()


def test_a_queue_that_went_while_no_agent_ran_is_not_told() -> None:
    for clocks in (True, False):
        path = Path()
        path.run(60)
        path.queues[0] = full(17 * MS, 1_200)
        path.run(60)
        path.queues[0] = nothing
        path.restart(clocks)
        path.probes(1)
        assert path.clear() and max(path.last) < ALLOWED_NS
        path.run(60, path.sees_the_queue)
        assert path.clear()


@pytest.mark.parametrize("told", ["hops", "way"])
@pytest.mark.parametrize("clocks", [True, False])
def test_a_route_that_changed_while_no_agent_ran_settles_without_load_alone(told: str, clocks: bool) -> None:
    path = Path()
    path.run(60)
    path.route_ns = [each + 9 * MS for each in path.route_ns]
    path.queues[0] = full(17 * MS, 120_000)
    if told == "hops":
        path.ttls = (60, 61)
    path.restart(clocks, changed=told == "way")
    path.run(4)

    def in_doubt() -> None:
        assert not path.clear()

    path.run(300, in_doubt)
    path.restart(clocks)
    path.run(WINDOW_S - 2, in_doubt)
    path.queues[0] = nothing
    path.run(SETTLED_BY_STEP_S)
    assert path.clear() and max(path.last) < ALLOWED_NS


def test_evidence_of_another_route_is_to_be_seen_for_a_whole_window_by_one_agent() -> None:
    path = Path()
    path.run(60)
    path.route_ns, path.ttls = [each + 9 * MS for each in path.route_ns], (60, 61)
    path.run(WINDOW_S - 5)
    path.restart()

    def in_doubt() -> None:
        assert not path.clear() and not path.bad()

    path.run(WINDOW_S - 2, in_doubt)
    path.run(12)
    assert path.clear() and max(path.last) < ALLOWED_NS


def test_ways_that_were_seen_at_once_are_known_to_a_successor() -> None:
    path = of_two_ways()
    path.queues[0] = full(17 * MS, 1_200)
    path.also, path.ttls = set(), (60, 60)
    path.restart()
    path.run(100, path.sees_the_queue)
    assert path.bad()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(levels, st.lists(st.booleans(), min_size=6, max_size=6), st.integers(0, 1000))
def test_over_restarts_what_stands_is_never_told_as_less(
    phases: list[tuple[int, int, int]], clocks: list[bool], seed: int
) -> None:
    path = Path(seed=seed)
    path.run(20)
    for (there, back, seconds), one_clock in zip(phases, clocks, strict=False):
        path.queues = [full(each * MS, 120_000) if each else nothing for each in (there, back)]
        path.restart(one_clock)
        path.run(seconds, path.sees_the_queue)
