"""Clock estimates of a lab against the truth, and the classic peer: what bench/clock.py counts.

Every estimate is judged over its life: at the moment it holds for and once an interval later, when the next one comes.
Nanoseconds; offsets are against the reference's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pytools.lab.clocks import Table, VirtualClock
from pytools.signals import Clock, ProbeSamples

STAGES = 8  # of the classic clock filter (RFC 5905, section 10)


@dataclass
class Errors:
    """Errors of estimates, and the bounds they came with."""

    errors_ns: list[float] = field(default_factory=list)
    bounds_ns: list[float] = field(default_factory=list)
    hard_bounds_ns: list[float] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        return float(np.percentile(np.abs(self.errors_ns), percent))

    def coverage(self) -> float:
        return float(np.mean(np.abs(self.errors_ns) <= np.array(self.bounds_ns)))

    def hard_coverage(self) -> float:
        return float(np.mean(np.abs(self.errors_ns) <= np.array(self.hard_bounds_ns)))


class Truth:
    """What the clocks of a lab show, as tables."""

    def __init__(self, clocks: Mapping[str, VirtualClock]) -> None:
        self.tables = {name: Table.of(clock) for name, clock in clocks.items()}

    def offset_ns(self, of: str, against: str, shown_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The clock of one host minus another's when the first one shows this."""
        true_ns = self.tables[of].when(shown_ns)
        return np.asarray(self.tables[of].at(true_ns) - self.tables[against].at(true_ns))

    def judge(self, clocks: Iterable[Clock], life_ns: int) -> Errors:
        """Every synchronised estimate of a clock that is not the reference's, at three moments of its life."""
        found = Errors()
        by_host: dict[tuple[str, str], list[Clock]] = {}
        for clock in clocks:
            if clock.state == "synchronised" and clock.of != clock.reference:
                by_host.setdefault((clock.of, clock.reference), []).append(clock)
        for (of, reference), group in by_host.items():
            for age_ns in (0, life_ns // 2, life_ns):
                shown = np.array([clock.epoch_ns + age_ns for clock in group])
                told = np.array([clock.offset_ns + round(clock.drift_ppb * 1e-9 * age_ns) for clock in group])
                found.errors_ns += (told - self.offset_ns(of, reference, shown)).tolist()
                found.bounds_ns += [clock.bound_ns for clock in group]
                found.hard_bounds_ns += [
                    np.inf if clock.hard_bound_ns is None else clock.hard_bound_ns for clock in group
                ]
        return found

    def ntp_errors(self, samples: Iterable[ProbeSamples]) -> list[float]:
        """The classic filter on the same stamps: of the last eight round trips, the offset of the shortest."""
        windows: dict[object, deque[tuple[int, int, int]]] = {}
        taken: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
        for signal in samples:
            window = windows.setdefault(signal.path, deque(maxlen=STAGES))
            for sent, forward, reverse in zip(signal.sent_ns, signal.forward_ns, signal.reverse_ns, strict=True):
                if forward is None or reverse is None:
                    continue
                window.append((forward + reverse, sent, (forward - reverse) // 2))
                if len(window) == STAGES:
                    _, at_ns, offset_ns = min(window)
                    at, told = taken.setdefault((signal.path.source, signal.path.destination), ([], []))
                    at.append(at_ns)
                    told.append(offset_ns)
        errors: list[float] = []
        for (ours, theirs), (at, told) in taken.items():
            truth = -self.offset_ns(ours, theirs, np.array(at))
            errors += (np.array(told) - truth).tolist()
        return errors
