"""Jobs: ranks from environments that may say anything, RAS that may answer anything, and the sums of their traffic."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import samples
import support
from connections import connections, member
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pytools.config import AgentConfig, Windows
from pytools.ipc.bus import Bus, Published
from pytools.signals import Job, Owner
from pytools.signals import Path as NetworkPath
from pytools.sources.jobs import processes as looking
from pytools.sources.jobs import ras, verdicts
from pytools.sources.jobs.environment import place
from pytools.sources.jobs.processes import Processes
from pytools.sources.jobs.ras import behind, of_job
from pytools.sources.jobs.source import JobSource
from pytools.sources.jobs.traffic import TYPES, Traffic
from pytools.sources.tcp.connections import Feed
from pytools.views import table_registry
from pytools.views.filters import Query
from pytools.views.model import Model, fold

SECOND = 10**9
TORCH = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
STEP = SLURM | {"SLURM_STEP_ID": "0"}
OMPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


def environ(given: dict[str, str]) -> bytes:
    return b"".join(f"{name}={value}".encode() + b"\0" for name, value in given.items())


# ---- environments ----


@pytest.mark.parametrize(
    ("given", "job", "source", "ranks"),
    [
        (TORCH | {"TORCHELASTIC_RUN_ID": "llama"}, "torchrun:llama", "torchrun", (3, 8, 1)),
        (TORCH | {"TORCHELASTIC_RUN_ID": "none"}, "torchrun:n1:29500", "torchrun", (3, 8, 1)),
        (TORCH, "env:n1:29500", "env", (3, 8, 1)),
        (TORCH | STEP, "slurm:4711.0/env:n1:29500", "env", (3, 8, 1)),
        (TORCH | SLURM, "slurm:4711/env:n1:29500", "env", (3, 8, 1)),
        (STEP, "slurm:4711.0", "slurm", (1, 2, 0)),
        (OMPI | {"PMIX_NAMESPACE": "prterun-n1-77@1"}, "mpi:prterun-n1-77@1", "mpi", (2, 4, 0)),
        (OMPI | STEP, "slurm:4711.0", "mpi", (2, 4, 0)),
        (STEP | {"PMIX_RANK": "1", "PMIX_NAMESPACE": "slurm.pmix.4711.0"}, "slurm:4711.0", "mpi", (1, 2, 0)),
        ({"PMIX_RANK": "5"}, "mpi", "mpi", (5, None, None)),
    ],
)
def test_a_launcher_says_which_rank_a_process_is(
    given: dict[str, str], job: str, source: str, ranks: tuple[int, int | None, int | None]
) -> None:
    found = place(environ({"PATH": "/bin"} | given))
    assert found is not None
    assert (found.job, found.source, (found.rank, found.size, found.local_rank)) == (job, source, ranks)


@pytest.mark.parametrize(
    "given",
    [
        {},
        SLURM,  # a batch script: no step has begun
        {"RANK": "3", "WORLD_SIZE": "8"},  # nowhere to meet
        TORCH | {"RANK": "8"},
        TORCH | {"RANK": "-1"},
        TORCH | {"RANK": "٣"},
        TORCH | {"WORLD_SIZE": "0", "RANK": "99999999"},
        STEP | {"SLURM_PROCID": "2"},
    ],
)
def test_what_is_no_rank_is_none(given: dict[str, str]) -> None:
    assert place(environ(given)) is None


def test_what_else_an_environment_says() -> None:
    given = TORCH | {"CUDA_VISIBLE_DEVICES": "0,1", "NCCL_RAS_ADDR": "127.0.0.1:9", "MASTER_ADDR": "127.0.0.1"}
    found = place(environ(given) + environ({"RANK": "4"}))
    assert found is not None and (found.gpus, found.ras, found.on_host, found.rank) == ("0,1", "127.0.0.1:9", True, 3)
    off = place(environ(TORCH | {"NCCL_RAS_ENABLE": "0"}))
    assert off is not None and off.ras is None and not off.on_host
    rude = place(environ(TORCH | {"TORCHELASTIC_RUN_ID": "\x1b[2J" + 1000 * "x"}))
    assert rude is not None and rude.job.isprintable() and len(rude.job) < 150


NAMES = st.sampled_from([*TORCH, *STEP, *OMPI, "PMIX_RANK", "PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", "NCCL_RAS_ADDR"])
VALUES = st.text(max_size=12) | st.integers(-1, 9).map(str) | st.integers(0, 10**12).map(str)


@given(st.dictionaries(NAMES, VALUES), st.binary(max_size=64))
def test_no_environment_is_too_odd(given: dict[str, str], rest: bytes) -> None:
    raw = b"\0".join(f"{name}={value}".encode("utf-8", "surrogatepass") for name, value in given.items()) + b"\0" + rest
    found = place(raw)
    assert found is None or (0 <= found.rank < (found.size or 1 << 24) and found.job and found.job.isprintable())


# ---- processes ----


class Proc:
    """A process table in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, pid: int, given: dict[str, str] | bytes, start: int = 5, own_pid: int | None = None) -> Path:
        place = self.folder / str(pid)
        place.mkdir()
        (place / "environ").write_bytes(given if isinstance(given, bytes) else environ(given))
        (place / "stat").write_text(f"{pid} (py) th) S 1 " + " ".join(["0"] * 17) + f" {start} 0\n")
        (place / "status").write_text(f"Name:\tpy\nNSpid:\t{pid}\t{own_pid or pid}\n")
        (place / "cgroup").write_text(f"0::/jobs/{pid}\n")
        (place / "comm").write_text("py\n")
        (place / "ns").mkdir()
        (place / "ns" / "net").symlink_to("/proc/thread-self/ns/net")
        return place


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    return Proc(tmp_path)


def look(found: Processes, times: int = 1, since: int = 0) -> dict[str, list[int]]:
    """Ranks by job after so many looks."""
    for each in range(since, since + times):
        now_ns = (each + 1) * 100 * SECOND
        found.work(now_ns)
        support.wait_until(lambda now_ns=now_ns: found.work(now_ns) and not found.looking, 10, "a look is over")
    return {members[0].place.job: sorted(each.place.rank for each in members) for members in found.ranks().values()}


def test_ranks_come_and_go(proc: Proc) -> None:
    proc.add(10, TORCH)
    proc.add(11, TORCH | {"RANK": "4"})
    proc.add(12, {"HOME": "/"})
    (proc.folder / "self").mkdir()
    found = Processes(proc=proc.folder)
    assert look(found) == {"env:n1:29500": [3, 4]}
    proc.folder.joinpath("11").rename(proc.folder / "gone")
    assert look(found, since=1) == {"env:n1:29500": [3]}
    proc.folder.joinpath("10").rename(proc.folder / "gone2")
    proc.add(10, {"HOME": "/"})  # the same number
    assert look(found, since=2) == {}


def test_an_environment_is_read_again_after_exec_and_now_and_then(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[bytes] = []
    monkeypatch.setattr(looking, "place", lambda text: reads.append(text) or place(text))
    there = proc.add(10, {"HOME": "/"})
    found = Processes(proc=proc.folder)
    assert look(found) == {}
    (there / "environ").write_bytes(environ(TORCH))
    assert look(found, since=1) == {"env:n1:29500": [3]}
    look(found, 9, since=2)
    assert len(reads) == 2
    look(found, 5, since=11)
    assert len(reads) == 3


def test_a_launcher_is_no_rank(proc: Proc) -> None:
    launched = TORCH | {"TORCHELASTIC_RUN_ID": "none"}
    proc.add(10, STEP)  # the script that srun started, and torchrun below it
    proc.add(11, STEP | launched)
    proc.add(12, STEP | launched | {"RANK": "4"})
    proc.add(20, STEP | {"SLURM_JOB_ID": "4712"})  # without a launcher inside
    assert look(Processes(proc=proc.folder)) == {"slurm:4711.0/torchrun:n1:29500": [3, 4], "slurm:4712.0": [1]}


def test_what_cannot_be_read_is_counted(proc: Proc, monkeypatch: pytest.MonkeyPatch) -> None:
    proc.add(10, TORCH)
    proc.add(11, environ(TORCH) + 200_000 * b"x")
    proc.add(12, TORCH)
    (proc.folder / "12" / "stat").unlink()  # ended meanwhile
    found = Processes(proc=proc.folder)
    assert look(found) == {"env:n1:29500": [3]}
    assert (found.refused, found.unreadable, found.too_many) == (1, 0, 0)
    monkeypatch.setattr(looking, "_MOST", 1)
    (proc.folder / "12").rename(proc.folder / "gone")
    proc.add(13, TORCH)
    look(found, since=1)
    assert found.too_many == 1


def test_a_process_whose_memory_is_locked_holds_nobody_up(proc: Proc) -> None:
    environment = proc.add(10, TORCH) / "environ"
    environment.unlink()
    os.mkfifo(environment)  # to open it takes somebody who writes
    found = Processes(proc=proc.folder)
    for number in range(3):
        found.work(100 * SECOND + number * looking.EVERY_NS)
    assert (found.hung, found.looking, found.ranks()) == (2, True, {})
    environment.write_bytes(environ(TORCH))
    support.wait_until(lambda: found.work(111 * SECOND) and not found.looking, 10, "the look is over")
    assert list(found.ranks())


# ---- RAS ----


def answer(ranks: list[dict[str, Any]], missing: Sequence[int] = (), comma: bool = True, size: int = 2) -> bytes:
    """What NCCL 2.28.9 answers, by its source; without the comma that 2.29.2 has added where `comma` is false."""
    places = [
        {"rank": rank, "host": "10.1.1.2", "pid": 900 + rank, "cuda_dev": rank, "nvml_dev": rank, "status": {}}
        for rank in missing
    ]
    report = {
        "nccl_version": "2.28.9",
        "cuda_runtime_version": 13000,
        "communicators_count": 1,
        "communicators": [
            {
                "hash": "0x1234",
                "secondary_hash": "0x1:0x2",
                "size": size,
                "ranks_count": len(ranks),
                "missing_ranks_count": len(missing),
                "ranks": ranks,
                "missing_ranks": places,
            }
        ],
        "ras": {"collection_time_sec": 0.003, "timeouts_count": 0},
    }
    text = json.dumps(report, indent=2).encode() + b"\n"
    return text if comma else text.replace(b'"nvml_dev": 1,\n', b'"nvml_dev": 1\n')


def rank(number: int, operations: int, pid: int | None = None) -> dict[str, Any]:
    status = {"init_state": 0, "async_error": 0, "abort_flag": False}
    counts = {"Broadcast": 1, "AllReduce": operations - 1}
    where = {"rank": number, "host": "10.1.1.1", "pid": pid or 100 + number, "cuda_dev": number, "nvml_dev": 4 + number}
    return where | {"status": status, "collective_counts": counts}


def test_a_report_is_read_also_without_the_comma() -> None:
    found = ras.parse(answer([rank(0, 7), rank(1, 9)]))
    assert (found.state, [each.operations for each in found.communicators[0].ranks]) == ("ok", [7, 9])
    broken = answer([rank(0, 7)], missing=[1], comma=False)
    with pytest.raises(json.JSONDecodeError):
        json.loads(broken)
    found = ras.parse(broken)
    assert found.state == "unresponsive" and support.mentions(found.reason, "1 of 2 ranks", "not answer RAS")
    text = json.loads(answer([rank(0, 7)], missing=[1]))
    text["communicators"] *= 2  # of which a rank may be in many
    assert ras.parse(json.dumps(text).encode()).reason == found.reason


@given(st.binary(max_size=200) | st.integers(0, 600).map(lambda cut: answer([rank(0, 7)])[:cut]))
def test_what_is_no_report_is_said_to_be_none(text: bytes) -> None:
    found = ras.parse(text)
    assert (found.state, found.communicators) == ("invalid", []) and found.reason.isprintable()


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("", ("localhost", 28028)),
        ("localhost:7", ("localhost", 7)),
        ("127.0.0.1:28029", ("127.0.0.1", 28029)),
        ("[::1]:28029", ("::1", 28029)),
        ("evil.example:80", None),
        ("127.0.0.1:0", None),
        ("127.0.0.1:٣", None),
        (":::", None),
    ],
)
def test_an_address_is_asked_and_no_name(address: str, expected: tuple[str, int] | None) -> None:
    assert ras.endpoint(address) == expected


Serve = Callable[[socket.socket], None]


@contextlib.contextmanager
def server(serve: Serve) -> Iterator[tuple[str, int]]:
    """Somebody listens, and answers each who connects."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listening.accept()
                    with peer, contextlib.suppress(OSError):
                        serve(peer)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield "127.0.0.1", listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def nccl(*parts: bytes, hang: bool = False, formats: bool = True, heard: list[str] | None = None) -> Serve:
    """RAS, which sends a report in these parts and closes."""

    def serve(peer: socket.socket) -> None:
        with peer.makefile("rb") as lines:
            for raw in lines:
                line = raw.decode().strip()
                if heard is not None:
                    heard.append(line)
                if line == "verbose status":
                    for part in parts:
                        peer.sendall(part)
                    if hang:
                        peer.recv(1)
                    return
                known = {"client protocol 2": "SERVER PROTOCOL 2", "timeout 1": "OK"}
                if formats:
                    known["set format json"] = "OK"
                peer.sendall(known.get(line, f"ERROR: Unknown command {line}").encode() + b"\n")

    return serve


def silent(peer: socket.socket) -> None:
    while peer.recv(1 << 10):
        pass


def test_ras_is_asked_as_its_own_client_does() -> None:
    heard: list[str] = []
    text = answer([rank(0, 7), rank(1, 7)])
    with server(nccl(text[:50], text[50:], heard=heard)) as where:
        assert ras.ask(where).state == "ok"
    assert heard == ["client protocol 2", "timeout 1", "set format json", "verbose status"]


@pytest.mark.parametrize(
    ("serve", "state", "reason"),
    [
        (nccl(answer([rank(0, 7)])[:400]), "invalid", "no report"),
        (nccl(b"\x00\xff" * 500), "invalid", "no report"),
        (nccl(b"[" * (5 << 20)), "invalid", "larger than 4 MiB"),
        (nccl(answer([rank(0, 7)]), formats=False), "invalid", "older than 2.28.7"),
        (nccl(b"{", hang=True), "unresponsive", "in time"),
        (lambda peer: peer.sendall(b"SSH-2.0-x\r\n"), "invalid", "not RAS"),
        (lambda peer: peer.sendall(b"x" * 100_000), "invalid", "not RAS"),
        (lambda peer: None, "", ""),
        (silent, "unresponsive", "in time"),
    ],
)
def test_whoever_answers_something_else_is_named(serve: Serve, state: str, reason: str) -> None:
    with server(serve) as where:
        found = ras.ask(where, limit_s=0.5)
    assert not state or (found.state == state and reason in found.reason)
    assert found.communicators == [] and found.state != "ok"


def test_nobody_listens_or_it_is_another_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    assert ras.ask(("127.0.0.1", port)).state == "absent"
    other = ras.ask(("192.0.2.1", port))
    assert other.state == "absent" and os.strerror(errno.EADDRNOTAVAIL) in other.reason  # it is not connected to


def communicators(*operations: int) -> list[ras.Communicator]:
    return ras.parse(answer([rank(number, each) for number, each in enumerate(operations)])).communicators


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ((10, 10, 10), (20, 20, 20), []),
        ((10, 9, 10), (20, 19, 20), []),  # asked a moment apart
        ((10, 8, 12), (12, 8, 12), [(1, 4)]),
        ((10, 8, 12), (11, 8, 12), [(1, 4), (0, 1)]),
        ((), (12, 8), []),
    ],
)
def test_a_rank_lags_that_has_not_begun_what_others_had(
    before: tuple[int, ...], now: tuple[int, ...], expected: list[tuple[int, int]]
) -> None:
    found = behind(communicators(*before), communicators(*now))
    assert [(each.rank, operations) for _, each, operations in found] == expected


def test_a_rank_is_known_by_the_communicator_that_numbers_as_the_job_does() -> None:
    here = {0: {100, 7}, 1: {101}}
    (whole,) = communicators(5, 5)
    other_order = ras.parse(answer([rank(0, 5, 101), rank(1, 5, 100)])).communicators[0]
    assert {number: each.pid for number, each in of_job([other_order, whole], 2, here).items()} == {0: 100, 1: 101}
    assert of_job([other_order], 2, here) == of_job([whole], 4, here) == of_job([], 2, here) == {}


# ---- traffic ----


def test_bytes_are_of_the_window_and_of_the_rank() -> None:
    traffic = Traffic()
    traffic.set_ranks({"job": [member(4711), member(77, 1, "/b")]})
    at_ns = samples.AT_NS

    def offer(sent: int, **changes: Any) -> None:
        traffic.take(connections(samples.tcp_flow(sent_bytes=sent, at_ns=at_ns, **changes)))

    def window() -> tuple[list[tuple[int, int, int]], tuple[int, int], tuple[int, int]]:
        found = sorted((each.connections, len(each.pairs), each.sent) for each in traffic.window(at_ns))
        return found, traffic.held("job", 0), traffic.held("job", 1)

    offer(1000)  # before it was first seen
    offer(1000, owner=Owner(5, "other"))
    assert window() == ([(1, 0, 0)], (1, 0), (0, 0))
    offer(1700)
    offer(1900)
    assert window() == ([(1, 0, 900)], (1, 0), (0, 0))
    assert window() == ([(1, 0, 0)], (1, 0), (0, 0))
    offer(50, local_port=2, owner=Owner(0, "", "/b"), namespace="ml/train-1", first_ns=at_ns + 5)
    offer(2000, state="close")
    assert window() == ([(1, 0, 150)], (0, 0), (1, 0))
    traffic.offer(Published(samples.rdma_qp(owner=Owner(4711, "py"), completed_bytes=10, path=samples.path())))
    traffic.offer(Published(samples.rdma_qp(owner=Owner(4711, "py"), completed_bytes=30, path=samples.path())))
    assert window() == ([(1, 1, 20)], (0, 1), (1, 0))
    at_ns += 20 * SECOND
    assert window() == ([], (0, 0), (0, 0))  # nobody has spoken of them since


def test_counts_that_go_back_and_ends_that_are_used_again_take_nothing_away() -> None:
    traffic = Traffic()
    traffic.set_ranks({"job": [member(4711)]})
    at_ns = samples.AT_NS
    for sent, state, cookie in ((1000, "established", 1), (1200, "close", 1), (5, "established", 2)):
        traffic.take(connections(samples.tcp_flow(sent_bytes=sent, state=state, at_ns=at_ns), cookie=cookie))
    (found,) = traffic.window(at_ns)
    assert (found.connections, found.sent, sorted(found.flows)) == (1, 200, [0, 200])
    for sent, timeouts in ((25, 1), (3, 0), (4, 0)):  # its row made room for others, and was made anew
        traffic.take(connections(samples.tcp_flow(sent_bytes=sent, timeouts=timeouts, at_ns=at_ns), cookie=2))
    (found,) = traffic.window(at_ns)
    assert (found.connections, found.sent, found.flows.tolist(), found.waits) == (1, 21, [21], [])


def test_what_a_connection_did_before_its_process_was_found_is_of_its_rank_too() -> None:
    traffic = Traffic()
    traffic.set_ranks({"job": [member(4711)]})
    at_ns = samples.AT_NS
    for sent, pid in ((1000, 0), (1500, 0), (1700, 4711)):
        traffic.take(connections(samples.tcp_flow(sent_bytes=sent, owner=Owner(pid), at_ns=at_ns)))
    (found,) = traffic.window(at_ns)
    assert (found.connections, found.sent, traffic.held("job", 0)) == (1, 700, (1, 0))


def test_a_row_without_a_socket_is_no_connection() -> None:
    traffic = Traffic()
    traffic.set_ranks({"job": [member(4711)]})
    traffic.take(replace(connections(samples.tcp_flow()), cookie=np.zeros(1, np.uint64)))
    assert traffic.window(samples.AT_NS) == []


def test_timeouts_of_a_connection_are_added_up_however_often_it_is_reported() -> None:
    traffic = Traffic()
    traffic.set_ranks({"job": [member(4711)]})
    for timeouts in (1, 2, 2, 4):
        traffic.take(connections(samples.tcp_flow(timeouts=timeouts, stall=None, at_ns=samples.AT_NS)))
    (found,) = traffic.window(samples.AT_NS)
    assert found.timeouts == 3 and found.waits == [(3, 0, 2_400_000)]


def test_a_connection_goes_with_its_path_and_its_rank() -> None:
    traffic = Traffic()
    traffic.set_ranks({"job": [member(4711), member(77, 1, "/b")]})
    at_ns, other = samples.AT_NS, NetworkPath("h1", "h2", "10.9.0.2", "10.2.1.1", "rail2")

    def offer(sent: int, **changes: Any) -> None:
        traffic.take(connections(samples.tcp_flow(sent_bytes=sent, at_ns=at_ns, **{"interface": "eth0"} | changes)))

    def window() -> dict[NetworkPath | None, tuple[int, int]]:
        return {each.where[1]: (each.connections, each.sent) for each in traffic.window(at_ns)}

    offer(1000, path=samples.path())
    offer(1200, path=samples.path())
    offer(1300, path=other, interface="eth1")
    assert window() == {samples.path(): (0, 200), other: (1, 100)} and traffic.held("job", 0) == (1, 0)
    offer(1400, path=other, interface="eth1", owner=Owner(77, "py"))
    assert window() == {other: (1, 100)} and (traffic.held("job", 0), traffic.held("job", 1)) == ((0, 0), (1, 0))
    traffic.set_ranks({"job": [member(77, 0, "/b")]})  # they were numbered anew
    offer(1500, path=other, interface="eth1", owner=Owner(77, "py"))
    assert window() == {other: (1, 100)} and (traffic.held("job", 0), traffic.held("job", 1)) == ((1, 0), (0, 0))


# ---- the source ----


class Listener:
    """A source with a process table of its own, and somebody who listens."""

    def __init__(self, folder: Path) -> None:
        self.bus = Bus()
        self.feed = Feed()
        self.source = JobSource(AgentConfig("h1", [], windows=Windows(long_ms=100)), self.bus, self.feed, folder)
        self.listening = self.bus.subscribe(frozenset({"job"}))

    def until(self, condition: Callable[[Job], bool], what: str) -> Job:
        def met() -> Job | None:
            self.source.tick(time.monotonic_ns())
            jobs = [each for each in self.listening.read() if isinstance(each, Job)]
            return next(filter(condition, jobs), None)

        found = support.wait_until(met, 20, what)
        assert found is not None
        return found


@contextlib.contextmanager
def in_turn(*texts: bytes) -> Iterator[tuple[str, int]]:
    """RAS with one report after the other; the last one stays."""
    left = list(texts)

    def serve(peer: socket.socket) -> None:
        nccl(left.pop(0) if len(left) > 1 else left[0])(peer)

    with server(serve) as where:
        yield where


def test_in_a_stall_nobody_is_said_to_be_behind(proc: Proc) -> None:
    with in_turn(answer([rank(0, 20), rank(1, 20)]), answer([rank(0, 9)], missing=[1], comma=False)) as (host, port):
        proc.add(4711, TORCH | {"NCCL_RAS_ADDR": f"{host}:{port}"}, own_pid=100)
        listener = Listener(proc.folder)
        listener.until(lambda job: job.ras == "ok", "RAS has answered")
        found = listener.until(lambda job: job.ras != "ok", "RAS has answered again")
        assert (found.ras, found.lagging, found.ras_reason[:6]) == ("unresponsive", [], "1 of 2")
        listener.source.close()


def test_a_job_is_joined_with_its_traffic_and_ras(proc: Proc) -> None:
    with in_turn(answer([rank(0, 20), rank(1, 20)]), answer([rank(0, 30), rank(1, 9)])) as (host, port):
        given = TORCH | {"WORLD_SIZE": "2", "NCCL_RAS_ADDR": f"{host}:{port}"}
        for number in (0, 1):
            proc.add(4711 + number, given | {"RANK": str(number)}, own_pid=100 + number)
        listener = Listener(proc.folder)
        found = listener.until(lambda job: job.ras == "ok", "RAS has answered")
        assert [(each.rank, each.gpu, each.processes) for each in found.ranks] == [(0, 4, 1), (1, 5, 1)]
        assert (found.job, found.size, found.lagging, found.ras_ranks) == ("env:n1:29500", 2, [], 2)
        for sent in (5, 8):
            assert listener.feed.reader is not None
            listener.feed.reader(connections(samples.tcp_flow(sent_bytes=sent, at_ns=time.monotonic_ns())))
        found = listener.until(lambda job: sum(each.sent_bytes for each in job.paths) == 3, "what was sent is told")
        assert found.paths[0].path == samples.path() and found.ranks[0].connections == 1
        found = listener.until(lambda job: bool(job.lagging), "the rank that is behind is told")
        assert [(each.rank, each.communicator_rank, each.pid, each.behind) for each in found.lagging] == [
            (1, 1, 101, 11)
        ]
        listener.listening.close()
        listener.source.tick(time.monotonic_ns())
        assert listener.feed.reader is None and not listener.bus.wanted("rdma_qp")
        assert sum(listener.source.drops().values()) == 0
        listener.source.close()


def test_without_a_job_no_other_signal_is_asked_for(proc: Proc) -> None:
    proc.add(10, {"HOME": "/"})
    listener = Listener(proc.folder)
    now_ns = time.monotonic_ns()

    def asks(wanted: bool) -> bool:
        """Whether it asks for all or for none, after one more window."""
        nonlocal now_ns
        now_ns += SECOND
        listener.source.tick(now_ns)
        asked = {listener.bus.wanted(each) for each in TYPES | verdicts.TYPES}
        return asked | {listener.feed.reader is not None} == {wanted}

    for _ in range(3):  # looks among them
        assert asks(False)
    proc.add(11, TORCH)
    support.wait_until(lambda: asks(True), 20, "the signals of a job are asked for")
    proc.folder.joinpath("11").rename(proc.folder / "gone")
    support.wait_until(lambda: asks(False), 20, "they are asked for no more")
    listener.source.close()


def test_ras_of_another_job_is_none_of_this_one(proc: Proc) -> None:
    with server(nccl(answer([rank(0, 20)]))) as (host, port):
        proc.add(4711, TORCH | {"NCCL_RAS_ADDR": f"{host}:{port}"})
        proc.add(4712, TORCH | {"MASTER_PORT": "1", "NCCL_RAS_ENABLE": "0"})
        listener = Listener(proc.folder)
        listener.until(lambda job: "another job" in job.ras_reason, "it is told")
        assert listener.until(lambda job: job.job == "env:n1:1", "the other one").ras == "absent"
        listener.source.close()


# ---- the table ----


def shown(*jobs: Job, sort: str | None = None) -> str:
    out = io.StringIO()
    Console(file=out, width=300, no_color=True, highlight=False).print(
        table_registry.TABLES["jobs"](fold(Model(), jobs), jobs, Query(sort=sort))
    )
    return out.getvalue()


def test_the_table_says_who_is_behind_and_nothing_of_it_in_a_stall() -> None:
    table = shown(samples.job())
    for said in ("slurm:4711.0", "user 1000, python3, ml/train-0", "1 / 16", "32", "2.00 Gbit/s", "h2 rail1 via"):
        assert said in table, said
    assert "rank 3 by 12 operations" in table
    for said in ("network 62.0 %", "steps of 31", "1.40 times the usual", "explains 62.0 % (50.0 % to 70.0 %): h2 by"):
        assert said in table, said
    assert "straggler explains 10.0 %" in table and "not measured: gpu: NVML is not there" in table
    well = shown(
        samples.job(why=samples.job_verdict(verdict="healthy", reason="all", causes=[], step=None, missing={}))
    )
    assert "healthy: all" in well and "steps not seen" in well
    stalled = shown(samples.job(ras="unresponsive", ras_reason="4 of 16 ranks did not answer RAS", lagging=[]))
    assert "4 of 16 ranks" in stalled and "operations" not in stalled and "nobody" not in stalled
    assert "no process here is a rank" in shown()
    table = shown(samples.job(job="a", lagging=[]), samples.job(job="b"), sort="lag")
    assert table.index("rank 3 by") < table.index("nobody")


_RANK = b"""\
        {
          "rank": %d,
          "host": "192.0.2.2",
          "pid": %d,
          "cuda_dev": %d,
          "nvml_dev": %d,
          "status": {
            "init_state": 0,
            "async_error": 0,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false
          },
          "collective_counts": {
            "Broadcast": 0,
            "Reduce": 0,
            "AllGather": 0,
            "ReduceScatter": 0,
            "AllReduce": 4088
          }
        }"""
RECORDED = b"""\
{
  "nccl_version": "2.28.9",
  "cuda_runtime_version": 13000,
  "cuda_driver_version": 13000,
  "timestamp": "2026-11-26 20:00:10",
  "communicators_count": 1,
  "communicators": [
    {
      "hash": "0x84fc084010aed069",
      "secondary_hash": "0x745fa502c037af65:0x41862df4edc5145b",
      "size": 2,
      "ranks_count": 2,
      "missing_ranks_count": 0,
      "ranks": [
%s,
%s
      ],
      "missing_ranks": [

      ]
    }
  ],
  "ras": {
    "collection_time_sec": 0.000,
    "timeouts_count": 0
  }
}

""" % (_RANK % (0, 1353, 0, 0), _RANK % (1, 1354, 1, 1))  # by NCCL 2.28.9 on a machine with two GPUs


def test_a_recorded_answer_is_read() -> None:
    answer = ras.parse(RECORDED)
    assert (answer.state, len(answer.communicators)) == ("ok", 1)
    (found,) = answer.communicators
    assert (found.hash, found.size, found.missing_ranks) == ("0x84fc084010aed069", 2, [])
    assert [(each.rank, each.host, each.pid) for each in found.ranks] == [
        (0, "192.0.2.2", 1353),
        (1, "192.0.2.2", 1354),
    ]
    assert [each.collective_counts["AllReduce"] for each in found.ranks] == [4088, 4088]
