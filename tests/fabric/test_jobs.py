"""`swerve jobs` of real processes: their environments, their connections over two rails, and RAS in one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import pytest
import support

from pytools.config import AgentConfig, Tcp, Windows
from pytools.ipc.bus import Bus
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.lab.topology import Host
from pytools.signals import Job
from pytools.sources.jobs.source import JobSource
from pytools.sources.tcp.connections import Feed

pytestmark = pytest.mark.beside

RANK = [sys.executable, str(support.ROOT / "tests" / "job_rank.py")]
PEER, PORT = "10.9.0.2", "7400"
CONNECTIONS = 6


def start(lab: Lab, host: Host, rank: int, *words: str) -> int:
    here = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 3), "MASTER_ADDR": "10.9.0.1"}
    torchrun = {"MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0"}
    return lab.start(host, [*RANK, *words], env=here | torchrun).pid


def test_ras_is_asked_in_the_network_namespace_of_the_rank(namespace: str) -> None:
    with inside(namespace):
        given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "PATH": "/bin"}
        process = subprocess.Popen([*RANK, "serve"], env=given)
    here = os.stat("/proc/thread-self/ns/net").st_ino
    bus = Bus()
    source = JobSource(AgentConfig("h1", [], tcp=Tcp(namespaces="all"), windows=Windows(long_ms=100)), bus, Feed())
    listening = bus.subscribe(frozenset({"job"}))
    try:

        def told() -> Job | None:
            source.tick(time.monotonic_ns())
            jobs = [each for each in listening.read() if isinstance(each, Job)]
            return next((job for job in jobs if job.ranks[0].owner.pid == process.pid and job.ras == "ok"), None)

        job = support.wait_until(told, 20, "RAS has answered")
        assert job is not None and job.ras_ranks == 2
        assert os.stat("/proc/thread-self/ns/net").st_ino == here
    finally:
        source.close()
        process.kill()
        process.wait()


def test_a_job_has_its_ranks_its_connections_and_who_is_behind(lab: Lab) -> None:
    sending, receiving = lab.hosts
    lab.start(sending, [*support.SWERVE, "agent", "-n", sending.netns])
    start(lab, receiving, 3, "receive", PEER, PORT)
    port = ["-H", "-tln", f"sport = :{PORT}"]
    support.wait_until(
        lambda: support.run(["ip", "netns", "exec", receiving.netns, "ss", *port]).stdout, 20, "rank 3 listens"
    )
    pids = {
        rank: start(lab, sending, rank, *words) for rank, words in enumerate([["serve"], ["send", PEER, PORT, "2"]])
    }
    pids[2] = start(lab, sending, 2, "send", PEER, PORT, str(CONNECTIONS - 2))

    def told() -> dict[str, Any] | None:
        done = support.swerve("jobs", "-n", sending.netns, "-j", "-c", "1", check=False)
        rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
        whole = [row for row in rows if sum(each["connections"] for each in row["paths"]) == CONNECTIONS]
        return whole[0] if whole and whole[0]["lagging"] else None

    job = support.wait_until(told, 60, "the job is known with all its connections, and who is behind")
    assert job is not None
    assert (job["job"], job["source"], job["size"]) == ("slurm:4711.0/torchrun:10.9.0.1:29500", "torchrun", 4)
    assert {each["rank"]: each["owner"]["pid"] for each in job["ranks"]} == pids  # rank 3 is of the other host
    assert [each["connections"] for each in job["ranks"]] == [0, 2, CONNECTIONS - 2]
    assert {each["interface"] for each in job["paths"]} <= {"rail1", "rail2"}
    assert all(each["path"]["destination"] == "h2" and each["sent_bytes"] > 0 for each in job["paths"])
    assert (job["ras"], job["lagging"][0]["communicator_rank"], job["lagging"][0]["rank"]) == ("ok", 1, None)
    assert job["lagging"][0]["behind"] % 10 == 0
