"""Clocks: fits a line to the coded probes of each path, joins the lines of all hosts, and says what delays rest on.

A few paths are fitted per tick, so that answers do not wait long for arithmetic. Several paths to one peer take turns,
two rounds each. Rounds follow each other more quickly after a step, a doubt or a new path, the first of them at once,
and then all paths are fitted in each. `now_ns` is CLOCK_MONOTONIC; epochs
are of stamping clocks (the same but in a lab). One thread, the agent's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from pytools.config import AgentConfig
from pytools.estimators.clocks import fit_edge, headed
from pytools.estimators.collocation import groups
from pytools.estimators.congested import Floor, doubted, noise_ns, tells_round_trip, tempered
from pytools.estimators.drift_history import DriftHistory
from pytools.estimators.drift_trends import DriftTrend
from pytools.estimators.offsets import UNBOUNDED_NS, Offset
from pytools.ipc.bus import Bus
from pytools.ipc.hosts import HostBus
from pytools.signals import Clock, Collocation, header
from pytools.sources.clocks import messages, slew
from pytools.sources.clocks.chrony import ChronyFeed, correction_ns, realtime_difference_ns
from pytools.sources.clocks.fitted import Fitted
from pytools.sources.clocks.messages import Edge, Edges, HostClock
from pytools.sources.clocks.timescale import Timescale
from pytools.sources.probing.mesh import ProbeMesh
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.source import RELAXED_NS, Source, pace_ns
from pytools.units import MS

_FITS: Final = 8  # paths fitted in one tick: the second and following find everything in the caches
_MOST_TICK_NS: Final = 100 * MS
_QUICKER: Final = 8  # times as many rounds
_QUICK_NS: Final = 4_000 * MS  # after the last step or new path: until its round trip is known as well
_DOUBTFUL_NS: Final = 1_000 * MS  # the same after a doubt that no step explains
_LEAST_LIFE_NS: Final = 1_500 * MS  # of an edge that no newer one replaces
_LEAST_SPAN_NS: Final = 400 * MS  # of a path's first line: the drift that a few pairs show is their queueing
_COLLOCATION_NS: Final = 5_000 * MS
_DOUBT_NS: Final = 6_000 * MS  # longer than any packet waits to be reported


class ClockSource(Source):
    """Keeps every peer's clock against ours up to date.

    Parameters
    ----------
    mesh : ProbeMesh
        Whose coded probes are fitted, and which gets the result.
    hosts : HostBus, optional
        The way to the other hosts; without one, each peer is compared with us alone.
    """

    def __init__(self, config: AgentConfig, mesh: ProbeMesh, hosts: HostBus | None, bus: Bus) -> None:
        self._config, self._settings, self._mesh, self._hosts, self._bus = config, config.clocks, mesh, hosts, bus
        self._path_clocks = mesh.measurements.clocks
        self._interval_ns = int(config.clocks.round_ms * MS)
        self._window_ns = int(config.clocks.window_ms * MS)
        self._life_ns = max(_LEAST_LIFE_NS, 5 * self._interval_ns // 2)
        # the common time of all hosts, as it was last told
        self.timescale = Timescale(config.host, self._interval_ns, config.clocks.reference, self._window_ns)
        self._fitted: dict[int, Fitted] = {}  # by path index
        self._floors: dict[int, Floor] = {}
        self._trends: dict[int, DriftTrend] = {}
        self._doubted_ns: dict[str, int] = {}  # peer -> when its clock or ours was last seen to be stepped
        self._waiting: list[PinnedPath] = []
        self._turn = 0  # of the paths to one peer, whether those of even or of odd number are fitted
        self._paths: set[int] = set()  # indexes, of the last round
        self._since_ns: dict[int, int] = {}  # by path index: from when on its probes are of the present time
        self._round_ns = 0
        self._quick_until_ns = 0
        self._contradictions = 0
        self._refused = 0
        self._unclear = 0
        self._slew_ppb: float | None = None
        self._history = DriftHistory(window_ns=self._window_ns)
        self._collocation_ns = 0
        self._chrony = ChronyFeed(config.clocks.chrony_socket) if config.clocks.chrony_socket else None

    def tick(self, now_ns: int) -> int:
        """Fit the next paths; once all are fitted, send them to the other hosts. Read their messages."""
        self._hear(now_ns)
        if self._contradictions != self._path_clocks.contradictions:
            self._contradictions = self._path_clocks.contradictions
            self.notice_doubts(now_ns)
        begins = not self._waiting and now_ns >= self._round_ns
        if begins:
            paths = [pinned for pinned in self._mesh.paths.current if self._mesh.has_own_clock(pinned)]
            self._note_paths({pinned.index for pinned in paths}, now_ns)
            pause_ns = self._pause_ns(now_ns)
            self._round_ns = now_ns + pause_ns
            self._waiting = self._in_turn(paths, now_ns) if pause_ns == self._interval_ns else paths
        if begins or self._waiting:
            for pinned in self._waiting[:_FITS]:
                self._fit(pinned, now_ns)
            del self._waiting[:_FITS]
            if not self._waiting:
                self._tell(now_ns)
        if not self._waiting:
            calm_ns = pace_ns(self._bus, "clock", RELAXED_NS, self._interval_ns)
            return min(self._round_ns, now_ns + (_MOST_TICK_NS if now_ns < self._quick_until_ns else calm_ns))
        step_ns = (self._round_ns - now_ns) // (len(self._waiting) // _FITS + 2)
        return now_ns + min(_MOST_TICK_NS, max(step_ns, 0))

    def late_ns(self) -> int:
        """How late we may be called: where there are many paths a round takes many ticks."""
        return 0 if self._waiting else _MOST_TICK_NS

    def _in_turn(self, paths: Sequence[PinnedPath], now_ns: int) -> list[PinnedPath]:
        """Of the paths to one peer every other one; the rest rest on what is known of the peer's clock by others."""
        self._turn ^= 1
        number: Counter[str] = Counter()
        chosen: list[PinnedPath] = []
        rest: list[PinnedPath] = []
        for pinned in paths:
            number[pinned.peer.name] += 1
            (chosen if number[pinned.peer.name] & 1 == self._turn else rest).append(pinned)
        fitted = {pinned.peer.name for pinned in chosen}
        for pinned in rest:
            if pinned.peer.name not in fitted:  # its only path
                chosen.append(pinned)
            elif not self._path_clocks.in_doubt(pinned.index):
                self._mesh.measurements.set_offset(pinned.index, self.between(pinned.peer.name, now_ns), now_ns)
        return chosen

    def _pause_ns(self, now_ns: int) -> int:
        """Time from one round to the next: less while clocks are unsettled or the reference is silent."""
        silent_ns = now_ns - self.timescale.told_ns if self.timescale.reference else 0
        silent = 3 * self._interval_ns < 2 * silent_ns < 8 * self._interval_ns
        return self._interval_ns // _QUICKER if silent or now_ns < self._quick_until_ns else self._interval_ns

    def _hurry(self, now_ns: int, for_ns: int = _QUICK_NS) -> None:
        """Let rounds follow each other quickly for a while, and the first of them at once."""
        if now_ns >= self._quick_until_ns:
            self._round_ns = now_ns
        self._quick_until_ns = max(self._quick_until_ns, now_ns + for_ns)

    # ---- our own edges ----

    def _fit(self, pinned: PinnedPath, now_ns: int) -> None:
        """Fit the line of one path, and let its delays rest on what is known now."""
        before = self._fitted.get(pinned.index)
        since_ns = max(now_ns - self._window_ns, self._since_ns.get(pinned.index, 0))
        pairs = self._mesh.sender.pairs(pinned.index, since_ns)
        fit = fit_edge(
            *pairs,
            tolerance_ns=self._settings.tolerance_ns,
            asymmetry_share=self._settings.asymmetry_share,
            prior=None if before is None else before.fit,
            singles=self._mesh.sender.singles(pinned.index, since_ns),
            wander_ppb_per_s=self.timescale.wander_between(pinned.peer.name),
        )
        if fit is not None and fit.stepped:
            self._since_ns[pinned.index] = now_ns - fit.span_ns
            self._hurry(now_ns)
            self._doubt(pinned.peer.name, now_ns)
        if fit is not None and not tells_round_trip(fit):
            self._unclear += 1
            fit = None
        if fit is not None and before is None and fit.span_ns < min(_LEAST_SPAN_NS, self._window_ns // 2):
            fit = None
        if fit is not None:
            if before is None or now_ns - before.at_ns > self._life_ns:
                self._hurry(now_ns)
            share = self._settings.asymmetry_share
            floor = self._floors.setdefault(pinned.index, Floor())
            floor_ns = floor.add(now_ns, fit.round_trip_min_ns, noise_ns(fit), share)
            prior = before.fit if before else None
            fit = tempered(fit, prior, floor_ns, share) if floor.settled else doubted(fit)
            stepped_ns = now_ns if fit.stepped else None if before is None else before.stepped_ns
            trend = self._trends.setdefault(pinned.index, DriftTrend(self._window_ns * 1e-9))
            fit = headed(fit, trend)
            self._fitted[pinned.index] = fitted = Fitted(pinned, fit, now_ns, stepped_ns)
            if self._bus.wanted("clock_edge"):
                self._bus.publish(fitted.signal(self._config.host, self._window_ns, now_ns))
        peer = pinned.peer.name
        if self._path_clocks.in_doubt(pinned.index):
            self._doubt(peer, now_ns)
        self._mesh.measurements.set_offset(pinned.index, self.between(peer, now_ns), now_ns)

    def _note_paths(self, current: set[int], now_ns: int) -> None:
        """Keep no line of a path that is gone; be quick about one that is new."""
        if not current <= self._paths:
            self._hurry(now_ns)
        self._paths = current
        self._since_ns = {index: since_ns for index, since_ns in self._since_ns.items() if index in current}
        self._fitted = {index: fitted for index, fitted in self._fitted.items() if index in current}
        self._floors = {index: floor for index, floor in self._floors.items() if index in current}
        self._trends = {index: trend for index, trend in self._trends.items() if index in current}

    def _own(self, peer: str, now_ns: int) -> Edge | None:
        """Our best fresh edge to a peer: the newest that shows a step, else the one with the smallest bound by now."""
        of_peer = [
            fitted
            for fitted in self._fitted.values()
            if fitted.pinned.peer.name == peer and now_ns - fitted.at_ns <= self._life_ns
        ]
        stepped = [fitted for fitted in of_peer if fitted.shows_step(now_ns)]
        if stepped:
            return max(stepped, key=lambda fitted: fitted.at_ns).edge(now_ns)
        if not of_peer:
            return None
        clock_ns = self._mesh.stamping_clock(now_ns)
        return min(of_peer, key=lambda fitted: fitted.bound_ns(clock_ns)).edge(now_ns)

    def between(self, peer: str, now_ns: int | None = None) -> Offset | None:
        """A peer's clock against ours as it is known now; None when nothing is."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return self.timescale.between(peer, self._mesh.stamping_clock(now_ns), self._own(peer, now_ns))

    def since_long(self, peer: str) -> Offset | None:
        """The same, but None for a while after a doubt: for delays of packets that passed seconds ago.

        One line cannot hold for packets from before and from after a step.
        """
        now_ns = time.monotonic_ns()
        self.notice_doubts(now_ns)
        if now_ns - self._doubted_ns.get(peer, -_DOUBT_NS) < _DOUBT_NS:
            return None
        return self.between(peer, now_ns)

    def notice_doubts(self, now_ns: int) -> None:
        """Remember whose probes contradict what is known of their clocks."""
        for pinned in self._mesh.paths.current:
            if self._path_clocks.in_doubt(pinned.index):
                self._doubt(pinned.peer.name, now_ns)

    def _doubt(self, peer: str, now_ns: int) -> None:
        self._doubted_ns[peer] = now_ns
        self.timescale.doubt(peer, now_ns)
        self._hurry(now_ns, _DOUBTFUL_NS)

    # ---- all hosts together ----

    def _tell(self, now_ns: int) -> None:
        """A round is over: say what we measured, and solve if we are the reference."""
        self._slew_ppb = slew.host_slew_ppb()
        self.notice_doubts(now_ns)
        fresh = [fitted.edge(now_ns) for fitted in self._fitted.values() if now_ns - fitted.at_ns <= self._life_ns]
        edges = Edges(messages.VERSION, self._slew_ppb, fresh)
        self.timescale.hear(self._config.host, edges, now_ns)
        if self._hosts is not None:
            self._hosts.send(messages.EDGES, messages.encode(edges))
        if self.timescale.elected(now_ns) == self._config.host:
            clock_ns = self._mesh.stamping_clock(now_ns)
            told = self.timescale.solve(clock_ns, now_ns, self._unix_ahead_ns(now_ns))
            if self._hosts is not None:
                self._hosts.send(messages.CLOCKS, messages.encode(told))
            self._adopt(self._config.host, told, now_ns)
        self.publish(now_ns)

    def _hear(self, now_ns: int) -> None:
        if self._hosts is None:
            return
        for host, payload in self._hosts.receive(messages.EDGES):
            edges = messages.decode_edges(payload)
            if edges is None:
                self._refused += 1
            else:
                self.timescale.hear(host, edges, now_ns)
                if any(edge.stepped for edge in edges.edges):
                    self._hurry(now_ns)
        for host, payload in self._hosts.receive(messages.CLOCKS):
            told = messages.decode_clocks(payload)
            if told is None:
                self._refused += 1
            elif host == self.timescale.elected(now_ns) != self._config.host:
                self._adopt(host, told, now_ns)

    def _adopt(self, reference: str, told: messages.Clocks, now_ns: int) -> None:
        self.timescale.adopt(reference, told, now_ns)
        steady = [clock for clock in told.hosts if clock.state == "synchronised" and clock.slew_ppb is not None]
        self._history.push(
            now_ns,
            [clock.host for clock in steady],
            [clock.drift_ppb for clock in steady],
            [clock.drift_sigma_ppb for clock in steady],
            [clock.slew_ppb or 0.0 for clock in steady],
        )
        self._feed_chrony(now_ns)

    def _unix_ahead_ns(self, now_ns: int) -> int:
        """CLOCK_REALTIME minus our stamping clock."""
        return realtime_difference_ns() - (self._mesh.stamping_clock(now_ns) - now_ns)

    def _feed_chrony(self, now_ns: int) -> None:
        ours = self.timescale.clocks.get(self._config.host)
        if self._chrony is None or ours is None or self.timescale.unix_ahead_ns is None:
            return
        clock_ns, ahead_ns = self._mesh.stamping_clock(now_ns), self._unix_ahead_ns(now_ns)
        lacks_ns = correction_ns(self._clock_signal(ours, now_ns), clock_ns, ahead_ns, self.timescale.unix_ahead_ns)
        self._chrony.send(now_ns, clock_ns + ahead_ns, lacks_ns)

    # ---- signals ----

    def publish(self, now_ns: int) -> None:
        """Publish every clock, and now and then who shares an oscillator, if anybody listens."""
        if self._bus.wanted("clock"):
            for clock in self.timescale.clocks.values():
                self._bus.publish(self._clock_signal(clock, now_ns))
        if self._bus.wanted("collocation") and now_ns >= self._collocation_ns:
            self._collocation_ns = now_ns + _COLLOCATION_NS
            found = vars(groups(self._history))
            self._bus.publish(Collocation(**header(self._config.host, now_ns), **found))

    def _own_clocks(self) -> set[str]:
        return {pinned.peer.name for pinned in self._mesh.paths.current if self._mesh.has_own_clock(pinned)}

    def _clock_signal(self, clock: HostClock, now_ns: int) -> Clock:
        age_ns, reference = now_ns - self.timescale.told_ns, self.timescale.reference
        offset = Offset(
            clock.epoch_ns,
            clock.offset_ns,
            clock.drift_ppb,
            clock.sigma_ns,
            clock.drift_sigma_ppb,
            clock.bound_ns,
            clock.hard_bound_ns,
            wander_ppb_per_s=self.timescale.wander(clock.host),
        ).aged(clock.epoch_ns + age_ns)
        # What was solved before a step was seen, or told by hosts that had not seen it yet, is the old offset.
        stepped = self.timescale.seen_stepped(self._own_clocks(), now_ns)
        moved = clock.host != reference and not stepped.isdisjoint((clock.host, reference))
        state = "free_running" if moved or clock.state == "free_running" else offset.state
        known = state != "free_running"
        return Clock(
            **header(self._config.host, now_ns),
            of=clock.host,
            reference=self.timescale.reference,
            epoch_ns=clock.epoch_ns,
            state=state,
            offset_ns=clock.offset_ns if known else None,
            drift_ppb=clock.drift_ppb if known else None,
            # A drift that is hardly known widens the one bound faster than the other, which holds anyway.
            bound_ns=min(offset.bound_ns, offset.hard_bound_ns) if known else None,
            hard_bound_ns=offset.hard_bound_ns if known and clock.hard_bound_ns < UNBOUNDED_NS else None,
            slew_ppb=clock.slew_ppb,
            neighbours=clock.neighbours,
            pairs_kept=clock.pairs_kept,
            pairs_rejected=clock.pairs_rejected,
            outlier_edges=clock.outlier_edges,
        )

    def drops(self) -> dict[str, int]:
        """What was refused, and what contradicted the clocks as they were known."""
        counted = {"clock_messages_refused": self._refused, "clock_contradictions": self._path_clocks.contradictions}
        counted["clock_windows_unclear"] = self._unclear
        return counted | (self._chrony.drops() if self._chrony is not None else {})

    def close(self) -> None:
        if self._chrony is not None:
            self._chrony.close()
