"""What the live view reads of a `path_delay` without decoding it: most are short windows, and few figures are shown.

Only what is named here is taken out of a line, which costs a third of decoding all of it. Pure; nanoseconds.
"""

from __future__ import annotations

from typing import Final

import msgspec

OF_A_PATH: Final = b'{"type":"path_delay"'
_FLOW_DELAY: Final = b'{"type":"app_delay"'
_OF_ALL_FLOWS: Final = b'"local":"",'


class _Way(msgspec.Struct, gc=False):
    queueing_last_ns: int | None = None


class Glance(msgspec.Struct, tag="path_delay", gc=False):
    """A window of a path, by the few of its figures that a histogram takes: queueing of the newest probe."""

    at_ns: int
    path: msgspec.Raw  # as it is written: the same bytes for the same path
    window_ns: int
    forward: _Way
    reverse: _Way


_decode: Final = msgspec.json.Decoder(Glance).decode


def glance(line: bytes) -> Glance | None:
    """What can be seen at a glance; None where the line is no `path_delay`, which begins as `OF_A_PATH` does."""
    try:
        return _decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def is_of_one_flow(line: bytes) -> bool:
    """Whether it is an `app_delay` of a single flow, of which the view shows nothing."""
    return line.startswith(_FLOW_DELAY) and _OF_ALL_FLOWS not in line
