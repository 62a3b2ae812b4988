"""Events of the running kernel as tracefs describes them: whether one is there, and which fields it has.

Light to import. Files are read when asked; any thread.
"""

from __future__ import annotations

import re
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
