"""A simulated fleet of hosts whose clocks disagree, and coded pairs between them through busy queues.

The model, exactly. A link is an M/G/1 queue: work arrives as a Poisson process of jobs whose service times are Pareto
with shape 1.5; `load` is its utilisation. A probe crosses two such links (the sender's uplink, the receiver's
downlink), waits for the work it finds there, and adds none. The first probe of a pair finds the stationary workload
(a geometric number of residual services); until the second comes, a spacing later, that very workload is served and
new jobs arrive. Pairs are independent of each other. A probe that would wait longer than the buffer is deep is lost.
Both directions have the same propagation delay. Every stamp carries Gaussian noise, and some are wrong by up to
`wild_ns` either way. Times are nanoseconds; float64 only for what is small.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pytools.estimators.windows import MISSING

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Window = tuple[Ints, Ints, Ints, Ints]  # forward_at, forward, reverse_at, reverse, as `fit_edge` takes them
_SHAPE = 1.5


@dataclass(frozen=True)
class Network:
    """What lies between two hosts, and how good their stamps are."""

    load: float = 0.9
    service_ns: float = 1000.0  # mean service time: 1,250 bytes at 10 Gbit/s
    buffer_ns: float = 5e6
    propagation_ns: tuple[float, float] = (1500.0, 10_000.0)  # drawn per edge, the same both ways
    noise_ns: float = 20.0  # of each stamp
    wild_share: float = 0.0  # of the stamps
    wild_ns: float = 500.0
    pairs_per_s: int = 200
    spacing_ns: float = 10_000.0


@dataclass(frozen=True)
class Clocks:
    """Clocks of all hosts: host clock = true time + offset + drift * true time + a sinusoidal wander of the rate."""

    offset_ns: Ints
    drift: Floats
    wander_ppb_per_s: float = 0.0  # the rate changes no faster
    wander_period_s: float = 10.0
    phase: Floats | None = None  # of each host's wander; None: no wander

    def reading(self, host: int, true_ns: Ints) -> Ints:
        """What a host's clock shows."""
        wandered = 0.0 if self.phase is None else self._wandered(true_ns, float(self.phase[host]))
        return true_ns + self.offset_ns[host] + np.rint(self.drift[host] * true_ns + wandered).astype(np.int64)

    def readings(self, true_ns: int) -> Ints:
        """What all clocks show at one instant."""
        wandered = 0.0 if self.phase is None else self._wandered(true_ns, self.phase)
        return true_ns + self.offset_ns + np.rint(self.drift * true_ns + wandered).astype(np.int64)

    def _wandered(self, true_ns: Ints | int, phase: Floats | float) -> Floats:
        """Nanoseconds that the changes of the rate add up to."""
        angular = 2 * np.pi / self.wander_period_s
        moved: Floats = -self.wander_ppb_per_s / angular**2 * np.sin(angular * 1e-9 * true_ns + phase)
        return moved


def draw_clocks(rng: np.random.Generator, hosts: int, offset_ns: int = 10**9, drift_ppm: float = 30.0) -> Clocks:
    """Random clocks."""
    return Clocks(rng.integers(-offset_ns, offset_ns, hosts), rng.uniform(-drift_ppm * 1e-6, drift_ppm * 1e-6, hosts))


def regular_graph(rng: np.random.Generator, hosts: int, neighbours: int) -> NDArray[np.intp]:
    """Edges (owner, peer) such that every host has `neighbours` of them (even): random rings laid over each other."""
    edges: set[tuple[int, int]] = set()
    while len(edges) < hosts * neighbours // 2:
        ring = rng.permutation(hosts)
        new = {(int(min(a, b)), int(max(a, b))) for a, b in zip(ring, np.roll(ring, 1), strict=True)}
        tries = 0
        while len(new | edges) < len(edges) + hosts and tries < 2000:  # swap ends that would repeat an edge
            ring = _mend(rng, ring, edges)
            new = {(int(min(a, b)), int(max(a, b))) for a, b in zip(ring, np.roll(ring, 1), strict=True)}
            tries += 1
        if len(new | edges) == len(edges) + hosts:
            edges |= new
    return np.array(sorted(edges), np.intp)


def ring_graph(rng: np.random.Generator, hosts: int, rings: int) -> NDArray[np.intp]:
    """Edges such that every host owns `rings` of them: as many random rings, which in large graphs hardly meet."""
    circles = [rng.permutation(hosts) for _ in range(rings)]
    return np.concatenate([np.column_stack([circle, np.roll(circle, 1)]) for circle in circles])


def _mend(rng: np.random.Generator, ring: NDArray[np.intp], edges: set[tuple[int, int]]) -> NDArray[np.intp]:
    """Swap the first host whose edge to its predecessor is taken with a random one."""
    ring = ring.copy()
    for place in range(len(ring)):
        pair = (int(min(ring[place], ring[place - 1])), int(max(ring[place], ring[place - 1])))
        if pair in edges:
            other = int(rng.integers(len(ring)))
            ring[place], ring[other] = ring[other], ring[place]
            break
    return ring


def _residual(rng: np.random.Generator, count: int, mean_ns: float) -> Floats:
    """What is left of a Pareto(1.5) service that is met in progress."""
    u = rng.random(count)
    least = mean_ns / 3
    return np.where(u > 2 / 3, (1 - u) * mean_ns, least * (2 / (3 * np.maximum(u, 1e-9))) ** 2)


def stationary_workload(rng: np.random.Generator, count: int, network: Network) -> Floats:
    """Work that a probe finds (Pollaczek-Khinchine: a geometric number of residual services)."""
    jobs = rng.geometric(1 - network.load, count) - 1 if network.load else np.zeros(count, np.int64)
    total = int(jobs.sum())
    owner = np.repeat(np.arange(count), jobs)
    return np.asarray(np.bincount(owner, _residual(rng, total, network.service_ns), count), np.float64)


def later_workload(rng: np.random.Generator, work: Floats, gap_ns: Floats, network: Network) -> Floats:
    """The same queues a gap later: served at one nanosecond a nanosecond while new jobs arrive."""
    if not network.load:
        return np.maximum(work - gap_ns, 0.0)
    mean_gap = network.service_ns / network.load
    least = network.service_ns / 3
    work, left = work.copy(), np.maximum(gap_ns, 0.0)
    alive = np.arange(len(work))
    while len(alive):
        step = rng.exponential(mean_gap, len(alive))
        comes = step < left[alive]
        passed = np.where(comes, step, left[alive])
        work[alive] = np.maximum(work[alive] - passed, 0.0)
        left[alive] -= passed
        alive = alive[comes]
        work[alive] += least * rng.random(len(alive)) ** (-1 / _SHAPE)
    return work


def queueing(rng: np.random.Generator, trains: int, network: Network, length: int = 2) -> Floats:
    """Waiting times of all probes of independent trains over two links, shape (trains, length)."""
    gaps = [np.full(trains, network.spacing_ns)] * (length - 1)
    total = np.zeros((trains, length))
    for _ in range(2):  # what leaves the first link a gap apart comes to the second one a longer or shorter gap apart
        waits = [stationary_workload(rng, trains, network)]
        for gap in gaps:
            waits.append(later_workload(rng, waits[-1], gap, network))
        gaps = [gap + later - earlier for gap, earlier, later in zip(gaps, waits[:-1], waits[1:], strict=True)]
        total += np.stack(waits, axis=1)
    return total


def _noise(rng: np.random.Generator, shape: tuple[int, ...], network: Network) -> Floats:
    noise = rng.normal(0.0, network.noise_ns, shape)
    if network.wild_share:
        noise += (rng.random(shape) < network.wild_share) * rng.uniform(-network.wild_ns, network.wild_ns, shape)
    return noise


def _stamped(
    rng: np.random.Generator, sent: Ints, delay_ns: float, network: Network, clocks: Clocks, ends: tuple[int, int]
) -> tuple[Ints, Ints]:
    """Stamps of trains of probes at the sender and at the receiver, each of its own clock, shape of `sent`."""
    waited = queueing(rng, len(sent), network, sent.shape[1])
    lost = waited > network.buffer_ns
    arrived = sent + np.rint(np.minimum(waited, 2 * network.buffer_ns) + delay_ns).astype(np.int64)
    out = clocks.reading(ends[0], sent) + np.rint(_noise(rng, sent.shape, network)).astype(np.int64)
    into = clocks.reading(ends[1], arrived) + np.rint(_noise(rng, sent.shape, network)).astype(np.int64)
    return np.where(lost, MISSING, out), np.where(lost, MISSING, into)


def _window(out: Ints, into: Ints, back_out: Ints, back_into: Ints) -> Window:
    """Stamps of both directions as `fit_edge` takes them."""
    return (
        out,
        np.where(out == MISSING, MISSING, into - np.where(out == MISSING, 0, out)),
        back_into,
        np.where(back_into == MISSING, MISSING, back_into - np.where(back_into == MISSING, 0, back_out)),
    )


def edge_window(
    rng: np.random.Generator,
    begin_ns: int,
    span_ns: int,
    network: Network,
    clocks: Clocks,
    owner: int,
    peer: int,
    delay_ns: float,
) -> Window:
    """One window of one edge: pairs at random moments, the directions independent of each other."""
    pairs = network.pairs_per_s * span_ns // 10**9
    stamps: list[Ints] = []
    for ends in ((owner, peer), (peer, owner)):
        starts = np.sort(rng.integers(0, span_ns, pairs)) + begin_ns
        sent = starts[:, None] + np.array([0, int(network.spacing_ns)])
        stamps += _stamped(rng, sent, delay_ns, network, clocks, ends)
    return _window(stamps[0], stamps[1], stamps[2], stamps[3])


@dataclass(frozen=True)
class Stream:
    """Probes of one edge as an agent sends them: trains of three (one that leads a pair), and single ones."""

    train_ns: Ints  # when each train leaves, in true time
    single_ns: Ints
    trains: Window  # shape (trains, 3)
    singles: Window  # shape (singles, 1)

    def window(self, begin_ns: int, end_ns: int) -> tuple[Window, Window]:
        """The pairs of a window and all of its probes, as `fit_edge` takes them."""
        trains = (self.train_ns >= begin_ns) & (self.train_ns < end_ns)
        singles = (self.single_ns >= begin_ns) & (self.single_ns < end_ns)
        a, b, c, d = (times[trains, 1:] for times in self.trains)
        every = [
            np.concatenate([train[trains].ravel(), single[singles].ravel()])
            for train, single in zip(self.trains, self.singles, strict=True)
        ]
        return (a, b, c, d), (every[0], every[1], every[2], every[3])


def edge_stream(
    rng: np.random.Generator,
    span_ns: tuple[int, int],
    network: Network,
    clocks: Clocks,
    ends: tuple[int, int],
    delay_ns: float,
    interval_ns: int,
    pair_every: int,
) -> Stream:
    """Probes of one edge, one train or single probe an interval, every `pair_every`th a train."""
    begin_ns = span_ns[0] + int(rng.integers(0, interval_ns))
    starts = np.arange(begin_ns, span_ns[1], interval_ns)
    is_train = np.arange(len(starts)) % pair_every == 0
    parts: list[Window] = []
    for sent_ns, length in ((starts[is_train], 3), (starts[~is_train], 1)):
        sent = sent_ns[:, None] + np.arange(length) * int(network.spacing_ns)
        out, into = _stamped(rng, sent, delay_ns, network, clocks, ends)
        back_out, back_into = _stamped(rng, sent, delay_ns, network, clocks, ends[::-1])
        parts.append(_window(out, into, back_out, back_into))
    return Stream(starts[is_train], starts[~is_train], parts[0], parts[1])
