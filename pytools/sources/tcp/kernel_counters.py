"""The kernel's own TCP counters of the calling thread's network namespace, as differences since the start.

Names are those that `nstat` prints: `TcpRetransSegs`, `TcpExtTCPTimeouts`. One thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

# Not /proc/net: that is the namespace of the process, and a thread may be in another.
_PROC: Final = Path("/proc/thread-self/net")
_FILES: Final = (("snmp", ("Tcp",)), ("netstat", ("TcpExt",)))
_STATES: Final = frozenset({"TcpRtoAlgorithm", "TcpRtoMin", "TcpRtoMax", "TcpMaxConn", "TcpCurrEstab"})  # do not count


class KernelCounters:
    """Counts from when it was made."""

    def __init__(self) -> None:
        self._start = _read()

    def since_start(self) -> dict[str, int]:
        """What has been counted; without those that are still where they were."""
        return difference(self._start, _read())


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What was counted in between, zeroes left out."""
    return {name: value - before.get(name, 0) for name, value in after.items() if value > before.get(name, 0)}


def parsed(text: str, groups: Iterable[str]) -> dict[str, int]:
    """Counters of a file that has a line of names above each line of values; what does not fit together is left out."""
    found: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for line in text.splitlines():
        group, _, rest = line.partition(":")
        if group not in groups:
            continue
        words, known = rest.split(), names.get(group, [])
        try:
            values = list(map(int, words))
        except ValueError:
            names[group] = [group + word for word in words]
            continue
        if len(values) == len(known):
            found |= zip(known, values, strict=True)
    return {name: value for name, value in found.items() if name not in _STATES}


def _read() -> dict[str, int]:
    found: dict[str, int] = {}
    for name, groups in _FILES:
        try:
            found |= parsed((_PROC / name).read_text(), groups)
        except OSError:  # no /proc here: the signal says nothing rather than nothing else
            continue
    return found
