"""What stamping costs: nanoseconds of BPF run time a packet, net of an empty program, and iperf3 with it on and off."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct

import numpy as np
from _common import (
    ADDRESSES,
    DEVICE,
    Hook,
    Pair,
    alternating,
    emit,
    median,
    note,
    run_times,
    veth_pair,
    whole,
)

from pytools.kernel.attach import attach_tc
from pytools.kernel.loader import Loaded, Program, load
from pytools.kernel.netns import inside

PORT = 862
ROUNDS = 7
PAIRS = 15
PROBES = 20_000
_CHUNK = 1000  # fewer than the ring holds


def main() -> None:
    stamp = Program("stamp.c", ("stamp_egress", "stamp_ingress"), {"SWERVE_PROBE_PORT": PORT})
    with whole(load([stamp])) as loaded, veth_pair() as pair:
        with pair.iperf3_server():
            run_time(pair, loaded)
            throughput(pair, loaded)
        sampled(pair, loaded)


def hooks_of(pair: Pair, loaded: Loaded) -> dict[str, Hook]:
    """Egress where packets leave, ingress where they arrive."""
    return {
        "egress": Hook(loaded.programs["stamp_egress"], pair.ends[0], DEVICE, "egress"),
        "ingress": Hook(loaded.programs["stamp_ingress"], pair.ends[1], DEVICE, "ingress"),
    }


def run_time(pair: Pair, loaded: Loaded) -> None:
    """Packets that are no probes."""
    for suffix, options in (("", ()), ("_udp", ("-u", "-b", "0", "-l", "1400"))):

        def work(options: tuple[str, ...] = options) -> None:
            pair.iperf3("-t", "1", *options)

        for case, figures in run_times(hooks_of(pair, loaded), work, ROUNDS).items():
            emit("stamp", "run_time", median(figures), "ns/packet", "lower", case=case + suffix, n=ROUNDS)


def throughput(pair: Pair, loaded: Loaded) -> None:
    """iperf3 at full speed, both hooks at both ends or none: the median of what each pair of runs gives."""

    def off() -> float:
        return pair.iperf3("-t", "1")

    def on() -> float:
        with contextlib.ExitStack() as stack:
            for end in pair.ends:
                with inside(end):
                    for direction in ("egress", "ingress"):
                        stack.enter_context(attach_tc(loaded.programs[f"stamp_{direction}"], DEVICE, direction))
            return pair.iperf3("-t", "1")

    with_it, without = alternating(PAIRS, on, off)
    note(f"on {[round(x / 1e9, 1) for x in with_it]}, off {[round(x / 1e9, 1) for x in without]} Gbit/s")
    ratio = median([one / other for one, other in zip(with_it, without, strict=True)])
    emit("stamp", "throughput_ratio", ratio, "ratio", "higher", case="iperf3", n=PAIRS)


def sampled(pair: Pair, loaded: Loaded) -> None:
    """Probes of a known peer, which are written to the ring."""
    peers = loaded.map("stamp_peers")
    for address, _ in ADDRESSES:
        peers.update(np.frombuffer(ipaddress.IPv6Address(f"::ffff:{address}").packed, peers.key)[0], 1)
    ring = loaded.ring("stamps", "stamp")
    stamps = 0
    with inside(pair.ends[0]):
        sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inside(pair.ends[1]):
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with sender, receiver:
        receiver.bind((ADDRESSES[1][0], PORT))
        sender.connect(receiver.getsockname())

        def work() -> None:
            nonlocal stamps
            for first in range(0, PROBES, _CHUNK):
                for seq in range(first, first + _CHUNK):
                    sender.send(struct.pack("!I40x", seq))
                    receiver.recv(64)
                stamps += len(ring.read())

        for case, figures in run_times(hooks_of(pair, loaded), work, ROUNDS).items():
            emit("stamp", "run_time", median(figures), "ns/packet", "lower", case=f"sampled_{case}", n=ROUNDS)
    if stamps != 2 * PROBES * (ROUNDS + 1):
        raise SystemExit(f"{stamps} stamps of {2 * PROBES * (ROUNDS + 1)}: not what was to be measured")


if __name__ == "__main__":
    main()
