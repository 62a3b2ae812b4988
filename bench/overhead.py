"""What the agents of two hosts cost the traffic between them, everything on as shipped, against no agent.

An unshaped lab of two hosts and two rails. Both agents compare clocks, talk over the bus, sample application packets
and record; in one run they run and stop in turn.

throughput_ratio   tcp: bit rate of one iperf3 flow; udp64: datagrams of 64 bytes, sent as fast as possible, counted as
                   they arrive in the receiver's UDP. Median of the ratios of neighbouring runs. The peer
                   empty_programs: without agents, but with programs that do nothing on the hooks that theirs have.
run_time           all: BPF run time of all programs of both agents, net of an empty program of the same type on the
                   same hooks in the same run, per packet and TC hook that it passes, over TCP. A packet passes one hook
                   at each host. Packets are as TC sees them: before segmentation, after GRO. What programs on
                   tracepoints and sockets cost is part of the sum; each agent counts those of the whole machine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _agents import RAW_TRACEPOINT, SOCK, SOCK_OPS, TC, TRACEPOINT, BpfProgram, agents, configure, programs_of
from _common import alternating, emit, empty_program, iperf3, iperf3_server, median, note, read_options, whole

from pytools.errors import SwerveError
from pytools.kernel.bpf import cgroups, syscall
from pytools.kernel.bpf.attach import OTHERS, STEERING, Direction, attach_tc
from pytools.kernel.bpf.compiler_client import Kind
from pytools.kernel.bpf.loader import Program, load
from pytools.kernel.bpf.syscall import RunTime
from pytools.kernel.netns import inside
from pytools.lab import Host, Lab

RAILS = 2
PAIRS, RUN_S = 12, 3
ROUNDS = 7
SETTLING_S = 6.0  # new agents compare clocks more often for some seconds
UDP64 = ("-u", "-b", "0", "-l", "64")


def main() -> None:
    options = read_options(__doc__, pairs=PAIRS, rounds=ROUNDS, seconds=RUN_S)
    with Lab.up(f"bench-overhead-{os.getpid()}", hosts=2, rails=RAILS, rate="none", bus=True) as lab:
        for host in lab.hosts:
            configure(host, compare_clocks)
        with iperf3_server(functools.partial(lab.start, lab.hosts[1])):
            throughput(lab, options.pairs, options.seconds)
            run_time(lab, options.rounds, options.seconds)


def compare_clocks(config: dict[str, Any]) -> None:
    """Undo what the lab knows: that all its hosts share one clock."""
    for peer in config["peers"]:
        del peer["clock"]


# ---- throughput ----


def throughput(lab: Lab, pairs: int, seconds: int) -> None:
    def without() -> tuple[float, float]:
        return tcp(lab, seconds), udp64(lab, seconds)

    def hooked() -> tuple[float, float]:
        with contextlib.ExitStack() as stack, Empty(stack, lab).on_packets(first=False):
            return without()

    def watched() -> tuple[float, float]:
        with agents(lab, *lab.hosts):
            time.sleep(SETTLING_S)
            return without()

    ours, hooks_alone, theirs = alternating(pairs, watched, hooked, without)
    for index, case in enumerate(("tcp", "udp64")):
        sides = {"with agents": ours, "with empty programs": hooks_alone, "without": theirs}
        note(f"{case}: {', '.join(f'{name} {_shown(found, index)}' for name, found in sides.items())} per second")
        value, peer_value = (
            median([one[index] / other[index] for one, other in zip(side, theirs, strict=True)])
            for side in (ours, hooks_alone)
        )
        emit(
            "overhead",
            "throughput_ratio",
            value,
            "ratio",
            "higher",
            case=case,
            peer="empty_programs",
            peer_value=peer_value,
            n=pairs,
        )


def tcp(lab: Lab, seconds: int) -> float:
    """Bits per second of one flow."""
    source, sink = lab.hosts
    return iperf3(functools.partial(lab.start, source), sink.service, "-t", str(seconds))


def udp64(lab: Lab, seconds: int) -> float:
    """Datagrams received per second."""
    source, sink = lab.hosts
    before = received_datagrams(sink)
    iperf3(functools.partial(lab.start, source), sink.service, "-t", str(seconds), *UDP64)
    return (received_datagrams(sink) - before) / seconds


def received_datagrams(host: Host) -> int:
    """Datagrams that UDP has given to the processes of a host."""
    with inside(host.netns):
        lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
    names, values = (line.split() for line in lines if line.startswith("Udp:"))
    return int(values[names.index("InDatagrams")])


def _shown(figures: list[tuple[float, float]], index: int) -> str:
    return str([f"{each[index]:.3g}" for each in figures])


# ---- run time ----


def run_time(lab: Lab, rounds: int, seconds: int) -> None:
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(agents(lab, *lab.hosts))
        programs = [each for agent in running for each in stack.enter_context(programs_of(agent.pid))]
        empty = Empty(stack, lab)
        note(f"programs: {', '.join(sorted(each.name for each in programs))}")
        time.sleep(SETTLING_S)
        found: dict[str, list[float]] = {"tcp": [], "udp64": []}
        for turn in range(rounds + 1):
            with empty.on_packets(first=bool(turn % 2)):
                for case, work in (("tcp", tcp), ("udp64", udp64)):
                    before = {fd: syscall.program_run_time(fd) for fd in (*(each.fd for each in programs), *empty.fds)}
                    with RunTime():
                        work(lab, seconds)
                    spent = {fd: _since(before[fd], fd) for fd in before}
                    if turn:  # the first is a warm-up
                        found[case].append(empty.net_per_packet(programs, spent))
        for case, figures in found.items():
            note(f"run time, {case}: {[round(each, 1) for each in figures]} ns per packet")
        emit("overhead", "run_time", median(found["tcp"]), "ns/packet", "lower", case="all", n=rounds)


def _since(before: tuple[int, int], fd: int) -> tuple[int, int]:
    after = syscall.program_run_time(fd)
    return after[0] - before[0], after[1] - before[1]


class Empty:
    """Empty programs on the hooks of the agents: two at TC, two on sockets, one on a tracepoint."""

    def __init__(self, stack: contextlib.ExitStack, lab: Lab) -> None:
        self._lab = lab
        self._packets: dict[Direction, int] = {
            direction: stack.enter_context(empty_program()).programs["empty"] for direction in ("egress", "ingress")
        }
        source = str(Path(__file__).with_name("empty_hooks.c"))
        kinds: dict[str, Kind] = {"empty_callbacks": "sock_ops", "empty_created": "sock"}
        loaded = stack.enter_context(whole(load([Program(source, tuple(kinds), {}, kinds)])))
        self._callbacks, self._created = (loaded.programs[name] for name in kinds)
        stack.enter_context(cgroups.attach(self._callbacks))
        stack.enter_context(cgroups.attach(self._created, syscall.SOCK_CREATE))
        self._tracepoint = syscall.program_of_link(loaded.tracepoints["tcp_cong_state_set"])
        stack.callback(os.close, self._tracepoint)

    @property
    def fds(self) -> tuple[int, ...]:
        """All of them."""
        return *self._packets.values(), self._callbacks, self._created, self._tracepoint

    @contextlib.contextmanager
    def on_packets(self, first: bool) -> Iterator[None]:
        """Attach those at TC to all interfaces of the rails, before or behind the agents' programs."""
        with contextlib.ExitStack() as attached:
            for host in self._lab.hosts:
                with inside(host.netns):
                    for interface in host.interfaces:
                        for direction, fd in self._packets.items():
                            role = STEERING if first else OTHERS
                            attached.enter_context(attach_tc(fd, interface.name, direction, role=role))
            yield

    def net_per_packet(self, programs: list[BpfProgram], spent: dict[int, tuple[int, int]]) -> float:
        """Run time of all programs, without what as many runs of an empty one take, per packet and hook."""
        net_ns = 0.0
        for each in programs:
            spent_ns, runs = spent[each.fd]
            if runs:
                net_ns += spent_ns - runs * _mean(spent[self._beside(each)])
        return net_ns / sum(spent[fd][1] for fd in self._packets.values())

    def _beside(self, program: BpfProgram) -> int:
        """The empty program to compare one with."""
        if program.type == TC:
            return self._packets["egress" if "egress" in program.name else "ingress"]
        if program.type == SOCK_OPS:
            return self._callbacks
        if program.type == SOCK:
            return self._created
        if program.type in (TRACEPOINT, RAW_TRACEPOINT):
            return self._tracepoint
        raise SwerveError(f"there is no empty program of the type of {program.name} ({program.type})")


def _mean(spent: tuple[int, int]) -> float:
    """Nanoseconds a run; 0 for one that did not run."""
    return spent[0] / spent[1] if spent[1] else 0.0


if __name__ == "__main__":
    main()
