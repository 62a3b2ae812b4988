"""The privileged step before a service that runs without root: opens what its three capabilities cannot.

It copies the formats of three kernel events, which only root may read, and which do not change while the kernel
runs; the unit mounts the copy in the place of tracefs, so that nothing else of tracefs is opened. And it gives files
back to the service that root wrote into its state directory (restored from a backup, say).
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Final

from pytools import directories
from pytools.errors import CapabilityError
from pytools.kernel import tracefs

EVENTS: Final = (("tcp", "tcp_cong_state_set"), ("sock", "inet_sock_set_state"), ("skb", "kfree_skb"))


def formats_dir() -> Path:
    """Where the copies lie: beside the runtime directory, for that one belongs to the service."""
    runtime = directories.runtime_dir(None).parent
    return runtime.with_name(f"{runtime.name}-tracing")


def run() -> list[str]:
    """Do all of it; what was done, one line each.

    Raises
    ------
    CapabilityError
        If the caller is not root.
    """
    if os.geteuid() != 0:
        hint = f"let its unit do it ({directories.page('service.md')})"
        raise CapabilityError("only root can prepare the service", hint)
    return [*copy_formats(formats_dir()), *give_back(directories.state_dir(None).parent)]


def copy_formats(to: Path) -> list[str]:
    """Copy the formats of the events that programs are attached to, and nothing else of tracefs."""
    done = []
    to.mkdir(mode=0o755, parents=True, exist_ok=True)
    for system, event in EVENTS:
        text = tracefs.event_format(system, event)
        if not text:
            done.append(f"no format of {system}:{event}: no such event, or tracefs is not mounted")
            continue
        place = to / "events" / system / event / "format"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
        place.chmod(0o444)
        done.append(f"copied the format of {system}:{event}")
    for directory in (to, *to.rglob("*")):  # whatever the caller's umask
        if directory.is_dir():
            directory.chmod(0o755)
    return done


def give_back(state: Path) -> list[str]:
    """Give what root wrote below a directory to the directory's owner: plain files and directories, no links."""
    try:
        owner = state.stat()
    except OSError:
        return []
    if owner.st_uid == 0:
        return []
    done = []
    for path, folders, files, at in os.fwalk(state):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
                try:
                    if _roots_own(os.fstat(fd)):
                        os.fchown(fd, owner.st_uid, owner.st_gid)
                        done.append(f"gave {path}/{name} to user {owner.st_uid}")
                finally:
                    os.close(fd)
    return done


def _roots_own(found: os.stat_result) -> bool:
    """Whether it is a file or directory of root's; one with two names may be linked here by the service's user."""
    plain = stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_nlink == 1)
    return found.st_uid == 0 and plain
