"""A longer way: a process that holds packets for a fixed time, one way, until it is ended.

Run inside a rail's namespace as `python -m pytools.lab.delay_line DEVICE EXTRA_NS SPREAD_NS`. It makes a TUN device:
what is routed there is written back a fixed time later, and up to SPREAD_NS more, in order, and so forwarded on. The
time runs from the time stamp of a packet socket on the device to the end of a busy wait: that keeps the spacing of a
coded pair far better than reading from the device would.

Prints `ready` once the device is there.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import os
import select
import signal
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from pytools.kernel import socket_filter as bpf

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1
_ETH_P_ALL = 3
_SOL_PACKET, _PACKET_OUTGOING = 263, 4
_SO_TIMESTAMPNS, _SO_RCVBUFFORCE = 35, 33
_TIMESPEC = struct.Struct("=qq")
_PR_SET_TIMERSLACK = 29
_BUFFER_BYTES = 8 << 20
_PACKET_BYTES = 1 << 16
_PRIORITY = 10  # of a load, too
_AWAKE_NS = 120_000  # before a packet is due, sleep no more: a wake-up may be this late
_DEAF_NS = 6_000  # and shortly before, do not even look for the next packet


def open_device(name: str) -> int:
    """Make a TUN device without addresses and set it up; it goes when the descriptor is closed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    Path(f"/proc/sys/net/ipv6/conf/{name}/addr_gen_mode").write_text("1\n")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), _IFF_UP))
    return device


def open_tap(name: str) -> socket.socket:
    """A socket that gets every packet the kernel sends to the device, with the time when it did."""
    tap = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, 0)
    tap.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    tap.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    outgoing_only = (
        (bpf.LOAD_HALF, 0, 0, bpf.PACKET_TYPE),
        (bpf.EQUAL, 0, 1, _PACKET_OUTGOING),
        (bpf.RETURN, 0, 0, _PACKET_BYTES),
        (bpf.RETURN, 0, 0, 0),
    )
    bpf.attach(tap, outgoing_only)
    tap.bind((name, _ETH_P_ALL))
    return tap


def times(extra_ns: int, spread_ns: int) -> Iterator[int]:
    """How long to hold each packet: neighbours differ, and few of them cover the spread evenly (golden section)."""
    return (extra_ns + number * 618_034 % 1_000_000 * spread_ns // 1_000_000 for number in itertools.count())


def take(tap: socket.socket, waiting: deque[tuple[int, bytes]], extra_ns: Iterator[int]) -> bool:
    """Put the next packet into the queue with the time when it is due; False when there is none."""
    try:
        packet, ancillary, _, _ = tap.recvmsg(_PACKET_BYTES, 64)
    except BlockingIOError:
        return False
    seconds, nanoseconds = _TIMESPEC.unpack_from(ancillary[0][2])
    if packet[0] >> 4 == 4 or packet[24] != 0xFF:  # not IPv6 multicast: that is the device's own chatter
        waiting.append((seconds * 10**9 + nanoseconds + next(extra_ns), packet))
    return True


def hold(device: int, tap: socket.socket, extra_ns: Iterator[int]) -> None:
    """Hold packets for ever. Times are CLOCK_REALTIME, as the kernel's time stamps are."""
    waiting: deque[tuple[int, bytes]] = deque()
    ready = select.select
    now = time.time_ns
    while True:
        if not waiting:
            _drain(device)
            ready([tap], [], [])
            take(tap, waiting, extra_ns)
            continue
        due, packet = waiting[0]
        left = due - now()
        if left > _AWAKE_NS:
            ready([tap], [], [], (left - _AWAKE_NS) / 1e9)
            take(tap, waiting, extra_ns)
            continue
        if left > _DEAF_NS:
            take(tap, waiting, extra_ns)
            continue
        while now() < due:
            pass
        with contextlib.suppress(OSError):  # what cannot be forwarded is lost, as on any way
            os.write(device, packet)
        waiting.popleft()
        if not waiting:
            take(tap, waiting, extra_ns)


def _drain(device: int) -> None:
    """The device has a queue of its own, of packets that were taken from the tap: empty it."""
    with contextlib.suppress(BlockingIOError):
        while True:
            os.read(device, _PACKET_BYTES)


def main() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(PermissionError):  # a busy machine would lengthen the way by milliseconds
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
    device = open_device(sys.argv[1])
    tap = open_tap(sys.argv[1])
    print("ready", flush=True)
    hold(device, tap, times(int(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
