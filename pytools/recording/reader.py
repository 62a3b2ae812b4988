"""Reads a recording: the lines of a stretch of time, from whichever track has them. Safe while it is being written.

Nothing is held in memory but the segment's decompressor: a recording may be larger. Times are CLOCK_REALTIME
nanoseconds, those of the records themselves.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import msgspec

from pytools import directories
from pytools.errors import CapabilityError, SwerveError
from pytools.ipc.wire import LINE_BYTES
from pytools.recording import segments
from pytools.recording.segments import Segment, Track
from pytools.signals import UNREADABLE

_CHUNK: Final = 1 << 16
_SLACK_NS: Final = 5_000_000_000  # a record is written a while after its time, and clocks are slewed
FOR_EVER: Final = (1 << 63) - 1


class Head(msgspec.Struct):
    """What is needed of a record to place it."""

    type: str
    unix_ns: Annotated[int, msgspec.Meta(ge=0, lt=FOR_EVER)]
    host: str = ""


head_of: Final = msgspec.json.Decoder(Head)


@dataclass(slots=True)
class Read:
    """What was found on the way."""

    records: int = 0
    broken: int = 0  # lines that are no records
    cut: int = 0  # segments that end in the middle: one whose writer was killed, or is still at it
    first_unix_ns: int = 0
    last_unix_ns: int = 0
    tracks: dict[Track, int] = field(default_factory=dict)  # records by the track that they come from


def covered(directory: Path) -> dict[Track, tuple[int, int]]:
    """From when to when each track reaches; a track without segments is left out.

    Raises
    ------
    SwerveError
        If there is no recording, or it may not be read.
    """
    found: dict[Track, tuple[int, int]] = {}
    for each in _listed(directory):
        began, ended = found.get(each.track, (each.began_unix_ns, each.ended_unix_ns))
        found[each.track] = min(began, each.began_unix_ns), max(ended, each.ended_unix_ns)
    return found


def lines(directory: Path, since_ns: int = 0, until_ns: int = FOR_EVER, told: Read | None = None) -> Iterator[bytes]:
    """The records of a stretch of time, one line each, in the order in which they were published.

    What the fine track still has comes from there; what is older from the coarse one, up to the first record that is as
    late as the fine track's first.

    Parameters
    ----------
    since_ns, until_ns : int
        The first instant, and the one after the last.
    told : Read, optional
        Is filled in on the way.

    Raises
    ------
    SwerveError
        If there is no recording, or it may not be read.
    """
    told = told if told is not None else Read()
    found = _listed(directory)
    fine = [each for each in found if each.track == "fine"]
    coarse = [each for each in found if each.track == "coarse"]
    turn_ns = _first(fine)
    for each in coarse:
        if turn_ns <= since_ns or (yield from _between(each, since_ns, until_ns, told, turn_ns)):
            break
    for each in fine:
        yield from _between(each, since_ns, until_ns, told)


def _listed(directory: Path) -> list[Segment]:
    try:
        found = segments.listed(directory)
    except PermissionError as error:
        raise CapabilityError(f"{directory}: {error.strerror}", "run it as root") from None
    except OSError:
        found = []
    if not found:
        raise SwerveError(
            f"there is no recording in {directory}",
            f"an agent writes it unless recording.retention is 0s ({directories.page('recording.md')})",
        )
    return found


def _first(row: list[Segment]) -> int:
    """The time of a track's first record; for ever where it has none."""
    for segment in row:
        for head, _ in _records(segment, Read()):
            return head.unix_ns
    return FOR_EVER


def _between(
    segment: Segment, since_ns: int, until_ns: int, told: Read, turn_ns: int = FOR_EVER
) -> Generator[bytes, None, bool]:
    """The lines of a stretch of time, up to the first record that is as late as `turn_ns`; whether that was reached."""
    if segment.ended_unix_ns + _SLACK_NS < since_ns:
        return False
    if segment.began_unix_ns - _SLACK_NS >= until_ns and turn_ns == FOR_EVER:
        return False
    for head, line in _records(segment, told):
        if head.unix_ns >= turn_ns:
            return True
        if since_ns <= head.unix_ns < until_ns:
            told.records += 1
            told.tracks[segment.track] = told.tracks.get(segment.track, 0) + 1
            told.first_unix_ns = told.first_unix_ns or head.unix_ns
            told.last_unix_ns = max(told.last_unix_ns, head.unix_ns)
            yield line
    return False


def _records(segment: Segment, told: Read) -> Iterator[tuple[Head, bytes]]:
    for line in unpacked(segment.path, told):
        try:
            yield head_of.decode(line), line
        except UNREADABLE:
            told.broken += 1


def unpacked(path: Path, told: Read) -> Iterator[bytes]:
    """The whole lines of one segment, as far as it can be read; nothing of one that was removed meanwhile."""
    rest = b""
    inflate = zlib.decompressobj(31)
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                while chunk:
                    data = inflate.decompress(chunk, LINE_BYTES)
                    chunk = inflate.unconsumed_tail
                    *whole, rest = (rest + data).split(b"\n")
                    yield from filter(None, whole)
                    if len(rest) > LINE_BYTES:
                        told.broken += 1
                        return
    except FileNotFoundError:
        return
    except zlib.error:
        told.broken += 1
        return
    if not inflate.eof or rest:
        told.cut += 1
