"""Times as people type them: 03:10, 2026-11-20 03:10:30, 15m. Pure; results are CLOCK_REALTIME nanoseconds.

A time without a date is the latest such time before now; one without a zone is in this host's. A duration is so long
ago.
"""

from __future__ import annotations

import contextlib
import re
from datetime import datetime, timedelta, tzinfo
from typing import Final

from pytools.errors import UsageError
from pytools.units import parse_duration

_LONGEST_NS: Final = 1 << 100  # "99999999d" is before everything, no error
_CLOCK: Final = re.compile(r"(\d{1,2}):(\d\d)(?::(\d\d(?:\.\d+)?))?")


def parse(text: str, now_ns: int, zone: tzinfo | None = None) -> int:
    """The instant that was meant.

    Parameters
    ----------
    text : str
        A time of day, a date and time (ISO 8601), or a duration.
    now_ns : int
        CLOCK_REALTIME.
    zone : tzinfo, optional
        What a time without a zone is in; None for this host's.

    Raises
    ------
    UsageError
        If it is none of these.
    """
    given = text.strip()
    with contextlib.suppress(ValueError):
        return now_ns - parse_duration("".join(given.split()), _LONGEST_NS)
    now = datetime.fromtimestamp(now_ns // 1_000_000_000, zone)
    try:
        found = _latest(given, now) or datetime.fromisoformat(given)
        if found.tzinfo is None:
            found = found.replace(tzinfo=zone)  # None: what such a time is in this host's zone, on that day
        instant_ns = round(found.timestamp() * 1e6) * 1000
    except (ValueError, OverflowError, OSError):
        raise UsageError(
            f"{text!r} is not a time", "write it like 03:10, '2026-11-20 03:10', or 15m for 15 minutes ago"
        ) from None
    return instant_ns


def check_order(since_ns: int, until_ns: int, now_ns: int) -> None:
    """Raise UsageError where a stretch of time ends before it begins, or is still to come."""
    if since_ns > now_ns:
        raise UsageError("--since is still to come", "name a time that has been, like 10m or 14:30")
    if until_ns <= since_ns:
        raise UsageError("--until is before --since", "a time without a date is the latest such time before now")


def _latest(given: str, now: datetime) -> datetime | None:
    """A time of day as the latest one before now; None when it is something else."""
    clock = _CLOCK.fullmatch(given)
    if clock is None:
        return None
    second = float(clock[3] or 0)
    today = now.replace(hour=int(clock[1]), minute=int(clock[2]), second=int(second),
                        microsecond=round(second % 1 * 1e6) % 1_000_000)  # fmt: skip
    # fold: when summer ends, an hour comes twice
    each = (day.replace(fold=fold) for day in (today, today - timedelta(days=1)) for fold in (1, 0))
    return next(found for found in each if found.timestamp() <= now.timestamp())
