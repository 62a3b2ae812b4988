"""A listening socket in a selector that survives a process without free descriptors.

Where `accept` fails for want of a descriptor or of memory, the connection stays in the backlog and the socket stays
readable: a selector would report it at once, for ever. So the socket leaves the selector for a while, which is counted;
who waits in the backlog is accepted afterwards. One thread. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable
from typing import Final

PAUSE_NS: Final = 500_000_000
LACKING: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Accepting:
    """Accepts connections of a non-blocking listening socket, which becomes its own.

    Parameters
    ----------
    admit : callable
        Takes each connection, non-blocking, which is then its own.
    at_once : int
        The most connections that one event of the selector accepts.
    """

    def __init__(self, sock: socket.socket, admit: Callable[[socket.socket], None], at_once: int = 1) -> None:
        self._sock, self._admit, self._at_once = sock, admit, at_once
        self._selector: selectors.BaseSelector | None = None
        self._again_ns: int | None = None  # when it listens again; None while it listens
        self.paused = 0  # how often it had to stop accepting for want of descriptors or memory

    def register(self, selector: selectors.BaseSelector) -> None:
        """Listen from this selector; `key.data` is a callable taking the event mask."""
        self._selector = selector
        selector.register(self._sock, selectors.EVENT_READ, self._accept)

    def tick(self, now_ns: int) -> int:
        """Listen again after a pause; returns when to be called next, pause or not."""
        if self._again_ns is not None and now_ns >= self._again_ns and self._selector is not None:
            self._again_ns = None
            self._selector.register(self._sock, selectors.EVENT_READ, self._accept)
        return now_ns + PAUSE_NS

    def close(self) -> bool:
        """Accept no more; False if it was closed before."""
        if self._sock.fileno() < 0:
            return False
        if self._selector is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._sock)
        self._sock.close()
        return True

    def _accept(self, _mask: int) -> None:
        for _ in range(self._at_once):
            try:
                sock, _ = self._sock.accept()
            except OSError as error:  # most of all: nobody is left
                if error.errno in LACKING:
                    self._pause()
                return
            sock.setblocking(False)
            self._admit(sock)

    def _pause(self) -> None:
        assert self._selector is not None
        self.paused += 1
        self._again_ns = time.monotonic_ns() + PAUSE_NS
        self._selector.unregister(self._sock)
