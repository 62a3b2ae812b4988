"""Ways behind the first hop, found and judged by agents as shipped: are all met, is the bad one named, and where?

    python bench/hidden_ways.py [--trials 40] [--faults 20] [--left 5] [--loss 0.05]

A lab whose rail hashes flows over inner ways; pairs of hosts probe each other, so several trials run at once. Routers
limit ICMP as Linux does. IPv4 and IPv6 alternate. With `--loss` the rail also loses this share of all packets it
forwards, in each direction (cases *_loss5 and so on), in the labs of the first three figures.

count_right
    share of trials in which the number of ways is told, and right, 10 s after both agents of a pair serve clients.
    Each trial has new source ports, and the seed draws 2 to 6 ways.
named
    share of faults in which the bad way, and no other, is called slow or dead. slow: a queue of up to 32 ms at the
    way's router; dead: the router loses what it forwards.
named_after
    from the return of the command that made the fault.
hop_right
    share of faults whose place is right: slow: behind the second hop; dead: behind the first, as the second, where it
    is, does not answer any more. n: faults.
avoided
    share of new connections that take a slow or a dead way while `ports` are steered (_avoided.py).
left, left_after, left_after_worst, retransmitted, resets
    live IPv6 connections on a way that is called slow or dead, while `labels` are steered: share that sends by another
    way within a second, and after how long; segments retransmitted per fault, and connections reset (_left.py).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from _agents import configure, start_agent, stop, wait_serving
from _avoided import avoided
from _common import emit, median, note, wait_until
from _left import left

from pytools import directories
from pytools.ipc.bus import Client
from pytools.lab import Host, Lab
from pytools.signals import PathWay

PAIRS: Final = 4
WITHIN_S, FOLLOWED_S, HEALED_WITHIN_S = 10.0, 75.0, 90.0
REFILL_S: Final = 6.0  # in which routers may answer six times again
RATE, QUEUE_BYTES, LOAD = "10mbit", 40_000, "11mbit"
FAULTY_WAYS: Final = 4
HOP: Final = {"slow": 2, "dead": 1}
BAD: Final = {"slow", "dead", "lossy"}


@dataclass
class Pair:
    """Two hosts, of which the first looks for ways to the second."""

    lab: Lab
    hosts: tuple[Host, Host]
    family: int
    agents: list[subprocess.Popen[str]] = field(default_factory=list)
    client: Client | None = None
    known: dict[int, PathWay] = field(default_factory=dict)

    def prepare(self) -> None:
        """Let each probe the other alone, by one address."""
        for own, other in (self.hosts, self.hosts[::-1]):
            address = other.service if self.family == 4 else other.service6
            peers = [{"name": other.name, "address": address, "clock": "shared"}]
            configure(own, lambda config, peers=peers: config.update(peers=peers))  # type: ignore[misc]

    def start(self) -> None:
        self.agents = [start_agent(self.lab, host) for host in self.hosts]

    def listen(self) -> None:
        for host in self.hosts:
            wait_serving(host)
        self.client, self.known = Client(directories.agent_socket(self.hosts[0].netns), frozenset({"path_way"})), {}

    def hear(self) -> dict[int, PathWay]:
        """The newest of each way."""
        assert self.client is not None
        for each in self.client.read():
            if isinstance(each, PathWay):
                self.known[each.way] = each
        return self.known

    def stop(self) -> None:
        if self.client is not None:
            self.client.close()
        for agent in self.agents:
            stop(agent)

    def router(self, way: int) -> str:
        """By which a way of the rail answers."""
        port = self.lab.rails[0].inner[way - 1].ports[self.hosts[0].number - 1]
        return port.address if self.family == 4 else port.address6

    def bad(self) -> dict[str, PathWay]:
        """The ways that are called bad, by router."""
        return {each.router: each for each in self.hear().values() if each.state in BAD}

    def all_healthy(self, ways: int) -> bool:
        return [each.state for each in self.hear().values()] == ["healthy"] * ways


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--left", type=int, default=5)
    parser.add_argument("--loss", type=float, default=0.0)
    wanted = parser.parse_args()
    loss: float = wanted.loss
    suffix = f"_loss{100 * loss:g}" if loss else ""
    if wanted.trials or wanted.faults:
        with lab_of(2) as pairs, running(pairs):  # compiles what is not in the cache
            wait_until(lambda: all(pair.hear() for pair in pairs), "all agents measure", HEALED_WITHIN_S)
    if wanted.trials:
        seeds = range(-(-wanted.trials // (2 * PAIRS)))
        right = [each for seed in seeds for each in count(seed, loss)][: wanted.trials]
        emit("hidden_ways", "count_right", sum(right) / len(right), "share", "higher", case=suffix[1:], n=len(right))
    if wanted.faults:
        with lab_of(FAULTY_WAYS, loss) as pairs, running(pairs):
            for case in HOP:
                tell(case + suffix, faults(pairs, case, wanted.faults, loss))
        avoided("hidden_ways", loss, suffix)
    if wanted.left:
        left("hidden_ways", wanted.left)


@contextlib.contextmanager
def lab_of(ways: int, loss: float = 0.0) -> Iterator[list[Pair]]:
    """A lab with so many ways, which loses this share of packets, and its pairs of hosts."""
    name = f"bench-ways-{os.getpid()}"
    with Lab.up(name, hosts=2 * PAIRS, rails=1, rate="100mbit", ipv6=True, inner=ways) as lab:
        pairs = [Pair(lab, tuple(lab.hosts[2 * place : 2 * place + 2]), 4 + 2 * (place % 2)) for place in range(PAIRS)]  # type: ignore[arg-type]
        for pair in pairs:
            pair.prepare()
        if loss:
            lab.lose(1, loss)
        yield pairs


@contextlib.contextmanager
def running(pairs: Sequence[Pair]) -> Iterator[None]:
    """The agents of these pairs serve clients."""
    try:
        for pair in pairs:
            pair.start()
        for pair in pairs:
            pair.listen()
        yield
    finally:
        for pair in pairs:
            pair.stop()


def count(seed: int, loss: float) -> list[bool]:
    """Two trials of every pair: whether the number of ways was told in time, and right."""
    ways = random.Random(seed).randint(2, 6)
    found = []
    with lab_of(ways, loss) as pairs:
        for _ in range(2):
            with running(pairs):
                began = time.monotonic()
                while time.monotonic() - began < WITHIN_S:
                    told = [{each.ways for each in pair.hear().values()} for pair in pairs]
                    time.sleep(0.05)
            found += [each == {ways} for each in told]
            note(f"seed {seed}: {ways} ways, told {told}")
            time.sleep(REFILL_S)
    return found


@dataclass
class Fault:
    """What was told of one."""

    named_s: float | None
    hop_right: bool
    others: bool  # whether anything else was called bad


def faults(pairs: Sequence[Pair], case: str, wanted: int, loss: float) -> list[Fault]:
    """Hurt one way of each pair, again and again."""
    drawn, found = random.Random(case), list[Fault]()
    while len(found) < wanted:
        for pair in pairs:
            wait_until(lambda pair=pair: pair.all_healthy(FAULTY_WAYS), "all ways are healthy", HEALED_WITHIN_S)  # type: ignore[misc]
        time.sleep(REFILL_S)
        began, hurt = [], []
        for pair in pairs:
            source, sink = (host.number for host in pair.hosts)
            way = drawn.randint(1, FAULTY_WAYS)
            if case == "slow":
                pair.lab.congest(1, RATE, QUEUE_BYTES, toward=sink, inner=way)
                pair.lab.load(1, LOAD, toward=sink, inner=way)
            else:
                pair.lab.blackhole(1, (source, sink), inner=way)
            began.append(time.monotonic())
            hurt.append(pair.router(way))
        found += follow(pairs, case, hurt, began)
        pairs[0].lab.heal()
        if loss:
            pairs[0].lab.lose(1, loss)
        note(f"{case}: {found[-len(pairs) :]}")
    return found[:wanted]


def follow(pairs: Sequence[Pair], case: str, hurt: Sequence[str], began: Sequence[float]) -> list[Fault]:
    """What is told of the faults until each is named, and placed or a while has passed."""
    named: list[float | None] = [None] * len(pairs)
    hops: list[Any] = [None] * len(pairs)
    others = [False] * len(pairs)
    until = time.monotonic() + FOLLOWED_S
    while time.monotonic() < until and not all(hop is not None for hop in hops):
        for place, pair in enumerate(pairs):
            bad = pair.bad()
            others[place] = others[place] or bool(bad.keys() - {hurt[place]})
            told = bad.get(hurt[place])
            if told is not None and told.state == case:
                named[place] = named[place] or time.monotonic() - began[place]
                hops[place] = told.sick_hop if hops[place] is None else hops[place]
        time.sleep(0.05)
    return [Fault(*each) for each in zip(named, [hop == HOP[case] for hop in hops], others, strict=True)]


def tell(case: str, found: Sequence[Fault]) -> None:
    """The figures of one kind of fault."""
    named = [each.named_s for each in found if each.named_s is not None]
    right = sum(each.named_s is not None and not each.others for each in found)
    emit("hidden_ways", "named", right / len(found), "share", "higher", case=case, n=len(found))
    if named:
        emit("hidden_ways", "named_after", median(named), "s", "lower", case=case, n=len(named))
    hops = sum(each.hop_right for each in found)
    emit("hidden_ways", "hop_right", hops / len(found), "share", "higher", case=case, n=len(found))


if __name__ == "__main__":
    main()
