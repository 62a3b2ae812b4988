"""The simulation of holds is exact and repeatable, and what the law in use does in it."""

from __future__ import annotations

from hold_laws import InUse
from hold_scenes import ENDLESS, RATE, ROOM, incast, shared
from hold_world import MS, SECOND, Flow, Host, Net, Queue, World
from hypothesis import given
from hypothesis import strategies as st


def net(seed: int = 1, room: int = ROOM) -> Net:
    world = World(seed)
    return Net(world, Queue(world, RATE, room))


def test_a_packet_arrives_when_it_has_passed_the_interface_the_wire_and_the_queue() -> None:
    one, times = net(), list[int]()
    host = Host(one, 0, None)
    for _ in range(2):
        host.send(1514, lambda: times.append(one.world.now), lambda: None)
    one.world.run(SECOND)
    line, queue = 1514 * SECOND // 1_250_000_000, 1514 * SECOND // RATE
    assert times == [line + 25_000 + queue + 25_000, line + 25_000 + 2 * queue + 25_000]


@given(st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 9000)), max_size=200))
def test_the_queue_never_holds_more_than_its_room_and_loses_no_byte_uncounted(packets: list[tuple[int, int]]) -> None:
    world = World(0)
    queue = Queue(world, RATE, ROOM)
    leaving: list[tuple[int, int]] = []
    for later, size in packets:
        world.now += later
        inside = sum(its for when, its in leaving if when > world.now)
        passed = queue.enter(size)
        assert (passed is None) == (inside + size > ROOM)
        if passed is not None:
            leaving.append((passed, size))
    assert queue.passed == sum(size for _, size in leaving)
    assert queue.dropped == len(packets) - len(leaving)
    assert queue.longest <= ROOM


def test_a_connection_delivers_every_packet_once_however_many_are_dropped() -> None:
    one, done = net(), list[int]()
    flows = [Flow(Host(one, number, None)) for number in range(8)]
    for flow in flows:
        flow.give(1_000_000, lambda: done.append(one.world.now))
    one.world.run(20 * SECOND)
    assert len(done) == 8 and one.queue.dropped > 0
    assert {flow.delivered for flow in flows} == {-(-1_000_000 // 1448)}
    assert sum(flow.resent for flow in flows) >= one.queue.dropped


def test_a_lone_connection_fills_the_bottleneck() -> None:
    one = net()
    Flow(Host(one, 0, None)).give(10**10)
    one.world.run(2 * SECOND)
    assert one.queue.passed > 0.95 * 2 * RATE


def test_the_same_seed_gives_the_same_run() -> None:
    first, again, other = (incast(InUse, seed, seconds=1) for seed in (7, 7, 8))
    assert first == again != other


def test_hosts_that_send_without_end_share_the_bottleneck_fairly_and_lose_nothing() -> None:
    seen = shared(InUse, 1)
    assert seen.dropped == 0 and seen.used > 0.99
    assert 0.9 < seen.share < 1.1


def test_hosts_that_hold_keep_their_share_beside_hosts_that_do_not() -> None:
    assert shared(InUse, 1, others=lambda: None).share > 0.8


def test_hosts_hold_again_once_those_that_do_not_have_gone_whenever_they_began() -> None:
    one, gone = net(room=2 * ROOM), list[int]()
    others = [Flow(Host(one, 10 + number, None)) for number in range(4)]
    for number in range(4):
        flow = Flow(Host(one, number, InUse()))
        one.world.at(number * 300 * MS, flow.give, ENDLESS)
    for flow in others:
        flow.give(4_000_000, lambda: gone.append(one.world.now))
    while len(gone) < len(others):
        one.world.run(one.world.now + 10 * MS)
    one.world.run(one.world.now + 1200 * MS)
    one.queue.longest = 0
    dropped = one.queue.dropped
    one.world.run(one.world.now + SECOND)
    assert one.queue.longest < RATE // 250  # the four thresholds
    assert one.queue.dropped == dropped


def test_an_incast_with_holds_waits_for_no_timeout() -> None:
    held, alone = incast(InUse, 1), incast(lambda: None, 1)
    assert alone.timeouts > 10 and held.timeouts == 0
    assert held.dropped < alone.dropped
    assert held.p99_ms < alone.p99_ms / 2.8
