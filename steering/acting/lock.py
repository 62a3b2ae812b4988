"""One controller per instance: an advisory lock on a file, shared by the controller and its guardian.

The guardian inherits the controller's open file, and with it the lock: a successor gets it when both are gone, or from
a guardian that hands it over (guarding/takeover.py); so never while the guardian is still undoing.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pytools.closing import Closing
from pytools.errors import CapabilityError, RefusedError, SwerveError
from pytools.owned_files import as_owner


class Lock(Closing):
    """The lock, held from construction to `close`.

    Parameters
    ----------
    wait_s : float
        How long to wait for a controller that is on its way out, or a guardian that is undoing.
    inherit : callable
        Asked while somebody else has it: the lock's descriptor, if he hands it over.

    Raises
    ------
    RefusedError
        If a controller of this instance runs.
    SwerveError
        If a guardian is still undoing what a dead one did.
    """

    def __init__(self, path: Path, wait_s: float = 0.0, inherit: Callable[[], int | None] = lambda: None) -> None:
        self.path = path
        try:
            with as_owner(path):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except PermissionError as error:
            raise CapabilityError(f"{path}: {error.strerror}", "run it as root") from None
        try:
            inherited = _take(fd, path, wait_s, inherit)
        except BaseException:
            os.close(fd)
            raise
        if inherited is not None:
            os.close(fd)
        self.fd = fd if inherited is None else inherited
        self.say({})

    def say(self, facts: dict[str, Any]) -> None:
        """Write who holds it, for people and for `holder`."""
        write_facts(self.fd, {"pid": os.getpid(), **facts})

    def close(self) -> None:
        os.close(self.fd)


def write_facts(fd: int, facts: dict[str, Any]) -> None:
    """Write what its holder says of itself."""
    line = json.dumps(facts).encode()
    os.pwrite(fd, line, 0)
    os.ftruncate(fd, len(line))


def _take(fd: int, path: Path, wait_s: float, inherit: Callable[[], int | None]) -> int | None:
    """Lock a file, or be handed a descriptor that has it locked."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            if (inherited := inherit()) is not None:
                return inherited
            if time.monotonic() >= deadline:
                raise _refusal(fd, path) from None
            select.select([], [], [], 0.01)


def _refusal(fd: int, path: Path) -> SwerveError:
    """Who holds the lock: what is written in it may be of a process that is gone."""
    pid = _facts(fd).get("pid")
    if isinstance(pid, int) and _has_open(pid, path):
        what = f"a controller already runs for {path.parent.name} (process {pid})"
        return RefusedError(what, "stop it first, or `swerve steer undo --stop`")
    what = f"what a dead controller did for {path.parent.name} is being undone, or somebody looks at it"
    return SwerveError(what, "try again in a moment")  # as a service does by itself: no refusal


def _facts(fd: int) -> dict[str, Any]:
    try:
        facts = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def holder(path: Path) -> dict[str, Any] | None:
    """What the process that holds the lock said of itself; None when nobody holds it."""
    try:
        with as_owner(path):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise CapabilityError(f"{path}: {error.strerror}", "run it as root") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _facts(fd)
    finally:
        os.close(fd)
    return None


def holder_pidfd(path: Path) -> int | None:
    """A handle on the controller that holds the lock; None when there is none.

    The number in the file could be another process's by now: after opening the handle, the process behind it must
    still have the lock file open.
    """
    facts = holder(path)
    pid = facts.get("pid") if facts else None
    if not isinstance(pid, int):
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if not _has_open(pid, path):
        os.close(pidfd)
        return None
    return pidfd


def _has_open(pid: int, path: Path) -> bool:
    wanted = path.lstat()  # a link in its place is nothing that anybody has open
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                found = os.stat(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                return True
    except OSError:
        return False
    return False
