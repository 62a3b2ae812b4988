"""What probing costs and what it withstands: probe.c as the agents of two hosts run it, on one unshaped rail.

run_time          BPF run time of all observers (observe.c) net of an empty program on the same hook in the same run.
                  ordinary_egress, ordinary_ingress: datagrams of 1,400 bytes between two peers, wanted by no observer,
                  at the sender's and at the receiver's end. vxlan_egress, vxlan_ingress: the same through a VXLAN
                  tunnel whose packets are counted below it: mean of the hook on the tunnel and the one below. reflect:
                  a request at the reflector, from its arrival to the departure of the reply, both hooks together.
turnaround_p99    how long a reflector keeps a probe, by the two timestamps in its reply (RFC 8762, 4.3.1: Timestamp
                  less Receive Timestamp), as a packet socket at the sender sees it; otherwise idle
probes_lost       junk: probes without an answer, of both agents, while 500,000 packets a second arrive at one host's
                  probe port, half of them with the peer's address as their source (bench/_junk.py)
throughput_ratio  iperf3: one TCP flow over a veth pair with the programs attached at both ends against none
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from _agents import BpfProgram, agents, configure, programs_of
from _common import (
    DEVICE,
    emit,
    emit_throughput_ratio,
    empty_program,
    iperf3,
    iperf3_server,
    median,
    note,
    per_run,
    read_options,
    veth_pair,
    whole,
)

from pytools import directories
from pytools.config import AgentConfig
from pytools.errors import SwerveError
from pytools.ipc.bus import Client
from pytools.kernel.bpf import syscall
from pytools.kernel.bpf.attach import OTHERS, STEERING, Direction, attach_tc
from pytools.kernel.bpf.loader import load
from pytools.kernel.bpf.syscall import RunTime
from pytools.kernel.netns import inside
from pytools.lab import Host, Lab
from pytools.signals import ProbeSamples
from pytools.sources import programs

ROUNDS, ROUND_S = 7, 1
PAIRS = 15
TURNAROUND_S, JUNK_S, FATE_S = 20.0, 10.0, 2.0
JUNK_RATE = 500_000
ORDINARY = ("-u", "-b", "0", "-l", "1400")
OFTEN = {"interval": "1ms", "flows": 4}  # of the host whose probes are reflected
SELDOM = {"interval": "1s"}  # of the reflector, which is to do hardly anything else
_GET_HARDWARE, _ETH_P_ALL = 0x8927, 0x0003  # SIOCGIFHWADDR
_PTP = 0x4000  # Z of the error estimate: seconds and nanoseconds
_REPLY = struct.Struct("!4xIIH2xII")  # seconds, fraction, error estimate, seconds and fraction of the arrival
_HEADERS = 14 + 20 + 8  # Ethernet, IPv4, UDP

# The kernel-facing part: names of the programs, and how to load them.
CONFIG = AgentConfig(host="bench", peers=[])
EGRESS, INGRESS = programs.probes(CONFIG).functions
OBSERVE_EGRESS, OBSERVE_INGRESS = programs.OBSERVE_EGRESS, programs.OBSERVE_INGRESS
load_probes = functools.partial(load, [programs.probes(CONFIG)])


def main() -> None:
    options = read_options(__doc__, rounds=ROUNDS, pairs=PAIRS, turnaround=TURNAROUND_S, junk=JUNK_S)
    with Lab.up(f"bench-probe-{os.getpid()}", hosts=2, rails=1, rate="none") as lab:
        with agents(lab, *lab.hosts) as running:
            turnaround(lab, options.turnaround)
            ordinary(lab, running, options.rounds, "ordinary")
            junk(lab, options.junk)
        for host, often in zip(lab.hosts, (OFTEN, SELDOM), strict=True):
            configure(host, functools.partial(_probe_every, often))
        reflect(lab, options.rounds)
    name = f"bench-tunnel-{os.getpid()}"
    with Lab.up(name, hosts=2, rails=1, rate="none", over="vxlan") as lab, agents(lab, *lab.hosts) as running:
        ordinary(lab, running, options.rounds, "vxlan")
    throughput(options.pairs)


def _probe_every(setting: dict[str, Any], config: dict[str, Any]) -> None:
    config["probe"].update(setting)


# ---- BPF run time ----


def ordinary(lab: Lab, running: Sequence[subprocess.Popen[str]], rounds: int, case: str) -> None:
    """Packets that are no probes."""
    (source, sink), (sender, receiver) = lab.hosts, running
    with programs_of(sender.pid) as ours, programs_of(receiver.pid) as theirs:
        hooks = {
            f"{case}_egress": _Hook(named(ours, OBSERVE_EGRESS), source, "egress"),
            f"{case}_ingress": _Hook(named(theirs, OBSERVE_INGRESS), sink, "ingress"),
        }
        with iperf3_server(functools.partial(lab.start, sink)):

            def work() -> None:
                iperf3(functools.partial(lab.start, source), sink.service, "-t", str(ROUND_S), *ORDINARY)

            for hook, figures in net_run_times(hooks, work, rounds).items():
                emit("probe", "run_time", median(figures), "ns/packet", "lower", case=hook, n=rounds)


def reflect(lab: Lab, rounds: int) -> None:
    """Requests at a host that does nothing but answer them."""
    reflector = lab.hosts[1]
    directions: tuple[tuple[Direction, str], ...] = (("ingress", OBSERVE_INGRESS), ("egress", OBSERVE_EGRESS))
    with agents(lab, *lab.hosts) as running, programs_of(running[1].pid) as theirs:
        hooks: dict[str, _Hook] = {each: _Hook(named(theirs, name), reflector, each) for each, name in directions}
        found = net_run_times(hooks, lambda: time.sleep(ROUND_S), rounds, alternate=False)
        figures = [sum(each) for each in zip(*found.values(), strict=True)]
        note(f"reflect: { ({name: [round(each) for each in values] for name, values in found.items()}) }")
        emit("probe", "run_time", median(figures), "ns/packet", "lower", case="reflect", n=rounds)


class _Hook:
    """A program of an agent, and where it is attached."""

    def __init__(self, fd: int, host: Host, direction: Direction) -> None:
        self.fd, self.host, self.direction = fd, host, direction


def named(found: Sequence[BpfProgram], name: str) -> int:
    """The descriptor of the program with this name."""
    fds = [each.fd for each in found if each.name == name[:15]]
    if len(fds) != 1:
        raise SwerveError(f"the agent has {len(fds)} programs named {name}", "is it the agent of this checkout?")
    return fds[0]


def net_run_times(
    hooks: Mapping[str, _Hook], work: Callable[[], object], rounds: int, alternate: bool = True
) -> dict[str, list[float]]:
    """Nanoseconds per packet of each program, net of an empty one on the same hook, one value a round.

    Whichever program is first on a hook pays some 20 ns for what is in no cache yet. So a round has two halves: the
    empty program is first in one and last in the other, and the value is their mean. `alternate` false: it is always
    first, for where a program of ours keeps packets to itself.
    """
    found: dict[str, list[float]] = {name: [] for name in hooks}
    with contextlib.ExitStack() as stack:
        empty = {name: stack.enter_context(empty_program()).programs["empty"] for name in hooks}
        for turn in range(1 + rounds * (2 if alternate else 1)):
            role = OTHERS if alternate and turn % 2 else STEERING
            with contextlib.ExitStack() as attached:
                for name, hook in hooks.items():
                    with inside(hook.host.netns):
                        device = hook.host.interfaces[0].name
                        attached.enter_context(attach_tc(empty[name], device, hook.direction, role=role))
                fds = [*(hook.fd for hook in hooks.values()), *empty.values()]
                before = {fd: syscall.program_run_time(fd) for fd in fds}
                with RunTime():
                    work()
                each = {fd: per_run(before[fd], syscall.program_run_time(fd)) for fd in fds}
            if turn:  # the first is a warm-up
                for name, hook in hooks.items():
                    found[name].append(each[hook.fd] - each[empty[name]])
    if not alternate:
        return found
    return {
        name: [(one + other) / 2 for one, other in zip(values[::2], values[1::2], strict=True)]
        for name, values in found.items()
    }


# ---- probes themselves ----


def turnaround(lab: Lab, seconds: float) -> None:
    """Replies as they arrive at the first host."""
    host = lab.hosts[0]
    with inside(host.netns):
        # All protocols: such a socket sees packets before TC does, where replies end.
        wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
    kept: list[int] = []
    with wire:
        wire.bind((host.interfaces[0].name, _ETH_P_ALL))
        wire.settimeout(0.1)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(TimeoutError):
                frame, (*_, kind, _, _) = wire.recvfrom(2048)
                if kind == socket.PACKET_HOST and is_reply(frame):
                    kept.append(turnaround_ns(frame))
    if not kept:
        raise SwerveError("no reply was seen on the wire")
    note(f"turnaround: median {median(kept):.0f} ns, most {max(kept)} ns")
    emit("probe", "turnaround_p99", p99(kept), "ns", "lower", n=len(kept))


def is_reply(frame: bytes) -> bool:
    """Whether a frame is an IPv4 UDP datagram from a reflector, and to a sender that keeps its PTP timestamps."""
    if len(frame) < _HEADERS + _REPLY.size or frame[14] != 0x45 or frame[23] != socket.IPPROTO_UDP:
        return False
    source, destination = struct.unpack_from("!HH", frame, 34)
    error = _REPLY.unpack_from(frame, _HEADERS)[2]
    return source == CONFIG.probe.port != destination and bool(error & _PTP)


def turnaround_ns(frame: bytes) -> int:
    """Timestamp less Receive Timestamp."""
    seconds, fraction, _, arrival_seconds, arrival_fraction = _REPLY.unpack_from(frame, _HEADERS)
    return int((seconds - arrival_seconds) * 10**9 + fraction - arrival_fraction)


def p99(values: Sequence[float]) -> float:
    """Nearest rank: a value that was measured."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


def junk(lab: Lab, seconds: float) -> None:
    """Probes between the hosts while junk arrives at the second, after as long a time without."""
    (peer, target), rail = lab.hosts, lab.rails[0]
    with Fates(lab.hosts) as fates:
        quiet_ns = time.monotonic_ns()
        fates.follow(seconds)
        junk_ns = time.monotonic_ns()
        before = received_packets(target)
        words = (rail.ports[1].name, _mac(target), target.service, peer.service, CONFIG.probe.port, JUNK_RATE, seconds)
        script = Path(__file__).with_name("_junk.py")
        process = lab.start(rail, [sys.executable, str(script), *map(str, words)], stdout=subprocess.PIPE, stderr=None)
        while process.poll() is None:
            fates.follow(0.1)
        end_ns = time.monotonic_ns()
        arrived = received_packets(target) - before
        output = process.communicate()[0]
        if process.returncode:
            raise SwerveError(f"bench/_junk.py ended with exit code {process.returncode}")
        fates.follow(FATE_S)
        quiet_lost, quiet = fates.lost(quiet_ns, junk_ns)
        lost, probes = fates.lost(junk_ns, end_ns)
    note(f"junk: {int(output) / seconds:,.0f} packets/s sent, {arrived / seconds:,.0f} arrived")
    note(f"junk: {quiet_lost} of {quiet} probes lost before, {lost} of {probes} meanwhile")
    if int(output) < 0.95 * JUNK_RATE * seconds:
        note(f"junk: this machine does not send {JUNK_RATE:,} packets/s")
    emit("probe", "probes_lost", lost, "probes", "lower", case="junk", n=probes)


class Fates:
    """Which probes of these hosts were answered, as their agents publish it."""

    def __init__(self, hosts: Sequence[Host]) -> None:
        self._clients = [Client(directories.agent_socket(host.netns), frozenset({"probe_samples"})) for host in hosts]
        self._fates: list[tuple[int, bool]] = []  # sent_ns, answered

    def follow(self, seconds: float) -> None:
        """Read for a while."""
        end = time.monotonic() + seconds
        while True:
            for client in self._clients:
                for each in client.read():
                    if isinstance(each, ProbeSamples):
                        pairs = zip(each.sent_ns, each.forward_ns, each.reverse_ns, strict=True)
                        self._fates += [
                            (sent, forward is not None or back is not None) for sent, forward, back in pairs
                        ]
            if time.monotonic() >= end:
                return
            time.sleep(0.02)

    def lost(self, from_ns: int, to_ns: int) -> tuple[int, int]:
        """Probes sent in this time: how many were lost, and how many there were."""
        if any(client.dropped for client in self._clients):
            raise SwerveError("records of probes were dropped on their way here: the count would be wrong")
        answered = [answer for sent_ns, answer in self._fates if from_ns <= sent_ns < to_ns]
        return answered.count(False), len(answered)

    def __enter__(self) -> Fates:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()


def received_packets(host: Host) -> int:
    """Packets that have come in at a host's interface."""
    with inside(host.netns):
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    name = f"{host.interfaces[0].name}:"
    return next(int(line.split(":")[1].split()[1]) for line in lines if line.strip().startswith(name))


def _mac(host: Host) -> str:
    with inside(host.netns), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _GET_HARDWARE, struct.pack("16s24x", host.interfaces[0].name.encode()))
    return answer[18:24].hex(":")


# ---- throughput ----


def throughput(pairs: int) -> None:
    """One flow, with the programs on both hooks of both ends and without."""
    with whole(load_probes()) as loaded, veth_pair() as pair, pair.iperf3_server():

        def off() -> float:
            return pair.iperf3("-t", str(ROUND_S))

        def on() -> float:
            with contextlib.ExitStack() as stack:
                for end in pair.ends:
                    with inside(end):
                        stack.enter_context(attach_tc(loaded.programs[EGRESS], DEVICE, "egress"))
                        stack.enter_context(attach_tc(loaded.programs[INGRESS], DEVICE, "ingress"))
                return pair.iperf3("-t", str(ROUND_S))

        emit_throughput_ratio("probe", pairs, on, off)


if __name__ == "__main__":
    main()
