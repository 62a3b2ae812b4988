"""What the kernel programs are told before they are attached: whose connections to follow, and what precedes them.

All of it concerns the network namespace of the calling thread. One thread: the agent's.
"""

from __future__ import annotations

import numpy as np

from pytools.kernel import netns
from pytools.kernel.bpf import contract
from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.bpf.maps import Map
from pytools.kernel.netlink.sockdiag import Socket


def configure(loaded: Loaded, refresh_ns: int, namespaces: str = "own") -> None:
    """Say whose connections to follow, and how often to look at a busy one.

    Raises
    ------
    SwerveError
        If the maps refuse.
    """
    followed = contract.constant(f"SWERVE_TCP_{namespaces.upper()}")
    loaded.map("tcp_settings").update(0, (netns.cookie(), refresh_ns, followed))
    interfaces = loaded.map("tcp_interfaces")
    interfaces.update(0, np.zeros((), interfaces.value))  # stands for those that find the map full


def note(accounted: Map, sockets: list[Socket]) -> int:
    """Write down what each socket has done so far; returns how many did not fit."""
    entries = [(each.cookie, *_entry(each)) for each in sockets if each.cookie]
    keys = np.array([entry[0] for entry in entries], accounted.key)
    values = np.zeros(len(entries), accounted.value)
    for column, name in enumerate(("segments", "older", "congestion"), start=1):
        values[name] = [entry[column] for entry in entries]
    return accounted.update_many(keys, values)


def _entry(found: Socket) -> tuple[int, int, int]:
    """Segments retransmitted, whether it is a connection, its congestion state."""
    if found.info is None:  # a half-open request: what follows from it is ours
        return found.request_retransmits, 0, 0
    return found.info.retransmitted_segments, 1, found.info.congestion
