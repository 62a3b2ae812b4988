"""A report of ten minutes in a real browser: nothing leaves the page, and all of it is reached, read and seen."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
import report_world
import samples
from browser import Browser
from msgspec.structs import replace as replaced
from support import require, wait_until

from pytools.signals import Path as Way
from pytools.views.report import reading
from pytools.views.report.aggregate import Told
from pytools.views.report.gather import Gathering
from pytools.views.report.reading import Asked

pytestmark = pytest.mark.deadline(300)

TIP = "const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent"
FOCUSED = """
const at = document.activeElement, box = at.getBoundingClientRect();
return {tag: at.tagName.toLowerCase(), kind: at.getAttribute('class') || '', words: at.textContent.slice(0, 80),
  href: at.getAttribute('href'), id: at.id, outline: getComputedStyle(at).outlineStyle,
  flag: at.querySelector('.flag') ? getComputedStyle(at.querySelector('.flag')).strokeWidth : '',
  shown: box.bottom > 0 && box.top < innerHeight};
"""
BOX = """
const found = document.querySelectorAll(arguments[0])[arguments[1]];
found.scrollIntoView({block: 'center', behavior: 'instant'});
const box = found.getBoundingClientRect();
return [box.left, box.top, box.width, box.height];
"""
TICKS = """
return [...document.querySelector('svg.chart .times').children].map((each) => each.textContent);
"""
# Contrast of every text that is to be seen against what lies behind it, and of lines against their chart (WCAG 2.2).
CONTRAST = """
const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
const ratio = (one, other) => {
  const [a, b] = [light(one), light(other)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
};
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const colour = parse(getComputedStyle(each).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const found = [];
for (const each of document.querySelectorAll('body *')) {
  if (!each.getClientRects().length) continue;
  const style = getComputedStyle(each), svg = each instanceof SVGElement;
  const words = [...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
  if (words && each.tagName !== 'SCRIPT') {
    found.push(['text', each.tagName + '.' + each.getAttribute('class'),
      ratio(parse(svg ? style.fill : style.color), behind(each))]);
  }
  if (svg && each.matches('.line, .stem')) {
    found.push(['line', each.getAttribute('class'), ratio(parse(style.stroke), behind(each))]);
  }
  if (svg && each.matches('.bar, .flag, [class^=b-]')) {
    found.push(['shape', each.getAttribute('class'), ratio(parse(style.fill), behind(each))]);
  }
}
return found;
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten minutes of four hosts."""
    folder = tmp_path_factory.mktemp("report")
    places = report_world.record(folder / "recordings")
    out = folder / "report.html"
    reading.write(reading.recorded(Asked(tuple(places), Path(), 0, 1 << 62, None)), out)
    return out


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    require("chromium", "chromedriver")
    with browser.browser() as one:
        yield one


@pytest.fixture
def opened(chromium: Browser, page: Path) -> Browser:
    chromium.dress("light")
    chromium.requested()
    chromium.complaints()
    chromium.open(page)
    return chromium


def middle(chromium: Browser, selector: str, number: int = 0) -> tuple[float, float]:
    left, top, width, height = chromium.run(BOX, selector, number)
    return left + width / 2, top + height / 2


def said(chromium: Browser, pattern: str) -> str:
    """What is said beside something, once it is."""

    def matching() -> str:
        words = str(chromium.run(TIP))
        return words if re.search(pattern, words) else ""

    return wait_until(matching, 10, f"{pattern} is said")


# ---- nothing leaves the page ----


def test_it_opens_and_asks_for_nothing(opened: Browser, page: Path) -> None:
    assert opened.requested() == [page.resolve().as_uri()]
    assert opened.run("return performance.getEntriesByType('resource').length") == 0
    assert opened.complaints() == []
    assert opened.run("return document.querySelectorAll('svg.chart').length") > 50


class Counting(http.server.BaseHTTPRequestHandler):
    """Counts who asks."""

    asked: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


def test_what_somebody_put_in_is_neither_fetched_nor_run(chromium: Browser, page: Path, tmp_path: Path) -> None:
    """The policy holds even where the escaping would not."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    threading.Thread(target=server.serve_forever).start()
    away = f"http://127.0.0.1:{server.server_port}"
    harmful = (
        f"<img src='{away}/img'><script>window.harmed = 1</script><script src='{away}/script'></script>"
        f"<link rel=stylesheet href='{away}/style'><iframe src='{away}/frame'></iframe>"
        f"<p style='background: url({away}/paint)' onclick='window.harmed = 2'>click</p>"
    )
    bad = tmp_path / "bad.html"
    bad.write_text(page.read_text().replace("<main", f"{harmful}<main", 1))
    try:
        chromium.complaints()
        chromium.open(bad)
        chromium.run(f"fetch('{away}/fetch').catch(() => 0); document.querySelector('p[onclick]').click()")
        refused = chromium.complaints()
    finally:
        server.shutdown()
        server.server_close()
    assert Counting.asked == []
    assert chromium.run("return window.harmed") is None
    assert len([each for each in refused if "Content Security Policy" in each]) >= 6, refused


def test_hostile_names_are_shown_as_they_are(chromium: Browser, tmp_path: Path) -> None:
    bad = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 2'>"
    way = Way(bad, bad, "10.9.0.2", bad, bad)
    gathering = Gathering()
    gathering.add(
        [
            replaced(samples.path_delay(path=way), host=bad),
            replaced(samples.act(because=bad, what=bad, under=bad), host=bad),
            replaced(samples.path_state(), path=way, state=bad, reason=bad, host=bad),
        ]
    )
    out = tmp_path / "hostile.html"
    reading.write(gathering.report(Told(bad)), out)
    chromium.complaints()
    chromium.open(out)
    assert chromium.run("return document.title").count("<script>window.harmed") == 1
    assert chromium.run("return window.harmed ?? null") is None
    assert chromium.run("return document.querySelectorAll('main img, main script').length") == 0
    assert chromium.complaints() == []
    chromium.point(*middle(chromium, ".mark"))
    assert bad in said(chromium, "act 1")
    assert chromium.run("return document.querySelectorAll('#tip *').length") == 0, "put in as text"


# ---- the pointer ----


def test_a_cell_of_the_matrix_says_more_under_the_pointer(opened: Browser) -> None:
    opened.point(*middle(opened, ".heat a"))
    words = said(opened, "±")
    assert re.search(r"h1 → h2, worst of 2 paths: h1 → h2 dev rail1", words)
    assert "OWD p50" in words and "queueing p99" in words
    opened.point(1, 1)
    wait_until(lambda: not opened.run(TIP), 10, "it is silent again")


def test_a_chart_says_values_under_the_pointer_and_looks_closer_by_dragging(opened: Browser) -> None:
    x, y = middle(opened, "svg.chart")
    before = opened.run(TICKS)
    opened.point(x, y)
    words = said(opened, "p99")
    assert re.search(r"\d\d:\d\d:\d\d\.\d{3} UTC\np50: [\d.]+ \S+ ± [\d.]+ ns\np99: ", words), words
    opened.point(x, y, drag_to=(x + 120, y))
    wait_until(lambda: opened.run(TICKS) != before, 10, "the chart shows less")
    opened.run("document.querySelector('svg.chart').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    assert opened.run(TICKS) == before


def test_the_chart_says_what_the_recording_has(opened: Browser) -> None:
    """At the middle of congestion, of a path over the congested rail: tens of milliseconds."""
    share = (report_world.CONGESTED_S + report_world.HEALED_S) / 2 / report_world.SECONDS
    left, top, width, height = opened.run(BOX, "#path-1 svg.chart", 0)
    opened.point(left + (74 + 880 * share) / 960 * width, top + height / 2)
    words = said(opened, "p50")
    assert re.search(r"^11:11:\d\d", words), words
    assert re.search(r"p50: [1-6]\d(\.\d+)? ms ± 240 ns", words), words


# ---- the keyboard ----


def test_everything_is_reached_by_tab_and_seen_to_be(opened: Browser) -> None:
    opened.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    stops: list[dict[str, Any]] = []
    for _ in range(60):
        opened.press("tab")
        stops.append(opened.run(FOCUSED))
    assert stops[0]["href"] == "#matrix" and "Skip" in stops[0]["words"]
    kinds = [stop["tag"] for stop in stops]
    assert {"a", "summary", "svg", "div"} <= set(kinds)
    assert [stop["href"] for stop in stops if (stop["href"] or "").startswith("#path-")]
    assert any(stop["kind"] == "mark" for stop in stops) and any(stop["kind"] == "chart" for stop in stops)
    unseen = [stop for stop in stops if stop["outline"] == "none" and stop["flag"] != "3px"]
    assert not unseen
    assert all(stop["shown"] for stop in stops), "what has the focus is on the screen"


def test_bands_are_no_stops_for_the_keyboard_but_say_what_they_are_to_the_pointer(opened: Browser) -> None:
    opened.run("document.querySelector('section[aria-labelledby=states] .wide').focus()")
    opened.press("tab")
    assert opened.run(FOCUSED)["tag"] == "summary"
    opened.point(*middle(opened, ".b-drained"))
    assert re.search(r"^drained, 11:09:42\.0 to 11:13:15\.0 UTC \(213 s\): queueing 41 ms", said(opened, "drained"))


def test_a_cell_says_the_same_to_the_keyboard_and_leads_to_its_path(opened: Browser) -> None:
    opened.run("document.querySelector('.heat a').focus()")
    assert "worst of 2 paths" in said(opened, "±")
    described = opened.run("return document.activeElement.getAttribute('aria-describedby')")
    assert described == "tip" and opened.run("return document.getElementById('tip').getAttribute('role')") == "status"
    opened.press("escape")
    assert opened.run(TIP) == ""
    target = opened.run("return document.activeElement.getAttribute('href')")
    opened.run("for (const each of document.querySelectorAll('details')) each.open = false")
    opened.press("enter")
    wait_until(lambda: opened.run(f"return document.querySelector('{target}').open"), 10, "its path is unfolded")


def test_arrow_keys_read_a_chart(opened: Browser) -> None:
    opened.run("document.querySelector('svg.chart').focus()")
    first = said(opened, "p99")
    opened.press("home")
    began = said(opened, "^11:06:40")
    opened.press("right", "right")
    moved = said(opened, "^11:06:4[1-9]")
    opened.press("end")
    ended = said(opened, "^11:16:39")
    assert len({first, began, moved, ended}) == 4
    before = opened.run(TICKS)
    opened.press("home", "+", "+")
    assert opened.run(TICKS) != before
    opened.press("0")
    assert opened.run(TICKS) == before


def test_a_flag_explains_its_act_and_leads_to_it(opened: Browser) -> None:
    opened.run("document.querySelector('.mark').focus()")
    words = said(opened, "^act")
    assert re.search(r"act \d+, 11:09:42\.000 UTC, h\d: routes to 10\.9\.0\.\d/32 \(made\)", words), words
    assert re.search(r"dev rail1: 10 → 0, .* because .*queueing delay 41 ms .* under leave-congested-rail", words)
    target = opened.run("return document.activeElement.getAttribute('href')")
    opened.press("enter")
    wait_until(lambda: opened.run(FOCUSED)["id"] == target[1:], 10, "the act's row has the focus")
    at = opened.run(FOCUSED)
    assert at["shown"] and "routes to" in at["words"]


def test_folded_tables_open_by_keyboard_and_hold_the_chart(opened: Browser) -> None:
    opened.run("document.querySelector('figure details summary').focus()")
    opened.press("enter")
    rows = opened.run(
        "return [...document.querySelectorAll('figure details[open] tbody tr')].map((row) => row.innerText)"
    )
    assert len(rows) == 20 and all("ms" in row or "µs" in row for row in rows)


# ---- to be seen ----


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_and_lines_stand_out_in(opened: Browser, scheme: Any) -> None:
    opened.dress(scheme)
    opened.run("for (const each of document.querySelectorAll('details')) each.open = true")
    opened.run("document.querySelector('.heat a').focus()")
    ground = opened.run("return getComputedStyle(document.documentElement).backgroundColor")
    assert ground == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 26)"}[scheme]
    found = opened.run(CONTRAST)
    assert len([each for each in found if each[0] == "text"]) > 1000
    assert {"text", "line", "shape"} <= {kind for kind, _, _ in found}
    least = {"text": 4.5, "line": 3.0, "shape": 3.0}
    faint = {(kind, name, round(ratio, 2)) for kind, name, ratio in found if ratio < least[kind]}
    assert not faint


def test_on_a_narrow_screen_only_tables_are_wider_than_it(opened: Browser) -> None:
    opened.devtools("Emulation.setDeviceMetricsOverride", width=400, height=800, deviceScaleFactor=1, mobile=False)
    try:
        assert opened.run("return document.documentElement.scrollWidth") <= 400
    finally:
        opened.devtools("Emulation.clearDeviceMetricsOverride")


def test_without_scripts_everything_can_be_read(chromium: Browser, page: Path) -> None:
    chromium.devtools("Emulation.setScriptExecutionDisabled", value=True)
    try:
        chromium.open(page)
        tree = chromium.devtools("Accessibility.getFullAXTree")["nodes"]
    finally:
        chromium.devtools("Emulation.setScriptExecutionDisabled", value=False)
    names = {(each.get("role", {}).get("value"), each.get("name", {}).get("value")) for each in tree}
    roles = {role for role, _ in names}
    assert {"table", "heading", "navigation", "main"} <= roles
    assert any(role == "link" and (name or "").startswith("h1 to h2: ") for role, name in names)
    assert any("because" in (name or "") or "queueing delay 41 ms" in (name or "") for _, name in names)
    assert any(role == "heading" and name == "Acts" for role, name in names)


def test_on_paper_it_is_all_there(opened: Browser) -> None:
    opened.devtools("Emulation.setEmulatedMedia", media="print", features=[])
    try:
        assert opened.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
        opened.run("dispatchEvent(new Event('beforeprint'))")
        assert opened.run("return document.querySelectorAll('details:not([open])').length") == 0
    finally:
        opened.devtools("Emulation.setEmulatedMedia", media="", features=[])
