"""A job of 16 connections in lock step, placed 11:5 by its ports: `then: spread` makes it 8:8, and leaves it so.

Where the bytes go is told by the interfaces' own counters. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import job_kit
import pytest
import steering_kit as kit
import support
import tcp_kit

from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.signals import Act
from steering.demo.observe import Observer, Record

pytestmark = pytest.mark.beside

LAB = {"queue_bytes": 4_000_000}  # a step waits for the busiest rail, not for a retransmission
PORT, SIZE_BYTES = 7777, 1 << 17
PLANTED = {"rail1": 11, "rail2": 5}
JUDGED_STEPS, QUIET_STEPS = 20, 100
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: even
    scope: {flows: {remote_port: 7777}}
    then: {spread: {flows: {min_rate: 1mbit}}}
"""


class Job:
    """Connections that each send the same; the next step begins when all of it has arrived."""

    def __init__(self, lab: Lab, ports: list[int]) -> None:
        near, far = lab.hosts
        self.steps: list[tuple[int, int]] = []  # end and duration
        self._netns, self._ends, self._stop = near.netns, contextlib.ExitStack(), threading.Event()
        with inside(far.netns):
            server = self._ends.enter_context(socket.create_server((far.service, PORT), backlog=len(ports)))
        self._pairs = []
        for port in ports:
            with inside(near.netns):
                end = self._ends.enter_context(socket.socket())
            end.bind((near.service, port))
            end.connect((far.service, PORT))
            self._pairs.append((end, self._ends.enter_context(server.accept()[0])))
        self._thread = threading.Thread(target=self._run)
        self.began_ns = time.monotonic_ns()
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            began_ns = time.monotonic_ns()
            tcp_kit.transfer(self._pairs, SIZE_BYTES)
            ended_ns = time.monotonic_ns()
            self.steps.append((ended_ns, ended_ns - began_ns))

    def goes_on(self, steps: int) -> dict[str, float]:
        """Wait for so many steps; the shares of the rails in what was sent meanwhile."""
        before, last = self._sent(), len(self.steps) + steps
        support.wait_until(lambda: len(self.steps) >= last, 60, "the job goes on")
        gained = {rail: sent - before[rail] for rail, sent in self._sent().items()}
        return {rail: each / sum(gained.values()) for rail, each in gained.items()}

    def _sent(self) -> dict[str, int]:
        links = json.loads(support.run(["ip", "-n", self._netns, "-j", "-s", "link"]).stdout)
        return {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links if link["ifname"] in PLANTED}

    def said(self, act: Act) -> str:
        """What it felt of an act."""
        at_ns = act.acknowledged_ns or 0
        before, after = ([lasted for end, lasted in self.steps if (end > at_ns) is late] for late in (False, True))
        steps = " and ".join(f"{median(each) / kit.MS:.1f} ms" for each in (before, after) if each)
        return f"even {(at_ns - self.began_ns) / kit.SECOND:.2f} s after the first step; median steps {steps}"

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._ends.close()


@contextlib.contextmanager
def steered(lab: Lab, observer: Observer, folder: Path) -> Iterator[None]:
    """A controller on the first host, to which all paths are healthy."""
    near, rails = lab.hosts[0], len(PLANTED)

    def healthy(record: Record) -> bool:
        return (
            sum(state.state == "healthy" and path.source == near.name for (_, path), state in record.latest.items())
            == rails
        )

    with kit.controlled(kit.Host(near.netns), kit.policy_file(folder, POLICY), "--apply"):
        assert observer.wait_for(healthy, 60), "all paths are healthy"
        yield


def pins(record: Record) -> list[Act]:
    return [act for act in record.acts if act.actuator == "pin"]


@pytest.mark.deadline(120)
def test_a_job_that_hashes_badly_is_spread_evenly_once(lab: Lab, observer: Observer, tmp_path: Path) -> None:
    ports = job_kit.ports_that_hash_to(lab, PLANTED, PORT)
    with steered(lab, observer, tmp_path), contextlib.closing(Job(lab, ports)) as job:
        assert observer.wait_for(lambda record: bool(pins(record)), 60), "an act"
        job.goes_on(2)  # what was sent before has left
        shares = job.goes_on(JUDGED_STEPS)
        job.goes_on(QUIET_STEPS)
        (act,) = pins(observer.take())
        said = f"{job.said(act)}; {shares}; {act.because}"
        print(said)
        assert (act.outcome, act.under) == ("applied", "even"), said
        counts = [{name.rpartition(" ")[2]: count for name, count in each.items()} for each in (act.before, act.after)]
        assert counts == [PLANTED, {"rail1": 8, "rail2": 8}], said
        assert shares["rail1"] == pytest.approx(0.5, abs=0.02), said
