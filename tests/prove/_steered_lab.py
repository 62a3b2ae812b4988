"""Hosts of a lab with two rails, an agent and a controller on each, and somebody who listens.

The helpers are those of the benchmarks (bench/_agents.py).
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from _agents import SWERVE, configure, start_agent, wait_measured
from _verdicts import Verdicts

from pytools.errors import SwerveError
from pytools.lab import Lab

READY_S = 60.0
_SHORTEST_WINDOW_MS = 10
_RAILS = 2


class Steered(NamedTuple):
    """A lab that steers itself."""

    lab: Lab
    verdicts: Verdicts
    controllers: list[subprocess.Popen[str]]

    def healthy(self) -> bool:
        """Whether every path is healthy and has its whole weight, by what the controllers say."""
        states = self.verdicts.states().values()
        whole = all(each.state == "healthy" and each.weight_actual == each.weight_wanted for each in states)
        return whole and len(states) == len(self.lab.hosts) * (len(self.lab.hosts) - 1) * _RAILS

    def wait_healthy(self, what: str) -> None:
        """Wait until it is."""
        deadline_s = time.monotonic() + READY_S
        while not self.healthy():
            if time.monotonic() > deadline_s:
                states = [f"{path}: {state.state}, {state.reason}" for path, state in self.verdicts.states().items()]
                raise SwerveError(f"not all paths are healthy {what}: {states}")
            time.sleep(0.01)


@contextlib.contextmanager
def steered(
    name: str,
    policy: str | Path,
    probe_ms: float | None = None,
    rate: str = "100mbit",
    base_s: float | None = None,
    hosts: int = 2,
) -> Iterator[Steered]:
    """Run it; at the start every path is healthy.

    Parameters
    ----------
    policy : str or Path
        Its text, or a file.
    probe_ms : float, optional
        Between the probes of a path; as shipped unless given.
    base_s : float, optional
        `windows.base_s`; as shipped unless given.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="swerve-prove-")))
        file = folder / "policy.yaml"
        file.write_text(policy.read_text() if isinstance(policy, Path) else policy)
        file.chmod(0o600)
        lab = stack.enter_context(Lab.up(name, hosts=hosts, rails=_RAILS, rate=rate))
        for host in lab.hosts:
            if probe_ms is not None:
                configure(host, lambda config: _probe_every(probe_ms, config))
            if base_s is not None:
                configure(host, lambda config: config["windows"].update(base=f"{base_s}s"))
            start_agent(lab, host, stderr=stack.enter_context((folder / f"{host.name}-agent.log").open("w")))
        for host in lab.hosts:
            wait_measured(host, (hosts - 1) * _RAILS)
        verdicts = stack.enter_context(contextlib.closing(Verdicts(lab.hosts)))
        made = Steered(lab, verdicts, [])
        for host in lab.hosts:
            words = [*SWERVE, "steer", "run", "--apply", "--policy", str(file), "-n", host.netns]
            log = stack.enter_context((folder / f"{host.name}-steer.log").open("w"))
            made.controllers.append(lab.start(host, words, stderr=log))
        made.wait_healthy("after the start")
        yield made


def _probe_every(interval_ms: float, config: dict[str, Any]) -> None:
    config["probe"]["interval"] = f"{interval_ms}ms"
    config["windows"]["short"] = f"{max(_SHORTEST_WINDOW_MS, round(4 * interval_ms))}ms"
