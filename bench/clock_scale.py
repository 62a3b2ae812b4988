"""What clocks cost: the fit of one edge per window, and the graph of up to 10,000 hosts with 10 neighbours each.

`edge`: one window of 400 pairs each way, idle (every probe is near the edge: the most work) and at 90 % load, median
of many. `solve`: n hosts, 10 n edges, offsets up to a day, 1 % of the edges wrong by 100 us; `peak` is the resident
memory of a process that does nothing else. One core.
"""

from __future__ import annotations

import os

# Before numpy starts its threads.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")

import multiprocessing
import resource
import statistics
import time

import numpy as np
from _common import emit, note
from _fleet import Network, draw_clocks, edge_window, ring_graph

from pytools.estimators.clock_graph import Edges, solve
from pytools.estimators.clocks import fit_edge

SIZES = (100, 300, 1000, 3000, 10_000)
NEIGHBOURS = 10
DAY_NS = 86_400 * 10**9
NOW = 10**12


def edge_ms(network: Network, windows: int = 60) -> float:
    """Median milliseconds of one fit."""
    rng = np.random.default_rng(1)
    taken = []
    for _ in range(windows):
        clocks = draw_clocks(rng, 2)
        window = edge_window(rng, NOW, 2 * 10**9, network, clocks, 0, 1, 5000.0)
        begin = time.perf_counter()
        fit_edge(*window, tolerance_ns=150, asymmetry_share=0.1)
        taken.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(taken)


def made_edges(hosts: int) -> tuple[Edges, int, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Edges as fits would give them, what the reference reads, and the true offsets against it."""
    rng = np.random.default_rng(hosts)
    clocks = draw_clocks(rng, hosts, DAY_NS)
    owner, peer = ring_graph(rng, hosts, NEIGHBOURS).T
    count = len(owner)
    when = NOW - rng.integers(10**9, 2 * 10**9, count)  # of each edge's epoch
    epoch = when + clocks.offset_ns[owner] + np.rint(clocks.drift[owner] * when).astype(np.int64)
    error = rng.normal(0, 10, count) + (rng.random(count) < 0.01) * 100_000
    offset = np.rint((clocks.drift[peer] - clocks.drift[owner]) * when + error).astype(np.int64)
    offset += clocks.offset_ns[peer] - clocks.offset_ns[owner]
    drift = ((1 + clocks.drift[peer]) / (1 + clocks.drift[owner]) - 1) * 1e9 + rng.normal(0, 12, count)
    fill = np.full(count, 10.0)
    bound = np.full(count, 500)
    edges = Edges(owner, peer, epoch, offset, drift, fill, 1.2 * fill, bound, offset - 5_000, offset + 5_000)
    readings = clocks.readings(NOW)
    return edges, int(readings[0]), readings - readings[0]


def one_size(hosts: int) -> tuple[float, float, float]:
    """Seconds, peak MB, and the 99th percentile of the error."""
    edges, at_ns, truth = made_edges(hosts)
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        clocks = solve(edges, hosts, 0, at_ns)
        taken.append(time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return statistics.median(taken), peak, float(np.percentile(np.abs(clocks.offset_ns - truth), 99))


def main() -> None:
    for case, network in (("idle", Network(load=0.0)), ("load90", Network())):
        emit("clock_scale", "edge", edge_ms(network), "ms/window", "lower", case=case, n=60)
    context = multiprocessing.get_context("spawn")
    for hosts in SIZES:
        with context.Pool(1) as pool:
            seconds, peak, error = pool.apply(one_size, (hosts,))
        growth = seconds / (hosts * np.log(hosts)) * 1e6
        note(f"n{hosts}: {seconds:.3f} s, {growth:.1f} us per n ln n, p99 of the error {error:.0f} ns")
        emit("clock_scale", "solve", seconds, "s", "lower", case=f"n{hosts}", n=3)
        emit("clock_scale", "peak", peak, "MB", "lower", case=f"n{hosts}", n=1)


if __name__ == "__main__":
    main()
