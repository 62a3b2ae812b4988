"""What a report costs: how large the page of a ten-minute recording of four hosts is, and how soon it can be read.

`make_s` is from the recordings to the file; `open_s` from the order to open the file until Chromium has loaded it and
given a picture of it; `load_event_s` what the page's own clock says. `requests` counts everything that was asked for
besides the page itself. With --pictures the two pictures for the docs are made as well.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from _common import emit, median, note

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

import browser  # noqa: E402
import report_world  # noqa: E402

from pytools.views.report import reading  # noqa: E402
from pytools.views.report.reading import Asked  # noqa: E402

OPENED, MADE = 7, 3
CASE: Final = "hosts4_rails2_600s"
PAINTED: Final = """
const [page] = performance.getEntriesByType('navigation');
const paint = performance.getEntriesByName('first-contentful-paint')[0];
return Math.max(page.loadEventEnd, paint ? paint.startTime : 0) / 1000;
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pictures", action="store_true", help="make docs/report-light.png and docs/report-dark.png")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swerve-bench-report-") as folder, contextlib.chdir(folder):
        places = tuple(report_world.record(Path()))
        page = Path("report.html")
        times = [made(places, page) for _ in range(MADE + 1)][1:]
        emit("report", "size_mb", page.stat().st_size / 1e6, "MB", "lower", case=CASE)
        emit("report", "make_s", median(times), "s", "lower", case=CASE, n=MADE)
        with browser.browser() as chromium:
            loads, waits, requests = [], [], 0
            for _ in range(OPENED + 1):
                chromium.requested()
                began = time.monotonic()
                chromium.open(page)
                chromium.picture()
                waits.append(time.monotonic() - began)
                loads.append(float(chromium.run(PAINTED)))
                requests += len([each for each in chromium.requested() if each != page.resolve().as_uri()])
            emit("report", "open_s", median(waits[1:]), "s", "lower", case=CASE, n=OPENED)
            emit("report", "load_event_s", median(loads[1:]), "s", "lower", case=CASE, n=OPENED)
            emit("report", "requests", requests, "1", "lower", case=CASE, n=OPENED + 1)
            note(f"opened after {[round(each, 2) for each in waits]} s")
        if asked.pictures:
            pictures(page)


def made(places: tuple[Path, ...], page: Path) -> float:
    """Seconds from recordings to the page."""
    began = time.monotonic()
    reading.write(reading.recorded(Asked(places, Path(), 0, 1 << 62, None)), page)
    return time.monotonic() - began


def pictures(page: Path) -> None:
    """The matrix and the worst path, as people see them."""
    with browser.browser(1000, 1380) as chromium:
        chromium.open(page)
        chromium.run("document.querySelector('#paths ~ .wide').style.maxHeight = '9rem'")  # so that a chart is in it
        for scheme in ("light", "dark"):
            chromium.dress(scheme)
            chromium.run("window.scrollTo(0, 0); document.activeElement.blur()")
            out = ROOT / "docs" / f"report-{scheme}.png"
            out.write_bytes(chromium.picture())
            note(f"{out}: {out.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
