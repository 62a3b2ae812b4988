"""CPU priority of a daemon: probes are read late, and acts come late, where applications take all processors.

Only the calling thread changes, and what it starts afterwards: call it from the main thread, first.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

NICE: Final = -10


def raise_own() -> str:
    """Set our nice value to -10; why it could not be, empty when it is or when somebody chose another one.

    A unit's `Nice=` is set by systemd itself. Under its system call filter our own attempt fails with EPERM.
    """
    try:
        if os.getpriority(os.PRIO_PROCESS, 0) != 0:
            return ""
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    except OSError as error:
        return f"nice {NICE} refused: {error.strerror}"
    return ""


def of_pacer(agent: int) -> int:
    """The real-time priority of the process that sends an agent's probes; 0: it has none, or cannot be seen."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return max((os.sched_getparam(int(child)).sched_priority for child in children), default=0)
    except OSError:
        return 0


def of(pid: int) -> int | None:
    """The nice value of a process; None where it cannot be seen."""
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:
        return None
