"""Whoever accepts connections goes on when the process has no descriptor left: counted, not spinning, served later."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import support
from prometheus_client import CollectorRegistry
from support import no_descriptor, wait_until

from pytools.errors import SwerveError
from pytools.ipc import accepting
from pytools.ipc.bus import Bus
from pytools.ipc.map_lending import Lender, Loan
from pytools.ipc.server import ReadServer, Server
from pytools.views.metrics.server import MetricsServer
from steering.control import requests
from steering.control.server import ControlServer


def _status(_request: object, _asker: object) -> requests.Reply:
    return requests.Reply(lines=["done"])


def _drops(name: str) -> Callable[[Any], int]:
    return lambda server: int(server.drops()[name])


SERVERS: dict[str, tuple[Callable[[Path], Any], int, Callable[[Any], int]]] = {
    "bus": (lambda path: Server(Bus(), path), socket.SOCK_STREAM, _drops("bus_accept_paused")),
    "readers": (lambda path: ReadServer(Bus(), path, None), socket.SOCK_STREAM, _drops("bus_readers_accept_paused")),
    "maps": (lambda path: Lender(path, {"one": 0}), socket.SOCK_STREAM, _drops("maps_accept_paused")),
    "control": (lambda path: ControlServer(path, _status), socket.SOCK_SEQPACKET, lambda server: int(server.paused)),
}


@pytest.mark.parametrize("name", SERVERS)
def test_without_descriptors_it_waits_and_serves_later(name: str, tmp_path: Path) -> None:
    make, kind, paused = SERVERS[name]
    path = tmp_path / "run" / "one.sock"
    path.parent.mkdir(mode=0o700)
    server = make(path)
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX, kind) as client:
        server.register(selector)
        registered = len(selector.get_map())
        with no_descriptor():
            client.connect(str(path))
            events = 0
            while found := selector.select(0):  # a spinning one never ends
                events += 1
                assert events < 10, "it spins"
                for key, mask in found:
                    key.data(mask)
            assert paused(server) == 1
        assert len(selector.get_map()) == registered - 1
        began = accepting.time.monotonic_ns()
        server.tick(began)
        assert len(selector.get_map()) == registered - 1, "not before the pause is over"
        assert server.tick(began + accepting.PAUSE_NS) <= began + 2 * accepting.PAUSE_NS
        for key, mask in selector.select(20):
            key.data(mask)
        assert len(selector.get_map()) == registered + 1, "the client that waited is served"
        server.close()


def test_closing_while_it_pauses_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run" / "one.sock"
    server = Server(Bus(), path)
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        server.register(selector)
        with no_descriptor():
            client.connect(str(path))
            for key, mask in selector.select(20):
                key.data(mask)
        server.close()
        assert not selector.get_map() and not path.exists()


def test_scrapes_wait_for_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, calls = [], []
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = ("127.0.0.1", free.getsockname()[1])
    accept = socket.socket.accept
    monkeypatch.setattr(socket.socket, "accept", lambda self: (calls.append(threading.get_ident()), accept(self))[1])
    server = MetricsServer(address, CollectorRegistry(), lambda: None, lambda: counts.append(1))
    try:
        with socket.socket() as client:
            with no_descriptor():
                client.connect(address)
                wait_until(lambda: len(counts) >= 2, 20, "it has paused twice")
                assert len(calls) == len(counts) <= 3, "each attempt is followed by a pause"
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            client.settimeout(20)
            assert client.recv(100).startswith(b"HTTP/1.0 200 OK")
    finally:
        server.close()


# ---- maps that are lent over a socket ----


class Borrower:
    """The other end, which notes what happens to it."""

    def __init__(self, path: Path, selector: selectors.BaseSelector) -> None:
        self.maps: dict[str, int] = {}
        self.over = 0
        self.loan = Loan(path, selector, self.maps.update, self._ended)

    def _ended(self) -> None:
        self.over += 1


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def turn(selector: selectors.BaseSelector) -> bool:
    for key, mask in selector.select(0):
        key.data(mask)
    return True


def test_what_is_lent_is_the_same_file_by_its_name(tmp_path: Path, selector: selectors.BaseSelector) -> None:
    read, write = os.pipe()
    lender = Lender(tmp_path / "run" / "maps.sock", {"one": read, "other": write})
    lender.register(selector)
    borrower = Borrower(tmp_path / "run" / "maps.sock", selector)
    support.wait_until(lambda: turn(selector) and borrower.maps, 20, "the maps are lent")
    assert set(borrower.maps) == {"one", "other"}
    os.write(borrower.maps["other"], b"x")
    assert os.read(read, 1) == b"x"
    lender.close()
    support.wait_until(lambda: turn(selector) and borrower.over, 20, "the loan is over")
    assert not (tmp_path / "run" / "maps.sock").exists()
    for fd in (read, write, *borrower.maps.values()):
        os.close(fd)


def test_a_borrower_that_goes_makes_room(tmp_path: Path, selector: selectors.BaseSelector) -> None:
    read, write = os.pipe()
    lender = Lender(tmp_path / "run" / "maps.sock", {"one": read})
    lender.register(selector)
    for _ in range(20):
        borrower = Borrower(tmp_path / "run" / "maps.sock", selector)
        support.wait_until(lambda b=borrower: turn(selector) and b.maps, 20, "the map is lent")  # type: ignore[misc]
        os.close(borrower.maps["one"])
        borrower.loan.close()
        support.wait_until(lambda: turn(selector) and not lender.borrowers, 20, "the lender has noticed")
    crowd = [Borrower(tmp_path / "run" / "maps.sock", selector) for _ in range(9)]
    support.wait_until(
        lambda: turn(selector) and sum(bool(b.maps) + b.over for b in crowd) == 9, 5, "all have an answer"
    )
    assert [bool(each.maps) for each in crowd].count(True) == 8
    assert lender.drops() == {"maps_not_lent": 1, "maps_accept_paused": 0}
    for each in crowd:
        each.loan.close()
        for fd in each.maps.values():
            os.close(fd)
    lender.close()
    os.close(read)
    os.close(write)


def test_without_a_lender_it_is_said_at_once(tmp_path: Path, selector: selectors.BaseSelector) -> None:
    with pytest.raises(SwerveError, match="No such file"):
        Borrower(tmp_path / "maps.sock", selector)
