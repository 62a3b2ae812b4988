"""Base delays on a lab with real traffic: a queue that stands for many windows is seen; a longer route settles."""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import time

import pytest
import support
import yaml

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.lab import Lab
from pytools.signals import PathDelay
from steering.demo.observe import Observer

MS = 1_000_000
SECOND = 1_000 * MS
BASE_S = 2
WINDOWS = 6  # for so many of them the queue stands
RATE, LOAD, QUEUE_BYTES = "10mbit", "12mbit", 22_000  # 17 ms
LONGER_US = 9_000
SPREAD_US = 300  # more than a busy machine adds to the smallest round trips
LAB = {"rate": "100mbit"}


def shorten(lab):
    """Let minima reach back a short time."""
    for host in lab.hosts:
        file = directories.default_config(host.netns)
        config = yaml.safe_load(file.read_text())
        config.setdefault("windows", {})["base"] = f"{BASE_S}s"
        file.write_text(yaml.safe_dump(config))


@pytest.fixture
def lab(lab):
    """With minima that reach back a short time."""
    shorten(lab)
    return lab


def of_rail(signals: list[PathDelay], since_ns: int, *hosts: str) -> list[PathDelay]:
    """Windows of the paths over rail 1 that began after a moment, and in which they were measured."""
    return [
        each
        for each in signals
        if each.host in (hosts or ("h1",))
        and each.path.interface == "rail1"
        and each.forward.samples
        and each.at_ns - each.window_ns > since_ns
    ]


def seen_for(observer: Observer, since_ns: int, seconds: float, *hosts: str) -> list[PathDelay]:
    """What is told of rail 1 over so long after a moment."""
    found: list[PathDelay] = []

    def passed() -> bool:
        found.extend(of_rail(observer.take().delays, since_ns, *hosts))
        return bool(found) and found[-1].at_ns - since_ns > seconds * SECOND

    support.wait_until(passed, seconds + 30, f"{seconds:g} s are told of")
    return found


def settled(observer: Observer, longest_s: float, since_ns: int = 0) -> PathDelay:
    """The first window in which rail 1 is known to be idle, which is told of in time."""
    heard: list[PathDelay] = []

    def idle() -> PathDelay | None:
        heard.extend(of_rail(observer.take().delays, since_ns))
        good = [each for each in heard if max(upper(each.forward), upper(each.reverse)) < MS]
        return good[0] if good else None

    return support.wait_until(idle, longest_s, "rail 1 is settled")


def upper(delay) -> int:
    return delay.queueing_p50_ns + delay.queueing_bound_ns


def measured(observer: Observer) -> None:
    """Wait until base delays are known: a window of an idle path."""
    since_ns = time.monotonic_ns()
    seen_for(observer, since_ns, 2 * BASE_S)
    settled(observer, 30)


def test_queues_that_stand_for_many_windows_are_told_as_long_as_they_stand(lab, observer):
    measured(observer)
    lab.congest(1, RATE, QUEUE_BYTES)
    lab.load(1, LOAD)
    since_ns = time.monotonic_ns() + SECOND  # until the queues are full
    told = seen_for(observer, since_ns, WINDOWS * BASE_S)
    for way in ("forward", "reverse"):
        delays = [getattr(each, way) for each in told]
        assert statistics.median(each.owd_p50_ns for each in delays) > 10 * MS, "the load keeps the queue standing"
        for each in delays:  # one clock at both ends, and a cable that takes microseconds
            assert each.owd_p50_ns - each.queueing_p50_ns <= each.queueing_bound_ns + MS
    lab.heal()
    settled(observer, 30)


def started(lab: Lab) -> list[subprocess.Popen[str]]:
    return [lab.start(host, [*support.SWERVE, "agent", "-n", host.netns]) for host in lab.hosts]


def listening(lab: Lab) -> Observer:
    """What both agents publish, as soon as both can be reached."""

    def reached(netns: str) -> bool:
        with contextlib.suppress(SwerveError), Client(directories.agent_socket(netns), frozenset({"self"})):
            return True
        return False

    support.wait_until(lambda: all(reached(host.netns) for host in lab.hosts), 60, "both agents are up")
    return Observer(lab.hosts)


@pytest.mark.deadline(240)
def test_a_queue_that_stands_while_the_agents_restart_is_told_still(lab):
    """One is ended, the other is killed; the queue is forward for the one, reverse for the other."""
    agents = started(lab)
    with contextlib.closing(listening(lab)) as before:
        measured(before)
        lab.congest(1, RATE, QUEUE_BYTES, toward=2)
        lab.load(1, LOAD, toward=2)
        full = seen_for(before, time.monotonic_ns() + SECOND, 2 * BASE_S)
        assert statistics.median(each.forward.queueing_p50_ns for each in full) > 10 * MS, "it stands"
        known = [directories.base_delays(host.netns) for host in lab.hosts]
        support.wait_until(lambda: all(each.exists() for each in known), 30, "bases are kept")
        ports = [json.loads(each.read_text())["ports"] for each in known]
        for agent, number in zip(agents, (signal.SIGTERM, signal.SIGKILL), strict=True):
            agent.send_signal(number)
        for agent in agents:
            agent.wait(30)
    since_ns = time.monotonic_ns()
    started(lab)
    with contextlib.closing(listening(lab)) as after:
        told = seen_for(after, since_ns, WINDOWS * BASE_S, "h1", "h2")
        for host, way in (("h1", "forward"), ("h2", "reverse")):
            queues = [getattr(each, way) for each in told if each.host == host]
            for each in queues:  # from the first answer on
                assert each.owd_p50_ns - each.queueing_p50_ns <= each.queueing_bound_ns + MS
            assert statistics.median(each.queueing_p50_ns for each in queues) > 10 * MS, "it stands still"
        assert [json.loads(each.read_text())["ports"] for each in known] == ports, "the probes are the same"
        lab.heal()
        settled(after, 30, time.monotonic_ns())


@pytest.mark.parametrize("way", [(1, 2), (2, 1)], ids=["forward", "reverse"])
def test_a_route_that_is_longer_one_way_settles_by_its_hop_count(lab, observer, way):
    """Nothing else tells it from a queue."""
    measured(observer)
    lab.delay(1, *way, LONGER_US)
    since_ns = time.monotonic_ns()
    told = settled_after(observer, since_ns)
    assert told.round_trip_min_ns > LONGER_US * 1000 * 0.9, "the route is the longer one still"
    assert told.at_ns - since_ns > BASE_S * SECOND, "not before it was seen for a window"


def settled_after(observer: Observer, since_ns: int) -> PathDelay:
    observer.take()
    seen_for(observer, since_ns, 0.2)  # what is told is of the longer route
    return settled(observer, 60, since_ns)


def test_a_longer_route_both_ways_settles_though_the_hop_counts_stay(lab):
    """As a detour below IP does: here the same device holds the packets, longer."""
    for source, destination in ((1, 2), (2, 1)):
        lab.delay(1, source, destination, 300, SPREAD_US)
    started(lab)  # now: without load this device jitters more than a cable, and how much is part of the base
    with contextlib.closing(listening(lab)) as observer:
        measured(observer)
        lab.heal()
        for source, destination in ((1, 2), (2, 1)):
            lab.delay(1, source, destination, LONGER_US, SPREAD_US)
        since_ns = time.monotonic_ns()
        told = settled_after(observer, since_ns)
        assert told.round_trip_min_ns > 2 * LONGER_US * 1000 * 0.9, "the route is the longer one still"
        assert told.at_ns - since_ns > BASE_S * SECOND, "not before it was seen for a window"
