"""Reading a ring as numpy arrays against bcc's callback: the same ring of the same program, in turn, warm.

The program is probe.c; its ring is filled by running it on a reply to one probe, again and again. Both readers end up
with the time of each record, which is what any use of it starts with.
"""

from __future__ import annotations

import ctypes
import ipaddress
import struct
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

import numpy as np
import packets
from _common import alternating, compare
from packet_runs import PacketRuns

from pytools.errors import CapabilityError
from pytools.kernel.bpf.cache_key import flags
from pytools.kernel.bpf.compiler import maps_of, use_headers, whole
from pytools.kernel.bpf.loader import bpf_dir, dtype
from pytools.kernel.bpf.maps import Map
from pytools.kernel.bpf.rings import Ring

PORT, SENDER_PORT = 862, 40000
PEER = "10.77.0.2"
LOOPBACK = 1  # interface index that a test run's packets come in by
OUTSTANDING, SECOND = 2, 10**9
RECORDS = 3000  # fewer than the ring holds
ROUNDS = 101


def main() -> None:
    program, descriptor, ring = loaded()

    def as_array() -> float:
        fill(descriptor)
        start = time.perf_counter()
        times = ring.read()["t4_ns"]
        took = time.perf_counter() - start
        return checked(len(times)) / took

    stamps: list[int] = []
    # bcc's own event() knows no nested types and asks for a ctypes type instead: this one is bcc's, too.
    pointer = ctypes.POINTER(program["layout_probe"].Leaf)

    def on_record(_context: object, data: int, _size: int) -> None:
        stamps.append(ctypes.cast(data, pointer).contents.t4_ns)

    program["probes"].open_ring_buffer(on_record)

    def by_callback() -> float:
        fill(descriptor)
        stamps.clear()
        start = time.perf_counter()
        program.ring_buffer_consume()
        took = time.perf_counter() - start
        return checked(len(stamps)) / took

    ours, theirs = alternating(ROUNDS, as_array, by_callback)
    compare("ring", "records", ours, theirs, "1/s", "higher", case="probes", peer="bcc_callback")


def loaded() -> tuple[Any, int, Ring]:
    """probe.c loaded by bcc in this process and waiting for one reply, and our reader on its ring."""
    sources = bpf_dir()
    try:
        from bcc import BPF, lib
    except ImportError:
        raise CapabilityError("this Python cannot import bcc", "apt-get install python3-bpfcc") from None
    use_headers(str(sources))
    cflags = [*flags(str(sources)), f"-DSWERVE_PROBE_PORT={PORT}"]
    program = BPF(text="\n".join(whole("probe.c", str(sources))), cflags=cflags)
    descriptor = program.load_func("probe_ingress", BPF.SCHED_CLS).fd
    maps = maps_of(program.module, lib, BPF._decode_table_type)

    def set_first(name: str, **fields: object) -> None:
        described = maps[name]
        table = Map(name, described["fd"], dtype(described["key"]), dtype(described["value"]))
        value = np.zeros((), table.value)
        for field, content in fields.items():
            value[field] = content
        table.update(0, value)

    remote = np.zeros((), dtype(maps["probe_sessions"]["value"]))["remote"]
    remote["bytes"] = np.frombuffer(ipaddress.IPv6Address(f"::ffff:{PEER}").packed, np.uint8)
    set_first("probe_settings", slots=1, ports=[SENDER_PORT] + [0] * 15)
    set_first("probe_paths", ifindex=LOOPBACK)
    set_first("probe_sessions", port=SENDER_PORT, remote=remote)
    set_first("probe_slots", state=OUTSTANDING, sent_ns=time.monotonic_ns(), t1_ns=SECOND)
    return program, descriptor, Ring(maps["probes"]["fd"], dtype(maps["layout_probe"]["value"]))


def reply() -> bytes:
    """An Ethernet frame that carries the peer's reply to the probe that is remembered."""
    stamp = struct.pack("!II", 1, 0)
    payload = struct.pack("!I8sHH8sI8s8x", 0, stamp, 0x4001, 1, stamp, 0, stamp)
    return packets.ipv4(packets.udp(payload, PORT, SENDER_PORT), PEER, "10.77.0.1")


FRAME = reply()


def fill(descriptor: int) -> None:
    """Have the program write RECORDS records."""
    PacketRuns().run(descriptor, FRAME, repeat=RECORDS)


def checked(count: int) -> int:
    """The same count, once it is known to be the one that was written."""
    if count != RECORDS:
        sys.exit(f"{count} records of {RECORDS}: not what was to be measured")
    return count


if __name__ == "__main__":
    main()
