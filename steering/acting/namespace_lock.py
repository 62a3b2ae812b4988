"""One controller that acts per network namespace, by whatever name the namespace was given (`-n lab`, its file, none).

An abstract Unix socket: its names are the namespace's own, and it is gone with the last process that holds it. Like the
lock of the instance (lock.py) the guardian inherits it: a successor gets it when both are gone, or from the guardian.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from typing import Final

from pytools.closing import Closing
from pytools.errors import RefusedError, SwerveError

_NAME: Final = "\0swerve-steer"
_QUEUE: Final = 128
_NOBODY: Final = -1
_CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user, group


class NamespaceLock(Closing):
    """The lock of the network namespace that this thread is in, held from construction to `close`.

    Any local user can take the name. One that is neither root nor us keeps nobody from steering: then nothing is held.

    Parameters
    ----------
    wait_s : float
        How long to wait for a controller that is on its way out, or a guardian that is undoing.
    inherited : int | None
        Its descriptor, from a guardian that handed it over.

    Raises
    ------
    RefusedError
        If another controller acts here.
    """

    def __init__(self, wait_s: float = 0.0, inherited: int | None = None) -> None:
        if inherited is not None:
            self._socket = socket.socket(fileno=inherited)
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._take(time.monotonic() + wait_s)
        except BaseException:
            self._socket.close()
            raise

    def _take(self, deadline: float) -> None:
        if self._bound():
            return
        holder = _holder()  # asked once: each time takes a place in its queue
        while not self._bound():
            if holder is not None and holder[1] not in (0, os.geteuid()):
                return
            if time.monotonic() >= deadline:
                process = f" (process {holder[0]})" if holder else ""
                what = f"a controller already acts in this network namespace under another name{process}"
                raise RefusedError(what, "stop it first: `swerve steer off`, or end that process")
            select.select([], [], [], 0.01)

    def _bound(self) -> bool:
        try:
            self._socket.bind(_NAME)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise SwerveError(f"the lock of the network namespace: {error.strerror}") from None
        self._socket.listen(_QUEUE)  # so that whoever finds it taken can ask by whom
        return True

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


def _holder() -> tuple[int, int] | None:
    """Process and user that took the name; None when nobody has it any more, or not yet for good."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as asking:
        try:
            asking.connect(_NAME)
        except ConnectionRefusedError:
            return None
        except BlockingIOError:  # its queue is full: ours never is, unless somebody sees to it
            return 0, _NOBODY
        process, user, _ = _CREDENTIALS.unpack(
            asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
    return process, user
