"""The controller's end of its control socket: nobody who connects can keep it waiting or grow it without bound.

One thread, in the controller's selector; every call returns at once. Root and the controller's own user may ask. One
request a connection: who is silent is put out when others come, who does not read loses the reply.
"""

from __future__ import annotations

import contextlib
import functools
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools.errors import SwerveError
from pytools.ipc.accepting import Accepting
from pytools.ipc.socket_files import peer
from pytools.owned_files import as_owner
from steering.control.requests import MOST_BYTES, AnyRequest, Reply, decode, encode_reply, refusal

_MOST_CLIENTS: Final = 16


@dataclass(frozen=True, slots=True)
class Peer:
    """Who asks, as the kernel says."""

    pid: int
    uid: int

    def __str__(self) -> str:
        return f"user {self.uid}, process {self.pid}"


class ControlServer:
    """Answers requests. The instance's lock must be held: whatever lies at `path` is then a dead controller's.

    Parameters
    ----------
    path : Path
        Where to listen; made with mode 0600.
    answer : callable
        Does what is asked, and says what became of it. A SwerveError or an OSError of it becomes the reply.
    """

    def __init__(self, path: Path, answer: Callable[[AnyRequest, Peer], Reply]) -> None:
        self._path, self._answer = path, answer
        self._selector: selectors.BaseSelector | None = None
        self._clients: dict[socket.socket, Peer] = {}  # oldest first
        # what was answered, refused, malformed, and put out unheard
        self.counts = dict.fromkeys(("answered", "malformed", "strangers", "put_out"), 0)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            os.fchmod(sock.fileno(), 0o600)  # before bind: the file never exists with another mode
            with as_owner(path):
                path.unlink(missing_ok=True)
                sock.bind(str(path))
            sock.listen(_MOST_CLIENTS)
        except OSError as error:
            sock.close()
            raise SwerveError(f"{path}: {error.strerror or error}", "the control socket cannot be made") from None
        self._accepting = Accepting(sock, self._admit, _MOST_CLIENTS)
        self.tick = self._accepting.tick

    @property
    def paused(self) -> int:
        """How often it had to stop accepting for want of descriptors or memory."""
        return self._accepting.paused

    def register(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._accepting.register(selector)

    def close(self) -> None:
        """Let nobody in any more."""
        for client in list(self._clients):
            self._drop(client)
        self._accepting.close()
        with as_owner(self._path):
            self._path.unlink(missing_ok=True)

    def _admit(self, client: socket.socket) -> None:
        assert self._selector is not None
        pid, uid, _ = peer(client)
        if uid not in (0, os.geteuid()):
            self.counts["strangers"] += 1
            client.close()
            return
        if len(self._clients) >= _MOST_CLIENTS:
            self.counts["put_out"] += 1
            self._drop(next(iter(self._clients)))
        self._clients[client] = Peer(pid, uid)
        self._selector.register(client, selectors.EVENT_READ, functools.partial(self._readable, client))

    def _readable(self, client: socket.socket, _events: int) -> None:
        asker = self._clients.get(client)
        if asker is None:  # put out in this very turn
            return
        try:
            data, _, flags, _ = client.recvmsg(MOST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, flags = b"", 0
        if data:
            reply = self._reply(data, bool(flags & socket.MSG_TRUNC), asker)
            with contextlib.suppress(OSError):
                client.send(encode_reply(reply), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._drop(client)

    def _reply(self, data: bytes, cut: bool, asker: Peer) -> Reply:
        try:
            if cut:
                raise ValueError(f"longer than {MOST_BYTES} bytes")
            request = decode(data)
        except ValueError as error:
            self.counts["malformed"] += 1
            return Reply(2, [f"not a request: {error}"])
        self.counts["answered"] += 1
        try:
            return self._answer(request, asker)
        except SwerveError as error:
            return refusal(error)
        except OSError as error:  # a full disk, for one: theirs to mend, not ours to die of
            return Reply(1, [f"{error.filename or 'the state directory'}: {error.strerror or error}"])

    def _drop(self, client: socket.socket) -> None:
        assert self._selector is not None
        self._clients.pop(client, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client)
        client.close()
