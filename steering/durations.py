"""Durations and rates as they are written in a policy: `40ms` in `int` nanoseconds, `10mbit` in `int` bit/s. Pure.

Commands read durations as well, and start sooner without pydantic: what the model makes of these is in `policy.base`.
"""

from __future__ import annotations

import re
from typing import Final

UNITS: Final = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 1_000_000_000,
    "m": 60_000_000_000,
    "h": 3_600_000_000_000,
}
RATE_UNITS: Final = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}  # as tc writes them
SECOND: Final = UNITS["s"]
LONGEST: Final = 1 << 62  # so that a sum of a duration and a time stays within 64 bits

_NUMBER: Final = r"[0-9]{1,18}(\.[0-9]{1,9})?"
SCHEMA_DURATION: Final = rf"^{_NUMBER}(ns|us|µs|ms|s|m|h)$"
SCHEMA_RATE: Final = rf"^{_NUMBER}(bit|kbit|mbit|gbit)$"


def _parse(text: object, pattern: str, units: dict[str, int]) -> int | None:
    if not isinstance(text, str) or not (match := re.match(pattern, text.strip(), re.ASCII)):
        return None
    number, unit = text.strip()[: match.start(2)], match[2]
    whole, _, fraction = number.partition(".")
    return int(whole + fraction) * units[unit] // int(10 ** len(fraction))


def parse_duration(text: object) -> int:
    """Nanoseconds in a duration such as `40ms` or `1.5s`.

    Raises
    ------
    ValueError
        If it is not a string of a number and a unit, or more than a century.
    """
    found = _parse(text, SCHEMA_DURATION, UNITS)
    if found is None or found > LONGEST:
        raise ValueError("not a duration")
    return found


def duration_text(ns: int) -> str:
    """A duration in the unit that keeps it short: `40 ms`, `1.5 s`."""
    for unit in ("h", "m", "s", "ms", "us"):
        size = UNITS[unit]
        if ns >= size and (ns % size == 0 or unit not in "hm"):
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:.0f} {unit}"
    return f"{ns} ns"


def duration_yaml(ns: int) -> str:
    """A duration exactly, as it is written in a file."""
    return next(f"{ns // UNITS[unit]}{unit}" for unit in ("h", "m", "s", "ms", "us", "ns") if ns % UNITS[unit] == 0)


def parse_rate(text: object) -> int:
    """Bits per second in a rate such as `10mbit`.

    Raises
    ------
    ValueError
        If it is not a string of a number and a unit.
    """
    found = _parse(text, SCHEMA_RATE, RATE_UNITS)
    if found is None:
        raise ValueError("not a rate")
    return found


def rate_text(bps: int) -> str:
    """A rate in the unit that keeps it short: `10 Mbit/s`."""
    for unit, name in (("gbit", "Gbit/s"), ("mbit", "Mbit/s"), ("kbit", "kbit/s")):
        if bps >= RATE_UNITS[unit]:
            return f"{bps / RATE_UNITS[unit]:.3g} {name}"
    return f"{bps} bit/s"


def rate_yaml(bps: int) -> str:
    """A rate exactly, as it is written in a file."""
    units = ("gbit", "mbit", "kbit", "bit")
    return next(f"{bps // RATE_UNITS[unit]}{unit}" for unit in units if bps % RATE_UNITS[unit] == 0)
