"""CPU steal: real-time processes take every CPU of the machine for 20 to 200 ms at a time, half of the time.

One busy process per CPU, all by the same seeded schedule, so that no CPU is left for anybody else meanwhile. What runs
at a higher real-time priority goes on, as do interrupts and softirqs on their way out of it.

As a command: `python bench/_steal.py --seconds 60 -- COMMAND…` runs COMMAND under CPU steal, which ends after 60 s or
with COMMAND; the exit status is COMMAND's. Without COMMAND it steals for 60 s.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

from _common import cpu_s, note

from pytools.errors import CapabilityError, SwerveError

LEAST_S, MOST_S = 0.02, 0.2
PRIORITY: Final = 5  # below that of the streams of the benchmarks (10), so that they keep their schedule
_PR_SET_PDEATHSIG: Final = 1
_READY_S, _LEAD_S = 20.0, 0.1
_BURN: Final = "--burn"


@contextlib.contextmanager
def real_time(priority: int) -> Iterator[None]:
    """Run this process at a real-time priority while the context lasts, and what it starts meanwhile."""
    before, usual = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    try:
        yield
    finally:
        os.sched_setscheduler(0, before, usual)


@contextlib.contextmanager
def steal(seed: int = 1, priority: int = PRIORITY) -> Iterator[None]:
    """Run CPU steal while the context lasts.

    Raises
    ------
    CapabilityError
        If the kernel refuses real-time priority.
    """
    burners: list[subprocess.Popen[bytes]] = []
    cpus = sorted(os.sched_getaffinity(0))
    try:
        for cpu in cpus:
            words = [sys.executable, __file__, _BURN, *map(str, (cpu, seed, priority, os.getpid()))]
            pipe = subprocess.PIPE
            burners.append(subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe))
        for burner in burners:
            _wait_ready(burner)
        start_ns = time.monotonic_ns() + int(_LEAD_S * 1e9)
        for burner in burners:
            assert burner.stdin is not None
            burner.stdin.write(b"%d\n" % start_ns)
            burner.stdin.flush()
        yield
        lasted_s = (time.monotonic_ns() - start_ns) / 1e9
        if any(burner.poll() is not None for burner in burners):
            raise SwerveError("CPU steal ended before its time", "look for whoever killed it")
        if lasted_s > 0:
            taken = sum(cpu_s(burner.pid) for burner in burners) / len(burners) / lasted_s
            note(f"CPU steal took {taken:.0%} of each of {len(burners)} CPUs over {lasted_s:.1f} s")
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.communicate()


def _wait_ready(burner: subprocess.Popen[bytes]) -> None:
    assert burner.stdout is not None
    if not select.select([burner.stdout], [], [], _READY_S)[0] or burner.stdout.readline() != b"ready\n":
        burner.kill()
        lines = burner.communicate()[1].decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else "it does not start"
        raise CapabilityError(f"CPU steal: {why}", "run as root, where real-time priority is allowed")


def _burn(cpu: int, seed: int, priority: int, parent: int) -> None:
    """Take one CPU by the schedule until killed. The kernel kills this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    os.sched_setaffinity(0, {cpu})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))
    print("ready", flush=True)
    due_ns = int(sys.stdin.readline())
    schedule = random.Random(seed)
    while True:  # pauses and bursts have the same distribution, so half of the time is taken
        due_ns += int(schedule.uniform(LEAST_S, MOST_S) * 1e9)
        time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
        due_ns += int(schedule.uniform(LEAST_S, MOST_S) * 1e9)
        while time.monotonic_ns() < due_ns:
            pass


def main() -> int:
    if sys.argv[1:2] == [_BURN]:
        _burn(*map(int, sys.argv[2:]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, help="End after so many seconds (default: with COMMAND).")
    parser.add_argument("--seed", type=int, default=1, help="Seed of the schedule (default: 1).")
    parser.add_argument("--priority", type=int, default=PRIORITY, help="SCHED_FIFO priority (default: %(default)s).")
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="Command to run under CPU steal, after --.")
    options = parser.parse_args()
    if not options.command and options.seconds is None:
        parser.error("give --seconds, COMMAND, or both")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if not options.command:
        with steal(options.seed, options.priority):
            time.sleep(options.seconds)
        return 0
    command: subprocess.Popen[bytes] | None = None
    try:
        with steal(options.seed, options.priority):
            command = subprocess.Popen(options.command)
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(options.seconds)
        return command.wait()
    finally:
        if command is not None and command.poll() is None:
            command.terminate()
            command.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SwerveError as error:
        sys.exit(str(error))
