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
from typing import Any, cast

import native_build
import pytest
import rdma_kit
import support

from pytools import rdma_tap
from pytools.bus import Bus
from pytools.config import AgentConfig
from pytools.kernel import compiling, loader
from pytools.kernel.loader import Loaded
from pytools.signals import AnySignal, RdmaQueuePair, RdmaSight
from pytools.sources.rdma import providers
from pytools.sources.rdma.providers import Uprobes
from pytools.sources.rdma.source import RdmaSource
from pytools.sources.rdma.table import Table, Way
from pytools.sources.rdma.tap_server import TapServer

pytestmark = [pytest.mark.guest(only=True), pytest.mark.deadline(240)]

MS = 1_000_000
SIZE = 4096
ROWS = 512
READINGS = 5  # in 50 ms
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


class Watcher:
    """The source, run as the agent runs it."""

    def __init__(self, way: Way, device: str) -> None:
        self._device = device
        bus = Bus()
        self._signals = bus.subscribe(frozenset({"rdma_qp", "rdma_suspects", "rdma_sight"}))
        self.source = RdmaSource(AgentConfig(host="guest", peers=[]), bus, lambda _remote, _interface: None, [way])
        self._selector = selectors.DefaultSelector()
        self.source.register(self._selector)
        self.readings: list[int] = []
        read = self.source._watch.read

        def noted(present: Sequence[Table], now_ns: int) -> tuple[list[int], list[int]]:
            self.readings.append(now_ns)
            return read(present, now_ns)

        self.source._watch.read = noted  # type: ignore[method-assign]
        self.seen: list[AnySignal] = []

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
def cable() -> Iterator[rdma_kit.Cable]:
    lacking = rdma_kit.missing()
    if lacking:
        pytest.skip(f"missing: {lacking}")
    with rdma_kit.cable("sv") as laid:
        yield laid


@pytest.fixture(scope="module")
def loaded(cable: rdma_kit.Cable) -> Iterator[Loaded]:
    support.require("bcc", "tracefs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_DEADLINE_S", compiling._DEADLINE_S * support.slow_factor())
        programs = loader.load([providers.program()])
    with programs:
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
    probes = Uprobes(loaded)
    yield probes
    probes.close()


@pytest.fixture
def seen(
    request: pytest.FixtureRequest, cable: rdma_kit.Cable, loaded: Loaded, tmp_path: Path, uprobes: Uprobes
) -> Iterator[tuple[Pair, Watcher]]:
    """A pair that was ok for a while, and the source that watches it."""
    environment = dict(os.environ)
    way: Way
    if request.param == "tap":
        socket = tmp_path / "tap"
        way = TapServer(socket, loaded.map("rdma_table").value, ROWS)
        library = rdma_tap.build(tmp_path / rdma_tap.LIBRARY)
        environment |= {"LD_AUDIT": str(library), rdma_tap.SOCKET_VARIABLE: str(socket)}
    else:
        way = cast(Way, Lasting(uprobes))
    watcher = Watcher(way, cable.client.device)
    pair: list[Pair] = []
    try:
        if request.param == "uprobe":
            watcher.run(lambda: bool(way.tables()), "the probes are attached", limit_s=20)
        starting = subprocess_pair(cable, environment, watcher)
        pair.append(starting)
        yield starting, watcher
    finally:
        cable.heal()
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
    """Have the pair send until all has been well for half a second, so that there is a mean to compare with."""
    pair.do(command)
    well_ns = 500 * MS

    def settled() -> bool:
        told = watcher.of(pair.sender)
        return bool(told) and told[-1].verdict == "ok" and time.monotonic_ns() - told[-1].since_ns > well_ns

    watcher.run(settled, "all is well", limit_s=6)


@pytest.mark.parametrize(
    ("seen", "load", "rate", "limit"),
    [
        ("uprobe", "pace 12", "1500kbit", READINGS),
        ("tap", "pace 12", "1500kbit", READINGS),
        ("tap", "full 16", "10mbit", 10 * READINGS),  # counted from tc, not from the data: 3 as a rule, 28 once
    ],
    indirect=["seen"],
)
def test_a_throttled_path_is_congested_within_50_ms(
    cable: rdma_kit.Cable, seen: tuple[Pair, Watcher], load: str, rate: str, limit: int
) -> None:
    pair, watcher = seen
    busy(pair, watcher, load)
    cable.throttle(rate, burst="6kb", latency="5s")
    throttled_ns = time.monotonic_ns()
    watcher.run(watcher.says(pair.sender, "congested", throttled_ns), "congested")
    told = watcher.first(pair.sender, "congested", throttled_ns)
    readings = [at_ns for at_ns in watcher.readings if throttled_ns < at_ns <= told.at_ns]
    after_ms = (told.at_ns - throttled_ns) / MS
    print(f"{load}: told after {len(readings)} readings, {after_ms:.0f} ms after tc returned: {told.reason}")
    assert len(readings) <= limit  # late as they come where a processor is emulated
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
def test_a_cut_path_is_dead(cable: rdma_kit.Cable, seen: tuple[Pair, Watcher]) -> None:
    pair, watcher = seen
    busy(pair, watcher, "pace 8")
    cut_ns = time.monotonic_ns()  # before: where a processor is emulated, the commands take longer than dead_ms
    cable.cut()
    watcher.run(watcher.says(pair.sender, "dead", cut_ns), "dead")
    told = watcher.first(pair.sender, "dead", cut_ns)
    assert told.at_ns - cut_ns >= 150 * MS  # not before dead_ms, less what the last reading was late
    assert "congested" not in {each.verdict for each in watcher.of(pair.sender) if each.at_ns > told.at_ns}
    pair.process.kill()
    watcher.run(lambda: watcher.last(pair.sender).closed, "the queue pair is told a last time")
