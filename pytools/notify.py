"""What a service manager is told: ready, alive, how it stands, reloading, stopping (sd_notify(3), without its library).

Nothing is waited for, and nothing can fail: without a manager, or with one that does not listen, words go nowhere.
CLOCK_MONOTONIC; any thread.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

_STATUS_BYTES: Final = 1024


class Manager:
    """The service manager that started this process, if one did.

    Parameters
    ----------
    environment : mapping
        Where it says how it is reached, and how often it wants to hear that we live.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A path, or a name in the abstract namespace; anything else (vsock) is not for a process of this host.
        self._address = "\0" + address[1:] if address.startswith("@") else address if address.startswith("/") else ""
        self.watchdog_ns = _watchdog_ns(environment) if self._address else 0
        self._status = ""

    @property
    def listens(self) -> bool:
        return bool(self._address)

    def ready(self) -> None:
        """What was started, or loaded again, does its work."""
        self._tell("READY=1")

    def alive(self) -> None:
        """The loop has turned."""
        self._tell("WATCHDOG=1")

    def reloading(self) -> None:
        """The configuration is read again; `ready` says when that is done."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; told when it is another than before."""
        line = " ".join(text.split())[:_STATUS_BYTES]
        if line != self._status:
            self._status = line
            self._tell(f"STATUS={line}")

    def _tell(self, words: str) -> None:
        if not self._address:
            return
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.setblocking(False)
            sock.sendto(words.encode(), self._address)


def _watchdog_ns(environment: Mapping[str, str]) -> int:
    """Within which time the manager wants to hear; 0: it does not, or not from this process."""
    for_us = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    text = environment.get("WATCHDOG_USEC", "")
    return int(text) * 1000 if for_us and text.isdecimal() else 0
