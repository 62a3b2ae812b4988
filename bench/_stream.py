"""A numbered stream from one host of a lab to another, over a rail of choice, and what became of it.

Run as `python _stream.py send|receive …` inside a host. Each millisecond a UDP datagram and a small TCP segment leave,
by an absolute schedule. Both sockets are made anew until the interface's counter shows that their packets leave by the
rail wanted. A datagram's arrival is the kernel's time stamp, so a receiver that wakes up late delays nothing; a TCP
byte's is when the receiver read it. Times are CLOCK_MONOTONIC nanoseconds, which all hosts of a lab share.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pytools.errors import SwerveError
from pytools.lab import Host, Lab

PERIOD_NS: Final = 1_000_000
UDP_PORT, TCP_PORT = 7100, 7101
STREAM_PRIORITY: Final = 10  # SCHED_FIFO
_NUMBERED: Final = struct.Struct("=qq")  # number from 0 (negative: a packet that seeks its rail), ns when it left
_TIMESPEC: Final = struct.Struct("=qq")
_SO_TIMESTAMPNS: Final = 35
_SEGMENT: Final = bytes(200)
_TRIES, _BURST, _BURST_BYTES = 100, 40, 1000
_SEEKING: Final = _NUMBERED.pack(-1, 0).ljust(_BURST_BYTES, b"\0")
_READY_S: Final = 20.0


class Pause(NamedTuple):
    """A time without arrivals."""

    since_ns: int  # the last arrival before it
    length_ms: float  # less the stream's period


@dataclass(frozen=True)
class Arrivals:
    """What arrived. Rows of datagrams are in order of arrival."""

    number: NDArray[np.int64]
    sent_ns: NDArray[np.int64]
    arrived_ns: NDArray[np.int64]
    segment_ns: NDArray[np.int64]  # when something of the TCP stream was read
    sent: int  # datagrams

    def pause(self, from_ns: int, to_ns: int) -> Pause:
        """Longest pause between two datagrams of which the first arrived in this time."""
        return _longest(self.arrived_ns, from_ns, to_ns)

    def stall(self, from_ns: int, to_ns: int) -> Pause:
        """The same of the TCP stream."""
        return _longest(self.segment_ns, from_ns, to_ns)

    def lost(self, from_ns: int, to_ns: int) -> int:
        """Datagrams that left in this time and never arrived. Those lost are placed in time by their neighbours."""
        sent_ns = np.full(self.sent, -1, np.int64)
        sent_ns[self.number] = self.sent_ns
        known = np.flatnonzero(sent_ns >= 0)
        when = np.interp(np.arange(self.sent), known, sent_ns[known] - sent_ns[known[0]]) + sent_ns[known[0]]
        return int(np.count_nonzero((sent_ns < 0) & (when >= from_ns) & (when < to_ns)))


def _longest(at_ns: NDArray[np.int64], from_ns: int, to_ns: int) -> Pause:
    ordered = np.append(np.sort(at_ns[at_ns >= from_ns]), max(to_ns, at_ns.max(initial=0)))  # a pause may last
    pauses = np.diff(ordered)[ordered[:-1] < to_ns]
    if not len(pauses):
        return Pause(from_ns, (to_ns - from_ns) / 1e6)
    which = int(pauses.argmax())
    return Pause(int(ordered[which]), int(pauses[which] - PERIOD_NS) / 1e6)


# ---- the bench's side ----


class Stream:
    """A stream at work, until it is ended.

    Raises
    ------
    SwerveError
        If no socket's packets take the rail.
    """

    def __init__(self, lab: Lab, source: Host, sink: Host, rail: int, directory: Path) -> None:
        self._file = directory / f"arrivals-{time.monotonic_ns()}"
        here = [sys.executable, __file__]
        self._receiver = lab.start(sink, [*here, "receive", sink.service, str(self._file)], stdout=subprocess.PIPE)
        _ready(self._receiver)
        words = [*here, "send", source.service, sink.service, source.interfaces[rail - 1].name]
        self._sender = lab.start(source, words, stdout=subprocess.PIPE)
        try:
            _ready(self._sender)
        except SwerveError:
            self._receiver.kill()
            raise

    def end(self) -> Arrivals:
        """End it; what arrived."""
        self._sender.terminate()
        said, _ = self._sender.communicate(timeout=10)
        self._receiver.terminate()
        self._receiver.communicate(timeout=10)
        with np.load(f"{self._file}.npz") as found:
            datagrams, segments = found["datagrams"].reshape(-1, 3), found["segments"]
        Path(f"{self._file}.npz").unlink()
        number, sent_ns, arrived_ns = datagrams[datagrams[:, 0] >= 0].T
        return Arrivals(number, sent_ns, arrived_ns, segments, int(said))


def _ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], _READY_S)[0] or process.stdout.readline() != "ready\n":
        process.kill()
        raise SwerveError("the stream found no socket whose packets take the rail")


# ---- inside the hosts ----


@contextlib.contextmanager
def _until_terminated() -> Iterator[Callable[[], bool]]:
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    yield lambda: bool(stop)


def _sent_bytes(interface: str) -> int:
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise SystemExit(f"there is no interface {interface}")


def _takes(interface: str, burst: Callable[[], object]) -> bool:
    before = _sent_bytes(interface)
    burst()
    deadline = time.monotonic() + 0.05  # what TCP keeps back leaves with the next acknowledgement
    while time.monotonic() < deadline:
        if _sent_bytes(interface) - before > 0.9 * _BURST * _BURST_BYTES:
            return True
        time.sleep(0.001)
    return False


def _udp(source: str, sink: str, interface: str) -> socket.socket:
    """A socket whose packets leave by an interface."""
    for _ in range(_TRIES):
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        out.bind((source, 0))
        out.connect((sink, UDP_PORT))
        if _takes(interface, lambda out=out: [out.send(_SEEKING) for _ in range(_BURST)]):  # type: ignore[misc]
            return out
        out.close()
    raise SystemExit(f"no UDP socket's packets take {interface}")


def _tcp(source: str, sink: str, interface: str) -> socket.socket:
    for _ in range(_TRIES):
        out = socket.create_connection((sink, TCP_PORT), 5, (source, 0))
        out.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _takes(interface, lambda out=out: out.sendall(bytes(_BURST * _BURST_BYTES))):  # type: ignore[misc]
            out.setblocking(False)
            return out
        out.close()
    raise SystemExit(f"no TCP connection's packets take {interface}")


def _send(source: str, sink: str, interface: str) -> None:
    datagrams, segments = _udp(source, sink, interface), _tcp(source, sink, interface)
    with contextlib.suppress(OSError):  # what this process is late by would be taken for the network's
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(STREAM_PRIORITY))
    print("ready", flush=True)
    number, due = 0, time.monotonic_ns()
    with _until_terminated() as stopped:
        while not stopped():
            due += PERIOD_NS  # what is late is made good for at once
            wait = due - time.monotonic_ns()
            if wait > 0:
                time.sleep(wait / 1e9)
            with contextlib.suppress(OSError):  # no way there: lost, and counted so
                datagrams.send(_NUMBERED.pack(number, time.monotonic_ns()))
            number += 1
            with contextlib.suppress(BlockingIOError):
                segments.send(_SEGMENT)
    time.sleep(0.05)  # what is under way arrives
    print(number, flush=True)


def _receive(address: str, file: str) -> None:
    box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    box.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    box.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    box.bind((address, UDP_PORT))
    listener = socket.create_server((address, TCP_PORT))
    rows: list[int] = []
    read_ns: list[int] = []
    to_monotonic = time.monotonic_ns() - time.time_ns()
    poll = select.poll()
    streams = {listener.fileno(): listener}
    for each in (box, listener):
        poll.register(each, select.POLLIN)
    print("ready", flush=True)
    with _until_terminated() as stopped:
        while not stopped():
            for fd, _ in poll.poll(100):
                if fd == box.fileno():
                    payload, ancillary, _, _ = box.recvmsg(2048, 64)
                    seconds, nanoseconds = _TIMESPEC.unpack_from(ancillary[0][2])
                    number, sent_ns = _NUMBERED.unpack_from(payload)
                    rows += (number, sent_ns, seconds * 10**9 + nanoseconds + to_monotonic)
                elif fd == listener.fileno():
                    connection = listener.accept()[0]
                    streams[connection.fileno()] = connection
                    poll.register(connection, select.POLLIN)
                elif _read(streams[fd]):
                    read_ns.append(time.monotonic_ns())
                else:
                    poll.unregister(fd)
                    streams.pop(fd).close()
    np.savez(file, datagrams=np.array(rows, np.int64), segments=np.array(read_ns, np.int64))


def _read(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1 << 16))
    except OSError:
        return False


if __name__ == "__main__":
    {"send": _send, "receive": _receive}[sys.argv[1]](*sys.argv[2:])
