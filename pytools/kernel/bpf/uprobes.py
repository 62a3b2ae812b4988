"""Breakpoints in user-space code that run a BPF program: by library and file offset, whether or not it has symbols.

They act on every process that has the file mapped, or maps it later, whichever path it used; containers' copies are
other files. They vanish with their descriptors. Safe from any thread.

They are links where the kernel has those (since 6.6, 89ae89f53d20), else events of perf. Removing an event waits 0.1 s
for programs that may still run, under a mutex of the kernel, and setting it takes CAP_SYS_ADMIN on some; links wait
together.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from pytools.closing import Closing
from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.bpf import syscall

_SYSCALL: Final = {"x86_64": 298, "aarch64": 241, "riscv64": 241, "ppc64le": 319, "s390x": 331}
_ENABLE, _SET_BPF = 0x2400, 0x40042408  # PERF_EVENT_IOC_*
_ATTRIBUTE_BYTES = 128
_CLOSE_ON_EXEC = 8
_AT_ONCE: Final = 16  # that are removed together
_PMU = Path("/sys/bus/event_source/devices/uprobe")
_libc = ctypes.CDLL(None, use_errno=True)


class Uprobe(Closing):
    """One program at one place, until closed.

    Parameters
    ----------
    prog_fd : int
        A loaded program of type kprobe; stays the caller's.
    path : str
        The library or executable.
    offset : int
        Of the function's first byte in the file.
    at_return : bool
        Run when the function returns, instead of when it is entered.
    pid : int
        Of one process; -1: of all, also those that start later.

    Raises
    ------
    CapabilityError
        If this kernel has no uprobes, or this process may not set them.
    SwerveError
        If the kernel refuses the place.
    """

    def __init__(self, prog_fd: int, path: str, offset: int, at_return: bool = False, pid: int = -1) -> None:
        self.path, self.offset = path, offset
        # One process alone: kernels before 6.11 take the number for that of a thread.
        link = syscall.create_uprobe_link(prog_fd, path, offset, at_return) if pid < 0 else None
        self.linked = link is not None
        if link is not None:
            self._fd = link
            return
        self._fd = _open_event(path, offset, at_return, pid)
        try:
            fcntl.ioctl(self._fd, _SET_BPF, prog_fd)
            fcntl.ioctl(self._fd, _ENABLE, 0)
        except OSError as error:
            self.close()
            raise SwerveError(f"no program can be put at {path}+{offset:#x}: {error.strerror}") from None

    def close(self) -> None:
        """Remove the breakpoint; a second time does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def close_all(probes: Iterable[Uprobe]) -> None:
    """Remove many."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(Uprobe.close, probes):
            pass


def missing() -> str:
    """Why this kernel has no uprobes; empty when it has."""
    return "" if (_PMU / "type").exists() else "the kernel has no uprobes (CONFIG_UPROBE_EVENTS)"


def _open_event(path: str, offset: int, at_return: bool, pid: int) -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None or missing():
        raise CapabilityError(missing() or f"uprobes are not known for the machine type {platform.machine()}")
    return_bit = int((_PMU / "format/retprobe").read_text().strip().removeprefix("config:"))
    name = ctypes.create_string_buffer(os.fsencode(path))
    # struct perf_event_attr: type, size, config, six that do not matter here, the path's address, the offset
    attributes = struct.pack(
        "<IIQQQQQIIQQ",
        int((_PMU / "type").read_text()),
        _ATTRIBUTE_BYTES,
        int(at_return) << return_bit,
        *(0, 0, 0, 0, 0, 0),
        syscall.address(name),
        offset,
    ).ljust(_ATTRIBUTE_BYTES, b"\0")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    cpu = 0 if pid < 0 else -1  # the breakpoint runs its program on whatever CPU it is hit
    fd = int(_libc.syscall(number, ctypes.byref(buffer), pid, cpu, -1, _CLOSE_ON_EXEC))
    if fd < 0:
        code = ctypes.get_errno()
        if code in (errno.EPERM, errno.EACCES):
            raise CapabilityError(f"no breakpoint may be set in {path}: {os.strerror(code)}", "run as root")
        raise SwerveError(f"no breakpoint can be set at {path}+{offset:#x}: {os.strerror(code)}")
    return fd
