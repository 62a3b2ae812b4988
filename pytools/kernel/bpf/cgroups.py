"""Attaching to the root control group: sockets of the whole machine, by a link that ends with its descriptor.

Nothing stays behind when the process dies, SIGKILL included. Other programs on the same group go on.
"""

from __future__ import annotations

import codecs
import os
import struct
from pathlib import Path

from pytools.closing import Closing
from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.bpf import syscall


class CgroupLink(Closing):
    """A program on the root control group, until closed."""

    def __init__(self, fd: int) -> None:
        self._fd: int | None = fd

    def close(self) -> None:
        """Detach; a second time does nothing."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def root() -> Path:
    """Where the version 2 hierarchy of control groups is mounted.

    Raises
    ------
    CapabilityError
        If it is mounted nowhere.
    """
    for line in Path("/proc/self/mounts").read_text().splitlines():
        fields = line.split()
        if len(fields) > 2 and fields[2] == "cgroup2":
            return Path(os.fsdecode(codecs.escape_decode(fields[1].encode())[0]))  # a space is written \040
    raise CapabilityError(
        "no version 2 hierarchy of control groups is mounted", "mount -t cgroup2 none /sys/fs/cgroup/unified"
    )


def attach(prog_fd: int, attach_type: int = syscall.SOCK_OPS) -> CgroupLink:
    """Have a program of this type (`syscall`) called for the sockets of a control group, the root unless given.

    Raises
    ------
    CapabilityError
        If there is no version 2 hierarchy.
    SwerveError
        If the kernel refuses.
    """
    place = root()
    try:
        target = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise SwerveError(f"control group {place}: {error.strerror}", "run as root") from None
    try:
        attributes = struct.pack("<4I", prog_fd, target, attach_type, 0).ljust(48, b"\0")
        return CgroupLink(syscall.bpf(syscall.LINK_CREATE, attributes))
    except OSError as error:
        raise SwerveError(
            f"attaching to control group {place} failed: {error.strerror}", "`swerve doctor` says what is missing"
        ) from None
    finally:
        os.close(target)
