"""Columns of the live view's lists: heading, width, what is shown, how it is sorted, and what it means. Pure.

The first column stays where it is; the others come in the order of their importance, as many as there is room for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from rich.text import Span, Text

from pytools.views.columns import Column, Listing, Order, much
from pytools.views.model import key_of
from pytools.views.top.glyphs import Glyphs

Row = TypeVar("Row")
Cell = str | Text
_GAP: Final = 1


def field(
    heading: str,
    width: int,
    show: Callable[[Row], Cell],
    meaning: str,
    order: Order[Row] | None = None,
    left: bool = False,
    least: int = 0,
) -> Column[Row]:
    """A column of one line; it is sorted by its heading."""
    orders = {} if order is None else {heading: order}
    return Column(heading, show, orders, left, width=width, meaning=meaning, least=least)


def figure(
    heading: str,
    width: int,
    show: Callable[[Any], Cell],
    value: Callable[[Row], Any],
    meaning: str,
    order: Callable[[Callable[[Row], Any]], Order[Row]] = much,
    left: bool = False,
) -> Column[Row]:
    """A column of one value, which is shown and sorted by."""
    return field(heading, width, lambda row: show(value(row)), meaning, order(value), left)


@dataclass(frozen=True)
class Rows(Generic[Row]):
    """A panel: its columns, its rows, and what they are about."""

    listing: Listing[Row]
    rows: Sequence[Row]
    text: Callable[[Row], str]  # what a text filter looks at
    signals: Callable[[Row], Iterable[Any]] = lambda row: (row,)
    key: Callable[[Row], object] = key_of
    dim: Callable[[Row], bool] = lambda _row: False
    nothing: str = "nothing yet"
    by: str = "worst first"  # the usual order, in words
    notes: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def ordered(self, sort: str | None, reverse: bool) -> list[Row]:
        """The rows in an order; those that are equal stay in the usual one."""
        rows = self.listing.ordered(self.rows, sort)
        return rows[::-1] if reverse else rows


def shown_fields(
    fields: Sequence[Column[Row]], first_width: int, room: int, shift: int
) -> tuple[list[Column[Row]], int]:
    """The columns there is room for behind the first, `shift` left out; how many do not fit on the right."""
    found, left = [], room - first_width
    rest = fields[1 + shift :]
    for each in rest:
        if left < (each.least or each.width) + _GAP:
            break
        found.append(each)
        left -= each.width + _GAP
    return found, len(rest) - len(found)


def line(cells: Sequence[tuple[Cell, int, bool]], glyphs: Glyphs, room: int, style: str = "") -> Text:
    """A row: cells with their widths, and whether they are aligned to the left. What is too long is cut."""
    parts: list[str] = []
    spans: list[Span] = []
    length = 0
    for cell, width, left in cells:
        own = cell.style if isinstance(cell, Text) else ""
        words = glyphs.text(cell.plain if isinstance(cell, Text) else cell)
        if len(words) > width:
            cut = glyphs.text("…")
            words = words[: max(0, width - len(cut))] + cut
        padded = words.ljust(width) if left else words.rjust(width)
        if own:
            start = length + (0 if left else width - len(words))
            spans.append(Span(start, start + len(words), own))
        parts.append(padded)
        length += width + _GAP
    plain = " ".join(parts).replace("\n", " ")[:room]
    return Text(plain, style=style, no_wrap=True, end="", spans=[span for span in spans if span.start < len(plain)])
