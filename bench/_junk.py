"""Junk at the port of a reflector: frames on a packet socket, at a fixed rate, by sendmmsg.

Run as `python _junk.py INTERFACE MAC ADDRESS PEER PORT RATE SECONDS` inside a rail. The frames go out of INTERFACE to
MAC and ADDRESS, from four kinds of sender in turn: strangers and PEER, a host whose probes are answered; each with
well-formed STAMP requests and with random bytes. So half of them pretend to be the peer. Prints how many were sent.
"""

from __future__ import annotations

import ctypes
import ipaddress
import itertools
import os
import random
import socket
import struct
import sys
import time
from typing import Final

FRAMES, BATCH = 4096, 128
_SOL_PACKET, _PACKET_QDISC_BYPASS = 263, 20
_STAMP_BYTES: Final = 44
_IPV4, _UDP = 0x0800, 17


class _Iovec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class _Message(ctypes.Structure):  # struct mmsghdr
    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("vectors", ctypes.c_void_p),
        ("vectors_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("sent_bytes", ctypes.c_uint),
    )


def frames(mac: str, address: str, peer: str, port: int) -> list[bytes]:
    """The frames that are sent again and again."""
    rng = random.Random(1)
    strangers = itertools.cycle(str(ipaddress.IPv4Address("203.0.113.1") + offset) for offset in range(200))
    return [
        _frame(rng, mac, peer if number % 4 >= 2 else next(strangers), address, port, well_formed=number % 2 == 0)
        for number in range(FRAMES)
    ]


def _frame(rng: random.Random, mac: str, source: str, address: str, port: int, well_formed: bool) -> bytes:
    if well_formed:
        now_s = int(time.time())
        payload = struct.pack(
            "!IIIHH28x", rng.getrandbits(32), now_s, rng.randrange(10**9), 0xC001, rng.getrandbits(15)
        )
    else:
        payload = rng.randbytes(rng.randint(1, 2 * _STAMP_BYTES))
    ports = rng.randint(1024, 65535), port
    datagram = struct.pack("!4H", *ports, 8 + len(payload), 0) + payload  # no checksum
    ends = socket.inet_aton(source) + socket.inet_aton(address)
    header = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(datagram), rng.getrandbits(16), 0, 64, _UDP, 0) + ends
    header = header[:10] + struct.pack("!H", _checksum(header)) + header[12:]
    return bytes.fromhex(mac.replace(":", "")) + bytes(6) + struct.pack("!H", _IPV4) + header + datagram


def _checksum(header: bytes) -> int:
    total = sum(struct.unpack(f"!{len(header) // 2}H", header))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def send(interface: str, content: list[bytes], rate: int, seconds: float) -> int:
    """Send these frames in turn; returns how many left."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffers = [ctypes.create_string_buffer(each, len(each)) for each in content]
    vectors = (_Iovec * FRAMES)(*((ctypes.addressof(each), len(each)) for each in buffers))
    messages = (_Message * FRAMES)(
        *(
            (None, 0, ctypes.addressof(vectors) + index * ctypes.sizeof(_Iovec), 1, None, 0, 0, 0)
            for index in range(FRAMES)
        )
    )
    starts = [ctypes.byref(messages, first * ctypes.sizeof(_Message)) for first in range(0, FRAMES, BATCH)]
    sent = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as out:
        out.setsockopt(_SOL_PACKET, _PACKET_QDISC_BYPASS, 1)
        out.bind((interface, 0))
        began_ns = now_ns = time.monotonic_ns()
        for start in itertools.cycle(starts):
            if now_ns - began_ns >= seconds * 1e9:
                return sent
            gone = libc.sendmmsg(out.fileno(), start, BATCH, 0)
            if gone < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            sent += gone
            due_ns = began_ns + sent * 10**9 // rate
            while (now_ns := time.monotonic_ns()) < due_ns:
                pass
    raise AssertionError


def main() -> None:
    interface, mac, address, peer, port, rate, seconds = sys.argv[1:]
    print(send(interface, frames(mac, address, peer, int(port)), int(rate), float(seconds)))


if __name__ == "__main__":
    main()
