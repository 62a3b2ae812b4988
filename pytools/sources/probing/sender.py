"""The Session-Sender over probe.c: keeps the sessions of every path, and turns the kernel's records into delays.

Records are processed many at once, those of one path in the order in which its replies came. The arrays are those of
sessions.py; planner.py decides what is sent when. Times are CLOCK_MONOTONIC nanoseconds, stamps are of the stamping
clock. One thread.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import Clocks, Probe
from pytools.errors import SwerveError, UsageError
from pytools.estimators.hop_counts import Hops
from pytools.estimators.windows import MISSING, how_many, occurrence
from pytools.sources.probing import frames, udp
from pytools.sources.probing.measurements import DUPLICATES, RECEIVED, REORDERED, Measurements
from pytools.sources.probing.paths import PinnedPath, Session
from pytools.sources.probing.planner import Planner
from pytools.sources.probing.program import DUPLICATE, MOST_SESSIONS, NUMBERS, OURS, ProbeProgram
from pytools.sources.probing.schedule import Schedule
from pytools.sources.probing.sessions import ANSWERED, FREE, LATE, OUTSTANDING, SINGLE, TIMED_OUT

_TIMES: Final = ("t1_ns", "t2_ns", "t3_ns", "t4_ns", "seen_ns")
_SEQ_BITS: Final = 44  # a session's numbers stay below, so that it can be ranked by row and number at once
_PORT_TRIES: Final = 16
_MOST_STRANGERS: Final = 64  # packets taken from a socket at once; a flood is dropped there


class Sender(Planner):
    """All sessions of this host.

    Parameters
    ----------
    clocks : Clocks, optional
        How coded pairs are sent; None when no peer has a clock of its own.
    families : iterable of {4, 6}
        Address families to have ports for.
    ports : sequence of int
        Those of a predecessor, by flow: had again where they are free, a hash on the way leads probes as before.

    Raises
    ------
    UsageError
        If more probes could be under way than there is room for.
    CapabilityError
        If this process may not have a packet socket.
    """

    def __init__(
        self,
        probe: Probe,
        clocks: Clocks | None,
        families: Iterable[udp.Family],
        measurements: Measurements,
        program: ProbeProgram,
        ports: Sequence[int] = (),
    ) -> None:
        self._known_paths: set[int] = set()
        self._wanted_ports = ports
        self._held: dict[tuple[udp.Family, int], socket.socket] = {}
        with contextlib.ExitStack() as undo:
            packets = undo.enter_context(frames.open_socket())
            schedule = undo.enter_context(contextlib.closing(Schedule(packets, program.paths_fd)))
            super().__init__(probe, clocks, measurements, program, schedule)
            self.drops |= dict.fromkeys(("late_replies", "stray_records", "foreign_replies"), 0)
            undo.callback(self._release)
            self.open(families)
            self._close = undo.pop_all().close

    def open(self, families: Iterable[udp.Family]) -> None:
        """Hold the sender's ports in these address families: nobody else can then send or receive by them.

        Raises
        ------
        SwerveError
            If no port can be had.
        """
        for flow in range(self._probe.flows):
            for family in families:
                if (family, flow) in self._held:
                    continue
                known = self.ports if flow < len(self.ports) else self._wanted_ports
                port = known[flow] if flow < len(known) else 0
                self._held[family, flow] = sock = self._hold(family, port, flow)
                if flow >= len(self.ports):
                    self.ports.append(int(sock.getsockname()[1]))
        self._program.set_ports(self.ports)

    def _hold(self, family: udp.Family, port: int, flow: int) -> socket.socket:
        """A socket on this port, or where that is taken in this family, on another one for both."""
        for _ in range(_PORT_TRIES):
            try:
                return udp.open_socket(family, port)
            except SwerveError:
                if not port:
                    raise
                others = [key for key in self._held if key[1] == flow]
                if not others:
                    port = 0
                    continue
                for key in others:  # no probe has left by them yet, or replies to the few that have are strays
                    self._held.pop(key).close()
                moved = udp.open_socket(others[0][0], 0)
                self._held[others[0]] = moved
                self.ports[flow] = port = int(moved.getsockname()[1])
        raise SwerveError("no UDP port is free for IPv4 and IPv6 probes alike", "see `ss -uan`")

    # ---- sessions ----

    def set_paths(self, paths: Sequence[PinnedPath]) -> None:
        """Probe these paths from now on; nothing is planned any more.

        Raises
        ------
        UsageError
            If there are more sessions than the kernel program has room for.
        """
        flows = self._probe.flows
        rows = (max((pinned.index for pinned in paths), default=-1) + 1) * flows
        if rows > MOST_SESSIONS:
            raise UsageError(f"{rows} sessions are more than {MOST_SESSIONS}", "lower probe.flows, or have fewer peers")
        with self.schedule.held() as withdrawn:
            self.note_sent()
            self._withdraw(*withdrawn)
            if rows > self.rows:
                self.grow(max(rows, 2 * self.rows))  # so that it is rare
            self.schedule.watch(rows // flows)
            self._forget({pinned.index for pinned in paths})
            sessions = [
                Session(pinned, port, pinned.index * flows + flow, counts=flow == 0)  # of several at once one counts
                for pinned in paths
                for flow, port in enumerate(self.ports)
            ]
            self._known_paths |= {pinned.index for pinned in paths}
            for pinned in paths:
                self._program.set_path(pinned)
            for session in sessions:
                self._program.set_session(session)
            numbers: dict[tuple[str, udp.Family], int] = {}
            self._peer[:] = -1
            for pinned in paths:
                number = numbers.setdefault((pinned.peer.name, pinned.family), len(numbers))
                self._peer[pinned.index * flows : (pinned.index + 1) * flows] = number
            self._lay_out(sessions)

    def _forget(self, wanted: set[int]) -> None:
        for index in self._known_paths - wanted:
            self._program.forget_path(index)
            for row in range(index * self._probe.flows, (index + 1) * self._probe.flows):
                self._program.forget_session(row)
        self._known_paths &= wanted

    # ---- receiving ----

    def take(self, records: NDArray[Any]) -> None:
        """Work on the records of the kernel, oldest first."""
        rows, number, flags = records["session"].astype(np.int64), records["number"], records["flags"]
        at = rows * self._slots + (number & (self._slots - 1))
        seq, state = self._seq.take(at, mode="clip"), self._state.take(at, mode="clip")
        # Nearly always each is the first reply to its probe, in time, and in a session each is to a later probe.
        unusual = (seq ^ number) & (NUMBERS - 1) | (state ^ OUTSTANDING) | flags & DUPLICATE
        ranked = ((rows << _SEQ_BITS) + seq).take(rows.argsort(kind="stable"))
        ascending = np.count_nonzero(ranked[1:] > ranked[:-1]) == len(rows) - 1
        usual = ascending and not np.count_nonzero(unusual) and ranked[-1] >> _SEQ_BITS < len(self._next_seq)
        if not usual:
            known = (rows < len(self._next_seq)) & ((seq & (NUMBERS - 1)) == number) & (state != FREE)
            self.drops["stray_records"] += len(known) - how_many(known)
            records, rows, at, state, flags = (each[known] for each in (records, rows, at, state, flags))
            came, fresh = self._sort_out(rows, at, state, flags)
            records, rows, at, flags = (each[came] for each in (records, rows, at, flags))
            if not len(at):
                return
        paths, sent_ns, liveness = rows // self._probe.flows, self._sent_ns.take(at), self._measurements.liveness
        left, came_ns, went, back, seen = (records[name].view(np.int64) for name in _TIMES)
        # Whatever our clock was stepped by meanwhile.
        liveness.arrived(paths, sent_ns, seen, np.minimum(back - left, seen - sent_ns))
        liveness.beats(paths, records["agent_age_ms"])
        self._measurements.note_hops(Hops(paths, records["ttl"], records["sender_ttl"]))
        newest = records["other"].astype(np.int64)
        stamps = np.array([left, came_ns - left, back, back - went])
        if np.count_nonzero(came_ns) < len(at) or np.count_nonzero(went) < len(at):  # the reflector gives no time
            stamps[1, came_ns == 0] = stamps[3, went == 0] = MISSING
        self._stamps.reshape(-1, 4)[at] = stamps.T
        if not usual:
            rows, at, paths, sent_ns, flags, seen, newest = (
                each[fresh] for each in (rows, at, paths, sent_ns, flags, seen, newest)
            )
            stamps = stamps[:, fresh]
        self._state.put(at, ANSWERED)
        np.maximum.at(self._answered_ns, rows, sent_ns)
        self._measurements.count(RECEIVED, paths)
        behind = self._reordered(rows, self._seq.take(at), ascending)
        if np.count_nonzero(behind):
            self._measurements.count(REORDERED, paths[behind])
        self.note_newest(rows, sent_ns, newest)
        self._measurements.foreign[paths] = flags & OURS == 0
        liveness.answered(paths, sent_ns, self._counting(rows, at), self._passed(at))
        self._measurements.add(paths, stamps[1::2], stamps[::2], seen)

    def _sort_out(
        self, rows: NDArray[np.int64], at: NDArray[np.int64], state: NDArray[np.uint8], flags: NDArray[np.uint8]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Count duplicates and what came too late; returns which are first replies, and which of these are in time."""
        first = (flags & DUPLICATE == 0) & (occurrence(at) == 0)
        fresh, late = first & (state == OUTSTANDING), first & (state == TIMED_OUT)
        came = fresh | late
        self._state.put(at[late], LATE)
        self.drops["late_replies"] += how_many(late)
        self._measurements.count(DUPLICATES, rows[~came] // self._probe.flows)
        return came, fresh[came]

    def _counting(self, rows: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.bool_]:
        counting: NDArray[np.bool_] = self._part.take(at) == SINGLE
        if self._probe.flows > 1:
            counting &= rows % self._probe.flows == 0
        return counting

    def _passed(self, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which probes were answered although the one before them in their session was not, or only too late."""
        mask = self._slots - 1
        earlier = (at & ~mask) | ((at - 1) & mask)
        state = self._state.take(earlier)
        passed: NDArray[np.bool_] = state != ANSWERED
        if np.count_nonzero(passed):
            passed &= (state != FREE) & (self._seq.take(earlier) == self._seq.take(at) - 1)
        return passed

    def _reordered(self, rows: NDArray[np.int64], seq: NDArray[np.int64], ascending: bool) -> NDArray[np.bool_]:
        """Which replies came after the reply to a later probe of their session."""
        behind: NDArray[np.bool_] = seq < self._highest.take(rows)
        if not ascending and len(rows) > 1:
            order = rows.argsort(kind="stable")
            ranked = ((rows << _SEQ_BITS) + seq).take(order)  # rows ascend, so only the same row can be ahead
            behind[order[1:]] |= ranked[1:] < np.maximum.accumulate(ranked)[:-1]
        np.maximum.at(self._highest, rows, seq)
        return behind

    def look(self) -> None:
        """Count what has come to the sender's ports from anywhere but a reflector's port."""
        for sock in self._held.values():
            for _ in range(_MOST_STRANGERS):
                try:
                    sock.recv(1)
                except OSError:  # nothing more, or an ICMP error
                    break
                self.drops["foreign_replies"] += 1

    def _release(self) -> None:
        for sock in self._held.values():
            sock.close()
        self._held = {}

    def close(self) -> None:
        """Close the sockets; the kernel takes no reply any more."""
        self._forget(set())
        self._program.set_ports(())
        self._close()
