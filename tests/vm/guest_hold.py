"""Holds with real agents and real TCP through a bottleneck: its queue stays short while they act.

Not collected outside the guest: fq is there alone (tests/vm/test_second_kernel.py names this file). The queue is read
from the kernel, at the bottleneck; nothing of swerve has a part in that.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import samples
import steering_kit as kit
import support
import yaml

from pytools import directories
from pytools.ipc.client import Client
from pytools.kernel.bpf import loader
from pytools.kernel.netlink import qdiscs
from pytools.kernel.netlink.links import Tables
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.signals import Path, PathDelay
from steering.acting import messages
from steering.acting.agent_maps import AgentMaps
from steering.actuators import flow_table
from steering.actuators.agent_paths import AgentPaths
from steering.actuators.flow_table import FlowTable
from steering.actuators.holds import Holds
from steering.plan import Hold, HoldLimits

pytestmark = [pytest.mark.guest(thorough=True), pytest.mark.deadline(240)]

RATE, QUEUE_BYTES = "8mbit", 200_000  # 200 ms
SHORT = QUEUE_BYTES // 4
LIMITS = HoldLimits(5_000_000, 100_000_000, 500_000_000, 12_500, 256)
LEASE_NS = 1_000_000_000
HOLD = "threshold: 5ms, longest: 100ms, floor: 100kbit, qdisc: fq"


@pytest.fixture
def lab(unique_name: str) -> Iterator[Lab]:
    support.require("bcc", "netns")
    with Lab.up(unique_name(), hosts=2, rails=1, rate=RATE, queue_bytes=QUEUE_BYTES) as made:
        for host in made.hosts:
            file = directories.default_config(host.netns)
            config = yaml.safe_load(file.read_text())
            config["probe"] |= {"interval": "20ms"}
            file.write_text(yaml.safe_dump(config, sort_keys=False))
        yield made


class Stream:
    """One TCP connection from the first host to the second, which sends all it can."""

    def __init__(self, lab: Lab) -> None:
        near, far = lab.hosts
        with inside(far.netns):
            listener = socket.create_server((far.service, 7200))
        with inside(near.netns):
            self._near = socket.socket()
        self._near.bind((near.service, 0))
        self._near.connect((far.service, 7200))
        self._far, _ = listener.accept()
        listener.close()
        self.received = 0
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._near.send(bytes(1 << 14))

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while found := self._far.recv(1 << 16):
                self.received += len(found)

    def close(self) -> None:
        for end in (self._near, self._far):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._near.close()
        self._far.close()


class Bottleneck:
    """The shaper towards the second host."""

    def __init__(self, lab: Lab) -> None:
        self._netlink = Netlink(lab.rails[0].netns)

    def waiting(self) -> int:
        """Bytes in it."""
        return max(row.backlog_bytes for row in Tables(self._netlink).qdiscs(None))

    def longest(self, seconds: float) -> int:
        """The most of many looks in this time."""
        end, most = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            most = max(most, self.waiting())
            time.sleep(0.01)
        return most

    def close(self) -> None:
        self._netlink.close()


class Holder(threading.Thread):
    """Holds what the first host sends to the second, as a controller does; until it is told to stop."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(daemon=True)
        self._lab, self._ended, self.renews = lab, threading.Event(), True
        self.refused: dict[Path, str] | None = None
        self.held = 0
        self.queue_at_end = ""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with inside(self._lab.hosts[0].netns):
                self._hold()
        except BaseException as error:
            self.error = error

    def _hold(self) -> None:
        near, far = self._lab.hosts
        output = messages.Output(near.name, print, lambda _: None)
        with contextlib.ExitStack() as stack:
            netlink = stack.enter_context(Netlink())
            table = stack.enter_context(FlowTable(loader.load([flow_table.PROGRAM])))
            selector = stack.enter_context(selectors.DefaultSelector())
            maps = stack.enter_context(contextlib.closing(AgentMaps(directories.maps_socket(near.netns), output)))
            agent = stack.enter_context(Client(directories.agent_socket(near.netns), frozenset({"path_delay"})))
            maps.register(selector)
            paths = AgentPaths(table)
            holds = stack.enter_context(Holds(table, paths, netlink))
            heard = (each for each in agent.within(60) if isinstance(each, PathDelay))
            path = next(each.path for each in heard if each.path.source == near.name)
            wanted = Hold(path, (f"{far.service}/32",), LIMITS, "short-queues", install=True)
            tell_ns = 0
            while not self._ended.is_set():
                now = time.monotonic_ns()
                maps.turn(now, paths)
                if self.renews:
                    self.refused = holds.arm([wanted])
                    holds.renew(now + LEASE_NS)
                    if now >= tell_ns:
                        tell_ns = now + LEASE_NS // 2
                        agent.publish(samples.hold_state(path=path, at_ns=now))
                self.held = sum(each.packets for each in holds.read(now))
                for key, events in selector.select(0.05):
                    key.data(events)
            holds.arm(())
            self.queue_at_end = qdiscs.queues(netlink, {socket.if_nametoindex("rail1")}).popitem()[1][0]
            paths.take_back()

    def end(self) -> None:
        self._ended.set()
        self.join(60)


def test_the_queue_stays_short_until_nobody_renews(lab: Lab) -> None:
    agents = kit.agents(lab)
    with contextlib.closing(Bottleneck(lab)) as bottleneck:
        holder = Holder(lab)
        holder.start()
        try:
            support.wait_until(lambda: holder.refused == {} or holder.error, 90, "the hold is armed")
            assert holder.error is None
            with contextlib.closing(Stream(lab)) as stream:
                support.wait_until(lambda: holder.held > 0 and bottleneck.longest(1) < SHORT, 90, "the queue is short")
                before = stream.received
                assert bottleneck.longest(5) < QUEUE_BYTES // 2
                assert stream.received > before
                holder.renews = False
                for agent in agents:
                    os.kill(agent.pid, signal.SIGSTOP)
                try:
                    support.wait_until(lambda: bottleneck.waiting() > QUEUE_BYTES // 2, 60, "nothing is held any more")
                finally:
                    for agent in agents:
                        os.kill(agent.pid, signal.SIGCONT)
                holder.renews = True
                support.wait_until(lambda: bottleneck.longest(1) < SHORT, 90, "the queue is short again")
        finally:
            holder.end()
        assert (holder.error, holder.queue_at_end) == (None, "default")


def test_a_stopped_controller_holds_nothing_and_a_killed_one_leaves_nothing(lab: Lab, tmp_path: pathlib.Path) -> None:
    near = kit.Host(lab.hosts[0].netns)
    agents = [each.pid for each in kit.agents(lab)]

    before = kit.queue_of(near.netns)
    file = kit.policy_file(tmp_path, kit.hold_policy(HOLD))
    with contextlib.closing(Bottleneck(lab)) as bottleneck, kit.controlled(near, file, "--apply") as controller:
        support.wait_until(lambda: kit.queue_of(near.netns) == "fq", 90, "the hold is armed")
        with contextlib.closing(Stream(lab)) as stream:
            support.wait_until(lambda: stream.received > 5 * QUEUE_BYTES, 60, "packets flow")
            support.wait_until(lambda: bottleneck.longest(1) < SHORT, 90, "the queue is short")
            guardian = controller.guardian()
            assert guardian
            everybody = (*agents, controller.process.pid, guardian)
            for pid in everybody:
                os.kill(pid, signal.SIGSTOP)
            try:
                support.wait_until(lambda: bottleneck.waiting() > QUEUE_BYTES // 2, 60, "nothing is held any more")
            finally:
                for pid in everybody:
                    os.kill(pid, signal.SIGCONT)
            support.wait_until(lambda: bottleneck.longest(1) < SHORT, 90, "the queue is short again")
            controller.kill()
            support.wait_until(lambda: kit.queue_of(near.netns) == before, 60, "fq is gone")
            support.wait_until(lambda: bottleneck.waiting() > QUEUE_BYTES // 2, 60, "nothing is held")
            received = stream.received
            support.wait_until(lambda: stream.received > received + QUEUE_BYTES, 60, "packets still flow")
