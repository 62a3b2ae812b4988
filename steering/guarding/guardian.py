"""The guardian: a small process that keeps or undoes what is in force when the controller dies or hangs.

Started by the controller with: a pidfd of the controller (a handle, not a number that could be reused), a pipe on
which a byte a few times per lease says "I live", a pipe that echoes those, and the locks, which it thereby shares.
A controller that dies is noticed at once; one that stops renewing is killed first, so that it cannot act later. What
was in force then stays for a while, for a successor to take over (takeover.py); without one our rules are deleted.
CLOCK_MONOTONIC nanoseconds; one thread.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from pytools import directories, log, owned_files
from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.kernel.leftovers import FAMILIES, is_our_rule, sweep, switch_off
from pytools.kernel.netlink import qdiscs
from pytools.kernel.netlink.routing import Netlink
from pytools.signals import Act
from pytools.units import duration_text
from steering import elapsed
from steering.acting import acts_file, bond_ports, journal, messages, rollback
from steering.acting.lock import write_facts
from steering.guarding import confirming, takeover
from steering.guarding.confirming import Deadline
from steering.guarding.takeover import kill

READY, RENEW, LEAVE = b"r", b".", b"q"
IN_CHARGE = b"a"  # from now on it is this guardian that guards, and not that of the controller before
HAND_OVER = b"h"  # the controller ends, and leaves all to a successor
DIED: Final = "died"
HUNG: Final = "stopped renewing its lease, and was killed"
HANDED_OVER: Final = "ended for a successor"
_LOG: Final = log.logger("guardian")
_LAST_S = 3.0  # after the end of its time, for a successor that has to be killed
_RETRY_S = 0.2
_HOOKS_S = 10.0  # in which they are called
_ENDS_S = 5.0  # after that, for the process to start and end
TRIES = 50


class Orders(msgspec.Struct, frozen=True):
    """What a guardian is started with; numbers of descriptors, and nanoseconds."""

    pidfd: int
    renewals: int
    echo: int
    locks: list[int]
    lease_ns: int
    keep_ns: int  # how long what is in force stays for a successor
    netns: str | None
    former: int | None = None  # connection to the guardian before, until we are in charge
    deadline: Deadline | None = None  # until when the run has to be confirmed


def main(arguments: list[str]) -> int:
    """Guard one controller until it leaves, or until its successor is guarded, or undo and go.

    Parameters
    ----------
    arguments : list of str
        Its orders, as JSON.
    """
    orders = msgspec.json.decode(arguments[0], type=Orders)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it leaves when its controller does, not before
    file = directories.state_dir(orders.netns) / journal.FILE
    with Netlink() as netlink:  # nothing here waits for a disk before our rules are deleted
        scope = netns.scope()
        with contextlib.suppress(OSError):  # the controller may be dead already
            os.write(orders.echo, READY)
        overdue = functools.partial(_overdue, file, scope, orders.deadline)
        watched = orders.pidfd, orders.renewals, orders.echo, orders.lease_ns
        deadline_ns = None if orders.deadline is None else orders.deadline.at_ns
        why = watch(*watched, deadline_ns, overdue, orders.former)
        if not why:
            return 0
        why = f"the controller {why}"
        told = directories.hook_calls(orders.netns)  # hooks, which a successor goes on with too
        there = told.exists() or in_force(netlink)
        if _keeps(orders, file) and why.endswith((DIED, HUNG, HANDED_OVER)) and there:
            until_ns = time.monotonic_ns() + orders.keep_ns
            _say(f"{why}: what is in force stays for {duration_text(orders.keep_ns)}, for a successor")
            if _keep(file.parent, scope, orders.locks, until_ns):
                _say("a successor has taken over")
                return 0
            why += ", and no successor took over"
        code, acts = undo(netlink, file, scope, why, orders.netns)
        owned_files.remove(directories.steering_memory(orders.netns))
        messages.tell(orders.netns, acts)  # last: who hears of it must not keep it waiting
        if told.exists():
            end_hooks(orders.netns, why)
        return code


def end_hooks(name: str | None, why: str) -> None:
    """Have hooks told that it is over, by a process that is given up after a while: far ends may hang."""
    words = [sys.executable, "-P", "-m", "steering.acting.hooks", name or "", why, str(_HOOKS_S)]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(words, stdin=subprocess.DEVNULL, timeout=_HOOKS_S + _ENDS_S, check=False)


def _overdue(file: Path, scope: str, deadline: Deadline | None) -> bool:
    if deadline is None:
        return False
    with journal.Journal(file) as log:
        return confirming.expire(log, deadline.run, scope, "guardian")


def _keeps(orders: Orders, file: Path) -> bool:
    """Whether anything may outlive this run: not as long as it is not confirmed."""
    confirmed = orders.deadline is None or confirming.verdict(file, orders.deadline.run) == "confirmed"
    return orders.keep_ns > 0 and confirmed


def _keep(folder: Path, scope: str, locks: list[int], until_ns: int) -> bool:
    """Keep what is in force for a successor; whether one has taken over. A disk that hangs makes it no longer."""
    taken: list[bool] = []

    def keep() -> None:
        for fd in locks[:1]:
            write_facts(fd, {"kept_until_ns": until_ns})
        taken.append(takeover.keep(folder, scope, locks, until_ns))

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    thread.join((until_ns - time.monotonic_ns()) / 1e9 + _LAST_S)
    return taken == [True]


def in_force(netlink: Netlink) -> bool:
    """Whether a rule or an fq of ours is there; where that cannot be told it is better undone."""
    try:
        return qdiscs.there(netlink) or any(is_our_rule(rule) for family in FAMILIES for rule in netlink.rules(family))
    except SwerveError:
        return False


def watch(
    pidfd: int,
    renewals: int,
    echo: int,
    lease_ns: int,
    deadline_ns: int | None = None,
    overdue: Callable[[], bool] = lambda: False,
    former: int | None = None,
) -> str:
    """Wait until the controller needs to be undone; why, or empty when there is nothing for us to do.

    When this returns a reason the controller is dead. At the deadline, by CLOCK_BOOTTIME, `overdue` is asked whether it
    has to end. As long as the guardian before us is in charge (`former`, a connection to it), a controller that ends is
    its affair.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(renewals, select.POLLIN)
    expires = time.monotonic_ns() + lease_ns
    handed_over = False
    while True:
        if deadline_ns is not None and elapsed.now_ns() >= deadline_ns:
            if overdue():
                kill(pidfd)
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
            if IN_CHARGE in said and former is not None:
                _take_charge(former)
                former = None
            handed_over |= HAND_OVER in said
            if said:
                expires = time.monotonic_ns() + lease_ns
                with contextlib.suppress(OSError):
                    os.write(echo, said[-1:])
                continue
            poll.unregister(renewals)  # its end is closed: it is dying
        if pidfd in ready:
            return "" if former is not None else HANDED_OVER if handed_over else DIED
        if time.monotonic_ns() >= expires:
            kill(pidfd)
            return "" if former is not None else HUNG


def _take_charge(former: int) -> None:
    """Tell the guardian before us that it guards nothing any more."""
    with socket.socket(fileno=former) as connection, contextlib.suppress(OSError):
        connection.send(takeover.DONE, socket.MSG_NOSIGNAL)


def undo(netlink: Netlink, file: Path, scope: str, why: str, name: str | None = None) -> tuple[int, list[Act]]:
    """Delete our rules, whatever else happens; put former ports of bonds back; then note it and remove the rest.

    Returns
    -------
    tuple of int and list of Act
        The exit code, and the acts.
    """
    began_ns = time.monotonic_ns()
    for attempt in range(TRIES):
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
    code, acts = _put_back(netlink, scope, why, name)
    try:
        acts_file.write_now(file.parent, acts)
        with journal.Journal(file) as log:
            done = rollback.note(log, scope, "guardian", why)
        acts += [messages.undone("", each, why, began_ns) for each in done]
        for text in (*(each.text for each in done), *(f"removed {each}" for each in sweep(netlink))):
            _say(text)
    except (OSError, SwerveError) as error:  # nothing leads to what is left
        _say(f"the rules are deleted, but: {error}")
        return 1, acts
    return code, acts


def _put_back(netlink: Netlink, scope: str, why: str, name: str | None) -> tuple[int, list[Act]]:
    """Put the former ports of bonds back: 1 if not all could be, and the acts."""
    try:
        done = bond_ports.restore(netlink, directories.bond_ports(name), scope, why)
    except SwerveError as error:
        _say(f"bonds cannot be read: {error}")
        return 1, []
    for each in done:
        _say(each.text)
    host = directories.instance(name)
    return int(any(each.failure for each in done)), [messages.bond_restored(host, each) for each in done]


def _say(text: str) -> None:
    _LOG.info("%s", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
