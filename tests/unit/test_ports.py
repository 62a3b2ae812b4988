"""Which local ports are asked about and offered, from ways and connections that are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import samples

from pytools.signals import Path
from pytools.units import SECOND
from steering.flows.ports import Ask, PortEngine
from steering.plan import Peer
from steering.policy.actions import Ports

NOW = 1_000 * SECOND
ROUTERS = [f"10.1{way}.1.1" for way in range(1, 5)]
PEER = Peer("10.9.0.2", 5901)
KEEP = 4


class World:
    """An engine, and a fabric whose ways follow from the port."""

    def __init__(self, wanted: Ports) -> None:
        self._ports: Iterator[int] = iter(range(32_769, 60_000, 2))
        self.engine = PortEngine(wanted, ("10.9.0.0/24", "fd00:9::/64"), lambda: next(self._ports))
        self.now, self.path = NOW, samples.path()
        self.takes: Callable[[int], str | None] = lambda port: ROUTERS[port // 2 % 4]

    def ways(self, distance: int | None = 2, **states: str) -> None:
        """Tell all ways; those named w1 to w4 are in these states."""
        for number, router in enumerate(ROUTERS, 1):
            state = states.get(f"w{number}", "healthy")
            fixed = {"path": self.path, "way": number, "router": router, "differs_at": distance, "state": state}
            self.engine.take(samples.path_way(at_ns=self.now, **fixed), self.now)

    def connect(self, peer: Peer = PEER, times: int = 2) -> None:
        """As many connections as TCP telemetry would tell."""
        for began in range(times):
            where = {"local": "10.9.0.1", "local_port": 40_000, "remote": peer.address, "remote_port": peer.port}
            self.engine.take(samples.tcp_flow(first_ns=self.now + began, segments_in=3, **where), self.now)

    def learn(self) -> list[Ask]:
        """Ask until enough is known."""
        asked = []
        while (ask := self.engine.ask(self.now)) is not None:
            asked.append(ask)
            self.engine.answered(ask, self.takes(ask.port), self.now)
        return asked

    def offered(self) -> dict[str, int]:
        """Ports offered to the peer by the router of their way."""
        self.now += SECOND
        ports = self.engine.decide(self.now).offers.get(PEER, ())
        return {router: count for router in ROUTERS if (count := sum(self.takes(port) == router for port in ports))}


@pytest.fixture
def world() -> World:
    made = World(Ports(keep=KEEP))
    made.ways()
    made.connect()
    return made


def test_ports_are_asked_about_at_the_hop_where_ways_differ_until_enough_are_known(world: World) -> None:
    asked = world.learn()
    assert {(ask.peer, ask.distance) for ask in asked} == {(PEER, 2)}
    assert len({ask.port for ask in asked}) == len(asked) == 2 * KEEP


def test_nothing_is_offered_while_all_ways_are_good(world: World) -> None:
    world.learn()
    plan = world.engine.decide(world.now)
    assert not plan.offers and not plan.acts


def test_ports_of_bad_ways_are_not_offered(world: World) -> None:
    world.learn()
    world.ways(w2="slow", w3="dead")
    world.learn()
    assert world.offered() == {ROUTERS[0]: 2, ROUTERS[3]: 2}


def test_only_the_states_that_the_policy_names_are_avoided() -> None:
    world = World(Ports(keep=KEEP, avoid=("dead",)))
    world.ways()
    world.connect()
    world.ways(w2="slow", w3="dead")
    world.learn()
    assert set(world.offered()) == {ROUTERS[0], ROUTERS[1], ROUTERS[3]}


def test_an_unmeasured_way_is_not_taken_for_a_good_one(world: World) -> None:
    world.ways(w1="unmeasured", w2="slow", w3="dead")
    world.learn()
    assert set(world.offered()) == {ROUTERS[3]}


def test_nothing_is_offered_while_all_ways_are_bad(world: World) -> None:
    world.learn()
    world.ways(w1="lossy", w2="slow", w3="dead", w4="dead")
    plan = world.engine.decide(world.now)
    assert not plan.offers and not plan.acts


def test_a_way_is_used_again_after_the_dwell(world: World) -> None:
    world.learn()
    world.ways(w2="slow")
    assert ROUTERS[1] not in world.offered()
    world.now += 5 * SECOND
    world.ways()
    assert ROUTERS[1] not in world.offered()
    assert world.engine.decide(world.now).offers
    world.now += 10 * SECOND
    world.ways()
    assert world.offered() == {}


def test_acts_tell_what_is_avoided_and_that_it_is_over(world: World) -> None:
    world.learn()
    world.ways(w2="slow")
    (act,) = world.engine.decide(world.now).acts
    assert not act.over and f"the way by {ROUTERS[1]} is slow (hop 2)" in act.because
    assert act.before == dict.fromkeys(ROUTERS, 2) and act.after == {**act.before, ROUTERS[1]: 0}
    world.now += SECOND
    assert world.engine.decide(world.now).acts == ()
    world.now += 60 * SECOND
    (over,) = world.engine.decide(world.now).acts
    assert over.over and "not known any more" in over.because
    assert (over.before, over.after) == (act.after, act.before) and world.engine.all_back("the end") == ()


def test_everything_is_taken_back_at_the_end(world: World) -> None:
    world.learn()
    world.ways(w2="slow")
    (act,) = world.engine.decide(world.now).acts
    (back,) = world.engine.all_back("the end")
    assert (back.path, back.over, back.because) == (act.path, True, "the end")
    assert (back.before, back.after) == (act.after, act.before)


def test_no_act_is_told_before_a_port_is_known(world: World) -> None:
    world.ways(w2="slow")
    assert world.engine.decide(world.now).acts == ()
    world.learn()
    assert len(world.engine.decide(world.now).acts) == 1


def test_a_dry_run_tells_acts_though_it_learns_nothing() -> None:
    engine = PortEngine(Ports(), ("10.9.0.0/24",), lambda: 0, learns=False)
    for router, state in zip(ROUTERS, ("healthy", "slow", "healthy", "healthy"), strict=True):
        engine.take(samples.path_way(at_ns=NOW, router=router, state=state), NOW)
    (act,) = engine.decide(NOW).acts
    assert f"the way by {ROUTERS[1]} is slow" in act.because


def test_a_router_is_avoided_if_it_is_bad_by_each_port_of_a_bond(world: World) -> None:
    """A SYN tells its router alone: a port of the bond that is bad is bad for all of them."""
    world.now += 20 * SECOND  # what was told of the ways as a whole is old
    for lowers, bad in ((("eth0",), False), (("eth0", "eth1"), True)):
        for router, lower in itertools.product(ROUTERS, ("eth1", "eth0")):
            sick = router == ROUTERS[1] and lower in lowers
            state = "dead" if sick else "healthy"
            told = samples.path_way(at_ns=world.now, path=world.path, router=router, lower=lower, state=state)
            world.engine.take(told, world.now)
        world.connect()
        world.learn()
        offered = world.offered()
        assert ROUTERS[1] not in offered and bool(offered) is bad


def test_silence_teaches_nothing(world: World) -> None:
    world.takes = lambda _: None
    for _ in range(20):
        ask = world.engine.ask(world.now)
        assert ask is not None
        world.engine.answered(ask, None, world.now)
    world.ways(w2="slow")
    assert world.offered() == {} and world.engine.counts["silent"] == 20


def test_another_hash_voids_what_was_learnt(world: World) -> None:
    world.learn()
    world.now += 11 * SECOND
    world.ways()
    ask = world.engine.ask(world.now)
    assert ask is not None
    world.engine.answered(ask, ROUTERS[(ROUTERS.index(world.takes(ask.port) or "") + 1) % 4], world.now)
    assert world.engine.counts["moved"] == 1
    assert [fact["known"] for fact in world.engine.facts()] == [1]


def test_a_syn_that_arrived_is_the_last_one_at_this_distance(world: World) -> None:
    ask = world.engine.ask(world.now)
    assert ask is not None
    world.engine.arrived(ask)
    assert world.engine.ask(world.now) is None
    world.ways(distance=3)
    ask = world.engine.ask(world.now)
    assert ask is not None and ask.distance == 3


def test_a_destination_with_two_paths_is_left_alone(world: World) -> None:
    world.learn()
    world.ways(w2="slow")
    world.path = samples.path(rail=2)
    world.ways()
    assert world.offered() == {} and world.engine.ask(world.now) is None


def test_only_managed_ipv4_destinations_with_known_ways_are_served() -> None:
    for address in ("192.0.2.7", "fd00:9::2", "10.9.0.3"):
        world = World(Ports(keep=KEEP))
        world.path = Path("h1", "h3", address, "10.1.1.1", "rail1")
        world.ways()
        world.connect(Peer("10.9.0.2", 80))
        assert world.engine.ask(world.now) is None
        world.connect(Peer(address, 80))
        assert (world.engine.ask(world.now) is not None) == (address == "10.9.0.3")


def test_the_most_used_destination_comes_first_and_one_used_once_does_not_count(world: World) -> None:
    busy, once = Peer(PEER.address, 80), Peer(PEER.address, 40_123)
    world.connect(busy, times=9)
    world.connect(once, times=1)
    asked = [ask.peer for ask in world.learn()]
    assert asked == [busy] * (2 * KEEP) + [PEER] * (2 * KEEP)


def test_a_destination_whose_routers_are_silent_leaves_others_their_turn(world: World) -> None:
    other = Peer(PEER.address, 80)
    world.connect(other, times=9)
    world.takes = lambda _: None
    asked = []
    while len(asked) < 20 * KEEP and (ask := world.engine.ask(world.now)) is not None:
        asked.append(ask.peer)
        world.engine.answered(ask, None, world.now)
    assert asked == [other] * (8 * KEEP) + [PEER] * (8 * KEEP)
    world.now += 11 * SECOND
    world.ways()
    later = [world.engine.ask(world.now), world.engine.ask(world.now)]
    assert [ask and ask.peer for ask in later] == [other, PEER]


def test_a_syn_of_ours_is_no_use_of_a_destination() -> None:
    world = World(Ports(keep=KEEP))
    world.ways()
    for began in range(5):
        flow = samples.tcp_flow(remote=PEER.address, remote_port=PEER.port, first_ns=NOW + began, segments_in=0)
        world.engine.take(flow, world.now)
    assert world.engine.ask(world.now) is None
