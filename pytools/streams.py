"""Standard streams of the commands as they may be found: closed, full, or in an encoding that lacks our characters."""

from __future__ import annotations

import codecs
import errno
import io
import os
import sys
from typing import Final

UNWRITABLE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)

# What characters become where they cannot be written; µs as ?s could be ms.
PLAIN: Final = {
    "µ": "u",
    "±": "+-",
    "→": "->",
    "←": "<-",
    "\u2013": "-",
    "…": "...",
    "↓": "v",
    "↑": "^",
    "≥": ">=",
    "·": ".",
    "─": "-",
}
_HANDLER: Final = "swerve-plain"


def prepare() -> None:
    """Let streams that our starter has closed (`>&-`) lead nowhere, and others take every character in some way."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else the next file that is opened would have its number
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    codecs.register_error(_HANDLER, _in_plain)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors=_HANDLER)


def write_no_more() -> None:
    """What is buffered still goes nowhere, instead of failing once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(PLAIN.get(each, "?") for each in error.object[error.start : error.end]), error.end
