"""Where loss or a queue begins: what the short window says of unanswered probes, against packets of a known fate.

Two paths to one peer, probed every 20 ms, and every 2 ms for a moment once an answer is overdue, as the mesh does.
Packets of one direction of a path keep their order. Answers say which probe by the other path had come in last.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from pytools.config import Peer, Probe, Windows
from pytools.estimators.windows import MISSING
from pytools.signals import Path, PathDelay
from pytools.sources.probing.measurements import Measurements
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.program import NUMBERS
from pytools.sources.probing.sessions import ANSWERED, EXTRA, OUTSTANDING, SINGLE, Sessions

MS = 1_000_000
EVERY_NS, EXTRA_NS, EXTRA_TICKS, LOOK_NS = 20 * MS, 2 * MS, 24, 4 * MS
ONSET_NS, END_NS = 1_000 * MS, 1_400 * MS
ROUTE_NS = 50_000
ABOVE_NS = 5 * MS
THERE, BACK = 0, 1


def nothing(_: int) -> int:
    return 0


class Played(Sessions):
    """Sessions whose probes the test sends and has answered, as `Planner` and `Sender` do; both lead to one peer."""

    def __init__(self, probe: Probe, measured: Measurements) -> None:
        super().__init__(probe, None, measured)
        self._peer[: 2 * probe.flows] = 0

    def send(self, row: int, slot: int, at_ns: int, part: int) -> None:
        self._state[row, slot], self._seq[row, slot] = OUTSTANDING, slot
        self._sent_ns[row, slot], self._part[row, slot] = at_ns, part
        self._there[row, slot] = MISSING

    def answer(self, row: int, slot: int, sent_ns: int) -> None:
        self._state[row, slot] = ANSWERED
        self._answered_ns[row] = max(self._answered_ns[row], sent_ns)

    def waiting_since(self) -> np.ndarray:
        """When the probes left that are not answered."""
        return self._sent_ns[self._state == OUTSTANDING]


@dataclass
class World:
    """Both paths: the queue of each path and direction by time, and the share of packets that each loses."""

    queues: dict[tuple[int, int], Callable[[int], int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    foreign: bool = False  # the peer's answers say nothing of the other path
    seed: int = 1
    flows: int = 1

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        probe = Probe(flows=self.flows)
        self.measured = Measurements("h1", Windows(), probe)
        self.sessions = Played(probe, self.measured)
        ways = [Path("h1", "h2", "10.9.0.2", f"10.{number}.1.1", f"rail{number}") for number in (1, 2)]
        paths = [
            PinnedPath(number, path, Peer("h2", path.address), 4, 100 + number, "10.9.0.1", None, False)
            for number, path in enumerate(ways)
        ]
        self.measured.set_paths(paths, 0)
        self.sent = [0, 0]
        self.busy_ns: dict[tuple[int, int], int] = {}
        self.answers: list[tuple[int, int, int, int, int]] = []  # arrival, path, slot, when sent, forward delay
        self.came: list[list[tuple[int, int]]] = [[], []]  # of each path: when a probe came to the peer, and its slot

    def passes(self, path: int, way: int, at_ns: int) -> int | None:
        """When a packet arrives; None: it is lost."""
        began = at_ns >= ONSET_NS
        if began and self.chance.random() < self.losses.get(path, 0.0):
            return None
        wait = self.queues.get((path, way), nothing)(at_ns) if began else 0
        jitter = int(self.chance.expovariate(1 / 2_000))
        arrival = max(at_ns + ROUTE_NS // 2 + wait + jitter, self.busy_ns.get((path, way), 0))
        self.busy_ns[path, way] = arrival
        return arrival

    def send(self, at_ns: int, extra: bool) -> None:
        for path in (0, 1):
            slot = self.sent[path]
            self.sent[path] += 1
            # All by the first source port.
            self.sessions.send(path * self.flows, slot, at_ns, EXTRA if extra else SINGLE)
            there = self.passes(path, THERE, at_ns)
            back = None if there is None else self.passes(path, BACK, there)
            if there is not None and back is not None:
                self.answers.append((back, path, slot, at_ns, there - at_ns))
            if there is not None:
                self.came[path].append((there, slot))

    def hear(self, now_ns: int) -> None:
        arrived = sorted(each for each in self.answers if each[0] <= now_ns)
        self.answers = [each for each in self.answers if each[0] > now_ns]
        if arrived:  # one read of the ring
            back, rows, _, sent, there = np.array(arrived).T
            for path, slot, sent_ns in zip(rows.tolist(), (each[2] for each in arrived), sent.tolist(), strict=True):
                self.sessions.answer(path * self.flows, slot, sent_ns)
            self.measured.add(rows, np.array([there, back - sent - there]), np.array([sent, back]), back)
        for _, path, slot, sent_ns, there in arrived if not self.foreign else ():
            newest = max((each for at_ns, each in self.came[1 - path] if at_ns < sent_ns + there), default=None)
            row, other = path * self.flows, (1 - path) * self.flows
            told = row * NUMBERS + slot if newest is None else other * NUMBERS + newest
            self.sessions.note_newest(np.array([row]), np.array([sent_ns]), np.array([told]))

    def run(self) -> list[PathDelay]:
        """What is told of the first path from the onset on."""
        told: list[PathDelay] = []
        extra: list[int] = []
        for now_ns in range(0, END_NS, EXTRA_NS):
            if now_ns % EVERY_NS == 0:
                self.send(now_ns, False)
            elif extra and extra[0] <= now_ns:
                extra.pop(0)
                self.send(now_ns, True)
            if now_ns % LOOK_NS:
                continue
            self.hear(now_ns)
            if now_ns < ONSET_NS:
                continue
            overdue = self.sessions.waiting_since()
            begun = not extra and now_ns - ONSET_NS < EVERY_NS + 12 * MS
            if begun and (overdue < now_ns - 10 * MS).any():
                extra = [now_ns + number * EXTRA_NS for number in range(1, EXTRA_TICKS + 1)]
            window = self.measured.short
            found = self.sessions.overtaken(now_ns - window.length_ns)
            signals = self.measured.signals(window, now_ns, 0, False, found)
            told.append(next(signal for signal in signals if signal.path.interface == "rail1"))
        return told

    def late_of_first(self) -> bool:
        """Play it; whether a probe by the first path is known to have come late to the peer."""
        self.run()
        return bool(self.sessions.overtaken(ONSET_NS).late[0])


def called_ns(told: list[PathDelay]) -> int | None:
    """When so many probes were told to have waited on the way there, after the onset."""
    for signal in told:
        if (signal.overtaken_forward_p50_ns or 0) > ABOVE_NS or (signal.forward.queueing_p50_ns or 0) > ABOVE_NS:
            return signal.at_ns - ONSET_NS
    return None


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("paths", [(0, 1), (0,)], ids=["all", "one"])
def test_where_loss_begins_no_queue_is_told(share: float, paths: tuple[int, ...]) -> None:
    called = sum(
        called_ns(World(losses=dict.fromkeys(paths, share), seed=seed).run()) is not None for seed in range(40)
    )
    assert called <= (1 if paths == (0,) and share == 0.5 else 0)


@pytest.mark.parametrize("queue_ms", [10, 65, 256])
@pytest.mark.parametrize("grows", [False, True], ids=["at_once", "grows"])
def test_a_queue_is_told_long_before_its_first_answer(queue_ms: int, grows: bool) -> None:
    def queue(at_ns: int) -> int:
        return min((at_ns - ONSET_NS) // 2, queue_ms * MS) if grows else queue_ms * MS

    for seed in range(10):
        found = called_ns(World({(0, THERE): queue}, seed=seed).run())
        assert found is not None and found <= 100 * MS


@pytest.mark.parametrize("flows", [3, 16])
def test_any_number_of_source_ports_tells_the_same(flows: int) -> None:
    told = [World({(0, THERE): lambda _: 65 * MS}, flows=each).run() for each in (1, flows)]
    assert [each.overtaken_forward_p50_ns for each in told[0]] == [each.overtaken_forward_p50_ns for each in told[1]]
    assert called_ns(told[0]) is not None


@pytest.mark.parametrize("queue_ms", [17, 65, 256])
@pytest.mark.parametrize("foreign", [True, False])
def test_a_queue_on_the_way_back_is_never_told_of_the_way_there(queue_ms: int, foreign: bool) -> None:
    for seed in range(10):
        told = World({(0, BACK): lambda _: queue_ms * MS}, foreign=foreign, seed=seed).run()
        assert called_ns(told) is None
        assert any(signal.overtaken for signal in told), "probes were overtaken"


@pytest.mark.parametrize("grows", [False, True], ids=["at_once", "grows"])
def test_a_queue_on_both_ways_is_told_as_soon(grows: bool) -> None:
    def queue(at_ns: int) -> int:
        return min((at_ns - ONSET_NS) // 2, 65 * MS) if grows else 65 * MS

    for seed in range(10):
        found = called_ns(World({(0, THERE): queue, (0, BACK): queue}, seed=seed).run())
        assert found is not None and found <= 100 * MS


def test_where_the_peer_does_not_say_the_ways_cannot_be_told_apart() -> None:
    told = World({(0, THERE): lambda _: 256 * MS}, foreign=True).run()
    assert all(signal.overtaken_forward_p50_ns is None for signal in told)
    assert any((signal.overtaken_p50_ns or 0) > ABOVE_NS for signal in told)


def test_a_probe_that_came_late_to_the_peer_is_late_before_its_answer_is_back() -> None:
    """Where the first answers wait on the way back, only the answers by the other path show that one was not lost."""

    def queue(at_ns: int) -> int:
        return min((at_ns - ONSET_NS) // 2, 65 * MS)

    assert World({(0, THERE): queue, (0, BACK): lambda _: 256 * MS}).late_of_first()
    assert not World({(0, BACK): lambda _: 256 * MS}).late_of_first()
