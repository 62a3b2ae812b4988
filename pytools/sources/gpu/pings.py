"""Readings of GPU clocks against CLOCK_MONOTONIC: `python -m pytools.sources.gpu.pings INTERVAL_MS` as a child.

A burst launches a kernel that answers pings through host memory and ends after the last one, or by itself when nobody
asks. Standard output: first one line of JSON, the list of UUIDs; then for each burst a header and int64 rows of
(host before, GPU, host after). The child ends when its standard input does.

Clocks of CPUs may differ by tens of nanoseconds between sockets, which neither round trips nor fits show. So one CPU
pings all GPUs of a round, and what its clock is off by is in all of their lines alike.

The GPU looks again as soon as it has answered, and each look takes a microsecond. Asked again at once, it would find
each question equally long after a look, 0 to 1 µs from burst to burst. So each question comes after another wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import struct
import sys
import time
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.errors import CapabilityError
from pytools.estimators.gpu_clocks import fastest
from pytools.sources.gpu.cuda import CudaError, Driver, Gpu

PINGS: Final = 64  # of a burst
ROW_BYTES: Final = 24
HEADER: Final = struct.Struct("=IiI")  # GPU (place in the list), CPU or ANY_CPU, rows
SPREAD_NS: Final = 2000  # of the waits before the questions: a look over the bus takes less
_STRIDE: Final = 39  # the golden section of PINGS, and odd: neighbours are far apart, and all waits differ
ANY_CPU: Final = -1  # the burst was not kept on one
_TIMEOUT_NS: Final = 20_000_000  # of a kernel that nobody asks
_START_NS: Final = 500_000_000  # a kernel may have to wait for one of another process
_POLL_S: Final = 0.00002
_TURNS: Final = 1000
_LIBC: Final = ctypes.CDLL(None)


def wait_ns(place: int) -> int:
    """How long the question at this place of a burst waits: all together, SPREAD_NS is covered evenly."""
    return place * _STRIDE % PINGS * SPREAD_NS // PINGS


@contextlib.contextmanager
def on_one_cpu() -> Iterator[int]:
    """Keep this thread on the CPU it runs on; the CPUs that it is allowed are restored at the end.

    Yields
    ------
    int
        ANY_CPU if it cannot be kept there: the CPUs of a control group may change at any time.
    """
    allowed = os.sched_getaffinity(0)
    cpu = int(_LIBC.sched_getcpu())
    try:
        os.sched_setaffinity(0, {cpu})
    except (OSError, ValueError):  # not allowed any more; unknown to the kernel
        cpu = ANY_CPU
    try:
        yield cpu
    finally:
        with contextlib.suppress(OSError):  # none of these is left: the kernel has moved the thread to others
            os.sched_setaffinity(0, allowed)


class Pinger:
    """Asks one GPU for its clock."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        asked, self._asked_at = gpu.pinned(4)
        answers, self._answers_at = gpu.pinned(8 * (PINGS + 1))
        self._asked, self._answers = asked.cast("I"), answers.cast("Q")

    def burst(self) -> NDArray[np.int64]:
        """Rows of (host before, GPU, host after); fewer than PINGS if the kernel ended early."""
        asked, answers, clock = self._asked, self._answers, time.monotonic_ns
        asked[0] = 0
        for place in range(PINGS + 1):
            answers[place] = 0
        arguments = ctypes.c_uint64(self._asked_at), ctypes.c_uint64(self._answers_at)
        self._gpu.launch("reflect", *arguments, ctypes.c_uint32(PINGS), ctypes.c_uint64(_TIMEOUT_NS))
        begin_ns = clock()
        while not answers[0] and clock() - begin_ns < _START_NS:
            time.sleep(_POLL_S)
        rows = np.zeros((PINGS, 3), np.int64)
        count = 0
        for place in range(1, PINGS + 1) if answers[0] else ():
            due = clock() + wait_ns(place)
            while clock() < due:
                pass
            before = clock()
            asked[0] = place
            while not answers[place]:  # looking at the clock in each turn would blur the time of the answer
                for _ in range(_TURNS):
                    if answers[place]:
                        break
                else:
                    if clock() - before > _TIMEOUT_NS:
                        break
            after = clock()
            if not answers[place]:
                break
            rows[count] = before, answers[place], after
            count += 1
        self._gpu.wait()
        return rows[:count]


def main() -> int:
    """Ping all GPUs until standard input ends."""
    interval_s = float(sys.argv[1]) / 1000
    try:
        driver = Driver()
        gpus = [Gpu(driver, number) for number in range(driver.count())]
        pingers = [Pinger(gpu) for gpu in gpus]
        for pinger in pingers:
            pinger.burst()  # threads that the driver makes at its first launch shall not be kept on one CPU
        output = sys.stdout.buffer
        output.write(json.dumps([gpu.uuid for gpu in gpus]).encode() + b"\n")
        due_s = time.monotonic()
        while True:
            with on_one_cpu() as cpu:
                bursts = [pinger.burst() for pinger in pingers]
            for number, burst in enumerate(bursts):
                rows = fastest(burst)
                output.write(HEADER.pack(number, cpu, len(rows)) + rows.tobytes())
            output.flush()
            now_s = time.monotonic()
            due_s = max(due_s + interval_s, now_s)
            if select.select([sys.stdin], [], [], due_s - now_s)[0]:
                return 0
    except (CudaError, CapabilityError) as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
