"""How often ports heard from a peer that its receiver was not ready (RNR): read only while somebody suspects it.

Every file may be a question to the device's firmware, so they are read once a second for a base, and at most every
20 ms while requests wait. Times are CLOCK_MONOTONIC nanoseconds; runs in the agent's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pytools.kernel.rdma_class import SYSFS

# What the requesting side counts, by driver: mlx5, bnxt_re, rxe, ionic.
_NAMES: Final = ("rnr_nak_retry_err", "rnr_naks_rcvd", "rcvd_rnr_err", "req_rx_rnr_retry_err")
_BASE_NS: Final = 1_000_000_000
_OFTEN_NS: Final = 20_000_000
_FILES_NS: Final = 60_000_000_000


@dataclass(slots=True)
class _Device:
    files: list[Path]
    found_ns: int
    read_ns: int = -_BASE_NS
    counts: dict[Path, int] = field(default_factory=dict)
    grew: int = 0  # at the last reading
    grew_ns: int | None = None


class NotReady:
    """Counters of receivers that were not ready, by device.

    Parameters
    ----------
    root : Path
        Where the devices are listed.
    """

    def __init__(self, root: Path = SYSFS) -> None:
        self._root = root
        self._devices: dict[str, _Device] = {}

    def look(self, device: str, suspected: bool, now_ns: int) -> None:
        """Read a device's counters when it is time."""
        known = self._devices.get(device)
        if known is None or now_ns - known.found_ns > _FILES_NS:
            counts = known.counts if known else {}
            known = self._devices[device] = _Device(self._files(device), now_ns, counts=counts)
        known.grew = 0
        if now_ns - known.read_ns < (_OFTEN_NS if suspected else _BASE_NS):
            return
        known.read_ns = now_ns
        for place in known.files:
            try:
                count = int(place.read_text())
            except (OSError, ValueError):
                continue
            known.grew += max(0, count - known.counts.get(place, count))
            known.counts[place] = count
        if known.grew:
            known.grew_ns = now_ns

    def counts(self, device: str) -> bool:
        """Whether the device tells at all."""
        return device in self._devices and bool(self._devices[device].files)

    def grew(self, device: str) -> int:
        """By how much its counters grew at the last look."""
        return self._devices[device].grew if device in self._devices else 0

    def within(self, device: str, ns: int, now_ns: int) -> bool:
        """Whether they grew within that time."""
        known = self._devices.get(device)
        return known is not None and known.grew_ns is not None and now_ns - known.grew_ns <= ns

    def _files(self, device: str) -> list[Path]:
        if not device or "/" in device or device.startswith("."):  # a tapped process may say anything
            return []
        place = self._root / device
        found = [file for name in _NAMES for file in place.glob(f"ports/*/hw_counters/{name}")]
        return found or [file for name in _NAMES for file in place.glob(f"hw_counters/{name}")]
