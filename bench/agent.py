"""What one agent costs: memory, processor time, and the time from its start to its first measurement.

The agent runs as shipped: probes of two rails every 20 ms, recorder on, a controller listening (as a dry run, in a
process of its own that is not counted). The agents at the other end are real as well:

peers10    11 hosts, an agent on each; the measured one also answers the probes of ten others
peers100   3 hosts; the other two have 50 addresses and one agent each, which answers for all of them and probes the
           measured host from one. So the measured agent sends to 100 peers and answers two: what an answer costs is in
           `make bench NAME=probe`, case reflect.

`first_signal`: from the start of the command until a client of its socket has a delay of a path, with one peer running.
cold: no compiled program in the cache; warm: all of them.

In a lab the sender of a packet also pays for its way through the rails: on real hosts the share is smaller.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from _agents import alive, configure, controller, start_agent, stop, wait_measured, wait_serving
from _common import alternating, cpu_s, emit, median, note, resident_bytes
from _sides import policy_for

from pytools.lab import Host, Lab
from pytools.lab.topology import group_id

RAILS = 2
MESH_PEERS, MANY_PEERS = 10, 100
SETTLING_S, WINDOW_S, WINDOWS = 10.0, 5.0, 7
STARTS = 5
FAR_HOSTS = 2  # that stand for many peers


def main() -> None:
    options = _options()
    with Lab.up(f"bench-agent-{os.getpid()}", hosts=2, rails=RAILS, rate="none") as lab:
        first_signal(lab, options.starts)
    for peers in options.peers:
        with (mesh if peers == MESH_PEERS else many)(peers) as lab:
            cost(lab, peers, options)


# ---- what is measured ----


def first_signal(lab: Lab, starts: int) -> None:
    """Start the agent with and without compiled programs, in turn."""
    measured, peer = lab.hosts
    other = start_agent(lab, peer)
    wait_serving(peer)

    def started(cache: str) -> float:
        began = time.monotonic()
        agent = start_agent(lab, measured, {"SWERVE_CACHE_DIR": cache})
        wait_measured(measured)
        waited_s = time.monotonic() - began
        stop(agent)
        return waited_s

    with tempfile.TemporaryDirectory() as filled:

        def cold() -> float:
            with tempfile.TemporaryDirectory() as empty:
                return started(empty)

        cases = ("cold", "warm")
        for case, waits in zip(cases, alternating(starts, cold, lambda: started(filled)), strict=True):
            note(f"{case}: first signals after {[round(wait, 2) for wait in waits]} s")
            emit("agent", "first_signal", median(waits), "s", "lower", case=case, n=starts)
    alive(other)
    stop(other)


def cost(lab: Lab, peers: int, options: argparse.Namespace) -> None:
    """Memory and processor time of the first host's agent; the other hosts' run already."""
    measured = lab.hosts[0]
    agent = start_agent(lab, measured)
    wait_measured(measured, peers * RAILS)
    with controller(lab, measured, policy_for("silence")):
        time.sleep(options.settling)
        shares = [share(agent.pid, options.window) for _ in range(options.windows)]
        alive(agent)
        resident_mb = resident_bytes(agent.pid) / 1e6
    stop(agent)
    case = f"peers{peers}_rails{RAILS}_20ms"
    note(f"{case}: shares {[round(each, 3) for each in shares]}")
    emit("agent", "cpu", median(shares), "share", "lower", case=case, n=options.windows)
    emit("agent", "resident", resident_mb, "MB", "lower", case=case)


def share(pid: int, seconds: float) -> float:
    """Share of one core over a window."""
    before, began = cpu_s(pid), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.monotonic() - began)


# ---- the other ends ----


@contextlib.contextmanager
def mesh(peers: int) -> Iterator[Lab]:
    """A host for every peer, each with an agent that probes all others."""
    with Lab.up(f"bench-agent-{os.getpid()}", hosts=peers + 1, rails=RAILS, rate="none") as lab:
        others = [start_agent(lab, host) for host in lab.hosts[1:]]
        for host in lab.hosts[1:]:
            wait_measured(host)
        yield lab
        alive(*others)


@contextlib.contextmanager
def many(peers: int) -> Iterator[Lab]:
    """A few hosts with an address for every peer, and one agent each."""
    with Lab.up(f"bench-agent-{os.getpid()}", hosts=FAR_HOSTS + 1, rails=RAILS, rate="none") as lab:
        measured, *far = lab.hosts
        for host in far:
            prefix = _prefix(host)
            lab.run(host, ["ip", "route", "add", "local", prefix, "dev", "lo"])
            for rail, interface in zip(lab.rails, host.interfaces, strict=True):
                lab.run(rail, ["ip", "route", "add", prefix, "via", interface.address])
            group = str(group_id(host.number, 4))
            lab.run(measured, ["ip", "route", "add", prefix, "src", measured.service, "nhid", group])
            configure(host, lambda config: config.update(peers=config["peers"][:1]))  # h1 alone

        def probe_all(config: dict[str, Any]) -> None:
            first = config["peers"][0]
            for host in far:
                more = [f"10.9.{host.number}.{number}" for number in range(1, peers // FAR_HOSTS)]
                config["peers"] += [first | {"name": each, "address": each} for each in more]

        configure(measured, probe_all)
        others = [start_agent(lab, host) for host in far]
        for host in far:
            wait_serving(host)
        yield lab
        alive(*others)


def _prefix(host: Host) -> str:
    """The addresses of the peers that a host stands for, beside its own."""
    return f"10.9.{host.number}.0/24"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=STARTS, help="Starts of each kind (default: %(default)s).")
    parser.add_argument(
        "--peers",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(MESH_PEERS, MANY_PEERS),
        help="Numbers of peers, comma-separated (default: 10,100).",
    )
    parser.add_argument("--windows", type=int, default=WINDOWS, help="Windows of each case (default: %(default)s).")
    parser.add_argument("--window", type=float, default=WINDOW_S, help="Seconds of a window (default: %(default)s).")
    parser.add_argument(
        "--settling", type=float, default=SETTLING_S, help="Seconds before the first window (default: %(default)s)."
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
