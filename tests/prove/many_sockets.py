"""Proof: 10,000 sockets of another user on a peer change nothing for that peer's agent, running or restarted.

    python tests/prove/many_sockets.py [--sockets 10000] [--seconds 10]

Two hosts, two rails, agents as shipped, but that none probes for sizes: those replies do come to a socket. A user
without privileges on h2 holds very many UDP sockets: connected to the probe port of h1, bound around the ports of h2's
own agent, and anywhere else; 2,000 packets a second go from them to both hosts' probe ports. While they are there h2's
agent runs, is restarted, and then h1's is. Every path's probes must go on being answered, the user must get no port of
a running agent, and nothing may reach an agent's socket; what is sent to the own probe port, by loopback, the filter of
that socket drops. Prints JSON Lines; exits with 1 unless all of it holds. Run as root, from the checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench"), str(Path(__file__).resolve().parent)]

import support  # noqa: E402
from _agents import configure, start_agent, stop, wait_measured  # noqa: E402

from pytools import directories  # noqa: E402
from pytools.ipc.bus import Client  # noqa: E402
from pytools.kernel.netns import inside  # noqa: E402
from pytools.lab import Host, Lab  # noqa: E402
from pytools.signals import ProbeSamples  # noqa: E402

PORT: Final = 862
RATE: Final = 2000
NEARLY_ALL: Final = 0.999  # of the probes: one may be under way for too long on a busy machine


def say(**line: Any) -> None:
    print(json.dumps({"proof": "many_sockets", **line}), flush=True)


def answered(hosts: Sequence[Host], seconds: float) -> dict[str, tuple[int, int]]:
    """Probes of each path, and how many of them were answered."""
    found: dict[str, tuple[int, int]] = {}
    with contextlib.ExitStack() as stack:
        wanted = frozenset({"probe_samples"})
        clients = [stack.enter_context(Client(directories.agent_socket(host.netns), wanted)) for host in hosts]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.1)
            for client in clients:
                for signal in client.read():
                    if isinstance(signal, ProbeSamples):
                        probes, got = found.get(str(signal.path), (0, 0))
                        more = sum(each is not None for each in signal.forward_ns)
                        found[str(signal.path)] = probes + len(signal.seq), got + more
    return found


def sockets_of(agent: subprocess.Popen[str], host: Host) -> dict[int, tuple[int, int]]:
    """The agent's UDP ports: bytes that wait at each, and datagrams dropped there."""
    inodes = support.socket_inodes(agent.pid)
    found: dict[int, tuple[int, int]] = {}
    with inside(host.netns):
        rows = [
            line.split()
            for name in ("udp", "udp6")
            for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]
        ]
    for row in rows:
        if row[9] in inodes:
            port = int(row[1].rpartition(":")[2], 16)
            waiting, dropped = found.get(port, (0, 0))
            found[port] = waiting + int(row[4].partition(":")[2], 16), dropped + int(row[-1])
    return found


@contextlib.contextmanager
def crowd(lab: Lab, host: Host, peer: Host, taken: int, count: int) -> Iterator[dict[str, Any]]:
    """The user's sockets; what it said is there once it is left."""
    script = str(Path(__file__).with_name("_crowd.py"))
    words = (host.service, peer.service, PORT, taken, count, RATE)
    command = [*support.AS_NOBODY, sys.executable, script, *map(str, words)]
    process = subprocess.Popen(
        ["ip", "netns", "exec", host.netns, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        said: dict[str, Any] = json.loads(process.stdout.readline())
        yield said
        process.stdin.close()
        said |= json.loads(process.stdout.readline())
        process.wait(20)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class Parts:
    """Measures part after part."""

    def __init__(self, lab: Lab, seconds: float) -> None:
        self.lab, self._seconds, self.good = lab, seconds, True
        self.agents = [start_agent(lab, host, stderr=subprocess.DEVNULL) for host in lab.hosts]
        self.wait()

    def wait(self) -> None:
        for host in self.lab.hosts:
            wait_measured(host, len(self.lab.rails))

    def restart(self, number: int) -> None:
        """End an agent in order and start it again."""
        stop(self.agents[number])
        self.agents[number] = start_agent(self.lab, self.lab.hosts[number], stderr=subprocess.DEVNULL)
        self.wait()

    def measure(self, part: str) -> None:
        """What is answered for a while, and what has come to the agents' sockets."""
        time.sleep(1.0)
        found = answered(self.lab.hosts, self._seconds)
        probes, got = (sum(each) for each in zip(*found.values(), strict=True))
        reached = {
            host.name: {
                port: (waiting, dropped)
                for port, (waiting, dropped) in sockets_of(agent, host).items()
                if waiting or (dropped and port != PORT)
            }
            for agent, host in zip(self.agents, self.lab.hosts, strict=True)
        }
        worst = min(answers / each for each, answers in found.values())
        good = len(found) == 4 and worst >= NEARLY_ALL and not any(reached.values())
        self.good &= good
        say(part=part, proven=good, probes=probes, unanswered=probes - got, worst_path=round(worst, 5), reached=reached)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sockets", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="Of each part (default: %(default)s).")
    given = parser.parse_args()
    with Lab.up(f"sockets{os.getpid()}", hosts=2, rails=2) as lab:
        for host in lab.hosts:
            configure(host, lambda config: config.setdefault("links", {}).update(mtu_interval="0s"))
        parts = Parts(lab, given.seconds)
        first, second = lab.hosts
        ports = sorted(sockets_of(parts.agents[1], second))
        parts.measure("alone")
        with crowd(lab, second, first, max(ports), given.sockets) as said:
            taken_running = list(said["took"])
            parts.measure("running")
            parts.restart(1)
            parts.measure("restarted")
            parts.restart(0)
            parts.measure("peer restarted")
            held = sorted(sockets_of(parts.agents[1], second))
        enough = said["sockets"] == given.sockets and said["sent"] - said["refused"] > given.seconds * RATE
        proven = parts.good and enough and not taken_running and PORT not in said["took"]
    say(part="all", proven=proven, ports=ports, ports_after=held, taken_running=taken_running, **said)
    return 0 if proven else 1


if __name__ == "__main__":
    sys.exit(main())
