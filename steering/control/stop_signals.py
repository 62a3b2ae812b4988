"""SIGTERM and SIGINT as events of a selector. One thread, the main one."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stop_signals(selector: selectors.BaseSelector, stop: Callable[[int], None]) -> Iterator[None]:
    """Have SIGTERM and SIGINT wake the selector and call `stop`, for a while."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    def wake(_events: int) -> None:
        for number in ours.recv(64):
            if number in (signal.SIGTERM, signal.SIGINT):
                stop(number)

    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGTERM, signal.SIGINT)}
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    selector.register(ours, selectors.EVENT_READ, wake)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(ours)
        ours.close()
        theirs.close()
