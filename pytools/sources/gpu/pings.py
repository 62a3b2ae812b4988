"""Readings of GPU clocks against CLOCK_MONOTONIC: `python -m pytools.sources.gpu.pings INTERVAL_MS` as a child.

A burst launches a kernel that answers pings through host memory and ends after the last one, or by itself when nobody
asks. Standard output: first one line of JSON, the list of UUIDs; then for each burst a header and int64 rows of
(host before, GPU, host after). The child ends when its standard input does.
"""

from __future__ import annotations

import ctypes
import json
import select
import struct
import sys
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.errors import CapabilityError
from pytools.estimators.gpu_clocks import fastest
from pytools.sources.gpu.cuda import CudaError, Driver, Gpu

PINGS: Final = 64  # of a burst
ROW_BYTES: Final = 24
HEADER: Final = struct.Struct("=II")  # GPU (place in the list), rows
_TIMEOUT_NS: Final = 20_000_000  # of a kernel that nobody asks
_START_NS: Final = 500_000_000  # a kernel may have to wait for one of another process
_POLL_S: Final = 0.00002
_TURNS: Final = 1000


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
        output = sys.stdout.buffer
        output.write(json.dumps([gpu.uuid for gpu in gpus]).encode() + b"\n")
        due_s = time.monotonic()
        while True:
            for number, pinger in enumerate(pingers):
                rows = fastest(pinger.burst())
                output.write(HEADER.pack(number, len(rows)) + rows.tobytes())
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
