"""A recording (`swerve watch`, JSON Lines) as signals: what is not needed is skipped, what is broken is counted.

Reads one line at a time, and no more than a line may be long: a recording may be larger than memory, or no recording.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import msgspec

from pytools.errors import SwerveError, UsageError
from pytools.recording import files, reader
from pytools.recording.reader import FOR_EVER
from pytools.signals import AnySignal, decode

LINE_BYTES: Final = 1 << 20
_LATEST_NS: Final = 1 << 62  # times beyond are none; sums of two still fit 64 bits


class _Head(msgspec.Struct):
    type: str
    host: str = ""


_head = msgspec.json.Decoder(_Head)


@dataclass(slots=True)
class Counts:
    """What was in a recording."""

    lines: int = 0
    used: int = 0
    not_needed: int = 0  # of kinds that the policy does not look at
    other_hosts: dict[str, int] = field(default_factory=dict)
    broken: int = 0  # no signal of this schema
    first_broken: int = 0  # its line
    why_broken: str = ""
    schemas: set[int] = field(default_factory=set)


class Readable(Protocol):
    """What a recording is read from: a file, or what looks like one."""

    def readline(self, limit: int, /) -> bytes:
        """The next line with its end, at most so many bytes of it; empty at the end."""


class Lines:
    """Lines that were taken apart already, as a file."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = iter(lines)

    def readline(self, _limit: int, /) -> bytes:
        """The next line; it is no longer than a line may be."""
        line = next(self._lines, None)
        return b"" if line is None else line + b"\n"


@contextlib.contextmanager
def opened(place: Path, since_ns: int = 0, until_ns: int = FOR_EVER) -> Iterator[Readable]:
    """A recording that a person names: a file, plain or gzip, standard input (-), or the flight recorder's directory.

    Raises
    ------
    SwerveError
        If it cannot be read, or a time is asked of what is no directory.
    """
    if place.is_dir():
        yield Lines(reader.lines(place, since_ns, until_ns))
        return
    if (since_ns, until_ns) != (0, FOR_EVER):
        raise UsageError(f"{place} is read as a whole", "--since and --until are for what the agent has recorded")
    if str(place) == "-":
        yield sys.stdin.buffer
        return
    try:
        with place.open("rb") as file:
            yield Lines(files.lines(file, reader.Read())) if place.suffix == ".gz" else file
    except OSError as error:
        raise SwerveError(f"{place}: {error.strerror}", "name what `swerve watch` has written") from None


class Recording:
    """The signals of one host in a recording, in the order of its lines.

    Parameters
    ----------
    file : Readable
        Is read once, from where it stands.
    kinds : frozenset of str
        The signals that are needed, by their tags.
    host : str
        Whose signals; empty for the first host in it.
    """

    def __init__(self, file: Readable, kinds: frozenset[str], host: str = "") -> None:
        self._file, self._kinds, self.host = file, kinds, host
        self.counts = Counts()

    def __iter__(self) -> Iterator[AnySignal]:
        counts = self.counts
        while line := self._file.readline(LINE_BYTES + 1):
            counts.lines += 1
            if len(line) > LINE_BYTES:
                self._break("a line longer than a MiB")
                while line and not line.endswith(b"\n"):
                    line = self._file.readline(LINE_BYTES)
                continue
            signal = self._signal(line)
            if signal is not None:
                counts.used += 1
                counts.schemas.add(signal.schema)
                yield signal

    def _signal(self, line: bytes) -> AnySignal | None:
        try:
            head = _head.decode(line)
            if head.type not in self._kinds:
                self.counts.not_needed += 1
                return None
            if head.host and self.host and head.host != self.host:
                others = self.counts.other_hosts
                if head.host in others or len(others) < 100:
                    others[head.host] = others.get(head.host, 0) + 1
                return None
            signal = decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._break(str(error))
            return None
        if not (0 <= signal.at_ns < _LATEST_NS and 0 <= signal.unix_ns < _LATEST_NS):
            self._break("a time that is none")
            return None
        self.host = self.host or signal.host
        return signal

    def _break(self, why: str) -> None:
        self.counts.broken += 1
        if self.counts.broken == 1:
            self.counts.first_broken, self.counts.why_broken = self.counts.lines, why[:200]
