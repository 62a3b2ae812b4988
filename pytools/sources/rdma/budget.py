"""How much of each queue pair is timed, so that every process stays within its budget.

What was busy a moment ago may be again: a rate that falls is forgotten by half a look at a time. Times are
CLOCK_MONOTONIC nanoseconds; runs in the agent's thread.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pytools.config import Rdma
from pytools.estimators.queue_rates import run_masks
from pytools.sources.rdma.register import ROWS
from pytools.sources.rdma.table import NOT_TIMED, Counters, Rows, Slots, Table, growth

_EVERY_NS: Final = 100_000_000


class Budget:
    """Sets the run masks of all tables."""

    def __init__(self, settings: Rdma) -> None:
        self._per_process, self._interval_ms = settings.budget_per_s, settings.interval_ms
        self._completed = np.zeros(ROWS, np.uint64)  # at the last look
        self._per_s = np.zeros(ROWS)
        self._looked_ns = 0

    def due(self, now_ns: int) -> bool:
        """Whether it is time to look."""
        return now_ns - self._looked_ns >= _EVERY_NS

    def begin(self, table: Table, slot: int, row: int, completed: int) -> None:
        """Time a new queue pair as it comes, until it is known how much it posts."""
        self._completed[row], self._per_s[row] = completed, 0.0
        if table.records.flags.writeable:
            table.records["run_mask"][slot] = 0 if self._per_process else NOT_TIMED

    def share_out(self, rows: Rows, completed: Counters, processes: Counters, now_ns: int, readable: int) -> Counters:
        """The run mask of each of these rows; `readable` requests of a row are kept between two readings."""
        passed_s = max(now_ns - self._looked_ns, 1) / 1e9
        self._looked_ns = now_ns
        per_s = np.maximum(growth(completed, self._completed[rows]), 0) / passed_s
        self._per_s[rows] = np.maximum(per_s, self._per_s[rows] / 2)
        self._completed[rows] = completed
        group = np.unique(processes, return_inverse=True)[1]
        return run_masks(self._per_s[rows], group, self._per_process, readable * 1e3 / self._interval_ms)


def write(table: Table, slots: Slots, masks: Counters) -> None:
    """Tell those who write a table, where it may be written and says otherwise."""
    differs = table.records["run_mask"][slots] != masks
    if differs.any() and table.records.flags.writeable:
        table.records["run_mask"][slots[differs]] = masks[differs]
