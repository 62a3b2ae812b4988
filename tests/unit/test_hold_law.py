"""The law of holds: bpf/steer/hold_law.h and steering/hold/law.py are the same, and what a packet can rely on."""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import native_build
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steering.hold import law

BPF = Path(__file__).resolve().parents[2] / "bpf"
SECOND = 1_000_000_000
START = 5 * SECOND


def structure(record: type[law.State] | type[law.Limits]) -> type[ctypes.Structure]:
    return type(record.__name__, (ctypes.Structure,), {"_fields_": [(f.name, ctypes.c_uint64) for f in fields(record)]})


CState, CLimits = structure(law.State), structure(law.Limits)


@functools.cache
def compiled() -> ctypes.CDLL:
    library = native_build.library("hold_law", BPF)
    library.release.restype = library.root.restype = ctypes.c_uint64
    library.root.argtypes = [ctypes.c_uint64]
    library.sample.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_uint64] * 3]
    library.release.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32]
    return library


LIMITS = st.builds(
    law.Limits,
    until_ns=st.integers(0, 10 * SECOND),
    second_ns=st.integers(0, 10 * SECOND),
    threshold_ns=st.integers(1, 50_000_000),
    longest_ns=st.integers(0, SECOND),
    fresh_ns=st.integers(0, SECOND),
    floor=st.integers(0, 1 << 40),
    gain=st.integers(0, 512),
)
SAMPLE = st.tuples(st.integers(-1_000, 2_000_000_000), st.integers(0, 200_000_000))  # the probe's age, its queueing
PACKET = st.integers(40, 1 << 19)
STEPS = st.lists(st.tuples(st.integers(0, 3_000_000_000) | st.integers(0, 5_000_000), SAMPLE | PACKET), max_size=60)


# A hold at work: its lease goes on, and samples follow each other within milliseconds.
WORKING = st.builds(
    law.Limits,
    until_ns=st.just(1000 * SECOND),
    second_ns=st.integers(0, START) | st.integers(START - 150_000_000, START),
    threshold_ns=st.integers(1, 5_000_000),
    longest_ns=st.integers(1_000_000, 50_000_000),
    fresh_ns=st.integers(5_000_000, SECOND),
    floor=st.integers(0, 10_000_000),
    gain=st.integers(0, 512),
)
SOON = st.integers(0, 2_000_000)


def work(queue: st.SearchStrategy[int]) -> st.SearchStrategy[list[Any]]:
    """Steps of a hold at work, whose samples found these queues."""
    return st.lists(st.tuples(SOON, st.tuples(SOON, queue) | st.integers(40, 65_536)), min_size=20, max_size=60)


@settings(max_examples=300)
@given(st.lists(st.tuples(LIMITS, STEPS), min_size=1, max_size=3))
def test_the_header_and_its_repetition_agree_after_every_step(parts: list[tuple[law.Limits, Any]]) -> None:
    compare(parts)


@settings(max_examples=300)
@given(st.tuples(WORKING, work(st.integers(0, 20_000_000))))
def test_they_agree_while_a_hold_is_at_work(part: tuple[law.Limits, Any]) -> None:
    compare([part])


@settings(max_examples=300)
@given(st.tuples(WORKING, work(st.integers(15_000_000, 200_000_000))), st.integers(250_000_000, SECOND))
def test_they_agree_where_the_queue_has_been_long(part: tuple[law.Limits, Any], long_ns: int) -> None:
    just_now = START - 1_000_000
    compare([part], law.State(short_ns=START - long_ns, sent_ns=just_now, taken_ns=just_now))


def compare(parts: list[tuple[law.Limits, Any]], begun: law.State | None = None) -> None:
    """Have both take these steps, and look at all that they say and know."""
    library, state, now = compiled(), begun or law.State(), START
    mirror = CState(*astuple(state))
    for limits, steps in parts:
        native = CLimits(*astuple(limits))
        for later, what in steps:
            now += later
            if isinstance(what, int):
                assert library.release(ctypes.byref(mirror), ctypes.byref(native), now, what) == law.release(
                    state, limits, now, what
                )
            else:
                age, queue = what
                assert library.sample(ctypes.byref(mirror), ctypes.byref(native), now, now - age, queue) == law.sample(
                    state, limits, now, now - age, queue
                )
            assert tuple(getattr(mirror, f.name) for f in fields(law.State)) == astuple(state)


@given(st.integers(0, law.MOST_RATE * law.UNIT_RATE))
def test_the_root_is_a_root(value: int) -> None:
    exact = math.isqrt(value)
    assert exact <= law.root(value) <= exact + exact // 1000 + 1
    assert compiled().root(value) == law.root(value)


@given(LIMITS, STEPS)
def test_no_packet_is_held_longer_than_the_longest_or_leaves_before_an_earlier_one(
    limits: law.Limits, steps: Any
) -> None:
    state, now, latest = law.State(), START, 0
    for later, what in steps:
        now += later
        if isinstance(what, int):
            at = law.release(state, limits, now, what)
            assert at == 0 or now < at <= now + limits.longest_ns
            leaves = at or now
            assert leaves >= latest
            latest = leaves
        else:
            law.sample(state, limits, now, now - what[0], what[1])


def test_past_the_lease_packets_wait_only_for_those_that_were_held_before() -> None:
    limits = law.Limits(START + 10_000_000, 0, 1_000_000, 20_000_000, SECOND, 0, 256)
    state = law.State()
    law.sample(state, limits, START, START - 1000, 9_000_000)
    assert law.release(state, limits, START + 7_000_000, 1500) == 0  # the pause of 7 ms is over
    assert law.sample(state, limits, START + 9_999_999, START + 9_000_000, 9_000_000) == law.Result.CONGESTED
    held = law.release(state, limits, START + 9_999_999, 1500)
    assert held > START + 10_000_000
    assert law.release(state, limits, START + 10_000_000, 1500) == held
    assert law.release(state, limits, held, 1500) == 0
    assert law.sample(state, limits, held, held - 1000, 9_000_000) == law.Result.OFF


@pytest.mark.parametrize(("age", "result"), [(100_000_000, law.Result.CONGESTED), (100_000_001, law.Result.STALE)])
def test_a_sample_counts_for_as_long_as_it_is_fresh(age: int, result: law.Result) -> None:
    limits = law.Limits(10 * SECOND, 0, 1_000_000, 20_000_000, 100_000_000, 0, 256)
    assert law.sample(law.State(), limits, START, START - age, 9_000_000) == result


def test_without_a_fresh_sample_nothing_is_held() -> None:
    limits = law.Limits(10 * SECOND, 0, 1_000_000, SECOND, 100_000_000, 0, 256)
    state = law.State()
    law.sample(state, limits, START, START - 1000, 500_000_000)
    assert law.release(state, limits, START + 100_000_000, 1500) == START + 498_000_000
    assert law.release(state, limits, START + 498_000_001, 1500) == 0


def test_a_sample_that_a_newer_one_overtook_changes_nothing() -> None:
    limits = law.Limits(10 * SECOND, 0, 1_000_000, SECOND, 100_000_000, 0, 256)
    state = law.State()
    law.sample(state, limits, START, START - 1000, 500_000)
    before = astuple(state)
    assert law.sample(state, limits, START + 10, START - 1000, 500_000_000) == law.Result.STALE
    assert astuple(state) == before


def test_a_pause_that_the_probe_could_not_see_is_not_made_twice() -> None:
    limits = law.Limits(10 * SECOND, 0, 1_000_000, SECOND, 100_000_000, 0, 256)
    state = law.State()
    law.sample(state, limits, START, START - 2000, 9_000_000)
    assert state.next_ns == START + 7_000_000
    assert law.sample(state, limits, START + 1_000_000, START - 1000, 9_000_000) == law.Result.CONGESTED
    assert state.next_ns == START + 7_000_000
    law.sample(state, limits, START + 2_000_000, START, 9_500_000)
    assert state.next_ns == START + 7_500_000


def engaged(rate: int = 1_000_000, threshold: int = 1_000_000) -> tuple[law.State, law.Limits]:
    """A state that lets `rate` pass, in balance: the last sample found just the threshold."""
    state = law.State(sent_ns=START - 2_000_000, queue_ns=threshold, taken_ns=START - 1_000_000, held_ns=START)
    state.rate, state.gap = rate, (SECOND << law.SHIFT) // rate
    state.last_ns, state.window_ns, state.own_rate, state.short_ns = START, START - 100_000, rate, START
    return state, law.Limits(10 * SECOND, 0, threshold, 20_000_000, SECOND, 0, 256)


def test_a_queue_that_grows_lowers_the_rate_and_one_that_shrinks_raises_it() -> None:
    for queue, lower in ((1_500_000, True), (500_000, False)):
        state, limits = engaged()
        law.sample(state, limits, START, START - 500_000, queue)
        assert (state.rate < 1_000_000) == lower


def test_a_rate_far_above_what_comes_is_not_raised_by_packets_that_wait_for_a_pause() -> None:
    for own, raised in ((500_000, True), (499_999, False)):
        state, limits = engaged()
        state.own_rate, state.window_ns = own, START  # measured less than a millisecond ago
        law.sample(state, limits, START, START - 500_000, 0)
        assert (state.rate > 1_000_000) == raised


@pytest.mark.parametrize(
    ("rate", "queue", "after"), [(0, 250_001, 400_000), (0, 250_000, 0), (9**7, 0, 400_000), (300_000, 0, 400_000)]
)
def test_after_silence_a_host_begins_slowly_where_a_queue_is_or_was(rate: int, queue: int, after: int) -> None:
    state, limits = engaged(rate or 1)
    limits.floor, state.queue_ns, state.rate = 100_000, queue, rate
    state.last_ns = 0
    state.left_ns = START - law.IDLE_NS
    law.release(state, limits, START, 1500)
    assert state.rate == rate  # not silent for longer than that
    law.release(state, limits, START + law.IDLE_NS + 1, 1500)
    assert state.rate == after


@pytest.mark.parametrize(("packets", "rate"), [(11, 440_000), (1, 0)])
def test_after_silence_a_host_begins_at_what_its_last_burst_came_to_if_it_was_held(packets: int, rate: int) -> None:
    state, limits = engaged()
    limits.floor, limits.longest_ns = 100_000, SECOND
    began_ns = START + 2 * law.IDLE_NS
    for _ in range(packets):  # at four times the floor one leaves in 3.75 ms, the first at once
        law.release(state, limits, began_ns, 1500)
    law.release(state, limits, began_ns + 10 * law.IDLE_NS, 1500)
    assert state.burst_rate == rate
    assert state.rate == (rate or 400_000)


def test_a_hold_that_is_forgotten_forgets_the_last_burst() -> None:
    state, limits = engaged()
    state.burst_rate = 440_000
    law.sample(state, limits, START + law.MEMORY_NS + 1, START + law.MEMORY_NS, 0)
    assert not state.burst_rate


def test_a_packet_that_waits_is_no_silence() -> None:
    state, limits = engaged()
    limits.floor, state.burst_ns = 100_000, START
    state.left_ns = START - 5 * law.IDLE_NS  # nothing has come since,
    state.last_ns = START - law.IDLE_NS  # but that left later
    law.release(state, limits, START, 1500)
    assert state.rate == 1_000_000
    state.left_ns, state.last_ns = START - 5 * law.IDLE_NS, START - law.IDLE_NS - 1
    law.release(state, limits, START, 1500)
    assert state.rate == 400_000


LONG_NS = 4_000_001  # a queue of more than four thresholds


def watched(state: law.State, limits: law.Limits, since_ns: int, until_ns: int) -> list[int]:
    """Find a long queue every 10 ms; in which samples, of that time, something was held."""
    held = []
    for now in range(since_ns, until_ns + 1, 10_000_000):
        law.sample(state, limits, now, now - 1000, LONG_NS)
        if law.release(state, limits, now, 1500) > now:
            held.append((now - START) // 1_000_000)
    return held


def test_where_others_keep_the_queue_long_all_hosts_hold_in_the_same_tenth_of_each_second() -> None:
    state, limits = engaged()
    limits.second_ns = START - 500_000_000
    held = watched(state, limits, START, START + 1_800_000_000)
    assert set(held) <= {*range(0, 310, 10), *range(500, 600, 10), *range(1500, 1600, 10)}
    for begin in (0, 500, 1500):
        assert any(begin <= each < begin + 100 for each in held)


def test_a_short_queue_ends_the_time_beside_others() -> None:
    state, limits = engaged()
    watched(state, limits, START, START + 600_000_000)
    again_ns = START + 610_000_000
    law.sample(state, limits, again_ns, again_ns - 1000, LONG_NS - 1)  # just four thresholds
    assert watched(state, limits, again_ns + 10_000_000, again_ns + 300_000_000)


def test_a_queue_that_nobody_looked_at_is_not_long() -> None:
    state, limits = engaged()
    for number in range(1, 10):
        now = START + number * 100_000_000
        law.sample(state, limits, now, now - 1000, LONG_NS)
    assert law.release(state, limits, now, 1500) > now


def test_a_rate_that_holds_nothing_back_is_not_raised() -> None:
    state, limits = engaged()
    state.last_ns = START - 1_000_000  # the last packet that waited left before the last sample
    law.sample(state, limits, START, START - 500_000, 0)
    assert state.rate == 1_000_000


@given(st.integers(0, 1_000_000_000))
def test_no_sample_more_than_halves_a_rate_or_raises_it_by_much_more_than_half(queue: int) -> None:
    state, limits = engaged(100_000_000)
    law.sample(state, limits, START, START - 500_000, queue)
    assert 50_000_000 <= state.rate <= 151_000_000


def test_a_first_excess_sets_the_rate_to_what_the_path_has_carried() -> None:
    """Within 2 ms the queue grew by 6: three parts of four were too much."""
    limits = law.Limits(10 * SECOND, 0, 1_000_000, 20_000_000, SECOND, 0, 256)
    state = law.State(sent_ns=START - 3_000_000, taken_ns=START - 2_000_000, window_ns=START - 2_000_000)
    state.short_ns = START
    state.bytes = 200_000
    law.sample(state, limits, START, START - 1_000_000, 6_000_000)
    assert state.rate == pytest.approx(200_000 / 0.002 / 4, rel=0.01)
