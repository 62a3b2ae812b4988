"""Charts as SVG: lines, bars and bands over time, all with one time axis, and marks where something was done. Pure.

A chart is drawn once, here: it needs no script to be seen or printed. What page.js adds (values under the pointer or
the arrow keys, a closer look) it reads from `data-` attributes: points are milliseconds since the beginning, value,
error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from pytools.views.report.markup import element, joined
from pytools.views.report.scales import WIDTH, Scale, Span
from pytools.views.report.series import Bands, Bars, Line, Point

HEIGHT: Final = 150.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 74.0, 6.0, 14.0, 22.0
STYLES: Final = 6
_NEAR: Final = 8.0  # marks so close to each other are one
_SEEN: Final = 2.0  # units of height: a shade that is thinner is not drawn
_MOST_SAID: Final = 4  # acts explained in one mark
_LEVELS: Final = {  # how high the band of a state is, of 20: trouble stands out without colour
    **{"healthy": 6, "returning": 10, "suspect": 13, "drained": 20, "unmeasured": 3},
    **{"synchronised": 6, "holdover": 12, "free_running": 20},
    **{"ok": 6, "no_demand": 3, "slow_receiver": 14, "congested": 17, "dead": 20, "unknown": 3},
    **{"imbalance": 11, "straggler": 14, "gpu": 15, "host": 17, "network": 20},
}


@dataclass(frozen=True, slots=True)
class Curve:
    name: str
    line: Line
    stepped: bool = False  # holds until the next value


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Something that was done."""

    unix_ns: int
    number: int
    words: str


def lines(
    span: Span, curves: Sequence[Curve], scale: Scale, unit: str, label: str, said: Callable[[float], str],
    marks: Sequence[Mark] = (),
) -> Markup:  # fmt: skip
    """Lines, each with its error as a shade."""
    drawn: list[Markup] = []
    for style, curve in enumerate(curves):
        shade = _shade(span, scale, curve.line)
        if shade:
            drawn.append(element("path", class_=f"bound s{style % STYLES}", d=shade))
    for style, curve in enumerate(curves):
        drawn.append(
            element(
                "path",
                class_=f"line s{style % STYLES}",
                d=_path(span, scale, curve),
                data_name=curve.name,
                data_w=max(1, curve.line.slot_ns // 1_000_000, curve.line.step_ns // 1_000_000),
                data_p=_data(span, curve.line),
            )
        )
    return _framed(span, scale, drawn, unit, label, said, marks)


def bars(
    span: Span, counts: Bars, kinds: Sequence[str], scale: Scale, label: str, said: Callable[[float], str]
) -> Markup:
    """Counts by kind, one on top of the other."""
    width = max(1.0, counts.slot_ns / span.length_ns * WIDTH)
    parts: dict[str, list[str]] = {kind: [] for kind in kinds}
    data: dict[str, list[str]] = {kind: [] for kind in kinds}
    for began_ns, slot in counts.slots:
        below = 0.0
        for kind in kinds:
            count = slot.get(kind, 0)
            if count:
                y0, y1 = scale.y(below), scale.y(below + count)
                x = span.x(began_ns)
                parts[kind].append(f"M{x:.1f} {y0:.1f}h{width:.1f}V{y1:.1f}h-{width:.1f}z")
                data[kind].append(f"{span.ms(began_ns)},{count}")
            below += count
    drawn = [
        element("path", class_=f"bar s{style % STYLES}", d="".join(parts[kind]), data_name=kind, data_bar=True,
                data_w=max(1, counts.slot_ns // 1_000_000), data_p=" ".join(data[kind]))
        for style, kind in enumerate(kinds)
        if parts[kind]
    ]  # fmt: skip
    return _framed(span, scale, drawn, "count", label, said)


def strip(span: Span, bands: Bands, said: Callable[[Span, str, int, int, str], str]) -> Markup:
    """States over time as one row; each state has its height besides its colour."""
    drawn = []
    for run in bands.runs:
        known = run.word in _LEVELS
        height = _LEVELS.get(run.word, 9)
        x, end = span.x(run.began_ns), span.x(run.ended_ns)
        title = element("title", said(span, run.word, run.began_ns, run.ended_ns, run.note))
        drawn.append(
            element(
                "rect", title, class_=f"b-{run.word}" if known else "b-other",
                x=round(x, 2), width=round(max(0.8, end - x), 2), y=(20 - height) / 2, height=height,
            )
        )  # fmt: skip
    return element(
        "svg", *drawn, class_="strip plot", viewBox=f"0 0 {WIDTH:g} 20", preserveAspectRatio="none", aria_hidden="true"
    )


def legend(names: Iterable[str], shape: str = "line") -> Markup:
    """Which line is which, by colour and by dashes."""
    items = [
        element(
            "li",
            element("svg", _sample(style % STYLES, shape), class_="key", viewBox="0 0 28 10", aria_hidden="true"),
            name,
        )
        for style, name in enumerate(names)
    ]
    return element("ul", *items, class_="legend")


def _sample(style: int, shape: str) -> Markup:
    if shape == "line":
        return element("path", class_=f"line s{style}", d="M1 5H27")
    return element("path", class_=f"bar s{style}", d="M4 1h20v8H4z")


def _framed(
    span: Span, scale: Scale, drawn: Sequence[Markup], unit: str, label: str, said: Callable[[float], str],
    marks: Sequence[Mark] = (),
) -> Markup:  # fmt: skip
    """Axes around a plot; the plot alone is stretched by a closer look."""
    height = scale.height
    grid = [
        joined(
            (
                element("line", class_="grid", x1=_LEFT, x2=_LEFT + WIDTH, y1=_TOP + y, y2=_TOP + y),
                element(
                    "text",
                    said(tick).replace(".00 ", " "),
                    class_="tick",
                    x=_LEFT - 6,
                    y=_TOP + y + 4,
                    text_anchor="end",
                ),
            )
        )
        for tick in scale.ticks
        for y in (round(scale.y(tick), 1),)
    ]
    below = _TOP + height + 15
    times = [
        element("text", span.clock(at, 0 if span.length_ns > 10_000_000_000 else 3), class_="tick",
                x=round(_LEFT + span.x(at), 1), y=below, text_anchor="middle")
        for at in span.ticks()
    ]  # fmt: skip
    plot = element(
        "svg", *drawn, class_="plot", x=_LEFT, y=_TOP, width=WIDTH, height=height,
        viewBox=f"0 0 {WIDTH:g} {height:g}", preserveAspectRatio="none", overflow="hidden",
    )  # fmt: skip
    return element(
        "svg",
        *grid,
        element("g", *times, class_="times"),
        plot,
        *_marks(span, height, marks),
        element("line", class_="cross", x1=_LEFT, x2=_LEFT, y1=_TOP, y2=_TOP + height, visibility="hidden"),
        class_="chart",
        viewBox=f"0 0 {_LEFT + WIDTH + _RIGHT:g} {_TOP + height + _BOTTOM:g}",
        role="group",
        tabindex=0,
        aria_label=label,
        aria_roledescription="chart",
        data_unit=unit,
    )


def _marks(span: Span, height: float, marks: Sequence[Mark]) -> list[Markup]:
    """A line and a flag for each act; those that would lie on each other share one."""
    groups: list[list[Mark]] = []
    for mark in sorted(marks):
        if groups and span.x(mark.unix_ns) - span.x(groups[-1][0].unix_ns) < _NEAR:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    found = []
    for group in groups:
        first = group[0]
        x = _LEFT + span.x(first.unix_ns)
        words = [each.words for each in group[:_MOST_SAID]]
        if len(group) > _MOST_SAID:
            words.append(f"and {len(group) - _MOST_SAID} more acts")
        name = f"act {first.number}" if len(group) == 1 else f"acts {first.number} to {group[-1].number}"
        found.append(
            element(
                "a",
                element("title", "\n".join(words)),
                element("path", d=f"M0 {_TOP:g}V{_TOP + height:g}", class_="hit"),
                element("path", d=f"M0 {_TOP:g}V{_TOP + height:g}", class_="stem"),
                element("path", d="M-5 2h10v6l-5 5l-5 -5z", class_="flag"),
                href=f"#act-{first.number}",
                class_="mark",
                transform=f"translate({x:.1f} 0)",
                data_t=span.ms(first.unix_ns),
                aria_label=name,
            )
        )
    return found


def _path(span: Span, scale: Scale, curve: Curve) -> str:
    parts: list[str] = []
    for piece in curve.line.pieces:
        places = [(span.x(point.unix_ns), scale.y(point.value)) for point in piece]
        (x, y), *others = _bent(places)
        parts.append(f"M{_at(x)} {_at(y)}")
        parts += [f"H{_at(x)}V{_at(y)}" if curve.stepped else f"L{_at(x)} {_at(y)}" for x, y in others]
        if not others:
            parts.append("h.01")  # a dot
    return "".join(parts)


def _bent(places: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    inner = (
        here
        for before, here, after in zip(places, places[1:], places[2:], strict=False)
        if not before[1] == here[1] == after[1]
    )
    return [places[0], *inner, *places[-1:]] if len(places) > 1 else list(places)


def _at(place: float) -> str:
    return f"{round(place, 1):g}"


def _shade(span: Span, scale: Scale, line: Line) -> str:
    """What lies within value ± bound; nothing where that is thinner than the line."""
    parts = []
    for piece in line.pieces:
        for visible, some in itertools.groupby(piece, lambda point: _visible(scale, point)):
            points = list(some)
            if visible:
                upper = [f"{_at(span.x(p.unix_ns))} {_at(scale.y(p.value + (p.bound or 0)))}" for p in points]
                lower = [f"{_at(span.x(p.unix_ns))} {_at(scale.y(max(0.0, p.value - (p.bound or 0))))}" for p in points]
                parts.append(f"M{'L'.join(upper)}L{'L'.join(reversed(lower))}z")
    return "".join(parts)


def _visible(scale: Scale, point: Point) -> bool:
    bound = point.bound or 0.0
    return scale.y(max(0.0, point.value - bound)) - scale.y(point.value + bound) >= _SEEN


def _data(span: Span, line: Line) -> str:
    """Points for the script; the error only where it is another one."""
    said: list[str] = []
    bound: float | None = None
    for point in line.points:
        same = point.bound == bound
        bound = point.bound
        error = "" if same else f",{_short(bound)}" if bound is not None else ",-"
        said.append(f"{span.ms(point.unix_ns)},{_short(point.value)}{error}")
    return " ".join(said)


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) < 10_000 else f"{value:.4g}"
