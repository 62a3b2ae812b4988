"""Volleys: the requests of several sessions that leave in one system call, single or as coded pairs.

In a coded pair a session's second probe follows its first after a set spacing; whether the network kept that
spacing tells whether the two met the same delay. A third probe leads the pair: the first packet to a destination
finds caches cold and processors asleep, all along the way, and would differ from the second every time. With spacing
0 the probes of a session lie beside each other in one volley; otherwise the seconds are a volley of their own, sent
when the spacing is over. Times are CLOCK_MONOTONIC nanoseconds. One thread.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.windows import occurrence
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing import udp
from pytools.sources.probing.paths import PinnedPath

SINGLE, FIRST, SECOND = range(3)  # a probe's part in a coded pair

Session = tuple[int, PinnedPath]  # row, path


@dataclass(frozen=True)
class Volley:
    """Requests of one family and one source port that leave at one moment."""

    rows: NDArray[np.intp]
    turn: NDArray[np.intp]  # which probe of its session in this volley, from 0
    parts: NDArray[np.uint8]  # SINGLE, FIRST or SECOND
    ssids: NDArray[np.int64]
    errors: NDArray[np.int64]
    sock: socket.socket
    datagrams: udp.Datagrams
    packets: NDArray[Any]
    spaced: bool = False  # leaves a spacing after the volley before it, not right behind it


Salvo = tuple[Volley, ...]


PROBES: Final = 3  # to a pair: the one that leads it included


def pairs(sock: socket.socket, port: int, sessions: Sequence[Session], spaced: bool) -> Salvo:
    """A pair for each session whose peer has a clock of its own, a single probe for the others."""
    paired = [session for session in sessions if session[1].peer.clock != "shared"]
    if spaced and paired:
        first = _volley(sock, port, paired, [FIRST] * len(paired))
        second = _volley(sock, port, paired, [SECOND] * len(paired))
        return single(sock, port, sessions), first, replace(second, spaced=True)
    repeated: list[Session] = []
    parts: list[int] = []
    for session in sessions:
        own_clock = session[1].peer.clock != "shared"
        repeated += [session] * (PROBES if own_clock else 1)
        parts += [SINGLE, FIRST, SECOND] if own_clock else [SINGLE]
    return (_volley(sock, port, repeated, parts),)


def single(sock: socket.socket, port: int, sessions: Sequence[Session]) -> Volley:
    """One probe for each session."""
    return _volley(sock, port, sessions, [SINGLE] * len(sessions))


_OWN_WIDTH: Final = {4: slice(12, 16), 6: slice(0, 16)}


def _volley(sock: socket.socket, port: int, sessions: Sequence[Session], parts: Sequence[int]) -> Volley:
    """Everything about these sessions' requests that stays the same."""
    family = sessions[0][1].family
    datagrams = udp.Datagrams(family, len(sessions), wire.PROBE_BYTES)
    rows = np.array([row for row, _ in sessions], np.intp)
    remotes = np.array([udp.mapped(pinned.path.address) for _, pinned in sessions])
    sources = np.array([udp.mapped(pinned.source) for _, pinned in sessions])
    datagrams.names["address"] = remotes[:, _OWN_WIDTH[family]]
    datagrams.names["port"] = port
    datagrams.depart(len(sessions), [pinned.mark for _, pinned in sessions], sources[:, _OWN_WIDTH[family]])
    packets = wire.requests(datagrams.payload)
    wire.prepare_requests(packets)
    shared = [pinned.peer.clock == "shared" for _, pinned in sessions]
    errors = np.array([wire.error_estimate(STAMP_BOUND_NS, each) for each in shared])
    return Volley(rows, occurrence(rows), np.array(parts, np.uint8), rows + 1, errors, sock, datagrams, packets)
