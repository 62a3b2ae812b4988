"""BPF queues: numbers that user space puts in and a program takes out. The descriptor is the caller's."""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from pytools.errors import SwerveError
from pytools.kernel.bpf import syscall

_LOOKUP_AND_DELETE = 21


def push(queue_fd: int, value: int) -> None:
    """Put in a number of 32 bits.

    Raises
    ------
    SwerveError
        If the queue is full.
    """
    buffer = ctypes.create_string_buffer(struct.pack("<I", value), 4)
    try:
        syscall.bpf(syscall.MAP_UPDATE_ELEM, struct.pack("<IIQQQ", queue_fd, 0, 0, syscall.address(buffer), 0))
    except OSError as error:
        raise SwerveError(f"a kernel queue takes no more: {os.strerror(error.errno or 0)}") from None


def drain(queue_fd: int) -> int:
    """Take everything out; returns how many there were."""
    found = 0
    buffer = ctypes.create_string_buffer(4)
    while True:
        try:
            syscall.bpf(_LOOKUP_AND_DELETE, struct.pack("<IIQQQ", queue_fd, 0, 0, syscall.address(buffer), 0))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return found
            raise SwerveError(f"a kernel queue gives nothing: {os.strerror(error.errno or 0)}") from None
        found += 1
