"""Which MPTCP subflows are replaced, and by which ports, from ways and subflows that are made up."""

from __future__ import annotations

import pytest
import samples

from pytools.units import SECOND
from steering.flows.ports import PortEngine
from steering.flows.rates import TCP
from steering.flows.subflows import Create, Destroy, SubflowEngine
from steering.plan import FlowKey
from steering.policy.actions import Ports

NOW = 1_000 * SECOND
ROUTERS = [f"10.1{way}.1.1" for way in range(1, 5)]
OWN, TOKEN = 40_000, 0xABC
FLOW = FlowKey(TCP, "10.9.0.1", OWN, "10.9.0.2", 5901)


class World:
    """Engines, and a fabric whose ways follow from the port."""

    def __init__(self) -> None:
        ports = iter(range(32_769, 60_000, 2))
        self.ports = PortEngine(Ports(keep=8), ("10.9.0.0/24",), lambda: next(ports))
        self.engine, self.now = SubflowEngine(self.ports), NOW

    def ways(self, **states: str) -> None:
        """Tell all ways; those named w1 to w4 are in these states."""
        for number, router in enumerate(ROUTERS, 1):
            fixed = {"way": number, "router": router, "differs_at": 2, "state": states.get(f"w{number}", "healthy")}
            self.ports.take(samples.path_way(at_ns=self.now, path=samples.path(), **fixed), self.now)

    def see(self, *ports: int, token: int = TOKEN, established: bool = True) -> None:
        """The subflows from these ports."""
        flows = [FlowKey(TCP, FLOW.local, port, FLOW.remote, FLOW.remote_port) for port in ports]
        self.engine.seen([(flow, token, established) for flow in flows], self.now)

    def learn(self) -> None:
        """Ask until enough is known; the subflow from OWN takes the first way."""
        while (ask := self.engine.ask(self.now)) is not None:
            self.engine.answered(ask.flow, ROUTERS[ask.flow.local_port // 2 % 4])
        while (syn := self.ports.ask(self.now)) is not None:
            self.ports.answered(syn, ROUTERS[syn.port // 2 % 4], self.now)

    def decide(self) -> list[Create | Destroy]:
        """What is decided now."""
        return list(self.engine.decide(self.now))


@pytest.fixture
def world() -> World:
    made = World()
    made.ways()
    made.see(OWN)
    made.learn()
    return made


def test_a_subflow_on_a_bad_way_is_replaced_once_the_new_one_is_established(world: World) -> None:
    assert world.decide() == []
    world.ways(w1="slow")
    [create] = world.decide()
    assert isinstance(create, Create) and create.flow == FLOW and create.port // 2 % 4 != 0
    world.see(OWN, create.port, established=False)
    assert world.decide() == []
    world.see(OWN, create.port)
    world.learn()
    [destroy] = world.decide()
    assert isinstance(destroy, Destroy) and destroy.flow == FLOW
    assert destroy.way.before == {ROUTERS[0]: 1} and destroy.way.after == {ROUTERS[create.port // 2 % 4]: 1}
    assert f"the way by {ROUTERS[0]} is slow" in destroy.way.because
    world.see(create.port)
    assert world.decide() == []


def test_a_subflow_of_another_connection_replaces_none(world: World) -> None:
    world.ways(w1="slow")
    [create] = world.decide()
    assert isinstance(create, Create)
    new = FlowKey(TCP, FLOW.local, create.port, FLOW.remote, FLOW.remote_port)
    world.engine.seen([(FLOW, TOKEN, True), (new, TOKEN + 1, True)], world.now)
    assert world.decide() == []


def test_another_port_is_tried_four_times_and_again_later(world: World) -> None:
    world.ways(w1="dead")
    tried = []
    for _ in range(10):
        tried += world.decide()
        world.now += SECOND
        world.ways(w1="dead")
        world.see(OWN)
    assert len(tried) == 4 and len({each.port for each in tried if isinstance(each, Create)}) == 4
    world.now += 10 * SECOND
    world.ways(w1="dead")
    assert len(world.decide()) == 1


def test_a_refused_port_is_followed_by_the_next_at_once(world: World) -> None:
    world.ways(w1="dead")
    [first] = world.decide()
    world.engine.refused(FLOW)
    [second] = world.decide()
    assert isinstance(first, Create) and isinstance(second, Create) and first.port != second.port


def test_what_is_on_a_good_way_or_nowhere_known_stays(world: World) -> None:
    world.ways(w2="dead")
    assert world.decide() == []
    world.see()
    world.ways(w1="slow")
    world.see(OWN)
    assert world.decide() == [], "its way is not known again yet"
    for _ in range(3):
        world.engine.answered(FLOW, None)
    assert len(world.decide()) == 1, "no router answers for it"
