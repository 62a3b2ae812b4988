"""Clocks and application delays as a person meets them: every figure with its error, and words where there is none."""

from __future__ import annotations

import io
import re
from typing import Any

import msgspec
import pytest
import samples
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType
from rich.text import Text
from support import mentions

from pytools import units
from pytools.errors import UsageError
from pytools.figures import OF_DIRECTIONS
from pytools.signals import AnySignal, AppDelay, Clock, Collocated, Quantiles
from pytools.units import UNKNOWN
from pytools.views import clock_tables, follow, table_registry
from pytools.views.model import FORGOTTEN_NS, KEPT, Model, fold, is_whole_path
from pytools.views.query import asked_for
from pytools.views.registry import VIEWS
from pytools.views.sheet import Sheet

SECOND_NS = samples.SECOND_NS
DAY_NS = 86_400 * SECOND_NS


def text(renderable: RenderableType, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(renderable)
    return out.getvalue()


def row(table: str, start: str) -> list[str]:
    line = next(line.strip() for line in table.splitlines() if line.strip().startswith(start))
    return re.split(r"\s{2,}", line)


def known(*signals: AnySignal) -> Model:
    return fold(Model(), signals)


def drawn(kind: str, model: Model, **asked: Any) -> RenderableType:
    query = asked_for(kind, asked.pop("sort", None), asked)
    return table_registry.TABLES[kind](model, follow.rows_of(kind, model, query), query)


def clocks(model: Model, **asked: Any) -> RenderableType:
    return drawn("clocks", model, **asked)


def edges(model: Model, **asked: Any) -> RenderableType:
    return drawn("edges", model, **asked)


def apps(model: Model, **asked: Any) -> RenderableType:
    return drawn("app", model, **asked)


def delays(model: Model) -> RenderableType:
    return drawn("delay", model)


def fleet() -> Model:
    return known(
        samples.clock("h3", state="holdover", bound_ns=14_300, hard_bound_ns=28_000, offset_ns=-5 * DAY_NS),
        samples.clock("h1", slew_ppb=-8_123.4, outlier_edges=2),
        samples.free_clock("h4"),
        samples.clock("h2"),
    )


def test_the_reference_is_the_first_and_is_named() -> None:
    shown = text(clocks(fleet()))
    assert shown.startswith("h1: clocks against h2\n")
    rows = [line.split()[0] for line in shown.splitlines() if re.match(r"h\d ", line)]
    assert rows == ["h2", "h1", "h3", "h4"]
    assert row(shown, "h2 ")[1] == "reference"


@pytest.mark.parametrize(
    ("word", "order"),
    [
        ("bound", "h3 h1 h2 h4"),
        ("state", "h4 h3 h2 h1"),
        ("offset", "h3 h1 h2 h4"),
        ("outliers", "h1 h2 h3 h4"),
        ("host", "h1 h2 h3 h4"),
    ],
)
def test_clocks_are_sorted_the_worst_first_and_those_without_a_figure_last(word: str, order: str) -> None:
    shown = text(clocks(fleet(), sort=word))
    assert [line.split()[0] for line in shown.splitlines() if re.match(r"h\d ", line)] == order.split()


def test_clocks_are_selected_by_host_and_edges_by_path() -> None:
    shown = text(clocks(fleet(), host=["H3"]))
    assert shown.startswith("h1: clocks against h2 (--host H3)\n") and row(shown, "h3 ")
    assert "\nh1 " not in shown and "free_running" not in shown, "remarks are about what is shown"
    assert re.fullmatch(r"h1: nothing .*--host h9\n", text(clocks(fleet(), host=["h9"])))
    model = known(samples.clock_edge(1), samples.clock_edge(2), samples.clock_edge(1, destination="h3"))
    assert [line.split()[:2] for line in text(edges(model, host=["h2"], interface=["rail2"])).splitlines()[4:5]] == [
        ["h2", "rail2"]
    ]
    with pytest.raises(UsageError, match="--interface"):
        clocks(fleet(), interface=["rail1"])


def test_edges_are_sorted() -> None:
    model = known(samples.clock_edge(1), samples.clock_edge(2, bound_ns=9_000), samples.clock_edge(1, destination="h3"))
    shown = text(edges(model, sort="bound"))
    assert [line.split()[:2] for line in shown.splitlines() if re.match(r"h\d ", line)] == [
        ["h2", "rail2"],
        ["h2", "rail1"],
        ["h3", "rail1"],
    ]


def test_a_clock_has_all_its_figures() -> None:
    shown = text(clocks(fleet()))
    assert row(shown, "h1 ") == [
        *("h1", "+312 ms", "-12.346", "±430 ns", "±1.90 µs", "synchronised", "3", "570", "30", "2", "-8.123")
    ]
    assert row(shown, "h3 ")[1:6] == ["-5d 00h 00m", "-12.346", "±14.30 µs", "±28.00 µs", "holdover"]
    assert row(shown, "h4 ") == ["h4", *[UNKNOWN] * 4, "free_running", "0", "570", "30", "0", UNKNOWN]


def test_states_that_need_a_word_get_one() -> None:
    shown = text(clocks(fleet()))
    assert "holdover: " in shown and "free_running: " in shown and "do not agree" not in shown
    assert ": " not in text(clocks(known(samples.clock("h1"), samples.clock("h2")))).split("\n", 1)[1]
    torn = known(samples.clock("h1", reference="h2"), samples.clock("h3", reference="h4"))
    assert "clocks against h2 and h4" in text(clocks(torn))
    assert mentions(text(clocks(torn)), "do not agree", "reference")


def test_without_a_reference_none_is_named() -> None:
    shown = text(clocks(known(samples.free_clock("h1", reference=""), samples.free_clock("h2", reference=""))))
    assert shown.startswith("h1: clocks, no reference\n")
    assert row(shown, "h1 ")[1] == UNKNOWN


def test_the_last_word_about_a_clock_is_not_for_ever() -> None:
    later = samples.AT_NS + KEPT[Clock].silent_ns + 1
    assert row(text(clocks(fold(fleet(), [samples.clock("h2", at_ns=later)]))), "h1 ")[5] == "synchronised?"
    gone = fold(fleet(), [samples.clock("h2", at_ns=samples.AT_NS + FORGOTTEN_NS + 1)])
    assert list(gone.of(Clock)) == ["h2"]


def test_an_edge_has_all_its_figures() -> None:
    model = known(
        samples.clock_edge(1),
        samples.clock_edge(2, offset_ns=3 * DAY_NS, hard_low_ns=3 * DAY_NS - 900, hard_high_ns=3 * DAY_NS + 2_500),
        samples.clock_edge(1, destination="h3", stepped=True),
    )
    shown = text(edges(model))
    assert row(shown, "h2 rail1") == [
        "h2 rail1 via 10.1.1.1",
        *("-312 ms", "+12.346", "6 ns", "±410 ns", "±1.80 µs", "3.60 µs", "190", "10", "no"),
    ]
    assert row(shown, "h2 rail2")[1] == "+3d 00h 00m"
    assert row(shown, "h2 rail2")[5] == "±2.50 µs"  # the farther of the two ends: offset ± this holds
    assert row(shown, "h3 rail1")[-1] == "stepped"


def test_groups_come_with_their_confidence_and_never_with_certainty() -> None:
    groups = [Collocated(hosts=["h1", "h4"], confidence=0.97), Collocated(hosts=["h5", "h6", "h7"], confidence=1.0)]
    shown = text(clock_tables.collocation(known(samples.collocation(groups=groups))))
    assert "from 120 s of drift history" in shown
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()[3:] if line.strip()]
    assert rows == [
        ["shared", "> 99.9 %", "h5, h6, h7"],
        ["shared", "97.0 %", "h1, h4"],
        ["own", "h2"],
        ["unknown", "h3"],
    ]


def test_that_nobody_shares_is_said_and_so_is_the_age() -> None:
    old = samples.collocation(groups=[], alone=["h1", "h2"], unknown=[])
    shown = text(clock_tables.collocation(known(old, samples.clock(at_ns=samples.AT_NS + 90 * SECOND_NS))))
    assert "no two hosts are known to share one" in shown and "said 90.00 s ago" in shown
    assert "shared" not in shown and "unknown" not in shown


APP = ["14.20 µs", "31.00 µs", "88.40 µs", "120 µs", "±460 ns", "12.50 µs", "86.70 µs"]


def test_application_delays_by_path_then_by_flow_the_busiest_first() -> None:
    model = known(
        samples.app_delay(1, sampled=200),
        samples.app_delay(1, local_port=40_000, sampled=50),
        samples.app_delay(1, local_port=40_002, sampled=150, protocol="udp"),
        samples.app_delay(2, local_port=40_004, sampled=7, path=None, local="fd00:9::1", remote="fd00:9::2"),
    )
    shown = text(apps(model))
    assert row(shown, "tcp h2 rail1") == ["tcp h2 rail1", *APP, "200", "3", "synchronised"]
    assert row(shown, "via 10.1.1.1") == ["via 10.1.1.1", "196", "1"]
    flows = [line.split()[1] for line in shown.splitlines() if re.match(r"(tcp|udp) .*\]?:\d", line)]
    assert flows == ["10.9.0.1:40002", "10.9.0.1:40000", "[fd00:9::1]:40004"]
    assert row(shown, "udp 10.9.0.1:40002") == ["udp 10.9.0.1:40002", *APP, "150", "3", "h2 rail1"]
    assert "→ [fd00:9::2]:5201" in shown and row(shown, "tcp [fd00")[-1] == "no measured"


def test_application_delays_are_selected_and_sorted() -> None:
    slow = Quantiles(samples=9, p50_ns=1, p90_ns=2, p99_ns=9_000_000, max_ns=9_000_000)
    model = known(
        samples.app_delay(1, sampled=200),
        samples.app_delay(2, sampled=300),
        samples.app_delay(1, local_port=40_000, sampled=50, owd=slow),
        samples.app_delay(1, local_port=40_002, sampled=150),
    )

    def flows(**asked: Any) -> list[str]:
        return re.findall(r":(4000\d)", text(apps(model, **asked)))

    assert flows() == ["40002", "40000"] and flows(sort="owd-p99") == ["40000", "40002"]
    assert flows(port=[40_002]) == ["40002"] and "by path" not in text(apps(model, port=[40_002]))
    of_rail = text(apps(model, interface=["rail2"]))
    assert "h2 rail2" in of_rail and "rail1" not in of_rail and "(--interface rail2), by path" in of_rail
    assert re.fullmatch(r"h1: nothing .*--src 10\.1\.0\.0/16\n", text(apps(model, src=["10.1.0.0/16"])))


@given(st.sampled_from(["synchronised", "holdover", "free_running"]), st.integers(-(10**9), 10**9))
def test_no_application_delay_is_a_fact_between_free_clocks_or_below_zero(clock: str, ns: int) -> None:
    owd = Quantiles(samples=9, p50_ns=ns, p90_ns=ns, p99_ns=ns, max_ns=ns)
    cells = row(text(apps(known(samples.app_delay(clock=clock, owd=owd)))), "tcp h2")
    fact = clock != "free_running" and ns >= 0
    assert cells[1:6] == ([units.duration(ns)] * 4 + ["±460 ns"] if fact else [UNKNOWN] * 5)
    assert cells[6:8] == APP[5:]  # queueing needs no common clock


def test_flows_that_ended_go_and_paths_stay_when_there_are_too_many() -> None:
    ended = known(samples.app_delay(local_port=40_000), samples.self_cost(samples.AT_NS + 4 * SECOND_NS))
    assert not ended.of(AppDelay)
    many = [samples.app_delay(1, samples.AT_NS), samples.app_delay(2, samples.AT_NS)]
    many += [samples.app_delay(1, samples.AT_NS + each, local_port=each + 1) for each in range(KEPT[AppDelay].most)]
    kept = known(*many).of(AppDelay).values()
    assert len(kept) == KEPT[AppDelay].most
    assert sum(is_whole_path(app) for app in kept) == 2
    assert [app for app in kept if app.path == samples.path(2)] == [many[1]]


# Headings of what goes first, where room is short.
SPARE = {each.heading for each in OF_DIRECTIONS if min(each.spare.get(part, 0) for part in each.exported) >= 5}


@pytest.mark.parametrize("width", [70, 80, 100, 120, 200])
def test_no_table_is_cut_or_wider_than_the_terminal(width: int) -> None:
    model = fold(fleet(), samples.one_of_each())
    model = fold(model, [samples.app_delay(1, local_port=40_000, local="fd00:9::1", remote="fd00:9::2")])
    for draw in (clocks, edges, apps, delays):
        lines = text(draw(model), width).splitlines()
        assert max(map(len, lines)) <= width
        assert not any("…" in line for line in lines)
        missing = [line.partition(": ")[2] for line in lines if line.startswith("left out for want of room: ")]
        if width >= 120:
            names = {name.removesuffix(" ±") for line in missing for name in line.split(", ")}
            assert names <= ({"OWD max", *SPARE} if width == 120 else set())
        elif width <= 80:
            assert missing


def test_a_sheet_leaves_out_no_more_than_it_must() -> None:
    sheet = Sheet("t", ("key", "wide\ncolumn", "a", "b"), spare=("a", "wide\ncolumn", "b"))
    sheet.add("k", "1234567890" * 4, "1", "2")
    assert "left out" not in text(sheet, 51)
    assert "left out for want of room: a\n" in text(sheet, 50)
    # Without the wide one there is room for the small one that would have gone before it.
    shown = text(sheet, 47)
    assert "left out for want of room: wide column\n" in shown
    assert re.search(r"^k +1 +2$", shown, re.M) and "1234567890" not in shown


def test_rows_have_as_many_cells_as_columns() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Sheet("t", ("a", "b")).add("1")


def test_brackets_in_cells_are_no_markup() -> None:
    sheet = Sheet("t", ("a", "b"))
    sheet.add("[red]", Text("[/]"))
    assert "[red]" in text(sheet) and "[/]" in text(sheet)


FREE = samples.path_delay(clock="free_running")


@pytest.mark.parametrize(
    ("signals", "kind", "said"),
    [
        ([samples.path_delay()], "clocks", "so there is nothing to compare"),
        ([FREE], "clocks", "a first result takes a window"),
        ([msgspec.structs.replace(FREE, received=0)], "clocks", "start the agents of the peers"),
        ([FREE, samples.clock_edge()], "clocks", "not put together yet"),
        ([samples.self_cost()], "clocks", "names no peer that has a route"),
        ([FREE], "edges", "a first result takes a window"),
        ([samples.path_delay()], "collocation", "so there is nothing to compare"),
        ([samples.clock("h1"), samples.clock("h2")], "collocation", "a minute or two of drifts"),
        ([samples.path_delay()], "app", "samples.enabled at both ends"),
    ],
)
def test_why_there_is_nothing_is_said_in_words(signals: list[AnySignal], kind: str, said: str) -> None:
    model, view = known(*signals), VIEWS[kind]
    assert view.silence is not None and not view.heard(model) and not view.rows(model)
    assert said in view.silence(model)
    assert said in text(drawn(kind, model), 2_000)


def test_a_clock_alone_is_explained() -> None:
    shown = text(clocks(known(samples.clock("h1", reference="h1"), samples.path_delay())))
    assert row(shown, "h1 ")[1] == "reference" and "so there is nothing to compare" in shown
    empty = samples.collocation(groups=[], alone=[], unknown=[])
    assert "a minute or two" in text(clock_tables.collocation(fold(fleet(), [empty])))


def test_each_view_is_heard_once_its_signals_are_there() -> None:
    model = known(*samples.one_of_each())
    for kind in ("clocks", "edges", "collocation", "app", "delay", "top"):
        assert VIEWS[kind].heard(model) and VIEWS[kind].rows(model)
