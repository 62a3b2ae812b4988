"""A lab host's clock: applies its file to every stamping program of the agent. Not used on real hosts.

Times are CLOCK_MONOTONIC nanoseconds. Runs on the agent's thread; reading the file costs microseconds.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from pytools.errors import SwerveError
from pytools.kernel.bpf.loader import Loaded
from pytools.lab import clocks
from pytools.sources.source import Source

_MAPS = ("probe_clock", "sample_clock")
_INTERVAL_NS = 50_000_000


class VirtualClockSource(Source):
    """Loads the clock when made, so before any hook is attached, and again whenever its file has changed.

    A step that the file announces ahead of its time acts in the kernel at exactly that time.

    Parameters
    ----------
    path : str
        The file, as `pytools.lab.clocks` writes it.
    loaded : Loaded
        The programs; those without a clock are left alone.

    Raises
    ------
    UsageError
        If there is no clock in the file: the host's stamps would not be what the lab says they are.
    """

    def __init__(self, path: str, loaded: Loaded) -> None:
        self._path = Path(path)
        self._maps = [loaded.map(name) for name in _MAPS if loaded.has_map(name)]
        self._unreadable = self._refused = self._late = 0
        self._identity = _identity(self._path)
        self._take(clocks.load(self._path))
        self._met = {step for step in self._clock.steps if step.at_ns <= time.monotonic_ns()}
        self._written: tuple[int, clocks.Step] | None = None
        self._write(time.monotonic_ns())

    def tick(self, now_ns: int) -> int:
        """Look at the file, and whether the next step is to be loaded."""
        identity = _identity(self._path)
        if identity != self._identity:
            self._identity = identity
            try:
                self._take(clocks.load(self._path))
                self._written = None
            except SwerveError:
                self._unreadable += 1
        if self._written is None or self._written != self._clock.loaded_at(now_ns):
            try:
                self._write(now_ns)
            except SwerveError:
                self._refused += 1
        return now_ns + _INTERVAL_NS

    def drops(self) -> dict[str, int]:
        """Changes of the file that could not be read or loaded, and steps that came too late to be exact."""
        return {
            "virtual_clock_unreadable": self._unreadable,
            "virtual_clock_refused": self._refused,
            "virtual_clock_late": self._late,
        }

    def _take(self, clock: clocks.VirtualClock) -> None:
        self._clock, self._knots = clock, clock.knots()

    def _write(self, now_ns: int) -> None:
        """Give the kernel the clock as it is to run from now on."""
        offset_ns, step = due = self._clock.loaded_at(now_ns)
        for each in self._maps:
            record = np.zeros((), each.value)
            record["origin_ns"] = self._clock.origin_ns
            record["offset_ns"] = offset_ns
            record["step_at_ns"] = step.at_ns
            record["step_ns"] = step.step_ns
            record["knots"] = self._knots
            each.update(0, record)
        self._written = due
        done_ns = max(now_ns, time.monotonic_ns())
        self._met |= {step} if step.at_ns > done_ns else set()
        late = {past for past in self._clock.steps if past.at_ns <= done_ns} - self._met
        self._late += len(late)
        self._met |= late


def _identity(path: Path) -> tuple[int, int] | None:
    """Changes whenever the file does; None when there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino
