"""Proof: a rail that is known to be dead gets not one packet while those who steer are restarted, killed or stopped.

    python tests/prove/restarts.py [--restarts 50] [--pauses 2] [--killed 7] [--stopped 8]

Two hosts of a lab with two rails, real agents and controllers, a policy as shipped in its times. Rail 1 dies silently
and is left on both hosts. Then datagrams from eight sockets, one a millisecond, each with a route of its own, go from
h1 to h2, and connections are made all the while: what is sent into the dead rail is lost, and counted as such. h1's
controller is killed (SIGKILL) or restarted (SIGTERM, --hand-over), in turn, and started again at once; the next time
comes when the successor is in charge and every path is measured. After that h1's agent is killed for --killed seconds
and stopped for --stopped seconds, --pauses times each. At last the rail is healed and has to come back. Prints JSON
Lines; exits with 1 unless not one datagram is lost. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

from _agents import start_agent, wait_measured  # noqa: E402
from _traffic import Traffic  # noqa: E402

from pytools import directories  # noqa: E402
from pytools.ipc.bus import Client  # noqa: E402
from pytools.kernel.leftovers import is_our_rule  # noqa: E402
from pytools.kernel.netlink.routing import Netlink  # noqa: E402
from pytools.lab import Host, Lab  # noqa: E402
from pytools.signals import PathState  # noqa: E402
from steering.acting.lock import holder  # noqa: E402
from steering.guarding.takeover import SOCKET  # noqa: E402

SWERVE: Final = [sys.executable, "-m", "steering.cli"]
LATEST_S: Final = 60.0
POLICY: Final = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: leave-dead-rail
    when: {signal: silence, missed: 3}
    then: {drain: {}}
    return: {dwell: 2s, retry_after: 10s, steps: [0.5, 1.0], step: 500ms}
"""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait until it holds."""
    deadline = time.monotonic() + LATEST_S
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {LATEST_S:g} s until {what}")
        time.sleep(0.01)
    return found


class Steered:
    """A host whose controller can be replaced."""

    def __init__(self, lab: Lab, host: Host, policy: Path, log: Any) -> None:
        self.lab, self.host, self._log = lab, host, log
        self._words = [*SWERVE, "steer", "run", "--apply", "--hand-over", "--policy", str(policy), "-n", host.netns]
        self.folder = directories.state_dir(host.netns)
        self.controller = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return self.lab.start(self.host, self._words, stderr=self._log)

    def states(self, seconds: float = 1.5) -> dict[int, str]:
        """The state of every path, by rail, as told within this time."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        with (
            contextlib.suppress(Exception),
            Client(directories.agent_socket(self.host.netns), {"path_state"}) as client,
        ):
            while len(found) < 2 and (left := deadline - time.monotonic()) > 0:
                each = client.next(left)
                if isinstance(each, PathState):
                    found[int(each.path.interface.removeprefix("rail"))] = each.state
        return found

    def wait(self, wanted: dict[int, str]) -> None:
        """Wait until its paths are in these states."""
        until(lambda: self.states() == wanted, f"the paths of {self.host.name} are {wanted}: they are {self.states()}")

    def restart(self, number: int) -> float:
        """End the controller and start another; how long until that one is in charge, in seconds."""
        began = time.monotonic()
        self.controller.send_signal(number)
        self.controller.wait(LATEST_S)
        self.controller = self._start()
        pid = self.controller.pid
        until(lambda: (holder(self.folder / "lock") or {}).get("pid") == pid, "the successor has the lock")
        until(lambda: not (self.folder / SOCKET).exists(), "the guardian before has gone")
        return time.monotonic() - began

    def in_force(self) -> int:
        """How many rules of ours there are."""
        with Netlink(self.host.netns) as netlink:
            return sum(is_our_rule(rule) for rule in netlink.rules(4))


def say(**facts: Any) -> None:
    print(json.dumps({"proof": "restarts", **facts}), flush=True)


def proof(lab: Lab, policy: Path, log: Any, wanted: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    agents = [start_agent(lab, host, stderr=log) for host in lab.hosts]
    for host in lab.hosts:
        wait_measured(host, 2)
    hosts = [Steered(lab, host, policy, log) for host in lab.hosts]
    for each in hosts:
        each.wait({1: "healthy", 2: "healthy"})
    lab.cut(1)
    for each in hosts:
        each.wait({1: "drained", 2: "healthy"})
    near, traffic, took = hosts[0], Traffic(lab, *lab.hosts), []
    for number in range(1, wanted.restarts + 1):
        how = signal.SIGTERM if number % 2 else signal.SIGKILL
        took.append(near.restart(how))
        near.wait({1: "drained", 2: "healthy"})
        say(restart=number, how=how.name, in_charge_s=round(took[-1], 2))
    for number in range(1, wanted.pauses + 1):
        agents[0].kill()
        agents[0].wait()
        time.sleep(wanted.killed)
        agents[0] = start_agent(lab, lab.hosts[0], stderr=log)
        wait_measured(lab.hosts[0], 1)
        near.wait({1: "drained", 2: "healthy"})
        agents[0].send_signal(signal.SIGSTOP)
        time.sleep(wanted.stopped)
        agents[0].send_signal(signal.SIGCONT)
        near.wait({1: "drained", 2: "healthy"})
        say(pause=number, agent_killed_s=wanted.killed, agent_stopped_s=wanted.stopped)
    counts = traffic.stop()
    rules = near.in_force()
    lab.heal(1)
    for each in hosts:
        each.wait({1: "healthy", 2: "healthy"})
    for each in hosts:
        each.controller.terminate()
        each.controller.wait(LATEST_S)
    until(lambda: not any(each.in_force() for each in hosts), "no rule of ours is left")
    for agent in agents:
        agent.terminate()
        agent.wait(LATEST_S)
    lost = counts["datagrams"] - counts["datagrams_received"]
    return {
        "restarts": wanted.restarts,
        "pauses": 2 * wanted.pauses,
        "datagrams": counts["datagrams"],
        "lost": lost,
        "connections": counts["connections"],
        "stream_broken": counts["stream_broken"],
        "no_route": counts["kernel_no_route"],
        "in_charge_max_s": round(max(took, default=0.0), 2),
        "passed": lost == 0 and counts["datagrams"] > 0 and not counts["stream_broken"] and rules > 0,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--pauses", type=int, default=2, help="how often the agent is killed, and stopped, for a while")
    parser.add_argument("--killed", type=float, default=7.0, help="seconds without an agent")
    parser.add_argument("--stopped", type=float, default=8.0, help="seconds with a stopped agent")
    wanted = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="swerve-prove-") as folder:
        os.environ["SWERVE_RUNTIME_DIR"] = f"{folder}/run"
        os.environ["SWERVE_STATE_DIR"] = f"{folder}/state"
        policy = Path(folder, "policy.yaml")
        policy.write_text(POLICY)
        policy.chmod(0o600)
        with Path(folder, "log").open("w+") as log:
            try:
                with Lab.up(f"restarts{os.getpid()}", hosts=2, rails=2, rate="none") as lab:
                    verdict = proof(lab, policy, log, wanted)
            except BaseException:
                log.seek(0)
                sys.stderr.write(log.read()[-8000:])
                raise
    say(**verdict, seconds=round(time.monotonic() - began, 1))
    return 0 if verdict["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
