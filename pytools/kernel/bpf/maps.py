"""BPF maps as numpy arrays: batched reads, single writes.

Layouts are those of the compiled C types. Safe from one thread at a time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.kernel.bpf import syscall

_PERCPU_TYPES = (5, 6, 10)  # BPF_MAP_TYPE_PERCPU_HASH, PERCPU_ARRAY, LRU_PERCPU_HASH
_BATCH = 512  # at once: larger buffers, made and freed each second, leave the heap in pieces
_SMALL = 16  # at first, in a map that was empty: most hold few of the entries that they could, times CPUs
_ENOTSUPP = 524  # the kernel's own, not in errno.h


def possible_cpus() -> int:
    """How many values a per-CPU map keeps for a key."""
    with open("/sys/devices/system/cpu/possible") as file:
        return int(file.read().strip().split("-")[-1].split(",")[-1]) + 1


def update_each(update: Callable[[Any, Any], None], keys: NDArray[Any], values: NDArray[Any]) -> int:
    """Set entries one by one; returns how many were refused."""
    refused = 0
    for key, value in zip(keys, values, strict=True):
        try:
            update(key, value)
        except SwerveError:
            refused += 1
    return refused


class Map:
    """One map; `read` gives everything in it.

    Parameters
    ----------
    name : str
        For messages.
    fd : int
        Descriptor; stays the caller's.
    key, value : numpy.dtype
        Layouts, as compiled.
    """

    def __init__(self, name: str, fd: int, key: np.dtype[Any], value: np.dtype[Any]) -> None:
        self.name, self.fd, self.key, self.value = name, fd, key, value
        info = syscall.MapInfo(fd)
        self.max_entries = info.max_entries
        self.percpu = info.type in _PERCPU_TYPES
        self._cpus = possible_cpus() if self.percpu else 1
        stride = (value.itemsize + 7) // 8 * 8 if self.percpu else value.itemsize
        self._slot = np.dtype({"names": ["value"], "formats": [value], "offsets": [0], "itemsize": stride})
        self._batched = True
        self._found = 0  # entries, when it was read last

    def read(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """All keys and values.

        Returns
        -------
        keys : ndarray, shape (n,)
        values : ndarray, shape (n,) or (n, cpus) for a per-CPU map
        """
        if self._batched:
            try:
                return self._read_batched()
            except OSError as error:
                self._without_batches(error)
        return self._read_one_by_one()

    def batches(self, at_once: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """What `read` gives, in parts of about so many entries, each read when it is asked for.

        Entries that come or go meanwhile may be missing; none is given twice but for those that move.
        """
        if self._batched:
            try:
                yield from self._batches(at_once)
                return
            except OSError as error:
                self._without_batches(error)
        yield self._read_one_by_one()

    def _without_batches(self, error: OSError) -> None:
        """Go on without, when that is what the error says: this map type has no batch operations on this kernel."""
        if error.errno not in (errno.EINVAL, _ENOTSUPP):
            raise SwerveError(f"the map {self.name} cannot be read: {error.strerror}") from None
        self._batched = False

    def read_percpu_sum(self) -> NDArray[Any]:
        """A per-CPU array's values summed over the CPUs, in the order of the index."""
        keys, values = self.read()
        total: NDArray[Any] = values.sum(axis=1)[np.argsort(keys, kind="stable")]
        return total

    def update(self, key: Any, value: Any) -> None:
        """Set one entry; for a per-CPU map, the same value on every CPU.

        Raises
        ------
        SwerveError
            If the map is full or refuses.
        """
        values = np.zeros(self._cpus, self._slot)
        values["value"] = np.asarray(value, self.value)
        self._element(syscall.MAP_UPDATE_ELEM, key, values.tobytes())

    def update_many(self, keys: NDArray[Any], values: NDArray[Any]) -> int:
        """Set many entries of a map that is not per CPU; returns how many were refused: the map is full."""
        if self._batched and len(keys):
            raw_keys, raw_values = keys.astype(self.key).tobytes(), values.astype(self.value).tobytes()
            key_buffer = ctypes.create_string_buffer(raw_keys, len(raw_keys))
            value_buffer = ctypes.create_string_buffer(raw_values, len(raw_values))
            where = (0, 0, syscall.address(key_buffer), syscall.address(value_buffer))
            attributes = struct.pack("<QQQQIIQQ", *where, len(keys), self.fd, 0, 0)
            buffer = ctypes.create_string_buffer(attributes, len(attributes))
            try:
                syscall.call(syscall.MAP_UPDATE_BATCH, buffer, len(attributes))
                return 0
            except OSError as error:
                if error.errno == errno.E2BIG:  # stopped there
                    return len(keys) - int(struct.unpack_from("<I", buffer.raw, 32)[0])
                self._without_batches(error)
        return update_each(self.update, keys, values)

    def lookup_many(self, keys: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[Any]]:
        """Which of these keys are there, and their values (zeros for the others); not for per-CPU maps."""
        count, size = len(keys), self.key.itemsize
        raw = ctypes.create_string_buffer(keys.astype(self.key).tobytes(), max(1, count * size))
        values = ctypes.create_string_buffer(max(1, count * self._slot.itemsize))
        found = np.zeros(count, np.bool_)
        key_at, value_at = syscall.address(raw), syscall.address(values)
        for index in range(count):
            where = key_at + index * size, value_at + index * self._slot.itemsize
            try:
                syscall.bpf(syscall.MAP_LOOKUP_ELEM, struct.pack("<IIQQQ", self.fd, 0, *where, 0))
                found[index] = True
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise SwerveError(f"reading map {self.name} failed: {error.strerror}") from None
        return found, np.frombuffer(values.raw, self._slot, count)["value"].copy()

    def delete(self, key: Any) -> bool:
        """Remove one entry; False when it was not there."""
        try:
            self._element(syscall.MAP_DELETE_ELEM, key, b"")
        except SwerveError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ENOENT:
                return False
            raise
        return True

    def _element(self, command: int, key: Any, value: bytes) -> bytes:
        raw_key = np.asarray(key, self.key).tobytes()
        keys = ctypes.create_string_buffer(raw_key, len(raw_key))
        values = ctypes.create_string_buffer(value, max(len(value), 1))
        where = syscall.address(values) if value else 0
        try:
            syscall.bpf(command, struct.pack("<IIQQQ", self.fd, 0, syscall.address(keys), where, 0))
        except OSError as error:
            full = "; it is full" if error.errno == errno.E2BIG else ""
            raise SwerveError(f"map {self.name}: {os.strerror(error.errno or 0)}{full}") from error
        return values.raw

    def _shaped(
        self, keys: bytes | memoryview, values: bytes | memoryview, count: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        key_array = np.frombuffer(keys, self.key, count).copy()
        slots = np.frombuffer(values, self._slot, count * self._cpus)["value"].copy()
        return key_array, slots.reshape(count, self._cpus) if self.percpu else slots

    def _read_batched(self) -> tuple[NDArray[Any], NDArray[Any]]:
        parts = list(self._batches(_BATCH))
        return np.concatenate([keys for keys, _ in parts]), np.concatenate([values for _, values in parts])

    def _batches(self, at_once: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        value_bytes = self._slot.itemsize * self._cpus
        most = min(at_once, self.max_entries)
        size, start, last, total = max(_SMALL, 2 * self._found), 0, False, 0
        token = ctypes.create_string_buffer(max(8, self.key.itemsize))
        while not last:
            size = min(size, most)
            keys = ctypes.create_string_buffer(size * self.key.itemsize)
            values = ctypes.create_string_buffer(size * value_bytes)
            where = (start, syscall.address(token), syscall.address(keys), syscall.address(values))
            attributes = struct.pack("<QQQQIIQQ", *where, size, self.fd, 0, 0)
            buffer = ctypes.create_string_buffer(attributes, len(attributes))
            try:
                syscall.call(syscall.MAP_LOOKUP_BATCH, buffer, len(attributes))
            except OSError as error:
                if error.errno == errno.ENOSPC:  # one hash bucket holds more than fits: ask for more at once
                    size *= 2
                    most = max(most, size)
                    continue
                if error.errno != errno.ENOENT:
                    raise
                last = True
            count = struct.unpack_from("<I", buffer.raw, 32)[0]
            start = syscall.address(token)
            total += count
            found = memoryview(keys)[: count * self.key.itemsize], memoryview(values)[: count * value_bytes]
            yield self._shaped(*found, count)
            size *= 2  # there is more
        self._found = total

    def _read_one_by_one(self) -> tuple[NDArray[Any], NDArray[Any]]:
        value_bytes = self._slot.itemsize * self._cpus
        key = ctypes.create_string_buffer(self.key.itemsize)
        value = ctypes.create_string_buffer(value_bytes)
        all_keys: list[bytes] = []
        all_values: list[bytes] = []
        previous = 0
        while len(all_keys) < self.max_entries:
            try:
                syscall.bpf(
                    syscall.MAP_GET_NEXT_KEY, struct.pack("<IIQQQ", self.fd, 0, previous, syscall.address(key), 0)
                )
                previous = syscall.address(key)
                syscall.bpf(
                    syscall.MAP_LOOKUP_ELEM,
                    struct.pack("<IIQQQ", self.fd, 0, syscall.address(key), syscall.address(value), 0),
                )
            except OSError as error:
                if error.errno == errno.ENOENT:
                    break
                raise SwerveError(f"reading map {self.name} failed: {error.strerror}") from None
            all_keys.append(key.raw)
            all_values.append(value.raw)
        return self._shaped(b"".join(all_keys), b"".join(all_values), len(all_keys))


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
