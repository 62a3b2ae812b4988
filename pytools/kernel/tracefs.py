"""Events of the running kernel as tracefs describes them: whether one is there, and which fields it has.

Light to import. Files are read when asked; any thread.

Why the kernel drops a packet differs from kernel to kernel, so the names of the reasons are read here too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_PLACES: Final = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
_FIELD: Final = re.compile(r"^\s*field:[^;]*?(\w+)(?:\[\w*\])?;", re.MULTILINE)


def event_format(system: str, event: str) -> str:
    """The text of an event's format; empty when there is no such event, or tracefs cannot be read."""
    for place in _PLACES:
        try:
            return (place / "events" / system / event / "format").read_text(errors="replace")
        except OSError:
            continue
    return ""


def fields(system: str, event: str) -> frozenset[str]:
    """The fields of an event; empty when there is no such event, or tracefs cannot be read."""
    return frozenset(_FIELD.findall(event_format(system, event)))


_PAIR: Final = re.compile(r'\{\s*(0x[0-9a-fA-F]+|[0-9]+)\s*,\s*"([^"]*)"\s*\}')


def drop_reasons() -> dict[int, str]:
    """Reason -> name, as the running kernel prints them; empty when tracefs cannot be read."""
    return reasons_in(event_format("skb", "kfree_skb"))


def reasons_in(event_format: str) -> dict[int, str]:
    """The pairs of number and name in the text of an event's format; a number that is listed twice has its first."""
    found: dict[int, str] = {}
    for number, text in _PAIR.findall(event_format.partition("print fmt:")[2]):
        found.setdefault(int(number, 16 if number[:2] == "0x" else 10), text)
    return found


def name(reason: int, names: Mapping[int, str]) -> str:
    return names.get(reason) or f"reason_{reason}"
