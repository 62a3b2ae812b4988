"""How often the mesh looks, and at which paths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.sources.probing.attention import READ_EVERY_NS, Attention, next_slow
from pytools.sources.probing.liveness import Liveness
from pytools.sources.probing.sessions import EXTRA_EVERY_NS, EXTRA_TICKS

MS = 1_000_000
INTERVAL_NS = 20 * MS
WINDOW_ENDS_NS = 10**15  # later than everything


def made(paths: int = 3, probes: int = 3) -> tuple[Attention, Liveness]:
    attention, liveness = Attention(INTERVAL_NS), Liveness(INTERVAL_NS)
    liveness.grow(paths)
    attention.grow(paths, probes)
    attention.watched = True
    return attention, liveness


def slow(*counts: int) -> np.ndarray:
    return np.array(counts, np.uint32)


def test_a_slow_path_is_told_of_for_a_while_after_its_last_slow_sample() -> None:
    attention, liveness = made()
    assert attention.look(slow(0, 0, 0), liveness, 0) is None and not attention.alerted
    found = attention.look(slow(0, 2, 0), liveness, 1000 * MS)
    assert found is not None and found.tolist() == [False, True, False]
    assert attention.look(slow(0, 0, 0), liveness, 1199 * MS) is not None
    assert attention.look(slow(0, 0, 0), liveness, 1200 * MS) is None and not attention.alerted


def told_every(attention: Attention, liveness: Liveness, begin_ms: int, end_ms: int, *counts: int) -> dict[int, int]:
    """By path, in how many looks it was told of, each when the one before asked for it."""
    told = dict.fromkeys(range(len(counts)), 0)
    now_ns = begin_ms * MS
    while now_ns < end_ms * MS:
        found = attention.look(slow(*counts), liveness, now_ns)
        for path in [] if found is None else np.flatnonzero(found).tolist():
            told[path] += 1
        now_ns = attention.next_read(now_ns, 0, WINDOW_ENDS_NS)
    return told


def test_a_path_that_stays_slow_is_told_of_less_often_and_one_that_becomes_so_beside_it_is_not() -> None:
    attention, liveness = made()
    first = told_every(attention, liveness, 1000, 3000, 0, 5, 0)
    assert 98 <= first[1] <= 101 and first[0] == first[2] == 0
    assert 49 <= told_every(attention, liveness, 3000, 8000, 0, 5, 0)[1] <= 52
    assert attention.standing and not attention.alerted
    both = told_every(attention, liveness, 8000, 10_000, 5, 5, 0)
    assert 98 <= both[0] <= 101 and 18 <= both[1] <= 26
    assert told_every(attention, liveness, 10_000, 15_000, 0, 0, 0)[0] <= 12 and not attention.standing
    assert 48 <= told_every(attention, liveness, 15_000, 16_000, 5, 0, 0)[0] <= 52  # it is news again


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.booleans())
def test_the_next_reading_is_soon_and_in_step_with_the_probes(now_ns: int, sends_ns: int, alerted: bool) -> None:
    attention, _ = made()
    attention.alerted = alerted
    due_ns = attention.next_read(now_ns, sends_ns, WINDOW_ENDS_NS)
    assert (due_ns - sends_ns) % INTERVAL_NS == (INTERVAL_NS // 8 if alerted else INTERVAL_NS * 3 // 4)
    longest_ns = INTERVAL_NS if alerted else attention.read_ns
    assert longest_ns - INTERVAL_NS < due_ns - now_ns <= longest_ns


def test_while_extra_probes_leave_it_reads_every_few_of_them() -> None:
    attention, _ = made()
    attention.hurry(0)
    assert attention.next_read(0, 0, WINDOW_ENDS_NS) == 8 * MS
    end_ns = EXTRA_TICKS * EXTRA_EVERY_NS
    assert attention.hurried(end_ns - 1) and not attention.hurried(end_ns)


@pytest.mark.parametrize(("probes", "read_ms"), [(3, 1000), (34, 1000), (512, 160), (4096, 20), (100_000, 20)])
def test_while_nobody_reads_short_windows_the_ring_is_read_at_the_end_of_long_ones(probes: int, read_ms: int) -> None:
    attention, liveness = made(probes=probes)
    attention.watched = False
    assert attention.next_read(7 * MS, 0, 1007 * MS) == (7 + read_ms) * MS
    assert attention.look(slow(0, 2, 0), liveness, 1000 * MS) is not None  # all is not well
    assert attention.next_read(1000 * MS, 0, WINDOW_ENDS_NS) <= 1000 * MS + INTERVAL_NS
    attention.alerted, attention.standing = False, True  # it has been slow for long
    assert attention.next_read(1000 * MS, 0, WINDOW_ENDS_NS) <= 1100 * MS


@pytest.mark.parametrize(("probes", "read_ms"), [(3, 200), (512, 160), (4096, 20), (100_000, 20)])
def test_the_ring_is_read_before_it_is_half_full(probes: int, read_ms: int) -> None:
    attention, _ = made(probes=probes)
    assert attention.read_ns == read_ms * MS <= READ_EVERY_NS


def test_the_first_slow_samples_wake_one_by_one() -> None:
    assert next_slow(slow(0, 1, 2, 3, 4, 900)).tolist() == [1, 2, 3, 4, 4, 4]
