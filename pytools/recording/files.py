"""Recordings that people keep: JSON Lines as `swerve watch` writes them, plain or gzip, from a file or a pipe.

Memory is bounded: a line may have `LINE_BYTES`, longer ones are counted as broken. No clock.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO, Final

from pytools.recording.reader import Read
from pytools.wire import LINE_BYTES, Lines

_CHUNK: Final = 1 << 16
_MAGIC: Final = b"\x1f\x8b"


def lines(file: BinaryIO, told: Read) -> Iterator[bytes]:
    """The whole lines of a file; of gzip that was cut off, as far as it goes."""
    split = Lines()
    last = b""
    for data in _unpacked(file, told):
        last = data or last
        yield from split.feed(data)
    if last and not last.endswith(b"\n"):
        yield from split.feed(b"\n")  # the last one is whole although nothing ends it, or is found to be broken
    told.broken += split.oversized


def _unpacked(file: BinaryIO, told: Read) -> Iterator[bytes]:
    chunk = file.read(_CHUNK)
    if not chunk.startswith(_MAGIC):
        while chunk:
            yield chunk
            chunk = file.read(_CHUNK)
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
        chunk = rest or file.read(_CHUNK)
