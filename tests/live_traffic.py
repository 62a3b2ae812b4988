"""Traffic between two namespaces that goes on while routes change, and what became of each packet of it.

Imported as `live_traffic`. Datagrams leave from several sockets, each at a constant rate, and are looked up anew, one
by one; connections stay open and echo what they carry. Threads of their own; CLOCK_MONOTONIC seconds.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from collections import Counter

import support

from pytools.kernel.netns import inside

PORT = 7300
SOCKETS = 6  # of each kind and family: more than there are hops
_EVERY_S = 0.01 * min(10, support.slow_factor())
_RCVBUFFORCE, _BINDTODEVICE = 33, 25
_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}


class Traffic:
    """Datagrams and connections of both families.

    Parameters
    ----------
    sender, receiver : str
        Namespaces.
    sources, peers : dict
        Addresses by family.
    device : str
        What the sender's sockets are bound to, as in a VRF; empty for nothing.
    """

    def __init__(
        self, sender: str, receiver: str, sources: dict[int, str], peers: dict[int, str], device: str = ""
    ) -> None:
        self.errors: Counter[str] = Counter()  # what the kernel said of packets that it did not take
        self.reset: list[str] = []  # connections that ended
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.echoed = dict.fromkeys([(family, n) for family in peers for n in range(SOCKETS)], 0)
        self._peers, self._end = peers, threading.Event()
        self._stack = contextlib.ExitStack()
        with inside(receiver):
            self._server = self._stack.enter_context(selectors.DefaultSelector())
            for family, address in peers.items():
                kind = _FAMILIES[family]
                datagrams = self._stack.enter_context(socket.socket(kind, socket.SOCK_DGRAM))
                datagrams.setsockopt(socket.SOL_SOCKET, _RCVBUFFORCE, 16 << 20)
                datagrams.bind((address, PORT))
                datagrams.setblocking(False)
                listener = self._stack.enter_context(socket.create_server((address, PORT), family=kind))
                listener.setblocking(False)
                self._server.register(datagrams, selectors.EVENT_READ, ("datagrams", family))
                self._server.register(listener, selectors.EVENT_READ, ("listener", family))
        self._receiving = threading.Thread(target=self._serve, daemon=True)
        self._receiving.start()
        with inside(sender):
            self._datagrams = {
                (family, n): self._socket(family, socket.SOCK_DGRAM, sources[family], device)
                for family in peers
                for n in range(SOCKETS)
            }
            self._streams = {
                (family, n): self._socket(family, socket.SOCK_STREAM, sources[family], device)
                for family in peers
                for n in range(SOCKETS)
            }
            for (family, _), stream in self._streams.items():
                stream.settimeout(20 * support.slow_factor())
                stream.connect((peers[family], PORT))
                stream.setblocking(False)
        self._sending = threading.Thread(target=self._send, daemon=True)
        self._sending.start()

    def _socket(self, family: int, kind: int, source: str, device: str) -> socket.socket:
        made = self._stack.enter_context(socket.socket(_FAMILIES[family], kind))
        if device:
            made.setsockopt(socket.SOL_SOCKET, _BINDTODEVICE, device.encode())
        made.bind((source, 0))
        made.setblocking(False)
        return made

    def close(self) -> None:
        """End the threads, then the sockets."""
        self._end.set()
        self._sending.join()
        self._receiving.join()
        self._stack.close()

    # ---- threads ----

    def _send(self) -> None:
        began = time.monotonic()
        for number in range(1 << 62):
            if self._end.wait(max(0.0, began + number * _EVERY_S - time.monotonic())):
                return
            for (family, _), sender in self._datagrams.items():
                try:
                    sender.sendto(b"x", (self._peers[family], PORT))
                    self.sent[family] += 1
                except BlockingIOError:  # its neighbour is asked for just now
                    continue
                except OSError as error:
                    self.errors[f"IPv{family} {errno.errorcode.get(error.errno or 0, error)}"] += 1
            for name, stream in list(self._streams.items()):
                with contextlib.suppress(BlockingIOError):
                    try:
                        if number % 3 == 0:
                            stream.send(b"y")
                        self.echoed[name] += len(stream.recv(1 << 12))
                    except OSError as error:
                        if isinstance(error, BlockingIOError):
                            raise
                        self.reset.append(f"IPv{name[0]}: {error}")
                        del self._streams[name]

    def _serve(self) -> None:
        while not self._end.is_set():
            for key, _ in self._server.select(0.05):
                what, family = key.data
                with contextlib.suppress(BlockingIOError, ConnectionError):
                    if what == "datagrams":
                        for _ in range(1000):
                            key.fileobj.recv(16)  # type: ignore[union-attr]
                            self.received[family] += 1
                    elif what == "listener":
                        stream = self._stack.enter_context(key.fileobj.accept()[0])  # type: ignore[union-attr]
                        stream.setblocking(False)
                        self._server.register(stream, selectors.EVENT_READ, ("stream", family))
                    elif data := key.fileobj.recv(1 << 12):  # type: ignore[union-attr]
                        key.fileobj.send(data)  # type: ignore[union-attr]
                    else:
                        self._server.unregister(key.fileobj)

    # ---- what became of it ----

    @property
    def lost(self) -> dict[int, int]:
        """Datagrams under way or lost, by family."""
        return {family: self.sent[family] - self.received[family] for family in self._peers}

    def flows(self) -> None:
        """Wait until every connection has carried something more."""
        before = dict(self.echoed)
        support.wait_until(
            lambda: self.reset or all(self.echoed[name] > count for name, count in before.items()),
            20,
            "every live connection goes on",
        )
        assert self.reset == [] and len(self._streams) == len(before), "a live connection ended"

    def unharmed(self, lost: int = 0) -> None:
        """Every connection goes on, no packet was without a route, and no more than these were lost so far."""
        self.flows()
        assert self.errors == {}, "a packet had no route"
        support.wait_until(lambda: all(count <= lost for count in self.lost.values()), 20, "no datagram is missing")
