"""What people read: figures with units and errors, a dash for what is not known, and the model behind it."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from pytools import units
from pytools.signals import Act, AnySignal, Delay, NexthopGroup, PathDelay, Underlay
from pytools.units import UNKNOWN
from pytools.views import delay_tables, query, table_registry, tables
from pytools.views.filters import Query
from pytools.views.model import Model, fold, member_of
from pytools.views.registry import VIEWS

SECOND_NS = samples.SECOND_NS


def text(renderable: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=220, no_color=True).print(renderable)
    return out.getvalue()


def row(table: str, start: str) -> list[str]:
    """The cells of the row that starts so (cells are at least three spaces apart)."""
    line = next(line.strip() for line in table.splitlines() if line.strip().startswith(start))
    return [cell.strip() for cell in line.split("   ") if cell.strip()]


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (None, UNKNOWN),
        (-1, UNKNOWN),
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 µs"),
        (99_990, "99.99 µs"),
        (123_456, "123 µs"),
        (1_500_000, "1.50 ms"),
        (41_000_000, "41.00 ms"),
        (2_000_000_000, "2.00 s"),
    ],
)
def test_durations_have_a_unit(ns: int | None, shown: str) -> None:
    assert units.duration(ns) == shown


@pytest.mark.parametrize(
    ("ns", "shown"),
    [
        (None, UNKNOWN),
        (0, "+0 ns"),
        (-999, "-999 ns"),
        (312_456_789, "+312 ms"),
        (-99_990_000_000, "-99.99 s"),
        (150_000_000_000, "+2m 30s"),
        (-3_600_000_000_000, "-1h 00m 00s"),
        (86_399_999_999_999, "+23h 59m 59s"),
        (-9 * 86_400 * SECOND_NS - 3_660 * SECOND_NS, "-9d 01h 01m"),
    ],
)
def test_offsets_have_a_sign_and_may_be_days(ns: int | None, shown: str) -> None:
    assert tables.offset(ns) == shown


@pytest.mark.parametrize(
    ("ppb", "shown"),
    [(None, UNKNOWN), (0.0, "+0.000"), (-0.4, "+0.000"), (12_345.6, "+12.346"), (-30_000.0, "-30.000")],
)
def test_drifts_are_parts_in_a_million(ppb: float | None, shown: str) -> None:
    assert tables.ppm(ppb) == shown


def delays(model: Model) -> str:
    return text(delay_tables.delays(model, VIEWS["delay"].rows(model), Query()))


COLUMNS = len(table_registry.LISTINGS["delay"][PathDelay](0).columns)
FIGURES = ["1.70 µs", "2.10 µs", "8.40 µs", "±450 ns", "400 ns", "6.70 µs", "±200 ns", "350 ns", "±210 ns"]


@pytest.mark.parametrize("clock", ["synchronised", "holdover"])
def test_delays_are_shown_with_their_bounds(clock: str) -> None:
    signal = samples.path_delay(lost=1, received=49, clock=clock, asymmetry_ns=-1_200, asymmetry_bound_ns=450)
    shown = delays(fold(Model(), [signal]))
    assert "h1: one-way delays over 1.00 s\n" in shown
    there, back = row(shown, "h2 rail1"), row(shown, "via 10.1.1.1")
    assert there[:11] == ["h2 rail1", "→", *FIGURES] and there[-2:] == ["3.80 µs", clock]
    assert back[:11] == ["via 10.1.1.1", "←", *FIGURES] and back[-2:] == ["-1.20 µs ±450 ns", "2.0 % (1/50)"]
    assert len(there) == len(back) == COLUMNS


@pytest.mark.parametrize(
    ("packets", "shown"),
    [
        ([], "over unknown ways"),
        ([None], "over eth1 via 10.3.1.1"),
        ([10, 30], "over eth2 75.0 %, eth1 via 10.3.1.1 25.0 %"),
        ([None, None], "over eth1 via 10.3.1.1 or eth2"),
    ],
)
def test_a_path_by_a_tunnel_names_the_ways_below_it(packets: list[int | None], shown: str) -> None:
    ways = [("10.3.1.1", "eth1"), ("", "eth2")]
    below = [Underlay("10.8.0.2", *way, count) for way, count in zip(ways, packets, strict=False)]
    signal = samples.path_delay(underlay=below)
    assert delay_tables.underlay(signal) == shown
    assert row(delays(fold(Model(), [signal])), "over")[0] == shown


@pytest.mark.parametrize(
    ("missed", "later_ns", "shown"),
    [(0, 0, "2.0 % (1/50)"), (1, 0, "2.0 % (1/50)"), (7, 0, "silent 130 ms (7)"), (7, -SECOND_NS - 1, "2.0 % (1/50)")],
)
def test_a_silent_path_is_shown_before_anything_counts_as_lost(missed: int, later_ns: int, shown: str) -> None:
    silent = samples.path_liveness(missed=missed, silent_ns=130_000_000, at_ns=samples.AT_NS + later_ns)
    model = fold(Model(), [samples.path_delay(lost=1, received=49), silent])
    assert row(delays(model), "via 10.1.1.1")[-1] == shown


def test_an_asymmetry_needs_clocks_and_a_bound() -> None:
    def shown(signal: AnySignal) -> str:
        return row(delays(fold(Model(), [signal])), "via 10.1.1.1")[-2]

    known = samples.path_delay(asymmetry_ns=120, asymmetry_bound_ns=450)
    assert shown(known) == "+120 ns ±450 ns"
    for changes in ({"clock": "free_running"}, {"asymmetry_ns": None}, {"asymmetry_bound_ns": None}):
        assert shown(msgspec.structs.replace(known, **changes)) == UNKNOWN


def test_windows_that_differ_are_said_to() -> None:
    short = msgspec.structs.replace(samples.path_delay(2), window_ns=80_000_000)
    shown = delays(fold(Model(), [samples.path_delay(1), short]))
    assert "over windows from 80.00 ms to 1.00 s" in shown


@given(
    st.sampled_from(["synchronised", "holdover", "free_running"]),
    st.integers(-(10**9), 10**9),
    st.none() | st.integers(-(10**6), 10**6),
)
def test_no_negative_and_no_unsynchronised_delay_is_ever_a_fact(clock: str, owd_ns: int, bound: int | None) -> None:
    one = Delay(samples=9, owd_min_ns=owd_ns, owd_p50_ns=owd_ns, owd_p99_ns=owd_ns, bound_ns=bound)
    signal = samples.path_delay(clock=clock, forward=one, reverse=one, round_trip_min_ns=None)
    shown = delays(fold(Model(), [signal]))
    owd = row(shown, "h2 rail1")[2:6]
    known = clock != "free_running" and owd_ns >= 0
    assert owd == [units.duration(owd_ns)] * 3 + [tables.bound(bound)] if known else owd == [UNKNOWN] * 4
    assert not re.search(r"-\d", shown)


def test_an_unprobed_direction_has_no_figures_and_no_loss() -> None:
    signal = samples.path_delay(
        forward=Delay(samples=0), reverse=Delay(samples=0), round_trip_min_ns=None, sent=0, received=0
    )
    shown = delays(fold(Model(), [signal]))
    *there, clock = row(shown, "h2 rail1")[2:]
    assert (set(there), clock) == ({UNKNOWN}, "synchronised") and len(there) == COLUMNS - 3
    assert row(shown, "via 10.1.1.1")[2:] == [UNKNOWN] * (COLUMNS - 2)


def test_cost_shows_every_counter_and_every_failed_hook() -> None:
    own = samples.self_cost(drops={"ring_full": 7, "bus_slow": 0}, failed={"tcp_egress on rail1": "no TCX"})
    shown = text(tables.cost(fold(Model(), [own]), [own], Query()))
    assert row(shown, "probe_egress") == ["probe_egress", "1000", "52 ns"]
    assert row(shown, "ring_full") == ["ring_full", "7"]
    assert row(shown, "bus_slow") == ["bus_slow", "0"]
    assert row(shown, "tcp_egress on rail1") == ["tcp_egress on rail1", "no TCX"]
    assert shown.index("bus_slow") < shown.index("ring_full")
    sorted_ = text(tables.cost(fold(Model(), [own]), [own], query.asked_for("self", "count", {})))
    assert sorted_.index("ring_full") < sorted_.index("bus_slow")


def test_the_longest_window_is_kept_until_it_is_long_over() -> None:
    long = samples.path_delay(at_ns=10 * SECOND_NS)
    short = samples.path_delay(at_ns=10 * SECOND_NS + 1, window_ns=SECOND_NS // 10)
    assert fold(Model(), [short, long, short]).of(PathDelay)[samples.path()] == long
    late = samples.path_delay(at_ns=14 * SECOND_NS, window_ns=SECOND_NS // 10)
    assert fold(Model(), [long, late]).of(PathDelay)[samples.path()] == late


@given(st.lists(st.sampled_from(samples.one_of_each(5) + samples.one_of_each(9)), max_size=20), st.integers(0, 20))
def test_folding_in_two_steps_is_folding_in_one(signals: list[AnySignal], cut: int) -> None:
    assert fold(fold(Model(), signals[:cut]), signals[cut:]) == fold(Model(), signals)


def test_folding_leaves_the_old_model_as_it_was() -> None:
    before = fold(Model(), samples.one_of_each(5))
    delays, acts = dict(before.of(PathDelay)), dict(before.of(Act))
    fold(before, samples.one_of_each(9))
    assert before.of(PathDelay) == delays and before.of(Act) == acts


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
def test_a_route_leads_to_the_group_that_was_told_of_last(cut: int) -> None:
    def group(number: int, *destinations: str) -> AnySignal:
        return msgspec.structs.replace(samples.nexthop_group(), group_id=number, destinations=list(destinations))

    told = [group(1, "10.1.0.0/16"), group(2, "10.1.0.0/16", "10.2.0.0/16"), group(3, "10.2.0.0/16"), group(4)]
    assert list(fold(fold(Model(), told[:cut]), told[cut:]).of(NexthopGroup)) == [3, 4]


def test_a_path_finds_its_member_by_the_longest_prefix() -> None:
    exact = samples.nexthop_group()
    wide = msgspec.structs.replace(exact, group_id=1, destinations=["default", "10.0.0.0/8"])
    model = fold(Model(), [exact, wide])
    found = member_of(model, samples.path(2))
    assert found is not None
    assert (found[0], found[1].nexthop_id) == (102, 12)
    other = member_of(model, samples.path(1, destination="h3"))
    assert other is not None and other[0] == 1
    assert member_of(Model(), samples.path()) is None
