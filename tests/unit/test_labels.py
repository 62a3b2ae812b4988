"""Which flow labels are asked about and given, from ways and connections that are made up."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import samples

from pytools.signals import Path
from pytools.units import SECOND
from steering.flows.labels import MOST_FLOWS, Ask, LabelAct, LabelEngine
from steering.flows.rates import TCP
from steering.plan import FlowKey
from steering.policy.actions import Labels

NOW = 1_000 * SECOND
ROUTERS = [f"fd00:1{way}::1" for way in range(1, 5)]
PATH = Path("h1", "h2", "fd00:9::2", "fd00:1::1", "rail1")
OWN = 4  # the label of the first connection, of the first way


class World:
    """An engine, and a fabric whose ways follow from label and port."""

    def __init__(self, learns: bool = True) -> None:
        self._labels: Iterator[int] = iter(range(101, 1 << 20))
        self.engine = LabelEngine(Labels(), ("fd00:9::/64",), lambda: next(self._labels), learns)
        self.now = NOW
        self.takes: Callable[[FlowKey, int], str | None] = lambda _, label: ROUTERS[label % 4]

    def ways(self, path: Path = PATH, distance: int = 2, **states: str) -> None:
        """Tell all ways; those named w1 to w4 are in these states."""
        for number, router in enumerate(ROUTERS, 1):
            state = states.get(f"w{number}", "healthy")
            fixed = {"path": path, "way": number, "router": router, "differs_at": distance, "state": state}
            self.engine.take(samples.path_way(at_ns=self.now, **fixed), self.now)

    def connect(self, port: int = 40_000, own: int = OWN, **others: object) -> FlowKey:
        """A connection as TCP telemetry would tell it, whose packets come with this label."""
        ends = {"local": "fd00:9::1", "local_port": port, "remote": PATH.address, "remote_port": 80}
        fixed = {"first_ns": NOW, "segments_in": 3, "sent_bytes": 1000, "state": "established", "namespace": ""}
        self.engine.take(samples.tcp_flow(**(ends | fixed | others)), self.now)
        key = FlowKey(TCP, "fd00:9::1", port, PATH.address, 80)
        self.engine.seen({key: own}, self.now)
        return key

    def learn(self) -> list[Ask]:
        """Ask until enough is known."""
        asked = []
        while (ask := self.engine.ask(self.now)) is not None:
            asked.append(ask)
            self.engine.answered(ask, self.takes(ask.flow, ask.label), self.now)
        return asked

    def act(self) -> list[LabelAct]:
        """What is decided a second later, carried out."""
        self.now += SECOND
        acts = list(self.engine.decide(self.now))
        for act in acts:
            self.engine.carried_out(act, {})
        return acts


@pytest.fixture
def world() -> World:
    made = World()
    made.ways()
    return made


def test_the_label_of_a_connection_is_asked_about_first_then_others_until_two_more_ways_are_known(world: World) -> None:
    key = world.connect()
    asked = world.learn()
    assert asked[0] == Ask(key, OWN, 2, "rail1")
    assert len({world.takes(ask.flow, ask.label) for ask in asked}) == 3 and len(asked) <= 5


def test_a_connection_on_a_bad_way_gets_a_label_of_a_good_one_and_others_stay(world: World) -> None:
    bad, good = world.connect(), world.connect(40_001, own=5)
    world.learn()
    world.ways(w1="slow")
    (act,) = world.act()
    assert act.give.keys() == {bad} and world.takes(bad, act.give[bad]) != ROUTERS[0]
    assert sum(act.way.before.values()) == sum(act.way.after.values()) == 2
    assert act.way.before[ROUTERS[0]] == 1 and act.way.after[ROUTERS[0]] == 0
    assert f"the way by {ROUTERS[0]} is slow (hop 2)" in act.way.because
    assert world.act() == [] and world.engine.held == (bad,) and good not in act.give


def test_connections_of_one_way_spread_over_the_good_ones(world: World) -> None:
    for port in range(40_000, 40_008):
        world.connect(port)
    world.learn()
    world.ways(w1="dead")
    (act,) = world.act()
    used = {world.takes(key, label) for key, label in act.give.items()}
    assert len(act.give) == 8 and len(used) >= 2


def test_labels_end_when_no_way_is_bad_for_the_dwell(world: World) -> None:
    key = world.connect()
    world.learn()
    world.ways(w1="dead")
    world.act()
    world.ways()
    assert world.act() == []
    world.now += 10 * SECOND
    world.ways()
    world.connect()
    (act,) = world.act()
    assert act.end == (key,) and act.way.over and act.way.after[ROUTERS[0]] == 1 and world.engine.held == ()


def test_a_connection_moves_on_when_its_new_way_is_bad_too(world: World) -> None:
    key = world.connect()
    world.learn()
    world.ways(w1="dead")
    (first,) = world.act()
    second = ROUTERS.index(world.takes(key, first.give[key]) or "") + 1
    world.ways(PATH, 2, w1="dead", **{f"w{second}": "slow"})
    world.learn()
    (act,) = world.act()
    assert world.takes(key, act.give[key]) not in (ROUTERS[0], ROUTERS[second - 1])


def test_nothing_moves_while_all_ways_are_bad(world: World) -> None:
    world.connect()
    world.learn()
    world.ways(w1="slow", w2="dead", w3="lossy", w4="slow")
    assert world.act() == []


def test_a_label_that_the_kernel_changed_is_left_only_for_a_known_good_one_while_a_way_is_bad(world: World) -> None:
    key = world.connect()
    world.learn()
    world.engine.seen({key: 44}, world.now)
    assert world.act() == [], "no way is bad"
    world.ways(w1="dead")
    (act,) = world.act()
    assert act.give.keys() == {key}


def test_a_label_that_no_router_answers_for_counts_as_astray_where_others_are_answered(world: World) -> None:
    world.takes = lambda _, label: None if label == OWN else ROUTERS[label % 4]
    key = world.connect()
    world.learn()
    assert world.act() == [], "no way is bad"
    world.ways(w1="dead")
    (act,) = world.act()
    assert act.give.keys() == {key}


def test_where_routers_do_not_hash_labels_nothing_moves_and_it_says_so(world: World) -> None:
    world.takes = lambda flow, _: ROUTERS[flow.local_port % 4]
    world.connect()
    assert len(world.learn()) < 30
    world.ways(w1="dead")
    assert world.act() == []
    assert world.engine.facts()[0]["movable"] == 0


def test_another_hash_voids_what_was_learnt(world: World) -> None:
    world.connect()
    world.learn()
    world.now += 9 * SECOND
    world.connect()
    world.now += 2 * SECOND
    world.ways()
    ask = world.engine.ask(world.now)
    assert ask is not None and ask.label == OWN
    world.engine.answered(ask, ROUTERS[1], world.now)
    assert world.engine.counts["moved"] == 1
    assert world.engine.facts()[0]["known"] == 1


def test_only_connections_of_this_namespace_to_managed_addresses_with_ways_are_looked_at(world: World) -> None:
    world.connect(namespace="pod")
    world.connect(remote="fd00:8::2")
    world.connect(remote="10.9.0.2")
    world.connect(segments_in=0)
    world.connect(state="time_wait")
    assert world.engine.watched(world.now) == () and world.engine.ask(world.now) is None
    key = world.connect()
    assert world.engine.watched(world.now) == (key,)
    assert world.engine.interfaces(world.now) == {"rail1"}
    world.connect(state="close")
    assert world.engine.watched(world.now) == ()


def test_an_address_with_two_paths_is_left_alone(world: World) -> None:
    world.connect()
    world.learn()
    world.ways(w1="dead")
    world.ways(Path("h1", "h2", "fd00:9::2", "fd00:2::1", "rail2"))
    assert world.act() == [] and world.engine.ask(world.now) is None


def test_those_that_have_sent_most_are_served_and_one_that_we_moved_is_kept(world: World) -> None:
    moved = world.connect(sent_bytes=1)
    world.learn()
    world.ways(w1="dead")
    world.act()
    for number in range(1, MOST_FLOWS + 1):
        world.connect(40_000 + number, sent_bytes=1000 * number)
    kept = world.engine.watched(world.now)
    assert len(kept) == MOST_FLOWS and moved in kept and FlowKey(TCP, "fd00:9::1", 40_001, PATH.address, 80) not in kept


def test_a_dry_run_tells_acts_though_it_learns_nothing() -> None:
    world = World(learns=False)
    world.ways(w2="slow")
    (act,) = world.act()
    assert f"the way by {ROUTERS[1]} is slow" in act.way.because and not act.give
    world.now += 60 * SECOND
    (act,) = world.act()
    assert act.way.over


def test_everything_is_taken_back_at_the_end(world: World) -> None:
    key = world.connect()
    world.learn()
    world.ways(w1="dead")
    world.act()
    (act,) = world.engine.all_back("stopped", world.now)
    assert act.end == (key,) and act.way.over and act.way.because.endswith("stopped")
    world.engine.lost([key])
    assert world.engine.held == () and world.engine.all_back("stopped", world.now) == ()
