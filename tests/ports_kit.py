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
from collections.abc import Callable, Iterator, Sequence

from pytools.closing import Closing
from pytools.kernel import socket_filter
from pytools.kernel.netns import inside
from pytools.lab.topology import Host, Rail

SERVICE = 5901
_ETH_P_IP, _TCP, _SYN, _ACK = 0x0800, 6, 0x02, 0x10
_LOAD_BYTE = 0x30
_ONLY_TCP, _ONLY_TCP6 = (
    (
        (_LOAD_BYTE, 0, 0, protocol),  # where the header has it
        (socket_filter.EQUAL, 0, 1, _TCP),
        (socket_filter.RETURN, 0, 0, socket_filter.ALL),
        (socket_filter.RETURN, 0, 0, 0),
    )
    for protocol in (9, 6)
)
_ETH_P_IPV6, _IPV6_BYTES, _IPV4_BYTES, _SO_TIMESTAMPNS = 0x86DD, 40, 20, 35
_PAUSE_S = 0.02  # between two writes of a live connection
_LEARNING_TTL = 8  # a connection's is 63 there
_LISTEN_BACKLOG = 512


class _Sockets(Closing):
    """A packet socket at each inner router of a rail, where TCP packets of a host enter it."""

    def __init__(self, rail: Rail, host: Host, family: int) -> None:
        self._sockets: dict[int, socket.socket] = {}
        for way in rail.inner:
            with inside(way.netns):
                heard = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM)
            socket_filter.attach(heard, _ONLY_TCP6 if family == 6 else _ONLY_TCP)
            heard.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            heard.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
            heard.bind((way.ports[host.number - 1].name, _ETH_P_IPV6 if family == 6 else _ETH_P_IP))
            heard.setblocking(False)
            self._sockets[way.number] = heard

    def close(self) -> None:
        """Look no more."""
        for heard in self._sockets.values():
            heard.close()


class Ways(_Sockets):
    """Which way the connections of a host to a port took.

    Parameters
    ----------
    rail : Rail
        With inner routers.
    host : Host
        Whose connections are counted.
    """

    def __init__(self, rail: Rail, host: Host, port: int = SERVICE) -> None:
        super().__init__(rail, host, 4)
        self._port = port

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


class LiveWays(_Sockets):
    """Which way each TCP connection of a host over one family takes, by its packets where they enter an inner router.

    Parameters
    ----------
    rail : Rail
        With inner routers.
    host : Host
        Whose connections are looked at.
    """

    def __init__(self, rail: Rail, host: Host, port: int = SERVICE, family: int = 6) -> None:
        super().__init__(rail, host, family)
        self._port, self._family = port, family

    def packets(self) -> Iterator[tuple[float, int, int]]:
        """Those since this was last asked: when (CLOCK_REALTIME, s), by which way, of which local port."""
        for way, heard in self._sockets.items():
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet, ancillary, _, _ = heard.recvmsg(64, 64)
                    header, left = (_IPV6_BYTES, packet[7]) if self._family == 6 else (_IPV4_BYTES, packet[8])
                    source, port = struct.unpack_from(">HH", packet, header)
                    if port == self._port and left > _LEARNING_TTL:
                        seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
                        yield seconds + nanoseconds / 1e9, way, source

    def taken(self) -> dict[int, set[int]]:
        """The ways that each local port has taken since this was last asked."""
        found: dict[int, set[int]] = {}
        for _, way, source in self.packets():
            found.setdefault(source, set()).add(way)
        return found


class Live:
    """Connections that send a little all the time; a thread of their own writes and reads them.

    Parameters
    ----------
    client, server : Host
        Between which they are.
    address : str
        Of the server.
    count : int
        So many.
    protocol : int
        Of the sockets.
    """

    def __init__(
        self,
        client: Host,
        server: Host,
        address: str,
        count: int,
        port: int = SERVICE,
        protocol: int = socket.IPPROTO_TCP,
    ) -> None:
        self._ended, self._end = socket.socketpair()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with inside(server.netns):
            self._listener = socket.socket(family, socket.SOCK_STREAM, protocol)
        self._listener.bind((address, port))
        self._listener.listen(_LISTEN_BACKLOG)
        self._clients: list[socket.socket] = []
        self._servers: list[socket.socket] = []
        self.sent = 0  # rounds of writes
        self.failed = 0  # writes or reads that met a reset
        with inside(client.netns):
            for _ in range(count):
                self._clients.append(socket.socket(family, socket.SOCK_STREAM, protocol))
                self._clients[-1].connect((address, port))
                self._servers.append(self._listener.accept()[0])
        for each in (*self._clients, *self._servers):
            each.setblocking(False)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.ports = frozenset(each.getsockname()[1] for each in self._clients)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not select.select([self._ended], [], [], _PAUSE_S)[0]:
            for each in self._clients:
                self._try(lambda each=each: each.send(bytes(200)))  # type: ignore[misc]
            self.sent += 1
            for each in self._servers:
                self._try(lambda each=each: each.recv(1 << 16))  # type: ignore[misc]

    def _try(self, call: Callable[[], object]) -> None:
        try:
            call()
        except BlockingIOError:
            pass
        except OSError:
            self.failed += 1

    def retransmitted(self) -> int:
        """Segments, of all connections since they began."""
        infos = [each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104) for each in self._clients]
        return sum(int(struct.unpack_from("=I", info, 100)[0]) for info in infos)

    def close(self) -> None:
        """End all of them."""
        self._end.send(b"x")
        self._thread.join()
        for each in (self._end, self._ended, self._listener, *self._clients, *self._servers):
            each.close()

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
