"""What was read of one GPU, from one publication to the next. Written by its thread, taken by the agent's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from pytools.signals import GPU_REASONS, GpuLink, GpuReason

_MOST_XIDS: Final = 16


class Readings:
    """Figures of one GPU; every method holds the lock."""

    def __init__(self) -> None:
        self.query = ""  # the query whose answers come now
        self._lock = threading.Lock()
        self._figures: dict[str, int] = {}
        self._origin: dict[str, str] = {}  # figure -> the query that gave it: where that fails, the figure goes
        self._counters: dict[str, int] = {}  # latest readings
        self._grown: dict[str, int] = {}  # since they were taken; a name is there from its second reading on
        self._rates: dict[str, tuple[int, int]] = {}  # counter -> (latest reading, when)
        self._clocks: list[int] = []
        self._reasons: Counter[int] = Counter()  # by bit; -1: all readings
        self._links: dict[int, bool] = {}
        self._processes: list[int] = []
        self._xids: list[int] = []
        self._failed: dict[str, str] = {}

    def set(self, values: Mapping[str, int]) -> None:
        """Take figures that stand for themselves."""
        with self._lock:
            self._figures.update(values)
            self._origin.update(dict.fromkeys(values, self.query))

    def sm_clock(self, mhz: int) -> None:
        with self._lock:
            self._clocks.append(mhz)

    def reasons(self, mask: int) -> None:
        """Take the reasons for the present clock."""
        with self._lock:
            self._reasons[-1] += 1
            self._reasons.update(bit for bit in range(mask.bit_length()) if mask >> bit & 1)

    def count(self, values: Mapping[str, int]) -> None:
        """Take readings of counters; one that is smaller than before began anew at zero."""
        with self._lock:
            for name, value in values.items():
                before = self._counters.get(name)
                if before is not None:
                    self._grown[name] = self._grown.get(name, 0) + (value - before if value >= before else value)
                self._counters[name] = value

    def rate(self, values: Mapping[str, int], at_ns: int) -> None:
        """Take readings of counters whose growth per second is shown."""
        with self._lock:
            for name, value in values.items():
                before, since_ns = self._rates.get(name, (value, at_ns))
                if value >= before and at_ns > since_ns:
                    self._origin[name] = self.query
                    self._figures[name] = (value - before) * 10**9 // (at_ns - since_ns)
                self._rates[name] = value, at_ns

    def links(self, active: Mapping[int, bool]) -> None:
        """Take the states of the NVLinks."""
        with self._lock:
            self._links = dict(active)

    def processes(self, pids: Iterable[int]) -> None:
        """Take the processes with a compute context."""
        with self._lock:
            self._processes = sorted(pids)

    def xid(self, number: int) -> None:
        with self._lock:
            if len(self._xids) < _MOST_XIDS:
                self._xids.append(number)

    def fail(self, name: str, reason: str) -> None:
        """Note why a query gives nothing; an empty reason: it does."""
        with self._lock:
            if reason:
                self._failed[name] = reason
                for figure in [figure for figure, query in self._origin.items() if query == name]:
                    self._figures.pop(figure, None)
            else:
                self._failed.pop(name, None)

    def take(self) -> Taken:
        """What was read since the last time."""
        with self._lock:
            taken = Taken(self)
            self._clocks.clear()
            self._reasons.clear()
            self._xids.clear()
            self._grown = dict.fromkeys(self._grown, 0)
            return taken


class Taken:
    def __init__(self, readings: Readings) -> None:
        self.figures = dict(readings._figures)
        self.grown = dict(readings._grown)
        self.totals = dict(readings._counters)
        self.clocks = list(readings._clocks)
        self.processes = list(readings._processes)
        self.xids = list(readings._xids)
        self.failed = dict(readings._failed)
        times, of = readings._reasons, readings._reasons[-1]
        self.reasons = [
            GpuReason(GPU_REASONS[bit] if bit < len(GPU_REASONS) else f"bit_{bit}", count / of)
            for bit, count in times.most_common()
            if bit >= 0
        ]
        self.links = [
            GpuLink(
                link=link,
                active=active,
                sent_bytes_per_s=self.figures.get(f"link{link}_sent"),
                received_bytes_per_s=self.figures.get(f"link{link}_received"),
                errors=self.grown.get(f"link{link}_errors"),
            )
            for link, active in sorted(readings._links.items())
        ]
