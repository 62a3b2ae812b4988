"""What the live view costs with 200 paths and 1,000 connections at one frame a second: processor time and memory.

A real `swerve top` on a pseudo-terminal of 200 by 50 is attached to a real server on a Unix socket, which this process
feeds with what an agent of 100 peers over two rails would publish: for each path 12.5 short windows and a long one a
second, TCP, marks, weights and states, and for each of 1,000 connections its counters and delays.
"""

from __future__ import annotations

import contextlib
import os
import pty
import random
import selectors
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from _common import cpu_s, emit, note, resident_bytes

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]
import samples  # noqa: E402

from pytools.bus import Bus, Server  # noqa: E402
from pytools.errors import SwerveError  # noqa: E402
from pytools.signals import AnySignal, GroupMember, NexthopGroup, PathDelay, TcpFlow, TcpPath  # noqa: E402
from pytools.signals import Path as Way  # noqa: E402

HOSTS, RAILS, FLOWS = 100, 2, 1000
SHORT_NS, SECOND_NS, SLOT_S = 80_000_000, 1_000_000_000, 0.01
SIZE = (50, 200)  # lines, columns
SETTLING_S, SHORT_SETTLING_S, WINDOW_S = 45.0, 5.0, 20.0  # at first until the longest horizon is full
NETNS = "bench-top"
RANDOM = random.Random(1)
# What is looked at -> the keys that lead there from what was looked at before.
LOOKS = {"paths": b"", "paths_40s": b"t", "detail_40s": b"\r", "flows": b"\x1b2", "events": b"4"}
CASE = f"paths{HOSTS * RAILS}_flows{FLOWS}_1hz"

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
                again(msgspec.structs.replace(samples.path_state(state="healthy"), path=way)),
            ]
        for index in range(FLOWS):
            way = paths[index % len(paths)]
            about = {"path": way, "local_port": 40_000 + index}
            each_second.append(again(samples.app_delay(**about, local="10.9.0.1", remote=way.address)))
            each_second.append(again(samples.tcp_flow(**about, remote=way.address, interface=way.interface)))
        each_second += [Group(paths[RAILS * host :][:RAILS], host) for host in range(HOSTS)]
        self._add(SHORT_NS, short)
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


class Screen:
    """`swerve top` on a pseudo-terminal of its own, and the agent that it is attached to."""

    def __init__(self, directory: str, color: str = "xterm-256color") -> None:
        self._bus = Bus()
        self._server = Server(self._bus, Path(directory) / NETNS / "agent.sock", long_window_ns=SECOND_NS)
        self._selector = selectors.DefaultSelector()
        self._server.register(self._selector)
        self.agent = Agent(self._bus)
        self._main, sub = pty.openpty()
        termios.tcsetwinsize(sub, SIZE)
        os.set_blocking(self._main, False)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "steering.cli", "top", "-n", NETNS],
            cwd=ROOT,
            stdin=sub,
            stdout=sub,
            stderr=sub,
            env={**os.environ, "SWERVE_RUNTIME_DIR": directory, "SWERVE_STATE_DIR": directory, "TERM": color},
            start_new_session=True,
        )
        os.close(sub)
        self.written = 0
        self.tail = b""

    def work(self, seconds: float) -> None:
        """Let the agent publish, and read what is drawn."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, mask in self._selector.select(min(SLOT_S, left)):
                key.data(mask)
            self.agent.work()
            with contextlib.suppress(BlockingIOError):
                drawn = os.read(self._main, 1 << 16)
                self.written += len(drawn)
                self.tail = (self.tail + drawn)[-1 << 16 :]
            if self.process.poll() is not None:
                raise SwerveError(f"swerve top ended with exit code {self.process.returncode}: {self.tail[-2000:]!r}")

    def press(self, keys: bytes) -> None:
        """Press keys, a moment apart: an Esc followed at once by something is another key."""
        for key in keys:
            os.write(self._main, bytes([key]))
            self.work(0.5)

    @property
    def dropped(self) -> int:
        """Signals that the view was too slow for."""
        return self._server.drops()["bus_slow"]

    def close(self) -> None:
        """End the view, and the agent."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(20)
        os.close(self._main)
        self._server.close()
        self._selector.close()


@contextlib.contextmanager
def opened() -> Iterator[Screen]:
    with tempfile.TemporaryDirectory(prefix="swerve-bench-") as directory:
        screen = Screen(directory)
        try:
            yield screen
        finally:
            screen.close()


def main() -> None:
    with opened() as screen:
        screen.work(SETTLING_S)
        for name, keys in LOOKS.items():
            screen.press(keys)
            screen.work(SHORT_SETTLING_S)
            before, began = cpu_s(screen.process.pid), time.monotonic()
            published, written = screen.agent.published, screen.written
            screen.work(WINDOW_S)
            took = time.monotonic() - began
            share = (cpu_s(screen.process.pid) - before) / took
            emit("top", "cpu", share, "share", "lower", case=f"{CASE}_{name}")
            note(
                f"{name}: {(screen.agent.published - published) / took:,.0f} signals/s published, "
                f"{(screen.written - written) / took:,.0f} bytes/s drawn, {screen.dropped} dropped"
            )
        emit("top", "resident", resident_bytes(screen.process.pid) / 1e6, "MB", "lower", case=CASE)
        emit("top", "lost", screen.dropped, "signals", "lower", case=CASE)


if __name__ == "__main__":
    main()
