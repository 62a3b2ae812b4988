"""A stand-in verbs library: what every way to post and to poll adds to a row, exactly, by the uprobes and by the tap.

What only the tap counts exactly is in test_tap.py.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import native_build
import numpy as np
import pytest
import tap_kit
from rdma_probes import (
    CLOSED,
    FAIL,
    FETCH_ADD,
    FLUSHED,
    LIVE,
    LOST,
    NONE_TIMED,
    READ,
    REFUSE,
    RESET,
    RNR_SPENT,
    SEND,
    SEND_WITH_IMM,
    STALL,
    SWAP,
    WRITE,
    Seen,
    devices,
    loaded,
    nonzero,
    prepare,
    sums,
)

from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.native import TAP

__all__ = ["devices", "loaded"]  # fixtures


@pytest.fixture(scope="module")
def probes(loaded: Loaded, devices: Path) -> Iterator[Seen]:
    seen = Seen(loaded, devices)
    seen.attach()
    yield seen
    seen.uprobes.close()


@pytest.fixture
def seen(probes: Seen) -> Iterator[Seen]:
    """The probes; the test loses nothing, but what it says that it does."""
    before = probes.counters()
    yield probes
    after = probes.counters()
    lost = {name: after[name] - before[name] for name in LOST if after[name] != before[name]}
    told = [(int(row["tgid"]), int(row["qp_number"]), sums(row)) for row in probes.live()]
    probes.free_all()
    assert not lost, told


@pytest.fixture(params=[(), ("-DDLOPEN",)], ids=["linked", "dlopen"])
def app(request: pytest.FixtureRequest, seen: Seen) -> Iterator[native_build.App]:
    with native_build.App(*request.param) as started:
        prepare(started)
        yield started


@pytest.fixture(scope="module", params=["tap", "uprobes"])
def counter(request: pytest.FixtureRequest) -> str:
    """What counts; the tap goes first, while there are no breakpoints."""
    return str(request.param)


@pytest.fixture(scope="module")
def tap() -> tuple[Path, np.dtype[Any]]:
    """The library, and the layout of its rows."""
    return TAP.ready(), tap_kit.row_layout()


class Counted(NamedTuple):
    """An application with one of each, and what is counted of its queue pairs."""

    app: native_build.App
    rows: Seen | tap_kit.Agent

    def do(self, command: str) -> list[str]:
        return self.app.do(command)

    def row(self, number: int = 257) -> Any:
        return self.rows.row(self.app.pid, number)


@pytest.fixture(params=[(), ("-DDLOPEN",)], ids=["linked", "dlopen"])
def counted(request: pytest.FixtureRequest, counter: str, tmp_path: Path) -> Iterator[Counted]:
    if counter == "uprobes":
        seen = request.getfixturevalue("seen")
        with native_build.App(*request.param) as app:
            prepare(app)
            yield Counted(app, seen)
        return
    (library, layout), socket = request.getfixturevalue("tap"), tmp_path / "test.tap"
    with (
        contextlib.closing(tap_kit.Agent(socket, layout)) as agent,
        native_build.App(*request.param, more=tap_kit.variables(library, socket)) as app,
    ):
        agent.prepare(app)
        yield Counted(app, agent)


# ---- every way to post and to complete ----


def test_signalled_completions_retire_the_unsignalled_before_them(counted: Counted) -> None:
    counted.do("post 0 10 4096 0 4 1 1")  # the 4th and the 8th ask for a completion
    posted = {"posted": 10, "posted_bytes": 40960, "signalled": 2}
    assert sums(counted.row()) == posted
    assert counted.do("poll 0 1")[0] == "1"
    assert sums(counted.row()) == posted | {"completed": 4, "completed_bytes": 16384, "completions": 1}
    assert counted.do("poll 0 9")[0] == "1"
    row = counted.row()
    assert sums(row) == posted | {"completed": 8, "completed_bytes": 32768, "completions": 2}
    assert nonzero(row["opcodes"]) == {WRITE: 10}
    assert nonzero(row["statuses"]) == {0: 2}
    assert (row["state"], row["tgid"], row["qp_type"], row["device"].tobytes()[:6]) == (
        LIVE,
        counted.app.pid,
        2,
        b"alpha0",
    )


def test_a_queue_may_signal_everything(counted: Counted) -> None:
    counted.do("qp 0 0 0 128 128 1 -1")
    counted.do("post 1 5 100 4 0 1 1")
    assert counted.do("poll 0 9")[0] == "5"
    assert sums(counted.row(258)) == {
        **{"posted": 5, "posted_bytes": 500, "signalled": 5},
        **{"completed": 5, "completed_bytes": 500, "completions": 5},
    }


def test_requests_with_the_same_wr_id(counted: Counted) -> None:
    counted.do("post 0 9 10 0 3 7 0")
    counted.do("poll 0 2")
    assert counted.row()["completed"] == 6
    counted.do("poll 0 2")
    assert counted.row()["completed"] == 9


@pytest.mark.parametrize("good", [2, 70], ids=["short", "long"])
def test_a_list_refused_in_the_middle(counted: Counted, good: int) -> None:
    counted.do(f"control 0 {REFUSE} {good}")
    assert counted.do("post 0 100 100 0 1 1 1") == ["22", str(good), "errno", "77"]
    row = counted.row()
    assert sums(row) == {**{"posted": good, "posted_bytes": 100 * good, "signalled": good}, "refused": 100 - good}
    assert nonzero(row["opcodes"]) == {WRITE: good}
    counted.do("poll 0 200")
    counted.do("post 0 1 50 2 1 9 1")
    counted.do("poll 0 9")
    assert sums(counted.row()) == {
        **{"posted": good + 1, "posted_bytes": 100 * good + 50, "signalled": good + 1, "refused": 100 - good},
        **{"completed": good + 1, "completed_bytes": 100 * good + 50, "completions": good + 1},
    }


def test_a_full_send_queue(counted: Counted) -> None:
    counted.do(f"control 0 {STALL} 1")
    assert counted.do("post 0 200 1 0 1 1 1")[:2] == ["12", "128"]
    assert sums(counted.row()) == {"posted": 128, "posted_bytes": 128, "signalled": 128, "refused": 72}


@pytest.mark.parametrize("data", [0, 1, 2, 3], ids=["sge", "sge_list", "inline", "inline_list"])
def test_extended_posts(counted: Counted, data: int) -> None:
    counted.do("qpx 0 0 0 128 128 0 -1")
    for opcode in (WRITE, SEND, SEND_WITH_IMM, READ):
        counted.do(f"postx 1 3 1001 {opcode} 3 0 1 {data} 0")
    counted.do("poll 0 99")
    row = counted.row(258)
    assert sums(row) == {
        **{"posted": 12, "posted_bytes": 12012, "signalled": 4},
        **{"completed": 12, "completed_bytes": 12012, "completions": 4},
    }
    assert nonzero(row["opcodes"]) == dict.fromkeys((WRITE, SEND, SEND_WITH_IMM, READ), 3)


def test_extended_atomics_aborts_and_refusals(counted: Counted) -> None:
    counted.do("qpx 0 0 0 8 8 0 -1")
    counted.do(f"postx 1 2 8 {SWAP} 1 0 1 0 0")
    counted.do(f"postx 1 1 8 {FETCH_ADD} 1 2 1 0 0")
    assert counted.do("postx 1 4 100 0 1 3 1 0 1") == ["0", "errno", "77"]  # aborted
    assert counted.do("postx 1 6 100 0 1 3 1 0 0") == ["12", "errno", "77"]  # more than there is room for
    row = counted.row(258)
    assert sums(row) == {"posted": 3, "posted_bytes": 24, "signalled": 3, "refused": 6}
    assert nonzero(row["opcodes"]) == {SWAP: 2, FETCH_ADD: 1}
    counted.do("poll 0 9")
    assert counted.row(258)["completed"] == 3


@pytest.mark.parametrize("asked", [0, 5], ids=["plain", "with_numbers"])
def test_extended_completion_queues(counted: Counted, asked: int) -> None:
    counted.do(f"cqx 0 1024 {asked}")
    counted.do("qpx 0 1 1 128 128 0 -1")
    counted.do("postx 1 10 64 0 2 0 1 0 0")
    assert counted.do("pollx 1 3") == ["1:0", "3:0", "5:0", "n", "3"]
    assert counted.row(258)["completed"] == 6
    counted.do("pollx 1 9")
    assert sums(counted.row(258)) == {
        **{"posted": 10, "posted_bytes": 640, "signalled": 5},
        **{"completed": 10, "completed_bytes": 640, "completions": 5},
    }


def test_errors_flush_what_is_posted(counted: Counted) -> None:
    counted.do("post 0 4 100 0 0 1 1")  # carried out, but nobody asked for a completion
    counted.do(f"control 0 {FAIL} 12")
    counted.do("post 0 5 100 0 5 11 1")
    assert counted.do("poll 0 99")[3:] == ["11:12:257", *(f"{n}:{FLUSHED}:257" for n in (12, 13, 14, 15))]
    row = counted.row()
    assert sums(row) == {
        **{"posted": 9, "posted_bytes": 900, "signalled": 1},
        **{"completed": 9, "completed_bytes": 900, "completions": 5},
    }
    assert nonzero(row["statuses"]) == {12: 1, FLUSHED: 4}


def test_a_reset_empties_the_queue(counted: Counted) -> None:
    counted.do(f"control 0 {STALL} 1")
    counted.do("post 0 7 100 0 1 1 1")
    counted.do(f"state 0 {RESET}")
    row = counted.row()
    assert (int(row["posted"]), int(row["completed"]), int(row["completions"])) == (7, 7, 0)
    counted.do(f"control 0 {STALL} 0")
    counted.do("post 0 1 100 0 1 1 1")
    counted.do("poll 0 9")
    assert counted.row()["completed"] == 8


def test_receives_and_a_peer(counted: Counted) -> None:
    counted.do("qp 0 0 0 128 4 0 -1")
    counted.do("connect 0 258 00000000000000000000ffff0a090001")
    assert counted.do("recv 1 6 900") == ["12", "4"]
    counted.do(f"post 0 3 1000 {SEND} 1 1 1")
    counted.do("poll 0 99")
    sender, receiver = counted.row(), counted.row(258)
    assert sender["completed"] == 3
    assert sums(receiver) == {"receives_posted": 4, "receives_completed": 3, "received_bytes": 3000}
    assert sender["remote_qp_number"] == 258
    assert sender["remote"]["bytes"].tobytes().hex() == "00000000000000000000ffff0a090001"
    counted.do(f"post 0 2 1000 {SEND} 1 1 1")  # one receive is left
    counted.do("poll 0 99")
    assert nonzero(counted.row()["statuses"]) == {0: 4, RNR_SPENT: 1}


def test_shared_receive_queues(counted: Counted) -> None:
    counted.do("srq 0 64")
    counted.do("srqrecv 0 10 0")  # before it has a queue pair
    counted.do("qp 0 0 0 8 8 0 0")
    counted.do("qp 0 0 0 8 8 0 0")
    counted.do("connect 0 259")
    counted.do("srqrecv 0 5 50")
    assert counted.do("srqrecv 0 60 50") == ["12", "49"]
    counted.do(f"post 0 2 30 {SEND} 1 1 1")
    counted.do("poll 0 99")
    first, second = counted.row(258), counted.row(259)
    assert sums(first) == {"receives_posted": 64}  # those of the shared queue, told by its oldest queue pair
    assert sums(second) == {"receives_completed": 2, "received_bytes": 60}
    assert (first["srq"], second["srq"], counted.row()["srq"]) == (1, 1, 0)
    counted.do("destroyqp 1")
    counted.do("srqrecv 0 1 1")
    assert counted.row(259)["receives_posted"] == 1


def test_gid_of_this_end(app: native_build.App, seen: Seen, devices: Path) -> None:
    app.do("connect 0 300 fe800000000000000000000000000001")
    assert seen.uprobes.table is not None
    seen.uprobes.table.resolve_local(devices)
    row = seen.row(app.pid)
    assert row["local"]["bytes"].tobytes().hex() == "00000000000000000000ffff0a090002"
    assert row["remote"]["bytes"].tobytes().hex() == "fe800000000000000000000000000001"


def test_long_lists_and_large_polls(seen: Seen) -> None:
    with native_build.App() as app:
        prepare(app, depth=1000)
        app.do("post 0 500 7 0 1 1 1")
        assert app.do("poll 0 250")[0] == "250"
        app.do("poll 0 250")
        assert sums(seen.row(app.pid)) == {
            **{"posted": 500, "posted_bytes": 3500, "signalled": 500},
            **{"completed": 500, "completed_bytes": 3500, "completions": 500},
        }


def released(seen: Seen, app: native_build.App, polls: int) -> Any:
    """The row of the first queue pair, when its completions are held up no longer and were polled."""
    app.do(f"control 0 {STALL} 0")
    for _ in range(polls):
        app.do("poll 0 100")
    return seen.row(app.pid)


def test_more_signalled_than_can_be_followed(seen: Seen) -> None:
    with native_build.App() as app:
        prepare(app, depth=4000)
        app.do(f"control 0 {STALL} 1")
        for _ in range(10):
            app.do("post 0 150 10 0 1 0 1")
        row = seen.row(app.pid)
        untracked = int(row["untracked"])
        assert untracked > 0
        assert sums(row) == {
            **{"posted": 1500, "posted_bytes": 15000, "signalled": 1500},
            **{"untracked": untracked, "completed": untracked, "completed_bytes": 10 * untracked},
        }
        row = released(seen, app, 15)
        assert (int(row["completed"]), int(row["completed_bytes"])) == (1500, 15000)
        app.do("post 0 3 10 0 1 5000 1")  # the next are followed again
        assert int(seen.row(app.pid)["completed"]) == 1500
        app.do("poll 0 100")
        assert int(seen.row(app.pid)["completed"]) == 1503


@pytest.mark.parametrize("room", [1004, 1008, 1020], ids=["before", "at", "beyond"])
@pytest.mark.parametrize("every", [1, 2], ids=["all", "half"])
def test_what_is_refused_when_no_more_can_be_followed(seen: Seen, room: int, every: int) -> None:
    """The provider refuses a little before, at, or after the place where signalled requests find no room (1008)."""
    with native_build.App() as app:
        prepare(app, depth=every * room)
        app.do(f"control 0 {STALL} 1")
        for _ in range(8):
            app.do(f"post 0 {every * 125} 10 0 {every} 0 1")  # 1000 signalled
        good = every * (room - 1000)
        assert app.do(f"post 0 {every * 50} 7 0 {every} 0 1")[:2] == ["12", str(good)]
        for _ in range(100):
            assert app.do(f"post 0 {every} 3 0 {every} 0 1")[:2] == ["12", "0"]
        posted, roomless = every * room, max(0, room - 1008)
        given = {
            **{"posted": posted, "posted_bytes": every * 10_000 + 7 * good, "signalled": room},
            "refused": every * 150 - good,
        }
        told = {"untracked": roomless, "completed": roomless, "completed_bytes": 7 * roomless} if roomless else {}
        row = seen.row(app.pid)
        assert sums(row) == {**given, **told}
        assert nonzero(row["opcodes"]) == {WRITE: posted}
        released(seen, app, 11)
        app.do("post 0 1 1 0 1 0 1")  # it retires what unsignalled ones those without room have left
        app.do("poll 0 100")
        row = seen.row(app.pid)
        assert (int(row["posted"]), int(row["completed"])) == (posted + 1, posted + 1)
        assert row["posted_bytes"] == row["completed_bytes"]
        assert int(row["completions"]) == room + 1


def test_a_list_refused_beyond_what_is_followed_of_it(seen: Seen) -> None:
    with native_build.App() as app:
        prepare(app, depth=700)
        lost = seen.counters()["too_long"]
        app.do(f"control 0 {STALL} 1")
        assert app.do("post 0 900 10 0 1 0 1")[:2] == ["12", "700"]
        row = seen.row(app.pid)
        untracked = int(row["untracked"])
        assert untracked > 0
        assert sums(row) == {
            **{"posted": 700, "posted_bytes": 10 * (700 - untracked), "signalled": 700, "refused": 200},
            **{"untracked": untracked, "completed": untracked},
        }
        row = released(seen, app, 7)
        assert int(row["completions"]) == 700
        assert int(row["completed"]) == 700
        assert seen.counters()["too_long"] == lost


@pytest.mark.parametrize(("pairs", "threads", "depth"), [(1, 4, 128), (4, 4, 128), (2, 8, 2)])
def test_threads_lose_nothing(seen: Seen, pairs: int, threads: int, depth: int) -> None:
    """With short queues many posts are refused, from all threads at once; these may be told as untracked."""
    count = 200
    with native_build.App() as app:
        prepare(app, depth)
        for _ in range(pairs - 1):
            app.do(f"qp 0 0 0 {depth} 8 0 -1")
        posted, refused = (int(word) for word in app.do(f"threads {pairs} 0 {threads} {count}"))
        rows = [seen.row(app.pid, 257 + index) for index in range(pairs)]
    print(posted, refused, [sums(row) for row in rows])
    assert sum(int(row["refused"]) for row in rows) == refused
    assert refused > 0 or depth > threads
    for row in rows:
        assert int(row["posted"]) - int(row["completed"]) <= int(row["untracked"])
    if depth > threads:
        assert sum(int(row["posted"]) for row in rows) == posted
        assert sum(int(row["completed"]) for row in rows) == posted
        assert sum(int(row["completed_bytes"]) for row in rows) == 100 * posted
    assert sum(int(row["completions"]) for row in rows) == posted


# ---- times, rows, processes ----


def test_times_are_of_the_clock_and_in_order(app: native_build.App, seen: Seen) -> None:
    before_ns = time.monotonic_ns()
    app.do("post 0 40 100 0 10 1 1")
    app.do("poll 0 99")
    after_ns = time.monotonic_ns()
    row = seen.row(app.pid)
    timed = row["timed_requests"][:40]
    assert int(row["timed"]) == 40
    assert timed["number"].tolist() == list(range(40))
    assert timed["bytes"].tolist() == [100] * 40
    assert before_ns <= timed["posted_ns"].min()
    assert timed["completed_ns"].max() <= after_ns
    assert (np.diff(timed["posted_ns"].astype(np.int64)) >= 0).all()
    assert (timed["completed_ns"] >= timed["posted_ns"]).all()


def test_the_reader_says_which_runs_are_timed(app: native_build.App, seen: Seen) -> None:
    slot = seen.slots(app.pid)[-1]
    seen.records["run_mask"][slot] = 1  # every second run of 64
    for _ in range(4):
        app.do("post 0 64 1 0 64 1 1")
        app.do("poll 0 99")
    row = seen.row(app.pid)
    assert int(row["timed"]) == 128
    assert sorted(row["timed_requests"]["number"].tolist()) == list(range(128, 192))
    seen.records["run_mask"][slot] = NONE_TIMED
    app.do("post 0 64 1 0 64 1 1")
    app.do("poll 0 99")
    assert int(seen.row(app.pid)["timed"]) == 128


def test_a_queue_pair_that_ends_and_its_row(app: native_build.App, seen: Seen) -> None:
    assert seen.uprobes.table is not None
    app.do("post 0 3 100 0 1 1 1")
    app.do("poll 0 9")
    app.do("destroyqp 0")
    [slot] = seen.slots(app.pid)
    assert (seen.records[slot]["state"], seen.records[slot]["completed"]) == (CLOSED, 3)
    seen.uprobes.table.free(slot)
    assert not any(seen.records[slot].tobytes())
    app.do("qp 0 0 0 64 64 0 -1")
    app.do("post 1 3 100 0 1 1 1")
    assert sums(seen.row(app.pid, 258)) == {"posted": 3, "posted_bytes": 300, "signalled": 3}


def test_rows_of_the_dead_are_used_again(seen: Seen) -> None:
    assert seen.uprobes.table is not None
    for _ in range(3):
        with native_build.App() as app:
            prepare(app)
            for _ in range(299):
                app.do("qp 0 0 0 16 16 0 -1")
            app.do("post 299 1 1 0 1 1 1")
            assert seen.row(app.pid, 257 + 299)["posted"] == 1
        seen.free_all()


def test_more_queue_pairs_than_rows_are_counted(probes: Seen) -> None:
    with native_build.App() as app:
        prepare(app)
        for _ in range(len(probes.records) + 3):
            app.do("qp 0 0 0 16 16 0 -1")
        before = probes.counters()["table_full"]
        assert before >= 4
        app.do(f"post {len(probes.records) + 3} 1 1 0 1 1 1")
        assert probes.counters()["table_full"] == before + 1
        assert probes.uprobes.drops()["table_full"] == before + 1
    probes.free_all()


def test_several_providers_and_processes_at_once(seen: Seen) -> None:
    with native_build.App() as one, native_build.App() as other:
        prepare(one)
        for command in ("open beta0", "cq 0 99", "qp 0 0 0 16 16 0 -1", "open alpha1", "cq 1 99", "qp 1 1 1 9 9 0 -1"):
            other.do(command)
        one.do("post 0 4 10 0 1 1 1")
        other.do("post 0 3 10 0 1 1 1")
        other.do("post 1 2 10 0 1 1 1")
        assert seen.row(one.pid)["posted"] == 4
        devices = {seen.records[slot]["device"].tobytes().strip(b"\0") for slot in seen.slots(other.pid)}
        assert devices == {b"beta0", b"alpha1"}
        assert sorted(int(seen.records[slot]["posted"]) for slot in seen.slots(other.pid)) == [2, 3]
        seen_by = dict(seen.uprobes.sight().seen)
        assert {seen_by[one.pid], seen_by[other.pid]} == {"uprobe"}
