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
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests"), str(Path(__file__).resolve().parent)]

from _agents import start_agent, wait_measured  # noqa: E402
from _steered_host import LATEST_S, SteeredHost, directory_of_its_own, start_agents, until  # noqa: E402
from _traffic import Traffic  # noqa: E402

from pytools.lab import Lab  # noqa: E402

POLICY: Final = """\
version: 1
manage: {destinations: [10.9.0.0/16]}
rules:
  - name: leave-dead-rail
    when: {signal: silence, missed: 3}
    then: {drain: {}}
    return: {dwell: 2s, retry_after: 10s, steps: [0.5, 1.0], step: 500ms}
"""


def say(**facts: Any) -> None:
    print(json.dumps({"proof": "restarts", **facts}), flush=True)


def proof(lab: Lab, policy: Path, log: Any, wanted: argparse.Namespace) -> dict[str, Any]:
    """All of it."""
    agents = start_agents(lab, log)
    hosts = [SteeredHost(lab, host, Path(log.name)) for host in lab.hosts]
    for each in hosts:
        each.start(policy)
    for each in hosts:
        each.wait({1: "healthy", 2: "healthy"})
    lab.cut(1)
    for each in hosts:
        each.wait({1: "drained", 2: "healthy"})
    near, traffic, took = hosts[0], Traffic.between(lab, *lab.hosts), []
    for number in range(1, wanted.restarts + 1):
        how = signal.SIGTERM if number % 2 else signal.SIGKILL
        took.append(near.restart(how, policy))
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
        each.stop()
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
    with directory_of_its_own() as folder:
        policy = Path(folder, "policy.yaml")
        policy.write_text(POLICY)
        policy.chmod(0o600)
        with Path(folder, "log").open("a+") as log:
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
