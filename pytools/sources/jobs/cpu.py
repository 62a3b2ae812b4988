"""What the ranks of jobs get of the processors: waits in the run queue, quotas of control groups, steal, and pressure.

The wait is that of a rank's main thread (/proc/PID/schedstat). A quota may be set on any control group above a process;
those of version 1 and 2 are read, as far as they are mounted here. Of each figure the change within a window counts.
Durations are nanoseconds. One thread: the agent's; all files are the kernel's own, and none of them blocks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from pytools.estimators.job_evidence import HostUse, RankUse

_LOOK_AGAIN: Final = 5  # windows until it is looked again in which control group a rank is, and what its quota is
_MOST_BYTES: Final = 16_384  # of such a file
_STEAL: Final = 7  # among the columns of /proc/stat
_IDLE: Final = (3, 4)  # idle, and waiting for a disk
_RUNNING: Final = 8  # columns; guests are in others


class Controller(NamedTuple):
    """Where the controller of the CPU is mounted."""

    root: Path
    version: int


def controllers(mountinfo: str) -> list[Controller]:
    """The hierarchies that may limit the CPU, from the text of /proc/self/mountinfo."""
    found = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or not kinds or fields[3] != "/":
            continue
        root = Path(fields[4].encode().decode("unicode_escape"))
        if kinds[0] == "cgroup2":
            found.append(Controller(root, 2))
        elif kinds[0] == "cgroup" and "cpu" in kinds[-1].split(","):
            found.append(Controller(root, 1))
    return found


def group_of(text: str, version: int) -> str | None:
    """A process's group, from the text of /proc/PID/cgroup; None if it is in none, or in one that is not seen here."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if (number == "0") if version == 2 else "cpu" in names.split(","):
            return None if ".." in path.split("/") else path
    return None


@dataclass(slots=True)
class _Quota:
    folder: Path
    name: str
    period_ns: int
    version: int
    throttled_ns: int = -1  # so far; -1: not read yet
    periods: int = 0  # so far, those in which it was throttled
    lost_ns: int = 0  # in the window

    def update(self) -> None:
        """Read it once more."""
        counts = dict(line.split() for line in _start(f"{self.folder}/cpu.stat").splitlines() if line.count(" ") == 1)
        total = int(counts.get("throttled_usec", 0)) * 1000 if self.version == 2 else int(counts["throttled_time"])
        periods = int(counts["nr_throttled"])
        if self.throttled_ns >= 0:  # of all processors together, but not longer than the periods in which it was
            lost = total - self.throttled_ns
            self.lost_ns = max(0, min(lost, (periods - self.periods + 1) * self.period_ns))
        self.throttled_ns, self.periods = total, periods


@dataclass(slots=True)
class _Rank:
    number: int
    fd: int  # of schedstat
    group_fd: int = -1  # of its control groups; -1: there are none
    waited_ns: int = -1
    quotas: tuple[_Quota, ...] = ()

    def close(self) -> None:
        os.close(self.fd)
        if self.group_fd >= 0:
            os.close(self.group_fd)


class Cpu:
    """The processors as the ranks of this host see them."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._controllers = controllers(_text(proc / "self" / "mountinfo"))
        self._ranks: dict[tuple[int, int], _Rank] = {}  # number and start of the process
        self._quotas: dict[Path, _Quota] = {}
        self._ticks: list[int] | None = None
        self._pressure_us: int | None = None
        self._began_ns = self._turn = 0
        self.host: HostUse | None = None

    def set_ranks(self, processes: Iterable[tuple[int, int, int]]) -> None:
        """Follow these: number, start, and rank of each."""
        wanted = {(pid, start): rank for pid, start, rank in processes}
        for key in self._ranks.keys() - wanted.keys():
            self._ranks.pop(key).close()
        for key in wanted.keys() - self._ranks.keys():
            folder = self._proc / str(key[0])
            with contextlib.suppress(OSError):
                self._ranks[key] = _Rank(wanted[key], os.open(folder / "schedstat", os.O_RDONLY | os.O_CLOEXEC))
                self._ranks[key].group_fd = os.open(folder / "cgroup", os.O_RDONLY | os.O_CLOEXEC)
        self._turn = 0

    def window(self, now_ns: int) -> dict[tuple[int, int], RankUse]:
        """What each process got since the last call, by its number and start; nothing at the first."""
        window_ns, self._began_ns = now_ns - self._began_ns, now_ns
        self._read_host(window_ns)
        if self._turn % _LOOK_AGAIN == 0:
            self._find_quotas()
        self._turn += 1
        for path, quota in list(self._quotas.items()):
            try:
                quota.update()
            except (OSError, KeyError, ValueError):  # it is gone
                del self._quotas[path]
        return {key: use for key, each in self._ranks.items() if (use := _use(each, window_ns)) is not None}

    def _find_quotas(self) -> None:
        quotas: dict[Path, _Quota] = {}
        looked: dict[Path, _Quota | None] = {}
        chains: dict[bytes, tuple[_Quota, ...]] = {}  # by the groups of a rank: most ranks share theirs
        for each in self._ranks.values():
            try:
                text = os.pread(each.group_fd, _MOST_BYTES, 0)
            except OSError:  # it has ended, or there is none
                text = b""
            if text not in chains:
                chains[text] = self._chain(text.decode(errors="replace"), looked)
                quotas |= {found.folder: found for found in chains[text]}
            each.quotas = chains[text]
        self._quotas = quotas

    def _chain(self, text: str, looked: dict[Path, _Quota | None]) -> tuple[_Quota, ...]:
        """The quotas of a control group and of those above it."""
        chain = []
        for root, version in self._controllers:
            group = group_of(text, version)
            while group is not None and group not in ("", "/"):
                folder = root / group.lstrip("/")
                if folder not in looked:
                    now = _quota(folder, group, version)
                    looked[folder] = now and self._quotas.get(folder, now)
                if (found := looked[folder]) is not None:
                    chain.append(found)
                group = group.rpartition("/")[0]
        return tuple(chain)

    def _read_host(self, window_ns: int) -> None:
        first = _start(f"{self._proc}/stat").partition("\n")[0].split()[1 : 1 + _RUNNING]
        ticks = [int(each) for each in first if each.isdigit()]
        some = _start(f"{self._proc}/pressure/cpu").partition("total=")[2].split()
        pressure_us = int(some[0]) if some and some[0].isdigit() else None
        if self._ticks is not None and len(ticks) == len(self._ticks) == _RUNNING and window_ns > 0:
            grown = [max(0, now - before) for now, before in zip(ticks, self._ticks, strict=True)]
            runnable = sum(grown) - sum(grown[each] for each in _IDLE)
            before_us, share = self._pressure_us, None
            if pressure_us is not None and before_us is not None:
                share = max(0, pressure_us - before_us) * 1000 / window_ns
            self.host = HostUse(grown[_STEAL] / runnable if runnable else None, runnable, share)
        self._ticks, self._pressure_us = ticks, pressure_us

    def close(self) -> None:
        """Follow nobody, and begin anew with the next."""
        self.set_ranks(())
        self._quotas.clear()
        self._ticks, self.host, self._began_ns = None, None, 0


def _use(rank: _Rank, window_ns: int) -> RankUse | None:
    try:
        waited_ns = int(os.pread(rank.fd, 256, 0).split()[1])
    except (OSError, IndexError, ValueError):  # it has ended
        return None
    before, rank.waited_ns = rank.waited_ns, waited_ns
    if before < 0 or window_ns <= 0:
        return None
    waited = min(1.0, max(0, waited_ns - before) / window_ns)
    if not rank.quotas:
        return RankUse(rank.number, waited, 0.0)
    worst = max(rank.quotas, key=lambda each: each.lost_ns)
    return RankUse(rank.number, waited, min(1.0, worst.lost_ns / window_ns), worst.period_ns, worst.name)


def _quota(folder: Path, name: str, version: int) -> _Quota | None:
    """The quota of a group, if it has one."""
    try:
        if version == 2:
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{each}_us").read_text().strip() for each in ("quota", "period"))
        return _Quota(folder, name, int(period) * 1000, version) if quota.isdigit() else None
    except (OSError, ValueError):
        return None


def _start(path: str) -> str:
    """The first bytes of a file of the kernel; without a buffer and a decoder, as this is read in each window."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _MOST_BYTES).decode("ascii", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
