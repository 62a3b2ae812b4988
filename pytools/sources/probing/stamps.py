"""Stamps of probes as they come from the kernel's ring, turned into columns for the arrays they go into.

Times are nanoseconds of this host's stamping clock unless said otherwise. Pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# What a stamp's kind says: see enum swerve_stamp_kind in bpf/swerve.h.
REQUEST_EGRESS, REQUEST_INGRESS, REPLY_EGRESS, REPLY_INGRESS = range(1, 5)


class Stamps(NamedTuple):
    """Stamps of two kinds, one element per stamp and column, in the order in which they were taken."""

    kind: NDArray[np.intp]  # 0 for the first of the two kinds, 1 for the second
    seq: NDArray[np.int64]
    ssid: NDArray[np.int64]
    port: NDArray[Any]  # UDP port of the Session-Sender
    remote: NDArray[np.uint64]  # shape (n, 2)
    at_ns: NDArray[np.int64]  # of the stamping clock
    seen_ns: NDArray[np.int64]  # CLOCK_MONOTONIC


def of_kinds(records: NDArray[Any], first: int, second: int) -> Stamps:
    """The stamps of two kinds among the records of the ring."""
    kinds = records["kind"]
    chosen = np.flatnonzero((kinds == first) | (kinds == second))
    remotes: NDArray[np.uint64] = records["remote"]["bytes"][chosen].view(np.uint64)
    return Stamps(
        kind=(kinds[chosen] == second).astype(np.intp),
        seq=records["seq"][chosen].astype(np.int64),
        ssid=records["ssid"][chosen].astype(np.int64),
        port=records["sender_port"][chosen],
        remote=remotes,
        at_ns=records["ts_ns"][chosen].astype(np.int64),
        seen_ns=records["seen_ns"][chosen].astype(np.int64),
    )
