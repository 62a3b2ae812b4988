"""The processes of this host that are ranks of jobs: a thread looks through /proc every five seconds.

An environment is read when a process is new, once more at the next look, because it may have been between fork() and
exec(), and then once a minute. A number that another process has taken over is a new process: the inode of its
directory differs. What is read is bounded, and what does not fit is counted.

The kernel reads an environment under the lock of the process's memory, for which it waits as long as a page fault of
that process does, on a file server that is gone for instance. So it is a thread that looks: it takes 1 ms of the
interpreter at a time, and hands over what it has found. Everything else is the agent's thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools.signals import Owner
from pytools.sources.jobs.environment import LAYERS, Place, place
from pytools.sources.rdma.owners import process_owner

EVERY_NS: Final = 5 * 10**9
SLICE_NS: Final = 1_000_000
PAUSE_S: Final = 0.02  # after a slice
_CHECK_NS: Final = 100_000_000  # whether a look is over
_AGAIN: Final = 12  # looks
_MOST_BYTES: Final = 128 * 1024  # of an environment
_MOST: Final = 4096  # processes of ranks

Key = tuple[int, int]  # number, and inode of its directory


@dataclass(frozen=True, slots=True)
class Member:
    """A process that is a rank, or a child of one."""

    place: Place
    owner: Owner
    uid: int
    start: int  # clock ticks since boot
    own_pid: int  # as the process sees itself
    netns: int  # inode of its network namespace; 0 if unknown

    @property
    def job(self) -> Hashable:
        """What tells its job from others: what one user's processes on this host agree about."""
        where = self.netns if self.place.on_host else 0
        return self.uid, self.place.scheduler, self.place.rendezvous, where

    @property
    def allocation(self) -> tuple[int, str]:
        """What a scheduler, or Kubernetes, started as one."""
        return self.uid, self.place.scheduler or self.owner.container


class Processes:
    """Members by number.

    Parameters
    ----------
    netns : int
        The only network namespace whose processes count, by inode; 0: all.
    """

    def __init__(self, netns: int = 0, proc: Path = Path("/proc")) -> None:
        self._netns, self._proc = netns, proc
        self._looks: dict[Key, int] = {}
        self._found: dict[Key, Member] = {}
        self._thread: threading.Thread | None = None
        self._result: tuple[dict[Key, int], dict[Key, Member]] | None = None
        self._due_ns = 0
        self._jobs: dict[Hashable, list[Member]] | None = None  # None: to be made anew
        self.refused = self.unreadable = self.too_many = self.hung = 0

    def work(self, now_ns: int) -> int:
        """Take what a look has found, begin one that is due; says when to call again. `now_ns` is CLOCK_MONOTONIC."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread = None
            if self._result is not None:
                self._looks, found = self._result
                if found != self._found:
                    self._found, self._jobs = found, None
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + EVERY_NS
            if self._thread is not None:
                self.hung += 1
            else:
                self._result = None
                self._thread = threading.Thread(target=self._look, name="swerve-ranks", daemon=True)
                self._thread.start()
        return self._due_ns if self._thread is None else now_ns + _CHECK_NS

    @property
    def looking(self) -> bool:
        return self._thread is not None

    def ranks(self) -> dict[Hashable, list[Member]]:
        """The members of each job by rank, the oldest first; the same object while nothing changes.

        Without launchers: what has ranks of another launcher in its allocation.
        """
        if self._jobs is None:
            self._jobs = self._grouped(sorted(self._found.values(), key=lambda each: (each.place.rank, each.start)))
        return self._jobs

    def _grouped(self, members: list[Member]) -> dict[Hashable, list[Member]]:
        innermost: dict[tuple[int, str], int] = {}
        for each in members:
            layer = LAYERS.index(each.place.source)
            innermost[each.allocation] = min(layer, innermost.get(each.allocation, layer))
        jobs: dict[Hashable, list[Member]] = {}
        for each in members:
            if not each.allocation[1] or LAYERS.index(each.place.source) == innermost[each.allocation]:
                jobs.setdefault(each.job, []).append(each)
        return jobs

    def _look(self) -> None:
        """What the thread does: it reads what the other one knows, and changes none of it but counts."""
        looks: dict[Key, int] = {}
        found: dict[Key, Member] = {}
        until_ns = time.monotonic_ns() + SLICE_NS
        try:
            with os.scandir(self._proc) as entries:
                for entry in entries:
                    if not entry.name.isdigit():
                        continue
                    key = int(entry.name), entry.inode()
                    looks[key] = self._looks.get(key, -1) + 1
                    known = self._found.get(key)
                    member = known if looks[key] > 1 and looks[key] % _AGAIN else self._read(key[0], known)
                    if member is not None and len(found) < _MOST:
                        found[key] = member
                    elif member is not None:
                        self.too_many += 1
                    if time.monotonic_ns() > until_ns:
                        time.sleep(PAUSE_S)
                        until_ns = time.monotonic_ns() + SLICE_NS
        except OSError:  # no /proc
            return
        self._result = looks, found

    def _read(self, pid: int, known: Member | None) -> Member | None:
        """What a process is; None if it is no rank, or cannot be read."""
        directory = self._proc / str(pid)
        try:
            with open(directory / "environ", "rb", buffering=0) as file:
                text = file.read(_MOST_BYTES + 1) or b""
            if len(text) > _MOST_BYTES:
                self.refused += 1
                return None
            found = place(text)
            if found is None or (known is not None and known.place == found):
                return known if found is not None else None
            member = self._describe(pid, directory, found)
        except PermissionError:
            self.unreadable += 1
            return None
        except OSError:  # it has just ended
            return None
        return None if self._netns and member.netns != self._netns else member

    def _describe(self, pid: int, directory: Path, found: Place) -> Member:
        stat = (directory / "stat").read_text(errors="replace").rpartition(")")[2].split()
        numbers = _own_numbers((directory / "status").read_text(errors="replace"))
        try:
            netns = os.stat(directory / "ns" / "net").st_ino
        except OSError:
            netns = 0
        uid = os.stat(directory).st_uid
        start = int(stat[19]) if len(stat) > 19 and stat[19].isdigit() else 0
        return Member(found, process_owner(pid, self._proc), uid, start, numbers[-1] if numbers else pid, netns)


def _own_numbers(status: str) -> list[int]:
    """A process's numbers, from the outermost process namespace to its own."""
    for line in status.splitlines():
        name, _, rest = line.partition(":")
        if name == "NSpid":
            return [int(each) for each in rest.split() if each.isdigit()]
    return []
