"""Collocation on a simulated fleet: 200 virtual machines on 50 hosts, after 10, 30, 60 and 120 seconds of drifts.

The model. Each host's oscillator: a base frequency uniform within 30 ppm; a temperature of its own (white noise through
two thermal masses of 20 to 120 s each, 30 to 300 ppb in effect, root mean square) and a share of the room's (200 ppb
over ten minutes). Each machine: a drift a second, the mean over the two seconds before, relative to one of them, with
noise of 2 to 20 ppb that overlapping windows share; its stated standard deviation is wrong by up to a quarter; one
solve in a hundred is missing. A quarter of the machines, the reference too, are slewed by a time service that changes
its mind every 16 to 64 s by up to 2 ppm. `quiet` cases have a hundredth of the wander: they ask whether what cannot be
known is left unknown. The peer groups by the mean alone (nearest neighbours within four standard deviations), as one
would at first. Precision and recall are shares of pairs over all seeds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from _common import emit, median, note
from numpy.typing import NDArray

from pytools.estimators.collocation import groups
from pytools.estimators.drift_history import DriftHistory

Floats = NDArray[np.float64]
Pairs = set[tuple[str, str]]
SECOND_NS = 1_000_000_000
SPANS = (10, 30, 60, 120)
SEEDS = range(10)
WARM_UP_S = 600
LARGE = 10_000
QUIET = 0.01


@dataclass(frozen=True)
class Fleet:
    """What the estimator is given, and where each machine truly is."""

    host_of: NDArray[np.intp]
    drift: Floats  # (seconds, machines)
    sigma: Floats
    slew: Floats

    @property
    def names(self) -> list[str]:
        """Machines by name."""
        return [f"vm{number:05d}" for number in range(len(self.host_of))]

    def history(self, seconds: int) -> DriftHistory:
        """The first so many seconds of it."""
        history = DriftHistory()
        for second in range(seconds):
            row = self.drift[second], self.sigma[second], self.slew[second]
            history.push(second * SECOND_NS, self.names, *row)
        return history

    def pairs(self) -> Pairs:
        """Who truly shares."""
        return {
            pair
            for host in np.unique(self.host_of)
            for pair in paired(self.names[machine] for machine in np.flatnonzero(self.host_of == host))
        }


def paired(names: Iterable[str]) -> set[tuple[str, str]]:
    """All pairs of some machines."""
    return set(itertools.combinations(sorted(names), 2))


def thermal(random: np.random.Generator, seconds: int, hosts: int) -> Floats:
    """Temperatures of hosts, unit root mean square over all time: white noise through two thermal masses."""
    decay = np.exp(-1 / np.exp(random.uniform(np.log(20), np.log(120), (2, hosts))))
    a, b = decay
    # Variance of the cascade of two first-order filters fed by unit white noise.
    gain = (1 - a) * (1 - b)
    variance = gain**2 * (1 + a * b) / ((1 - a**2) * (1 - b**2) * (1 - a * b))
    first, second = np.zeros(hosts), np.zeros(hosts)
    found = np.empty((seconds, hosts))
    for row in range(-WARM_UP_S, seconds):
        first = a * first + (1 - a) * random.standard_normal(hosts)
        second = b * second + (1 - b) * first
        if row >= 0:
            found[row] = second
    return found / np.sqrt(variance)


def slews(random: np.random.Generator, seconds: int, machines: int) -> Floats:
    """What time services do: a new frequency every 16 to 64 s on every fourth machine, and on the first."""
    found = np.zeros((seconds, machines))
    for machine in range(0, machines, 4):
        at, ppb = 0, random.uniform(-30_000, 30_000)
        while at < seconds:
            found[at:, machine] = ppb
            at += int(random.integers(16, 65))
            ppb += random.choice([-1, 1]) * np.exp(random.uniform(np.log(1), np.log(2000)))
    return found


def simulate(seed: int, machines: int = 200, hosts: int = 50, seconds: int = max(SPANS), wander: float = 1.0) -> Fleet:
    """A fleet; machines are placed at random, so some hosts have one alone."""
    random = np.random.default_rng(seed)
    host_of = random.integers(0, hosts, machines)
    length = seconds + 2
    own = thermal(random, length, hosts) * np.exp(random.uniform(np.log(30), np.log(300), hosts))
    room = np.sin(2 * np.pi * (np.arange(length) / 600 + random.uniform())) * 200 * np.sqrt(2)
    oscillator = random.uniform(-30_000, 30_000, hosts) + wander * (own + room[:, None] * random.normal(1, 0.5, hosts))
    slew = slews(random, length, machines)
    clock = oscillator[:, host_of] + slew
    relative = clock - clock[:, :1]
    window = (relative[1:-1] + relative[:-2]) / 2  # the two seconds that end where a row's slew is read
    sigma = np.exp(random.uniform(np.log(2), np.log(20), machines))
    white = random.standard_normal((seconds + 1, machines))
    noise = sigma * (white[1:] + white[:-1]) / np.sqrt(2)
    noise[:, 0] = 0.0  # the reference against itself
    stated = np.tile(sigma * random.uniform(0.8, 1.25, machines), (seconds, 1))
    stated[:, 0] = 0.0
    drift = np.where(random.uniform(size=noise.shape) < 0.01, np.nan, window + noise)
    return Fleet(host_of, drift, stated, slew[1:-1])


def by_mean(fleet: Fleet, seconds: int) -> Pairs:
    """The peer: machines whose mean frequencies lie within four standard deviations, and all they chain to."""
    ppb = fleet.drift[:seconds] - fleet.slew[:seconds]
    mean, error = np.nanmean(ppb, axis=0), fleet.sigma[0] * np.sqrt(2 / seconds)
    order = np.argsort(mean)
    apart = np.diff(mean[order]) > 4 * np.hypot(error[order[1:]], error[order[:-1]])
    return {
        pair
        for chain in np.split(order, np.flatnonzero(apart) + 1)
        for pair in paired(fleet.names[machine] for machine in chain)
    }


def found_pairs(fleet: Fleet, seconds: int) -> Pairs:
    """The estimator's pairs."""
    result = groups(fleet.history(seconds))
    return {pair for group in result.groups for pair in paired(group.hosts)}


def accuracy(wander: float, label: str) -> None:
    """Precision and recall after each span."""
    fleets = [simulate(seed, wander=wander) for seed in SEEDS]
    for seconds in SPANS:
        true = [fleet.pairs() for fleet in fleets]
        ours = [found_pairs(fleet, seconds) for fleet in fleets]
        peers = [by_mean(fleet, seconds) for fleet in fleets]
        wrong = sum(len(found - truth) for found, truth in zip(ours, true, strict=True))
        note(f"{label}{seconds} s: {sum(map(len, ours))} pairs found, {wrong} of them false")
        case = f"{label}s{seconds}"
        count = sum(map(len, true))
        for name, figure in (("precision", precision), ("recall", recall)):
            value, peer = figure(ours, true), figure(peers, true)
            emit("collocation", name, value, "share", "higher", case=case, peer="by_mean", peer_value=peer, n=count)


def precision(found: list[Pairs], true: list[Pairs]) -> float:
    """Share of the pairs found that are true; one when none is found."""
    count = sum(map(len, found))
    return sum(len(each & truth) for each, truth in zip(found, true, strict=True)) / count if count else 1.0


def recall(found: list[Pairs], true: list[Pairs]) -> float:
    """Share of the true pairs that are found."""
    return sum(len(each & truth) for each, truth in zip(found, true, strict=True)) / sum(map(len, true))


def cost(machines: int) -> None:
    """CPU time of one verdict on two minutes of a large fleet."""
    fleet = simulate(0, machines, machines // 4)
    history = fleet.history(max(SPANS))
    times = []
    for _ in range(3):
        begin = time.process_time()
        groups(history)
        times.append(time.process_time() - begin)
    emit("collocation", "verdict", median(times), "s", "lower", case=f"n{machines}", n=len(times))


def main() -> None:
    """All figures."""
    accuracy(1.0, "")
    accuracy(QUIET, "quiet_")
    for machines in (100, 1000, LARGE):
        cost(machines)


if __name__ == "__main__":
    main()
