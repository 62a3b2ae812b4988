"""A user with very many UDP sockets beside an agent: `python _crowd.py OWN PEER PORT TAKEN COUNT RATE`.

OWN is the host's address, PEER the host whose reflector at PORT is asked, TAKEN a port that the agent beside holds.
A third of the sockets each: bound anywhere, connected to PEER, bound to ports on either side of TAKEN. Tries to bind
TAKEN and PORT as well, at first and every second. RATE packets a second go to PEER's port and to this host's own, half
of them STAMP requests, half of random bytes. Prints one JSON line when all sockets are there, and one at the end, which
comes with the end of standard input.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import resource
import select
import socket
import struct
import sys
import time
from collections.abc import Iterator

BATCH_S = 0.01


def opened(own: str, peer: str, port: int, taken: int, count: int) -> list[socket.socket]:
    """All the sockets."""
    made = []
    near = itertools.chain.from_iterable((taken + step, taken - step) for step in range(1, 20_000))
    for number in range(count):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.setblocking(False)
        if number % 3 == 1:
            sock.bind((own, 0))
            sock.connect((peer, port))
        elif number % 3 == 2:
            _bind_near(sock, own, near)
        else:
            sock.bind(("", 0))
        made.append(sock)
    return made


def _bind_near(sock: socket.socket, own: str, near: Iterator[int]) -> None:
    for port in near:
        if 1024 <= port < 65536:
            with contextlib.suppress(OSError):
                sock.bind((own, port))
                return


def can_take(address: str, port: int) -> bool:
    """Whether a port can be had, by whatever option."""
    for option in (0, socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as sock:
            if option:
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
            for each in (address, ""):
                with contextlib.suppress(OSError):
                    sock.bind((each, port))
                    return True
    return False


def main() -> None:
    own, peer, port, taken, count, rate = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:7])
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (count + 100, max(count + 100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    )
    sockets, chance = opened(own, peer, port, taken, count), random.Random(1)
    took = {each: can_take(own, each) for each in (taken, port)}
    print(json.dumps({"sockets": len(sockets), "took": [each for each, there in took.items() if there]}), flush=True)
    sent = refused = 0
    due, look = time.monotonic(), time.monotonic() + 1
    while not select.select([sys.stdin], [], [], max(0.0, due - time.monotonic()))[0]:
        due = max(due + BATCH_S, time.monotonic() - BATCH_S)
        for _ in range(max(1, int(rate * BATCH_S))):
            sock = sockets[sent % len(sockets)]
            data = struct.pack("!III2H28x", sent, 1, 2, 0x4001, sent & 0xFFFF) if sent % 2 else chance.randbytes(44)
            try:
                sock.sendto(data, (peer if sent % 3 else own, port)) if sent % len(sockets) % 3 != 1 else sock.send(
                    data
                )
            except OSError:
                refused += 1
            sent += 1
        if time.monotonic() > look:
            look += 1
            took = {each: took[each] or can_take(own, each) for each in took}
    print(json.dumps({"sent": sent, "refused": refused, "took": [each for each, there in took.items() if there]}))


if __name__ == "__main__":
    main()
