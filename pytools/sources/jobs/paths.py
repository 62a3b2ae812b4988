"""The paths of a job as evidence: what its connections did on each in a window, beside what probes say of it.

Times are CLOCK_MONOTONIC nanoseconds. One thread: the agent's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.job_evidence import PathUse, Range
from pytools.ipc.bus import Published
from pytools.signals import DELAY_BOUNDS_NS, Path, PathDelay, PathState, RdmaQueuePair
from pytools.sources.jobs.traffic import Sum, Wait

TYPES: Final = frozenset({"path_delay", "path_state"})
LOCAL: Final = "lo"
LEAST_SHARE: Final = 0.05  # of what the largest connection of the job sends; one that sends less does not count
_USUAL: Final = 300  # windows
_KNOWN: Final = 30  # windows from which on it is known what is usual
_STALE: Final = 3  # windows
_STATE_NS: Final = 5 * 10**9
_MOST: Final = 16_384  # paths
_RTO_NS: Final = 200_000_000  # the kernel's usual smallest one
_RTO_LEAST_NS: Final = 10_000_000  # where it was made shorter
_QUEUE_NS: Final = 50_000  # shorter ones are noise
_FEWEST: Final = 10  # probes
_SURE: Final = 1.96  # standard deviations
_LEFT: Final = frozenset({"drained", "returning"})
_MISSING: Final = {"congested", "dead"}  # verdicts of queue pairs
_NONE: Final = np.empty(0, np.int64)


class Delays:
    """The newest delays over a long window, and the state, of each path."""

    def __init__(self, window_ns: int) -> None:
        self._window_ns = window_ns
        self._newest: dict[Path, PathDelay] = {}
        self._queues: dict[Path, deque[int]] = {}
        self._states: dict[Path, PathState] = {}

    def offer(self, published: Published) -> None:
        signal = published.signal
        if isinstance(signal, PathDelay):
            if signal.window_ns >= self._window_ns and (signal.path in self._newest or len(self._newest) < _MOST):
                self._newest[signal.path] = signal
                queue = signal.forward.queueing_p50_ns
                if queue is not None:
                    self._queues.setdefault(signal.path, deque(maxlen=_USUAL)).append(queue)
        elif isinstance(signal, PathState) and (signal.path in self._states or len(self._states) < _MOST):
            self._states[signal.path] = signal

    def of(self, path: Path, now_ns: int) -> PathDelay | None:
        """What was measured of a path lately."""
        found = self._newest.get(path)
        fresh = found is not None and now_ns - found.at_ns <= _STALE * max(found.window_ns, self._window_ns)
        return found if fresh else None

    def usual(self, path: Path) -> int | None:
        known = self._queues.get(path, ())
        return round(median(known)) if len(known) >= _KNOWN else None

    def is_left(self, path: Path, now_ns: int) -> bool:
        """Whether a controller has taken load away from it."""
        state = self._states.get(path)
        return state is not None and now_ns - state.at_ns <= _STATE_NS and state.state in _LEFT

    def siblings(self, path: Path, now_ns: int) -> list[Path]:
        """All paths to the same host that are measured."""
        return [each for each in self._newest if each.destination == path.destination and self.of(each, now_ns)]

    def forget(self) -> None:
        self._newest.clear()
        self._queues.clear()
        self._states.clear()


def uses(sums: Iterable[Sum], delays: Delays, window_ns: int, now_ns: int) -> list[PathUse]:
    """The paths of one job, and besides them all others to the same hosts; without those of the host to itself."""
    found = {each.where[1:]: each for each in sums if each.where[2] != LOCAL}
    least = LEAST_SHARE * max((int(each.flows.max()) for each in found.values() if each.flows.size), default=0)
    counted = {where: each.flows[each.flows >= least] if least else _NONE for where, each in found.items()}
    used = {where[0] for where, each in found.items() if where[0] is not None and (counted[where].size or each.pairs)}
    for path in used:
        for sibling in delays.siblings(path, now_ns):
            found.setdefault((sibling, sibling.interface), Sum((None, sibling, sibling.interface)))
    hosts = {each.destination for each in used}
    return [
        _use(each, counted.get(where, _NONE), delays, window_ns, now_ns)
        for where, each in found.items()
        if where[0] is None or where[0].destination in hosts
    ]


def typical(sums: Iterable[Sum]) -> float:
    """What the median connection sent, of those that send about as much as the largest; 0 without any."""
    sent = np.concatenate([_NONE, *(each.flows for each in sums if each.where[2] != LOCAL)])
    return float(np.median(sent[sent >= LEAST_SHARE * sent.max()])) if sent.size and sent.max() > 0 else 0.0


def _use(all_of_it: Sum, counted: NDArray[np.int64], delays: Delays, window_ns: int, now_ns: int) -> PathUse:
    _, path, interface = all_of_it.where
    delay = None if path is None else delays.of(path, now_ns)
    troubled, reason = _of_pairs(all_of_it.pairs)
    forward = None if delay is None else delay.forward
    return PathUse(
        path,
        interface,
        connections=len(counted),
        sent_bytes=int(counted.sum()),
        busy=_busy(delay),
        segments=all_of_it.segments,
        retransmitted=all_of_it.retransmitted,
        timeouts=all_of_it.timeouts,
        stalled=_stalled(all_of_it.waits, window_ns),
        queue_ns=None if forward is None or forward.queueing_bound_ns is None else forward.queueing_p50_ns,
        queue_bound_ns=0 if forward is None else forward.queueing_bound_ns or 0,
        usual_queue_ns=None if path is None else delays.usual(path),
        round_trip_ns=None if delay is None else delay.round_trip_min_ns,
        settled=0 if delay is None else delay.received + delay.lost,
        lost=0 if delay is None else delay.lost,
        steered=path is not None and delays.is_left(path, now_ns),
        pairs=sum(each.verdict != "unknown" for each in all_of_it.pairs),
        troubled=troubled,
        pairs_reason=reason,
    )


def _busy(delay: PathDelay | None) -> Range | None:
    """In which share of the window there was a queue: that of the probes that met one or were lost, 95 % sure."""
    if delay is None or delay.forward.queueing_histogram is None or delay.forward.queueing_bound_ns is None:
        return None
    least = max(_QUEUE_NS, 2 * delay.forward.queueing_bound_ns)
    first = next((place for place, bound in enumerate(DELAY_BOUNDS_NS, 1) if bound >= least), len(DELAY_BOUNDS_NS))
    counts = delay.forward.queueing_histogram.by_class()
    many, met = sum(counts) + delay.lost, sum(counts[first:]) + delay.lost
    if many < _FEWEST:
        return None
    share, square = met / many, _SURE**2 / many  # Wilson's interval
    middle = (share + square / 2) / (1 + square)
    half = _SURE / (1 + square) * math.sqrt(share * (1 - share) / many + square / many / 4)
    return Range(share, max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half)))


def _stalled(waits: list[Wait], window_ns: int) -> Range | None:
    """In which share of the window the connection that did so longest waited for its retransmission timer."""
    worst = None
    for many, lasted_ns, srtt_ns in waits:
        lasted = min(lasted_ns, window_ns)
        least = max(lasted, many * max(_RTO_LEAST_NS, srtt_ns))
        likely, most = max(lasted, many * _RTO_NS), max(lasted, (2**many - 1) * _RTO_NS)
        found = Range(likely / window_ns, min(least, likely) / window_ns, most / window_ns).clipped()
        worst = found if worst is None else max(worst, found)
    return worst


def _of_pairs(pairs: list[RdmaQueuePair]) -> tuple[Range | None, str]:
    """The bandwidth that queue pairs miss, and how many, where these are at least half of those that are judged."""
    judged = [each for each in pairs if each.verdict != "unknown"]
    bad = [each for each in judged if each.verdict in _MISSING]
    if not bad or 2 * len(bad) < len(judged):
        return None, ""
    lost = []
    for each in bad:
        known = max(each.bandwidths, key=lambda one: one.messages, default=None)
        if each.verdict == "dead":
            lost.append(1.0)
        elif known is not None and known.last_bps is not None and known.mean_bps:
            lost.append(max(0.0, 1 - known.last_bps / known.mean_bps))
    worst = max(bad, key=lambda each: each.outstanding_bytes)
    reason = f"{len(bad)} of {len(judged)} queue pairs {worst.verdict} (pair {worst.qp_number}: {worst.reason})"
    return (Range(median(lost), min(lost), max(lost)), reason) if lost else (None, "")
