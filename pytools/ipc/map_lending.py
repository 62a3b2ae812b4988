"""Kernel maps lent to another process: their descriptors, over a Unix socket that stays open while the loan lasts.

Who holds a descriptor of a map may write to it: so the socket is root's and the lender's user's alone. A lender that
dies closes the connection, and the borrower knows at once that nobody keeps the maps up to date any more.
Non-blocking; each end runs in its process's one thread, on its selector.
"""

from __future__ import annotations

import os
import selectors
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from pytools.errors import SwerveError
from pytools.ipc.socket_files import Listener, peer

_BORROWERS: Final = 8
_MOST_BYTES: Final = 4096
_MOST_MAPS: Final = 16


class Lender:
    """Lends maps to whoever connects, if it is root or the same user.

    Parameters
    ----------
    maps : mapping of str to int
        Descriptors by name; stay the caller's.

    Raises
    ------
    SwerveError
        As `Listener` does.
    """

    def __init__(self, path: Path, maps: Mapping[str, int]) -> None:
        self._maps = dict(maps)
        self._refused = 0
        self._borrowers: set[socket.socket] = set()
        self._selector: selectors.BaseSelector | None = None
        self._listener = Listener(path, self._admit)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Lend from this selector; `key.data` is a callable taking the event mask."""
        self._selector = selector
        self._listener.register(selector)

    def tick(self, now_ns: int) -> int:
        """Accept again after a pause; all other work hangs on the selector."""
        return self._listener.tick(now_ns)

    @property
    def borrowers(self) -> int:
        return len(self._borrowers)

    def drops(self) -> dict[str, int]:
        """Borrowers that were sent away; pauses for want of descriptors."""
        return {"maps_not_lent": self._refused, "maps_accept_paused": self._listener.paused}

    def close(self) -> None:
        """End all loans and remove the socket."""
        for sock in list(self._borrowers):
            self._end(sock)
        self._listener.close()

    def _admit(self, sock: socket.socket) -> None:
        names = "\n".join(self._maps).encode()
        try:
            if peer(sock)[1] not in (0, os.geteuid()) or len(self._borrowers) >= _BORROWERS:
                raise PermissionError
            socket.send_fds(sock, [names], list(self._maps.values()))
        except OSError:
            self._refused += 1
            sock.close()
            return
        self._borrowers.add(sock)
        assert self._selector is not None
        self._selector.register(sock, selectors.EVENT_READ, lambda _: self._heard(sock))

    def _heard(self, sock: socket.socket) -> None:
        """A borrower says nothing; what is readable is its end, or nonsense."""
        self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        self._borrowers.discard(sock)
        if self._selector is not None:
            self._selector.unregister(sock)
        sock.close()


class Loan:
    """The maps of one lender, as long as it lives.

    Parameters
    ----------
    path : Path
        The lender's socket.
    selector : selectors.BaseSelector
        Where to wait for it.
    lent : callable
        Takes the descriptors by name, which are then its own; called once.
    over : callable
        Called when the loan ends from the other side, or was never made.

    Raises
    ------
    SwerveError
        If nobody lends there.
    """

    def __init__(
        self,
        path: Path,
        selector: selectors.BaseSelector,
        lent: Callable[[dict[str, int]], None],
        over: Callable[[], None],
    ) -> None:
        self._selector, self._lent, self._over = selector, lent, over
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise SwerveError(f"{path}: {error.strerror}") from None
        selector.register(self._sock, selectors.EVENT_READ, self._readable)

    def _readable(self, _mask: int) -> None:
        try:
            names, descriptors, _, _ = socket.recv_fds(self._sock, _MOST_BYTES, _MOST_MAPS)
        except BlockingIOError:
            return
        except OSError:
            names, descriptors = b"", []
        words = names.decode(errors="replace").split("\n")
        if names and len(words) == len(descriptors):
            self._lent(dict(zip(words, descriptors, strict=True)))
            return
        for fd in descriptors:
            os.close(fd)
        self.close()
        self._over()

    def close(self) -> None:
        """Give up the loan; what was borrowed is the borrower's to close."""
        if self._sock.fileno() >= 0:
            self._selector.unregister(self._sock)
            self._sock.close()
