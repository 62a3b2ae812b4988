"""NCCL's profiler plugin on two GPUs: what it adds to a small all-reduce, and whether it names a planted straggler.

    python bench/nccl_plugin.py --torch PYTHON

Three jobs of two ranks over NVLink (or what there is) take turns: one without the plugin, one with it, which alternates
between off and kernel events in its processes, and one with a plugin that asks for the same events and does nothing
(nccl_empty.c): what it adds is NCCL's own work. NCCL loads a plugin for the life of a process, so each needs others;
jobs are started again --jobs times, and the medians of all turns are compared.

The plugin records the first 250 collectives of a period, 250 ms on average; the empty one has no limit. So the median
is of collectives that are not recorded, and the 99th percentile of those that are.

all_reduce      absent, off, kernel, empty_plugin: median time of a 1 KB all-reduce
all_reduce_p99  the 99th percentile of a turn
plugin          off, kernel: what is added to the median of absent; of kernel beside the peer empty_plugin
plugin_p99      the same of the 99th percentile
records         kernel: share of the collectives that have kernel records
verdict         straggler: share of trials in which the rank that sleeps for 2 ms before each step is named, within
                25 %; nobody: share of trials without one in which nobody is named

The job runs under the Python that --torch names; NCCL_* of the environment count.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _common import alternating, emit, gpus, median, note, wait_until

from pytools.estimators import collectives
from pytools.estimators.stragglers import Straggler, straggler
from pytools.kernel.native import NCCL, Native
from pytools.sources.jobs.nccl.ring import EVENTS
from pytools.sources.jobs.nccl.watching import Watcher, environment

RANKS = 2
SMALL_BYTES, STEP_BYTES = 1024, 1 << 20
REDUCES, STEPS, LATE_US = 1500, 60, 2_000
READY_S = 120.0
CASES = ("absent", "off", "kernel", "empty_plugin")
JOB = Path(__file__).with_name("_nccl_plugin_job.py")
HEADERS = NCCL.source.parent
EMPTY = Native(
    what="the plugin that does nothing",
    source=Path(__file__).with_name("nccl_empty.c"),
    target=Path(__file__).with_name("nccl_empty.so"),
    parts=(HEADERS / "interface.h",),
    flags=("-Wno-unused-parameter", "-shared", "-fPIC", "-fvisibility=hidden", f"-I{HEADERS}"),
)


class Job:
    """The ranks of a job, as children that take commands."""

    def __init__(self, stack: contextlib.ExitStack, python: str, variables: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.ranks = []
        for rank in range(RANKS):
            process = subprocess.Popen(
                [python, str(JOB), str(rank), str(RANKS), str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    **variables,
                },
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            self.ranks.append(process)
        self.answers()

    def answers(self) -> list[str]:
        """What each rank says to the last command."""
        lines = [process.stdout.readline().strip() for process in self.ranks]
        if not all(lines):
            raise SystemExit("a rank of the job has ended")
        return lines

    def do(self, *commands: str) -> list[str]:
        """Have each rank do its command."""
        for process, command in zip(self.ranks, commands, strict=True):
            process.stdin.write(command + "\n")
        return self.answers()

    def reduce_ns(self) -> tuple[float, float]:
        """Median and 99th percentile of the time of a small all-reduce, of rank 0."""
        middle, high = map(float, self.do(*[f"time {REDUCES} {SMALL_BYTES}"] * RANKS)[0].split())
        return middle, high


def empty_job(stack: contextlib.ExitStack, python: str) -> Job:
    """A job with the plugin that does nothing; NCCL goes on without one that it cannot load."""
    job = Job(stack, python, {"NCCL_PROFILER_PLUGIN": str(EMPTY.ready())})
    for process in job.ranks:
        if EMPTY.target.name not in Path(f"/proc/{process.pid}/maps").read_text():
            raise SystemExit(f"{EMPTY.target} was not loaded by all ranks")
    return job


class Observed(Job):
    """A job with the plugin."""

    def __init__(self, stack: contextlib.ExitStack, python: str) -> None:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        super().__init__(stack, python, environment(place))
        self.watchers = {events: Watcher(events, [place]) for events in (0, EVENTS["kernel"])}
        self.watcher = self.watchers[0]
        self.shares: list[float] = []  # of the collectives of each turn with kernel events: that have records
        self.set(0)
        stack.callback(self.close)

    def close(self) -> None:
        """Stop watching."""
        self.watcher.close()

    def set(self, events: int) -> None:
        """Have these events recorded, and wait until the plugins of all ranks do so."""
        self.watcher.close()
        self.watcher = self.watchers[events]
        self.watcher.update(time.monotonic_ns())
        if self.watcher.refused or len(self.watcher.rings) != RANKS:
            raise SystemExit(f"the plugin was not loaded by all ranks: {self.watcher.refused}")
        wait_until(lambda: all(ring.applied == events for ring in self.watcher.rings), "the mask is in force", 10)

    def off_ns(self) -> tuple[float, float]:
        """As reduce_ns, with the plugin off."""
        self.set(0)
        return self.reduce_ns()

    def kernel_ns(self) -> tuple[float, float]:
        """As reduce_ns, with kernel events."""
        self.set(EVENTS["kernel"])
        took_ns = self.reduce_ns()
        self.shares.append(len(self.watcher.update(time.monotonic_ns())) / (REDUCES * RANKS))
        return took_ns

    def verdict(self, late_rank: int | None) -> Straggler | None:
        """Whom the others wait for, while this rank comes late to every step."""
        self.watcher.update(time.monotonic_ns())
        self.do(*[f"step {STEPS} {STEP_BYTES} {LATE_US * (rank == late_rank)}" for rank in range(RANKS)])
        time.sleep(0.01)  # the last kernels' ends are on their way
        tables = collectives.by_rank(self.watcher.update(time.monotonic_ns()))
        found = [straggler(ranks, durations) for ranks, durations in tables.values()]
        return found[0] if found else None


@contextlib.contextmanager
def jobs(python: str) -> Iterator[tuple[Job, Observed, Job]]:
    """One without the plugin, one with it, one with that which does nothing."""
    with contextlib.ExitStack() as stack:
        absent = Job(stack, python, {"NCCL_PROFILER_PLUGIN": "none"})
        yield absent, Observed(stack, python), empty_job(stack, python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default="python3", help="the Python that has PyTorch (python3)")
    parser.add_argument("--jobs", type=int, default=3, help="how often jobs are started (3)")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each job (20)")
    parser.add_argument("--trials", type=int, default=20, help="planted stragglers, and as many without (20)")
    options = parser.parse_args()
    if gpus(options.torch) < RANKS:
        note(f"left out: {options.torch} has no PyTorch with {RANKS} GPUs (--torch)")
        return
    took: list[list[tuple[float, float]]] = [[] for _ in CASES]
    shares: list[float] = []
    named: list[bool] = []
    nobody: list[bool] = []
    for start in range(options.jobs):
        with jobs(options.torch) as (absent, observed, empty):
            sides = (absent.reduce_ns, observed.off_ns, observed.kernel_ns, empty.reduce_ns)
            turns = alternating(options.rounds, *sides)
            took = [former + own for former, own in zip(took, turns, strict=True)]
            shares += observed.shares[1:]  # without the warm-up
            for at, which in enumerate(("p50", "p99")):
                told = ", ".join(f"{median([each[at] for each in own]) / 1e3:.2f}" for own in turns)
                note(f"1 KB all-reduce, {which} of {', '.join(CASES)}: {told} µs")
            for trial in range(options.trials if start == 0 else 0):
                observed.set(0)
                observed.set(EVENTS["kernel"])  # a period begins
                rank = trial % RANKS
                found, nothing = observed.verdict(rank), observed.verdict(None)
                close = found is not None and abs(found.late_ns / (LATE_US * 1e3) - 1) < 0.25
                named.append(close and found.rank == rank)
                nobody.append(nothing is None)
                note(f"rank {rank} late: {found}; nobody: {nothing}")
    n = len(took[0])
    for at, suffix in enumerate(("", "_p99")):
        absent_ns, off_ns, kernel_ns, empty_ns = figures = [median([each[at] for each in own]) for own in took]
        for case, value in zip(CASES, figures, strict=True):
            emit("jobs", f"all_reduce{suffix}", value, "ns", "lower", case=case, n=n)
        emit("jobs", f"plugin{suffix}", off_ns - absent_ns, "ns", "lower", case="off", n=n)
        beside = {"peer": "empty_plugin", "peer_value": empty_ns - absent_ns}
        emit("jobs", f"plugin{suffix}", kernel_ns - absent_ns, "ns", "lower", case="kernel", n=n, **beside)
    emit("jobs", "records", median(shares), "share", "higher", case="kernel", n=len(shares))
    for case, right in (("straggler", named), ("nobody", nobody)):
        emit("jobs", "verdict", sum(right) / len(right), "share", "higher", case=case, n=len(right))


if __name__ == "__main__":
    main()
