"""What tests and benchmarks of local ports share: connections of a lab host, counted by the hidden way that each takes.

SYNs are counted where they enter an inner router, so that those that a dead way swallows count, too.
What learns the way of a port dies there: its TTL tells it from a connection.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from pytools.kernel import socket_filter
from pytools.kernel.netns import inside
from pytools.lab.topology import Host, Rail

SERVICE = 5901
_ETH_P_IP, _TCP, _SYN, _ACK = 0x0800, 6, 0x02, 0x10
_LOAD_BYTE = 0x30
_ONLY_TCP = (
    (_LOAD_BYTE, 0, 0, 9),  # the protocol of the IP header
    (socket_filter.EQUAL, 0, 1, _TCP),
    (socket_filter.RETURN, 0, 0, socket_filter.ALL),
    (socket_filter.RETURN, 0, 0, 0),
)
_LEARNING_TTL = 8  # a connection's is 63 there
_LISTEN_BACKLOG = 512


class Ways:
    """Which way the connections of a host to a port took.

    Parameters
    ----------
    rail : Rail
        With inner routers.
    host : Host
        Whose connections are counted.
    """

    def __init__(self, rail: Rail, host: Host, port: int = SERVICE) -> None:
        self._port = port
        self._sockets: dict[int, socket.socket] = {}
        for way in rail.inner:
            with inside(way.netns):
                heard = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
            socket_filter.attach(heard, _ONLY_TCP)
            heard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            heard.bind((way.ports[host.number - 1].name, _ETH_P_IP))
            heard.setblocking(False)
            self._sockets[way.number] = heard

    def close(self) -> None:
        """Count no more."""
        for heard in self._sockets.values():
            heard.close()

    def __enter__(self) -> Ways:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def taken(self, destination: str = "") -> Counter[int]:
        """Connections by way since this was last asked, to one address or all."""
        found: dict[tuple[str, int, int], int] = {}
        for way, heard in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = heard.recv(128)
                    to, header = socket.inet_ntoa(packet[16:20]), (packet[0] & 15) * 4
                    source, port, sequence = struct.unpack_from(">HHI", packet, header)
                    fits = port == self._port and packet[header + 13] & (_SYN | _ACK) == _SYN
                    if fits and packet[8] > _LEARNING_TTL and destination in ("", to):
                        found[to, source, sequence] = way  # a SYN that is sent again is the same connection
        return Counter(found.values())


@contextlib.contextmanager
def serving(host: Host, addresses: Sequence[str], port: int = SERVICE) -> Iterator[None]:
    """Accept connections, and close each as soon as its client has."""
    with inside(host.netns):
        listeners = [socket.create_server((address, port), backlog=_LISTEN_BACKLOG) for address in addresses]
    end, stop = socket.socketpair()
    open_ = {each.fileno(): each for each in [*listeners, end]}

    def run() -> None:
        poll = select.poll()
        for number in open_:
            poll.register(number, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == end.fileno():
                    return
                if open_[number] in listeners:
                    client, _ = open_[number].accept()
                    open_[client.fileno()] = client
                    poll.register(client.fileno(), select.POLLIN)
                else:
                    poll.unregister(number)
                    open_.pop(number).close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.send(b"x")
        thread.join()
        for each in [*open_.values(), stop]:
            each.close()


def connect(host: Host, address: str, count: int, at_once: int = 20, wait_s: float = 1.0, port: int = SERVICE) -> int:
    """Open so many connections, some at a time, and reset each; how many were answered."""
    answered = 0
    with inside(host.netns):
        for first in range(0, count, at_once):
            with contextlib.ExitStack() as stack:
                poll = select.poll()
                for _ in range(min(at_once, count - first)):
                    client = stack.enter_context(socket.socket())
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    client.setblocking(False)
                    client.connect_ex((address, port))
                    poll.register(client, select.POLLOUT)
                waiting = min(at_once, count - first)
                while waiting and (ready := poll.poll(wait_s * 1000)):
                    for number, events in ready:
                        poll.unregister(number)
                        waiting -= 1
                        answered += not events & (select.POLLERR | select.POLLHUP)
    return answered
