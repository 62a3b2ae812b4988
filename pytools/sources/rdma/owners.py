"""Who a process is: command, cgroup, container. Reads /proc; of a process that is gone only the number is known."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from pytools.kernel.printable import printable
from pytools.signals import Owner
from pytools.sources.tcp.containers import container
from pytools.sources.tcp.owners import command


def cgroup_path(text: str) -> str:
    """The path below the root of the hierarchy, from the text of /proc/PID/cgroup.

    That of the unified hierarchy (version 2); where a process is not in one, the longest of version 1.
    """
    paths = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        paths[number] = rest.partition(":")[2].removesuffix(" (deleted)")
    unified = paths.get("0", "")
    return unified if unified not in ("", "/") else max(paths.values(), key=len, default="")


def process_owner(pid: int, proc: Path = Path("/proc")) -> Owner:
    """The owner behind a process id; what cannot be read stays empty."""
    try:
        path = printable(cgroup_path((proc / str(pid) / "cgroup").read_text(errors="replace")))
    except OSError:  # gone, or not ours to read
        path = ""
    return Owner(pid=pid, command=command(proc, pid), cgroup=path, container=container(path))


def user_of(pid: int) -> int | None:
    """The effective user of a process; None when it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


class Process(NamedTuple):
    """A process as it was when it was first met."""

    owner: Owner
    start: int | None  # in clock ticks since boot; None: it was gone already
    uid: int | None

    @classmethod
    def of(cls, pid: int) -> Process:
        """What can be read of it now."""
        return cls(process_owner(pid), _start_of(pid), user_of(pid))

    def gone(self) -> bool:
        """Whether it has ended; its number may be another's by now."""
        return self.start is None or _start_of(self.owner.pid) != self.start


def _start_of(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[19]) if fields[0] not in "ZX" else None
    except (OSError, IndexError, ValueError):
        return None
