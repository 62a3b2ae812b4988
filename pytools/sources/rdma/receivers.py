"""Whether those who are sent to are ready: what the ports hear of them, or their own rows where they are on this host.

Asked only for requests that take a receive, and that wait or crawl. Runs in the agent's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from pytools.estimators import verdicts
from pytools.kernel.rdma_class import SYSFS
from pytools.sources.rdma import table as tables
from pytools.sources.rdma.register import ROWS, QueuePair
from pytools.sources.rdma.table import Counters, Rows

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
    """Counters of receivers that were not ready, by device; `root` lists the devices."""

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
        known = self._devices.get(device)
        return known is not None and known.grew_ns is not None and now_ns - known.grew_ns <= ns

    def _files(self, device: str) -> list[Path]:
        if not device or "/" in device or device.startswith("."):  # a tapped process may say anything
            return []
        place = self._root / device
        found = [file for name in _NAMES for file in place.glob(f"ports/*/hw_counters/{name}")]
        return found or [file for name in _NAMES for file in place.glob(f"hw_counters/{name}")]


class Receivers:
    """What is known of the other ends."""

    def __init__(self, not_ready: NotReady) -> None:
        self._not_ready = not_ready
        self.needed = np.zeros(ROWS, np.bool_)  # posts requests that take a receive
        self._device = np.zeros(ROWS, np.intp)
        self._devices: list[str] = []
        self._peer = np.full(ROWS, -1, np.intp)

    def refresh(self, row: int, pair: QueuePair, opcodes: Counters) -> None:
        """Take in what a queue pair posts, and on which device."""
        self.needed[row] = any(int(opcodes[code]) for code in tables.NEED_RECEIVES)
        if pair.device not in self._devices:
            self._devices.append(pair.device)
        self._device[row] = self._devices.index(pair.device)

    def forget(self, row: int) -> None:
        self._peer[row] = -1

    def look(self, pairs: Mapping[int, QueuePair], now_ns: int) -> None:
        """Find the ends that are on this host, and have a base for the ports' counters."""
        ends = {(pair.local, pair.number): row for row, pair in pairs.items() if pair.local}
        for row, pair in pairs.items():
            peer = -1 if pair.remote_number is None else ends.get((pair.remote, pair.remote_number), -1)
            self._peer[row] = peer if peer >= 0 and not pairs[peer].shared_receives else -1
        for device in {pair.device for row, pair in pairs.items() if self.needed[row]}:
            self._not_ready.look(device, False, now_ns)

    def ask(
        self, rows: Rows, facts: verdicts.Facts, share: float, counters: Mapping[str, Counters], now_ns: int
    ) -> None:
        """Fill in what the facts say of receivers.

        Parameters
        ----------
        share : float
            Of the mean bandwidth: below is low.
        counters : mapping
            Of all rows, as they stood at the last reading.
        """
        slow = (facts.completed == 0) | verdicts.low(facts, share)
        suspected = facts.needs_receives & (facts.outstanding > 0) & slow
        if not suspected.any():
            return
        devices = self._device[rows]
        for index in np.unique(devices[suspected]).tolist():
            device, mine = self._devices[index], suspected & (devices == index)
            self._not_ready.look(device, True, now_ns)
            facts.not_ready[mine] = self._not_ready.grew(device)
            facts.not_ready_recently[mine] = self._not_ready.within(device, verdicts.NOT_READY_NS, now_ns)
            if not self._not_ready.counts(device):
                peer = self._peer[rows[mine]]
                taken, given = counters["receives_completed"][peer], counters["receives_posted"][peer]
                facts.starved[mine] = (peer >= 0) & (taken >= given)
