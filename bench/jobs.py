"""What looking for the ranks of jobs costs, and whether verdicts on planted causes are right.

    python bench/jobs.py [--trials 20] [--cases straggler congested_rail throttled_host] [--no-cost]

cpu, cpu_threads
         shares of a core over a minute, of the agent's thread and of those that look through /proc and at rings. The
         source runs alone, while somebody listens to `job`, as nothing else makes it work:
         ranks64         64 ranks on this host, each with eight more processes, and 32 connections. Every connection
                         is reported once per second as `tcp_flow`; what that costs the source of TCP is not counted.
                         RAS is off
         idle            as many processes, none of which is a rank
verdict  share of the trials in which the first cause but CPU steal was the planted one, within ten windows, and was
         not named in the last window before:
         straggler       one of two processes that call NCCL's plugin as NCCL does comes 2 ms late (tests/native)
         congested_rail  TCP in lock step over two rails, one of them cut to a tenth
         throttled_host  the same, with one rank held to 5 % of a processor by its control group

What needs a GPU is in nccl_plugin.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

from _common import emit, note

sys.path.append(str(File(__file__).resolve().parent.parent / "tests"))
import job_kit
import nccl_kit
import support

from pytools.config import AgentConfig
from pytools.ipc.bus import Bus
from pytools.lab import Lab
from pytools.signals import Job, JobVerdict, Owner, Path, TcpFlow
from pytools.sources.jobs.processes import EVERY_NS
from pytools.sources.jobs.source import JobSource

RANKS, CHILDREN, CONNECTIONS = 64, 8, 32
SETTLING_S, WINDOW_S = 10.0, 60.0
SECOND_NS = 10**9
PATHS = [Path("h1", f"h{n}", f"10.9.0.{n}", "", f"rail{n % 8}") for n in range(2, 10)]


WINDOWS = 10  # in which a verdict must come
LONG_NS, LATE_NS, BATCH = 5_000_000, 2_000_000, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--no-cost", action="store_true", help="only the verdicts")
    wanted = parser.parse_args()
    if not wanted.no_cost:
        cost()
    for case in wanted.cases:
        right = CASES[case](wanted.trials)
        emit("jobs", "verdict", sum(right) / len(right), "share", "higher", case=case, n=len(right))


def cost() -> None:
    """What it costs."""
    for case in ("ranks64", "idle"):
        with contextlib.ExitStack() as ending:
            pids = [start(ending, rank, case != "idle") for rank in range(RANKS)]
            bus = Bus()
            source = JobSource(AgentConfig("h1", []), bus)
            ending.callback(source.close)
            listening = bus.subscribe(frozenset({"job"}))
            reported = pids if case != "idle" else []
            run(bus, source, reported, SETTLING_S)
            found = [each for each in listening.read() if isinstance(each, Job)][-1:]
            ranks = sum(len(each.ranks) for each in found)
            note(f"{ranks} ranks, {sum(each.processes for job in found for each in job.ranks)} processes")
            connections = sum(each.connections for job in found for each in job.paths)
            if ranks != len(reported) or connections != len(reported) * CONNECTIONS:
                raise SystemExit("not all were found, or too many")
            own, threads = run(bus, source, reported, WINDOW_S)
            emit("jobs", "cpu", own, "share", "lower", case=case, n=int(WINDOW_S * SECOND_NS / EVERY_NS))
            emit("jobs", "cpu_threads", threads, "share", "lower", case=case, n=int(WINDOW_S * SECOND_NS / EVERY_NS))


def start(ending: contextlib.ExitStack, rank: int, in_job: bool) -> int:
    """A rank with its children, or as many processes that are no rank."""
    given = {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "h1", "NCCL_RAS_ENABLE": "0"}
    given = given if in_job else {}
    given |= {f"FILLING_{n}": 100 * "x" for n in range(60)}  # as many as a real one has
    words = ["/bin/sh", "-c", f"for i in {' '.join(map(str, range(CHILDREN)))}; do sleep 1000 & done; wait"]
    process = subprocess.Popen(words, env=given | {"PATH": "/bin:/usr/bin"}, start_new_session=True)
    ending.callback(process.wait)
    ending.callback(subprocess.run, ["kill", "--", f"-{process.pid}"], check=True)
    return process.pid


def run(bus: Bus, source: JobSource, pids: list[int], seconds: float) -> tuple[float, float]:
    """Let it work; the shares of a core that its own calls take, and its threads."""
    began_s, spent_s, round_ns = time.monotonic(), 0.0, 0
    others_s, due_ns = time.thread_time() - time.process_time(), 0
    while time.monotonic() - began_s < seconds:
        now_ns = time.monotonic_ns()
        if now_ns >= round_ns:
            round_ns = now_ns + SECOND_NS
            flows = [flow(pid, n, now_ns) for pid in pids for n in range(CONNECTIONS)]
            before_s = time.thread_time()
            for each in flows:
                bus.publish(each)
            spent_s += time.thread_time() - before_s
        if now_ns >= due_ns:
            before_s = time.thread_time()
            due_ns = source.tick(now_ns)
            spent_s += time.thread_time() - before_s
        time.sleep(max(0, min(due_ns, round_ns) - time.monotonic_ns()) / 1e9)
    others_s += time.process_time() - time.thread_time()
    return spent_s / (time.monotonic() - began_s), others_s / (time.monotonic() - began_s)


def flow(pid: int, number: int, now_ns: int) -> TcpFlow:
    """A connection of a rank, which has sent a gigabit more each second."""
    path = PATHS[number % len(PATHS)]
    fields: dict[str, Any] = dict.fromkeys(TcpFlow.__struct_fields__, 0)  # most are not looked at
    fields |= {
        "local_port": number,
        "remote": str(pid),
        "path": path,
        "interface": path.interface,
        "namespace": "",
        "stall": None,
    }
    return TcpFlow(**fields | {"at_ns": now_ns, "owner": Owner(pid), "state": "open", "sent_bytes": now_ns // 8})


def planted(causes: list[Any], kind: str, **fields: Any) -> bool:
    """Whether the first cause but CPU steal is of a kind, and has these fields; of causes as records or as JSON."""
    rows = [each if isinstance(each, dict) else {name: getattr(each, name) for name in each.__struct_fields__}
            for each in causes]  # fmt: skip
    rows = [each for each in rows if each["kind"] != "host" or each["rank"] is not None]
    return bool(rows) and all(rows[0][name] == value for name, value in {"kind": kind, **fields}.items())


def straggler(trials: int) -> list[bool]:
    """One of two ranks is late, in turn."""
    found = []
    with contextlib.ExitStack() as ending:
        folder = File(ending.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        ranks = []
        for rank in range(2):
            os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "NCCL_RAS_ENABLE": "0"})
            ranks.append(ending.enter_context(nccl_kit.Job(folder / "rings", 5)))
            ranks[-1].do(f"init 77 2 {rank}")
        source = JobSource(AgentConfig("h1", []), bus := Bus())
        ending.callback(source.close)
        listening = bus.subscribe(frozenset({"job"}))

        def verdicts(late: int | None, enough: Callable[[JobVerdict], bool]) -> bool:
            """Let them work, one of them late, until a verdict is as it should be; whether there was one."""
            stop = threading.Event()
            meeting = threading.Barrier(2)

            def work(rank: int) -> None:
                lasting = LONG_NS - LATE_NS * (rank == late)
                with contextlib.suppress(threading.BrokenBarrierError):
                    while not stop.is_set():
                        meeting.wait(10)
                        ranks[rank].do(f"last AllReduce {BATCH} {lasting}")

            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
            for each in threads:
                each.start()
            windows, done = 0, False
            while windows < WINDOWS and not done:
                time.sleep(max(0, source.tick(time.monotonic_ns()) - time.monotonic_ns()) / 1e9)
                told = [each.why for each in listening.read() if isinstance(each, Job) and each.why is not None]
                windows += len(told)
                done = any(map(enough, told))
            stop.set()
            for each in threads:
                each.join()
            return done

        for trial in range(trials):
            rank = trial % 2
            clean = verdicts(None, lambda why: "ranks" not in why.missing and not planted(why.causes, "straggler"))
            named = verdicts(rank, lambda why, rank=rank: planted(why.causes, "straggler", rank=rank))
            found.append(clean and named)
            note(f"straggler {rank}: nobody before: {clean}, named: {named}")
    return found


def in_lab(trials: int, plant: Callable[[Lab, job_kit.LockStep, int], Any], kind: str) -> list[bool]:
    """A job in lock step; `plant` is a context in which the cause is there, for one or the other rail or rank."""
    found = []
    with Lab.up(f"jobs{os.getpid() % 1000}", hosts=2, rails=2, queue_bytes=1_000_000) as lab:
        near = lab.hosts[0]
        for each in lab.hosts:  # the second answers probes
            lab.start(each, [*support.SWERVE, "agent", "-n", each.netns])
        ports = job_kit.ports_that_hash_to(lab, {"rail1": 8, "rail2": 8})
        with contextlib.closing(job_kit.LockStep(lab, ports)) as job:
            support.wait_until(lambda: not support.run([*support.SWERVE, "jobs", "-n", near.netns, "-j"],
                                                       check=False).returncode, 60, "the agent answers")  # fmt: skip
            with contextlib.closing(job_kit.Verdicts(near.netns)) as verdicts:
                for trial in range(trials):
                    which = trial % 2
                    expected = {name: type_of(which) for name, type_of in FIELDS[kind].items()}

                    def named(why: dict[str, Any], expected: dict[str, Any] = expected) -> bool:
                        return planted(why["causes"], kind, **expected)

                    clean = False
                    for _ in range(3 * WINDOWS):  # queues drain
                        last = verdicts.next(1)[-1]
                        clean = not named(last)
                        if clean:
                            break
                    with plant(lab, job, which):
                        seen = verdicts.next(1)[-1:]
                        while len(seen) < WINDOWS and not named(seen[-1]):
                            seen += verdicts.next(1)[-1:]
                    found.append(clean and named(seen[-1]))
                    note(f"{kind} {expected}: not before: {clean}; {seen[-1]['reason']}")
    return found


FIELDS: dict[str, dict[str, Callable[[int], Any]]] = {
    "network": {"interface": lambda which: f"rail{which + 1}"},
    "host": {"rank": lambda which: which},
}


@contextlib.contextmanager
def congested(lab: Lab, _job: job_kit.LockStep, which: int) -> Any:
    """A rail cut to a tenth."""
    lab.congest(which + 1, "10mbit", toward=2)
    yield
    lab.heal(which + 1)


@contextlib.contextmanager
def throttled(_lab: Lab, job: job_kit.LockStep, which: int) -> Any:
    """A rank held by its control group."""
    with job_kit.quota(f"rank{which}", job.pids[which]) as limit:
        limit(0.05)
        yield
        limit(None)


CASES: dict[str, Callable[[int], list[bool]]] = {
    "straggler": straggler,
    "congested_rail": lambda trials: in_lab(trials, congested, "network"),
    "throttled_host": lambda trials: in_lab(trials, throttled, "host"),
}

if __name__ == "__main__":
    main()
