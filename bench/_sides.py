"""Who routes between the hosts of a lab, for benchmarks: swerve on every host, or FRR on every host and rail.

Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import _frr
from _agents import SWERVE, configure, start_agent, wait_serving
from _common import note, wait_until

from pytools import directories
from pytools.ipc.bus import Client
from pytools.kernel.leftovers import FIRST_ID, is_our_nexthop
from pytools.kernel.netlink.routing import Netlink
from pytools.lab import Host, Lab
from pytools.signals import Act, PathState, decode
from pytools.signals import Path as NetworkPath
from steering.acting import journal

RAILS: Final = 2
PROBE_MS: Final = 20  # as shipped
SIDES: Final = ("swerve", "frr_bfd_default", "frr_bfd_fastest")
READY_S: Final = 60.0
_STATES = frozenset({"path_state"})
_SHORTEST_WINDOW_MS = 10

SIGNALS = {
    "silence": "{signal: silence, missed: 3}",
    "loss": "{signal: loss, above: 0.5, clear_below: 0.01}",
    "overtaken": "{signal: queueing_delay, quantile: last, above: 20ms, clear_below: 5ms}",
}
LEAVES_DEAD: Final = "leave-dead-rail"
_POLICY = """\
version: 1
manage: {{destinations: [10.9.0.0/16]{manage}}}
safety: {{lease: 3s, max_drained_share: 0.5}}
rules:
  - name: {dead}
    when: {condition}
    then: {{shift: {{share: 0}}}}
    return: {{dwell: 500ms, max_dwell: 5s, retry_after: 1s, steps: [1.0], step: 100ms}}
{more}"""


@dataclass(frozen=True)
class Side:
    """Somebody who routes between the hosts of a lab."""

    name: str
    lab: Lab
    whole: Callable[[], bool]  # whether traffic is spread over all rails and nothing is pending
    heal: Callable[[int], None]  # a rail
    acts: Callable[[], int]  # changes so far, on all hosts
    explain: Callable[[int], None]  # say what it did since then
    changes: Callable[[int], list[Act]] = lambda _: []  # decided since then, on all hosts; of swerve alone
    agents: Sequence[subprocess.Popen[str]] = ()  # one per host, in their order; of swerve alone
    controllers: Sequence[subprocess.Popen[str]] = ()
    revive: Callable[[], None] = lambda: None  # start what has ended again


def policy_for(signal: str, manage: str = "", more: str = "") -> str:
    """A policy that leaves rails by a signal; `manage` is added to what it manages, `more` to its rules."""
    return _POLICY.format(dead=LEAVES_DEAD, condition=SIGNALS[signal], manage=manage, more=more)


@contextlib.contextmanager
def swerve(lab: Lab, signal: str, probe_ms: int, manage: str = "", more: str = "") -> Iterator[Side]:
    """An agent and a controller on every host, see `policy_for`."""
    agents: list[subprocess.Popen[str]] = []
    controllers: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        policy = Path(folder) / "policy.yaml"
        policy.write_text(policy_for(signal, manage, more))
        policy.chmod(0o600)
        for host in lab.hosts:
            configure(host, functools.partial(_probe_every, probe_ms))
            log = stack.enter_context((Path(folder) / f"{host.name}.log").open("w"))
            agents.append(start_agent(lab, host, stderr=log))
        for host in lab.hosts:
            wait_serving(host)
        states = States(stack, lab.hosts)

        def control(host: Host) -> subprocess.Popen[str]:
            words = [*SWERVE, "steer", "run", "--apply", "--policy", str(policy), "-j", "-n", host.netns]
            acts = stack.enter_context((Path(folder) / f"{host.name}.acts").open("a"))
            return lab.start(host, words, stdout=acts, stderr=sys.stderr)

        def revive() -> None:
            for index, host in enumerate(lab.hosts):
                if controllers[index].poll() is not None:
                    note(f"the controller of {host.name} has ended: started again")
                    states.forget(host.name)
                    controllers[index] = control(host)

        controllers += [control(host) for host in lab.hosts]
        before: dict[str, dict[int, dict[int, int]]] = {}  # once the controllers have made their groups

        def whole() -> bool:
            if not states.healthy():
                return False
            now = {host.name: weights_of(host) for host in lab.hosts}
            if not before and all(map(_has_ours, now.values())):
                before.update(now)
            return now == before

        def changes(since_ns: int) -> list[Act]:
            acts = (act for host in lab.hosts for act in _acts(Path(folder) / f"{host.name}.acts"))
            return [each for each in acts if each.decided_ns > since_ns and each.outcome != "dry_run"]

        def explain(since_ns: int) -> None:
            for each in changes(since_ns):
                steps = (each.seen_ns, each.decided_ns, each.acknowledged_ns or 0)
                seen, decided, acknowledged = ((at_ns - since_ns) / 1e6 for at_ns in steps)
                words = f"seen {seen:.1f}, decided {decided:.1f}, acknowledged {acknowledged:.1f} ms later"
                note(f"  {each.host} {each.what} {each.outcome}: {words}; {each.because}")

        def acts_so_far() -> int:
            return sum(_applied(host) for host in lab.hosts)

        def heal(rail: int) -> None:
            lab.heal(rail, routes=True)  # their groups lose a member with its carrier; whoever made them adds it again

        yield Side("swerve", lab, whole, heal, acts_so_far, explain, changes, agents, controllers, revive)


def _probe_every(interval_ms: int, config: dict[str, Any]) -> None:
    config["probe"]["interval"] = f"{interval_ms}ms"
    config["windows"]["short"] = f"{max(_SHORTEST_WINDOW_MS, 4 * interval_ms)}ms"


class States:
    """What the controllers say of the paths."""

    def __init__(self, stack: contextlib.ExitStack, hosts: Sequence[Host]) -> None:
        self._clients = [stack.enter_context(Client(directories.agent_socket(host.netns), _STATES)) for host in hosts]
        self._paths = len(hosts) * (len(hosts) - 1) * RAILS
        self._latest: dict[NetworkPath, str] = {}

    def healthy(self) -> bool:
        """Whether every path of every host is."""
        for client in self._clients:
            for each in client.read():
                if isinstance(each, PathState):
                    self._latest[each.path] = each.state
        return len(self._latest) == self._paths and set(self._latest.values()) == {"healthy"}

    def forget(self, host: str) -> None:
        """Wait for the word of a new controller."""
        self.healthy()  # reads what the old one left
        self._latest = {path: state for path, state in self._latest.items() if path.source != host}


def _has_ours(weights: dict[int, dict[int, int]]) -> bool:
    return any(group >= FIRST_ID for group in weights)


def weights_of(host: Host) -> dict[int, dict[int, int]]:
    with Netlink(host.netns) as netlink:
        groups = [group for group in netlink.groups() if group.id < 200 or is_our_nexthop(group)]
        return {group.id: dict(group.weights) for group in groups}


def _acts(file: Path) -> list[Act]:
    found = (decode(line) for line in file.read_bytes().splitlines())
    return [each for each in found if isinstance(each, Act)]


def _applied(host: Host) -> int:
    return sum(
        entry.kind == "applied" for entry in journal.read(directories.state_dir(host.netns) / journal.FILE).entries
    )


@contextlib.contextmanager
def frr(lab: Lab, name: str, bfd: _frr.Bfd) -> Iterator[Side]:
    """FRR on every host and every rail."""
    with _frr.routed(lab, bfd) as router:
        yield Side(name, lab, router.is_whole, router.heal, lambda: 0, lambda _: None)


@contextlib.contextmanager
def routing(name: str, signal: str, hosts: int = 2, probe_ms: int = PROBE_MS) -> Iterator[Side]:
    """A lab with somebody who routes; `signal` and `probe_ms` are for swerve alone."""
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab.up(f"fo{os.getpid()}", hosts=hosts, rails=RAILS, bus=name == "swerve"))
        if name == "swerve":
            made = stack.enter_context(swerve(lab, signal, probe_ms))
        else:
            bfd = {"frr_bfd_default": _frr.DEFAULT, "frr_bfd_fastest": _frr.FASTEST}[name]
            made = stack.enter_context(frr(lab, name, bfd))
        wait_until(made.whole, f"{name} has spread its routes", READY_S)
        yield made
