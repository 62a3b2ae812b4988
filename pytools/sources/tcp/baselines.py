"""What the kernel programs are told before they are attached: whose connections to follow, and what precedes them.

All of it concerns the network namespace of the calling thread. One thread: the agent's.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Final

import numpy as np

from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.bpf.maps import Map
from pytools.kernel.netlink.sockdiag import Socket

_SO_NETNS_COOKIE: Final = 71


def configure(loaded: Loaded, refresh_ns: int) -> None:
    """Say whose connections to follow, and how often to look at a busy one.

    Raises
    ------
    SwerveError
        If the maps refuse.
    """
    loaded.map("tcp_settings").update(0, (netns_cookie(), refresh_ns))
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


def netns_cookie() -> int:
    """What tells this network namespace from others in the kernel; 0, which is none, before Linux 5.14."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as any_one:
        cookie: int = struct.unpack("=Q", any_one.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8))[0]
        return cookie
    return 0


def _entry(found: Socket) -> tuple[int, int, int]:
    """Segments retransmitted, whether it is a connection, its congestion state."""
    if found.info is None:  # a half-open request: what follows from it is ours
        return found.request_retransmits, 0, 0
    return found.info.retransmitted_segments, 1, found.info.congestion
