"""Acts that the journal has no place for: pins, labels, bonds, alerts, orders; JSON Lines of `Act`, for the history.

Each line has the boot and namespace of the journal's entries as well (`scope`). Nothing is undone from here. Two files
at most, each of `ROTATE_BYTES`. What cannot be written is counted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from pytools.kernel import netns
from pytools.owned_files import as_owner
from pytools.signals import Act, decode, encode
from steering.acting.background import Later
from steering.acting.journal import append_line

FILE: Final = "acts.jsonl"
ROTATE_BYTES: Final = 4 << 20
_JOURNALLED: Final = "overlay"


class ActsFile:
    """Appends acts.

    Parameters
    ----------
    later : Later
        Does the writing, so that nobody waits for the disk; stays the caller's.
    """

    def __init__(self, folder: Path, later: Later) -> None:
        self._path, self._later = folder / FILE, later
        self._scope = b',"scope":' + msgspec.json.encode(netns.scope()) + b"}"
        self._fd: int | None = None
        self.lost = 0

    def write(self, act: Act) -> None:
        """Append an act, unless it is one of weights (the journal has those) or was not made."""
        if act.outcome != "dry_run" and act.actuator != _JOURNALLED:
            self._later.put(lambda: self._append(act))

    def _append(self, act: Act) -> None:
        try:
            if self._fd is None:
                self._fd = _open(self._path)
            elif os.fstat(self._fd).st_size > ROTATE_BYTES:
                self._close()
                with as_owner(self._path):
                    os.replace(self._path, _older(self._path))
                self._fd = _open(self._path)
            append_line(self._fd, encode(act).removesuffix(b"}") + self._scope, self._path)
        except OSError:
            self.lost += 1

    def close(self) -> None:
        self._later.put(self._close)

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None


def write_now(folder: Path, acts: Iterable[Act]) -> None:
    """Append acts from a process that ends soon; it waits a second at most."""
    if found := list(acts):
        with Later() as later, contextlib.closing(ActsFile(folder, later)) as file:
            for act in found:
                file.write(act)


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with as_owner(path):
        return os.open(path, flags, 0o600)


def _older(path: Path) -> Path:
    return path.with_suffix(".jsonl.1")


class _Scoped(msgspec.Struct):
    scope: str = ""


_scoped = msgspec.json.Decoder(_Scoped)


def read(folder: Path) -> Iterator[tuple[str, Act]]:
    """The acts on disk, oldest first, each with the boot and namespace that it was made in; other lines are left out.

    An older version did not write where it was made: that is empty then.
    """
    path = folder / FILE
    for place in (_older(path), path):
        try:
            with as_owner(place):
                file = place.open("rb")
        except FileNotFoundError:
            continue
        with file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    act = decode(line)
                    if isinstance(act, Act):
                        yield _scoped.decode(line).scope, act
