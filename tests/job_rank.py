"""One rank of a job: a process that sends to another one, and answers as NCCL's RAS does; run as a program.

    RANK=0 … python tests/job_rank.py serve          the address of RAS is 127.0.0.1:28028
    RANK=2 … python tests/job_rank.py send ADDRESS PORT CONNECTIONS
    RANK=3 … python tests/job_rank.py receive ADDRESS PORT

Of `serve` each answer has more operations of rank 0, and the same of rank 1.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import socketserver
import sys
import time

BEHIND = 5
_asked = itertools.count(1)


def report() -> str:
    """All ranks of the job, of which rank 1 has stopped."""
    ahead = next(_asked) * 10 + BEHIND
    ranks = [
        {"rank": rank, "host": "10.1.1.1", "pid": pid, "nvml_dev": rank, "collective_counts": {"AllReduce": count}}
        for rank, pid, count in ((0, os.getpid(), ahead), (1, 1, BEHIND))
    ]
    return json.dumps({"communicators": [{"hash": "0xa", "size": 2, "ranks": ranks, "missing_ranks": []}]}, indent=1)


class Ras(socketserver.StreamRequestHandler):
    """A client of RAS."""

    def handle(self) -> None:
        for line in self.rfile:
            if line == b"verbose status\n":
                self.wfile.write(report().encode())
                return
            self.wfile.write(b"SERVER PROTOCOL 2\n" if line.startswith(b"client") else b"OK\n")


def serve() -> None:
    with socketserver.TCPServer(("127.0.0.1", 28028), Ras) as server:
        server.serve_forever()


def send(address: str, port: int, connections: int) -> None:
    streams = [socket.create_connection((address, port)) for _ in range(connections)]
    while True:
        for stream in streams:
            stream.sendall(bytes(20_000))
        time.sleep(0.02)


def receive(address: str, port: int) -> None:
    class Sink(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while self.request.recv(1 << 16):
                pass

    with socketserver.ThreadingTCPServer((address, port), Sink) as server:
        server.serve_forever()


socketserver.TCPServer.allow_reuse_address = True

if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "serve":
        serve()
    elif what == "send":
        send(words[0], int(words[1]), int(words[2]))
    else:
        receive(words[0], int(words[1]))
