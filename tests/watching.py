"""Meshes with the sources of marks and sizes, all driven by one test in one process; imported as `watching`.

All hosts are driven by one thread, each inside its own namespace, as its agent would: ticks when they are due.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import support

from pytools.agent.hooks import Hooks
from pytools.config import AgentConfig
from pytools.ipc.bus import Bus
from pytools.kernel import netns
from pytools.kernel.bpf import loader
from pytools.kernel.netlink.routing import PROTOCOL, Netlink
from pytools.lab.building import agent_config
from pytools.lab.fabric import Lab
from pytools.signals import LinkEvent, PathEcn, PathMtu
from pytools.sources import programs
from pytools.sources.path_ecn import PathEcnSource
from pytools.sources.path_mtu import PathMtuSource
from pytools.sources.probing.mesh import ProbeMesh
from pytools.sources.probing.sender import Sender

T = TypeVar("T")
SECOND_NS = 1_000_000_000


def send_now(sender: Sender) -> None:
    """One probe now on each path, whenever the pacer gets to it."""
    sender.add(np.array([time.monotonic_ns()]), 10 * SECOND_NS)
    support.wait_until(lambda: sender.schedule.done == sender.schedule.planned, 10, "the pacer has sent")
    sender.note_sent()


def mesh_of(keep: Callable[..., Any], config: AgentConfig, bus: Bus) -> tuple[loader.Loaded, Netlink, ProbeMesh]:
    """A mesh and what it works with, in the namespace that we are in; `keep` closes each in the end."""
    loaded = keep(loader.load([programs.probes(config)]))
    assert loaded.failed == {}
    netlink = keep(Netlink())
    return loaded, netlink, keep(contextlib.closing(ProbeMesh(config, loaded, netlink, bus)))


class Watcher:
    """One host: its sources, and all that they have told.

    Attributes
    ----------
    due : dict
        When each source's `tick` is to be called again.
    """

    def __init__(self, namespace: str, config: AgentConfig) -> None:
        self.namespace, self.config, self.bus = namespace, config, Bus()
        self.events: list[LinkEvent] = []
        self.mtus: list[PathMtu] = []
        self.ecns: list[PathEcn] = []
        self._closing = contextlib.ExitStack()
        keep = self._closing.enter_context
        self._told = self.bus.subscribe(frozenset({"link_event", "path_mtu", "path_ecn"}))
        try:
            with netns.inside(namespace):
                loaded, self.netlink, self.mesh = mesh_of(keep, config, self.bus)
                self.selector = keep(selectors.DefaultSelector())
                self.mesh.register(self.selector)
                self.ecn = PathEcnSource(config, loaded, self.bus, lambda: self.mesh.paths.current)
                self.mtu = keep(contextlib.closing(PathMtuSource(config, self.bus, lambda: self.mesh.paths.current)))
                hooks = keep(contextlib.closing(Hooks(loaded, self.mesh.interfaces)))
                hooks.tick(0)
        except BaseException:
            self._closing.close()
            raise
        self.due = {source.tick: 0 for source in (self.mesh, hooks, self.ecn, self.mtu)}

    def work(self) -> None:
        """What is due now."""
        now_ns = time.monotonic_ns()
        for key, mask in self.selector.select(0):
            key.data(mask)
            self.due[self.mesh.tick] = 0
        for tick, due_ns in self.due.items():
            if due_ns <= now_ns:
                with netns.inside(self.namespace):
                    self.due[tick] = tick(now_ns)
        for signal in self._told.read():
            into: list[object] = {"LinkEvent": self.events, "PathMtu": self.mtus, "PathEcn": self.ecns}[
                type(signal).__name__
            ]  # type: ignore[assignment]
            into.append(signal)

    def states(self) -> dict[tuple[str, str], PathMtu]:
        """The latest word on every path, by interface and address."""
        return {(each.path.interface, each.path.address): each for each in self.mtus}

    def lost(self) -> dict[str, int]:
        """Everything that was dropped anywhere."""
        drops = self.mesh.drops() | self.mtu.drops()
        return {name: count for name, count in drops.items() if count}

    def close(self) -> list[str]:
        """Close all; what is left in the kernel."""
        with netns.inside(self.namespace):
            rules = [rule for family in (4, 6) for rule in self.netlink.rules(family) if rule.protocol == PROTOCOL]
            self._closing.close()
        return [str(rule) for rule in rules]


def watchers(lab: Lab, **changes: object) -> list[Watcher]:
    """One for every host of a lab."""
    made = []
    for host in lab.hosts:
        known = agent_config(host, lab.hosts, lab.spec.ipv6)
        made.append(Watcher(host.netns, AgentConfig(known.host, known.peers, **changes)))  # type: ignore[arg-type]
    return made


def work_until(made: list[Watcher], condition: Callable[[], T], what: str, deadline_s: float = 20) -> T:
    """Let all of them work until the condition holds; what it returned."""

    def worked() -> T:
        for each in made:
            each.work()
        return condition()

    return support.wait_until(worked, deadline_s, what, every_s=0.001)


def work_for(made: list[Watcher], seconds: float) -> None:
    """Let all of them work for a while, to see what does not happen."""
    end_ns = time.monotonic_ns() + int(seconds * SECOND_NS)
    work_until(made, lambda: time.monotonic_ns() >= end_ns, "the time is over", seconds + 20)
