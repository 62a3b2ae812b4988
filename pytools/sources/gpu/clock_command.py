"""`swerve gpu clock`: relates the timers of this host's GPUs to CLOCK_MONOTONIC without an agent."""

from __future__ import annotations

import os
import sys
import time
from typing import Final

from pytools import directories
from pytools.errors import CapabilityError
from pytools.signals import GpuClock, encode
from pytools.sources.gpu.clocks import GpuClocks
from pytools.units import duration

_TICK_S: Final = 0.02
_FIRST_S: Final = 30.0  # contexts on eight GPUs take some seconds


def run(interval_s: float, count: int, as_json: bool) -> int:
    """Print so many reports.

    Raises
    ------
    CapabilityError
        If no timer can be read.
    """
    newest: dict[str, GpuClock] = {}
    clocks = GpuClocks(os.uname().nodename, lambda signal: newest.__setitem__(signal.uuid, signal))
    begin_s = due_s = time.monotonic()
    try:
        while count:
            now_s = time.monotonic()
            clocks.tick(time.monotonic_ns())
            late = now_s - begin_s > _FIRST_S
            if clocks.problem or (late and not newest):
                raise CapabilityError(clocks.problem or "no GPU has answered", f"see {directories.page('gpu.md')}")
            if not newest or (clocks.unknown and not late):  # the first report has all GPUs
                due_s = now_s + interval_s
            elif now_s >= due_s:
                due_s, count = now_s + interval_s, count - 1
                for signal in newest.values():
                    print(encode(signal).decode() if as_json else _text(signal))
                sys.stdout.flush()
            time.sleep(_TICK_S)
    finally:
        clocks.close()
    return 0


def _text(signal: GpuClock) -> str:
    return (
        f"{signal.uuid}: at {signal.epoch_ns} ns the timer is {signal.offset_ns:+,} ns ± {duration(signal.bound_ns)} "
        f"(hard ± {duration(signal.hard_bound_ns)}) from CLOCK_MONOTONIC, drift {signal.drift_ppb / 1000:+.4f} ppm; "
        f"{signal.state}, {signal.pings} pings, round trip {duration(signal.round_trip_min_ns)}"
    )
