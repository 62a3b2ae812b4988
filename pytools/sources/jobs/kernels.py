"""Looks at the rings of NCCL's profiler plugin now and then: which rank the others wait for, and how long a step lasts.

A look asks for kernel events for one window, and compares what all ranks of this host did at its beginning. The pause
until the next is so long that looks take a small share of a processor, however many ranks there are. Whatever may block
(a directory of a container, for instance) is done in a thread of its own; all else is the agent's. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators import collectives, stragglers
from pytools.estimators.job_evidence import Late
from pytools.estimators.job_rhythm import Steps, steps
from pytools.sources.jobs.nccl.ring import EVENTS, WATCHED, Ring
from pytools.sources.jobs.nccl.watching import Watcher
from pytools.sources.jobs.processes import Member

MOST: Final = 512  # records of a process in a look
_SHARE: Final = 500  # a look is paid for by a pause of so many times what it took: 0.2 % of a processor
_KEEP_ON_NS: Final = 3 * 10**9  # until the next look: it is not worth while to have the events off meanwhile
_EMPTY_NS: Final = 5 * 10**9  # until the next look for rings, where there are none
_CHECK_NS: Final = 250_000_000  # whether a look is over
_LONGEST_NS: Final = 60 * 10**9  # pause
_TABLES: Final = 16  # communicators of a job

Jobs = Mapping[Hashable, list[Member]]


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look showed of a job."""

    at_ns: int
    next_ns: int  # when the next one is over
    compared: int = 0  # ranks
    late: Late | None = None
    steps: Steps | None = None
    why: str = ""  # why not all ranks of this host were compared


@dataclass(slots=True)
class _Place:
    path: Path
    members: list[tuple[Hashable, Member]] = field(default_factory=list)


class Looks:
    """The rings of the jobs on this host.

    Parameters
    ----------
    window_ns : int
        How long a look lasts.
    """

    def __init__(self, window_ns: int, proc: Path = Path("/proc")) -> None:
        self._window_ns, self._proc = window_ns, proc
        self._watcher = Watcher(EVENTS["operations"] | EVENTS["kernel"], [])
        self._paths: dict[tuple[int, int], Path] = {}  # by device and inode
        self._seen: dict[Hashable, Seen] = {}
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._due_ns = self._pause_ns = 0
        self.hung = 0  # looks that were not over when the next was due

    def work(self, now_ns: int, jobs: Jobs) -> int:
        """Begin a look that is due; says when to call again."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread, self._due_ns = None, now_ns + self._pause_ns
        if self._thread is not None and now_ns > self._due_ns:
            self.hung += 1
            self._due_ns = now_ns + _LONGEST_NS
        if self._thread is None and now_ns >= self._due_ns and jobs:
            self._due_ns = now_ns + self._window_ns + _LONGEST_NS
            self._thread = threading.Thread(target=self._run, args=(jobs,), name="swerve-kernels", daemon=True)
            self._thread.start()
        return now_ns + _CHECK_NS if self._thread is not None or not jobs else max(self._due_ns, now_ns + _CHECK_NS)

    def seen(self, job: Hashable, now_ns: int) -> Seen | None:
        """What the last look showed; None if that is too long ago."""
        found = self._seen.get(job)
        return found if found is not None and now_ns <= found.next_ns + 3 * self._window_ns else None

    def close(self) -> None:
        """Have the plugins stop recording; a look that is under way ends at once, and does this then."""
        self._stop.set()
        if self._lock.acquire(blocking=False):
            self._watcher.close()
            self._lock.release()

    def _run(self, jobs: Jobs) -> None:
        with self._lock:
            began_ns = time.thread_time_ns()
            places, notes = self._places(jobs)
            self._watcher.begin(time.monotonic_ns(), [each.path for each in places])
            found = collectives.NOTHING
            if self._watcher.rings:
                self._stop.wait(self._window_ns / 1e9)
                found = self._watcher.update(time.monotonic_ns(), MOST)
            seen = summarise(found, self._watcher.by_process, places)
            spent_ns = time.thread_time_ns() - began_ns
            least_ns = 0 if self._watcher.rings else _EMPTY_NS
            self._pause_ns = min(_LONGEST_NS, max(least_ns, _SHARE * spent_ns - self._window_ns))
            if self._pause_ns > _KEEP_ON_NS:
                self._watcher.end()
            now_ns = time.monotonic_ns()
            next_ns = now_ns + self._pause_ns + self._window_ns
            refused = next(iter(self._watcher.refused.values()), "")
            self._seen = {
                job: _described(members, seen.get(job, Seen(0, 0)), notes.get(job) or refused, now_ns, next_ns)
                for job, members in jobs.items()
            }
        if self._stop.is_set():
            self.close()

    def _places(self, jobs: Jobs) -> tuple[list[_Place], dict[Hashable, str]]:
        """The directories that ranks have their rings in; and of jobs why they are not looked into."""
        places: dict[tuple[int, int], _Place] = {}
        notes: dict[Hashable, str] = {}
        for job, members in jobs.items():
            looked: dict[tuple[int, str], _Place | None] = {}
            for each in members:
                named = each.place.rings or f"/dev/shm/swerve-nccl-{each.uid}"
                at = each.place.rank, named
                if at not in looked:
                    watched = os.path.basename(named).startswith(WATCHED)
                    looked[at] = None if watched else self._place(each, named, places)
                    if watched:
                        notes[job] = "`swerve jobs watch` reads its rings"
                place = looked[at]
                if place is not None:
                    place.members.append((job, each))
        self._paths = {key: each.path for key, each in places.items()}
        return list(places.values()), notes

    def _place(self, member: Member, named: str, places: dict[tuple[int, int], _Place]) -> _Place | None:
        """A directory as the rank sees it, by a name that others who see it have too."""
        if not named.startswith("/") or ".." in named.split("/"):
            return None
        inside = f"{self._proc}/{member.owner.pid}/root{named}"  # not a Path: there are many ranks, and few have rings
        key = _identity(inside)
        if key is None:
            return None
        if key not in places:
            names = (self._paths.get(key, Path(inside)), Path(named), Path(inside))
            places[key] = _Place(next(each for each in names if _identity(each) == key))
        return places[key]


def _identity(path: Path | str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def summarise(operations: NDArray[Any], rings: Mapping[int, Ring], places: Iterable[_Place]) -> dict[Hashable, Seen]:
    """What operations say of each job, as far as it is known whose they are."""
    whose: dict[int, tuple[Hashable, int]] = {}
    by_path = {each.path: each.members for each in places}
    for process, ring in rings.items():
        for job, member in by_path.get(ring.path.parent, ()):
            if (member.own_pid, member.uid) == (ring.pid, ring.user):
                whose[process] = job, member.place.rank
    found: dict[Hashable, Seen] = {}
    for job in {each[0] for each in whose.values()}:
        ranks = {process: rank for process, (its, rank) in whose.items() if its == job}
        own = operations[np.isin(operations["process"], list(ranks))]
        if len(own):
            found[job] = _of_job(own, ranks)
    return found


def _of_job(operations: NDArray[Any], ranks: Mapping[int, int]) -> Seen:
    late, compared, why = None, 0, ""
    tables = sorted(collectives.by_rank(operations).items(), key=lambda item: -item[1][1].size)[:_TABLES]
    for (user, communicator), (columns, durations) in tables:
        many, width = durations.shape
        if width < 2:
            continue
        if stragglers.left_out(min(many, stragglers.BATCHES), stragglers.DOUBT / width) is None:
            why = why or f"too few collectives: {many}"
            continue
        compared = max(compared, width)
        found = stragglers.straggler(columns, durations)
        own = operations[(operations["user"] == user) & (operations["hash"] == communicator)]
        if found is None:
            continue
        process = int(own["process"][own["rank"] == found.rank][0])
        its = own[(own["process"] == process) & np.isin(own["function"], collectives.MEETING)]
        interval = collectives.interval_ns(its)
        each = Late(ranks[process], found.late_ns, found.low_ns, found.high_ns, interval, found.collectives)
        if late is None or each.late_ns / max(each.interval_ns, 1) > late.late_ns / max(late.interval_ns, 1):
            late = each
    processes, counts = np.unique(operations["process"], return_counts=True)
    most = operations[operations["process"] == processes[counts.argmax()]]
    return Seen(0, 0, compared, late, steps(most), why)


def _described(members: list[Member], seen: Seen, refused: str, now_ns: int, next_ns: int) -> Seen:
    here = len({each.place.rank for each in members})
    if members[0].place.size == 1 or (here > 1 and seen.compared == here):
        why = ""
    elif here == 1:
        why = "the other ranks are on other hosts"
    elif seen.compared:
        why = f"kernels of {seen.compared} of {here} ranks were compared"
    else:
        why = seen.why or refused or "no rank has NCCL's profiler plugin (docs/nccl.md), or no collective ended"
    return Seen(now_ns, next_ns, seen.compared, seen.late, seen.steps, why)
