"""Ways behind the first hop: how many there are and how sure that is, which ports take which, which is bad, where."""

from __future__ import annotations

import itertools
import random
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytools.config import Probe
from pytools.estimators.ways import Probes, State, Way, group, judge, miss, ports_needed, sick_hop
from pytools.estimators.windows import MISSING
from pytools.ipc.bus import Bus
from pytools.kernel import error_queue
from pytools.sources.probing.path_ways import Hurry, PathWays, Seen
from pytools.sources.probing.program import SWEEP_ROWS
from pytools.sources.probing.sweep import FIRST_ROW, Fate, UnderWay
from pytools.sources.probing.tracing import PORTS, Ask, Locating, Meeting, Reply, Steps
from pytools.sources.probing.ways import HiddenWays

MS, SECOND = 1_000_000, 1_000_000_000
FAST = 20_000


# ---- how many ----


def test_the_ports_needed_are_those_of_the_multipath_detection_algorithm() -> None:
    assert [ports_needed(ways, 0.05) for ways in (1, 2, 3, 4)] == [6, 11, 16, 21]
    assert miss(0, 10) == 1 and miss(1, 5) > 0.05 >= miss(1, 6)


@pytest.mark.parametrize("ways", [2, 3, 5, 9])
def test_one_of_several_ways_is_missed_no_more_often_than_is_said(ways: int) -> None:
    drawn, ports, trials = random.Random(ways), ports_needed(ways - 1, 0.05), 2000
    missed = sum(len({drawn.randrange(ways) for _ in range(ports)}) < ways for _ in range(trials))
    assert missed / trials <= 0.05


def test_ports_are_grouped_by_the_routers_where_these_differ() -> None:
    hops = [{0: "leaf"}, {0: "s1", 1: "s2", 2: "s1", 3: "s2"}, {0: "far", 1: "far"}]
    found = group(hops)
    assert [(way.ports, way.hops) for way in found.ways] == [
        ((0, 2), ("leaf", "s1", "far")),
        ((1, 3), ("leaf", "s2", "far")),
    ]
    assert found.differs_at == 2 and found.ports == 4 and found.confidence == pytest.approx(1 - miss(2, 4))


def test_one_router_that_answers_by_several_addresses_behind_the_ways_parts_none() -> None:
    """As routers do: the address is that of the interface by which the packet came in."""
    found = group([{0: "leaf"}, {0: "s1", 1: "s2", 2: "s1"}, {0: "far1", 1: "far2"}])
    assert {way.key: way.ports for way in found.ways} == {("s1",): (0, 2), ("s2",): (1,)} and found.differs_at == 2


def test_ports_whose_routers_do_not_answer_are_each_by_themselves() -> None:
    found = group([{0: "leaf"}, {}], silent=(0, 1, 2))
    assert [(way.ports, way.alone) for way in found.ways] == [((0,), True), ((1,), True), ((2,), True)]
    assert found.differs_at is None and found.confidence == 0


# ---- the search ----


class Fabric:
    """Routers that answer six times at once, and then once a second each; `way_of` port and hop is their address."""

    def __init__(self, routers: int, way_of: Callable[[int, int], str | None]) -> None:
        self.routers, self.way_of, self.now_s = routers, way_of, 0.0
        self._tokens: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 6.0))
        self.asked: list[Ask] = []
        self.delay: Callable[[Ask], int] = lambda _ask: FAST
        self.lost, self._drawn = 0.0, random.Random(routers)  # share of packets, of both directions

    def answer(self, ask: Ask) -> Reply | None:
        self.asked.append(ask)
        router = self.way_of(ask.port, ask.hop)
        if router is None:
            return None
        if ask.hop == 0:  # an interface is seen, not asked
            return Reply(router, 0)
        if self._drawn.random() < self.lost:
            return None
        before_s, tokens = self._tokens[router]
        tokens = min(6.0, tokens + self.now_s - before_s)
        self._tokens[router] = self.now_s, tokens - (tokens >= 1)
        lost = self._drawn.random() < self.lost
        return Reply(router, self.delay(ask)) if tokens >= 1 and not lost else None

    def run(self, search: Steps) -> None:
        replies: dict[Ask, Reply] | None = None
        while True:
            try:
                batch = next(search) if replies is None else search.send(replies)
            except StopIteration:
                return
            assert len({ask.port for ask in batch.asks}) == len(batch.asks)
            self.now_s += batch.after_ns / 1e9
            found = {ask: self.answer(ask) for ask in batch.asks}
            replies = {ask: reply for ask, reply in found.items() if reply is not None}
            self.now_s += 0.05 * len(found) if len(replies) == len(found) else 0.5

    def meet(self, before: Sequence[dict[int, str]] = (), bundled: bool = False) -> Meeting:
        meeting = Meeting(self.routers, before, bundled)
        self.run(meeting.search())
        return meeting


def two_stages(seed: int, ways: int) -> Callable[[int, int], str | None]:
    """leaf, one of several spines, the far leaf."""
    drawn = random.Random(seed)
    chosen = [drawn.randrange(ways) for _ in range(PORTS)]
    return lambda port, hop: f"spine{chosen[port]}" if hop == 2 else f"leaf{hop}"


def test_all_ways_are_met_by_routers_that_answer_once_a_second() -> None:
    right = 0
    for seed in range(100):
        fabric = Fabric(3, two_stages(seed, 4))
        found = fabric.meet().ways()
        right += len(found.ways) == 4 and found.confidence >= 0.99
    assert right >= 97


@pytest.mark.parametrize("ways", [2, 3, 6])
@pytest.mark.parametrize("lost", [0.05, 0.2])
def test_ports_whose_packets_are_lost_are_no_ways_of_their_own(ways: int, lost: float) -> None:
    right = 0
    for seed in range(100):
        fabric = Fabric(3, two_stages(seed, ways))
        fabric.lost = lost
        right += len(fabric.meet().ways().ways) == ways
    assert right >= 97


def test_a_later_search_meets_the_way_that_the_first_has_missed() -> None:
    of = two_stages(3, 4)
    few = Fabric(3, lambda port, hop: "spine2" if hop == 2 and of(port, 2) == "spine1" and port < 28 else of(port, hop))
    before = few.meet()
    assert len(before.ways().ways) == 3
    later = Fabric(3, few.way_of).meet(before.hops).ways()
    assert len(later.ways) == 4 and later.confidence > 0.9999


def test_one_way_is_one_way_and_few_ports_are_asked() -> None:
    fabric = Fabric(3, lambda _port, hop: f"r{hop}")
    found = fabric.meet().ways()
    assert len(found.ways) == 1 and found.differs_at is None and len(fabric.asked) < 25


def test_a_later_hop_at_which_ways_part_again_tells_more_of_them_apart() -> None:
    found = Fabric(4, lambda port, hop: {2: f"a{port % 2}", 3: f"a{port % 2}c{port % 4}"}.get(hop, f"r{hop}")).meet()
    assert {way.key for way in found.ways().ways} == {("a0", "a0c0"), ("a1", "a1c1"), ("a0", "a0c2"), ("a1", "a1c3")}


def test_a_far_leaf_that_answers_by_four_addresses_changes_nothing() -> None:
    of = two_stages(5, 4)
    found = Fabric(3, lambda port, hop: f"far of {of(port, 2)}" if hop == 3 else of(port, hop)).meet().ways()
    assert len(found.ways) == 4 and found.confidence >= 0.99 and all(len(way.key) == 1 for way in found.ways)


def test_a_router_that_never_answers_leaves_its_ports_by_themselves() -> None:
    found = Fabric(3, lambda port, hop: None if hop == 2 and port % 3 == 0 else f"s{port % 3}" if hop == 2 else "r")
    ways = found.meet().ways()
    assert {way.key for way in ways.ways if not way.alone} == {("s1",), ("s2",)}
    assert all(way.ports[0] % 3 == 0 for way in ways.ways if way.alone) and any(way.alone for way in ways.ways)
    assert ways.confidence == 0


def test_where_no_router_answers_each_port_is_by_itself() -> None:
    ways = Fabric(3, lambda _port, _hop: None).meet().ways()
    assert len(ways.ways) == 16 and all(way.alone for way in ways.ways)


def test_a_way_that_died_since_keeps_its_ports() -> None:
    of = two_stages(3, 4)
    before = Fabric(3, of).meet()
    again = Fabric(3, lambda port, hop: None if of(port, 2) == "spine1" and hop >= 2 else of(port, hop))
    found = again.meet(before.hops).ways()
    then = {port: way.key for way in before.ways().ways for port in way.ports}
    now = {port: way.key for way in found.ways for port in way.ports}
    assert len(found.ways) == 4 and then.items() <= now.items()
    assert all(now[port] == (of(port, 2),) for port in now)


def test_a_way_whose_ports_were_moved_to_others_is_gone() -> None:
    of = two_stages(3, 4)
    before = Fabric(3, of).meet()
    after = Fabric(3, lambda port, hop: "spine2" if of(port, hop) == "spine1" else of(port, hop)).meet(before.hops)
    assert {way.key for way in after.ways().ways} == {("spine0",), ("spine2",), ("spine3",)}


def test_a_way_is_judged_no_more_when_no_other_is_left() -> None:
    pinned: Any = SimpleNamespace(path=SimpleNamespace(address="10.9.0.2"), shared_clock=True)
    known = PathWays(pinned)
    known.learn(group([], lowers={0: "eth0", 1: "eth1"}))
    for number, seen in enumerate(known.seen):
        seen.probes.extend((at * SECOND // 10, FAST + 12 * MS * number) for at in range(20))
    assert known.judge() and [seen.state for seen in known.seen] == ["healthy", "slow"]
    known.learn(group([], lowers={0: "eth1", 1: "eth1"}))
    [only] = known.seen
    assert (only.state, only.verdict.sent, len(only.probes)) == ("unmeasured", 0, 0)


def test_ways_are_probed_equally_often_however_many_ports_each_has() -> None:
    pinned: Any = SimpleNamespace(path=SimpleNamespace(address="10.9.0.2"), shared_clock=True)
    known = PathWays(pinned)
    known.learn(group([{port: "r1" if port < 2 else "r2" if port < 5 else "r3" for port in range(PORTS)}]))
    sent = [known.next_port() for _ in range(6 * PORTS)]
    assert [known.by_port[port].number for port in sent] == [1, 2, 3] * (2 * PORTS)
    assert set(sent) == set(range(PORTS)) and sent[::3] == [0, 1] * PORTS


# ---- ports of a bond ----


def leaves_by(port: int) -> str:
    return f"eth{port % 2}"


@pytest.mark.parametrize("routers", [0, 1])
def test_ports_are_grouped_by_the_lower_that_they_leave_by(routers: int) -> None:
    fabric = Fabric(routers, lambda port, hop: leaves_by(port) if hop == 0 else "gateway")
    found = fabric.meet(bundled=True).ways()
    assert {way.lower: way.ports for way in found.ways} == {f"eth{n}": tuple(range(n, PORTS, 2)) for n in (0, 1)}
    assert found.differs_at is None and found.confidence > 0.99


def test_each_lower_has_the_ways_behind_it() -> None:
    of = two_stages(3, 4)
    fabric = Fabric(3, lambda port, hop: leaves_by(port) if hop == 0 else of(port, hop))
    found = fabric.meet(bundled=True).ways()
    assert {way.key for way in found.ways} == {(f"eth{n}", f"spine{s}") for n in (0, 1) for s in range(4)}
    assert found.differs_at == 2
    assert all(way.lower == leaves_by(port) and way.hops[1] == of(port, 2) for way in found.ways for port in way.ports)


def test_lowers_are_ways_where_routers_do_not_answer_and_there_may_be_more() -> None:
    fabric = Fabric(3, lambda port, hop: leaves_by(port) if hop == 0 else None)
    found = fabric.meet(bundled=True).ways()
    assert [(way.lower, way.alone) for way in found.ways] == [("eth0", False), ("eth1", False)]
    assert found.confidence == 0


def test_a_bond_that_sends_packets_in_turn_has_no_ways() -> None:
    turns = itertools.count()
    fabric = Fabric(1, lambda _port, hop: f"eth{next(turns) % 3}" if hop == 0 else "gateway")
    assert [(way.lower, way.key) for way in fabric.meet(bundled=True).ways().ways] == [("", ())]


def test_a_bad_way_whose_ports_leave_by_another_lower_by_now_is_not_located() -> None:
    sick, good = Way(("eth0",), (0, 2), ("r",), lower="eth0"), Way(("eth1",), (1, 3), ("r",), lower="eth1")
    for lower, moved in (("eth0", False), ("eth1", True)):
        locating = Locating(sick, good, "dead", 1, 1.0)
        fabric = Fabric(1, lambda port, hop, lower=lower: lower if hop == 0 else None if port % 2 == 0 else "r")
        fabric.run(locating.search())
        assert (locating.moved, locating.hop) == (moved, None if moved else 0)


# ---- which is bad ----


def probes(delays: Sequence[int | None], offset_ns: int = 0) -> Probes:
    """Ten a second, one after the other; None: lost."""
    sent = np.arange(len(delays), dtype=np.int64) * SECOND // 10 + offset_ns
    return Probes(sent, np.array([MISSING if each is None else each for each in delays], np.int64))


def states(*ways: Sequence[int | None], before: State = "healthy") -> list[State]:
    of_ways = [probes(way, place * 1000) for place, way in enumerate(ways)]
    return [each.state for each in judge(of_ways, [before] * len(ways), 0.0, 200)]


GOOD = [FAST] * 20


def test_the_slow_and_the_dead_are_named_and_nothing_else() -> None:
    slow, dead = [12 * MS + FAST] * 20, [*GOOD[:12], *[None] * 8]
    assert states(GOOD, slow, dead, GOOD) == ["healthy", "slow", "dead", "healthy"]


def test_what_all_ways_have_is_of_none() -> None:
    """A queue before they part, or clocks that are far apart."""
    assert states([9 * SECOND] * 20, [9 * SECOND + FAST] * 20, [9 * SECOND] * 20) == ["healthy"] * 3
    drawn = random.Random(1)
    noisy = [[drawn.randrange(30 * MS) for _ in range(20)] for _ in range(4)]
    assert states(*noisy) == ["healthy"] * 4


def test_of_two_ways_the_one_that_answers_is_healthy_while_the_other_is_dead() -> None:
    dead = [*GOOD[:8], *[None] * 12]
    assert states(GOOD, dead) == ["healthy", "dead"] and states(dead, dead) == ["unmeasured"] * 2


def test_random_loss_of_all_ways_calls_none_dead_or_lossy() -> None:
    drawn = random.Random(2)
    for _ in range(2000):
        ways = [[None if drawn.random() < 0.2 else FAST for _ in range(20)] for _ in range(4)]
        assert "dead" not in states(*ways)


def test_a_way_that_loses_what_others_do_not_is_lossy() -> None:
    assert states(GOOD, [None, FAST, FAST, None] * 5, GOOD, GOOD) == ["healthy", "lossy", "healthy", "healthy"]


def test_a_dead_path_says_nothing_of_its_ways() -> None:
    assert states([None] * 20, [None] * 20) == ["unmeasured"] * 2


def test_a_way_with_few_probes_is_not_measured() -> None:
    assert states(GOOD, [FAST]) == ["healthy", "unmeasured"]


def test_a_slow_way_stays_slow_until_it_is_as_fast_as_the_others() -> None:
    between = [FAST + 700_000] * 20
    assert states(GOOD, between) == ["healthy", "healthy"]
    assert states(GOOD, between, before="slow")[1] == "slow"
    assert states(GOOD, GOOD, before="slow") == ["healthy", "healthy"]


def test_figures_carry_their_errors() -> None:
    first, second = judge(
        [probes(GOOD), probes([5 * MS + each * 1000 for each in range(20)], 7)], ["healthy"] * 2, 1e-4, 200
    )
    assert (first.queueing_ns, first.lost, first.sent) == (0, 0, 20) and first.loss_bound == pytest.approx(
        0.161, abs=0.01
    )
    assert second.queueing_ns == pytest.approx(5 * MS, abs=20_000)
    assert second.window_ns == 19 * SECOND // 10 and second.queueing_bound_ns is not None
    assert second.queueing_bound_ns >= 190_000  # 100 ppm of the window


# ---- and where ----


@pytest.mark.parametrize(
    ("good", "hop"),
    [
        ([True, False, False], 2),
        ([False, False], 1),
        ([True, True, False], 3),
        ([None, False], None),
        ([False, True, False], None),
    ],
)
def test_the_sick_hop_is_the_last_good_one_and_unknown_if_the_next_does_not_say(
    good: list[bool | None], hop: int | None
) -> None:
    assert sick_hop(good, 2) == hop


SICK = Way(("s1",), (1, 4), ("leaf1", "s1", "leaf3"))
HEALTHY = Way(("s2",), (2, 5), ("leaf1", "s2", "leaf3"))


def located(state: State, size: float, fabric: Fabric) -> int | None:
    locating = Locating(SICK, HEALTHY, state, 2, size)
    fabric.run(locating.search())
    return locating.hop


def routers(port: int, hop: int) -> str | None:
    return (SICK if port in SICK.ports else HEALTHY).hops[hop - 1]


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_queue_is_behind_the_last_router_that_answers_as_soon_as_on_a_good_way(behind: int) -> None:
    fabric = Fabric(3, routers)
    fabric.delay = lambda ask: FAST + 20 * MS * (ask.port in SICK.ports and ask.hop > behind)
    assert located("slow", 20 * MS, fabric) == behind


def test_a_dead_way_is_cut_behind_the_last_router_that_answers() -> None:
    assert (
        located("dead", 1, Fabric(3, lambda port, hop: None if port in SICK.ports and hop > 1 else routers(port, hop)))
        == 1
    )
    assert (
        located("dead", 1, Fabric(3, lambda port, hop: None if port in SICK.ports and hop > 2 else routers(port, hop)))
        == 2
    )


def test_where_a_router_does_not_answer_the_hop_is_not_known() -> None:
    fabric = Fabric(3, lambda port, hop: None if hop == 3 else routers(port, hop))
    assert located("slow", 20 * MS, fabric) is None


# ---- what routers say ----


def test_only_a_time_exceeded_names_a_router() -> None:
    def entry(origin: int, kind: int, offender: bytes) -> bytes:
        return struct.pack("=IBBBBII", 113, origin, kind, 0, 0, 0, 0) + offender

    def time_exceeded(content: bytes) -> str | None:
        said = {error_queue.entry(*each, content) for each in error_queue.RECVERR.values()}
        assert len(said) == 1 and error_queue.entry(1, 11, content) is None
        (one,) = said
        return one.offender or None if one is not None and one.time_exceeded else None

    four = struct.pack("=HH", 2, 0) + bytes([10, 1, 2, 3]) + bytes(8)
    six = struct.pack("=HHI", 10, 0, 0) + bytes([0xFD, *bytes(14), 9]) + bytes(4)
    assert time_exceeded(entry(2, 11, four)) == "10.1.2.3" and time_exceeded(entry(3, 3, six)) == "fd00::9"
    assert time_exceeded(entry(2, 3, four)) is None and time_exceeded(entry(1, 11, four)) is None
    assert time_exceeded(b"") is None and time_exceeded(entry(2, 11, b"")) is None


# ---- probes of a sweep ----


def answer(row: int, number: int, t1_ns: int, t2_ns: int) -> np.ndarray[Any, Any]:
    names = ("session", "number", "t1_ns", "t2_ns")
    return np.array([(FIRST_ROW + row, number, t1_ns, t2_ns)], [(name, np.int64) for name in names])


def test_a_probe_is_lost_once_and_its_late_answer_still_counts() -> None:
    sweep, way = UnderWay(1000 * MS), Seen(1, Way(("s1",), (7,), ("leaf", "s1")))
    row, number = sweep.begin(3, 7, 5 * MS) or pytest.fail("there is room")
    assert list(sweep.late(404 * MS)) == [] and [each.sent_ns for each in sweep.waiting()] == [5 * MS]
    fates = [*sweep.late(405 * MS), *sweep.late(600 * MS)]
    assert fates == [Fate(3, 7, 5 * MS)] and list(sweep.waiting()) == []
    fates += sweep.answered(answer(row, number, 5 * MS, 505 * MS))
    for fate in fates:
        way.note(fate.sent_ns, fate.forward_ns)
    assert list(way.probes) == [(5 * MS, 500 * MS)]
    assert list(sweep.answered(answer(row, number, 5 * MS, 505 * MS))) == []


def test_after_the_timeout_no_answer_counts_and_its_row_is_free() -> None:
    sweep = UnderWay(1000 * MS)
    begun = [sweep.begin(0, port, 1 + port) for port in range(SWEEP_ROWS)]
    assert len({each and each[0] for each in begun}) == SWEEP_ROWS and sweep.begin(0, 0, SWEEP_ROWS) is None
    assert len(list(sweep.late(1001 * MS))) == SWEEP_ROWS
    row, number = begun[0] or (0, 0)
    assert list(sweep.answered(answer(row, number, 1, 2))) == [] and sweep.begin(0, 0, 1002 * MS) == (row, number + 1)


def test_a_short_timeout_is_when_a_probe_is_lost() -> None:
    sweep = UnderWay(100 * MS)
    sweep.begin(0, 0, 5 * MS)
    assert list(sweep.late(104 * MS)) == [] and len(list(sweep.late(105 * MS))) == 1


def test_extra_probes_leave_20_ms_apart_by_the_ports_of_their_way_in_turn() -> None:
    seen = Seen(1, Way(("s1",), (4, 9), ("leaf", "s1")))
    hurry = Hurry(SimpleNamespace(), seen, 0)  # type: ignore[arg-type]
    sent, now_ns = [], 0
    while not hurry.over(now_ns):
        if (port := hurry.port(now_ns)) is not None:
            sent.append((now_ns, port))
        now_ns = hurry.due_ns(now_ns)
    assert sent == [(20 * MS * turn, (4, 9)[turn % 2]) for turn in range(12)]
    assert now_ns > sent[-1][0] + 400 * MS, "until all of them are late"


def test_without_ports_nothing_is_hurried_along_and_the_ring_read_no_sooner() -> None:
    ways = HiddenWays("h1", Probe(), SimpleNamespace(), Bus())  # type: ignore[arg-type]
    ways._sweep = SimpleNamespace(wire_bytes=0, refused=0, close=lambda: None)  # type: ignore[assignment]
    ways._order.append(0)
    ways._hurries.append(Hurry(SimpleNamespace(), Seen(1, Way(("s1",), (4, 9), ("leaf", "s1"))), 0))  # type: ignore[arg-type]
    assert ways.sweeping and ways.look_ns(1) == 0
    ways._close_sweep()
    assert not ways.sweeping and ways.look_ns(1) is None
    ways.close()


def test_a_way_that_is_dead_is_not_hurried_along() -> None:
    seen = Seen(1, Way(("s1",), (4, 9), ("leaf", "s1")))
    hurry = Hurry(SimpleNamespace(), seen, 0)  # type: ignore[arg-type]
    seen.state = "dead"
    assert hurry.over(1)
