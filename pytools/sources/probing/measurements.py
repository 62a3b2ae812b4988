"""The measurements of each path, and the signals that report them.

Rows are path indexes. Times are CLOCK_MONOTONIC nanoseconds. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.config import Probe, Windows
from pytools.errors import UsageError
from pytools.estimators.base_delays import FORWARD, KINDS, REVERSE, ROUND_TRIP, BaseDelays
from pytools.estimators.delays import STAMP_BOUND_NS, Figures, or_none, published, summarise
from pytools.estimators.distributions import histograms
from pytools.estimators.hop_counts import Hops
from pytools.estimators.offsets import Offset
from pytools.estimators.overtaken import LATE_NS, Overtaken, half_waited, waiting
from pytools.estimators.windows import MISSING, CountHistory, Growing, Rows, Samples, Times
from pytools.signals import Histogram, Path, PathDelay
from pytools.sources.probing.base_memory import Found, PathBase
from pytools.sources.probing.liveness import Liveness
from pytools.sources.probing.path_clocks import PathClocks
from pytools.sources.probing.paths import PinnedPath

SENT, RECEIVED, LOST, DUPLICATES, REORDERED, COUNTERS = range(6)

_DIRECTIONS: Final = np.array([[FORWARD], [REVERSE]])
_IS_REVERSE: Final = _DIRECTIONS == REVERSE

SLOW_NS: Final = 5_000_000  # queueing that is worth waking for

_MOST_SAMPLES: Final = 65_536
_LOSS_NS: Final = 60_000_000_000  # over which the loss that shows a load is counted, or the window of the base if less
_MS: Final = 1_000_000


class Bases(NamedTuple):
    """What queueing is counted from on some paths, as struct swerve_probe_path has it."""

    known: NDArray[np.bool_]  # whether the clocks and the base delays allow it
    there_ns: Times  # t2 - t1 of a probe that waits for nothing
    round_trip_ns: Times
    drift: Times  # the first grows by so many 2^-32 a nanosecond
    slack_ns: Times


class Window:
    """One length of time over which figures are given, and the counters at its beginning.

    Attributes
    ----------
    counted : ndarray of int64, optional
        How many samples of each path have been put into a histogram; None: this window gives none.
    """

    def __init__(self, length_ms: float, probe: Probe, with_histograms: bool) -> None:
        self.length_ns = int(length_ms * _MS)
        # Twice what is expected: after a pause of the network replies come in a burst.
        self.at_most = int(2 * length_ms / probe.interval_ms * probe.flows) + 8
        self.history = CountHistory(self.length_ns)
        self.counted = np.zeros(0, np.int64) if with_histograms else None


class Measurements(Growing):
    """Samples, minima and counters of every path.

    Parameters
    ----------
    remembered : callable, optional
        What a predecessor knew of the base delays of a path, at a time.

    Attributes
    ----------
    short, long : Window
        What figures are given over.
    counts : ndarray of int64, shape (paths, COUNTERS)
        Of each path, how many probes were SENT, RECEIVED, LOST, DUPLICATES and REORDERED.
    foreign : ndarray of bool
        By path index, whether the peer takes its stamps in user space.
    news : ndarray of bool
        By path index, whether anything was added since the short window was last told.
    clocks : PathClocks
        What is known of the peers' clocks.
    liveness : Liveness
        Misses and answers in a row.

    Raises
    ------
    UsageError
        If a window would hold more probes than there is room for.
    """

    def __init__(
        self,
        host: str,
        windows: Windows,
        probe: Probe,
        remembered: Callable[[PinnedPath, int], Found | None] | None = None,
    ) -> None:
        self._host, self._remembered = host, remembered
        self.short = Window(windows.short_ms, probe, with_histograms=False)
        self.long = Window(windows.long_ms, probe, with_histograms=True)
        depth = max(self.short.at_most, self.long.at_most)
        if depth > _MOST_SAMPLES:
            raise UsageError(
                f"a window of {windows.long_ms:g} ms with a probe every {probe.interval_ms:g} ms is too long",
                "shorten windows.long or probe less often",
            )
        base_ns = int(windows.base_s * 1_000_000_000)
        self._samples = Samples(depth, (KINDS,))
        self._base = BaseDelays(base_ns)
        self._fates = CountHistory(min(base_ns, _LOSS_NS))
        self._hops: list[Hops] = []  # since the last `find_base`
        self.clocks = PathClocks()
        self.liveness = Liveness(int(probe.interval_ms * _MS))
        self._own_clock: set[int] = set()
        self._paths: dict[int, Path] = {}
        self._ways: dict[int, PinnedPath] = {}  # every path so far, as it was last
        self.grow(0)

    def _allocate(self, rows: int) -> None:
        for part in (self._samples, self._base, self.clocks, self.liveness):
            part.grow(rows)
        self.counts = np.zeros((rows, COUNTERS), np.int64)
        self.foreign, self.news, self._measured = np.zeros((3, rows), np.bool_)

    def set_paths(self, paths: Sequence[PinnedPath], now_ns: int) -> None:
        """Measure these from now on; what is known of a path that comes back is kept.

        A path that was gone, or whose interface or source address is another one, may have another base delay.
        """
        self.grow(max((pinned.index for pinned in paths), default=-1) + 1)
        for pinned in paths:
            before = self._ways.get(pinned.index)
            if before is None:
                self._restore(pinned, now_ns)
            elif before.way != pinned.way or pinned.index not in self._paths:
                self._base.route_changed(pinned.index, now_ns)
            self._ways[pinned.index] = pinned
        self._paths = {pinned.index: pinned.path for pinned in paths}
        self._measured[:] = False
        self._measured[list(self._paths)] = True
        self.liveness.set_paths(paths)
        for pinned in paths:
            if pinned.shared_clock:
                self.clocks.share(pinned.index)
            elif pinned.index not in self._own_clock:
                self._own_clock.add(pinned.index)
                self.clocks.set(pinned.index, None, 0)

    def _restore(self, pinned: PinnedPath, now_ns: int) -> None:
        found = self._remembered(pinned, now_ns) if self._remembered is not None else None
        if found is not None:
            self._base.restore(pinned.index, found.base, found.at_ns, now_ns, found.changed)

    def bases(self, now_ns: int) -> Iterator[PathBase]:
        """What is known of the base delays, for a successor."""
        for index, pinned in self._ways.items():
            known = self._base.known(index)
            if known is not None:
                base = known if pinned.shared_clock else known.without_clocks()
                yield PathBase(pinned.path, *pinned.way, now_ns, index not in self._paths, base)

    def set_offset(self, path: int, offset: Offset | None, known_ns: int) -> None:
        """Say what is known of the clocks of a path, see `PathClocks.set`."""
        if self.clocks.set(path, offset, known_ns):
            self._samples.forget(np.array([path]))
            self._base.forget_clocks(path)

    def sent(self, by_path: Times) -> None:
        self.counts[:, SENT] += by_path
        self.news |= by_path > 0

    def count(self, counter: int, paths: Rows, more: int = 1) -> None:
        """Add to a counter for each path named, as often as it is named."""
        if len(paths):
            np.add.at(self.counts[:, counter], paths, more)
            self.news[paths] = True

    def add(self, paths: Rows, stamps_ns: Times, at_ns: Times, seen_ns: Times) -> None:
        """Add what the answered probes of these paths have shown, in the order in which the answers came.

        Parameters
        ----------
        stamps_ns : ndarray of int64, shape (2, n)
            Differences of stamps, whatever the clocks: forward and reverse; MISSING what is not known.
        at_ns : ndarray of int64, shape (2, n)
            Our own stamp in each difference.
        seen_ns : ndarray of int64, shape (n,)
            When (CLOCK_MONOTONIC) the answer came in.
        """
        if not len(paths):
            return
        values = np.empty((KINDS, len(paths)), np.int64)
        values[:ROUND_TRIP] = self.clocks.correct(paths, _IS_REVERSE, stamps_ns, at_ns, seen_ns)
        np.add(stamps_ns[FORWARD], stamps_ns[REVERSE], out=values[ROUND_TRIP])
        # Nothing of a path whose clocks are in doubt, and no round trip of a probe at whose peer a clock was stepped.
        kept = np.empty(values.shape, np.bool_)
        np.not_equal(stamps_ns, MISSING, out=kept[:ROUND_TRIP])
        np.greater_equal(values[ROUND_TRIP], 0, out=kept[ROUND_TRIP])
        if self.clocks.any_suspended or np.count_nonzero(kept) < kept.size:
            kept[ROUND_TRIP] &= kept[FORWARD] & kept[REVERSE]
            kept[:ROUND_TRIP] &= ~self.clocks.suspended(paths)
            values[~kept] = MISSING
        self._samples.add(paths, values, seen_ns)
        self._base.add(paths, values, kept, seen_ns)
        self.news[paths] = True

    def note_hops(self, hops: Hops) -> None:
        """Take note of how many hops probes have passed; `find_base` looks at them."""
        self._hops.append(hops)

    def longer_there(self, paths: Rows, than: Rows, now_ns: int) -> Times:
        """How much longer the base delays of these paths are on the way there than those of others to the same peer."""
        ours, others = self._base.at(paths, now_ns).delays[FORWARD], self._base.at(than, now_ns).delays[FORWARD]
        return np.where((ours != MISSING) & (others != MISSING), np.maximum(ours - others, 0), 0)

    def _overtaken(self, overtaken: Overtaken, figures: Figures, rows: Rows) -> tuple[Times, Times, Times]:
        """How many probes were overtaken, and how long half of them have waited in all, and on the way there."""
        answered, base = figures.samples[FORWARD], figures.base
        loss = np.maximum(self.liveness.loss(rows)[1], overtaken.losses.take(rows))
        known = (base.delays != MISSING) & (figures.delays[2] != MISSING)
        late = known & (np.where(known, figures.delays[2] - base.delays, 0) - base.slack > LATE_NS)
        counts, waited = half_waited(overtaken.paths, overtaken.leads_ns, answered, rows)
        told = overtaken.there_ns != MISSING
        _, there = half_waited(overtaken.paths[told], overtaken.there_ns[told], answered, rows)
        late[FORWARD] |= overtaken.late.take(rows)
        runs = overtaken.runs.take(rows)
        waited[~waiting(runs, loss, late.any(axis=0))] = MISSING
        there[~waiting(runs, loss, late[FORWARD])] = MISSING
        return counts, waited, there

    def find_base(self, now_ns: int) -> None:
        """Update the base delays, once a second."""
        fates = self._fates.growth(now_ns, self.counts[:, (LOST, RECEIVED)])
        lost = fates[:, 0] / np.maximum(fates.sum(axis=1), 1)
        hops, self._hops = self._hops, []
        self._base.update(now_ns, hops, self.clocks.clocks(np.arange(len(lost))).free, lost)

    def slow_from(self, now_ns: int, at_ns: int) -> Times:
        """By path index, the difference of stamps above which a probe has waited for `SLOW_NS`; MISSING: not known.

        Parameters
        ----------
        at_ns : int
            What the stamping clock shows now.
        """
        rows = np.arange(len(self.counts))
        base = self._base.at(rows, now_ns).delays[FORWARD]
        known = base != MISSING
        return np.where(known, self.clocks.difference(rows, np.where(known, base, 0) + SLOW_NS, at_ns), MISSING)

    def queueing_from(self, rows: Rows, now_ns: int, at_ns: int) -> Bases:
        """What the kernel has to know of some paths to tell how long a probe waits on its way there.

        Parameters
        ----------
        at_ns : int
            What the stamping clock shows now.
        """
        base, clocks = self._base.at(rows, now_ns), self.clocks.clocks(rows)
        known = (base.delays != MISSING).all(axis=0) & ~clocks.free
        there = self.clocks.difference(rows, np.where(known, base.delays[FORWARD], 0), at_ns)
        round_trip = np.where(known, base.delays[FORWARD] + base.delays[REVERSE], 0)
        drift, slack = self.clocks.drift(rows), 2 * STAMP_BOUND_NS + clocks.jitter_ns
        return Bases(known, there, round_trip, np.rint(drift * 2**32).astype(np.int64), slack)

    def skip(self, window: Window, now_ns: int) -> None:
        """Nobody wants to know: the next window begins where it should."""
        window.history.growth(now_ns, self.counts)
        self._uncounted(window)

    def signals(
        self,
        window: Window,
        now_ns: int,
        unix_ns: int,
        only_news: bool,
        overtaken: Overtaken,
        among: NDArray[np.bool_] | None = None,
    ) -> list[PathDelay]:
        """The state of the paths over a window that ends now.

        Parameters
        ----------
        overtaken : Overtaken
            The probes of this window that were, see `Sender.overtaken`.
        only_news : bool
            Leave out paths without an answer since the last call with this set.
        among : ndarray of bool, optional
            Leave out the other paths, by index.
        """
        grown = window.history.growth(now_ns, self.counts)
        chosen = self._measured if among is None else self._measured & among
        if only_news:
            chosen = chosen & self.news
            self.news[chosen] = False
        rows = chosen.nonzero()[0]
        if not len(rows):
            return []
        figures = summarise(self._samples, self._base, rows, now_ns - window.length_ns, now_ns, window.at_most)
        foreign, clocks = self.foreign.take(rows), self.clocks.clocks(rows)
        fresh = self._uncounted(window)
        queueing = (
            self._histograms(rows, fresh[rows], figures.base.delays) if fresh is not None else [[None] * len(rows)] * 2
        )
        overtakes, waited, waited_there = [0] * len(rows), [None] * len(rows), [None] * len(rows)
        if len(overtaken.paths):
            behind, both, there = self._overtaken(overtaken, figures, rows)
            overtakes = behind.tolist()
            waited, waited_there = or_none(both, both != MISSING), or_none(there, there != MISSING)
        columns = zip(
            rows.tolist(),
            *published(figures, clocks, foreign, now_ns, queueing),
            or_none(figures.round_trip_min, figures.round_trip_min != MISSING),
            self.clocks.states(rows),
            grown.take(rows, axis=0).tolist(),
            overtakes,
            waited,
            waited_there,
            self._base.reach(rows, now_ns).tolist(),
            strict=True,
        )
        return [
            PathDelay(
                host=self._host,
                at_ns=now_ns,
                unix_ns=unix_ns,
                path=self._paths[index],
                window_ns=window.length_ns,
                base_window_ns=reach,
                forward=there,
                reverse=back,
                round_trip_min_ns=round_trip,
                clock=clock,
                sent=numbers[SENT],
                received=numbers[RECEIVED],
                lost=numbers[LOST],
                duplicates=numbers[DUPLICATES],
                reordered=numbers[REORDERED],
                overtaken=behind,
                overtaken_p50_ns=lead,
                overtaken_forward_p50_ns=ahead,
                asymmetry_ns=asymmetric,
                asymmetry_bound_ns=bound,
            )
            for index, there, back, asymmetric, bound, round_trip, clock, numbers, behind, lead, ahead, reach in columns
        ]

    def _uncounted(self, window: Window) -> Times | None:
        """How many samples of each path no histogram has counted yet; from now on they are counted."""
        before, now = window.counted, self._samples.counts
        if before is None:
            return None
        window.counted = now.copy()
        grown = now.copy()
        grown[: len(before)] -= before
        return grown

    def _histograms(self, rows: Rows, fresh: Times, base: Times) -> Sequence[Sequence[Histogram | None]]:
        """Queueing of the newest samples of these paths, so many of each; None where there is no minimum."""
        values, known = (each[:ROUND_TRIP] for each in self._samples.newest(rows, fresh))
        known &= base[..., None] != MISSING
        waited = np.where(known, values - base[..., None], 0)
        return [
            [each if each.counts else None for each in histograms(*direction)]
            for direction in zip(waited, known, strict=True)
        ]
