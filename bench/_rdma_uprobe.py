"""What the uprobes on verbs providers cost, on a stand-in library whose device is memory: BPF run time and all of it.

An application posts one request and polls one completion, in a loop. Run time is that of each program, net of an empty
one of the same kind at the same place in the same run. The whole time a hit takes, most of which is the breakpoint
itself, is the loop's with the probes less the loop's without, and stands beside that of empty probes.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import native_build
import numpy as np
from _common import alternating, emit, median, note, wait_until, whole

from pytools.kernel.bpf import syscall
from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.bpf.syscall import RunTime
from pytools.kernel.bpf.uprobes import Uprobe
from pytools.sources.rdma import providers
from pytools.sources.rdma.providers import PROBES, Uprobes

ROUNDS = 9
PAIRS = 3_000
VERBS = {
    "classic": ("post_send", "poll_cq"),
    "extended": ("wr_rdma_write", "wr_set_sge", "wr_complete", "start_poll", "end_poll"),
}
LOOPS = {"classic": "loop 0 0", "extended": "loopx 1 1"}
SAMPLED = {"timed_all": 0, "untimed": 2**64 - 1}  # run_mask


def main() -> None:
    """All figures."""
    note("rdma: the uprobes, on a stand-in library")
    ours = providers.program()
    program = Program(
        ours.source, (*ours.functions, "rdma_empty"), ours.defines, {**ours.kinds, "rdma_empty": "uprobe"}
    )
    with whole(load([program])) as loaded, tempfile.TemporaryDirectory() as devices, native_build.App() as app:
        Path(devices, "alpha0").mkdir()
        for command in ("open alpha0", "cq 0 1024", "cqx 0 1024 5", "qp 0 0 0 128 8 0 -1", "qpx 0 1 1 128 8 0 -1"):
            app.do(command)
        for api in VERBS:
            run_time(loaded, Path(devices), app, api)
        total(loaded, Path(devices), app)


@contextlib.contextmanager
def attached(loaded: Loaded, devices: Path) -> Iterator[Uprobes]:
    """Our probes."""
    probes = Uprobes(loaded, devices, environment=native_build.environment())
    try:
        wait_until(lambda: probes.tick(time.monotonic_ns()) and probes.tables(), "the probes are attached")
        yield probes
    finally:
        probes.close()


@contextlib.contextmanager
def empty_probes(loaded: Loaded, probes: Uprobes, api: str) -> Iterator[None]:
    """The program that does nothing, wherever ours are for this way to post."""
    with contextlib.ExitStack() as stack:
        for verb in VERBS[api]:
            for name, at_return in zip(PROBES[verb], (False, True), strict=True):
                for path, offset in probes.places(verb) if name else ():
                    stack.enter_context(Uprobe(loaded.programs["rdma_empty"], path, offset, at_return))
        yield


def loop(app: native_build.App, api: str) -> float:
    """Nanoseconds of a post and its poll."""
    return float(app.do(f"{LOOPS[api]} {PAIRS}")[0])


def run_time(loaded: Loaded, devices: Path, app: native_build.App, api: str) -> None:
    """Of each program, and of all hits of a post and its poll together."""
    names = [name for verb in VERBS[api] for name in PROBES[verb] if name]
    with attached(loaded, devices) as probes, empty_probes(loaded, probes, api):
        for case, mask in SAMPLED.items():
            loop(app, api)
            probes.tables()[0].records["run_mask"][:] = np.uint64(mask)
            found: dict[str, list[float]] = {name: [] for name in (*names, "mean")}
            for _ in range(ROUNDS):
                before = {name: syscall.program_run_time(loaded.programs[name]) for name in (*names, "rdma_empty")}
                with RunTime():
                    loop(app, api)
                after = {name: syscall.program_run_time(loaded.programs[name]) for name in before}
                spent = {name: after[name][0] - before[name][0] for name in before}
                runs = {name: after[name][1] - before[name][1] for name in before}
                nothing = spent["rdma_empty"] / runs["rdma_empty"]
                for name in names:
                    found[name].append(spent[name] / runs[name] - nothing)
                hits = sum(runs[name] for name in names)
                found["mean"].append(sum(spent[name] for name in names) / hits - nothing)
            for name, values in found.items():
                short = name.removeprefix("rdma_")
                emit(
                    "rdma", "run_time", median(values), "ns/hit", "lower", case=f"uprobe_{api}_{case}_{short}", n=ROUNDS
                )


def total(loaded: Loaded, devices: Path, app: native_build.App) -> None:
    """Everything that a hit costs the application, ours beside empty ones."""
    hits = sum(bool(name) for verb in VERBS["classic"] for name in PROBES[verb])

    def bare() -> float:
        return loop(app, "classic")

    def ours() -> float:
        with attached(loaded, devices) as probes:
            app.do(f"{LOOPS['classic']} 10")
            probes.tables()[0].records["run_mask"][:] = np.uint64(0)
            return loop(app, "classic")

    def nothing() -> float:
        with empty_probes(loaded, places, "classic"):
            return loop(app, "classic")

    with attached(loaded, devices) as places:
        pass
    without, with_ours, with_empty = alternating(ROUNDS, bare, ours, nothing)
    each = median([(more - less) / hits for more, less in zip(with_ours, without, strict=True)])
    empty = median([(more - less) / hits for more, less in zip(with_empty, without, strict=True)])
    emit(
        *("rdma", "hit", each, "ns/hit", "lower"),
        case="uprobe_classic",
        peer="empty_uprobe",
        peer_value=empty,
        n=ROUNDS,
    )


if __name__ == "__main__":
    main()
