"""The stop file: while it exists no act is started; what is in force stays.

`<state>/freeze` stops one instance, `freeze` in the directory above it every instance of this host. Any tool may make
it (`touch` will do); what is written in it is the reason. A place that cannot be looked at counts as stopped. A look is
two `stat` calls, some 3 µs.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from pytools.owned_files import as_owner

FILE: Final = "freeze"
_MOST_BYTES: Final = 200
_ABSENT: Final = (FileNotFoundError, NotADirectoryError)


def places_of(folder: Path) -> tuple[Path, Path]:
    """The instance's stop file and the host's, given the instance's state directory."""
    return folder / FILE, folder.parent / FILE


class StopFile:
    """Whether an instance is stopped."""

    def __init__(self, folder: Path) -> None:
        self._places = places_of(folder)
        self._known: dict[Path, tuple[tuple[int, int, int], str]] = {}  # which file, written when, and what it says

    def why(self) -> str:
        """Why nothing may be started, in words; empty when it may."""
        return "; ".join(said for place in self._places if (said := self._look(place)))

    def _look(self, place: Path) -> str:
        try:
            found = os.stat(place)
        except _ABSENT:
            self._known.pop(place, None)
            return ""
        except OSError as error:
            return f"{place}: {error.strerror}"
        if stat.S_ISDIR(found.st_mode):  # the state directory of a namespace that is called so
            return ""
        known, now = self._known.get(place), (found.st_ino, found.st_mtime_ns, found.st_size)
        if known is None or known[0] != now:
            known = self._known[place] = (now, _said(place))
        return known[1]


def _said(place: Path) -> str:
    """The reason in a stop file, on one line; its name when it gives none."""
    text = ""
    with contextlib.suppress(OSError):
        with as_owner(place):
            fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(fd, _MOST_BYTES).decode(errors="replace")
        finally:
            os.close(fd)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split()) or f"{place} exists"


def freeze(place: Path, why: str) -> None:
    """Make a stop file.

    Raises
    ------
    OSError
        If it cannot be made.
    """
    with as_owner(place):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, why.encode(errors="replace")[:_MOST_BYTES] + b"\n" if why else b"")
    finally:
        os.close(fd)


def thaw(place: Path) -> bool:
    """Remove a stop file; whether there was one."""
    try:
        with as_owner(place):
            place.unlink()
    except _ABSENT:
        return False
    return True
