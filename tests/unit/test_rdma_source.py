"""The RDMA source over synthetic tables: links of a set rate serve what applications post, in a made-up time."""

from __future__ import annotations

import ipaddress
import os
import selectors
from collections.abc import Callable, Sequence
from pathlib import Path as File

import msgspec
import numpy as np
import pytest
from qp_rows import TIMED, FakeTable, Sender

from pytools.config import AgentConfig, Rdma, Windows
from pytools.ipc.bus import Bus
from pytools.signals import AnySignal, Path, RdmaBackup, RdmaQueuePair, RdmaSight, RdmaSuspects
from pytools.sources.rdma import source as rdma
from pytools.sources.rdma import table as tables
from pytools.sources.rdma.register import Register
from pytools.sources.rdma.table import Sight

MS = 1_000_000
STEP_NS = 100_000
MESSAGE = 65_536
GBIT = 10**9
START_NS = 5 * 365 * 86_400 * 10**9  # up for five years


class FakeWay:
    """A way in with tables of its own."""

    def __init__(self, *present: FakeTable) -> None:
        self.present: list[FakeTable] = list(present)
        self.told = Sight(providers=("libmlx5.so.1",))
        self.closed = False

    def register(self, selector: selectors.BaseSelector) -> None: ...

    def tick(self, now_ns: int) -> int:
        return now_ns + 1000 * MS

    def tables(self) -> Sequence[FakeTable]:
        return self.present

    def sight(self) -> Sight:
        return self.told

    def drops(self) -> dict[str, int]:
        return {"way_lost": 3}

    def close(self) -> None:
        self.closed = True


class Link:
    """Serves the requests of one sender in order, at a rate; 0 serves nothing."""

    def __init__(self, sender: Sender, rate_bps: float) -> None:
        self.sender, self.rate_bps = sender, rate_bps
        self._credit = 0.0

    def step(self, now_ns: int) -> None:
        if not self.sender.waiting:
            self._credit = 0.0
            return
        self._credit += self.rate_bps * STEP_NS / 8e9
        done = 0
        for _, _, size in self.sender.waiting:
            if self._credit < size:
                break
            self._credit -= size
            done += 1
        self.sender.complete(now_ns, done)
        if not self.sender.waiting:  # what was not used is gone
            self._credit = 0.0


class World:
    """Applications, links and the source, in one made-up time."""

    def __init__(self, tmp_path: File, *present: FakeTable, **settings: object) -> None:
        self.sysfs = tmp_path / "infiniband"
        self.counter = self.sysfs / "mlx5_0/ports/1/hw_counters/rnr_nak_retry_err"
        self.counter.parent.mkdir(parents=True)
        self.counter.write_text("100")
        self.table = present[0] if present else FakeTable()
        self.way = FakeWay(*(present or (self.table,)))
        bus = Bus()
        self._signals = bus.subscribe({"rdma_qp", "rdma_suspects", "rdma_sight"})
        config = AgentConfig(host="here", peers=[], rdma=msgspec.convert(settings, Rdma), windows=Windows())
        self.paths: dict[tuple[str, str], Path] = {}  # by remote address and interface
        self.answers: dict[Path, bool] = {}  # the measured paths
        self.source = rdma.RdmaSource(
            config, bus, lambda *ends: self.paths.get(ends), lambda: self.answers, [self.way], self.sysfs
        )
        self.now_ns = START_NS
        self.seen: list[AnySignal] = []
        self.due_ns = 0

    def port(self, device: str, interface: str, *gids: tuple[str, str], state: str = "4: ACTIVE") -> None:
        """A port with these GIDs: address as sysfs has it, and type."""
        place = self.sysfs / device / "ports/1"
        for index, (gid, kind) in enumerate(gids):
            files = (f"gids/{index}", gid), (f"gid_attrs/types/{index}", kind), (f"gid_attrs/ndevs/{index}", interface)
            for name, text in files:
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_text(text)
        (place / "state").write_text(state)

    def run(self, ms: float, *doing: Callable[[int], None]) -> None:
        """Let time pass."""
        for _ in range(round(ms * MS / STEP_NS)):
            self.now_ns += STEP_NS
            for each in doing:
                each(self.now_ns)
            if self.now_ns >= self.due_ns:
                self.due_ns = self.source.tick(self.now_ns)
            self.seen += self._signals.read()

    def pairs(self) -> list[RdmaQueuePair]:
        return [each for each in self.seen if isinstance(each, RdmaQueuePair)]

    def verdict(self) -> str:
        return self.pairs()[-1].verdict

    def told(self, verdict: str) -> RdmaQueuePair:
        """The first signal with that verdict."""
        return next(each for each in self.pairs() if each.verdict == verdict)

    def sender(self, opcode: int = 0) -> Sender:
        return Sender(self.table, 0, os.getpid(), self.now_ns, opcode=opcode)


def keeps(sender: Sender, depth: int) -> Callable[[int], None]:
    """An application that keeps its queue full."""
    return lambda now_ns: sender.post(now_ns, MESSAGE, depth - len(sender.waiting))


def paced(sender: Sender, bps: float, size: int = MESSAGE) -> Callable[[int], None]:
    """An application that posts at a pace, whatever becomes of it."""
    credit = [0.0]

    def post(now_ns: int) -> None:
        credit[0] += bps * STEP_NS / 8e9
        count = int(credit[0] // size)
        credit[0] -= count * size
        sender.post(now_ns, size, count)

    return post


@pytest.fixture
def world(tmp_path: File) -> World:
    return World(tmp_path)


def test_counts_and_bandwidth_are_those_of_the_application(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    world.run(2100, keeps(sender, 16), link.step)
    last = [each for each in world.pairs() if each.window_ns == 1000 * MS][-1]
    assert last.verdict == "ok", last.reason
    assert last.outstanding == last.posted - last.completed
    assert last.outstanding_bytes == last.outstanding * MESSAGE
    assert last.opcodes == {"rdma_write": last.posted}
    counted = next(each for each in last.bandwidths if each.messages == 0)
    assert counted.mean_bps == pytest.approx(10 * GBIT, rel=0.005)
    eight = next(each for each in last.bandwidths if each.messages == 8)
    assert eight.mean_bps == pytest.approx(10 * GBIT * 8 / (8 + 15), rel=0.1)  # the first of them waits behind 15
    assert last.latency.p50_ns == pytest.approx(16 * MESSAGE * 8 / 10, rel=0.2)  # ten bits a nanosecond
    assert last.owner.pid == os.getpid()
    assert last.owner.command


def test_counts_are_exact_once_all_is_done(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    world.run(300, keeps(sender, 16), link.step)
    world.run(1500, link.step)
    last = world.pairs()[-1]
    assert (last.posted, last.outstanding, last.outstanding_bytes) == (last.completed, 0, 0)
    assert last.posted == int(sender.row["posted"][0])
    assert last.verdict == "no_demand"


@pytest.mark.slow
@pytest.mark.parametrize("rate", [10 * GBIT, 1 * GBIT, 800 * GBIT])
def test_a_paced_sender_on_a_path_that_slows_down_is_congested_within_50_ms(world: World, rate: int) -> None:
    size = MESSAGE * max(1, rate // (10 * GBIT))
    sender = world.sender()
    link, application = Link(sender, rate), paced(sender, 0.8 * rate, size)
    world.run(500, application, link.step)
    assert {each.verdict for each in world.pairs()} <= {"unknown", "ok"}
    slowed_ns, link.rate_bps = world.now_ns, rate / 8
    world.run(60, application, link.step)
    told = world.told("congested")
    assert told.at_ns - slowed_ns <= 50 * MS
    assert "of its recent mean" in told.reason
    world.run(1000, application, link.step)
    assert world.verdict() == "congested"  # for as long as it lasts
    link.rate_bps = rate
    world.run(3000, application, link.step)
    assert world.verdict() == "ok"


@pytest.mark.parametrize("lulls", [1, 2])
def test_a_long_reading_does_not_become_the_mean(tmp_path: File, lulls: int) -> None:
    """A busy machine reads seldom, and its sender falls behind: its demand then must not pass for what is usual."""
    world = World(tmp_path, budget_per_s=0)
    sender = world.sender()
    link = Link(sender, GBIT)
    usual, lull = paced(sender, 0.8 * GBIT), paced(sender, 0.15 * GBIT)

    def between_readings(ms: int, application: Callable[[int], None]) -> None:
        world.due_ns = world.now_ns + ms * MS
        world.run(ms, application, link.step)

    for _ in range(20):
        between_readings(100, usual)
    for _ in range(lulls):
        between_readings(1000, lull)
    assert {each.verdict for each in world.pairs()} <= {"unknown", "ok"}
    link.rate_bps = 0.125 * GBIT
    for _ in range(5):
        between_readings(100, usual)
    assert world.verdict() == "congested"


def test_a_sender_with_a_full_queue_on_a_path_that_slows_down_is_congested(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    world.run(500, keeps(sender, 128), link.step)
    assert {each.verdict for each in world.pairs()} <= {"unknown", "ok"}
    slowed_ns, link.rate_bps = world.now_ns, GBIT
    world.run(100, keeps(sender, 128), link.step)
    told = world.told("congested")
    assert told.at_ns - slowed_ns <= 50 * MS
    assert "stays full" in told.reason


def test_less_demand_is_not_congestion(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    for share in (0.8, 0.2, 0.05, 0.5):
        world.run(400, paced(sender, share * 10 * GBIT), link.step)
    assert {each.verdict for each in world.pairs()} <= {"unknown", "ok"}


def test_a_deeper_queue_is_not_congestion(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    for depth in (4, 64, 8, 128):
        world.run(300, keeps(sender, depth), link.step)
    assert {each.verdict for each in world.pairs()} <= {"unknown", "ok"}


def test_an_application_that_computes_between_bursts_is_not_congested(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    for _ in range(20):
        world.run(15, keeps(sender, 32), link.step)
        world.run(35)  # neither posts nor polls
    assert {each.verdict for each in world.pairs()} <= {"unknown", "ok"}


def test_a_sender_that_stops_has_no_demand_and_wakes_at_once(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    world.run(300, keeps(sender, 16), link.step)
    stopped_ns = world.now_ns
    world.run(400, link.step)
    told = world.told("no_demand")
    assert 100 * MS <= told.at_ns - stopped_ns <= 200 * MS
    assert "nothing posted" in told.reason
    world.run(1000, link.step)
    woken_ns = world.now_ns
    world.run(300, keeps(sender, 16), link.step)
    assert (
        min(each.at_ns for each in world.pairs() if each.verdict == "ok" and each.at_ns > woken_ns)
        < woken_ns + 260 * MS
    )


def test_a_queue_pair_that_was_busy_before_it_was_seen_has_no_demand(world: World) -> None:
    world.sender().add(posted=500, completed=500, completions=500, signalled=500)
    Sender(world.table, 1, os.getpid(), world.now_ns, number=2)  # never posted anything
    world.run(1500)
    last = {each.qp_number: each for each in world.pairs()}
    assert (last[17].verdict, last[2].verdict) == ("no_demand", "unknown")
    assert "posted nothing" in last[2].reason


def test_a_receiver_that_is_not_ready_is_slow(world: World) -> None:
    sender = world.sender(opcode=tables.OPCODES.index("send"))
    link = Link(sender, 10 * GBIT)
    world.run(600, keeps(sender, 16), link.step)

    def not_ready(now_ns: int) -> None:
        if now_ns % MS == 0:
            world.counter.write_text(str(now_ns // MS))

    world.run(400, keeps(sender, 16), not_ready)
    assert world.verdict() == "slow_receiver"
    assert "dead" not in {each.verdict for each in world.pairs()}
    assert "not ready" in world.told("slow_receiver").reason
    world.run(400, keeps(sender, 16), link.step)
    world.run(1000, keeps(sender, 16), link.step)
    assert world.verdict() == "ok"


def test_a_port_that_hears_not_ready_says_nothing_of_writes(world: World) -> None:
    sender = world.sender()  # RDMA writes take no receive
    link = Link(sender, 10 * GBIT)
    world.run(600, keeps(sender, 16), link.step)
    world.counter.write_text("5000")
    world.run(400, keeps(sender, 16))
    assert world.verdict() == "dead"


def test_a_path_that_is_cut_is_dead_and_comes_back(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    world.run(300, keeps(sender, 16), link.step)
    cut_ns = world.now_ns
    world.run(1500, keeps(sender, 16))
    told = world.told("dead")
    assert 190 * MS <= told.at_ns - cut_ns <= 240 * MS
    assert "16 requests" in told.reason
    assert world.verdict() == "dead"
    world.run(400, keeps(sender, 16), link.step)
    world.run(1100, keeps(sender, 16), link.step)
    assert world.verdict() == "ok"


V1, V2 = "IB/RoCE v1", "RoCE v2"
ANY = "0000:0000:0000:0000:0000:ffff:0a06:"  # 10.6.
LINK_LOCAL = "fe80:0000:0000:0000:0000:00ff:fe00:0001"
FIRST = Path("here", "peer", "10.6.1.2", "", "rail1")
SECOND = Path("here", "peer", "10.6.2.2", "", "rail2")
STRANGER = Path("here", "stranger", "10.6.3.2", "", "rail2")


def dead_sender(world: World) -> Callable[[], RdmaQueuePair]:
    """A queue pair to the peer's first address whose path is cut; what is said of it, later and later."""
    world.port("mlx5_0", "rail1", (f"{ANY}0101", V2))
    world.paths = {("10.6.1.2", "rail1"): FIRST}
    sender = world.sender()
    sender.row["remote"]["bytes"] = np.frombuffer(ipaddress.IPv6Address("::ffff:10.6.1.2").packed, np.uint8)
    world.run(300, keeps(sender, 16), Link(sender, 10 * GBIT).step)
    assert all((each.path_answers, each.backups, each.no_backup) == (None, [], "") for each in world.pairs())

    def later() -> RdmaQueuePair:
        world.run(1500, keeps(sender, 16))
        assert world.verdict() == "dead"
        return world.pairs()[-1]

    return later


def test_a_dead_queue_pair_is_told_with_what_reaches_its_peer_otherwise(world: World) -> None:
    world.port("mlx5_1", "rail2", (LINK_LOCAL, V2), (f"{ANY}0201", V1), (f"{ANY}0201", V2))
    world.port("mlx5_2", "rail2", (f"{ANY}0209", V2), state="1: DOWN")
    world.answers = {FIRST: False, SECOND: True, STRANGER: True}
    told = dead_sender(world)()
    assert told.path == FIRST
    assert told.path_answers is False
    assert told.backups == [RdmaBackup("mlx5_1", 1, 2, f"10.6.2.1 {V2}", "10.6.2.2", SECOND)]
    assert told.no_backup == ""


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({FIRST: False, SECOND: False}, "no other path to peer answers probes"),
        ({FIRST: True, STRANGER: True}, "no other path to peer answers probes"),
        ({FIRST: False, Path("here", "peer", "10.6.1.2", "10.6.1.9", "rail1"): True}, "no other path to peer"),
        ({FIRST: False, SECOND: True}, "rail2 answers probes of peer, but no active RDMA port has a GID there"),
        ({STRANGER: True}, "no measured path leads to 10.6.1.2"),
    ],
)
def test_a_dead_queue_pair_without_a_backup_is_told_with_the_reason(
    world: World, answers: dict[Path, bool], why: str
) -> None:
    world.port("mlx5_1", "rail2", (LINK_LOCAL, V2))
    later = dead_sender(world)
    if FIRST not in answers:
        world.paths.clear()
        world.source._identify(next(iter(world.source.watch.register.pairs.values())))
    world.answers = answers
    told = later()
    assert told.path_answers is answers.get(FIRST)
    assert told.backups == []
    assert told.no_backup.startswith(why)


def test_a_backup_comes_and_goes_with_the_answers_of_its_path(world: World) -> None:
    world.port("mlx5_1", "rail2", (f"{ANY}0201", V2))
    later = dead_sender(world)
    for answers in (False, True, False):
        world.answers = {FIRST: False, SECOND: answers}
        assert bool(later().backups) is answers


def test_a_host_without_processor_is_not_a_dead_path(world: World) -> None:
    """Neither the application nor the source runs for 230 ms of each 260; what comes first then is the source."""
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    world.run(300, keeps(sender, 16), link.step)
    for _ in range(20):
        world.now_ns += 230 * MS
        world.run(10)
        world.run(10, keeps(sender, 16), link.step)
        world.run(10, keeps(sender, 16))  # posted and read once more, not completed
    assert {each.verdict for each in world.pairs()} <= {"unknown", "ok"}
    cut_ns = world.now_ns
    for _ in range(6):
        world.now_ns += 230 * MS
        world.run(20, keeps(sender, 16))
    told = world.told("dead")
    assert told.at_ns - cut_ns <= 1000 * MS  # four late readings
    assert f"for {(told.at_ns - cut_ns) // MS + 10} ms" in told.reason  # all of it, not what was watched


def test_unsignalled_requests_left_behind_are_not_dead(world: World) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    world.run(300, keeps(sender, 16), link.step)
    world.run(100, link.step)
    sender.post(world.now_ns, MESSAGE, 3, signalled=False)
    world.run(1500)
    assert "dead" not in {each.verdict for each in world.pairs()}


@pytest.mark.parametrize(("status", "verdict"), [("retry_exc_err", "dead"), ("rnr_retry_exc_err", "slow_receiver")])
def test_a_failed_request_says_why_and_stands(world: World, status: str, verdict: str) -> None:
    sender = world.sender()
    link = Link(sender, 10 * GBIT)
    world.run(300, keeps(sender, 16), link.step)
    keeps(sender, 16)(world.now_ns)
    sender.complete(world.now_ns, 1, tables.STATUSES.index(status))
    sender.complete(world.now_ns, 15, tables.FLUSHED)
    world.run(2500)
    last = world.pairs()[-1]
    assert last.verdict == verdict
    assert status in last.reason
    assert last.errors == {status: 1, "wr_flush_err": 15}


def test_two_gib_outstanding_at_800_gbit_and_counters_about_to_wrap(world: World) -> None:
    sender = world.sender()
    near = 2**64 - 3 * 2**30
    sender.set(posted_bytes=near, completed_bytes=near, posted=2**63 - 5, completed=2**63 - 5)
    link, size = Link(sender, 800 * GBIT), 64 << 20
    depth = 48  # 3 GiB

    def application(now_ns: int) -> None:
        sender.post(now_ns, size, depth - len(sender.waiting))

    world.run(2100, application, link.step)
    last = [each for each in world.pairs() if each.window_ns == 1000 * MS][-1]
    assert last.verdict == "ok", last.reason
    assert last.outstanding_bytes == depth * size > 2**31
    counted = next(each for each in last.bandwidths if each.messages == 0)
    assert counted.mean_bps == pytest.approx(800 * GBIT, rel=0.01)
    assert all(each.mean_bps is None or 0 < each.mean_bps < 1000 * GBIT for each in last.bandwidths)


def test_rows_that_make_no_sense_are_counted_and_left_out(world: World) -> None:
    for slot, wrong in enumerate(
        ({"state": 7}, {"completed": 5}, {"completed_bytes": 5}, {"created_ns": START_NS + 10**12}, {"tgid": 0})
    ):
        Sender(world.table, slot, os.getpid(), world.now_ns, number=slot).set(**wrong)
    good = Sender(world.table, 9, os.getpid(), world.now_ns, number=9)
    good.set(device=b"mlx5_0\xff\x07")
    world.run(1500)
    assert {each.qp_number for each in world.pairs()} == {9}
    assert world.pairs()[-1].device.isprintable()
    assert world.source.drops()["rdma_garbage"] == 5


def test_timed_requests_that_make_no_sense_are_counted(world: World) -> None:
    sender = world.sender()
    world.run(300)
    sender.row["timed_requests"][0, 0] = (0, 10**18, 5, 1)
    sender.add(timed=1, posted=1, completed=1)
    world.run(300)
    assert world.source.drops()["rdma_garbage"] == 1


def test_a_destroyed_queue_pair_is_told_once_more_and_its_slot_is_freed(world: World) -> None:
    sender = world.sender()
    world.run(300, keeps(sender, 16), Link(sender, GBIT).step)
    sender.close()
    world.run(1500)
    assert world.table.freed == [0]
    assert [each.closed for each in world.pairs()].count(True) == 1
    assert world.pairs()[-1].closed
    again = Sender(world.table, 0, os.getpid(), world.now_ns, number=99)
    world.run(1500, keeps(again, 4), Link(again, GBIT).step)
    assert world.pairs()[-1].qp_number == 99
    assert not world.pairs()[-1].closed


def test_the_queue_pairs_of_a_process_that_ended_are_closed(world: World) -> None:
    beyond = int(File("/proc/sys/kernel/pid_max").read_text()) + 1
    Sender(world.table, 3, beyond, world.now_ns)
    world.run(600)
    assert world.table.freed == [3]
    assert world.pairs()[-1].closed
    assert world.pairs()[-1].owner.pid == beyond


def test_a_table_that_goes_takes_its_queue_pairs_along(tmp_path: File) -> None:
    first, second = FakeTable(), FakeTable("tap", 8)
    world = World(tmp_path, first, second)
    Sender(first, 0, os.getpid(), world.now_ns, number=1)
    Sender(second, 0, os.getpid(), world.now_ns, number=2)
    world.run(600)
    world.way.present.remove(second)
    world.run(1500)
    closed = [each for each in world.pairs() if each.closed]
    assert [(each.qp_number, each.seen_by) for each in closed] == [(2, "tap")]
    assert second.freed == []


def test_a_table_may_close_before_it_frees(world: World) -> None:
    """A way in may refuse to free what still looks alive, and close it when it sees the process gone."""
    beyond = int(File("/proc/sys/kernel/pid_max").read_text()) + 1
    sender = Sender(world.table, 3, beyond, world.now_ns)
    freeing, world.table.free = world.table.free, lambda _slot: None  # type: ignore[method-assign,assignment]
    world.run(600)
    assert world.pairs()[-1].closed
    world.table.free = freeing  # type: ignore[method-assign]
    sender.close()
    world.run(600)
    assert world.table.freed == [3]
    assert [each.closed for each in world.pairs()].count(True) == 1


def test_timing_stays_within_the_budget(tmp_path: File) -> None:
    world = World(tmp_path, budget_per_s=1000)
    sender = world.sender()
    application, link = paced(sender, 10 * GBIT, 8192), Link(sender, 20 * GBIT)  # 150,000 requests a second
    world.run(300, application, link.step)
    before = int(sender.row["timed"][0])
    world.run(2000, application, link.step)
    assert 0 < int(sender.row["timed"][0]) - before <= 2 * 1000 + TIMED
    mask = int(sender.row["run_mask"][0])
    assert mask & (mask + 1) == 0
    share = world.pairs()[-1].sampled_share
    assert 0 < share < 0.01


def test_nothing_is_timed_without_a_budget(tmp_path: File) -> None:
    world = World(tmp_path, budget_per_s=0)
    sender = world.sender()
    world.run(1500, keeps(sender, 16), Link(sender, GBIT).step)
    assert int(sender.row["run_mask"][0]) == tables.NOT_TIMED
    last = world.pairs()[-1]
    assert last.verdict == "ok"
    assert next(each for each in last.bandwidths if each.messages == 0).mean_bps == pytest.approx(GBIT, rel=0.01)


def test_a_remote_address_comes_as_people_write_it(world: World) -> None:
    sender = world.sender()
    sender.row["remote"]["bytes"][0] = [*([0] * 10), 255, 255, 10, 9, 0, 3]
    sender.set(remote_qp_number=77)
    world.run(1100)
    assert (world.pairs()[-1].remote, world.pairs()[-1].remote_qp_number) == ("10.9.0.3", 77)


@pytest.mark.slow
def test_queue_pairs_to_one_slow_host_agree(world: World) -> None:
    senders = [Sender(world.table, slot, os.getpid(), world.now_ns, number=slot) for slot in range(8)]
    for slot, sender in enumerate(senders):
        sender.row["remote"]["bytes"][0] = [*([0] * 10), 255, 255, 10, 9, 0, slot // 2]
    links = [Link(sender, 10 * GBIT) for sender in senders]
    doing = [*(paced(sender, 8 * GBIT) for sender in senders), *(link.step for link in links)]
    world.run(500, *doing)
    for link in links[2:4]:
        link.rate_bps = GBIT
    world.run(600, *doing)
    last = [each for each in world.seen if isinstance(each, RdmaSuspects)][-1].suspects
    assert [(each.kind, each.name, each.agreeing) for each in last] == [("host", "10.9.0.1", 2)]
    assert last[0].slowness == pytest.approx(1 - 1 / 8, abs=0.08)


def test_idle_tables_are_looked_at_seldom(world: World) -> None:
    world.sender()
    world.run(2000)
    assert world.source.tick(world.now_ns) - world.now_ns > 100 * MS or world.due_ns - world.now_ns > 0
    looks = []
    read = world.source.watch.read
    world.source.watch.read = lambda present, now_ns: (looks.append(now_ns), read(present, now_ns))[1]  # type: ignore[method-assign]
    world.run(1000)
    assert len(looks) <= 5


def test_sight_says_why_there_is_nothing_to_see(tmp_path: File) -> None:
    world = World(tmp_path)
    world.counter.unlink()
    for place in (world.counter.parent, *list(world.counter.parents)[1:4]):
        place.rmdir()
    world.run(1100)
    sight = next(each for each in world.seen if isinstance(each, RdmaSight))
    assert not sight.available
    assert "no RDMA device" in sight.reason
    assert world.source.drops()["way_lost"] == 3
    world.source.close()
    assert world.way.closed


def test_sight_names_who_is_seen_how(world: World) -> None:
    world.sender()
    world.way.told = Sight(providers=("libmlx5.so.1",), seen=((1, "not permitted"),), hits=5000)
    world.run(2100)
    sight = [each for each in world.seen if isinstance(each, RdmaSight)][-1]
    assert sight.available
    assert sight.providers == ["libmlx5.so.1"]
    assert next(how for name, how in sight.seen.items() if name.split()[0] == str(os.getpid())) == "uprobe"
    assert next(how for name, how in sight.seen.items() if name.split()[0] == "1") == "not permitted"


def test_paths_are_found_by_address_and_interface(world: World) -> None:
    path = Path("here", "there", "10.9.0.3", "", "eth7")
    world.paths["10.9.0.3", "eth7"] = path
    types = world.counter.parents[1] / "gid_attrs/ndevs"
    gids = world.counter.parents[1] / "gids"
    types.mkdir(parents=True)
    gids.mkdir()
    (gids / "0").write_text("0000:0000:0000:0000:0000:ffff:0a09:0001")
    (types / "0").write_text("eth7")
    sender = world.sender()
    sender.row["remote"]["bytes"][0] = [*([0] * 10), 255, 255, 10, 9, 0, 3]
    world.run(1100)
    assert world.pairs()[-1].path == path


def test_more_queue_pairs_than_rows_are_counted_once(world: World) -> None:
    world.source.watch.register = Register(rows=2)
    for slot in range(5):
        Sender(world.table, slot, os.getpid(), world.now_ns, number=slot)
    world.run(1500)
    assert len({each.qp_number for each in world.pairs()}) == 2
    assert world.source.drops()["rdma_no_row"] == 3
