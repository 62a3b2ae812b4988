"""A view described: its tables, one below the other, what is said of them, and what instead of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from pytools.signals import AnySignal
from pytools.units import duration
from pytools.views import tables
from pytools.views.columns import Listing
from pytools.views.filters import Query
from pytools.views.model import Model

Nothing = Callable[[Model, Query], str]


@dataclass(frozen=True)
class Part:
    """A table of the signals of one kind."""

    kind: type[Any]
    listing: Callable[[int], Listing[Any]]  # at a time
    title: str | Callable[[Model], str]  # in it: {host}, {window}, and {asked} for the filters
    most: int | None = None  # rows
    more: str = ""  # where the others are, with {more} for how many
    dims: bool = True  # whether rows that nobody stands for any more are dimmed
    passes: Callable[[Any], bool] = lambda _row: True
    sorts: bool = True  # whether `--sort` is meant for it, too
    remarks: Callable[[Sequence[Any]], Iterable[RenderableType]] = lambda _rows: ()  # right below it

    def rows(self, model: Model, signals: Iterable[AnySignal], asked: Query) -> list[Any]:
        known = (each for each in signals if isinstance(each, self.kind) and self.passes(each))
        return self.listing(model.at_ns).ordered(known, asked.sort if self.sorts else None)

    def draw(self, model: Model, rows: Sequence[Any], asked: Query) -> list[RenderableType]:
        window = duration(max(getattr(row, "window_ns", 0) for row in rows))
        title = self.title if isinstance(self.title, str) else self.title(model)
        title = title.format(host=model.host, window=window, asked=asked.said())
        listing, more = self.listing(model.at_ns), 0 if self.most is None else len(rows) - self.most
        style = (lambda row: tables.dim(row, model.at_ns)) if self.dims else (lambda _row: None)
        sheet = listing.sheet(title, rows[: self.most], style)
        others = [Text(self.more.format(more=more), style="dim")] if more > 0 else []
        return [sheet, *others, *self.remarks(rows[: self.most])]


def filters_first(why: Callable[[Model], str] | str) -> Nothing:
    """That no row passes the filters; without filters, why there is none."""

    def say(model: Model, asked: Query) -> str:
        return asked.none_passes(model.host) or (f"{model.host}: {why}" if isinstance(why, str) else why(model))

    return say


def kind_first(kind: type[Any], why: Callable[[Model], str]) -> Nothing:
    """Why there is no signal of this kind; where there is one, that none passes the filters."""
    return lambda model, asked: asked.none_passes(model.host) if model.of(kind) else why(model)


@dataclass(frozen=True)
class Overview:
    """What a view draws."""

    parts: Sequence[Part]
    nothing: Nothing  # what is said where there is no row
    # lines below the tables, of the rows shown, and above them
    remarks: Callable[[Model, Sequence[Any]], Iterable[RenderableType]] = lambda _model, _rows: ()
    head: Callable[[Sequence[AnySignal]], Iterable[RenderableType]] = lambda _signals: ()

    def __call__(self, model: Model, signals: Sequence[AnySignal], asked: Query) -> RenderableType:
        drawn, shown = [*self.head(signals)], list[Any]()
        for part in self.parts:
            rows = part.rows(model, signals, asked)
            if rows:
                drawn += part.draw(model, rows, asked)
                shown += rows[: part.most]
        said = [] if shown else [Text(self.nothing(model, asked))]
        return Group(*drawn, *said, *self.remarks(model, shown))
