"""What looking for the ranks of jobs costs: 64 ranks on this host, each with eight more processes, and 32 connections.

The source runs alone, while somebody listens to `job`, as nothing else makes it work. Every connection is reported to
it once per second as `tcp_flow`; what that costs the source of TCP is not counted. RAS is off. `cpu`: over a minute.
"""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import Any

from _common import emit, note

from pytools.config import AgentConfig
from pytools.ipc.bus import Bus
from pytools.signals import Job, Owner, Path, TcpFlow
from pytools.sources.jobs.processes import EVERY_NS
from pytools.sources.jobs.source import JobSource

RANKS, CHILDREN, CONNECTIONS = 64, 8, 32
SETTLING_S, WINDOW_S = 10.0, 60.0
SECOND_NS = 10**9
PATHS = [Path("h1", f"h{n}", f"10.9.0.{n}", "", f"rail{n % 8}") for n in range(2, 10)]


def main() -> None:
    with contextlib.ExitStack() as ending:
        pids = [start(ending, rank) for rank in range(RANKS)]
        bus = Bus()
        source = JobSource(AgentConfig("h1", []), bus)
        listening = bus.subscribe(frozenset({"job"}))
        run(bus, source, pids, SETTLING_S)
        (latest,) = [each for each in listening.read() if isinstance(each, Job)][-1:]
        note(f"{len(latest.ranks)} ranks, {sum(each.processes for each in latest.ranks)} processes")
        if len(latest.ranks) != RANKS or sum(each.connections for each in latest.paths) != RANKS * CONNECTIONS:
            raise SystemExit("not all were found")
        share = run(bus, source, pids, WINDOW_S)
        emit("jobs", "cpu", share, "share", "lower", case="ranks64", n=int(WINDOW_S * SECOND_NS / EVERY_NS))
        source.close()


def start(ending: contextlib.ExitStack, rank: int) -> int:
    """A rank with its children."""
    given = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "h1", "NCCL_RAS_ENABLE": "0"}
    given |= {f"FILLING_{n}": 100 * "x" for n in range(60)}  # as many as a real one has
    words = ["/bin/sh", "-c", f"for i in {' '.join(map(str, range(CHILDREN)))}; do sleep 1000 & done; wait"]
    process = subprocess.Popen(words, env=given | {"PATH": "/bin:/usr/bin"}, start_new_session=True)
    ending.callback(process.wait)
    ending.callback(subprocess.run, ["kill", "--", f"-{process.pid}"], check=True)
    return process.pid


def run(bus: Bus, source: JobSource, pids: list[int], seconds: float) -> float:
    """Let it work; the share of a core that its own calls take."""
    began_s, spent_s, round_ns = time.monotonic(), 0.0, 0
    due_ns = 0
    while time.monotonic() - began_s < seconds:
        now_ns = time.monotonic_ns()
        if now_ns >= round_ns:
            round_ns = now_ns + SECOND_NS
            flows = [flow(pid, n, now_ns) for pid in pids for n in range(CONNECTIONS)]
            before_s = time.process_time()
            for each in flows:
                bus.publish(each)
            spent_s += time.process_time() - before_s
        if now_ns >= due_ns:
            before_s = time.process_time()
            due_ns = source.tick(now_ns)
            spent_s += time.process_time() - before_s
        time.sleep(max(0, min(due_ns, round_ns) - time.monotonic_ns()) / 1e9)
    return spent_s / (time.monotonic() - began_s)


def flow(pid: int, number: int, now_ns: int) -> TcpFlow:
    """A connection of a rank, which has sent a gigabit more each second."""
    path = PATHS[number % len(PATHS)]
    fields: dict[str, Any] = dict.fromkeys(TcpFlow.__struct_fields__, 0)  # most are not looked at
    fields |= {"local_port": number, "remote": str(pid), "path": path, "interface": path.interface, "namespace": ""}
    return TcpFlow(**fields | {"at_ns": now_ns, "owner": Owner(pid), "state": "open", "sent_bytes": now_ns // 8})


if __name__ == "__main__":
    main()
