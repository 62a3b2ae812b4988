"""Why the kernel drops a packet, in its own words: names from the running kernel's event format.

The numbers differ from kernel to kernel, so there is no list here. Files are read when asked; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from pytools.kernel import tracefs

_PAIR: Final = re.compile(r'\{\s*(0x[0-9a-fA-F]+|[0-9]+)\s*,\s*"([^"]*)"\s*\}')


def from_kernel() -> dict[int, str]:
    """Reason -> name, as the running kernel prints them; empty when tracefs cannot be read."""
    return parsed(tracefs.event_format("skb", "kfree_skb"))


def parsed(event_format: str) -> dict[int, str]:
    """The pairs of number and name in the text of an event's format; a number that is listed twice has its first."""
    found: dict[int, str] = {}
    for number, text in _PAIR.findall(event_format.partition("print fmt:")[2]):
        found.setdefault(int(number, 16 if number[:2] == "0x" else 10), text)
    return found


def name(reason: int, names: Mapping[int, str]) -> str:
    """A reason in words."""
    return names.get(reason) or f"reason_{reason}"
