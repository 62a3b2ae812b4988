"""Units in the agent's configuration (config.py has its keys).

In the file a quantity carries its unit (`interval: 20ms`), in the record its name does (`interval_ms`).
"""

from __future__ import annotations

import math
import re
from typing import Any, Final

from pytools.units import SIZE_UNITS, UNITS, duration_yaml, parse_duration, parse_size, size_yaml

_MIB: Final = SIZE_UNITS["MiB"]
_QUANTITY: Final = re.compile(r"(?!\w*per_s$)(\w+)_(ns|us|ms|s|mib)")
_KEYS: Final = {"hours": "retention", "busiest_ms": "busiest_interval"}  # the others are the name without its unit


def key_of(field: str) -> str:
    """A field of the record (`probe.interval_ms`) as the file names it (`probe.interval`)."""
    section, dot, name = field.rpartition(".")
    match = _QUANTITY.fullmatch(name)
    return section + dot + _KEYS.get(name, match[1] if match else name)


def unit_of(name: str) -> str:
    """The unit in the name of a field; empty where its value is a plain number."""
    match = _QUANTITY.fullmatch(name.rpartition(".")[2])
    return "h" if name.endswith("hours") else match[2] if match else ""


def written(name: str, value: Any) -> Any:
    """The value of a field as it is written in a file."""
    unit = unit_of(name)
    if not unit or not math.isfinite(value):
        return value
    return size_yaml(round(value * _MIB)) if unit == "mib" else duration_yaml(round(value * UNITS[unit]))


def quantity(name: str, text: object) -> float:
    """A quantity of a file as the value of the field; raises ValueError."""
    unit = unit_of(name)
    value = parse_size(text) / _MIB if unit == "mib" else parse_duration(text) / UNITS[unit]
    return int(value) if value.is_integer() else value
