"""What a lab's agents tell about clocks and delays, against what is true. Nanoseconds; all hosts' clocks are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from pytools.lab.clocks import Table
from pytools.lab.fabric import Lab
from pytools.signals import Clock, Delay, Path, PathDelay, ProbeSamples

Times = NDArray[np.int64]

# A window's figures come from probes that left within the window or this long before it: an agent may be late.
EARLIER_NS = 3_000_000_000
RESIDENCE_NS = 25_000_000  # a peer answers what has arrived every 20 ms, when it has a processor
APART_PPM = 60  # the most that the rates of two clocks of a lab differ by
UNLIKELY_SHARE = 0.01


@dataclass
class Judged:
    """Errors of everything told, each with the bound it came with."""

    errors_ns: list[int] = field(default_factory=list)
    bounds_ns: list[int] = field(default_factory=list)
    impossible: list[tuple[int, int]] = field(default_factory=list)  # (error, hard bound) of those beyond it

    def add(self, error_ns: int, bound_ns: int | None, hard_bound_ns: int | None = None) -> None:
        assert bound_ns is not None, "told without a bound"
        self.errors_ns.append(error_ns)
        self.bounds_ns.append(bound_ns)
        if hard_bound_ns is not None and abs(error_ns) > hard_bound_ns:
            self.impossible.append((error_ns, hard_bound_ns))

    def share(self, slack_ns: int = 0) -> float:
        """How many of the errors are within their bounds."""
        return float(np.mean(np.abs(self.errors_ns) <= np.array(self.bounds_ns) + slack_ns))

    def largest(self) -> int:
        return max(map(abs, self.errors_ns))

    def __str__(self) -> str:
        worst = sorted(zip(self.errors_ns, self.bounds_ns, strict=True), key=lambda each: abs(each[0]))[-3:]
        return f"{len(self.errors_ns)} told, {self.share():.2%} within their bounds, largest (error, bound): {worst}"


class Truth:
    """The clocks of a lab as they are now, steps included."""

    def __init__(self, lab: Lab) -> None:
        self.tables = {host.name: Table.of(lab.clock(host)) for host in lab.hosts}

    def clocks(self, told: Iterable[Clock]) -> Judged:
        """Every clock that is told of: the offset at its epoch, and where its line has come to when it is published."""
        found = Judged()
        for each in told:
            if each.state == "free_running" or each.of == each.reference:
                continue
            assert each.offset_ns is not None
            assert each.drift_ppb is not None
            of, reference = self.tables[each.of], self.tables[each.reference]
            for true_ns in (int(of.when(each.epoch_ns)), each.at_ns):
                reading = int(of.at(true_ns))
                line = each.offset_ns + round((reading - each.epoch_ns) * each.drift_ppb * 1e-9)
                found.add(line - (reading - int(reference.at(true_ns))), each.bound_ns, each.hard_bound_ns)
        return found

    def delays(self, path: Path, samples: Iterable[ProbeSamples]) -> dict[str, tuple[TrueDelays, TrueDelays]]:
        """What the probes of a path have met each way: if peers answered in time, and whatever they did.

        As our clock counts, from their stamps and the true clocks. Forward is exact. When a reply left is not told: as
        a rule before the peer answered the next probes, in truth some time between the probe's arrival and the signal.
        Its delay is good to what the clocks may drift apart meanwhile; that of a reply whose departure was learnt after
        the signal, or never, was no longer than that time.
        """
        probes = [
            (sent, there, back or 0, back is not None, signal.at_ns)
            for signal in samples
            if signal.path == path
            for sent, there, back in zip(signal.sent_ns, signal.forward_ns, signal.reverse_ns, strict=True)
            if there is not None
        ]
        columns = np.array(probes, np.int64).reshape(-1, 5).T
        sent, there, back, told = columns[[0, 1, 2, 4]]
        learnt = columns[3] != 0
        ours, theirs = self.tables[path.source], self.tables[path.destination]
        left = ours.when(sent)
        came = theirs.when(sent + there)
        forward = ours.at(came) - sent
        exact = TrueDelays(left, forward, forward)
        # The clock may have been stepped while the probe was at the peer: take the offset that makes sense.
        moments = np.stack([came, came + RESIDENCE_NS])
        either = back + theirs.at(moments) - ours.at(moments)
        reverse = np.take_along_axis(either, np.abs(either).argmin(axis=0)[None], axis=0)[0]
        slack = RESIDENCE_NS * APART_PPM // 10**6
        usual = TrueDelays(left[learnt], reverse[learnt] - slack, reverse[learnt] + slack)
        at_peer = np.maximum(told - came, RESIDENCE_NS)
        slacks = at_peer * APART_PPM // 10**6
        certain = TrueDelays(
            left, np.where(learnt, reverse - slacks, 0), np.where(learnt, reverse + slacks, at_peer + slacks)
        )
        return {"forward": (exact, exact), "reverse": (usual, certain)}

    def wrong(self, told: Sequence[PathDelay], samples: Sequence[ProbeSamples]) -> list[str]:
        """One-way delays that no probe has met: shorter than all of about that time, or longer than all.

        A stated bound holds for almost all that is told (`Judged.share`), its double for all. That peers answer in time
        may be taken for granted for almost all as well, as it is for none.
        """
        unlikely: list[str] = []
        impossible: list[str] = []
        judged = 0
        for path in {signal.path for signal in told}:
            true = self.delays(path, samples)
            left = true["forward"][0].left_ns
            for signal in (each for each in told if each.path == path):
                begin_ns = signal.at_ns - signal.window_ns - EARLIER_NS
                if not len(left) or begin_ns < left.min() or signal.at_ns > left.max():
                    continue  # its probes are not all here
                for way, usual_and_certain in true.items():
                    each: Delay = getattr(signal, way)
                    judged += bool(facts(each))
                    for met, found in zip(usual_and_certain, (unlikely, impossible), strict=True):
                        then = met.within(begin_ns, signal.at_ns)
                        if not facts(each) or not len(then.left_ns):
                            continue
                        assert each.bound_ns is not None
                        low = int(then.least_ns.min()) - 2 * each.bound_ns
                        high = int(then.most_ns.max()) + 2 * each.bound_ns
                        if not all(low <= fact <= high for fact in facts(each)):
                            found.append(f"{path} {way} at {signal.at_ns}: {each}, not within {low} and {high}")
        return impossible if len(unlikely) <= judged * UNLIKELY_SHARE else unlikely


@dataclass(frozen=True)
class TrueDelays:
    """One direction: when each probe left, and how long it took at least and at most."""

    left_ns: Times
    least_ns: Times
    most_ns: Times

    def within(self, begin_ns: int, end_ns: int) -> TrueDelays:
        """Of the probes that left then."""
        then = (self.left_ns >= begin_ns) & (self.left_ns <= end_ns)
        return TrueDelays(self.left_ns[then], self.least_ns[then], self.most_ns[then])


def facts(delay: Delay) -> list[int]:
    """The one-way delays told."""
    return [each for each in (delay.owd_min_ns, delay.owd_p50_ns, delay.owd_p99_ns) if each is not None]


def told_as_facts(signals: Sequence[PathDelay]) -> list[int]:
    """Every one-way delay told, of both directions."""
    return [fact for signal in signals for each in (signal.forward, signal.reverse) for fact in facts(each)]
