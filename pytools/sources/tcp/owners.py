"""Who holds a connection: process by the socket's inode, control group and container by the identifier it carries.

Looked up for the connections that are asked about, a slice of time at a go and at most 2 % of it, and remembered by the
socket's cookie, which is never used twice. Inodes are the sockets' own, so processes of all namespaces are told apart
exactly. A socket that several processes hold belongs to the first that is found. One thread: the agent's.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools.kernel.printable import printable
from pytools.signals import Owner
from pytools.sources.tcp.containers import Cgroups

SLICE_NS: Final = 1_000_000
EVERY_NS: Final = 50_000_000  # a slice so often: 2 %
_FILES_AT_ONCE: Final = 16  # between two looks at the clock
_WAITING: Final = 8192  # connections in line; others ask again
_RETRY_NS: Final = 60 * 10**9  # a socket that nobody held may be held by then


@dataclass(frozen=True, slots=True)
class Identity:
    """A connection as the kernel can be asked for it."""

    local: bytes  # 16, IPv4 mapped
    local_port: int
    remote: bytes
    remote_port: int
    interface: int  # index
    cookie: int


InodeOf = Callable[[Identity], int]  # 0: the socket is gone, or no descriptor holds it


class Owners:
    """Owners by cookie.

    Parameters
    ----------
    inode_of : callable
        Asks the kernel for the inode of a connection's socket.
    cgroups : Cgroups
        Closed with this.
    remembered : int
        How many connections' owners are kept.
    """

    def __init__(self, inode_of: InodeOf, cgroups: Cgroups, remembered: int, proc: Path = Path("/proc")) -> None:
        self._inode_of, self._cgroups, self._remembered, self._proc = inode_of, cgroups, remembered, proc
        self._held: OrderedDict[int, tuple[int, str]] = OrderedDict()  # cookie -> process and its name
        self._nobody: OrderedDict[int, int] = OrderedDict()  # cookie -> since when it is known to have none
        self._waiting: OrderedDict[int, Identity] = OrderedDict()
        self._wanted: dict[int, list[int]] = {}  # inode -> cookies, of the walk under way
        self._next: dict[int, list[int]] = {}  # of the one after it
        self._walk: Iterator[tuple[int, int]] | None = None
        self._familiar: OrderedDict[int, None] = OrderedDict()  # processes that held one before: looked at first
        self._asked: set[int] = set()  # cookies waiting, or wanted by this walk or the next
        self._due_ns = 0

    def known(self, cookie: int, cgroup: int) -> Owner:
        """What is known now; without a process when none has been found."""
        held = self._held.get(cookie)
        if held is None:
            return Owner(0, "", *self._cgroups.find(cgroup))
        self._held.move_to_end(cookie)
        return Owner(*held, *self._cgroups.find(cgroup))

    def ask(self, identity: Identity, now_ns: int) -> None:
        """Have the process looked up in the slices that follow, unless that was done lately."""
        cookie = identity.cookie
        if cookie == 0 or cookie in self._asked or len(self._asked) >= _WAITING:
            return
        since_ns = self._nobody.get(cookie)
        if since_ns is None or now_ns - since_ns >= _RETRY_NS:
            self._asked.add(cookie)
            self._waiting[cookie] = identity

    @property
    def busy(self) -> bool:
        """Whether a slice would find work."""
        return bool(self._waiting or self._wanted or self._next)

    def work(self, now_ns: int) -> int:
        """Take a slice of time when one is due; says when the next is. `now_ns` is CLOCK_MONOTONIC."""
        if now_ns >= self._due_ns and self.busy:
            until_ns = time.monotonic_ns() + SLICE_NS
            while self.busy and time.monotonic_ns() < until_ns:
                self._step(now_ns)
            self._due_ns = now_ns + EVERY_NS
        return self._due_ns

    def close(self) -> None:
        self._walk = None
        self._cgroups.close()

    def _step(self, now_ns: int) -> None:
        """A few microseconds of work: inodes first, for one walk then serves them all."""
        if self._waiting:
            cookie, identity = self._waiting.popitem(last=False)
            inode = self._inode_of(identity)
            if inode:
                self._next.setdefault(inode, []).append(cookie)
            else:
                self._give_up([cookie], now_ns)
            return
        if self._walk is None:
            self._wanted, self._next = self._next, {}
            self._walk = holders(self._proc, list(self._familiar))
        for _ in range(_FILES_AT_ONCE):
            found = next(self._walk, None)
            if found is None or not self._wanted:
                for cookies in self._wanted.values():
                    self._give_up(cookies, now_ns)
                self._wanted, self._walk = {}, None
                return
            self._take(*found)

    def _take(self, pid: int, inode: int) -> None:
        cookies = self._wanted.pop(inode, None)
        if cookies is None:
            return
        held = (pid, command(self._proc, pid))
        self._asked.difference_update(cookies)
        for cookie in cookies:
            self._held[cookie] = held
            self._nobody.pop(cookie, None)
        self._familiar[pid] = None
        self._familiar.move_to_end(pid, last=False)
        while len(self._held) > self._remembered:
            self._held.popitem(last=False)
        while len(self._familiar) > _FILES_AT_ONCE:
            self._familiar.popitem()

    def _give_up(self, cookies: list[int], now_ns: int) -> None:
        self._asked.difference_update(cookies)
        for cookie in cookies:
            self._nobody[cookie] = now_ns
            self._nobody.move_to_end(cookie)
        while len(self._nobody) > self._remembered:
            self._nobody.popitem(last=False)


def holders(proc: Path, first: list[int]) -> Iterator[tuple[int, int]]:
    """Process and inode of every open socket; other descriptors give an inode of 0, so that each costs a step."""
    try:
        everyone = [int(name) for name in os.listdir(proc) if name.isdigit()]
    except OSError:
        return
    early = dict.fromkeys(first)
    for pid in [*early, *(pid for pid in everyone if pid not in early)]:
        yield from _sockets(proc, pid)


def _sockets(proc: Path, pid: int) -> Iterator[tuple[int, int]]:
    try:
        with os.scandir(proc / str(pid) / "fd") as entries:
            for entry in entries:
                yield pid, _inode(entry.path)
    except OSError:  # it ended, or is not ours to look into
        yield pid, 0


def _inode(link: str) -> int:
    try:
        target = os.readlink(link)
    except OSError:
        return 0
    number = target.removeprefix("socket:[").removesuffix("]")
    return int(number) if target.startswith("socket:[") and number.isdigit() else 0


def command(proc: Path, pid: int) -> str:
    """The name of a process; empty when it ended."""
    try:
        return printable((proc / str(pid) / "comm").read_text(errors="replace").strip())
    except OSError:
        return ""
