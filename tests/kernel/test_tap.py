"""The tap, loaded into an application on a stand-in verbs library: every count exact, and nothing that it can see."""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import native_build
import numpy as np
import pytest
from rdma_probes import NONE_TIMED, READ, REFUSE, SEND, STALL, SWAP, WRITE, nonzero, prepare, sums
from support import ROOT, no_descriptor, wait_until
from tap_kit import ROWS, Agent, row_layout, variables

from pytools.errors import RefusedError, SwerveError, UsageError
from pytools.ipc.accepting import PAUSE_NS
from pytools.kernel.bpf import mapped
from pytools.kernel.native import TAP
from pytools.sources.rdma import table as row_table
from pytools.sources.rdma import tap_command, tap_server
from pytools.sources.rdma.table import CLOSED, FREE, LIVE
from pytools.sources.rdma.tap_server import TapServer

ERROR = 6  # of enum ibv_qp_state


@pytest.fixture(scope="module")
def record() -> np.dtype[Any]:
    return row_layout()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TAP.build(tmp_path_factory.mktemp("tap") / TAP.target.name)


@pytest.fixture
def agent(tmp_path: Path, record: np.dtype[Any]) -> Iterator[Agent]:
    serving = Agent(tmp_path / "test.tap", record)
    yield serving
    serving.close()


Start = Callable[..., native_build.App]


@pytest.fixture
def start(tmp_path: Path, library: Path) -> Iterator[Start]:
    """Start an application with the tap in it."""
    with contextlib.ExitStack() as stack:

        def begin(*flags: str, more: dict[str, str] | None = None) -> native_build.App:
            given = variables(library, tmp_path / "test.tap") | (more or {})
            return stack.enter_context(native_build.App(*flags, more=given))

        yield begin


@pytest.fixture(params=[(), ("-DDLOPEN",)], ids=["linked", "dlopen"])
def app(request: pytest.FixtureRequest, start: Start, agent: Agent) -> native_build.App:
    """An application with one device, one completion queue and one queue pair (257) of 128 requests."""
    started = start(*request.param)
    agent.prepare(started)
    return started


# ---- every way to post and to complete ----


def test_who_tries_again_and_again_fills_nothing(app: native_build.App, agent: Agent) -> None:
    app.do(f"control 0 {STALL} 1")
    app.do("post 0 128 10 0 1 1 1")
    for _ in range(3):
        assert app.do("post 0 4000 10 0 1 1 1")[:2] == ["12", "0"]
    app.do(f"control 0 {STALL} 0")
    app.do("poll 0 64")
    row = agent.row(app.pid)
    assert (int(row["posted"]), int(row["completed"]), int(row["refused"])) == (128, 64, 12000)
    assert row["untracked"] == 0
    app.do("post 0 64 10 0 1 1 1")
    app.do("poll 0 999")
    row = agent.row(app.pid)
    assert (int(row["posted"]), int(row["completed"]), int(row["untracked"])) == (192, 192, 0)


@pytest.mark.parametrize("device", ["alpha0", "beta0"], ids=["provider_posts", "provider_calls_us"])
def test_bound_memory_windows_are_requests(start: Start, agent: Agent, device: str) -> None:
    app = start()
    for command in (f"open {device}", "cq 0 64", "qp 0 0 0 16 8 0 -1", "bind 0 5 0", "bind 0 6 1", "poll 0 9"):
        app.do(command)
    agent.settle(app, 257)
    row = agent.row(app.pid)
    assert sums(row) == {"posted": 2, "signalled": 1, "completed": 2, "completions": 1}
    assert nonzero(row["opcodes"]) == {8: 2}


def test_a_queue_pair_made_behind_our_back_is_counted_but_not_followed(app: native_build.App, agent: Agent) -> None:
    app.do("hidden 0 0")
    app.do("post 1 5 100 0 5 1 1")
    app.do("poll 0 9")
    assert sums(agent.row(app.pid, 258)) == {
        **{"posted": 5, "posted_bytes": 500, "signalled": 1, "untracked": 5},
        **{"completed": 5, "completed_bytes": 500, "completions": 1},
    }


def test_gid_of_this_end(start: Start, agent: Agent, tmp_path: Path) -> None:
    gids = tmp_path / "sys/alpha0/ports/1/gids"
    gids.mkdir(parents=True)
    (gids / "1").write_text("0000:0000:0000:0000:0000:ffff:0a09:0002\n")
    app = start(more={"SWERVE_FAKE_SYSFS": str(tmp_path / "sys")})
    agent.prepare(app)
    app.do("connect 0 300 fe800000000000000000000000000001")
    row = agent.row(app.pid)
    assert row["local"]["bytes"].tobytes().hex() == "00000000000000000000ffff0a090002"
    assert row["remote"]["bytes"].tobytes().hex() == "fe800000000000000000000000000001"


def test_more_outstanding_than_can_be_followed(start: Start, agent: Agent) -> None:
    app = start()
    app.do("open alpha0")
    app.do("cq 0 100000")
    app.do("qp 0 0 0 70000 8 0 -1")
    agent.settle(app, 257)
    app.do(f"control 0 {STALL} 1")
    for _ in range(17):
        assert app.do("post 0 4096 10 0 4096 1 1")[0] == "0"
    row = agent.row(app.pid)
    assert sums(row) == {
        **{"posted": 69632, "posted_bytes": 696320, "signalled": 17, "untracked": 4096},
        **{"completed": 4096, "completed_bytes": 40960},
    }
    app.do(f"control 0 {STALL} 0")
    app.do("poll 0 99")
    row = agent.row(app.pid)
    assert (int(row["completed"]), int(row["completed_bytes"])) == (69632, 696320)
    assert int(row["completions"]) == 17


def test_what_is_refused_when_no_more_can_be_followed(start: Start, agent: Agent) -> None:
    """The ring has 65,536 places at most; the provider has room for 64 more, and refuses from there on."""
    app = start()
    for command in ("open alpha0", "cq 0 100000", "qp 0 0 0 65600 8 0 -1"):
        app.do(command)
    agent.settle(app, 257)
    app.do(f"control 0 {STALL} 1")
    for _ in range(16):
        assert app.do("post 0 4090 10 0 1 0 1")[0] == "0"
    assert app.do("post 0 200 7 0 1 0 1")[:2] == ["12", "160"]  # 96 with a place, 64 without
    for _ in range(100):
        assert app.do("post 0 1 3 0 1 0 1")[:2] == ["12", "0"]
    assert sums(agent.row(app.pid)) == {
        **{"posted": 65600, "posted_bytes": 654400 + 1120, "signalled": 65600, "refused": 140},
        **{"untracked": 64, "completed": 64, "completed_bytes": 448},
    }
    app.do(f"control 0 {STALL} 0")
    for _ in range(17):
        app.do("poll 0 4000")
    row = agent.row(app.pid)
    assert (int(row["completed"]), int(row["completions"])) == (65600, 65600)
    assert row["completed_bytes"] == row["posted_bytes"]


# ---- threads, processes ----


@pytest.mark.parametrize(("pairs", "threads", "depth"), [(1, 4, 128), (2, 4, 128), (4, 4, 128), (1, 8, 2), (2, 8, 2)])
def test_threads_lose_nothing(start: Start, agent: Agent, pairs: int, threads: int, depth: int) -> None:
    """With short queues many posts are refused, from all threads at once."""
    app = start()
    agent.prepare(app, depth)
    for _ in range(pairs - 1):
        app.do(f"qp 0 0 0 {depth} 8 0 -1")
    posted, refused = map(int, app.do(f"threads {pairs} 0 {threads} 5000"))
    rows = agent.rows(app.pid)
    assert posted + refused == 3 * threads * 5000
    assert posted == sum(int(row["posted"]) for row in rows.values())
    assert refused == sum(int(row["refused"]) for row in rows.values())
    assert refused > 0 or depth > threads
    for row in rows.values():
        assert int(row["posted"]) == int(row["completed"]) == int(row["completions"]) == int(row["signalled"])
        assert int(row["posted_bytes"]) == int(row["completed_bytes"]) == 100 * int(row["posted"])
        assert nonzero(row["opcodes"]) == {WRITE: int(row["posted"])}
        assert int(row["statuses"][0]) == int(row["completions"])


def test_a_child_changes_nothing_for_its_parent(app: native_build.App, agent: Agent) -> None:
    app.do("qpx 0 0 0 16 16 0 -1")
    app.do("postx 1 1 10 0 1 1 1 0 0")
    app.do("post 0 3 100 0 1 1 1")
    before = {number: sums(row) for number, row in agent.rows(app.pid).items()}
    app.do("poll 0 99")
    assert app.do("fork 0 0 50") == ["0"]
    assert sums(agent.row(app.pid)) == before[257] | {"completed": 3, "completed_bytes": 300, "completions": 3}
    app.do("post 0 1 100 0 1 1 1")
    app.do("poll 0 99")
    assert sums(agent.row(app.pid))["completed"] == 4


def test_a_child_with_a_device_of_its_own_is_followed(app: native_build.App, agent: Agent) -> None:
    app.do("post 0 2 100 0 1 1 1")
    status, child = app.do("forkopen 40")
    assert status == "0"
    row = agent.row(int(child))
    assert (row["device"].tobytes()[:5], int(row["posted"]), int(row["completed"])) == (b"beta0", 40, 40)
    app.do("poll 0 9")
    assert sums(agent.row(app.pid))["completed"] == 2


# ---- nothing that the application can see ----


def a_script(seed: int) -> list[str]:
    """Commands at random: posts of all kinds, refusals, errors, completions."""
    chance = random.Random(seed)
    script = ["open alpha0", "cq 0 8192", "cqx 0 8192 1", "srq 0 512"]
    for _ in range(3):
        script.append(f"qp 0 0 0 {chance.choice([1, 16, 64])} 64 {chance.randint(0, 1)} {chance.choice([-1, 0])}")
    script.append("qpx 0 1 1 32 64 0 -1")
    script += ["connect 0 258", "connect 1 257", "recv 0 9 1000", "srqrecv 0 30 5000", "recv 1 30 2000"]
    for _ in range(120):
        qp, count, opcode = chance.randrange(3), chance.randint(1, 6), chance.choice([WRITE, SEND, READ, SWAP])
        wr_id, signal = chance.randint(0, 3), chance.choice([0, 1, 2, 3])
        script.append(
            chance.choice(
                [
                    f"post {qp} {count} {chance.randint(0, 9000)} {opcode} {signal} {wr_id} {chance.randint(0, 1)}",
                    f"post {qp} {count} 8 {opcode} {signal} {wr_id} 1",
                    f"postx 3 {count} 512 {opcode} {signal} {wr_id} 1 {chance.randrange(4)} {chance.randint(0, 1)}",
                    f"recv {qp} {count} 100",
                    f"poll 0 {chance.randint(1, 9)}",
                    f"pollx 1 {chance.randint(1, 9)}",
                    f"control {qp} {REFUSE} {chance.randrange(8)}",
                    f"control {qp} {STALL} {chance.randint(0, 1)}",
                ]
            )
        )
    if seed % 3 == 0:
        script += ["control 1 2 12", f"post 1 2 10 {WRITE} 1 1 1", f"state 2 {ERROR}", "post 2 2 10 0 1 1 1"]
    script += ["poll 0 4000", "pollx 1 4000", "destroyqp 1", "poll 0 9", "destroyqp 0", "close 0"]
    return script


@pytest.mark.parametrize("seed", range(12))
def test_an_application_sees_no_difference(start: Start, agent: Agent, seed: int) -> None:
    """The answers tell results, refused requests, errno, every completion."""
    script = a_script(seed)[1:]
    answers = []
    with native_build.App() as bare:
        tapped = start()
        for app in (bare, tapped):
            app.do("open alpha0")
            made = [app.do(command) for command in script[:7]]
            if app is tapped:
                agent.settle(app, 257)
            answers.append(made + [app.do(command) for command in script[7:]])
    assert answers[0] == answers[1]
    rows = agent.rows(tapped.pid)
    assert {number: (int(row["posted"]), int(row["refused"])) for number, row in rows.items()} == posted_in(
        script, answers[1]
    )
    assert all(int(row["completed"]) <= int(row["posted"]) for row in rows.values())


def posted_in(script: list[str], answers: list[list[str]]) -> dict[int, tuple[int, int]]:
    """By queue pair: requests that the application was told to be posted, and refused."""
    found = {number: (0, 0) for number in range(257, 261)}
    for command, answer in zip(script, answers, strict=True):
        verb, *words = command.split()
        if verb not in ("post", "postx") or (verb == "postx" and words[8] == "1"):
            continue
        qp, count, error = 257 + int(words[0]), int(words[1]), int(answer[0])
        taken = (int(answer[1]) if verb == "post" else 0) if error else count
        found[qp] = (found[qp][0] + taken, found[qp][1] + count - taken)
    return found


def test_no_second_library_and_no_descriptor_come_along(start: Start, agent: Agent) -> None:
    def look(app: native_build.App) -> tuple[set[str], int]:
        objects = {line.split()[-1] for line in Path(f"/proc/{app.pid}/maps").read_text().splitlines() if ".so" in line}
        return objects, len(os.listdir(f"/proc/{app.pid}/fd"))

    with native_build.App() as bare:
        tapped = start()
        for app in (bare, tapped):
            prepare(app)
            app.do("post 0 1 1 0 1 1 1")
        agent.settle(tapped, 257)
        (without, descriptors), (within, descriptors_within) = look(bare), look(tapped)
    assert {Path(each).name for each in within - without} == {TAP.target.name}
    assert descriptors == descriptors_within
    assert agent.row(tapped.pid)["posted"] == 1


def test_the_library_may_be_closed_and_opened_again(start: Start, agent: Agent) -> None:
    app = start("-DDLOPEN")
    for turn in range(2):
        app.do("open beta0")
        app.do(f"cq {turn} 64")
        app.do(f"qp {turn} {turn} {turn} 16 16 0 -1")
        app.do(f"post {turn} {turn + 1} 10 0 1 1 1")
        app.do(f"poll {turn} 9")
        agent.settle(app, 257, turn)
        assert sums(agent.row(app.pid))["completed"] == turn + 1
        app.do(f"destroyqp {turn}")
        app.do(f"destroycq {turn}")
        app.do(f"close {turn}")
        app.do("unload")
        app.do("load")


# ---- time ----


def test_times_are_of_the_clock_and_in_order(app: native_build.App, agent: Agent) -> None:
    app.do("loop 0 0 200000")  # long enough to tie the counter to the clock a few times
    before = time.monotonic_ns()
    for _ in range(10):
        app.do("post 0 6 4096 0 3 1 1")
        app.do("poll 0 9")
    after = time.monotonic_ns()
    (table,) = agent.tables(app.pid)
    row = table.records[0].copy()
    assert int(row["timed"]) == 200_060
    times = row["timed_requests"][[(200_060 - back) % 64 for back in range(60, 0, -1)]]
    assert times["number"].tolist() == list(range(200_000, 200_060))
    assert before - 2000 <= int(times["posted_ns"].min()) and int(times["completed_ns"].max()) <= after + 2000
    assert (np.diff(times["posted_ns"].astype(np.int64)) >= -500).all()
    assert (times["completed_ns"] >= times["posted_ns"]).all()
    assert set(times["bytes"].tolist()) == {4096}


def test_the_reader_says_which_runs_are_timed(app: native_build.App, agent: Agent) -> None:
    (table,) = agent.tables(app.pid)
    table.records["run_mask"][0] = 3  # one run of 64 in four
    app.do("loop 0 0 1024")
    assert int(table.records["timed"][0]) == 256
    table.records["run_mask"][0] = NONE_TIMED
    app.do("loop 0 0 1024")
    assert int(table.records["timed"][0]) == 256
    assert int(table.records["completed"][0]) == 2048


# ---- the agent comes and goes ----


def test_an_agent_that_comes_later_gets_it_all(start: Start, tmp_path: Path, record: np.dtype[Any]) -> None:
    app = start()
    prepare(app)
    app.do("post 0 5 100 0 1 1 1")
    app.do("poll 0 2")
    with contextlib.closing(Agent(tmp_path / "test.tap", record)) as agent:
        assert not agent.tables(app.pid)
        app.do("qp 0 0 0 16 16 0 -1")
        agent.settle(app, 258)
        app.do("poll 0 9")
        assert sums(agent.row(app.pid)) == {
            **{"posted": 5, "posted_bytes": 500, "signalled": 5},
            **{"completed": 5, "completed_bytes": 500, "completions": 5},
        }
        assert set(agent.rows(app.pid)) == {257, 258}


def test_an_agent_that_restarts_finds_the_tables(start: Start, tmp_path: Path, record: np.dtype[Any]) -> None:
    app = start()
    with contextlib.closing(Agent(tmp_path / "test.tap", record)) as first:
        first.prepare(app)
        app.do("post 0 5 100 0 1 1 1")
        assert first.row(app.pid)["posted"] == 5
        with pytest.raises(RefusedError, match="already serves"):
            TapServer(tmp_path / "test.tap", record, ROWS)
    app.do("poll 0 3")
    with contextlib.closing(Agent(tmp_path / "test.tap", record)) as second:
        assert (app.pid, "tap") in second.server.sight().seen
        assert sums(second.row(app.pid))["completed"] == 3
        app.do("poll 0 3")
        assert sums(second.row(app.pid))["completed"] == 5
        app.close()
        wait_until(lambda: second.row(app.pid)["state"] == CLOSED, 20, "the process's end is seen")


def test_rows_are_used_again_once_they_are_told(app: native_build.App, agent: Agent) -> None:
    (table,) = agent.tables(app.pid)
    app.do("post 0 1 10 0 1 1 1")
    table.free(0)
    assert table.records["state"][0] == LIVE, "a row in use stays"
    app.do("destroyqp 0")
    assert (table.records["state"][0], int(table.records["posted"][0])) == (CLOSED, 1)
    table.free(0)
    assert (table.records["state"][0], int(table.records["posted"][0])) == (FREE, 0)
    for _ in range(ROWS):
        app.do("qp 0 0 0 1 1 0 -1")
    assert len(agent.tables(app.pid)) == 1
    assert (table.records["state"] == LIVE).all()
    app.do("qp 0 0 0 1 1 0 -1")
    wait_until(lambda: app.do("state 1 1") and len(agent.tables(app.pid)) == 2, 20, "there is a second table")
    wait_until(lambda: app.do("state 1 1") and agent.tables(app.pid)[1].records["state"].any(), 20, "it is used")
    assert [int((each.records["state"] == LIVE).sum()) for each in agent.tables(app.pid)] == [512, 1]


def test_a_dead_process_is_told_and_forgotten(app: native_build.App, agent: Agent) -> None:
    app.do("post 0 1 10 0 1 1 1")
    (table,) = agent.tables(app.pid)
    app.close()
    wait_until(lambda: table.records["state"][0] == CLOSED, 20, "the process's end is seen")
    agent.tick()
    assert agent.tables(app.pid) == [table]
    assert (app.pid, "tap") not in agent.server.sight().seen
    table.free(0)
    agent.tick()
    assert not agent.tables(app.pid)
    assert not [name for name, fd in mapped.named(f"swtap_{app.pid}") if os.close(fd) is None]


def test_a_process_cannot_pass_for_another(app: native_build.App, agent: Agent) -> None:
    (table,) = agent.tables(app.pid)
    table.records["tgid"] = 1
    told = row_table.read(table.records, time.monotonic_ns(), table.pid)
    assert told.tgid.tolist() == [app.pid]


@pytest.mark.parametrize(
    "words",
    [
        b"x",
        b"\0" * 256,
        tap_server.HELLO.pack(tap_server.MAGIC, 99, 0, ROWS, 0),
        tap_server.HELLO.pack(tap_server.MAGIC, tap_server.VERSION, 8, ROWS, 0),
    ],
)
def test_a_hello_that_is_none_is_refused(agent: Agent, words: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(str(agent.path))
        sock.send(words)
        _, _, refused = tap_server.REPLY.unpack(sock.recv(64))
        assert refused == tap_server.NOT_UNDERSTOOD
        assert sock.recv(64) == b""
    assert agent.server.drops()["tap_refused"] == 1
    assert not agent.server.tables()


def ask(agent: Agent, have: int, accept: bool = True) -> int:
    """Why this process is refused a table; 0: it is not."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(str(agent.path))
        hello = (tap_server.MAGIC, tap_server.VERSION, agent.record.itemsize, ROWS, have)
        sock.send(tap_server.HELLO.pack(*hello))
        reply, descriptors, _, _ = socket.recv_fds(sock, 64, 4)
        if descriptors and accept:
            sock.send(b"k")
        for each in descriptors:
            os.close(each)
        return int(tap_server.REPLY.unpack(reply)[2])


ASK = """
import os, socket, sys
for _ in range(int(sys.argv[3])):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(sys.argv[1])
        sock.send(bytes.fromhex(sys.argv[2]))
        reply, descriptors, _, _ = socket.recv_fds(sock, 64, 4)
        if descriptors:
            sock.send(b"k")
        print(int.from_bytes(reply[8:12], sys.byteorder))
"""


def asked_by(agent: Agent, uid: int, times: int) -> list[int]:
    """Why a process of another user is refused tables that it asks for; 0: it is not."""
    hello = tap_server.HELLO.pack(tap_server.MAGIC, tap_server.VERSION, agent.record.itemsize, ROWS, 1)
    command = ["/usr/bin/python3", "-I", "-c", ASK, str(agent.path), hello.hex(), str(times)]
    done = subprocess.run(command, user=uid, cwd="/", capture_output=True, text=True, timeout=30, check=True)
    return [int(line) for line in done.stdout.split()]


@pytest.fixture
def open_agent(record: np.dtype[Any]) -> Iterator[Agent]:
    """An agent that every user reaches, as the real one."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        serving = Agent(Path(folder) / "test.tap", record)
        yield serving
        serving.close()


def test_a_user_has_four_tables_whatever_processes_it_has(open_agent: Agent) -> None:
    agent, refused = open_agent, tap_server.TOO_MANY
    assert asked_by(agent, 1001, 6) == [0] * 4 + [refused] * 2
    assert asked_by(agent, 1001, 1) == [refused], "another process of this user: no row of the first is told yet"
    assert asked_by(agent, 1002, 5) == [0] * 4 + [refused], "another user has its own"
    assert agent.server.drops()["tap_refused"] == 4


def test_tables_are_limited_and_taken_back(agent: Agent) -> None:
    assert ask(agent, 0, accept=False) == 0
    wait_until(lambda: agent.server.drops()["tap_abandoned"] == 1, 20, "a table nobody took is taken back")
    assert not agent.tables(os.getpid())
    assert [ask(agent, have) for have in range(17)] == [0] * 16 + [tap_server.TOO_MANY]
    assert len(agent.tables(os.getpid())) == 16


def test_who_says_nothing_is_shown_out(agent: Agent) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(str(agent.path))
        wait_until(lambda: bool(agent.server.conversations), 20, "the connection is taken")
        agent.tick(later_ns=2_000_000_000)
        assert sock.recv(1) == b""
    assert agent.server.drops()["tap_malformed"] == 1


def test_without_descriptors_a_process_waits(tmp_path: Path, record: np.dtype[Any]) -> None:
    path = tmp_path / "test.tap"
    with (
        contextlib.closing(TapServer(path, record, ROWS)) as server,
        selectors.DefaultSelector() as s,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as waiting,
    ):
        server.register(s)
        with no_descriptor():
            waiting.connect(str(path))
            for key, mask in s.select(20):
                key.data(mask)
            assert s.select(0) == [] and server.drops()["tap_accept_paused"] == 1
        server.tick(time.monotonic_ns() + PAUSE_NS)
        for key, mask in s.select(20):
            key.data(mask)
        assert len(server.conversations) == 1


@pytest.mark.parametrize("call", ["connect 0 1", "destroyqp 0"])
def test_an_answer_that_comes_late_loses_nothing(
    start: Start, tmp_path: Path, record: np.dtype[Any], call: str
) -> None:
    with contextlib.closing(TapServer(tmp_path / "test.tap", record, ROWS)) as server, selectors.DefaultSelector() as s:
        server.register(s)
        app = start()
        prepare(app)
        app.do("post 0 3 100 0 1 1 1")
        app.do("poll 0 2")
        assert not server.tables()
        for _ in range(2):  # the connection, and what was said on it
            for key, mask in s.select(0):
                key.data(mask)
        app.do(call)
        for key, mask in s.select(0):
            key.data(mask)
        (table,) = server.tables()
        assert table.pid == app.pid
        assert sums(table.records[0])["completed"] == 2
        assert table.records["state"][0] == (CLOSED if call.startswith("destroy") else LIVE)
        assert not any(server.drops().values())
        assert app.do("held 500") == ["0"]


def test_a_descriptor_that_became_another_is_left_alone(start: Start, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "test.tap"))
        silent.listen(8)
        app = start()
        prepare(app)
        assert app.do("held 500") == ["1"]
        assert app.do("grab 500") == ["500"]
        app.do("connect 0 1")
        app.do("qp 0 0 0 16 16 0 -1")
        assert app.do("held 500") == ["1"]
        assert app.do("post 1 1 1 0 1 1 1")[0] == "0"


def test_an_agent_that_is_silent_costs_little(start: Start, tmp_path: Path, record: np.dtype[Any]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(str(tmp_path / "test.tap"))
        silent.listen(8)
        app = start()
        prepare(app)
        for _ in range(20):
            assert app.do("qp 0 0 0 16 16 0 -1")[2:] == ["errno", "77"]
        app.do("post 0 2 10 0 1 1 1")
        assert app.do("poll 0 9")[0] == "2"
    (tmp_path / "test.tap").unlink()
    with contextlib.closing(Agent(tmp_path / "test.tap", record)) as agent:

        def shown() -> bool:
            app.do("qp 0 0 0 16 16 0 -1")
            return 257 in agent.rows(app.pid)

        wait_until(shown, 20, "the agent that came is found")
        assert sums(agent.row(app.pid))["completed"] == 2


# ---- the launcher ----


def launch(arguments: Sequence[str], more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = "import sys; from pytools.sources.rdma import tap_command; tap_command.run(sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**native_build.environment(), **more},
        check=False,
        timeout=60,
    )


def test_the_launcher_sets_the_tap_up(agent: Agent, tmp_path: Path) -> None:
    show = ["sh", "-c", "echo $LD_AUDIT; echo $SWERVE_TAP_SOCKET"]
    done = launch(show, {"SWERVE_TAP_SOCKET": str(agent.path), "LD_AUDIT": ""})
    assert done.stdout.split() == [str(TAP.ready()), str(agent.path)]
    assert done.stderr == ""
    done = launch(show, {"SWERVE_RUNTIME_DIR": str(tmp_path / "nowhere")})
    assert done.stdout.split()[1] == str(tmp_path / "nowhere/host.tap")
    assert "no agent serves" in done.stderr


def test_the_launcher_says_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no command is given"):
        tap_command.run([])
    with pytest.raises(UsageError, match="no command surely-not"):
        tap_command.run(["surely-not"])
    (tmp_path / "static.c").write_text("int main(void) { return 0; }\n")
    subprocess.run(["cc", "-static", tmp_path / "static.c", "-o", tmp_path / "static"], check=True)
    with pytest.raises(UsageError, match="linked statically"):
        tap_command.run([str(tmp_path / "static")])
    monkeypatch.setenv("CC", "surely-no-compiler")
    with pytest.raises(SwerveError, match="no C compiler"):
        TAP.build(tmp_path / "tap.so")
