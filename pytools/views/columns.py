"""Tables by column: what each shows, and how `--sort` orders by it, the worst first.

Whether much or little is worse is the column's; what is not known comes last. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rich.text import Text

from pytools.views.sheet import Sheet

Row = TypeVar("Row")
Key = Callable[[Row], "float | str | None"]


@dataclass(frozen=True)
class Order(Generic[Row]):
    key: Key[Row]
    falling: bool

    def __call__(self, rows: Iterable[Row]) -> list[Row]:
        """The rows in this order; those that are equal stay as they were, those without a value come last."""
        keyed = [(self.key(row), row) for row in rows]
        known = [(key, row) for key, row in keyed if key is not None]
        known.sort(key=lambda pair: pair[0], reverse=self.falling)
        return [row for _, row in known] + [row for key, row in keyed if key is None]


def much(key: Callable[[Row], float | None]) -> Order[Row]:
    """Where more is worse, or simply more: the largest first."""
    return Order(key, falling=True)


def far(key: Callable[[Row], float | None]) -> Order[Row]:
    """Where what is far from zero is worse, either way: the farthest first."""
    return Order(lambda row: None if (value := key(row)) is None else abs(value), falling=True)


def little(key: Callable[[Row], float | None]) -> Order[Row]:
    """Where less is worse: the smallest first."""
    return Order(key, falling=False)


def named(key: Callable[[Row], str]) -> Order[Row]:
    """Names: from a to z, those without a name last."""
    return Order(lambda row: key(row).lower() or None, falling=False)


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column; a heading of two lines has two values in each cell, and may have two orders.

    `width`, `meaning` and `least` are for the live view: characters, what it is, and how few characters do for the
    last one, which takes what room there is (0: `width`, no more, no less).
    """

    heading: str
    show: Callable[[Row], str | Text]
    orders: Mapping[str, Order[Row]] = field(default_factory=dict)  # by the word for --sort
    left: bool = False
    spare: int = 0  # columns may be left out where room is short, the highest number first; 0: never
    width: int = 0
    meaning: str = ""
    least: int = 0


def figure(
    heading: str,
    word: str,
    show: Callable[[Any], str | Text],
    value: Callable[[Row], Any],
    spare: int = 0,
    order: Callable[[Callable[[Row], Any]], Order[Row]] = much,
    left: bool = False,
) -> Column[Row]:
    """A column of one value, which is shown and sorted by."""
    return Column(heading, lambda row: show(value(row)), {word: order(value)}, left, spare)


def figures(heading: str, show: Callable[[Any], str], orders: Mapping[str, Order[Row]], spare: int = 0) -> Column[Row]:
    """A column of several values of one unit, which are shown below each other and sorted by."""
    return Column(heading, lambda row: "\n".join(show(each.key(row)) for each in orders.values()), orders, spare=spare)


@dataclass(frozen=True)
class Listing(Generic[Row]):
    """Columns, and the order there is unless one is asked for."""

    columns: Sequence[Column[Row]]
    usual: Callable[[Row], Any]

    def words(self) -> list[str]:
        return [word for column in self.columns for word in column.orders]

    def ordered(self, rows: Iterable[Row], word: str | None) -> list[Row]:
        """The rows in the usual order, or by a column; a word of another table changes nothing."""
        usual = sorted(rows, key=self.usual)
        for column in self.columns:
            if word is not None and word in column.orders:
                return column.orders[word](usual)
        return usual

    def sheet(self, title: str, rows: Iterable[Row], style: Callable[[Row], str | None] = lambda _row: None) -> Sheet:
        spare = sorted((column for column in self.columns if column.spare), key=lambda column: -column.spare)
        sheet = Sheet(
            title,
            [column.heading for column in self.columns],
            left=[column.heading for column in self.columns if column.left],
            spare=[column.heading for column in spare],
        )
        for row in rows:
            sheet.add(*(column.show(row) for column in self.columns), style=style(row))
        return sheet
