"""Probes from many source ports, which find and watch the ways behind the first hop, and the ICMP answers of routers.

Each source port is a UDP socket, shared by all paths. probe.c stamps, matches and records a probe of a sweep as any
other, in a session of its own until it is answered or lost. A probe with a small TTL has the addresses, ports and flow
label of a sweep's, so routers take it for the same flow; the router at which the TTL expires answers by ICMP, and the
socket's error queue holds its address. Non-blocking; one thread. Times are CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.estimators.delays import STAMP_BOUND_NS
from pytools.estimators.windows import MISSING
from pytools.kernel import error_queue
from pytools.sources.probing import frames, stamp_packet, udp
from pytools.sources.probing.paths import PinnedPath, Session
from pytools.sources.probing.program import MOST_SESSIONS, NUMBERS, SEQ_WRAP, SWEEP, SWEEP_ROWS, ProbeProgram
from pytools.sources.probing.tracing import LATE_NS, PORTS

FIRST_ROW: Final = MOST_SESSIONS  # of the sessions

_TRIES: Final = 32  # to find so many free ports in a row
_TURNS: Final = 16  # numbers of one row, before they begin again: distinguishes a late reply from the next one's
_BUFFER_BYTES: Final = 4096


class Fate(NamedTuple):
    path: int
    port: int  # by number
    sent_ns: int
    # the peer's clock at its ingress minus ours at our egress; MISSING: lost, or it gives no time
    forward_ns: int = MISSING


class Spoke(NamedTuple):
    """A router that says where a TTL ended."""

    port: int
    destination: str
    router: str
    seq: int | None  # as the probe has it; None: it does not say


class UnderWay:
    """Probes that have no answer yet, each by a row of the kernel's sessions and a number of that row. Pure.

    Parameters
    ----------
    timeout_ns : int
        After which no answer counts.
    """

    def __init__(self, timeout_ns: int) -> None:
        self._timeout_ns = timeout_ns
        self._free = deque(range(SWEEP_ROWS))
        self._turn = [0] * SWEEP_ROWS
        self._fates: dict[int, Fate] = {}  # by row, in the order in which they were sent
        self._late_ns = 0  # of those that left until then it is told that they are lost, or late

    def begin(self, path: int, port: int, now_ns: int) -> tuple[int, int] | None:
        """Row and number of the next probe; None: too many are under way."""
        if not self._free:
            return None
        row = self._free.popleft()
        self._turn[row] = (self._turn[row] + 1) % _TURNS
        self._fates[row] = Fate(path, port, now_ns)
        return row, self._turn[row]

    def answered(self, records: NDArray[Any]) -> Iterator[Fate]:
        """What the kernel's records say of probes under way."""
        for record in records:
            row = int(record["session"]) - FIRST_ROW
            fate = self._fates.get(row)
            if fate is None or int(record["number"]) != self._turn[row]:
                continue  # answered before, or given up
            self._end(row)
            there = int(record["t2_ns"])
            yield fate._replace(forward_ns=there - int(record["t1_ns"])) if there else fate

    def late(self, now_ns: int) -> Iterator[Fate]:
        """Probes that have no answer for long, each once; one that comes within the timeout is another fate of it."""
        until_ns = now_ns - min(LATE_NS, self._timeout_ns)
        for row, fate in list(self._fates.items()):
            if fate.sent_ns > until_ns:
                break
            if fate.sent_ns > self._late_ns:
                yield fate
            if now_ns - fate.sent_ns >= self._timeout_ns:
                self._end(row)
        self._late_ns = max(self._late_ns, until_ns)

    def waiting(self) -> Iterator[Fate]:
        """Probes without an answer that are not late yet, oldest first."""
        return (fate for fate in self._fates.values() if fate.sent_ns > self._late_ns)

    def forget(self, path: int) -> None:
        """What is under way along a path says nothing any more."""
        for row in [row for row, fate in self._fates.items() if fate.path == path]:
            self._end(row)

    def _end(self, row: int) -> None:
        del self._fates[row]
        self._free.append(row)


class Sweep:
    """The sockets, and what was sent by them.

    Parameters
    ----------
    wakeups : epoll
        Readable when a router has spoken, until `spoke` is called.

    Attributes
    ----------
    under_way : UnderWay
        Its probes without an answer.
    wire_bytes : int
        Of what was sent.

    Raises
    ------
    SwerveError
        If there are not so many ports.
    """

    def __init__(
        self,
        program: ProbeProgram,
        wakeups: select.epoll,
        families: Iterable[udp.Family],
        port: int,
        dscp: int,
        timeout_ns: int,
    ) -> None:
        self._program, self._said = program, wakeups
        self._port, self._dscp, self.under_way = port, dscp, UnderWay(timeout_ns)
        self._sockets: dict[tuple[udp.Family, int], socket.socket] = {}
        self._by_fd: dict[int, tuple[udp.Family, int]] = {}
        self.wire_bytes = self.refused = 0
        with contextlib.ExitStack() as undo:
            self._packets = undo.enter_context(frames.open_socket())
            undo.callback(self._release)
            self.first_port = self._open_all(sorted(families))
            program.set_sweep_ports(self.first_port, PORTS)
            undo.callback(program.set_sweep_ports, 0, 0)
            self._close = undo.pop_all().close

    def _open_all(self, families: list[udp.Family]) -> int:
        for _ in range(_TRIES):
            with contextlib.suppress(SwerveError):
                return self._open_row(families)
            self._release()
        raise SwerveError(f"no {PORTS} UDP ports in a row are free", "see `ss -uan`")

    def _open_row(self, families: list[udp.Family]) -> int:
        with udp.open_socket(families[0], 0) as chosen:
            first = int(chosen.getsockname()[1])
        if first + PORTS > 1 << 16:
            first -= PORTS
        for number in range(PORTS):
            for family in families:
                sock = udp.open_socket(family, first + number)
                self._sockets[family, number] = sock
                self._by_fd[sock.fileno()] = family, number
                sock.setsockopt(*error_queue.RECVERR[family], 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
                self._said.register(sock, select.EPOLLERR | select.EPOLLET)
        return first

    def has(self, pinned: PinnedPath) -> bool:
        return (pinned.family, 0) in self._sockets

    def send(self, pinned: PinnedPath, port: int, now_ns: int) -> bool:
        """Send a probe of a sweep; False: too many are under way."""
        begun = self.under_way.begin(pinned.index, port, now_ns)
        if begun is None:
            return False
        row, number = begun
        session = self._session(pinned, port, row)
        self._program.set_session(session, SWEEP)
        seq = (self._program.seq_base + session.row * NUMBERS + number) % SEQ_WRAP
        error = stamp_packet.error_estimate(STAMP_BOUND_NS, pinned.shared_clock)
        self._send(session, stamp_packet.probe(seq, error, 0, os.urandom(stamp_packet.NONCE_BYTES)))
        return True

    def ask(self, pinned: PinnedPath, port: int, ttl: int, seq: int) -> None:
        """Send a probe of the same flow that a router is to answer; probe.c only hands it to the gateway."""
        payload = stamp_packet.size_request(stamp_packet.PROBE_BYTES, seq, 0, short_reply=True)
        self._send(self._session(pinned, port, ttl=ttl), payload)

    def _session(self, pinned: PinnedPath, port: int, row: int = 0, ttl: int = 255) -> Session:
        # Of IPv6 routers may hash the flow label instead of the ports, or both.
        source_port = self.first_port + port
        return Session(pinned, source_port, FIRST_ROW + row, ttl=ttl, flow_label=source_port << 4 | 1)

    def _send(self, session: Session, payload: bytes) -> None:
        made = frames.Frame(session, self._port, self._dscp)
        frame = made.around(payload)
        try:
            self._packets.sendto(frame, made.address)
        except OSError:
            self.refused += 1
            return
        self.wire_bytes += len(frame)

    def spoke(self) -> Iterator[Spoke]:
        """What routers have said since the last call."""
        for fd, _ in self._said.poll(0):
            if fd not in self._by_fd:
                continue
            family, port = self._by_fd[fd]
            for said, payload, address in error_queue.read(self._sockets[family, port]):
                if said.time_exceeded and said.offender:
                    seq = int.from_bytes(payload[:4], "big") if len(payload) >= 4 else None
                    yield Spoke(port, str(ipaddress.ip_address(address[0])), said.offender, seq)

    def _release(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._sockets, self._by_fd = {}, {}

    def close(self) -> None:
        for row in range(SWEEP_ROWS):
            self._program.forget_session(FIRST_ROW + row)
        self._close()
