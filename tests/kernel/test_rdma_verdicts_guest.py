"""Verdicts on real queue pairs: Soft-RoCE in the second kernel, seen through the uprobes and through the tap.

Figures are those of the records themselves: a processor that is emulated runs late, but its clock does not.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import native_build
import pytest
import rdma_kit
import rdma_probes
import support
import tap_kit

from pytools.config import AgentConfig
from pytools.ipc.bus import Bus
from pytools.kernel.bpf.loader import Loaded
from pytools.kernel.native import TAP
from pytools.signals import AnySignal, RdmaBackup, RdmaQueuePair, RdmaSight
from pytools.signals import Path as NetworkPath
from pytools.sources.rdma.providers import Uprobes
from pytools.sources.rdma.source import RdmaSource
from pytools.sources.rdma.table import LIVE, Table, Way, text
from pytools.sources.rdma.tap_server import TapServer

pytestmark = [pytest.mark.guest(only=True), pytest.mark.deadline(240)]

MS = 1_000_000
SIZE = 4096
READINGS = 5  # in 50 ms
USUAL_NS = 500 * MS
USUAL_READINGS = 10  # that make a mean; a mean of the first one or two is no more than they are
LIMIT_S = 3.0  # for a verdict to come, before SWERVE_SLOW_FACTOR


class Pair:
    """A sender and a receiver that do as they are told (tests/native/rc_pair.c)."""

    def __init__(self, cable: rdma_kit.Cable, environment: dict[str, str]) -> None:
        ends = [str(word) for end in (cable.client, cable.server) for word in (end.device, end.gid_index)]
        self.process = subprocess.Popen(
            [str(native_build.program("rc_pair")), *ends, str(SIZE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env=environment,
        )
        self.pid, self.sender, self.receiver = map(int, self._line())

    def _line(self) -> list[str]:
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words, f"rc_pair ended with {self.process.wait(10)}"
        return words

    def do(self, command: str) -> list[int]:
        """Posted, completed, failed, the last status, and when that was."""
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        return [int(word) for word in self._line()]

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Reading(NamedTuple):
    """What the sender's row said when it was read."""

    at_ns: int
    completed_bytes: int
    outstanding_bytes: int


def bandwidth_bps(first: Reading, last: Reading) -> float:
    """Of what was completed between two readings."""
    return (last.completed_bytes - first.completed_bytes) * 8e9 / (last.at_ns - first.at_ns)


def telling(readings: Sequence[Reading], below_bps: float) -> Sequence[Reading]:
    """The readings that can tell of a throttled path, and the one before them.

    From the first on after which all that was completed, up to each later reading, came slower than that; but what
    stands still at first (a packet was lost, and its timer is a second) can be told by its next completion only.
    """
    place = next(
        place
        for place, each in enumerate(readings)
        if all(bandwidth_bps(each, later) < below_bps for later in readings[place + 1 :])
    )
    while place + 1 < len(readings) and readings[place + 1].completed_bytes == readings[place].completed_bytes:
        place += 1
    return readings[place:]


class Watcher:
    """The source, run as the agent runs it."""

    def __init__(self, way: Way, rails: Sequence[rdma_kit.Cable]) -> None:
        self._device = rails[0].client.device
        self.paths = [NetworkPath("guest", "peer", each.server.address, "", each.client.interface) for each in rails]
        bus = Bus()
        self._signals = bus.subscribe(frozenset({"rdma_qp", "rdma_suspects", "rdma_sight"}))
        by_end = {(path.address, path.interface): path for path in self.paths}
        answers = {self.paths[0]: False, self.paths[1]: True}  # what the agent's probes might say
        self.source = RdmaSource(AgentConfig("guest", []), bus, lambda *end: by_end.get(end), lambda: answers, [way])
        self._selector = selectors.DefaultSelector()
        self.source.register(self._selector)
        self.readings: list[Reading] = []
        read = self.source.watch.read

        def noted(present: Sequence[Table], now_ns: int) -> tuple[list[int], list[int]]:
            self.readings.append(self._reading(present, now_ns))
            return read(present, now_ns)

        self.source.watch.read = noted  # type: ignore[method-assign]
        self.seen: list[AnySignal] = []

    def _reading(self, present: Sequence[Table], now_ns: int) -> Reading:
        """The counters themselves; of the client's device the sender alone has any."""
        live = [row for each in present for row in each.records[each.records["state"] == LIVE]]
        rows = [row for row in live if text(row["device"].tobytes()) == self._device]
        completed, posted = (sum(int(row[name]) for row in rows) for name in ("completed_bytes", "posted_bytes"))
        return Reading(now_ns, completed, posted - completed)

    def run(self, until: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        """Work until the condition holds."""
        end_s = time.monotonic() + limit_s * support.slow_factor()
        while not until():
            assert time.monotonic() < end_s, f"not within {limit_s:g} s: {what}; verdicts: {self.story()}"
            due_ns = self.source.tick(time.monotonic_ns())
            for key, mask in self._selector.select(max(0.0, (due_ns - time.monotonic_ns()) / 1e9)):
                key.data(mask)
            self.seen += self._signals.read()

    def run_for(self, seconds: float) -> None:
        """Work for a while of real time."""
        end_s = time.monotonic() + seconds
        self.run(lambda: time.monotonic() >= end_s, "time passes", limit_s=seconds + LIMIT_S)

    def of(self, number: int) -> list[RdmaQueuePair]:
        """What was told of a queue pair; devices number theirs alike."""
        pairs = (each for each in self.seen if isinstance(each, RdmaQueuePair) and each.device == self._device)
        return [each for each in pairs if each.qp_number == number]

    def last(self, number: int) -> RdmaQueuePair:
        return self.of(number)[-1]

    def says(self, number: int, verdict: str, since_ns: int = 0) -> Callable[[], bool]:
        return lambda: any(each.verdict == verdict and each.at_ns >= since_ns for each in self.of(number))

    def first(self, number: int, verdict: str, since_ns: int) -> RdmaQueuePair:
        return next(each for each in self.of(number) if each.verdict == verdict and each.at_ns >= since_ns)

    def story(self) -> list[str]:
        """What was told, for failures."""
        pairs = [each for each in self.seen if isinstance(each, RdmaQueuePair)]
        told = [f"{each.at_ns // MS} {each.qp_number} {each.verdict}: {each.reason}" for each in pairs[-20:]]
        return [
            *told,
            str(self.source.drops()),
            str(next((each for each in reversed(self.seen) if isinstance(each, RdmaSight)), None)),
        ]

    def close(self) -> None:
        self.source.close()
        self._selector.close()


@pytest.fixture(scope="module")
def rails() -> Iterator[list[rdma_kit.Cable]]:
    with rdma_kit.cables("sv", "sx") as laid:
        yield laid


@pytest.fixture(scope="module")
def cable(rails: list[rdma_kit.Cable]) -> rdma_kit.Cable:
    return rails[0]


@pytest.fixture(scope="module")
def loaded(cable: rdma_kit.Cable) -> Iterator[Loaded]:
    with rdma_probes.programs() as programs:
        yield programs


class Lasting:
    """A way in that outlives the source that uses it: breakpoints are set once."""

    def __init__(self, way: Way) -> None:
        self._way = way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._way, name)

    def close(self) -> None:
        """Not yet."""


@pytest.fixture(scope="module")
def uprobes(loaded: Loaded) -> Iterator[Uprobes]:
    with rdma_probes.attached(loaded) as probes:
        yield probes


@pytest.fixture
def seen(
    request: pytest.FixtureRequest, rails: list[rdma_kit.Cable], loaded: Loaded, tmp_path: Path
) -> Iterator[tuple[Pair, Watcher]]:
    """A pair that was ok for a while, and the source that watches it."""
    environment = dict(os.environ)
    way: Way
    if request.param == "tap":
        socket = tmp_path / "tap"
        way = TapServer(socket, loaded.map("rdma_table").value, tap_kit.ROWS)
        environment |= tap_kit.variables(TAP.ready(), socket)
    else:
        way = cast(Way, Lasting(request.getfixturevalue("uprobes")))
    watcher = Watcher(way, rails)
    pair: list[Pair] = []
    try:
        starting = subprocess_pair(rails[0], environment, watcher)
        pair.append(starting)
        yield starting, watcher
    finally:
        rails[0].heal()
        for each in pair:
            each.close()
        watcher.close()


def subprocess_pair(cable: rdma_kit.Cable, environment: dict[str, str], watcher: Watcher) -> Pair:
    """Start a pair while the source is served, for the tap asks it for a table."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(Pair, cable, environment)
        watcher.run(starting.done, "the pair starts", limit_s=10)
        return starting.result()


def busy(pair: Pair, watcher: Watcher, command: str) -> None:
    """Have the pair send until all has been well for long enough that there is a mean to compare with."""
    pair.do(command)

    def settled() -> bool:
        told = watcher.of(pair.sender)
        if not told or told[-1].verdict != "ok":
            return False
        well = [each for each in watcher.readings if each.at_ns >= told[-1].since_ns]
        return len(well) >= USUAL_READINGS and well[-1].at_ns - well[0].at_ns > USUAL_NS

    watcher.run(settled, "all is well", limit_s=6)


@pytest.mark.parametrize(
    ("seen", "load", "rate"),
    [
        pytest.param("uprobe", "pace 12", "1500kbit", marks=pytest.mark.guest(thorough=True)),
        ("tap", "pace 12", "1500kbit"),
        # In 262 ms the queue is done once: readings that lie further apart than that cannot tell that it stays full.
        pytest.param("tap", "full 16", "2mbit", marks=pytest.mark.guest(thorough=True)),
    ],
    indirect=["seen"],
)
def test_a_throttled_path_is_congested_within_50_ms(
    cable: rdma_kit.Cable, seen: tuple[Pair, Watcher], load: str, rate: str
) -> None:
    pair, watcher = seen
    busy(pair, watcher, load)
    throttling_ns = time.monotonic_ns()
    cable.throttle(rate, burst="6kb", latency="5s")
    throttled_ns = time.monotonic_ns()
    watcher.run(watcher.says(pair.sender, "congested", throttled_ns), "congested")
    told = watcher.first(pair.sender, "congested", throttled_ns)
    before = [each for each in watcher.readings if each.at_ns <= throttling_ns]
    usual_from = max(each for each in before if each.at_ns <= before[-1].at_ns - USUAL_NS)
    since = [each for each in watcher.readings if throttling_ns <= each.at_ns <= told.at_ns]
    usual_bps = bandwidth_bps(usual_from, before[-1])
    told_by = telling(since, usual_bps / 2)
    spent_ms = (told_by[-1].at_ns - told_by[0].at_ns) / MS
    print(f"{load}: told after {len(told_by) - 1} of {len(since)} readings, {spent_ms:.0f} ms: {told.reason}")
    assert len(told_by) - 1 <= READINGS  # late as they come where a processor is emulated
    cable.heal()
    watcher.run(lambda: watcher.last(pair.sender).verdict == "ok", "ok again", limit_s=10)


@pytest.mark.parametrize("seen", ["tap"], indirect=True)
def test_a_sender_that_stops_has_no_demand(seen: tuple[Pair, Watcher]) -> None:
    pair, watcher = seen
    busy(pair, watcher, "pace 8")
    pair.do("stop")
    watcher.run(watcher.says(pair.sender, "no_demand"), "no demand")
    watcher.run_for(1.5)
    posted, completed, failed, *_ = pair.do("say")
    last = watcher.last(pair.sender)
    assert (last.posted, last.completed, last.outstanding) == (posted, completed, 0)
    assert last.posted_bytes == posted * SIZE
    assert failed == 0
    assert last.verdict == "no_demand"


@pytest.mark.parametrize("seen", ["uprobe"], indirect=True)
def test_a_receiver_without_receives_is_slow(seen: tuple[Pair, Watcher]) -> None:
    pair, watcher = seen
    pair.do("op send")
    busy(pair, watcher, "pace 8")
    watcher.run_for(1.0)
    pair.do("receives off")
    watcher.run(watcher.says(pair.sender, "slow_receiver"), "slow receiver")
    assert "dead" not in {each.verdict for each in watcher.of(pair.sender)}
    pair.do("receives on")
    watcher.run(lambda: watcher.last(pair.sender).verdict == "ok", "ok again", limit_s=10)


@pytest.mark.parametrize("seen", ["tap"], indirect=True)
def test_a_cut_path_is_dead_and_the_other_rail_its_backup(
    rails: list[rdma_kit.Cable], seen: tuple[Pair, Watcher]
) -> None:
    pair, watcher = seen
    cable, other = rails
    busy(pair, watcher, "pace 8")
    cut_ns = time.monotonic_ns()  # before: where a processor is emulated, the commands take longer than dead_ms
    cable.cut()
    watcher.run(watcher.says(pair.sender, "dead", cut_ns), "dead")
    told = watcher.first(pair.sender, "dead", cut_ns)
    assert told.at_ns - cut_ns >= 150 * MS  # not before dead_ms, less what the last reading was late
    assert "congested" not in {each.verdict for each in watcher.of(pair.sender) if each.at_ns > told.at_ns}
    assert (told.path, told.path_answers) == (watcher.paths[0], False)
    end, there = other.client, other.server.address
    assert told.backups == [RdmaBackup(end.device, 1, end.gid_index, f"{end.address} RoCE v2", there, watcher.paths[1])]
    pair.process.kill()
    watcher.run(lambda: watcher.last(pair.sender).closed, "the queue pair is told a last time")
