"""A guardian from outside: undoes what is in force when controller and guardian have gone together, with a container.

It has no handle on either, only the lock that both hold: who gets it knows that nobody else is left. A controller that
starts meanwhile waits for it, as for a guardian that is still undoing. One thread, in the namespace that is steered.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final

from pytools import directories, log, owned_files
from pytools.errors import SwerveError
from pytools.kernel import netns
from pytools.kernel.netlink.routing import Netlink
from steering.acting import bond_ports, journal, messages
from steering.acting.lock import Lock, holder
from steering.acting.namespace_lock import NamespaceLock
from steering.guarding import guardian

_LOG: Final = log.logger("guard")
_LOOK_S: Final = 0.5
_STOPS: Final = frozenset({signal.SIGTERM, signal.SIGINT})


def guard(name: str | None, stopped: Callable[[float], int]) -> int:
    """Look until asked to end, and then as long as somebody steers; the signal that asked.

    Parameters
    ----------
    stopped : callable
        Waits for at most so many seconds; the signal that came, or 0.
    """
    lock, asked = directories.state_dir(name) / journal.LOCK_FILE, 0
    said, tried_ns = "", 0
    with Netlink() as netlink:
        while True:
            try:
                free = holder(lock) is None
                if free and lock.exists() and _left(netlink, name, tried_ns):
                    _undo(netlink, name, tried_ns)
                    tried_ns = _told_ns(name)
                elif free and asked:
                    return asked
            except (OSError, SwerveError) as error:  # one has just started; else it is tried again
                if said != str(error):
                    _say(f"cannot undo: {error}")
                said = str(error)
            asked = stopped(_LOOK_S) or asked
            if asked == signal.SIGINT:
                return asked


def stopped(seconds: float) -> int:
    """Wait for SIGTERM or SIGINT: from the first call on they come here."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    found = signal.sigtimedwait(_STOPS, seconds)
    return 0 if found is None else found.si_signo


def _told_ns(name: str | None) -> int:
    """When it was last written down that hooks are to be told of something; 0: they are not."""
    try:
        return directories.hook_calls(name).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _left(netlink: Netlink, name: str | None, tried_ns: int) -> bool:
    """Whether anything of ours is in force that has no lease in the kernel. Hooks that do not answer are tried once."""
    bonds = bond_ports.load(directories.bond_ports(name), netns.scope())
    return guardian.in_force(netlink) or bool(bonds) or _told_ns(name) not in (0, tried_ns)


def _undo(netlink: Netlink, name: str | None, tried_ns: int) -> None:
    folder = directories.state_dir(name)
    with Lock(folder / journal.LOCK_FILE), NamespaceLock():
        if not _left(netlink, name, tried_ns):
            return
        why = "the controller and its guardian are gone"
        _, acts = guardian.undo(netlink, folder / journal.FILE, netns.scope(), why, name)
        owned_files.remove(directories.steering_memory(name))
        messages.tell(name, acts)
        if _told_ns(name):
            guardian.end_hooks(name, why)


def _say(text: str) -> None:
    _LOG.info("%s", text)
