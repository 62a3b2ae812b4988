"""What the daemons log: one event a line on standard error, words first, then key=value fields.

The loggers are those of the standard library below `swerve`; importing this module sets them up. Where the journal
reads our standard error (JOURNAL_STREAM names it) each line begins with its level, <4> for a warning, which the journal
takes off. Never raises: a log that is gone must not end what it tells of. Any thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Final, TextIO

_PLAIN: Final = re.compile(r"[^\s\"=\\]+")
_LONGEST: Final = 4000  # characters; the journal breaks lines of 48 KiB


class Level(IntEnum):
    """As the standard library numbers them, and one between."""

    ERROR = logging.ERROR
    WARNING = logging.WARNING
    NOTICE = 25
    INFO = logging.INFO


_SYSLOG: Final[Mapping[int, int]] = {Level.ERROR: 3, Level.WARNING: 4, Level.NOTICE: 5, Level.INFO: 6}


def logger(part: str = "") -> logging.Logger:
    """The logger of a part of swerve, whose lines begin with its name: `swerve steer: `."""
    return logging.getLogger(f"swerve.{part}" if part else "swerve")


def event(level: Level, what: str, /, **fields: object) -> None:
    """Log an event of the agent; fields that are None are left out."""
    _AGENT.log(level, "%s", text(what, fields))


def text(what: str, fields: Mapping[str, object]) -> str:
    """The line, without level and newline.

    >>> text("hook failed", {"hook": "probe_egress on rail0", "tries": 3, "since": None})
    'hook failed hook="probe_egress on rail0" tries=3'
    """
    parts = [_clean(what), *(f"{name}={_value(value)}" for name, value in fields.items() if value is not None)]
    return " ".join(parts)[:_LONGEST]


def without_repeats(say: Callable[[str], None]) -> Callable[[str], None]:
    """Like `say`, but a line that was the last one already is not said again."""
    last = ""

    def say_once(line: str) -> None:
        nonlocal last
        if line != last:
            last = line
            say(line)

    return say_once


class _ToStderr(logging.Handler):
    """Writes to what is standard error at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        level = f"<{_SYSLOG.get(record.levelno, 6)}>" if to_journal(sys.stderr) else ""
        name = "" if record.name == _AGENT.name else record.name.replace(".", " ") + ": "
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"{level}{name}{record.getMessage()}", file=sys.stderr, flush=True)


_AGENT: Final = logger("agent")
_ROOT: Final = logger()
_ROOT.setLevel(logging.INFO)
_ROOT.addHandler(_ToStderr())
_ROOT.propagate = False


def to_journal(stream: TextIO) -> bool:
    """Whether the journal reads this very stream: a child that was given another one has the variable all the same."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


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
