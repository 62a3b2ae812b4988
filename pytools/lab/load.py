"""Competing traffic: a process that sends UDP from one namespace to another at a steady rate until it is ended.

Run as `python -m pytools.lab.load SOURCE_NETNS SINK_NETNS SINK_ADDRESS RATE_BIT_S`. The sink is a socket that is never
read, so nothing answers and nothing is computed at the other end. The rate counts Ethernet frames, as the shapers do.

It stands for traffic of other hosts, so it runs at real-time priority where it may: what keeps this machine busy does
not thin it out.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

from pytools.kernel.netns import inside

PORT = 9  # discard
FRAME_BYTES = 1514
_PAYLOAD_BYTES = FRAME_BYTES - 14 - 20 - 8
_SOL_UDP, _UDP_SEGMENT = 17, 103
_MAX_BATCH = 8
_BATCH_NS = 1_000_000
_PRIORITY = 10
_CATCH_UP_NS = 10_000_000  # what a late wake-up may make good for; more would be a burst, not a load


def batch_frames(rate_bit_s: int) -> int:
    """Frames sent at once: about a millisecond's worth, so that the load is smooth and costs little."""
    return max(1, min(_MAX_BATCH, rate_bit_s * _BATCH_NS // (8 * FRAME_BYTES * 10**9)))


def batch_interval_ns(rate_bit_s: int) -> int:
    """Time between two batches."""
    return batch_frames(rate_bit_s) * FRAME_BYTES * 8 * 10**9 // rate_bit_s


def send(source: str, sink: str, address: str, rate_bit_s: int) -> None:
    """Send for ever."""
    with inside(sink):
        hole = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    hole.bind((address, PORT))
    with inside(source):
        out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    out.setsockopt(_SOL_UDP, _UDP_SEGMENT, _PAYLOAD_BYTES)
    out.connect((address, PORT))
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
    send(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
