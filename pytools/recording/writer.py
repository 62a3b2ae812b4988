"""Writes one track of a recording: compresses, cuts into segments, and removes the oldest.

May wait for the disk, so it has a thread of its own (pytools/sources/recording.py). Times are CLOCK_REALTIME
nanoseconds, passed in.
"""

from __future__ import annotations

import errno
import os
import zlib
from pathlib import Path
from typing import Final

from pytools.owned_files import as_owner
from pytools.recording import segments
from pytools.recording.segments import Track

_LEVEL: Final = 1  # a tenth of the size already, at about 100 MB/s
_GZIP: Final = 31  # zlib's word for a gzip member
_SEGMENTS: Final = 32  # so many make a full track: what is removed at once is a small part of it
_SEGMENT_NS: Final = 600_000_000_000
_FREE_SHARE: Final = 0.05  # of the file system is left to others


class TrackWriter:
    """Appends to one track.

    Parameters
    ----------
    directory : Path
        Of the recording; exists.
    limit_bytes : int
        For all its segments together; only one that is being written alone exceeds it, by what one `write` adds.
    age_ns : int
        What is older goes.
    """

    def __init__(self, directory: Path, track: Track, limit_bytes: int, age_ns: int) -> None:
        self._directory, self._track = directory, track
        self._limit_bytes, self._age_ns = limit_bytes, age_ns
        self._number = max((each.number for each in self._segments()), default=0)
        self._fd = -1
        self._size = self._total = self._began = 0  # bytes of this segment, and of all
        self._unflushed = 0  # records
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self.lost = 0  # records that could not be written: a full disk, or a directory that is gone
        self.error = ""  # why, while it lasts

    def write(self, lines: bytes, now_ns: int) -> None:
        """Append whole lines; they are in the file after `flush`."""
        records = lines.count(b"\n")
        try:
            self._keep_within(now_ns)
            self._unflushed += records
            self._put(self._deflate.compress(lines))
        except OSError as error:
            self.lost += records if self._unflushed == 0 else 0
            self._fail(error)

    def flush(self) -> None:
        """Have all that was written in the file, so that it can be read whatever becomes of us."""
        self._flushed(zlib.Z_SYNC_FLUSH)

    def close(self) -> None:
        """End the segment in order."""
        if self._flushed(zlib.Z_FINISH):
            os.close(self._fd)
            self._fd = -1

    def _flushed(self, mode: int) -> bool:
        if self._fd < 0:
            return False
        try:
            self._put(self._deflate.flush(mode))
            self._unflushed = 0
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _put(self, data: bytes) -> None:
        if self._total + len(data) > self._limit_bytes:
            self._make_room(self._limit_bytes - len(data), 0)
        view = memoryview(data)
        while view:
            done = os.write(self._fd, view)
            self._size += done
            self._total += done
            view = view[done:]

    def _fail(self, error: OSError) -> None:
        """A segment that lacks something in its middle cannot be read further: end it where it was whole."""
        self.lost += self._unflushed
        self._unflushed = 0
        self.error = error.strerror or str(error)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _keep_within(self, now_ns: int) -> None:
        """Begin another segment when this one is long enough, and make room for it."""
        full = self._size >= max(1, self._limit_bytes // _SEGMENTS)
        if self._fd >= 0 and not full and self._began <= now_ns < self._began + _SEGMENT_NS:
            return
        self.close()
        self._make_room(self._limit_bytes * (_SEGMENTS - 1) // _SEGMENTS, now_ns - self._age_ns)
        self._refuse_when_full()
        self._number += 1
        path = self._directory / segments.name(self._track, self._number, now_ns)
        with as_owner(path):
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        self._size, self._began, self.error = 0, now_ns, ""

    def _make_room(self, limit_bytes: int, oldest_unix_ns: int) -> None:
        """Remove the oldest segments until the rest is no larger and no older; the newest stays."""
        found = self._segments()
        surplus = segments.surplus(found, limit_bytes, oldest_unix_ns)
        for each in surplus:
            with as_owner(each.path):
                each.path.unlink(missing_ok=True)
        self._total = sum(each.size_bytes for each in found[len(surplus) :])

    def _refuse_when_full(self) -> None:
        room = os.statvfs(self._directory)
        if room.f_bavail < _FREE_SHARE * room.f_blocks:
            raise OSError(errno.ENOSPC, "the file system is nearly full: its last 5 % are left to others")

    def _segments(self) -> list[segments.Segment]:
        try:
            return [each for each in segments.listed(self._directory) if each.track == self._track]
        except FileNotFoundError:
            return []
