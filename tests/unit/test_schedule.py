"""The schedule and the process that sends it, over a pair of sockets: what was planned comes, once, and in time."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import support

from pytools.errors import CapabilityError, UsageError
from pytools.sources.probing import pacer, udp
from pytools.sources.probing.schedule import MEMORY_BYTES, Group, Schedule

MS = 1_000_000
TICKS = 8
LATE_NS = 10**10


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """What is sent by, and where it comes out."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    theirs.settimeout(20)
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def schedule(ends: tuple[socket.socket, socket.socket]) -> Iterator[Schedule]:
    made = Schedule(ends[0])
    yield made
    made.close()


def pacer_pid() -> int:
    """The process that sends: the only child of ours that is one."""
    children = [
        int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    (found,) = (pid for pid in children if b"swerve-pacer" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


def messages(schedule: Schedule, count: int, size: int = 8) -> np.ndarray:
    """Room for so many, in a schedule that is held; each has its number, and names the path of that number."""
    payload = schedule.array((count, size), np.uint8)
    payload[:, 0] = payload[:, 5] = np.arange(count)
    vectors, headers = schedule.array((count,), udp.VECTOR), schedule.array((count,), udp.HEADER)
    vectors["base"], vectors["length"] = schedule.addresses(payload), size
    headers["vectors"], headers["vector_count"] = schedule.addresses(vectors), 1
    return headers


def one_message(schedule: Schedule) -> Group:
    """The schedule laid out anew, for one message a tick."""
    with schedule.held():
        schedule.set_ticks(TICKS)
        return schedule.group(messages(schedule, 1))


def plan(schedule: Schedule, due_ns: list[int], *groups: Group, late_ns: int = LATE_NS) -> None:
    due = np.array(due_ns)
    schedule.plan(due, due + late_ns, [groups] * len(due_ns))


def wait_sent(schedule: Schedule) -> None:
    support.wait_until(lambda: schedule.done == schedule.planned, 10, "all that was planned is done")


def one_sent(schedule: Schedule, ends: tuple[socket.socket, socket.socket]) -> Group:
    """The schedule laid out anew, for one message a tick, and one tick of it sent."""
    group = one_message(schedule)
    plan(schedule, [time.monotonic_ns()], group)
    assert ends[1].recv(100)[0] == 0
    wait_sent(schedule)
    return group


def test_23_ticks_are_sent_in_order_and_not_before_they_are_due(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket]
) -> None:
    with schedule.held() as withdrawn:
        assert withdrawn == (0, 0)
        schedule.set_ticks(TICKS)
        headers = messages(schedule, 3)
        first, rest = schedule.group(headers[:1]), schedule.group(headers[1:], 50_000)
    due_ns = (time.monotonic_ns() + 5 * MS + 3 * MS * np.arange(23)).tolist()
    began: list[int] = []
    for turn in range(0, 23, TICKS // 2):  # so that entries are used again
        ticks = due_ns[turn : turn + TICKS // 2]
        plan(schedule, ticks, first, rest)
        got = [ends[1].recv(100) for _ in range(3 * len(ticks))]
        assert [each[0] for each in got] == [0, 1, 2] * len(ticks)
        wait_sent(schedule)
        began += schedule.began(np.arange(turn, turn + len(ticks))).tolist()
        assert headers["bytes"].tolist() == [8, 8, 8]
    assert all(at >= due for at, due in zip(began, due_ns, strict=True))
    assert schedule.planned == schedule.done == 23
    cpu_ns, memory = schedule.cost()
    assert 0 < cpu_ns < 10**10
    assert memory > 1 << 20


def test_what_is_too_late_is_left_out_and_said_to_be(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket]
) -> None:
    group = one_message(schedule)
    now_ns = time.monotonic_ns()
    plan(schedule, [now_ns - 30 * MS, now_ns - 20 * MS], group, late_ns=5 * MS)
    plan(schedule, [now_ns], group)
    wait_sent(schedule)
    began = schedule.began(np.arange(3)).tolist()
    assert began[:2] == [0, 0]
    assert began[2] >= now_ns
    ends[1].recv(100)
    ends[1].setblocking(False)
    with pytest.raises(BlockingIOError):
        ends[1].recv(100)


def test_what_is_held_is_withdrawn_and_what_is_planned_next_goes_on(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket]
) -> None:
    group = one_message(schedule)
    now_ns = time.monotonic_ns()
    plan(schedule, [now_ns, now_ns + 3600 * 1000 * MS, now_ns + 3601 * 1000 * MS], group)
    assert ends[1].recv(100)[0] == 0
    with schedule.held() as withdrawn:
        assert withdrawn == (1, 3)
        schedule.set_ticks(2)
        headers = messages(schedule, 2)
    plan(schedule, [now_ns], schedule.group(headers[1:]))
    assert ends[1].recv(100)[0] == 1
    assert (schedule.done, schedule.planned, schedule.restarts) == (2, 2, 0)


def test_of_a_tick_that_is_under_way_nothing_is_known(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket]
) -> None:
    """The pacer may lose its processor between the beginning of a tick and its first message."""
    one_sent(schedule, ends)
    schedule._words[pacer.BEGUN] += 1
    assert schedule.done == 1
    schedule._words[pacer.BEGUN] -= 1


def test_a_refusal_is_found_at_its_message_and_the_others_are_tried(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket]
) -> None:
    with schedule.held():
        schedule.set_ticks(TICKS)
        headers = messages(schedule, 4)
        headers["vector_count"][1] = 1 << 20  # more than the kernel takes
    plan(schedule, [time.monotonic_ns()], schedule.group(headers))
    wait_sent(schedule)
    assert headers["bytes"].tolist() == [8, -errno.EMSGSIZE, 8, 8]
    assert [ends[1].recv(100)[0] for _ in range(3)] == [0, 2, 3]


def test_what_a_full_buffer_has_no_room_for_is_not_tried(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket]
) -> None:
    with schedule.held():
        schedule.set_ticks(TICKS)
        headers = messages(schedule, 1000, 1000)
    plan(schedule, [time.monotonic_ns()], schedule.group(headers))
    wait_sent(schedule)
    results = headers["bytes"]
    taken = int(np.count_nonzero(results == 1000))
    assert 0 < taken < 1000
    assert results[taken] == -errno.EAGAIN
    assert not results[taken + 1 :].any()


def test_a_pacer_that_was_killed_is_replaced_and_goes_on_where_it_was(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket]
) -> None:
    group = one_sent(schedule, ends)
    os.kill(pacer_pid(), signal.SIGKILL)
    support.wait_until(lambda: not schedule.hear(), 10, "its end is told")
    plan(schedule, [time.monotonic_ns()], group)
    with schedule.held() as withdrawn:
        assert withdrawn == (1, 2)
        schedule.set_ticks(TICKS)
        group = schedule.group(messages(schedule, 1))
    assert schedule.restarts == 1
    plan(schedule, 2 * [time.monotonic_ns()], group, group)
    assert [ends[1].recv(100)[0] for _ in range(4)] == [0] * 4
    wait_sent(schedule)
    assert schedule.done == 3


def test_where_no_process_can_be_had_it_is_said_and_tried_again(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    pid = pacer_pid()
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", refused)
        for _ in range(2):
            with pytest.raises(CapabilityError, match="temporarily unavailable"), schedule.held():
                pass
        plan(schedule, [time.monotonic_ns()])  # into the void
        assert schedule.cost()[1] == 0
        assert not schedule.hear()
    group = one_message(schedule)
    plan(schedule, [time.monotonic_ns()], group)
    assert ends[1].recv(100)[0] == 0


def test_it_starts_in_a_process_with_more_descriptors_than_select_takes(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.enter_context(open(os.devnull))
        schedule = stack.enter_context(contextlib.closing(Schedule(ends[0])))
        assert schedule.fileno() > 1023
        one_sent(schedule, ends)


# ---- answers that are overdue ----

ROWS = 4
PATH = np.dtype(  # struct swerve_probe_path
    {
        "names": ["grace_ns", "limit", "first_ns", "overdue", "passed_bytes"],
        "formats": ["u8", "u4", "u8", "u4", "u8"],
        "offsets": [40, 56, 120, 168, 192],
        "itemsize": 200,
    }
)


class Watched:
    """A schedule whose pacer looks at rows that the test fills; none is overdue to begin with."""

    def __init__(self, packets: socket.socket, keep: contextlib.ExitStack) -> None:
        fd = os.memfd_create("paths")
        keep.callback(os.close, fd)
        os.ftruncate(fd, 4096 * PATH.itemsize)
        self.rows = np.frombuffer(mmap.mmap(fd, ROWS * PATH.itemsize), PATH, ROWS)
        self.schedule = keep.enter_context(contextlib.closing(Schedule(packets, fd)))
        self.schedule.watch(ROWS)
        self._group = one_message(self.schedule)

    def set(self, row: int, limit: int = 3, overdue: int = 0, grace_ns: int = 2 * MS, first_ns: int = 1) -> None:
        self.rows[row] = (grace_ns, limit, first_ns, overdue, 0)

    def tick(self, *after_ms: int) -> None:
        now_ns = time.monotonic_ns()
        plan(self.schedule, [now_ns + after * MS for after in after_ms], self._group)

    def spoke(self) -> bool:
        return bool(select.select([self.schedule], [], [], 0)[0])

    def sign(self, number: int) -> None:
        os.kill(pacer_pid(), number)


@pytest.fixture
def watched(ends: tuple[socket.socket, socket.socket]) -> Iterator[Watched]:
    with contextlib.ExitStack() as keep:
        yield Watched(ends[0], keep)


def test_the_pacer_says_that_an_answer_is_overdue_and_nothing_else(watched: Watched) -> None:
    watched.set(0, limit=0)
    watched.set(1, overdue=1)
    watched.set(2, first_ns=0)
    watched.set(3, grace_ns=17 * MS)
    watched.tick(0, 30)
    wait_sent(watched.schedule)
    assert not watched.spoke(), "not judged, known, answered, and no news at the time of a look"
    watched.set(3, grace_ns=16 * MS)
    watched.tick(*range(0, 30 * TICKS, 30))  # several looks: any may be late
    support.wait_until(watched.spoke, 10, "it is said")
    assert watched.schedule.hear()
    watched.sign(signal.SIGKILL)
    support.wait_until(lambda: not watched.schedule.hear(), 10, "its end is another matter")


def test_a_message_is_left_out_until_enough_was_sent_along_its_path_or_long_ago(
    watched: Watched, ends: tuple[socket.socket, socket.socket]
) -> None:
    schedule, passed = watched.schedule, watched.rows["passed_bytes"]
    with schedule.held():
        schedule.set_ticks(TICKS)
        group = schedule.group(messages(schedule, 2))

    now_ns = time.monotonic_ns()

    def sent(ago_ms: int = 0) -> list[int]:
        """Which messages left at a tick that was due then."""
        plan(schedule, [now_ns - ago_ms * MS], group)
        wait_sent(schedule)
        ends[0].send(b"\xff")
        return [each[0] for each in iter(lambda: ends[1].recv(100), b"\xff")]

    schedule.space(8000, 1)
    assert sent(9000) == [0, 1], "both long ago"
    schedule.space(8000, LATE_NS)
    passed[0] = 8000
    assert sent(8000) == [0]
    passed[:2] = 15_999, 7_999
    assert sent(7000) == []
    passed[:2] = 16_000, 8_001
    assert sent(6000) == [0, 1]
    passed[1] = 0
    assert sent(5000) == [1], "the path's row is another's"
    assert schedule.spaced_bytes == 6 * 8
    assert sent(4001) == []
    passed[0] = 10**6
    assert sent(4000) == [0], "nothing had passed, for less than a second"
    assert sent(2999) == []
    passed[0] = 10**9
    assert sent() == [], "nothing had passed for a second, so it rests"
    assert schedule.spaced_bytes == 7 * 8


def test_where_ticks_are_close_together_it_looks_at_each(watched: Watched) -> None:
    watched.set(0)
    watched.tick(*range(0, 5 * TICKS, 5))
    support.wait_until(watched.spoke, 10, "it is said")


def test_a_look_that_comes_late_is_left_out(watched: Watched) -> None:
    """Without a processor for us, answers may wait for one too. At the next tick, late as well, nobody looks either."""

    def stopped_between() -> bool:
        """Whether it has sent the first of two: both may be due before it gets a processor."""
        done = watched.schedule.done
        watched.tick(0, 12)
        support.wait_until(lambda: watched.schedule.done > done, 10, "the first has been sent", every_s=0.001)
        watched.sign(signal.SIGSTOP)
        if watched.schedule.done == done + 1:
            return True
        watched.sign(signal.SIGCONT)
        return False

    support.wait_until(stopped_between, 20, "it is stopped after the first")
    stopped_ns = time.monotonic_ns()
    try:
        watched.set(0)
        support.wait_until(lambda: time.monotonic_ns() > stopped_ns + 15 * MS, 10, "the look is late")
    finally:
        watched.sign(signal.SIGCONT)
    wait_sent(watched.schedule)
    assert not watched.spoke()


def test_it_does_not_wait_for_an_agent_that_does_not_listen_and_can_be_held(
    watched: Watched, ends: tuple[socket.socket, socket.socket]
) -> None:
    watched.set(0)
    for _ in range(3):
        watched.tick(*range(0, 15 * TICKS, 15))
        wait_sent(watched.schedule)
    support.wait_until(watched.spoke, 10, "several were said")
    with watched.schedule.held() as withdrawn:
        assert withdrawn == (3 * TICKS, 3 * TICKS)
    assert watched.schedule.restarts == 0
    assert watched.schedule.hear(), "there was a word, which is gone"


_OWNER = """
import os, socket, sys, time
from pathlib import Path
from pytools.sources.probing.schedule import Schedule
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
schedule = Schedule(ours)
print(*Path(f"/proc/self/task/{os.getpid()}/children").read_text().split(), flush=True)
time.sleep(3600)
"""


@pytest.mark.slow
def test_the_pacer_ends_with_its_owner_however_that_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        commands = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert b"swerve-pacer" in commands
        owner.kill()
        owner.wait()
    support.wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists(), 10, "the pacer has ended")


def test_signals_for_the_agent_do_not_end_the_pacer(
    schedule: Schedule, ends: tuple[socket.socket, socket.socket]
) -> None:
    group = one_message(schedule)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pacer_pid(), number)
    plan(schedule, [time.monotonic_ns()], group)
    assert ends[1].recv(100)[0] == 0


def test_more_than_the_memory_holds_is_refused(schedule: Schedule) -> None:
    with schedule.held():
        schedule.set_ticks(TICKS)
        schedule.array((MEMORY_BYTES // 2,), np.uint8)
        with pytest.raises(UsageError, match="too many probes"):
            schedule.array((MEMORY_BYTES // 2,), np.uint8)
        schedule.set_ticks(TICKS)  # all arrays are taken back
        assert schedule.array((MEMORY_BYTES // 2,), np.uint8).sum() == 0


def test_an_array_begins_as_zeros_whatever_was_there(schedule: Schedule) -> None:
    with schedule.held():
        schedule.set_ticks(TICKS)
        schedule.array((100,), np.uint8)[:] = 7
        schedule.set_ticks(TICKS)
        assert not schedule.array((100,), np.uint8).any()


def test_entries_and_headers_are_as_long_as_the_pacer_takes_them_for() -> None:
    assert udp.HEADER.itemsize == pacer.HEADER_BYTES
    assert udp.HEADER.fields is not None
    assert udp.HEADER.fields["bytes"][1] == pacer.RESULT_AT
