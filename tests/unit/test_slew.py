"""The kernel's own correction of the clock is understood, and only ever read."""

from __future__ import annotations

import ctypes
import time

import pytest
import support

from pytools.sources.clocks import slew
from pytools.sources.clocks.slew import STA_NANO, STA_PLL, Timex, slew_ppb

STILL = {"freq": 0, "tick": 10_000, "status": 0, "offset": 0, "constant": 2}


@pytest.mark.parametrize(
    ("change", "ppb"),
    [
        ({}, 0.0),
        ({"freq": 65_536}, 1000.0),  # 1 ppm
        ({"freq": -1_638_400}, -25_000.0),
        ({"tick": 10_001}, 100_000.0),
        ({"tick": 9_999, "freq": 6_553_600}, 0.0),  # how chrony makes one of the other
        ({"status": STA_PLL | STA_NANO, "offset": 16_000}, 1000.0),  # a sixteenth of it in the next second
        ({"status": STA_PLL, "offset": -16}, -1000.0),  # microseconds without STA_NANO
        ({"status": STA_PLL | STA_NANO, "offset": 16_000, "constant": 6}, 62.5),
        ({"status": STA_NANO, "offset": 16_000}, 0.0),  # the loop is off
    ],
)
def test_the_kernels_units_are_understood(change: dict[str, int], ppb: float) -> None:
    assert slew_ppb(Timex(**STILL | change)) == pytest.approx(ppb)


def test_a_reading_asks_for_no_change_and_takes_the_fields() -> None:
    asked = []

    def kernel(reply: Timex) -> int:
        asked.append(reply.modes)
        reply.freq, reply.tick, reply.status, reply.offset, reply.constant = 1, 2, 3, 4, 5
        return 0

    found = slew.read(kernel)
    assert found is not None
    assert (found.freq, found.tick, found.status, found.offset, found.constant) == (1, 2, 3, 4, 5)
    assert asked == [0]


def test_a_kernel_that_refuses_gives_nothing() -> None:
    assert slew.read(lambda _: -1) is None


@pytest.mark.parametrize("modes", [0x0002, 0x4000, 0x8001])
def test_a_change_is_never_passed_on(modes: int) -> None:
    with pytest.raises(ValueError, match="would change a clock"):
        slew.adjtimex(Timex(modes=modes))


def test_the_structure_has_the_kernels_size() -> None:
    assert ctypes.sizeof(Timex) == 208


def test_this_hosts_slew_is_within_what_a_kernel_allows() -> None:
    correction = slew.read()
    assert correction is not None
    assert abs(correction.freq) <= 500 << 16  # the kernel's own limit
    assert 9_000 <= correction.tick <= 11_000
    ppb = slew.host_slew_ppb()
    assert ppb is not None
    assert abs(ppb) <= 1.1e8


def test_the_slew_is_how_the_clock_runs_against_the_raw_one() -> None:
    def reading() -> tuple[int, int, int]:
        """Width of the reading, CLOCK_MONOTONIC less the raw clock, the raw clock: the narrowest of some."""
        found = []
        for _ in range(100):
            before, raw, after = (
                time.clock_gettime_ns(clock)
                for clock in (time.CLOCK_MONOTONIC, time.CLOCK_MONOTONIC_RAW, time.CLOCK_MONOTONIC)
            )
            found.append((after - before, (before + after) // 2 - raw, raw))
        return min(found)

    slew_before = slew.host_slew_ppb()
    first = reading()
    support.wait_until(
        lambda: time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW) - first[2] > 500_000_000, 20, "half a second"
    )
    last = reading()
    slew_after = slew.host_slew_ppb()
    assert slew_before is not None
    assert slew_after is not None
    elapsed = last[2] - first[2]
    measured_ppb = (last[1] - first[1]) / elapsed * 1e9
    allowed_ppb = (first[0] + last[0]) / elapsed * 1e9 + abs(slew_after - slew_before) + 100
    assert abs(measured_ppb - slew_after) <= allowed_ppb
