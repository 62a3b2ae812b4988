"""Competing traffic: a process that sends UDP from one namespace to another at a steady rate until it is ended.

Run as `python -m pytools.lab.load SOURCE_NETNS SINK_NETNS SINK_ADDRESS RATE_BIT_S [WAY_NETNS WAY_PORT]`; with the last
two by a source port that the rail hashes on to this way. The sink is a socket that is never read, so nothing answers
and nothing is computed at the other end. The rate counts Ethernet frames, as the shapers do.

It stands for traffic of other hosts, so it runs at real-time priority where it may: what keeps this machine busy does
not thin it out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence

from pytools.errors import SwerveError
from pytools.kernel.netns import inside

PORT = 9  # discard
FRAME_BYTES = 1514
_PAYLOAD_BYTES = FRAME_BYTES - 14 - 20 - 8
_SOL_UDP, _UDP_SEGMENT = 17, 103
_ETH_P_ALL = 3  # what leaves is seen by such a socket only
_MAX_BATCH = 8
_BATCH_NS = 1_000_000
_PRIORITY = 10
_TRIES, _TRIAL_FRAMES, _TRIAL_S = 200, 5, 0.1  # to find a port that takes a way
_CATCH_UP_NS = 10_000_000  # what a late wake-up may make good for; more would be a burst, not a load


def batch_frames(rate_bit_s: int) -> int:
    """Frames sent at once: about a millisecond's worth, so that the load is smooth and costs little."""
    return max(1, min(_MAX_BATCH, rate_bit_s * _BATCH_NS // (8 * FRAME_BYTES * 10**9)))


def batch_interval_ns(rate_bit_s: int) -> int:
    """Time between two batches."""
    return batch_frames(rate_bit_s) * FRAME_BYTES * 8 * 10**9 // rate_bit_s


def _connected(source: str, address: str) -> socket.socket:
    with inside(source):
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    out.setsockopt(_SOL_UDP, _UDP_SEGMENT, _PAYLOAD_BYTES)
    out.connect((address, PORT))
    return out


def _by_way(source: str, address: str, way: str, port: str) -> socket.socket:
    """A socket whose packets leave a way inside the rail by this port, as seen there."""
    with inside(way):
        tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
    with tap:
        tap.bind((port, _ETH_P_ALL))
        for _ in range(_TRIES):
            out = _connected(source, address)
            for _ in range(_TRIAL_FRAMES):
                out.send(b"0")
            if _sees(tap, out.getsockname()[1]):
                return out
            out.close()
    raise SwerveError(f"no flow takes inner path {way}", "is it healed, and its rail up?")


def _sees(tap: socket.socket, source_port: int) -> bool:
    """Whether a packet of ours from this port comes by within a while."""
    wanted, until = struct.pack("!HH", source_port, PORT), time.monotonic() + _TRIAL_S
    while (left := until - time.monotonic()) > 0:
        tap.settimeout(left)
        with contextlib.suppress(TimeoutError):
            packet = tap.recv(64)  # IPv4 without options
            if packet[:1] == b"E" and packet[9:10] == bytes((socket.IPPROTO_UDP,)) and packet[20:24] == wanted:
                return True
    return False


def send(source: str, sink: str, address: str, rate_bit_s: int, way: Sequence[str] = ()) -> None:
    """Send for ever; `way`: namespace and port."""
    with inside(sink):
        hole = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    hole.bind((address, PORT))
    out = _by_way(source, address, *way) if way else _connected(source, address)
    batch = bytes(batch_frames(rate_bit_s) * _PAYLOAD_BYTES)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    interval = batch_interval_ns(rate_bit_s)
    due = time.monotonic_ns()
    while True:
        out.send(batch)
        due = max(due + interval, time.monotonic_ns() - _CATCH_UP_NS)
        wait = due - time.monotonic_ns()
        if wait > 0:
            time.sleep(wait / 10**9)


if __name__ == "__main__":
    send(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
