"""Metrics over HTTP: `/metrics` as Prometheus text or OpenMetrics, whichever is asked for.

A thread per scrape, so that a reader who hangs holds up nobody; there are at most a few, and each waits ten seconds at
most for its peer to read or write. What cannot be served at once is refused, and counted.
"""

from __future__ import annotations

import ipaddress
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from pytools.errors import CapabilityError, RefusedError, SwerveError, UsageError
from pytools.ipc.accepting import LACKING

AT_ONCE: Final = 8
_PATIENCE_S: Final = 10.0
_PAUSE_S: Final = 0.5
_FRONT: Final = b'<!doctype html><title>swerve metrics</title><p><a href="/metrics">metrics</a></p>\n'

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
Address = tuple[str, int]


def address_of(text: str, allow_remote: bool) -> Address:
    """The address and port to listen on, as written: `127.0.0.1:9762`, `[::1]:9762`.

    Raises
    ------
    UsageError
        If it is none.
    RefusedError
        If others could reach it, and nobody said that they may.
    """
    host, colon, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port)
        if not colon or not 0 <= number <= 65535 or (address.version == 6) != host.startswith("["):
            raise ValueError
    except ValueError:
        raise UsageError(
            f"--listen: {text!r} is not an address and port", "write it like 127.0.0.1:9762 or [::1]:9762"
        ) from None
    if not address.is_loopback and not allow_remote:
        raise RefusedError(
            f"--listen: {address} can be reached by other hosts, and whoever reaches it may read everything",
            "listen on 127.0.0.1, or say --allow-remote",
        )
    return str(address), number


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is no news."""


class MetricsServer(socketserver.ThreadingMixIn, WSGIServer):
    """Serves a registry from threads of its own, from when it is made until it is closed.

    Parameters
    ----------
    refused : callable
        Called for each scrape that is not served because too many are under way.
    paused : callable
        Called each time that none can be accepted for want of a descriptor.

    Raises
    ------
    SwerveError
        If the address cannot be had.
    """

    daemon_threads = True

    def __init__(
        self,
        address: Address,
        registry: CollectorRegistry,
        refused: Callable[[], None],
        paused: Callable[[], None] = lambda: None,
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._refused, self._paused = refused, paused
        self._closing = threading.Event()
        self.under_way, self._lock = 0, threading.Lock()
        try:
            super().__init__(address, _Handler)
        except PermissionError as error:
            raise CapabilityError(f"--listen: {_text(address)}: {error.strerror}", "choose a port above 1023") from None
        except OSError as error:
            raise SwerveError(
                f"--listen: {_text(address)}: {error.strerror or error}",
                "choose another port, or an address of this host (ss -ltnp says who listens)",
            ) from None
        self.set_app(_app(registry))
        self._thread = threading.Thread(target=self.serve_forever, name="swerve-metrics-http", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://{_text(self.server_address[:2])}/metrics"

    def close(self) -> None:
        """Serve no more; scrapes under way are let go."""
        self._closing.set()
        self.shutdown()
        self.server_close()

    def server_bind(self) -> None:
        """Bind, and do not ask the name service who we are."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a scrape. Where no descriptor is left it waits in the backlog, and this thread for a moment."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in LACKING:
                self._paused()
                self._closing.wait(_PAUSE_S)
            raise

    def server_close(self) -> None:
        """Close the socket; threads of readers who hang are not waited for."""
        socketserver.TCPServer.server_close(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a thread, if there is room for one."""
        if not self._begin():
            self._refused()
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread is to be had
            self._end()
            self._refused()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end()

    def _begin(self) -> bool:
        """Take one of the places; False when all are taken."""
        with self._lock:
            free = self.under_way < AT_ONCE
            self.under_way += free
        return free

    def _end(self) -> None:
        with self._lock:
            self.under_way -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A reader who hangs or goes away is no news."""


def _app(registry: CollectorRegistry) -> App:
    metrics: App = make_wsgi_app(registry)

    def app(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        match environ.get("REQUEST_METHOD"), environ.get("PATH_INFO"):
            case "GET", "/metrics":
                return metrics(environ, start)
            case "GET", "/" | "":
                start("200 OK", [("Content-Type", "text/html; charset=utf-8")])
                return [_FRONT]
            case "GET", _:
                start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
            case _:
                start("405 Method Not Allowed", [("Content-Type", "text/plain; charset=utf-8"), ("Allow", "GET")])
        return [b"there is GET /metrics\n"]

    return app


def _text(address: Any) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
