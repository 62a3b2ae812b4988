"""Handing over: a guardian whose controller is gone keeps what is in force, and a successor takes it over from there.

The guardian listens beside the lock, hands its locks to whoever connects, and goes on guarding until that one says that
it is ready, or ends; another may come then. At the end of its time it kills a successor that is not ready, as it kills
a controller that hangs. So at every instant somebody undoes what is in force. CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytools.closing import Closing
from pytools.ipc.socket_files import peer
from steering.acting.lock import Lock
from steering.acting.namespace_lock import NamespaceLock

SOCKET: Final = "takeover.sock"
DONE: Final = b"d"
_MOST_LOCKS: Final = 2
_SCOPE_BYTES: Final = 256
_ANSWER_S: Final = 0.2
_KILLED_MS: Final = 2000.0
_QUEUE: Final = 8


# ---- the guardian's end ----


def keep(folder: Path, scope: str, locks: Sequence[int], until_ns: int) -> bool:
    """Wait for a successor; whether one has taken over. Else nobody is left who could act.

    Parameters
    ----------
    folder : Path
        Of the instance; only its owner can connect there.
    scope : str
        This boot and network namespace: a successor elsewhere is none.
    locks : sequence of int
        What a successor gets.
    until_ns : int
        How long.
    """
    path = folder / SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listener:
        try:
            path.unlink(missing_ok=True)
            os.fchmod(listener.fileno(), 0o600)  # before bind: the file never exists with another mode
            listener.bind(str(path))
            listener.listen(_QUEUE)
            return _wait(listener, scope, locks, until_ns)
        except OSError:  # no room for a file, or no descriptor: then nobody can come
            return False
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _wait(listener: socket.socket, scope: str, locks: Sequence[int], until_ns: int) -> bool:
    while (left_ms := (until_ns - time.monotonic_ns()) / 1e6) > 0:
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        if not poll.poll(left_ms):
            break
        with contextlib.suppress(OSError):  # it has gone already
            client, _ = listener.accept()
            with client:
                if _serve(client, scope, locks, until_ns):
                    return True
    return False


def _serve(client: socket.socket, scope: str, locks: Sequence[int], until_ns: int) -> bool:
    """Hand the locks over; whether this successor became ready. When the time is over it is dead."""
    pid, uid, _ = peer(client)
    if uid not in (0, os.geteuid()):
        return False
    pidfd = os.pidfd_open(pid)
    try:
        socket.send_fds(client, [scope.encode()], list(locks))
        poll = select.poll()
        poll.register(client, select.POLLIN)
        if poll.poll(max(0.0, (until_ns - time.monotonic_ns()) / 1e6)):
            return client.recv(16) == DONE
        kill(pidfd)
        return False
    finally:
        os.close(pidfd)


def kill(pidfd: int) -> None:
    """End a process, and wait until it is dead; one of whose threads waits for a disk can do nothing more either."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(_KILLED_MS)


# ---- the successor's end ----


class Former:
    """The guardian of the controller before us: it guards until it is told that we are ready, or until we end."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        """Readable when it has gone; a guardian of ours inherits it."""
        return self._connection.fileno()

    def done(self) -> None:
        """Tell it that it guards nothing any more."""
        with contextlib.suppress(OSError):
            self._connection.send(DONE, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Let go of it: unless told otherwise, or by our guardian, it goes on as if we had not come."""
        self._connection.close()


class Locks(Closing):
    """The locks of an instance, and of the network namespace; free, or taken over from a guardian that keeps them.

    Parameters
    ----------
    wait_s : float
        How long to wait for each.
    scope : str
        This boot and network namespace.

    Raises
    ------
    RefusedError
        If a controller runs.
    SwerveError
        If a guardian is undoing what a dead one did.
    """

    def __init__(self, path: Path, wait_s: float, namespace: bool, scope: str) -> None:
        self.former: Former | None = None  # who keeps what is in force; None when nobody did
        self._folder, self._scope = path.parent, scope
        self._more: list[int] = []
        self._namespace: NamespaceLock | None = None
        self.lock = Lock(path, wait_s, self._inherit)
        if self.former is None:  # nobody listens there: whoever did was killed meanwhile
            with contextlib.suppress(OSError):
                (self._folder / SOCKET).unlink(missing_ok=True)
        try:
            if namespace:
                inherited = self._more.pop() if self._more else None
                self._namespace = NamespaceLock(wait_s, inherited)
        except BaseException:
            self.close()
            raise

    def filenos(self) -> list[int]:
        return [self.lock.fd, *([self._namespace.fileno()] if self._namespace is not None else [])]

    def _inherit(self) -> int | None:
        """The lock of a guardian that waits for us; None when none does."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds: list[int] = []
        try:
            connection.settimeout(_ANSWER_S)  # it answers at once, unless it has another successor
            connection.connect(str(self._folder / SOCKET))
            scope, fds, _, _ = socket.recv_fds(connection, _SCOPE_BYTES, _MOST_LOCKS)
        except OSError:
            scope = b""
        if not fds or scope.decode() != self._scope:
            connection.close()
            for fd in fds:
                os.close(fd)
            return None
        connection.setblocking(False)
        self.former = Former(connection)
        self._more = list(fds[1:])
        for fd in fds:
            os.set_inheritable(fd, False)
        return fds[0]

    def close(self) -> None:
        for fd in self._more:
            os.close(fd)
        self._more = []
        if self._namespace is not None:
            self._namespace.close()
        self.lock.close()
        if self.former is not None:
            self.former.close()
