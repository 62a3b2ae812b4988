"""The processes of this host that are ranks of jobs: /proc is looked through every five seconds, a slice at a time.

An environment is read when a process is new, once more at the next look, because it may have been between fork() and
exec(), and then once a minute. A number that another process has taken over is a new process: the inode of its
directory differs. What is read is bounded, and what does not fit is counted. One thread: the agent's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools.signals import Owner
from pytools.sources.jobs.environment import LAYERS, Place, place
from pytools.sources.rdma.owners import process_owner

EVERY_NS: Final = 5 * 10**9
SLICE_NS: Final = 1_000_000
PAUSE_NS: Final = 50_000_000  # after a slice
_AGAIN: Final = 12  # looks
_UNREAD: Final = 64  # processes between two looks at the clock that cost no more than their entry
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
    proc : Path
        Where the processes are.
    """

    def __init__(self, netns: int = 0, proc: Path = Path("/proc")) -> None:
        self._netns, self._proc = netns, proc
        self._looks: dict[Key, int] = {}
        self._found: dict[Key, Member] = {}
        self._steps: Iterator[None] | None = None
        self._due_ns = 0
        self._jobs: dict[Hashable, list[Member]] | None = None  # None: to be made anew
        self.refused = self.unreadable = self.too_many = 0

    def work(self, now_ns: int) -> int:
        """Take a slice of time when one is due; says when the next is. `now_ns` is CLOCK_MONOTONIC."""
        if now_ns < self._due_ns:
            return self._due_ns
        if self._steps is None:
            self._steps = self._look()
        until_ns = time.monotonic_ns() + SLICE_NS
        while time.monotonic_ns() < until_ns:
            if next(self._steps, self) is self:
                self._steps, self._due_ns = None, now_ns + EVERY_NS
                return self._due_ns
        self._due_ns = now_ns + PAUSE_NS
        return self._due_ns

    @property
    def looking(self) -> bool:
        """Whether a look is under way."""
        return self._steps is not None

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

    def _look(self) -> Iterator[None]:
        looks: dict[Key, int] = {}
        try:
            entries = os.scandir(self._proc)
        except OSError:
            return
        with entries:
            for count, entry in enumerate(entries):
                if not entry.name.isdigit():
                    continue
                key = int(entry.name), entry.inode()
                looks[key] = self._looks.get(key, -1) + 1
                if looks[key] > 1 and looks[key] % _AGAIN:
                    if count % _UNREAD == 0:
                        yield
                    continue
                try:
                    self._read(key)
                except PermissionError:
                    self.unreadable += 1
                except OSError:  # it has just ended
                    pass
                yield
        self._looks = looks
        for gone in self._found.keys() - looks.keys():
            self._forget(gone)

    def _read(self, key: Key) -> None:
        directory = self._proc / str(key[0])
        with open(directory / "environ", "rb", buffering=0) as file:
            text = file.read(_MOST_BYTES + 1) or b""
        if len(text) > _MOST_BYTES:
            self.refused += 1
            return
        known = self._found.get(key)
        found = place(text)
        if found is None or (known is not None and known.place == found):
            if found is None:
                self._forget(key)
            return
        if known is None and len(self._found) >= _MOST:
            self.too_many += 1
            return
        member = self._describe(key[0], directory, found)
        if not self._netns or member.netns == self._netns:
            self._found[key], self._jobs = member, None

    def _forget(self, key: Key) -> None:
        if self._found.pop(key, None) is not None:
            self._jobs = None

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
