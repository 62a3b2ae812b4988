"""The bus on a Unix socket: the end of a view, a controller, or any other program.

Never waits to publish; waits to read only when asked to. One thread at a time.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from pytools.closing import Closing
from pytools.errors import SwerveError
from pytools.ipc.socket_files import connect, start_hint
from pytools.ipc.wire import CHUNK_BYTES, QUEUE_BYTES, Dropped, Error, Lines, Subscribe, check_types, from_server
from pytools.signals import UNREADABLE, AnySignal, encode

_Told = TypeVar("_Told")
_ITS_OWN: Final = (b'{"type":"dropped"', b'{"type":"error"')  # of the server, not signals (wire.py)


class AgentGoneError(SwerveError):
    """The agent closed the connection."""


class Connection(Generic[_Told], Closing):
    """Reads what a running agent tells, and publishes signals.

    In a selector: register it (it has a `fileno`), and call `read` when it is readable — one event may stand
    for many signals. Otherwise iterate, or call `next`.

    Parameters
    ----------
    types : frozenset[str] | None
        Types wanted; None for all, an empty set for one that only publishes.
    coarse : bool
        Without details: short windows of a path, delays of single connections.

    Raises
    ------
    UsageError
        If a type does not exist.
    SwerveError
        If no agent runs there.
    CapabilityError
        If this user may not talk to it.
    """

    def __init__(self, path: Path, types: frozenset[str] | None = None, coarse: bool = False) -> None:
        self._path, self._coarse = path, coarse
        self._lines = Lines()
        self._ready: deque[_Told] = deque()
        self._unsent = b""
        self._gone = False
        self.dropped = 0  # signals this client was too slow for, as told by the agent
        self.dropped_urgent = 0  # of them
        self.malformed = 0  # lines that were no signal of this schema
        self.unpublished = 0  # own signals dropped because the agent did not read
        self.errors: deque[str] = deque(maxlen=16)  # what the agent complained about
        check_types(types)
        self._sock = connect(path)
        self.want(types)

    def want(self, types: frozenset[str] | None) -> None:
        """From now on these types.

        Raises
        ------
        UsageError
            If a type does not exist.
        """
        check_types(types)
        asked = Subscribe(None if types is None else sorted(types), self._coarse)
        self._send(msgspec.json.encode(asked) + b"\n")

    def fileno(self) -> int:
        return self._sock.fileno()

    def read(self) -> list[_Told]:
        """What can be had without waiting, oldest first; possibly nothing.

        Raises
        ------
        AgentGoneError
            If the agent closed the connection and everything before that was read.
        """
        self._send(b"")
        while not self._gone and self._receive():
            pass
        signals = list(self._ready)
        self._ready.clear()
        if not signals and self._gone:
            raise self._gone_error()
        return signals

    def next(self, timeout_s: float | None = None) -> _Told | None:
        """The next signal, or None when none came in time.

        Raises
        ------
        AgentGoneError
            If the agent closed the connection.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            if self._gone:
                raise self._gone_error()
            self._send(b"")
            poll = select.poll()
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            wait_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1e3
            if not poll.poll(wait_ms):
                return None
            self._receive()
        return self._ready.popleft()

    def within(self, timeout_s: float) -> Iterator[_Told]:
        """Signals as they arrive, until the time is over.

        Raises
        ------
        AgentGoneError
            If the agent closed the connection.
        """
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            signal = self.next(left_s)
            if signal is not None:
                yield signal

    def __iter__(self) -> Iterator[_Told]:
        while True:
            signal = self.next()
            assert signal is not None
            yield signal

    def publish(self, signal: AnySignal) -> None:
        """Send a signal to the agent; never waits (what the agent does not take within bounds is counted).

        Raises
        ------
        AgentGoneError
            If the agent closed the connection.
        """
        line = encode(signal) + b"\n"
        if len(self._unsent) + len(line) > QUEUE_BYTES:
            self.unpublished += 1
            line = b""
        self._send(line)
        if self._gone:
            raise self._gone_error()

    def close(self) -> None:
        """Hand over what is still to be published (at most for a second), then disconnect."""
        if self._sock.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            if self._unsent and not self._gone:
                self._sock.settimeout(1.0)
                self._sock.sendall(self._unsent)
        self._sock.close()

    def _send(self, line: bytes) -> None:
        self._unsent += line
        if not self._unsent or self._gone:
            return
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError:
            while self._receive():  # it may have said why
                pass
            self._gone = True
            return
        self._unsent = self._unsent[sent:]

    def _receive(self) -> bool:
        try:
            data = self._sock.recv(4 * CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._gone = True
            return False
        self._take_all(data, self._lines.feed(data))
        return True

    def _take_all(self, data: bytes, lines: list[bytes]) -> None:
        for line in lines:
            self._take(line)

    def _take(self, line: bytes) -> None:
        raise NotImplementedError

    def _note(self, line: bytes) -> AnySignal | None:
        """The signal in a line; None where it was word of the agent itself, or nothing that can be read."""
        try:
            message = from_server.decode(line)
        except UNREADABLE:
            self.malformed += 1
            return None
        if isinstance(message, Dropped):
            self.dropped += message.count
            self.dropped_urgent += message.urgent
            return None
        if isinstance(message, Error):
            self.errors.append(message.message)
            return None
        return message

    def _gone_error(self) -> AgentGoneError:
        what = f"the agent at {self._path} closed the connection"
        if self.errors:  # it runs
            return AgentGoneError(f"{what}; it said: {self.errors[-1]}")
        return AgentGoneError(what, start_hint(self._path))


class Client(Connection[AnySignal]):
    def _take(self, line: bytes) -> None:
        signal = self._note(line)
        if signal is not None:
            self._ready.append(signal)


class LineClient(Connection[bytes]):
    """Reads signals as the lines that the agent sends, each one JSON object: for those who only hand them on."""

    def _take_all(self, data: bytes, lines: list[bytes]) -> None:
        begun_earlier = bool(lines) and lines[0].startswith(_ITS_OWN)
        if begun_earlier or any(start in data for start in _ITS_OWN):
            super()._take_all(data, lines)
        else:
            self._ready.extend(lines)

    def _take(self, line: bytes) -> None:
        if line.startswith(_ITS_OWN):
            self._note(line)
        else:
            self._ready.append(line)
