"""How fast queue pairs carry their messages, from requests that were timed. Pure; arrays, one row per pair.

Times are int64 nanoseconds of CLOCK_MONOTONIC that the caller passes in, counters uint64 whose differences are taken
modulo 2^64, bandwidths float64 bits per second: 2 GiB of bits times 10^9 does not fit into 64 bits. One thread.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import MISSING

WINDOWS: Final = (1, 8, 32)  # messages
_CARRIED: Final = max(WINDOWS) - 1  # timed requests of a row that the next ones continue
_BITS: Final = 8e9  # bytes per nanosecond -> bits per second
_HELD_LATENCIES: Final = 1 << 18

Ints = NDArray[np.int64]
Counters = NDArray[np.uint64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]


def bits_per_s(amount: NDArray[Any], ns: NDArray[Any]) -> Floats:
    """Bytes and nanoseconds to bits per second; NaN where no time has passed."""
    passed = np.asarray(ns, np.float64)
    result = np.full(passed.shape, np.nan)
    np.divide(np.asarray(amount, np.float64) * _BITS, passed, out=result, where=passed > 0)
    return result


class Chain(NamedTuple):
    """Timed requests of many rows, one after the other: those known before, then the new ones."""

    rows: Rows
    number: Counters
    posted_ns: Ints
    completed_ns: Ints
    bytes: Counters
    fresh: Mask


class Served(NamedTuple):
    """What the new requests of a row say; one element per row that had any."""

    rows: Rows
    whole: Mask  # each of them follows one that was timed as well, so that nothing in between is missing
    requests: Ints
    bytes: Ints
    busy_ns: Ints  # time in which one of them was being served, not waiting behind an earlier one
    last_number: Counters
    ended_ns: Ints


def sliding(chain: Chain, messages: int) -> tuple[Rows, Floats, Ints]:
    """Windows of consecutive messages that end with a new one.

    Returns
    -------
    rows, bits_per_s, end_ns : ndarray
        Bytes of the window by the time from its first post to its last completion.
    """
    last = np.flatnonzero(chain.fresh)
    last = last[last >= messages - 1]
    first = last - (messages - 1)
    together = (chain.rows[first] == chain.rows[last]) & (
        chain.number[last] - chain.number[first] == np.uint64(messages - 1)
    )
    first, last = first[together], last[together]
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(chain.bytes, dtype=np.uint64)])
    passed_ns = chain.completed_ns[last] - chain.posted_ns[first]
    some = passed_ns > 0
    first, last = first[some], last[some]
    return chain.rows[last], bits_per_s(total[last + 1] - total[first], passed_ns[some]), chain.completed_ns[last]


def served(chain: Chain) -> Served:
    """How long the new requests took to serve, the time behind earlier ones taken off."""
    new = np.flatnonzero(chain.fresh)
    before = np.maximum(new - 1, 0)
    follows = (
        (new > 0) & (chain.rows[before] == chain.rows[new]) & (chain.number[new] - chain.number[before] == np.uint64(1))
    )
    begun_ns = np.where(follows, np.maximum(chain.posted_ns[new], chain.completed_ns[before]), chain.posted_ns[new])
    own_ns = np.maximum(chain.completed_ns[new] - begun_ns, 0)
    rows, start = np.unique(chain.rows[new], return_index=True)
    if not len(rows):
        nothing = np.zeros(0, np.int64)
        return Served(rows, nothing.astype(np.bool_), nothing, nothing, nothing, nothing.view(np.uint64), nothing)
    end = np.append(start[1:], len(new)) - 1
    whole = np.logical_and.reduceat(follows | (chain.number[new] == 0), start)
    return Served(
        rows,
        whole,
        (end - start + 1).astype(np.int64),
        np.add.reduceat(chain.bytes[new], start).astype(np.int64),
        np.add.reduceat(own_ns, start),
        chain.number[new[end]],
        chain.completed_ns[new[end]],
    )


class Figures(NamedTuple):
    """Bandwidths of one kind of window since they were last taken; one element per row, NaN or MISSING for none."""

    windows: Ints
    last: Floats
    mean: Floats
    smallest: Floats
    largest: Floats
    last_ns: Ints


class TimedRequests:
    """Windows and latencies of the timed requests of many rows."""

    def __init__(self, rows: int) -> None:
        self._number = np.zeros((rows, _CARRIED), np.uint64)
        self._posted = np.zeros((rows, _CARRIED), np.int64)
        self._completed = np.zeros((rows, _CARRIED), np.int64)
        self._bytes = np.zeros((rows, _CARRIED), np.uint64)
        self._carried = np.zeros(rows, np.int64)
        shape = (len(WINDOWS), rows)
        self._count, self._sum = np.zeros(shape, np.int64), np.zeros(shape)
        self._low, self._high = np.full(shape, np.inf), np.full(shape, -np.inf)
        self._last, self._last_ns = np.full(shape, np.nan), np.full(shape, MISSING)
        self._latencies: list[tuple[Rows, Ints]] = []
        self._held = 0
        self.latencies_dropped = 0

    def forget(self, rows: Rows) -> None:
        self._carried[rows] = 0
        self._clear(rows)
        self._latencies = [
            (where[keep], ns[keep]) for where, ns in self._latencies for keep in (~np.isin(where, rows),)
        ]
        self._held = sum(len(where) for where, _ in self._latencies)

    def add(self, rows: Rows, number: Counters, posted_ns: Ints, completed_ns: Ints, amount: Counters) -> Served:
        """Take new timed requests in; `rows` ascends, and within a row they are in order."""
        chain = self._chain(rows, number, posted_ns, completed_ns, amount)
        for place, messages in enumerate(WINDOWS):
            self._count_windows(place, *sliding(chain, messages))
        self._carry(chain)
        if self._held + len(rows) <= _HELD_LATENCIES:
            self._latencies.append((rows, completed_ns - posted_ns))
            self._held += len(rows)
        else:
            self.latencies_dropped += len(rows)
        return served(chain)

    def figures(self, place: int, rows: Rows) -> Figures:
        """The windows of WINDOWS[place] since `restart`."""
        count = self._count[place, rows]
        some = count > 0
        mean = np.where(some, self._sum[place, rows] / np.maximum(count, 1), np.nan)
        return Figures(
            count,
            self._last[place, rows],
            mean,
            np.where(some, self._low[place, rows], np.nan),
            np.where(some, self._high[place, rows], np.nan),
            self._last_ns[place, rows],
        )

    def latencies(self) -> tuple[Rows, Ints]:
        """Row and latency of every timed request since `restart`."""
        if not self._latencies:
            return np.zeros(0, np.intp), np.zeros(0, np.int64)
        return tuple(np.concatenate(part) for part in zip(*self._latencies, strict=True))  # type: ignore[return-value]

    def restart(self) -> None:
        self._clear(slice(None))
        self._latencies.clear()
        self._held = 0

    def _clear(self, rows: Any) -> None:
        self._count[:, rows], self._sum[:, rows] = 0, 0.0
        self._low[:, rows], self._high[:, rows] = np.inf, -np.inf
        self._last[:, rows], self._last_ns[:, rows] = np.nan, MISSING

    def _count_windows(self, place: int, rows: Rows, bps: Floats, end_ns: Ints) -> None:
        np.add.at(self._count[place], rows, 1)
        np.add.at(self._sum[place], rows, bps)
        np.minimum.at(self._low[place], rows, bps)
        np.maximum.at(self._high[place], rows, bps)
        self._last[place, rows] = bps  # of several of one row the newest stays
        self._last_ns[place, rows] = end_ns

    def _chain(self, rows: Rows, number: Counters, posted_ns: Ints, completed_ns: Ints, amount: Counters) -> Chain:
        present, new = np.unique(rows, return_counts=True)
        known = self._carried[present]
        length = known + new
        start = np.cumsum(length) - length
        fresh = np.ones(int(length.sum()), np.bool_)
        held = np.arange(_CARRIED) >= _CARRIED - known[:, None]  # carried ones stand at the right
        which, column = np.nonzero(held)
        old = start[which] + column - (_CARRIED - known[which])
        fresh[old] = False

        def joined(before: NDArray[Any], after: NDArray[Any]) -> NDArray[Any]:
            values = np.empty(len(fresh), before.dtype)
            values[old], values[fresh] = before[present[which], column], after
            return values

        return Chain(
            np.repeat(present, length),
            joined(self._number, number),
            joined(self._posted, posted_ns),
            joined(self._completed, completed_ns),
            joined(self._bytes, amount),
            fresh,
        )

    def _carry(self, chain: Chain) -> None:
        present, length = np.unique(chain.rows, return_counts=True)
        end = np.cumsum(length)
        known = np.minimum(length, _CARRIED)
        place = np.maximum(end[:, None] - _CARRIED + np.arange(_CARRIED), 0)
        for store, values in (
            (self._number, chain.number),
            (self._posted, chain.posted_ns),
            (self._completed, chain.completed_ns),
            (self._bytes, chain.bytes),
        ):
            if len(values):
                store[present] = values[place]
        self._carried[present] = known
