"""What looking for the ranks of jobs costs, and whether verdicts on planted causes are right.

    python bench/jobs.py [--trials 20] [--cases straggler slow_gpu congested_rail throttled_host] [--no-cost]

cpu, cpu_threads
         shares of a core over a minute, of the agent's thread and of those that look through /proc and at rings. The
         source runs alone, while somebody listens to `job`, as nothing else makes it work:
         ranks64         64 ranks on this host, each with eight more processes, and 32 connections, all of which
                         send. What it costs the source of TCP to read them is not counted. RAS is off
         idle            as many processes, none of which is a rank
verdict  share of the trials in which the first cause but CPU steal was the planted one, within ten windows, and was
         not named in the last window before:
         straggler       one of two processes that call NCCL's plugin as NCCL does comes 2 ms late (tests/native)
         slow_gpu        two processes that call the plugin compute for 2 ms before each collective, one of them in turn
                         for 4 ms; an NVML of our own (tests/native) says that its GPU has half of the clock
         congested_rail  TCP in lock step over two rails, one of them cut to a tenth
         throttled_host  the same, with one rank held to 5 % of a processor by its control group

    python bench/jobs.py --no-cost --cases slow_gpu --real-gpu [--torch PYTHON]

on a machine with two NVIDIA GPUs, with nvidia-ml-py here and PyTorch in PYTHON: two ranks multiply matrices and reduce
by NCCL with the plugin, and NVML is the real one. The clock of one GPU is locked to half of its maximum (`nvidia-smi
-lgc`, undone by `-rgc`). Where that is not permitted, another process multiplies matrices on that GPU, and the rank has
to be named as the straggler (case busy_gpu).

Other benchmarks that need a GPU are in nccl_plugin.py.
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
from unittest import mock

import nccl_plugin
import numpy as np
import pynvml
from _common import emit, gpus, note

sys.path.append(str(File(__file__).resolve().parent.parent / "tests"))
import job_kit
import nccl_kit
import nvml_kit
import support

from pytools.config import AgentConfig
from pytools.ipc.bus import Bus
from pytools.lab import Lab
from pytools.signals import GPU_REASONS, Job, JobVerdict, Owner, Path
from pytools.sources.gpu.source import GpuSource
from pytools.sources.jobs.nccl.watching import environment
from pytools.sources.jobs.processes import EVERY_NS
from pytools.sources.jobs.source import JobSource
from pytools.sources.tcp.connections import COUNTS, Connections, Described, Feed
from pytools.sources.tcp.table import SLICE

RANKS, CHILDREN, CONNECTIONS = 64, 8, 32
SETTLING_S, WINDOW_S = 10.0, 60.0
SECOND_NS = 10**9
PATHS = [Path("h1", f"h{n}", f"10.9.0.{n}", "", f"rail{n % 8}") for n in range(2, 10)]

WINDOWS = 10  # in which a verdict must come
LONG_NS, LATE_NS, BATCH = 5_000_000, 2_000_000, 10
OF_RANKS = "straggler", "gpu"
MAX_MHZ = 1980
PRODUCTS = 4  # of matrices, in a step of real_gpu
SPIN = """import sys, torch
square = torch.ones(8192, 8192, device=f"cuda:{sys.argv[1]}")
while True:
    square @ square
    torch.cuda.synchronize()"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--no-cost", action="store_true", help="only the verdicts")
    parser.add_argument("--real-gpu", action="store_true", help="slow_gpu on two GPUs of this machine")
    parser.add_argument("--torch", default="python3", help="the Python that has PyTorch (python3)")
    wanted = parser.parse_args()
    if not wanted.no_cost:
        cost()
    for case in wanted.cases:
        if case == "slow_gpu" and wanted.real_gpu:
            named, right = real_gpu(wanted.trials, wanted.torch)
        else:
            named, right = case, CASES[case](wanted.trials)
        emit("jobs", "verdict", sum(right) / len(right), "share", "higher", case=named, n=len(right))


def cost() -> None:
    """What it costs."""
    for case in ("ranks64", "idle"):
        with contextlib.ExitStack() as ending:
            pids = [start(ending, rank, case != "idle") for rank in range(RANKS)]
            bus = Bus()
            feed = Feed()
            source = JobSource(AgentConfig("h1", []), bus, feed)
            ending.callback(source.close)
            listening = bus.subscribe(frozenset({"job"}))
            reported = pids if case != "idle" else []
            run(feed, source, reported, SETTLING_S)
            found = [each for each in listening.read() if isinstance(each, Job)][-1:]
            ranks = sum(len(each.ranks) for each in found)
            note(f"{ranks} ranks, {sum(each.processes for job in found for each in job.ranks)} processes")
            connections = sum(each.connections for job in found for each in job.paths)
            if ranks != len(reported) or connections != len(reported) * CONNECTIONS:
                raise SystemExit("not all were found, or too many")
            own, threads = run(feed, source, reported, WINDOW_S)
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


def run(feed: Feed, source: JobSource, pids: list[int], seconds: float) -> tuple[float, float]:
    """Let it work; the shares of a core that its own calls take, and its threads."""
    began_s, spent_s, round_ns = time.monotonic(), 0.0, 0
    others_s, due_ns = time.thread_time() - time.process_time(), 0
    while time.monotonic() - began_s < seconds:
        now_ns = time.monotonic_ns()
        if now_ns >= round_ns:
            round_ns = now_ns + SECOND_NS
            parts = [part(pids, first, now_ns) for first in range(0, len(pids) * CONNECTIONS, SLICE)]
            before_s = time.thread_time()
            for each in parts:
                if feed.reader is not None:
                    feed.reader(each)
            spent_s += time.thread_time() - before_s
        if now_ns >= due_ns:
            before_s = time.thread_time()
            due_ns = source.tick(now_ns)
            spent_s += time.thread_time() - before_s
        time.sleep(max(0, min(due_ns, round_ns) - time.monotonic_ns()) / 1e9)
    others_s += time.process_time() - time.thread_time()
    return spent_s / (time.monotonic() - began_s), others_s / (time.monotonic() - began_s)


def part(pids: list[int], first: int, now_ns: int) -> Connections:
    """Connections of ranks, as the source of TCP reads them at a time; each sends a gigabit more each second."""
    numbers = np.arange(first, min(first + SLICE, len(pids) * CONNECTIONS))
    counts = np.zeros((len(numbers), len(COUNTS)), np.int64)
    counts[:, COUNTS.index("sent_bytes")] = now_ns // 8
    none = np.zeros(len(numbers), np.int64)

    def describe(at: int) -> Described:
        rank, number = divmod(int(numbers[at]), CONNECTIONS)
        path = PATHS[number % len(PATHS)]
        return Described(Owner(pids[rank]), path, path.interface)

    return Connections(
        now_ns,
        cookie=(1 + numbers).astype(np.uint64),
        counts=counts,
        ifindex=(1 + numbers % len(PATHS)).astype(np.uint32),
        foreign=none != 0,
        closed=none != 0,
        first_ns=none,
        srtt_ns=none,
        stalls={},
        describe=describe,
    )


def planted(causes: list[Any], kind: str, **fields: Any) -> bool:
    """Whether the first cause but CPU steal is of a kind, and has these fields; of causes as records or as JSON."""
    rows = [each if isinstance(each, dict) else {name: getattr(each, name) for name in each.__struct_fields__}
            for each in causes]  # fmt: skip
    rows = [each for each in rows if each["kind"] != "host" or each["rank"] is not None]
    return bool(rows) and all(rows[0][name] == value for name, value in {"kind": kind, **fields}.items())


Batch = Callable[[int, int | None], None]  # a rank does some steps; which rank is to be slow


def watched(trials: int, batch: Batch, plant: Callable[[int | None], None], kind: str) -> list[bool]:
    """A job of two ranks with the plugin, one of which is slow, in turn; `plant` is called when that changes."""
    found = []
    with contextlib.ExitStack() as ending:
        bus = Bus()
        sources = [
            JobSource(AgentConfig("h1", []), bus, Feed()),
            GpuSource(AgentConfig("h1", []), bus, File("/dev/null")),
        ]
        for source in sources:
            ending.callback(source.close)
        ending.callback(plant, None)
        listening = bus.subscribe(frozenset({"job"}))

        def verdicts(slow: int | None, enough: Callable[[JobVerdict], bool]) -> tuple[bool, str]:
            """Let them work, one of them slowly, until a verdict is as it should be; whether one was, and the last."""
            plant(slow)
            stop = threading.Event()
            meeting = threading.Barrier(2)

            def work(rank: int) -> None:
                with contextlib.suppress(threading.BrokenBarrierError):
                    while not stop.is_set():
                        meeting.wait(30)
                        batch(rank, slow)

            threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
            for each in threads:
                each.start()
            windows, done, last = 0, False, ""
            while windows < WINDOWS and not done:
                due_ns = min(source.tick(time.monotonic_ns()) for source in sources)
                time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
                told = [each.why for each in listening.read() if isinstance(each, Job) and each.why is not None]
                windows += len(told)
                done = any(map(enough, told))
                last = "; ".join(f"{c.kind} {c.share:.2f}: {c.reason}" for c in told[-1].causes) if told else last
            stop.set()
            for each in threads:
                each.join()
            return done, last

        for trial in range(trials):
            rank = trial % 2
            clean, before = verdicts(
                None, lambda why: "ranks" not in why.missing and not any(planted(why.causes, each) for each in OF_RANKS)
            )
            named, after = verdicts(rank, lambda why, rank=rank: planted(why.causes, kind, rank=rank))
            found.append(clean and named)
            note(f"{kind} {rank}: nobody before: {clean}, named: {named}" + f" ({before} | {after})" * (not found[-1]))
    return found


def of_plugin(ending: contextlib.ExitStack) -> list[nccl_kit.Job]:
    """Two ranks that call the plugin as NCCL does."""
    folder = File(ending.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
    ranks = []
    for rank in range(2):
        os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "NCCL_RAS_ENABLE": "0"})
        ranks.append(ending.enter_context(nccl_kit.Job(folder / "rings", 5)))
        ranks[-1].do(f"init 77 2 {rank}")
    return ranks


def straggler(trials: int) -> list[bool]:
    """One of two ranks is late, in turn."""
    with contextlib.ExitStack() as ending:
        ranks = of_plugin(ending)

        def batch(rank: int, late: int | None) -> None:
            ranks[rank].do(f"last AllReduce {BATCH} {LONG_NS - LATE_NS * (rank == late)}")

        return watched(trials, batch, lambda _late: None, "straggler")


def slow_gpu(trials: int) -> list[bool]:
    """One of two ranks computes for twice as long, in turn, and NVML says that its GPU has half of the clock."""
    with contextlib.ExitStack() as ending:
        ranks = of_plugin(ending)
        fake = nvml_kit.Fake(nvml_kit.built())
        ending.enter_context(mock.patch.object(pynvml, "nvmlLib", fake.library))
        fake.set(sm_max=MAX_MHZ, busy=95)
        for each, process in enumerate(ranks):
            fake.set(each, pid=process.pid)

        def plant(slow: int | None) -> None:
            for each in range(2):
                held = each == slow
                fake.set(each, sm=MAX_MHZ // (1 + held), reasons=held << GPU_REASONS.index("hw_thermal"))

        def batch(rank: int, slow: int | None) -> None:
            late_ns = LATE_NS * (rank == slow)
            ranks[rank].do(f"last AllReduce {BATCH} {LONG_NS - late_ns} {LATE_NS + late_ns}")

        return watched(trials, batch, plant, "gpu")


def real_gpu(trials: int, python: str) -> tuple[str, list[bool]]:
    """The same with two GPUs and NCCL; which case it was."""
    if gpus(python) < 2:
        raise SystemExit(f"{python} has no PyTorch with two GPUs (--torch)")
    with contextlib.ExitStack() as ending:
        folder = File(ending.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        job = nccl_plugin.Job(ending, python, {**environment(folder), "NCCL_RAS_ENABLE": "0"})
        locks = lock(0, "-rgc")

        def batch(rank: int, _slow: int | None) -> None:
            stdin, stdout = job.ranks[rank].stdin, job.ranks[rank].stdout
            stdin.write(f"work {BATCH} {nccl_plugin.STEP_BYTES} {PRODUCTS}\n")
            if not stdout.readline():
                raise SystemExit("a rank of the job has ended")

        spinning: list[subprocess.Popen[bytes]] = []

        def plant(slow: int | None) -> None:
            for each in range(2) if locks else ():
                lock(each, "-rgc")
            while spinning:
                spinning[0].kill()
                spinning.pop().wait()
            if slow is None:
                return
            if locks:
                half = int(smi(slow, "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits").stdout) // 2
                lock(slow, f"-lgc={half},{half}")
            else:
                spinning.append(subprocess.Popen([python, "-c", SPIN, str(slow)]))

        case, kind = ("slow_gpu", "gpu") if locks else ("busy_gpu", "straggler")
        return case, watched(trials, batch, plant, kind)


def smi(gpu: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Ask nvidia-smi about a GPU."""
    return subprocess.run(["nvidia-smi", "-i", str(gpu), *words], capture_output=True, text=True, check=False)


def lock(gpu: int, word: str) -> bool:
    """Change the limits of a GPU's clock; whether that is permitted."""
    return smi(gpu, word).returncode == 0


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
                    causes = "; ".join(f"{each['share']:.2f} {each['reason']}" for each in seen[-1]["causes"])
                    note(f"{kind} {expected}: not before: {clean}; in {len(seen)} windows: {causes}")
                    if not clean:
                        note(f"before: {last['causes']}")
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
    "slow_gpu": slow_gpu,
    "congested_rail": lambda trials: in_lab(trials, congested, "network"),
    "throttled_host": lambda trials: in_lab(trials, throttled, "host"),
}

if __name__ == "__main__":
    main()
