"""One rank of a job: a process that sends to another one, and answers as NCCL's RAS does; run as a program.

    RANK=0 … python tests/job_rank.py serve          the address of RAS is 127.0.0.1:28028
    RANK=2 … python tests/job_rank.py send ADDRESS PORT CONNECTIONS
    RANK=3 … python tests/job_rank.py receive ADDRESS PORT

    RANK=0 … python tests/job_rank.py step ADDRESS PORT LOCAL_PORT…
    RANK=2 … python tests/job_rank.py answer ADDRESS PORT CONNECTIONS

`step` works for some milliseconds, sends the same over each connection, from these ports, and begins again when
`answer` has had all of it from all ranks. Of `serve` each answer has more operations of rank 0, and the same of rank 1.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import socket
import socketserver
import sys
import time

BEHIND = 5
STEP_BYTES = 1 << 15  # over each connection
WORK_S = 0.005  # of a processor, for a step
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


def step(address: str, port: int, local_ports: list[int]) -> None:
    streams = []
    for local in local_ports:
        stream = socket.socket()
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stream.bind((os.environ["MASTER_ADDR"], local))
        stream.connect((address, port))
        streams.append(stream)
    chunk, ready = bytes(STEP_BYTES), selectors.DefaultSelector()
    while True:
        end = time.thread_time() + WORK_S
        while time.thread_time() < end:
            pass
        left = {}
        for stream in streams:
            stream.setblocking(False)
            ready.register(stream, selectors.EVENT_WRITE)
            left[stream] = len(chunk)
        while left:
            for key, _ in ready.select():
                stream = key.fileobj  # type: ignore[assignment]
                left[stream] -= stream.send(chunk[: left[stream]])
                if not left[stream]:
                    del left[stream]
                    ready.unregister(stream)
        for stream in streams:
            stream.setblocking(True)
            if not stream.recv(1):
                return


def answer(address: str, port: int, connections: int) -> None:
    with socket.create_server((address, port), backlog=connections) as server:
        streams = [server.accept()[0] for _ in range(connections)]
    while True:
        for stream in streams:
            left = STEP_BYTES
            while left:
                got = len(stream.recv(left))
                if not got:
                    return
                left -= got
        for stream in streams:
            stream.sendall(b".")


socketserver.TCPServer.allow_reuse_address = True

if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "serve":
        serve()
    elif what == "send":
        send(words[0], int(words[1]), int(words[2]))
    elif what == "step":
        step(words[0], int(words[1]), [int(each) for each in words[2:]])
    elif what == "answer":
        answer(words[0], int(words[1]), int(words[2]))
    else:
        receive(words[0], int(words[1]))
