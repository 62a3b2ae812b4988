"""A table that fits: where the terminal is too narrow its least important columns stay away, and it says which.

Cells may have two lines, and so may headings. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

_WIDE: Final = 3  # characters between columns where there is room
_CLOSE: Final = 2


@dataclass
class Sheet:
    """Rows under headings, drawn as wide as there is room."""

    title: str
    columns: Sequence[str]  # headings; the first column is never left out, and folds when nothing else helps
    left: Sequence[str] = ()  # columns aligned to the left; the first one always is
    spare: Sequence[str] = ()  # columns that may be left out, the first of them first
    bare: bool = False  # without the words around it: title, what was left out, and the empty line behind
    rows: list[tuple[tuple[Text, ...], str | None]] = field(default_factory=list)

    def add(self, *cells: str | Text, style: str | None = None) -> None:
        """Add a row; brackets in its cells are no markup."""
        if len(cells) != len(self.columns):
            raise ValueError(f"{len(cells)} cells for {len(self.columns)} columns")
        self.rows.append((tuple(Text(cell) if isinstance(cell, str) else cell for cell in cells), style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown, gap = self._fitting(options.max_width)
        table = self._table([self.columns.index(name) for name in shown], gap)
        if self.bare:
            yield table
            return
        yield Text(self.title, style="bold")
        yield table
        missing = [_words(name) for name in self.columns if name not in shown]
        if missing:
            yield Text(f"left out for want of room: {', '.join(missing)}", style="dim")
        yield Text("")

    def _fitting(self, room: int) -> tuple[list[str], int]:
        """Headings of the columns there is room for, and how far apart."""
        widths = {name: self._width(index) for index, name in enumerate(self.columns)}
        gone: set[str] = set()

        def needed(gap: int, without: set[str]) -> int:
            return sum(width + gap for name, width in widths.items() if name not in without) - gap

        for name in self.spare:
            if needed(_CLOSE, gone) <= room:
                break
            gone.add(name)
        for name in reversed(self.spare):  # a wide one that went may have made room for those before it
            if needed(_CLOSE, gone - {name}) <= room:
                gone.discard(name)
        gap = _WIDE if needed(_WIDE, gone) <= room else _CLOSE
        return [name for name in self.columns if name not in gone], gap

    def _width(self, index: int) -> int:
        texts = [Text(self.columns[index]), *(cells[index] for cells, _ in self.rows)]
        return max(line.cell_len for text in texts for line in text.split("\n", allow_blank=True))

    def _table(self, indexes: Sequence[int], gap: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=gap == _CLOSE)
        for index in indexes:
            name = self.columns[index]
            left = index == 0 or name in self.left
            table.add_column(
                Text(name),
                justify="left" if left else "right",
                no_wrap=index > 0,
                overflow="fold" if index == 0 else "ellipsis",
            )
        for cells, style in self.rows:
            table.add_row(*(cells[index] for index in indexes), style=style)
        return table


def _words(heading: str) -> str:
    return heading.replace("-\n", "").replace("\n", " ")
