"""The Session-Sender over probe.c: keeps the sessions of every path, and turns the kernel's records into delays.

Records are worked on many at once, those of one path in the order in which its replies came. The arrays are those of
sessions.py; planner.py says what is sent when. Times are CLOCK_MONOTONIC nanoseconds, those of stamps are of the
stamping clock. One thread.
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
from pytools.estimators.windows import MISSING, how_many, occurrence
from pytools.sources.probing import frames, udp
from pytools.sources.probing.measurements import (
    DUPLICATES,
    FORWARD,
    RECEIVED,
    REORDERED,
    REVERSE,
    ROUND_TRIP,
    Measurements,
)
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.planner import Planner
from pytools.sources.probing.program import DUPLICATE, MOST_SESSIONS, NUMBERS, OURS, ProbeProgram
from pytools.sources.probing.schedule import Schedule
from pytools.sources.probing.sessions import (
    ANSWERED,
    FREE,
    LATE,
    OUTSTANDING,
    SINGLE,
    TIMED_OUT,
)

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
    ) -> None:
        self._known_paths: set[int] = set()
        self._held: dict[tuple[udp.Family, int], socket.socket] = {}
        with contextlib.ExitStack() as undo:
            packets = undo.enter_context(frames.open_socket())
            schedule = undo.enter_context(contextlib.closing(Schedule(packets)))
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
                port = self._ports[flow] if flow < len(self._ports) else 0
                self._held[family, flow] = sock = self._hold(family, port, flow)
                if flow >= len(self._ports):
                    self._ports.append(int(sock.getsockname()[1]))
        self._program.set_ports(self._ports)

    def _hold(self, family: udp.Family, port: int, flow: int) -> socket.socket:
        """A socket on this port, or where that is taken in this family, on another one for both."""
        for _ in range(_PORT_TRIES):
            try:
                return udp.open_socket(family, port)
            except SwerveError:
                if not port:
                    raise
                others = [key for key in self._held if key[1] == flow]
                for key in others:  # no probe has left by them yet, or replies to the few that have are strays
                    self._held.pop(key).close()
                moved = udp.open_socket(others[0][0], 0)
                self._held[others[0]] = moved
                self._ports[flow] = port = int(moved.getsockname()[1])
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
            self._grow(rows)
            self._forget({pinned.index for pinned in paths})
            dealt: dict[udp.Family, list[tuple[int, PinnedPath]]] = {}
            for pinned in paths:
                self._tell(pinned)
                for row in range(pinned.index * flows, (pinned.index + 1) * flows):
                    self._own_clock[row] = pinned.peer.clock != "shared"
                    dealt.setdefault(pinned.family, []).append((row, pinned))
            numbers = {address: number for number, address in enumerate(sorted({p.path.address for p in paths}))}
            self._peer[:] = -1
            for pinned in paths:
                self._peer[pinned.index * flows : (pinned.index + 1) * flows] = numbers[pinned.path.address]
            self._lay_out(dealt)

    def _tell(self, pinned: PinnedPath) -> None:
        """Let the kernel know a path and its sessions."""
        self._known_paths.add(pinned.index)
        path = pinned.path
        self._program.set_path(pinned.index, pinned.ifindex, path.gateway or path.address, path.address)
        for flow, port in enumerate(self._ports):
            row = pinned.index * self._probe.flows + flow
            self._program.set_session(row, pinned.index, path.address, port, pinned.peer.clock == "shared")

    def _forget(self, wanted: set[int]) -> None:
        for index in self._known_paths - wanted:
            self._program.forget_path(index)
            for row in range(index * self._probe.flows, (index + 1) * self._probe.flows):
                self._program.forget_session(row)
        self._known_paths &= wanted

    # ---- receiving ----

    def take(self, records: NDArray[Any]) -> None:
        """Work on the records of the kernel, oldest first."""
        rows, number = records["session"].astype(np.intp), records["number"].astype(np.int64)
        known = rows < len(self._next_seq)
        rows = np.where(known, rows, 0)
        slots = number & (self._slots - 1)
        known &= (self._seq[rows, slots] & (NUMBERS - 1)) == number
        known &= self._state[rows, slots] != FREE
        if not known.all():
            self.drops["stray_records"] += len(known) - how_many(known)
            records, rows, slots = records[known], rows[known], slots[known]
        if not len(rows):
            return
        paths, state = rows // self._probe.flows, self._state[rows, slots]
        first = (records["flags"] & DUPLICATE == 0) & (occurrence(rows * self._slots + slots) == 0)
        fresh, late = first & (state == OUTSTANDING), first & (state == TIMED_OUT)
        self._state[rows[late], slots[late]] = LATE
        self._state[rows[fresh], slots[fresh]] = ANSWERED
        self.drops["late_replies"] += how_many(late)
        self._measurements.count(DUPLICATES, paths[~fresh & ~late])
        self._measurements.count(RECEIVED, paths[fresh])
        np.maximum.at(self._answered_ns, rows[fresh], self._sent_ns[rows[fresh], slots[fresh]])
        self._note_arrivals(rows, slots, records, fresh, late)
        behind = self._reordered(rows[fresh], self._seq[rows[fresh], slots[fresh]])
        self._measurements.count(REORDERED, paths[fresh][behind])
        came = fresh | late
        self._note_stamps(records[came], rows[came], slots[came])
        self._measure(rows[fresh], slots[fresh], records[fresh])

    def _note_arrivals(
        self,
        rows: NDArray[np.intp],
        slots: NDArray[np.int64],
        records: NDArray[Any],
        fresh: NDArray[np.bool_],
        late: NDArray[np.bool_],
    ) -> None:
        liveness, paths, sent_ns = self._measurements.liveness, rows // self._probe.flows, self._sent_ns[rows, slots]
        came, seen_ns = fresh | late, records["seen_ns"].astype(np.int64)
        round_trips_ns = records["t4_ns"].astype(np.int64) - records["t1_ns"].astype(np.int64)
        round_trips_ns = np.minimum(round_trips_ns, seen_ns - sent_ns)  # whatever our clock was stepped by meanwhile
        liveness.arrived(paths[came], sent_ns[came], seen_ns[came], round_trips_ns[came])
        liveness.beats(paths[came], records["agent_age_ms"][came])
        earlier = (slots - 1) & (self._slots - 1)
        follows = self._seq[rows, earlier] == self._seq[rows, slots] - 1
        passed = follows & (self._state[rows, earlier] != ANSWERED) & (self._state[rows, earlier] != FREE)
        counting = (rows % self._probe.flows == 0) & (self._part[rows, slots] == SINGLE)
        liveness.answered(paths[fresh], sent_ns[fresh], counting[fresh], passed[fresh])

    def _reordered(self, rows: NDArray[np.intp], seq: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which replies came after the reply to a later probe of their session."""
        behind: NDArray[np.bool_] = seq < self._highest[rows]
        if len(rows) > 1:
            order = np.argsort(rows, kind="stable")
            ranked = (rows[order] << 44) + seq[order]  # rows ascend, so only the same row can be ahead
            behind[order[1:]] |= ranked[1:] < np.maximum.accumulate(ranked)[:-1]
        np.maximum.at(self._highest, rows, seq)
        return behind

    def _note_stamps(self, records: NDArray[Any], rows: NDArray[np.intp], slots: NDArray[np.int64]) -> None:
        """Keep both delays of each probe; a reflector that gives no time of its own leaves them unknown."""
        left, came, went, back = (records[name].astype(np.int64) for name in ("t1_ns", "t2_ns", "t3_ns", "t4_ns"))
        self._left[rows, slots], self._back[rows, slots] = left, back
        self._forward[rows, slots] = np.where(came != 0, came - left, MISSING)
        self._reverse[rows, slots] = np.where(went != 0, back - went, MISSING)

    def _measure(self, rows: NDArray[np.intp], slots: NDArray[np.int64], records: NDArray[Any]) -> None:
        if not len(rows):
            return
        paths, forward, reverse = rows // self._probe.flows, self._forward[rows, slots], self._reverse[rows, slots]
        left, back, seen = (records[name].astype(np.int64) for name in ("t1_ns", "t4_ns", "seen_ns"))
        self._measurements.foreign[paths] = records["flags"] & OURS == 0
        both = np.where((forward == MISSING) | (reverse == MISSING), MISSING, forward + reverse)
        self._measurements.add(
            np.repeat([FORWARD, REVERSE, ROUND_TRIP], len(rows)),
            np.concatenate([paths, paths, paths]),
            np.concatenate([forward, reverse, both]),
            np.concatenate([left, back, back]),
            np.concatenate([seen, seen, seen]),
        )

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
