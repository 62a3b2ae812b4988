"""The agent's socket files: who may make them, who serves them, who may talk to them.

A stale file of a dead agent is replaced; a live one never is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pytools.directories import READERS_SUFFIX
from pytools.errors import CapabilityError, RefusedError, SwerveError
from pytools.ipc.accepting import Accepting

_BACKLOG: Final = 64
_SO_PEERGROUPS: Final = 59
_GROUPS_BYTES: Final = 1024  # the most that Python asks for: 256 groups
_NEW: Final = ".new"  # what a socket is called until it listens; short, for the kernel limits the length


class Listener:
    """A listening socket, in a directory that is made (0700) when it is missing.

    Its mode is 0600, unless anybody may connect whom `admit` then looks at.

    Each connection is handed to `admit`, non-blocking, and is then its own.

    Raises
    ------
    RefusedError
        If a live process serves it already, or others may write to its directory.
    CapabilityError
        If this user may not make it.
    SwerveError
        If it cannot be made.
    """

    def __init__(
        self,
        path: Path,
        admit: Callable[[socket.socket], None],
        mode: int = 0o600,
        kind: socket.SocketKind = socket.SOCK_STREAM,
    ) -> None:
        self._path = path
        try:
            self._accepting = Accepting(_listen(path, mode, kind), admit)
        except PermissionError as error:
            raise CapabilityError(f"{path}: {error.strerror}", "run the agent as root") from None
        except OSError as error:
            why = error.strerror or str(error)
            raise SwerveError(f"{path}: {why}", "choose another directory with SWERVE_RUNTIME_DIR") from None
        self._inode = path.stat().st_ino
        self.register, self.tick = self._accepting.register, self._accepting.tick

    @property
    def paused(self) -> int:
        """How often it had to stop accepting for want of descriptors or memory."""
        return self._accepting.paused

    def close(self) -> None:
        """Let nobody in any more, and remove the file unless another has taken its place."""
        if not self._accepting.close():
            return
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def _listen(path: Path, mode: int, kind: socket.SocketKind) -> socket.socket:
    if not path.parent.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.parent.lstat().st_uid not in (0, os.geteuid()):  # of a link: who may lead us elsewhere
        raise RefusedError(f"{path.parent} belongs to another user", "choose another with SWERVE_RUNTIME_DIR")
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(directory)
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RefusedError(f"{path.parent} may be written by others", f"chown and chmod 700 {path.parent}")
        fcntl.flock(directory, fcntl.LOCK_EX)  # two agents that start together must not both find it stale
        _remove_stale(path, kind)
        sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
        try:
            new = path.with_name(_NEW)
            new.unlink(missing_ok=True)
            bind(sock, new, mode)
            sock.listen(_BACKLOG)
            new.rename(path)  # whoever sees the file is answered
        except BaseException:
            sock.close()
            raise
        return sock
    finally:
        os.close(directory)


def bind(sock: socket.socket, path: Path, mode: int) -> None:
    """Make a socket's file with this mode: it never has another, and no link that somebody put there is followed."""
    os.fchmod(sock.fileno(), mode)
    before = os.umask(0)
    try:
        sock.bind(str(path))
    finally:
        os.umask(before)


def _remove_stale(path: Path, kind: socket.SocketKind) -> None:
    """Remove what a dead agent left; refuse when somebody answers."""
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
            pid = peer(probe)[0]
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:
            pid = 0  # its backlog is full: alive, if not well
    who = f"process {pid}" if pid else "another process"
    raise RefusedError(f"{who} already serves {path}", "stop it first, or choose another namespace with -n")


def connect(path: Path) -> socket.socket:
    """A non-blocking connection to the agent.

    Raises
    ------
    SwerveError
        If no agent runs there, or it does not answer.
    CapabilityError
        If this user may not talk to it.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(1.0)
        sock.connect(str(path))
        sock.setblocking(False)
    except PermissionError:
        sock.close()
        raise CapabilityError(f"{path}: permission denied", "run as root, or as the agent's user") from None
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        raise SwerveError(f"no agent serves {path}", start_hint(path)) from None
    except OSError as error:
        sock.close()
        why = "the agent does not answer" if error.errno == errno.EAGAIN else error.strerror or str(error)
        raise SwerveError(f"{path}: {why}") from None
    return sock


def start_hint(path: Path) -> str:
    """How to start the agent that would serve this socket (`directories.agent_socket`, `readers_socket`)."""
    name = path.name.removesuffix(READERS_SUFFIX)
    instance = path.parent.name if name == path.name else name
    return "start it with: swerve agent" + ("" if instance == "host" else f" -n {instance}")


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def in_group(sock: socket.socket, gid: int) -> bool:
    """Whether the process at the other end was in a group when it connected."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # it is in more groups than fit
        raw = b""
    return gid == peer(sock)[2] or gid in struct.unpack(f"{len(raw) // 4}I", raw)
