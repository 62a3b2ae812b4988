"""The guardian: a small process that deletes our rules when the controller dies or hangs.

Started by the controller with: a pidfd of the controller (a handle, not a number that could be reused), a pipe on
which a byte a few times per lease says "I live", a pipe that echoes those, and the lock, which it thereby shares.
A controller that dies is noticed at once; one that stops renewing is killed first, so that it cannot act later.
CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import sys
import time
from collections.abc import Callable

from pytools.errors import SwerveError
from pytools.kernel.leftovers import sweep, switch_off
from pytools.kernel.netlink import Netlink
from pytools.signals import Act
from steering import elapsed
from steering.acting import journal, rollback, telling
from steering.guarding import confirming
from steering.guarding.confirming import Deadline

READY, RENEW, LEAVE = b"r", b".", b"q"
_RETRY_S = 0.2
_TRIES = 50


def main(arguments: list[str]) -> int:
    """Guard one controller until it leaves, or undo and go.

    Parameters
    ----------
    arguments : list of str
        pidfd, renewal pipe, echo pipe, lease in nanoseconds, instance name (empty for the host's); for a run that has
        to be confirmed also until when, and its name.
    """
    pidfd, renewals, echo, lease_ns = (int(text) for text in arguments[:4])
    netns = arguments[4] or None
    deadline = Deadline(arguments[6], int(arguments[5])) if len(arguments) > 5 else None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it leaves when its controller does, not before
    path = journal.directory(netns) / journal.FILE
    with Netlink() as netlink, journal.Journal(path) as log:
        scope = journal.scope()
        with contextlib.suppress(OSError):  # the controller may be dead already
            os.write(echo, READY)
        overdue = functools.partial(_overdue, log, scope, deadline)
        why = watch(pidfd, renewals, echo, lease_ns, deadline.at_ns if deadline else None, overdue)
        if not why:
            return 0
        code, acts = undo(netlink, log, scope, f"the controller {why}")
        telling.tell(netns, acts)  # last: who hears of it must not keep it waiting
        return code


def _overdue(log: journal.Journal, scope: str, deadline: Deadline | None) -> bool:
    return deadline is not None and confirming.expire(log, deadline.run, scope, "guardian")


def watch(
    pidfd: int,
    renewals: int,
    echo: int,
    lease_ns: int,
    deadline_ns: int | None = None,
    overdue: Callable[[], bool] = lambda: False,
) -> str:
    """Wait until the controller needs to be undone; why, or empty when it left in order.

    When this returns a reason the controller is dead. At the deadline, by CLOCK_BOOTTIME, `overdue` is asked whether it
    has to end.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(renewals, select.POLLIN)
    expires = time.monotonic_ns() + lease_ns
    while True:
        if deadline_ns is not None and elapsed.now_ns() >= deadline_ns:
            if overdue():
                _kill(pidfd)
                return "was not confirmed in time, and was killed"
            deadline_ns = None
        left_ns = expires - time.monotonic_ns()
        if deadline_ns is not None:
            left_ns = min(left_ns, deadline_ns - elapsed.now_ns())
        ready = dict(poll.poll(max(0.0, left_ns / 1e6)))
        if renewals in ready:
            said = os.read(renewals, 4096)
            if LEAVE in said:
                return ""
            if said:
                expires = time.monotonic_ns() + lease_ns
                with contextlib.suppress(OSError):
                    os.write(echo, said[-1:])
                continue
            poll.unregister(renewals)  # its end is closed: it is dying
        if pidfd in ready:
            return "died"
        if time.monotonic_ns() >= expires:
            _kill(pidfd)
            return "stopped renewing its lease, and was killed"


def _kill(pidfd: int) -> None:
    """End the controller, and wait until it can do nothing more."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()


def undo(netlink: Netlink, log: journal.Journal, scope: str, why: str) -> tuple[int, list[Act]]:
    """Delete our rules, whatever else happens; then note it and remove the rest. The exit code, and the acts."""
    began_ns = time.monotonic_ns()
    for attempt in range(_TRIES):
        if attempt:
            time.sleep(_RETRY_S)
        try:
            switch_off(netlink)
            break
        except SwerveError as error:
            _say(f"cannot delete the rules: {error}")
    else:
        _say("gave up: `swerve steer off` tries again")
        return 1, []
    _say(f"{why}: its rules are deleted")
    acts: list[Act] = []
    try:
        done = rollback.take_back(log, lambda: None, scope, "guardian", why)
        acts = telling.taken_back(done, why, began_ns)
        for text in (*(each.text for each in done), *(f"removed {each}" for each in sweep(netlink))):
            _say(text)
    except (OSError, SwerveError) as error:  # nothing leads to what is left
        _say(f"the rules are deleted, but: {error}")
        return 1, acts
    return 0, acts


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(f"swerve guardian: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
