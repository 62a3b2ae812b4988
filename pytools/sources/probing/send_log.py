"""How many probes had been sent on each path at any recent time, and which of them no answer has followed.

Times are CLOCK_MONOTONIC nanoseconds, in the order in which they are noted. One thread.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import Growing, Rows, Times

Counts = NDArray[np.int64]


class SendLog(Growing):
    """How many probes had been sent on each path after each of the last `kept` times, at least, that any were sent.

    Attributes
    ----------
    answered_by : ndarray of int64
        By path, how many had been sent when its latest answer arrived.
    """

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._times = np.zeros(2 * kept, np.int64)
        self._used = 0
        self.grow(0)

    def _allocate(self, paths: int) -> None:
        self._counts = np.zeros((2 * self._kept + 1, paths), np.int64)  # row k: after k of the times; 0: before all
        self.answered_by = np.zeros(paths, np.int64)

    def sent(self, times_ns: Times, counts: Counts) -> None:
        """Take note of when some were sent, and how many on each path: shape (times, paths)."""
        counts = self._counts[self._used] + counts.cumsum(axis=0)  # in all
        times_ns, counts = times_ns[-self._kept :], counts[-self._kept :]
        end = self._used + len(times_ns)
        if end > len(self._times):
            kept = self._kept - len(times_ns)
            self._times[:kept] = self._times[self._used - kept : self._used]
            self._counts[: kept + 1] = self._counts[self._used - kept : self._used + 1]
            self._used, end = kept, self._kept
        self._times[self._used : end], self._counts[self._used + 1 : end + 1] = times_ns, counts
        self._used = end

    def arrived(self, paths: Rows, at_ns: Times) -> None:
        """Take note of when the latest answer on each of these paths arrived, to whatever probe."""
        if self._used:
            self.answered_by.put(paths, self.sent_by(at_ns, paths))

    def missed(self, by_ns: Times) -> Counts:
        """How many of those sent by a time of its own for each path were followed by no answer."""
        missed: Counts = np.maximum(self.sent_by(by_ns, np.arange(len(by_ns))) - self.answered_by, 0)
        return missed

    def sent_by(self, times_ns: Times, paths: Rows) -> Counts:
        """How many had been sent on each of these paths at a time of its own."""
        places = self._times[: self._used].searchsorted(times_ns, side="right")
        counts: Counts = self._counts[places, paths]
        return counts

    def miss_ns(self, paths: Rows, after: Counts | int = 0) -> Times:
        """When the first that no answer has followed was sent on each of these paths, or so many later; 0: none yet."""
        beyond = self._counts[1 : self._used + 1, paths] > self.answered_by[paths] + after
        if not len(beyond):
            return np.zeros(len(paths), np.int64)
        return np.where(beyond[-1], self._times[beyond.argmax(axis=0)], 0)
