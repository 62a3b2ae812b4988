"""Which paths are read often, and when the ring is read next. CLOCK_MONOTONIC nanoseconds; one thread."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.sources.probing.liveness import Liveness
from pytools.sources.probing.sessions import EXTRA_EVERY_NS, EXTRA_TICKS

READ_EVERY_NS: Final = 200_000_000  # while somebody reads short windows
_MOST_RECORDS: Final = 4096  # between two readings: fewer than the ring holds
_MOST_INTERVALS: Final = 60  # between two readings: fewer than liveness.py remembers
_ALERT_NS: Final = 200_000_000  # a path is alerted for so long after it was slow or silent
_NEWS_NS: Final = 2_000_000_000  # and reported once an interval for this long, then less often
_STANDING_EVERY_NS: Final = 100_000_000
_HURRIED_EVERY_NS: Final = 8_000_000
_SLOW_SINGLY: Final = 4  # slow samples in a row that are reported at once, one by one


class Attention:
    """What the mesh looks at, and when.

    Attributes
    ----------
    alerted : bool
        Whether any path is reported once an interval.
    standing : bool
        Whether any has been alerted for longer.
    read_ns : int
        How often the ring is read while none is alerted and somebody reads short windows.
    watched : bool
        Whether somebody reads short windows, or the ways of a path are probed.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._alert_ns = np.zeros(0, np.int64)  # by path, until when it is alerted
        self._since_ns = np.zeros(0, np.int64)  # and since when
        self._told_ns = 0  # when those that have been alerted for longer were last told of
        self._hurried_ns = 0  # until when extra probes leave
        self.alerted = self.standing = self.watched = False
        self._fits_ns = self.read_ns = READ_EVERY_NS  # for so long the ring has room

    def grow(self, paths: int, probes: int) -> None:
        """Have this many paths, along which so many probes leave every interval."""
        more = np.zeros(paths - len(self._alert_ns), np.int64)
        self._alert_ns, self._since_ns = (np.concatenate([each, more]) for each in (self._alert_ns, self._since_ns))
        intervals = min(_MOST_INTERVALS, max(1, _MOST_RECORDS // max(1, probes)))
        self._fits_ns = intervals * self._interval_ns
        self.read_ns = min(READ_EVERY_NS, self._fits_ns)

    def hurry(self, now_ns: int) -> None:
        """Extra probes leave from now on."""
        self._hurried_ns = now_ns + EXTRA_TICKS * EXTRA_EVERY_NS

    def hurried(self, now_ns: int) -> bool:
        """Whether extra probes are leaving."""
        return now_ns < self._hurried_ns

    def look(self, slow: NDArray[np.uint32], liveness: Liveness, now_ns: int) -> NDArray[np.bool_] | None:
        """Which alerted paths are to be reported now, by index; None: none is.

        Parameters
        ----------
        slow : ndarray of uint32
            By path, how many slow samples in a row there were.
        """
        slow = slow[: len(self._alert_ns)]
        if not (liveness.any_silent or self.alerted or self.standing or np.count_nonzero(slow)):
            return None
        before = self._alert_ns > now_ns
        # Of a dead path the last sample may have been a slow one.
        self._alert_ns[((slow > 0) & (liveness.missed == 0)) | liveness.young(now_ns)] = now_ns + _ALERT_NS
        alert = self._alert_ns > now_ns
        self._since_ns[alert & ~before] = now_ns
        news = alert & (self._since_ns > now_ns - _NEWS_NS)
        self.alerted, self.standing = bool(np.count_nonzero(news)), bool(np.count_nonzero(alert & ~news))
        if self.standing and now_ns >= self._told_ns + _STANDING_EVERY_NS * 3 // 4:
            self._told_ns = now_ns
            return alert
        return news if self.alerted else None

    def next_read(self, now_ns: int, sends_ns: int, window_ends_ns: int) -> int:
        """When to read the ring, where the next probes leave at `sends_ns`.

        For the long window alone, if nobody reads short ones and all is well. Else shortly before probes leave, when
        most answers are there; if alerted soon after: who is overtaken shows.
        """
        step_ns = min(self._interval_ns, READ_EVERY_NS)
        if self.hurried(now_ns):
            return now_ns + min(step_ns, _HURRIED_EVERY_NS)
        if not (self.watched or self.alerted or self.standing):
            return min(window_ends_ns, now_ns + self._fits_ns)
        phase_ns = sends_ns + (step_ns // 8 if self.alerted else -step_ns // 4)
        calm_ns = min(self.read_ns, max(step_ns, _STANDING_EVERY_NS)) if self.standing else self.read_ns
        due_ns = now_ns + (step_ns if self.alerted else calm_ns)
        return due_ns - (due_ns - phase_ns) % step_ns


def next_slow(slow: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """How many slow samples in a row are to wake us next: the first few do so one by one."""
    limits: NDArray[np.uint32] = np.minimum(slow + np.uint32(1), np.uint32(_SLOW_SINGLY))
    return limits
