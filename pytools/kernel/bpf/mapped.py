"""BPF array maps that lie in memory: made, found again, and read or written in place as numpy records.

The kernel and any number of processes may write such a map at the same time; each 64-bit number is read whole. A map
lives as long as a descriptor or a mapping of it. Safe from one thread at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.closing import Closing
from pytools.errors import CapabilityError, SwerveError
from pytools.kernel.bpf import syscall

_ARRAY: Final = 2  # BPF_MAP_TYPE_ARRAY
_MAPPABLE: Final = 0x400  # BPF_F_MMAPABLE
_GET_NEXT_ID, _GET_FD_BY_ID = 12, 14
_INFO_BYTES, _NAME_AT, _NAME_BYTES = 80, 24, 16


class MappedArray(Closing):
    """A mappable array map in this process's memory.

    Parameters
    ----------
    fd : int
        Its descriptor; taken over.
    record : numpy.dtype
        The layout of a value, as compiled.

    Raises
    ------
    SwerveError
        If the map is of another kind or layout, or may not be mapped.
    """

    def __init__(self, fd: int, record: np.dtype[Any]) -> None:
        self.fd = fd
        try:
            info = _info(fd)
            if (info.type, info.value_bytes) != (_ARRAY, record.itemsize) or not info.flags & _MAPPABLE:
                raise SwerveError(
                    f"map {info.id} ({info.name}) is not a mappable array of {record.itemsize} byte records"
                )
            if record.itemsize % 8:
                raise SwerveError("records of a mapped array must be a multiple of 8 bytes long")
            size = info.entries * record.itemsize
            try:
                self._memory = mmap.mmap(fd, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, mmap.MAP_SHARED)
            except OSError as error:
                raise SwerveError(f"map {info.id} ({info.name}) cannot be mapped: {error.strerror}") from None
        except BaseException:
            os.close(fd)
            raise
        self.id, self.name = info.id, info.name
        self.records: NDArray[Any] = np.frombuffer(self._memory, record, info.entries)

    def close(self) -> None:
        """Give the descriptor back, and the memory as soon as nobody holds an array of it."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        del self.records
        with contextlib.suppress(BufferError):  # it goes with the last array
            self._memory.close()


class _Info:
    def __init__(self, raw: bytes) -> None:
        self.type, self.id, _, self.value_bytes, self.entries, self.flags = struct.unpack_from("<6I", raw)
        self.name = raw[_NAME_AT : _NAME_AT + _NAME_BYTES].split(b"\0")[0].decode(errors="replace")


def _info(fd: int) -> _Info:
    buffer = ctypes.create_string_buffer(_INFO_BYTES)
    syscall.bpf(syscall.OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", fd, _INFO_BYTES, syscall.address(buffer)))
    return _Info(buffer.raw)


def create(name: str, record: np.dtype[Any], entries: int) -> MappedArray:
    """A new map of zeroed records; the name (at most 15 letters, digits, dots, underscores) is how it is found again.

    Raises
    ------
    CapabilityError
        If the kernel does not let this process make one.
    """
    encoded = name.encode()
    if not 0 < len(encoded) < _NAME_BYTES:
        raise ValueError(f"map name {name!r}")
    sizes = struct.pack("<7I", _ARRAY, 4, record.itemsize, entries, _MAPPABLE, 0, 0)
    try:
        fd = syscall.bpf(syscall.MAP_CREATE, (sizes + encoded.ljust(_NAME_BYTES, b"\0")).ljust(72, b"\0"))
    except OSError as error:
        raise CapabilityError(f"no mappable BPF array can be made: {error.strerror}", "run as root") from None
    return MappedArray(fd, record)


def named(prefix: str) -> Iterator[tuple[str, int]]:
    """The maps whose names begin like this: name, and a new descriptor that is then the caller's.

    Walks the list of all maps, which needs root; without it there is nothing.
    """
    previous = 0
    while True:
        buffer = ctypes.create_string_buffer(struct.pack("<3I", previous, 0, 0), 12)
        try:
            syscall.call(_GET_NEXT_ID, buffer, 12)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EPERM):
                return
            raise
        previous = struct.unpack_from("<I", buffer.raw, 4)[0]
        try:
            fd = syscall.bpf(_GET_FD_BY_ID, struct.pack("<3I", previous, 0, 0))
        except OSError:
            continue  # gone meanwhile, or not ours to open
        name = _info(fd).name
        if name.startswith(prefix):
            yield name, fd
        else:
            os.close(fd)
