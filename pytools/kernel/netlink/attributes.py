"""Netlink attributes as bytes: taken apart and put together again without a look inside. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_HEAD = struct.Struct("=HH")  # length, type
_TYPE_MASK = 0x3FFF  # without the flags "nested" and "in network order"


def attributes(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Type and value of every attribute from an offset on."""
    end = len(data)
    while offset + 4 <= end:
        length, name = _HEAD.unpack_from(data, offset)
        if length < 4:
            return
        yield name & _TYPE_MASK, data[offset + 4 : offset + length]
        offset += (length + 3) & ~3


def attribute(name: int, value: bytes) -> bytes:
    """One attribute, padded."""
    return _HEAD.pack(4 + len(value), name) + value + bytes(-len(value) % 4)
