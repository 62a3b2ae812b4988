"""The recent oscillator frequencies of all hosts, one row per solve: what collocation is judged from.

A host's clock runs at its oscillator's frequency plus what its own time service adds (the slew), so `drift - slew` is
the oscillator, up to a term of the reference that is the same for all. Frequencies in parts per billion, relative to
the reference; times are nanoseconds of the caller's clock, passed in. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

_DEPTH: Final = 300
_WINDOW_NS: Final = 2_000_000_000
_LEAST_SHARE: Final = 0.4  # of a window, from one row to the next
_SLEWS: Final = 4  # rows that a window can see, and the one before


@dataclass(frozen=True)
class Frequencies:
    """Oscillator frequencies as the history holds them; NaN where one is not known."""

    hosts: tuple[str, ...]
    at_ns: NDArray[np.int64]  # (rows,), ascending
    ppb: Floats  # (hosts, rows)
    sigma_ppb: Floats  # (hosts, rows)
    window_ns: int  # each figure is an average over so long before its time


class DriftHistory:
    """The last rows of every host's oscillator frequency, in bounded memory.

    Parameters
    ----------
    depth : int
        How many rows are kept.
    window_ns : int
        How much time each drift was fitted over: a slew that changes meanwhile is in it by an unknown share.
    """

    def __init__(self, depth: int = _DEPTH, window_ns: int = _WINDOW_NS) -> None:
        self._depth, self._window_ns = depth, window_ns
        self._clear()

    def _clear(self) -> None:
        self._columns: dict[str, int] = {}
        self._rows = 0  # ever pushed
        self._at = np.zeros(self._depth, np.int64)
        self._ppb = np.empty((0, self._depth))
        self._variance = np.empty((0, self._depth), np.float32)
        self._slews = np.empty((0, _SLEWS))  # of the last rows

    def __len__(self) -> int:
        return min(self._rows, self._depth)

    def push(
        self, at_ns: int, hosts: Sequence[str], drift_ppb: ArrayLike, sigma_ppb: ArrayLike, slew_ppb: ArrayLike
    ) -> None:
        """Add a row; hosts that are not named, or have a NaN, are missing in it.

        One that comes too soon is left out: its window is nearly the last one's. A time that is not after the last one
        (a stepped clock) begins a new history.

        Parameters
        ----------
        at_ns : int
            When the drifts' windows ended.
        hosts : sequence of str
            In any order; the reference itself has a drift of 0.
        drift_ppb, sigma_ppb : array_like, shape (hosts,)
            Against the reference, positive when the host's clock is faster, and the standard deviation.
        slew_ppb : array_like, shape (hosts,)
            By how much the host's time service runs its clock faster than its oscillator.
        """
        if self._rows and at_ns <= self._last_ns:
            self._clear()
        elif self._rows and at_ns - self._last_ns < _LEAST_SHARE * self._window_ns:
            return
        drift, sigma, slew = (np.asarray(each, np.float64) for each in (drift_ppb, sigma_ppb, slew_ppb))
        columns = self._columns_of(hosts)
        place, before = self._rows % self._depth, (self._rows - 1) % self._depth
        self._slews[:, self._rows % _SLEWS] = np.nan
        self._slews[columns, self._rows % _SLEWS] = slew
        self._at[place] = at_ns
        straddled = self._change(columns, self._rows_within(at_ns))
        if self._rows:  # the slew may have been read a little late
            self._variance[columns, before] += self._change(columns, [self._rows - 1, self._rows])
        known = np.isfinite(drift) & np.isfinite(slew) & np.isfinite(sigma) & (sigma >= 0)
        self._ppb[:, place] = np.nan
        self._ppb[columns, place] = np.where(known, drift - slew, np.nan)
        self._variance[columns, place] = np.where(known, sigma**2 + straddled, 0)
        self._rows += 1
        if self._rows % self._depth == 0:
            self._forget()

    @property
    def _last_ns(self) -> int:
        return int(self._at[(self._rows - 1) % self._depth])

    def _rows_within(self, at_ns: int) -> list[int]:
        """The new row, those of the window that ends with it, and the one before them: what slews it saw."""
        rows = [self._rows]
        while len(rows) < _SLEWS and rows[-1] and self._at[rows[-1] % self._depth] > at_ns - self._window_ns:
            rows.append(rows[-1] - 1)
        return rows

    def _change(self, columns: NDArray[np.intp], rows: list[int]) -> Floats:
        """How far apart the known slews of some rows are, squared."""
        slews = self._slews[columns][:, [row % _SLEWS for row in rows]]
        spread: Floats = np.nan_to_num(np.fmax.reduce(slews, axis=1) - np.fmin.reduce(slews, axis=1))
        return spread**2

    def frequencies(self) -> Frequencies:
        """All of it, oldest row first, for the hosts that have any figure."""
        newest = self._rows % self._depth
        order = np.r_[newest : self._depth, 0:newest] if self._rows >= self._depth else np.arange(self._rows)
        hosts = tuple(self._columns)
        columns = np.fromiter(self._columns.values(), np.intp, len(hosts))
        select = np.ix_(columns, order)
        sigma = np.sqrt(self._variance[select].astype(np.float64))
        return Frequencies(hosts, self._at[order], self._ppb[select], sigma, self._window_ns)

    def _columns_of(self, hosts: Sequence[str]) -> NDArray[np.intp]:
        if len(set(hosts)) != len(hosts):
            raise ValueError("a host is named twice in one row")
        new = [host for host in hosts if host not in self._columns]
        if new:
            first = len(self._columns)
            self._columns |= {host: first + place for place, host in enumerate(new)}
            self._grow(len(self._columns))
        return np.fromiter((self._columns[host] for host in hosts), np.intp, len(hosts))

    def _grow(self, columns: int) -> None:
        more = max(columns, 2 * len(self._ppb)) - len(self._ppb) if columns > len(self._ppb) else 0
        if not more:
            return
        self._ppb = np.concatenate([self._ppb, np.full((more, self._depth), np.nan)])
        self._variance = np.concatenate([self._variance, np.zeros((more, self._depth), np.float32)])
        self._slews = np.concatenate([self._slews, np.full((more, _SLEWS), np.nan)])

    def _forget(self) -> None:
        """Drop the hosts that no row of the history has a figure of."""
        kept = [host for host, column in self._columns.items() if not np.isnan(self._ppb[column]).all()]
        if len(kept) == len(self._columns):
            return
        columns = np.fromiter((self._columns[host] for host in kept), np.intp, len(kept))
        self._columns = {host: place for place, host in enumerate(kept)}
        self._ppb, self._variance, self._slews = self._ppb[columns], self._variance[columns], self._slews[columns]
