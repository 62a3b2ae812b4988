"""Tables, and charts as tables: what a chart shows, for those who read it or hear it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pytools.views.report.chart import Curve
from pytools.views.report.format import UNKNOWN
from pytools.views.report.markup import Markup, element, joined
from pytools.views.report.scales import Span, slots
from pytools.views.report.series import Bars, Point

ROWS: Final = 20


def table(
    caption: str,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Sequence[str] = (),
    ids: Sequence[str] = (),
) -> Markup:
    """Rows under headings; the first column names the row.

    Parameters
    ----------
    left : sequence of str
        Headings of the columns that are words, not figures.
    ids : sequence of str
        Anchors of the rows, where others refer to them.
    """
    head = element("tr", *(element("th", name, scope="col") for name in headings))
    body = []
    for number, row in enumerate(rows):
        first, *others = row
        cells = [
            element("td", cell, class_=None if name in left else "figure")
            for name, cell in zip(headings[1:], others, strict=True)
        ]
        anchor = ids[number] if ids else None
        body.append(
            element("tr", element("th", first, scope="row"), *cells, id=anchor, tabindex=-1 if anchor else None)
        )
    whole = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *body)
    )  # as wide as it needs: its frame scrolls
    return element("div", whole, class_="wide", role="region", aria_label=caption, tabindex=0)


def folded(summary: str, *content: str, id_: str | None = None, opened: bool = False) -> Markup:
    """What is shown when asked for."""
    return element("details", element("summary", summary), *content, id=id_, open=opened)


def lines_table(span: Span, curves: Sequence[Curve], said: Callable[[float], str]) -> Markup:
    """The lines of a chart by stretches of time: the smallest and the largest value of each, and the larger error."""
    parts = slots(span, ROWS)
    columns = [_by_slot(span, curve, len(parts)) for curve in curves]
    rows = [
        [f"{span.clock(began, 1)} to {span.clock(ended, 1)}", *(_range(column[number], said) for column in columns)]
        for number, (began, ended) in enumerate(parts)
    ]
    headings = ["UTC", *(curve.name for curve in curves)]
    return folded("As a table", table("Smallest and largest value of each stretch of time", headings, rows))


def _by_slot(span: Span, curve: Curve, count: int) -> list[list[Point]]:
    found: list[list[Point]] = [[] for _ in range(count)]
    for point in curve.line.points:
        number = (point.unix_ns - span.since_ns) * count // span.length_ns
        if 0 <= number <= count:
            found[min(count - 1, number)].append(point)
    return found


def _range(points: Sequence[Point], said: Callable[[float], str]) -> str:
    if not points:
        return UNKNOWN
    low, high = min(p.value for p in points), max(p.value for p in points)
    bounds = [p.bound for p in points if p.bound is not None]
    text = said(low) if low == high else f"{said(low)} to {said(high)}"
    return text if not bounds else f"{text} ± {said(max(bounds))}"


def bars_table(span: Span, counts: Bars, kinds: Sequence[str]) -> Markup:
    parts = slots(span, ROWS)
    sums = [dict.fromkeys(kinds, 0) for _ in parts]
    for began_ns, slot in counts.slots:
        number = min(ROWS - 1, max(0, (began_ns - span.since_ns) * ROWS // span.length_ns))
        for kind, count in slot.items():
            sums[number][kind] = sums[number].get(kind, 0) + count
    rows = [
        [f"{span.clock(began, 1)} to {span.clock(ended, 1)}", *(f"{found.get(kind, 0):,}" for kind in kinds)]
        for found, (began, ended) in zip(sums, parts, strict=True)
    ]
    return folded("As a table", table("Segments of each stretch of time", ["UTC", *kinds], rows))


def figure(caption: str, *content: str) -> Markup:
    """A chart with what belongs to it."""
    return element("figure", element("figcaption", caption), *content)


def section(anchor: str, title: str, *content: str) -> Markup:
    return element("section", element("h2", title, id=anchor, tabindex=-1), *content, aria_labelledby=anchor)


def paragraphs(*words: str) -> Markup:
    """Each as a paragraph; empty ones are left out."""
    return joined(element("p", each) for each in words if each)
