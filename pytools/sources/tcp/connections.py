"""Connections as arrays, for a reader in this process: what a `tcp_flow` costs for each is not paid for these.

Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.signals import Owner, Path, Stall

COUNTS: Final = ("sent_bytes", "received_bytes", "segments_out", "retransmitted_segments", "timeouts")


class Described(NamedTuple):
    """Whose a connection is and where it goes; the fields are those of `tcp_flow`."""

    owner: Owner
    path: Path | None
    interface: str


@dataclass(frozen=True, slots=True)
class Connections:
    """A part of a host's connections, n of them.

    Parameters
    ----------
    cookie : array of uint64, (n,)
        Of their sockets: numbers that are never used twice.
    counts : array of int64, (n, 5)
        COUNTS of each, with the meaning that they have in `tcp_flow`.
    ifindex : array of uint32, (n,)
        Of the interface that each left by last; 0 if not known.
    foreign : array of bool, (n,)
        Whether each is of another network namespace: its process is not known.
    srtt_ns : array of int64, (n,)
        0 if not known.
    stalls : mapping
        By position, of those that wait for their retransmission timer.
    describe : callable
        Says it of one, by position.
    """

    at_ns: int
    cookie: NDArray[np.uint64]
    counts: NDArray[np.int64]
    ifindex: NDArray[np.uint32]
    foreign: NDArray[np.bool_]
    closed: NDArray[np.bool_]
    first_ns: NDArray[np.int64]
    srtt_ns: NDArray[np.int64]
    stalls: Mapping[int, Stall]
    describe: Callable[[int], Described]


class Feed:
    """Between the source of TCP, which looks at connections only while somebody reads, and one reader."""

    def __init__(self) -> None:
        self.reader: Callable[[Connections], Any] | None = None
