"""Control groups by identifier, and the containers that their names tell of.

Only the unified hierarchy has identifiers that sockets carry. Paths are relative to where it is mounted. A group is
looked up by its handle; where that is not allowed (CAP_DAC_READ_SEARCH), the tree is walked now and then, a slice of
time at a go: the identifier is the inode of its directory. One thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pytools.errors import SwerveError
from pytools.kernel.bpf import cgroups
from pytools.kernel.printable import printable

_libc = ctypes.CDLL(None, use_errno=True)
_KERNFS_HANDLE: Final = struct.Struct("=IiQ")  # struct file_handle of a cgroup: its size, its type, the identifier
_FILEID_KERNFS: Final = 0xFE
_REMEMBERED: Final = 4096
_MOST_GROUPS: Final = 65536  # of a walk
_AGAIN_NS: Final = 10 * 10**9

_HEX: Final = r"([0-9a-f]{64})"
# What engines call the group of a container, innermost component first; the identifier is the first group.
_CONTAINERS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"docker-{_HEX}\.scope",
        rf"cri-containerd-{_HEX}\.scope",
        rf"crio-{_HEX}(?:\.scope)?",
        rf"libpod-{_HEX}(?:\.scope)?",
        rf"nerdctl-{_HEX}\.scope",
        rf".+:cri-containerd:{_HEX}",  # containerd told to use slices, by a runtime that does not
        _HEX,  # cgroupfs drivers: /docker/<id>, /kubepods/burstable/pod<uid>/<id>, /ecs/<task>/<id>
        r"[0-9a-f]{32}-\d{9,10}",  # ECS and Fargate tasks
        r"lxc\.payload\.(.+)",
        r"machine-(.+)\.scope",  # systemd-nspawn, libvirt
        r"systemd-nspawn@(.+)\.service",
    )
)


def container(path: str) -> str:
    """The identifier of the innermost container whose group lies on the path; empty for none.

    >>> container("/kubepods.slice/cri-containerd-" + 64 * "a" + ".scope/init")[:4]
    'aaaa'
    """
    for part in reversed(path.split("/")):
        for pattern in _CONTAINERS:
            found = pattern.fullmatch(part)
            if found:
                return found.group(found.lastindex or 0)
    return ""


class Cgroups:
    """Path and container by identifier; remembers them, also when the group is gone."""

    def __init__(self, root: Path | None = None) -> None:
        self._found = functools.lru_cache(_REMEMBERED)(self._find)
        self._walked: dict[int, str] = {}
        self._walk: Iterator[None] | None = None
        self._unknown, self._walk_due_ns = False, 0
        self._root, self._fd = "", -1
        with contextlib.suppress(OSError, SwerveError):  # none is mounted: nothing is known of any
            self._root = str(cgroups.root() if root is None else root)
            self._fd = os.open(self._root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def find(self, identifier: int) -> tuple[str, str]:
        """Path below the root ("/" for the root itself) and container; empty when not found (any more, or yet)."""
        try:
            return self._found(identifier)
        except KeyError:  # not to be remembered: the next walk may come by it
            self._unknown = True
            return "", ""

    def work(self, now_ns: int, until_ns: int) -> None:
        """Walk on, where a group was asked for that no handle leads to."""
        if self._walk is None and self._unknown and now_ns >= self._walk_due_ns:
            self._unknown, self._walk_due_ns = False, now_ns + _AGAIN_NS
            self._walk = self._steps()
        while self._walk is not None and time.monotonic_ns() < until_ns:
            if next(self._walk, self) is self:
                self._walk = None

    def _steps(self) -> Iterator[None]:
        walked, waiting = {os.fstat(self._fd).st_ino: "/"}, [""]
        while waiting and len(walked) < _MOST_GROUPS:
            path = waiting.pop()
            with contextlib.suppress(OSError), os.scandir(self._root + path) as entries:
                below = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
                walked |= {entry.inode(): printable(f"{path}/{entry.name}") for entry in below}
                waiting += [f"{path}/{entry.name}" for entry in below]
            yield
        self._walked = walked

    def _find(self, identifier: int) -> tuple[str, str]:
        if identifier == 0 or self._fd < 0:
            return "", ""
        path = self._look_up(identifier)
        return path, container(path)

    def _look_up(self, identifier: int) -> str:
        """By handle: no walk through the tree, whatever its size."""
        raw = _KERNFS_HANDLE.pack(8, _FILEID_KERNFS, identifier)
        handle = ctypes.create_string_buffer(raw, len(raw))
        fd = _libc.open_by_handle_at(self._fd, handle, os.O_PATH | os.O_CLOEXEC)
        if fd < 0:
            return self._walked[identifier] if ctypes.get_errno() == errno.EPERM else ""
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            return ""
        finally:
            os.close(fd)
        if target.endswith(" (deleted)") or not target.startswith(self._root):
            return ""
        return printable(target[len(self._root.rstrip("/")) :]) or "/"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
