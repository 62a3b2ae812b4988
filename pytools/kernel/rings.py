"""BPF ring buffers as numpy arrays, read straight from the mapped pages.

Records have one fixed size; times in them are CLOCK_MONOTONIC nanoseconds. One reader, one thread.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.kernel.bpf import MapInfo

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
        self.record = record
        self._bytes = MapInfo(fd).max_entries
        payload = (record.itemsize + 7) // 8 * 8
        self._slot = np.dtype(
            {
                "names": ["length", "page", "record"],
                "formats": ["<u4", "<u4", record],
                "offsets": [0, 4, _HEADER_BYTES],
                "itemsize": _HEADER_BYTES + payload,
            }
        )
        page = mmap.PAGESIZE
        self._consumer = mmap.mmap(fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        # The kernel maps the data twice in a row, so a record that wraps is contiguous here.
        self._producer = mmap.mmap(fd, page + 2 * self._bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._consumed = np.frombuffer(self._consumer, np.uint64, 1)
        self._produced = np.frombuffer(self._producer, np.uint64, 1)
        self._data = np.frombuffer(self._producer, np.uint8, offset=page)

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
        offset = start % self._bytes
        slots = self._data[offset : offset + (end - start)]
        whole = len(slots) // self._slot.itemsize
        records = slots[: whole * self._slot.itemsize].view(self._slot)
        length = records["length"]
        busy = (length & _BUSY) != 0
        done = int(busy.argmax()) if busy.any() else whole  # stop at the first one still being written
        sizes = length[:done] & ~(_BUSY | _DISCARD)
        if done and not (sizes == self.record.itemsize).all():
            raise SwerveError(f"a ring holds records of {int(sizes.max())} bytes, not {self.record.itemsize}")
        kept: NDArray[Any] = records["record"][:done][(length[:done] & _DISCARD) == 0].copy()
        self._consumed[0] = start + done * self._slot.itemsize
        return kept

    def close(self) -> None:
        """Unmap the pages."""
        del self._consumed, self._produced, self._data
        self._consumer.close()
        self._producer.close()
