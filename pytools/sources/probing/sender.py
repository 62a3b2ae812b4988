"""The Session-Sender over probe.c: sends the probes of every path, and turns the kernel's records into delays.

A tick is one system call per address family and one look at the ring. The arrays are those of sessions.py. Times are
CLOCK_MONOTONIC nanoseconds, those of stamps are of the stamping clock. One thread.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pytools.config import Clocks, Probe
from pytools.errors import SwerveError, UsageError
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.windows import MISSING, how_many, occurrence
from pytools.sources.probing import frames, udp
from pytools.sources.probing import stamp_packet as wire
from pytools.sources.probing.frames import Frames, Lane
from pytools.sources.probing.measurements import (
    DUPLICATES,
    FORWARD,
    LOST,
    RECEIVED,
    REORDERED,
    REVERSE,
    ROUND_TRIP,
    SENT,
    Measurements,
)
from pytools.sources.probing.paths import PinnedPath
from pytools.sources.probing.program import DUPLICATE, MOST_SESSIONS, NUMBERS, OURS, ProbeProgram
from pytools.sources.probing.sessions import (
    ANSWERED,
    FIRST,
    FREE,
    LATE,
    OUTSTANDING,
    SECOND,
    SINGLE,
    TIMED_OUT,
    Sessions,
)

_PORT_TRIES: Final = 16
_MOST_STRANGERS: Final = 64  # packets taken from a socket at once; a flood is dropped there


@dataclass(frozen=True)
class Volley:
    """Probes of one family that leave at one moment."""

    frames: Frames
    rows: NDArray[np.intp]  # session of each
    turn: NDArray[np.intp]  # which probe of its session in this volley, from 0
    parts: NDArray[np.uint8]  # SINGLE, FIRST or SECOND
    spaced: bool = False  # leaves a spacing after the volley before it


class Sender(Sessions):
    """All sessions of this host.

    Parameters
    ----------
    clocks : Clocks, optional
        How coded pairs are sent; None when no peer has a clock of its own.
    families : iterable of {4, 6}
        Address families to have ports for.
    groups : int
        Into how many groups the sessions are dealt, so that probes do not leave in one burst.

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
        groups: int,
        measurements: Measurements,
        program: ProbeProgram,
    ) -> None:
        super().__init__(probe, clocks, measurements)
        self._program, self._groups = program, groups
        self.drops = dict.fromkeys(
            ("late_replies", "stray_records", "foreign_replies", "send_refused", "send_buffer_full"), 0
        )
        self.wire_bytes = 0  # of requests sent, headers included
        self._pair_every = 1 if clocks is None else clocks.pair_every(probe)
        self._spacing_ns = 0 if clocks is None else int(clocks.spacing_us * 1000)
        self._rounds = [0] * groups
        self._singles: list[list[Volley]] = [[] for _ in range(groups)]
        self._pairs: list[list[Volley]] = [[] for _ in range(groups)]
        self._known_paths: set[int] = set()
        self._ports: list[int] = []
        self._held: dict[tuple[udp.Family, int], socket.socket] = {}
        with contextlib.ExitStack() as undo:
            self._socket = undo.enter_context(frames.open_socket())
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
        """Probe these paths from now on.

        Raises
        ------
        UsageError
            If there are more sessions than the kernel program has room for.
        """
        flows = self._probe.flows
        rows = (max((pinned.index for pinned in paths), default=-1) + 1) * flows
        if rows > MOST_SESSIONS:
            raise UsageError(f"{rows} sessions are more than {MOST_SESSIONS}", "lower probe.flows, or have fewer peers")
        self._grow(rows)
        self._forget({pinned.index for pinned in paths})
        dealt: dict[tuple[int, udp.Family], list[tuple[int, PinnedPath]]] = {}
        for pinned in paths:
            self._tell(pinned)
            for row in range(pinned.index * flows, (pinned.index + 1) * flows):
                self._own_clock[row] = pinned.peer.clock != "shared"
                dealt.setdefault((row % self._groups, pinned.family), []).append((row, pinned))
        numbers = {address: number for number, address in enumerate(sorted({p.path.address for p in paths}))}
        self._peer[:] = -1
        for pinned in paths:
            self._peer[pinned.index * flows : (pinned.index + 1) * flows] = numbers[pinned.path.address]
        self._singles, self._pairs = [[] for _ in range(self._groups)], [[] for _ in range(self._groups)]
        for (group, family), sessions in dealt.items():
            self._singles[group].append(self._volley(family, [(each, SINGLE) for each in sessions]))
            self._pairs[group] += self._salvo(family, sessions)

    def _tell(self, pinned: PinnedPath) -> None:
        """Let the kernel know a path and its sessions."""
        self._known_paths.add(pinned.index)
        path = pinned.path
        self._program.set_path(pinned.index, pinned.ifindex, path.gateway or path.address)
        for flow, port in enumerate(self._ports):
            row = pinned.index * self._probe.flows + flow
            self._program.set_session(row, pinned.index, path.address, port, pinned.peer.clock == "shared")

    def _forget(self, wanted: set[int]) -> None:
        for index in self._known_paths - wanted:
            self._program.forget_path(index)
            for row in range(index * self._probe.flows, (index + 1) * self._probe.flows):
                self._program.forget_session(row)
        self._known_paths &= wanted

    def _salvo(self, family: udp.Family, sessions: Sequence[tuple[int, PinnedPath]]) -> list[Volley]:
        """A coded pair for the first session of each path whose peer has its own clock, one probe for all others."""
        paired = [each for each in sessions if self._is_paired(*each)]
        if self._spacing_ns and paired:
            first = self._volley(family, [(each, FIRST) for each in paired], follows=True)
            second = self._volley(family, [(each, SECOND) for each in paired], follows=True, spaced=True)
            return [self._volley(family, [(each, SINGLE) for each in sessions]), first, second]
        parts = [
            (each, part)
            for each in sessions
            for part in ((SINGLE, FIRST, SECOND) if self._is_paired(*each) else (SINGLE,))
        ]
        return [self._volley(family, parts)]

    def _is_paired(self, row: int, pinned: PinnedPath) -> bool:
        return pinned.peer.clock != "shared" and row % self._probe.flows == 0

    def _volley(
        self,
        family: udp.Family,
        probes: Sequence[tuple[tuple[int, PinnedPath], int]],
        follows: bool = False,
        spaced: bool = False,
    ) -> Volley:
        rows = np.array([row for (row, _), _ in probes], np.intp)
        flows = self._probe.flows
        lanes = [
            Lane(
                session=row,
                path=pinned.index,
                ifindex=pinned.ifindex,
                source=pinned.source,
                destination=pinned.path.address,
                source_port=self._ports[row % flows],
                error_estimate=wire.error_estimate(STAMP_BOUND_NS, pinned.peer.clock == "shared"),
                counts=part == SINGLE and row % flows == 0,  # one an interval: three lost at once are no silence
            )
            for (row, pinned), part in probes
        ]
        made = Frames(family, lanes, self._probe.port, self._probe.dscp)
        parts = np.array([part for _, part in probes], np.uint8)
        return Volley(made, rows, occurrence(rows), parts, spaced)

    # ---- sending ----

    def send(self, group: int, now_ns: int) -> None:
        """Send one probe, or a coded pair where it is time for one, for each session of a group."""
        as_pairs = self._rounds[group] % self._pair_every == 0
        self._rounds[group] += 1
        began_ns = leaving_ns = time.monotonic_ns()
        counting = []
        for volley in (self._pairs if as_pairs else self._singles)[group]:
            while volley.spaced and time.monotonic_ns() < began_ns + self._spacing_ns:
                pass  # microseconds: no timer is as punctual
            began_ns = time.monotonic_ns()
            sent = self._send(volley, now_ns)
            chosen = sent & (volley.parts == SINGLE) & (volley.rows % self._probe.flows == 0)
            counting.append(volley.rows[chosen])
        if counting:
            self._measurements.liveness.sent(leaving_ns, np.concatenate(counting) // self._probe.flows)

    def _send(self, volley: Volley, now_ns: int) -> NDArray[np.bool_]:
        """Send a volley; which of its probes were sent, in vain or not."""
        rows = volley.rows
        seq = self._next_seq[rows] + volley.turn
        slots = seq & (self._slots - 1)
        overwritten = self._state[rows, slots] == OUTSTANDING  # only after a long pause of the agent
        self._measurements.count(LOST, rows[overwritten] // self._probe.flows)
        np.maximum.at(self._next_seq, rows, seq + 1)
        self._seq[rows, slots], self._sent_ns[rows, slots] = seq, now_ns
        self._state[rows, slots], self._part[rows, slots] = OUTSTANDING, volley.parts
        for known in (self._left, self._back, self._seen, self._forward, self._reverse):
            known[rows, slots] = MISSING
        refused = volley.frames.send(self._socket, self._program.seq(rows, seq))
        sent = np.ones(len(rows), np.bool_)
        for place, code in refused.items():
            row, slot = rows[place], slots[place]
            if code in (errno.EAGAIN, errno.ENOBUFS):  # our own fault, not the path's; probe.c counts what it dropped
                sent[place] = False
                self._state[row, slot] = FREE
                self.drops["send_buffer_full"] += 1
            else:  # no interface any more: as lost as if the network had dropped it, and known at once
                self._state[row, slot] = TIMED_OUT
                self.drops["send_refused"] += 1
                self._measurements.count(LOST, rows[place : place + 1] // self._probe.flows)
        self._measurements.count(SENT, rows[sent] // self._probe.flows)
        self.wire_bytes += how_many(sent) * volley.frames.wire_bytes
        return sent

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
        self._measure(rows[fresh], slots[fresh], (records["flags"][fresh] & OURS) != 0)

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
        earlier = (slots - 1) & (self._slots - 1)
        follows = self._seq[rows, earlier] == self._seq[rows, slots] - 1
        passed = follows & (self._state[rows, earlier] != ANSWERED) & (self._state[rows, earlier] != FREE)
        counting = (rows % self._probe.flows == 0) & ~(follows & (self._sent_ns[rows, earlier] == sent_ns))
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
        self._seen[rows, slots] = records["seen_ns"]
        self._forward[rows, slots] = np.where(came != 0, came - left, MISSING)
        self._reverse[rows, slots] = np.where(went != 0, back - went, MISSING)

    def _measure(self, rows: NDArray[np.intp], slots: NDArray[np.int64], ours: NDArray[np.bool_]) -> None:
        if not len(rows):
            return
        paths, forward, reverse = rows // self._probe.flows, self._forward[rows, slots], self._reverse[rows, slots]
        left, back, seen = self._left[rows, slots], self._back[rows, slots], self._seen[rows, slots]
        self._measurements.foreign[paths] = ~ours
        both = np.where((forward == MISSING) | (reverse == MISSING), MISSING, forward + reverse)
        self._measurements.add(
            np.repeat([FORWARD, REVERSE, ROUND_TRIP], len(rows)),
            np.tile(paths, 3),
            np.concatenate([forward, reverse, both]),
            np.concatenate([left, back, back]),
            np.tile(seen, 3),
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
