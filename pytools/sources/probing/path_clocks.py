"""The clock of each path's peer against ours, applied to the stamp differences of that path.

Rows are path indexes. Offsets are lines in the time of our stamping clock; everything else is CLOCK_MONOTONIC
nanoseconds. One thread.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.delays import STAMP_BOUND_NS, Clocks, corrected
from pytools.estimators.offsets import SIGMAS, Offset
from pytools.estimators.windows import MISSING, Growing, Rows, Times
from pytools.signals import ClockState

# What a path's clocks are, by number.
SHARED, FREE, HOLDOVER, SYNCHRONISED = range(4)
_STATES: Final[tuple[ClockState, ...]] = ("synchronised", "free_running", "holdover", "synchronised")
_NUMBER: Final = {"free_running": FREE, "holdover": HOLDOVER, "synchronised": SYNCHRONISED}


class PathClocks(Growing):
    """What is known of the clocks of every path.

    Notes
    -----
    A sample that would be earlier than the bound allows contradicts what is known: queueing only lengthens delays, so
    one of the clocks was stepped, or the bound was wrong. The path is then suspended, nothing of it is a fact, until an
    offset is set that was found out later.
    """

    def __init__(self) -> None:
        self.contradictions = 0  # samples that were earlier than what was known of the clocks allowed
        self.any_suspended = False
        self._any_known = False  # whether an offset was ever set
        self.grow(0)

    def _allocate(self, rows: int) -> None:
        self._state = np.zeros(rows, np.uint8)
        self._suspended_ns = np.zeros(rows, np.int64)  # when; 0: is not
        self._epoch, self._offset, self._bound, self._hard, self._jitter = np.zeros((5, rows), np.int64)
        self._drift = np.zeros(rows)

    def share(self, path: int) -> None:
        """Both ends of this path read one clock."""
        self._state[path] = SHARED
        self._forget(path)

    def _forget(self, path: int) -> None:
        self._offset[path] = self._bound[path] = self._hard[path] = self._jitter[path] = 0
        self._drift[path] = 0.0

    def set(self, path: int, offset: Offset | None, known_ns: int) -> bool:
        """Say what is known of a path's clocks now.

        Parameters
        ----------
        known_ns : int
            Up to when (CLOCK_MONOTONIC) it takes into account what was measured.

        Returns
        -------
        bool
            Whether earlier samples of this path do not compare with later ones.
        """
        before = self._state[path], self._offset_at(path, offset)
        known = offset is not None and offset.state != "free_running"
        if not known or offset is None:
            self._state[path] = FREE
            self._forget(path)
            if known_ns > self._suspended_ns[path]:  # without a claim there is nothing left to contradict
                self._release(path)
            return bool(before[0] != FREE)
        if self._suspended_ns[path] and known_ns <= self._suspended_ns[path]:
            return False
        self._release(path)
        self._state[path], self._any_known = _NUMBER[offset.state], True
        self._epoch[path], self._offset[path], self._drift[path] = offset.epoch_ns, offset.offset_ns, offset.drift_ppb
        self._bound[path], self._hard[path] = offset.bound_ns, offset.hard_bound_ns
        self._jitter[path] = int(2 * SIGMAS * offset.sigma_ns)
        moved = abs(before[1] - offset.offset_ns)
        return bool(before[0] == FREE or moved > 2 * offset.bound_ns)

    def _release(self, path: int) -> None:
        if self._suspended_ns[path]:
            self._suspended_ns[path] = 0
            self.any_suspended = bool(self._suspended_ns.any())

    def _offset_at(self, path: int, other: Offset | None) -> int:
        """What was said of this path so far, at another's epoch."""
        since = 0 if other is None else other.epoch_ns - int(self._epoch[path])
        return int(self._offset[path]) + round(since * float(self._drift[path]) * 1e-9)

    def correct(
        self, paths: Rows, reverse: NDArray[np.bool_], values: Times, at_ns: Times, now_ns: Times | int
    ) -> Times:
        """Delays from differences of stamps; what the clocks cannot say is left as it is. Of MISSING, nothing follows.

        Parameters
        ----------
        paths, reverse : ndarray of int and of bool
            Of each, its path and whether it is of the reverse direction; broadcast to the shape of `values`.
        at_ns : ndarray of int64
            Our stamp of each.
        now_ns : int or ndarray of int64
            CLOCK_MONOTONIC; the latest counts.
        """
        if not self._any_known:
            return values
        offsets = self._offsets(paths, at_ns)
        delays = corrected(values, np.where(reverse, -offsets, offsets), self._drift.take(paths))
        early = delays < -(self._bound.take(paths) + 2 * STAMP_BOUND_NS)
        if np.count_nonzero(early):
            early &= (self._state.take(paths) >= HOLDOVER) & (values != MISSING)
            self.contradictions += int(np.count_nonzero(early))
            self._suspended_ns[np.broadcast_to(paths, early.shape)[early]] = np.max(now_ns)
            self.any_suspended = bool(self._suspended_ns.any())
        return delays

    def difference(self, paths: Rows, forward: Times, at_ns: int) -> Times:
        """What two stamps would differ by, one delay of each of these paths later."""
        return forward + self._offsets(paths, np.full(len(paths), at_ns))

    def drift(self, paths: Rows) -> NDArray[np.float64]:
        """How fast the peers' clocks run ahead of ours; 0 where that is not known."""
        return self._drift.take(paths) * 1e-9

    def _offsets(self, paths: Rows, at_ns: Times) -> Times:
        """The peers' clocks against ours at these times of ours; 0 where that is not known."""
        since, drift = at_ns - self._epoch.take(paths), self._drift.take(paths) * 1e-9
        offsets: Times = self._offset.take(paths) + np.rint(since * drift).astype(np.int64)
        return offsets

    def in_doubt(self, path: int) -> bool:
        """Whether a sample of this path has contradicted what was known of its clocks, and nothing newer is known."""
        return bool(self._suspended_ns[path])

    def suspended(self, paths: Rows) -> NDArray[np.bool_]:
        """Which paths wait for an offset that agrees with what is measured."""
        waits: NDArray[np.bool_] = self._suspended_ns.take(paths) != 0
        return waits

    def states(self, rows: Rows) -> list[ClockState]:
        """The state of the clocks of each path, as signals have it."""
        numbers = np.where(self.suspended(rows), FREE, self._state.take(rows))
        return [_STATES[number] for number in numbers.tolist()]

    def clocks(self, rows: Rows) -> Clocks:
        """What the delays of these paths are good to."""
        free = (self._state.take(rows) == FREE) | self.suspended(rows)
        return Clocks(~free, self._bound.take(rows), self._hard.take(rows), free, self._jitter.take(rows))
