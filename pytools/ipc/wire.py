"""What crosses the agent's socket: JSON Lines, and how they are taken apart.

The first line of a client says what it wants, `{"type":"subscribe","types":["path_delay"]}` (null: all), and with
`"coarse":true` that it wants no details (`is_detail`); each later line is a signal to publish. The server also sends
`{"type":"dropped","count":n,"urgent":m}` where a slow client missed n signals, m of them urgent, and
`{"type":"error","message":…}` for a line it could not read. Pure.
"""

from __future__ import annotations

import typing
from typing import Final

import msgspec

from pytools.errors import UsageError
from pytools.signals import Act, AnySignal, AppDelay, LinkEvent, PathDelay, PathLiveness

QUEUE_BYTES: Final = 4 << 20  # what a client may leave unread before signals are dropped for it
LINE_BYTES: Final = 1 << 20  # the longest line accepted
CHUNK_BYTES: Final = 1 << 16


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe"):
    """A client's first line: the types it wants, None for all; whether without details."""

    types: list[str] | None
    coarse: bool = False


class Dropped(msgspec.Struct, frozen=True, tag="dropped"):
    """The server's word that so many signals are missing at this place of the stream."""

    count: int
    urgent: int = 0  # of them


class Error(msgspec.Struct, frozen=True, tag="error"):
    """The server's word that a line was not understood, or the client not accepted."""

    message: str


TAGS: Final[dict[type, str]] = {kind: str(kind.__struct_config__.tag) for kind in typing.get_args(AnySignal)}
TYPES: Final = frozenset(TAGS.values())

FromClient = Subscribe | AnySignal
FromServer = Dropped | Error | AnySignal
URGENT: Final = frozenset({"path_liveness", "link_event", "act", "path_state"})  # do not wait behind others

from_client: msgspec.json.Decoder[FromClient] = msgspec.json.Decoder(FromClient)
from_server: msgspec.json.Decoder[FromServer] = msgspec.json.Decoder(FromServer)


def check_types(types: frozenset[str] | None) -> None:
    """Raise UsageError when a type does not exist."""
    unknown = sorted((types or frozenset()) - TYPES)
    if unknown:
        raise UsageError(f"no such signal type: {', '.join(unknown)}", f"one of {', '.join(sorted(TYPES))}")


def is_pressing(signal: AnySignal) -> bool:
    """Whether an urgent signal is sent at once: it tells of a change, and is no repetition."""
    match signal:
        case PathLiveness():
            return signal.missed > 0
        case Act() | LinkEvent():
            return True
    return False


def is_detail(signal: AnySignal, long_window_ns: int) -> bool:
    """Whether what people read is in another signal, too: a short window of a path, or a single connection's delays."""
    match signal:
        case PathDelay():
            return signal.window_ns < long_window_ns
        case AppDelay():
            return bool(signal.local)
    return False


class Lines:
    """Bytes in, whole lines out; a line longer than `LINE_BYTES` is thrown away and counted."""

    def __init__(self) -> None:
        self._partial = b""
        self._skipping = False
        self.oversized = 0

    def feed(self, data: bytes) -> list[bytes]:
        """The lines completed by this data, without their newlines; empty ones left out."""
        *lines, rest = (self._partial + data).split(b"\n")
        if self._skipping and lines:
            del lines[0]
            self._skipping = False
        self._partial = b"" if self._skipping else rest
        if len(self._partial) > LINE_BYTES:
            self._partial = b""
            self._skipping = True
            self.oversized += 1
        return [line for line in lines if line] if b"" in lines else lines
