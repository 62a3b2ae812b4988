"""What went with a link, on disk: a controller that dies takes its memory with it, its successor needs it.

Not synced: what a power failure would lose is void after it anyway. One thread.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

import msgspec

from steering.actuators.restore import Memory

FILE: Final = "objects.json"
_SPACING_NS: Final = 30_000_000_000  # routes alone come and go: they are worth a write that often


class _Saved(msgspec.Struct):
    scope: str
    memory: Memory


class MemoryFile:
    """One instance's file.

    Parameters
    ----------
    folder : Path
        Where it is.
    scope : str
        This boot and namespace: what was written in another is void.
    """

    def __init__(self, folder: Path, scope: str) -> None:
        self._path, self._scope = folder / FILE, scope
        self._written: Memory | None = None
        self._written_ns = 0

    def load(self) -> Memory:
        """What the predecessor wrote; empty when there is none, or it is void or damaged."""
        try:
            saved = msgspec.json.decode(self._path.read_bytes(), type=_Saved)
        except (OSError, msgspec.DecodeError):
            return Memory()
        return saved.memory if saved.scope == self._scope else Memory()

    def save(self, memory: Memory, now: int) -> None:
        """Write it where it differs; without it only a successor is the poorer."""
        if memory == self._written:
            return
        if self._written is not None and memory.core == self._written.core and now < self._written_ns + _SPACING_NS:
            return
        beside = self._path.with_suffix(".new")
        with contextlib.suppress(OSError):
            beside.touch(0o600)
            beside.write_bytes(msgspec.json.encode(_Saved(self._scope, memory)))
            os.replace(beside, self._path)
            self._written, self._written_ns = memory, now
