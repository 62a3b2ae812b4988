"""The agents' and controllers' part of holds, for all senders of a lab at once: one process renews leases and bases.

As shipped: probe.c on every host, steer.c on the senders, and what sends the probes, a pacer for each sender. Times are
CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Self

sys.path += [str(Path(__file__).resolve().parent.parent / "tests" / each) for each in ("", "vm")]

import guest
import numpy as np
import probe_kit
import samples

from pytools import directories
from pytools.config import AgentConfig, Peer, Probe
from pytools.errors import SwerveError
from pytools.kernel.bpf import loader
from pytools.kernel.netlink.routing import Netlink
from pytools.kernel.netns import inside
from pytools.lab import Host, Lab
from pytools.signals import Path as NetworkPath
from pytools.sources import programs
from pytools.sources.probing.held_paths import HeldPaths
from pytools.sources.probing.measurements import Bases
from pytools.sources.probing.paths import PinnedPath
from steering.actuators.agent_paths import AgentPaths
from steering.actuators.flow_table import PROGRAM, FlowTable
from steering.actuators.holds import Holds
from steering.plan import Hold, HoldLimits

_PROBES: Final = programs.probes(AgentConfig("", [], Probe(port=probe_kit.PORT)))
_LEASE_NS: Final = 1_000_000_000
_RENEWED_NS: Final = _LEASE_NS // 5
_SLACK_NS: Final = 100_000
_FIRST: Final = 30  # probes, of which the shortest tell the base delays
_APART_S: Final = 0.002
_FILES: Final = 1 << 16
_SLOTS: Final = 1024  # as an agent with default settings has


def compiled(shared: Path) -> None:
    """Compile out here what is loaded in the guest."""
    (shared / guest.COMPILED).mkdir()
    with loader.Compilation([_PROBES, PROGRAM]) as under_way:
        for reply, descriptors in under_way.replies():
            for fd in descriptors:
                os.close(fd)
            file = directories.compiled_dirs()[0] / reply["entry"]
            (shared / guest.COMPILED / file.name).write_bytes(file.read_bytes())


@dataclass
class Done:
    """What all senders did."""

    packets: int = 0
    bytes: int = 0
    waited_ns: int = 0
    samples: int = 0
    above: int = 0
    probe_bytes: int = 0
    counters: Counter[str] | None = None


class Prober:
    """The process; as a context manager it ends with it. The clocks of its senders are off by up to `error_ns`."""

    def __init__(self, lab: Lab, error_ns: int = 0) -> None:
        self._pipe, far = multiprocessing.Pipe()
        arguments = lab, far, self._pipe, error_ns
        self._process = multiprocessing.get_context("fork").Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        far.close()
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def hold(self, limits: HoldLimits, senders: int | None = None) -> None:
        """Have the first senders, or all, hold packets."""
        self._pipe.send((limits, senders))
        self._answer()

    def release(self) -> Done:
        """Hold nothing any more."""
        self._pipe.send(None)
        return self._answer()

    def signal(self, number: signal.Signals) -> None:
        """Stop it, let it go on, or kill it, in the middle of whatever it does."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _answer(self) -> Done:
        try:
            answer = self._pipe.recv()
        except EOFError:
            raise SwerveError("the process that probes has ended") from None
        assert isinstance(answer, Done)
        return answer


class _Sender:
    """A sender's kernel side."""

    def __init__(self, host: Host, asker: Host, stack: contextlib.ExitStack, error_ns: int, bound_ns: int) -> None:
        self._error_ns, self._slack_ns = error_ns, _SLACK_NS + bound_ns
        self._prefix = f"{asker.service}/32"
        (rail,) = host.interfaces
        self.end = stack.enter_context(contextlib.closing(probe_kit.Host(host.netns, rail.name, slots=_SLOTS)))
        self.end.probe(4, host.service, asker.service, rail.gateway)
        self._path = NetworkPath(host.name, asker.name, asker.service, rail.gateway, rail.name)
        self._host = host
        with inside(host.netns):
            self._table = stack.enter_context(FlowTable(loader.load([PROGRAM])))
            netlink = stack.enter_context(Netlink())
            paths = AgentPaths(self._table)
            stack.callback(paths.take_back)
            self._holds = stack.enter_context(Holds(self._table, paths, netlink))
            lent = {"probe_settings": self.end.settings_fd, "probe_paths": self.end.program.paths_fd}
            paths.lend({name: os.dup(fd) for name, fd in lent.items()})
        peer = Peer(asker.name, asker.service, clock="shared")
        self._pinned = PinnedPath(0, self._path, peer, 4, self.end.ifindex, host.service, None, False)
        self._there_ns = self._round_trip_ns = self._probed_bytes = 0
        self._wanted = list[Hold]()
        self._held = HeldPaths(self.end.program, self, Probe(port=probe_kit.PORT), [self.end.ports[4]])  # type: ignore[arg-type]
        stack.callback(self._held.close)

    def learn(self) -> None:
        """Take the shortest of the probes so far for those that waited for nothing."""
        records = self.end.program.read()
        there = records["t2_ns"] - records["t1_ns"]
        self._there_ns = int(there.min())
        self._round_trip_ns = int((there + records["seen_ns"] - records["t3_ns"]).min())

    def queueing_from(self, rows: np.ndarray, now_ns: int, at_ns: int) -> Bases:
        """What the kernel is told of the path: the agent's part, its clocks being one."""
        there_ns = self._there_ns + self._error_ns
        one = (np.full(len(rows), each, np.int64) for each in (there_ns, self._round_trip_ns, 0, self._slack_ns))
        return Bases(np.ones(len(rows), bool), *one)

    def arm(self, limits: HoldLimits | None) -> None:
        """Hold packets like this, or none, and probe accordingly."""
        self._held.hear([samples.hold_state(path=self._path, armed=limits is not None)], time.monotonic_ns())
        self._wanted = [Hold(self._path, (self._prefix,), limits, "bench")] if limits else []
        with inside(self._host.netns):
            refused = self._holds.arm(self._wanted)
        if refused:
            raise SwerveError(f"{self._host.name} holds nothing: {refused}")

    def renew(self, until_ns: int) -> None:
        """What an agent and a controller do five times a second."""
        if self._wanted:
            self._held.hear([samples.hold_state(path=self._path)], time.monotonic_ns())
        with inside(self._host.netns):
            self._held.renew([self._pinned], 0)
        self._holds.renew(until_ns)

    def did(self, done: Done) -> None:
        """Add what it did."""
        for each in self._holds.read(time.monotonic_ns()):
            done.packets += each.packets
            done.bytes += each.bytes
            done.waited_ns += each.waited_ns
            done.samples += each.samples
            done.above += each.above
        done.probe_bytes += self._held.wire_bytes - self._probed_bytes
        self._probed_bytes = self._held.wire_bytes
        assert done.counters is not None
        done.counters.update({name: count for name, count in self._table.counters().items() if count})
        done.counters.update({name: count for name, count in self.end.counted().items() if name.endswith("doubted")})


def _serve(lab: Lab, pipe: Connection, other_end: Connection, bound_ns: int) -> None:
    other_end.close()  # else the pipe never ends
    probe_kit.PROGRAMS = [_PROBES]
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))
    os.nice(-15)  # as the agent's process that sends probes
    try:
        with contextlib.ExitStack() as stack:
            asker, *others = lab.hosts
            far = stack.enter_context(contextlib.closing(probe_kit.Host(asker.netns, asker.interfaces[0].name)))
            far.program.set_peers({each.service: probe_kit.ESTIMATE for each in others})
            errors = (0, bound_ns, -bound_ns)
            senders = [_Sender(host, asker, stack, errors[number % 3], bound_ns) for number, host in enumerate(others)]
            for _ in range(_FIRST):
                for each in senders:
                    each.end.send(4)
                    time.sleep(_APART_S)
            for each in senders:
                each.learn()
            pipe.send(Done())
            while True:
                _hold(senders, pipe, *pipe.recv())
    except EOFError:
        pass
    except BaseException:
        traceback.print_exc()


def _hold(senders: list[_Sender], pipe: Connection, limits: HoldLimits, first: int | None) -> None:
    """Hold, and renew, until told otherwise."""
    for number, each in enumerate(senders):
        each.arm(limits if first is None or number < first else None)
    told, due_ns = False, time.monotonic_ns()
    while not pipe.poll(max(0, due_ns - time.monotonic_ns()) / 1e9):
        due_ns = time.monotonic_ns() + _RENEWED_NS
        for each in senders:
            each.renew(time.monotonic_ns() + _LEASE_NS)
        if not told:
            pipe.send(Done())
            told = True
    pipe.recv()
    done = Done(counters=Counter())
    for each in senders:
        each.did(done)
        each.arm(None)
        each.renew(0)
    pipe.send(done)
