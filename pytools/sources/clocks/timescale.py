"""The common timescale: whose clock is the reference, and the offset and drift of every host's clock against it.

Every host sends its edges to every peer. The reference - the configured one, else the first by name of those whose
messages arrive - solves for all clocks at once and publishes the result; without a bus each host is its own reference.
Two hosts are compared by one result only, so a change of the reference changes no delay. `now_ns` is CLOCK_MONOTONIC,
`clock_ns` this host's stamping clock. Reads no clock, sends nothing. One thread.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from pytools.estimators.drift_trends import DriftTrends
from pytools.estimators.offsets import MEMORY_S, WANDER_PPB_PER_S, Offset, wander, wander_between
from pytools.sources.clocks.messages import VERSION, Clocks, Edge, Edges, HostClock

FRESH_ROUNDS: Final = 3  # what is older than so many intervals no longer counts
_PROBATION_NS: Final = 2_000_000_000  # a host that returns must be received this long before it is the reference
# So long after an edge showed a step of a clock, that clock is free running. Hosts that receive the step look at
# once, and the others within an interval: so it is never less than one and a half of these.
_STEPPED_NS: Final = 1_500_000_000


@dataclass
class _Heard:
    """A host that sends us its edges."""

    since_ns: int
    last_ns: int
    edges: Edges


class Timescale:
    """What one host knows of all clocks.

    Parameters
    ----------
    interval_ns, window_ns : int
        How often hosts send their edges, and over which time they are fitted.
    reference : str
        The host whose clock is the common one; empty: elected.
    """

    def __init__(self, host: str, interval_ns: int, reference: str, window_ns: int = 0) -> None:
        self._host, self._interval_ns, self._wanted = host, interval_ns, reference
        self._trends = DriftTrends(window_ns * 1e-9, interval_ns * 0.5e-9)
        self._suspect_ns = max(_STEPPED_NS, 3 * interval_ns // 2)
        self._heard: dict[str, _Heard] = {}
        self._quarantined_ns: dict[str, int] = {}  # host -> since when its clock is known to be stepped
        self._stepped_ns: dict[frozenset[str], int] = {}  # two hosts -> when an edge between them last showed a step
        self.reference = ""  # whose word `clocks` is
        self.clocks: dict[str, HostClock] = {}
        self.unix_ahead_ns: int | None = None
        self.told_ns = 0  # when
        self._drifts: deque[tuple[int, dict[str, tuple[float, float]]]] = deque()  # of one reference's results
        self._wanders: dict[str, float] = {}

    def hear(self, host: str, edges: Edges, now_ns: int) -> None:
        """Take note of a host's edges; our own as well."""
        known = self._heard.get(host)
        begins = known is None or now_ns - known.last_ns > FRESH_ROUNDS * self._interval_ns
        self._heard[host] = _Heard(now_ns if begins or known is None else known.since_ns, now_ns, edges)
        for edge in edges.edges:
            if edge.stepped:
                self._stepped_ns[frozenset((host, edge.peer))] = now_ns

    def doubt(self, peer: str, now_ns: int) -> None:
        """Note that a probe between us and a peer contradicts what is known of the two clocks."""
        self._stepped_ns[frozenset((self._host, peer))] = now_ns

    def seen_stepped(self, peers: Iterable[str], now_ns: int) -> set[str]:
        """The hosts whose clock was stepped a moment ago, by what we alone have seen."""
        recent = {pair for pair, at_ns in self._stepped_ns.items() if now_ns - at_ns <= self._suspect_ns}
        return stepped(((self._host, peer) for peer in peers), recent)

    def wander(self, host: str) -> float:
        """How fast a host's drift against the reference changes at most, in ppb per second."""
        return self._wanders.get(host, WANDER_PPB_PER_S)

    def wander_between(self, peer: str) -> float:
        """The same for the drift between a peer and us."""
        return wander_between(self.wander(self._host), self.wander(peer))

    def elected(self, now_ns: int) -> str:
        """Whose clock is to be the common one now."""
        patience_ns = FRESH_ROUNDS * self._interval_ns
        here = {host for host, heard in self._heard.items() if now_ns - heard.last_ns <= patience_ns}
        here.add(self._host)
        if self._wanted in here:
            return self._wanted
        probation_ns = max(_PROBATION_NS, 2 * self._interval_ns)
        settled = {host for host in here if host in (self._host, self.reference) or self._proven(host, probation_ns)}
        return min(settled)

    def _proven(self, host: str, probation_ns: int) -> bool:
        heard = self._heard[host]
        return heard.last_ns - heard.since_ns >= probation_ns

    def adopt(self, reference: str, told: Clocks, now_ns: int) -> None:
        """Take the reference's word; our own, cut off and with nobody to compare, does not replace the last one."""
        if reference == self._host and len(told.hosts) == 1 and self.clocks:
            return  # what was known of the others is held over
        if reference != self.reference:
            self._drifts.clear()
        self.reference, self.told_ns = reference, now_ns
        self.unix_ahead_ns = told.unix_ahead_ns
        self.clocks = {clock.host: clock for clock in told.hosts}
        self._note_drifts(now_ns)

    def _note_drifts(self, now_ns: int) -> None:
        known = {
            clock.host: (clock.drift_ppb, clock.drift_sigma_ppb)
            for clock in self.clocks.values()
            if clock.state == "synchronised"
        }
        self._drifts.append((now_ns, known))
        while now_ns - self._drifts[0][0] > MEMORY_S * 1e9:
            self._drifts.popleft()
        self._wanders = {}
        for host in known:
            if host == self.reference:
                continue  # it is what the others are measured by
            rows = [((at - now_ns) * 1e-9, *drifts[host]) for at, drifts in self._drifts if host in drifts]
            times, drifts_ppb, sigmas_ppb = np.array(rows).T
            self._wanders[host] = wander(times, drifts_ppb, sigmas_ppb)

    def solve(self, clock_ns: int, now_ns: int, unix_ahead_ns: int) -> Clocks:
        """All clocks against ours, from every edge that is fresh."""
        from pytools.sources.clocks.solving import solved  # only the reference needs the solver

        patience_ns = FRESH_ROUNDS * self._interval_ns
        fresh = {host: heard for host, heard in self._heard.items() if now_ns - heard.last_ns <= patience_ns}
        slews = {host: heard.edges.slew_ppb for host, heard in fresh.items()}
        self._stepped_ns = {pair: at for pair, at in self._stepped_ns.items() if now_ns - at <= self._suspect_ns}
        pairs = [(host, edge.peer) for host, heard in fresh.items() for edge in heard.edges.edges]
        doubtful = stepped(pairs, self._stepped_ns) if self._stepped_ns else set()
        since = self._quarantined(doubtful, now_ns - patience_ns, now_ns)
        edges = [
            (host, edge)
            for host, heard in fresh.items()
            for edge in heard.edges.edges
            if not since or heard.last_ns >= max(since.get(host, 0), since.get(edge.peer, 0))
        ]
        hosts = solved(self._host, clock_ns, edges, slews, doubtful, self._wanders, self._trends)
        return Clocks(VERSION, unix_ahead_ns, hosts)

    def _quarantined(self, doubtful: Set[str], oldest_ns: int, now_ns: int) -> Mapping[str, int]:
        """Since when the clock of each host is another one; edges from before say nothing about it."""
        known = self._quarantined_ns
        # Those that are still doubtful keep their time; of the others no message from before it counts any more.
        known = {host: at for host, at in known.items() if host in doubtful or at >= oldest_ns}
        self._quarantined_ns = dict.fromkeys(doubtful, now_ns) | known
        return self._quarantined_ns

    def between(self, peer: str, clock_ns: int, own: Edge | None) -> Offset | None:
        """The peer's clock against ours, as well as it is known.

        The result for all hosts, unless it is old, or contradicts our own newest edge to this peer: then that edge
        alone. What is old is held over, with a bound that grows.

        Parameters
        ----------
        own : Edge or None
            Our newest edge to this peer, if there is a fresh one.
        """
        common = self._common(peer)
        if own is None:
            return None if common is None else common.aged(clock_ns)
        edge = replace(as_offset(own), wander_ppb_per_s=self.wander_between(peer))
        if common is None or clock_ns - common.epoch_ns > FRESH_ROUNDS * self._interval_ns:
            return edge.aged(clock_ns)
        apart_ns = abs(int(edge.at(clock_ns) - common.at(clock_ns)))
        # The edge's own bound would not do: it rests on symmetry, which only the others can check.
        if own.stepped or apart_ns > edge.aged(clock_ns).hard_bound_ns + common.aged(clock_ns).bound_ns:
            return edge.aged(clock_ns)
        # Both intervals hold, so the truth is within the smaller of the two bounds around the common estimate.
        return replace(
            common,
            bound_ns=min(common.bound_ns, edge.bound_ns + apart_ns),
            hard_bound_ns=min(common.hard_bound_ns, edge.hard_bound_ns + apart_ns),
        ).aged(clock_ns)

    def _common(self, peer: str) -> Offset | None:
        """The two hosts compared by the reference's word."""
        ours, theirs = self.clocks.get(self._host), self.clocks.get(peer)
        if ours is None or theirs is None or "free_running" in (ours.state, theirs.state):
            return None
        # Both hold at one moment of the reference, so at the epoch of each; each drift is per second of its own clock.
        d_ours, d_theirs = ours.drift_ppb * 1e-9, theirs.drift_ppb * 1e-9
        return Offset(
            epoch_ns=ours.epoch_ns,
            offset_ns=theirs.offset_ns - ours.offset_ns,
            drift_ppb=(d_theirs * (1 - d_ours) / (1 - d_theirs) - d_ours) * 1e9,
            sigma_ns=math.hypot(theirs.sigma_ns, ours.sigma_ns),
            drift_sigma_ppb=math.hypot(theirs.drift_sigma_ppb, ours.drift_sigma_ppb),
            bound_ns=theirs.bound_ns + ours.bound_ns,
            hard_bound_ns=theirs.hard_bound_ns + ours.hard_bound_ns,
            wander_ppb_per_s=self.wander_between(peer),
        )


def stepped(edges: Iterable[tuple[str, str]], pairs: Collection[frozenset[str]]) -> set[str]:
    """The hosts whose clock was stepped: those for which more than half of their neighbours see it so.

    A step shows between the host and everybody; between two others nothing shows, and a single edge may be mistaken.

    Parameters
    ----------
    edges : iterable of (str, str)
        Who has an edge with whom.
    pairs : collection of frozenset of str
        Two hosts each, between which an edge showed a step.
    """
    neighbours: dict[str, set[str]] = {}
    for one, other in edges:
        neighbours.setdefault(one, set()).add(other)
        neighbours.setdefault(other, set()).add(one)
    return {
        host
        for host, around in neighbours.items()
        if 2 * sum(frozenset((host, each)) in pairs for each in around) > len(around)
    }


def as_offset(edge: Edge) -> Offset:
    """An edge as what it says of the peer's clock."""
    hard_ns = max(edge.hard_high_ns - edge.offset_ns, edge.offset_ns - edge.hard_low_ns, 0)
    return Offset(
        edge.epoch_ns, edge.offset_ns, edge.drift_ppb, edge.sigma_ns, edge.drift_sigma_ppb, edge.bound_ns, hard_ns
    )
