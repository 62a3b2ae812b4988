"""How soon live IPv6 connections leave a bad hidden way once it is called bad, and what they retransmit meanwhile.

For bench/hidden_ways.py: a lab of two hosts and one rail with four inner ways, whose agents tell `path_way`. Packets
are looked at where they enter the inner routers; `peer` is the same without a controller. The kernel changes no label
of a connection that times out here (`txrehash` is off), so that what is measured is ours: as shipped, connections have
left a dead way before it is called so. Each fault is of the way that most connections take.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))
import ports_kit as kit
import steering_kit
from _avoided import controller
from _common import emit, median, note, wait_until

from pytools import directories
from pytools.ipc.bus import Client
from pytools.lab import Lab, namespaces
from pytools.signals import PathWay
from steering.commands.status import facts_of

CONNECTIONS, WAYS = 16, 4
POLICY = 'version: 1\nmanage: {{destinations: ["{address}/128"]}}\nlabels: {{dwell: 2s}}\n'
IN_TIME_S, FOLLOWED_S, LIMIT_S = 1.0, 5.0, 300.0
_BAD = frozenset({"slow", "lossy", "dead"})


@dataclass
class Case:
    """What became of the connections on bad ways."""

    left_s: list[float] = field(default_factory=list)  # of each that left
    flows: int = 0  # that were on a way as it was called bad
    faults: int = 0
    retransmitted: int = 0  # segments, of all connections
    resets: int = 0

    @property
    def in_time(self) -> float:
        """Share of those that left within a second."""
        return sum(each <= IN_TIME_S for each in self.left_s) / self.flows


def left(bench: str, faults: int) -> None:
    """Emit `left`, `left_after`, `retransmitted` and `resets` for slow and for dead ways."""
    with Lab.up(f"bench-left-{os.getpid()}", hosts=2, rails=1, inner=WAYS, ipv6=True) as lab:
        steering_kit.agents(lab)
        client, server = lab.hosts
        for host in lab.hosts:
            namespaces.set_sysctls(host.netns, {"core/txrehash": 0})
        with (
            kit.Live(client, server, server.service6, CONNECTIONS) as live,
            kit.LiveWays(lab.rails[0], client) as ways,
            Client(directories.agent_socket(client.netns), frozenset({"path_way"})) as agent,
        ):
            trial = _Trial(lab, live, ways, agent)
            wait_until(lambda: len(trial.states()) == WAYS, "ways are found", LIMIT_S)
            kinds = ("slow", "dead")
            unaided = {kind: trial.run(kind, faults) for kind in kinds}
            with controller(client, POLICY.format(address=server.service6)):
                trial.learnt()
                for kind in kinds:
                    _tell(bench, kind, trial.run(kind, faults), unaided[kind])


def _tell(bench: str, case: str, steered: Case, unaided: Case) -> None:
    n = steered.flows
    figures = (
        ("retransmitted", steered.retransmitted / steered.faults, unaided.retransmitted / unaided.faults, "segments"),
        ("resets", steered.resets, unaided.resets, "connections"),
    )
    for name, value, peer, unit in figures:
        emit(bench, name, value, unit, "lower", case=case, peer="unaided", peer_value=peer, n=steered.faults)
    if n:
        peer_value = unaided.in_time if unaided.flows else None  # by then all may have left by themselves
        emit(bench, "left", steered.in_time, "share", "higher", case=case, peer="unaided", peer_value=peer_value, n=n)
    if steered.left_s:
        emit(bench, "left_after", 1e3 * median(steered.left_s), "ms", "lower", case=case, n=n)
        emit(bench, "left_after_worst", 1e3 * max(steered.left_s), "ms", "lower", case=case, n=n)


class _Trial:
    """The lab, and what is known of it."""

    def __init__(self, lab: Lab, live: kit.Live, ways: kit.LiveWays, agent: Client) -> None:
        self._lab, self._live, self._ways, self._agent = lab, live, ways, agent
        self._states: dict[str, PathWay] = {}
        self._client = lab.hosts[0]

    def states(self) -> dict[str, PathWay]:
        """The newest of each way over IPv6, by router."""
        for each in self._agent.read():
            if isinstance(each, PathWay) and ":" in each.path.address and each.router:
                self._states[each.router] = each
        return self._states

    def learnt(self) -> None:
        """Wait until the controller knows where each connection can go."""

        def known() -> bool:
            found = facts_of(self._client.netns, with_paths=False).get("label_ways", [])
            return sum(min(each["known"], each["movable"]) for each in found) == CONNECTIONS

        wait_until(known, "ways of labels are learnt", LIMIT_S)
        note(f"ways of labels are learnt: {facts_of(self._client.netns, with_paths=False).get('label_counts')}")

    def run(self, kind: str, faults: int) -> Case:
        """Hurt the way that most connections take, again and again."""
        case = Case()
        for _ in range(faults):
            self._one(kind, case)
            self._lab.heal()
            wait_until(self._is_well, "all ways are good again", LIMIT_S)
        note(f"{kind}: {case}")
        return case

    def _is_well(self) -> bool:
        avoided = [each["avoided"] for each in facts_of(self._client.netns, with_paths=False).get("label_ways", [])]
        return {each.state for each in self.states().values()} == {"healthy"} and not any(avoided)

    def _one(self, kind: str, case: Case) -> None:
        packets = self._some()  # when, by which way, of which port
        bad = Counter(_last(packets).values()).most_common(1)[0][0]
        router = self._lab.rails[0].inner[bad - 1].ports[0].address6
        retransmitted, failed = self._live.retransmitted(), self._live.failed
        if kind == "slow":
            self._lab.congest(1, "10mbit", 40_000, toward=2, inner=bad)
            self._lab.load(1, "11mbit", toward=2, inner=bad)
        else:
            self._lab.blackhole(1, (1, 2), inner=bad)
        called = list[float]()

        def follow() -> bool:
            packets.extend(self._ways.packets())
            if not called and (told := self.states()[router]).state in _BAD:
                called.append(told.unix_ns / 1e9)
            return bool(called) and time.time() - called[0] > FOLLOWED_S

        wait_until(follow, f"the {kind} way is called bad, and left", LIMIT_S)
        on_it = [port for port, way in _last(packets, called[0]).items() if way == bad]
        case.flows, case.faults = case.flows + len(on_it), case.faults + 1
        case.left_s += [max(0.0, at - called[0]) for port in on_it if (at := _left_at(packets, port, bad)) is not None]
        case.retransmitted += self._live.retransmitted() - retransmitted
        case.resets += self._live.failed - failed

    def _some(self) -> list[tuple[float, int, int]]:
        """Packets of all connections."""
        found: list[tuple[float, int, int]] = []
        self._ways.taken()

        def heard() -> bool:
            found.extend(self._ways.packets())
            return {port for _, _, port in found} == self._live.ports

        wait_until(heard, "all connections are heard of", LIMIT_S)
        return found


def _last(packets: Iterable[tuple[float, int, int]], until: float = math.inf) -> dict[int, int]:
    """The last way of each port before a moment."""
    return {port: way for at, way, port in sorted(packets) if at < until}


def _left_at(packets: Iterable[tuple[float, int, int]], port: int, bad: int) -> float | None:
    """When a port first sent by another way than the bad one, never to come back to it; None: it did not."""
    own = sorted((at, way) for at, way, of in packets if of == port)
    last = max(at for at, way in own if way == bad)
    return next((at for at, _ in own if at > last), None)
