"""Clocks and delays between real agents whose clocks disagree, against the truth: idle, loaded, stepped, killed.

One lab for all tests, as agents take seconds to start; each test begins by waiting until all clocks are known, and
leaves the lab as it found it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import support
from lab_truth import EARLIER_NS, Judged, Truth, facts, told_as_facts
from support import SWERVE

from pytools import directories, signals
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.lab import Lab
from pytools.lab.topology import Host
from pytools.signals import AnySignal, Clock, ClockEdge, PathDelay, ProbeSamples, Self

SEED = 5
STEP_NS = 10_000_000
FEW_US = 5_000
PATIENCE_S = 60.0
TYPES = frozenset({"clock", "path_delay", "probe_samples"})


@dataclass
class Watched:
    """What one host's agent has told since the last `forget`."""

    host: Host
    client: Client
    told: list[AnySignal] = field(default_factory=list)
    clocks: dict[str, Clock] = field(default_factory=dict)  # the last word on each
    delays: dict[str, PathDelay] = field(default_factory=dict)  # the last word on each path, by destination
    dropped: int = 0

    def read(self) -> None:
        for signal in (new := self.client.read()):
            if isinstance(signal, Clock):
                self.clocks[signal.of] = signal
            elif isinstance(signal, PathDelay) and signal.forward.samples:
                self.delays[signal.path.destination] = signal
        self.told += new
        if self.client.dropped > self.dropped:  # too slow to read all that was told: judge what comes from now on
            self.dropped = self.client.dropped
            self.told = self.of(Clock)

    def forget(self) -> None:
        """Begin anew, but for the probes that the next windows reach back to."""
        newest_ns = max((signal.at_ns for signal in self.told), default=0)
        self.told = [each for each in self.of(ProbeSamples) if each.at_ns > newest_ns - 2 * EARLIER_NS]
        self.clocks.clear()
        self.delays.clear()

    def of(self, kind: type) -> list:  # type: ignore[type-arg]
        return [each for each in self.told if isinstance(each, kind)]


class Agents:
    """The agents of a lab, and what they tell."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.watched: dict[str, Watched] = {}

    def start(self, host: Host) -> None:
        self.processes[host.name] = self.lab.start(host, [*SWERVE, "agent", "-n", host.netns])

    def watch(self, host: Host) -> None:
        socket = directories.agent_socket(host.netns)

        def connected() -> Client | None:
            with contextlib.suppress(SwerveError):
                return Client(socket, TYPES)
            return None

        client = support.wait_until(connected, PATIENCE_S, f"the agent of {host.name} serves")
        assert client is not None
        self.watched[host.name] = Watched(host, client)

    def kill(self, host: Host) -> None:
        self.watched.pop(host.name).client.close()
        process = self.processes.pop(host.name)
        process.kill()
        process.wait()

    def forget(self) -> None:
        for each in self.watched.values():
            each.read()
            each.forget()

    def until(self, condition: Callable[[], object], what: str, deadline_s: float = PATIENCE_S) -> None:
        def held() -> object:
            for each in self.watched.values():
                each.read()
            return condition()

        support.wait_until(held, deadline_s, what, every_s=0.05)

    def know(self, reference: str, *but: str) -> bool:
        """Whether every agent's last word is that all clocks (but some) are synchronised against this one."""
        wanted = {host.name for host in self.lab.hosts} - set(but)
        for each in self.watched.values():
            fine = {
                of for of, clock in each.clocks.items() if (clock.state, clock.reference) == ("synchronised", reference)
            }
            if not wanted <= fine:
                return False
        return True

    def have_facts(self, *but: str) -> bool:
        """Whether the last word on every path (but those of some hosts) is a one-way delay."""
        for name, each in self.watched.items():
            wanted = {host.name for host in self.lab.hosts} - {name, *but}
            if not all(other in each.delays and facts(each.delays[other].forward) for other in wanted):
                return False
        return True

    def settle(self) -> None:
        """Begin anew, with all clocks known against the first host's."""
        self.until(lambda: self.know("h1") and self.have_facts(), "all clocks are known against h1's")
        self.forget()

    def tell_for(self, rounds: int) -> None:
        """Until every agent has told so many rounds of clocks (half a second each)."""
        peers = len(self.lab.hosts)

        begun = {name: len(each.of(Clock)) for name, each in self.watched.items()}

        def enough() -> bool:
            return all(len(each.of(Clock)) - begun[name] >= rounds * peers for name, each in self.watched.items())

        self.until(enough, f"{rounds} rounds are told")

    def command(self, host: Host, *words: str) -> list[AnySignal]:
        """What a command prints once, as signals."""
        argv = [*SWERVE, *words, "-j", "-c", "1", "-n", host.netns]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as process:
            try:
                self.until(lambda: process.poll() is not None, f"{words} is done")
            finally:
                process.kill()
            assert process.stdout is not None
            lines = process.stdout.read().splitlines()
        assert process.returncode == 0
        return [signals.decode(line) for line in lines]

    def clocks(self) -> list[Clock]:
        return [clock for each in self.watched.values() for clock in each.of(Clock)]

    def wrong_delays(self) -> list[str]:
        """One-way delays that were told and are not true."""
        truth = Truth(self.lab)
        return [
            line for each in self.watched.values() for line in truth.wrong(each.of(PathDelay), each.of(ProbeSamples))
        ]

    def impossible_delays(self) -> list[PathDelay]:
        """Told with a delay below zero."""
        return [
            signal
            for each in self.watched.values()
            for signal in each.of(PathDelay)
            if any(fact < 0 for fact in told_as_facts([signal])) or (signal.round_trip_min_ns or 0) < 0
        ]


@pytest.fixture(scope="module")
def running() -> Iterator[Agents]:
    support.require("root", "bcc", "netns")
    with Lab.up(f"t{os.getpid()}clocks", hosts=4, rails=1, rate="20mbit", clocks=SEED) as lab:
        agents = Agents(lab)
        for host in lab.hosts:
            agents.start(host)
        for host in lab.hosts:
            agents.watch(host)
        yield agents
        for each in agents.watched.values():
            each.client.close()


@pytest.fixture
def agents(running: Agents) -> Agents:
    running.settle()
    return running


def assert_true(judged: Judged, least: int) -> None:
    assert len(judged.errors_ns) >= least
    assert judged.share() >= 0.99, str(judged)
    assert judged.largest() <= FEW_US, str(judged)
    assert judged.impossible == []


def test_all_clocks_are_told_within_their_bounds(agents: Agents) -> None:
    agents.tell_for(8)
    truth = Truth(agents.lab)
    assert_true(truth.clocks(agents.clocks()), least=4 * 8 * 3)
    for name, each in agents.watched.items():
        assert {clock.of for clock in each.of(Clock)} == {"h1", "h2", "h3", "h4"}
        for clock in each.of(Clock):
            assert (clock.host, clock.reference) == (name, "h1")
            assert clock.bound_ns <= clock.hard_bound_ns or clock.of == "h1"
            if clock.of == "h1":
                assert (clock.offset_ns, clock.drift_ppb) == (0, 0.0)
                assert clock.bound_ns <= 20


def test_one_way_delays_are_those_of_the_packets(agents: Agents) -> None:
    agents.tell_for(6)
    truth, minima = Truth(agents.lab), Judged()
    for each in agents.watched.values():
        long = [signal for signal in each.of(PathDelay) if signal.window_ns >= 10**9]
        assert long
        for signal in long:
            met, _ = truth.delays(signal.path, each.of(ProbeSamples))["forward"]
            inside = met.within(signal.at_ns - signal.window_ns, signal.at_ns).least_ns
            if len(inside) >= 20 and signal.forward.owd_min_ns is not None:
                minima.add(signal.forward.owd_min_ns - int(inside.min()), signal.forward.bound_ns)
                assert signal.forward.owd_min_ns > 0
    assert len(minima.errors_ns) >= 12
    assert minima.share() >= 0.9, str(minima)  # a late agent's window may hold other probes than ours
    assert agents.wrong_delays() == []
    assert agents.impossible_delays() == []


def test_both_ends_of_a_path_agree(agents: Agents) -> None:
    """What the one calls forward is the other's reverse; what they say of asymmetry has opposite signs."""
    agents.tell_for(4)
    for one in agents.watched.values():
        for other in agents.watched.values():
            if one is other:
                continue
            there = [each for each in one.of(PathDelay) if each.path.destination == other.host.name]
            back = [each for each in other.of(PathDelay) if each.path.destination == one.host.name]
            mine = [each.asymmetry_ns for each in there if each.asymmetry_ns is not None]
            theirs = [each.asymmetry_ns for each in back if each.asymmetry_ns is not None]
            bounds = [each.asymmetry_bound_ns for each in (*there, *back) if each.asymmetry_bound_ns is not None]
            least = abs(sorted(mine)[len(mine) // 2] + sorted(theirs)[len(theirs) // 2])
            assert least <= 2 * max(bounds)


def test_the_commands_say_what_the_signals_say(agents: Agents) -> None:
    host = agents.lab.hosts[1]
    clocks = [each for each in agents.command(host, "clocks") if isinstance(each, Clock)]
    assert sorted(clock.of for clock in clocks) == ["h1", "h2", "h3", "h4"]
    assert_true(Truth(agents.lab).clocks(clocks), least=6)
    told = [each for each in agents.command(host, "delay") if isinstance(each, PathDelay)]
    assert sorted(each.path.destination for each in told) == ["h1", "h3", "h4"]
    agents.tell_for(1)
    assert Truth(agents.lab).wrong(told, agents.watched[host.name].of(ProbeSamples)) == []
    assert all(each.clock == "synchronised" and each.forward.bound_ns for each in told)
    edges = [each for each in agents.command(host, "clocks", "--edges") if isinstance(each, ClockEdge)]
    assert sorted(each.path.destination for each in edges) == ["h1", "h3", "h4"]


@pytest.mark.parametrize("step_ns", [STEP_NS, -STEP_NS])
def test_a_stepped_clock_is_noticed_and_no_wrong_delay_is_told_meanwhile(agents: Agents, step_ns: int) -> None:
    stepped = agents.lab.hosts[2]
    at_ns = agents.lab.step_clock(stepped, step_ns)

    def touches(signal: PathDelay) -> bool:
        return stepped.name in (signal.path.source, signal.path.destination)

    def of_stepped(each: Watched) -> list[PathDelay]:
        return [signal for signal in each.of(PathDelay) if touches(signal) and signal.at_ns >= at_ns]

    def doubted() -> bool:  # half a second passes before it happens
        return all(any(s.clock == "free_running" for s in of_stepped(each)) for each in agents.watched.values())

    agents.until(doubted, "every agent doubts the stepped clock", 20)
    agents.until(
        lambda: all(
            stepped.name in each.clocks and each.clocks[stepped.name].state == "free_running"
            for each in agents.watched.values()
        ),
        "every agent is told that the stepped clock is free running",
        20,
    )
    agents.until(lambda: agents.know("h1") and agents.have_facts(), "the stepped clock is known again")
    agents.tell_for(2)
    truth = Truth(agents.lab)
    assert agents.wrong_delays() == []
    assert agents.impossible_delays() == []
    for each in agents.watched.values():
        for signal in of_stepped(each):
            assert (signal.clock == "free_running") == (told_as_facts([signal]) == []) or not signal.forward.samples
        others = [signal for signal in each.of(PathDelay) if not touches(signal)]
        disturbed = [signal for signal in others if signal.clock != "synchronised"]
        assert disturbed == [], "a step of one clock is no other's business"
        assert all(clock.state == "synchronised" for clock in each.clocks.values())
        assert_true(truth.clocks(each.clocks.values()), least=6)


def test_when_the_reference_is_killed_the_others_go_on_and_it_comes_back(agents: Agents) -> None:
    first = agents.lab.hosts[0]
    agents.tell_for(2)
    agents.kill(first)
    agents.until(lambda: agents.know("h2", "h1") and agents.have_facts("h1"), "the others go on with h2")
    agents.start(first)
    agents.watch(first)
    agents.until(lambda: agents.know("h1") and agents.have_facts(), "h1 is the reference again")
    assert agents.wrong_delays() == []
    assert agents.impossible_delays() == []
    alive = [each for name, each in agents.watched.items() if name != "h1"]
    truth = Truth(agents.lab)
    for each in alive:
        assert [clock.reference for clock in each.of(Clock)].count("h2") >= 3
        between = [s for s in each.of(PathDelay) if s.path.destination != "h1" and s.forward.samples]
        assert all(s.clock == "synchronised" for s in between), "a change of the reference is nobody's business"
        assert_true(truth.clocks(each.of(Clock)), least=20)


def test_on_loaded_links_the_bounds_still_cover_the_truth(agents: Agents) -> None:
    before = sum(agents.lab.sent_bytes().values())
    agents.lab.bursts(1, 0.6)
    try:
        agents.until(lambda: sum(agents.lab.sent_bytes().values()) > before + 4_000_000, "the links are loaded")
        agents.forget()
        agents.tell_for(12)
        judged = Truth(agents.lab).clocks(agents.clocks())
        assert len(judged.errors_ns) >= 4 * 12 * 3
        assert judged.share() >= 0.99, str(judged)
        assert judged.impossible == []
        assert agents.wrong_delays() == []
        assert agents.impossible_delays() == []
        queueing = [
            signal.forward.queueing_p99_ns or 0 for each in agents.watched.values() for signal in each.of(PathDelay)
        ]
        assert max(queueing) > 1_000_000, "there was no load"
    finally:
        agents.lab.heal()


def test_nothing_was_lost_unseen(agents: Agents) -> None:
    """What other hosts told was understood, and no sample contradicted the clocks but those of the steps."""
    host = agents.lab.hosts[1]
    with Client(directories.agent_socket(host.netns), frozenset({"self"})) as client:
        end = time.monotonic() + 10
        cost = None
        while not isinstance(cost, Self) and time.monotonic() < end:
            cost = client.next(1)
        assert isinstance(cost, Self)
    assert cost.drops["clock_messages_refused"] == 0
    assert cost.failed == {}
