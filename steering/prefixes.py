"""Prefixes as integers, and what lies in which of them. Pure."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
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


class LongestPrefix(Generic[T]):
    """Looks up among prefixes.

    Parameters
    ----------
    values : mapping of Key
        What is found, by prefix.
    """

    def __init__(self, values: Mapping[Key, T]) -> None:
        self.values = values
        there = sorted({key[:2] for key in values}, reverse=True)
        self._lengths = {version: [length for v, length in there if v == version] for version in _BITS}

    def around(self, key: Key) -> T | None:
        """The value of the longest prefix that a prefix lies in, which may be itself; None for none."""
        version, longest, number = key
        for length in self._lengths[version]:
            unused = _BITS[version] - length
            holds = version, length, number >> unused << unused
            if length <= longest and holds in self.values:
                return self.values[holds]
        return None

    def get(self, address: str) -> T | None:
        """The same of an address; None also for what is no address."""
        host = host_key(address)
        return None if host is None else self.around(host)
