"""Prefixes as integers: quick enough for every route of a large table. Pure."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

Key = tuple[int, int, int]  # IP version, prefix length, network address
T = TypeVar("T")
_BITS = {4: 32, 6: 128}


def key_of(prefix: str) -> Key:
    """The key of a prefix that is written as the kernel writes it."""
    address, _, length = prefix.partition("/")
    version, family = (6, socket.AF_INET6) if ":" in address else (4, socket.AF_INET)
    return version, int(length), int.from_bytes(socket.inet_pton(family, address), "big")


def host_key(address: str) -> Key | None:
    """The key of one address; None for what is none, as a signal may come from any program."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return None
    return number.version, number.max_prefixlen, int(number)


class Within:
    """Tells whether a prefix lies inside one of some others."""

    def __init__(self, prefixes: Iterable[str]) -> None:
        found = {key_of(str(ipaddress.ip_network(prefix))) for prefix in prefixes}
        self._prefixes = [
            (version, length, _BITS[version] - length, number >> (_BITS[version] - length))
            for version, length, number in sorted(found)
        ]

    def holds(self, key: Key) -> bool:
        """Whether it does."""
        version, length, number = key
        return any(v == version and n <= length and number >> shift == head for v, n, shift, head in self._prefixes)


class LongestPrefix(Generic[T]):
    """Looks an address up among prefixes."""

    def __init__(self, values: Mapping[Key, T]) -> None:
        self.values = values
        self._lengths: dict[int, Sequence[int]] = {
            version: sorted({length for v, length, _ in values if v == version}, reverse=True) for version in _BITS
        }

    def get(self, address: str) -> T | None:
        """The value of the longest prefix that an address is in; None for none, and for what is no address."""
        host = host_key(address)
        if host is None:
            return None
        version, bits, number = host
        for length in self._lengths[version]:
            key = (version, length, number >> (bits - length) << (bits - length))
            if key in self.values:
                return self.values[key]
        return None
