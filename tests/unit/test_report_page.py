"""The page: everything that was told is on it, as text and never as markup; nothing is fetched; unknown is no zero."""

from __future__ import annotations

import base64
import hashlib
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest
import report_world
import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from markupsafe import Markup
from msgspec.structs import replace as replaced
from report_world import World
from support import ROOT, mentions

from pytools.figures import FOLLOWED
from pytools.signals import AnySignal, Delay, Path
from pytools.units import duration
from pytools.views.report import matrix, tables
from pytools.views.report.aggregate import Held, Report, Told
from pytools.views.report.gather import ACTS, PATHS, Gathering
from pytools.views.report.markup import element, text
from pytools.views.report.page import page

SECOND = 1_000_000_000
HOSTILE = "<script>alert(1)</script>\"'&\x00\u202e</td></svg></title>"
VOID = {"meta"}


@dataclass
class Found(HTMLParser):
    """A page taken apart by somebody else's parser."""

    source: str
    tags: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)
    styles: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    open_: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.source)
        self.close()
        assert self.open_ == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id" and value]
        if tag not in VOID:
            self.open_.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open_ and self.open_.pop() == tag, f"</{tag}> where {self.open_} is open"

    def handle_data(self, data: str) -> None:
        kind = self.open_[-1] if self.open_ else ""
        {"script": self.scripts, "style": self.styles}.get(kind, self.words).append(data)

    def all_of(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [
            found
            for name, found in self.tags
            if name == tag and all(found.get(key.rstrip("_")) == value for key, value in attributes.items())
        ]


def report(signals: Iterable[AnySignal], told: Told | None = None) -> Report:
    gathering = Gathering()
    gathering.add(signals)
    return gathering.report(told or Told("From a test."))


def whole(signals: Iterable[AnySignal]) -> Found:
    return Found(page(report(signals)))


@pytest.fixture(scope="module")
def incident() -> Report:
    """Four hosts, until all have come back."""
    world = World(seconds=report_world.BACK_S + 40)
    gathering = Gathering()
    for host in world.hosts:
        gathering.add(world.signals(host))
    return gathering.report(Told("From a test."))


@pytest.fixture(scope="module")
def shown(incident: Report) -> Found:
    return Found(page(incident))


# ---- what tells subjects apart ----


def test_a_queue_pair_number_that_another_process_gets_is_another_pair() -> None:
    first = samples.rdma_qp(at_ns=1)
    second = replaced(samples.rdma_qp(at_ns=2), owner=replaced(first.owner, pid=first.owner.pid + 1))
    assert [len(report(pairs).queue_pairs) for pairs in ([first, first], [first, second])] == [1, 2]


# ---- text is text ----


@given(st.text())
def test_text_holds_nothing_that_a_page_would_obey(words: str) -> None:
    safe = text(words)
    assert not set("<>\"'") & set(safe) and re.fullmatch(r"(?:[^&]|&(?:lt|gt|amp|#34|#39);)*", safe, re.DOTALL)
    assert all(each.isprintable() or each == "\n" for each in safe)


@given(st.text(), st.text())
def test_an_element_gives_back_what_was_put_in(words: str, attribute: str) -> None:
    found = Found(f"<body>{element('p', words, title=attribute)}</body>")
    plain = ["".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in each) for each in (words, attribute)]
    assert "".join(found.words) == plain[0]
    assert found.all_of("p")[0]["title"] == plain[1]


def test_markup_is_not_escaped_twice_and_text_always_once() -> None:
    assert element("p", element("b", "<&>"), "<i>") == "<p><b>&lt;&amp;&gt;</b>&lt;i&gt;</p>"
    assert element("a", x=None, y=False, z=True, data_t=3, class_="k") == '<a z data-t="3" class="k"></a>'
    assert isinstance(element("p"), Markup) and element("p") + "<" == "<p></p>&lt;"


@pytest.mark.parametrize("row", [["a"], ["a", "b", "c"]])
def test_a_row_has_a_cell_for_each_heading(row: list[str]) -> None:
    assert "<td>b</td>" in tables.table("t", ["x", "y"], [["a", "b"]], left=["y"])
    with pytest.raises(ValueError, match=r"zip\(\)"):
        tables.table("t", ["x", "y"], [row])


def hostile() -> list[AnySignal]:
    """Every signal there is with every word in it hostile."""
    from typing import Any

    import msgspec

    def bad(value: Any) -> Any:
        match value:
            case str():
                return HOSTILE
            case list():
                return [bad(each) for each in value]
            case dict():
                return {f"{HOSTILE}{key}": bad(each) for key, each in value.items()}
            case msgspec.Struct():
                keep = {"type", "schema"}
                return type(value)(
                    **{
                        name: each if name in keep or name in CHOSEN else bad(each)
                        for name in value.__struct_fields__
                        for each in (getattr(value, name),)
                    }
                )
        return value

    return [bad(each) for each in samples.one_of_each()]


CHOSEN = {"clock", "outcome", "verdict", "protocol", "ecn", "seen_by", "kind", "congestion"}  # a fixed set of words


def test_hostile_names_and_reasons_are_read_and_not_run() -> None:
    signals = hostile()
    late = [replaced(each, unix_ns=each.unix_ns + SECOND) for each in signals]
    found = whole([*signals, *late])
    assert len(found.scripts) == 1 and "alert(1)" not in found.scripts[0]
    assert "".join(found.words).count("<script>alert(1)</script>") > 20, "it is there, as text"
    names = {name for name, _ in found.tags}
    assert not names & {"img", "iframe", "object", "embed", "base", "link", "form", "foreignobject", "audio", "video"}
    keys = {key for _, attributes in found.tags for key in attributes}
    assert not any(key.startswith("on") or key in {"style", "src", "srcset", "action"} for key in keys)
    assert "\x00" not in found.source and "\u202e" not in found.source


# ---- nothing leaves the page ----


def test_the_policy_allows_the_one_script_and_the_one_style_and_nothing_else(shown: Found) -> None:
    (meta,) = [each for each in shown.all_of("meta") if each.get("http-equiv")]
    assert meta["http-equiv"] == "Content-Security-Policy" and meta["content"] is not None
    rules = dict(rule.strip().split(" ", 1) for rule in meta["content"].split(";"))
    assert rules.keys() == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for rule, contents in (("script-src", shown.scripts), ("style-src", shown.styles)):
        (content,) = contents
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    before = [name for name, _ in shown.tags[: shown.tags.index(("meta", meta))]]
    assert before == ["html", "head", "meta"], "it comes before all that it is about"


def test_no_address_of_anything_else_is_on_the_page(shown: Found) -> None:
    fetching = {"src", "srcset", "href", "data", "action", "poster", "background", "xlink:href", "ping"}
    named = {value for _, found in shown.tags for key, value in found.items() if key in fetching}
    assert all(value is not None and value.startswith("#") for value in named)
    outside = re.findall(r"(?:https?:)?//[\w.-]+", "".join([*shown.scripts, *shown.styles]))
    assert set(outside) == {"http://www.w3.org"}, "the name of SVG, which nobody fetches"
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|innerHTML|eval\(|WebSocket|sendBeacon", shown.source)


def test_every_link_leads_somewhere_on_the_page(shown: Found) -> None:
    assert len(shown.ids) == len(set(shown.ids))
    targets = {(each["href"] or "").removeprefix("#") for each in shown.all_of("a")}
    assert targets <= set(shown.ids)


def test_style_and_script_travel_with_the_package() -> None:
    kept = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    place = ROOT / "pytools" / "views" / "report"
    patterns = kept["pytools.views.report"]
    assert {file for pattern in patterns for file in place.glob(pattern)} == set((place / "assets").iterdir())


# ---- what is on it ----


def test_it_says_of_whom_and_when_in_utc_and_in_local_time(incident: Report) -> None:
    from datetime import timedelta, timezone

    zone = timezone(timedelta(hours=2), "EET")
    words = "".join(Found(page(incident, lambda at: at.astimezone(zone))).words)
    assert "swerve report: h1, h2, h3, h4" in words
    assert "2026-11-18 11:06:40 to 11:14:19 UTC; 2026-11-18 13:06:40 to 13:14:19 EET where this page was made" in words


def test_every_act_is_explained_and_marked_on_the_paths_that_it_concerns(incident: Report, shown: Found) -> None:
    words = " ".join(shown.words)
    assert len(incident.acts) == 4 * 3 * 3
    for each in incident.acts:
        assert f"act-{each.number}" in shown.ids
        assert each.act.because in words and each.act.what in words
    assert mentions(words, "10.1.1.1 dev rail1", "10 → 0", "10.2.1.1 dev rail2", "10 → 10")
    by_number = {each.number: each.act for each in incident.acts}
    for history in incident.paths:
        assert len(history.acts) == 3, "not those on groups to other hosts, nor of other hosts"
        for number in history.acts:
            assert by_number[number].host == history.path.source
            assert f"{history.path.source}>{history.path.destination} " in by_number[number].because
    assert words.count("because h1>h2 dev rail1 via 10.1.1.1: queueing delay 41 ms") >= 2, "table, and marks"
    marks = shown.all_of("a", class_="mark")
    assert len(marks) >= 2 * 3 * len(incident.paths)
    assert all(mark["aria-label"] for mark in marks)


def test_the_matrix_has_the_worst_path_of_every_pair(incident: Report, shown: Found) -> None:
    found = matrix.cells(incident.paths)
    assert found.keys() == {(a, b) for a in report_world.HOSTS for b in report_world.HOSTS if a != b}
    for (source, to), cell in found.items():
        assert (cell.history.path.source, cell.history.path.destination) == (source, to) and not cell.reverse
        assert cell.history.path.interface == "rail1" and cell.paths == 2
        assert cell.direction.delay is not None and cell.direction.delay.value > 1_000_000
    cells = [each for each in shown.all_of("a") if "rail1" in (each.get("title") or "")]
    assert len(cells) == 12 and all("±" in (each["title"] or "") for each in cells)


def test_of_one_host_the_way_back_fills_the_other_row() -> None:
    one = samples.path_delay(reverse=replaced(samples.path_delay().reverse, owd_p99_ns=50_000))
    found = matrix.cells(report([one]).paths)
    assert found.keys() == {("h1", "h2"), ("h2", "h1")}
    back = found["h2", "h1"]
    assert back.reverse and back.direction.delay is not None and back.direction.delay.value == 50_000
    both = [one, replaced(samples.path_delay(), host="h2", path=Path("h2", "h1", "10.9.0.1", "10.1.2.1", "rail1"))]
    assert not any(cell.reverse for cell in matrix.cells(report(both).paths).values())


def test_what_is_not_known_is_unknown_and_never_zero() -> None:
    nothing = Delay(samples=0)
    free = samples.path_delay(clock="free_running")  # it has delays in it, which are no facts
    lost = samples.path_delay(2, forward=nothing, reverse=nothing, received=0, lost=50)
    words = whole([free, lost, samples.free_clock("h3"), samples.free_clock("h3", samples.AT_NS + SECOND)])
    cells = [each for each in words.all_of("a") if (each.get("aria-label") or "").startswith("h1 to h2")]
    assert [each["aria-label"] for each in cells] == ["h1 to h2: unknown"]
    said = " ".join(words.words)
    assert "never compared (free_running)" in said and "All its probes were lost" in said
    assert not re.search(r"(?<![\d.])0 ns", said) and "2.10 µs" not in said
    assert "queueing p99 6.70 µs ± 200 ns" in said, "queueing needs no common clock"


def test_a_path_that_loses_everything_comes_first() -> None:
    nothing = Delay(samples=0)
    lost = samples.path_delay(2, forward=nothing, reverse=nothing, received=0, lost=50)
    found = report([samples.path_delay(1), lost, samples.path_delay(3)])
    assert found.paths[0].path.interface == "rail2" and found.paths[0].loss == 1.0


def test_every_chart_has_a_name_a_place_in_the_tab_order_and_a_table(shown: Found) -> None:
    charts = shown.all_of("svg", class_="chart")
    assert len(charts) > 50
    assert all(chart["tabindex"] == "0" and "over time" in (chart["aria-label"] or "") for chart in charts)
    assert "".join(shown.words).count("As a table") == len(charts)
    regions = shown.all_of("div", role="region")
    assert len(regions) == len(shown.all_of("table")) and all(each["aria-label"] for each in regions)
    assert len(shown.all_of("caption")) == len(shown.all_of("table"))


def test_every_figure_of_the_catalogue_is_in_the_table_on_a_chart_and_in_the_matrix() -> None:
    one = samples.path_delay()
    found = whole([one])
    charts = [each["aria-label"] or "" for each in found.all_of("svg", class_="chart")]
    (cell, *_) = [title for each in found.all_of("a") if "rail1" in (title := each.get("title") or "")]
    for figure in FOLLOWED:
        assert figure.name in found.words
        assert any(each.startswith(f"{figure.measure.words.capitalize()} of h1 → h2") for each in charts)
        assert f"{figure.name} {duration(figure.value(one, one.forward))} ± " in cell


def test_what_else_happened_is_on_it(shown: Found) -> None:
    words = " ".join(shown.words)
    for each in (
        "rail1: its queue is full",  # a link event
        "alert tell-of-loss",
        "retransmissions 1.2 % above 1 %",
        "h1 rxe0 18 to 10.9.0.2 (ib_write_bw)",
        "congested",
        "h4 against h1",
        "free_running 20.00 s",
        "ring_full 1",
        "The bottleneck of a ring is not known",
    ):
        assert each in words, each
    for cause in ("fast", "RTO", "TLP"):
        assert cause in shown.words


def test_what_was_lost_or_broken_is_said_first() -> None:
    told = Told("From a test.", broken=3, cut=2, dropped=7)
    words = "".join(Found(page(report([samples.path_delay()], told))).words)
    for each in ("3 lines were not signals", "2 files ended in the middle", "7 signals were missed"):
        assert each in words
    assert "Nothing was lost" not in words
    assert "Nothing was lost or broken" in "".join(whole([samples.path_delay()]).words)


def test_a_host_that_was_silent_in_between_is_named() -> None:
    told = [samples.path_delay(at_ns=samples.AT_NS + second * SECOND) for second in (0, 1, 31, 32, 52)]
    words = "".join(whole(told).words)
    assert mentions(words, "No signal", "h1", "50.00 s", "2 times") and "Nothing was lost" not in words


def test_an_empty_recording_is_a_page_that_says_so() -> None:
    found = whole([])
    words = "".join(found.words)
    assert "no signal within this time" in words and "--since" in words
    assert found.all_of("section") and not found.all_of("svg", class_="chart")


@pytest.mark.parametrize("signal", samples.one_of_each(), ids=lambda each: type(each).__name__)
def test_a_single_signal_of_any_kind_is_a_page(signal: AnySignal) -> None:
    assert whole([signal]).all_of("section")


def test_what_is_told_twice_is_not_counted_twice() -> None:
    told = [samples.tcp_path(at_ns=samples.AT_NS + second * SECOND) for second in range(5)]
    once, twice = report(told), report([*told, *told])
    assert once.paths[0].resent.totals == twice.paths[0].resent.totals == {"fast": 10, "timeout": 5}
    assert once.paths[0].segments_out == twice.paths[0].segments_out == 50_000
    assert (once.told.late, twice.told.late) == (0, 5)


def test_short_windows_are_left_out_while_there_are_long_ones() -> None:
    def window(second: int, ns: int) -> AnySignal:
        return samples.path_delay(at_ns=samples.AT_NS + second * SECOND, window_ns=ns)

    both = [window(second, ns) for second in range(10) for ns in (SECOND, SECOND // 20)]
    assert report(both).paths[0].windows == 10
    short = [window(second, SECOND // 20) for second in range(10)]
    assert report(short).paths[0].windows == 10
    then = [window(0, SECOND), *(window(second, SECOND // 20) for second in range(1, 20))]
    assert report(then).paths[0].windows == 17, "once nothing was heard of long ones for three of them"


@pytest.mark.slow
def test_the_number_of_everything_is_bounded_and_what_had_no_room_is_counted() -> None:
    paths = [samples.path_delay(path=Path("h1", f"h{n}", "10.9.0.1", "", "rail1")) for n in range(PATHS + 5)]
    acts = [samples.act(samples.AT_NS + number, number) for number in range(ACTS + 7)]
    found = report([*paths, *acts])
    assert len(found.paths) == PATHS and found.told.crowded == {"paths": 5}
    assert len(found.acts) == ACTS and found.forgotten == {"acts": 7}
    assert found.acts[-1].act.act_id == f"a{ACTS + 6}", "the newest are kept"
    words = "".join(Found(page(found)).words)
    assert mentions(words, "5 signals", "no room") and mentions(words, "7 older acts", "not listed")


@pytest.mark.parametrize("unix_ns", [0, -1, 1 << 62, (1 << 63) - 1])
def test_a_time_that_is_none_is_counted_and_left_out(unix_ns: int) -> None:
    found = report([samples.path_delay(), replaced(samples.path_delay(), unix_ns=unix_ns)])
    assert found.told.broken == 1 and found.until_ns - found.since_ns == 0


EXTREME = st.one_of(st.none(), st.integers(-(1 << 63), (1 << 63) - 1))


@settings(max_examples=30)
@given(st.lists(st.tuples(EXTREME, EXTREME, EXTREME, st.integers(1, (1 << 62) - 1)), min_size=1, max_size=8))
def test_no_value_is_too_strange_for_a_page(values: list[tuple[int | None, int | None, int | None, int]]) -> None:
    signals: list[AnySignal] = []
    for p50, p99, bound, unix_ns in values:
        delay = Delay(samples=1, owd_p50_ns=p50, owd_p99_ns=p99, bound_ns=bound, queueing_p99_ns=p99)
        signals += [
            replaced(samples.path_delay(forward=delay, reverse=delay), unix_ns=unix_ns),
            replaced(samples.clock(bound_ns=bound, offset_ns=p50), unix_ns=unix_ns),
            replaced(samples.act(seen_ns=p50 or 0, acknowledged_ns=p99), unix_ns=unix_ns),
        ]
    assert whole(signals).all_of("section")


def test_the_page_is_the_same_for_the_same_signals() -> None:
    world = World(seconds=30)
    one, other = (page(report(world.signals("h1"))) for _ in range(2))
    assert one == other


def test_what_was_held_is_counted_over_the_time_of_the_report() -> None:
    def told(second: int, **counts: int) -> AnySignal:
        at = {"at_ns": second * samples.SECOND_NS, "unix_ns": (1 + second) * samples.SECOND_NS}
        return samples.hold_state(**(at | counts))

    before = told(1, held_packets=900, held_bytes=1_000_000, waited_ns=5, samples=50, samples_above=40)
    on = told(2, held_packets=910, held_bytes=1_400_000, waited_ns=7, samples=55, samples_above=44)
    anew = told(3, held_packets=3, held_bytes=600_000, waited_ns=1, samples=2, samples_above=1)
    (history,) = report([before, on, anew]).paths
    assert history.held == Held(packets=13, bytes=1_000_000, waited_ns=3, samples=7, above=5)
    (never,) = report([samples.path_delay(1)]).paths
    assert never.held is None
