"""What following the connections of 1,000 network namespaces costs, beside an agent that follows its own only.

Each namespace has a connection over its loopback interface, both ends of which are followed, and sends a message of
1,000 bytes on it every 100 ms. The agent runs as shipped, with a recorder and a controller listening, on two rails to
one peer. Each side is a fresh agent, for which the connections are made anew. `cpu`: processor time of the agent, and
of the kernel programs at sockets, which the kernel bills to the applications.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from _agents import SOCK_OPS, alive, configure, controller, programs_of, start_agent, stop, wait_measured
from _common import alternating, cpu_s, emit, median, note, read_options, wait_until
from _sides import policy_for

from pytools import directories
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.kernel.bpf import syscall
from pytools.kernel.bpf.syscall import RunTime
from pytools.lab import Host, Lab, namespaces
from pytools.signals import TcpNamespace

RAILS, PODS, ROUNDS = 2, 1000, 5
SETTLING_S, WINDOW_S, RUN_TIME_S = 5.0, 10.0, 3.0
CGROUP_SOCK = 9  # BPF_PROG_TYPE_CGROUP_SOCK

# Connections in each of the namespaces named on standard input, and a message on each every 100 ms.
TRAFFIC = """
import ctypes, os, resource, socket, sys, time
names = sys.stdin.read().split()
resource.setrlimit(resource.RLIMIT_NOFILE, (4 * len(names) + 64,) * 2)
libc, pairs = ctypes.CDLL(None), []
for name in names:
    fd = os.open("/run/netns/" + name, os.O_RDONLY)
    assert libc.setns(fd, 0x40000000) == 0
    os.close(fd)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    pairs.append((near, far))
print("ready", flush=True)
message, due = bytes(1000), time.monotonic()
while True:
    for near, far in pairs:
        near.send(message)
        far.recv(1000)
    due = max(due + 0.1, time.monotonic())
    time.sleep(due - time.monotonic())
"""


def main() -> None:
    options = read_options(__doc__, pods=PODS, rounds=ROUNDS, window=WINDOW_S)
    mark = f"bench-pods-{os.getpid()}"
    with Lab.up(mark, hosts=2, rails=RAILS, rate="none") as lab, pods(mark, options.pods) as names:
        other = start_agent(lab, lab.hosts[1])
        own, everyone = alternating(
            options.rounds,
            lambda: cost(lab, names, "own", options.window),
            lambda: cost(lab, names, "all", options.window),
        )
        alive(other)
        stop(other)
    for case, shares in (("own", own), ("all", everyone)):
        note(f"{case}: shares {[round(share, 4) for share in shares]}")
    case = f"pods{options.pods}"
    emit("pods", "cpu", median(everyone), "share", "lower", case=case, peer="own", peer_value=median(own),
         n=options.rounds)  # fmt: skip


@contextlib.contextmanager
def pods(mark: str, count: int) -> Iterator[list[str]]:
    """So many namespaces whose loopback interface is up; removed at the end."""
    names = [f"swerve-{mark}-{number}" for number in range(count)]
    made: list[str] = []
    try:
        for name in names:
            namespaces.create(name)
            made.append(name)
        batch = "".join(f"netns exec {name} ip link set dev lo up\n" for name in names)
        subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True)
        yield names
    finally:
        for name in made:
            namespaces.delete(name)


def cost(lab: Lab, names: list[str], followed: str, window_s: float) -> float:
    """The share of a core of an agent that follows `own` or `all` namespaces, and of its programs at sockets."""
    host = lab.hosts[0]
    configure(host, lambda config: config.update(tcp={"namespaces": followed}))
    agent = start_agent(lab, host)
    wait_measured(host, RAILS)
    with controller(lab, host, policy_for("silence")), traffic(names):
        if followed == "all":
            wait_followed(host, len(names))
        time.sleep(SETTLING_S)
        before, began = cpu_s(agent.pid), time.monotonic()
        time.sleep(window_s)
        share = (cpu_s(agent.pid) - before) / (time.monotonic() - began)
        at_sockets = run_time(agent.pid)
        alive(agent)
    stop(agent)
    note(f"{followed}: agent {share:.4f}, programs at sockets {at_sockets:.4f}")
    return share + at_sockets


@contextlib.contextmanager
def traffic(names: list[str]) -> Iterator[None]:
    """Connections in all of them, at work."""
    child = subprocess.Popen([sys.executable, "-c", TRAFFIC], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write("\n".join(names))
        child.stdin.close()
        if child.stdout.readline() != "ready\n":
            raise SwerveError("the connections were not made")
        yield
        alive(child)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def wait_followed(host: Host, count: int) -> None:
    """Wait until something was counted in each namespace."""
    seen: set[int] = set()
    with Client(directories.agent_socket(host.netns), frozenset({"tcp_namespace"})) as client:

        def all_seen() -> bool:
            seen.update(each.netns for each in client.read() if isinstance(each, TcpNamespace) and each.connections)
            return len(seen) >= count

        wait_until(all_seen, f"{count} namespaces are followed")


def run_time(pid: int) -> float:
    """Share of a core that the programs at sockets take."""
    with programs_of(pid) as programs:
        fds = [each.fd for each in programs if each.type in (SOCK_OPS, CGROUP_SOCK)]
        with RunTime():
            before, began = sum(syscall.program_run_time(fd)[0] for fd in fds), time.monotonic()
            time.sleep(RUN_TIME_S)
            spent = sum(syscall.program_run_time(fd)[0] for fd in fds) - before
            return spent / 1e9 / (time.monotonic() - began)


if __name__ == "__main__":
    main()
