"""A host of a lab with a real agent, whose controller can be killed and replaced.

Seconds of CLOCK_MONOTONIC. One thread.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from _agents import start_agent, wait_measured
from steering_kit import guardians

from pytools import directories
from pytools.ipc.bus import Client
from pytools.kernel.leftovers import is_our_rule
from pytools.kernel.netlink.routing import Netlink
from pytools.lab import Host, Lab
from pytools.signals import PathState
from steering.acting import journal
from steering.acting.lock import holder
from steering.guarding.takeover import SOCKET

_SWERVE: Final = [sys.executable, "-m", "steering.cli"]
LATEST_S: Final = 60.0


def until(condition: Callable[[], Any], what: str, every_s: float = 0.01) -> Any:
    """Wait until it holds."""
    deadline = time.monotonic() + LATEST_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {LATEST_S:g} s until {what}")
        time.sleep(every_s)
    return found


@contextlib.contextmanager
def directory_of_its_own() -> Iterator[str]:
    """A directory of the proof, with the sockets and the state of every command that it starts."""
    with tempfile.TemporaryDirectory(prefix="swerve-prove-") as folder:
        os.environ["SWERVE_RUNTIME_DIR"] = f"{folder}/run"
        os.environ["SWERVE_STATE_DIR"] = f"{folder}/state"
        yield folder


def start_agents(lab: Lab, log: Any) -> list[subprocess.Popen[str]]:
    """The agent of every host; each measures all its paths."""
    agents = [start_agent(lab, host, stderr=log) for host in lab.hosts]
    for host in lab.hosts:
        wait_measured(host, len(lab.rails))
    return agents


class SteeredHost:
    """A host and its controller, once that is started."""

    def __init__(self, lab: Lab, host: Host, log: Path) -> None:
        self.lab, self.host, self.log = lab, host, log
        self.folder = directories.state_dir(host.netns)
        self.controller: subprocess.Popen[str] | None = None  # the latest one
        self._log_at = 0

    def start(self, policy: Path) -> None:
        """Start a controller; it need not be in charge yet."""
        words = [*_SWERVE, "steer", "run", "--apply", "--hand-over", "--policy", str(policy), "-n", self.host.netns]
        self._log_at = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            self.controller = self.lab.start(self.host, words, stderr=log)

    def said(self) -> str:
        """What was said since the latest controller was started, by it and by those before."""
        return self.log.read_bytes()[self._log_at :].decode()

    def guardian(self) -> int | None:
        """The process number of the controller's guardian."""
        return next(iter(guardians(self.controller.pid)), None) if self.controller else None

    def wait_in_charge(self) -> None:
        """Wait until the controller is in charge, and no guardian before its own."""
        assert self.controller is not None
        controller, lock = self.controller, self.folder / journal.LOCK_FILE

        def has_lock() -> bool:
            if controller.poll() is not None:
                raise SystemExit(f"the controller ended with {controller.returncode}: {self.said()[-2000:]}")
            return (holder(lock) or {}).get("pid") == controller.pid

        until(has_lock, "the controller has the lock")
        until(self.guardian, "the controller has a guardian")
        until(lambda: not (self.folder / SOCKET).exists(), "the guardian before has gone")

    def states(self, seconds: float = 1.5) -> dict[int, str]:
        """The state of every path, by rail, as told within this time."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        with (
            contextlib.suppress(Exception),
            Client(directories.agent_socket(self.host.netns), {"path_state"}) as client,
        ):
            while len(found) < len(self.lab.rails) and (left := deadline - time.monotonic()) > 0:
                each = client.next(left)
                if isinstance(each, PathState):
                    found[int(each.path.interface.removeprefix("rail"))] = each.state
        return found

    def wait(self, wanted: dict[int, str]) -> None:
        """Wait until its paths are in these states."""
        until(lambda: self.states() == wanted, f"the paths of {self.host.name} are {wanted}: they are {self.states()}")

    def restart(self, number: int, policy: Path) -> float:
        """End the controller and start another; how long until that one is in charge, in seconds."""
        assert self.controller is not None
        began = time.monotonic()
        self.controller.send_signal(number)
        self.controller.wait(LATEST_S)
        self.start(policy)
        self.wait_in_charge()
        return time.monotonic() - began

    def stop(self) -> int:
        """End the controller for good (Ctrl-C); its exit code."""
        assert self.controller is not None
        self.controller.send_signal(signal.SIGINT)
        return self.controller.wait(LATEST_S)

    def in_force(self) -> int:
        """How many rules of ours there are."""
        with Netlink(self.host.netns) as netlink:
            return sum(is_our_rule(rule) for rule in netlink.rules(4))

    def lock_is_free(self) -> bool:
        """Whether neither the controller nor a guardian runs any more."""
        return holder(self.folder / journal.LOCK_FILE) is None
