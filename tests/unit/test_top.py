"""Frames of the live view: signals in, lines out, no terminal and no application."""

from __future__ import annotations

import functools
import re

import msgspec
import pytest
import reference
import samples
from samples import AT_NS, SECOND_NS
from support import ROOT, mentions
from top_kit import NOW_NS, around, known, story

from pytools.errors import UsageError
from pytools.figures import FOLLOWED, ONE_WAY, Figure
from pytools.signals import AnySignal, PathState, Underlay
from pytools.units import UNKNOWN
from pytools.views.actions import Mode
from pytools.views.top import lists, paths, plain
from pytools.views.top.glyphs import ASCII, UNICODE, Glyphs
from pytools.views.top.header import Around
from pytools.views.top.keys import KEYS, Asked, Look, asked
from pytools.views.top.page import Frame, draw
from pytools.views.top.state import Known

SIZES = [(80, 24), (100, 30), (132, 43), (200, 50), (400, 60)]


def frame(
    about: Known, width: int = 400, height: int = 40, at: Around | None = None, glyphs: Glyphs = UNICODE, **look: object
) -> Frame:
    return draw(about, Look(**look), at or around(), width, height, glyphs)  # type: ignore[arg-type]


def text(made: Frame) -> list[str]:
    return [line.plain.rstrip() for line in made.lines]


def line(lines: list[str], start: str) -> str:
    return next(each.strip() for each in lines if each.strip().startswith(start))


def cells(about: Known, place: int = 0, **look: object) -> dict[str, str]:
    """A row of paths by heading, uncut."""
    view = Look(**look)  # type: ignore[arg-type]
    rows = paths.rows(about, NOW_NS, view.horizon_s, UNICODE)
    row = rows.ordered(view.sort, view.reverse)[place]
    return {field.heading: str(field.show(row)) for field in rows.listing.columns}


@functools.cache
def told() -> Known:
    return known(*story())


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("panel", ["paths", "flows", "links", "rdma", "events", "jobs"])
@pytest.mark.parametrize("page", ["list", "detail", "help"])
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["utf8", "ascii"])
def test_every_frame_fits(width: int, height: int, panel: str, page: str, glyphs: Glyphs) -> None:
    made = frame(told(), width, height, glyphs=glyphs, panel=panel, page=page)
    assert len(made.lines) == height
    assert max(each.cell_len for each in made.lines) <= width
    if glyphs is ASCII:
        assert all(each.plain.isascii() for each in made.lines)


def test_one_row_says_everything_about_a_path() -> None:
    shown = cells(known(*story()))
    assert mentions(shown.pop("reason"), samples.path_state(1).reason, "under drain-congested")
    assert shown == {
        "path": "h2 rail1",
        "state": "drained 4s",
        "q p99": "40.00 ms",
        "loss": "2.0 %",
        "OWD p99": "41.00 ms",
        "±": "±450 ns",
        "trend 40 s": "▁▁▁▁▁▁████",
        "retx/s": "12",
        "CE": "1.0 %",
        "weight": "1→0",  # the kernel has 1, steering wants 0
        "wanted": "0 %",
        "sent": "10.0 %",
        "back p99": "8.40 µs",
        "q back": "6.70 µs",
        "OWD p50": "31.00 ms",
        "back p50": "2.10 µs",
        "± back": "±450 ns",
        "q p50": "30.00 ms",
        "CE back": "3.1 %",
        "app p99": UNKNOWN,
        "via": "10.1.1.1",
    }


def test_weights_that_are_as_wanted_are_one_number() -> None:
    found = cells(known(*story()), 1)
    assert (found["path"], found["weight"], found["wanted"], found["sent"]) == ("h2 rail2", "9", "100.0 %", "90.0 %")


def test_a_horizon_reaches_as_far_back_as_it_says() -> None:
    # 10 of 41 seconds are bad: within the last 2 and 10 all of them, within 40 a quarter.
    about = known(*story())
    by_horizon = {seconds: cells(about, horizon_s=seconds) for seconds in (2, 10, 40)}
    assert [by_horizon[each]["retx/s"] for each in (2, 10, 40)] == ["12", "12", "3.0"]
    assert [by_horizon[each]["OWD p50"] for each in (2, 10, 40)] == ["31.00 ms", "31.00 ms", "2.10 µs"]
    assert {each["q p99"] for each in by_horizon.values()} == {"40.00 ms"}  # the largest of the windows'
    assert [by_horizon[each]["loss"] for each in (2, 10, 40)] == ["2.0 %", "2.0 %", "0.50 %"]
    assert "last 2 s" in text(frame(about, horizon_s=2))[1]


def test_the_worst_path_comes_first() -> None:
    lines = text(frame(known(*story())))
    assert [each.split()[1] for each in lines if each.startswith("h2 rail")][:3] == ["rail1", "rail2", "rail3"]
    better = known(
        *story(), samples.path_state(1, AT_NS + 1, "healthy", 1), samples.path_state(2, AT_NS + 1, "drained")
    )
    assert [each.split()[1] for each in text(frame(better)) if each.startswith("h2 rail")][:2] == ["rail2", "rail1"]


def test_unknown_is_a_dash_and_never_a_number() -> None:
    only_state = known(msgspec.structs.replace(samples.path_state(), weight_actual=None))
    found = cells(only_state)
    assert found.pop("weight") == f"{UNKNOWN}→1"
    about = {name: found.pop(name) for name in ("path", "state", "via", "reason", "trend 40 s")}
    assert about["trend 40 s"].strip() == "" and set(found.values()) == {UNKNOWN}
    free = cells(known(samples.path_delay(1, clock="free_running")))
    assert {free[name] for name in ("OWD p50", "OWD p99", "±", "back p50", "back p99", "± back")} == {UNKNOWN}
    assert free["q p99"] == "6.70 µs"


def test_a_horizon_with_a_free_running_clock_in_it_shows_what_was_synchronised() -> None:
    both = known(samples.path_delay(1), samples.path_delay(1, AT_NS + 1, clock="free_running"))
    rows = paths.rows(both, NOW_NS, 10, UNICODE).rows
    assert rows[0].figures.clock == "free_running" and rows[0].figures.forward.figures[Figure(ONE_WAY, "p99")] == 8_400


def test_a_path_that_fell_silent_is_called_so_and_keeps_its_last_window() -> None:
    later = around(AT_NS + 60 * SECOND_NS)
    made = frame(known(*story()), at=later)
    assert "not measured for 60.00 s" in " ".join(text(made))
    assert "41.00 ms" in line(text(made), "h2 rail1")
    assert "not measured" not in " ".join(text(frame(known(*story()))))


def test_a_state_nobody_stands_for_any_more_is_called_so() -> None:
    later = around(AT_NS + 5 * SECOND_NS)
    made = " ".join(text(frame(known(*story()), at=later)))
    assert "drained?" in made and "no controller for 5.00 s" in made


def test_probes_that_were_overtaken_are_spoken_of_before_they_are_answered() -> None:
    waiting = known(samples.path_delay(1, overtaken=40, overtaken_p50_ns=35_000_000))
    assert any(mentions(line, "half", "at least 35.00 ms") for line in text(frame(waiting)))


def test_two_paths_with_one_short_name_are_told_apart() -> None:
    other = msgspec.structs.replace(samples.path(1), gateway="10.1.1.9")
    made = text(frame(known(samples.path_delay(1), samples.path_delay(1, path=other))))
    assert line(made, "h2 rail1 via 10.1.1.1") and line(made, "h2 rail1 via 10.1.1.9")


# ---- header ----


@pytest.mark.parametrize("width", [80, 200])
def test_the_first_line_has_all_that_was_asked_for(width: int) -> None:
    first = text(frame(known(*story()), width, at=around(mode=Mode(True, True), own_share=0.021)))[0]
    for part in ("swerve h1", "up 3d 04:12", "±430 ns", "steering", "agent 3.1 %", "lost 0"):
        assert part in first
    assert mentions(first, "clock", "synchronised", "±430 ns", "h2") == (width == 200)


@pytest.mark.parametrize(
    ("mode", "word"),
    [
        (None, "a controller runs"),  # seen by its states, and nobody to ask
        (Mode(), "observe"),
        (Mode(True, False), "dry run"),
        (Mode(True, True), "steering"),
    ],
)
def test_the_mode_is_a_word(mode: Mode | None, word: str) -> None:
    assert f"  {word}  " in text(frame(known(*story()), at=around(mode=mode)))[0]


def test_without_a_controller_the_mode_is_observe() -> None:
    assert "  observe  " in text(frame(known(samples.path_delay())))[0]


def test_what_must_not_be_overlooked_has_a_line() -> None:
    lossy = samples.self_cost(AT_NS + 1, drops={"ring_full": 3, "bus_slow": 4}, failed={"tcp_egress": "no"})
    at = around(mode=Mode(True, True, 41.6, "upgrade"), missed=5)
    lines = text(frame(known(*story(), lossy), at=at, asked=Asked("rail")))
    assert "lost 7" in lines[0]
    for words in (
        "CONFIRM within 42 s",
        "swerve steer confirm",
        "steering is frozen: upgrade",
        "not attached: tcp_egress",
        "this view missed 5 signals",
        "filter: rail (3 of 3)",
    ):
        assert words in lines[2]
    assert text(frame(known(*story())))[2].startswith("path ")  # otherwise there is none


def test_the_clock_is_given_with_how_far_it_can_be_trusted() -> None:
    held = known(samples.path_delay(), samples.clock("h1", state="holdover", bound_ns=21_000))
    assert "clock holdover ±21.00 µs to h2" in text(frame(held))[0]
    assert "clock free_running" in text(frame(known(samples.free_clock("h1"))))[0]
    assert f"clock {UNKNOWN}" in text(frame(known(samples.path_delay())))[0]


# ---- below the list ----


def test_the_selected_row_says_why_and_the_last_acts_explain_themselves() -> None:
    lines = text(frame(known(*story())))
    assert mentions(line(lines, "h2 rail1:"), samples.path_state(1).reason, "under drain-congested")
    assert line(lines, "TCP:") and line(lines, "links: rail1 queue full") and line(lines, "RDMA: 1 congested")
    assert line(lines, "clocks against h2")
    act = lines[lines.index("last acts") + 1]
    what = ("nexthop group 102", "applied", "11 5→1", "12 5→9")
    assert mentions(act, "3.55 s ago", *what, samples.act().because, "under drain-congested")


def test_rows_come_before_what_is_said_below_them() -> None:
    many = known(*story(), *(samples.path_delay(rail) for rail in range(4, 101)))
    lines = text(frame(many, 80, 24))
    assert sum(each.startswith("h2 rail") and ":" not in each[:10] for each in lines) >= 13
    assert " 1/100" in lines[1]


# ---- other lists ----


def test_a_reason_that_counts_seconds_is_no_event_and_the_newest_is_shown() -> None:
    def waits(second: int) -> PathState:
        state = samples.path_state(1, AT_NS - (12 - second) * SECOND_NS)
        return msgspec.structs.replace(state, reason=f"good for {second} s of 30 s; before: queueing")

    about = known(samples.path_delay(1), *map(waits, range(13)))
    assert len(about.events) == 1
    assert cells(about)["reason"].startswith("good for 12 s of 30 s; before: queueing")


def test_flows_events_links_and_queue_pairs_have_a_row_each() -> None:
    about = known(*story())
    flows = text(frame(about, panel="flows"))
    assert line(flows, "10.9.0.1:40029 → 10.9.0.2:5201").split()[3] == "29"  # the most retransmissions first
    links = text(frame(about, panel="links"))
    assert line(links, "rail1") and line(links, "rail2") and line(links, "RDMA: 1 congested").endswith("(3 again)")
    assert line(text(frame(about, panel="rdma")), "rxe0 20").split()[2] == "congested"
    jobs = line(text(frame(known(samples.job()), width=200, panel="jobs")), "slurm:4711.0")
    assert "network 62.0 %" in jobs and "queueing delay 9.1 ms" in jobs
    events = text(frame(about, panel="events"))
    assert [each.split()[2] for each in events[3:7]] == ["state", "act", "state", "link"]
    assert "suspect → drained" in events[3] and "healthy → suspect" in events[5]


def test_an_empty_list_says_why() -> None:
    nothing = Known()
    said = {
        panel: " ".join(text(frame(nothing, panel=panel)))
        for panel in ("paths", "flows", "links", "rdma", "events", "jobs")
    }
    assert "no process here is a rank" in said["jobs"]
    assert "no path has been measured yet" in said["paths"]
    assert all(re_word in said[panel] for panel, re_word in (("flows", "no TCP"), ("links", "no interface")))
    assert "no queue pair" in said["rdma"] and "nothing has happened" in said["events"]
    blind = known(samples.rdma_sight(available=False, reason="no RDMA device"))
    assert "no RDMA device" in " ".join(text(frame(blind, panel="rdma")))


def test_a_path_by_a_tunnel_in_detail_has_the_ways_below_it() -> None:
    below = [Underlay("10.8.0.2", "10.3.1.1", "eth1", 30), Underlay("10.8.0.2", "", "eth2", 10)]
    whole = "\n".join(text(frame(known(samples.path_delay(underlay=below)), 80, 60, page="detail")))
    assert mentions(whole, "outer packets", "10.8.0.2", "eth1 via 10.3.1.1 75.0 %", "eth2 25.0 %")


@pytest.mark.parametrize(
    ("ways", "confidence", "header", "rows"),
    [
        (1, 0.9922, "1 way behind the first hop, with 99.2 % confidence", 0),
        (2, 0.995, "2 ways behind the first hop, with 99.5 % confidence", 2),
        (2, 0.0, "2 ways behind the first hop, perhaps others too: routers do not answer", 2),
    ],
)
def test_a_path_in_detail_says_how_many_ways_it_has(ways: int, confidence: float, header: str, rows: int) -> None:
    fixed = {"ways": ways, "confidence": confidence}
    told = [samples.path_way(way=number + 1, **fixed) for number in range(ways)]
    lines = text(frame(known(*story(), *told), 80, 60, page="detail"))
    assert header in [line.strip() for line in lines]
    assert sum(" hop 2  slow, behind hop 2" in line for line in lines) == rows


def test_a_path_in_detail_has_its_histogram_and_its_log() -> None:
    lines = text(frame(known(*story()), 80, 60, page="detail"))
    whole = "\n".join(lines)
    assert mentions(whole, "10 s", "10 windows", "1.00 s", "10.00 s")
    for each in FOLLOWED:
        assert line(lines, each.name).count("±") == 2
    assert line(lines, "jitter").split() == ["jitter", "350", "ns", "±210", "ns", "350", "ns", "±210", "ns"]
    assert mentions(whole, "weight 1", "kernel", "0 wanted", "0 %", "10.0 % sent")
    assert mentions(whole, "sent here", "10,000", "1,000", "kernel")
    assert line(lines, "queueing of single probes").endswith("500 there, 500 back")
    assert line(lines, "up to 50 ms").split()[4:6] == ["500", "█" * 24]
    log = lines[lines.index("acts and states since this view was opened, the newest first") + 1 :]
    kinds = [each.split()[1] for each in log if each[:2].isdigit()]
    assert kinds == ["state", "act", "state", "link"]


# ---- order, filters ----


def test_sorting_puts_the_worst_of_a_column_first_and_what_is_unknown_last() -> None:
    about = known(*story())
    by_weight = [cells(about, place, sort="weight")["weight"] for place in range(3)]
    assert by_weight == ["1→0", "9", UNKNOWN]
    assert [cells(about, place, sort="weight", reverse=True)["weight"] for place in range(3)] == by_weight[::-1]
    assert "weight↓" in " ".join(text(frame(about, sort="weight"))) or "weight" in text(frame(about, sort="weight"))[1]


@pytest.mark.parametrize(
    ("typed", "rails"),
    [
        ("rail2", {"rail2"}),
        ("DRAINED", {"rail1"}),
        ("--path rail2", {"rail2"}),
        ("--interface rail1 --interface=rail3", {"rail1", "rail3"}),
        ("--dst 10.9.0.0/16 --path 'dev rail3'", {"rail3"}),
        ("--dst 10.10.0.0/16", set()),
        ("", {"rail1", "rail2", "rail3"}),
    ],
)
def test_filters_are_words_or_those_of_the_other_commands(typed: str, rails: set[str]) -> None:
    lines = text(frame(known(*story()), asked=asked(typed)))
    heading = next(index for index, each in enumerate(lines) if each.startswith("path "))
    rows = [each for each in lines[heading + 1 : heading + 4] if each.startswith("h2 ")]
    assert {each.split()[1] for each in rows} == rails
    if not rails:
        assert "nothing passes --dst 10.10.0.0/16" in " ".join(lines)


@pytest.mark.parametrize(
    "typed", ["--port x", "--dst nonsense", "--colour red", "--path", "--path 'a", "--verdict fine"]
)
def test_a_filter_that_makes_no_sense_is_refused(typed: str) -> None:
    with pytest.raises(UsageError):
        asked(typed)


# ---- keys, glyphs, plain ----


def test_the_help_names_every_key() -> None:
    for width, height in ((80, 24), (200, 50)):
        lines = text(frame(known(*story()), width, height, page="help"))
        for key in KEYS:
            assert any(f"{key.shown:<8}{key.words}" in each for each in lines), key


def test_sparklines_share_one_scale() -> None:
    assert UNICODE.spark(
        [None, 0, 9_999, 10_000, 50_000, 200_000, 500_000, 2_000_000, 5_000_000, 10_000_000, 10**12]
    ) == (" ▁▁▂▃▄▅▆▇██")
    assert ASCII.spark([None, 0, 10_000_000]) == " _#"


def test_the_report_has_everything_and_is_not_cut() -> None:
    made = plain.text(plain.report(known(*story()), Look(), around(), UNICODE), UNICODE)
    assert "…" not in made and "\x1b" not in made
    for words in (
        "swerve h1",
        "h2 rail3",
        "last acts",
        "h2 rail1: queueing",
        "clocks against",
        "RDMA: 1 congested",
        "41.00 ms",
    ):
        assert words in made
    headings = next(each for each in made.splitlines() if each.startswith("path"))
    assert all(name in headings for name in ("q back", "± back", "CE back", "trend 40 s", "via"))
    assert plain.text(plain.report(known(*story()), Look(), around(), ASCII), ASCII).isascii()


def test_the_published_columns_are_those_of_the_view() -> None:
    made = reference.columns()
    assert (ROOT / "docs" / "columns.txt").read_text() == made, "python scripts/reference.py"
    listed = [panel(Known(), 0).listing.columns for panel in lists.PANELS.values()]
    for field in [*paths.fields(UNICODE), *(field for fields in listed for field in fields)]:
        assert field.meaning
        assert re.search(rf"^    {re.escape(field.heading)} +{re.escape(field.meaning)}$", made, re.MULTILINE)


def test_a_hold_is_shown_with_what_it_did_and_why_there_is_none() -> None:
    def detail(*signals: AnySignal, at: Around | None = None) -> str:
        return " ".join(text(frame(known(samples.path_delay(1), *signals), at=at, page="detail")))

    held = samples.hold_state()
    assert cells(known(samples.path_delay(1), held))["reason"] == "held to 320.0 Mbit/s"
    found = detail(held)
    assert mentions(found, "held", "above 1.00 ms", "at most 20.00 ms", "1.40 ms", "320.0 Mbit/s", "[short")
    assert mentions(found, "900 packets", "240 ms", "60 of 410 samples above")
    refused = samples.hold_state(armed=False, why_not="packets wait in htb there", rate_bytes_per_s=None)
    assert "not held: packets wait in htb there" in detail(refused)
    assert "held to" not in cells(known(samples.path_delay(1), refused))["reason"]
    assert "not held: no controller for 9.00 s" in detail(held, at=around(AT_NS + 9 * SECOND_NS))
    assert "not held: the hold has ended" in detail(samples.hold_state(armed=False))
    assert "held" not in detail()
