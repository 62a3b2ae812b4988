"""The bpf(2) system call: the few commands that swerve needs, no library in between.

Descriptors and buffers are the caller's. Times are nanoseconds. Safe from any thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Final

from pytools.errors import CapabilityError, SwerveError

_SYSCALL: Final = {"x86_64": 321, "aarch64": 280, "riscv64": 280, "ppc64le": 361, "s390x": 351}
_libc = ctypes.CDLL(None, use_errno=True)

MAP_CREATE, MAP_LOOKUP_ELEM, MAP_UPDATE_ELEM, MAP_DELETE_ELEM, MAP_GET_NEXT_KEY = 0, 1, 2, 3, 4
PROG_LOAD, PROG_GET_FD_BY_ID, OBJ_GET_INFO_BY_FD = 5, 13, 15
RAW_TRACEPOINT_OPEN, BTF_LOAD = 17, 18
PROG_QUERY = 16
MAP_LOOKUP_BATCH, MAP_UPDATE_BATCH, LINK_CREATE, ENABLE_STATS = 24, 26, 28, 32

TCX_INGRESS, TCX_EGRESS = 46, 47  # enum bpf_attach_type, and so the next
SOCK_CREATE, SOCK_OPS, CONNECT4, CONNECT6 = 2, 3, 10, 11
UPROBE_MULTI = 48
_BEFORE, _AFTER = 1 << 3, 1 << 4  # BPF_F_BEFORE, BPF_F_AFTER; with no other program named: all of them
_MOST_PROGRAMS = 64  # on one hook (BPF_MPROG_MAX)
_MAP_INFO_BYTES, PROG_INFO_BYTES, _LINK_INFO_BYTES = 80, 232, 16
_RUN_TIME_OFFSET = 192  # of run_time_ns, run_cnt in struct bpf_prog_info


def bpf(command: int, attributes: bytes) -> int:
    """Make the call; returns what the kernel returns.

    Raises
    ------
    OSError
        With the kernel's errno.
    """
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return call(command, buffer, len(attributes))


def call(command: int, buffer: ctypes.Array[ctypes.c_char], size: int) -> int:
    """bpf(2) with attributes of so many bytes in a buffer, which the kernel may write to.

    Raises
    ------
    OSError
        If the kernel refuses.
    CapabilityError
        If the system call's number is not known for this machine.
    """
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise CapabilityError(f"bpf(2) is not known for the machine type {platform.machine()}")
    result = int(_libc.syscall(number, command, ctypes.byref(buffer), size))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def address(buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Where a buffer lies; the caller keeps it alive."""
    return ctypes.cast(buffer, ctypes.c_void_p).value or 0


class MapInfo:
    """What the kernel says about a map: type, sizes, capacity."""

    def __init__(self, fd: int) -> None:
        raw = object_info(fd, _MAP_INFO_BYTES)
        self.type, self.id, self.key_bytes, self.value_bytes, self.max_entries, flags = struct.unpack_from("<6I", raw)
        self.made_with = (self.type, self.key_bytes, self.value_bytes, self.max_entries, flags)


def program_run_time(fd: int) -> tuple[int, int]:
    """Time spent in a program and how often it ran, both since it was loaded and counted only while
    somebody holds `enable_stats`.

    Returns
    -------
    run_time_ns, runs : int
    """
    run_time_ns, runs = struct.unpack_from("<QQ", object_info(fd, PROG_INFO_BYTES), _RUN_TIME_OFFSET)
    return run_time_ns, runs


def program_id(fd: int) -> int:
    """The kernel's number of a program."""
    number: int = struct.unpack_from("<2I", object_info(fd, _LINK_INFO_BYTES))[1]
    return number


def program_of_link(link_fd: int) -> int:
    """A descriptor, the caller's, of the program that a link attaches."""
    _, _, prog_id = struct.unpack_from("<3I", object_info(link_fd, _LINK_INFO_BYTES))
    return bpf(PROG_GET_FD_BY_ID, struct.pack("<3I", prog_id, 0, 0))


def object_info(fd: int, size: int) -> bytes:
    """The first bytes of what the kernel says about a map, a program or a link.

    Raises
    ------
    OSError
        If it is none of these.
    """
    info = ctypes.create_string_buffer(size)
    bpf(OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, size, address(info)))
    return info.raw


def enable_stats() -> int:
    """Have the kernel time every program until the returned descriptor is closed (~70 ns a hit at TC).

    Raises
    ------
    CapabilityError
        If the kernel does not let this process do so.
    """
    try:
        return bpf(ENABLE_STATS, struct.pack("<I", 0))
    except OSError as error:
        raise CapabilityError(
            f"BPF run-time statistics cannot be switched on: {error.strerror}", "run as root"
        ) from None


def create_tcx_link(prog_fd: int, ifindex: int, attach_type: int, last: bool = False) -> int | None:
    """Attach at TC, before or behind all programs there, by a link that vanishes with its descriptor.

    None where the kernel has no TCX (before 6.6). The index is looked up in the calling thread's network namespace.
    """
    attributes = struct.pack("<4I", prog_fd, ifindex, attach_type, _AFTER if last else _BEFORE).ljust(48, b"\0")
    try:
        return bpf(LINK_CREATE, attributes)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):  # unknown attach type
            return None
        raise SwerveError(f"attaching to interface {ifindex} failed: {error.strerror}") from None


def create_uprobe_link(prog_fd: int, path: str, offset: int, at_return: bool) -> int | None:
    """Run a program of type kprobe where a file's code is entered or left, until the returned descriptor is closed.

    None where the kernel has no such links (before 6.6), the program was not loaded for them, or the place is no good.
    """
    name, place = ctypes.create_string_buffer(os.fsencode(path)), ctypes.c_uint64(offset)
    where = struct.pack("<4Q3I", address(name), ctypes.addressof(place), 0, 0, 1, int(at_return), 0)
    try:
        return bpf(LINK_CREATE, (struct.pack("<4I", prog_fd, 0, UPROBE_MULTI, 0) + where).ljust(64, b"\0"))
    except OSError:
        return None


def tcx_programs(ifindex: int, attach_type: int) -> list[int]:
    """Ids of the programs on an interface in their order; none where the kernel has no TCX, or does not tell us."""
    ids = (ctypes.c_uint32 * _MOST_PROGRAMS)()
    attributes = struct.pack("<4IQ2I4Q", ifindex, attach_type, 0, 0, ctypes.addressof(ids), _MOST_PROGRAMS, *[0] * 5)
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    try:
        call(PROG_QUERY, buffer, len(attributes))
    except OSError:
        return []
    count: int = struct.unpack_from("<I", buffer.raw, 24)[0]
    return list(ids[: min(count, _MOST_PROGRAMS)])


def has_tcx(prog_fd: int) -> bool:
    """Whether the kernel knows TCX links; asks it to attach a TC program where no interface is."""
    try:
        bpf(LINK_CREATE, struct.pack("<4I", prog_fd, 0x7FFFFFFF, TCX_INGRESS, 0).ljust(48, b"\0"))
    except OSError as error:
        return error.errno == errno.ENODEV
    return False


class RunTime:
    """Context in which the kernel times programs; read them with `bpf.program_run_time`."""

    def __enter__(self) -> RunTime:
        self._fd = enable_stats()
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
