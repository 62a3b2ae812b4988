"""What the agent of a large host tells, made up: 100 peers over two rails, 1,000 connections, each at its own time.

For each path 12.5 short windows and a long one a second, single probes five times a second, liveness, TCP, marks,
weights and states; for each connection its counters and its delays. Delays and counters go up and down, by a seed.
"""

from __future__ import annotations

import random
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]
import samples  # noqa: E402

from pytools.errors import SwerveError  # noqa: E402
from pytools.ipc.bus import Bus  # noqa: E402
from pytools.ipc.server import Server  # noqa: E402
from pytools.signals import AnySignal, GroupMember, NexthopGroup, PathDelay, ProbeSamples, TcpFlow, TcpPath  # noqa: E402
from pytools.signals import Path as Way  # noqa: E402

HOSTS, RAILS, FLOWS = 100, 2, 1000
SHORT_NS, SAMPLES_NS, SECOND_NS, SLOT_S = 80_000_000, 200_000_000, 1_000_000_000, 0.01
PROBES = 10  # of a path in SAMPLES_NS: one every 20 ms
RANDOM = random.Random(1)

Make = Callable[[int], AnySignal]


def ways() -> list[Way]:
    return [
        Way("h1", f"h{host}", f"10.9.{host // 250}.{host % 250}", f"10.{rail}.1.1", f"rail{rail}")
        for host in range(2, HOSTS + 2)
        for rail in range(1, RAILS + 1)
    ]


class Agent:
    """Publishes what is due: everything at its own time, so that it comes evenly."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._slots: list[tuple[int, list[list[Make]]]] = []  # every so many ns, divided in slots of 10 ms
        self._began_ns, self._done = time.monotonic_ns(), 0
        self.published = 0
        paths = ways()
        short = [again(samples.path_delay(path=way, window_ns=SHORT_NS)) for way in paths]
        each_second: list[Make] = [again(samples.self_cost()), again(samples.clock())]
        for way in paths:
            each_second += [
                again(samples.path_delay(path=way)),
                again(samples.tcp_path(path=way, interface=way.interface)),
                again(samples.path_ecn(path=way)),
                again(samples.app_delay(path=way)),
                again(samples.path_liveness(path=way)),
                again(msgspec.structs.replace(samples.path_state(state="healthy"), path=way)),
            ]
        for index in range(FLOWS):
            way = paths[index % len(paths)]
            about = {"path": way, "local_port": 40_000 + index}
            each_second.append(again(samples.app_delay(**about, local="10.9.0.1", remote=way.address)))
            each_second.append(again(samples.tcp_flow(**about, remote=way.address, interface=way.interface)))
        each_second += [Group(paths[RAILS * host :][:RAILS], host) for host in range(HOSTS)]
        self._add(SHORT_NS, short)
        self._add(SAMPLES_NS, [again(_probes(way)) for way in paths])
        self._add(SECOND_NS, each_second)

    def _add(self, every_ns: int, makes: list[Make]) -> None:
        count = every_ns // int(SLOT_S * 1e9)
        self._slots.append((count, [makes[index::count] for index in range(count)]))

    def work(self) -> None:
        """Publish what is due by now."""
        now_ns = time.monotonic_ns()
        slot = (now_ns - self._began_ns) // int(SLOT_S * 1e9)
        for number in range(self._done, slot):
            for count, slots in self._slots:
                for make in slots[number % count]:
                    self._bus.publish(make(now_ns))
                    self.published += 1
        self._done = slot


def again(signal: AnySignal) -> Make:
    """The same signal at another time; delays and counters go up and down."""

    def make(now_ns: int) -> AnySignal:
        fresh = {"at_ns": now_ns, "unix_ns": time.time_ns()}
        if isinstance(signal, PathDelay):
            queueing_ns = RANDOM.randrange(1_000, 10_000_000)
            values = dict.fromkeys(("queueing_p50_ns", "queueing_p99_ns", "queueing_last_ns"), queueing_ns)
            way = msgspec.structs.replace(signal.forward, owd_p99_ns=2_000 + queueing_ns, **values)
            fresh |= {"forward": way, "reverse": way, "lost": queueing_ns % 2}
        elif isinstance(signal, TcpPath | TcpFlow):
            fresh["retransmitted_segments"] = RANDOM.randrange(100)
        return msgspec.structs.replace(signal, **fresh)

    return make


def _probes(way: Way) -> ProbeSamples:
    numbers, delays = list(range(PROBES)), [3_000] * PROBES
    about = {"seq": numbers, "sent_ns": numbers, "forward_ns": delays, "reverse_ns": delays}
    return msgspec.structs.replace(samples.probe_samples(), path=way, **about)


class Group:
    """A nexthop group whose members count packets."""

    def __init__(self, members: list[Way], number: int) -> None:
        self._members, self._number, self._packets = members, number, 0

    def __call__(self, now_ns: int) -> AnySignal:
        self._packets += 1000
        members = [
            GroupMember(
                nexthop_id=10 * self._number + place,
                gateway=way.gateway,
                interface=way.interface,
                weight=1,
                packets=self._packets * (place + 1),
            )
            for place, way in enumerate(self._members)
        ]
        prefixes = [f"{self._members[0].address}/32"]
        about = {"host": "h1", "at_ns": now_ns, "unix_ns": time.time_ns()}
        return NexthopGroup(**about, group_id=100 + self._number, destinations=prefixes, members=members)


class Served:
    """Such an agent on a socket, and the command that is attached to it."""

    def __init__(self, directory: str, netns: str, *, readers: bool = False) -> None:
        bus = Bus()
        path = Path(directory) / (f"{netns}.read" if readers else f"{netns}/agent.sock")
        self._server = Server(bus, path, long_window_ns=SECOND_NS)
        self._selector = selectors.DefaultSelector()
        self._server.register(self._selector)
        self.agent = Agent(bus)
        self.places = {"SWERVE_RUNTIME_DIR": directory, "SWERVE_STATE_DIR": directory}  # for its environment
        self.process: subprocess.Popen[bytes] | None = None

    def work(self, seconds: float, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Let the agent publish, and do something every 10 ms or so."""
        assert self.process is not None
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, mask in self._selector.select(min(SLOT_S, left)):
                key.data(mask)
            self.agent.work()
            meanwhile()
            if self.process.poll() is not None:
                raise SwerveError(f"{self.process.args!r} ended with exit code {self.process.returncode}")

    @property
    def dropped(self) -> int:
        """Signals that the command was too slow for."""
        return self._server.drops()["bus_slow"]

    def close(self) -> None:
        """End both."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(20)
        self._server.close()
        self._selector.close()
