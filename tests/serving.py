"""A stand-in for the agent: a bus, its server on a real socket, and a loop that turns when the test says so."""

from __future__ import annotations

import selectors
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import samples
from support import wait_until

from pytools.ipc.bus import Bus, Client
from pytools.ipc.client import LineClient
from pytools.ipc.server import ReadServer, Server

_Made = TypeVar("_Made")


class Served:
    """A bus, its server, and the agent's loop around them."""

    def __init__(self, path: Path, queue_bytes: int = 1 << 16, *, readers: int | None = None) -> None:
        self.path, self.bus = path, Bus()
        self.server = (
            Server(self.bus, path, queue_bytes, long_window_ns=samples.SECOND_NS)
            if readers is None
            else ReadServer(self.bus, path, readers, long_window_ns=samples.SECOND_NS)
        )
        self.selector = selectors.DefaultSelector()
        self.server.register(self.selector)

    def turn(self, wait_s: float = 0.0) -> None:
        for key, mask in self.selector.select(wait_s):
            key.data(mask)

    def until(self, condition: Callable[[], object], what: str) -> None:
        def turned() -> bool:
            self.turn(0.01)
            return bool(condition())

        wait_until(turned, 10, what, every_s=0)

    def client(self, types: frozenset[str] | None = None, coarse: bool = False) -> Client:
        return self._connected(lambda: Client(self.path, types, coarse), types)

    def lines(self, types: frozenset[str] | None = None) -> LineClient:
        return self._connected(lambda: LineClient(self.path, types), types)

    def _connected(self, connect: Callable[[], _Made], types: frozenset[str] | None) -> _Made:
        before = self.server.clients
        client = connect()
        self.until(lambda: self.server.clients > before, "the client is connected")
        wanted = sorted(types) if types else ["act"]
        if types is None or types:
            self.until(lambda: self.bus.wanted(wanted[0]), "its subscription has arrived")
        return client

    def close(self) -> None:
        self.server.close()
        self.selector.close()
