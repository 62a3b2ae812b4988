"""Base delays: what a path takes when nothing waits on it. A queueing delay is what a probe takes beyond that.

A minimum over a sliding window is no base delay: it takes in a queue that stands longer than the window. Here the floor
of the round trip is remembered for as long as the route is the same. The round trip is free of clock offset, drift and
steps; the smallest round trip of the window above its floor is therefore how much stands in both directions together.
The base of each direction lies between the minimum of its window and so much below it.

The floor rises only on evidence of another route (`BaseDelays.update` has the rules). Nanoseconds throughout; times are
CLOCK_MONOTONIC. Pure arrays, one row per path; one thread. `add` is for every reading of the ring, `update` for once a
second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from pytools.estimators.hop_counts import LOOK_NS, HopCounts, Hops
from pytools.estimators.remembered_bases import RememberedBase, RouteChange
from pytools.estimators.windows import MISSING, NO_MINIMUM, PARTS, Growing, Rows, SlidingMinimum, Times, pick

FORWARD, REVERSE, ROUND_TRIP, KINDS = range(4)

# Parts of the window that must show a delay before it counts as low: a wrong stamp is in one. Of a path that is new,
# half of its parts: what soon queues must not be its base.
CONFIRMED: Final = 4
_LASTING: Final = 10  # updates that must have seen a floor before it is kept for good
_FORGET_NS: Final = 3_600_000_000_000  # a floor that fewer have seen is forgotten so long after the last did
_FULL: Final = PARTS * 3 // 4  # parts with samples that make a window
_ODD: Final = 2  # parts of the window that a spread leaves out: a busy machine delays all probes of a part at times
_LEAST_NS: Final = 10_000  # a smaller standing excess follows the window: temperature and idle states make as much
_LEAST_SHARE: Final = 128  # or a smaller share of the floor: one in so many
_CALM_TIMES: Final = 4  # without load the smallest round trips spread at most so many times as far as they did before
_CALM_NS: Final = 1_000  # and this
_CALM_RISE: Final = 1_000  # the smallest spread seen is let rise by one in so many per update without load
_NEWEST: Final = 4  # a spread is that of no load only if the newest part, one in so many, is as low as the floor
_SAME_SHARE: Final = 16  # both directions took the same step if they differ by one in so many of the round trip's
_MOST_LOST: Final = 0.01  # share of the probes that are lost without load; a full queue loses more
_ANY_DRIFT_NS: Final = 1 << 40  # nothing is known of how what stands is divided between the directions
_DRIFT_SHARE: Final = 10_000  # free clocks run apart by one part in so many


class Base(NamedTuple):
    """Base delays of some paths, forward and reverse: shape (2, paths)."""

    delays: Times  # MISSING where nothing is known
    taken_ns: Times  # when the samples behind them came
    slack: Times  # they may be wrong by so much, besides errors of stamps and clocks


class BaseDelays(Growing):
    """The base delay of each path and direction, from minima over `window_ns`."""

    def __init__(self, window_ns: int) -> None:
        self.window_ns = window_ns
        self._minima = SlidingMinimum(window_ns)  # of path p and kind k in row KINDS * p + k, without ROUND_TRIP + 1
        self._updated_ns = 0
        self._hops = HopCounts()
        self._changes: dict[int, tuple[int, RouteChange]] = {}  # since when
        self.grow(0)

    def _allocate(self, paths: int) -> None:
        self._minima.grow(paths * KINDS)
        self._floor = np.full(paths, MISSING)  # of the round trip
        self._since_ns = np.zeros(paths, np.int64)  # since when the floor can only fall
        self._support = np.zeros(paths, np.int64)  # how many updates have seen it
        self._reached_ns = np.zeros(paths, np.int64)  # when it was seen last
        self._calm = np.full(paths, MISSING)  # spread of the smallest round trips without load
        self._steady_ns = np.zeros(paths, np.int64)  # since when both directions stand by the same without load; 0: no
        self._drifted = np.zeros(paths, np.int64)  # how far free clocks may have drifted apart since something stands
        self._base = np.full((2, paths), MISSING)
        self._taken_ns, self._slack, self._standing = np.zeros((3, 2, paths), np.int64)

    def add(self, paths: Rows, delays_ns: Times, kept: NDArray[np.bool_], seen_ns: Times) -> None:
        """Take samples into account.

        Parameters
        ----------
        paths, seen_ns : ndarray of int, shape (n,)
        delays_ns, kept : ndarray, shape (3, n)
            Forward, reverse and round trip, and which of them are known.
        """
        rows, times = KINDS * paths + _KIND, np.broadcast_to(seen_ns, kept.shape)
        self._minima.add(rows[kept], delays_ns[kept], times[kept])

    def at(self, paths: Rows, now_ns: int) -> Base:
        """Base delays as they are known now; of a path that is new the minimum of what there is."""
        base = Base(*(each.take(paths, axis=1) for each in (self._base, self._taken_ns, self._slack)))
        unknown = base.delays == MISSING
        if np.count_nonzero(unknown):
            least, taken_ns = self._minima.at(KINDS * paths + _KIND, now_ns)
            known, floor = least != MISSING, self._floor.take(paths)
            compared = known[ROUND_TRIP] & (floor != MISSING)  # then as `_project` has it
            excess = np.where(compared, np.maximum(least[ROUND_TRIP] - floor, 0), 0)
            standing = self._standing.take(paths, axis=1)
            standing = np.where(compared, np.minimum(standing, excess), standing)
            fresh = np.where(known[:ROUND_TRIP], least[:ROUND_TRIP] - standing, MISSING)
            slack = np.maximum(base.slack, excess)
            base = Base(*np.where(unknown, [fresh, taken_ns[:ROUND_TRIP], slack], base))
        return base

    def reach(self, paths: Rows, now_ns: int) -> Times:
        """How far back the base delays of these paths reach: to when their route was last found to be another one."""
        since = self._since_ns.take(paths)
        return np.where(since > 0, np.maximum(now_ns - since, self.window_ns), self.window_ns)

    def forget_clocks(self, path: int) -> None:
        """Earlier one-way delays of this path do not compare with later ones; round trips do.

        What stood in each direction is taken to stand there still, until the path is empty again.
        """
        self._minima.forget(KINDS * path + _DIRECTION[:, 0])
        self._base[:, path] = MISSING
        if path in self._changes:
            since_ns, change = self._changes[path]
            self._changes[path] = since_ns, replace(change, base_ns=None)

    def route_changed(self, path: int, now_ns: int) -> None:
        """Our own route along this path is another one, or it was gone: both directions may have another base."""
        self._change(path, now_ns, (True, True), self._queued(path, now_ns, now_ns))

    def _change(self, path: int, began_ns: int, directions: tuple[bool, bool], queued: bool) -> None:
        if self._floor[path] == MISSING:
            return  # nothing that could be too low
        floor = int(self._floor[path])
        known = bool((self._base[:, path] != MISSING).all() and (self._slack[:, path] <= _tolerance(floor)).all())
        base = (int(self._base[0, path]), int(self._base[1, path])) if known else None
        if path in self._changes:
            _, before = self._changes[path]
            floor, base, queued = before.floor_ns, before.base_ns, before.queued or queued
            directions = (before.directions[0] or directions[0], before.directions[1] or directions[1])
        self._changes[path] = began_ns, RouteChange(floor, base, directions, queued)
        self._minima.forget(KINDS * path + _KIND[:, 0])
        self._steady_ns[path] = 0

    def _queued(self, path: int, now_ns: int, began_ns: int) -> bool:
        """Whether something waited on a path just before its route changed."""
        minima, times = self._minima.parts(np.array([KINDS * path + ROUND_TRIP]), now_ns)
        just = (minima != NO_MINIMUM) & (times < began_ns) & (times >= began_ns - 4 * LOOK_NS)
        if just.any():
            floor = int(self._floor[path])
            return bool(minima[just].min() - floor > _tolerance(floor))
        return bool(self._standing[:, path].any())

    # ---- over a restart ----

    def known(self, path: int) -> RememberedBase | None:
        """What a successor can begin with; None of a path whose floor is not known yet."""
        if self._floor[path] == MISSING:
            return None
        calm = int(self._calm[path])
        usual, beside = self._hops.known(path)
        return RememberedBase(
            floor_ns=int(self._floor[path]),
            since_ns=int(self._since_ns[path]),
            support=int(self._support[path]),
            reached_ns=int(self._reached_ns[path]),
            calm_ns=None if calm == MISSING else calm,
            drifted_ns=int(self._drifted[path]),
            standing_ns=_pair(self._standing, path),
            slack_ns=_pair(self._slack, path),
            base_ns=_pair(self._base, path) if (self._base[:, path] != MISSING).all() else None,
            hops=usual,
            beside=beside,
            change=self._changes[path][1] if path in self._changes else None,
        )

    def restore(self, path: int, known: RememberedBase, at_ns: int, now_ns: int, changed: bool) -> None:
        """Begin with what a predecessor knew of a new path: it is as if this were its next update.

        Nobody saw what waited meanwhile. So a route that changed meanwhile counts as changed under a queue.

        Parameters
        ----------
        at_ns : int
            When the predecessor knew it.
        changed : bool
            Whether our own route along this path may be another one.
        """
        self._floor[path], self._since_ns[path] = known.floor_ns, known.since_ns
        self._support[path], self._reached_ns[path] = known.support, known.reached_ns
        self._calm[path] = MISSING if known.calm_ns is None else known.calm_ns
        self._drifted[path] = known.drifted_ns if known.base_ns is not None else _ANY_DRIFT_NS
        self._standing[:, path], self._slack[:, path] = known.standing_ns, known.slack_ns
        if known.base_ns is not None:
            self._base[:, path], self._taken_ns[:, path] = known.base_ns, at_ns
        self._hops.restore(path, known.hops, known.beside)
        if known.change is not None:  # to be seen for a whole window again
            self._changes[path] = now_ns, known.change
        if changed:
            self._change(path, now_ns, (True, True), queued=True)

    # ---- once a second ----

    def update(self, now_ns: int, hops: Sequence[Hops], free: NDArray[np.bool_], lost: NDArray[np.float64]) -> None:
        """Find the base delays anew.

        The floor of a path's round trip falls to what CONFIRMED parts of the window show. It rises when

        - the hop counts of all probes are others than before for three updates in a row, or our own route changed
          (`route_changed`): to the minimum since then, settled after a window. Where something waited at that moment,
          only directions with another hop count rise, and they settle after a window without load. Until then `slack`
          reaches down to the old base.
        - both directions stand above their bases by the same, without load, for a whole window after a whole window.
        - it was seen by few updates and by none for an hour: a wrong stamp.

        Without load means: the smallest round trips of the window spread hardly further than they ever did when nothing
        stood on the path, and no more than 1 % of its probes are lost.

        Parameters
        ----------
        hops : sequence of Hops
            Of all probes since the last update.
        free : ndarray of bool
            By path, whether nothing is known of how its clocks drift.
        lost : ndarray of float
            By path, the share of the probes of the last window that was lost.
        """
        paths = np.arange(len(self._floor))
        elapsed_ns = now_ns - self._updated_ns if self._updated_ns else 0
        for other in self._hops.look(now_ns, hops, self._queued):
            self._change(*other)
        minima, times = self._minima.parts(KINDS * paths[:, None] + _KIND[:, 0], now_ns)
        counts = (minima != NO_MINIMUM).sum(axis=2)
        ordered = np.sort(minima, axis=2)
        rank = np.where(counts >= CONFIRMED, np.minimum(CONFIRMED - 1, (counts - 1) // 2), 0)
        low = pick(ordered, rank)
        taken_ns = np.take_along_axis(times, (minima == low[..., None]).argmax(axis=2)[..., None], axis=2)[..., 0]
        low[counts == 0] = MISSING
        self._taken_ns = np.where(counts[:, :ROUND_TRIP] > 0, taken_ns[:, :ROUND_TRIP], self._taken_ns.T).T.copy()
        seen = (minima[:, ROUND_TRIP], times[:, ROUND_TRIP])
        full = counts[:, ROUND_TRIP] >= _FULL
        top = pick(ordered[:, ROUND_TRIP], np.maximum(counts[:, ROUND_TRIP] - 1 - _ODD, 0))
        spread = np.where(full, top - low[:, ROUND_TRIP], 0)
        self._lower(now_ns, low[:, ROUND_TRIP], counts[:, ROUND_TRIP] >= CONFIRMED, seen)
        quiet = full & (lost <= _MOST_LOST)
        quiet &= spread <= _CALM_TIMES * np.where(self._calm == MISSING, 0, self._calm) + _CALM_NS
        self._settle(now_ns, low, quiet)
        self._project(low, free, elapsed_ns)
        self._compare(now_ns, low, quiet)
        highest = self._floor + _tolerance(self._floor)
        newest = np.where(times[:, ROUND_TRIP] > now_ns - self.window_ns // _NEWEST, minima[:, ROUND_TRIP], NO_MINIMUM)
        still = newest.min(axis=1) <= highest  # nothing began to stand in the window
        calm = full & (self._floor != MISSING) & (low[:, ROUND_TRIP] <= highest) & still
        usual = np.where(self._calm == MISSING, spread, self._calm)
        usual += np.where(quiet, usual // _CALM_RISE + 1, 0)
        self._calm = np.where(calm, np.minimum(usual, spread), self._calm)
        self._updated_ns = now_ns

    def _lower(self, now_ns: int, low: Times, confirmed: NDArray[np.bool_], seen: tuple[Times, Times]) -> None:
        """Let floors fall; forget those that were hardly ever seen."""
        confirmed = confirmed.copy()
        confirmed[list(self._changes)] = False
        new = confirmed & (self._floor == MISSING)
        old = (self._floor != MISSING) & (self._support < _LASTING) & (now_ns - self._reached_ns > _FORGET_NS)
        falls = confirmed & (low < self._floor)
        sinks = new | (confirmed & old) | (falls & (self._floor - low > _tolerance(low)))
        self._since_ns = np.where(new, now_ns, self._since_ns)
        self._floor = np.where(sinks | falls, low, self._floor)
        minima, times = seen
        near = minima - self._floor[:, None] <= _tolerance(self._floor)[:, None]
        reached = (self._floor != MISSING) & (near & (minima != NO_MINIMUM) & (times > self._updated_ns)).any(axis=1)
        self._support = np.where(sinks, 0, np.minimum(self._support + reached, _LASTING))
        self._reached_ns = np.where(reached | sinks, now_ns, self._reached_ns)

    def _project(self, low: Times, free: NDArray[np.bool_], elapsed_ns: int) -> None:
        """Find the base of each direction, between its minimum and what stands in both directions below that."""
        known = (self._floor != MISSING) & (low[:, ROUND_TRIP] != MISSING)
        known[list(self._changes)] = False
        excess = np.where(known, np.maximum(low[:, ROUND_TRIP] - self._floor, 0), 0)
        stands = excess > _tolerance(self._floor)
        below = np.where(stands, excess, 0)
        drift = np.where(free, elapsed_ns // _DRIFT_SHARE, 0)
        self._drifted = np.where(stands, self._drifted + drift, 0)
        for direction in (FORWARD, REVERSE):
            least, base = low[:, direction], self._base[direction]
            some = known & (least != MISSING)
            lost = base == MISSING
            wanted = np.where(lost, least - self._standing[direction], base)
            found = np.clip(wanted, least - below, least)
            slack = np.where(lost, excess, np.minimum(excess, self._slack[direction] + drift))
            self._base[direction] = np.where(some, found, base)
            self._slack[direction] = np.where(some, np.where(stands, slack, excess), self._slack[direction])
            self._standing[direction] = np.where(some, least - found, self._standing[direction])

    def _settle(self, now_ns: int, low: Times, quiet: NDArray[np.bool_]) -> None:
        """Go on with paths whose route is another one."""
        for path, (since_ns, change) in list(self._changes.items()):
            least = [int(each) for each in low[path]]
            if MISSING in least:
                continue
            grown = max(least[ROUND_TRIP] - change.floor_ns, 0)
            held = change.base_ns or (least[FORWARD] - grown, least[REVERSE] - grown)
            moves = change.directions if change.queued and change.base_ns is not None else (True, True)
            rises = [
                max(least[direction] - held[direction], 0) if moves[direction] else 0
                for direction in (FORWARD, REVERSE)
            ]
            floor = least[ROUND_TRIP] if all(moves) else min(least[ROUND_TRIP], change.floor_ns + sum(rises))
            stands = least[ROUND_TRIP] - floor
            self._floor[path] = floor
            for direction in (FORWARD, REVERSE):
                top = least[direction]
                base = min(max(held[direction], top - stands), top) if not moves[direction] else top
                self._base[direction, path], self._slack[direction, path] = base, rises[direction]
                self._standing[direction, path] = top - base
            passed = now_ns - since_ns >= self.window_ns and (quiet[path] or not change.queued)
            if passed or sum(rises) <= int(_tolerance(change.floor_ns)):
                del self._changes[path]
                self._slack[:, path] = 0
                self._since_ns[path], self._support[path], self._reached_ns[path] = since_ns, 0, now_ns

    def _compare(self, now_ns: int, low: Times, quiet: NDArray[np.bool_]) -> None:
        """Find out where both directions stand by the same without load: that is another route, and no queue."""
        above = low[:, :ROUND_TRIP].T - self._base
        both, allowed = above.sum(axis=0), _tolerance(self._floor)
        same = quiet & (self._floor != MISSING) & (low != MISSING).all(axis=1) & (self._base != MISSING).all(axis=0)
        same &= low[:, ROUND_TRIP] - self._floor > allowed
        differ = np.abs(above[0] - above[1]) + 2 * self._drifted
        same &= differ <= np.maximum(allowed, both // _SAME_SHARE)
        same[list(self._changes)] = False
        self._steady_ns = np.where(same, np.where(self._steady_ns > 0, self._steady_ns, now_ns), 0)
        for path in np.flatnonzero(same & (now_ns - self._steady_ns >= self.window_ns)).tolist():
            self._floor[path] = low[path, ROUND_TRIP]
            self._base[:, path] = low[path, :ROUND_TRIP]
            self._slack[:, path] = self._standing[:, path] = 0
            self._since_ns[path], self._support[path], self._reached_ns[path] = self._steady_ns[path], 0, now_ns
            self._steady_ns[path] = 0


_KIND: Final = np.arange(KINDS)[:, None]
_DIRECTION: Final = np.arange(ROUND_TRIP)[:, None]


def _tolerance(floor_ns: Any) -> Any:
    """What may stand above a floor without being a queue."""
    return np.where(floor_ns == MISSING, 0, np.maximum(_LEAST_NS, floor_ns // _LEAST_SHARE))


def _pair(table: Times, path: int) -> tuple[int, int]:
    return int(table[FORWARD, path]), int(table[REVERSE, path])
