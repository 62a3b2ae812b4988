"""Times as people type them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.errors import UsageError
from pytools.views import times

SECOND = 1_000_000_000
NOW = datetime(2026, 11, 20, 4, 0, 0, tzinfo=UTC)
NOW_NS = int(NOW.timestamp()) * SECOND
EAST = timezone(timedelta(hours=2))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("03:10", datetime(2026, 11, 20, 3, 10, tzinfo=UTC)),
        ("3:10:05", datetime(2026, 11, 20, 3, 10, 5, tzinfo=UTC)),
        ("03:10:05.25", datetime(2026, 11, 20, 3, 10, 5, 250_000, tzinfo=UTC)),
        ("04:00", NOW),
        ("04:01", datetime(2026, 11, 19, 4, 1, tzinfo=UTC)),  # still to come today: yesterday's
        ("2026-11-19 23:59", datetime(2026, 11, 19, 23, 59, tzinfo=UTC)),
        ("2026-11-19T23:59:01Z", datetime(2026, 11, 19, 23, 59, 1, tzinfo=UTC)),
        ("2026-11-19T23:59:01+02:00", datetime(2026, 11, 19, 21, 59, 1, tzinfo=UTC)),
        ("2026-11-19", datetime(2026, 11, 19, tzinfo=UTC)),
        ("15m", NOW - timedelta(minutes=15)),
        ("1.5h", NOW - timedelta(minutes=90)),
        (" 90 s ", NOW - timedelta(seconds=90)),
        ("2d", NOW - timedelta(days=2)),
    ],
)
def test_what_is_meant(text: str, meant: datetime) -> None:
    assert times.parse(text, NOW_NS, UTC) == round(meant.timestamp() * 1e6) * 1000


def test_a_time_of_day_is_in_the_zone() -> None:
    assert times.parse("05:30", NOW_NS, EAST) == NOW_NS - 1800 * SECOND
    assert times.parse("06:30", NOW_NS, EAST) == NOW_NS + 1800 * SECOND - 86400 * SECOND
    assert times.parse("2026-11-20 05:30", NOW_NS, EAST) == NOW_NS - 1800 * SECOND


def test_without_a_zone_it_is_this_hosts() -> None:
    here = datetime(2026, 11, 20, 3, 10).astimezone()
    assert times.parse("2026-11-20 03:10", NOW_NS) == int(here.timestamp()) * SECOND


@pytest.mark.parametrize("text", ["", "noon", "25:00", "03:60", "3", "15x", "-5m", "2026-13-01", "99999999999999d"])
def test_what_is_no_time_is_an_error_with_an_example(text: str) -> None:
    if text.endswith("d"):
        assert times.parse(text, NOW_NS, UTC) < 0  # before everything
        return
    with pytest.raises(UsageError, match=r"03:10"):
        times.parse(text, NOW_NS, UTC)


@given(st.text(max_size=30))
def test_anything_typed_is_a_time_or_an_error(text: str) -> None:
    try:
        found = times.parse(text, NOW_NS, UTC)
    except UsageError:
        return
    assert isinstance(found, int)


SUMMER, WINTER = timezone(timedelta(hours=2)), timezone(timedelta(hours=1))


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
@pytest.mark.parametrize(
    ("now", "text", "meant"),
    [
        (datetime(2026, 3, 29, 10, 0, tzinfo=SUMMER), "01:30", datetime(2026, 3, 29, 1, 30, tzinfo=WINTER)),
        (datetime(2026, 3, 29, 10, 0, tzinfo=SUMMER), "23:00", datetime(2026, 3, 28, 23, 0, tzinfo=WINTER)),
        (datetime(2026, 10, 25, 10, 0, tzinfo=WINTER), "01:30", datetime(2026, 10, 25, 1, 30, tzinfo=SUMMER)),
        (datetime(2026, 10, 25, 10, 0, tzinfo=WINTER), "23:00", datetime(2026, 10, 24, 23, 0, tzinfo=SUMMER)),
        (datetime(2026, 10, 25, 10, 0, tzinfo=WINTER), "02:30", datetime(2026, 10, 25, 2, 30, tzinfo=WINTER)),
        (datetime(2026, 10, 25, 2, 15, tzinfo=WINTER), "02:30", datetime(2026, 10, 25, 2, 30, tzinfo=SUMMER)),
        (
            datetime(2026, 10, 25, 10, 0, tzinfo=WINTER),
            "2026-10-25 01:30",
            datetime(2026, 10, 25, 1, 30, tzinfo=SUMMER),
        ),
    ],
)
def test_a_time_before_the_clocks_were_changed(
    monkeypatch: pytest.MonkeyPatch, zone: str | None, now: datetime, text: str, meant: datetime
) -> None:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Europe/Berlin")
        time.tzset()
        found = times.parse(text, int(now.timestamp()) * SECOND, ZoneInfo(zone) if zone else None)
    time.tzset()
    assert found == int(meant.timestamp()) * SECOND
