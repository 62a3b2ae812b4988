"""Fast reroute with real agents and controllers: the kernel leaves a silent rail while both are stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path as File

import pytest
import steering_kit as kit
import support
import yaml
from steering_kit import controlled

from pytools import directories
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.signals import Act
from steering.acting import acts_file

PORT = 7100
RARELY_S = 5  # between two probes
STOPPED_S = 20  # less than the lease: for so long the kernel acts alone, however late a stall has made answers before
POLICY = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
safety: {lease: 60s, reroute_hold: 500ms}
rules:
  - name: leave-dead-rail
    when: {signal: silence, missed: 3, lasting: 60s}
    then: {drain: {}}
"""
LAB = {"rate": "none"}


@pytest.fixture
def agents(lab):
    return kit.agents(lab)


def reroutes(controller: kit.Controller) -> list[Act]:
    """What it has told of the kernel's moves."""
    return [act for _, act in acts_file.read(controller.folder) if act.actuator == "reroute"]


class Stream:
    """Numbered datagrams from the first host to the second, over the rail that routing has chosen for them."""

    def __init__(self, lab: Lab) -> None:
        near, far = lab.hosts
        with inside(near.netns):
            self._near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with inside(far.netns):
            self._far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._far.bind((far.service, PORT))
        self._far.setblocking(False)
        self._near.bind((near.service, 0))
        self._near.connect((far.service, PORT))
        self._lab, self._sent = lab, 0

    def send(self) -> int:
        """Send one; its number."""
        self._sent += 1
        with contextlib.suppress(OSError):
            self._near.send(self._sent.to_bytes(8))
        return self._sent

    def burst(self, size: int) -> None:
        """Send so many bytes at once, in datagrams that count as old."""
        for _ in range(size // 1000):
            self._near.send(bytes(1000))

    def arrived(self) -> int:
        """The highest number that has arrived since the last call; 0 for none."""
        highest = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                highest = max(highest, int.from_bytes(self._far.recv(64)))
        return highest

    def passes(self, after: int = 0) -> bool:
        """Whether anything that was sent after a number arrives now."""
        self.send()
        time.sleep(0.002)
        return self.arrived() > after

    def rail(self) -> int:
        """The rail that it goes by."""
        before = self._counts()
        for _ in range(50):
            self.send()
        grown = {rail: count - before[rail] for rail, count in self._counts().items()}
        return max(grown, key=lambda rail: grown[rail])

    def _counts(self) -> dict[int, int]:
        with inside(self._lab.hosts[0].netns):
            lines = File("/proc/thread-self/net/dev").read_text().splitlines()
        columns = {line.split(":")[0].strip(): line.split(":")[1].split() for line in lines if ":" in line}
        return {rail: int(columns[f"rail{rail}"][9]) for rail in (1, 2)}

    def close(self) -> None:
        self._near.close()
        self._far.close()


def rail_once_armed(stream: Stream, *hosts: kit.Host) -> int:
    """The rail that the stream takes, once these hosts have stand-bys for both."""
    for host in hosts:
        support.wait_until(lambda host=host: kit.status(host).get("standbys") == 2, 60, f"{host} has stand-bys")
    support.wait_until(stream.passes, 30, "the stream passes")
    return stream.rail()


@contextlib.contextmanager
def stopped(*processes: int) -> Iterator[None]:
    """Keep processes from running."""
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def test_the_kernel_leaves_a_silent_rail_by_itself(lab, agents, tmp_path):
    """The rule itself would wait for a minute; the controllers are stopped before the fault."""
    policy = kit.policy_file(tmp_path, POLICY)
    near, far = (kit.Host(host.netns) for host in lab.hosts)
    with (
        controlled(near, policy, "--apply") as first,
        controlled(far, policy, "--apply") as second,
        contextlib.closing(Stream(lab)) as stream,
    ):
        rail = rail_once_armed(stream, near, far)
        with stopped(first.process.pid, second.process.pid):
            lab.cut(rail)
            last = stream.send()
            support.wait_until(lambda: stream.passes(last), STOPPED_S, "the stream goes on")
            with stopped(agents[0].pid):
                support.wait_until(lambda: stream.passes(last), STOPPED_S, "without an agent as well")
        support.wait_until(lambda: reroutes(first), 30, "the beginning is told while the rail is silent")
        lab.heal(rail)

        support.wait_until(
            lambda: [act.outcome for act in reroutes(first)] == ["applied", "undone"], 30, "both ends are told"
        )
        begun, over = reroutes(first)
        assert begun.under == "leave-dead-rail"
        assert begun.act_id == over.act_id
        assert begun.before == over.after
        assert "silent, or a longer queue" in begun.because, "nobody can know yet"
        assert "the kernel moved" in over.because
        assert ": it was silent for" in over.because
        support.wait_until(lambda: stream.passes() and stream.rail() == rail, 30, "the rail is used again")


def test_a_queue_that_is_long_at_once_is_told_as_a_queue(lab, agents, tmp_path):
    """A burst into a port that has become slow: probes behind it are late, and none is lost."""
    near = kit.Host(lab.hosts[0].netns)
    with (
        controlled(near, kit.policy_file(tmp_path, POLICY), "--apply") as first,
        contextlib.closing(Stream(lab)) as stream,
    ):
        rail = rail_once_armed(stream, near)
        lab.congest(rail, "1mbit", 100_000, toward=2)
        stream.burst(40_000)

        def told() -> bool:
            stream.send()
            return [act.outcome for act in reroutes(first)] == ["applied", "undone"]

        support.wait_until(told, 30, "both ends are told", every_s=0.002)
        lab.heal(rail)
        begun, over = reroutes(first)
        assert begun.under == "leave-dead-rail"
        assert "it was silent" not in begun.because
        assert ": a queue, not a dead path: an answer took" in over.because


@pytest.fixture
def rarely_probed(unique_name):
    """Hosts that share a key, and probe each other so rarely that silence would tell of nothing for a while."""
    with Lab.up(unique_name(), hosts=2, rails=2, rate="none", bus=True) as made:
        for host in made.hosts:
            file = directories.default_config(host.netns)
            config = yaml.safe_load(file.read_text())
            config["probe"] |= {"interval": f"{RARELY_S}s", "timeout": f"{RARELY_S}s"}
            config["windows"] = {"short": f"{2 * RARELY_S}s", "long": f"{4 * RARELY_S}s", "base": "1h"}
            file.write_text(yaml.safe_dump(config, sort_keys=False))
        yield made


def test_a_peer_that_loses_a_carrier_says_so(rarely_probed, tmp_path):
    """No probe is missed meanwhile: what silences the path is the peer's word, over the other rail."""
    lab = rarely_probed
    kit.agents(lab)
    near = kit.Host(lab.hosts[0].netns)
    with (
        controlled(near, kit.policy_file(tmp_path, POLICY), "--apply") as first,
        contextlib.closing(Stream(lab)) as stream,
    ):
        rail = rail_once_armed(stream, near)
        lab.cut(rail, 2, carrier=True)
        last = stream.send()
        support.wait_until(lambda: stream.passes(last), 2 * RARELY_S, "the stream goes on by the other rail")
        assert stream.rail() == 3 - rail
        support.wait_until(lambda: reroutes(first), 30, "it is told")


def test_a_dead_peer_moves_nothing(lab, agents, tmp_path):
    policy = kit.policy_file(tmp_path, POLICY)
    near = kit.Host(lab.hosts[0].netns)
    with controlled(near, policy, "--apply") as first, contextlib.closing(Stream(lab)) as stream:
        rail = rail_once_armed(stream, near)
        lab.kill_host(2)
        until = time.monotonic() + 2 * support.slow_factor()
        while time.monotonic() < until:
            stream.send()
            time.sleep(0.001)
        assert stream.rail() == rail
        assert reroutes(first) == []
