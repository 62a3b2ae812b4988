"""Tables, and charts as tables: what a chart shows, for those who read it or hear it. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from markupsafe import Markup

from pytools.views.report.chart import Curve
from pytools.views.report.format import UNKNOWN
from pytools.views.report.markup import TEMPLATES, joined
from pytools.views.report.scales import Span, slots
from pytools.views.report.series import Bars, Point

ROWS: Final = 20
_PARTS: Final = TEMPLATES.get_template("parts.html").module


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
    named = [list(zip(headings, row, strict=True)) for row in rows]
    return _PARTS.table(caption, headings, named, left, ids)  # type: ignore[attr-defined, no-any-return]


def folded(summary: str, *content: str, id_: str | None = None, opened: bool = False) -> Markup:
    """What is shown when asked for."""
    return _PARTS.folded(summary, joined(content), id_, opened)  # type: ignore[attr-defined, no-any-return]


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
    return _PARTS.figure(caption, joined(content))  # type: ignore[attr-defined, no-any-return]


def section(anchor: str, title: str, *content: str) -> Markup:
    return _PARTS.section(anchor, title, joined(content))  # type: ignore[attr-defined, no-any-return]


def paragraphs(*words: str) -> Markup:
    """Each as a paragraph; empty ones are left out."""
    return _PARTS.paragraphs(words)  # type: ignore[attr-defined, no-any-return]
