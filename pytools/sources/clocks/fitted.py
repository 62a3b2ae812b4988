"""The newest line through the coded probes of one path, as the other hosts and the subscribers get it.

Epochs are of this host's stamping clock; `now_ns` is CLOCK_MONOTONIC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pytools.estimators.clocks import EdgeFit
from pytools.estimators.offsets import SIGMAS
from pytools.signals import ClockEdge, header
from pytools.sources.clocks.messages import Edge
from pytools.sources.probing.paths import PinnedPath

_STEP_TOLD_NS: Final = 500_000_000


@dataclass(frozen=True)
class Fitted:
    """The newest line of one path."""

    pinned: PinnedPath
    fit: EdgeFit
    at_ns: int
    stepped_ns: int | None  # when a step was last seen

    def shows_step(self, now_ns: int) -> bool:
        """Whether to report a step to the others: more than once, because messages get lost."""
        return self.stepped_ns is not None and now_ns - self.stepped_ns <= _STEP_TOLD_NS

    def bound_ns(self, clock_ns: int) -> float:
        return self.fit.bound_ns + SIGMAS * (self.fit.sigma_at(clock_ns) - self.fit.sigma_at(self.fit.epoch_ns))

    def edge(self, now_ns: int) -> Edge:
        """What is sent to the other hosts."""
        fit = self.fit
        return Edge(
            self.pinned.peer.name,
            **fit.line,
            hard_low_ns=fit.hard_low_ns,
            hard_high_ns=fit.hard_high_ns,
            pairs_kept=fit.kept,
            pairs_rejected=fit.rejected,
            stepped=self.shows_step(now_ns),
        )

    def signal(self, host: str, window_ns: int, now_ns: int) -> ClockEdge:
        fit = self.fit
        return ClockEdge(
            **header(host, now_ns),
            path=self.pinned.path,
            **fit.line,
            window_ns=window_ns,
            hard_low_ns=fit.hard_low_ns,
            hard_high_ns=fit.hard_high_ns,
            round_trip_min_ns=fit.round_trip_min_ns,
            pairs_kept=fit.kept,
            pairs_rejected=fit.rejected,
            stepped=fit.stepped,
        )
