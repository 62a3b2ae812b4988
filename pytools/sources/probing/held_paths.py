"""Paths whose packets a controller holds: the kernel is told what queueing counts from, and probes leave more often.

What the kernel is told holds for a second, renewed five times as often: while the agent hangs, or the clocks are in
doubt, the kernel learns nothing of the queues, and nothing is held. The additional probes have sessions of their own,
whose answers end in the kernel; a pacer of their own sends them, from frames that are used again and again. It leaves
out those of paths along which little has been sent since the last (pacer.c). Times are CLOCK_MONOTONIC nanoseconds; one
thread.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from pytools.config import Probe
from pytools.errors import CapabilityError
from pytools.signals import HoldState, Path
from pytools.sources.probing import frames
from pytools.sources.probing.measurements import Measurements
from pytools.sources.probing.paths import PinnedPath, Session
from pytools.sources.probing.program import MOST_SESSIONS, QUEUE, QUEUE_ROWS, SWEEP_ROWS, ProbeProgram
from pytools.sources.probing.schedule import Schedule
from pytools.sources.probing.ticks import Kind, one_each

LASTS_NS: Final = 1_000_000_000
LEAST_NS: Final = 2_000_000  # between two probes of a held path
MOST_NS: Final = 8_000_000
APART_BYTES: Final = 8_000  # within these, so much is sent along it from one to the next: with 118 bytes each, 1.5 %
_HELD_NS: Final = 2_500_000_000  # for so long after a controller has said so
_AHEAD_NS: Final = 600_000_000  # probes are planned for
_TICKS: Final = 512  # more than that
_TIMES: Final = 512  # ticks before a frame is used again, whether it was answered or not; at most the kernel's slots
_FIRST_ROW: Final = MOST_SESSIONS + SWEEP_ROWS


class HeldPaths:
    """The held paths of one host.

    Parameters
    ----------
    program : ProbeProgram
        The kernel's half.
    measurements : Measurements
        Knows base delays and clocks.
    ports : sequence of int
        The UDP ports that the sender holds.

    Attributes
    ----------
    wire_bytes : int
        Of requests sent here, headers included.
    """

    def __init__(self, program: ProbeProgram, measurements: Measurements, probe: Probe, ports: Sequence[int]) -> None:
        self._program, self._measurements, self._probe, self._ports = program, measurements, probe, ports
        self._until_ns: dict[Path, int] = {}
        self._prober: _Prober | None = None
        self._retry_ns = self._sent_bytes = 0

    def close(self) -> None:
        """Send no more of these probes."""
        if self._prober is not None:
            self._sent_bytes = self.wire_bytes
            self._prober.close()
            self._prober = None

    @property
    def wire_bytes(self) -> int:
        """Of requests sent, headers included."""
        return self._sent_bytes + (0 if self._prober is None else self._prober.wire_bytes)

    def hear(self, states: Iterable[HoldState], now_ns: int) -> None:
        """Learn from a controller which paths are held."""
        for state in states:
            self._until_ns[state.path] = now_ns + _HELD_NS if state.armed else now_ns

    def renew(self, paths: Sequence[PinnedPath], ahead_ns: int) -> None:
        """Tell the kernel again, of those of these paths that are held, and plan their probes.

        Parameters
        ----------
        ahead_ns : int
            By how much the stamping clock is ahead of CLOCK_MONOTONIC.
        """
        if not self._until_ns:
            return
        now_ns = time.monotonic_ns()
        self._until_ns = {path: until for path, until in self._until_ns.items() if until > now_ns}
        held = [pinned for pinned in paths if pinned.path in self._until_ns]
        rows = np.array([pinned.index for pinned in held], np.intp)
        bases = self._measurements.queueing_from(rows, now_ns, now_ns + ahead_ns)
        self._program.set_bases(rows, now_ns + ahead_ns, now_ns + LASTS_NS, bases)
        self._probe_more(held[:QUEUE_ROWS], now_ns)

    def _probe_more(self, held: Sequence[PinnedPath], now_ns: int) -> None:
        """Without a process that sends them the path is probed as all others are."""
        if not held or self._probe.interval_ms * 1e6 <= LEAST_NS or now_ns < self._retry_ns:
            self.close()
            return
        if self._prober is not None and self._prober.paths != held:
            self.close()
        with contextlib.suppress(CapabilityError):
            if self._prober is None:
                self._retry_ns = now_ns + LASTS_NS
                self._prober = _Prober(self._program, held, self._probe, self._ports[0])
                self._retry_ns = 0
            self._prober.plan(now_ns)


class _Prober:
    """Sends the additional probes of some paths."""

    def __init__(self, program: ProbeProgram, paths: Sequence[PinnedPath], probe: Probe, port: int) -> None:
        self.paths, self._program = list(paths), program
        self._next_ns = self._ticks = 0
        self._times = min(_TIMES, program.slots)
        with contextlib.ExitStack() as undo:
            packets = undo.enter_context(frames.open_socket())
            self._schedule = undo.enter_context(contextlib.closing(Schedule(packets, program.paths_fd)))
            self._schedule.set_ticks(_TICKS)
            self._schedule.space(APART_BYTES, MOST_NS)
            sessions = [Session(pinned, port, _FIRST_ROW + number) for number, pinned in enumerate(self.paths)]
            for session in sessions:
                program.set_session(session, QUEUE)
            self._kind = Kind(one_each(sessions), self._times, probe, self._schedule, _FIRST_ROW + QUEUE_ROWS)
            times = np.arange(self._times)
            seq = program.seq(self._kind.rows, times[:, None])
            for made in self._kind.messages:
                made.frames.fill(times, seq[:, made.within])
            self._close = undo.pop_all().close

    @property
    def wire_bytes(self) -> int:
        """Of requests sent, headers included."""
        return self._schedule.spaced_bytes

    def plan(self, now_ns: int) -> None:
        """Plan ahead; what would be too late by then is left out."""
        self._next_ns = max(self._next_ns, now_ns)
        due_ns = np.arange(self._next_ns, now_ns + _AHEAD_NS, LEAST_NS)
        groups = [
            [group for made in self._kind.messages for group in made.groups[tick % self._times]]
            for tick in range(self._ticks, self._ticks + len(due_ns))
        ]
        if groups:
            self._schedule.plan(due_ns, due_ns + LEAST_NS, groups)
            self._ticks += len(due_ns)
            self._next_ns = int(due_ns[-1]) + LEAST_NS

    def close(self) -> None:
        """Send no more; answers that are still on their way are dropped."""
        for number in range(len(self.paths)):
            self._program.forget_session(_FIRST_ROW + number)
        self._close()
