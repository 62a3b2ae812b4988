"""What paths have learnt to be usual, kept beside the sockets of the instance: survives a controller, not a reboot.

In a file system in memory, so that no disk holds the controller up. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from pytools import directories, owned_files
from pytools.errors import SwerveError
from steering.deciding.usual import Entry, Usuals

FILE: Final = "usual.json"
EVERY_NS: Final = 10_000_000_000
_LARGEST: Final = 1 << 27


class _Contents(msgspec.Struct, frozen=True):
    at_ns: int  # when it was written
    entries: list[Entry]


class UsualFile:
    """Keeps what an engine learns.

    Parameters
    ----------
    folder : Path
        The instance's runtime directory.
    usuals : Usuals
        What is kept.
    say : callable
        Takes a line for the log.
    """

    def __init__(self, folder: Path, usuals: Usuals, say: Callable[[str], None]) -> None:
        self._path, self._usuals = folder / FILE, usuals
        self._due_ns = self._version = 0
        self._file = owned_files.ReplacedFile(
            self._path, lambda error: say(f"what is usual is not kept for the next controller: {error}")
        )

    def __enter__(self) -> UsualFile:
        """Go on with what the controller before us has learnt."""
        if self._usuals.needed:
            self._usuals.restore(read(self._path.parent)[1], time.monotonic_ns())
            self._version = self._usuals.version
        return self

    def __exit__(self, *_: object) -> None:
        self.write(time.monotonic_ns())

    def tick(self, now: int) -> None:
        """Write, if it is time and there is something new."""
        if now >= self._due_ns and self._version != self._usuals.version:
            self._due_ns = now + EVERY_NS
            self.write(now)

    def write(self, now: int) -> None:
        """Write, if there is something new; what fails is said once, and costs no more than learning again."""
        if self._version == self._usuals.version:
            return
        version = self._usuals.version
        if self._file.write(msgspec.json.encode(_Contents(now, self._usuals.entries()))):
            self._version = version


def read(folder: Path, *, guarded: bool = True) -> tuple[int, Iterable[Entry]]:
    """When a controller last wrote what it had learnt, and that; 0 and nothing without a file that makes sense.

    `guarded` refuses a file that somebody else could have written; only for showing is this not needed.
    """
    with contextlib.suppress(OSError, SwerveError, msgspec.MsgspecError, ValueError):
        found = msgspec.json.decode(directories.read_obeyed(folder / FILE, _LARGEST, guarded=guarded), type=_Contents)
        return found.at_ns, found.entries
    return 0, ()
