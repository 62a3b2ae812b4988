"""Application delays against packet captures, and what sampling costs.

The captures of a transfer at 90 % load, segmentation and receive offload on, are matched by sequence number: what they
say of the very bytes that were sampled is the truth. A capture's stamps lie before the hook at ingress and behind it at
egress, so some difference is the way between the two. Costs are those of one host that sends and receives within the
default budget, all its samples being read.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import itertools
import os
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from _common import (
    ADDRESSES,
    DEVICE,
    Hook,
    Pair,
    emit,
    emit_throughput_ratio,
    iperf3,
    iperf3_server,
    median,
    note,
    run_times,
    until_left,
    veth_pair,
    wait_until,
    whole,
)
from numpy.typing import NDArray

from pytools.config import AgentConfig, Peer, Samples
from pytools.estimators.matching import JOINED
from pytools.ipc.bus import Bus
from pytools.kernel.bpf.attach import attach_tc
from pytools.kernel.bpf.loader import Loaded, load
from pytools.kernel.netns import inside
from pytools.lab import Lab
from pytools.signals import Path as MeasuredPath
from pytools.sources import programs
from pytools.sources.interfaces import Interfaces
from pytools.sources.samples.joins import PATIENCE_NS
from pytools.sources.samples.rates import RateControl
from pytools.sources.samples.source import EGRESS, INGRESS, SampleSource

RATE, LOAD = "1gbit", "900M"
TRANSFER_S = 15
ROUNDS = 7
PAIRS = 15
BUDGET = Samples().per_s
_TICK_S = 0.2
_FORMAT = struct.Struct("<IHHiIII")  # head of a capture file
_PACKET = struct.Struct("<IIII")  # s, ns, bytes kept, bytes
_NANOSECONDS = 0xA1B23C4D
_TURN = 1 << 32


def main() -> None:
    truth("load90", "on")
    truth("load90_unmerged", "off")
    config = AgentConfig(host="a", peers=[])
    with whole(load([programs.samples(config)])) as loaded, veth_pair() as pair, pair.iperf3_server():
        run_time(pair, loaded)
        throughput(pair, loaded)


# ---- the truth ----


class Recorder(SampleSource):
    """The source, with every settled sample kept."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.recorded: list[NDArray[Any]] = []
        self.ports: dict[int, int] = {}  # by flow
        self._last_ns = time.monotonic_ns()

    def take(self, settled: NDArray[Any]) -> None:
        if len(settled):
            named = {number: self.joins.flows.row(number) for number in np.unique(settled["flow"]).tolist()}
            self.ports |= {number: int(row["source_port"]) for number, row in named.items()}
            self.recorded.append(settled)
            self._last_ns = time.monotonic_ns()
        super().take(settled)

    def is_settled(self) -> bool:
        """Whether nothing waits any more."""
        return time.monotonic_ns() - self._last_ns > PATIENCE_NS + 10**9


class Mail:
    """The bus between the two hosts of this process."""

    def __init__(self) -> None:
        self.boxes: dict[tuple[str, str], list[tuple[str, bytes]]] = {}

    def end(self, name: str, other: str) -> End:
        return End(self, name, other)


class End(NamedTuple):
    mail: Mail
    name: str
    other: str

    def send(self, topic: str, payload: bytes, to: str | None = None) -> None:
        self.mail.boxes.setdefault((to or self.other, topic), []).append((self.name, payload))

    def receive(self, topic: str) -> list[tuple[str, bytes]]:
        return self.mail.boxes.pop((self.name, topic), [])


def truth(case: str, receive_offload: str) -> None:
    """A transfer, sampled and captured; cut into packets half-way, and merged again or not where it arrives."""
    name = f"bench-app-{os.getpid()}"
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab.up(name, hosts=2, rails=1, rate=RATE, queue_bytes=1 << 20))
        files = [Path(directory) / f"{host.name}.pcap" for host in lab.hosts]
        for host in lab.hosts:
            lab.run(host, ["ethtool", "-K", "rail1", "tso", "on", "gso", "on", "gro", receive_offload])
        for port in lab.rails[0].ports:  # as on a wire
            lab.run(lab.rails[0], ["ethtool", "-K", port.name, "tso", "off", "gso", "off"])
        sources = both_sources(stack, lab)
        stack.enter_context(iperf3_server(functools.partial(lab.start, lab.hosts[1])))
        with contextlib.ExitStack() as running:
            for host, file in zip(lab.hosts, files, strict=True):
                running.enter_context(capturing(lab, host, file))
            running.enter_context(ticking(sources))
            options = ("-b", LOAD, "-t", str(TRANSFER_S))
            rate = iperf3(functools.partial(lab.start, lab.hosts[0]), lab.hosts[1].service, *options)
            note(f"{rate / 1e6:.0f} Mbit/s")
            wait_until(sources[0].is_settled, "every sample's fate is known")
        compare(case, sources[0], files)


def both_sources(stack: contextlib.ExitStack, lab: Lab) -> list[Recorder]:
    mail, sources = Mail(), []
    for host, other in itertools.permutations(lab.hosts):
        config = AgentConfig(host=host.name, peers=[Peer(other.name, other.service, "shared")])
        loaded = stack.enter_context(whole(load([programs.samples(config)])))
        with inside(host.netns):
            for direction in ("egress", "ingress"):
                stack.enter_context(attach_tc(loaded.programs[f"sample_{direction}"], "rail1", direction))
        bus = Bus()
        source = Recorder(
            config,
            loaded,
            Interfaces(lambda _: "rail1"),
            bus,
            mail.end(host.name, other.name),
            lambda _: None,
            lambda remote, interface, host=host, other=other: MeasuredPath(
                host.name, other.name, remote, "", interface
            ),
        )
        stack.callback(source.close)
        if not sources:
            bus.subscribe(frozenset({"app_delay"}), 1 << 20)
        sources.append(source)
    return sources


@contextlib.contextmanager
def ticking(sources: list[Recorder]) -> Iterator[None]:
    """Have the sources work meanwhile, in a thread of their own."""
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(_TICK_S):
            for source in sources:
                source.tick(time.monotonic_ns())

    with until_left(tick, stop.set):
        yield


@contextlib.contextmanager
def capturing(lab: Lab, host: Any, file: Path) -> Iterator[None]:
    """Capture what the transfer sends, stamped in nanoseconds where the kernel hands packets to captures."""
    argv = ["tcpdump", "-i", "rail1", "-j", "host", "--time-stamp-precision=nano", "-s", "96", "-B", "65536"]
    argv += ["-Z", "root", "-w", str(file), f"tcp and dst host {lab.hosts[1].service} and dst port 5201"]
    process = lab.start(host, argv, stderr=subprocess.PIPE)
    assert process.stderr is not None
    for line in process.stderr:
        if "listening" in line:
            break
    try:
        yield
    finally:
        process.terminate()
        note(process.communicate()[1].strip().replace("\n", ", "))


class Capture(NamedTuple):
    """The packets of one connection at one host, by where in its stream they begin."""

    first: NDArray[np.int64]  # byte, counted from the connection's first
    end: NDArray[np.int64]
    at_ns: NDArray[np.int64]

    def of(self, byte: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """When each of these bytes passed, and whether it did exactly once."""
        index = np.clip(np.searchsorted(self.first, byte, "right") - 1, 0, None)
        covering = np.searchsorted(self.first, byte, "right") - np.searchsorted(np.sort(self.end), byte, "right")
        return self.at_ns[index], (covering == 1) & (self.first[index] <= byte) & (byte < self.end[index])


def read_capture(file: Path) -> dict[int, list[tuple[int, int, int]]]:
    """Sequence number, payload bytes and time of each packet with payload, by source port."""
    raw, found = file.read_bytes(), {}
    if _FORMAT.unpack_from(raw)[0] != _NANOSECONDS:
        raise SystemExit("the capture's stamps are no nanoseconds")
    place = _FORMAT.size
    while place < len(raw):
        seconds, nanoseconds, kept, size = _PACKET.unpack_from(raw, place)
        place += _PACKET.size
        ip = place + 14
        header = (raw[ip] & 15) * 4
        total = int.from_bytes(raw[ip + 2 : ip + 4], "big") or size - 14
        port, _, seq = struct.unpack_from("!HHI", raw, ip + header)
        payload = total - header - (raw[ip + header + 12] >> 4) * 4
        if payload:
            found.setdefault(port, []).append((seq, payload, seconds * 10**9 + nanoseconds))
        place += kept
    return found


def compare(case: str, source: Recorder, files: list[Path]) -> None:
    """Samples of the biggest connection against both captures."""
    captured = [read_capture(file) for file in files]
    port = max(captured[0], key=lambda each: sum(size for _, size, _ in captured[0][each]))
    origin = captured[0][port][0][0]
    sides = []
    for packets in captured:
        seq, size, at_ns = np.array(packets[port], np.int64).T
        first = (seq - origin) % _TURN  # less than a turn is sent
        order = np.argsort(first, kind="stable")
        sides.append(Capture(first[order], (first + size)[order], at_ns[order]))
        note(f"{len(seq)} packets of {int(size.mean())} bytes on average")
    settled = np.concatenate(source.recorded)
    settled = settled[np.isin(settled["flow"], [flow for flow, each in source.ports.items() if each == port])]
    joined = settled[settled["fate"] == JOINED]
    byte = (joined["key"].astype(np.int64) - origin) % _TURN
    (left_ns, left_once), (arrived_ns, arrived_once) = (side.of(byte) for side in sides)
    sure = left_once & arrived_once
    ours = joined["far_at_ns"] - joined["at_ns"]
    difference = (ours - (arrived_ns - left_ns))[sure]
    note(f"{len(settled)} settled, {len(joined)} joined, {int(sure.sum())} in both captures once")
    note(f"ours: {np.percentile(ours, (1, 50, 99)).astype(int).tolist()} ns")
    note(f"difference: {np.percentile(difference, (0, 1, 50, 99, 100)).astype(int).tolist()} ns")
    drops = {name: count for name, count in source.drops().items() if count}
    note(f"left out: {drops}")
    if len(difference) < 1000:
        raise SystemExit("too few samples to compare")
    absolute = np.abs(difference)
    for percent in (50, 99):
        value = float(np.percentile(absolute, percent))
        emit("app_delay", f"capture_difference_p{percent}", value, "ns", "lower", case=case, n=len(difference))
    emit("app_delay", "joined", len(joined) / len(settled), "share", "higher", case=case, n=len(settled))


# ---- the cost ----


@contextlib.contextmanager
def sampling(loaded: Loaded, directions: int) -> Iterator[RateControl]:
    """Sample what passes between the two ends, within the budget, reading all of it."""
    peers, settings = loaded.map("sample_peers"), loaded.map("sample_settings")
    for address, _ in ADDRESSES:
        peers.update(np.frombuffer(ipaddress.IPv6Address(f"::ffff:{address}").packed, peers.key)[0], EGRESS | INGRESS)
    ring, control, stop = loaded.ring("samples", "sample"), RateControl(BUDGET), threading.Event()
    control.start(time.monotonic_ns())
    settings.update(0, (directions, control.tcp, control.udp, 0))

    def adapt() -> None:
        while not stop.wait(_TICK_S):
            is_tcp = ring.read()["protocol"] == 6
            control.observe(time.monotonic_ns(), int(is_tcp.sum()), int((~is_tcp).sum()), 0)
            settings.update(0, (directions, control.tcp, control.udp, 0))

    try:
        with until_left(adapt, stop.set):
            yield control
    finally:
        settings.update(0, (0, 31, 31, 0))


def hooks_of(pair: Pair, loaded: Loaded) -> dict[str, Hook]:
    """Egress where packets leave, ingress where they arrive."""
    return {
        "egress": Hook(loaded.programs[programs.SAMPLE_EGRESS], pair.ends[0], DEVICE, "egress"),
        "ingress": Hook(loaded.programs[programs.SAMPLE_INGRESS], pair.ends[1], DEVICE, "ingress"),
    }


def run_time(pair: Pair, loaded: Loaded) -> None:
    """At full speed: TCP, datagrams one by one, and TCP with nobody who wants samples."""
    for suffix, directions, options in (
        ("", EGRESS | INGRESS, ()),
        ("_udp", EGRESS | INGRESS, ("-u", "-b", "0", "-l", "1400")),
        ("_idle", 0, ()),
    ):
        with sampling(loaded, directions) as control:
            work = functools.partial(pair.iperf3, "-t", "1", *options)
            work()  # the rates find their place
            figures = run_times(hooks_of(pair, loaded), work, ROUNDS)
            note(f"rates{suffix}: tcp {control.tcp}, udp {control.udp}")
        for case, values in figures.items():
            emit("app_delay", "run_time", median(values), "ns/packet", "lower", case=case + suffix, n=ROUNDS)


def throughput(pair: Pair, loaded: Loaded) -> None:
    """iperf3 at full speed, both hooks at both ends or none: the median of what each pair of runs gives."""

    def off() -> float:
        return pair.iperf3("-t", "1")

    def on() -> float:
        with contextlib.ExitStack() as stack:
            for end in pair.ends:
                with inside(end):
                    for direction in ("egress", "ingress"):
                        stack.enter_context(attach_tc(loaded.programs[f"sample_{direction}"], DEVICE, direction))
            return pair.iperf3("-t", "1")

    with sampling(loaded, EGRESS | INGRESS):
        emit_throughput_ratio("app_delay", PAIRS, on, off)


if __name__ == "__main__":
    main()
