"""The bus on a Unix socket: the agent's end, for those who may publish and for those who only read.

Non-blocking; runs in the agent's one thread, on its selector. Each client has two queues bounded in bytes, one for
urgent signals, which overtake the others once the client is behind. Signals that do not fit are dropped for that
client, counted, and the client is told how many it missed.
"""

from __future__ import annotations

import contextlib
import grp
import os
import selectors
import socket
from pathlib import Path
from typing import Final

import msgspec

from pytools.closing import Closing
from pytools.errors import UsageError
from pytools.ipc.bus import Bus, Published
from pytools.ipc.outbox import Outbox
from pytools.ipc.socket_files import Listener, in_group, peer
from pytools.ipc.wire import (
    CHUNK_BYTES,
    LINE_BYTES,
    QUEUE_BYTES,
    URGENT,
    Dropped,
    Error,
    Lines,
    Subscribe,
    check_types,
    from_client,
    is_detail,
    is_pressing,
)
from pytools.signals import UNREADABLE, PathDelay

CLIENTS: Final = 64
_HELD_BYTES: Final = 1 << 20
READERS: Final = 16  # at once
READERS_GROUP: Final = "swerve-metrics"
_READERS_LINES: Final = 64  # that one may send
_SO_SNDBUFFORCE: Final = 32  # beyond net.core.wmem_max: whoever attaches programs has CAP_NET_ADMIN


class _Connection:
    def __init__(self, server: Server, sock: socket.socket) -> None:
        self._server = server
        self.sock = sock
        self._lines = Lines()
        self._out = Outbox(server.queue_bytes, CHUNK_BYTES)
        self._missed = self._missed_urgent = 0  # dropped and not yet told; urgent ones are in both
        self._lines_read = 0
        self._had_long = False  # whether a path's long window was offered
        self._writing = False
        self._closed = False

    def offer(self, published: Published) -> None:
        line, urgent = published.line(), published.tag in URGENT
        # Once it has missed something a client is served again when half its queue is empty: a few long gaps,
        # told once each, are easier to live with than a sieve.
        if self._missed and not urgent and not self._resumes():
            self._miss(urgent)
            return
        if not self._out.fits(line, urgent):
            self.flush()  # a burst within one turn of the loop: the socket may still take it
            if not self._out.fits(line, urgent):
                self._miss(urgent)
                return
        if self._missed and self._resumes():
            self._tell_missed()
        self._enqueue(line, urgent)
        if urgent and is_pressing(published.signal):
            self.flush(urgent_only=self._out.behind)

    def offer_coarse(self, published: Published) -> None:
        """The same, but for details; until the first long window short ones pass, which are there sooner."""
        signal = published.signal
        if is_detail(signal, self._server.long_window_ns):
            if self._had_long or not isinstance(signal, PathDelay):
                return
        elif isinstance(signal, PathDelay):
            self._had_long = True
        self.offer(published)

    def on_event(self, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            self._read()
        if mask & selectors.EVENT_WRITE:
            self.flush()

    def flush(self, urgent_only: bool = False) -> None:
        try:
            while not self._closed and (chunk := self._out.take(urgent_only)):
                sent = 0
                try:
                    sent = self.sock.send(chunk)
                finally:
                    self._out.sent(sent)
                if self._missed and self._resumes():
                    self._tell_missed()
        except BlockingIOError:
            return
        except OSError:
            self.close()
            return
        if not self._out:
            self._want_write(False)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._server._leave(self)
        self.sock.close()

    @property
    def blocked(self) -> bool:
        return self._out.blocked

    def _miss(self, urgent: bool) -> None:
        self._missed += 1
        self._missed_urgent += urgent
        self._server._dropped += 1
        self._server._dropped_urgent += urgent
        if not self._out:  # one signal larger than the whole queue: nothing will drain and tell
            self._tell_missed()

    def _resumes(self) -> bool:
        return self._out.bulk_bytes <= self._server.queue_bytes // 2

    def _tell_missed(self) -> None:
        told = Dropped(self._missed, self._missed_urgent)
        self._missed = self._missed_urgent = 0
        self._enqueue(msgspec.json.encode(told) + b"\n")

    def _enqueue(self, line: bytes, urgent: bool = False) -> None:
        self._out.put(line, urgent)
        self._want_write(True)

    def _want_write(self, wanted: bool) -> None:
        if wanted == self._writing or self._closed:
            return
        self._writing = wanted
        self._server._watch(self, wanted)

    def _read(self) -> None:
        try:
            data = self.sock.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        before = self._lines.oversized
        for line in self._lines.feed(data):
            self._take(line)
            if self._closed:
                return
        if self._lines.oversized > before:
            self._reject(f"a line is longer than {LINE_BYTES} bytes")

    def _take(self, line: bytes) -> None:
        self._lines_read += 1
        if self._lines_read > self._server.most_lines:
            self._reject(f"more than {self._server.most_lines} lines were sent over a socket for reading")
            self._show_out()
            return
        try:
            message = from_client.decode(line)
            if isinstance(message, Subscribe):
                types = None if message.types is None else frozenset(message.types)
                check_types(types)
                self._server._bus.remove(self)
                offer = self.offer_coarse if message.coarse else self.offer
                self._server._bus.add(self, types, offer, details=not message.coarse)
                return
        except (*UNREADABLE, UsageError) as error:
            self._reject(str(error))
            return
        if not self._server.publishes:
            self._server._not_published += 1
            self._tell("nothing is published here: this socket is for reading only")
            self._show_out()
            return
        self._server._bus.publish(message)

    def _reject(self, message: str) -> None:
        self._server._malformed += 1
        self._tell(message)

    def _show_out(self) -> None:
        """Close the connection; what it was told goes first."""
        self.flush()
        self.close()

    def _tell(self, message: str) -> None:
        line = msgspec.json.encode(Error(message)) + b"\n"
        if self._out.fits(line, urgent=False):
            self._enqueue(line)


class Server(Closing):
    """Serves a bus on a Unix socket (0600) to root and to the user the agent runs as.

    Parameters
    ----------
    bus : Bus
        Where signals come from, and where clients' signals go.
    path : Path
        The socket; its directory is made, 0700, when it is missing.
    queue_bytes : int
        How much one client may leave unread before signals are dropped for it.
    long_window_ns : int
        Shorter windows of a path are details.

    Raises
    ------
    SwerveError
        As `Listener` does.
    """

    publishes = True
    most_lines = 1 << 62
    _mode, _counted = 0o600, "bus_"

    def __init__(self, bus: Bus, path: Path, queue_bytes: int = QUEUE_BYTES, long_window_ns: int = 0) -> None:
        self._bus = bus
        self.queue_bytes, self.long_window_ns = queue_bytes, long_window_ns
        self._dropped = self._dropped_urgent = 0  # urgent ones are in both
        self._malformed = 0
        self._refused = self._not_published = 0
        self.connections: set[_Connection] = set()
        self._unsent: set[_Connection] = set()  # for which something waits
        self._selector: selectors.BaseSelector | None = None
        self._listener = Listener(path, self._admit, self._mode)

    def register(self, selector: selectors.BaseSelector) -> None:
        """Serve from this selector; `key.data` is a callable taking the event mask."""
        self._selector = selector
        self._listener.register(selector)

    def tick(self, now_ns: int) -> int:
        """Accept again after a pause; all other work hangs on the selector."""
        return self._listener.tick(now_ns)

    def flush(self) -> None:
        """Write what the sockets take now, instead of being woken for it; of those that are full the selector tells."""
        for connection in [each for each in self._unsent if not each.blocked]:
            connection.flush()

    def drops(self) -> dict[str, int]:
        """Signals dropped for slow clients, and urgent ones of them; what was refused; pauses of accepting."""
        counts = {
            "slow": self._dropped,
            "slow_urgent": self._dropped_urgent,
            "malformed": self._malformed,
            "refused": self._refused,
            "accept_paused": self._listener.paused,
        }
        return {f"{self._counted}{name}": count for name, count in counts.items()}

    @property
    def clients(self) -> int:
        return len(self.connections)

    @property
    def unsent(self) -> int:
        """For how many of them something waits to be written."""
        return len(self._unsent)

    def close(self) -> None:
        """Give each client what it takes at once, then let all go and remove the socket."""
        for connection in list(self.connections):
            connection.flush()
            connection.close()
        self._listener.close()

    def _admit(self, sock: socket.socket) -> None:
        if why := self._objection(sock):
            self._refused += 1
            with contextlib.suppress(OSError):
                sock.send(msgspec.json.encode(Error(why)) + b"\n")
            sock.close()
            return
        if self.queue_bytes >= _HELD_BYTES:
            _enlarge(sock)
        connection = _Connection(self, sock)
        self.connections.add(connection)
        assert self._selector is not None
        self._selector.register(sock, selectors.EVENT_READ, connection.on_event)

    def _objection(self, sock: socket.socket) -> str:
        """Why a client is shown out; empty when it may stay."""
        if peer(sock)[1] not in (0, os.geteuid()):
            return f"only root and user {os.geteuid()} may connect"
        return self._full(CLIENTS)

    def _full(self, most: int) -> str:
        if len(self.connections) < most:
            return ""
        return f"{most} clients are connected already; end one of them (ss -xp names their processes)"

    def _watch(self, connection: _Connection, writing: bool) -> None:
        (self._unsent.add if writing else self._unsent.discard)(connection)
        if self._selector is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._selector.modify(connection.sock, events, connection.on_event)

    def _leave(self, connection: _Connection) -> None:
        self._bus.remove(connection)
        self.connections.discard(connection)
        self._unsent.discard(connection)
        if self._selector is not None:
            self._selector.unregister(connection.sock)


def _enlarge(sock: socket.socket) -> None:
    """Have the kernel hold more for a reader, who then wakes up less often; without the privilege what it usually does.

    The default of 208 KiB is 50 ms of what the agent of a large host tells.
    """
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, _HELD_BYTES)


class ReadServer(Server):
    """Serves a bus for reading only, also to a group: who reads metrics needs no right to steer.

    Such a client subscribes; what it publishes is refused with an error, counted, and ends its connection. It has
    places and a bound on what it sends of its own, so that it keeps nobody from the other socket. Any user may connect
    to it; who is not root, the agent's user, or in the group is shown out.

    Parameters
    ----------
    group : int or None
        The group that may read; None for nobody else.
    """

    publishes = False
    most_lines = _READERS_LINES
    _mode, _counted = 0o666, "bus_readers_"

    def __init__(self, bus: Bus, path: Path, group: int | None, long_window_ns: int = 0) -> None:
        self._group = group
        super().__init__(bus, path, long_window_ns=long_window_ns)

    def drops(self) -> dict[str, int]:
        """The same of the readers, and what they tried to publish."""
        return super().drops() | {"bus_readers_published": self._not_published}

    def _objection(self, sock: socket.socket) -> str:
        member = self._group is not None and in_group(sock, self._group)
        if not member and peer(sock)[1] not in (0, os.geteuid()):
            return f"only root, user {os.geteuid()} and members of the group {READERS_GROUP} may connect"
        return self._full(READERS)


def readers_group() -> int | None:
    """The group whose members may read signals; None when this host has no such group."""
    try:
        return grp.getgrnam(READERS_GROUP).gr_gid
    except KeyError:
        return None
