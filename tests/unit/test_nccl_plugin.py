"""The plugin, called as NCCL calls it, by each version of the interface: every count exact, and no harm to the job.

Plugin and caller are built with the sanitizers: a wrong access, an overflow or a race ends the caller.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from nccl_kit import ADDRESS, THREAD, Job, built, built_empty, count_limit
from numpy.typing import NDArray

from pytools.errors import RefusedError, SwerveError
from pytools.estimators import collectives
from pytools.sources.jobs.nccl import ring as rings
from pytools.sources.jobs.nccl.ring import EVENTS, KERNEL, PROXY, RECORDS, Ring
from pytools.sources.jobs.nccl.watching import Watcher, environment

pytestmark = pytest.mark.slow

ALL = EVENTS["operations"] | EVENTS["proxy"] | EVENTS["kernel"]
LONG_NS = 3600 * 1_000_000_000
VERSIONS = (1, 2, 3, 4, 5)


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Job(tmp_path / "rings", *arguments))


@contextlib.contextmanager
def reading(directory: Path, job: Job, events: int) -> Iterator[Ring]:
    """The ring of the only job, with these events on."""
    (path,) = rings.find([directory / "rings"])
    ring = Ring(path)
    ring.want(events, time.monotonic_ns() + LONG_NS)
    job.do(f"mask {events}")
    # The plugin says so after it has told the job.
    support.wait_until(lambda: ring.applied == events, 20, "the mask is said to be in force")
    yield ring
    ring.close()


@contextlib.contextmanager
def reading_job(start: Start, directory: Path, version: int = 5, events: int = ALL) -> Iterator[tuple[Job, Ring]]:
    """A job of one communicator, which ends after the ring was read."""
    job = start(version)
    job.do("init 77 4 1")
    with reading(directory, job, events) as ring:
        yield job, ring
    job.end()


def of(records: NDArray[Any], kind: int) -> NDArray[Any]:
    return records[records["kind"] == kind]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sanitizer", [ADDRESS, THREAD])
def test_every_event_is_read_once(start: Start, tmp_path: Path, version: int, sanitizer: str) -> None:
    job = start(version, sanitizer)
    assert job.do("init 77 4 1") == ["1", "0", "0"]
    assert job.do("run 4 10 3 2") == ["0"] * 6  # nothing is wanted
    with reading(tmp_path, job, ALL) as ring:
        numbers = [int(each) for each in job.do("run 4 25 3 2")]
        kernels = 300 if version >= 3 else 0
        assert numbers == [100 if version == 5 else 0, 100, 100, kernels, 200, 400]
        records = ring.read()
        assert len(ring.read()) == 0
        assert not any(ring.counters().values())
        (row,) = ring.communicators()
    assert (row["hash"], row["rank"], row["interface"], row["name"]) == (77, 1, version, b"world")
    assert row["ranks"] == (4 if version >= 4 else -1)

    operations, proxies = of(records, rings.COLLECTIVE), of(records, PROXY)
    assert len(operations) == 100 and len(of(records, KERNEL)) == kernels and len(proxies) == 200
    assert sorted(operations["number"]) == list(range(40, 140))
    assert set(operations["function"]) == {b"AllReduce"} and set(operations["protocol"]) == {b"SIMPLE"}
    assert set(operations["datatype"]) == {b"ncclFloat32"} and set(operations["algorithm"]) == {b"RING"}
    assert set(operations["bytes"]) == {1024} and set(operations["peer"]) == {3} and set(operations["channel"]) == {3}
    assert (operations["called_ns"] > 0).all() == (version == 5)
    assert (operations["start_ns"] <= operations["stop_ns"]).all()
    assert set(of(records, KERNEL)["parent"]) == (set(operations["id"]) if kernels else set())
    for send in (True, False):
        own = proxies[proxies["send"] == send]
        assert set(own["parent"]) == set(operations["id"])
        assert set(own["bytes"]) == {2000} and set(own["steps"]) == {2} and set(own["peer"]) == {5}
        told = own["wait_ns"] > 200_000  # each state of the first step lasted that long
        assert told.all(axis=0).tolist() == [True, version >= 4 or not send, True]
    durations = collectives.join(records, np.array([row]), time.monotonic_ns())[0]["duration_ns"]
    assert len(durations) == (100 if kernels else 0)
    assert set(durations) == {5002.0} if version >= 4 else (durations > 0).all()
    job.do("finalize")
    job.end()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_empty_plugin_of_the_benchmark_gets_the_same_calls(start: Start, tmp_path: Path, version: int) -> None:
    empty = start(version, ADDRESS, built_empty())
    assert empty.do("init 77 4 1") == ["1", str(EVENTS["kernel"]), "0"]
    job = start(version)
    job.do("init 77 4 1")
    with reading(tmp_path, job, EVENTS["kernel"]):
        expected = job.do("run 2 5 3 2")
    assert empty.do("run 2 5 3 2") == expected and expected[2] == "10"
    for each in (empty, job):
        each.do("finalize")
        each.end()


def test_the_call_that_captures_a_graph_is_not_when_it_runs(start: Start, tmp_path: Path) -> None:
    with reading_job(start, tmp_path, 5, EVENTS["kernel"]) as (job, ring):
        job.do("captured")
        job.do("run 1 3 1 0")
        assert of(ring.read(), rings.COLLECTIVE)["called_ns"].tolist() == [0, 0, 0]


def test_a_full_ring_drops_and_counts(start: Start, tmp_path: Path) -> None:
    job = start(5, THREAD)
    job.do("init 77 4 1")
    with reading(tmp_path, job, EVENTS["kernel"]) as ring:
        job.do(f"run 4 32 {3 * RECORDS // 128 - 1} 0")  # one record more than channels each
        assert ring.counters()["full"] == 2 * RECORDS
        first = ring.read()
        assert len(first) == RECORDS
        job.do("run 4 20 14 0")
        records = ring.read()
        assert len(records) == 1200 and ring.counters()["full"] == 2 * RECORDS
        assert len(set(records["id"]) | set(first["id"])) == RECORDS + 1200
    job.end()


def test_a_job_of_few_collectives_loses_none(start: Start, tmp_path: Path) -> None:
    with reading_job(start, tmp_path, 5, EVENTS["kernel"]) as (job, ring):
        job.do("last AllReduce 300 4000000")  # no more than 125 in the longest period
        operations = of(ring.read(), rings.COLLECTIVE)
        assert operations["number"].tolist() == list(range(300)) and not operations["sample"].any()


def test_a_flood_is_recorded_as_far_as_the_limit(start: Start, tmp_path: Path) -> None:
    with reading_job(start, tmp_path, 5, EVENTS["kernel"]) as (job, ring):

        def flooded() -> NDArray[Any]:
            job.do(f"mask {EVENTS['kernel']}")  # the next period has begun
            (told,) = map(int, job.do("flood"))
            records = ring.read()
            operations = of(records, rings.COLLECTIVE)
            assert len(operations) == told >= count_limit() and operations["sample"][-1] & 1
            assert of(records, KERNEL)["parent"].tolist() == operations["id"].tolist()  # each is whole
            assert len(collectives.join(records, ring.communicators(), time.monotonic_ns())[0]) == told
            return operations

        first, second = flooded(), flooded()
        assert not first["sample"][: count_limit() - 1].any() and second["sample"][0] >> 1 == 1
        assert second["number"][0] == first["number"][-1] + 2  # NCCL goes on counting
        # Of a flood within one period no more is recorded; of this one the next period may have begun meanwhile.
        support.wait_until(lambda: len(flooded()) == count_limit(), 60, "a flood within one period")
        job.do(f"mask {EVENTS['kernel']}")
        support.wait_until(lambda: not _one(job, ring)["sample"] & 1, 20, "nothing is missing any more")
        assert not any(ring.counters().values())


def _one(job: Job, ring: Ring) -> Any:
    job.do("run 1 1 1 0")
    return of(ring.read(), rings.COLLECTIVE)[-1]


def test_threads_reach_the_limit_together(start: Start, tmp_path: Path) -> None:
    job = start(5, THREAD)
    job.do("init 77 4 1")
    with reading(tmp_path, job, EVENTS["kernel"]) as ring:
        told = [int(each) for each in job.do("run 4 1000 1 0")]
        operations = of(ring.read(), rings.COLLECTIVE)
        assert len(operations) == told[2] == told[3] >= count_limit() and (operations["sample"] & 1).any()
        assert not any(ring.counters().values())
        ring.want(EVENTS["kernel"], time.monotonic_ns())
        job.do("mask 0")
        job.do("finalize")
    job.end()


def test_the_mask_lapses(start: Start, tmp_path: Path) -> None:
    with reading_job(start, tmp_path, 5, EVENTS["kernel"]) as (job, ring):
        ring.want(EVENTS["kernel"], time.monotonic_ns())
        job.do("mask 0")
        assert job.do("run 1 10 1 1") == ["0"] * 6
        ring.want(0xFFFFFFFF, time.monotonic_ns() + LONG_NS)
        job.do(f"mask {ALL}")  # what the plugin does not record is not asked for


@pytest.mark.parametrize("version", VERSIONS)
def test_wrong_calls_do_no_harm(start: Start, tmp_path: Path, version: int) -> None:
    with reading_job(start, tmp_path, version) as (job, ring):
        job.do("wrong")
        counters = ring.counters()
        assert counters["foreign"] == 64 and counters["unknown"] > 64
        assert len(ring.read()) == 1  # of the only event that was begun
        job.do("run 1 10 1 1")
        assert len(of(ring.read(), rings.COLLECTIVE)) == 10
        assert ring.counters() == counters
        assert job.do("stale") == ["0"] and ring.counters()["unknown"] == counters["unknown"] + 1


def test_a_destroyed_communicator_takes_its_events_along(start: Start, tmp_path: Path) -> None:
    with reading_job(start, tmp_path) as (job, ring):
        job.do("begin")
        job.do("begin")
        job.do("finalize")
        assert ring.counters()["unfinished"] == 2 and len(ring.read()) == 0
        job.do("unload")
        for rank in range(300):  # rows serve again
            job.do(f"init {rank} 4 {rank}")
            job.do(f"mask {ALL}")  # the limit may be reached in this period
            assert job.do("run 1 1 1 0")[2:4] == ["1", "1"]
            job.do("finalize")
        assert sorted(ring.communicators()["hash"]) == list(range(44, 300))
        for rank in range(256):
            assert job.do(f"init {rank} 4 {rank}")[0] == "1"
        assert job.do("init 256 4 0")[0] == "0"
        assert ring.counters()["no_communicator"] == 1


def test_too_many_unfinished_events_are_counted(start: Start, tmp_path: Path) -> None:
    with reading_job(start, tmp_path) as (job, ring):
        for _ in range(4096):
            job.do("begin")
        job.do("begin")
        assert ring.counters()["no_slot"] == 1


def test_a_child_of_fork_writes_nothing_of_its_parent(start: Start, tmp_path: Path) -> None:
    with reading_job(start, tmp_path) as (job, ring):
        (child,) = job.do("fork")
        assert len(ring.read()) == 0 and not any(ring.counters().values())
        assert [path.name for path in rings.find([tmp_path / "rings"]) if path.name.startswith(f"{child}-")]
        job.do("run 1 10 1 0")
        assert len(ring.read()) == 20


def test_the_file_is_its_owners_alone(start: Start, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        start(5).do("init 77 4 1")
    finally:
        os.umask(before)
    (path,) = rings.find([tmp_path / "rings"])
    assert path.stat().st_mode & 0o7777 == 0o600 and path.parent.stat().st_mode & 0o7777 == 0o700
    assert path.stat().st_size == rings.FILE_BYTES
    assert path.stat().st_blocks * 512 >= rings.FILE_BYTES  # a full file system cannot kill the job later


def test_where_it_is_unless_told_otherwise() -> None:
    place = Path(f"/dev/shm/swerve-nccl-{os.geteuid()}")
    with Job(None, 5) as job:
        job.do("init 77 4 1")
        assert place in rings.directories() and place.stat().st_mode & 0o7777 == 0o700
        assert [path for path in rings.find([place]) if path.name.startswith(f"{job.pid}-")]
        job.end()
        assert not [path for path in rings.find([place]) if path.name.startswith(f"{job.pid}-")]
    with contextlib.suppress(OSError):  # others may use it
        place.rmdir()


@pytest.mark.parametrize("kind", ["link", "open to others", "file"])
def test_a_directory_that_cannot_be_trusted_is_not_used(start: Start, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "rings"
    if kind == "file":
        place.touch()
    else:
        (tmp_path / "other").mkdir(mode=0o700)
        (tmp_path / "other").chmod(0o777 if kind == "open to others" else 0o700)
        place.symlink_to("other") if kind == "link" else (tmp_path / "other").rename(place)
    job = start(5)
    assert job.do("init 77 4 1") == ["0", "0", "1"]  # NCCL's log says why
    assert job.do("run 1 10 1 1") == ["0"] * 6
    job.do("finalize")
    job.end()
    assert not [path for path in tmp_path.rglob("*.ring")]


def test_files_go_when_they_are_of_no_more_use(start: Start, tmp_path: Path) -> None:
    place = tmp_path / "rings"
    unread = start(5)
    unread.do("init 77 4 1")
    unread.end()
    assert rings.find([place]) == []  # nobody ever asked
    killed = start(5)
    killed.do("init 77 4 1")
    (path,) = rings.find([place])
    killed.process.kill()
    killed.process.wait()
    _last_sign(path, time.monotonic_ns() - rings.STALE_NS // 2)
    (place / "other").write_text("not ours")
    second = start(5)
    second.do("init 77 4 1")
    assert path in rings.find([place])  # it might live
    _last_sign(path, time.monotonic_ns() - 2 * rings.STALE_NS)
    third = start(5)
    third.do("init 77 4 1")
    assert path not in rings.find([place]) and len(rings.find([place])) == 2
    assert (place / "other").exists()


def _last_sign(path: Path, at_ns: int) -> None:
    with path.open("r+b") as file:
        file.seek(192)
        file.write(at_ns.to_bytes(8, "little"))


def test_a_reader_refuses_what_is_no_ring(start: Start, tmp_path: Path) -> None:
    job = start(5)
    job.do("init 77 4 1")
    (path,) = rings.find([tmp_path / "rings"])
    ring = Ring(path)
    with pytest.raises(RefusedError, match="has a reader"):
        Ring(path)
    ring.close()
    link = path.with_name("link.ring")
    link.symlink_to(path.name)
    with pytest.raises(RefusedError):
        Ring(link)
    link.unlink()
    copy = path.with_name("copy.ring")
    shutil.copy(path, copy)
    copy.chmod(0o644)
    with pytest.raises(RefusedError, match="its owner's alone"):
        Ring(copy)
    copy.chmod(0o600)
    os.truncate(copy, 100)
    with pytest.raises(RefusedError, match="not a ring"):
        Ring(copy)
    path.parent.chmod(0o770)
    with pytest.raises(RefusedError, match="others can write"):
        Ring(path)
    path.parent.chmod(0o700)
    job.end()


def test_a_reader_doubts_what_it_reads(start: Start, tmp_path: Path) -> None:
    job = start(5)
    job.do("init 77 4 1")
    with reading(tmp_path, job, ALL) as ring:
        job.do("run 1 10 1 0")
        with ring.path.open("r+b") as file:
            for at, value in ((128, 1 << 63), (64, 1 << 62), (4096 + 256 * 128 + 8 * 3, 7)):
                file.seek(at)
                file.write(value.to_bytes(8, "little"))
            file.seek(4096 + 256 * 136 + 128 * 3)
            file.write(b"\xff" * 4096)
        assert len(ring.read()) <= RECORDS
        job.do("run 1 10 1 1")  # whatever a reader or another process writes there
        os.truncate(ring.path, 4096)  # under the reader, after the job's last look
        with pytest.raises(SwerveError, match="cut short"):
            ring.communicators()
    job.process.send_signal(signal.SIGKILL)


def test_watching(start: Start, tmp_path: Path) -> None:
    place = tmp_path / "rings"
    watcher = Watcher(EVENTS["kernel"], [place])
    assert len(watcher.update(time.monotonic_ns())) == 0
    ranks = [start(5), start(4)]
    for rank, job in enumerate(ranks):
        job.do(f"init 77 2 {rank}")
    watcher.update(time.monotonic_ns() - 1_000_000_000)  # a reading may have begun before the last sign of life
    (place / "bad.ring").write_text("x")
    for late, job in zip((2_006_000, 3_000), ranks, strict=True):
        job.do(f"mask {EVENTS['kernel']}")
        job.do(f"last AllReduce 50 {late}")
    found = watcher.update(time.monotonic_ns())
    assert len(found) == 100 and list(watcher.refused) == [place / "bad.ring"]
    punctual, late_rank = collectives.summarise(found)
    assert (punctual.hash, punctual.rank, punctual.ranks, punctual.operations, punctual.bytes) == (77, 0, 2, 50, 51200)
    assert punctual.duration_p50_ns == punctual.duration_p99_ns == 2_006_000 and late_rank.duration_p50_ns == 3_000
    assert punctual.enqueue_to_start_ns >= 0 and punctual.bound_ns > 0 and np.isnan(late_rank.enqueue_to_start_ns)
    ranks[0].do("finalize")
    ranks[0].end()
    ranks[1].process.kill()
    ranks[1].process.wait()
    for path in rings.find([place]):
        _last_sign(path, 1) if path.name.startswith(f"{ranks[1].pid}-") else None
    watcher.update(time.monotonic_ns())
    assert rings.find([place]) == [place / "bad.ring"]
    assert not any(watcher.lost().values())
    watcher.close()


def test_a_watcher_that_closes_switches_off(start: Start, tmp_path: Path) -> None:
    job = start(5)
    job.do("init 77 2 0")
    watcher = Watcher(ALL, [tmp_path / "rings"])
    watcher.update(time.monotonic_ns())
    job.do(f"mask {ALL}")
    watcher.close()
    job.do("mask 0")
    job.end()


def test_the_variables_name_a_plugin_that_nccl_can_load(tmp_path: Path) -> None:
    chosen = environment(tmp_path)
    assert chosen[rings.DIRECTORY_VARIABLE] == str(tmp_path)
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", chosen["NCCL_PROFILER_PLUGIN"]], capture_output=True, text=True, check=True
    )
    assert {line.split()[-1] for line in symbols.stdout.splitlines()} == {f"ncclProfiler_v{each}" for each in VERSIONS}


def watched(tmp_path: Path, ranks: dict[int, str], *options: str) -> subprocess.CompletedProcess[str]:
    """`swerve jobs watch` of a job whose ranks each do as told, on a terminal of nobody."""
    app, _ = built(ADDRESS)
    script = ["#!/bin/sh"]
    for rank, said in ranks.items():
        (tmp_path / f"rank{rank}").write_text(f"init 77 {len(ranks)} {rank}\nmask 70\n{said}\nfinalize\nexit\n")
        script.append(f"{app} $NCCL_PROFILER_PLUGIN 5 <{tmp_path}/rank{rank} >{tmp_path}/said{rank} &")
    job = tmp_path / "job"
    job.write_text("\n".join([*script, "wait", "echo trained", "exit 3", ""]))
    job.chmod(0o700)
    words = [sys.executable, "-m", "steering.cli", "jobs", "watch", *options, "--", str(job)]
    return subprocess.run(words, capture_output=True, text=True, cwd=support.ROOT, timeout=100, check=False)


def test_a_watched_job_runs_as_it_is_and_its_straggler_is_named(tmp_path: Path) -> None:
    done = watched(tmp_path, {0: "last AllReduce 40 2000000", 1: "last AllReduce 40 3000"}, "-j", "-i", "100")
    assert (done.returncode, done.stdout) == (3, "trained\n"), done.stderr
    (report,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (report["communicator"], report["ranks"]) == (f"{77:016x}", 2)
    assert [(each["rank"], each["operations"]) for each in report["by_rank"]] == [(0, 40), (1, 40)]
    assert [each["kernel_p50_ns"] for each in report["by_rank"]] == [2_000_000, 3_000]
    late = report["straggler"]
    assert (late["rank"], late["late_ns"], late["collectives"]) == (1, 1_997_000, 40)
    done = watched(tmp_path, {0: "last AllReduce 40 3000", 1: "last AllReduce 40 3000"}, "-i", "100")
    (line,) = done.stderr.splitlines()
    assert line.endswith("kernels p50 of rank 0: 3.00 µs, 1: 3.00 µs; no straggler among them")


def test_a_watched_flood_is_said_to_be_a_sample(tmp_path: Path) -> None:
    done = watched(tmp_path, {0: "flood", 1: "last AllReduce 20 3000"}, "-j", "-i", "100")
    (report,) = [json.loads(line) for line in done.stderr.splitlines()]
    flood, few = report["by_rank"]
    assert flood["sampled"] and flood["operations"] >= count_limit() and flood["bytes"] == 1024 * flood["operations"]
    assert not few["sampled"] and few["operations"] == 20
    done = watched(tmp_path, {0: "flood"}, "-i", "100")
    assert "ranks here: a sample of " in done.stderr


def test_a_watched_command_without_nccl_is_said_to_be_that(tmp_path: Path) -> None:
    done = watched(tmp_path, {})
    assert (done.returncode, done.stdout) == (3, "trained\n")
    assert support.mentions(done.stderr, "swerve", "no rank", "loaded the plugin", "NCCL 2.23")
    words = [sys.executable, "-m", "steering.cli", "jobs", "watch", "--", "/nowhere/at-all"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=support.ROOT, timeout=100, check=False)
    assert done.returncode == 2 and "there is no command /nowhere/at-all" in done.stderr
