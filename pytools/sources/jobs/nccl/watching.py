"""Watches the NCCL jobs of this host: finds their rings, keeps the plugin's events on, hands out whole operations.

Times are CLOCK_MONOTONIC nanoseconds that the caller passes in. One thread.
"""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.estimators import collectives
from pytools.kernel.native import NCCL
from pytools.sources.jobs.nccl import ring as rings
from pytools.sources.jobs.nccl.ring import Ring

LEASE_NS: Final = 10_000_000_000  # a watcher that is killed leaves the events on for so long
_KEPT: Final = 4 * rings.RECORDS  # records of a process whose operations are not whole yet


def environment(directory: Path | None = None) -> dict[str, str]:
    """The variables that have a job's NCCL load the plugin, which is built if it is missing.

    Parameters
    ----------
    directory : Path, optional
        Where the rings shall be: for a container, one that it shares with the host. Else /dev/shm/swerve-nccl-UID.
    """
    place = {rings.DIRECTORY_VARIABLE: str(directory)} if directory is not None else {}
    return {"NCCL_PROFILER_PLUGIN": str(NCCL.ready()), **place}


class _Process:
    def __init__(self, ring: Ring, serial: int) -> None:
        self.ring, self.serial, self.rest = ring, serial, np.empty(0, rings.RECORD)


class Watcher:
    """The jobs of this host whose rings this user may read.

    Parameters
    ----------
    events : int
        What to have recorded: sum of some of `ring.EVENTS`.
    places : list of Path, optional
        Directories to look in, if not all.
    """

    def __init__(self, events: int, places: list[Path] | None = None) -> None:
        self._events, self._places = events, places
        self._processes: dict[Path, _Process] = {}
        self._serials = itertools.count()
        self.refused: dict[Path, str] = {}  # rings that cannot be read, and why
        # what was lost, by reason: of processes that have ended
        self.drops = dict.fromkeys((*rings.COUNTERS, "never_whole"), 0)

    def begin(self, now_ns: int, places: list[Path]) -> None:
        """Ask for the events in these directories, and leave out what was recorded so far: for a look now and then.

        Rings elsewhere are let go.
        """
        self._places, self.refused = places, {}
        self._find()
        for path, process in list(self._processes.items()):
            process.rest = np.empty(0, rings.RECORD)
            try:
                if path.parent in places:
                    process.ring.want(self._events, now_ns + LEASE_NS)
                    process.ring.skip()
                else:
                    self._forget(path)
            except SwerveError as error:
                self.refused[path] = str(error)
                self._forget(path)

    def end(self) -> None:
        """Ask for no events until the next look."""
        for process in self._processes.values():
            process.ring.want(0, 1)

    def update(self, now_ns: int, most: int = rings.RECORDS) -> NDArray[Any]:
        """Renew what is wanted, and read.

        Parameters
        ----------
        most : int
            Read so many records of a process.

        Returns
        -------
        ndarray of collectives.OPERATION
            The operations that have become whole, of all processes.
        """
        self._find()
        found = [collectives.NOTHING]
        for path, process in list(self._processes.items()):
            try:
                found.append(self._operations(process, now_ns, most))
            except SwerveError as error:
                self.refused[path] = str(error)
                self._forget(path)
        return np.concatenate(found)

    @property
    def rings(self) -> list[Ring]:
        return [process.ring for process in self._processes.values()]

    @property
    def by_process(self) -> dict[int, Ring]:
        """The same by what operations have as `process`."""
        return {process.serial: process.ring for process in self._processes.values()}

    def _find(self) -> None:
        there = rings.find(self._places)
        self.refused = {path: why for path, why in self.refused.items() if path in there}
        for path in there:
            if path not in self._processes and path not in self.refused:
                try:
                    self._processes[path] = _Process(Ring(path), next(self._serials))
                except SwerveError as error:
                    self.refused[path] = str(error)

    def _operations(self, process: _Process, now_ns: int, most: int) -> NDArray[Any]:
        ring = process.ring
        over = ring.is_over(now_ns)  # before the last look
        ring.want(self._events, now_ns + LEASE_NS)
        records = np.concatenate([process.rest, ring.read(most)])
        operations, rest = collectives.join(records, ring.communicators(), now_ns)
        self.drops["never_whole"] += max(len(rest) - _KEPT, 0)
        process.rest = rest[-_KEPT:]
        operations["user"], operations["process"] = ring.user, process.serial
        if over:
            self.drops["never_whole"] += len(process.rest)
            for name, many in ring.counters().items():
                self.drops[name] += many
            ring.remove()
            self._forget(ring.path)
        return operations

    def _forget(self, path: Path) -> None:
        self._processes.pop(path).ring.close()

    def lost(self) -> dict[str, int]:
        """What was lost, by reason: of all processes, from their start."""
        total = dict(self.drops)
        for process in self._processes.values():
            with contextlib.suppress(SwerveError):
                for name, many in process.ring.counters().items():
                    total[name] += many
        return total

    def close(self) -> None:
        """Have the plugins stop recording, and let another watch."""
        for path, process in list(self._processes.items()):
            process.ring.want(0, 1)
            self._forget(path)
