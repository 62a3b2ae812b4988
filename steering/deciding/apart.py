"""Addresses that are to have targets of their own, as what they need moves the traffic of no other. Pure.

CLOCK_MONOTONIC nanoseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

_ALONE_NS: Final = 50_000_000  # so long an address waits for others that say the same
_TOGETHER_NS: Final = 60_000_000_000  # so long it must be well before its traffic follows that of others again
_MOST: Final = 256


class Apart:
    def __init__(self) -> None:
        self._alone: dict[str, int] = {}  # addresses that want what no other wants, and since when
        self._needed: dict[str, int] = {}  # addresses that have, or are to have, targets of their own; when last needed

    def take(self, addresses: Iterable[str], alone: Collection[str], now: int) -> None:
        """Take note which addresses of a group want what no other wants."""
        for address in addresses:
            if address in alone:
                self._alone.setdefault(address, now)
            else:
                self._alone.pop(address, None)

    def chosen(self, ill: Iterable[str], now: int) -> frozenset[str]:
        """The addresses that stand alone for long enough, and those `ill` or well for too short; the latest first."""
        lone = [address for address, since in self._alone.items() if now - since >= _ALONE_NS]
        self._needed |= dict.fromkeys((*lone, *ill), now)
        lasting = {address: last for address, last in self._needed.items() if now - last < _TOGETHER_NS}
        self._needed = dict(sorted(lasting.items(), key=lambda pair: -pair[1])[:_MOST])
        return frozenset(self._needed)
