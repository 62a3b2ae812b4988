"""What an agent needs that runs without root, and what it loses, capability by capability.

Whom the losses concern is found by its process. Light to import; any thread.

And its CPU priority: probes are read late, and acts come late, where applications take all processors. Only the calling
thread changes, and what it starts afterwards: call it from the main thread, first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pytools import directories
from pytools.errors import CapabilityError
from pytools.kernel import tracefs

NEEDED: Final = {"CAP_NET_ADMIN": 12, "CAP_NET_RAW": 13, "CAP_PERFMON": 38, "CAP_BPF": 39}  # without one nothing works
_SYS_ADMIN: Final = 21
_OF_SYS_ADMIN: Final = frozenset({"CAP_PERFMON", "CAP_BPF"})  # it includes them


@dataclass(frozen=True, slots=True)
class Lost:
    """What one capability more would bring."""

    capability: str
    bit: int
    what: str  # is lost without it


LOST: Final = (
    Lost(
        "CAP_SYS_PTRACE",
        19,
        "the processes behind other users' TCP connections are not named, their RDMA processes cannot be tapped, and "
        "their jobs are not seen",
    ),
    Lost(
        "CAP_DAC_READ_SEARCH", 2, "the control group and the container of a TCP connection are named some seconds late"
    ),
    Lost(
        "CAP_SYS_ADMIN",
        _SYS_ADMIN,
        "what a kernel program costs per packet is not known, RDMA is not seen by probes in its providers (by "
        "kernels before 6.6), and processes tapped before the agent began are not found",
    ),
)


def effective(pid: int | None = None) -> int | None:
    """The effective capabilities of a process, ours unless given, as a mask; None when there is no such process."""
    try:
        lines = Path("/proc", str(os.getpid() if pid is None else pid), "status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def lost(mask: int) -> list[Lost]:
    """What a process with these capabilities goes without."""
    return [each for each in LOST if not mask >> each.bit & 1]


def missing(mask: int) -> list[str]:
    """What a process with these capabilities lacks to be an agent."""
    admin = mask >> _SYS_ADMIN & 1
    return [name for name, bit in NEEDED.items() if not mask >> bit & 1 and not (admin and name in _OF_SYS_ADMIN)]


def require() -> None:
    """Refuse to be an agent without what it needs: what fails later does not name the capability.

    Raises
    ------
    CapabilityError
        If this process lacks one.
    """
    mask = effective()
    if mask is not None and (lacking := missing(mask)):
        raise CapabilityError(
            f"the agent has no {' and no '.join(lacking)}",
            f"run it as root, or grant it ({directories.page('service.md')})",
        )


def gaps() -> Iterator[tuple[str, str]]:
    """What this very process goes without: what is missing, and what is lost by that."""
    for each in lost(effective() or 0):
        yield each.capability, each.what
    for (system, event), what in _EVENTS.items():
        if not tracefs.fields(system, event):
            yield f"the format of {system}:{event}", what


_EVENTS: Final = {
    ("tcp", "tcp_cong_state_set"): "retransmitted segments are counted, but fast, RTO, TLP and SYN are not told apart",
    ("skb", "kfree_skb"): "packets that the kernel drops are not counted",
}


NICE: Final = -10


def raise_priority() -> str:
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


def pacer_priority(agent: int) -> int:
    """The real-time priority of the process that sends an agent's probes; 0: it has none, or cannot be seen."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return max((os.sched_getparam(int(child)).sched_priority for child in children), default=0)
    except OSError:
        return 0


def priority_of(pid: int) -> int | None:
    """The nice value of a process; None where it cannot be seen."""
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except OSError:
        return None
