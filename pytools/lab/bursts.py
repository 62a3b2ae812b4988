"""Bursty TCP between all hosts over one rail: what shares the links with the probes in benchmarks.

Run as `python -m pytools.lab.bursts LAB RAIL SHARE SEED`: one process for all hosts, until it is ended. Bursts towards
each host begin at random (Poisson), come from a random other host, and have heavy-tailed sizes (Pareto with exponent
1.5, cut off). They wait at the sender when the network is slower, so on average each port carries the share asked for,
in Ethernet frames, as the shapers count. Receivers throw the bytes away without copying them. Single thread,
non-blocking sockets.

Prints `ready` once all hosts are connected.
"""

from __future__ import annotations

import heapq
import random
import select
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Final

from pytools.errors import UsageError
from pytools.kernel.netns import inside
from pytools.lab import state
from pytools.lab.topology import Host, Spec, rail_of

PORT: Final = 9  # discard
MAX_SHARE: Final = 0.98  # beyond, what waits at the senders only grows
_WIRE_PER_PAYLOAD: Final = (1514 + 66 / 2) / 1448  # an acknowledgement for every second frame: others send back
_WIRE_PER_BURST: Final = 2 * 66  # a last frame that is not full, and its acknowledgement
_EXPONENT: Final = 1.5
_LARGEST: Final = 60  # largest burst, in smallest ones
_MEAN_NS: Final = 5_000_000  # what the mean burst takes at the port's rate
_SMALLEST_BYTES: Final = 1448
_CHUNK_BYTES: Final = 1 << 17
_READ_BYTES: Final = 1 << 20
_READ_LOW_BYTES: Final = 1 << 15  # receivers are not woken for less
_SEND_BUFFER_BYTES: Final = 1 << 18


@dataclass(frozen=True, slots=True)
class Burst:
    """So many bytes, from a moment on (nanoseconds since the start)."""

    at_ns: int
    source: int  # hosts by number
    destination: int
    payload_bytes: int


def mean_in_smallest() -> float:
    """Mean of the sizes of bursts, in smallest ones."""
    a, h = _EXPONENT, float(_LARGEST)
    return float(a / (a - 1) * (1 - h ** (1 - a)) / (1 - h**-a))


def schedule(hosts: int, rate_bit_s: int, share: float, seed: int) -> Iterator[Burst]:
    """All bursts in the order of time, without end; towards each host `share` of the rate on average."""
    smallest = max(_SMALLEST_BYTES, rate_bit_s * _MEAN_NS / (8 * 10**9) / _WIRE_PER_PAYLOAD / mean_in_smallest())
    wire = smallest * mean_in_smallest() * _WIRE_PER_PAYLOAD + _WIRE_PER_BURST
    mean_interval_ns = wire * 8 * 10**9 / (share * rate_bit_s)
    draws = random.Random(seed)
    begun = [(draws.expovariate(1 / mean_interval_ns), host) for host in range(1, hosts + 1)]
    heapq.heapify(begun)
    cut = 1 - _LARGEST**-_EXPONENT
    while True:
        at_ns, destination = begun[0]
        source = draws.randrange(1, hosts)
        source += source >= destination
        size = smallest * (1 - cut * draws.random()) ** (-1 / _EXPONENT)
        yield Burst(int(at_ns), source, destination, int(size))
        heapq.heapreplace(begun, (at_ns + draws.expovariate(1 / mean_interval_ns), destination))


def check_share(share: float) -> None:
    """Refuse a share that makes no sense."""
    if not 0 < share <= MAX_SHARE:
        raise UsageError(f"a share of {share:g} is out of range", f"give more than 0 and at most {MAX_SHARE}")


class Traffic:
    """One connection from every host to every other over a rail, and what is still to be sent on each."""

    def __init__(self, hosts: tuple[Host, ...], rail: int) -> None:
        self._poll = select.epoll()
        self._senders: dict[tuple[int, int], socket.socket] = {}
        self._by_fd: dict[int, tuple[int, int]] = {}
        self._sinks: dict[int, socket.socket] = {}
        self._waiting: dict[tuple[int, int], int] = {}
        self._zeros, self._nowhere = memoryview(bytes(_CHUNK_BYTES)), bytearray(_READ_BYTES)
        listeners = {host.number: _listener(host, rail) for host in hosts}
        for source, destination in permutations(hosts, 2):
            self._connect(source, destination, listeners[destination.number])
        for listener in listeners.values():
            listener.close()

    def _connect(self, source: Host, destination: Host, listener: socket.socket) -> None:
        with inside(source.netns):
            sender = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # Whatever the machine prefers: BBR, for one, ignores losses, and keeps so short a queue overflowing.
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        sender.connect(listener.getsockname())
        sink, _ = listener.accept()
        sink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _READ_LOW_BYTES)
        for each in (sender, sink):
            each.setblocking(False)
        pair = source.number, destination.number
        self._senders[pair], self._by_fd[sender.fileno()] = sender, pair
        self._sinks[sink.fileno()] = sink
        self._waiting[pair] = 0
        self._poll.register(sink, select.EPOLLIN)

    def add(self, burst: Burst) -> None:
        """Send this as soon as the connection takes it."""
        pair = burst.source, burst.destination
        idle = self._waiting[pair] == 0
        self._waiting[pair] += burst.payload_bytes
        if idle and not self._send(pair):
            self._poll.register(self._senders[pair], select.EPOLLOUT)

    def work(self, until_ns: int) -> None:
        """Send and receive until this moment of CLOCK_MONOTONIC."""
        while (left_ns := until_ns - time.monotonic_ns()) > 0:
            for fd, _ in self._poll.poll(left_ns / 1e9):
                if fd in self._sinks:
                    self._sinks[fd].recv_into(self._nowhere, _READ_BYTES, socket.MSG_TRUNC)
                elif self._send(self._by_fd[fd]):
                    self._poll.unregister(fd)

    def _send(self, pair: tuple[int, int]) -> bool:
        """Write what the connection takes; whether nothing is left."""
        sender, left = self._senders[pair], self._waiting[pair]
        try:
            while left:
                left -= sender.send(self._zeros[: min(left, _CHUNK_BYTES)])
        except BlockingIOError:
            pass
        self._waiting[pair] = left
        return left == 0


def _listener(host: Host, rail: int) -> socket.socket:
    with inside(host.netns):
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _READ_BYTES)
    listener.bind((host.interfaces[rail - 1].address, PORT))
    listener.listen(128)
    return listener


def send(spec: Spec, rail: int, share: float, seed: int) -> None:
    assert spec.rate_bit_s is not None, "the caller has refused an unshaped lab"
    traffic = Traffic(spec.topology[0], rail_of(spec, rail).number)
    print("ready", flush=True)
    start_ns = time.monotonic_ns()
    for burst in schedule(spec.hosts, spec.rate_bit_s, share, seed):
        traffic.work(start_ns + burst.at_ns)
        traffic.add(burst)


if __name__ == "__main__":
    send(state.recall(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
