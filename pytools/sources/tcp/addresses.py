"""`struct swerve_addr` as text: IPv4-mapped ones as IPv4. One thread."""

from __future__ import annotations

import ipaddress
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BYTES: Final = 16
_REMEMBERED: Final = 65_536


class Addresses:
    """Remembers what it has written once: the same few addresses come again and again."""

    def __init__(self) -> None:
        self._known: dict[bytes, str] = {}

    def texts(self, rows: NDArray[np.uint8]) -> list[str]:
        """Addresses of shape (n, 16) as text."""
        raw = rows.tobytes()
        return [self.text(raw[at : at + _BYTES]) for at in range(0, len(raw), _BYTES)]

    def text(self, raw: bytes) -> str:
        """One address."""
        known = self._known.get(raw)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            ip = ipaddress.IPv6Address(raw)
            known = self._known[raw] = str(ip.ipv4_mapped or ip)
        return known
