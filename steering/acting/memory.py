"""The memory of a controller in /run: what its successor has to know to go on with what is in force.

Written after every act and when anything in it has changed; not synced, for it is of use in the same boot alone. A
file that is torn, of another boot, namespace or version, or that others could have written, is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from pytools import directories, owned_files
from pytools.errors import SwerveError
from steering.actuators.overlay_memory import OverlayMemory
from steering.deciding.memory import PathMemory

_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20


class Memory(msgspec.Struct, frozen=True):
    """What is remembered."""

    version: int
    scope: str  # boot and network namespace
    overlay: OverlayMemory
    paths: tuple[PathMemory, ...]


class MemoryFile:
    """The file.

    Parameters
    ----------
    path : Path
        Where it is; its directory is made with mode 0700 when missing.
    scope : str
        This boot and network namespace.
    say : callable
        Takes a line for the log.
    """

    def __init__(self, path: Path, scope: str, say: Callable[[str], None]) -> None:
        self._path, self._scope, self._say = path, scope, say
        self._file = owned_files.ReplacedFile(
            path, lambda error: say(f"a successor could not take over: {error}"), makes_directory=True
        )
        self._written = b""

    def load(self) -> Memory | None:
        """What the controller before us left here; None when that is of no use."""
        try:
            found = msgspec.json.decode(directories.read_obeyed(self._path, _MOST_BYTES), type=Memory)
        except (OSError, SwerveError, ValueError) as error:
            self._say(f"{self._path}: nothing is taken over: {error}")
            return None
        return found if (found.version, found.scope) == (_VERSION, self._scope) else None

    def write(self, overlay: OverlayMemory, paths: tuple[PathMemory, ...]) -> None:
        """Replace it, if anything has changed. What cannot be written costs a successor its knowledge, and no act."""
        data = msgspec.json.encode(Memory(_VERSION, self._scope, overlay, paths))
        if data != self._written and self._file.write(data):
            self._written = data

    def remove(self) -> None:
        """Nothing of ours is in force any more."""
        remove(self._path)
        self._written = b""


def remove(path: Path) -> None:
    """Remove a memory, and what a writer that was killed left beside it."""
    for each in (path, owned_files.beside(path)):
        with contextlib.suppress(OSError):
            each.unlink(missing_ok=True)
