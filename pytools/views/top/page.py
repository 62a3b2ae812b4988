"""One frame of the live view as lines of text: header, list or page, what the selected row says, hints. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.text import Text

from pytools.views import clock_tables, network_panel, tables
from pytools.views.columns import Column
from pytools.views.top import detail, header, lists, paths
from pytools.views.top.fields import Cell, Rows, line, shown_fields
from pytools.views.top.glyphs import Glyphs
from pytools.views.top.header import Around
from pytools.views.top.keys import Look
from pytools.views.top.paths import PathRow
from pytools.views.top.state import Event, Known

_LEAST_ROWS: Final = 4
_LEAST_NOTES: Final = 6
_FIRST: Final = (8, 42)  # width of the first column: at least, at most
_HINTS: Final = "? help  Enter detail  / filter  s sort  t horizon  q quit"
_ACTS: Final = 5
_SAID_SHARE: Final = 3  # of the screen, at most, is what is said below


_JUDGED: Final = "nothing is wrong with it"
_NOT_JUDGED: Final = "nobody steers, so no policy has judged it"


@dataclass(frozen=True)
class Frame:
    """What is shown, and what was looked at."""

    lines: list[Text]
    look: Look  # with the cursor on a row that is there
    row: Any  # the selected one; None: there is none
    key: object  # what it is known by
    sortable: list[str]
    columns: int  # behind the first
    more: int  # columns on the right that there is no room for
    page: int  # rows or lines that are seen at once


def rows_of(known: Known, look: Look, around: Around, glyphs: Glyphs) -> Rows[Any]:
    if look.panel == "paths":
        return paths.rows(known, around.now_ns, look.horizon_s, glyphs)
    return lists.PANELS[look.panel](known, around.now_ns)


def draw(
    known: Known,
    look: Look,
    around: Around,
    width: int,
    height: int,
    glyphs: Glyphs,
    notice: Text | None = None,
    allow_actions: bool = False,
) -> Frame:
    """One frame, `height` lines of at most `width` characters."""
    rows = rows_of(known, look, around, glyphs)
    found = rows.ordered(look.sort, look.reverse)
    passing = [row for row in found if look.asked.passes(rows.signals(row), rows.text(row))] if look.asked else found
    look = _on_a_row(look, rows, passing)
    row = passing[look.cursor] if passing else None
    arrow = glyphs.rising if look.reverse else glyphs.falling
    alerts = header.alerts(known, around, look, (len(passing), len(found)))
    head = [header.first(known, around, width), header.second(look, rows, len(passing), arrow, width)]
    head += [alerts] if alerts is not None else []
    said = _in_lines(notice, width, height // _SAID_SHARE) if notice is not None else []
    room = max(0, height - len(head) - max(1, len(said)))
    columns, more = len(rows.listing.columns) - 1, 0
    if look.page == "list":
        body, more, seen = _list(rows, passing, look, known, around, width, room, glyphs)
    else:
        text = (
            detail.help_lines(width, allow_actions)
            if look.page == "help"
            else detail.lines(row, known, look, around, width, glyphs)
            if row is not None
            else [Text(rows.nothing, style="dim")]
        )
        body, scroll = detail.cut(text, look.scroll, room)
        look, seen = replace(look, scroll=scroll), room
    body += [Text("")] * (room - len(body))
    foot = said or [_hints(look, more)]
    shown = [_fitted(each, width, glyphs) for each in (*head, *body[:room], *foot)]
    key = None if row is None else rows.key(row)
    return Frame(shown[:height], look, row, key, rows.listing.words(), columns, more, max(1, seen))


def _in_lines(notice: Text, width: int, lines: int) -> list[Text]:
    """What is said below, in as many lines as it needs; the last of those there are is cut."""
    if notice.cell_len <= width:
        return [notice]
    parts = detail.wrapped(notice.plain, max(1, width), style=notice.style)
    if len(parts) > (kept := max(1, lines)):
        parts[kept - 1 :] = [Text(" ").join(parts[kept - 1 :])]
    return parts


def _hints(look: Look, more: int) -> Text:
    if look.page != "list":
        return Text("Esc back  j k scroll  q quit", style="dim")
    aside = f"  Right: {more} more columns" if more else ""
    return Text(_HINTS + aside, style="dim")


def _fitted(text: Text, width: int, glyphs: Glyphs) -> Text:
    """A line that fits, in characters that can be shown."""
    if glyphs.plain is not None and not text.plain.isascii():
        found = Text(style=text.style, end="")
        for part in text.divide(sorted({0, *(span.start for span in text.spans), *(span.end for span in text.spans)})):
            styles = [span.style for span in part.spans]
            found.append(glyphs.text(part.plain), styles[-1] if styles else None)
        text = found
    if text.cell_len > width:
        text = text.copy()
        text.truncate(max(0, width - len(glyphs.text("…"))))
        text.append(glyphs.text("…"))
    return text


def _on_a_row(look: Look, rows: Rows[Any], passing: Sequence[Any]) -> Look:
    """With the cursor on the row that was selected, wherever that is by now; else where it was."""
    cursor = min(max(0, look.cursor), max(0, len(passing) - 1))
    if look.selected is not None:
        cursor = next((place for place, row in enumerate(passing) if rows.key(row) == look.selected), cursor)
    return replace(look, cursor=cursor)


def _list(
    rows: Rows[Any],
    passing: Sequence[Any],
    look: Look,
    known: Known,
    around: Around,
    width: int,
    room: int,
    glyphs: Glyphs,
) -> tuple[list[Text], int, int]:
    """Heading, rows, and below them what there is to say; columns left out; rows seen at once."""
    notes = _notes(passing[look.cursor] if passing else None, known, look, around, width)
    most = max(_LEAST_NOTES, room - 1 - len(passing))
    notes = notes[: max(0, min(most, room - 1 - _LEAST_ROWS))]
    seen = max(1, room - 1 - len(notes))
    top = min(max(0, look.cursor - seen // 2), max(0, len(passing) - seen))
    visible = passing[top : top + seen]
    first: Column[Any] = rows.listing.columns[0]
    cells: list[Cell] = [first.show(row) for row in visible]
    widest = max((len(str(each)) for each in cells), default=0)
    first_width = min(
        max(_FIRST[0], len(first.heading) + 1, widest), _FIRST[1], first.width if widest < first.width else 99
    )
    fields, more = shown_fields(rows.listing.columns, first_width, width, look.shift)
    widths = [first_width, *(field.width for field in fields)]
    if fields and fields[-1].least:
        widths[-1] = width - sum(widths[:-1]) - len(fields)
    marked = [_heading(field, look, glyphs) for field in (first, *fields)]
    lefts = [True, *(field.left for field in fields)]
    body = [line(list(zip(marked, widths, lefts, strict=True)), glyphs, width, "bold underline")]
    for index, row in enumerate(visible):
        style = "reverse" if top + index == look.cursor else "dim" if rows.dim(row) else ""
        shown = [cells[index], *(field.show(row) for field in fields)]
        body.append(line(list(zip(shown, widths, lefts, strict=True)), glyphs, width, style))
    if not passing:
        nothing = f"nothing passes {look.asked}: Esc takes it away" if look.asked and rows.rows else rows.nothing
        body.append(Text(nothing, style="dim"))
    body += [Text("")] * (room - len(body) - len(notes))
    return body + notes, more, seen


def _heading(field: Column[Any], look: Look, glyphs: Glyphs) -> Cell:
    if field.heading != look.sort:
        return field.heading
    return Text(field.heading[: field.width - 1] + (glyphs.rising if look.reverse else glyphs.falling), style="cyan")


def _notes(row: Any, known: Known, look: Look, around: Around, width: int) -> list[Text]:
    """Below the list of paths: why the selected one is as it is; then TCP, links, RDMA, GPUs, clocks, acts."""
    if look.panel != "paths":
        said = network_panel.rdma(known.model, around.now_ns) if look.panel == "links" else None
        return [said.append("  (3 again)", "dim")] if said is not None else []
    found: list[Text] = []
    if isinstance(row, PathRow):
        why = row.why() or ("not measured" if row.delay is None else _JUDGED if row.state else _NOT_JUDGED)
        text = Text(f"{row.name}: ", style="bold").append(why, "not bold")
        found.extend(_two_lines(text, width))
    model, now = known.model, around.now_ns
    about = (network_panel.tcp, network_panel.links, network_panel.rdma, network_panel.gpus, clock_tables.summary)
    found += [said for each in about if (said := each(model, now)) is not None]
    acts = [event for event in reversed(known.events) if event.kind == "act"][:_ACTS]
    if acts:
        found.append(Text("last acts", style="bold"))
        found += [_act(event, now) for event in acts]
    return found


def _two_lines(text: Text, width: int) -> list[Text]:
    if text.cell_len <= width:
        return [text]
    place = text.plain.rfind(" ", 0, width + 1)
    first, rest = text.divide([place if place > 0 else width])
    rest.right_crop(0)
    return [first, Text("  ").append_text(rest[1:] if rest.plain.startswith(" ") else rest)]


def _act(event: Event, now_ns: int) -> Text:
    when = tables.ago(event.at_ns, now_ns)
    return (
        Text(f"{when} ", style="dim")
        .append(f"{event.place} ", "not dim")
        .append(event.what, f"{event.style} not dim")
        .append(f" because {event.why}", "not dim")
    )
