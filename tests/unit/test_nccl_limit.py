"""Which operations the profiler plugin records: pytools/sources/jobs/nccl/limit.h."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nccl_kit import limit

PERIOD_NS = ctypes.c_uint64.in_dll(limit(), "period_ns").value
NOW = 7_200_000_000  # 2027, in periods since 1970
PERIODS = st.integers(NOW - 1_000_000_000, NOW + 1_000_000_000)


@given(PERIODS)
def test_periods_follow_each_other(period: int) -> None:
    begins, ends = limit().begins(period), limit().begins(period + 1)
    assert 0 < ends - begins <= 2 * PERIOD_NS
    assert limit().at(begins) == limit().at(ends - 1) == period and limit().at(ends) == period + 1


@given(PERIODS)
def test_a_period_begins_at_the_same_time_in_every_rank_of_every_release(period: int) -> None:
    mixed = period * 0x9E3779B97F4A7C15 % 2**64
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 % 2**64
    assert limit().begins(period) == period * 250_000_000 + (mixed >> 32) % 250_000_000


@pytest.mark.parametrize(
    "step_ns", [PERIOD_NS // 7, PERIOD_NS // 2, PERIOD_NS, 2 * PERIOD_NS, 1_000_000_000, 333_000_000]
)
def test_periods_begin_anywhere_in_a_step(step_ns: int) -> None:
    begins = np.array([limit().begins(NOW + each) for each in range(2400)])  # ten minutes
    parts = np.bincount(begins % step_ns * 10 // step_ns, minlength=10) / len(begins)
    assert parts.min() > 0.07 and parts.max() < 0.13


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_sample_says_whether_operations_are_missing_beside_it(reached: list[bool]) -> None:
    sample, before = 0, False
    for number, now in enumerate(reached):
        assert sample == sum(reached[:number]) % 128 * 2 + before
        sample, before = limit().next(sample | now, now), now
