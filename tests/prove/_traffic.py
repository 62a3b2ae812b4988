"""Traffic that asks for a route with every packet, and what became of it.

Run inside a host: `_traffic.py receive PORT` or `_traffic.py send ADDRESS PORT`. A datagram leaves each ms from
unconnected sockets, so that the kernel looks its route up anew; one connection lives all the time and carries a byte
string each 10 ms; each 50 ms another connection is made and closed. SIGTERM ends either, which then prints its counts
as one JSON object. `Traffic` is both of them. A connection that is not made at once holds nothing else up.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import itertools
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from pytools.lab import Host, Lab

PORT: Final = 7300
_SOCKETS: Final = 8
_PERIOD_S: Final = 0.001
_EVERY: Final = 10  # periods between writes to the connection that lives
_CONNECT_EVERY: Final = 50
_NO_ROUTE: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})
Starter = Callable[[Sequence[str]], "subprocess.Popen[str]"]


class Traffic:
    """Both of them.

    Parameters
    ----------
    send_from, receive_at : callable
        Start this program with these words at either end; its standard output is read.
    address : str
        Of the receiver.
    """

    def __init__(self, send_from: Starter, receive_at: Starter, address: str) -> None:
        self._receiver = _ready(receive_at([sys.executable, __file__, "receive", str(PORT)]))
        self._sender = _ready(send_from([sys.executable, __file__, "send", address, str(PORT)]))
        self._no_routes_before = no_routes(self._sender.pid)

    @classmethod
    def between(cls, lab: Lab, sender: Host, receiver: Host) -> Self:
        """From one host of a lab to another."""

        def at(host: Host) -> Starter:
            return lambda words: lab.start(host, words, stdout=subprocess.PIPE)

        return cls(at(sender), at(receiver), receiver.service)

    def stop(self) -> dict[str, Any]:
        """End both; their counts, and how many packets the sender's kernel had no route for."""
        no_route = no_routes(self._sender.pid) - self._no_routes_before
        sent, received = (json.loads(_stopped(process)) for process in (self._sender, self._receiver))
        return sent | received | {"kernel_no_route": no_route}


def no_routes(pid: int) -> int:
    """How many packets had no route so far, by the kernel's count, in the namespace of a process."""
    rows = [line.split() for line in Path(f"/proc/{pid}/net/snmp").read_text().splitlines() if line.startswith("Ip:")]
    return int(dict(zip(*rows, strict=True))["OutNoRoutes"])


def _ready(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def _stopped(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    return process.communicate(timeout=20)[0]


class _EndedError(Exception):
    pass


def send(address: str, port: int) -> dict[str, Any]:
    """Send until told to end."""
    refused: collections.Counter[str] = collections.Counter()
    sent = stream_bytes = connections = 0
    udp = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(_SOCKETS)]
    stream = socket.create_connection((address, port))
    stream.setblocking(False)
    broken = ""
    under_way: list[socket.socket] = []
    print("ready", flush=True)
    began = time.monotonic()
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))  # between two datagrams: all are counted
    for number in itertools.count():
        if ended:
            break
        time.sleep(max(0.0, began + number * _PERIOD_S - time.monotonic()))
        try:
            udp[number % _SOCKETS].sendto(number.to_bytes(8, "little"), (address, port))
            sent += 1
        except OSError as error:
            refused[f"udp {os.strerror(error.errno or 0)}"] += 1
        if number % _EVERY == 0 and not broken:
            try:
                stream_bytes += stream.send(bytes(200))
            except BlockingIOError:
                pass
            except OSError as error:
                broken = str(error)
        if number % _CONNECT_EVERY == 0:
            try:
                under_way.append(_connecting(address, port))
            except OSError as error:
                refused[f"tcp {os.strerror(error.errno or 0)}"] += 1
            for code in _ended(under_way):
                connections += code == 0
                if code:
                    refused[f"tcp {os.strerror(code)}"] += 1
    with contextlib.suppress(OSError):
        stream.close()
    words = {os.strerror(number) for number in _NO_ROUTE}
    return {
        "datagrams": sent,
        "connections": connections,
        "stream_bytes": stream_bytes,
        "stream_broken": broken,
        "no_route": sum(count for word, count in refused.items() if word.partition(" ")[2] in words),
        "other_errors": {word: count for word, count in refused.items() if word.partition(" ")[2] not in words},
    }


def _connecting(address: str, port: int) -> socket.socket:
    """Begin to make a connection."""
    made = socket.socket()
    made.setblocking(False)
    code = made.connect_ex((address, port))
    if code not in (0, errno.EINPROGRESS):
        made.close()
        raise OSError(code, os.strerror(code))
    return made


def _ended(under_way: list[socket.socket]) -> list[int]:
    """Close those of these connections that are made, or will not be; the error of each, 0 for none."""
    poll = select.poll()
    for each in under_way:
        poll.register(each, select.POLLOUT)
    ready = {fd for fd, _ in poll.poll(0)}
    done = [each for each in under_way if each.fileno() in ready]
    codes = [each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) for each in done]
    for each in done:
        under_way.remove(each)
        each.close()
    return codes


def receive(port: int) -> dict[str, Any]:
    """Receive until told to end."""
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE: a receiver that gets no processor loses nothing
    udp.bind(("0.0.0.0", port))
    listener = socket.create_server(("0.0.0.0", port), backlog=256)
    datagrams = 0
    with selectors.DefaultSelector() as selector:
        selector.register(udp, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        print("ready", flush=True)
        with contextlib.suppress(_EndedError):
            while True:
                for key, _ in selector.select():
                    if key.fileobj is udp:
                        udp.recv(64)
                        datagrams += 1
                    elif key.fileobj is listener:
                        selector.register(listener.accept()[0], selectors.EVENT_READ)
                    else:
                        _drain(selector, key.fileobj)
    udp.setblocking(False)
    time.sleep(0.2)  # what is under way
    with contextlib.suppress(BlockingIOError):
        while udp.recv(64):
            datagrams += 1
    return {"datagrams_received": datagrams}


def _drain(selector: selectors.BaseSelector, stream: Any) -> None:
    try:
        if stream.recv(1 << 16):
            return
    except ConnectionError:
        pass
    selector.unregister(stream)
    stream.close()


def main() -> int:
    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _EndedError

    signal.signal(signal.SIGTERM, end)
    done = send(sys.argv[2], int(sys.argv[3])) if sys.argv[1] == "send" else receive(int(sys.argv[2]))
    print(json.dumps(done), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
