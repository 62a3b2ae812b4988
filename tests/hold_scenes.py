"""What hosts do in the simulation of holds: incast, a ring all-reduce, long connections that share a queue.

The bottleneck has 100 Mbit/s and a shallow buffer of 75 kB (6 ms); interfaces have 10 Gbit/s, a round trip without any
queue takes 0.1 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hold_world import MS, SECOND, Flow, Host, Law, Net, Queue, World

from pytools.sources.probing import held_paths

RATE: Final = 12_500_000
ROOM: Final = 75_000
ENDLESS: Final = 10**10

Make = Callable[[], Law | None]


@dataclass(frozen=True)
class Seen:
    """What came of one run; a figure that a scene has not is 0."""

    p50_ms: float = 0
    p99_ms: float = 0
    dropped: int = 0
    used: float = 0  # share of the bottleneck
    background: float = 0  # its part of what passed
    timeouts: int = 0
    share: float = 0  # of the first group, relative to the fair one


@dataclass(frozen=True)
class Sensor:
    """How the queue is measured; without `apart_bytes`, always after `every_ns`."""

    every_ns: int = held_paths.LEAST_NS
    apart_bytes: int = held_paths.APART_BYTES
    late_ns: int = 0
    error_ns: Callable[[int, int], int] = lambda host, now: 0


def _net(seed: int, sensor: Sensor) -> Net:
    world = World(seed)
    queue = Queue(world, RATE, ROOM)
    how = {"every_ns": sensor.every_ns, "apart_bytes": sensor.apart_bytes, "late_ns": sensor.late_ns}
    return Net(world, queue, **how, error_ns=sensor.error_ns)


def incast(
    make: Make, seed: int, sensor: Sensor = Sensor(), *, background: int = 2, kind: str = "cubic", seconds: int = 4
) -> Seen:
    """16 hosts answer each request with 32 KiB at once, for some seconds; `background` others send without end."""
    net = _net(seed, sensor)
    world, size, ends = net.world, 32 * 1024, seconds * SECOND
    flows = [Flow(Host(net, number, make()), kind) for number in range(16)]
    beside = [Flow(Host(net, 16 + number, make()), kind) for number in range(background)]
    times: list[int] = []

    def request() -> None:
        began, left = world.now, [len(flows)]

        def done() -> None:
            left[0] -= 1
            if not left[0]:
                times.append(world.now - began)
                world.at(world.now + 10 * MS + world.random.randrange(MS), request)

        for flow in flows:
            world.at(world.now + net.back_ns + world.random.randrange(MS // 20), flow.give, size, done)

    for flow in beside:
        flow.give(ENDLESS)
    world.at(SECOND // 10, request)
    world.run(ends)
    times.sort()
    times = times or [ends]
    return Seen(
        times[len(times) // 2] / MS,
        times[len(times) * 99 // 100] / MS,
        net.queue.dropped,
        net.queue.passed * SECOND / RATE / ends,
        sum(flow.delivered for flow in beside) * 1448 * SECOND / RATE / ends,
        sum(flow.timeouts for flow in flows + beside),
    )


def ring(make: Make, seed: int, sensor: Sensor = Sensor(), *, kind: str = "cubic") -> Seen:
    """8 hosts reduce 1 MiB by a ring, 14 steps of 128 KiB each, three times; all through the one queue."""
    net = _net(seed, sensor)
    world, hosts, steps = net.world, 8, 14
    flows = [Flow(Host(net, number, make()), kind) for number in range(hosts)]
    times: list[int] = []

    def reduce() -> None:
        began, left = world.now, [hosts]

        def step(host: int, number: int) -> None:
            """The host has what it needs for this step."""
            if number == steps:
                left[0] -= 1
                if not left[0]:
                    times.append(world.now - began)
                    if len(times) < 3:
                        world.at(world.now + 20 * MS, reduce)
                return
            flows[host].give(128 * 1024, lambda: step((host + 1) % hosts, number + 1))

        for host in range(hosts):
            world.at(world.now + world.random.randrange(MS), step, host, 0)

    reduce()
    while len(times) < 3 and world.now < 60 * SECOND:
        world.run(world.now + SECOND // 10)
    times.sort()
    timeouts = sum(flow.timeouts for flow in flows)
    return Seen(times[len(times) // 2] / MS, times[-1] / MS, net.queue.dropped, timeouts=timeouts)


def shared(make: Make, seed: int, sensor: Sensor = Sensor(), *, others: Make | None = None) -> Seen:
    """Four hosts send, one second later four more; what the first group gets in seconds 3 to 6."""
    net = _net(seed, sensor)
    world = net.world
    first, second = (
        [Flow(Host(net, 10 * group + number, maker())) for number in range(4)]
        for group, maker in enumerate((make, others or make))
    )
    for flow in first:
        world.at(world.random.randrange(MS), flow.give, ENDLESS)
    for flow in second:
        world.at(SECOND + world.random.randrange(MS), flow.give, ENDLESS)
    world.run(3 * SECOND)
    before = [sum(flow.delivered for flow in group) for group in (first, second)]
    passed, dropped = net.queue.passed, net.queue.dropped
    world.run(6 * SECOND)
    one, other = (
        sum(flow.delivered for flow in group) - was for group, was in zip((first, second), before, strict=True)
    )
    used = (net.queue.passed - passed) * SECOND / RATE / (3 * SECOND)
    return Seen(dropped=net.queue.dropped - dropped, used=used, share=2 * one / max(1, one + other))
