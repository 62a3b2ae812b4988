"""Files of root's in directories of another user, such as the state of a service that runs without root.

That user could put links there. So root reaches such files as the user, by the thread's file system user (`setfsuid`):
whatever a link leads to, nothing is read or written that the user could not reach itself, and what is made is the
user's own, who needs it after a restart. Any thread; only root's own is changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_MOST_LINKS: Final = 40
_libc = ctypes.CDLL(None, use_errno=True)


def owner_of(place: Path) -> tuple[int, int] | None:
    """User and group that can change what a path leads to; None when that is root alone, or the path is not there yet.

    The first that is not root's among the directories and links on the way, from the top: what lies above it only root
    can change.
    """
    links, here = 0, Path("/")
    left = list(reversed(place.absolute().parts[1:]))
    while left:
        name = left.pop()
        if name == "..":
            here = here.parent
            continue
        try:
            found = os.lstat(here / name)
        except OSError:
            return None
        if found.st_uid != 0:
            return found.st_uid, found.st_gid
        if not stat.S_ISLNK(found.st_mode):
            here /= name
            continue
        links += 1
        if links > _MOST_LINKS:
            return None
        target = Path(os.readlink(here / name))
        if target.is_absolute():
            here = Path("/")
        left += reversed(target.parts[target.is_absolute() :])
    return None


@contextlib.contextmanager
def as_owner(place: Path) -> Iterator[None]:
    """Reach a path, within the block, as the user who can change what it leads to; a no-op unless we are root.

    Raises
    ------
    PermissionError
        If that user may not reach what is in it, and who it is.
    """
    owner = owner_of(place) if os.geteuid() == 0 else None
    if owner is None:
        yield
        return
    try:
        _become(*owner)
        yield
    except PermissionError as error:
        why = f"{error.strerror}, as user {owner[0]} to whom its directory belongs"
        raise PermissionError(error.errno, why, error.filename) from None
    finally:
        _become(0, 0)


def beside(path: Path) -> Path:
    """Where `replace` writes first; a writer that is killed leaves it."""
    return path.with_name(f"{path.name}.new")


def remove(path: Path) -> None:
    """Remove a file, if it is there, and what a writer that was killed has left beside it."""
    for each in (path, beside(path)):
        with contextlib.suppress(OSError):
            each.unlink(missing_ok=True)


def replace(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Give a file other contents, mode 0600, as a whole: whoever reads it finds the former ones or these.

    Parameters
    ----------
    data : bytes
        What it shall hold.
    durable : bool
        Whether that is on disk when this returns; its name has to be synced besides.

    Raises
    ------
    OSError
        If it cannot be written; the file has the former contents then.
    """
    fresh = beside(path)
    with as_owner(fresh):
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        with as_owner(path):
            os.replace(fresh, path)
    except OSError:
        with as_owner(fresh):
            fresh.unlink(missing_ok=True)
        raise


def _become(uid: int, gid: int) -> None:
    """Have files reached as this user. With root's, the capabilities that pass over permissions go and come."""
    first, second = (_libc.setfsgid, gid), (_libc.setfsuid, uid)
    for call, number in (first, second) if uid else (second, first):
        call(ctypes.c_uint(number))
        if call(ctypes.c_uint(0xFFFFFFFF)) != number:  # it has no other way to say that it failed
            raise PermissionError(1, f"the kernel refuses to reach files as user {uid}")


class ReplacedFile:
    """A file that is replaced from time to time; an error is reported when it is another one than the last time.

    Parameters
    ----------
    report : callable
        Takes the error.
    makes_directory : bool
        Whether its directory is made, with mode 0700, when it is missing.
    """

    def __init__(self, path: Path, report: Callable[[OSError], None], *, makes_directory: bool = False) -> None:
        self._path, self._report, self._makes_directory = path, report, makes_directory
        self._error = ""

    def write(self, data: bytes) -> bool:
        """Replace it; return whether that worked."""
        try:
            if self._makes_directory:
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace(self._path, data)
        except OSError as error:
            if self._error != str(error):
                self._report(error)
            self._error = str(error)
            return False
        self._error = ""
        return True
