"""Timers of two GPUs of one host: what relating both to CLOCK_MONOTONIC says, against comparing them over NVLink.

    python bench/gpu_clock.py [--seconds 180] [--torch PYTHON]

The agent's code relates the timer of each GPU to CLOCK_MONOTONIC (pytools/sources/gpu). Ten times a second a kernel on
the first GPU also pings one on the second through memory of each other: of such a ping all stamps are of GPUs. How its
questions meet the polls of the other side errs by 60 ns at most either way, so the mean over a second is compared. With
--torch, both GPUs multiply matrices meanwhile in a process of that Python, and what the readings cost them is measured.

difference   p50, p99, mean, std (ns): timer 1 minus timer 0 through the host, less the same over NVLink
coverage     share of comparisons within the sum of the bounds of both lines
bound_p50    that sum
slowdown     share of the products per second that the readings cost (with --torch)

Standard error also says how many CPUs pinged, and what the clocks of CPUs and of packages seem to differ by: how much
further ahead a GPU's timer is, less its drift, when the next burst comes from another CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from _common import emit, median, note
from numpy.typing import NDArray

from pytools.errors import CapabilityError
from pytools.estimators.gpu_clocks import Pings, between, cpu_differences
from pytools.estimators.offsets import Offset
from pytools.signals import GpuClock
from pytools.sources.gpu.clocks import GpuClocks
from pytools.sources.gpu.cuda import Driver, Gpu
from pytools.sources.gpu.pings import ANY_CPU

MEAN_NS, LEAST = 1_000_000_000, 5  # of direct comparisons: bursts in a mean, at least
PINGS, EVERY_S, TIMEOUT_NS = 64, 0.1, 200_000_000
POLL_NS = 128  # round trips this much above the smallest differ only by how they met the polls
LEAST_PINGS = 25  # that a line rests on: those of seven bursts
NEAR_NS = 1_000_000_000  # a comparison and the middle of the window of a line
TURNS, TURN_S = 6, 5.0
PAIRS = 10  # of CPUs that are noted
MULTIPLY = """
import sys, time, torch
parts = [[torch.randn(4096, 4096, device=f"cuda:{n}", dtype=torch.bfloat16) for _ in range(2)] for n in range(2)]
done, since = 0, time.monotonic()
while True:
    for a, b in parts:
        for _ in range(20):
            a @ b
    for n in range(2):
        torch.cuda.synchronize(n)
    done += 40
    if time.monotonic() - since > 0.5:
        print(done / (time.monotonic() - since), flush=True)
        done, since = 0, time.monotonic()
"""


class Direct:
    """Pings from one GPU to another, without the host."""

    def __init__(self, driver: Driver) -> None:
        self._driver, (self.first, self.second) = driver, (Gpu(driver, 0), Gpu(driver, 1))
        for one, other in ((self.first, self.second), (self.second, self.first)):
            with one.current():
                driver.call("cuCtxEnablePeerAccess", other.context, 0)
        self._asked = self._memory(self.second, 4)
        self._answers = self._memory(self.first, 8 * (PINGS + 1))
        self._record = self._memory(self.first, 24 * (PINGS + 1))

    def _memory(self, gpu: Gpu, size: int) -> tuple[Gpu, ctypes.c_uint64, int]:
        address = ctypes.c_uint64()
        with gpu.current():
            self._driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return gpu, address, size

    def burst(self) -> tuple[int, float, int] | None:
        """Time of the first GPU, timer 1 minus timer 0, smallest round trip; None if a kernel ended early."""
        for gpu, address, size in (self._asked, self._answers, self._record):
            with gpu.current():
                self._driver.call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
            gpu.wait()
        asked, answers, record = self._asked[1], self._answers[1], self._record[1]
        limit = ctypes.c_uint32(PINGS), ctypes.c_uint64(TIMEOUT_NS)
        self.second.launch("reflect", asked, answers, *limit)
        self.first.launch("ask", asked, answers, record, *limit)
        self.first.wait()
        self.second.wait()
        rows = np.zeros((PINGS + 1, 3), np.int64)
        with self.first.current():
            self._driver.call(
                "cuMemcpyDtoH_v2", ctypes.c_void_p(rows.ctypes.data), record, ctypes.c_size_t(rows.nbytes)
            )
        rows = rows[1:]  # the first is the start of the other kernel
        if not rows.all():
            return None
        return between(rows, POLL_NS)


def measure(direct: Direct, seconds: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Differences between the two ways, and the sums of the bounds."""
    lines: dict[str, list[GpuClock]] = defaultdict(list)
    heard: dict[str, list[tuple[int, Pings]]] = defaultdict(list)
    clocks = GpuClocks(
        "bench",
        lambda signal: lines[signal.uuid].append(signal),
        heard=lambda uuid, cpu, pings: heard[uuid].append((cpu, pings)),
    )
    bursts: list[tuple[int, float, int]] = []
    early, end_s, due_s = 0, time.monotonic() + seconds, 0.0
    try:
        while time.monotonic() < end_s:
            clocks.tick(time.monotonic_ns())
            if clocks.problem:
                raise SystemExit(clocks.problem)
            if time.monotonic() >= due_s:
                due_s = time.monotonic() + EVERY_S
                burst = direct.burst()
                early += burst is None
                bursts += [burst] if burst is not None else []
            time.sleep(0.01)
    finally:
        clocks.close()
    trip = min(each[2] for each in bursts)
    bursts = [each for each in bursts if each[2] <= trip + POLL_NS]
    note(f"{len(bursts)} direct comparisons, smallest round trip {trip} ns; {early} bursts ended early")
    first, second = (
        [each for each in lines[gpu.uuid] if each.pings > LEAST_PINGS] for gpu in (direct.first, direct.second)
    )
    note(f"lines: {len(first)} and {len(second)}; last bounds {first[-1].bound_ns} and {second[-1].bound_ns} ns")
    trips = [min(each.round_trip_min_ns for each in side) for side in (first, second)]
    note(f"smallest round trips through the host: {trips[0]} and {trips[1]} ns")
    note_cpus([(heard[gpu.uuid], own) for gpu, own in ((direct.first, first), (direct.second, second))])
    differences, bounds = [], []
    times, values = np.array([each[0] for each in bursts]), np.array([each[1] for each in bursts])
    for at_ns in range(int(times[0]) + MEAN_NS // 2, int(times[-1]) - MEAN_NS // 2, MEAN_NS // 4):
        near = np.abs(times - at_ns) <= MEAN_NS // 2
        if np.count_nonzero(near) < LEAST:
            continue
        over_nvlink = float(np.polynomial.Polynomial.fit((times[near] - at_ns) * 1e-9, values[near], 1)(0.0))
        at_host_ns = at_ns - int(_line(first[-1]).at(at_ns - first[-1].offset_ns))
        one, other = (min(side, key=lambda each: abs(each.epoch_ns - at_host_ns)) for side in (first, second))
        if max(abs(each.epoch_ns - at_host_ns) for each in (one, other)) > NEAR_NS:
            continue
        through_host = int(_line(other).at(at_host_ns)) - int(_line(one).at(at_host_ns))
        differences.append(through_host - over_nvlink)
        bounds.append(float(one.bound_ns + other.bound_ns))
    return np.array(differences), np.array(bounds)


def note_cpus(gpus: Sequence[tuple[list[tuple[int, Pings]], list[GpuClock]]]) -> None:
    """Say from how many CPUs the bursts of each GPU came, and what the clocks of CPUs seem to differ by."""
    by_cpu, by_package = defaultdict(list), defaultdict(list)
    used, astray, early = set(), 0, 0
    for bursts, lines in gpus:
        kept = [(cpu, pings) for cpu, pings in bursts if cpu != ANY_CPU and len(pings)]
        used |= {cpu for cpu, _pings in kept}
        astray += sum(cpu == ANY_CPU for cpu, _pings in bursts)
        early += sum(not len(pings) for _cpu, pings in bursts)
        epochs = np.array([each.epoch_ns for each in lines])
        drifts = [lines[int(np.abs(epochs - pings[0, 0]).argmin())].drift_ppb for _cpu, pings in kept]
        changes = cpu_differences([cpu for cpu, _pings in kept], [pings for _cpu, pings in kept], drifts)
        for (one, other), differences in changes.items():
            by_cpu[one, other] += differences
            first, second = package(one), package(other)
            if first < second:
                by_package[first, second] += differences
            elif second < first:
                by_package[second, first] += [-each for each in differences]
    packages = {package(cpu) for cpu in used}
    note(f"bursts from {len(used)} CPUs of {len(packages)} packages; {astray} from no single CPU, {early} ended early")
    most = sorted(by_cpu, key=lambda pair: -len(by_cpu[pair]))[:PAIRS]
    for what, found, pairs in (("CPU", by_cpu, most), ("package", by_package, sorted(by_package))):
        for one, other in pairs:
            low, middle, high = np.percentile(found[one, other], [25, 50, 75])
            size = len(found[one, other])
            note(f"{what} {one} less {other}: median {middle:+.0f}, quartiles {low:+.0f} and {high:+.0f} ns, n {size}")


def package(cpu: int) -> int:
    """The package (socket) that a CPU is in; -1 where that is not known."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id").read_text())
    return -1


def _line(clock: GpuClock) -> Offset:
    return Offset(clock.epoch_ns, clock.offset_ns, clock.drift_ppb, clock.sigma_ns, clock.drift_sigma_ppb, 0, 0)


def report(case: str, differences: NDArray[np.float64], bounds: NDArray[np.float64]) -> None:
    """Print the figures of a case."""
    size, n = np.abs(differences), len(differences)
    emit("gpu_clock", "difference_p50", float(np.median(size)), "ns", "lower", case=case, n=n)
    emit("gpu_clock", "difference_p99", float(np.percentile(size, 99)), "ns", "lower", case=case, n=n)
    emit("gpu_clock", "difference_mean", float(differences.mean()), "ns", "lower", case=case, n=n)
    emit("gpu_clock", "difference_std", float(differences.std()), "ns", "lower", case=case, n=n)
    emit("gpu_clock", "coverage", float((size <= bounds).mean()), "share", "higher", case=case, n=n)
    emit("gpu_clock", "bound_p50", float(np.median(bounds)), "ns", "lower", case=case, n=n)


@contextlib.contextmanager
def multiplying(python: str) -> Iterator[subprocess.Popen[str]]:
    """Both GPUs are busy; the process prints products per second."""
    process = subprocess.Popen([python, "-c", MULTIPLY], stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    try:
        if not process.stdout.readline():
            raise SystemExit("the process that multiplies has ended")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def slowdown(process: subprocess.Popen[str]) -> float:
    """The share of the products that the readings cost, in turns without and with them."""
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for side in (0, 1):
            clocks = GpuClocks("bench", lambda _signal: None) if side else None
            end_s, skip = time.monotonic() + TURN_S, 3
            while time.monotonic() < end_s:
                if clocks is not None:
                    clocks.tick(time.monotonic_ns())
                rate = float(process.stdout.readline())
                skip -= 1
                if skip < 0 and (clocks is None or clocks.running):
                    rates[side].append(rate)
            if clocks is not None:
                clocks.close()
    return 1 - median(rates[1]) / median(rates[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--torch", metavar="PYTHON", help="Python with PyTorch: measure with both GPUs busy as well")
    options = parser.parse_args()
    try:
        driver = Driver()
    except CapabilityError as error:
        note(f"gpu_clock: skipped: {error}")
        return
    if driver.count() < 2:
        note("gpu_clock: skipped: it needs two GPUs")
        return
    direct = Direct(driver)
    report("idle", *measure(direct, options.seconds))
    if options.torch:
        with multiplying(options.torch) as process:
            report("busy", *measure(direct, options.seconds / 3))
            emit("gpu_clock", "slowdown", slowdown(process), "share", "lower", case="busy", n=TURNS)


if __name__ == "__main__":
    main()
