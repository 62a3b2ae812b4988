"""One trial of the elephants' benchmark: live TCP over the rails of a lab, one rail cut, and what came of it.

Goodput is what the receiver's kernel had received in order, by connection, every 50 ms. Times are CLOCK_MONOTONIC
nanoseconds, rates bits per second of payload.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import msgspec
import yaml
from _common import iperf3_server, until_left, wait_until
from fair_rates import fair_rates

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.kernel.netlink.sockdiag import Diagnostics
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.signals import Act, ProbeSamples, TcpFlow
from steering.demo.traffic import established_resets
from steering.flows.maxmin import worst_ratio

RATE_BPS, CUT_BPS, FLOWS = 100_000_000, 10_000_000, 8
PAYLOAD: Final = 1448 / 1514  # of a full Ethernet frame, with timestamps
SECOND: Final = 1_000_000_000
POLICY: Final = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: move-elephants
    when: {signal: queueing_delay, quantile: p50, above: 15ms, for: 20ms, clear_below: 8ms}
    then: {pin: {flows: {min_rate: 2mbit, at_most: 64}, gain: 0.1, lease: 10s}}
"""
_EVERY_S: Final = 0.05
_PORT: Final = 5201


@dataclass
class Heard:
    """What the sending host's agent told, and the acts."""

    rail: dict[int, str] = field(default_factory=dict)  # by local port, as it was at the last look
    told: list[tuple[int, int, str]] = field(default_factory=list)  # at, port, interface
    probes: list[tuple[int, str, float | None]] = field(default_factory=list)  # sent, interface, one-way delay
    measured: set[str] = field(default_factory=set)
    acts: list[Act] = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    """What one trial found."""

    cut_ns: int
    cut_rail: str
    start: Mapping[int, str]  # interface of each flow when the rail was cut
    end: Mapping[int, str]  # and at the end
    acts: Sequence[Act]
    samples: Sequence[tuple[int, Mapping[int, int]]]  # bytes received in order, by the sender's port
    probes: Sequence[tuple[int, str, float | None]]
    resets: int
    rails: int

    # ---- placing: by the true rates of the rails ----

    def capacities(self) -> dict[str, float]:
        """What each rail carries after the cut."""
        every = {f"rail{number}": RATE_BPS * PAYLOAD for number in range(1, self.rails + 1)}
        return every | {self.cut_rail: CUT_BPS * PAYLOAD}

    def optimum(self) -> list[float]:
        """The max-min fair optimum of these many greedy flows, in rising order."""
        return best_of(list(self.capacities().values()), len(self.start))

    def placing(self, after_ns: int) -> list[float]:
        """The fair rates, in rising order, that the placing so long after the cut gives, by the acts until then."""
        where = list(self.start.values())
        for act in self.acts:
            done = act.outcome == "applied" and act.actuator == "pin"
            if done and (act.acknowledged_ns or 0) <= self.cut_ns + after_ns:
                where = _counted(act.after)
        return rates_of(self.capacities(), where)

    def placed_worst(self, after_ns: int) -> float:
        """`worst_ratio` of these to the optimum."""
        return worst_ratio(self.placing(after_ns), self.optimum())

    def placed_share(self, after_ns: int) -> float:
        """Sum of min(rate, optimum's rate) over the sum of the optimum's, by rank."""
        best = self.optimum()
        return sum(map(min, self.placing(after_ns), best)) / sum(best)

    def moved(self) -> int:
        """Moves that were made: one for each time a flow was pinned elsewhere."""
        return sum(_pinned(act) for act in self.acts if act.outcome == "applied" and act.actuator == "pin")

    def fewest(self, enough: float = 0.9) -> int:
        """The fewest moves that make a placing at least so good."""
        return fewest_moves(self.capacities(), list(self.start.values()), self.optimum(), enough)

    def acted_ns(self) -> tuple[int, int] | None:
        """First and last act, after the cut."""
        times = [act.acknowledged_ns - self.cut_ns for act in self.acts if act.acknowledged_ns is not None]
        return (min(times), max(times)) if times else None

    # ---- goodput: what arrived ----

    def goodput(self, from_ns: int, to_ns: int) -> list[float]:
        """Of each flow between two times after the cut, in rising order."""
        first, last = self._at(from_ns), self._at(to_ns)
        seconds = (last[0] - first[0]) / 1e9
        return sorted(8 * (last[1].get(port, 0) - first[1].get(port, 0)) / seconds for port in self.start)

    def _at(self, after_ns: int) -> tuple[int, Mapping[int, int]]:
        return min(self.samples, key=lambda sample: abs(sample[0] - self.cut_ns - after_ns))

    def total_ratio(self, from_ns: int, to_ns: int) -> float:
        """What all got of what the optimum gives."""
        return sum(self.goodput(from_ns, to_ns)) / sum(self.optimum())

    def fair_ratio(self, from_ns: int, to_ns: int) -> float:
        """Sum of min(rate, fair rate) over the sum of fair rates, both in rising order."""
        best = self.optimum()
        return sum(map(min, self.goodput(from_ns, to_ns), best)) / sum(best)

    def reached_ns(self, share: float, window_ns: int) -> int | None:
        """When the total of a window first was this share of the optimum, after a window in which it was not."""
        below = False
        for at_ns, _ in self.samples:
            after = at_ns - self.cut_ns
            if after < window_ns:
                continue
            if self.total_ratio(after - window_ns, after) < share:
                below = True
            elif below:
                return after
        return None if below else 0

    def mice(self, from_ns: int, to_ns: int) -> list[float]:
        """One-way delays of the probes on the healthy rails, between two times after the cut."""
        return [
            delay
            for sent, interface, delay in self.probes
            if delay is not None and interface != self.cut_rail and from_ns <= sent - self.cut_ns < to_ns
        ]


def _counted(after: Mapping[str, int]) -> list[str]:
    """An interface for each flow of an act; a member is named "10.1.1.1 dev rail1"."""
    return [name.rpartition(" ")[2] for name, count in after.items() for _ in range(count)]


def _pinned(act: Act) -> int:
    before, after = act.before, act.after
    return sum(max(0, after[name] - before.get(name, 0)) for name in after)


def rates_of(capacities: Mapping[str, float], where: Sequence[str]) -> list[float]:
    """The fair rates of greedy flows on these rails, in rising order."""
    rates: list[float] = []
    for name, capacity in capacities.items():
        rates += fair_rates(capacity, [float("inf")] * where.count(name))
    return sorted(rates)


def best_of(capacities: Sequence[float], flows: int) -> list[float]:
    """The best of all ways to spread greedy flows, by every count on every rail."""
    best: list[float] = []
    for counts in _spreads(len(capacities), flows):
        rates = sorted(c / n for c, n in zip(capacities, counts, strict=True) for _ in range(n))
        best = max(best, rates)
    return best


def fewest_moves(capacities: Mapping[str, float], start: Sequence[str], best: Sequence[float], enough: float) -> int:
    """The fewest flows that have to change rails."""
    names = list(capacities)
    found = []
    for counts in _spreads(len(names), len(start)):
        where = [name for name, count in zip(names, counts, strict=True) for _ in range(count)]
        if worst_ratio(rates_of(capacities, where), best) >= enough - 1e-9:
            found.append(sum(max(0, n - start.count(name)) for name, n in zip(names, counts, strict=True)))
    return min(found)


def _spreads(rails: int, flows: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(flows + rails - 1), rails - 1):
        edges = (-1, *bars, flows + rails - 1)
        yield tuple(edges[i + 1] - edges[i] - 1 for i in range(rails))


# ---- the lab ----


Steer = Callable[[Lab, Path], contextlib.AbstractContextManager[object]]


def play(rails: int, steer: Steer, work: Path, patience_s: float = 0.0) -> Trial:
    """Build a lab, fill it, cut the rail that most flows are on, and look on for nine seconds.

    With patience, until the first act and two seconds more.
    """
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab.up(f"el{rails}-{time.monotonic_ns() % 10**6}", hosts=2, rails=rails))
        _agents(lab, work)
        heard = stack.enter_context(_listening(lab))
        wait_until(lambda: len(heard.measured) == rails, "every rail is measured", 60.0)
        stack.enter_context(steer(lab, work))
        samples = stack.enter_context(_sampling(lab))
        stack.enter_context(iperf3_server(lambda *words, **more: lab.start(lab.hosts[1], *words, **more)))
        words = ["iperf3", "-c", lab.hosts[1].service, "-B", lab.hosts[0].service, "-P", str(FLOWS), "-t", "180"]
        client = lab.start(lab.hosts[0], [*words, "-C", "cubic"])
        wait_until(lambda: len(_streams(samples)) >= FLOWS, "all flows are up")
        time.sleep(4.0)  # until they share the rails as they do for long
        ports = _streams(samples)
        wait_until(lambda: ports <= heard.rail.keys(), "every flow is told")
        start = {port: heard.rail[port] for port in ports}
        cut = max(sorted(set(start.values())), key=list(start.values()).count)
        resets = [established_resets(host) for host in lab.hosts]
        lab.congest(int(cut.removeprefix("rail")), f"{CUT_BPS}bit")
        cut_ns = time.monotonic_ns()
        if patience_s:
            wait_until(lambda: any(act.actuator == "pin" for act in heard.acts), "a flow is moved", patience_s)
            time.sleep(2.0)
        else:
            time.sleep(9.2)
        if client.poll() is not None:
            raise SwerveError("iperf3 ended before its time")
        after = [established_resets(host) for host in lab.hosts]
        end = {port: heard.rail[port] for port in ports}
        return Trial(
            cut_ns,
            cut,
            start,
            end,
            list(heard.acts),
            [(at, {port: got for port, got in each.items() if port in ports}) for at, each in samples],
            list(heard.probes),
            sum(after) - sum(resets),
            rails,
        )


def _agents(lab: Lab, work: Path) -> None:
    for host in lab.hosts:
        file = directories.default_config(host.netns)
        settings = yaml.safe_load(file.read_text())
        settings |= {"probe": settings.get("probe", {}) | {"interval": "10ms"}}
        file.write_text(yaml.safe_dump(settings))
        log = (work / f"{host.name}.log").open("w")
        lab.start(host, [sys.executable, "-m", "steering.cli", "agent", "-n", host.netns], stdout=log, stderr=log)
    for host in lab.hosts:
        wait_until(functools.partial(_serves, host.netns), f"the agent of {host.name} is up", 60.0)


def _serves(netns: str) -> bool:
    try:
        Client(directories.agent_socket(netns), frozenset()).close()
    except SwerveError:
        return False
    return True


@contextlib.contextmanager
def _listening(lab: Lab) -> Iterator[Heard]:
    heard, stop = Heard(), threading.Event()

    def listen() -> None:
        with Client(
            directories.agent_socket(lab.hosts[0].netns), frozenset({"tcp_flow", "probe_samples", "act"})
        ) as agent:
            while not stop.is_set():
                signal = agent.next(0.1)
                if isinstance(signal, TcpFlow) and signal.remote_port == _PORT:
                    heard.rail[signal.local_port] = signal.interface
                    heard.told.append((signal.at_ns, signal.local_port, signal.interface))
                elif isinstance(signal, ProbeSamples):
                    heard.measured.add(signal.path.interface)
                    for sent, forward in zip(signal.sent_ns, signal.forward_ns, strict=True):
                        heard.probes.append((sent, signal.path.interface, forward))
                elif isinstance(signal, Act):
                    heard.acts.append(signal)

    with until_left(listen, stop.set):
        yield heard


@contextlib.contextmanager
def _sampling(lab: Lab) -> Iterator[list[tuple[int, dict[int, int]]]]:
    """What each connection of the receiver has received so far, every 50 ms, from socket diagnostics."""
    samples: list[tuple[int, dict[int, int]]] = []
    stop = threading.Event()

    def sample() -> None:
        with inside(lab.hosts[1].netns):
            sockets = Diagnostics()
        while not stop.wait(_EVERY_S):
            now = time.monotonic_ns()
            found = {
                each.remote_port: each.info.received_bytes or 0
                for each in sockets.sockets()
                if each.local_port == _PORT and each.info is not None
            }
            samples.append((now, found))

    with until_left(sample, stop.set):
        yield samples


def _streams(samples: list[tuple[int, dict[int, int]]]) -> set[int]:
    """Ports of the connections that carry data: the control connection's few bytes do not count."""
    return {port for port, got in samples[-1][1].items() if got > 100_000} if samples else set()


# ---- who acts ----


@contextlib.contextmanager
def nobody(_lab: Lab, _work: Path) -> Iterator[None]:
    """Nobody acts."""
    yield


@contextlib.contextmanager
def small_loop(lab: Lab, work: Path) -> Iterator[None]:
    """The engine and its hands alone: no weights, no guardian."""
    policy = work / "policy.yaml"
    policy.write_text(POLICY)
    script = Path(__file__).with_name("_elephants_loop.py")
    host = lab.hosts[0]
    with (work / "loop.log").open("w") as log:
        process = lab.start(
            host, [sys.executable, str(script), host.netns, str(policy)], stdout=subprocess.PIPE, stderr=log
        )
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise SwerveError(f"the loop did not start: {(work / 'loop.log').read_text()}")
    with Client(directories.agent_socket(host.netns), frozenset()) as agent:
        lines = process.stdout

        def forward() -> None:
            for line in lines:
                agent.publish(msgspec.json.decode(line, type=Act))

        def end() -> None:
            process.terminate()
            process.wait()

        with until_left(forward, end):
            yield


@contextlib.contextmanager
def command(lab: Lab, work: Path) -> Iterator[None]:
    """The command that people use."""
    policy = work / "policy.yaml"
    policy.write_text(POLICY)
    host = lab.hosts[0]
    words = ["steer", "run", "--apply", "--policy", str(policy), "-n", host.netns]
    with (work / "controller.log").open("w") as log:
        process = lab.start(host, [sys.executable, "-m", "steering.cli", *words], stdout=log, stderr=log)
    try:
        with Client(directories.agent_socket(host.netns), frozenset({"path_state"})) as agent:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline and process.poll() is None:
                state = agent.next(0.5)
                if state is not None and getattr(state, "state", "") == "healthy":
                    break
            else:
                raise SwerveError(f"the controller did not come up: {(work / 'controller.log').read_text()}")
        yield
    finally:
        process.terminate()
        process.wait()


def said(trial: Trial) -> str:
    """A trial in one line of JSON, for the log."""
    return json.dumps(
        {
            "start": sorted(trial.start.values()),
            "cut": trial.cut_rail,
            "end": sorted(trial.end.values()),
            "acts_ms": [round((a.acknowledged_ns - trial.cut_ns) / 1e6) for a in trial.acts if a.acknowledged_ns],
            "moves": trial.moved(),
            "fewest": trial.fewest(),
            "placed_1s": round(trial.placed_worst(SECOND), 3),
            "placed": round(worst_ratio(rates_of(trial.capacities(), list(trial.end.values())), trial.optimum()), 3),
            "total_1s": round(trial.total_ratio(SECOND, 2 * SECOND), 3),
            "fair_1s": round(trial.fair_ratio(SECOND, 2 * SECOND), 3),
            "fair_1_4s": round(trial.fair_ratio(SECOND, 4 * SECOND), 3),
            "reached_ms": None if (r := trial.reached_ns(0.9, SECOND // 5)) is None else round(r / 1e6),
            "resets": trial.resets,
            "probes": [len(trial.probes), sum(each[2] is None for each in trial.probes)],
            "load": os.getloadavg()[0],
        }
    )
