"""What it costs an application that its RDMA requests are counted, on a stand-in verbs library whose device is memory.

The tap: an application with it and one without do the same in turn, and the median of the differences is what the tap
takes of the processor: for a post and a poll in a loop, and as a share of a core at 100,000 requests a second in
bursts of 100. The stand-in's own share is told beside it. Times are taken of all requests, of one run in 16, of none;
the last loop is that of a queue pair which several threads have used at once. The uprobes: see _rdma_uprobe.py.
"""

from __future__ import annotations

import contextlib
import selectors
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import _rdma_uprobe
import native_build
import numpy as np
from _common import alternating, emit, median, note

from pytools.kernel.bpf import loader
from pytools.kernel.native import TAP
from pytools.sources.rdma.tap_server import TapServer, TapTable

ROUNDS = 101
PAIRS = 200_000
PACE_ROUNDS = 25
BURST, INTERVAL_NS, BURSTS = 100, 1_000_000, 250  # 100,000 requests a second
SAMPLED = {"timed_all": 0, "timed_16th": 15, "untimed": 2**64 - 1}  # run_mask


@contextlib.contextmanager
def serving() -> Iterator[tuple[Path, TapServer]]:
    """An agent's tap server at a socket, served by a thread of its own."""
    with loader.load([loader.Program("rdma.c", ())]) as loaded, tempfile.TemporaryDirectory() as directory:
        record = loaded.map("rdma_table").value
        selector, stop = selectors.DefaultSelector(), threading.Event()
        socket = Path(directory) / "bench.tap"
        server = TapServer(socket, record, loaded.map("rdma_table").max_entries)
        server.register(selector)

        def serve() -> None:
            while not stop.is_set():
                for key, mask in selector.select(0.05):
                    key.data(mask)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield socket, server
        finally:
            stop.set()
            thread.join()
            server.close()
            selector.close()


def prepared(app: native_build.App) -> native_build.App:
    """One device, a classic pair of queues (0) and an extended one (1)."""
    for command in ("open alpha0", "cq 0 1024", "cqx 0 1024 5", "qp 0 0 0 128 8 0 -1", "qpx 0 1 1 128 8 0 -1"):
        app.do(command)
    return app


def loop(app: native_build.App, command: str) -> float:
    """Nanoseconds of processor time for a post and its poll."""
    return float(app.do(f"{command} {PAIRS}")[0])


def share(app: native_build.App) -> float:
    """Of a core, at 100,000 requests a second."""
    used_ns, took_ns = map(int, app.do(f"pace 0 0 {BURST} {INTERVAL_NS} {BURSTS}"))
    return used_ns / took_ns


def difference(within: Sequence[float], without: Sequence[float]) -> float:
    """What the tap adds; each run is compared with the one beside it, for the machine's speed varies."""
    return median([more - less for more, less in zip(within, without, strict=True)])


def costs(bare: native_build.App, tapped: native_build.App, table: TapTable) -> None:
    """The tap's share of a loop and of a core."""

    def measure(command: str, case: str, mask: int) -> None:
        table.records["run_mask"][:] = np.uint64(mask)
        without, within = alternating(ROUNDS, lambda: loop(bare, command), lambda: loop(tapped, command))
        emit(
            *("rdma", "tap", difference(within, without), "ns/post+poll", "lower"),
            case=case,
            peer="stand_in_alone",
            peer_value=median(without),
            n=ROUNDS,
        )

    for command, api in (("loop 0 0", "classic"), ("loopx 1 1", "extended")):
        for case, mask in SAMPLED.items():
            measure(command, f"{api}_{case}", mask)
    for app in (bare, tapped):
        app.do("threads 1 0 4 20000")  # from then on it is shared
    measure("loop 0 0", "shared_timed_all", 0)
    without, within = alternating(PACE_ROUNDS, lambda: share(bare), lambda: share(tapped))
    emit(
        *("rdma", "cpu", difference(within, without), "share", "lower"),
        case="tap_100k",
        peer="stand_in_alone",
        peer_value=median(without),
        n=PACE_ROUNDS,
    )


def tap() -> None:
    """Everything about the tap."""
    note("rdma: the tap, against the same application without it")
    with serving() as (socket, server):
        more = {"LD_AUDIT": str(TAP.ready()), "SWERVE_TAP_SOCKET": str(socket)}
        with native_build.App() as bare, native_build.App(more=more) as tapped:
            prepared(bare)
            prepared(tapped)
            (table,) = server.tables()
            costs(bare, tapped, table)
            row = table.records[0].copy()
            assert row["posted"] == row["completed"] > PAIRS, "the tap did not count what was measured"


if __name__ == "__main__":
    tap()
    _rdma_uprobe.main()
