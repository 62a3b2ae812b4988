"""When orders end, and how a suspend is noticed: with clocks that are made up."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steering.deciding.overrides import Moment, Override
from steering.elapsed import Sleeps, Slept

SECOND = 10**9
HOUR = 3600 * SECOND
BEGIN = Moment(1_700_000_000 * SECOND, 5 * HOUR, "one")
ORDER = Override("hold").lasting(2 * HOUR, BEGIN)


def sleeps(readings: Iterable[tuple[int, int, int]]) -> Sleeps:
    return Sleeps(iter(readings).__next__)


def test_a_suspend_is_noticed_once_and_its_length_is_told() -> None:
    found = sleeps([(10, 10, 11), (20, 20, 21), (30, 30 + HOUR, 31), (40, 40 + HOUR, 41), (50, 50 + 3 * HOUR, 51)])
    assert found.look() is None
    assert found.look() == Slept(HOUR - 1, 21, 31)
    assert found.look() is None
    assert found.look() == Slept(2 * HOUR - 1, 41, 51)


@given(st.lists(st.tuples(*[st.integers(0, 10 * SECOND)] * 3), min_size=2, max_size=20))
def test_being_kept_waiting_between_two_readings_is_no_suspend(waits: list[tuple[int, int, int]]) -> None:
    now, readings = 10**12, []
    for first, second, third in waits:
        readings.append((now := now + first, now := now + second, now := now + third))
    found = sleeps([(a, b + HOUR, c) for a, b, c in readings])
    assert [found.look() for _ in readings[1:]] == [None] * (len(readings) - 1)


@given(st.lists(st.tuples(*[st.integers(0, SECOND)] * 3), min_size=2, max_size=9), st.data())
def test_however_long_it_waits_a_long_suspend_is_noticed(
    waits: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    at = data.draw(st.integers(1, len(waits) - 1))
    now, slept, readings = 10**12, 0, []
    for number, (first, second, third) in enumerate(waits):
        slept = HOUR if number >= at else 0
        readings.append((now := now + first, (now := now + second) + slept, now := now + third))
    found = sleeps(readings)
    told = [found.look() for _ in readings[1:]]
    [noticed] = [each for each in told if each is not None]
    assert told.index(noticed) == at - 1 and HOUR - 10 * SECOND < noticed.lasted_ns <= HOUR + 10 * SECOND


@pytest.mark.parametrize("wall_step", [-100 * HOUR, 0, 100 * HOUR])
def test_in_the_same_boot_only_real_time_counts(wall_step: int) -> None:
    def after(passed: int) -> Moment:
        return Moment(BEGIN.unix_ns + passed + wall_step, BEGIN.boot_ns + passed, "one")

    assert ORDER.left_ns(after(0)) == 2 * HOUR
    assert ORDER.left_ns(after(2 * HOUR - 1)) == 1 and ORDER.left_ns(after(2 * HOUR)) == 0


@pytest.mark.parametrize(
    ("wall", "up", "left"),
    [
        (HOUR, HOUR // 2, HOUR),  # as the wall clock says
        (3 * HOUR, HOUR // 2, -HOUR),
        (-1000 * HOUR, HOUR, HOUR),  # the clock was lost: not longer than it was ordered for, from the boot on
        (-1000 * HOUR, 2 * HOUR, 0),
    ],
)
def test_after_a_reboot_the_wall_clock_counts_within_bounds(wall: int, up: int, left: int) -> None:
    assert ORDER.left_ns(Moment(BEGIN.unix_ns + wall, up, "two")) == left


def test_orders_of_an_older_version_and_those_without_end() -> None:
    old = Override("hold", until_unix_ns=BEGIN.unix_ns + HOUR)
    assert old.left_ns(BEGIN) == HOUR
    assert Override("hold").lasting(0, BEGIN).left_ns(BEGIN) is None
