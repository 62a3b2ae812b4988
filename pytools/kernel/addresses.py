"""Addresses as our kernel programs keep them: 16 bytes, IPv4 addresses mapped into IPv6. Any thread."""

from __future__ import annotations

import functools
import ipaddress
import socket

import numpy as np
from numpy.typing import NDArray

_MAPPED = bytes(10) + b"\xff\xff"
_BYTES = 16


def mapped(address: str) -> bytes:
    """The bytes of an address."""
    if ":" in address:
        return socket.inet_pton(socket.AF_INET6, address)
    return _MAPPED + socket.inet_pton(socket.AF_INET, address)


@functools.lru_cache(maxsize=65_536)  # the same few come again and again
def text(address: bytes | str) -> str:
    """An IPv6 address, or its bytes, as people write it: an IPv4-mapped one as IPv4.

    >>> text(bytes(10) + bytes([255, 255, 10, 9, 0, 1]))
    '10.9.0.1'
    """
    found = ipaddress.IPv6Address(address)
    return str(found.ipv4_mapped or found)


def texts(rows: NDArray[np.uint8]) -> list[str]:
    raw = rows.tobytes()
    return [text(raw[at : at + _BYTES]) for at in range(0, len(raw), _BYTES)]
