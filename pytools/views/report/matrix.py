"""The delays between hosts as a heat map: source by destination, each the worst of the paths between them. Pure.

The map is a table, so that it can be read, heard and walked through. A colour is one of seven steps, even in the
logarithm; what is not known has none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from pytools.figures import FOLLOWED
from pytools.signals import Path
from pytools.units import UNKNOWN
from pytools.views.report import format
from pytools.views.report.aggregate import Direction, PathHistory, Report
from pytools.views.report.markup import element
from pytools.views.report.tables import paragraphs, section

STEPS: Final = 7
_MOST: Final = 64  # hosts on a side
_LEAST_RANGE: Final = 10  # what differs by less shall not look like cold and hot


@dataclass(frozen=True, slots=True)
class Cell:
    """What is known between two hosts."""

    history: PathHistory  # of the worst path
    direction: Direction  # of it, that goes from source to destination
    reverse: bool  # told by the destination's probes on their way back, because the source itself is not heard
    paths: int
    unknown: int  # of these, paths without a known one-way delay


def cells(paths: Sequence[PathHistory]) -> dict[tuple[str, str], Cell]:
    """The worst path of each pair of hosts.

    What the source measured itself counts; only where there is nothing of it, what the destination measured backwards.
    """
    there: dict[tuple[str, str], list[tuple[Direction, PathHistory]]] = {}
    back: dict[tuple[str, str], list[tuple[Direction, PathHistory]]] = {}
    for history in paths:
        if history.windows:
            ends = (history.path.source, history.path.destination)
            there.setdefault(ends, []).append((history.forward, history))
            back.setdefault(ends[::-1], []).append((history.reverse, history))
    found = {}
    for ends in there.keys() | back.keys():
        reverse = ends not in there
        rows = back[ends] if reverse else there[ends]
        unknown = sum(direction.delay is None for direction, _ in rows)
        direction, history = max(rows, key=lambda row: row[0].delay.value if row[0].delay else -1.0)
        found[ends] = Cell(history, direction, reverse, len(rows), unknown)
    return found


def heat(value: float, low: float, high: float) -> int:
    """Which of the colours: 0 for the smallest, `STEPS` - 1 for the largest."""
    if high <= low or low <= 0:
        return 0
    share = math.log(max(value, low) / low) / math.log(high / low)
    return min(STEPS - 1, int(share * STEPS))


def drawn(report: Report, anchors: Mapping[tuple[str, Path], str]) -> Markup:
    """The section.

    Parameters
    ----------
    anchors : mapping
        Where a path is drawn on the page, by its key.
    """
    found = cells(report.paths)
    names = sorted({name for ends in found for name in ends})[:_MOST]
    known = [delay.value for cell in found.values() if (delay := cell.direction.delay) is not None]
    high = max(known, default=1.0)
    low = max(1.0, min(*known, high / _LEAST_RANGE)) if known else 1.0
    head = element(
        "tr", element("th", "from \\ to", scope="col"), *(element("th", name, scope="col") for name in names)
    )
    rows = [
        element(
            "tr",
            element("th", source, scope="row"),
            *(_cell(source, to, found.get((source, to)), low, high, anchors) for to in names),
        )
        for source in names
    ]
    caption = "One-way delay, 99th percentile of the worst path between two hosts; a click leads to the path"
    whole = element(
        "table", element("caption", caption), element("thead", head), element("tbody", *rows), class_="heat"
    )
    said = (
        "Each cell: for all windows but one in a hundred the 99th percentile of their delays was no larger. Its colour "
        f"is one of {STEPS} steps from the smallest delay (or a tenth of the largest) to the largest. "
        "Unknown means that the clocks do not support it, or that no probe measured it; it does not mean zero."
    )
    framed = element("div", whole, class_="wide", role="region", aria_label="Delays between hosts", tabindex=0)
    content = framed if names else paragraphs("No path was measured within this time.")
    return section("matrix", "Delays between hosts", content, paragraphs(said if names else ""))


def _cell(
    source: str, to: str, cell: Cell | None, low: float, high: float, anchors: Mapping[tuple[str, Path], str]
) -> Markup:
    if source == to:
        return element("td", UNKNOWN, class_="self")
    if cell is None:
        return element("td", "not measured", class_="none")
    measured = cell.direction.delay
    anchor = anchors.get(cell.history.key)
    step = "none" if measured is None else f"h{heat(measured.value, low, high)}"
    figure = format.UNKNOWN if measured is None else format.delay(measured).partition(" ±")[0]
    name = f"{source} to {to}: {figure}"
    said = element("a", figure, href=f"#{anchor or 'paths'}", title=_tip(source, to, cell), aria_label=name)
    return element("td", said, class_=step)


def _tip(source: str, to: str, cell: Cell) -> str:
    direction = cell.direction
    lines = [
        f"{source} → {to}, worst of {format.counted(cell.paths, 'path')}: {format.way(cell.history.path)}",
        *(f"{figure.name} {format.delay(direction.figures.get(figure))}" for figure in FOLLOWED),
        f"probes lost {format.share(cell.history.loss)}",
    ]
    if cell.reverse:
        lines[0] = (
            f"{source} → {to}, told by probes of {to} on their way back; worst of {format.counted(cell.paths, 'path')}"
        )
    if cell.unknown:
        lines.append(f"of {cell.unknown} of these paths no one-way delay is known")
    return "\n".join(lines)
