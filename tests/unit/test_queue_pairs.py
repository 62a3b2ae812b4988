"""Windows, latencies, bandwidth by counters, and how much is timed: against figures worked out one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytools.estimators.queue_pairs import WINDOWS, Served, TimedRequests, bits_per_s
from pytools.estimators.queue_rates import Growth, Rates, run_masks
from pytools.estimators.windows import MISSING

MS = 1_000_000
YEARS_NS = 5 * 365 * 86_400 * 10**9
Request = tuple[int, int, int, int, int]  # row, number, posted, completed, bytes


def requests(
    row: int, count: int, first: int = 0, depth: int = 1, each_ns: int = 1000, size: int = 4096
) -> list[Request]:
    """A queue of a constant depth that is served at a constant pace."""
    begin = YEARS_NS
    return [
        (row, number, begin + max(0, number - depth + 1) * each_ns, begin + (number + 1) * each_ns, size)
        for number in range(first, first + count)
    ]


def add(timed: TimedRequests, some: list[Request]) -> Served:
    columns = list(zip(*sorted(some), strict=True))
    return timed.add(
        np.array(columns[0], np.intp),
        np.array(columns[1], np.uint64),
        np.array(columns[2], np.int64),
        np.array(columns[3], np.int64),
        np.array(columns[4], np.uint64),
    )


def one_by_one(some: list[Request], messages: int) -> list[float]:
    """Bandwidths of all windows of consecutive requests of one row."""
    found = []
    for last in range(messages - 1, len(some)):
        window = some[last - messages + 1 : last + 1]
        if window[-1][1] - window[0][1] == messages - 1:
            ns = window[-1][3] - window[0][2]
            found.append(sum(each[4] for each in window) * 8e9 / ns)
    return found


def stream(rng: np.random.Generator, row: int) -> list[Request]:
    """Requests of one row, some of them left out, at times of their own."""
    number, at_ns, found = int(rng.integers(0, 2**62)), YEARS_NS, []
    for _ in range(int(rng.integers(1, 150))):
        posted = at_ns + int(rng.integers(0, 50))
        at_ns = posted + int(rng.integers(1, 10_000))
        found.append((row, number, posted, at_ns, int(rng.integers(0, 2**40))))
        number += 1 if rng.random() < 0.97 else 65
    return found


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_windows_are_those_of_consecutive_messages_however_they_arrive(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = {row: stream(rng, row) for row in (3, 5)}
    timed = TimedRequests(8)
    rest = {row: list(some) for row, some in rows.items()}
    while any(rest.values()):
        now = []
        for row, some in rest.items():
            take = int(rng.integers(0, 65))
            now += some[:take]
            rest[row] = some[take:]
        if now:
            add(timed, now)
    for place, messages in enumerate(WINDOWS):
        figures = timed.figures(place, np.array([3, 5]))
        for index, some in enumerate(rows.values()):
            expected = one_by_one(some, messages)
            assert figures.windows[index] == len(expected)
            if expected:
                assert figures.last[index] == pytest.approx(expected[-1], rel=1e-9)
                assert figures.mean[index] == pytest.approx(sum(expected) / len(expected), rel=1e-9)
                assert figures.smallest[index] == pytest.approx(min(expected), rel=1e-9)
                assert figures.largest[index] == pytest.approx(max(expected), rel=1e-9)
            else:
                assert np.isnan(figures.mean[index])
                assert figures.last_ns[index] == MISSING


def test_two_gib_at_800_gbit_do_not_overflow() -> None:
    size = 2 << 30
    ns = round(size * 8 / 800)  # at 800 bits a nanosecond
    timed = TimedRequests(1)
    add(timed, requests(0, 64, depth=8, each_ns=ns, size=size))
    eight = timed.figures(WINDOWS.index(8), np.array([0]))
    assert eight.largest[0] <= 801e9
    assert eight.last[0] == pytest.approx(800e9 * 8 / 15, rel=1e-6)  # the first of eight waits behind seven
    assert bits_per_s(np.array([2**63], np.uint64), np.array([92_233_720_369 * 10**9]))[0] == pytest.approx(
        0.8e9, rel=1e-3
    )


def test_time_behind_earlier_requests_is_not_service() -> None:
    timed = TimedRequests(2)
    served = add(timed, requests(1, 32, depth=16, each_ns=1000, size=1000))
    assert served.whole.tolist() == [True]  # number 0 has none before it
    assert served.busy_ns.tolist() == [32_000]
    assert served.requests.tolist() == [32]
    served = add(timed, [(1, 40, YEARS_NS + 50_000, YEARS_NS + 51_000, 10)])
    assert served.whole.tolist() == [False]  # 32 to 39 were not timed


def test_a_row_that_begins_anew_continues_nothing() -> None:
    timed = TimedRequests(2)
    add(timed, requests(0, 31) + requests(1, 31))
    timed.forget(np.array([0]))
    add(timed, requests(0, 1, first=31) + requests(1, 1, first=31))
    assert timed.figures(WINDOWS.index(32), np.array([0, 1])).windows.tolist() == [0, 1]
    assert set(timed.latencies()[0].tolist()) == {0, 1}
    timed.restart()
    assert timed.figures(0, np.array([0, 1])).windows.tolist() == [0, 0]
    assert not len(timed.latencies()[0])


def grown(requests: int, size: int, outstanding: int = 4) -> Growth:
    one = [
        np.array([value]) for value in (requests, requests * size, outstanding, outstanding * size, MISSING, MISSING)
    ]
    return Growth(*one)


ROW = np.array([0])


def fill(rates: Rates, readings: int, each: Growth, now_ns: int = YEARS_NS) -> int:
    for _ in range(readings):
        before_ns, now_ns = now_ns, now_ns + 10 * MS
        rates.update(ROW, before_ns, now_ns, each)
        rates.learn(ROW, before_ns, now_ns, each)
    return now_ns


def test_the_mean_is_what_is_steady_and_forgets() -> None:
    rates = Rates(1, 50 * MS)
    now_ns = fill(rates, 30, grown(100, 125_000))  # 10 Gbit/s
    assert rates.means(ROW)[0][0] == pytest.approx(10e9)
    assert rates.means(ROW)[1][0] == pytest.approx(4 * 125_000)
    now_ns = fill(rates, 5, grown(10, 125_000), now_ns)
    assert rates.now(ROW, now_ns)[0][0] == pytest.approx(1e9)
    assert rates.means(ROW)[0][0] == pytest.approx(10e9 * np.exp(-1) + 1e9 * (1 - np.exp(-1)), rel=0.01)


def test_bandwidth_now_is_that_of_the_last_eight() -> None:
    rates = Rates(1, 50 * MS)
    now_ns = fill(rates, 30, grown(100, 125_000))
    now_ns = fill(rates, 1, grown(1, 125_000), now_ns)
    expected = 8 * 125_000 * 8e9 / (10 * MS + 7 * MS / 10)  # one in this reading, seven of the hundred before
    assert rates.now(ROW, now_ns)[0][0] == pytest.approx(expected)
    now_ns = fill(rates, 1, grown(100, 125_000), now_ns)
    assert rates.now(ROW, now_ns)[0][0] == pytest.approx(10e9)


def test_few_large_messages_have_a_mean_over_more_time() -> None:
    rates = Rates(1, 50 * MS)
    now_ns = YEARS_NS
    for _ in range(60):  # one message in 40 ms
        for requests in (0, 0, 0, 1):
            now_ns = fill(rates, 1, grown(requests, 10**8, 1), now_ns)
    assert rates.means(ROW)[0][0] == pytest.approx(20e9, rel=0.01)
    assert rates.now(ROW, now_ns)[0][0] == pytest.approx(20e9, rel=0.01)
    now_ns = fill(rates, 32, grown(0, 10**8, 1), now_ns)  # none for 320 ms
    assert rates.waited_ns(ROW, now_ns)[0] == 320 * MS
    assert rates.now(ROW, now_ns)[0][0] == pytest.approx(10e9, rel=0.01)
    assert rates.now(ROW, now_ns)[1][0] == pytest.approx(20e9, rel=0.01)


def test_the_edges_of_a_burst_do_not_count() -> None:
    rates = Rates(1, 50 * MS)
    now_ns = fill(rates, 1, grown(3, 125_000))  # begins somewhere within the reading
    now_ns = fill(rates, 20, grown(100, 125_000), now_ns)
    fill(rates, 1, grown(7, 125_000, 0), now_ns)  # ends within it
    counted = rates.counted(ROW)
    assert counted.mean[0] == pytest.approx(10e9)
    assert counted.smallest[0] == pytest.approx(10e9)
    assert counted.windows[0] == 20


def test_masks_keep_every_process_within_its_budget() -> None:
    per_s = np.array([1e6, 1e6, 100.0, 5e4, 0.0])
    process = np.array([0, 0, 0, 1, 2])
    masks = run_masks(per_s, process, 20_000, 6400.0)
    shares = 1 / (masks.astype(float) + 1)
    assert np.bincount(process, per_s * shares).max() <= 20_000
    assert (per_s * shares <= 6400).all()
    assert masks[4] == 0
    assert ((masks & (masks + np.uint64(1))) == 0).all()
    assert (run_masks(per_s, process, 0, 6400.0) == np.iinfo(np.uint64).max).all()
    assert run_masks(np.zeros(0), np.zeros(0, np.intp), 5, 1.0).tolist() == []
