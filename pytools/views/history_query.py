"""Records of the past, as lines: what was wanted of a file or of the flight recorder, and what joins it to the present.

A line that passes is handed on as it was written, byte for byte. Times are CLOCK_REALTIME nanoseconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

from pytools.ipc.client import LineClient
from pytools.recording import files, reader
from pytools.recording.reader import FOR_EVER, Read
from pytools.signals import UNREADABLE, AnySignal, decode
from pytools.views import export
from pytools.views.filters import Filters
from pytools.views.model import Model, fold

_WRITTEN_NS: Final = 5_000_000_000  # what was told so long ago is in the recording
_SUBSCRIBED_NS: Final = 1_000_000_000
_PATIENCE_S: Final = 5.0
_LOOK_AGAIN_S: Final = 0.25
_LOT: Final = 1024


@dataclass(frozen=True)
class Wanted:
    types: frozenset[str] | None = None  # None: all
    filters: Filters = field(default_factory=Filters)
    since_ns: int = 0
    until_ns: int = FOR_EVER
    host: str = ""  # empty: all

    @property
    def all_of_them(self) -> bool:
        """Whether nothing is left out, so that nothing has to be read."""
        return self == Wanted()

    def takes(self, line: bytes, told: Read) -> bool:
        """Whether a line passes; one that is no record does not, and is counted."""
        try:
            head = reader.head_of.decode(line)
            if self.types is not None and head.type not in self.types:
                return False
            if not self.since_ns <= head.unix_ns < self.until_ns or (self.host and head.host != self.host):
                return False
            return not self.filters or self.filters.passes(decode(line))
        except UNREADABLE:
            told.broken += 1
            return False


def passing(lines: Iterable[bytes], wanted: Wanted, told: Read) -> Iterator[bytes]:
    if wanted.all_of_them:
        return iter(lines)
    return (line for line in lines if wanted.takes(line, told))


def signals(lines: Iterable[bytes], told: Read) -> Iterator[AnySignal]:
    """Lines as signals; what is none of this schema is counted."""
    for line in lines:
        try:
            yield decode(line)
        except UNREADABLE:
            told.broken += 1


def recorded(directory: Path, wanted: Wanted, told: Read) -> Iterator[bytes]:
    """What the flight recorder has of it.

    Raises
    ------
    SwerveError
        If there is no recording, or it may not be read.
    """
    at_any_time = replace(wanted, since_ns=0, until_ns=FOR_EVER)  # the reader looks at the times
    return passing(reader.lines(directory, wanted.since_ns, wanted.until_ns, told), at_any_time, told)


def recorded_and_on(directory: Path, client: LineClient, wanted: Wanted, told: Read) -> Iterator[list[bytes]]:
    """What was recorded, then what is told from now on, in lots; nothing twice and nothing left out between the two.

    They join at an instant a moment from now: by then the agent has taken note of the subscription. What comes before
    it is taken from the recording, whenever the client hears of it.

    Raises
    ------
    SwerveError
        If there is no recording.
    AgentGoneError
        If the agent ends.
    """
    before_ns = max(time.time_ns() - _WRITTEN_NS, wanted.since_ns)
    for lot in lots(recorded(directory, replace(wanted, until_ns=before_ns), told)):
        yield lot
        client.read()  # it is recorded too, and must not fill the client's queue while hours are read
    join_ns = time.time_ns() + _SUBSCRIBED_NS
    live_on = replace(wanted, since_ns=join_ns)
    held = _held(directory, client, join_ns)
    yield from lots(recorded(directory, replace(wanted, since_ns=before_ns, until_ns=join_ns), told))
    yield list(passing(held, live_on, told))
    yield from live(client, live_on, told)


def live(client: LineClient, wanted: Wanted, told: Read) -> Iterator[list[bytes]]:
    """What is told from now on, in lots, of which some are empty.

    Raises
    ------
    AgentGoneError
        If the agent ends, once all that it told was handed on.
    """
    while True:
        yield list(passing(export.some(client), wanted, told))


def model(lines: Iterable[bytes], told: Read) -> Model:
    """What a view knows after these records."""
    found = Model()
    for lot in lots(iter(lines)):
        found = fold(found, signals(lot, told))
    return found


def of(file: Path | None, directory: Path | None, wanted: Wanted, told: Read) -> Iterator[bytes]:
    """What is wanted of a file, of standard input (-), or of a recording's directory.

    Raises
    ------
    SwerveError
        If it cannot be read.
    """
    place = file or directory
    assert place is not None
    if file is None or place.is_dir():  # of which the reader looks at the times
        return recorded(place, wanted, told)
    return (line for line in files.opened(place, told) if wanted.takes(line, told))  # anybody's file: look at each line


def nothing_then(directory: Path) -> str:
    """What to say where a recording has nothing of the time that was asked for: from when to when it reaches.

    Raises
    ------
    SwerveError
        If there is no recording.
    """
    begins_ns, ends_ns = zip(*reader.covered(directory).values(), strict=True)
    return f"nothing was recorded then; {directory} reaches from {_moment(min(begins_ns))} to {_moment(max(ends_ns))}"


def _moment(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9).astimezone().isoformat(" ", "seconds")


def _held(directory: Path, client: LineClient, join_ns: int) -> list[bytes]:
    """What is told until the recording has all that came before an instant."""
    held: list[bytes] = []
    deadline_s = time.monotonic() + _PATIENCE_S
    while (now_s := time.monotonic()) < deadline_s:
        while (left_s := now_s + _LOOK_AGAIN_S - time.monotonic()) > 0:
            first = client.next(left_s)
            held += [] if first is None else [first, *client.read()]
        if next(reader.lines(directory, join_ns), None) is not None:
            break
    return held


def lots(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    """The same lines, many at a time."""
    while lot := list(itertools.islice(lines, _LOT)):
        yield lot
