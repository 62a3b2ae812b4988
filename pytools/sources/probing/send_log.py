"""How many probes had been sent on each path at any recent time.

Times are CLOCK_MONOTONIC nanoseconds, in the order in which they are noted. One thread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import Growing, Rows, Times

Counts = NDArray[np.int64]


class SendLog(Growing):
    """How many probes had been sent on each path after each of the last `kept` times, at least, that any were sent."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._times = np.zeros(2 * kept, np.int64)
        self._used = 0
        self.grow(0)

    def _allocate(self, paths: int) -> None:
        self._counts = np.zeros((2 * self._kept + 1, paths), np.int64)  # row k: after k of the times; 0: before all

    def note(self, times_ns: Times, counts: Counts) -> None:
        """Take note of when some were sent, and of how many had then been sent in all, shape (times, paths)."""
        times_ns, counts = times_ns[-self._kept :], counts[-self._kept :]
        end = self._used + len(times_ns)
        if end > len(self._times):
            kept = self._kept - len(times_ns)
            self._times[:kept] = self._times[self._used - kept : self._used]
            self._counts[: kept + 1] = self._counts[self._used - kept : self._used + 1]
            self._used, end = kept, self._kept
        self._times[self._used : end], self._counts[self._used + 1 : end + 1] = times_ns, counts
        self._used = end

    @property
    def latest_ns(self) -> int:
        """The last time that any were sent; 0: there is none."""
        return int(self._times[self._used - 1]) if self._used else 0

    def sent_by(self, times_ns: Times, paths: Rows) -> Counts:
        """How many had been sent on each of these paths at a time of its own."""
        places = self._times[: self._used].searchsorted(times_ns, side="right")
        counts: Counts = self._counts[places, paths]
        return counts

    def sent_beyond(self, counts: Counts, paths: Rows) -> Times:
        """When the probe after the first so many was sent on each of these paths; 0 where none was yet."""
        beyond = self._counts[1 : self._used + 1, paths] > counts
        if not len(beyond):
            return np.zeros(len(paths), np.int64)
        return np.where(beyond[-1], self._times[beyond.argmax(axis=0)], 0)
