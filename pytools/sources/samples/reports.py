"""Settled samples of one window, turned into `AppDelay` signals: per path, and per flow for the busiest.

A delay is the peer's stamp less ours less what the peer's clock is ahead. Delays and `seen_ns` are nanoseconds, the
latter of CLOCK_MONOTONIC. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.distributions import by_group
from pytools.estimators.matching import FRESH, JOINED, SPOILED, alike
from pytools.estimators.offsets import UNBOUNDED_NS, Offset
from pytools.estimators.windows import MISSING, SlidingMinimum
from pytools.kernel.addresses import text
from pytools.signals import AppDelay, ClockState, Path, Quantiles
from pytools.sources.samples.batches import TCP
from pytools.sources.samples.joins import Flows

MOST_FLOWS: Final = 32
_PERCENT: Final = (50, 90, 99, 100)
_STATES: Final[tuple[ClockState, ...]] = ("synchronised", "holdover", "free_running")  # from good to bad
_MOST_ROWS: Final = 4096  # of the table of minima; beyond, it starts anew
Place = tuple[bytes, int]  # destination address and interface index: a path


ONE_CLOCK: Final = Offset(0, 0, 0.0, 0.0, 0.0, bound_ns=0, hard_bound_ns=0)  # of a peer that reads the same one


class _Groups(NamedTuple):
    """The samples of one window, put together by path or by flow and path."""

    group: NDArray[np.int64]  # of each sample
    peer: NDArray[np.uint16]  # of each group
    place: NDArray[np.int64]  # row of each group in the table of minima


class Reports:
    """Makes the signals; remembers the minima of the paths and the states of the clocks.

    Parameters
    ----------
    peers : sequence of str
        Their hosts, by number.
    base_ns : int
        How far back the minimum behind queueing delays reaches.
    between : callable
        How the clock of a peer's host runs against ours; None when nothing is known.
    interface : callable
        The name of an interface by its index.
    """

    def __init__(
        self,
        host: str,
        peers: Sequence[str],
        base_ns: int,
        between: Callable[[str], Offset | None],
        path_of: Callable[[str, str], Path | None],
        interface: Callable[[int], str],
    ) -> None:
        self._host, self._peers = host, peers
        self._between, self._path_of, self._interface = between, path_of, interface
        self._base_ns = base_ns
        self._base = SlidingMinimum(base_ns)
        self._rows: dict[Place, int] = {}
        self._states: dict[int, ClockState] = {}
        self.drops = dict.fromkeys(("flows_left_out", "contradicted"), 0)

    def signals(self, settled: NDArray[Any], flows: Flows, window_ns: int, now_ns: int, unix_ns: int) -> list[AppDelay]:
        """All paths, then the busiest flows, over the window that ends now."""
        if not len(settled):
            return []
        end = alike(settled["flow"], settled["ifindex"].astype(np.int64) << 16 | settled["peer"])
        ends = settled[np.unique(end, return_index=True)[1]]  # a sample of each
        rows = [flows.row(number) for number in ends["flow"].tolist()]
        ifindexes = ends["ifindex"].tolist()
        places = [(row["destination"].tobytes(), ifindex) for row, ifindex in zip(rows, ifindexes, strict=True)]
        place = np.array([self._row(each) for each in places])
        # A path has a signal per protocol.
        named = {name: number for number, name in enumerate(dict.fromkeys(zip(places, _protocols(rows), strict=True)))}
        path = np.array([named[name] for name in zip(places, _protocols(rows), strict=True)])
        first = np.unique(path, return_index=True)[1]
        offsets = {int(peer): self._offset(int(peer)) for peer in np.unique(settled["peer"])}
        delays = _delays(settled, offsets)
        self._learn(settled, delays, offsets, place[end], now_ns)
        told = []
        for groups, count in (
            (_Groups(path[end], ends["peer"][first], place[first]), len(first)),
            (_Groups(end, ends["peer"], place), len(ends)),
        ):
            told.append(self._figures(settled, delays, groups, count, offsets, now_ns))
        common = (window_ns, now_ns, unix_ns)
        signals = [
            self._signal(figures, rows[index], ifindexes[index], True, *common)
            for figures, index in zip(told[0], first.tolist(), strict=True)
        ]
        busiest = sorted(range(len(ends)), key=lambda index: -told[1][index]["sampled"])
        self.drops["flows_left_out"] += max(len(busiest) - MOST_FLOWS, 0)
        signals += [
            self._signal(told[1][index], rows[index], ifindexes[index], False, *common)
            for index in busiest[:MOST_FLOWS]
        ]
        return signals

    def _row(self, place: Place) -> int:
        if place not in self._rows:
            if len(self._rows) >= _MOST_ROWS:
                self._rows, self._base = {}, SlidingMinimum(self._base_ns)
            self._rows[place] = len(self._rows)
            self._base.grow(len(self._rows))
        return self._rows[place]

    def _offset(self, peer: int) -> tuple[ClockState, Offset | None]:
        """The worse of what delays are worth now and were at the end of the window before; and the offset."""
        offset = self._between(self._peers[peer])
        state: ClockState = "free_running" if offset is None else offset.state
        before = self._states.get(peer, state)
        self._states[peer] = state
        return max(state, before, key=_STATES.index), offset

    def _learn(
        self,
        settled: NDArray[Any],
        delays: NDArray[np.int64],
        offsets: dict[int, tuple[ClockState, Offset | None]],
        place: NDArray[np.int64],
        now_ns: int,
    ) -> None:
        """Take the delays into the minima, but for those that the clocks forbid."""
        floor = np.zeros(len(self._peers), np.int64)
        for peer, (state, offset) in offsets.items():
            floor[peer] = -_bound(offset.bound_ns) if offset and state != "free_running" else np.iinfo(np.int64).max
        possible = (delays != MISSING) & (delays >= floor[settled["peer"]])
        # Nothing older than the window of the minima may enter them.
        possible &= settled["seen_ns"] > now_ns - self._base_ns
        self._base.add(place[possible], delays[possible], settled["seen_ns"][possible])

    def _figures(
        self,
        settled: NDArray[Any],
        delays: NDArray[np.int64],
        groups: _Groups,
        count: int,
        offsets: dict[int, tuple[ClockState, Offset | None]],
        now_ns: int,
    ) -> list[dict[str, Any]]:
        """What a signal says of its delays, per group."""
        joined = settled["fate"] == JOINED
        known = joined & (delays != MISSING)
        found = by_group(delays[known], groups.group[known], count, _PERCENT)
        counts = [
            np.bincount(groups.group[settled["fate"] == fate], minlength=count).tolist()
            for fate in (JOINED, SPOILED, FRESH)
        ]
        base, _ = self._base.at(groups.place, now_ns)
        made = []
        for index, (joins, ambiguous, unmatched) in enumerate(zip(*counts, strict=True)):
            state, offset = offsets[int(groups.peer[index])]
            minimum, least = int(found.minimum[index]), int(base[index])
            bound = None if offset is None or state == "free_running" else _bound(offset.bound_ns)
            usable = bound is not None and minimum != MISSING
            if bound is not None and usable and minimum < -bound:  # the clocks are not what they are said to be
                self.drops["contradicted"] += 1
                usable = False
            some = found.percentiles[:, index].tolist()
            facts = some if usable and state == "synchronised" else None
            waited = [each - least for each in some] if usable and least != MISSING else None
            hard = offset is not None and offset.hard_bound_ns < UNBOUNDED_NS and state == "synchronised"
            made.append(
                {
                    "clock": state,
                    "owd": _quantiles(joins, facts),
                    "queueing": _quantiles(joins, waited),
                    "bound_ns": bound if state == "synchronised" else None,
                    "hard_bound_ns": _bound(offset.hard_bound_ns) if offset and hard else None,
                    "sampled": joins + ambiguous + unmatched,
                    "joined": joins,
                    "ambiguous": ambiguous,
                    "unmatched": unmatched,
                }
            )
        return made

    def _signal(
        self,
        figures: dict[str, Any],
        flow: np.void,
        ifindex: int,
        whole_path: bool,
        window_ns: int,
        now_ns: int,
        unix_ns: int,
    ) -> AppDelay:
        remote = text(flow["destination"].tobytes())
        return AppDelay(
            host=self._host,
            at_ns=now_ns,
            unix_ns=unix_ns,
            path=self._path_of(remote, self._interface(ifindex)),
            protocol="tcp" if flow["protocol"] == TCP else "udp",
            local="" if whole_path else text(flow["source"].tobytes()),
            local_port=0 if whole_path else int(flow["source_port"]),
            remote="" if whole_path else remote,
            remote_port=0 if whole_path else int(flow["destination_port"]),
            window_ns=window_ns,
            **figures,
        )


def _delays(settled: NDArray[Any], offsets: dict[int, tuple[ClockState, Offset | None]]) -> NDArray[np.int64]:
    """The one-way delay of each joined sample; MISSING where there is none."""
    delays = np.full(len(settled), MISSING)
    for peer, (_, offset) in offsets.items():
        rows = np.flatnonzero((settled["peer"] == peer) & (settled["fate"] == JOINED))
        if offset is None or not len(rows):
            continue
        ours, theirs = settled["at_ns"][rows], settled["far_at_ns"][rows]
        # What the peer's clock was ahead by when the bytes arrived there, not when they left: first about when.
        arrived = theirs - offset.at(ours)
        delays[rows] = theirs - offset.at(arrived) - ours
    return delays


def _bound(offset_bound_ns: int) -> int:
    """What a delay is good to: the offset, and the stamps at both ends."""
    return offset_bound_ns + 2 * STAMP_BOUND_NS


def _quantiles(samples: int, values: list[int] | None) -> Quantiles:
    """Nothing negative is given as a fact: what is within the bound of zero is zero."""
    return Quantiles(samples, *([None] * 4 if values is None else [max(value, 0) for value in values]))


def _protocols(rows: Sequence[np.void]) -> list[int]:
    return [int(row["protocol"]) for row in rows]
