"""The files of a recording: names, order, what they cover, and what has to go.

A recording is a directory with two tracks. `fine` has every record, `coarse` only what people read (no short windows),
so that it reaches further back in the same space. A track is a row of segments, gzip of JSON Lines, each written once
from its beginning to its end: a crash can only cut the last one off. Times are CLOCK_REALTIME nanoseconds, which may
step: segments are ordered by their numbers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

Track = Literal["fine", "coarse"]
TRACKS: Final[tuple[Track, ...]] = get_args(Track)
_NAME: Final = re.compile(r"(fine|coarse)-(\d{8})-(\d{1,20})\.jsonl\.gz")


@dataclass(frozen=True, slots=True)
class Segment:
    path: Path
    track: Track
    number: int
    began_unix_ns: int
    ended_unix_ns: int  # when it was last written to
    size_bytes: int


def name(track: Track, number: int, began_unix_ns: int) -> str:
    """How a segment's file is called."""
    return f"{track}-{number:08d}-{began_unix_ns}.jsonl.gz"


def listed(directory: Path) -> list[Segment]:
    """The segments that are there, each track's in the order in which they were written; other files are left out.

    Raises
    ------
    OSError
        If there is no such directory, or it cannot be read.
    """
    return sorted(_found(directory), key=lambda each: (each.track, each.number))


def _found(directory: Path) -> Iterator[Segment]:
    for path in directory.iterdir():
        match = _NAME.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(FileNotFoundError):  # it has just been removed
            there = path.stat()
            track: Track = "fine" if match[1] == "fine" else "coarse"
            yield Segment(path, track, int(match[2]), int(match[3]), there.st_mtime_ns, there.st_size)


def surplus(found: Iterable[Segment], limit_bytes: int, oldest_unix_ns: int) -> list[Segment]:
    """Which segments of one track have to go: the oldest, until the rest is small enough and young enough.

    Parameters
    ----------
    found : iterable of Segment
        In order, the one being written last.
    limit_bytes : int
        What the rest may have together.
    oldest_unix_ns : int
        What was last written to before this goes.
    """
    kept = list(found)
    gone = []
    total = sum(each.size_bytes for each in kept)
    while len(kept) > 1 and (total > limit_bytes or kept[0].ended_unix_ns < oldest_unix_ns):
        total -= kept[0].size_bytes
        gone.append(kept.pop(0))
    return gone


NEVER: Final = frozenset({"probe_samples", "tcp_flow"})  # single probes and single connections: unbounded in number
ASIDE: Final = frozenset({"self", "job", "gpu"})  # cost something to make: recorded while somebody else asks for them
FINE_ONLY: Final = frozenset(
    {"path_liveness", "clock_edge"}
)  # many a second, as are details (pytools.ipc.wire.is_detail)
