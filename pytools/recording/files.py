"""Recordings that people name: the flight recorder's directory, or what `swerve watch` has written, plain or gzip.

Memory is bounded: a line may have `LINE_BYTES`, longer ones are counted as broken. No clock.
"""

from __future__ import annotations

import contextlib
import io
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

from pytools.errors import SwerveError
from pytools.ipc.wire import LINE_BYTES, Lines
from pytools.recording import reader
from pytools.recording.reader import FOR_EVER, Read

_CHUNK: Final = 1 << 16
_MAGIC: Final = b"\x1f\x8b"


def opened(place: Path, told: Read, since_ns: int = 0, until_ns: int = FOR_EVER) -> Iterator[bytes]:
    """The lines of a recorder's directory, of a file, or of standard input (-), as they come.

    Parameters
    ----------
    told : Read
        Is filled in on the way.
    since_ns, until_ns : int
        Of a directory the first instant, and the one after the last; anything else is read as a whole.

    Raises
    ------
    SwerveError
        If it cannot be read.
    """
    if place.is_dir():
        yield from reader.lines(place, since_ns, until_ns, told)
        return
    try:
        with contextlib.ExitStack() as kept:
            pipe = cast("io.BufferedReader", sys.stdin.buffer)
            yield from lines(pipe if str(place) == "-" else kept.enter_context(place.open("rb")), told)
    except OSError as error:
        raise SwerveError(f"{place}: {error.strerror}", "name what `swerve watch` has written") from None


def lines(file: io.BufferedIOBase, told: Read) -> Iterator[bytes]:
    """The whole lines of a file; of gzip that was cut off, as far as it goes."""
    split = Lines()
    last = b""
    for data in _unpacked(file, told):
        last = data or last
        yield from split.feed(data)
    if last and not last.endswith(b"\n"):
        yield from split.feed(b"\n")  # the last one is whole although nothing ends it, or is found to be broken
    told.broken += split.oversized


def _unpacked(file: io.BufferedIOBase, told: Read) -> Iterator[bytes]:
    chunk = file.read(len(_MAGIC))
    if chunk != _MAGIC:
        while chunk:
            yield chunk
            chunk = file.read1(_CHUNK)  # what a pipe has now
        return
    inflate = zlib.decompressobj(31)
    while chunk:
        try:
            yield inflate.decompress(chunk, LINE_BYTES)
        except zlib.error:
            told.broken += 1
            return
        rest = inflate.unconsumed_tail
        if inflate.eof:  # several may follow each other
            rest, inflate = inflate.unused_data, zlib.decompressobj(31)
        chunk = rest or file.read1(_CHUNK)
