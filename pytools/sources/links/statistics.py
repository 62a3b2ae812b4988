"""Drivers' statistics, by lists of names that are kept until they change. One thread; its own network namespace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pytools.kernel.ethtool import Ethtool
from pytools.sources.links import driver

_NAMES_AGAIN_NS: Final = 60_000_000_000  # a driver may rename its statistics without having more of them


@dataclass(frozen=True, slots=True)
class _Names:
    count: int
    meaning: driver.Meaning
    read_ns: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a driver counts, and what that means."""

    meaning: driver.Meaning
    values: Sequence[int]
    speed_mbps: int | None


class Statistics:
    """Asks the drivers of interfaces for what matters."""

    def __init__(self, ethtool: Ethtool) -> None:
        self._ethtool = ethtool
        self._names: dict[int, _Names] = {}
        self.failed = 0  # readings that a driver refused although it has statistics

    def read(self, index: int, interface: str, now_ns: int) -> Reading:
        """One reading; a driver without statistics that matter is asked for the speed alone."""
        speed_mbps = self._ethtool.speed_mbps(interface)
        count = self._ethtool.count(interface)
        names = self._names.get(index)
        if names is None or names.count != count or now_ns - names.read_ns > _NAMES_AGAIN_NS:
            listed = self._ethtool.names(interface, count) if count else []
            if count and not listed:
                self.failed += 1
                return Reading(driver.NOTHING, (), speed_mbps)
            meaning = driver.meaning_of(listed)
            names = self._names[index] = _Names(count, meaning, now_ns)
        values = self._ethtool.values(interface, count) if names.meaning else None
        if values is None:
            self.failed += bool(names.meaning)
            return Reading(driver.NOTHING, (), speed_mbps)
        return Reading(names.meaning, values.tolist(), speed_mbps)

    def forget(self, index: int) -> None:
        """The interface is gone, or watched no more."""
        self._names.pop(index, None)

    def close(self) -> None:
        """Ask no more."""
        self._ethtool.close()
