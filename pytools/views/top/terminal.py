"""The terminal of the live view: what it is given back as, and which of the three streams it is.

Textual writes to standard error; what is shown here is output, so it goes to standard output. One thread, but for the
driver's own.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
from collections.abc import Iterator
from typing import Any, Final

from textual.drivers.linux_driver import LinuxDriver

_BACK: Final = "\x1b[?2004l\x1b[?7h\x1b[<u\x1b[?1049l\x1b[?25h\x1b[?1004l\x1b[0m"


class Terminal(LinuxDriver):
    """Textual's driver, on standard output."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._file = sys.__stdout__


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """The terminal as it was, whatever happens inside: what the driver does itself is not done again."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with contextlib.suppress(termios.error, OSError):
            if termios.tcgetattr(fd) != before:
                termios.tcsetattr(fd, termios.TCSADRAIN, before)
                os.write(sys.stdout.fileno(), _BACK.encode())


def is_gone() -> bool:
    """Whether nobody is at the other end of the terminal any more."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)
    return any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))
