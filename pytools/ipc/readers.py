"""The bus on a Unix socket for those who only read. Like `ipc.server`, of which it is the restricted form."""

from __future__ import annotations

import grp
import os
import socket
from pathlib import Path
from typing import Final

from pytools.ipc.server import Publisher, Server
from pytools.ipc.socket_files import in_group, peer

READERS: Final = 16  # at once
READERS_GROUP: Final = "swerve-metrics"
_LINES: Final = 64  # that one may send


class ReadServer(Server):
    """Serves a bus for reading only, also to a group: who reads metrics needs no right to steer.

    Such a client subscribes; what it publishes is refused with an error, counted, and ends its connection. It has
    places and a bound on what it sends of its own, so that it keeps nobody from the other socket.

    Args:
        bus: Where signals come from.
        path: The socket. Any user may connect to it; who is not root, the agent's user, or in the group is shown out.
        group: The group that may read; None for nobody else.
        long_window_ns: Shorter windows of a path are details.

    Raises SwerveError as `Listener` does.
    """

    publishes = False
    most_lines = _LINES
    _mode, _counted = 0o666, "bus_readers_"

    def __init__(self, bus: Publisher, path: Path, group: int | None, long_window_ns: int = 0) -> None:
        self._group = group
        super().__init__(bus, path, long_window_ns=long_window_ns)

    def drops(self) -> dict[str, int]:
        """The same of the readers, and what they tried to publish."""
        return super().drops() | {"bus_readers_published": self._not_published}

    def _objection(self, sock: socket.socket) -> str:
        member = self._group is not None and in_group(sock, self._group)
        if not member and peer(sock)[1] not in (0, os.geteuid()):
            return f"only root, user {os.geteuid()} and members of the group {READERS_GROUP} may connect"
        return self._full(READERS)


def readers_group() -> int | None:
    """The group whose members may read signals; None when this host has no such group."""
    try:
        return grp.getgrnam(READERS_GROUP).gr_gid
    except KeyError:
        return None
