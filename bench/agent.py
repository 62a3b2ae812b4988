"""What one agent costs with ten peers over two rails at 20 ms: memory, processor time, time to the first signal.

By who listens: nobody, and nothing is recorded; the flight recorder alone, as it comes; with it what the live view asks
for, a controller, somebody who watches everything. Listeners are here, so their own cost is not in it.

The first signal: from the start of the command until a client of its socket has a delay of a path; one of the ten
peers runs meanwhile. Then all eleven hosts run agents, so that the one that is measured also answers the probes of ten
others. In a lab the sender of a packet also pays for its way through the rails: on real hosts the share is smaller.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from _common import cpu_s, emit, median, note, resident_bytes, wait_until

from pytools import places
from pytools.bus import Client
from pytools.errors import SwerveError
from pytools.lab.fabric import Lab
from pytools.lab.topology import Host
from pytools.views.top.feed import types_of

HOSTS, RAILS = 11, 2
SETTLING_S, WINDOW_S, WINDOWS = 10.0, 3.0, 7
STARTS = 5
READ_S = 0.1
# Who listens -> types, and whether without details.
Asked = tuple[frozenset[str] | None, bool]
NOBODY: Asked = (frozenset(), False)
LISTENERS: dict[str, Asked] = {
    "nobody": NOBODY,
    "top": (types_of("paths"), True),
    "controller": (frozenset({"path_delay", "path_liveness", "tcp_path", "nexthop_group"}), False),
    "everything": (None, False),
}


def main() -> None:
    with Lab.up(f"bench-agent-{os.getpid()}", hosts=HOSTS, rails=RAILS, rate="none") as lab:
        measured, first_peer, *more = lab.hosts
        others = [start(lab, first_peer)]
        first_signal(first_peer)
        waits = []
        for _ in range(STARTS + 1):
            began = time.monotonic()
            agent = start(lab, measured)
            first_signal(measured)
            waits.append(time.monotonic() - began)
            stop(agent)
        del waits[0]  # warm-up
        emit("agent", "first_signal", median(waits), "s", "lower", case=case(), n=STARTS)
        note(f"first signals after {[round(wait, 2) for wait in waits]} s")

        others += [start(lab, host) for host in more]
        for host in more:
            first_signal(host)
        for recorded, listeners in ((False, {"nobody": NOBODY}), (True, LISTENERS)):
            agent = start(lab, measured, recorded)
            first_signal(measured)
            time.sleep(SETTLING_S)
            for name, asked in listeners.items():
                with Client(places.agent_socket(measured.netns), *asked) as client:
                    shares = [share(agent.pid, client) for _ in range(WINDOWS)]
                if agent.poll() is not None or any(other.poll() is not None for other in others):
                    raise SwerveError("an agent died while it was measured", "start it by hand to see why")
                listener = f"{'recorded' if recorded else 'unrecorded'}_{name}"
                note(f"{listener}: shares {[round(each, 3) for each in shares]}, {client.dropped} signals dropped")
                emit("agent", "cpu", median(shares), "share", "lower", case=f"{case()}_{listener}", n=WINDOWS)
            listener = "recorded" if recorded else "unrecorded"
            emit("agent", "resident", resident_bytes(agent.pid) / 1e6, "MB", "lower", case=f"{case()}_{listener}")
            stop(agent)


def case() -> str:
    return f"peers{HOSTS - 1}_rails{RAILS}_20ms"


def start(lab: Lab, host: Host, recorded: bool = True) -> subprocess.Popen[str]:
    """An agent with the configuration that the lab wrote for the host, but for the recorder."""
    command = [sys.executable, "-m", "steering.cli", "agent", "-n", host.netns]
    if recorded:
        return lab.start(host, command, stderr=None)
    config = places.default_config(host.netns)
    other = config.with_name("unrecorded.yaml")
    other.write_text(config.read_text() + "recording: {hours: 0}\n")
    return lab.start(host, [*command, "--config", str(other)], stderr=None)


def stop(agent: subprocess.Popen[str]) -> None:
    """End an agent and wait until it has cleaned up."""
    agent.terminate()
    if agent.wait(timeout=20) != 0:
        raise SwerveError(f"the agent ended with exit code {agent.returncode}")


def first_signal(host: Host) -> None:
    """Wait for the first delay of a path."""
    socket = places.agent_socket(host.netns)
    client: list[Client] = []

    def connected() -> bool:
        try:
            client.append(Client(socket, frozenset({"path_delay"})))
        except SwerveError:  # nobody serves there yet
            return False
        return True

    wait_until(connected, f"the agent of {host.name} serves", 60)
    with client[0] as reader:
        if reader.next(60) is None:
            raise SwerveError(f"no path_delay from {host.name} within 60 s")


def share(pid: int, client: Client) -> float:
    """Share of one core over a window, with somebody who listens."""
    before, began = cpu_s(pid), time.monotonic()
    while time.monotonic() - began < WINDOW_S:
        client.read()
        time.sleep(READ_S)
    return (cpu_s(pid) - before) / (time.monotonic() - began)


if __name__ == "__main__":
    main()
