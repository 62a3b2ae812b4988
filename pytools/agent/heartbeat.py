"""Reports of the agent to its service manager and the log, from its own loop.

A source like any other: it reports only when the loop turns, so the manager's watchdog restarts an agent that hangs.
Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from pytools import log
from pytools.log import Level
from pytools.notify import Manager
from pytools.sources.source import Source

_LOOK_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Standing:
    paths: int
    peers: int
    wanted: int  # interfaces that carry paths
    attached: int  # of those, where at least one of our programs is
    failed: Mapping[str, str]  # hook -> why it is not attached
    waiting: tuple[str, ...] = ()  # fields of the configuration that wait for a restart

    @property
    def measures(self) -> bool:
        """Whether it does its work: something is attached, or there is nothing yet to attach to."""
        return self.attached > 0 or self.wanted == 0

    def text(self) -> str:
        if not self.paths:
            words = f"no route leads to any of {self.peers} peers yet" if self.peers else "no peers are configured"
        else:
            words = f"probes {self.paths} paths to {self.peers} peers by {self.wanted} interfaces"
        words += f"; {len(self.failed)} hooks are not attached" if self.failed else ""
        return words + (f"; waiting for a restart: {', '.join(self.waiting)}" if self.waiting else "")


class Heartbeat(Source):
    """Tells the manager that the agent is ready, alive and how it stands; the log what changed.

    Parameters
    ----------
    drops : callable
        Everything lost so far, by name.
    began_ns : int
        When the agent was started.
    """

    def __init__(
        self, manager: Manager, standing: Callable[[], Standing], drops: Callable[[], Mapping[str, int]], began_ns: int
    ) -> None:
        self._manager, self._standing, self._drops = manager, standing, drops
        self._ready = False
        self._failed: dict[str, str] = {}
        self._began_ns = began_ns
        self._every_ns = min(_LOOK_NS, manager.watchdog_ns // 3) or _LOOK_NS

    def tick(self, now_ns: int) -> int:
        """Say what there is to say; returns when to be called next."""
        if self._manager.watchdog_ns:
            self._manager.alive()
        standing = self._standing()
        self._tell_failed(standing.failed)
        if standing.measures and not self._ready:
            self._ready = True
            self._manager.ready()
            log.event(Level.INFO, "agent ready", paths=standing.paths, interfaces=standing.attached,
                      after_s=(now_ns - self._began_ns) / 1e9)  # fmt: skip
        self._manager.status(standing.text())
        return now_ns + self._every_ns

    def _tell_failed(self, failed: Mapping[str, str]) -> None:
        for hook, why in failed.items():
            if self._failed.get(hook) != why:
                log.event(Level.WARNING, "hook failed", hook=hook, why=why)
        for hook in self._failed.keys() - failed.keys():
            log.event(Level.NOTICE, "hook works", hook=hook)
        self._failed = dict(failed)

    def close(self) -> None:
        """Say that the agent ends: closed first, while everything still runs."""
        self._manager.stopping()
        lost = {name: count for name, count in self._drops().items() if count}
        ran_s = (time.monotonic_ns() - self._began_ns) / 1e9
        log.event(Level.INFO, "agent stopping", ran_s=ran_s, **lost)
