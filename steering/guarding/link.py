"""The controller's end of its guardian: start it, tell it that we live, know whether it does, start it again.

CLOCK_MONOTONIC nanoseconds; one thread, which must be in the namespace that is steered.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from steering.guarding.confirming import Deadline
from steering.guarding.guardian import LEAVE, READY, RENEW

_RESPAWN_NS = 100_000_000  # a guardian that cannot start must not become a fork loop


class GuardianLink:
    """A guardian, and the news of it.

    Parameters
    ----------
    netns : str | None
        The instance whose journal it undoes.
    lease_ns : int
        Without a renewal for so long it kills us and undoes.
    lock_fd : int
        The instance's lock, which it shares.
    say : callable
        Takes a line for the log.
    deadline : Deadline | None
        Without a confirmation until then it kills us and undoes.
    """

    def __init__(
        self,
        netns: str | None,
        lease_ns: int,
        lock_fd: int,
        say: Callable[[str], None],
        deadline: Deadline | None = None,
    ) -> None:
        self._netns = netns
        self._lease_ns = lease_ns
        self._lock_fd = lock_fd
        self._say = say
        self._deadline = deadline
        self._selector: selectors.BaseSelector | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = self._renewals = self._echo = -1
        self._started_ns = 0
        self._heard_ns: int | None = None  # when it last echoed a renewal; None before it is ready
        self._renew_ns = 0
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Its process number, for people."""
        return self._process.pid if self._process else None

    def register(self, selector: selectors.BaseSelector) -> None:
        """Start it and watch it from this selector."""
        self._selector = selector
        self._start()

    def live(self) -> bool:
        """Whether it would undo us now: it runs, and answered within the lease."""
        if self._process is None or self._heard_ns is None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0) and time.monotonic_ns() - self._heard_ns <= self._lease_ns

    def tick(self, now_ns: int) -> int:
        """Renew, and replace a guardian that died or hangs; when to call again."""
        if self._process is None:
            if now_ns - self._started_ns >= _RESPAWN_NS:
                self._start()
            return now_ns + _RESPAWN_NS
        if now_ns >= self._renew_ns:
            with contextlib.suppress(OSError):
                os.write(self._renewals, RENEW)
            self._renew_ns = now_ns + self._lease_ns // 4
        heard = self._heard_ns if self._heard_ns is not None else self._started_ns + 5_000_000_000
        if now_ns - heard > self._lease_ns:
            self._say("the guardian does not answer")
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._died(0)
        return self._renew_ns

    def leave(self) -> None:
        """Tell it that nothing is to be undone, and wait until it has gone."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            os.write(self._renewals, LEAVE)
        try:
            self._process.wait(timeout=self._lease_ns / 1e9 + 1)
        except subprocess.TimeoutExpired:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        self._forget()

    def _start(self) -> None:
        self._started_ns = time.monotonic_ns()
        self.starts += 1
        their_renewals, self._renewals = os.pipe()
        self._echo, their_echo = os.pipe()
        us = os.pidfd_open(os.getpid())
        os.set_blocking(self._renewals, False)
        os.set_blocking(self._echo, False)
        theirs = (us, their_renewals, their_echo)
        arguments = [*map(str, theirs), str(self._lease_ns), self._netns or ""]
        if self._deadline is not None:
            arguments += [str(self._deadline.at_ns), self._deadline.run]
        try:
            # A session of its own: a Ctrl-C for us is not for it. -P: nothing is imported from the current directory.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "steering.guarding.guardian", *arguments],
                pass_fds=(*theirs, self._lock_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        finally:
            for fd in theirs:
                os.close(fd)
        self._heard_ns = None
        self._renew_ns = 0
        assert self._selector is not None
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._died)
        self._selector.register(self._echo, selectors.EVENT_READ, self._heard)

    def _heard(self, _events: int) -> None:
        try:
            said = os.read(self._echo, 4096)
        except BlockingIOError:
            return
        if said:
            if READY in said:
                self._renew_ns = 0
            self._heard_ns = time.monotonic_ns()
        elif self._selector is not None:
            self._selector.unregister(self._echo)  # closed: its death arrives by pidfd

    def _died(self, _events: int) -> None:
        code = self._process.wait() if self._process else 0
        self._say(f"the guardian died (exit status {code}): starting another; nothing is changed until it is ready")
        self._forget()
        if time.monotonic_ns() - self._started_ns >= _RESPAWN_NS:
            self._start()

    def _forget(self) -> None:
        for fd in (self._pidfd, self._echo):
            if self._selector is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(fd)
        for fd in (self._pidfd, self._echo, self._renewals):
            with contextlib.suppress(OSError):
                os.close(fd)
        if self._process is not None:
            self._process.wait()
        self._process = None
        self._heard_ns = None
