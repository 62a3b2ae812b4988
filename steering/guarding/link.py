"""The controller's end of its guardian: start it, tell it that we live, know whether it does, start it again.

CLOCK_MONOTONIC nanoseconds; one thread, which must be in the namespace that is steered.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from steering.guarding.confirming import Deadline
from steering.guarding.guardian import HAND_OVER, IN_CHARGE, LEAVE, READY, RENEW, Orders
from steering.guarding.takeover import Locks

_RESPAWN_NS = 100_000_000  # a guardian that cannot start must not become a fork loop


class GuardianLink:
    """A guardian, and the news of it.

    Parameters
    ----------
    netns : str | None
        The instance whose journal it undoes.
    lease_ns : int
        Without a renewal for so long it kills us and undoes.
    locks : Locks
        Those of the instance and of the namespace, which it shares; with them the guardian that had them before, to
        which ours says that it is in charge.
    deadline : Deadline | None
        Without a confirmation until then it kills us and undoes.
    keep_ns : int
        How long it keeps what is in force for a successor.
    """

    def __init__(
        self,
        netns: str | None,
        lease_ns: int,
        locks: Locks,
        say: Callable[[str], None],
        deadline: Deadline | None = None,
        keep_ns: int = 0,
    ) -> None:
        self._netns = netns
        self._lease_ns = lease_ns
        self._locks = locks
        self._keep_ns = keep_ns
        self._in_charge = locks.former is None  # of what is in force, ours and not the one before
        self._say = say
        self._deadline = deadline
        self._selector: selectors.BaseSelector | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = self._renewals = self._echo = -1
        self._started_ns = 0
        self._heard_ns: int | None = None  # when it last echoed a renewal; None before it is ready
        self._renew_ns = 0
        self._trouble = ""  # why it could not be started the last time
        self.starts = 0

    @property
    def pid(self) -> int | None:
        """Its process number, for people."""
        return self._process.pid if self._process else None

    def register(self, selector: selectors.BaseSelector) -> None:
        """Start it and watch it from this selector."""
        self._selector = selector
        if self._locks.former is not None:
            selector.register(self._locks.former, selectors.EVENT_READ, self._former_left)
        self._start()

    def _former_left(self, _events: int) -> None:
        """The guardian before ours has gone: it was told that ours is in charge."""
        former, self._locks.former = self._locks.former, None
        if former is not None and self._selector is not None:
            self._selector.unregister(former)
            former.close()

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
        self._heard(0)  # after a stall of ours its answers wait in the pipe
        if now_ns >= self._renew_ns:
            self._write(RENEW)
            self._renew_ns = now_ns + self._lease_ns // 4
        heard = self._heard_ns if self._heard_ns is not None else self._started_ns + 5_000_000_000
        if now_ns - heard > self._lease_ns:
            self._replace("does not answer")
        return self._renew_ns

    def hand_over(self) -> bool:
        """Leave what is in force to a successor; whether somebody keeps it for him."""
        if not self._in_charge:  # then the one before does, as if we had not come
            self._end()
            return True
        return self.live() and self._write(HAND_OVER)

    def leave(self) -> None:
        """Tell it that nothing is to be undone, and wait until it has gone."""
        if self._locks.former is not None:
            self._locks.former.done()
        self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        self._write(LEAVE)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=self._lease_ns / 1e9 + 1)
        self._forget()

    def _write(self, said: bytes) -> bool:
        try:
            return os.write(self._renewals, said) == len(said)
        except OSError:
            return False

    def _start(self) -> None:
        self._started_ns = time.monotonic_ns()
        self.starts += 1
        try:
            self._spawn()
        except OSError as error:  # no process or no descriptor is to be had just now
            why = f"the guardian cannot be started ({error.strerror}): nothing is changed until it is"
            if why != self._trouble:
                self._say(why)
            self._trouble = why
            self._forget()
            return
        self._trouble = ""
        self._heard_ns = None
        self._renew_ns = 0
        assert self._selector is not None
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._died)
        self._selector.register(self._echo, selectors.EVENT_READ, self._heard)

    def _spawn(self) -> None:
        with contextlib.ExitStack() as theirs:  # our copies of what it inherits
            their_renewals, self._renewals = os.pipe()
            theirs.callback(os.close, their_renewals)
            self._echo, their_echo = os.pipe()
            theirs.callback(os.close, their_echo)
            us = os.pidfd_open(os.getpid())
            theirs.callback(os.close, us)
            os.set_blocking(self._renewals, False)
            os.set_blocking(self._echo, False)
            former = self._locks.former.fileno() if self._locks.former is not None else None
            orders = Orders(
                pidfd=us,
                renewals=their_renewals,
                echo=their_echo,
                locks=self._locks.filenos(),
                lease_ns=self._lease_ns,
                keep_ns=self._keep_ns,
                netns=self._netns,
                former=former,
                deadline=self._deadline,
            )
            inherited = [us, their_renewals, their_echo, *orders.locks, *([former] if former is not None else [])]
            # A session of its own: a Ctrl-C for us is not for it. -P: nothing is imported from the current directory.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "steering.guarding.guardian", msgspec.json.encode(orders).decode()],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(self._process.pid)

    def _heard(self, _events: int) -> None:
        try:
            said = os.read(self._echo, 4096)
        except OSError:  # nothing yet; or the guardian it was from has been replaced
            return
        if said:
            if READY in said:
                self._renew_ns = 0
                if self._locks.former is not None:  # not so before: somebody has to be in charge at every instant
                    self._in_charge |= self._write(IN_CHARGE)
            self._heard_ns = time.monotonic_ns()
        elif self._selector is not None:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._echo)  # closed: its death arrives by pidfd

    def _died(self, _events: int) -> None:
        if self._process is None or self._process.poll() is None:
            return  # the news is of one that has been replaced in this very turn
        self._replace(f"died (exit status {self._process.returncode})")

    def _replace(self, why: str) -> None:
        self._say(f"the guardian {why}: starting another; nothing is changed until it is ready")
        self._forget()
        if time.monotonic_ns() - self._started_ns >= _RESPAWN_NS:
            self._start()

    def _forget(self) -> None:
        """End it, whatever state it is in, and let go of what we have of it."""
        for fd in (self._pidfd, self._echo):
            if self._selector is not None:
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(fd)
        for fd in (self._pidfd, self._echo, self._renewals):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._pidfd = self._renewals = self._echo = -1
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._heard_ns = None
