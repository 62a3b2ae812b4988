"""Log lines of a daemon: one event a line on standard error, words first, then key=value fields.

Where the journal reads them (JOURNAL_STREAM names our standard error) each begins with its level, <4> for a warning,
which the journal takes off. Never raises: a log that is gone must not end what it tells of. Any thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, TextIO

_PLAIN: Final = re.compile(r"[^\s\"=\\]+")
_LONGEST: Final = 4000  # characters; the journal breaks lines of 48 KiB


class Level(IntEnum):
    """As syslog numbers them."""

    ERROR = 3
    WARNING = 4
    NOTICE = 5
    INFO = 6


def event(level: Level, what: str, /, **fields: object) -> None:
    """Write one line; fields that are None are left out."""
    line = text(what, fields)
    prefix = f"<{level.value}>" if to_journal(sys.stderr) else ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"{prefix}{line}", file=sys.stderr, flush=True)


def text(what: str, fields: Mapping[str, object]) -> str:
    """The line, without level and newline.

    >>> text("hook failed", {"hook": "probe_egress on rail0", "tries": 3, "since": None})
    'hook failed hook="probe_egress on rail0" tries=3'
    """
    parts = [_clean(what), *(f"{name}={_value(value)}" for name, value in fields.items() if value is not None)]
    return " ".join(parts)[:_LONGEST]


def to_journal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the journal reads this very stream: a child that was given another one has the variable all the same."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    words = _clean(str(value))
    if _PLAIN.fullmatch(words):
        return words
    return '"' + words.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _clean(words: str) -> str:
    """On one line, and nothing that a terminal obeys."""
    return "".join(each if each.isprintable() else " " for each in words)
