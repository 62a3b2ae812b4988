"""Time that goes on while the host is suspended (CLOCK_BOOTTIME), and how a suspend is noticed.

Measurements, and the leases that kernel programs end, have CLOCK_MONOTONIC, which stands still in a suspend. What a
person asks for ("for 2h") ends by CLOCK_BOOTTIME, which neither a suspend nor a step of the wall clock shifts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from steering.deciding.overrides import Moment

_LEAST_NS: Final = 10_000_000  # a shorter suspend is none


def now_ns() -> int:
    """Nanoseconds since this boot, suspends included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


def moment() -> Moment:
    """This instant, by all that tells when an order ends."""
    return Moment(time.time_ns(), now_ns(), boot_id())


@functools.cache
def boot_id() -> str:
    """A name of this boot that no other one has."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class Slept:
    """A suspend that is over. Times are CLOCK_MONOTONIC."""

    lasted_ns: int
    after_ns: int  # it began after this
    before_ns: int  # and was over before this


def _clocks() -> tuple[int, int, int]:
    before = time.monotonic_ns()
    return before, now_ns(), time.monotonic_ns()


class Sleeps:
    """Notices suspends: CLOCK_BOOTTIME has run away from CLOCK_MONOTONIC.

    Parameters
    ----------
    clocks : callable
        Reads CLOCK_MONOTONIC, CLOCK_BOOTTIME, and CLOCK_MONOTONIC again: we may be kept waiting in between.
    """

    def __init__(self, clocks: Callable[[], tuple[int, int, int]] = _clocks) -> None:
        self._clocks = clocks
        before, boot, self._looked_ns = clocks()
        self._most_ns = boot - before  # what the difference was at most

    def look(self) -> Slept | None:
        """A suspend since the last look. Costs a microsecond."""
        before, boot, after = self._clocks()
        grown, since = boot - after - self._most_ns, self._looked_ns
        self._looked_ns = after
        if grown < _LEAST_NS:
            self._most_ns = min(self._most_ns, boot - before)
            return None
        self._most_ns = boot - before
        return Slept(grown, since, after)
