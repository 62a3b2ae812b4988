"""`swerve jobs watch -- CMD`: runs a job with the plugin, and says what its ranks on this host wait for.

What is said goes to standard error: standard output is the command's. Times are CLOCK_MONOTONIC nanoseconds. One
thread.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.errors import UsageError
from pytools.estimators import collectives, stragglers
from pytools.estimators.collectives import Summary
from pytools.estimators.stragglers import Straggler
from pytools.sources.jobs.nccl.ring import EVENTS, WATCHED
from pytools.sources.jobs.nccl.watching import Watcher, environment
from pytools.units import duration, size

_READ_S: Final = 0.05  # a ring is emptied so often: it holds the kernels of some hundred operations
_HERE: Final = Path("/dev/shm")


def run(arguments: list[str], interval_s: float, as_json: bool) -> int:
    """Run the command until it ends; returns its exit status, 128 and the signal if one ended it.

    Raises
    ------
    UsageError
        If there is no such command.
    """
    command = shutil.which(arguments[0])
    if command is None:
        raise UsageError(f"there is no command {arguments[0]}")
    with tempfile.TemporaryDirectory(prefix=WATCHED, dir=_HERE) as place:
        watcher = Watcher(EVENTS["operations"] | EVENTS["kernel"], [Path(place)])
        try:
            process = subprocess.Popen([command, *arguments[1:]], env={**os.environ, **environment(Path(place))})
        except OSError as error:
            raise UsageError(f"{command}: {error.strerror}") from None
        before = signal.signal(signal.SIGTERM, lambda number, _: process.send_signal(number))
        try:
            seen = _watch(process, watcher, interval_s, as_json)
        finally:
            signal.signal(signal.SIGTERM, before)
            lost = {why: count for why, count in watcher.lost().items() if count}
            watcher.close()
            _end(process)
    if lost:
        print(f"swerve: lost: {', '.join(f'{count} {why}' for why, count in lost.items())}", file=sys.stderr)
    if not seen:
        print("swerve: no rank on this host has loaded the plugin: it needs NCCL 2.23 or later", file=sys.stderr)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def _watch(process: subprocess.Popen[bytes], watcher: Watcher, interval_s: float, as_json: bool) -> bool:
    """Read and report until the command has ended; whether any rank was seen."""
    found: list[NDArray[Any]] = []
    seen, due_s = False, time.monotonic() + interval_s
    ended = False
    while not ended:
        try:
            process.wait(min(_READ_S, interval_s))
            ended = True
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:  # the command has had it as well: it may still have something to do
            continue
        found.append(watcher.update(time.monotonic_ns()))
        seen = seen or bool(watcher.rings) or bool(len(found[-1]))
        if ended or time.monotonic() >= due_s:
            due_s = time.monotonic() + interval_s
            for report in reports(np.concatenate(found)):
                print(json.dumps(report) if as_json else in_words(report), file=sys.stderr, flush=True)
            found.clear()
    return seen


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        process.wait()


def reports(operations: NDArray[Any]) -> Iterator[dict[str, Any]]:
    """What a window says of each communicator, as plain values.

    Parameters
    ----------
    operations : ndarray of collectives.OPERATION
        Of all ranks on this host.
    """
    tables = collectives.by_rank(operations)

    def whose(each: Summary) -> tuple[int, int]:
        return each.user, each.hash

    for key, summaries in itertools.groupby(sorted(collectives.summarise(operations), key=whose), whose):
        ranks = sorted(summaries, key=lambda each: each.rank)
        late = stragglers.straggler(*tables[key]) if key in tables else None
        yield {
            "communicator": f"{key[1]:016x}",
            "ranks": ranks[0].ranks,
            "by_rank": [_of_rank(each) for each in ranks],
            "straggler": None if late is None else _of_straggler(late),
        }


def _of_rank(each: Summary) -> dict[str, Any]:
    known = math.isfinite(each.enqueue_to_start_ns)
    return {
        "rank": each.rank,
        "operations": each.operations,
        "bytes": each.bytes,
        "sampled": each.sampled,
        "kernel_p50_ns": round(each.duration_p50_ns),
        "kernel_p99_ns": round(each.duration_p99_ns),
        "call_to_start_ns": round(each.enqueue_to_start_ns) if known else None,
        "call_to_start_bound_ns": round(each.bound_ns) if known else None,
    }


def _of_straggler(late: Straggler) -> dict[str, Any]:
    return {
        "rank": late.rank,
        "late_ns": round(late.late_ns),
        "low_ns": round(late.low_ns),
        "high_ns": round(late.high_ns),
        "share": late.share,
        "collectives": late.collectives,
        "also": list(late.also),
    }


def in_words(report: dict[str, Any]) -> str:
    ranks, late = report["by_rank"], report["straggler"]
    kernels = ", ".join(f"{each['rank']}: {duration(each['kernel_p50_ns'])}" for each in ranks)
    total = f"{max(each['operations'] for each in ranks)} operations, {size(max(each['bytes'] for each in ranks))}"
    if any(each["sampled"] for each in ranks):
        total = f"a sample of {total}"
    of = f" of {report['ranks']}" if report["ranks"] > 0 else ""
    verdict = "no straggler among them"
    if late is not None:
        bounds = f"{duration(late['low_ns'])} to {duration(late['high_ns'])}"
        verdict = f"rank {late['rank']} is late by {duration(late['late_ns'])} ({bounds})"
    return (
        f"swerve: communicator {report['communicator']}, {len(ranks)}{of} ranks here: {total} a rank; kernels p50 of "
        f"rank {kernels}; {verdict}"
    )
