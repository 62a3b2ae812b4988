"""What the benchmarks share: one JSON object a figure on standard output, paired runs, kernel run times, a veth pair.

Every comparison runs its sides in turn in one process and quotes medians. Times are nanoseconds of CLOCK_MONOTONIC
unless a name says otherwise. Progress goes to standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from pytools.errors import SwerveError
from pytools.kernel.bpf import syscall
from pytools.kernel.bpf.attach import Direction, attach_tc
from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.bpf.syscall import RunTime
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import namespaces, processes, wiring

DEVICE = "v0"
ADDRESSES = (("10.77.0.1", "fd77::1"), ("10.77.0.2", "fd77::2"))
_DEADLINE_S = 20.0
_OPTIONS = {
    "pairs": "Runs of each side",
    "rounds": "Rounds of each measurement, or agents of each kind",
    "seconds": "Seconds of traffic a run",
    "pods": "Network namespaces",
    "window": "Seconds of a window",
    "turnaround": "Seconds of replies",
    "junk": "Seconds of junk",
}
_Result = TypeVar("_Result")


def read_options(doc: str | None, **defaults: float) -> argparse.Namespace:
    """The options of a benchmark, by their defaults; one whose default is a whole number takes whole numbers."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=type(value), default=value, help=f"{_OPTIONS[name]} (default: {value}).")
    return parser.parse_args()


def emit_throughput_ratio(bench: str, pairs: int, on: Callable[[], float], off: Callable[[], float]) -> None:
    """Print what hooks leave of iperf3's throughput: the median of what each pair of runs, with and without, gives."""
    with_it, without = alternating(pairs, on, off)
    note(f"on {[round(x / 1e9, 1) for x in with_it]}, off {[round(x / 1e9, 1) for x in without]} Gbit/s")
    ratio = median([one / other for one, other in zip(with_it, without, strict=True)])
    emit(bench, "throughput_ratio", ratio, "ratio", "higher", case="iperf3", n=pairs)


def emit(
    bench: str,
    name: str,
    value: float,
    unit: str,
    better: Literal["lower", "higher"],
    *,
    case: str = "",
    peer: str | None = None,
    peer_value: float | None = None,
    n: int | None = None,
) -> None:
    """Print one figure; `n` is how many runs or samples its median is taken from."""
    figure: dict[str, object] = {
        "bench": bench,
        "name": name,
        "case": case,
        "value": _rounded(value),
        "unit": unit,
        "better": better,
    }
    if peer is not None and peer_value is not None:
        ratio = _rounded(value / peer_value) if peer_value else None  # JSON has no infinity
        figure |= {"peer": peer, "peer_value": _rounded(peer_value), "ratio": ratio}
    if n is not None:
        figure["n"] = n
    print(json.dumps(figure), flush=True)


def compare(
    bench: str,
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    unit: str,
    better: Literal["lower", "higher"],
    *,
    case: str,
    peer: str,
) -> None:
    """Print the median of several runs beside that of a peer's."""
    emit(bench, name, median(ours), unit, better, case=case, peer=peer, peer_value=median(theirs), n=len(ours))


def _rounded(value: float) -> float:
    """Four significant digits: none of these figures has more."""
    return float(f"{value:.4g}")


def note(text: str) -> None:
    """Say what goes on, beside the figures."""
    print(text, file=sys.stderr, flush=True)


def alternating(rounds: int, *sides: Callable[[], _Result]) -> list[list[_Result]]:
    """Run each side once as a warm-up, then all of them in turn; every other round runs them in reverse.

    Returns
    -------
    list of list
        What each side returned, one per round.
    """
    results: list[list[_Result]] = [[] for _ in sides]
    for side in sides:
        side()
    for turn in range(rounds):
        order = list(enumerate(sides))
        for index, side in reversed(order) if turn % 2 else order:
            results[index].append(side())
    return results


@dataclass(frozen=True)
class Pair:
    """Two namespaces joined by one unshaped veth pair; the device is called the same in both."""

    mark: str
    ends: tuple[str, str]

    def start(self, end: int, argv: Sequence[str], stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """Start a process at one end; it is ended with the pair."""
        return processes.start(self.mark, self.ends[end], argv, stdout=stdout)

    def iperf3_server(self) -> contextlib.AbstractContextManager[None]:
        """A server at the second end."""
        return iperf3_server(functools.partial(self.start, 1))

    def iperf3(self, *options: str) -> float:
        """Bits per second from the first end to the second."""
        return iperf3(functools.partial(self.start, 0), ADDRESSES[1][0], *options)


@contextlib.contextmanager
def veth_pair() -> Iterator[Pair]:
    """Join two fresh namespaces; everything is removed at the end."""
    mark = f"bench-{os.getpid()}"
    ends = (f"swerve-{mark}-a", f"swerve-{mark}-b")
    try:
        for end in ends:
            namespaces.create(end)
        with Netlink(ends[0]) as netlink:
            wiring.add_veth(netlink, wiring.End(DEVICE, 101), wiring.End(DEVICE, 102), ends[1])
        for end, index, addresses in zip(ends, (101, 102), ADDRESSES, strict=True):
            with Netlink(end) as netlink:
                for address, length in zip(addresses, (24, 64), strict=True):
                    wiring.add_address(netlink, index, address, length)
                wiring.set_up(netlink, index)
        yield Pair(mark, ends)
    finally:
        processes.end(mark)
        for end in ends:
            namespaces.delete(end)


@contextlib.contextmanager
def iperf3_server(start: Callable[..., subprocess.Popen[str]]) -> Iterator[None]:
    """An iperf3 server, ready to be connected to; `start` starts a process where it shall be."""
    server = start(["iperf3", "-s", "--forceflush"], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if "Server listening" in line:
                break
        else:
            raise SwerveError("iperf3 did not start", "run it by hand to see why")
        rest = threading.Thread(target=server.stdout.read)  # after some fifty runs a full pipe would stop it for good
        rest.start()
        yield
    finally:
        server.kill()
        server.wait()


def iperf3(start: Callable[..., subprocess.Popen[str]], address: str, *options: str) -> float:
    """Run a client; returns the bits per second that arrived."""
    client = start(["iperf3", "-J", "-c", address, *options], stdout=subprocess.PIPE)
    try:
        report = json.loads(client.communicate(timeout=120)[0])
    finally:
        client.kill()
    if "error" in report:
        raise SwerveError(f"iperf3: {report['error']}")
    end = report["end"]
    return float((end.get("sum_received") or end["sum"])["bits_per_second"])


@dataclass(frozen=True)
class Hook:
    """A loaded program and where it is attached."""

    fd: int
    netns: str
    interface: str
    direction: Direction

    @property
    def place(self) -> tuple[str, str, Direction]:
        """Where it is attached."""
        return self.netns, self.interface, self.direction


def run_times(hooks: Mapping[str, Hook], work: Callable[[], object], rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per packet of each program, net of an empty one that sees the same packets, one value a round.

    The empty program comes first in one round and last in the next, so that neither has the caches warmed for it.
    """
    found: dict[str, list[float]] = {name: [] for name in hooks}
    with contextlib.ExitStack() as stack:
        places = {hook.place for hook in hooks.values()}
        empty = {place: Hook(stack.enter_context(empty_program()).programs["empty"], *place) for place in places}
        both = [*hooks.values(), *empty.values()]
        for turn in range(rounds + 1):
            with contextlib.ExitStack() as attached:
                for hook in both if turn % 2 else reversed(both):
                    with inside(hook.netns):
                        attached.enter_context(attach_tc(hook.fd, hook.interface, hook.direction))
                before = {hook.fd: syscall.program_run_time(hook.fd) for hook in both}
                with RunTime():
                    work()
                each = {hook.fd: per_run(before[hook.fd], syscall.program_run_time(hook.fd)) for hook in both}
            if turn == 0:
                continue  # warm-up
            for name, hook in hooks.items():
                found[name].append(each[hook.fd] - each[empty[hook.place].fd])
    return found


def per_run(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Nanoseconds a run, from two readings of `bpf.program_run_time`."""
    runs = after[1] - before[1]
    if not runs:
        raise SwerveError("a program under test saw no packet")
    return (after[0] - before[0]) / runs


def empty_program() -> Loaded:
    """A fresh copy of the program that does nothing."""
    return whole(load([Program("empty.c", ("empty",))]))


def whole(loaded: Loaded) -> Loaded:
    """The same, once it is known that all of it was loaded."""
    if loaded.failed:
        loaded.close()
        raise SwerveError("; ".join(f"{name}: {reason}" for name, reason in loaded.failed.items()))
    return loaded


@contextlib.contextmanager
def until_left(work: Callable[[], None], end: Callable[[], object]) -> Iterator[None]:
    """Do this in a thread meanwhile; `end` has it return."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end()
        thread.join()


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def wait_until(condition: Callable[[], object], what: str, deadline_s: float = _DEADLINE_S) -> None:
    """Wait for a condition, or give up."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise SwerveError(f"waited {deadline_s:g} s until {what}")
        time.sleep(0.005)


def resident_bytes(pid: int) -> int:
    """Memory in RAM of a process and those it has started; what they share counts for each."""
    pages = [int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in _family(pid)]
    return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, and those it has started which still run."""
    fields = [Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split() for each in _family(pid)]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return [pid, *(each for child in children for each in _family(child))]


def gpus(python: str) -> int:
    """How many GPUs a Python sees by PyTorch; 0 where either is missing."""
    words = [python, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return 0
    return int(said) if said.isdecimal() else 0
