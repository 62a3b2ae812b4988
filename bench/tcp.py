"""What tcp.c costs: nanoseconds of BPF run time a hit, net of an empty program on the same hits.

The TCP window is kept small enough that nothing is lost but where it shall be. `tcp`, `udp` and `acks`: an unshaped
veth pair; what an ordinary packet pays on its way out and, for `acks`, in. `short`: connections of one message, which
are left alone until they end; what they pay then is in `short_callbacks`, for a connection as a whole. `lossy`: the
mean over all packets, retransmissions included, while one packet in a hundred is lost; `after_loss`: the same
connection, once nothing is lost any more. `callbacks` and `tracepoint`: what the kernel calls beside the packets.

`lost` and `cpu`: one packet in five lost, and bcc's tcpretrans beside us (bench/_tcpretrans.py).
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from _common import ADDRESSES, DEVICE, Hook, emit, median, note, run_times, veth_pair, whole
from _tcpretrans import compare, drop_every

from pytools.config import Tcp
from pytools.errors import SwerveError
from pytools.kernel.bpf import cgroups, syscall
from pytools.kernel.bpf.attach import attach_tc
from pytools.kernel.bpf.loader import Loaded, Program, load
from pytools.kernel.bpf.syscall import RunTime
from pytools.kernel.netns import inside
from pytools.lab import namespaces
from pytools.sources.programs import TCP_CALLBACKS, TCP_EGRESS, TCP_INGRESS, tcp_connections

ROUNDS = 7
CONNECTIONS = 400
LOST_ONE_IN = 100
SO_NETNS_COOKIE = 71
# With round trips of microseconds a busy processor is enough to have them sent: retransmissions where nothing is lost.
NO_TAIL_LOSS_PROBES = {"ipv4/tcp_early_retrans": 0}


def main() -> None:
    with whole(load([tcp_connections(Tcp())])) as loaded:
        lossless(loaded)
        lossy(loaded)
        with veth_pair() as pair, pair.iperf3_server():
            set_up(loaded, pair.ends[0])
            compare(loaded, pair)


def lossless(loaded: Loaded) -> None:
    with veth_pair() as pair, pair.iperf3_server():
        set_up(loaded, pair.ends[0])
        hooks = {
            TCP_EGRESS: Hook(loaded.programs[TCP_EGRESS], pair.ends[0], DEVICE, "egress"),
            TCP_INGRESS: Hook(loaded.programs[TCP_INGRESS], pair.ends[0], DEVICE, "ingress"),
        }
        for case, options in (("tcp", ("-w", "128K")), ("udp", ("-u", "-b", "0", "-l", "1400"))):
            before = retransmitted(loaded)
            work = functools.partial(pair.iperf3, "-t", "1", *options)
            figures = run_times(hooks, work, ROUNDS)
            note(f"{case}: {retransmitted(loaded) - before} segments retransmitted")
            emit("tcp", "run_time", median(figures[TCP_EGRESS]), "ns/hit", "lower", case=case, n=ROUNDS)
            if case == "tcp":
                emit("tcp", "run_time", median(figures[TCP_INGRESS]), "ns/hit", "lower", case="acks", n=ROUNDS)
        with callbacks(loaded):
            figures = run_times(hooks, lambda: connect_often(pair.ends), ROUNDS)
            emit("tcp", "run_time", median(figures[TCP_EGRESS]), "ns/hit", "lower", case="short", n=ROUNDS)
        beside_the_packets(loaded, functools.partial(connect_often, pair.ends))


def lossy(loaded: Loaded) -> None:
    with veth_pair() as pair, pair.iperf3_server(), contextlib.ExitStack() as stack:
        set_up(loaded, pair.ends[0])
        stack.enter_context(callbacks(loaded))
        hooks = {TCP_EGRESS: Hook(loaded.programs[TCP_EGRESS], pair.ends[0], DEVICE, "egress")}
        dropper = stack.enter_context(whole(load([drop_every(LOST_ONE_IN)])))
        flow = pair.start(0, ["iperf3", "-c", ADDRESSES[1][0], "-t", "300", "-w", "128K"])
        with inside(pair.ends[1]), attach_tc(dropper.programs["drop_every"], DEVICE, "ingress"):
            mean_while(loaded, hooks, "lossy")
        mean_while(loaded, hooks, "after_loss")
        flow.kill()


def mean_while(loaded: Loaded, hooks: dict[str, Hook], case: str) -> None:
    """What each packet costs while a connection is at work."""
    before = retransmitted(loaded)
    figures = run_times(hooks, lambda: time.sleep(1), ROUNDS)[TCP_EGRESS]
    note(f"{case}: {retransmitted(loaded) - before} segments retransmitted")
    emit("tcp", "run_time", median(figures), "ns/hit", "lower", case=case, n=ROUNDS)


def beside_the_packets(loaded: Loaded, work: Callable[[], object]) -> None:
    """Socket operations and the tracepoint, beside empty ones."""
    empty_hooks = Program(
        str(Path(__file__).with_name("empty_hooks.c")), ("empty_callbacks",), {}, {"empty_callbacks": "sock_ops"}
    )
    with whole(load([empty_hooks])) as empty, contextlib.ExitStack() as stack:
        sides = {
            "callbacks": (loaded.programs[TCP_CALLBACKS], empty.programs["empty_callbacks"]),
            "tracepoint": tuple(
                stack.enter_context(program_of(each.tracepoints["tcp_cong_state_set"])) for each in (loaded, empty)
            ),
        }
        stack.enter_context(cgroups.attach(empty.programs["empty_callbacks"]))
        stack.enter_context(callbacks(loaded))
        found: dict[str, list[float]] = {name: [] for name in sides}
        ends: list[float] = []
        for turn in range(ROUNDS + 1):
            before = {fd: syscall.program_run_time(fd) for pair in sides.values() for fd in pair}
            with RunTime():
                work()
            after = {fd: syscall.program_run_time(fd) for fd in before}
            for name, pair in sides.items():
                ours, nothing = (per_run(before[fd], after[fd]) for fd in pair)
                if turn:
                    found[name].append(ours - nothing)
            if turn:
                own, idle = (after[fd][0] - before[fd][0] for fd in sides["callbacks"])
                ends.append((own - idle) / CONNECTIONS)
        for name, figures in found.items():
            emit("tcp", "run_time", median(figures), "ns/hit", "lower", case=name, n=ROUNDS)
        emit("tcp", "run_time", median(ends), "ns/connection", "lower", case="short_callbacks", n=ROUNDS)


def per_run(before: tuple[int, int], after: tuple[int, int]) -> float:
    if after[1] == before[1]:
        raise SwerveError("a program under test was never called")
    return (after[0] - before[0]) / (after[1] - before[1])


@contextlib.contextmanager
def program_of(link_fd: int) -> Iterator[int]:
    """The program behind a raw tracepoint's link."""
    fd = syscall.program_of_link(link_fd)
    try:
        yield fd
    finally:
        os.close(fd)


def set_up(loaded: Loaded, namespace: str) -> None:
    """Have the programs work for this namespace."""
    namespaces.set_sysctls(namespace, NO_TAIL_LOSS_PROBES)
    with inside(namespace), socket.socket() as any_socket:
        cookie = struct.unpack("=Q", any_socket.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0]
    loaded.map("tcp_settings").update(0, (cookie, int(Tcp().refresh_ms * 1e6), 0))


def callbacks(loaded: Loaded) -> cgroups.CgroupLink:
    """Timeouts and ends of connections, called back while this is open."""
    return cgroups.attach(loaded.programs[TCP_CALLBACKS])


def connect_often(ends: tuple[str, str]) -> None:
    """Connections of one message each, one after the other."""
    with inside(ends[1]):
        server = socket.create_server((ADDRESSES[1][0], 0))
    with server, inside(ends[0]):
        place = server.getsockname()
        for _ in range(CONNECTIONS):
            with socket.create_connection(place) as near:
                far, _ = server.accept()
                with far:
                    near.sendall(b"x" * 1000)
                    far.recv(1000, socket.MSG_WAITALL)


def retransmitted(loaded: Loaded) -> int:
    """Segments retransmitted, on all interfaces so far."""
    rows = loaded.map("tcp_interfaces").read()[1]
    return int(rows["retransmitted"].sum())


if __name__ == "__main__":
    main()
