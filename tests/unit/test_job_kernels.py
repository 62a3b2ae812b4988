"""The agent finds the rings of ranks by itself: processes that call the plugin as NCCL does, one of them late."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import support
from nccl_kit import Job as Process
from nccl_kit import built

from pytools.config import AgentConfig, Tcp, Windows
from pytools.errors import RefusedError
from pytools.estimators.collectives import OPERATION
from pytools.ipc.bus import Bus
from pytools.signals import Job, JobVerdict
from pytools.sources.jobs.kernels import summarise
from pytools.sources.jobs.nccl import ring as rings
from pytools.sources.jobs.nccl.ring import Ring
from pytools.sources.jobs.source import JobSource
from pytools.sources.tcp.connections import Feed

pytestmark = pytest.mark.slow

LONG_NS, LATE_NS = 5_000_000, 2_000_000  # what a kernel lasts, and by how much shorter that of a late rank
BATCH = 10  # collectives between two meetings


class Ranks:
    """Two ranks, which do the same collectives, a batch at a time."""

    def __init__(self, places: list[Path | None], late: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self._stack, self._stop = contextlib.ExitStack(), threading.Event()
        self.processes = []
        for rank, place in enumerate(places):
            for name, value in {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "n1", "MASTER_PORT": os.getpid()}.items():
                monkeypatch.setenv(name, str(value))
            self.processes.append(self._stack.enter_context(Process(place, 5)))
            self.processes[-1].do(f"init 77 2 {rank}")
        lasting = [LONG_NS - LATE_NS * (rank == late) for rank in range(2)]
        self._threads = [
            threading.Thread(target=self._work, args=each) for each in zip(self.processes, lasting, strict=True)
        ]
        self._meeting = threading.Barrier(2)
        for each in self._threads:
            each.start()

    def _work(self, process: Process, lasting: int) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            while not self._stop.is_set():
                self._meeting.wait(30)
                process.do(f"last AllReduce {BATCH} {lasting}")

    def close(self) -> None:
        self._stop.set()
        for each in self._threads:
            each.join()
        self._stack.close()


@contextlib.contextmanager
def watched() -> Iterator[Any]:
    """A source; gives what waits for a verdict on the job of these tests."""
    bus = Bus()
    source = JobSource(AgentConfig("h1", [], tcp=Tcp(namespaces="all"), windows=Windows(long_ms=1000)), bus, Feed())
    listening = bus.subscribe(frozenset({"job"}))

    def until(condition: Any, what: str) -> JobVerdict:
        def met() -> JobVerdict | None:
            source.tick(time.monotonic_ns())
            jobs = [each for each in listening.read() if isinstance(each, Job) and each.job.endswith(f":{os.getpid()}")]
            return next((each.why for each in jobs if each.why is not None and condition(each.why)), None)

        found = support.wait_until(met, 60, what)
        assert found is not None
        return found

    try:
        yield until
    finally:
        source.close()


def late_rank(why: JobVerdict) -> int | None:
    return next((each.rank for each in why.causes if each.kind == "straggler"), None)


def can_be_read(place: Path) -> bool:
    """Whether nobody else reads the rings there."""
    try:
        for each in rings.find([place]):
            Ring(each).close()
    except RefusedError:
        return False
    return True


def test_the_rank_that_others_wait_for_is_named_and_the_plugin_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built("address,undefined")
    places: list[Path | None] = [tmp_path / "a", tmp_path / "b"]  # as two containers have
    with contextlib.closing(Ranks(places, 1, monkeypatch)), watched() as until:
        why = until(lambda why: late_rank(why) is not None, "the late rank is named")
        cause = next(each for each in why.causes if each.kind == "straggler")
        assert cause.rank == 1 and "ranks" not in why.missing
        assert why.step is not None and (why.step.source, why.step.operations) == ("nccl", 1)
    for place in places:
        assert place is not None
        support.wait_until(functools.partial(can_be_read, place), 20, "nobody reads the ring any more")


def test_a_late_rank_of_which_a_sample_was_recorded(tmp_path: Path) -> None:
    made = np.zeros(2_000, OPERATION)
    made["number"], made["process"] = np.repeat(np.arange(1_000), 2), np.tile([0, 1], 1_000)
    made["rank"], made["start_ns"], made["function"] = made["process"], made["number"] * 1_000_000, b"AllReduce"
    made["duration_ns"] = np.where(made["rank"] == 1, LONG_NS - LATE_NS, LONG_NS)
    members = [("job", SimpleNamespace(own_pid=pid, uid=0, place=SimpleNamespace(rank=pid))) for pid in (0, 1)]
    files: Any = {each: SimpleNamespace(path=tmp_path / "x", pid=each, user=0) for each in (0, 1)}
    place: Any = SimpleNamespace(path=tmp_path, members=members)
    recorded = made[made["number"] % 400 < 50]
    late = summarise(recorded, files, [place])["job"].late
    assert late is not None and (late.rank, late.late_ns, late.collectives) == (1, LATE_NS, 150)
    assert late.interval_ns == pytest.approx(1_000_000)  # of all, recorded or not


def test_without_a_late_rank_nobody_is_named_though_all_were_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Ranks([tmp_path / "a"] * 2, None, monkeypatch)), watched() as until:
        why = until(lambda why: "ranks" not in why.missing, "the ranks are compared")
        assert late_rank(why) is None


def test_ranks_whose_rings_another_reads_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = tmp_path / f"{rings.WATCHED}x"
    with contextlib.closing(Ranks([watching] * 2, 1, monkeypatch)), watched() as until:
        why = until(lambda why: "swerve jobs watch" in why.missing.get("ranks", ""), "it is said who reads them")
        assert late_rank(why) is None and why.verdict != "healthy"
        assert can_be_read(watching)
