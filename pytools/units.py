"""Quantities with their units: as configuration files and commands give them, and as tables show them. Pure.

A duration is `40ms` in a file and an `int` of nanoseconds here, a rate `10mbit` and bit/s, a size `64MiB` and bytes.
Measured figures are rounded for people; UNKNOWN stands for a figure that is not there.
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
    "d": 86_400_000_000_000,
}
RATE_UNITS: Final = {"bit": 1, "kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}  # as tc writes them
SIZE_UNITS: Final = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
UNKNOWN: Final = "\u2013"
MS: Final = UNITS["ms"]
SECOND: Final = UNITS["s"]
LONGEST: Final = 1 << 62  # so that a sum of a duration and a time stays within 64 bits

_NUMBER: Final = r"[0-9]{1,18}(\.[0-9]{1,9})?"
SCHEMA_DURATION: Final = rf"^{_NUMBER}(ns|us|µs|ms|s|m|h|d)$"
SCHEMA_RATE: Final = rf"^{_NUMBER}(bit|kbit|mbit|gbit)$"
_SIZE: Final = rf"^{_NUMBER}(B|KiB|MiB|GiB)$"


def _parse(text: object, what: str, pattern: str, units: dict[str, int]) -> int:
    if not isinstance(text, str) or not (match := re.match(pattern, text.strip(), re.ASCII)):
        raise ValueError(f"not a {what}")
    number, unit = text.strip()[: match.start(2)], match[2]
    whole, _, fraction = number.partition(".")
    return int(whole + fraction) * units[unit] // int(10 ** len(fraction))


def _exactly(count: int, units: dict[str, int]) -> str:
    """In the largest unit of which it is a whole number."""
    return next(
        f"{count // size}{unit}" for unit, size in sorted(units.items(), key=lambda each: -each[1]) if count % size == 0
    )


def parse_duration(text: object, longest_ns: int = LONGEST) -> int:
    """Nanoseconds in a duration such as `40ms` or `1.5s`.

    Raises
    ------
    ValueError
        If it is not a string of a number and a unit, or longer than `longest_ns` (a century).
    """
    found = _parse(text, "duration", SCHEMA_DURATION, UNITS)
    if found > longest_ns:
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
    return _exactly(ns, {unit: UNITS[unit] for unit in ("h", "m", "s", "ms", "us", "ns")}) if ns else "0s"


def parse_rate(text: object) -> int:
    """Bits per second in a rate such as `10mbit`; a ValueError where `parse_duration` raises one."""
    return _parse(text, "rate", SCHEMA_RATE, RATE_UNITS)


def rate_text(bps: int) -> str:
    """A rate in the unit that keeps it short: `10 Mbit/s`."""
    for unit, name in (("gbit", "Gbit/s"), ("mbit", "Mbit/s"), ("kbit", "kbit/s")):
        if bps >= RATE_UNITS[unit]:
            return f"{bps / RATE_UNITS[unit]:.3g} {name}"
    return f"{bps} bit/s"


def rate_yaml(bps: int) -> str:
    """A rate exactly, as it is written in a file."""
    return _exactly(bps, RATE_UNITS)


def parse_size(text: object) -> int:
    """Bytes in a size such as `64MiB`; a ValueError where `parse_duration` raises one."""
    return _parse(text, "size", _SIZE, SIZE_UNITS)


def size_yaml(count: int) -> str:
    """A size exactly, as it is written in a file."""
    return _exactly(count, SIZE_UNITS)


def duration(ns: float | None) -> str:
    """Nanoseconds with a unit that keeps three or four digits; a dash for unknown or negative."""
    if ns is None or ns < 0:
        return UNKNOWN
    for scale, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
        if ns >= scale:
            return f"{ns / scale:.{2 if ns < 100 * scale else 0}f} {unit}"
    return f"{ns:.0f} ns"


def share(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    percent = 100 * value
    return "0 %" if percent == 0 else f"{percent:.2f} %" if percent < 1 else f"{percent:.1f} %"


def size(count: float) -> str:
    """Bytes with a unit (powers of 1024)."""
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def bit_rate(bps: float | None) -> str:
    """Bits per second with a unit (powers of 1000)."""
    if bps is None:
        return UNKNOWN
    for scale, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bps >= scale:
            return f"{bps / scale:.{2 if bps < 10 * scale else 1}f} {unit}"
    return f"{bps:.0f} bit/s"
