"""Reading a ring as numpy arrays against bcc's callback: the same ring of the same program, in turn, warm.

The program is stamp.c; its ring is filled by running it on a probe that goes nowhere. Both readers end up with the time
of each record, which is what any use of it starts with.
"""

from __future__ import annotations

import ctypes
import ipaddress
import struct
import sys
import time
from typing import Any

import numpy as np
from _common import alternating, emit, median

from pytools.errors import CapabilityError
from pytools.kernel import bpf
from pytools.kernel.compiler import maps_of, use_headers
from pytools.kernel.loader import bpf_dir, dtype
from pytools.kernel.maps import Map
from pytools.kernel.rings import Ring

PORT = 862
RECORDS = 3000  # as many as the ring holds, and a margin
ROUNDS = 101


def main() -> None:
    program, descriptor, ring = loaded()

    def as_array() -> float:
        fill(descriptor)
        start = time.perf_counter()
        times = ring.read()["ts_ns"]
        took = time.perf_counter() - start
        return checked(len(times)) / took

    stamps: list[int] = []
    # bcc's own event() knows no nested types and asks for a ctypes type instead: this one is bcc's, too.
    pointer = ctypes.POINTER(program["layout_stamp"].Leaf)

    def on_record(_context: object, data: int, _size: int) -> None:
        stamps.append(ctypes.cast(data, pointer).contents.ts_ns)

    program["stamps"].open_ring_buffer(on_record)

    def by_callback() -> float:
        fill(descriptor)
        stamps.clear()
        start = time.perf_counter()
        program.ring_buffer_consume()
        took = time.perf_counter() - start
        return checked(len(stamps)) / took

    ours, theirs = alternating(ROUNDS, as_array, by_callback)
    emit(
        "ring",
        "records",
        median(ours),
        "1/s",
        "higher",
        case="stamps",
        peer="bcc_callback",
        peer_value=median(theirs),
        n=ROUNDS,
    )


def loaded() -> tuple[Any, int, Ring]:
    """stamp.c loaded by bcc in this process, and our reader on its ring."""
    sources = bpf_dir()
    try:
        from bcc import BPF, lib
    except ImportError:
        raise CapabilityError("this Python cannot import bcc", "apt-get install python3-bpfcc") from None
    flags = [*use_headers(str(sources)), f"-DSWERVE_PROBE_PORT={PORT}"]
    program = BPF(src_file=str(sources / "stamp.c"), cflags=flags)
    descriptor = program.load_func("stamp_egress", BPF.SCHED_CLS).fd
    maps = maps_of(program.module, lib, BPF._decode_table_type)
    described = maps["stamp_peers"]
    peers = Map("stamp_peers", described["fd"], dtype(described["key"]), dtype(described["value"]))
    peers.update(np.frombuffer(ipaddress.IPv6Address("::ffff:10.77.0.2").packed, peers.key)[0], 1)
    return program, descriptor, Ring(maps["stamps"]["fd"], dtype(maps["layout_stamp"]["value"]))


def probe() -> bytes:
    """An Ethernet frame that carries a STAMP probe to the peer."""
    stamp = struct.pack("!I40x", 1)
    udp = struct.pack("!4H", 40000, PORT, 8 + len(stamp), 0) + stamp
    addresses = ipaddress.IPv4Address("10.77.0.1").packed + ipaddress.IPv4Address("10.77.0.2").packed
    ip = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(udp), 0, 0, 64, 17, 0) + addresses
    return bytes(12) + b"\x08\x00" + ip + udp


FRAME = probe()


def fill(descriptor: int) -> None:
    """Have the program write RECORDS records."""
    bpf.test_run(descriptor, FRAME, RECORDS)


def checked(count: int) -> int:
    """The same count, once it is known to be the one that was written."""
    if count != RECORDS:
        sys.exit(f"{count} records of {RECORDS}: not what was to be measured")
    return count


if __name__ == "__main__":
    main()
