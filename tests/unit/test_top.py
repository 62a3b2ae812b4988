"""The live view without a terminal: model in, lines out."""

from __future__ import annotations

import io
import re

import msgspec
import pytest
import samples
from rich.console import Console

from pytools.views.model import Model, fold
from pytools.views.tables import UNKNOWN
from pytools.views.top import render

NOW_NS = samples.AT_NS + samples.SECOND_NS // 2


def frame(
    model: Model, now_ns: int = NOW_NS, width: int = 280, height: int | None = None, missed: int = 0
) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True).print(render(model, now_ns, width, height, missed))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def line(lines: list[str], start: str) -> str:
    return next(each.strip() for each in lines if each.strip().startswith(start))


def whole() -> Model:
    return fold(
        Model(),
        [
            samples.path_delay(1),
            samples.path_delay(2),
            samples.tcp_path(1, in_window=3),
            samples.nexthop_group(samples.AT_NS - samples.SECOND_NS, packets=(90, 800)),
            samples.nexthop_group(samples.AT_NS, packets=(100, 900)),
            samples.path_state(1, state="drained", wanted=0),
            samples.path_state(2, state="healthy", wanted=9),
            samples.self_cost(),
            samples.act(),
        ],
    )


def clocked() -> Model:
    """As above, with clocks and application delays."""
    known = [
        samples.clock("h1"),
        samples.clock("h2"),
        samples.clock("h3", state="holdover", bound_ns=14_300),
        samples.free_clock("h4"),
        samples.app_delay(1),
        samples.app_delay(1, local_port=40_000),
    ]
    return fold(whole(), known)


def test_one_line_says_everything_about_a_path() -> None:
    cells = re.split(r"\s{2,}", line(frame(whole()), "h2 rail1"))
    assert cells[:14] == [
        "h2 rail1 via 10.1.1.1",
        "2.10 µs",
        "8.40 µs",
        "±450 ns",
        "400 ns",
        "6.70 µs",
        "6.70 µs",
        UNKNOWN,
        UNKNOWN,
        "0 % (0/50)",
        "3",
        "1→0",  # the kernel has 1, steering wants 0
        "100",
        "10",
    ]
    assert cells[14:] == ["drained 4.50 s", "queueing 41 ms > 5 ms for 60 ms [under drain-congested]"]


def test_a_weight_that_is_as_wanted_is_one_number() -> None:
    cells = re.split(r"\s{2,}", line(frame(whole()), "h2 rail2"))
    assert cells[10:14] == [UNKNOWN, "9", "900", "100"]


def test_the_worst_path_comes_first() -> None:
    lines = frame(whole())
    paths = [each.split()[1] for each in lines if each.strip().startswith("h2 rail")]
    assert paths == ["rail1", "rail2"]
    swapped = fold(whole(), [samples.path_state(1, state="healthy"), samples.path_state(2, state="drained")])
    assert [each.split()[1] for each in frame(swapped) if each.strip().startswith("h2 rail")] == ["rail2", "rail1"]


def test_acts_explain_themselves() -> None:
    shown = line(frame(whole()), "500 ms ago")
    assert shown == (
        "500 ms ago applied: nexthop group 102 11 5→1, 12 5→9 "
        "because queueing 41 ms > 5 ms for 60 ms on rail1 [under drain-congested]"
    )


def test_the_newest_act_is_the_first_and_old_ones_go() -> None:
    acts = [samples.act(at_ns=samples.AT_NS + each, number=each, what=f"group {each}") for each in range(99)]
    shown = [each for each in frame(fold(Model(), acts), height=40) if "because" in each]
    assert [re.search(r"group (\d+)", each)[1] for each in shown] == ["98", "97", "96", "95", "94", "93"]


def test_what_was_lost_is_said_in_the_first_line() -> None:
    assert "lost" not in frame(whole())[0]
    lossy = fold(whole(), [samples.self_cost(drops={"ring_full": 3, "bus_slow": 4}, failed={"tcp_egress": "no"})])
    first = frame(lossy, missed=5)[0]
    assert "7 lost while watching" in first
    assert "not attached: tcp_egress" in first
    assert "this view missed 5 signals" in first


def test_a_path_that_fell_silent_is_called_so() -> None:
    later = samples.AT_NS + 60 * samples.SECOND_NS
    assert "not measured for 60.00 s" in line(frame(whole(), later), "h2 rail1")
    assert "not measured" not in "\n".join(frame(whole()))


def test_probes_that_were_overtaken_are_spoken_of_before_they_are_answered() -> None:
    waiting = fold(Model(), [samples.path_delay(1, overtaken=40, overtaken_p50_ns=35_000_000)])
    assert "half of the probes wait for at least 35.00 ms" in line(frame(waiting), "h2 rail1")


def test_a_state_nobody_stands_for_any_more_is_called_so() -> None:
    later = samples.AT_NS + 5 * samples.SECOND_NS
    shown = line(frame(fold(whole(), [samples.path_delay(1, at_ns=later)]), later), "h2 rail1")
    assert "drained?" in shown and "no controller for 5.00 s; queueing 41 ms" in shown


def test_unknown_is_a_dash_and_never_a_number() -> None:
    only_state = fold(Model(), [msgspec.structs.replace(samples.path_state(), weight_actual=None)])
    cells = re.split(r"\s{2,}", line(frame(only_state), "h2 rail1"))
    assert cells[1:14] == [UNKNOWN] * 10 + [f"{UNKNOWN}→1"] + [UNKNOWN] * 2
    free = fold(Model(), [samples.path_delay(1, clock="free_running")])
    assert re.split(r"\s{2,}", line(frame(free), "h2 rail1"))[1:4] == [UNKNOWN, UNKNOWN, UNKNOWN]


def test_more_paths_than_lines_are_counted() -> None:
    many = fold(Model(), [samples.path_delay(rail) for rail in range(1, 101)])
    shown = frame(many, height=30)
    assert len(shown) <= 30
    rows = sum(each.strip().startswith("h2 rail") for each in shown)
    assert f"… and {100 - rows} paths that look better" in "\n".join(shown)


@pytest.mark.parametrize("model", [whole(), clocked()], ids=["paths", "clocks"])
@pytest.mark.parametrize("width", [80, 96, 100, 118, 130, 140, 150, 160, 182, 200, 230, 252, 280])
def test_every_figure_is_whole_at_every_width(width: int, model: Model) -> None:
    shown = frame(model, width=width, height=24)
    assert len(shown) <= 24
    assert not any("…" in each for each in shown)
    wide = re.split(r"\s{2,}", line(frame(model), "h2 rail1"))
    cells = re.split(r"\s{2,}", line(shown, "h2 rail1"))
    assert cells[0] == (wide[0] if width >= 96 else "h2 rail1")
    assert [cell for cell in cells[1:] if cell not in wide] == ([] if width >= 96 else ["0 %"])
    assert "queueing 41 ms > 5 ms for 60 ms" in " ".join(shown)


def test_an_empty_model_says_so() -> None:
    assert "no path has been measured yet" in "\n".join(frame(Model()))


def test_the_first_line_says_how_far_our_clock_can_be_trusted() -> None:
    assert "clock" not in frame(whole())[0]
    assert "   clock synchronised ±430 ns to h2" in frame(clocked())[0]
    held = fold(clocked(), [samples.clock("h1", state="holdover", bound_ns=21_000)])
    assert "   clock holdover ±21.00 µs to h2" in frame(held)[0]
    free = frame(fold(clocked(), [samples.free_clock("h1")]))[0]
    assert free.endswith("   clock free_running")
    chosen = fold(whole(), [samples.clock("h1", reference="h1"), samples.clock("h2", reference="h1")])
    assert "   clock synchronised, the reference" in frame(chosen)[0]
    assert "   clock synchronised?" in frame(clocked(), NOW_NS + 20 * samples.SECOND_NS)[0]


def test_clocks_are_one_line_and_a_row_each_where_there_is_room() -> None:
    shown = frame(clocked())
    assert line(shown, "clocks against") == (
        "clocks against h2: 1 synchronised (h1 ±430 ns), 1 holdover (h3 ±14.30 µs), 1 free_running (h4)"
    )
    start = shown.index(next(each for each in shown if each.startswith("host  ")))
    assert [each.split()[0] for each in shown[start + 2 : start + 6]] == ["h4", "h3", "h1", "h2"]  # the worst first
    assert shown[start + 6] == "last acts"


def test_paths_come_before_clocks_when_lines_are_few() -> None:
    many = fold(clocked(), [samples.path_delay(rail) for rail in range(1, 101)])
    shown = frame(many, height=24)
    assert len(shown) <= 24
    assert not any(each.startswith("host  ") for each in shown)
    assert any(each.startswith("clocks against h2") for each in shown)


def test_of_many_clocks_three_of_each_kind_are_named() -> None:
    fleet = fold(Model(), [samples.clock(f"n{each}", reference="n0", bound_ns=each) for each in range(50)])
    assert line(frame(fleet), "clocks against") == (
        "clocks against n0: 49 synchronised (n49 ±49 ns, n48 ±48 ns, n47 ±47 ns, …)"
    )
    assert len(frame(fleet, width=80, height=24)) <= 24


def test_application_delays_are_columns_or_a_line() -> None:
    cells = re.split(r"\s{2,}", line(frame(clocked()), "h2 rail1"))
    assert cells[7:9] == ["88.40 µs", "86.70 µs"]
    assert not any(each.startswith("application") for each in frame(clocked()))
    narrow = " ".join(frame(clocked(), width=80, height=24))
    assert "application packets: tcp h2 rail1 p99 88.40 µs ±460 ns" in narrow
    free = fold(clocked(), [samples.app_delay(1, clock="free_running")])
    assert "application packets: tcp h2 rail1 queueing p99 86.70 µs" in " ".join(frame(free, width=80))
    assert re.split(r"\s{2,}", line(frame(free), "h2 rail1"))[7:9] == [UNKNOWN, "86.70 µs"]


def test_holdover_is_shown_with_its_bound() -> None:
    held = fold(Model(), [samples.path_delay(1, clock="holdover")])
    assert re.split(r"\s{2,}", line(frame(held), "h2 rail1"))[1:4] == ["2.10 µs", "8.40 µs", "±450 ns"]


def test_a_small_terminal_keeps_its_newest_acts_and_leaves_clocks_to_the_first_line() -> None:
    busy = fold(clocked(), [samples.act(at_ns=samples.AT_NS + each, number=each, what=f"g{each}") for each in range(9)])
    shown = frame(busy, width=80, height=24)
    assert len(shown) <= 24 and any("clocks against" in each for each in shown)
    numbers = [int(found[1]) for each in shown if (found := re.search(r"applied: g(\d)", each))]
    assert numbers == list(range(8, 8 - len(numbers), -1)) and len(numbers) >= 3
    crowded = fold(busy, [samples.path_state(rail, state="drained") for rail in range(1, 9)])
    shown = frame(crowded, width=80, height=24)
    assert "clock synchronised ±430 ns to h2" in shown[0]
    assert not any("clocks against" in each for each in shown)
    assert sum("applied: g" in each for each in shown) == 3


def troubled() -> Model:
    """As `clocked`, with something to say about TCP, links and RDMA."""
    trouble = [
        samples.tcp_path(2, in_window=9),
        samples.link_event(1, what="carrier_lost"),
        samples.rdma_qp(18),
        samples.rdma_qp(20, verdict="congested"),
        samples.rdma_suspects(),
    ]
    return fold(clocked(), trouble)


def test_tcp_links_and_rdma_have_a_line_each() -> None:
    lines = frame(troubled())
    assert line(lines, "TCP:") == (
        "TCP: h2 rail2 9 sent again (fast 8, RTO 1), 3 needlessly; h2 rail1 3 sent again (fast 2, RTO 1), 1 needlessly"
    )
    assert line(lines, "links:") == "links: rail1 carrier lost 502 ms ago"
    assert line(lines, "RDMA:") == "RDMA: 1 congested (rxe0 qp 20 ib_write_bw); slow host h2, 62.0 %; 1 well"


def test_there_is_no_line_when_all_is_well() -> None:
    well = fold(
        Model(),
        [samples.path_delay(), samples.tcp_path(in_window=0), samples.rdma_qp(), samples.rdma_suspects(suspects=[])],
    )
    old = fold(well, [samples.link_event(at_ns=samples.AT_NS - 61 * samples.SECOND_NS)])
    for each in (well, old):
        assert not [text for text in frame(each) if text.startswith(("TCP:", "links:", "RDMA:"))]


def test_what_nobody_stands_for_any_more_is_not_said() -> None:
    later = NOW_NS + 20 * samples.SECOND_NS
    said = [text for text in frame(troubled(), later) if text.startswith(("TCP:", "links:", "RDMA:"))]
    assert said == ["links: rail1 carrier lost 20.50 s ago"]
    closed = fold(Model(), [samples.rdma_qp(verdict="dead", closed=True)])
    assert not any("RDMA" in text for text in frame(closed))


def test_of_events_that_follow_upon_one_another_the_last_is_told() -> None:
    events = [
        samples.link_event(1, samples.AT_NS, "carrier_lost"),
        samples.link_event(1, samples.AT_NS + 1, "carrier_found"),
        samples.link_event(1, samples.AT_NS + 2, "neighbour_failed"),
        samples.link_event(2, samples.AT_NS + 3, "queue_full"),
        samples.link_event(3, samples.AT_NS + 4, "flap"),
    ]
    assert line(frame(fold(Model(), events)), "links:") == (
        "links: rail3 flap 502 ms ago; rail2 queue full 502 ms ago; rail1 neighbour failed 502 ms ago; and 1 more"
    )


def test_a_receiver_that_does_not_read_is_said_without_any_loss() -> None:
    full = fold(Model(), [samples.tcp_path(in_window=0, zero_windows=4)])
    assert line(frame(full), "TCP:") == "TCP: h2 rail1 4 zero windows"


def test_many_queue_pairs_are_a_line_by_verdict() -> None:
    verdicts = ["congested"] * 40 + ["dead"] * 3 + ["slow_receiver", "no_demand", "unknown", "ok"]
    pairs = [samples.rdma_qp(number, verdict=verdict) for number, verdict in enumerate(verdicts)]
    assert line(frame(fold(Model(), pairs)), "RDMA:") == (
        "RDMA: 3 dead (rxe0 qp 40 ib_write_bw, rxe0 qp 41 ib_write_bw, …); "
        "40 congested (rxe0 qp 0 ib_write_bw, rxe0 qp 1 ib_write_bw, …); "
        "1 slow receiver (rxe0 qp 43 ib_write_bw); 2 well"
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 24), (200, 24), (80, 40)])
def test_new_lines_leave_the_paths_and_the_acts_their_room(width: int, height: int) -> None:
    shown = frame(troubled(), width=width, height=height)
    assert len(shown) <= height
    assert sum(each.strip().startswith("h2 rail") for each in shown) >= 2
    assert "last acts" in shown and any(each.startswith("links:") for each in shown)
    crowded = fold(troubled(), [samples.path_state(rail, state="drained") for rail in range(1, 9)])
    assert len(frame(crowded, width=width, height=height)) <= height
