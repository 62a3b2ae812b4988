"""What the live view costs with 200 paths and 1,000 connections at one frame a second: processor time and memory.

A real `swerve top` on a pseudo-terminal of 200 by 50 is attached to a real server on a Unix socket, which this process
feeds with what an agent of 100 peers over two rails would publish (_large_agent.py).
"""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator

from _common import cpu_s, emit, note, resident_bytes
from _large_agent import FLOWS, HOSTS, RAILS, ROOT, Served

from pytools.errors import SwerveError

SIZE = (50, 200)  # lines, columns
SETTLING_S, SHORT_SETTLING_S, WINDOW_S = 45.0, 5.0, 20.0  # at first until the longest horizon is full
NETNS = "bench-top"
# What is looked at -> the keys that lead there from what was looked at before.
LOOKS = {"paths": b"", "paths_40s": b"t", "detail_40s": b"\r", "flows": b"\x1b2", "events": b"4"}
CASE = f"paths{HOSTS * RAILS}_flows{FLOWS}_1hz"


class Screen(Served):
    """`swerve top` on a pseudo-terminal of its own, and the agent that it is attached to."""

    def __init__(self, directory: str, color: str = "xterm-256color") -> None:
        super().__init__(directory, NETNS)
        self._main, sub = pty.openpty()
        termios.tcsetwinsize(sub, SIZE)
        os.set_blocking(self._main, False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steering.cli", "top", "-n", NETNS],
            cwd=ROOT,
            stdin=sub,
            stdout=sub,
            stderr=sub,
            env={**os.environ, **self.places, "TERM": color},
            start_new_session=True,
        )
        self.pid = self.process.pid
        os.close(sub)
        self.written = 0
        self.tail = b""

    def look(self, seconds: float) -> None:
        """Let the agent publish, and read what is drawn."""
        try:
            self.work(seconds, self._read)
        except SwerveError as error:
            raise SwerveError(f"{error}: {self.tail[-2000:]!r}") from None

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            drawn = os.read(self._main, 1 << 16)
            self.written += len(drawn)
            self.tail = (self.tail + drawn)[-1 << 16 :]

    def press(self, keys: bytes) -> None:
        """Press keys, a moment apart: an Esc followed at once by something is another key."""
        for key in keys:
            os.write(self._main, bytes([key]))
            self.look(0.5)

    def close(self) -> None:
        """End the view, and the agent."""
        super().close()
        os.close(self._main)


@contextlib.contextmanager
def opened() -> Iterator[Screen]:
    with tempfile.TemporaryDirectory(prefix="swerve-bench-") as directory:
        screen = Screen(directory)
        try:
            yield screen
        finally:
            screen.close()


def main() -> None:
    with opened() as screen:
        screen.look(SETTLING_S)
        for name, keys in LOOKS.items():
            screen.press(keys)
            screen.look(SHORT_SETTLING_S)
            before, began = cpu_s(screen.pid), time.monotonic()
            published, written = screen.agent.published, screen.written
            screen.look(WINDOW_S)
            took = time.monotonic() - began
            share = (cpu_s(screen.pid) - before) / took
            emit("top", "cpu", share, "share", "lower", case=f"{CASE}_{name}")
            note(
                f"{name}: {(screen.agent.published - published) / took:,.0f} signals/s published, "
                f"{(screen.written - written) / took:,.0f} bytes/s drawn, {screen.dropped} dropped"
            )
        emit("top", "resident", resident_bytes(screen.pid) / 1e6, "MB", "lower", case=CASE)
        emit("top", "lost", screen.dropped, "signals", "lower", case=CASE)


if __name__ == "__main__":
    main()
