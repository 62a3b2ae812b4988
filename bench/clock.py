"""Clocks of eight lab hosts against the truth: idle, and with bursty TCP both ways on 40 % and 90 % of every port.

Each host has a virtual clock (offset within 1 s, drift within 30 ppm, wander), real packets, real queues. The peer is
the classic filter of NTP on the same stamps of the same run. Then a clock is stepped by 10 ms, and one path of many
gets 200 us longer one way.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import numpy as np
from _clock_truth import Truth
from _common import cpu_s, emit, note, resident_bytes, wait_until

from pytools import directories
from pytools.config import Clocks
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.lab.fabric import Lab
from pytools.lab.topology import Host
from pytools.signals import AnySignal, Clock, PathDelay, ProbeSamples

HOSTS, RAILS, RATE = 8, 1, "100mbit"
SEED = 7
PHASE_S, SETTLING_S = 200.0, 8.0
LIFE_NS = int(Clocks().round_ms * 1e6)  # of an estimate: until the next one comes
STEP_NS, STEPPED = 10_000_000, 5  # of which host
EXTRA_US, LONGER = 200.0, (4, 5)
LIMITS = {"idle": 50, "load40": 150, "load90": 500}
SHARES = {"idle": 0.0, "load40": 0.4, "load90": 0.9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--case", choices=LIMITS, action="append", help="only this load; may be given again")
    parser.add_argument("--faults", action="store_true", help="only the step and the longer path")
    parser.add_argument("--rails", type=int, default=RAILS)
    wanted = parser.parse_args()
    phase_s = PHASE_S / (10 if wanted.quick else 1)
    name = f"bench-clock-{os.getpid()}"
    with Lab.up(name, hosts=HOSTS, rails=wanted.rails, rate=RATE, clocks=SEED) as lab:
        agents = [
            lab.start(host, [sys.executable, "-m", "steering.cli", "agent", "-n", host.netns], stderr=None)
            for host in lab.hosts
        ]
        with Watch(lab.hosts[0], {"clock", "probe_samples"}) as watch:
            settle(watch)
            cases = [] if wanted.faults else wanted.case or list(SHARES)
            for case, share in ((case, SHARES[case]) for case in cases):
                before = cpu_s(agents[0].pid)
                for rail in lab.rails if share else ():
                    lab.bursts(rail.number, share, seed=SEED)
                watch.read_for(SETTLING_S)
                sent = sum(lab.sent_bytes().values())
                began = time.monotonic()
                phase(lab, watch, case, phase_s)
                spent = time.monotonic() - began
                rate = (sum(lab.sent_bytes().values()) - sent) * 8 / spent / 1e6 / len(lab.sent_bytes())
                spent_cpu = (cpu_s(agents[0].pid) - before) / (spent + SETTLING_S)
                note(f"{case}: {rate:.0f} Mbit/s a port, first agent {spent_cpu:.1%} of a core")
                lab.heal()
            emit("agent", "resident", resident_bytes(agents[0].pid) / 1e6, "MB", "lower", case="clocks")
            if any(agent.poll() is not None for agent in agents):
                raise SwerveError("an agent died", "start it by hand to see why")
        step(lab)
        longer(lab)


class Watch:
    """A subscription to the agent of one host."""

    def __init__(self, host: Host, types: set[str]) -> None:
        self._client: list[Client] = []
        socket = directories.agent_socket(host.netns)

        def connected() -> bool:
            try:
                self._client.append(Client(socket, frozenset(types)))
            except SwerveError:  # nobody serves there yet
                return False
            return True

        wait_until(connected, f"the agent of {host.name} serves", 60)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._client[0].close()

    def read_for(self, seconds: float) -> list[AnySignal]:
        """Everything that arrives within this time."""
        return self.read_until(lambda _: False, seconds)

    def read_until(self, enough: Callable[[AnySignal], bool], seconds: float) -> list[AnySignal]:
        """Everything up to the first signal that is enough."""
        signals: list[AnySignal] = []
        for signal in self._client[0].within(seconds):
            signals.append(signal)
            if enough(signal):
                break
        return signals


def settle(watch: Watch) -> None:
    """Wait until all clocks are known against one."""
    known: set[str] = set()

    def all_known(signal: AnySignal) -> bool:
        if isinstance(signal, Clock) and signal.reference == "h1" and signal.state == "synchronised":
            known.add(signal.of)
        return len(known) == HOSTS

    watch.read_until(all_known, 60)
    if len(known) < HOSTS:
        raise SwerveError(f"after 60 s only these clocks are known: {sorted(known)}")


def phase(lab: Lab, watch: Watch, case: str, seconds: float) -> None:
    """Judge what is told meanwhile."""
    signals = watch.read_for(seconds)
    truth = Truth({host.name: lab.clock(host) for host in lab.hosts})
    errors = truth.judge((each for each in signals if isinstance(each, Clock)), LIFE_NS)
    ntp = np.abs(truth.ntp_errors(each for each in signals if isinstance(each, ProbeSamples)))
    n, p99 = len(errors.errors_ns), errors.percentile(99)
    emit("clock", "offset_error_p99", p99, "ns", "lower", case=case, n=n,
         peer="ntp_filter", peer_value=float(np.percentile(ntp, 99)))  # fmt: skip
    emit("clock", "offset_error_p50", errors.percentile(50), "ns", "lower", case=case, n=n)
    emit("clock", "offset_error_max", errors.percentile(100), "ns", "lower", case=case, n=n)
    emit("clock", "bound_p50", float(np.median(errors.bounds_ns)), "ns", "lower", case=case, n=n)
    emit("clock", "coverage", errors.coverage(), "share", "higher", case=case, n=n)
    emit("clock", "hard_coverage", errors.hard_coverage(), "share", "higher", case=case, n=n)
    others = [each for each in signals if isinstance(each, Clock) and each.of != each.reference]
    known = sum(each.state == "synchronised" for each in others) / max(1, len(others))
    emit("clock", "known", known, "share", "higher", case=case, n=len(others))
    note(f"{case}: p99 {p99:.0f} ns (bar {LIMITS[case]}), filter {np.percentile(ntp, 99):.0f} ns over {len(ntp)}")


def step(lab: Lab) -> None:
    """Step one clock, and see when it is noticed and whether a wrong delay was ever told."""
    stepped = lab.hosts[STEPPED - 1]
    with Watch(lab.hosts[0], {"path_delay"}) as watch:
        watch.read_for(3)
        at_ns = lab.step_clock(stepped, STEP_NS)
        signals = watch.read_for(8)
    of_host = [each for each in signals if isinstance(each, PathDelay) and each.path.destination == stepped.name]
    doubted = [each.at_ns for each in of_host if each.at_ns >= at_ns and each.clock == "free_running"]
    facts = [
        owd
        for each in of_host
        if each.at_ns >= at_ns and each.clock != "free_running"
        for way in (each.forward, each.reverse)
        for owd in (way.owd_min_ns, way.owd_p50_ns, way.owd_p99_ns)
        if owd is not None
    ]
    again = [each.at_ns for each in of_host if doubted and each.at_ns > doubted[0] and each.clock == "synchronised"]
    if not doubted or not again:
        raise SwerveError(f"the step was {'not noticed' if not doubted else 'not got over'} within 8 s")
    emit("clock", "step_noticed", (doubted[0] - at_ns) / 1e9, "s", "lower")
    emit("clock", "step_recovered", (again[0] - at_ns) / 1e9, "s", "lower")
    wrong = sum(owd > STEP_NS // 2 for owd in facts)
    emit("clock", "step_wrong_facts", wrong, "delays", "lower", n=len(facts))


def longer(lab: Lab) -> None:
    """Make one path asymmetric, and see how far that moves the clocks."""
    source, destination = LONGER
    with Watch(lab.hosts[0], {"clock"}) as watch:
        watch.read_for(2)
        lab.delay(1, source, destination, EXTRA_US)
        watch.read_for(SETTLING_S)
        signals = watch.read_for(20)
    lab.heal()
    truth = Truth({host.name: lab.clock(host) for host in lab.hosts})
    told = [each for each in signals if isinstance(each, Clock)]
    for host in lab.hosts[1:]:
        of_host = truth.judge((each for each in told if each.of == host.name), LIFE_NS)
        outliers = [each.outlier_edges for each in told if each.of == host.name]
        note(f"{host.name}: p99 {of_host.percentile(99):.0f} ns, outlier edges {min(outliers)} to {max(outliers)}")
    errors = truth.judge(told, LIFE_NS)
    emit("clock", "asymmetry_spread", errors.percentile(99), "ns", "lower", n=len(errors.errors_ns))
    emit("clock", "coverage", errors.coverage(), "share", "higher", case="asymmetric", n=len(errors.errors_ns))


if __name__ == "__main__":
    main()
