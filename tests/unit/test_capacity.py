"""What interfaces carry, and the shares that follow from it."""

from __future__ import annotations

import policy_kit as kit
import pytest
from msgspec.structs import replace
from steering_kit import SECOND, group, path

from pytools.signals import Link
from steering.deciding.capacity import Estimate, shares_by, updated

RAILS = group({1: [], 2: []})


def link(at_s: int, mbit: float, speed_mbps: int | None = None) -> Link:
    report = kit.link(path(1), at_s * SECOND)
    sent = replace(report.window, sent_bytes=int(mbit * 1e6 / 8))
    return replace(report, window=sent, speed_mbps=speed_mbps)


def test_with_a_queue_what_gets_through_is_the_capacity() -> None:
    known = updated(None, link(1, 90), queued=False)
    assert known == Estimate(90e6, 90e6, SECOND, False, 90e6, SECOND)
    cut = updated(known, link(2, 10), queued=True)
    assert cut is not None and cut.carries_bps == 10e6


def test_without_a_queue_it_is_the_speed_or_the_most_that_was_seen_lately() -> None:
    known = updated(updated(None, link(1, 90), queued=False), link(2, 5), queued=False)
    assert known is not None and (known.carries_bps, known.load_bps) == (90e6, 5e6)
    late = updated(known, link(100, 5), queued=False)
    assert late is not None and late.carries_bps == 5e6
    steady: Estimate | None = known
    for at_s in range(3, 100):
        steady = updated(steady, link(at_s, 5), queued=False)
    assert steady is not None and steady.carries_bps == 5e6, "a minute after it was seen"
    fast = updated(known, link(3, 5, speed_mbps=1000), queued=False)
    assert fast is not None and fast.carries_bps == 1e9
    assert updated(known, link(1, 50), queued=False) == known, "an older window changes nothing"


def test_shares_are_proportional_and_never_nothing() -> None:
    found = {"rail1": Estimate(10e6, 10e6, 1, True), "rail2": Estimate(100e6, 40e6, 1, False)}
    assert shares_by("capacity", RAILS, found) == {11: pytest.approx(0.1), 12: 1.0}
    assert shares_by("headroom", RAILS, found) == {11: 0.01, 12: 1.0}, "behind a queue nothing is to spare"
    assert shares_by("capacity", RAILS, {"rail1": found["rail1"]}) is None
    full = found | {"rail1": Estimate(1.0, 1.0, 1, True)}
    assert shares_by("capacity", RAILS, full) == {11: 0.01, 12: 1.0}


def test_where_none_has_anything_to_spare_each_keeps_its_share() -> None:
    queued = {name: Estimate(bps, bps, 1, True) for name, bps in (("rail1", 10e6), ("rail2", 90e6))}
    assert shares_by("headroom", RAILS, queued) == {11: 1.0, 12: 1.0}


def test_a_rail_that_lets_nothing_through_is_measured_and_the_others_are_balanced() -> None:
    silent = updated(updated(None, link(1, 90), queued=False), link(2, 0), queued=True)
    idle = updated(None, link(2, 0), queued=False)
    assert silent is not None and idle is not None
    busy = Estimate(100e6, 40e6, 1, False)
    assert shares_by("capacity", RAILS, {"rail1": silent, "rail2": busy}) == {11: 0.01, 12: 1.0}
    assert shares_by("capacity", RAILS, {"rail1": idle, "rail2": busy}) is None, "nothing was sent over it yet"


def test_original_weights_count() -> None:
    heavy = group({1: [], 2: []}, weights={11: 3, 12: 1})
    found = {name: Estimate(60e6, 0.0, 1, False) for name in ("rail1", "rail2")}
    assert shares_by("capacity", heavy, found) == {11: pytest.approx(1 / 3), 12: 1.0}
