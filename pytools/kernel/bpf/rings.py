"""BPF ring buffers as numpy arrays, read straight from the mapped pages.

Records have one fixed size; times in them are CLOCK_MONOTONIC nanoseconds. One reader, one thread.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.kernel.bpf.syscall import MapInfo

_BUSY, _DISCARD = np.uint32(1 << 31), np.uint32(1 << 30)
_HEADER_BYTES = 8


class Ring:
    """One ring buffer with records of one type.

    Parameters
    ----------
    fd : int
        Descriptor of the map; stays the caller's.
    record : numpy.dtype
        Layout of a record, as compiled.
    """

    def __init__(self, fd: int, record: np.dtype[Any]) -> None:
        self.record, self._fd = record, fd
        self._bytes = MapInfo(fd).max_entries
        self._slot_bytes = _HEADER_BYTES + (record.itemsize + 7) // 8 * 8
        page = mmap.PAGESIZE
        self._consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        # The kernel maps the data twice in a row, so a record that wraps is contiguous here.
        self._producer = mmap.mmap(fd, page + 2 * self._bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._consumed = np.frombuffer(self._consumer, np.uint64, 1)
        self._produced = np.frombuffer(self._producer, np.uint64, 1)

    def fileno(self) -> int:
        """For epoll, by edges: a program has submitted a record with BPF_RB_FORCE_WAKEUP."""
        return self._fd

    def read(self) -> NDArray[Any]:
        """All finished records since the last call, oldest first; a copy, so the ring is free again.

        Returns
        -------
        ndarray of `record`, shape (n,)

        Raises
        ------
        SwerveError
            If a record has another size than the compiled type: the program and its contract disagree.
        """
        start, end = int(self._consumed[0]), int(self._produced[0])
        if start == end:
            return np.empty(0, self.record)
        slot = self._slot_bytes
        whole = (end - start) // slot
        # Rows of bytes: copying and viewing structured arrays costs several times as much.
        offset = mmap.PAGESIZE + start % self._bytes
        rows = np.ndarray((whole, slot), np.uint8, self._producer, offset)
        length = np.ndarray((whole,), np.uint32, self._producer, offset, (slot,))
        done = whole
        plain = length == self.record.itemsize
        if np.count_nonzero(plain) < whole:  # some are still being written, or were discarded
            busy = (length & _BUSY) != 0
            done = int(busy.argmax()) if busy.any() else whole  # stop at the first that is not finished
            sizes = length[:done] & ~(_BUSY | _DISCARD)
            if not (sizes == self.record.itemsize).all():
                raise SwerveError(f"a ring holds records of {int(sizes.max())} bytes, not {self.record.itemsize}")
            plain = (length[:done] & _DISCARD) == 0
        payload = rows[:done, _HEADER_BYTES : _HEADER_BYTES + self.record.itemsize]
        kept = payload.copy() if np.count_nonzero(plain) == done else payload[plain]
        self._consumed[0] = start + done * slot
        return np.ndarray((len(kept),), self.record, kept)

    def close(self) -> None:
        del self._consumed, self._produced
        self._consumer.close()
        self._producer.close()
