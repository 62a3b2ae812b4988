"""A hundred thousand connections through a flow map that holds fewer: totals exact, evictions as counted.

    python tests/prove/tcp_many_connections.py [connections] [rows]

Needs root. Makes two namespaces of its own and removes them. Every connection sends one message, one in two thousand
is lost on the way; the kernel's own counters of the namespace are the truth.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from _common import ADDRESSES, DEVICE, Pair, veth_pair, wait_until, whole  # noqa: E402
from _tcpretrans import drop_every  # noqa: E402

from pytools.config import Tcp  # noqa: E402
from pytools.kernel.bpf import cgroups  # noqa: E402
from pytools.kernel.bpf.attach import attach_tc  # noqa: E402
from pytools.kernel.bpf.loader import Loaded, load  # noqa: E402
from pytools.kernel.netns import inside  # noqa: E402
from pytools.sources.programs import TCP_CALLBACKS, TCP_EGRESS, TCP_INGRESS, tcp_connections  # noqa: E402

SO_NETNS_COOKIE = 71
LISTENERS = 16  # ports to connect to: ephemeral ones are used again for another one only
BYTES = 1200
LOST_ONE_IN = 2000


def main(connections: int, rows: int) -> int:
    with (
        whole(load([tcp_connections(Tcp(flows=rows))])) as loaded,
        veth_pair() as pair,
        contextlib.ExitStack() as stack,
    ):
        with inside(pair.ends[0]):
            with socket.socket() as any_socket:
                cookie = struct.unpack("=Q", any_socket.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0]
            loaded.map("tcp_settings").update(0, (cookie, 100_000_000))
            stack.enter_context(cgroups.attach_sock_ops(loaded.programs[TCP_CALLBACKS]))
            stack.enter_context(attach_tc(loaded.programs[TCP_EGRESS], DEVICE, "egress"))
            stack.enter_context(attach_tc(loaded.programs[TCP_INGRESS], DEVICE, "ingress"))
        dropper = stack.enter_context(whole(load([drop_every(LOST_ONE_IN)])))
        with inside(pair.ends[1]):
            stack.enter_context(attach_tc(dropper.programs["drop_every"], DEVICE, "ingress"))
        began = time.monotonic()
        connect(pair, connections)
        took = time.monotonic() - began
        wait_until(lambda: total(loaded, "sent_bytes") >= connections * BYTES, "all connections have ended", 60)
        return report(loaded, pair, connections, rows, took)


def connect(pair: Pair, connections: int) -> None:
    """One after the other: connect, send, close at both ends."""
    with contextlib.ExitStack() as stack:
        with inside(pair.ends[1]):
            servers = [stack.enter_context(socket.create_server((ADDRESSES[1][0], 0))) for _ in range(LISTENERS)]
        stack.enter_context(inside(pair.ends[0]))
        places = [server.getsockname() for server in servers]
        message = bytes(BYTES)
        for number in range(connections):
            server = servers[number % LISTENERS]
            with socket.create_connection(places[number % LISTENERS]) as near:
                far, _ = server.accept()
                with far:
                    near.sendall(message)
                    far.recv(BYTES, socket.MSG_WAITALL)


def total(loaded: Loaded, name: str) -> int:
    """The host's count of this name."""
    return int(loaded.map("tcp_interfaces").read()[1][name].sum())


def kernel(pair: Pair) -> dict[str, int]:
    """The kernel's counters of the sending namespace."""
    with inside(pair.ends[0]):
        lines = Path("/proc/thread-self/net/snmp").read_text().splitlines()
    names, values = (line.split()[1:] for line in lines if line.startswith("Tcp:"))
    return dict(zip(names, map(int, values), strict=True))


def report(loaded: Loaded, pair: Pair, connections: int, rows: int, took: float) -> int:
    """Compare, and say so; the exit code."""
    counters = loaded.map("tcp_counters").read_percpu_sum().tolist()
    created, replaced, met = counters[0], counters[1], counters[10]
    began = time.monotonic()
    present = len(loaded.map("tcp_flows").read()[0])
    reading = time.monotonic() - began
    truth = kernel(pair)
    again = int(loaded.map("tcp_interfaces").read()[1]["retransmitted"].sum())
    paths = loaded.map("tcp_paths").read()[1]
    facts: list[tuple[str, int, int]] = [
        ("connections", met, connections),
        ("opened, as the kernel has it", truth["ActiveOpens"], connections),
        ("bytes sent, over interfaces", total(loaded, "sent_bytes"), connections * BYTES),
        ("bytes sent, over paths", int(paths["sent_bytes"].sum()), connections * BYTES),
        ("segments retransmitted", again, truth["RetransSegs"]),
        ("nothing put off or without a place", sum(counters[2:10]), 0),
    ]
    print(f"{connections} connections in {took:.1f} s through {rows} rows; all rows read in {1000 * reading:.1f} ms")
    print(f"rows made {created}, taken over {replaced}, present {present}: evicted {created - replaced - present}")
    for what, ours, expected in facts:
        print(f"{'ok ' if ours == expected else 'BAD'} {what}: {ours}, expected {expected}")
    facts.append(("a loss in so many", again >= connections // LOST_ONE_IN, True))
    bounded = present <= rows and created - replaced - present >= max(0, connections - replaced - rows)
    print(f"{'ok ' if bounded else 'BAD'} rows are within the bound")
    return 0 if bounded and all(ours == expected for _, ours, expected in facts) else 1


if __name__ == "__main__":
    sys.exit(main(int((sys.argv[1:] or ["100000"])[0]), int((sys.argv[2:] or ["16384"])[0])))
