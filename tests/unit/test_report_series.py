"""What many values become: bounded, in order, every extreme kept, unknown never a value; sums exact; states bounded."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytools.views.report import scales
from pytools.views.report.scales import Span
from pytools.views.report.series import Point, Runs, Series, Spread, Sums
from pytools.views.report.transport import together

SECOND = 1_000_000_000
TIMES = st.integers(0, 1 << 62)
VALUES = st.one_of(st.none(), st.integers(0, 1 << 40))
SAMPLES = st.lists(st.tuples(TIMES, VALUES), max_size=120)


def filled(samples: list[tuple[int, int | None]], limit: int) -> Series:
    series = Series(limit)
    for at, value in samples:
        series.add(at, value, 7)
    return series


# ---- lines ----


@given(SAMPLES, st.integers(1, 20))
def test_points_are_bounded_in_order_and_values_that_were_given(
    samples: list[tuple[int, int | None]], limit: int
) -> None:
    line = filled(samples, limit).line(SECOND)
    points = line.points
    assert len(points) <= 2 * limit
    assert [point.unix_ns for point in points] == sorted(point.unix_ns for point in points)
    assert {point[:2] for point in points} <= {(at, value) for at, value in samples if value is not None}
    assert all(point.bound == 7 for point in points) and all(line.pieces)
    assert (line.values, line.unknown) == (
        sum(value is not None for _, value in samples),
        sum(value is None for _, value in samples),
    )


@given(SAMPLES, st.integers(1, 20))
def test_of_every_stretch_the_smallest_and_the_largest_are_kept(
    samples: list[tuple[int, int | None]], limit: int
) -> None:
    line = filled(samples, limit).line(SECOND)
    given_, kept = {}, {}
    for at, value in samples:
        if value is not None:
            given_.setdefault(at // line.slot_ns, []).append(value)
    for point in line.points:
        kept.setdefault(point.unix_ns // line.slot_ns, []).append(point.value)
    assert {slot: (min(values), max(values)) for slot, values in given_.items()} == {
        slot: (min(values), max(values)) for slot, values in kept.items()
    }


@given(SAMPLES, st.integers(1, 20), st.randoms(use_true_random=False))
def test_the_order_in_which_values_come_changes_no_extreme(
    samples: list[tuple[int, int | None]], limit: int, dice: object
) -> None:
    mixed = list(samples)
    dice.shuffle(mixed)  # type: ignore[attr-defined]
    one, other = (filled(each, limit).line(SECOND) for each in (samples, mixed))
    assert one.slot_ns == other.slot_ns
    assert _ends(one.points) == _ends(other.points)


def _ends(points: list[Point]) -> tuple[float, float] | tuple[()]:
    return (min(p.value for p in points), max(p.value for p in points)) if points else ()


@given(SAMPLES, st.integers(2, 20), st.integers(1, 5))
def test_a_coarser_line_keeps_the_extremes_too(samples: list[tuple[int, int | None]], limit: int, fewer: int) -> None:
    series = filled(samples, limit)
    fine = series.line(SECOND)
    coarse = series.line(SECOND, fewer)
    assert len(coarse.points) <= 2 * fewer
    assert _ends(coarse.points) == _ends(fine.points)


def test_as_long_as_there_is_room_every_value_is_a_point() -> None:
    line = filled([(number * SECOND, number) for number in range(300)], 300).line(SECOND)
    assert [(point.unix_ns, point.value) for point in line.points] == [(n * SECOND, n) for n in range(300)]
    assert len(line.pieces) == 1


def test_a_spike_of_one_window_in_a_day_is_seen() -> None:
    series = Series()
    for second in range(86_400):
        series.add(second * SECOND, 40_000_000 if second == 54_321 else 400)
    points = series.line(SECOND).points
    assert len(points) <= 600
    assert [point for point in points if point.value == 40_000_000] == [Point(54_321 * SECOND, 40_000_000)]


@pytest.mark.parametrize("missing", [None, "nothing at all"])
def test_what_is_not_known_breaks_the_line_and_is_no_zero(missing: str | None) -> None:
    series = Series()
    for second in range(30):
        if 10 <= second < 20:
            if missing is None:
                series.add(second * SECOND, None)
        else:
            series.add(second * SECOND, 5)
    line = series.line(SECOND)
    assert [len(piece) for piece in line.pieces] == [10, 10]
    assert all(point.value == 5 for point in line.points)


def test_one_missing_window_breaks_the_line_and_a_late_one_does_not() -> None:
    times = [0.0, 1.0, 2.3, 3.0, 5.0, 6.0]
    line = filled([(round(at * SECOND), 1) for at in times], 300).line(SECOND)
    assert [[point.unix_ns / SECOND for point in piece] for piece in line.pieces] == [[0, 1, 2.3, 3], [5, 6]]


def test_one_that_is_unknown_breaks_the_line_however_close_its_neighbours_are() -> None:
    line = filled([(0, 1), (SECOND // 2, 1), (SECOND, None), (3 * SECOND // 2, 1)], 300).line(SECOND)
    assert [len(piece) for piece in line.pieces] == [2, 1]


def test_in_a_long_recording_the_line_is_broken_where_whole_stretches_are_unknown() -> None:
    series = Series(60)
    for second in range(6000):
        series.add(second * SECOND, None if 2000 <= second < 3000 else 1)
    line = series.line(SECOND)
    first, second_ = line.pieces
    assert first[-1].unix_ns < 2000 * SECOND and second_[0].unix_ns >= 3000 * SECOND


# ---- sums and spreads ----

COUNTS = st.lists(
    st.tuples(TIMES, st.dictionaries(st.sampled_from(["fast", "timeout"]), st.integers(0, 1000), max_size=2)),
    max_size=60,
)


@given(COUNTS, st.integers(1, 10))
def test_sums_are_exact_and_bounded(counts: list[tuple[int, dict[str, int]]], limit: int) -> None:
    sums = Sums(limit)
    total: Counter[str] = Counter()
    for at, some in counts:
        sums.add(at, some)
        total.update(some)
    bars = sums.bars()
    assert len(bars.slots) <= limit
    assert bars.totals == {kind: count for kind, count in total.items() if count}
    assert [at for at, _ in bars.slots] == sorted({at for at, _ in bars.slots})


@given(COUNTS, COUNTS, st.integers(1, 10))
def test_bars_of_several_paths_add_up(
    one: list[tuple[int, dict[str, int]]], other: list[tuple[int, dict[str, int]]], limit: int
) -> None:
    parts = []
    for counts in (one, other):
        sums = Sums(limit)
        for at, some in counts:
            sums.add(at, some)
        parts.append(sums.bars())
    both = together(parts)
    assert Counter(both.totals) == Counter(parts[0].totals) + Counter(parts[1].totals)


@given(st.lists(st.integers(0, 1 << 60), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_a_quantile_is_a_measured_value_hardly_too_large(values: list[int], share: float) -> None:
    spread = Spread()
    for value in values:
        spread.add(value, value + 1)
    found = spread.quantile(share)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert found is not None and found.value in values
    assert exact <= found.value <= exact + exact / 63
    assert found.bound == found.value + 1, "the error is that of the very value"


def test_of_nothing_there_is_no_quantile() -> None:
    assert Spread().quantile(0.5) is None


# ---- states ----


@given(st.lists(st.tuples(st.integers(0, 10**12), st.sampled_from("abc")), max_size=80), st.integers(1, 8))
def test_states_are_bounded_in_order_and_do_not_overlap(said: list[tuple[int, str]], limit: int) -> None:
    runs = Runs(SECOND, limit)
    for at, word in said:
        runs.add(at, word)
    bands = runs.bands(1 << 62)
    assert len(bands.runs) <= limit
    assert all(run.began_ns <= run.ended_ns for run in bands.runs)
    assert all(one.ended_ns <= other.began_ns for one, other in zip(bands.runs, bands.runs[1:], strict=False))
    assert not said or bands.runs


def test_a_state_lasts_until_the_next_and_no_longer_than_it_is_said() -> None:
    runs = Runs(5 * SECOND)
    for second in (0, 1, 2):
        runs.add(second * SECOND, "healthy")
    runs.add(3 * SECOND, "drained", "a queue")
    runs.add(20 * SECOND, "drained", "still")
    runs.add(1 * SECOND, "late")
    bands = runs.bands(22 * SECOND)
    assert [(run.word, run.began_ns // SECOND, run.ended_ns // SECOND, run.note) for run in bands.runs] == [
        ("healthy", 0, 3, ""),
        ("drained", 3, 8, "a queue"),
        ("drained", 20, 22, "still"),
    ]
    assert bands.lasted_ns() == {"healthy": 3 * SECOND, "drained": 7 * SECOND}


# ---- scales ----


@given(st.lists(st.floats(0, 1e15), max_size=20), st.floats(0, 1e15))
def test_every_value_has_a_place_on_the_chart(values: list[float], other: float) -> None:
    for scale in (scales.logarithmic(values, 100), scales.linear(values, 100)):
        assert 0 <= scale.y(other) <= 100
        assert len(scale.ticks) <= 12
        for value in values:
            assert 0 <= scale.y(value) <= 100
        for low, high in zip(sorted(values), sorted(values)[1:], strict=False):
            assert scale.y(low) >= scale.y(high), "more is higher"


def test_times_have_a_date_where_the_day_is_in_doubt() -> None:
    midnight = 1_795_305_600 * 1_000_000_000
    second = 1_000_000_000
    within, across = Span(midnight, midnight + 86_399 * second), Span(midnight - second, midnight + second)
    assert within.clock(midnight + 3_661 * second + 5_000_000, 3) == "01:01:01.005"
    assert [across.clock(each) for each in (midnight - second, midnight)] == ["11-21 23:59:59", "11-22 00:00:00"]


@given(TIMES, st.integers(0, 1 << 58))
def test_ticks_lie_within_the_span_and_are_few(since: int, length: int) -> None:
    span = Span(since, since + length)
    ticks = span.ticks()
    assert len(ticks) <= 17 and all(since <= tick <= since + length for tick in ticks)
    assert span.x(since) == 0
